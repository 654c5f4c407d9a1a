"""Means of which each rank keeps its shard, and gathering of shards, in every array library."""

import numpy as np
import pytest

import qcomp
from qcomp.core.mean.shards import Shards
from qcomp.core.numeric.arrays import host_bytes
from qcomp.testing import replace_draws
from qcomp.testing.libraries import to_numpy

SIZES = (37, 0, 5, 128)
KEY = qcomp.Key(seed=1, step=2, tensor=3)
SIGN, QSGD, EXACT = qcomp.ScaledSign(bucket_size=16), qcomp.QSGD(7, 16), qcomp.Identity()


def of_all(world, compressors=(SIGN, EXACT, EXACT, QSGD), sizes=SIZES):
    return [Shards(compressors, sizes, rank, world) for rank in range(world)]


def drawn(world, size, step=0, dtype=np.float32):
    return [np.random.default_rng([rank, step]).standard_normal(size).astype(dtype) for rank in range(world)]


def run(lockstep, stages):
    return lockstep(list(stages))


@pytest.mark.parametrize("world", [1, 2, 3])
def test_exact_tensors_give_the_mean_of_the_own_shard(lockstep, library, world):
    shards = of_all(world, (EXACT,) * 4)
    values = drawn(world, world * sum(SIZES))
    results = run(
        lockstep, (s.scatter_mean(library.array(x), None, KEY) for s, x in zip(shards, values, strict=True))
    )
    total = np.float32(0)
    for x in values:
        total = total + x
    expected = np.reshape(total / np.float32(world), (world, -1))
    for (mean, residual), own in zip(results, expected, strict=True):
        np.testing.assert_array_max_ulp(to_numpy(mean), own, 1)
        assert residual is None


@pytest.mark.exhaustive
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_the_part_that_is_not_sent_is_owed(lockstep, kernels, dtype):
    """The sum of the means equals the sum of the exact means minus the mean of what the ranks owe."""
    world, steps = 3, 5
    size = world * sum(SIZES)
    shards = of_all(world)
    owed = [np.zeros(size, dtype) for _ in shards]
    sent, exact = np.zeros(size), np.zeros(size)
    for step in range(steps):
        values = drawn(world, size, step, dtype)
        keys = KEY._replace(step=step)
        results = run(
            lockstep, (s.scatter_mean(x, e, keys) for s, x, e in zip(shards, values, owed, strict=True))
        )
        owed = [e for _, e in results]
        sent += np.concatenate([mean for mean, _ in results])
        exact += np.mean(values, axis=0, dtype=np.float64)
    assert np.abs(np.stack(owed)).max() > 0.1
    rounding = 16 * steps * np.finfo(dtype).eps * 10
    np.testing.assert_allclose(sent, exact - np.mean(owed, axis=0, dtype=np.float64), atol=rounding, rtol=0)
    assert all(e.dtype == dtype for e in owed)


def test_the_mean_is_unbiased(lockstep):
    """Over four equidistant draws shared by all elements: an expectation depends only on each element's own draw."""
    shards = of_all(2, (qcomp.QSGD(1, 8, norm="max"),), (2,))
    values = [np.asarray([1, 0.25, 0.5, 1], np.float32), np.asarray([1, -0.5, 0.25, 1], np.float32)]
    found = []
    for draw in (1 << 13, 3 << 13, 5 << 13, 7 << 13):
        with replace_draws(lambda _key, _block, draw=draw: draw):
            results = run(
                lockstep, (s.scatter_mean(x, None, KEY) for s, x in zip(shards, values, strict=True))
            )
        found.append(np.concatenate([mean for mean, _ in results]))
    assert len({x.tobytes() for x in found}) > 1
    np.testing.assert_array_equal(np.mean(found, axis=0), np.mean(values, axis=0))


def test_no_two_shards_share_draws():
    """Otherwise equal values in two shards, or on two ranks, would be rounded alike."""
    asked = []

    def source(key, block):
        first = key.bucket + block.first_bucket
        asked.extend((key.rank, row) for row in range(first, first + block.rows))
        return 0

    for shards in of_all(2, (qcomp.QSGD(1, 8),) * 2, (64, 24)):
        with replace_draws(source):
            next(shards.scatter_mean(np.ones(2 * 88, np.float32), None, KEY))
    assert len(set(asked)) == len(asked) == 2 * 2 * (8 + 3)


