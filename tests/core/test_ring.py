"""The mean around a ring: N roundings, messages to one neighbour only, and the order of its sums."""

from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

import qcomp
from qcomp import CompressedMean, Key, NonFiniteError
from qcomp.comm import run_local
from qcomp.core.mean.codec import Codec, unsealed
from qcomp.core.mean.framing import seal
from qcomp.core.mean.stages import AllToAll
from qcomp.core.mean.topologies.ring import _Share
from qcomp.core.numeric.random import replace_draws
from tests.core.worlds import (
    SHAPES,
    SPECS,
    average,
    bits,
    draws_of,
    inputs,
    owed,
    require_sum_identity,
    start,
)

ELEMENTS = 104
SIZES = [1, 2, 3, 4, 5]
sizes = pytest.mark.parametrize("size", SIZES)


def around(c: qcomp.Compressor, **options: Any) -> CompressedMean:
    return CompressedMean(c, topology="ring", **options)


SIGN = around(qcomp.ScaledSign(bucket_size=16))


class TestMean:
    @sizes
    def test_without_loss_adds_in_the_order_of_the_ring(self, size):
        """To the last bit: the sum starts with the owner's right neighbour and ends with the owner of the chunk."""
        mean = around(qcomp.Identity())
        values = [inputs(rank, 0, shapes=[(23,)])[0] for rank in range(size)]
        got, _ = average(mean, values, start(mean, values[:1], size))
        for owner, chunk in enumerate(mean.layout([values[0].shape], rank=0, size=size).chunks):
            for part in chunk:
                total = np.float32(0)
                for hop in range(size):
                    total += values[(owner + 1 + hop) % size][part.start : part.stop]
                assert got[part.start : part.stop].tobytes() == (total / np.float32(size)).tobytes()

    @pytest.mark.parametrize("spec", SPECS[:1] + SPECS[2:])
    def test_with_one_rank_it_rounds_once(self, spec):
        c, x = qcomp.compressor(spec), inputs(0, 0)
        got, expected = (
            average(mean, [x], start(mean, x, 1)).means
            for mean in (around(c), CompressedMean(c, topology="all_gather"))
        )
        assert bits(got) == bits(expected)

    def test_with_two_ranks_it_is_two_phases_with_the_own_part_kept_exact(self):
        """Bit for bit, if compressing that part loses nothing."""
        signs = np.sign(np.random.default_rng(0).standard_normal(64)).astype(np.float32)
        values = [inputs(rank, 0, shapes=[(64,)])[0] for rank in range(2)]
        for rank in range(2):
            values[rank][32 * rank : 32 * rank + 32] = signs[:32]
        results = {}
        for topology in ("ring", "two_phase"):
            mean = CompressedMean(qcomp.ScaledSign(bucket_size=16), topology=topology)
            results[topology] = average(mean, values, start(mean, values[:1], 2)).means
        assert results["ring"].tobytes() == results["two_phase"].tobytes()
        values = [inputs(rank, 0, shapes=[(64,)])[0] for rank in range(2)]
        two_phase = CompressedMean(qcomp.ScaledSign(bucket_size=16))
        ring = average(SIGN, values, start(SIGN, values[:1], 2)).means
        other = average(two_phase, values, start(two_phase, values[:1], 2)).means
        assert ring.tobytes() != other.tobytes()


def requantising(self: Any, sealed: Any, owner: int) -> AllToAll:
    """Break the second half: each rank compresses anew what it passes on."""
    self.sent = getattr(self, "sent", 0) + 1
    if self.sent >= self.size and owner != self.rank:
        frame = self.layout.frames[owner]
        message, _ = unsealed(self.codec, sealed, frame, self._left, self.size)
        decoded = self.codec.decode(self.codec.open_from(self._left, message, frame))
        values = [v * np.float32(1.25) for v in decoded]
        again = Codec(values, sealed).encode([frame.as_tensors], values, (), self.call.key, donate=False)
        sealed = seal(again.messages[0], (), self.size)
    return to_the_right(self, sealed, owner)


to_the_right = _Share._to_the_right


