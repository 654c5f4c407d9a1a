"""The mean around a ring: N roundings, one neighbour, the same bytes on all ranks."""

import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np
import pytest

import qcomp
from qcomp import CompressedMean, Key, NonFiniteError
from qcomp.comm import run_local
from qcomp.core.kernels import Blend
from qcomp.core.mean.codec import Codec
from qcomp.core.mean.framing import seal
from qcomp.core.mean.stages import AllToAll, fuse
from qcomp.core.mean.topologies.ring import _Share
from qcomp.core.numeric.random import replace_draws

SHAPES = [(3, 11), (0,), (), (70,), (2, 0, 4)]
"""Odd sizes, a scalar, and tensors with nothing in them: 3, 0, 1, 5 and 0 buckets of 16."""
ELEMENTS = 104
SPECS = ["sign:bucket_size=16", "qsgd:levels=7,bucket_size=16", "minmax:bucket_size=16", "cast", "identity"]
SIZES = [1, 2, 3, 4, 5]
sizes = pytest.mark.parametrize("size", SIZES)


def inputs(
    rank: int, step: int, dtype: type = np.float32, shapes: Sequence[tuple] = SHAPES
) -> list[np.ndarray]:
    rng = np.random.default_rng([rank, step])
    return [rng.standard_normal(shape).astype(dtype) for shape in shapes]


def around(c: qcomp.Compressor, **options: Any) -> CompressedMean:
    return CompressedMean(c, topology="ring", **options)


SIGN = around(qcomp.ScaledSign(bucket_size=16))


def start(mean: CompressedMean, tensors: Any, size: int) -> list[Any]:
    return [mean.zeros(tensors, rank=rank, size=size) for rank in range(size)]


class Outcome(NamedTuple):
    means: Any
    states: list[Any]


def average(
    lockstep: Callable, mean: CompressedMean, values: Sequence, states: list, key: Key | None = None
) -> Outcome:
    """Average the values of all ranks once; all ranks must hold the same mean bit for bit."""
    results = lockstep([mean.stages(x, s, key=key) for x, s in zip(values, states, strict=True)])
    assert len({bits(means) for means, _ in results}) == 1
    return Outcome(results[0][0], [state for _, state in results])


def bits(arrays: Any) -> bytes:
    return b"|".join(np.asarray(a).tobytes() for a in (arrays if isinstance(arrays, list) else [arrays]))


def held_by(state: Any) -> bytes:
    return b"|".join(np.asarray(r).tobytes() for r in (*state.worker, *state.server))


def owed(mean: CompressedMean, states: Sequence, tensors: Sequence) -> list[np.ndarray]:
    """mean_i e_i + e_s of every element, from the residuals of all ranks."""
    whole = [np.zeros(math.prod(t.shape)) for t in tensors]
    for state in states:
        parts = mean.layout(state.shapes, rank=state.rank, size=state.size).residuals
        for weight, of_kind, residuals in zip(
            (len(states), 1), parts, (state.worker, state.server), strict=True
        ):
            for part, residual in zip(of_kind, residuals, strict=True):
                whole[part.tensor][part.start : part.stop] += residual / weight
    return whole


