"""Tensors with one owner each: the assignment to owners, and feedback that loses nothing on either way."""

from dataclasses import dataclass, replace
from math import prod

import numpy as np
import pytest

import qcomp
from qcomp.comm import LocalCommunicator
from qcomp.core.mean.chunks import cut, deal
from qcomp.core.mean.compressed_mean import Terms
from qcomp.core.mean.owned import OwnedMean
from qcomp.core.mean.stages import drive, pipeline
from qcomp.core.numeric.whitening import whitened
from qcomp.testing.inputs import vector
from qcomp.testing.means import draws_of

SHAPES = [(8, 8), (5, 3, 3), (16, 4), (2, 2), (9, 20)]
STEPS = 12


@dataclass(frozen=True)
class Tripled:
    """Updates that are linear in the means, so that sums show what was lost; the momentum is the sum of the means."""

    def cost(self, tensor, shape):
        return prod(shape)

    def sides(self, tensor, shape):
        assert shape == SHAPES[tensor]
        return shape[0], prod(shape[1:])

    def updates(self, means, momenta, tensors, shapes):
        assert len(tensors) == len(shapes)
        assert [m.shape for m in means] == [m.shape for m in momenta] == [(prod(s),) for s in shapes]
        return [3 * mean for mean in means], [m + mean for m, mean in zip(momenta, means, strict=True)]


def mean_of(compressor, updates, repaid=1.0):
    return OwnedMean(compressor, updates=updates, rule=Tripled(), repaid=repaid)


def vectors(rank, step):
    rng = np.random.default_rng([rank, step])
    return [rng.standard_normal(shape) for shape in SHAPES]


def run(mean, size, lockstep, *, steps=STEPS):
    """Return the states after some steps, the sums of exact means and of updates, all in float64."""
    states = lockstep([mean.init_stages(vectors(0, 0), rank=rank, size=size) for rank in range(size)])
    exact = [np.zeros(shape) for shape in SHAPES]
    decoded = [np.zeros(shape) for shape in SHAPES]
    for step in range(steps):
        values = [vectors(rank, step) for rank in range(size)]
        key = qcomp.Key(seed=3, step=step)
        results = lockstep([mean.stages(v, s, key=key) for v, s in zip(values, states, strict=True)])
        states = [state for _, state in results]
        assert len({b"".join(u.tobytes() for u in updates) for updates, _ in results}) == 1
        for i, update in enumerate(results[0][0]):
            exact[i] += sum(v[i] for v in values) / size
            decoded[i] += update
    return states, exact, decoded


def owned(mean, states):
    """Return what the owner of each tensor holds: the momentum and the residual."""
    found = {}
    for state in states:
        (_, mine) = mean.layout(state.shapes, rank=state.rank, size=state.size).residuals
        count = len(mine)
        assert len(state.server) == 2 * count
        for place, segment in enumerate(mine):
            assert (segment.start, segment.size) == (0, prod(SHAPES[segment.tensor]))
            assert segment.tensor not in found
            found[segment.tensor] = state.server[place], state.server[count + place]
    assert sorted(found) == list(range(len(SHAPES)))
    return found


PAIRS = [
    (qcomp.QSGD(7, 16), qcomp.ScaledSign(16, "rms")),
    (qcomp.ScaledSign(16), qcomp.QSGD(7, 16, coding="elias")),
    (qcomp.QSGD(7, 16, coding="range"), qcomp.TopK(2, 16)),
    (qcomp.LloydMax(2, 16), qcomp.LloydMax(3, 8)),
    (qcomp.OneBitSGD(), qcomp.Identity()),
    (qcomp.Identity(), qcomp.OneBitSGD()),
    (qcomp.Identity(), qcomp.Identity()),
]


