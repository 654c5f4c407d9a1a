"""Laws for every drawn vector; see `qcomp.testing.laws`."""

from collections.abc import Callable
from functools import partial

import numpy as np

from qcomp.core.numeric.arrays import TINY
from qcomp.core.numeric.buckets import Block
from qcomp.core.numeric.random import Key
from qcomp.testing.compressor_case import Case
from qcomp.testing.inputs import doubles, flushed, vector
from qcomp.testing.libraries import Vector
from qcomp.testing.payload_laws import announced_length, coder_loses_nothing


def same_bytes(case: Case, x: Vector) -> None:
    """Payload, decoded vector and residual have the same bytes as on NumPy."""
    residual = flushed(np.roll(x, 1) * np.float32(0.5))
    key = Key(seed=5, step=3, tensor=2, rank=1)
    got, expected = (each.compress_with_feedback(x, residual, key=key) for each in (case, case.on_numpy))
    for name in ("data", "decoded", "residual"):
        a, b = (np.frombuffer(bytes(getattr(each, name)), np.uint8) for each in (got, expected))
        assert np.array_equal(a, b), f"{name} differs from NumPy's in {np.count_nonzero(a != b)} bytes"


def feedback_law(case: Case, x: Vector) -> None:
    """With p = fl(x + residual) and q the decoded vector, the new residual is fl(p - q) bit for bit."""
    residual = flushed(np.roll(x, 3) * np.float32(-0.25))
    got = case.compress_with_feedback(x, residual)
    p = flushed(flushed(x) + residual)
    expected = flushed(p - got.decoded)
    assert got.residual.tobytes() == expected.tobytes(), "the residual is not fl(p - q)"
    slack = 2.0**-24 * np.maximum(np.abs(p), np.abs(got.residual)) + 2 * TINY
    error = np.abs(got.decoded.astype(np.float64) + got.residual - p)
    assert np.all(error <= slack), "decoded vector and residual do not add up to the compensated vector"


def deterministic(case: Case, x: Vector) -> None:
    """The same vector and key give the same payload, and the same payload gives the same vector."""
    first, second = case.compress(x), case.compress(x)
    assert first.data == second.data, "two payloads of the same vector and key differ"
    assert first.decoded.tobytes() == second.decoded.tobytes(), "decompressing twice gives two vectors"


def lossless(case: Case, x: Vector) -> None:
    """C(v) = v bit for bit."""
    assert case.compress(x).decoded.tobytes() == x.tobytes(), "the vector came back changed"


def keeps_zero(case: Case, x: Vector) -> None:
    """An element that is 0 stays 0, whatever is drawn."""
    y = np.where(np.arange(x.size) % 3 == 1, np.float32(0), x)
    _require_zeros(y, case.compress(y).decoded)


def _require_zeros(x: Vector, decoded: Vector) -> None:
    assert np.all(decoded[x == 0] == 0), (
        f"an element that was 0 becomes nonzero, of {x.size} elements of {x.dtype}"
    )


def sparse(case: Case, x: Vector) -> None:
    """A bucket has at most as many nonzero elements as the traits say."""
    _require_sparse(case, case.compress(x).decoded)


def _require_sparse(case: Case, decoded: Vector) -> None:
    bucket, most = case.compressor.traits.bucket_size, case.compressor.traits.kept
    for start in range(0, decoded.size, bucket):
        kept = np.count_nonzero(decoded[start : start + bucket])
        assert most is None or kept <= most, (
            f"{kept} elements of a bucket are other than 0; the traits say {most}"
        )


def peak(case: Case, x: Vector) -> None:
    """In every bucket, the largest error is at most the largest magnitude times the peak in the traits."""
    _require_peak(case, x, case.compress(x).decoded)


def _require_peak(case: Case, x: Vector, decoded: Vector) -> None:
    bucket, most = case.compressor.traits.bucket_size, case.compressor.traits.peak
    if most is None:
        return
    v = flushed(x).astype(np.float64)
    for start in range(0, v.size, bucket):
        part = v[start : start + bucket]
        largest, error = np.abs(part).max(), np.abs(decoded[start : start + bucket] - part).max()
        assert error <= most * (1 + 2.0**-20) * largest + 2.0**-119, (
            f"the largest error of a bucket is {error:.6g}, above (peak) max |v| = {most:.6g} * {largest:.6g}"
        )


def _constant(draw: int, key: Key, block: Block) -> int:  # noqa: ARG001 - the same for all
    return draw


_SMALLEST, _LARGEST = partial(_constant, 0), partial(_constant, 65535)
"""Sources of extreme draws; a case under jit compiles once for each source and shape."""


def extreme_draws(case: Case) -> None:
    """The laws about zeros, sparsity and losslessness hold for the smallest and the largest draws, in every dtype."""
    traits = case.compressor.traits
    if not (traits.keeps_zero or traits.kept is not None or traits.lossless or traits.peak is not None):
        return
    bucket = min(traits.bucket_size, 4096)
    for size in (7, bucket, 2 * bucket + 5, 5000):
        for family in ("gaussian", "sparse", "one_hot", "ties", "wide"):
            for dtype in case.dtypes:
                x = vector(family, size, 35).astype(dtype)
                if not traits.lossless:
                    x[::3] = 0
                elif dtype == "float64":
                    x = doubles(x, 35)
                    x[:3] = (-0.0, 1e-200, 5e-324)[: x.size]
                if not case.takes(x):
                    continue
                sources = (_SMALLEST, _LARGEST) if traits.random else ()
                found = [case.compress(x, source=source).decoded for source in sources]
                keys = (Key(seed=3), Key(seed=3, step=9, rank=1), Key(seed=3, hop=1, bucket=7))
                found += [case.decoded(x, key) for key in keys]
                for decoded in found:
                    if traits.keeps_zero:
                        _require_zeros(x, decoded)
                    _require_sparse(case, decoded)
                    _require_peak(case, x, decoded)
                    if traits.lossless:
                        assert decoded.astype(x.dtype).tobytes() == x.tobytes(), (
                            f"{size} {family} values of {dtype} came back changed"
                        )


VectorLaw = Callable[[Case, Vector], None]

VECTOR_LAWS: tuple[VectorLaw, ...] = (
    same_bytes,
    feedback_law,
    deterministic,
    lossless,
    keeps_zero,
    sparse,
    peak,
    announced_length,
    coder_loses_nothing,
)
"""The laws for every vector."""

_CONDITIONS: dict[VectorLaw, Callable[[Case], bool]] = {
    same_bytes: lambda case: case.jit or case.xp is not np,
    lossless: lambda case: case.compressor.traits.lossless,
    keeps_zero: lambda case: case.compressor.traits.keeps_zero,
    sparse: lambda case: case.compressor.traits.kept is not None,
    peak: lambda case: case.compressor.traits.peak is not None,
    coder_loses_nothing: lambda case: case.compressor.coder is not None,
}


def applies(case: Case, law: VectorLaw) -> bool:
    """Return whether the traits promise what a law checks; drawing vectors for other laws would waste time."""
    return law not in _CONDITIONS or _CONDITIONS[law](case)
