"""The exact mean in a world of one: what an exchange would return, without exchanging."""

from contextlib import nullcontext
from itertools import product

import numpy as np
import pytest

from qcomp import CompressedMean, Identity, NonFiniteError
from qcomp.comm import LocalCommunicator
from qcomp.core.kernels import use_kernels
from qcomp.core.mean.stages import drive
from qcomp.testing.inputs import FAMILIES, vector
from qcomp.testing.libraries import has_dtype, to_library, to_numpy

MEAN = CompressedMean(Identity(), feedback=False)
SIZES = (5, 0, 1, 3000)


class Silent(LocalCommunicator):
    """The only rank of a world, which must not exchange anything."""

    def _exchange(self, *_):
        raise AssertionError("something was sent")


def alone(xs, **options):
    state = MEAN.zeros(xs, rank=0, size=1)
    means, _ = drive(MEAN.stages(xs, state, **options), Silent.alone())
    return means


def computed(pure):
    return use_kernels(None) if pure else nullcontext()


@pytest.mark.quick_cases(4)
@pytest.mark.parametrize("pure", [False, True], ids=["kernels", "pure"])
def test_equals_the_mean_of_two_ranks_with_the_same_values(library, lockstep, pure):
    xp = library.xp
    cases = [(family, "float32") for family in (FAMILIES if library.name != "jax" else ("gaussian",))]
    cases += [("gaussian", name) for name in ("float64", "float16", "bfloat16") if has_dtype(xp, name)]
    for family, dtype in cases:
        xs = [library.seal(to_library(xp, vector(family, size, 3), dtype)) for size in SIZES]
        with computed(pure):
            own = alone(xs)
            two = [MEAN.stages(xs, MEAN.zeros(xs, rank=rank, size=2)) for rank in range(2)]
            (expected, _), _ = lockstep(two)
        for a, b, x in zip(own, expected, xs, strict=True):
            assert to_numpy(a).tobytes() == to_numpy(b).tobytes(), (family, dtype)
            assert a.dtype == x.dtype
            assert a.shape == x.shape


@pytest.mark.parametrize("pure", [False, True], ids=["kernels", "pure"])
@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("bad", [np.nan, -np.inf, 2.0**100])
def test_refuses_what_an_exchange_refuses(float64_library, bad, overwrite, pure):
    xs = [vector("gaussian", size, 3) for size in SIZES]
    xs[3][2999] = bad
    given = [to_library(float64_library.xp, x) for x in xs]
    with computed(pure), pytest.raises(NonFiniteError, match="a value on rank 0 is not finite, or too large"):
        alone(given, overwrite=overwrite)
    assert [to_numpy(x).tobytes() for x in given] == [x.tobytes() for x in xs]


@pytest.mark.parametrize("pure", [False, True], ids=["kernels", "pure"])
def test_shares_no_memory_with_the_values(pure):
    xs = [vector("gaussian", size, 3) for size in SIZES]
    with computed(pure):
        means = alone(xs)
    assert not any(np.shares_memory(mean, x) for mean in means for x in xs)


EXACT = [2.0**994, -3 * 2.0**100, 2.0**-133, -(2.0**-1022), 2.0**-1023, -0.0]


def test_exact_float64_has_its_own_range(float64_library, lockstep):
    """Sums over ranks of values below 2^996 are finite; scales in float32 are not involved."""

    def averaged(values, size, topology, **catch):
        mean, x = CompressedMean(Identity(), topology, feedback=False), float64_library.array(values)
        return lockstep([mean.stages(x, mean.zeros(x, rank=r, size=size)) for r in range(size)], **catch)

    expected = np.array([*EXACT[:4], 0.0, 0.0]).tobytes()
    for size, topology in product((1, 3), ("two_phase", "all_gather", "ring", "hierarchical")):
        assert all(to_numpy(x).tobytes() == expected for x, _ in averaged(EXACT, size, topology)), topology
        errors = averaged([2.0**996], size, topology, catch=NonFiniteError)
        assert all("is not finite, or too large" in str(error) for error in errors)


def test_exact_float32_has_the_same_bits_beside_float64(lockstep):
    """Joined to one vector, it was added up in float64, kept what is below 2^-126, and was not refused."""
    doubles = np.full(3, 2.0**200)

    def averaged(singles, size, topology, others, **catch):
        mean, x = CompressedMean(Identity(), topology, feedback=False), [*others, singles]
        return lockstep([mean.stages(x, mean.zeros(x, rank=r, size=size)) for r in range(size)], **catch)

    for size, topology in product((1, 3), ("two_phase", "all_gather", "ring", "hierarchical")):
        singles = np.array([0.1, 2.0**-127, 3.0], np.float32)
        own, beside = (averaged(singles, size, topology, others) for others in ([], [doubles]))
        assert [x[-1].tobytes() for x, _ in own] == [x[-1].tobytes() for x, _ in beside]
        assert all(x[0].tobytes() == doubles.tobytes() for x, _ in beside)
        errors = averaged(np.full(3, 2.0**101, np.float32), size, topology, [doubles], catch=NonFiniteError)
        assert all("is not finite, or too large" in str(error) for error in errors)
