"""The outer loop around torch optimizers: it works by hooks only; ranks are threads."""

import copy
import re
import warnings
from itertools import pairwise

import pytest

import qcomp
from qcomp.comm import run_local
from tests.outer.jobs import Group

torch = pytest.importorskip("torch")
import qcomp.torch  # noqa: E402

LOOP = qcomp.OuterLoop(
    every=3,
    outer=qcomp.SGD(learning_rate=0.5, momentum=0.5),
    compressor=qcomp.ScaledSign(16),
    exact=qcomp.ExactBelow(10),
    decay=0.5,
)
STREAMING = qcomp.OuterLoop(
    every=4, fragments=2, delay=1, mixing=0.5, compressor=qcomp.ScaledSign(16), exact=qcomp.ExactBelow(10)
)


PLAIN = qcomp.OuterLoop(every=2)


def network():
    made = torch.nn.Sequential(
        torch.nn.Linear(6, 8), torch.nn.BatchNorm1d(8), torch.nn.Tanh(), torch.nn.Linear(8, 3)
    )
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for p in made.parameters():
            p.copy_(torch.randn(p.shape, generator=generator) / 4)
    return made


def backward(model, rank, step):
    generator = torch.Generator().manual_seed(100 * rank + step)
    x = torch.randn(16, 6, generator=generator)
    (model(x) - x[:, :3]).square().mean().backward()


def train(comm, loop, steps=7, *, optimizers=None, model=None, **options):
    """A training script; the outer loop adds two lines to one for a single rank."""
    model = model or network()
    optimizer = (optimizers or (lambda m: torch.optim.AdamW(m.parameters(), lr=0.05)))(model)
    outer = qcomp.torch.OuterLoop(model, optimizer, loop, comm=comm, **options)
    for step in range(steps):
        one_step(model, optimizer, comm.rank, step)
    return model, optimizer, outer


def one_step(model, optimizer, rank, step):
    several = optimizer if isinstance(optimizer, list) else [optimizer]
    for one in several:
        one.zero_grad()
    backward(model, rank, step)
    for one in several:
        one.step()


def bits(tensors):
    return [t.detach().numpy().tobytes() for t in tensors]


@pytest.mark.parametrize("loop", [LOOP, STREAMING], ids=["plain", "streaming"])
def test_it_agrees_with_the_loop_of_the_core(loop):
    def by_hand(comm):
        model = network()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        params = list(model.parameters())
        names = [name for name, _ in model.named_parameters()]
        state = loop.init([p.detach() for p in params], comm, names)
        for step in range(7):
            one_step(model, optimizer, comm.rank, step)
            new, state = loop.step([p.detach() for p in params], state, comm)
            with torch.no_grad():
                for p, value in zip(params, [x.clone() for x in new], strict=True):
                    p.copy_(value)
        return bits(params), bits(state.arrays["anchor"])

    def by_hooks(comm):
        model, _, outer = train(comm, loop, buffers=False)
        return bits(model.parameters()), bits(outer.core_state.arrays["anchor"])

    assert run_local(2, by_hooks, timeout=20) == run_local(2, by_hand, timeout=20)


def test_shared_parameters_are_those_of_all_ranks():
    def rank_main(comm):
        model, _, outer = train(comm, STREAMING)
        shared = outer.shared_parameters()
        assert list(shared) == [name for name, _ in model.named_parameters()]
        model.load_state_dict(shared, strict=False)
        return bits(model.parameters())

    one, other = run_local(2, rank_main, timeout=20)
    assert one == other


@pytest.mark.parametrize("buffers", [True, False])
@pytest.mark.parametrize("loop", [LOOP, STREAMING], ids=["plain", "streaming"])
def test_running_statistics_are_averaged_once_per_round(loop, buffers):
    def rank_main(comm):
        model, optimizer, outer = train(comm, loop, 0, buffers=buffers)
        trail = []
        for step in range(7):
            one_step(model, optimizer, comm.rank, step)
            trail.append((bits(model[1].buffers()), outer.core_state.numbers))
        return trail

    one, other = run_local(2, rank_main, timeout=20)
    same = [a[0] == b[0] for a, b in zip(one, other, strict=True)]
    last = [n[f"rounds.{loop.fragments - 1}"] for _, n in one]
    ended = [now > before for before, now in zip([0, *last[:-1]], last, strict=True)]
    assert any(ended)
    assert same == (ended if buffers else [False] * 7)


