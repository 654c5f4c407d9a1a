"""The laws of compressors that are about shapes, dtypes and precision; see `qcomp.testing.laws`."""

import math

import numpy as np

from qcomp.core.arrays import device
from qcomp.core.random import Key
from qcomp.testing.case import Case
from qcomp.testing.inputs import flushed, rounded, vector
from qcomp.testing.libraries import has_dtype

__all__ = ["double_precision", "half_precision", "shapes_and_dtypes"]


def shapes_and_dtypes(case: Case) -> None:
    """A decompressed array has the shape, dtype and device of ``like``."""
    for name in ("float32", "float64", "float16", "bfloat16"):
        if not has_dtype(case.xp, name):
            continue
        for shape in ((), (3, 0), (4, 3, 2)):
            x = case.array(vector("ties", math.prod(shape), 0).reshape(shape), name)
            y = case.compressor.decompress(case.compressor.compress(x, key=Key(seed=1)), like=x)
            got, expected = (tuple(y.shape), y.dtype), (shape, x.dtype)
            assert got == expected, f"decompressed to {got}; expected {expected}"
            assert device(y) == device(x), f"decompressed to {device(y)}; expected {device(x)}"


def double_precision(case: Case) -> None:
    """float64 is compressed as well as float32: the same promise of contraction, and feedback without loss."""
    if not has_dtype(case.xp, "float64"):
        return
    size = case.compressor.traits.bucket_size + 9
    x = vector("gaussian", size, 1).astype(np.float64) * (1 + 2.0**-40)
    got = case.compress_with_feedback(x, np.roll(x, 1))
    p = x + np.roll(x, 1)
    assert np.array_equal(got.residual, flushed(p - got.decoded)), "the residual is not fl(p - q) in float64"
    traits = case.compressor.traits
    if traits.delta is not None and not traits.random:
        error = np.sum((case.compress(x).decoded - x) ** 2)
        bound = (1 - traits.delta + 2.0**-22) * np.sum(x**2)
        assert error <= bound, f"||C(v) - v||^2 is {error:.6g}, above {bound:.6g}, in float64"


def half_precision(case: Case) -> None:
    """float16 and bfloat16 are compressed as the same values in float32 are; the result is rounded to them once."""
    for name in ("float16", "bfloat16"):
        if not has_dtype(case.xp, name):
            continue
        for family in ("gaussian", "ties"):
            x = rounded(vector(family, 2 * 8 + 5, 10), name)
            residual = flushed(np.roll(x, 1) * np.float32(0.3))
            single = case.compress_with_feedback(x, residual)
            half = case.compress_with_feedback(x, residual, dtype=name)
            assert half.data == single.data, (
                f"the payload of {name} is not that of the same values in float32"
            )
            assert half.residual.dtype == np.float32, f"the residual of {name} is {half.residual.dtype}"
            assert half.residual.tobytes() == single.residual.tobytes(), (
                f"the residual of {name} is not that of the same values in float32"
            )
            decoded, expected = half.decoded.astype(np.float32), rounded(single.decoded, name)
            assert decoded.tobytes() == expected.tobytes(), f"decompressed to {name}, it is not rounded once"
