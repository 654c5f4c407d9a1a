"""What torch asks of each of its optimizers. Each test has the name of the test of torch that it is like."""

import io
from copy import deepcopy

import torch
from torch.nn import Parameter
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.testing._internal import common_optimizers
from torch.testing._internal.common_device_type import instantiate_device_type_tests
from torch.testing._internal.common_utils import TestCase, parametrize

optims = common_optimizers.optims(common_optimizers.optim_db)
both = (True, False)


class Line:
    """A linear problem, its parameters, and an optimizer of them."""

    def __init__(self, info, settings, *, contiguous=True, named=False, groups=None, schedulers=()):
        shapes = ((10, 5), (10,)) if contiguous else ((10, 5, 2), (10, 2))
        weight, bias = (torch.randn(shape) for shape in shapes)
        self.params = [Parameter(x if contiguous else x[..., 0]) for x in (weight, bias)]
        self.x = torch.randn(5)
        self.optimizer = info.optim_cls(
            self.given(named) if groups is None else groups(*self.params), **settings
        )
        self.schedulers = [make(self.optimizer) for make in schedulers]

    def given(self, named):
        return list(zip(("weight", "bias"), self.params, strict=True)) if named else self.params

    def twin(self, info, settings, *, named=False):
        """Return an equal problem with an optimizer of its own, which has made no step."""
        other = deepcopy_without(self, "optimizer")
        other.optimizer = info.optim_cls(other.given(named), **settings)
        return other

    def loss(self):
        self.optimizer.zero_grad()
        weight, bias = self.params
        loss = (weight.mv(self.x) + bias).square().sum()
        loss.backward()
        return loss

    def steps(self, count):
        for _ in range(count):
            loss = self.loss()
            self.optimizer.step()
            for scheduler in self.schedulers:
                scheduler.step(*([loss] if isinstance(scheduler, ReduceLROnPlateau) else []))


def deepcopy_without(problem, name):
    kept = {key: value for key, value in vars(problem).items() if key != name}
    other = object.__new__(type(problem))
    vars(other).update(deepcopy(kept))
    return other


def settings_of(info, device):
    """Return all settings with which an optimizer is tested."""
    every = common_optimizers._get_optim_inputs_including_global_cliquey_kwargs(
        device, torch.float32, info, skip=("differentiable",)
    )
    return [deepcopy(one.kwargs) for one in every]


def without_names(saved):
    return [{k: v for k, v in group.items() if k != "param_names"} for group in saved["param_groups"]]