@pytest.mark.parametrize("how", ["before", "closure", "named", "two"])
def test_the_warm_up_trains_on_the_mean_gradient(how):
    """With gradients computed before the step or by closures, for one optimizer or several."""
    loop = qcomp.OuterLoop(every=2, warmup=4, exact=None)

    def spare(model):
        model.spare = torch.nn.Parameter(torch.ones(3))
        model.rare = torch.nn.Parameter(torch.ones(2))
        return model

    def use_rare(model, rank):
        if rank == 1:
            model.rare.sum().backward()

    def rank_main(comm):
        model = spare(network())
        params = list(model.parameters())
        parts = [params[:3], params[3:]] if how == "two" else [params]
        optimizers = [torch.optim.AdamW(part, lr=0.05, weight_decay=0.5) for part in parts]
        outer = qcomp.torch.OuterLoop(model, optimizers, loop, comm=comm)

        def closure():
            model.zero_grad()
            backward(model, comm.rank, step)
            use_rare(model, comm.rank)
            return torch.tensor(float(step))

        for step in range(4):
            if how in ("before", "two"):
                closure()
                for optimizer in optimizers:
                    optimizer.step()
            else:
                found = (
                    optimizers[0].step(closure) if how == "closure" else optimizers[0].step(closure=closure)
                )
                assert found == step
        assert outer.core_state.stage == "local"
        return [p.detach().clone() for p in model.parameters()]

    alike = spare(network())
    reference = torch.optim.AdamW(alike.parameters(), lr=0.05, weight_decay=0.5)
    for step in range(4):
        grads = []
        for rank in range(2):
            twin = copy.deepcopy(alike)
            backward(twin, rank, step)
            use_rare(twin, rank)
            grads.append([torch.zeros_like(p) if p.grad is None else p.grad for p in twin.parameters()])
        for p, a, b in zip(alike.parameters(), *grads, strict=True):
            p.grad = None if p is alike.spare else (a + b) / 2
        reference.step()
    for of_rank in run_local(2, rank_main, timeout=20):
        for found, p in zip(of_rank, alike.parameters(), strict=True):
            assert torch.allclose(found, p, atol=1e-6)
    assert torch.equal(alike.spare, torch.ones(3))  # weight decay would have moved it


GRAD_DTYPES = [
    (torch.bfloat16, torch.float32),
    (torch.float32, torch.bfloat16),
    (torch.float32, torch.float64),
    (torch.float64, torch.float32),
    (torch.bfloat16, None),
]


@pytest.mark.skipif(not hasattr(torch.nn.Parameter(torch.ones(1)), "grad_dtype"), reason="an older torch")
@pytest.mark.parametrize(("of_params", "of_grads"), GRAD_DTYPES, ids=str)
def test_gradients_may_have_another_dtype_than_parameters(of_params, of_grads):
    """In the warm-up, where one rank has no gradient of a parameter."""

    def rank_main(comm):
        params = [torch.nn.Parameter(torch.zeros(3, dtype=of_params)) for _ in range(2)]
        for p in params:
            p.grad_dtype = of_grads
        optimizer = torch.optim.SGD(params, lr=0.5)
        outer = qcomp.torch.OuterLoop(params, optimizer, qcomp.OuterLoop(every=2, warmup=2), comm=comm)
        for step in range(2):
            for p in params[comm.rank :]:
                p.grad = torch.full(
                    (3,), 1.0 + step / 3, dtype=of_grads or (torch.float64, torch.float32)[comm.rank]
                )
            optimizer.step()
            optimizer.zero_grad()
        assert outer.core_state.stage == "local"  # all ranks had the same parameters
        return [p.tolist() for p in params]

    one, other = run_local(2, rank_main, timeout=20)
    assert one == other
    assert one[0] == pytest.approx([-0.5 * (1 + 4 / 3) / 2] * 3, rel=1e-2)
    assert one[1] == pytest.approx([-0.5 * (1 + 4 / 3)] * 3, rel=1e-2)


def test_steps_of_several_optimizers_count_as_one_inner_step():
    def two(model):
        matrices = [p for p in model.parameters() if p.ndim > 1]
        vectors = [p for p in model.parameters() if p.ndim == 1]
        return [torch.optim.SGD(matrices, lr=0.05), torch.optim.AdamW(vectors, lr=0.05)]

    def rank_main(comm):
        model, _, outer = train(comm, LOOP, 6, optimizers=two)
        assert outer.core_state.step == 6
        return bits(model.parameters())

    one, other = run_local(2, rank_main, timeout=20)
    assert one == other


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("stop", [1, 3, 5])
@pytest.mark.parametrize("loop", [LOOP, STREAMING], ids=["plain", "streaming"])
def test_a_checkpoint_resumes_bit_for_bit(loop, stop):
    def rank_main(comm):
        whole, _, _ = train(comm, loop, 8)
        model, optimizer, outer = train(comm, loop, stop)
        saved = copy.deepcopy((model.state_dict(), optimizer.state_dict(), outer.state_dict()))
        other = network()
        model, optimizer, outer = train(comm, loop, 0, model=other)
        model.load_state_dict(saved[0])
        optimizer.load_state_dict(saved[1])
        outer.load_state_dict(saved[2])
        for step in range(stop, 8):
            one_step(model, optimizer, comm.rank, step)
        return bits(model.state_dict().values()) == bits(whole.state_dict().values())

    assert run_local(2, rank_main, timeout=20) == [True, True]


def test_ranks_at_different_steps_are_an_error():
    def rank_main(comm):
        model, optimizer, outer = train(comm, LOOP, 1)
        if comm.rank:  # as after a checkpoint that the others have not loaded
            outer._state = outer._state._replace(step=4)
        for step in range(2):
            one_step(model, optimizer, comm.rank, step)

    with pytest.raises(
        qcomp.MismatchError, match=r"rank 0: fragment 0 after step 3 .* rank 1: fragment 0 after step 6"
    ):
        run_local(2, rank_main, timeout=20)


