"""A saved job resumes with another number of ranks, and what compression owes is not lost."""

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import qcomp
from qcomp import MismatchError
from qcomp.comm import run_local

SHAPES = [(40,), (7, 5), (3,)]
NAMES = ["embedding@0", "layer.0/weight", "bias"]
BETAS = (0.9, 0.9)
WORLDS = [(3, 2), (2, 3), (4, 1), (1, 4), (2, 2)]
TOPOLOGIES = [name for name in qcomp.topologies.names() if name != "hierarchical"]


def sgd(**chosen: Any) -> qcomp.CompressedSGD:
    settings: dict[str, Any] = {
        "learning_rate": 0.125,
        "momentum": 0.0,
        "exact": None,
        "compressor": qcomp.ScaledSign(8),
    }
    return qcomp.CompressedSGD(**settings | chosen)


def one_bit(**chosen: Any) -> qcomp.OneBitAdam:
    settings: dict[str, Any] = {
        "learning_rate": 0.1,
        "betas": BETAS,
        "freeze": 2,
        "compressor": qcomp.ScaledSign(8),
    }
    return qcomp.OneBitAdam(exact=qcomp.ExactBelow(10), **settings | chosen)


def saved_by(opt: Any, grads: Callable, size: int, *, steps: int = 5, dtype: type = np.float32) -> tuple:
    """Return the dicts of all ranks, and the parameters, after some steps."""

    def rank_main(comm):
        params = grads(SHAPES, 99, 0, dtype)
        state = opt.init(params, comm, NAMES)
        for step in range(steps):
            params, state = opt.step(params, grads(SHAPES, comm.rank, step, dtype), state, comm)
        return opt.state_dict(state), params

    results = run_local(size, rank_main, timeout=20)
    return [saved for saved, _ in results], results[0][1]


def spread(saved: list[dict], size: int, how: str) -> list[list[dict]]:
    """Return the list that each of the new ranks passes."""
    match how:
        case "all on all":
            return [saved] * size
        case "dealt":
            return [saved[rank::size] for rank in range(size)]
        case "all on the last":
            return [[]] * (size - 1) + [saved[::-1]]
    raise ValueError(how)


def load(opt: Any, passed: list, params: list, *, convert: Callable = list, strict: bool = True) -> list:
    """Return the state of each new rank, or its error."""

    def rank_main(comm):
        try:
            return opt.load_state_dict(passed[comm.rank], convert(params), comm, NAMES, strict=strict)
        except (ValueError, MismatchError) as error:
            return error

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # another test checks the warning
        return run_local(len(passed), rank_main, timeout=20)


def total(saved: list[dict], kind: Callable = np.asarray) -> dict[str, np.ndarray]:
    """Return mean_i e_i + e_s of every compressed tensor in float64, from the dicts of all ranks."""
    sizes = {name: int(np.prod(shape)) for name, shape in zip(NAMES, SHAPES, strict=True)}
    sums: dict[str, np.ndarray] = {}
    for each in saved:
        for key, value in each.items():
            what, _, place = key.partition(".")
            if what == "worker_residual":
                name, start = (
                    (place, 0)
                    if place in sizes
                    else (place.rpartition("@")[0], int(place.rpartition("@")[2]))
                )
                sums.setdefault(name, np.zeros(sizes[name]))
                sums[name][start:][: len(value)] += kind(np.asarray(value, np.float64)) / len(saved)
    for each in saved:
        for key, value in each.items():
            what, _, place = key.partition(".")
            name, _, start = place.rpartition("@")
            if what == "server_residual":
                sums[name][int(start) :][: len(value)] += kind(np.asarray(value, np.float64))
    return sums


def assert_total_is_kept(opt: Any, saved: list[dict], states: list, unit: float) -> None:
    """Sums of n terms in any order are within (n - 1) units of the sum of magnitudes; with the scaling, n + 6 units.

    An element is summed over the old dicts of a rank and over the new ranks, and scaled three or four times.
    """
    new = total([opt.state_dict(state) for state in states])
    old, magnitude = total(saved), total(saved, np.abs)
    assert new.keys() == old.keys()
    for name in old:
        bound = (len(saved) + len(states) + 6) * unit * magnitude[name]
        assert (np.abs(new[name] - old[name]) <= bound).all()
        assert np.abs(old[name]).max() > 1e3 * bound.max()  # the loss of a total would be detected


