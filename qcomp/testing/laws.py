"""The laws of compressors, each a function that raises AssertionError where a `Case` breaks it.

A law that does not apply, by the traits of the compressor, passes.
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from qcomp.core.buckets import Block
from qcomp.core.errors import NonFiniteError, PayloadError
from qcomp.core.payload import Payload
from qcomp.core.random import Key
from qcomp.core.registry import compressor as from_spec
from qcomp.testing.case import Case
from qcomp.testing.dtype_laws import double_precision, half_precision, shapes_and_dtypes
from qcomp.testing.expectations import unbiased, variance_bound
from qcomp.testing.inputs import sizes, vector
from qcomp.testing.libraries import to_numpy
from qcomp.testing.payload_laws import damaged_payload_is_an_error, payload_size
from qcomp.testing.vector_laws import VECTOR_LAWS

__all__ = ["LAWS", "VECTOR_LAWS"]

Vector = np.ndarray[Any, Any]


def _sizes(case: Case) -> tuple[int, ...]:
    return sizes(case.compressor.traits.bucket_size)


def same_when_flat(case: Case) -> None:
    """The compressor of a tensor is also that of the tensor as a vector, which is how it is averaged."""
    for shape in ((), (5,), (4, 3, 2), (0, 3)):
        own = case.compressor.for_shape(shape)
        flat = own.for_shape((math.prod(shape),))
        assert flat == own, f"for the shape {shape} it is {own.spec}, and that is {flat.spec} for a vector"


def round_trip_of_bytes(case: Case) -> None:
    """`to_bytes` and `from_bytes` keep the payload, and the spec string keeps the compressor."""
    again = from_spec(case.compressor.spec)
    assert again == case.compressor, f"the spec string {case.compressor.spec!r} makes {again!r}"
    for size in (0, 1, 9, case.compressor.traits.bucket_size + 1):
        x = vector("gaussian", size, 2)
        payload = case.payload(x)
        back = Payload.from_bytes(payload.to_bytes(), like=case.array(x))
        assert to_numpy(back.data).tobytes() == to_numpy(payload.data).tobytes(), "the data changed"
        assert (back.compressor, back.size, back.dtype) == (payload.compressor, size, payload.dtype)


def key_names_the_draws(case: Case) -> None:
    """Each part of the key changes the draws of a random compressor; without randomness the key does not matter."""
    x = vector("gaussian", 512, 3)
    base = Key(seed=1, step=2, tensor=3, rank=4)
    others = {
        "seed": base._replace(seed=2),
        "step": base._replace(step=3),
        "tensor": base._replace(tensor=2),
        "rank": base._replace(rank=5),
        "hop": base.at(hop=1),
        "bucket": base.at(bucket=64),
    }
    reference = case.compress(x, key=base).data
    for part, key in others.items():
        differs = case.compress(x, key=key).data != reference
        random = case.compressor.traits.random
        assert differs == random, (
            f"another {part} in the key {'does not change' if random else 'changes'} the payload"
        )


def needs_key(case: Case) -> None:
    """A random compressor says that it needs a key."""
    x = case.array(vector("gaussian", 9, 4))
    if not case.compressor.traits.random:
        case.compressor.compress(x)
        return
    try:
        case.compressor.compress(x)
    except ValueError:
        return
    raise AssertionError("no key is not an error")


def cut_at_buckets(case: Case) -> None:
    """A vector cut at a multiple of the bucket size, with the key's bucket counted on, decompresses to the same."""
    bucket = case.compressor.traits.bucket_size
    x = vector("gaussian", _sizes(case)[-1], 5)
    key = Key(seed=1, step=1)
    whole = case.compress(x, key=key).decoded
    head = case.compress(x[:bucket], key=key).decoded
    tail = case.compress(x[bucket:], key=key.at(bucket=1)).decoded
    parts = np.concatenate([head, tail])
    assert parts.tobytes() == whole.tobytes(), (
        "cut after one bucket, the vector decompresses to something else"
    )