class TestExchanges:
    def test_a_ring_that_requantises_what_it_passes_on_is_caught(self, monkeypatch):
        mean = around(qcomp.QSGD(levels=7, bucket_size=16))
        values = [inputs(rank, 0) for rank in range(3)]
        states = start(mean, values[0], 3)
        average(mean, values, states, Key())
        monkeypatch.setattr(_Share, "_to_the_right", requantising)
        with pytest.raises(AssertionError):
            average(mean, values, states, Key())

    @sizes
    def test_each_rank_compresses_n_times_and_sends_to_the_right(self, lockstep, monkeypatch, size):
        calls, encode = [], Codec.encode

        def counted(self, *args, **options):
            calls.append(args)
            return encode(self, *args, **options)

        def looked_at(stages, rank):
            request, exchanges = next(stages, None), 0
            while request is not None:
                exchanges += 1
                assert isinstance(request, AllToAll)
                right, left = (rank + 1) % size, (rank - 1) % size
                assert [r for r, b in enumerate(request.send) if b.shape[0]] == [right]
                assert [r for r, n in enumerate(request.receive) if n] == [left]
                arrived = yield request
                try:
                    request = stages.send(arrived)
                except StopIteration:
                    break
            assert exchanges == 2 * (size - 1)

        monkeypatch.setattr(Codec, "encode", counted)
        values = [inputs(rank, 0) for rank in range(size)]
        states = start(SIGN, values[0], size)
        lockstep([looked_at(SIGN.stages(values[r], states[r]), r) for r in range(size)])
        assert len(calls) == size * size

    @sizes
    @pytest.mark.parametrize("spec", ["sign:bucket_size=16", "qsgd:levels=20,bucket_size=16"])
    def test_bytes_are_what_the_layout_predicts(self, size, spec):
        """A message holds the payload of each segment, the verdict and a flag for each rank, each padded to 8 bytes."""
        c = qcomp.compressor(spec)
        mean, tensors = around(c), inputs(0, 0)

        def rank_main(comm):
            state, before = mean.init(tensors, comm), comm.bytes_sent
            before = comm.bytes_sent
            mean(inputs(comm.rank, 0), state, comm, key=Key())
            return comm.bytes_sent - before

        def padded(n):
            return -(-n // 8) * 8

        messages = [
            sum(padded(c.payload_spec(s.size).nbytes) for s in chunk) + 8 + padded(size)
            for chunk in mean.layout([t.shape for t in tensors], rank=0, size=size).chunks
        ]
        # Of sums, a rank sends all but its own; of means, all but its right neighbour's.
        expected = [2 * sum(messages) - messages[r] - messages[(r + 1) % size] for r in range(size)]
        assert run_local(size, rank_main) == (expected if size > 1 else [0])


class TestSumIdentity:
    def test_counting_residuals_of_sums_like_those_of_means_is_caught(self, monkeypatch):
        """Residuals of sums count as an Nth part; the owner of a chunk has none, but counts as one of the N."""

        def of_holders(mean, states, tensors):
            fewer = [state._replace(worker=tuple(r * (3 / 2) for r in state.worker)) for state in states]
            return owed(mean, fewer, tensors)

        require_sum_identity(SIGN, 3)
        with pytest.raises(AssertionError):
            require_sum_identity(SIGN, 3, owes=of_holders)


class TestState:
    @sizes
    def test_residuals_add_up_to_one_vector_per_rank(self, size):
        for state in start(SIGN, inputs(0, 0), size):
            worker, server = SIGN.layout(SHAPES, rank=state.rank, size=size).residuals
            assert [r.shape for r in (*state.worker, *state.server)] == [
                (s.size,) for s in (*worker, *server)
            ]
            covered = sorted((s.tensor, s.start, s.stop) for s in (*worker, *server) if s.size)
            assert sum(stop - start for _, start, stop in covered) == ELEMENTS
            assert server == SIGN.layout(SHAPES, rank=0, size=size).chunks[state.rank]
            assert {s.tensor for s in worker} == set(range(len(SHAPES)))
            assert state.topology == "ring"

    def test_of_other_topologies_is_an_error_of_checkpoints(self):
        """A rank's own dict fits one topology; a list of all dicts fits any (see the tests of elastic checkpoints)."""
        comm, x = qcomp.comm.LocalCommunicator.alone(), np.ones(40, dtype=np.float32)
        settings = {"learning_rate": 0.1, "compressor": qcomp.ScaledSign(8), "exact": None}
        ring, other = (
            qcomp.CompressedSGD(**settings, averaging=qcomp.Averaging(topology=t))
            for t in ("ring", "two_phase")
        )
        saved = ring.state_dict(ring.init(x, comm))
        with pytest.raises(ValueError, match=r"worker_residual.0 of shape \(0,\); expected \(40,\)"):
            other.load_state_dict(saved, x, comm)


class TestNonFinite:
    def test_a_sum_that_is_too_large_names_the_rank_that_computed_it(self, lockstep):
        """Values are below 2^100, but their sum is not: rank 2 cannot compress it for rank 0, the chunk's owner."""
        values = [np.full(16, 0.75 * 2.0**100, dtype=np.float32) for _ in range(3)]
        errors = lockstep(
            [SIGN.stages(x, s) for x, s in zip(values, start(SIGN, values[:1], 3), strict=True)],
            catch=NonFiniteError,
        )
        assert [str(e) for e in errors] == ["a value on rank 2 is not finite, or too large to compress"] * 3


LARGEST = (3, 3, 6, 12)
"""Values of each rank's bucket in the order of the ring: sums, and means of 2, 3 and 4 ranks, are exact steps."""
DRAWS = 16


def thirds(*values: str) -> list[Fraction]:
    """Return values whose thirds, over exact steps, are sixteenths."""
    return [3 * Fraction(value) for value in values]


def rounded(value: Fraction, largest: Fraction, levels: int) -> dict[Fraction, Fraction]:
    """Return QSGD's distribution: the two levels around a value, weighted by their distance."""
    step = largest / levels
    low, share = divmod(value / step, 1)
    return {low * step: 1 - share, (low + 1) * step: share} if share else {low * step: Fraction(1)}


def ring_moments(p: Sequence[Fraction], levels: int) -> tuple[Fraction, Fraction]:
    """Return the exact mean and variance of a ring's result for p, in the order of the ring."""
    sums = {Fraction(0): Fraction(1)}
    size, largest = len(p), Fraction(0)
    for hop, own in enumerate(p):
        largest += LARGEST[hop]
        divisor = size if hop == size - 1 else 1
        after: dict[Fraction, Fraction] = {}
        for total, weight in sums.items():
            for value, share in rounded((total + own) / divisor, largest / divisor, levels).items():
                after[value] = after.get(value, Fraction(0)) + weight * share
        sums = after
    mean = sum((v * w for v, w in sums.items()), Fraction(0))
    return mean, sum((v * v * w for v, w in sums.items()), -(mean**2))


GRIDS = {size: np.stack(np.meshgrid(*[np.arange(DRAWS)] * size), -1).reshape(-1, size) for size in (2, 3, 4)}


class TestUnbiased:
    """QSGD around rings: every outcome of sixteen draws for each rounding, with its exact probability."""

    CASES = (
        (thirds("1/4", "1/2"), 1),
        (thirds("3/16", "5/8"), 2),
        (thirds("1/4", "1/2", "1"), 1),
        (thirds("3/16", "5/8", "7/4"), 2),
        (thirds("1/16", "1/8", "3/4", "5/2"), 1),
        (thirds("5/16", "7/8", "1/4", "3/2"), 2),
    )

    def outcomes(self, p: Sequence[Fraction], levels: int, columns: Callable) -> np.ndarray:
        """Average at len(p) ranks, in one bucket of the chunk of rank 0, one copy of p for each tuple of draws."""
        size, grid = len(p), GRIDS[len(p)]
        values = [np.full(len(grid) + 1, 0, dtype=np.float64) for _ in p]
        for hop, value in enumerate(p):
            values[(hop + 1) % size][:] = float(value)
            values[(hop + 1) % size][0] = LARGEST[hop]

        def source(key, block):
            draws = (2 * grid[:, columns(key)] + 1) * (1 << 16) // (2 * DRAWS)  # the middle of each sixteenth
            return np.pad(np.concatenate([[0], draws]), (0, block.length - len(grid) - 1))

        mean = around(qcomp.QSGD(levels=levels, bucket_size=1 << 17), feedback=False)
        with replace_draws(source):
            got, _ = average(mean, values, start(mean, values[:1], size), Key())
        return got[1:]

    @staticmethod
    def own(key: Key) -> int:
        return 0 if key.hop == 1 else key.hop - 1  # the owner finishes with hop 1, others use hops from 2 on

    @pytest.mark.parametrize(("p", "levels"), CASES)
    def test_mean_and_variance_over_all_outcomes_are_exact(self, p, levels):
        got = self.outcomes(p, levels, self.own)
        mean, variance = ring_moments(p, levels)
        assert mean == sum(p) / len(p)
        assert got.mean() == float(mean)
        assert np.square(got).mean() - got.mean() ** 2 == pytest.approx(float(variance), rel=1e-12)
        assert variance > 0

    @pytest.mark.parametrize(("p", "levels"), CASES)
    def test_one_stream_for_all_hops_is_caught(self, p, levels):
        got = self.outcomes(p, levels, lambda _: 0)
        mean, variance = ring_moments(p, levels)
        off = abs(got.mean() - float(mean)), abs(got.var() - float(variance))
        assert max(off) > 0.01

    def test_variances_of_the_roundings_add_up(self):
        """Three hops of variance s (1 - s) steps^2 over N^2, and that of the mean, for sums that do not vary."""
        p, levels = thirds("1/4", "0", "0"), 1
        first = Fraction(1, 4) * Fraction(3, 4)
        mean, variance = ring_moments(p, levels)
        # After the first hop the sum is 0 or 1 of 1, then 0 or 2 of 2 half as probably, then 0 or 4 of 4: each
        # rounding adds its variance to those before, since E[X] stays.
        assert mean == Fraction(1, 4)
        expected = first + Fraction(1, 4) * 1 + Fraction(1, 8) * 4  # in units of 3; the mean has a third
        assert variance == expected
        assert self.outcomes(p, levels, self.own).var() == pytest.approx(float(expected), rel=1e-12)

    @sizes
    def test_every_draw_has_a_key_of_its_own(self, size):
        mean = around(qcomp.QSGD(levels=7, bucket_size=16))
        values = [inputs(rank, 0) for rank in range(size)]
        seen = draws_of(mean, values, start(mean, values[0], size))
        assert len(seen) == len(set(seen)) == 9 * size
        for bucket in range(9):  # a bucket meets each rank once, and each hop once
            of_bucket = [key for key in seen if key.bucket == bucket]
            assert sorted(key.rank for key in of_bucket) == list(range(size))
            assert sorted(key.hop for key in of_bucket) == list(range(1, size + 1))