DRAWN = (qcomp.QSGD(7, 16), qcomp.QSGD(7, 8))
"""Both draw, with buckets of their own."""


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    ("size", "repaid"),
    [(1, 1.0), (3, 0.5), (7, 1.0), *(pytest.param(n, 0.3, marks=pytest.mark.exhaustive) for n in (1, 7))],
)
@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: f"{pair[0].spec} {pair[1].spec}")
def test_feedback_loses_nothing_on_either_way(lockstep, size, pair, repaid):
    """Sum of the means = sum of the exact means - mean_i e_i; sum of the updates = 3 sum of the means - e."""
    mean = mean_of(*pair, repaid)
    states, exact, decoded = run(mean, size, lockstep)
    lossy = not pair[0].traits.lossless
    for i, (total, residual) in owned(mean, states).items():
        owed = sum(s.worker[i] for s in states) / size / repaid if lossy else np.zeros_like(total)
        np.testing.assert_allclose(total, exact[i].ravel() - owed, rtol=0, atol=1e-12)
        np.testing.assert_allclose(decoded[i].ravel(), 3 * total - residual, rtol=0, atol=1e-12)
        assert np.any(owed) == lossy
        assert np.any(residual) != pair[1].traits.lossless
    assert all(bool(s.worker) == lossy for s in states)


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: f"{pair[0].spec} {pair[1].spec}")
def test_feedback_loses_nothing_of_whitened_gradients(lockstep, size, pair):
    """For W x: sum of the W means = sum of the exact means of W x - mean_i e_i."""
    mean = mean_of(*pair)
    rng = np.random.default_rng(0)
    rows = [min(shape[0], prod(shape[1:])) for shape in SHAPES]
    whiteners = tuple(np.eye(n) + 0.2 * rng.standard_normal((n, n)) for n in rows)
    states = lockstep([mean.init_stages(vectors(0, 0), rank=rank, size=size) for rank in range(size)])
    exact = [np.zeros(shape) for shape in SHAPES]
    for step in range(STEPS):
        values = [vectors(rank, step) for rank in range(size)]
        terms = Terms(qcomp.Key(seed=3, step=step), whiteners=whiteners)
        begun = [mean.begin(v, s, terms) for v, s in zip(values, states, strict=True)]
        results = lockstep([pipeline(one.rounds) for one in begun])
        states = [one.finish(found)[1] for one, found in zip(begun, results, strict=True)]
        for i in range(len(SHAPES)):
            exact[i] += sum(v[i] for v in values) / size
    lossy = not pair[0].traits.lossless
    for i, (total, _) in owned(mean, states).items():
        sides = Tripled().sides(i, SHAPES[i])
        owed = sum(s.worker[i] for s in states) / size if lossy else np.zeros_like(total)
        expected = whitened(exact[i].ravel(), whiteners[i], sides) - owed
        np.testing.assert_allclose(whitened(total, whiteners[i], sides), expected, rtol=0, atol=1e-11)
        assert np.any(owed) == lossy