def test_bad_arguments_are_refused():
    comm = qcomp.comm.LocalCommunicator.alone()
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(TypeError, match=r"loop is 100; expected a qcomp\.OuterLoop"):
        qcomp.torch.OuterLoop(model, optimizer, 100, comm=comm)
    with pytest.raises(TypeError, match=r"expected a torch\.optim\.Optimizer"):
        qcomp.torch.OuterLoop(model, [], LOOP, comm=comm)
    with pytest.raises(ValueError, match=r"a parameter of shape .* that the model did not have"):
        qcomp.torch.OuterLoop(model[0], optimizer, LOOP, comm=comm)
    for bare, text in (
        (torch.nn.Linear(3, 3, device="meta"), "the parameter 'weight' is on the meta device; .*to_empty"),
        (torch.nn.LazyLinear(3), "the parameter 'weight' has no shape yet, as in a LazyModule"),
    ):
        with pytest.raises(ValueError, match=text):
            qcomp.torch.OuterLoop(bare, torch.optim.SGD(bare.parameters(), 0.1), LOOP)
    with pytest.raises(ValueError, match="no parameter that requires a gradient"):
        qcomp.torch.OuterLoop([], optimizer, LOOP, comm=comm)


class TestAveragedTwice:
    """An optimizer that averages over all ranks of a loop leaves it nothing to do; over some, it makes a worker."""

    @staticmethod
    def muon(comm):
        return lambda model: qcomp.torch.Muon(model.named_parameters(), lr=0.05, comm=comm)

    def test_over_all_ranks(self):
        def rank_main(comm):
            with pytest.raises(
                ValueError, match="optimizer 1 averages over all 2 ranks of the loop in every step"
            ):
                train(
                    comm,
                    PLAIN,
                    optimizers=lambda model: [
                        torch.optim.SGD(model[0].parameters()),
                        qcomp.torch.Muon(model[3].named_parameters(), comm=comm),
                    ],
                )
            return True

        assert run_local(2, rank_main, timeout=20) == [True, True]

    @pytest.mark.parametrize("size", [1, 2])
    def test_alone(self, size):
        def rank_main(comm):
            inner = qcomp.comm.LocalCommunicator.alone() if size > 1 else comm
            return [p.tolist() for p in train(comm, PLAIN, 4, optimizers=self.muon(inner))[0].parameters()]

        found = run_local(size, rank_main, timeout=20)
        assert found == found[:1] * size

    def test_among_the_ranks_of_a_worker(self):
        def rank_main(comm):
            machine = comm.rank // 2
            inner = Group(comm, [2 * machine, 2 * machine + 1])
            return [p.tolist() for p in train(comm, PLAIN, 4, optimizers=self.muon(inner))[0].parameters()]

        found = run_local(4, rank_main, timeout=20)
        assert found == found[:1] * 4


def test_an_optimizer_has_one_loop():
    comm = qcomp.comm.LocalCommunicator.alone()
    model, optimizer, outer = train(comm, PLAIN, 1)
    with pytest.raises(ValueError, match=r"optimizer 0 has an OuterLoop already; .* call remove\(\)"):
        qcomp.torch.OuterLoop(model, optimizer, PLAIN, comm=comm)
    outer.remove()
    qcomp.torch.OuterLoop(model, optimizer, PLAIN, comm=comm)
    outer.remove()  # once more, which takes nothing from the other loop
    with pytest.raises(ValueError, match="optimizer 0 has an OuterLoop already"):
        qcomp.torch.OuterLoop(model, optimizer, PLAIN, comm=comm)


@pytest.mark.parametrize("how", ["thawed", "added"])
def test_a_parameter_unknown_to_the_loop_is_refused_before_a_step(how):
    """Otherwise each rank would train it alone."""
    comm = qcomp.comm.LocalCommunicator.alone()
    model, extra = network(), torch.nn.Parameter(torch.ones(3))
    model[0].weight.requires_grad_(False)
    _, optimizer, outer = train(comm, LOOP, 2, model=model)
    if how == "thawed":
        model[0].weight.requires_grad_(True)
    else:
        optimizer.add_param_group({"params": [extra]})
    before = [p.clone() for p in model.parameters()]
    with pytest.raises(
        ValueError, match=r"the model did not have when the loop was made, or that required no gradient then"
    ):
        one_step(model, optimizer, 0, 2)
    assert all(map(torch.equal, before, model.parameters()))
    assert outer.core_state.step == 2


def test_a_model_with_other_tensors_is_refused_before_a_step():
    """Otherwise the optimizer would move the tensors that the model had before, and nothing would say so."""
    comm = qcomp.comm.LocalCommunicator.alone()
    model, optimizer, outer = train(comm, LOOP, 2)
    model.load_state_dict({name: x.clone() for name, x in model.state_dict().items()}, assign=True)
    with pytest.raises(
        ValueError, match=r"the parameter '0\.weight' of the model has been replaced by another tensor"
    ):
        optimizer.step()
    assert outer.core_state.step == 2


def test_an_inner_step_without_any_gradient_gives_a_warning():
    comm = qcomp.comm.LocalCommunicator.alone()
    _, optimizer, _ = train(comm, LOOP, 1)
    optimizer.zero_grad()
    with pytest.warns(
        UserWarning, match="no parameter has a gradient on this rank, so this optimizer step has changed"
    ):
        optimizer.step()


def test_it_cannot_be_copied():
    comm = qcomp.comm.LocalCommunicator.alone()
    with pytest.raises(TypeError, match="cannot be copied or pickled"):
        copy.deepcopy(train(comm, PLAIN, 0)[2])


def test_removing_the_hooks_restores_the_optimizer():
    comm = qcomp.comm.LocalCommunicator.alone()
    model, optimizer, outer = train(comm, LOOP, 2)
    outer.remove()
    one_step(model, optimizer, 0, 2)
    assert outer.core_state.step == 2


