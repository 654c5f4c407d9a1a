"""One rank saves for all: what loads then, what is refused or dropped, and who is warned when it saves."""

import copy
import threading
import warnings

import pytest

import qcomp
from qcomp.comm import run_local
from tests.outer.jobs import Group

torch = pytest.importorskip("torch")
import qcomp.torch  # noqa: E402

FREEZE = 3
ADAM = {"lr": 0.01, "betas": (0.9, 0.9), "freeze": FREEZE, "compressor": qcomp.ScaledSign(64), "exact": None}
CURES = ("call gather_states() on all ranks before that rank saves", "lost='drop'")
DILOCO = qcomp.OuterLoop(every=3, outer=qcomp.SGD(learning_rate=0.5, momentum=0.9), warmup=2)
SIGNS = qcomp.OuterLoop(every=3, compressor=qcomp.ScaledSign(16), exact=None, warmup=2)
STREAMING = qcomp.OuterLoop(
    every=4, fragments=2, delay=2, mixing=0.5, compressor=qcomp.ScaledSign(16), exact=None
)


@pytest.fixture(autouse=True)
def quiet():
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "the variance is frozen after|the variance of .* no longer fits")
        yield


def network():
    model = torch.nn.Sequential(torch.nn.Linear(6, 31), torch.nn.Tanh(), torch.nn.Linear(31, 3))
    draws = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=draws) / 4)
    return model


def steps(model, optimizer, rank, numbers):
    for step in numbers:
        optimizer.zero_grad()
        x = torch.randn(16, 6, generator=torch.Generator().manual_seed(100 * rank + step))
        (model(x) - x[:, :3]).square().mean().backward()
        optimizer.step()


def made(comm, name="OneBitAdam", **changes):
    model = network()
    settings = {key: value for key, value in (ADAM | changes).items() if name != "SGD" or key == "lr"}
    return model, getattr(qcomp.torch, name)(model.named_parameters(), comm=comm, **settings)


def looped(comm, loop):
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    return model, optimizer, qcomp.torch.OuterLoop(model, optimizer, loop, comm=comm)


def content(model, thing):
    state = thing.core_state
    arrays = [*state.momentum, *state.variance, *state.exchange.worker, *state.exchange.server]
    arrays += [x for kind in sorted(state.arrays) for x in state.arrays[kind]]
    tensors = [*model.parameters(), *arrays]
    return [x.detach().numpy().tobytes() for x in tensors], str(state.numbers), state.step, state.stage


