"""The mean of each tensor on its own: the same as of all together, and independent of what it is exchanged with."""

import numpy as np
import pytest

import qcomp
from qcomp import CompressedMean, Key
from qcomp.core.mean.stages import fuse
from qcomp.core.mean.tensorwise import TensorwiseMean
from qcomp.core.mean.topologies.registry import names

SHAPES = [(3, 11), (0,), (), (70,), (5, 26)]
"""Odd sizes, a scalar, and an empty tensor."""
SIGN = qcomp.ScaledSign(bucket_size=16)
DRAWS = qcomp.QSGD(levels=7, bucket_size=16)
GROUPS = [[4], [1, 2], [0, 3]]


def inputs(rank, step, shapes=SHAPES):
    rng = np.random.default_rng([rank, step])
    return [rng.standard_normal(shape).astype(np.float32) for shape in shapes]


def equal(xs, ys):
    return len(xs) == len(ys) and all(np.array_equal(x, y) for x, y in zip(xs, ys, strict=True))


def test_separate_means_equal_one_mean_of_all_tensors_in_every_library(library, lockstep):
    shapes = [(40,), (40,)]  # JAX compiles for each shape
    check_that_means_are_those_of_one_mean_of_all(library, lockstep, 2, "two_phase", SIGN, shapes=shapes)


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("topology", [*names(), "auto"])
@pytest.mark.parametrize("compressor", [SIGN, DRAWS, [SIGN, DRAWS, DRAWS, SIGN, DRAWS]])
def test_separate_means_equal_one_mean_of_all_tensors(libraries, lockstep, size, topology, compressor):
    check_that_means_are_those_of_one_mean_of_all(libraries["numpy"], lockstep, size, topology, compressor)


def check_that_means_are_those_of_one_mean_of_all(
    library, lockstep, size, topology, compressor, *, shapes=SHAPES
):
    # A server draws with its own rank, and here another rank serves a bucket.
    # A ring sums a bucket in an order that depends on the rank where it begins.
    differ = size > 1 and (topology == "ring" or (topology == "two_phase" and compressor is not SIGN))
    together = CompressedMean(compressor, topology=topology)
    apart = TensorwiseMean(compressor, topology=topology)
    nodes = tuple(rank % 2 for rank in range(size)) if topology == "hierarchical" else ()
    differ |= topology == "hierarchical" and size > 1 and compressor is not SIGN

    def start(mean):
        like = [library.array(x) for x in inputs(0, 0, shapes)]
        return [mean.zeros(like, rank=rank, size=size, nodes=nodes) for rank in range(size)]

    states = {mean: start(mean) for mean in (together, apart)}
    for step in range(3):
        means = {}
        for mean in (together, apart):
            values = [[library.array(x) for x in inputs(rank, step, shapes)] for rank in range(size)]
            results = lockstep(
                [
                    mean.stages(x, state, key=Key(seed=3, step=step))
                    for x, state in zip(values, states[mean], strict=True)
                ]
            )
            states[mean] = [state for _, state in results]
            means[mean] = [[library.numpy(m) for m in of_rank] for of_rank, _ in results]
            assert all(equal(means[mean][0], other) for other in means[mean])
        assert equal(means[together][0], means[apart][0]) != differ
        if differ:
            return
    for one, other in zip(states[together], states[apart], strict=True):
        if topology != "hierarchical":
            assert equal([library.numpy(e) for e in one.worker], [library.numpy(e) for e in other.worker])


@pytest.mark.parametrize("compressor", [SIGN, DRAWS])
def test_groups_of_tensors_are_exchanged_as_one(lockstep, compressor):
    mean, size = TensorwiseMean(compressor), 3
    whole = [mean.zeros(inputs(0, 0), rank=rank, size=size) for rank in range(size)]
    single = [mean.split(state, len(SHAPES)) for state in whole]
    numbers = mean.bucket_numbers(SHAPES)
    grouped = {i: TensorwiseMean(compressor, numbers=[numbers[t] for t in g]) for i, g in enumerate(GROUPS)}
    for step in range(3):
        key, values = Key(seed=3, step=step), [inputs(rank, step) for rank in range(size)]
        expected = lockstep([mean.stages(x, s, key=key) for x, s in zip(values, whole, strict=True)])
        whole = [state for _, state in expected]

        def of_rank(rank, key=key, values=values):
            return fuse(
                [
                    grouped[i].stages(
                        [values[rank][t] for t in g], mean.join([single[rank][t] for t in g]), key=key
                    )
                    for i, g in enumerate(GROUPS)
                ]
            )

        for rank, results in enumerate(lockstep([of_rank(rank) for rank in range(size)])):
            means = [None] * len(SHAPES)
            for i, (g, (of_group, state)) in enumerate(zip(GROUPS, results, strict=True)):
                for t, m, s in zip(g, of_group, grouped[i].split(state, len(g)), strict=True):
                    means[t], single[rank][t] = m, s
            assert equal(means, expected[rank][0])
            joined = mean.join(single[rank])
            assert equal(joined.worker, whole[rank].worker)
            assert equal(joined.server, whole[rank].server)


def test_without_bucket_numbers_groups_have_other_draws(lockstep):
    mean = TensorwiseMean(DRAWS, feedback=False)
    nothing = qcomp.MeanState(0, 1, (), ())
    values = inputs(0, 0)
    ((both, _),) = lockstep([mean.stages(values, nothing, key=Key())])
    ((last, _),) = lockstep([mean.stages([values[4]], nothing, key=Key())])
    assert not np.array_equal(both[4], last[0])


@pytest.mark.parametrize("size", [1, 2, 5])
def test_residuals_match_their_parts(size):
    mean = TensorwiseMean(SIGN)
    served = [np.zeros(int(np.prod(shape)), int) for shape in SHAPES]
    for rank in range(size):
        worker, server = mean.layout(SHAPES, rank=rank, size=size).residuals
        state = mean.zeros(inputs(0, 0), rank=rank, size=size)
        assert [s.size for s in worker] == [e.shape[0] for e in state.worker]
        assert [s.size for s in server] == [e.shape[0] for e in state.server]
        assert mean.join(mean.split(state, len(SHAPES))) == state
        assert [s[:3] for s in server] == [s[:3] for s in mean.layout(SHAPES, rank=0, size=size).chunks[rank]]
        for segment in server:
            served[segment.tensor][segment.start : segment.stop] += 1
    assert all((counts == 1).all() for counts in served)


def test_the_number_of_compressors_must_fit():
    with pytest.raises(ValueError, match="x has 5 arrays; compressor has 2 entries"):
        TensorwiseMean([SIGN, SIGN]).zeros(inputs(0, 0), rank=0, size=1)