@pytest.mark.quick_cases(4)
@pytest.mark.parametrize("how", ["all on all", "dealt", "all on the last"])
@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.parametrize(("old", "new"), WORLDS)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_the_total_residual_is_kept(grads, old, new, topology, how, dtype):  # noqa: PLR0917
    opt, unit = sgd(averaging=qcomp.Averaging(topology=topology)), np.finfo(dtype).eps / 2
    saved, params = saved_by(opt, grads, old, dtype=dtype)
    states = load(opt, spread(saved, new, how), params)
    assert_total_is_kept(opt, saved, states, unit)
    if old != new and topology != "ring":
        for state in states:
            assert all(not np.any(residual) for residual in state.exchange.server)
            for own, first in zip(state.exchange.worker, states[0].exchange.worker, strict=True):
                assert own.tobytes() == first.tobytes()
    for rank, state in enumerate(states):
        assert (state.step, state.stage, state.rank, state.size) == (5, "compressed", rank, new)


@pytest.mark.parametrize("how", ["all on all", "dealt", "all on the last"])
def test_in_a_world_of_the_same_size_nothing_changes(grads, how):
    """Bit for bit, whichever rank has the dicts, and without a warning."""
    opt = one_bit()
    saved, params = saved_by(opt, grads, 3)

    def rank_main(comm):
        passed = spread(saved, 3, how)[comm.rank]
        return opt.state_dict(opt.load_state_dict(passed, params, comm, NAMES))

    for rank, again in enumerate(run_local(3, rank_main, timeout=20)):
        assert again.keys() == saved[rank].keys()
        for key, value in saved[rank].items():
            assert np.asarray(again[key]).tobytes() == np.asarray(value).tobytes(), key


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize(("old", "new"), [(3, 2), (1, 4)])
@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_the_sum_identity_holds_across_the_change(grads, old, new, topology):
    """x_0 - x_T = rate (sum of the exact means - E_T), although the world changed in between."""
    opt = sgd(averaging=qcomp.Averaging(topology=topology))
    saved, params = saved_by(opt, grads, old, dtype=np.float64)
    states = load(opt, spread(saved, new, "dealt"), params)

    def rank_main(comm):
        own, state = params, states[comm.rank]
        for step in range(5, 9):
            own, state = opt.step(own, grads(SHAPES, comm.rank, step, np.float64), state, comm)
        return own, opt.state_dict(state)

    results = run_local(new, rank_main, timeout=20)
    owed = total([saved for _, saved in results])
    first = grads(SHAPES, 99, 0, np.float64)
    sums = [np.zeros(shape) for shape in SHAPES]
    for step in range(9):
        ranks = old if step < 5 else new
        for rank in range(ranks):
            drawn = grads(SHAPES, rank, step, np.float64)
            sums = [s + g / ranks for s, g in zip(sums, drawn, strict=True)]
    for name, x0, s, x in zip(NAMES, first, sums, results[0][0], strict=True):
        moved = (x0 - x).reshape(-1) / 0.125
        # Some dozens of roundings of values up to 100; what is owed is far larger.
        assert np.abs(moved - (s.reshape(-1) - owed[name])).max() < 1e-12
        assert np.abs(owed[name]).max() > 1e-2


@pytest.mark.parametrize(("old", "new"), [(3, 2), (2, 3)])
def test_adam_resumes_with_its_momentum_and_variance(grads, old, new):
    """m' + E' = b1 m + (1 - b1) mean(g) + E, also in the first step of the new world."""
    opt = one_bit()
    saved, params = saved_by(opt, grads, old, dtype=np.float64)
    states = load(opt, spread(saved, new, "all on all"), params)
    for kind in ("momentum", "variance"):
        for name, state in [(name, state) for name in NAMES for state in states]:
            again = opt.state_dict(state)[f"{kind}.{name}"]
            assert again.tobytes() == saved[0][f"{kind}.{name}"].tobytes()

    def rank_main(comm):
        _, state = opt.step(params, grads(SHAPES, comm.rank, 5, np.float64), states[comm.rank], comm)
        return opt.state_dict(state)

    after = run_local(new, rank_main, timeout=20)
    mean = [
        np.mean(parts, axis=0)
        for parts in zip(*(grads(SHAPES, r, 5, np.float64) for r in range(new)), strict=True)
    ]
    before, owed = total(saved), total(after)
    name = "layer.0/weight"  # the only compressed tensor
    assert set(owed) == {name}
    left = after[0][f"momentum.{name}"].reshape(-1) + owed[name]
    right = 0.9 * saved[0][f"momentum.{name}"].reshape(-1) + 0.1 * mean[1].reshape(-1) + before[name]
    assert np.abs(left - right).max() < 1e-14
    assert np.abs(before[name]).max() > 1e-3


