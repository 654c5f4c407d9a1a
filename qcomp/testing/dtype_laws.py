"""Laws about shapes, dtypes and precision; see `qcomp.testing.laws`."""

import math
from itertools import product

import numpy as np

from qcomp.core.numeric.arrays import device
from qcomp.core.numeric.random import Key
from qcomp.testing.compressor_case import Case
from qcomp.testing.inputs import doubles, flushed, rounded, vector
from qcomp.testing.libraries import has_dtype, to_numpy

_HALVES = (
    ("gaussian", Key(seed=1)),
    ("ties", Key(seed=1)),
    ("small", Key(seed=1, rank=1)),
    ("negative", Key(seed=1, hop=1)),
    ("sparse", Key(seed=1, step=2000)),
)


def shapes_and_dtypes(case: Case) -> None:
    """A decompressed array has the shape, dtype and device of ``like``."""
    for name in ("float32", "float64", "float16", "bfloat16"):
        if not has_dtype(case.xp, name):
            continue
        for shape in ((), (0,), (1,), (3, 0), (4, 3, 2), (1, 1, 17), (2, 1, 3, 1, 2), (70, 80)):
            x = case.array(vector("ties", math.prod(shape), 0).reshape(shape), name)
            y = case.compressor.decompress(case.compressor.compress(x, key=Key(seed=1)), like=x)
            got, expected = (tuple(y.shape), y.dtype), (shape, x.dtype)
            assert got == expected, f"decompressed to {got}; expected {expected}"
            assert device(y) == device(x), f"decompressed to {device(y)}; expected {device(x)}"


def double_precision(case: Case) -> None:
    """float64 loses about as much as float32; with feedback, the residual is what was lost, computed in float64."""
    if not has_dtype(case.xp, "float64"):
        return
    bucket = min(case.compressor.traits.bucket_size, 1 << 13)
    for size in (1, 7, 9, bucket + 9, 5001):
        for family in ("gaussian", "positive", "sparse", "tiny", "huge"):
            x = doubles(vector(family, size, 1), 1)
            residual = np.roll(x, 1) * 0.5
            if not case.takes(2 * x):
                continue
            got = case.compress_with_feedback(x, residual, key=Key(seed=1, step=size))
            expected = flushed(flushed(x) + residual) - got.decoded
            assert got.residual.dtype == np.float64, f"the residual is {got.residual.dtype}"
            assert np.array_equal(got.residual, flushed(expected)), (
                f"the residual is not fl(p - q) in float64, for {size} {family} values"
            )
            # float64 only makes the arithmetic finer, so the loss is about the same.
            near = (
                case.decoded(x.astype(np.float32), Key(seed=1))
                if np.any(x) and not case.compressor.traits.random
                else None
            )
            if near is not None:
                mine = case.decoded(x, Key(seed=1))
                lost, usual = (np.sum((y - x) ** 2) for y in (mine, near))
                assert lost <= 4 * usual + 2.0**-20 * np.sum(x**2), (
                    f"{size} {family} values lose {lost:.3g} in float64, and {usual:.3g} in float32"
                )


def decoded_in_another_dtype(case: Case) -> None:
    """A float32 payload decompresses to the same values in float64, a float64 payload to rounded values in float32."""
    if case.jit or len(case.dtypes) < 2:
        return
    bucket = min(case.compressor.traits.bucket_size, 4096)
    for size, family in product((1, 9, bucket + 3), ("gaussian", "positive", "sparse")):
        x = vector(family, size, 12)
        for dtype, other in (case.dtypes, case.dtypes[::-1]):
            payload = case.compressor.compress(case.array(x, dtype), key=Key(seed=1))
            own, found = (
                to_numpy(case.compressor.decompress(payload, like=case.array(x, name))).astype(np.float64)
                for name in (dtype, other)
            )
            worst = int(np.argmax(np.abs(own - found) - 2.0**-18 * np.abs(own).max(initial=0.0)))
            assert abs(own[worst] - found[worst]) <= 2.0**-18 * np.abs(own).max(), (
                f"a payload of {size} elements of {dtype} decompresses to {own[worst]:.9g} in {dtype}, and to "
                f"{found[worst]:.9g} in {other}"
            )


def one_way(case: Case) -> None:
    """`compress` returns the same payload as `qcomp.feedback.compress` with a zero residual; means use the latter."""
    if case.jit:
        return
    bucket = min(case.compressor.traits.bucket_size, 4096)
    for size in (1, 9, bucket + 3, 5001):
        for dtype in case.dtypes:
            for key in (Key(seed=1), Key(seed=1, rank=3, hop=1, step=70)):
                x = vector("gaussian", size, 11).astype(dtype)
                fed = case.compress_with_feedback(x, np.zeros_like(x), key=key)
                alone = case.compress(x, key=key)
                assert fed.data == alone.data, (
                    f"compress and feedback.compress make different payloads of {size} elements of {dtype}"
                )


def half_precision(case: Case) -> None:
    """float16 and bfloat16 compress like the same values in float32; decompressed values are rounded once."""
    for name in ("float16", "bfloat16"):
        if not has_dtype(case.xp, name):
            continue
        bucket = min(case.compressor.traits.bucket_size, 4096)
        for (family, key), size in product(_HALVES, (1, 7, 21, bucket + 3, 4100)):
            x = rounded(vector(family, size, 10), name)
            residual = flushed(np.roll(x, 1) * np.float32(0.3))
            single = case.compress_with_feedback(x, residual, key=key)
            half = case.compress_with_feedback(x, residual, key=key, dtype=name)
            payload = case.compressor.compress(case.array(x, name), key=key)
            assert to_numpy(payload.data).tobytes() == case.compress(x, key=key).data, (
                f"the payload of {name} differs from the payload of the same values in float32"
            )
            decoded = to_numpy(case.compressor.decompress(payload, like=case.array(x, name)))
            expected = rounded(case.compress(x, key=key).decoded, name)
            assert decoded.astype(np.float32).tobytes() == expected.tobytes(), (
                f"decompressed to {name}, a payload does not give its float32 values, rounded once"
            )
            assert half.data == single.data, (
                f"the payload of {name} differs from the payload of the same values in float32"
            )
            assert half.residual.dtype == np.float32, f"the residual of {name} is {half.residual.dtype}"
            assert half.residual.tobytes() == single.residual.tobytes(), (
                f"the residual of {name} differs from the residual of the same values in float32"
            )
            decoded, expected = half.decoded.astype(np.float32), rounded(single.decoded, name)
            assert decoded.tobytes() == expected.tobytes(), (
                f"with feedback, values of {name} are not rounded once"
            )