class TestMean:
    @sizes
    @pytest.mark.parametrize("spec", SPECS)
    def test_is_the_same_on_all_ranks(self, lockstep, size, spec):
        mean = around(qcomp.compressor(spec))
        states = start(mean, inputs(0, 0), size)
        for step in range(2):
            values = [inputs(rank, step) for rank in range(size)]
            means, states = average(lockstep, mean, values, states, Key(step=step))
            assert [(m.shape, m.dtype) for m in means] == [(v.shape, v.dtype) for v in values[0]]

    @sizes
    def test_without_loss_adds_in_the_order_of_the_ring(self, lockstep, size):
        """In the last bits too: the owner of a chunk comes last, its right neighbour first."""
        mean = around(qcomp.Identity())
        values = [inputs(rank, 0, shapes=[(23,)])[0] for rank in range(size)]
        got, _ = average(lockstep, mean, values, start(mean, values[:1], size))
        for owner, chunk in enumerate(mean.layout([values[0].shape], rank=0, size=size).chunks):
            for part in chunk:
                total = np.float32(0)
                for hop in range(size):
                    total += values[(owner + 1 + hop) % size][part.start : part.stop]
                assert got[part.start : part.stop].tobytes() == (total / np.float32(size)).tobytes()

    @pytest.mark.parametrize("spec", SPECS[:1] + SPECS[2:])
    def test_of_one_rank_rounds_once(self, lockstep, spec):
        c, x = qcomp.compressor(spec), inputs(0, 0)
        got, expected = (
            average(lockstep, mean, [x], start(mean, x, 1)).means
            for mean in (around(c), CompressedMean(c, topology="all_gather"))
        )
        assert bits(got) == bits(expected)

    def test_of_two_ranks_is_two_phases_in_which_a_server_keeps_its_own_part_exact(self, lockstep):
        """Bit for bit, where compressing that part loses nothing."""
        signs = np.sign(np.random.default_rng(0).standard_normal(64)).astype(np.float32)
        values = [inputs(rank, 0, shapes=[(64,)])[0] for rank in range(2)]
        for rank in range(2):
            values[rank][32 * rank : 32 * rank + 32] = signs[:32]
        results = {}
        for topology in ("ring", "two_phase"):
            mean = CompressedMean(qcomp.ScaledSign(bucket_size=16), topology=topology)
            results[topology] = average(lockstep, mean, values, start(mean, values[:1], 2)).means
        assert results["ring"].tobytes() == results["two_phase"].tobytes()
        values = [inputs(rank, 0, shapes=[(64,)])[0] for rank in range(2)]
        two_phase = CompressedMean(qcomp.ScaledSign(bucket_size=16))
        ring = average(lockstep, SIGN, values, start(SIGN, values[:1], 2)).means
        other = average(lockstep, two_phase, values, start(two_phase, values[:1], 2)).means
        assert ring.tobytes() != other.tobytes()

    @pytest.mark.parametrize("donate", [False, True])
    @pytest.mark.parametrize("size", [1, 3])
    def test_blends_and_donation_change_nothing(self, lockstep, size, donate):
        momenta, values = inputs(77, 0), [inputs(rank, 1) for rank in range(size)]
        blends = [Blend(m, 0.9, 0.5) for m in momenta]
        mixed = [[0.9 * m + ((1 - 0.9) * 0.5) * g for m, g in zip(momenta, v, strict=True)] for v in values]
        expected, after = average(lockstep, SIGN, mixed, start(SIGN, momenta, size))
        results = lockstep(
            [
                SIGN.stages(v, s, donate=donate, blends=blends)
                for v, s in zip(values, start(SIGN, momenta, size), strict=True)
            ]
        )
        assert {bits(means) for means, _ in results} == {bits(expected)}
        assert [held_by(state) for _, state in results] == [held_by(state) for state in after]
        assert bits(momenta) == bits(inputs(77, 0))

    def test_every_library_alike(self, lockstep, float64_library):
        """The reference is NumPy; the read-only detector also proves that nothing passed in is written to."""
        lib, shapes = float64_library, [(40,), (5,)]
        for c in (qcomp.ScaledSign(bucket_size=16), qcomp.QSGD(levels=7, bucket_size=16)):
            mean, held = around(c), {}
            for name, array, seal_ in (("numpy", np.asarray, lambda x: x), (lib.name, lib.array, lib.seal)):
                drawn = [[inputs(rank, s, shapes=shapes) for rank in range(3)] for s in range(2)]
                for step in range(2):
                    drawn[step][1][0][:20] *= np.float32(2.0**-130)  # subnormal, which some devices flush
                values = [[[array(t) for t in x] for x in of_step] for of_step in drawn]
                states, record = seal_(start(mean, values[0][0], 3)), b""
                for step in range(2):
                    means, states = average(lockstep, mean, values[step], states, Key(step=step))
                    seal_(states)
                    record += bits([lib.numpy(m) for m in means]) + b"".join(map(held_by, states))
                held[name] = record
            assert len(set(held.values())) == 1

    @pytest.mark.parametrize("dtype", ["float16", "float64"])
    def test_dtypes(self, lockstep, dtype):
        mean = around(qcomp.MinMaxUInt8(16))
        x = [inputs(rank, 0, dtype, [(37,)])[0] for rank in range(3)]
        got, states = average(lockstep, mean, x, start(mean, [x[0]], 3))
        assert got.dtype == dtype
        assert states[0].worker[0].dtype == (np.float64 if dtype == "float64" else np.float32)
        assert np.abs(got - sum(v.astype(np.float64) for v in x) / 3).max() < 0.05

    @sizes
    def test_coded_payloads_change_nothing(self, lockstep, size):
        """Messages of varying length, also those that are passed on."""
        coded = qcomp.QSGD(levels=7, bucket_size=16, coding="elias")
        held = []
        for c in (coded, coded.coder.plain):
            mean = around(c)
            states = start(mean, inputs(0, 0), size)
            for step in range(2):
                values = [inputs(rank, step) for rank in range(size)]
                means, states = average(lockstep, mean, values, states, Key(step=step))
            held.append(bits(means) + b"".join(map(held_by, states)))
        assert held[0] == held[1]

    @pytest.mark.parametrize("shapes", [[(20,)], [(3,)], [(0,)], [(0,), (2, 0)]])
    def test_more_ranks_than_buckets(self, lockstep, shapes):
        values = [inputs(rank, 0, shapes=shapes) for rank in range(5)]
        states = start(SIGN, values[0], 5)
        for _ in range(2):
            means, states = average(lockstep, SIGN, values, states)
        assert [m.shape for m in means] == shapes

    def test_fused_with_other_means(self, lockstep):
        """Side by side with one of as many exchanges, and with one of fewer."""
        means = [SIGN, around(qcomp.Identity(), feedback=False), CompressedMean(qcomp.ScaledSign(16))]
        values = [[inputs(rank, i) for i in range(3)] for rank in range(3)]
        states = [start(mean, values[0][0], 3) for mean in means]
        fused = lockstep(
            [fuse([m.stages(values[r][i], states[i][r]) for i, m in enumerate(means)]) for r in range(3)]
        )
        for i, mean in enumerate(means):
            expected, _ = average(lockstep, mean, [v[i] for v in values], states[i])
            assert {bits(fused[rank][i][0]) for rank in range(3)} == {bits(expected)}