def test_broken_rules_would_be_detected(grads):
    """The mean of the workers alone, or the old rank's own residual, is off by more than the tests above allow."""
    opt = sgd()
    saved, params = saved_by(opt, grads, 3)
    (state,) = load(opt, [saved], params)

    def broken(change: Callable) -> list:
        kept = {key: x for key, x in opt.state_dict(state).items() if key != "digests"}
        for key in kept:
            if key.startswith("worker_residual"):
                kept[key] = change(key)
        return [opt.load_state_dict(kept, params, qcomp.comm.LocalCommunicator.alone(), NAMES)]

    mean = broken(lambda key: np.mean([each[key] for each in saved], axis=0, dtype=np.float32))
    own = broken(lambda key: saved[0][key])
    for states in (mean, own):
        with pytest.raises(AssertionError):
            assert_total_is_kept(opt, saved, states, 2.0**-24)


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize(
    ("old", "new"),
    [("two_phase", "all_gather"), ("all_gather", "two_phase"), ("ring", "two_phase"), ("all_gather", "ring")],
)
@pytest.mark.parametrize("size", [1, 2, 3])
def test_other_chunks_in_a_world_of_the_same_size(grads, old, new, size):
    """With another topology or other buckets the residuals move, but their total is kept."""
    saved, params = saved_by(sgd(averaging=qcomp.Averaging(topology=old)), grads, 2)
    for opt in (
        sgd(averaging=qcomp.Averaging(topology=new)),
        sgd(averaging=qcomp.Averaging(topology=new), compressor=qcomp.ScaledSign(16)),
    ):
        assert_total_is_kept(opt, saved, load(opt, [saved] * size, params, strict=False), 2.0**-24)


@pytest.mark.parametrize("steps", [0, 1])
def test_without_residuals(grads, steps):
    """In the warm-up, and without feedback."""
    for opt in (
        one_bit(),
        sgd(averaging=qcomp.Averaging(feedback=False), compressor=qcomp.QSGD(7, 16), momentum=0.9),
    ):
        saved, params = saved_by(opt, grads, 3, steps=steps)
        for state in load(opt, spread(saved, 2, "dealt"), params):
            assert state.step == steps
            assert not state.exchange.worker
            assert [m.tobytes() for m in state.momentum] == [
                saved[0][f"momentum.{n}"].tobytes() for n in NAMES
            ]


def test_resuming_from_no_residuals_and_to_none(grads):
    """If nothing was owed, residuals start at zero; without feedback, what is owed is refused."""
    plain, fed_back = (
        sgd(averaging=qcomp.Averaging(feedback=feedback), compressor=qcomp.MinMaxUInt8(8))
        for feedback in (False, True)
    )
    saved, params = saved_by(plain, grads, 2)
    for state in load(fed_back, [saved] * 3, params):
        assert not any(np.any(r) for r in (*state.exchange.worker, *state.exchange.server))
    saved, params = saved_by(fed_back, grads, 2)
    for error in load(plain, [saved] * 3, params):
        assert "this optimizer keeps none, because the ranks share one node or feedback is False" in str(
            error
        )


def hierarchical(hosts: list[str], work: Callable) -> list:
    return run_local(len(hosts), work, hosts=hosts, timeout=20)