@pytest.mark.parametrize(
    "damaged", [{"rank 0 of 2": 3}, {"rank 0 of 2": (3,)}, {"rank 0 of 2": ()}, {}, [], 3, [3]]
)
def test_a_damaged_state_is_refused_on_every_rank(damaged):
    def rank_main(comm):
        model, _, outer = train(comm, PLAIN, 3)
        saved, before = outer.state_dict(), [p.clone() for p in model.parameters()]
        with pytest.raises((ValueError, TypeError, qcomp.MismatchError)) as caught:
            outer.load_state_dict(saved if comm.rank else damaged)
        assert all(map(torch.equal, before, model.parameters()))
        outer.load_state_dict(saved)
        return type(caught.value).__name__

    assert run_local(2, rank_main, timeout=20)[1] == "MismatchError"


def test_parameters_without_names_are_numbered():
    comm = qcomp.comm.LocalCommunicator.alone()
    params = [torch.nn.Parameter(torch.ones(3)) for _ in range(2)]
    outer = qcomp.torch.OuterLoop(params, torch.optim.SGD(params, lr=0.1), PLAIN, comm=comm)
    assert outer.core_state.names == ("0", "1")
    outer = qcomp.torch.OuterLoop(iter(params), torch.optim.SGD(params, lr=0.1), PLAIN, comm=comm)
    assert outer.core_state.names == ("0", "1")
    named = [("a", params[0]), ("b", params[1])]
    outer = qcomp.torch.OuterLoop(named, torch.optim.SGD(params, lr=0.1), PLAIN, comm=comm)
    assert outer.core_state.names == ("a", "b")


class TestSameData:
    """A common mistake in scripts made for one rank: every rank draws the same batches."""

    @pytest.mark.quick_cases(4)
    @pytest.mark.parametrize(
        ("loop", "what"),
        [
            (LOOP, "outer gradients in the first round"),
            (STREAMING, "outer gradients in the first round"),
            (qcomp.OuterLoop(every=2, warmup=2), "gradients in the first step"),
        ],
    )
    @pytest.mark.parametrize("by_closure", [False, True])
    def test_every_rank_warns_once(self, loop, what, by_closure):
        def rank_main(comm):
            model, optimizer, _ = train(comm, loop, 0)
            for step in range(8):
                if by_closure:
                    optimizer.step(lambda of=step: (optimizer.zero_grad(), backward(model, 0, of))[1])
                else:
                    one_step(model, optimizer, 0, step)

        assert (
            self.told(rank_main)
            == [f"all 2 ranks have the same {what}, so an outer loop averages in vain"] * 2
        )

    def told(self, main):
        """Return the warnings of the ranks."""
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            run_local(2, main, timeout=20)
        return [str(one.message).partition(":")[0] for one in found if "in vain" in str(one.message)]

    def test_ranks_with_different_data_do_not_warn(self):
        assert self.told(lambda comm: train(comm, PLAIN) and None) == []


def test_an_optimizer_in_the_wrapper_of_a_framework():
    """As in Accelerate and Lightning; Accelerate's wrapper is a subclass that torch's hooks do not reach."""

    class Wrapper(torch.optim.Optimizer):
        def __init__(self, optimizer):
            self.optimizer = optimizer

    def rank_main(comm, *, wrapped):
        model = network()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        qcomp.torch.OuterLoop(model, Wrapper(optimizer) if wrapped else [optimizer], PLAIN, comm=comm)
        for step in range(4):
            one_step(model, optimizer, comm.rank, step)
        return bits(model.parameters())

    with_it, without = (
        run_local(2, lambda comm, how=how: rank_main(comm, wrapped=how), timeout=20) for how in (True, False)
    )
    assert with_it == without
    assert with_it[0] == with_it[1]


