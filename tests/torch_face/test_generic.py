"""Checks from torch's own tests of all optimizers, and parameters of every kind: a step or a clear error."""

import copy
import inspect
import warnings

import numpy as np
import pytest
import torch
from torch.nn import Parameter

import qcomp.torch
from qcomp.comm import LocalCommunicator, run_local
from tests.torch_face.every import FACES

every_face = pytest.mark.parametrize("name", [name for name in FACES if name != "Muon"])


@pytest.fixture(autouse=True)
def quiet():
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore",
            "the variance of .* no longer fits|the variance is frozen after|nothing is compressed yet",
        )
        yield


def made(name, params, comm=None, **changes):
    freeze = {"freeze": 3} if "freeze" in FACES[name][1] else {}
    settings = {"lr": 0.02, "exact": None, **freeze, **changes}
    return getattr(qcomp.torch, name)(params, comm=comm or LocalCommunicator.alone(), **settings)


def steps(name, params, count=6, gradient=torch.ones_like, **changes):
    optimizer = made(name, params, **changes)
    for _ in range(count):
        for p in params:
            p.grad = gradient(p)
        optimizer.step()
    return [p.detach() for p in params]


# --- as in torch's tests of all optimizers ---------------------------------------------------------------------------


@every_face
def test_each_group_moves_by_its_own_rate(name):
    still, moving = Parameter(torch.ones(200)), Parameter(torch.ones(200))
    optimizer = made(name, [{"params": [still], "lr": 0.0}, {"params": [moving]}])
    for _ in range(6):
        for p in (still, moving):
            p.grad = torch.ones(200)
        optimizer.step()
    assert torch.equal(still.detach(), torch.ones(200))
    assert bool((moving < 1).all())


@every_face
def test_state_dicts_are_deterministic_and_load_with_hooks(name):
    first, second = Parameter(torch.ones(200)), Parameter(torch.ones(200))
    optimizer, other = made(name, [first]), made(name, [second])
    for _ in range(5):
        first.grad = torch.ones(200)
        optimizer.step()
    one, two = optimizer.state_dict(), optimizer.state_dict()
    assert str(one) == str(two)
    with torch.no_grad():
        second.copy_(first)
    other.load_state_dict(copy.deepcopy(one))
    assert str(other.state_dict()) == str(one)
    for opt, p in ((optimizer, first), (other, second)):
        p.grad = torch.ones(200)
        opt.step()
    assert torch.equal(first, second)


@every_face
def test_hooks_run_around_a_step_with_its_arguments(name):
    p = Parameter(torch.ones(20))
    p.grad = torch.ones(20)
    optimizer = made(name, [p])
    seen = []
    pre = optimizer.register_step_pre_hook(lambda opt, args, kwargs: seen.append((opt, args, kwargs)))
    post = optimizer.register_step_post_hook(lambda opt, args, kwargs: seen.append((opt, args, kwargs)))
    optimizer.step()
    assert seen == [(optimizer, (optimizer,), {})] * 2
    pre.remove()
    post.remove()
    optimizer.step()
    assert len(seen) == 2


@every_face
def test_defaults_are_not_empty_and_repr_names_them(name):
    optimizer = made(name, [Parameter(torch.ones(5))])
    assert optimizer.defaults["lr"] == 0.02
    assert set(optimizer.defaults) == optimizer.param_groups[0].keys() - {"params"}
    text = repr(optimizer)
    assert text.startswith(f"{name} (\nParameter Group 0\n")
    assert "lr: 0.02" in text


@every_face
def test_errors_of_torch_are_errors_here(name):
    p = Parameter(torch.ones(5))
    for params, error, text in (
        (p, TypeError, "should be an iterable of Tensors or dicts"),
        ([p, p.sum()], ValueError, "can't optimize a non-leaf Tensor"),
        ([{"params": [p]}, {"params": [p]}], ValueError, "appear in more than one parameter group"),
        ([p, 7], TypeError, "can only optimize Tensors"),
    ):
        with pytest.raises(error, match=text):
            made(name, params)


@every_face
@pytest.mark.parametrize("argument", ["maximize", "differentiable", "capturable", "foreach", "fused"])
def test_arguments_that_only_torch_has_are_refused(name, argument):
    assert argument not in inspect.signature(getattr(qcomp.torch, name)).parameters
    with pytest.raises(TypeError, match=f"unexpected keyword argument '{argument}'"):
        made(name, [Parameter(torch.ones(5))], **{argument: True})