def requantising(self: _Share, sealed: Any, owner: int) -> AllToAll:
    """Break the second half: what is passed on is compressed anew, by who passes it on."""
    self.sent = getattr(self, "sent", 0) + 1
    if self.sent >= self.size and owner != self.rank:
        frame = self.layout.frames[owner]
        message, _ = self._opened(sealed, frame, self._left)
        payloads = self.codec.payloads(message, frame, self._left)
        decoded = self.codec.decode(payloads, frame, [None] * len(frame.chunk))
        values = [v * np.float32(1.25) for v in decoded]
        again = Codec(values, sealed).encode([frame.as_tensors], values, (), self.call.key, donate=False)
        sealed = seal(again.messages[0], (), self.size)
    return to_the_right(self, sealed, owner)


to_the_right = _Share._to_the_right


class TestExchanges:
    def test_a_ring_that_requantises_what_it_passes_on_is_caught(self, lockstep, monkeypatch):
        monkeypatch.setattr(_Share, "_to_the_right", requantising)
        with pytest.raises(AssertionError):
            TestMean().test_is_the_same_on_all_ranks(lockstep, 3, SPECS[1])

    @sizes
    def test_each_rank_compresses_n_things_and_sends_to_the_right(self, lockstep, monkeypatch, size):
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
        """A message is the payload of each segment, the verdict and a flag for each rank, each padded to 8 bytes."""
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
        # Of sums a rank sends all but its own, of means all but its right neighbour's.
        expected = [2 * sum(messages) - messages[r] - messages[(r + 1) % size] for r in range(size)]
        assert run_local(size, rank_main) == (expected if size > 1 else [0])