def test_weights_that_are_loaded_into_the_model_of_a_new_loop_are_refused():
    """They would count as what the first inner step did."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    qcomp.torch.OuterLoop(model, optimizer, PLAIN, comm=qcomp.comm.LocalCommunicator.alone())
    model.load_state_dict({name: x + 1 for name, x in network().state_dict().items()})
    before = copy.deepcopy(model.state_dict())
    backward(model, 0, 0)
    with pytest.raises(RuntimeError, match=r"the parameter '0\.weight' has changed since the loop was made"):
        optimizer.step()
    assert all(torch.equal(x, before[name]) for name, x in model.named_parameters())


def test_buffers_that_a_module_replaces_are_averaged():
    def rank_main(comm):
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        qcomp.torch.OuterLoop(model, optimizer, PLAIN, comm=comm)
        for step in range(2):
            one_step(model, optimizer, comm.rank, step)
            model[1].running_mean = model[1].running_mean + 0.0  # as modules do that compute averages
            if step == 0:
                model[1].running_var = torch.full((8,), float(comm.rank))
        return model[1].running_var

    first, second = run_local(2, rank_main)
    assert torch.equal(first, second)


def test_an_exchange_under_autocast_is_the_one_outside():
    loop = qcomp.OuterLoop(every=2, averaging=qcomp.PowerSGD(rank=1, min_compression=1), exact=None)

    def trained(enabled):
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        qcomp.torch.OuterLoop(model, optimizer, loop, comm=qcomp.comm.LocalCommunicator.alone())
        for step in range(4):
            optimizer.zero_grad()
            backward(model, 0, step)
            with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
                optimizer.step()
        return list(model.parameters())

    for inside, outside in zip(trained(True), trained(False), strict=True):
        assert torch.equal(inside, outside)


class TestClosures:
    """In the warm-up all ranks see the same gradients and the same losses."""

    @pytest.mark.parametrize("search", [None, "strong_wolfe"])
    def test_lbfgs_decides_alike_on_all_ranks(self, search):
        def rank_main(comm):
            model = torch.nn.Sequential(torch.nn.Linear(6, 4), torch.nn.Tanh(), torch.nn.Linear(4, 3))
            with torch.no_grad():
                for p in model.parameters():
                    p.copy_(torch.linspace(-1, 1, p.numel()).reshape(p.shape))
            optimizer = torch.optim.LBFGS(model.parameters(), max_iter=6, line_search_fn=search)
            qcomp.torch.OuterLoop(model, optimizer, qcomp.OuterLoop(every=3, warmup=2), comm=comm)
            calls = []

            def closure():
                calls.append(1)
                optimizer.zero_grad()
                x = torch.randn(16, 6, generator=torch.Generator().manual_seed(comm.rank))
                loss = (model(x) - 3 * (1 + comm.rank) * x[:, :3]).square().mean()
                loss.backward()
                return loss

            optimizer.step(closure)
            optimizer.step(closure)
            return len(calls), bits(model.parameters())

        one, other = run_local(2, rank_main, timeout=20)
        assert one == other

    @pytest.mark.parametrize(
        ("given", "expected"),
        [
            ((1.0, 2.0), (1.5, 1.5)),
            ((torch.tensor(1.0, dtype=torch.float64), torch.tensor([2.0])), (1.5, 1.5)),
            ((1.0, torch.inf), (torch.inf, torch.inf)),
            ((1.0, None), (1.0, None)),
            ((None, None), (None, None)),
        ],
    )
    def test_losses_are_averaged_if_all_ranks_have_one(self, given, expected):
        def rank_main(comm):
            _, optimizer, _ = train(comm, qcomp.OuterLoop(every=2, warmup=2), 0)

            def closure():
                for group in optimizer.param_groups:
                    for p in group["params"]:
                        p.grad = torch.full_like(p, comm.rank)
                return given[comm.rank]

            found = optimizer.step(closure)
            assert type(found) is type(given[comm.rank])
            return found

        assert tuple(run_local(2, rank_main, timeout=20)) == expected


class TestFusedUnderScaler:
    """A GradScaler leaves unscaling and skipping to the steps of fused optimizers, and of those of qcomp."""

    @staticmethod
    def torchs(model):
        return torch.optim.SGD(model.parameters(), lr=0.05, fused=True)

    @staticmethod
    def qcomps(model):
        alone = qcomp.comm.LocalCommunicator.alone()
        return qcomp.torch.CompressedSGD(model.parameters(), lr=0.05, exact=None, comm=alone)

    def trained(self, make, *, scaled, overflows=()):
        """Return the parameters of both ranks after each step; rank 1 overflows in some steps."""

        def rank_main(comm):
            model, optimizer, _ = train(comm, qcomp.OuterLoop(every=3, warmup=5), 0, optimizers=make)
            scaler = torch.amp.GradScaler("cpu", init_scale=1024.0 * (1 + comm.rank), enabled=scaled)
            trail = []
            for step in range(4):
                optimizer.zero_grad()
                x = torch.randn(16, 6, generator=torch.Generator().manual_seed(100 * comm.rank + step))
                loss = (model(x) - x[:, :3]).square().mean()
                scaler.scale(loss * torch.inf if comm.rank and step in overflows else loss).backward()
                scaler.step(optimizer)
                scaler.update()
                trail.append(bits(model.parameters()))
            return trail

        return run_local(2, rank_main, timeout=20)

    @pytest.mark.slow
    @pytest.mark.parametrize("make", [torchs, qcomps])
    def test_ranks_with_other_scales_train_as_without(self, make):
        one, other = self.trained(make, scaled=True)
        assert one == other
        assert one == self.trained(make, scaled=False)[0]  # scales are powers of two

    @pytest.mark.parametrize("make", [torchs, qcomps])
    def test_all_ranks_skip_what_overflows_on_one(self, make):
        one, other = self.trained(make, scaled=True, overflows=[1])
        assert one == other
        assert [a == b for a, b in pairwise(one)] == [True, False, False]


class TestSeveralBackwardPasses:
    """Two optimizers, each with its own backward pass, as for a generator and its critic."""

    @pytest.mark.parametrize(("warmup", "critic"), [(4, 1), (4, 3), (0, 3)])
    def test_each_optimizer_averages_its_own_gradients(self, warmup, critic):
        """The warm-up ends with a check that all ranks have the same parameters."""

        def rank_main(comm):
            models = torch.nn.ModuleList([torch.nn.Linear(4, 4), torch.nn.Linear(4, 1)])
            with torch.no_grad():
                for p in models.parameters():
                    p.copy_(torch.linspace(-1, 1, p.numel()).reshape(p.shape))
            makes, judges = (torch.optim.RMSprop(one.parameters(), 1e-2) for one in models)
            loop = qcomp.OuterLoop(every=2, warmup=warmup)
            outer = qcomp.torch.OuterLoop(models, [judges, makes], loop, comm=comm)
            for step in range(6):
                for turn in range(critic):
                    generator = torch.Generator().manual_seed(100 * step + 10 * turn + comm.rank)
                    x = torch.randn(8, 4, generator=generator)
                    judges.zero_grad()
                    (models[1](x).square().mean() - models[1](models[0](x)).mean()).backward()
                    judges.step()
                makes.zero_grad()
                models[1](models[0](x)).mean().backward()
                makes.step()
                if step < warmup:
                    trail.append((step, bits(models.parameters())))
            return outer.core_state.step, bits(models.parameters())

        trail = []
        one, other = run_local(2, rank_main, timeout=20)
        assert one == other
        assert one[0] == 6
        for step in range(warmup):
            assert len({tuple(found) for of, found in trail if of == step}) == 1

    def test_an_embedding_that_renormalises_is_no_weight_that_is_loaded_late(self):
        def rank_main(comm):
            model = torch.nn.Embedding(8, 4, max_norm=1.0)
            with torch.no_grad():
                model.weight.fill_(2.0)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            outer = qcomp.torch.OuterLoop(model, optimizer, PLAIN, comm=comm)
            for step in range(2):
                model(torch.tensor([comm.rank, step])).sum().backward()
                optimizer.step()
            return outer.core_state.step, bits(model.parameters())

        one, other = run_local(2, rank_main, timeout=20)
        assert one == other


class TestBuffers:
    """What a model has besides parameters: one value for all ranks where they differ, and nothing where they do not."""

    def trained(self, buffers, ranks=2):
        """Return each rank's buffers after an outer round, of a model with these buffers of a rank and BatchNorm."""

        def rank_main(comm):
            model = network()
            for name, buffer in buffers(comm.rank).items():
                model[0].register_buffer(name, buffer, persistent=False)
            train(comm, PLAIN, 2, model=model, init_sync=False)
            return dict(model.named_buffers())

        return run_local(ranks, rank_main, timeout=20)

    def exchanged(self, make, fill, ranks=3):
        """Return each rank's buffers after an exchange, which ``fill`` has written before."""

        def rank_main(comm):
            inside = make()
            model = torch.nn.Sequential(torch.nn.Linear(2, 2), inside).to(
                next(inside.parameters(), torch.ones(0)).dtype
            )
            with torch.no_grad():
                for p in model.parameters():
                    p.copy_(torch.linspace(-1, 1, p.numel()).reshape(p.shape))
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            qcomp.torch.OuterLoop(model, optimizer, qcomp.OuterLoop(every=1), comm=comm)
            with torch.no_grad():
                fill(model[1], comm.rank)
            for p in model.parameters():
                p.grad = torch.full_like(p, comm.rank)
            optimizer.step()
            return model[1]

        return run_local(ranks, rank_main, timeout=20)

    @pytest.mark.parametrize("second", [torch.ones(4), torch.ones(3, dtype=torch.float64), None])
    def test_others_are_refused_by_name(self, second):
        """Otherwise all buffers behind it would get the elements of others."""
        kinds = "is float32 of shape (3,) on ranks 0 and 2, but "
        kinds += "absent" if second is None else f"{str(second.dtype)[6:]} of shape {tuple(second.shape)}"
        expected = re.escape(f"the buffer '0.cache' {kinds} on rank 1: all ranks need the same")
        with pytest.raises(qcomp.MismatchError, match=expected):
            self.trained(lambda rank: {"cache": second if rank == 1 else torch.ones(3)}, ranks=3)

    def test_their_order_does_not_matter(self):
        pairs = [("a", torch.ones(3)), ("b", torch.zeros(5))]
        found = self.trained(lambda rank: {n: x + rank for n, x in (pairs[::-1] if rank else pairs)})
        for one in found:
            assert torch.equal(one["0.a"], torch.ones(3))
            assert torch.equal(one["0.b"], torch.zeros(5))
        assert torch.equal(found[0]["1.running_var"], found[1]["1.running_var"])

    @pytest.mark.parametrize(
        "constant",
        [
            torch.full((3, 3), -torch.inf).triu(1),
            torch.full((2,), torch.nan),
            torch.ones(3).to(torch.float8_e4m3fn),
            torch.eye(3).to_sparse(),
            torch.ones(1).expand(3),
            torch.zeros(0),
            torch.rand(
                100, generator=torch.Generator().manual_seed(0)
            ),  # its mean over three ranks is another
        ],
        ids=["mask", "nan", "float8", "sparse", "expanded", "empty", "float32"],
    )
    def test_equal_ones_stay_as_they_are(self, constant):
        for one in self.trained(lambda _: {"constant": constant.clone()}, ranks=3):
            torch.testing.assert_close(one["0.constant"], constant, rtol=0, atol=0, equal_nan=True)

    def test_equal_ones_in_other_layouts_stay_as_they_are(self):
        mask = torch.full((2, 3), -torch.inf).triu(1)
        found = self.trained(lambda rank: {"mask": mask.t().contiguous().t() if rank else mask.clone()})
        assert all(torch.equal(one["0.mask"], mask) for one in found)

    @pytest.mark.parametrize(
        "dtype",
        [
            torch.float32,
            torch.float64,
            torch.bfloat16,
            torch.float8_e4m3fn,
            torch.int64,
            torch.uint8,
            torch.bool,
            torch.complex64,
        ],
        ids=str,
    )
    def test_those_without_a_rule_become_those_of_rank_0(self, dtype):
        """Bit for bit, as under DistributedDataParallel; three odd bytes before them shift what is behind them."""

        def of_rank(rank):
            return {
                "odd": torch.full((3,), rank, dtype=torch.uint8),
                "x": torch.tensor([rank, 1 - rank]).to(dtype),
            }

        for one in self.trained(of_rank):
            assert one["0.x"].dtype == dtype
            assert torch.equal(one["0.x"].to(torch.complex64), torch.tensor([0, 1]).to(torch.complex64))

    def test_values_that_are_not_finite_are_no_obstacle_without_a_rule(self):
        for one in self.trained(lambda rank: {"x": torch.tensor([torch.nan, -torch.inf, 1.0][rank:])[:1]}):
            assert one["0.x"].isnan().all()

    def test_expanded_ones_become_those_of_rank_0(self):
        found = self.trained(lambda rank: {"x": torch.full((1,), float(rank)).expand(3)})
        assert all(torch.equal(one["0.x"], torch.zeros(3)) for one in found)

    @pytest.mark.parametrize("new", [False, True], ids=["hook", "parametrization"])
    def test_unit_vectors_stay_unit_vectors(self, new):
        """The mean of spectral_norm's vectors is shorter, so the norm would be underestimated by as much."""
        norm = torch.nn.utils.parametrizations.spectral_norm if new else torch.nn.utils.spectral_norm

        def turn(module, rank):
            for buffer in module.buffers():
                generator = torch.Generator().manual_seed(rank)
                buffer.copy_(
                    torch.nn.functional.normalize(torch.randn(buffer.shape, generator=generator), dim=0)
                )

        found = self.exchanged(lambda: norm(torch.nn.Linear(2, 2)), turn)
        for module in found:
            for buffer, first in zip(module.buffers(), found[0].buffers(), strict=True):
                assert torch.equal(buffer, first)
                assert buffer.norm().item() == pytest.approx(1)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
    @pytest.mark.parametrize(
        "make",
        [
            torch.nn.BatchNorm1d,
            torch.nn.SyncBatchNorm,
            lambda n: torch.nn.InstanceNorm1d(n, track_running_stats=True),
        ],
        ids=["batch", "sync", "instance"],
    )
    def test_running_statistics_become_those_of_all_data(self, make, dtype):
        """In equal parts: all data of three ranks have the mean variance plus the variance of their means."""
        data = [
            torch.randn(64, 5, generator=torch.Generator().manual_seed(r)).double() * (r + 1) + 9 * r
            for r in range(3)
        ]

        def measure(module, rank):
            module.running_mean.copy_(data[rank].mean(0))
            module.running_var.copy_(data[rank].var(0, correction=0))

        whole = torch.cat(data)
        for module in self.exchanged(lambda: make(5).to(dtype), measure):
            loose = {"rtol": 2e-2, "atol": 0} if dtype == torch.bfloat16 else {"rtol": 1e-5, "atol": 0}
            torch.testing.assert_close(module.running_mean.double(), whole.mean(0), **loose)
            torch.testing.assert_close(module.running_var.double(), whole.var(0, correction=0), **loose)

    def test_equal_variances_around_other_means_grow(self):
        def measure(module, rank):
            module.running_mean.fill_(rank)

        for module in self.exchanged(lambda: torch.nn.BatchNorm1d(2), measure):
            torch.testing.assert_close(module.running_var, torch.full((2,), 1 + 2 / 3))

    def test_running_statistics_that_are_not_finite_are_named(self):
        def spoil(module, rank):
            module.running_var[rank % 2] = torch.nan if rank == 1 else 2.0

        with pytest.raises(
            qcomp.NonFiniteError,
            match=r"the buffer value of '1\.running_var' on rank 1 is not finite.* in step 1",
        ):
            self.exchanged(lambda: torch.nn.BatchNorm1d(2), spoil)

    @pytest.mark.parametrize("kind", ["MinMaxObserver", "PerChannelMinMaxObserver", "HistogramObserver"])
    def test_observers_see_the_range_of_all_ranks(self, kind):
        """A histogram belongs to its own range, so all of it becomes that of rank 0."""
        observers = pytest.importorskip("torch.ao.quantization.observer")

        def observe(module, rank):
            module(torch.tensor([[-1.0 - rank, 2.0], [0.5, 3.0 - rank]]))

        found = self.exchanged(getattr(observers, kind), observe)
        for module in found:
            for name, buffer in module.named_buffers():
                assert torch.equal(buffer, dict(found[0].named_buffers())[name])
            if kind == "HistogramObserver":
                assert (module.min_val, module.max_val) == (-1, 3)
                assert module.histogram.sum() == 4
            elif kind == "MinMaxObserver":
                assert (module.min_val, module.max_val) == (-3, 3)
            else:
                assert (module.min_val.tolist(), module.max_val.tolist()) == ([-3, 0.5], [2, 3])

    def test_largest_magnitudes_of_8_bit_floats_are_those_of_all_ranks(self):
        found = self.trained(lambda rank: {"fp8_amax_history_input": torch.tensor([1.0 + rank, 3.0 - rank])})
        assert all(one["0.fp8_amax_history_input"].tolist() == [2.0, 3.0] for one in found)

    def test_tied_ones_are_combined_once(self):
        """Two modules have the same running mean, and a variance each."""

        def tie():
            pair = torch.nn.Sequential(torch.nn.BatchNorm1d(2), torch.nn.BatchNorm1d(2))
            pair[1].running_mean = pair[0].running_mean
            return pair

        def measure(module, rank):
            module[0].running_mean.fill_(3 * rank)

        for module in self.exchanged(tie, measure):
            assert module[1].running_mean is module[0].running_mean
            assert module[0].running_mean.tolist() == [3, 3]
            for one in module:
                assert one.running_var.tolist() == [7, 7]

    def test_those_in_the_memory_of_a_parameter_move_with_it(self):
        """The last fragment is exchanged in the second step, the weight only in the first."""

        def rank_main(comm):
            model = torch.nn.Linear(2, 2)
            with torch.no_grad():
                model.weight.zero_()
                model.bias.zero_()
            model.register_buffer("view", model.weight.detach()[0])
            optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
            qcomp.torch.OuterLoop(model, optimizer, qcomp.OuterLoop(every=2, fragments=2), comm=comm)
            for _ in range(2):
                for p in model.parameters():
                    p.grad = torch.full_like(p, -comm.rank)
                optimizer.step()
            return model.weight[0].tolist(), model.bias.tolist()

        assert run_local(2, rank_main, timeout=20) == [([0.5, 0.5], [1, 1]), ([1.5, 1.5], [1, 1])]