# --- parameters of every kind ----------------------------------------------------------------------------------------


@every_face
def test_empty_and_one_element_parameters_move_like_others(name):
    nothing, scalar, vector = steps(name, [Parameter(torch.ones(s)) for s in ((0, 3), (), (1,))])
    assert nothing.shape == (0, 3)
    assert scalar.shape == ()
    assert scalar < 1
    assert vector.shape == (1,)
    assert vector < 1


@every_face
@pytest.mark.parametrize(
    ("values", "error", "text"),
    [
        (
            lambda: [torch.ones(5, dtype=torch.complex64)],
            TypeError,
            r"params\[0\] has dtype complex64; expected",
        ),
        (lambda: [torch.ones(5, 3).to_sparse()], TypeError, r"params\[0\] is sparse; expected a dense array"),
        (lambda: [torch.ones(5, device="meta")], ValueError, "parameter '0' is on the meta device"),
        (lambda: [torch.ones(1, 4).expand(3, 4)], ValueError, "parameter '0' repeats elements in memory"),
        (lambda: [torch.ones(9), (x := torch.ones(100))[:60], x[40:]], ValueError, "'1' and '2' share"),
        (lambda: 2 * [torch.ones(5)], ValueError, "parameters '0' and '1' share memory"),
    ],
)
def test_unsupported_parameters_are_refused(name, values, error, text):
    with pytest.raises(error, match=text):
        made(name, [Parameter(x) for x in values()])


@every_face
def test_parameters_of_a_lazy_module_are_refused_before_they_have_a_shape(name):
    with pytest.raises(
        ValueError, match=r"parameter '0' has no shape yet, as in a LazyModule .* with a batch first"
    ):
        made(name, torch.nn.LazyLinear(4).parameters())


@pytest.mark.parametrize(
    ("name", "numbers"),
    [
        ("OneBitAdam", {"betas": (0.875, 0.9375), "eps": 2**-10, "weight_decay": 0.25, "lr": 0.125}),
        ("CompressedSGD", {"momentum": 0.875, "weight_decay": 0.25, "lr": 0.125}),
    ],
)
def test_arrays_of_one_element_count_as_numbers(name, numbers):
    (expected,) = steps(name, [Parameter(torch.ones(300))], **numbers)
    for array in (
        torch.tensor,
        lambda x: torch.tensor([[x]], dtype=torch.bfloat16),
        lambda x: np.asarray([x]),
    ):
        arrays = {key: tuple(map(array, x)) if key == "betas" else array(x) for key, x in numbers.items()}
        (found,) = steps(name, [Parameter(torch.ones(300))], **arrays)
        assert torch.equal(found, expected)
    if "betas" in numbers:
        (found,) = steps(
            name, [Parameter(torch.ones(300))], **{**numbers, "betas": torch.tensor(numbers["betas"])}
        )
        assert torch.equal(found, expected)


@pytest.mark.parametrize(
    ("name", "changes", "error", "text"),
    [
        (
            "OneBitAdam",
            {"lr": torch.ones(2)},
            ValueError,
            r"lr=an array of shape \(2,\).*; expected a finite number",
        ),
        (
            "OneBitAdam",
            {"weight_decay": -torch.ones(1)},
            ValueError,
            "weight_decay=.*; expected a finite number",
        ),
        ("OneBitAdam", {"eps": torch.ones(2)}, TypeError, r"eps is \(1.0, 1.0\); expected a number"),
        ("OneBitAdam", {"eps": torch.tensor(True)}, TypeError, "eps is True; expected a number"),
        (
            "OneBitAdam",
            {"betas": torch.full((3,), 0.5)},
            ValueError,
            r"betas is \(0.5, 0.5, 0.5\); expected two",
        ),
        ("OneBitAdam", {"betas": (torch.tensor(1j), 0.5)}, TypeError, "betas is .*; expected two numbers"),
        ("CompressedSGD", {"momentum": torch.ones(0)}, TypeError, r"momentum is \(\); expected a number"),
        ("CompressedSGD", {"momentum": torch.tensor(1.0)}, ValueError, "momentum is 1.0; expected"),
    ],
)
def test_other_arrays_in_the_place_of_numbers_are_refused(name, changes, error, text):
    with pytest.raises(error, match=text):
        made(name, [Parameter(torch.ones(5))], **changes)