def check_sum_identity(lockstep: Callable, mean: CompressedMean, size: int) -> None:
    """The sum of the means is the sum of the exact means less mean_i e_i + e_s; after every step."""
    tensors = inputs(0, 0, np.float64)
    states = start(mean, tensors, size)
    sums, exact = ([np.zeros(t.shape) for t in tensors] for _ in range(2))
    magnitude = 0.0
    for step in range(6):
        values = [inputs(rank, step, np.float64) for rank in range(size)]
        means, states = average(lockstep, mean, values, states, Key(step=step))
        kept = owed(mean, states, tensors)
        for i, m in enumerate(means):
            sums[i] += m
            exact[i] += sum(v[i] for v in values) / size
            magnitude = max([magnitude, *np.abs(exact[i]).ravel(), *np.abs(kept[i])])
            assert np.abs(sums[i] - (exact[i] - kept[i].reshape(m.shape))).max(initial=0) <= 1e-12 * magnitude
    assert max(np.abs(k).max(initial=0) for k in kept) > 1e-3


class TestSumIdentity:
    @sizes
    @pytest.mark.parametrize(
        "spec",
        [*SPECS[:3], "onebit_sgd", "scaled(qsgd:levels=1)", "qsgd:levels=31,bucket_size=16,coding=elias"],
    )
    def test_holds(self, lockstep, size, spec):
        check_sum_identity(lockstep, around(qcomp.compressor(spec)), size)

    @pytest.mark.parametrize("hop", [1, 2, 3])
    def test_a_residual_that_is_dropped_at_one_hop_is_caught(self, lockstep, monkeypatch, hop):
        encode = Codec.encode

        def forgetful(self, chunks, tensors, residuals, key, **options):
            if key.hop == hop:
                residuals = tuple(0 * r for r in residuals)
            return encode(self, chunks, tensors, residuals, key, **options)

        monkeypatch.setattr(Codec, "encode", forgetful)
        with pytest.raises(AssertionError):
            check_sum_identity(lockstep, SIGN, 3)

    def test_residuals_taken_for_those_of_means_are_caught(self, lockstep, monkeypatch):
        """Residuals of sums count as their Nth part; the owner of a chunk, which has none, counts among the N."""

        def of_holders(mean, states, tensors):
            fewer = [state._replace(worker=tuple(r * (3 / 2) for r in state.worker)) for state in states]
            return right(mean, fewer, tensors)

        right = owed
        monkeypatch.setattr(f"{__name__}.owed", of_holders)
        with pytest.raises(AssertionError):
            check_sum_identity(lockstep, SIGN, 3)

    def test_without_feedback_nothing_is_kept(self, lockstep):
        mean = around(qcomp.QSGD(bucket_size=16), feedback=False)
        states = start(mean, inputs(0, 0), 3)
        _, after = average(lockstep, mean, [inputs(rank, 0) for rank in range(3)], states, Key())
        assert after == states
        assert after[0].worker == after[0].server == ()