@pytest.mark.parametrize(
    ("before", "after"), [("aab", "ab"), ("aabb", "abab"), ("abbcc", "aabb"), ("ab", "aaabb")]
)
def test_hierarchies(grads, before, after):
    """The ranks of a node share its residuals; they resume with other nodes, and in two phases."""

    def opt(topology):
        return sgd(averaging=qcomp.Averaging(topology=topology))

    def train(comm):
        params = grads(SHAPES, 99, 0, np.float64)
        state = opt("hierarchical").init(params, comm, NAMES)
        for step in range(3):
            drawn = grads(SHAPES, comm.rank, step, np.float64)
            params, state = opt("hierarchical").step(params, drawn, state, comm)
        return opt("hierarchical").state_dict(state), params

    results = hierarchical(list(before), train)
    saved, params = [s for s, _ in results], results[0][1]
    first, sums = grads(SHAPES, 99, 0, np.float64), [np.zeros(shape) for shape in SHAPES]
    for rank, step in np.ndindex(len(before), 3):
        drawn = grads(SHAPES, rank, step, np.float64)
        sums = [s + g / len(before) for s, g in zip(sums, drawn, strict=True)]
    # What is owed, by the sum identity: rate (sums - owed) = x_0 - x.
    owed = [s - (x0 - x) / 0.125 for s, x0, x in zip(sums, first, params, strict=True)]

    def resume(comm, topology="hierarchical"):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            state = opt(topology).load_state_dict(saved, params, comm, NAMES)
        x, state = opt(topology).step(params, grads(SHAPES, comm.rank, 3, np.float64), state, comm)
        return x, opt(topology).state_dict(state), state.exchange

    two_phase = run_local(len(after), lambda comm: resume(comm, "two_phase"), timeout=20)
    rest = total([s for _, s, _ in two_phase])
    mean = [
        np.mean(p, axis=0)
        for p in zip(*(grads(SHAPES, r, 3, np.float64) for r in range(len(after))), strict=True)
    ]
    for name, x0, x, g, e in zip(NAMES, params, two_phase[0][0], mean, owed, strict=True):
        step = (x0 - x).reshape(-1) / 0.125
        assert np.abs(step + rest[name] - (g + e).reshape(-1)).max() < 1e-12
        assert np.abs(e).max() > 1e-2
    # The hierarchy's dicts resume in two phases once more, to show what it owes.
    again = hierarchical(list(after), resume)
    states = load(opt("two_phase"), [[s for _, s, _ in again]], params)
    rest = total([opt("two_phase").state_dict(state) for state in states])
    for name, x0, x, g, e in zip(NAMES, params, again[0][0], mean, owed, strict=True):
        step = (x0 - x).reshape(-1) / 0.125
        assert np.abs(step + rest[name] - (g + e).reshape(-1)).max() < 1e-12


def test_a_change_of_the_number_of_ranks_warns(grads):
    opt = sgd()
    saved, params = saved_by(opt, grads, 2)
    with pytest.warns(UserWarning, match="a state of 2 ranks resumes with 3") as caught:
        run_local(3, lambda comm: opt.load_state_dict(saved, params, comm, NAMES), timeout=20)
    assert {warning.filename for warning in caught} == {__file__}


def test_every_library(library, grads):
    opt = one_bit()
    saved, params = saved_by(opt, grads, 2)
    for how in ("all on all", "all on the last"):
        states = load(
            opt, spread(saved, 3, how), params, convert=lambda arrays: [library.array(a) for a in arrays]
        )
        as_numpy = [{k: library.numpy(v) for k, v in opt.state_dict(state).items()} for state in states]
        owed, expected, magnitude = total(as_numpy), total(saved), total(saved, np.abs)
        for name in expected:
            assert (np.abs(owed[name] - expected[name]) <= 10 * 2.0**-24 * magnitude[name]).all()
        kind = type(library.array([0.0]))
        assert all(isinstance(a, kind) for state in states for a in (*state.momentum, *state.exchange.worker))