def test_the_same_parameter_twice_is_refused():
    p = Parameter(torch.ones(5))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "optimizer contains a parameter group with duplicate parameters")
        with pytest.raises(ValueError, match="parameters '0' and '1' share memory"):
            made("OneBitAdam", [p, p])


@pytest.mark.quick_cases(2)
@every_face
def test_parameters_that_share_a_storage_do_not_affect_each_other(name):
    x = torch.ones(300)
    halves = steps(name, [Parameter(x[:150]), Parameter(x[150:])])
    apart = steps(name, [Parameter(torch.ones(150)), Parameter(torch.ones(150))])
    assert all(map(torch.equal, halves, apart))
    columns = steps(name, [Parameter(torch.ones(10, 30)[:, :15]), Parameter(torch.ones(10, 30)[:, 15:])])
    assert all(bool((c < 1).all()) for c in columns)


@pytest.mark.quick_cases(2)
@every_face
def test_strides_of_a_gradient_do_not_matter(name):
    values = torch.arange(1200.0).reshape(30, 40) - 500
    (plain,) = steps(name, [Parameter(torch.ones(30, 40))], gradient=lambda _: values.clone())
    (other,) = steps(name, [Parameter(torch.ones(30, 40))], gradient=lambda _: values.t().contiguous().t())
    assert torch.equal(plain, other)
    (one,) = steps(name, [Parameter(torch.ones(30, 40))], gradient=lambda _: torch.ones(1, 40).expand(30, 40))
    (all_,) = steps(name, [Parameter(torch.ones(30, 40))])
    assert torch.equal(one, all_)


# --- misuse ----------------------------------------------------------------------------------------------------------


def of_two():
    params = [Parameter(torch.ones(200)), Parameter(torch.ones(30))]
    optimizer = made("OneBitAdam", params)
    for p in params:
        p.grad = torch.ones_like(p)
    optimizer.step()
    return optimizer, params


@pytest.mark.parametrize(
    "change",
    [
        lambda groups, other: groups[0]["params"].pop(),
        lambda groups, other: groups[0]["params"].append(other),
        lambda groups, other: groups[0]["params"].reverse(),
        lambda groups, other: groups[0].update(params=[other, *groups[0]["params"][1:]]),
        lambda groups, other: groups.append({**groups[0], "params": [other]}),
        lambda groups, other: setattr(groups[0]["params"][0], "data", torch.ones(20, 10)),
    ],
)
def test_parameters_that_were_changed_by_hand_are_an_error(change):
    optimizer, params = of_two()
    change(optimizer.param_groups, Parameter(torch.ones(200)))
    before = [p.detach().clone() for p in params]
    for p in params:
        p.grad = torch.ones_like(p)
    with pytest.raises(RuntimeError, match="the parameters in param_groups, or their shapes, have changed"):
        optimizer.step()
    assert all(map(torch.equal, before, (p.detach() for p in params)))


def test_a_sparse_gradient_is_an_error_that_names_it():
    optimizer, params = of_two()
    before = [p.detach().clone() for p in params]
    params[1].grad = torch.ones(30).to_sparse()
    with pytest.raises(TypeError, match="the gradient of '1' is sparse"):
        optimizer.step()
    assert all(map(torch.equal, before, (p.detach() for p in params)))


def test_an_optimizer_beside_another_makes_its_own_steps():
    """As for layers whose training starts later."""

    def main(comm):
        old, new = Parameter(torch.ones(200)), Parameter(torch.ones(300))
        alone = Parameter(torch.ones(300))
        first = made("OneBitAdam", [old], comm)
        for step in range(10):
            if step == 5:
                second, twin = (made("OneBitAdam", [p], comm, seed=1) for p in (new, alone))
            gradients = torch.from_numpy(
                np.random.default_rng([comm.rank, step]).standard_normal(500)
            ).float()
            old.grad = gradients[:200]
            first.step()
            if step >= 5:
                for p, opt in ((new, second), (alone, twin)):
                    p.grad = gradients[200:].clone()
                    opt.step()
        assert torch.equal(new, alone)
        return old.detach(), new.detach(), first.core_state.stage, second.core_state.step

    (old, new, stage, count), other = run_local(2, main)
    assert torch.equal(old, other[0])
    assert torch.equal(new, other[1])
    assert (stage, count) == ("compressed", 5)