class TestState:
    @sizes
    def test_residuals_are_one_vector_a_rank(self, size):
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
        """A rank's own dict fits one topology; a list of all fits any (see the tests of elastic checkpoints)."""
        comm, x = qcomp.comm.LocalCommunicator.alone(), np.ones(40, dtype=np.float32)
        settings = {"learning_rate": 0.1, "compressor": qcomp.ScaledSign(8), "exact": None}
        ring, other = (
            qcomp.CompressedSGD(**settings, averaging=qcomp.Averaging(topology=t))
            for t in ("ring", "two_phase")
        )
        saved = ring.state_dict(ring.init(x, comm))
        with pytest.raises(ValueError, match=r"worker_residual.0 of shape \(0,\); expected \(40,\)"):
            other.load_state_dict(saved, x, comm)

    def test_a_state_of_another_topology_is_an_error(self):
        x = np.ones(40, dtype=np.float32)
        state = CompressedMean(qcomp.ScaledSign(16)).zeros([x], rank=0, size=1)
        with pytest.raises(ValueError, match="state is of topology 'two_phase'; this mean is 'ring'"):
            SIGN(x, state, qcomp.comm.LocalCommunicator.alone())

    def test_ranks_of_other_topologies_are_told(self):
        def rank_main(comm):
            topology = "ring" if comm.rank else "two_phase"
            with pytest.raises(
                qcomp.MismatchError, match="topology is 'two_phase' on rank 0, but 'ring' on rank 1"
            ):
                CompressedMean(qcomp.ScaledSign(), topology=topology).init(np.zeros(4), comm)
            return True

        assert run_local(2, rank_main, timeout=20) == [True] * 2


class TestNonFinite:
    @pytest.mark.parametrize("spec", ["sign:bucket_size=16", "qsgd:levels=31,bucket_size=16,coding=elias"])
    @pytest.mark.parametrize("size", [1, 2, 4])
    def test_all_ranks_raise_in_the_same_stage_with_the_same_words(self, lockstep, size, spec):
        """Wherever the value is: in a chunk that is passed on first, last, or finished."""
        mean = around(qcomp.compressor(spec))
        values = [inputs(rank, 0) for rank in range(size)]
        _, states = average(lockstep, mean, values, start(mean, values[0], size), Key())
        before = [held_by(state) for state in states]
        for bad in range(size):
            for tensor, at in ((0, (0, 0)), (3, (5,)), (3, (37,)), (3, (69,))):
                broken = [inputs(rank, 1) for rank in range(size)]
                broken[bad][tensor][at] = (np.nan, np.inf)[bad % 2]
                errors = lockstep(
                    [mean.stages(x, s, key=Key()) for x, s in zip(broken, states, strict=True)],
                    catch=NonFiniteError,
                )
                words = f"a value on rank {bad} is not finite, or too large to compress"
                assert [str(e) for e in errors] == [words] * size
        assert [held_by(state) for state in states] == before

    @pytest.mark.parametrize("at", [(0, 5), (5, 5), (69, 69)])
    def test_all_who_are_to_blame_are_named(self, lockstep, at):
        """In chunks of their own, and in the same one: the second refuses what it would have refused anyway."""
        values = [inputs(rank, 0) for rank in range(4)]
        values[1][3][at[0]], values[3][3][at[1]] = np.nan, -np.inf
        errors = lockstep(
            [SIGN.stages(x, s) for x, s in zip(values, start(SIGN, values[0], 4), strict=True)],
            catch=NonFiniteError,
        )
        words = "a value on ranks 1 and 3 is not finite, or too large to compress"
        assert [str(e) for e in errors] == [words] * 4

    def test_a_sum_that_is_too_large_is_refused_where_it_is(self, lockstep):
        """Values below 2^100 whose sum is not: rank 2 cannot compress it for rank 0, which owns the chunk."""
        values = [np.full(16, 0.75 * 2.0**100, dtype=np.float32) for _ in range(3)]
        errors = lockstep(
            [SIGN.stages(x, s) for x, s in zip(values, start(SIGN, values[:1], 3), strict=True)],
            catch=NonFiniteError,
        )
        assert [str(e) for e in errors] == ["a value on rank 2 is not finite, or too large to compress"] * 3

    def test_over_a_communicator_nobody_waits(self):
        def rank_main(comm):
            x = inputs(comm.rank, 0)
            state = SIGN.init(x, comm)
            if comm.rank == 2:
                x[0][1, 1] = np.nan
            with pytest.raises(NonFiniteError):
                SIGN(x, state, comm)
            SIGN(inputs(comm.rank, 0), state, comm)
            return True

        assert run_local(4, rank_main, timeout=20) == [True] * 4

    def test_a_message_of_another_size_is_an_error(self):
        x = np.zeros(50, dtype=np.float32)
        stages = SIGN.stages(x, SIGN.zeros([x], rank=0, size=2))
        request = next(stages)
        nothing = np.zeros(0, dtype=np.uint8)
        with pytest.raises(qcomp.PayloadError, match=r"the message from rank 1 has shape"):
            stages.send([nothing, np.zeros(request.receive[1] + 8, dtype=np.uint8)])


