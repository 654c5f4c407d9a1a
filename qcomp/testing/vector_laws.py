"""The laws of compressors that hold for every vector, which Hypothesis draws; see `qcomp.testing.laws`."""

from collections.abc import Callable
from typing import Any

import numpy as np

from qcomp.core.arrays import TINY
from qcomp.core.random import Key
from qcomp.testing.case import Case
from qcomp.testing.inputs import flushed
from qcomp.testing.libraries import to_numpy
from qcomp.testing.payload_laws import announced_length, coder_loses_nothing

__all__ = ["VECTOR_LAWS", "VectorLaw"]

Vector = np.ndarray[Any, Any]


def same_bytes(case: Case, x: Vector) -> None:
    """Payload, decoded vector and residual are the bytes that NumPy gives."""
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
    """The same vector and key give the same payload, and the same payload the same vector."""
    first, second = case.compress(x), case.compress(x)
    assert first.data == second.data, "two payloads of the same vector and key differ"
    assert first.decoded.tobytes() == second.decoded.tobytes(), "decompressing twice gives two vectors"


def contraction(case: Case, x: Vector) -> None:
    """||C(v) - v||^2 <= (1 - delta) ||v||^2, for compressors without randomness."""
    traits = case.compressor.traits
    if traits.delta is None or traits.random:
        return
    v = flushed(x).astype(np.float64)
    error = np.sum((case.compress(x).decoded - v) ** 2)
    # Scales are rounded to float32: a relative 2^-22 of the vector; below 2^-126 all is zero.
    bound = (1 - traits.delta) * np.sum(v**2) + 2.0**-22 * np.sum(v**2) + x.size * (2 * TINY) ** 2
    assert error <= bound, f"||C(v) - v||^2 is {error:.6g}, above (1 - delta) ||v||^2 = {bound:.6g}"


def lossless(case: Case, x: Vector) -> None:
    """C(v) = v bit for bit."""
    if case.compressor.traits.lossless:
        assert case.compress(x).decoded.tobytes() == x.tobytes(), "the vector came back changed"


def keeps_zero(case: Case, x: Vector) -> None:
    """An element that is 0 stays 0, whatever is drawn."""
    if not case.compressor.traits.keeps_zero:
        return
    y = np.where(np.arange(x.size) % 3 == 1, np.float32(0), x)
    decoded = case.compress(y).decoded
    assert np.all(decoded[y == 0] == 0), "an element that was 0 is not 0 any more"


def sparse(case: Case, x: Vector) -> None:
    """No more elements of a bucket are other than 0 than the traits say."""
    traits = case.compressor.traits
    if traits.kept is None:
        return
    decoded = case.compress(x).decoded
    for start in range(0, x.size, traits.bucket_size):
        kept = np.count_nonzero(decoded[start : start + traits.bucket_size])
        assert kept <= traits.kept, (
            f"{kept} elements of a bucket are other than 0; the traits say {traits.kept}"
        )


def pure(case: Case, x: Vector) -> None:
    """Neither the vector nor the payload is written to."""
    if case.jit:
        return  # what is traced cannot be written to
    array = case.array(x)
    payload = case.compressor.compress(array, key=Key(seed=1))
    before = to_numpy(payload.data).tobytes()
    case.compressor.decompress(payload, like=array)
    assert to_numpy(array).tobytes() == x.tobytes(), "compressing changed the vector"
    assert to_numpy(payload.data).tobytes() == before, "decompressing changed the payload"


def any_layout(case: Case, x: Vector) -> None:
    """Every other element of a longer array, a view, is compressed as a vector of its own is."""
    if case.jit:
        return  # the arrays of JAX are never views
    array = case.array(np.repeat(x, 2))[::2]
    data = case.compressor.compress(array, key=Key(seed=1)).data
    assert to_numpy(data).tobytes() == to_numpy(case.payload(x).data).tobytes(), (
        "a strided view gives other bytes"
    )


VectorLaw = Callable[[Case, Vector], None]

VECTOR_LAWS: tuple[VectorLaw, ...] = (
    same_bytes,
    feedback_law,
    deterministic,
    contraction,
    lossless,
    keeps_zero,
    sparse,
    pure,
    any_layout,
    announced_length,
    coder_loses_nothing,
)
"""The laws that hold for every vector."""