def test_every_draw_is_used_once(lockstep):
    """No two ranks, ways or buckets share draws."""
    mean = mean_of(*DRAWN)
    values = [vectors(rank, 0) for rank in range(3)]
    states = lockstep([mean.init_stages(v, rank=rank, size=3) for rank, v in enumerate(values)])
    seen = draws_of(mean, values, states)
    buckets = [sum(-(-prod(shape) // size) for shape in SHAPES) for size in (16, 8)]
    assert len(seen) == len(set(seen)) == 3 * buckets[0] + buckets[1]


GROUPS = [(4, 0), (2,), (3, 1)]


@dataclass(frozen=True)
class OfGroup(Tripled):
    """The rule for some of the tensors."""

    group: tuple[int, ...] = ()

    def sides(self, tensor, shape):
        return super().sides(self.group[tensor], shape)


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("size", [1, 3, 7])
@pytest.mark.parametrize("pair", [DRAWN, *PAIRS], ids=lambda pair: f"{pair[0].spec} {pair[1].spec}")
def test_groups_of_tensors_are_exchanged_as_one(lockstep, size, pair):
    """Owners, draws, momenta and residuals are those of all tensors together."""
    mean = mean_of(*pair, 0.5)
    whole = [mean.zeros(vectors(0, 0), rank=rank, size=size) for rank in range(size)]
    single = [mean.split(state, len(SHAPES)) for state in whole]
    assert all(mean.join(each) == state for each, state in zip(single, whole, strict=True))
    places = mean.places(SHAPES, size)
    assert len({place.owner for place in places}) == min(size, len(SHAPES))
    of_group = [
        replace(mean, rule=OfGroup(group)).numbered(tuple(places[t] for t in group)) for group in GROUPS
    ]
    for step in range(3):
        key, values = qcomp.Key(seed=3, step=step), [vectors(rank, step) for rank in range(size)]
        expected = lockstep([mean.stages(x, s, key=key) for x, s in zip(values, whole, strict=True)])
        whole = [state for _, state in expected]
        for group, part in zip(GROUPS, of_group, strict=True):
            joined = [part.join([of_rank[t] for t in group]) for of_rank in single]
            given = [[of_rank[t] for t in group] for of_rank in values]
            results = lockstep([part.stages(x, s, key=key) for x, s in zip(given, joined, strict=True)])
            for rank, (updates, state) in enumerate(results):
                for t, update, new in zip(group, updates, part.split(state, len(group)), strict=True):
                    np.testing.assert_array_equal(update, expected[rank][0][t])
                    single[rank][t] = new
    for each, state in zip(single, whole, strict=True):
        joined = mean.join(each)
        for kept, other in ((joined.worker, state.worker), (joined.server, state.server)):
            assert [x.tobytes() for x in kept] == [x.tobytes() for x in other]


@pytest.mark.parametrize("count", [1, 2, 3, 8])
def test_tensors_are_dealt_whole_and_evenly(count):
    rng = np.random.default_rng(count)
    for _ in range(20):
        sizes = rng.integers(1, 60, size=rng.integers(1, 12)).tolist()
        costs = [int(s) ** 2 for s in sizes]
        chunks = deal(sizes, [8] * len(sizes), count, costs=costs)
        (whole,) = cut(sizes, 8, 1)
        assert sorted(s for chunk in chunks for s in chunk) == list(
            whole
        )  # with the draws that they have in one chunk
        assert all(list(chunk) == sorted(chunk) for chunk in chunks)
        spent = [sum(costs[s.tensor] for s in chunk) for chunk in chunks]
        assert max(spent) <= sum(costs) / count + max(costs)
        assert max(spent) - min(spent) <= max(costs)


def test_the_state_of_another_mean_is_refused():
    x = vectors(0, 0)
    plain = qcomp.CompressedMean(qcomp.ScaledSign(16))
    mean = mean_of(qcomp.ScaledSign(16), qcomp.Identity())
    with pytest.raises(
        ValueError,
        match=r"state has server residuals of the shapes \[.*\]; expected \[.*The state belongs to another mean",
    ):
        next(mean.stages(x, plain.zeros(x, rank=0, size=1)))


@pytest.mark.parametrize("repaid", [0, -0.5, 1.5, float("nan")])
def test_a_repaid_fraction_out_of_range_is_refused(repaid):
    with pytest.raises(ValueError, match=f"repaid is {repaid!r}; expected a number above 0 and at most 1"):
        mean_of(qcomp.ScaledSign(16), qcomp.Identity(), repaid)


@pytest.mark.parametrize("repaid", [1.0, 0.5])
def test_a_worker_repays_a_part_of_its_residual(lockstep, repaid):
    """By hand: r' = (1 - repaid) r + repaid (x + r - C(x + r)); the old residuals are not overwritten."""
    c = qcomp.LloydMax(2, 16)
    mean = mean_of(c, qcomp.Identity(), repaid)
    (state,) = lockstep([mean.init_stages(vectors(0, 0), rank=0, size=1)])
    expected = [np.zeros(prod(shape)) for shape in SHAPES]
    for step in range(4):
        x, before = vectors(0, step), [r.copy() for r in state.worker]
        old = state
        ((_, state),) = lockstep([mean.stages(x, state, key=qcomp.Key(step=step))])
        assert [r.tobytes() for r in old.worker] == [r.tobytes() for r in before]
        for i, value in enumerate(x):
            p = value.ravel() + expected[i]
            lost = p - c.decompress(c.compress(p), like=p)
            expected[i] = (1 - repaid) * expected[i] + repaid * lost
        for found, right in zip(state.worker, expected, strict=True):
            np.testing.assert_allclose(found, right, rtol=0, atol=1e-14)


@dataclass(frozen=True)
class Momentum(Tripled):
    """The update is the momentum, with or without Nesterov's look-ahead."""

    nesterov: bool

    def updates(self, means, momenta, tensors, shapes):
        new = [0.95 * m + 0.05 * mean for m, mean in zip(momenta, means, strict=True)]
        ahead = [0.95 * m + 0.05 * mean for m, mean in zip(new, means, strict=True)]
        return (ahead if self.nesterov else new), new


@pytest.mark.slow
@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(("nesterov", "ratio"), [(True, (0.6, 0.8)), (False, (1.2, 2.0))])
def test_nesterov_updates_have_less_noise_if_half_is_repaid(lockstep, nesterov, ratio):
    """Nesterov weighs the last mean 1.95 times, so repaying in two halves adds less noise than repaying at once."""
    found = {}
    for repaid in (0.5, 1.0):
        pair = [
            OwnedMean(c, updates=qcomp.Identity(), rule=Momentum(nesterov), repaid=repaid)
            for c in (qcomp.LloydMax(2, 16), qcomp.Identity())
        ]
        states = [lockstep([mean.init_stages(vectors(0, 0), rank=0, size=1)]) for mean in pair]
        noise = 0.0
        for step in range(60):
            updates = []
            for i, mean in enumerate(pair):
                stages = mean.stages(vectors(0, step), states[i][0], key=qcomp.Key(step=step))
                ((update, states[i][0]),) = lockstep([stages])
                updates.append(update)
            if step >= 10:
                noise += sum(float(np.sum((a - b) ** 2)) for a, b in zip(*updates, strict=True))
        found[repaid] = noise
    assert ratio[0] < found[0.5] / found[1.0] < ratio[1]


def test_both_compressors_must_be_contractions():
    wild = qcomp.QSGD(levels=1, bucket_size=512)
    for pair in ((wild, qcomp.Identity()), (qcomp.Identity(), wild)):
        with pytest.raises(ValueError, match="feedback=True around qsgd:levels=1"):
            mean_of(*pair)


class Silent(LocalCommunicator):
    """The only rank of a world, which must not exchange anything."""

    def _exchange(self, *_):
        raise AssertionError("something was sent")


class TestAlone:
    """Without compression, a lone rank makes the updates that an exchange would give it, without exchanging."""

    mean = mean_of(qcomp.Identity(), qcomp.Identity())

    def states(self, values, size):
        return [self.mean.zeros(values, rank=rank, size=size) for rank in range(size)]

    @pytest.mark.parametrize("family", ["gaussian", "subnormal"])
    def test_the_updates_are_those_of_two_ranks_with_the_same_gradients(self, library, lockstep, family):
        values = [
            library.seal(library.array(vector(family, prod(shape), 3).reshape(shape))) for shape in SHAPES
        ]
        (state,) = self.states(values, 1)
        own, two = state, self.states(values, 2)
        for _ in range(2):
            updates, own = drive(self.mean.stages(values, own, key=qcomp.Key()), Silent.alone())
            results = lockstep([self.mean.stages(values, s, key=qcomp.Key()) for s in two])
            two = [s for _, s in results]
        for one, other in zip(updates, results[0][0], strict=True):
            assert library.numpy(one).tobytes() == library.numpy(other).tobytes()
        assert own.worker == ()
        momenta = owned(self.mean, two)
        for place, (momentum, residual) in sorted(momenta.items()):
            assert library.numpy(own.server[place]).tobytes() == library.numpy(momentum).tobytes()
            assert not library.numpy(residual).any()
            assert not library.numpy(own.server[len(SHAPES) + place]).any()

    @pytest.mark.parametrize("value", [0.0, -0.0, 2.0**-127, -(2.0**-149)])
    @pytest.mark.parametrize("kernels", ["pure", "numba"])
    def test_gradients_stay_as_they_are_and_are_not_shared(self, kernels, value):
        """Values in range are not copied; values to be flushed are flushed in a copy."""
        values = [vector("gaussian", prod(shape), 3).reshape(shape) for shape in SHAPES]
        for x in values:
            x.flat[x.size // 2] = value
        kept = [x.copy() for x in values]
        with qcomp.backends.use(kernels):
            (state,) = self.states(values, 1)
            (_, after) = drive(self.mean.stages(values, state, key=qcomp.Key()), Silent.alone())
            updates, after = drive(self.mean.stages(values, after, key=qcomp.Key()), Silent.alone())
        for x, before in zip(values, kept, strict=True):
            assert x.tobytes() == before.tobytes()
            assert not any(np.shares_memory(x, made) for made in (*updates, *after.server))

    def test_empty_tensors_stay_empty(self):
        values = [np.zeros((0, 3)), np.ones((2, 4)), np.zeros((3, 0))]
        for some in (values, values[:1]):
            (state,) = self.states(some, 1)
            updates, state = drive(self.mean.stages(some, state, key=qcomp.Key()), LocalCommunicator.alone())
            assert [x.shape for x in updates] == [x.shape for x in some]
            assert all((x == 3).all() for x in updates)

    def test_values_that_an_exchange_refuses_are_refused_and_change_nothing(self):
        values = vectors(0, 0)
        (state,) = self.states(values, 1)
        values[2][3, 1] = np.nan
        with pytest.raises(qcomp.NonFiniteError, match="a value on rank 0 is not finite"):
            drive(self.mean.stages(values, state, key=qcomp.Key()), Silent.alone())
        assert not any(x.any() for x in state.server)
