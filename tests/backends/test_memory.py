"""The memory that a compressed mean needs, and that it donates only arrays of its own."""

import tracemalloc

import numpy as np
import pytest

import qcomp
from qcomp.core.mean.stages import AllToAll

pytest.importorskip("numba")

from qcomp.backends.numba_cpu import release_memory

N = (1 << 18) + 1001
COMPRESSORS = ["sign", "sign:scale=rms", "scaled(qsgd)", "minmax"]
SLACK = 64 * 1024
"""Bytes for Python's own objects and for the kernels' scratch space of a few buckets."""


def values(rank, step):
    return np.random.default_rng([rank, step]).standard_normal(N).astype(np.float32)


def exchanged(allreduce, ranks, key):
    """Run a world in lockstep; return the states, and what rank 0 sent and received in every stage."""
    states = [allreduce.zeros([values(0, 0)], rank=rank, size=ranks) for rank in range(ranks)]
    computations = [allreduce.stages(values(rank, 0), states[rank], key=key) for rank in range(ranks)]
    arrived = [None] * ranks
    traffic = []
    while True:
        try:
            requests = [stages.send(buffers) for stages, buffers in zip(computations, arrived, strict=True)]
        except StopIteration:
            return states, traffic
        to_each = isinstance(requests[0], AllToAll)
        arrived = [[r.send[rank] if to_each else r.send for r in requests] for rank in range(ranks)]
        sent = sum(b.nbytes for b in requests[0].send) if to_each else requests[0].send.nbytes
        traffic.append((sent, arrived[0]))


def peak_of(stages, traffic):
    """Return the most bytes that one rank allocates beyond those at the start, and its result."""
    release_memory()  # else the stages would reuse idle buffers, and no allocation would be seen
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    try:
        next(stages)  # a driver that moves buffers drops its references
        for _, arrived in traffic:
            try:
                stages.send(arrived)
            except StopIteration as stop:
                return tracemalloc.get_traced_memory()[1] - before, stop.value
    finally:
        tracemalloc.stop()
    raise AssertionError("the stages did not end")


@pytest.mark.quick_cases(4)
@pytest.mark.parametrize("donate", [False, True])
@pytest.mark.parametrize("ranks", [1, 3, 4])
@pytest.mark.parametrize("spec", COMPRESSORS)
def test_a_mean_needs_its_results_the_payloads_and_one_chunk(spec, ranks, donate):
    allreduce = qcomp.CompressedMean(qcomp.compressor(spec))
    key = qcomp.Key(seed=1)
    with qcomp.backends.use("numba"):
        states, traffic = exchanged(allreduce, ranks, key)
        x = values(0, 0)
        peak, (mean, state) = peak_of(allreduce.stages(x, states[0], key=key, donate=donate), traffic)
    residuals = [r for r in (*state.worker, *state.server) if not np.shares_memory(r, x)]
    assert len(residuals) == (1 if donate else 2)
    results = mean.nbytes + sum(r.nbytes for r in residuals)
    payloads = sum(sent for sent, _ in traffic)
    chunk = 4 * (-(-N // ranks) + allreduce.compressor.traits.bucket_size)
    assert results <= peak <= results + payloads + chunk + SLACK


def test_the_measurement_sees_a_copy():
    """The bound is tight: it excludes one more float32 copy of the input."""
    allreduce = qcomp.CompressedMean(qcomp.ScaledSign())
    with qcomp.backends.use("numba"):
        states, traffic = exchanged(allreduce, 4, qcomp.Key())

        def wasteful():
            x = values(0, 0)
            kept = x.copy()
            result = yield from allreduce.stages(x, states[0])
            return kept, result

        peak, _ = peak_of(wasteful(), traffic)
    assert peak > 4 * (N + N + N // 4 + N // 4) + SLACK


@pytest.mark.parametrize("spec", COMPRESSORS)
def test_a_refusal_on_another_rank_leaves_the_state_unchanged_even_with_donation(lockstep, spec):
    allreduce = qcomp.CompressedMean(qcomp.compressor(spec))
    with qcomp.backends.use("numba"):
        tensors = [values(0, 0)]
        states = [allreduce.zeros(tensors, rank=rank, size=2) for rank in range(2)]
        runs = [allreduce.stages(values(r, 0), states[r], key=qcomp.Key(), donate=True) for r in range(2)]
        states = [state for _, state in lockstep(runs)]
        before = [[r.tobytes() for r in (*s.worker, *s.server)] for s in states]
        bad = [values(rank, 1) for rank in range(2)]
        bad[1][N - 1] = np.inf
        again = [allreduce.stages(bad[r], states[r], key=qcomp.Key(), donate=True) for r in range(2)]
        errors = lockstep(again, catch=qcomp.NonFiniteError)
    assert all(isinstance(error, qcomp.NonFiniteError) for error in errors)
    assert [[r.tobytes() for r in (*s.worker, *s.server)] for s in states] == before


def test_arrays_that_are_not_donated_are_not_written_to(lockstep):
    allreduce = qcomp.CompressedMean(qcomp.ScaledSign())
    with qcomp.backends.use("numba"):
        states = [allreduce.zeros([values(0, 0)], rank=rank, size=2) for rank in range(2)]
        inputs = [values(rank, 0) for rank in range(2)]
        lockstep([allreduce.stages(inputs[r], states[r]) for r in range(2)])
    for rank in range(2):
        assert np.array_equal(inputs[rank], values(rank, 0))
        assert not any(r.any() for r in (*states[rank].worker, *states[rank].server))


@pytest.mark.parametrize("opt", [qcomp.OneBitAdam, qcomp.QAdam], ids=lambda o: o.__name__)
def test_a_step_writes_to_nothing_that_was_passed_in(opt):
    """Optimizers donate only arrays that they made; gradients, parameters and the old state belong to the caller."""
    optimizer = opt(learning_rate=0.1, freeze=1, exact=None, variance_steps=None)

    def rank_main(comm):
        params = [values(0, 0)]
        state = optimizer.init(params, comm)
        for step in range(1, 4):
            grads = [values(comm.rank, step)]
            held = [*params, *grads, *state.momentum, *state.variance]
            held += [*state.exchange.worker, *state.exchange.server]
            before = [array.tobytes() for array in held]
            params, state = optimizer.step(params, grads, state, comm)
            assert [array.tobytes() for array in held] == before, step
        return state.stage

    with qcomp.backends.use("numba"):
        assert qcomp.comm.run_local(2, rank_main) == ["compressed", "compressed"]