@pytest.mark.parametrize(("old", "new"), [(2, 3), (3, 1)])
def test_zero_one_adam_while_its_ranks_are_apart(grads, old, new):
    """Momenta and pending sums become their means, so the next synchronisation averages what all ranks had."""
    opt = qcomp.ZeroOneAdam(
        learning_rate=0.1,
        betas=BETAS,
        exact=None,
        compressor=qcomp.ScaledSign(8),
        variance_steps=qcomp.DoublingIntervals(1),
        sync_steps=qcomp.LocalSteps(1, 4),
        freeze=2,
    )
    steps = next(n for n in range(3, 20) if not opt.sync_steps(n - 2) and not opt.sync_steps(n - 1))
    saved, params = saved_by(opt, grads, old, steps=steps)
    assert {each["stage"] for each in saved} == {"local"}
    states = load(opt, spread(saved, new, "dealt"), params)
    for name, index in zip(NAMES, range(len(NAMES)), strict=True):
        assert saved[0][f"pending.{name}"].tobytes() != saved[1][f"pending.{name}"].tobytes()
        means = {
            kind: np.mean([each[f"{kind}.{name}"] for each in saved], axis=0)
            for kind in ("pending", "momentum")
        }
        for state in states:
            assert np.abs(state.arrays["pending"][index] - means["pending"]).max() < 1e-6
            assert np.abs(state.momentum[index] - means["momentum"]).max() < 1e-6
            assert state.arrays["anchor"][index].tobytes() == saved[0][f"anchor.{name}"].tobytes()
    assert_total_is_kept(opt, saved, states, 2.0**-24)

    def rank_main(comm):
        return opt.synchronize(params, states[comm.rank], comm)[0]

    results = run_local(new, rank_main, timeout=20)
    assert len({b"".join(p.tobytes() for p in result) for result in results}) == 1


class OwnSums(qcomp.CompressedSGD):
    """An optimizer with one kind of array that differs by rank, and one that is the same on all ranks."""

    def own_kinds(self, stage):
        return ("gathered",)

    def initial_state(self, params, names, rank, size):
        state = super().initial_state(params, names, rank, size)
        own, common = ([np.zeros_like(p) for p in params] for _ in range(2))
        return state._replace(arrays={"gathered": tuple(own), "common": (*common[:-1], common[-1][:0])})

    def prepare(self, grads, state, *, scale=1.0):
        for own, g in zip(state.arrays["gathered"], grads, strict=True):
            np.add(own, g, out=own)
        return super().prepare(grads, state, scale=scale)


class TestKindsOfAnOptimizer:
    @pytest.mark.parametrize("how", ["all on all", "dealt", "all on the last"])
    def test_arrays_of_single_ranks_become_their_mean(self, grads, how):
        opt = OwnSums(learning_rate=0.1, exact=None, compressor=qcomp.ScaledSign(8))
        saved, params = saved_by(opt, grads, 3)
        means = [np.mean([each[f"gathered.{name}"] for each in saved], axis=0) for name in NAMES]
        assert np.abs(means[0] - saved[0][f"gathered.{NAMES[0]}"]).max() > 0.1
        for state in load(opt, spread(saved, 2, how), params):
            assert state.arrays["common"][-1].shape == (0,)
            for own, mean in zip(state.arrays["gathered"], means, strict=True):
                assert own.shape == mean.shape
                assert np.abs(own - mean).max() < 1e-5

    def test_arrays_that_should_be_the_same_are_compared(self, grads):
        """A kind that is not declared as a rank's own, but differs, is an error; so is one bit of a momentum."""
        opt = OwnSums(learning_rate=0.1, exact=None, compressor=qcomp.ScaledSign(8))
        saved, params = saved_by(opt, grads, 3)
        for key in (f"common.{NAMES[1]}", f"momentum.{NAMES[2]}"):
            other = saved[2][key].copy()
            other.view(np.uint32).reshape(-1)[1] ^= 1
            errors = load(opt, spread([*saved[:2], {**saved[2], key: other}], 2, "dealt"), params)
            assert len({str(error) for error in errors}) == 1
            assert f"the dicts of old ranks 0 and 2 differ in ['{key}']" in str(errors[0])