LARGEST = (3, 3, 6, 12)
"""Of each rank's bucket in the order of the ring: the sums, and the means of 2, 3 and 4 ranks, are exact steps."""
DRAWS = 16


def thirds(*values: str) -> list[Fraction]:
    """Values whose thirds, over exact steps, are sixteenths."""
    return [3 * Fraction(value) for value in values]


def rounded(value: Fraction, largest: Fraction, levels: int) -> dict[Fraction, Fraction]:
    """The distribution of QSGD: the two levels around a value, by their distance."""
    step = largest / levels
    low, share = divmod(value / step, 1)
    return {low * step: 1 - share, (low + 1) * step: share} if share else {low * step: Fraction(1)}


def ring_moments(p: Sequence[Fraction], levels: int) -> tuple[Fraction, Fraction]:
    """The exact mean and variance of what a ring makes of p, in the order of the ring."""
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
    mean = sum(v * w for v, w in sums.items())
    return mean, sum(v * v * w for v, w in sums.items()) - mean**2


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

    def outcomes(self, lockstep, p: Sequence[Fraction], levels: int, columns: Callable) -> np.ndarray:
        """Average at len(p) ranks, in one bucket of the chunk of rank 0, a copy of p for each tuple of draws."""
        size, grid = len(p), GRIDS[len(p)]
        values = [np.full(len(grid) + 1, 0, dtype=np.float64) for _ in p]
        for hop, value in enumerate(p):
            values[(hop + 1) % size][:] = float(value)
            values[(hop + 1) % size][0] = LARGEST[hop]

        def source(key, block):
            draws = (
                (2 * grid[:, columns(key)] + 1) * (1 << 16) // (2 * DRAWS)
            )  # in the middle of each sixteenth
            return np.pad(np.concatenate([[0], draws]), (0, block.length - len(grid) - 1))

        mean = around(qcomp.QSGD(levels=levels, bucket_size=1 << 17), feedback=False)
        with replace_draws(source):
            got, _ = average(lockstep, mean, values, start(mean, values[:1], size), Key())
        return got[1:]

    @staticmethod
    def own(key: Key) -> int:
        return 0 if key.hop == 1 else key.hop - 1  # the owner finishes with hop 1, the others have 2 and up

    @pytest.mark.parametrize(("p", "levels"), CASES)
    def test_mean_and_variance_over_all_outcomes_are_exact(self, lockstep, p, levels):
        got = self.outcomes(lockstep, p, levels, self.own)
        mean, variance = ring_moments(p, levels)
        assert mean == sum(p) / len(p)
        assert got.mean() == float(mean)
        assert np.square(got).mean() - got.mean() ** 2 == pytest.approx(float(variance), rel=1e-12)
        assert variance > 0

    @pytest.mark.parametrize(("p", "levels"), CASES)
    def test_one_stream_for_all_hops_is_caught(self, lockstep, p, levels):
        got = self.outcomes(lockstep, p, levels, lambda _: 0)
        mean, variance = ring_moments(p, levels)
        off = abs(got.mean() - float(mean)), abs(got.var() - float(variance))
        assert max(off) > 0.01

    def test_variances_of_the_roundings_add_up(self, lockstep):
        """Three hops of variance s (1 - s) steps^2 over N^2, and that of the mean: where the sums do not vary."""
        p, levels = thirds("1/4", "0", "0"), 1
        first = Fraction(1, 4) * Fraction(3, 4)
        mean, variance = ring_moments(p, levels)
        # After the first hop the sum is 0 or 1 of 1, then 0 or 2 of 2 with half of that, then 0 or 4 of 4: each of
        # these is a variance on top of the one before, since E[X] stays.
        assert mean == Fraction(1, 4)
        expected = (
            first + Fraction(1, 4) * 1 + Fraction(1, 8) * 4
        )  # in units of 3, of which the mean has a third
        assert variance == expected
        assert self.outcomes(lockstep, p, levels, self.own).var() == pytest.approx(float(expected), rel=1e-12)

    @sizes
    def test_every_draw_has_a_key_of_its_own(self, lockstep, size):
        seen = []

        def source(key, block):
            first = key.bucket + block.first_bucket
            seen.extend(key._replace(bucket=first + row) for row in range(block.rows))
            return 0

        mean = around(qcomp.QSGD(levels=7, bucket_size=16))
        values = [inputs(rank, 0) for rank in range(size)]
        with replace_draws(source):
            average(lockstep, mean, values, start(mean, values[0], size), Key(seed=9, step=4, tensor=2))
        assert len(seen) == len(set(seen)) == 9 * size
        assert {(key.seed, key.step, key.tensor) for key in seen} == {(9, 4, 2)}
        for bucket in range(9):  # a bucket meets each rank once, and each hop once
            of_bucket = [key for key in seen if key.bucket == bucket]
            assert sorted(key.rank for key in of_bucket) == list(range(size))
            assert sorted(key.hop for key in of_bucket) == list(range(1, size + 1))