class TestBrokenBuffers:
    """Other rules for buffers, which the tests above catch."""

    @pytest.mark.parametrize(
        ("attribute", "broken", "law", "options"),
        [
            ("_rule", lambda leaf, beside: "mean", "test_unit_vectors_stay_unit_vectors", {"new": True}),
            ("_rule", lambda leaf, beside: "that of rank 0", "test_tied_ones_are_combined_once", {}),
            (
                "_rule",
                lambda leaf, beside: "mean" if leaf.startswith("running") else "that of rank 0",
                "test_equal_variances_around_other_means_grow",
                {},
            ),
            (
                "_EXTREMES",
                {"least": torch.maximum, "greatest": torch.minimum},
                "test_observers_see_the_range_of_all_ranks",
                {"kind": "MinMaxObserver"},
            ),
        ],
        ids=["means", "first", "mean variance", "smallest range"],
    )
    def test_are_detected(self, attribute, broken, law, options, monkeypatch):
        getattr(TestBuffers(), law)(**options)
        monkeypatch.setattr(f"qcomp.torch.buffers.{attribute}", broken)
        with pytest.raises(AssertionError):
            getattr(TestBuffers(), law)(**options)


class TestStepsInsideSteps:
    """torch runs the hooks of an optimizer again where the step of its class calls that of a base class."""

    class Careful(torch.optim.AdamW):  # type: ignore[name-defined]  # not exported by name
        fails = False

        def step(self, closure=None):
            loss = super().step(closure)
            if self.fails:
                raise OSError("the log is full")
            return loss

    def made(self, warmup):
        torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))])  # now torch runs hooks in the base class, too
        loop = qcomp.OuterLoop(every=4, warmup=warmup, exact=None)
        comm = qcomp.comm.LocalCommunicator.alone()
        return train(comm, loop, 0, optimizers=lambda model: self.Careful(model.parameters(), lr=0.05))

    @pytest.mark.parametrize("warmup", [0, 2])
    def test_count_as_one_step(self, warmup):
        model, optimizer, outer = self.made(warmup)
        for step in range(6):
            one_step(model, optimizer, 0, step)
            assert outer.core_state.step == step + 1

    def test_count_as_one_step_after_an_error(self):
        """Neither a step that fails inside its base class nor one that fails after it has a post-hook."""
        model, optimizer, outer = self.made(0)
        one_step(model, optimizer, 0, 0)
        optimizer.fails = True
        with pytest.raises(OSError, match="the log is full"):
            one_step(model, optimizer, 0, 1)
        optimizer.fails = False
        with pytest.raises(ZeroDivisionError):
            optimizer.step(lambda: 1 / 0)
        assert outer.core_state.step == 1
        for step in range(1, 4):
            one_step(model, optimizer, 0, step)
            assert outer.core_state.step == step + 1