class TestErrors:
    """All ranks raise the same text, whichever rank causes the error."""

    @staticmethod
    def error(opt: Any, passed: list, params: list) -> str:
        errors = load(opt, passed, params)
        assert {type(error) for error in errors} == {ValueError}
        assert len({str(error) for error in errors}) == 1
        return str(errors[0])

    def test_missing(self, grads):
        saved, params = saved_by(sgd(), grads, 4)
        message = self.error(sgd(), [saved[:1], saved[2:3]], params)
        missing = "no rank passes the dict of old ranks 1 and 3; expected the dicts of all 4 old ranks, since"
        assert message.startswith(missing)
        assert "saved is empty on every rank" in self.error(sgd(), [[], []], params)

    def test_twice(self, grads):
        saved, params = saved_by(sgd(), grads, 2)
        message = self.error(sgd(), [saved, [saved[1], saved[0], saved[1]], []], params)
        assert message == "saved has a dict more than once: rank 1 passes 2 dicts of old rank 1"

    def test_of_another_step_or_world(self, grads):
        saved, params = saved_by(sgd(), grads, 2)
        older, _ = saved_by(sgd(), grads, 2, steps=4)
        message = self.error(sgd(), [saved[:1], older[1:], []], params)
        assert "rank 0 passes the dict of old rank 0 of 2 after step 5, compressed, but rank 1" in message
        other, _ = saved_by(sgd(), grads, 3)
        assert "the dict of old rank 2 of 3" in self.error(sgd(), [[*saved, other[2]]], params)

    def test_of_different_numbers(self, grads):
        saved, params = saved_by(sgd(), grads, 2)
        message = self.error(sgd(), [[saved[0], {**saved[1], "history": [7.0]}]], params)
        assert "old ranks 0 and 1 differ in ['history']" in message

    def test_only_the_skipped_steps_may_differ(self, grads):
        """For an optimizer whose ranks step alone at times; the largest number is kept."""
        saved, params = saved_by(sgd(), grads, 2)
        del saved[1]["digests"]
        for state in load(sgd(), [[saved[0], {**saved[1], "skipped": 7}]] * 3, params):
            assert state.skipped == 7

    def test_of_another_model(self, grads):
        saved, params = saved_by(sgd(momentum=0.9), grads, 2)
        assert "with another model" in self.error(sgd(), [saved] * 3, params)
        assert "was saved by CompressedSGD; this is OneBitAdam" in self.error(one_bit(), [saved] * 3, params)
        wider = [*params[:1], np.zeros((7, 6), np.float32), *params[2:]]
        message = self.error(sgd(momentum=0.9), [saved] * 3, wider)
        assert "momentum.layer.0/weight of shape (7, 5); expected (7, 6)" in message
        doubled = [p.astype(np.float64) for p in params]
        assert "of dtype float32; expected" in self.error(sgd(momentum=0.9), [saved] * 3, doubled)

    @pytest.mark.parametrize("kind", ["worker_residual", "server_residual"])
    def test_with_a_residual_cut_or_left_out(self, grads, kind):
        opt = sgd()
        saved, params = saved_by(opt, grads, 2)
        key = next(key for key in saved[1] if key.startswith(kind))
        for change in ({key: saved[1][key][:-1]}, {}):
            broken = {k: v for k, v in saved[1].items() if k != key} | change
            message = self.error(opt, [[saved[0], broken]] * 3, params)
            assert kind in message
            assert "another model" in message or "elements" in message

    def test_no_dicts_at_all(self, grads):
        saved, params = saved_by(sgd(), grads, 2)
        message = self.error(sgd(), [["a file name"], saved], params)
        assert message == "on rank 0: saved contains a str; expected dicts from state_dict"
        message = self.error(sgd(), [[{**saved[0], "schema": 2}], saved[1:]], params)
        assert message == (
            "on rank 0: the state has schema 2, the format of another release of qcomp; this release reads schema 1"
        )
        message = self.error(sgd(), [saved, None], params)
        assert message == "on rank 1: 'NoneType' object is not iterable"
        message = self.error(sgd(), [[], [{"schema": 1}]], params)
        assert "on rank 1: saved has the keys 'schema', but not 'history', 'rank'" in message

    def test_a_dict_on_one_rank_and_a_list_on_another(self, grads):
        saved, params = saved_by(sgd(), grads, 2)
        for error in load(sgd(), [saved[0], saved], params):
            assert isinstance(error, MismatchError)
            assert "saved is 'a dict' on rank 0, but 'a sequence of dicts' on rank 1" in str(error)