OPTIMIZERS = {
    "SGD": lambda t: qcomp.CompressedSGD(
        learning_rate=0.1, compressor=qcomp.ScaledSign(8), averaging=qcomp.Averaging(topology=t)
    ),
    "1-bit Adam": lambda t: qcomp.OneBitAdam(
        learning_rate=0.1,
        freeze=2,
        betas=(0.9, 0.5),
        compressor=qcomp.ScaledSign(8),
        averaging=qcomp.Averaging(topology=t),
    ),
    "QAdam": lambda t: qcomp.QAdam(
        learning_rate=0.1, warmup_steps=2, betas=(0.9, 0.5), averaging=qcomp.Averaging(topology=t)
    ),
    "0/1 Adam": lambda t: qcomp.ZeroOneAdam(
        learning_rate=0.1, compressor=qcomp.ScaledSign(8), averaging=qcomp.Averaging(topology=t)
    ),
}


@pytest.mark.filterwarnings("ignore:.*freez.*", "ignore:.*compresses nothing.*")
@pytest.mark.parametrize("topology", ["ring", "auto"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_go_on_from_their_own_dicts(name, topology):
    """All replicas alike; and stopped in the middle as if there had been no stop. One small tensor stays exact."""
    from dataclasses import replace

    opt = replace(OPTIMIZERS[name](topology), exact=qcomp.ExactBelow(10))

    def rank_main(comm):
        params = inputs(99, 0, shapes=[(40,), (3,), (7, 5)])
        state, held = opt.init(params, comm), []
        for stop in (None, 4):
            own, at = params, state
            for step in range(7):
                if step == stop:
                    at = opt.load_state_dict(opt.state_dict(at), own, comm)
                own, at = opt.step(own, inputs(comm.rank, step, shapes=[(40,), (3,), (7, 5)]), at, comm)
            held.append(bits(own))
            assert at.exchange.topology == ("ring" if topology == "ring" else "all_gather")
        return held

    results = run_local(3, rank_main, timeout=60)
    assert {text for held in results for text in held} == {results[0][0]}