@pytest.mark.parametrize("world", [1, 3])
def test_all_ranks_gather_the_same(lockstep, library, kernels, world):
    shards = of_all(world, (qcomp.MinMaxUInt8(16), EXACT, EXACT, qcomp.MinMaxUInt8(16)))
    own = drawn(world, sum(SIZES))
    results = run(lockstep, (s.gather(library.array(x), KEY) for s, x in zip(shards, own, strict=True)))
    assert len({host_bytes(found) for found in results}) == 1
    found = np.reshape(to_numpy(results[0]), (world, -1))
    np.testing.assert_array_equal(found[:, 37:42], np.stack(own)[:, 37:42])
    steps = [np.ptp(x[start : start + 16]) / 255 for x in own for start in (0, 16)]
    assert 0 < np.abs(found - np.stack(own)).max() < 8 / 255
    assert np.abs(found[0, :16] - own[0][:16]).max() <= steps[0] / 2 * 1.001


def test_a_buffer_may_hold_the_own_shard(lockstep, kernels):
    world = 2
    shards = of_all(world, (qcomp.MinMaxUInt8(16),) * 4)
    own = drawn(world, sum(SIZES))
    expected = run(lockstep, (s.gather(x, KEY) for s, x in zip(shards, own, strict=True)))
    places = [np.full(world * sum(SIZES), np.nan, np.float32) for _ in shards]
    parts = [np.reshape(place, (world, -1))[rank] for rank, place in enumerate(places)]
    for part, x in zip(parts, own, strict=True):
        part[:] = x
    results = run(
        lockstep, (s.gather(x, KEY, into=place) for s, x, place in zip(shards, parts, places, strict=True))
    )
    for found, place, right in zip(results, places, expected, strict=True):
        assert found is place
        np.testing.assert_array_equal(place, right)


@pytest.mark.parametrize("world", [1, 3])
def test_changes_that_one_call_leaves_out_are_in_a_later_one(lockstep, library, world):
    """Of each bucket of 16, every call sends the 4 largest changes: the fourth sends the last ones."""
    shards = of_all(world, (qcomp.TopK(4, 16),) * 4)
    own = drawn(world, sum(SIZES))
    exact, missing = np.concatenate(own), []
    references = [library.array(0 * exact) for _ in shards]
    for _ in range(4):
        triples = zip(shards, own, references, strict=True)
        references = run(lockstep, (s.gather_changes(library.array(x), r, KEY) for s, x, r in triples))
        assert len({host_bytes(found) for found in references}) == 1
        missing.append(int((to_numpy(references[0]) != exact).sum()))
    assert missing == [world * n for n in (25 + 1 + 96, 16 + 64, 8 + 32, 0)]


@pytest.mark.parametrize("codes", [SIGN, qcomp.QSGD(7, 16, coding="elias")], ids=["fixed", "variable"])
@pytest.mark.parametrize("verb", ["scatter_mean", "gather"])
def test_a_value_that_is_not_finite_is_an_error_on_every_rank(lockstep, codes, verb):
    shards = of_all(3, (codes,), (20,))
    values = drawn(3, 60 if verb == "scatter_mean" else 20)
    values[1][7] = np.inf
    stages = [
        s.scatter_mean(x, None, KEY) if verb == "scatter_mean" else s.gather(x, KEY)
        for s, x in zip(shards, values, strict=True)
    ]
    errors = lockstep(stages, catch=qcomp.NonFiniteError)
    assert all("rank 1" in str(error) for error in errors)


def test_messages_of_variable_length(lockstep):
    codes = qcomp.QSGD(7, 16, coding="elias")
    values = drawn(2, 2 * 64)
    fixed, variable = (
        run(
            lockstep,
            (s.scatter_mean(x, None, KEY) for s, x in zip(of_all(2, (c,), (64,)), values, strict=True)),
        )
        for c in (qcomp.QSGD(7, 16), codes)
    )
    for (one, _), (other, _) in zip(fixed, variable, strict=True):
        np.testing.assert_array_equal(one, other)


def test_feedback_that_would_diverge_is_refused():
    with pytest.raises(ValueError, match="omega"):
        Shards((qcomp.QSGD(1, 512),), (3,), 0, 1).require_contraction()