def told(size, main):
    """Return the results of ranks, and all warnings about states."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        results = run_local(size, main, timeout=20)
    texts = [str(one.message) for one in found]
    return results, [text for text in texts if "resumes" in text or "saves" in text or "state_dict" in text]


def trained(stop, size=2, **changes):
    def main(comm):
        model, optimizer = made(comm, **changes)
        steps(model, optimizer, comm.rank, range(stop))
        return copy.deepcopy((model.state_dict(), optimizer.state_dict()))

    return run_local(size, main, timeout=20)


def test_a_state_of_the_warm_up_loads_from_any_rank_on_any_number_of_ranks():
    saved = trained(FREEZE - 1)

    def main(comm, of_rank):
        model, optimizer = made(comm, lr=0.3)
        weights, state = of_rank(comm.rank)
        model.load_state_dict(weights)
        optimizer.load_state_dict(copy.deepcopy(state))
        found = content(model, optimizer)
        steps(model, optimizer, comm.rank, range(FREEZE - 1, FREEZE + 3))
        return found, content(model, optimizer)

    expected, _ = told(2, lambda comm: main(comm, saved.__getitem__))
    for rank in (0, 1):
        found, warned = told(2, lambda comm, rank=rank: main(comm, lambda _: saved[rank]))
        assert found == expected
        assert not warned
    states = [state for _, state in saved]
    expected, _ = told(3, lambda comm: main(comm, lambda _: (saved[0][0], states)))
    found, warned = told(3, lambda comm: main(comm, lambda _: saved[0]))
    assert found == expected
    assert not warned


@pytest.mark.parametrize("size", [2, 3])
def test_later_states_of_one_rank_are_refused_on_every_rank_with_the_cures(size):
    (_, state), _ = trained(FREEZE + 3)

    def main(comm):
        model, optimizer = made(comm)
        before = content(model, optimizer)
        with pytest.raises((ValueError, qcomp.MismatchError)) as caught:
            optimizer.load_state_dict(state)
        assert content(model, optimizer) == before
        return str(caught.value)

    for error in run_local(size, main, timeout=20):
        assert "rank 1" in error
        assert "residuals" in error
        assert all(cure in error for cure in CURES), error


@pytest.mark.parametrize("size", [2, 3])
def test_drop_keeps_what_is_there(size):
    (weights, state), _ = trained(FREEZE + 3)

    def main(comm):
        model, optimizer = made(comm, lr=0.3)
        model.load_state_dict(weights)
        optimizer.load_state_dict(state, lost="drop")
        assert optimizer.param_groups[0]["lr"] == 0.01
        found = content(model, optimizer)
        for name, x in zip(optimizer.core_state.names, optimizer.core_state.momentum, strict=True):
            assert any(torch.equal(x, entry["shared"][0]["momentum"]) for entry in state["state"].values()), (
                name
            )
        steps(model, optimizer, comm.rank, range(FREEZE + 3, FREEZE + 6))
        return found, [p.detach().numpy().tobytes() for p in model.parameters()]

    results, warned = told(size, main)
    assert len(warned) == size
    assert all(
        f"a state of 2 ranks resumes with {size}, without the residuals of rank 1" in w for w in warned
    )
    assert all(params == results[0][1] for _, params in results)


def test_between_synchronisations_every_rank_goes_on_as_the_one_that_saved():
    changes = {"name": "ZeroOneAdam", "sync_steps": lambda step: step % 6 == 0}
    saved = trained(FREEZE + 3, **changes)
    assert "local" in str(saved[0][1]["state"][0]["rank 0 of 2"][0]["stage"])

    def main(comm):
        model, optimizer = made(comm, **changes)
        model.load_state_dict(saved[comm.rank][0])
        optimizer.load_state_dict(saved[0][1], lost="drop")
        return [p.detach().numpy().tobytes() for p in model.parameters()], content(model, optimizer)[0][:8]

    results, warned = told(2, main)
    assert results[0] == results[1]
    assert results[0][0] == [p.numpy().tobytes() for p in saved[0][0].values()]
    assert len(warned) == 2
    assert "'momentum' and 'pending' of rank 1" in warned[0]


def test_rank_0_saves_for_all_after_gather_states():
    def main(comm):
        model, optimizer = made(comm)
        steps(model, optimizer, comm.rank, range(FREEZE + 2))
        optimizer.consolidate_state_dict()  # as Lightning and Fabric call it
        saved = copy.deepcopy(optimizer.state_dict()) if comm.rank == 0 else None
        return model.state_dict(), saved, content(model, optimizer)

    before = run_local(2, main, timeout=20)

    def again(comm):
        model, optimizer = made(comm)
        model.load_state_dict(before[comm.rank][0])
        optimizer.load_state_dict(before[0][1])
        return content(model, optimizer)

    assert run_local(2, again, timeout=20) == [one[2] for one in before]


class TestWarnings:
    """A rank that saves without the others is warned, and nobody else."""

    def saves(
        self, who, name="OneBitAdam", gathers=False, stops=(1, FREEZE + 1, FREEZE + 2, FREEZE + 3), **changes
    ):
        def main(comm):
            model, optimizer = made(comm, name, **changes)
            for first, last in zip((0, *stops), stops, strict=False):
                steps(model, optimizer, comm.rank, range(first, last))
                if gathers:
                    optimizer.gather_states()
                if comm.rank in who:
                    optimizer.state_dict()
                    optimizer.state_dict()

        return told(3, main)[1]

    @pytest.mark.parametrize("who", [[0], [0, 2]])
    def test_once_on_each_rank_that_saves(self, who):
        warned = self.saves(who)
        assert len(warned) == len(who)
        text = f"{len(who)} of 3 ranks called state_dict after step 1, but each rank keeps its own residuals"
        assert all(text in one and "gather_states() on all ranks" in one for one in warned), warned

    def test_not_where_every_rank_saves(self):
        assert self.saves([0, 1, 2]) == []
        assert self.saves([0, 1, 2], "ZeroOneAdam", sync_steps=lambda step: step % 3 == 0) == []

    @pytest.mark.parametrize("who", [[0], [0, 1, 2]])
    def test_not_after_gather_states(self, who):
        assert self.saves(who, gathers=True) == []

    def test_not_where_nothing_is_owed(self):
        assert self.saves([0], freeze=100) == []
        assert self.saves([0], averaging=qcomp.Averaging(feedback=False), compressor=qcomp.QSGD(7, 64)) == []

    def test_no_message_is_sent(self):
        def main(comm):
            model, optimizer = made(comm)
            sent = []
            for step in range(FREEZE + 4):
                before = comm.bytes_sent
                steps(model, optimizer, comm.rank, [step])
                sent.append(comm.bytes_sent - before)
                before = comm.bytes_sent
                if comm.rank == 0:
                    with warnings.catch_warnings():
                        warnings.simplefilter("ignore")
                        optimizer.state_dict()
                assert comm.bytes_sent == before
            return sent

        def plain(comm):
            model, optimizer = made(comm)
            sent = []
            for step in range(FREEZE + 4):
                before = comm.bytes_sent
                steps(model, optimizer, comm.rank, [step])
                sent.append(comm.bytes_sent - before)
            return sent

        assert run_local(2, main, timeout=20) == run_local(2, plain, timeout=20)

    @pytest.mark.parametrize(
        ("module", "function", "framework"),
        [
            ("accelerate.checkpointing", "save_accelerator_state", "Accelerate"),
            ("transformers.trainer", "_save_optimizer_and_scheduler", "the Trainer of Hugging Face"),
        ],
    )
    @pytest.mark.parametrize("gathers", [False, True])
    def test_frameworks_that_write_one_state_are_known_at_once(self, module, function, framework, gathers):
        space = {"__name__": module}
        exec(f"def {function}(optimizer):\n    return optimizer.state_dict()", space)

        def main(comm):
            model, optimizer = made(comm)
            for stop in range(FREEZE + 2):
                steps(model, optimizer, comm.rank, [stop])
                if gathers:
                    optimizer.gather_states()
                space[function](optimizer)

        warned = told(2, main)[1]
        assert len(warned) == (0 if gathers else 2)
        assert all(
            one.startswith(f"{framework} saves the state of only one rank, but each") for one in warned
        )

    def test_another_communicator_begins_anew(self):
        """Its ranks have not counted the saves over the first."""

        def main(comm):
            model, optimizer = made(comm)
            steps(model, optimizer, comm.rank, range(FREEZE + 1))
            optimizer.state_dict()
            optimizer._move(Group(comm, [0, 1]))  # without counters
            steps(model, optimizer, comm.rank, [FREEZE + 1])
            optimizer.state_dict()
            optimizer._move(comm)
            steps(model, optimizer, comm.rank, [FREEZE + 2])
            optimizer.state_dict()

        assert told(2, main)[1] == []

    def test_outer_loops_of_ranks_at_different_steps(self):
        """Between exchanges a rank may save long before the others reach that step."""
        ahead = threading.Event()

        def main(comm, who, loop):
            model, optimizer, outer = looped(comm, loop)
            if comm.rank:
                assert ahead.wait(10)
            for step in range(18):
                steps(model, optimizer, comm.rank, [step])
                if step == (0 if loop.delay else 3):
                    ahead.set()
                if comm.rank in who and step % 2:
                    outer.state_dict()
                    optimizer.state_dict()

        for loop in (qcomp.OuterLoop(every=5), STREAMING):
            ahead.clear()
            assert told(2, lambda comm, loop=loop: main(comm, [0, 1], loop))[1] == []
            ahead.clear()
            warned = told(2, lambda comm, loop=loop: main(comm, [0], loop))[1]
            assert len(warned) == 1
            assert "1 of 2 ranks called state_dict" in warned[0]


class TestOuterLoops:
    @pytest.mark.parametrize("loop", [DILOCO, SIGNS], ids=["exact", "signs"])
    @pytest.mark.parametrize("stop", [1, 2, 4, 5, 6])
    def test_rank_0_saves_alone(self, loop, stop):
        """In the warm-up, at its end, and at the end of an exact outer round all ranks are alike."""

        def first(comm):
            model, optimizer, outer = looped(comm, loop)
            steps(model, optimizer, comm.rank, range(stop))
            return copy.deepcopy((model.state_dict(), optimizer.state_dict(), outer.state_dict()))

        saved = run_local(2, first, timeout=20)

        def again(comm, of_rank, **options):
            model, optimizer, outer = looped(comm, loop)
            model.load_state_dict(saved[0][0])
            optimizer.load_state_dict(copy.deepcopy(saved[0][1]))
            try:
                outer.load_state_dict(of_rank(comm.rank), **options)
            except (ValueError, qcomp.MismatchError) as error:
                return str(error)
            found = content(model, outer)
            steps(model, optimizer, comm.rank, range(stop, stop + 2))
            return found

        alike = stop < 2 or (loop is DILOCO and stop in (2, 5))
        for size in (2, 3):
            results, warned = told(size, lambda comm: again(comm, lambda _: saved[0][2]))
            if alike:
                assert not warned
                if size == 2:
                    assert results == told(2, lambda comm: again(comm, lambda rank: saved[rank][2]))[0]
                assert all(one[0][:4] == results[0][0][:4] for one in results)
                continue
            assert all(cure in text for text in results for cure in CURES), results
            assert all("'local'" in text or "residuals" in text for text in results)
            results, warned = told(size, lambda comm: again(comm, lambda _: saved[0][2], lost="drop"))
            assert len(warned) == size
            assert all("of rank 1: every rank starts with" in text for text in warned)
            for params, *_ in results:
                assert params[:4] == [x.numpy().tobytes() for x in saved[0][0].values()] or size == 3

    @pytest.mark.parametrize("loop", [DILOCO, SIGNS, STREAMING], ids=["exact", "signs", "streaming"])
    @pytest.mark.parametrize("stop", [1, 4, 5])
    def test_rank_0_saves_for_all(self, loop, stop):
        def first(comm):
            model, optimizer, outer = looped(comm, loop)
            steps(model, optimizer, comm.rank, range(stop))
            before = content(model, outer)
            outer.gather_states()
            saved = copy.deepcopy(outer.state_dict())
            assert len(saved) == (1 if comm.rank else 2)
            inner = copy.deepcopy(optimizer.state_dict())
            steps(model, optimizer, comm.rank, range(stop, stop + 6))
            assert len(outer.state_dict()) == 1
            return saved, before, inner, content(model, outer)

        results, warned = told(2, first)
        assert not warned
        saved = results[0][0]

        def again(comm):
            model, optimizer, outer = looped(comm, loop)
            optimizer.load_state_dict(copy.deepcopy(results[comm.rank][2]))
            outer.load_state_dict(saved)
            found = content(model, outer)
            steps(model, optimizer, comm.rank, range(stop, stop + 6))
            return found, content(model, outer)

        assert run_local(2, again, timeout=20) == [(before, after) for _, before, _, after in results]

        def on_three(comm):
            model, optimizer, outer = looped(comm, loop)
            outer.load_state_dict(saved)
            steps(model, optimizer, comm.rank, range(stop, stop + 6))
            return outer.core_state.step

        assert told(3, on_three)[0] == [stop + 6] * 3

    def test_one_rank_that_gathers_alone_is_named(self):
        def main(comm):
            model, optimizer, outer = looped(comm, qcomp.OuterLoop(every=1))
            steps(model, optimizer, comm.rank, range(2))
            if comm.rank == 0:
                outer.gather_states()
            steps(model, optimizer, comm.rank, [2])

        with pytest.raises(qcomp.MismatchError, match=r"rank 0: gather_states\(\) after step 2 of OuterLoop"):
            run_local(2, main, timeout=20)

    def test_a_second_warm_up_and_an_inner_state_alone_give_a_warning(self):
        def main(comm, saves, loads):
            model, optimizer, outer = looped(comm, SIGNS)
            steps(model, optimizer, comm.rank, range(4))
            if comm.rank == 0:
                optimizer.state_dict()
            if saves:
                outer.state_dict()
            steps(model, optimizer, comm.rank, range(4, 6))
            again, other, loop = looped(comm, SIGNS)
            other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
            saved = outer.state_dict()
            if loads:
                loop.load_state_dict(saved)
            steps(again, other, comm.rank, range(1))

        assert told(2, lambda comm: main(comm, True, True))[1] == []
        warned = told(2, lambda comm: main(comm, False, True))[1]
        assert len(warned) == 1
        assert "saved after step 4, but the state of its OuterLoop was not" in warned[0]
        assert "outer.gather_states() on all ranks" in warned[0]
        warned = told(2, lambda comm: main(comm, True, False))[1]
        assert len(warned) == 2
        assert "a warm-up of 2 steps begins, but optimizer 0 has made steps before" in warned[0]