def test_a_parameter_that_is_given_twice_counts_once():
    """As tied weights in lists of parameters; with fragments they would have two shared values."""
    tied, other = torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.ones(2))
    alone = qcomp.comm.LocalCommunicator.alone()
    for given, names in (
        ([("a", tied), ("b", other), ("c", tied)], ("a", "b")),
        ([tied, tied, other], ("0", "2")),
    ):
        optimizer = torch.optim.SGD([tied, other], lr=0.1)
        outer = qcomp.torch.OuterLoop(
            given, optimizer, qcomp.OuterLoop(every=2, fragments=2, exact=None), comm=alone
        )
        assert outer.core_state.names == names


def test_parameters_that_share_memory_are_refused():
    values = torch.ones(5)
    params = [torch.nn.Parameter(values[:3]), torch.nn.Parameter(values[2:])]
    with pytest.raises(ValueError, match="the parameters '0' and '1' share memory"):
        qcomp.torch.OuterLoop(
            params, torch.optim.SGD(params), PLAIN, comm=qcomp.comm.LocalCommunicator.alone()
        )


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated")  # from within torch
@pytest.mark.parametrize("warmup", [0, 2])
def test_a_compiled_step_trains_as_a_plain_one(warmup):
    def trained(compiled):
        torch._dynamo.reset()
        loop = qcomp.OuterLoop(every=2, warmup=warmup)
        alone = qcomp.comm.LocalCommunicator.alone()
        # AdamW would amplify other roundings of a gradient that is almost zero, of the bias before BatchNorm.
        model, optimizer, outer = train(
            alone,
            loop,
            0,
            optimizers=lambda model: torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.5),
        )
        step_of = torch.compile(optimizer.step, backend="eager") if compiled else optimizer.step
        for step in range(5):
            optimizer.zero_grad()
            backward(model, 0, step)
            step_of()
            assert outer.core_state.step == step + 1
        return list(model.parameters())

    for found, expected in zip(trained(compiled=True), trained(compiled=False), strict=True):
        assert torch.allclose(found, expected, atol=1e-5)