def padding_never_leaks(case: Case) -> None:
    """What fills up a tail does not matter: a few elements are compressed as when nothing had to be filled up.

    One, two or four elements need padding to eight; eight copies, four or two need none, and have the same mean
    magnitude, minimum and maximum, to the last bit. The norm of an unbiased compressor may grow with the
    copies, but not with zeros, and copies may displace each other where few elements are kept: so there zeros
    take their place. Buckets that are smaller than eight hold fewer copies.
    """
    traits = case.compressor.traits
    fill_with_zeros = traits.unbiased or traits.kept is not None

    def source(_: Key, block: Block) -> Vector:
        return np.full((block.rows, block.length), 20000.0, dtype=np.float32)

    room = min(8, 1 << traits.bucket_size.bit_length() - 1) if traits.bucket_size > 1 else 8
    for count in (1, 2, 4)[: room.bit_length() - 1]:
        tail = vector("positive", count, count)
        filled = np.pad(tail, (0, room - count)) if fill_with_zeros else np.tile(tail, room // count)
        a, b = (case.compress(x, source=source).decoded[:count] for x in (tail, filled))
        assert a.tobytes() == b.tobytes(), f"a tail of {count} decompresses to {a}, without padding to {b}"


def zero_gives_zero(case: Case) -> None:
    """Zeros, and what is below 2^-126, decompress to zeros."""
    for size in _sizes(case):
        decoded = case.compress(np.zeros(size, dtype=np.float32)).decoded
        assert not np.any(decoded), f"{size} zeros decompress to something else"
        if not case.compressor.traits.lossless:
            small = case.compress(vector("subnormal", size, 7).clip(-(2.0**-127), 2.0**-127)).decoded
            assert not np.any(small), f"{size} subnormals decompress to something else than zeros"


def huge_values(case: Case) -> None:
    """Huge finite values give a finite result or the documented error."""
    for scale in (2.0**99, 2.0**126, float(np.finfo(np.float32).max)):
        for size in (1, 9, case.compressor.traits.bucket_size + 1):
            x = np.where(np.arange(size) % 2, -1, 1).astype(np.float32) * np.float32(scale)
            try:
                decoded = case.compress(x).decoded
            except NonFiniteError:
                continue
            if not case.jit:
                assert np.all(np.isfinite(decoded)), (
                    f"{size} values of {scale:.3g} decompress to infinity or NaN"
                )


def non_finite_is_an_error(case: Case) -> None:
    """One infinity or NaN anywhere raises NonFiniteError."""
    if case.jit:
        return  # there is nothing to look at while tracing
    size = case.compressor.traits.bucket_size + 9
    for bad in (np.nan, np.inf, -np.inf):
        for position in (0, size // 2, size - 1):
            x = vector("gaussian", size, 8)
            x[position] = bad
            try:
                case.payload(x)
            except NonFiniteError:
                continue
            raise AssertionError(f"{bad} at {position} of {size} was compressed without an error")


def foreign_payload_is_an_error(case: Case) -> None:
    """A payload of another size or another compressor raises PayloadError."""
    x = vector("gaussian", 9, 9)
    payload = case.payload(x)
    wrong = {
        "of another size": (payload, case.array(x[:8])),
        "of another compressor": (Payload("other", 9, "float32", payload.data), case.array(x)),
        "without its last byte": (
            Payload(payload.compressor, 9, "float32", payload.data[:-1]),
            case.array(x),
        ),
    }
    for what, (bad, like) in wrong.items():
        try:
            case.compressor.decompress(bad, like=like)
        except PayloadError:
            continue
        raise AssertionError(f"a payload {what} was decompressed without an error")


Law = Callable[[Case], None]

LAWS: tuple[Law, ...] = (
    payload_size,
    shapes_and_dtypes,
    double_precision,
    half_precision,
    same_when_flat,
    round_trip_of_bytes,
    key_names_the_draws,
    needs_key,
    cut_at_buckets,
    padding_never_leaks,
    zero_gives_zero,
    huge_values,
    non_finite_is_an_error,
    foreign_payload_is_an_error,
    damaged_payload_is_an_error,
    unbiased,
    variance_bound,
)
"""The laws of the compressor as a whole."""