class TestOptimizers(TestCase):
    def goes_down(self, line, count=20):
        first = line.loss().item()
        line.steps(count)
        self.assertLess(line.loss().item(), first)

    # --- steps

    @optims
    def test_errors(self, device, dtype, optim_info):
        for one in optim_info.optim_error_inputs_func(device=device, dtype=dtype):
            given = one.optimizer_error_input
            with self.assertRaisesRegex(one.error_type, one.error_regex):
                optim_info.optim_cls(given.params, **given.kwargs)

    @parametrize("contiguous", both)
    @optims
    def test_forloop_goes_right_direction(self, device, dtype, optim_info, contiguous):
        for settings in settings_of(optim_info, device):
            self.goes_down(Line(optim_info, settings, contiguous=contiguous))

    @optims
    def test_param_group_with_lrscheduler_goes_right_direction(self, device, dtype, optim_info):
        for schedulers in optim_info.scheduler_inputs:
            groups = lambda w, b: [{"params": [w]}, {"params": [b], "lr": 0.01}]  # noqa: E731
            self.goes_down(Line(optim_info, {}, groups=groups, schedulers=schedulers))

    @optims
    def test_tensor_lr(self, device, dtype, optim_info):
        for settings in settings_of(optim_info, device):
            one = Line(optim_info, {**settings, "lr": 0.0009765625})  # the same number in float32
            other = one.twin(optim_info, {**settings, "lr": torch.tensor(0.0009765625)})
            one.steps(6)
            other.steps(6)
            self.assertEqual(one.params, other.params, rtol=0, atol=0)

    @optims
    def test_param_groups_weight_decay(self, device, dtype, optim_info):
        for settings in settings_of(optim_info, device):
            groups = lambda w, b: [{"params": [w]}, {"params": [b], "weight_decay": 0.0}]  # noqa: E731
            self.goes_down(Line(optim_info, settings, groups=groups))

    @optims
    def test_param_groups_lr(self, device, dtype, optim_info):
        still = Parameter(torch.randn(2))
        before = still.detach().clone()
        for settings in settings_of(optim_info, device):
            rate = settings.pop("lr", 0) or 1e-3
            groups = lambda *params: [{"params": [*params], "lr": rate}, {"params": [still]}]  # noqa: B023, E731
            line = Line(optim_info, {**settings, "lr": 1e-28}, groups=groups)
            still.grad = torch.rand(2)
            self.goes_down(line)
            self.assertEqual(still.detach(), before)

    @optims
    def test_step_is_noop_when_params_have_no_grad(self, device, dtype, optim_info):
        params = [torch.randn(2, 3) for _ in range(2)]
        before = deepcopy(params)
        for settings in settings_of(optim_info, device):
            optim_info.optim_cls(params, **settings).step(lambda: torch.tensor([1.0]))
            self.assertEqual(params, before)

    @optims
    def test_step_is_noop_for_zero_grads(self, device, dtype, optim_info):
        for settings in settings_of(optim_info, device):
            if not settings.get("weight_decay"):
                p = Parameter(torch.randn(5, 1))
                before = p.detach().clone()
                p.grad = torch.zeros_like(p)
                optim_info.optim_cls([p], **settings).step(lambda: torch.tensor([1.0]))
                self.assertEqual(p.detach(), before)

    @optims
    def test_complex(self, device, dtype, optim_info):
        for settings in settings_of(optim_info, device):
            of_complex = [torch.randn(shape, dtype=torch.complex64) for shape in ((10, 5), (10,))]
            of_real = [Parameter(torch.view_as_real(x).clone()) for x in of_complex]
            of_complex = [Parameter(x) for x in of_complex]
            for _ in range(3):
                gradients = [torch.randn_like(p) for p in of_real]
                for params in (of_complex, of_real):
                    for p, g in zip(params, gradients, strict=True):
                        p.grad = torch.view_as_complex(g) if p.is_complex() else g.clone()
                    optim_info.optim_cls(params, **settings).step()
            self.assertEqual([torch.view_as_real(p.detach()) for p in of_complex], of_real)

    @optims
    def test_optimizer_can_be_printed(self, device, dtype, optim_info):
        for settings in settings_of(optim_info, device):
            self.assertIn(optim_info.name, repr(Line(optim_info, settings).optimizer))

    @optims
    def test_non_empty_state(self, device, dtype, optim_info):
        for settings in settings_of(optim_info, device):
            line = Line(optim_info, settings)
            line.steps(1)
            self.assertEqual(len(line.optimizer.state), 2)
            self.assertTrue(all(line.optimizer.state.values()))

    @optims
    def test_deepcopy_copies_all_public_attrs(self, device, dtype, optim_info):
        for settings in settings_of(optim_info, device):
            line = Line(optim_info, settings)
            line.steps(3)
            of_both = [
                {k for k in vars(o) if not k.startswith("_")}
                for o in (line.optimizer, deepcopy(line.optimizer))
            ]
            self.assertEqual(*of_both)

    # --- hooks of steps

    @optims
    def test_step_all_hooks(self, device, dtype, optim_info):
        for settings in settings_of(optim_info, device):
            seen = []
            note = lambda what: lambda *_: seen.append(what)  # noqa: B023, E731
            lines = Line(optim_info, settings), Line(optim_info, settings)
            handles = [
                register_optimizer_step_pre_hook(note("before all")),
                register_optimizer_step_post_hook(note("after all")),
            ]
            for line in lines:
                handles += [
                    line.optimizer.register_step_pre_hook(note("before")),
                    line.optimizer.register_step_post_hook(note("after")),
                ]
            for line in (*lines, lines[0]):
                line.steps(1)
            self.assertEqual(seen, ["before all", "before", "after", "after all"] * 3)
            for handle in handles:
                handle.remove()
            for line in lines:
                line.steps(1)
            self.assertEqual(len(seen), 12)

    # --- saving and loading

    @parametrize("is_named_optim0", both)
    @parametrize("is_named_optim1", both)
    @optims
    def test_state_dict_deterministic(self, device, dtype, optim_info, is_named_optim0, is_named_optim1):
        for settings in settings_of(optim_info, device):
            one = Line(optim_info, settings, named=is_named_optim0)
            one.steps(5)
            other = one.twin(optim_info, settings, named=is_named_optim1)
            other.optimizer.load_state_dict(deepcopy(one.optimizer.state_dict()))
            for line in (one, other):
                line.steps(5)
            self.assertEqual(one.params, other.params, rtol=0, atol=0)
            of_both = [line.optimizer.state_dict() for line in (one, other)]
            self.assertEqual(*map(without_names, of_both))
            if is_named_optim0 == is_named_optim1:
                self.assertEqual(*of_both)

    @optims
    def test_state_dict_of_extended_groups(self, device, dtype, optim_info):
        one = Line(optim_info, {})
        other = one.twin(optim_info, {})
        other.optimizer.param_groups.extend(other.optimizer.param_groups)
        groups = [without_names(line.optimizer.state_dict())[-1] for line in (one, other)]
        self.assertEqual(*groups)

    @parametrize("is_named_optim0", both)
    @parametrize("is_named_optim1", both)
    @optims
    def test_can_load_from_to_named_state_dict(
        self, device, dtype, optim_info, is_named_optim0, is_named_optim1
    ):
        for settings in settings_of(optim_info, device):
            one = Line(optim_info, settings, named=is_named_optim0)
            one.steps(3)
            other = one.twin(optim_info, settings, named=is_named_optim1)
            other.optimizer.load_state_dict(one.optimizer.state_dict())
            other.steps(1)
            (group,) = other.optimizer.state_dict()["param_groups"]
            expected = ["weight", "bias"] if is_named_optim0 or is_named_optim1 else None
            self.assertEqual(group.get("param_names"), expected)

    @parametrize("is_named_optim", both)
    @optims
    def test_save_load_equality_with_weights_only(self, device, dtype, optim_info, is_named_optim):
        for settings in settings_of(optim_info, device):
            line = Line(optim_info, settings, named=is_named_optim)
            line.steps(3)
            saved, file = line.optimizer.state_dict(), io.BytesIO()
            torch.save(saved, file)
            for weights_only in both:
                file.seek(0)
                self.assertEqual(torch.load(file, weights_only=weights_only), saved)

    @optims
    def test_state_dict_pre_post_hook(self, device, dtype, optim_info):
        for settings in settings_of(optim_info, device):
            optimizer = Line(optim_info, settings).optimizer
            optimizer.register_state_dict_pre_hook(lambda o: o.state.update(mine=1))
            self.assertEqual(optimizer.state_dict()["state"]["mine"], 1)

            def take_out(o, saved):
                return {**saved, "found": saved["state"].pop("mine")}

            optimizer.register_state_dict_post_hook(take_out)
            saved = optimizer.state_dict()
            self.assertEqual(saved["found"], 1)
            self.assertNotIn("mine", saved["state"])

    @optims
    def test_load_state_dict_pre_hook_and_prepend(self, device, dtype, optim_info):
        def in_place(o, saved):
            saved["param_groups"][0]["lr"] = 0.002

        def in_a_copy(o, saved):
            saved = deepcopy(saved)
            saved["param_groups"][0]["lr"] = 0.003
            return saved

        for settings in settings_of(optim_info, device):
            for prepend, expected in ((False, 0.003), (True, 0.002)):
                optimizer = Line(optim_info, settings).optimizer
                optimizer.register_load_state_dict_pre_hook(in_place)
                optimizer.register_load_state_dict_pre_hook(in_a_copy, prepend=prepend)
                optimizer.load_state_dict(optimizer.state_dict())
                self.assertEqual(optimizer.param_groups[0]["lr"], expected)

    @optims
    def test_load_state_dict_pre_post_hook(self, device, dtype, optim_info):
        for settings in settings_of(optim_info, device):
            optimizer = Line(optim_info, settings).optimizer
            saved = optimizer.state_dict()
            optimizer.register_load_state_dict_pre_hook(lambda o, s: s["param_groups"][0].update(lr=0.5))
            optimizer.register_load_state_dict_post_hook(
                lambda o: o.state.update(rate=o.param_groups[0]["lr"])
            )
            optimizer.load_state_dict(saved)
            self.assertEqual(optimizer.state["rate"], 0.5)


instantiate_device_type_tests(TestOptimizers, globals(), only_for="cpu")
