"""Eight bits between the extremes of every bucket, with feedback: `qcomp.core.compressors.minmax`.

p = flush(flush(x) + residual); step = (max - min) / 255, rounded up to 16 bits; base = a whole number of steps if the
bucket spans zero, else min; code = rint(flush(p - base) / step), clamped to 0 to 255; residual' = flush(p - (base +
code * step)).

Bytes read and written per element: encode with feedback 8 and 5, without 4 and 1; decode 1 and 4, plus 4 read to
accumulate. Memory bandwidth is nearly the limit; the division is most of the arithmetic.
"""

from __future__ import annotations

import numpy as np

from qcomp.backends.numba_cpu.codec import (
    DecodeRun,
    EncodeRun,
    Weights,
)
from qcomp.backends.numba_cpu.jit import Bytes, Floats, Longs, borrow, inline, kernel
from qcomp.backends.numba_cpu.primitives import (
    ROUND,
    ZERO,
    F,
    U,
    as_bits,
    as_float,
    bucket_length,
    finish,
    flush,
    load,
    load_scale,
    store_scale,
    too_large,
)
from qcomp.backends.numba_cpu.qsgd import round_up_step
from qcomp.backends.numba_cpu.stream import finish_streams, stream
from qcomp.backends.numba_cpu.tables import Decoded, ToEncode, input_vectors, output_vectors, run_of

__all__ = ["decode_minmax", "encode_minmax"]


def encode_minmax(bucket_size: int) -> EncodeRun:
    """Return a function that compresses vectors to eight bits per element."""

    def run(vectors: ToEncode, mode: int, weights: Weights, first: int, last: int) -> int:
        scratch = np.empty(bucket_size, dtype=np.float32)
        failed: int = _encode(vectors.rows, vectors.ends, mode, *weights, bucket_size, first, last, scratch)
        return failed

    return run


def decode_minmax(bucket_size: int) -> DecodeRun:
    """Return a function that decompresses payloads of eight bits per element."""

    def run(vectors: Decoded, accumulate: bool, streams: bool, finish: bool, first: int, last: int) -> None:
        beside = np.empty(bucket_size if streams else 0, dtype=np.float32)
        _decode(
            *vectors,
            bucket_size,
            accumulate,
            streams,
            finish,
            first,
            last,
            beside,
        )

    return run


@inline
def _ordered(bits: np.uint32) -> np.int32:
    """Return an integer that is ordered like the float32 with these bits, NaN beyond the infinities; its own inverse.

    The kernels compare integers because comparisons of floats that may be NaN do not vectorise.
    """
    signed = np.int32(bits)
    return np.int32(signed ^ (signed >> np.int32(31) & np.int32(0x7FFFFFFF)))


@inline
def _extremes(p: Floats) -> tuple[np.float32, np.float32]:
    low = np.int32(0x7FFFFFFF)
    high = np.int32(-0x80000000)
    for i in range(p.size):
        value = _ordered(as_bits(p[i]))
        low = min(low, value)
        high = max(high, value)
    return as_float(U(_ordered(U(low)))), as_float(U(_ordered(U(high))))


@inline
def _clamp(code: np.float32) -> np.float32:
    code = code if code > ZERO else ZERO
    return F(255) if code > F(255) else code


@inline
def _quantise(p: Floats, base: np.float32, step: np.float32, divisor: np.float32, codes: Bytes) -> None:
    """Fill the codes, and let p = flush(p - decoded)."""
    for i in range(p.size):
        value = p[i]
        # Clamping before rounding gives the same code. An addition rounds: the code is then in the last byte.
        rounded = _clamp(flush(value - base) / divisor) + ROUND
        codes[i] = np.uint8(as_bits(rounded))
        p[i] = flush(value - (base + (rounded - ROUND) * step))


@inline
def _encode_vector(
    x: Floats,
    residual: Floats,
    out: Floats,
    mode: int,
    m: Floats,
    keep: np.float32,
    new: np.float32,
    bucket_size: int,
    first: int,
    last: int,
    data: Bytes,
    scratch: Floats,
) -> int:
    x, residual, out, data, scratch = borrow(x), borrow(residual), borrow(out), borrow(data), borrow(scratch)
    m = borrow(m)
    size = x.size
    count = (size + bucket_size - 1) // bucket_size
    rest = size - size // bucket_size * bucket_size
    codes_end = size - rest + (bucket_length(rest) if rest > 0 else 0)
    bases = codes_end  # buckets are multiples of 8 long: the scales are aligned
    steps = bases + 4 * count
    for bucket in range(first, last):
        start = bucket * bucket_size
        stop = min(start + bucket_size, size)
        # No padding, which must not affect the extremes.
        p = load(x, residual, out, mode, m, keep, new, start, stop, stop - start, scratch)
        low, high = _extremes(p)
        if too_large(as_bits(low)) or too_large(as_bits(high)):
            return bucket
        step = round_up_step(flush(high - low), 255, 0xFF)
        divisor = step if step > ZERO else F(1)
        base = low
        if low <= ZERO and high >= ZERO:
            base = -(_clamp(np.rint(-low / divisor)) * step)
        base = flush(base)
        store_scale(data, bases + 4 * bucket, base)
        store_scale(data, steps + 4 * bucket, step)
        _quantise(p, base, step, divisor, data[start:stop])
    if last == count:
        data[size:codes_end] = np.uint8(0)
    return -1


@kernel("int64(table, i64, int64, float32, float32, int64, int64, int64, f32)")
def _encode(
    rows: Longs,
    ends: Longs,
    mode: int,
    keep: np.float32,
    new: np.float32,
    bucket_size: int,
    first: int,
    last: int,
    scratch: Floats,
) -> int:
    scratch = borrow(scratch)
    vector = 0
    while first < last:
        vector, start, stop = run_of(ends, vector, first, last)
        x, residual, out, m, data = input_vectors(rows, vector)
        failed = _encode_vector(x, residual, out, mode, m, keep, new, bucket_size, start, stop, data, scratch)
        if failed >= 0:
            return first - start + failed
        first += stop - start
    return -1


@inline
def _write(codes: Bytes, base: np.float32, step: np.float32, out: Floats) -> None:
    for i in range(out.size):
        out[i] = base + F(np.int32(codes[i])) * step


@inline
def _accumulate(codes: Bytes, base: np.float32, step: np.float32, out: Floats) -> None:
    for i in range(out.size):
        out[i] += base + F(np.int32(codes[i])) * step


@inline
def _decode_vector(
    data: Bytes,
    bucket_size: int,
    out: Floats,
    accumulate: bool,
    streams: bool,
    ranks: np.float32,
    first: int,
    last: int,
    beside: Floats,
) -> None:
    data, out, beside = borrow(data), borrow(out), borrow(beside)
    count = (out.size + bucket_size - 1) // bucket_size
    rest = out.size - out.size // bucket_size * bucket_size
    codes_end = out.size - rest + (bucket_length(rest) if rest > 0 else 0)
    for bucket in range(first, last):
        start = bucket * bucket_size
        stop = min(start + bucket_size, out.size)
        base = load_scale(data, codes_end + 4 * bucket)
        step = load_scale(data, codes_end + 4 * (count + bucket))
        if accumulate:
            _accumulate(data[start:stop], base, step, out[start:stop])
        elif streams:
            _write(data[start:stop], base, step, beside[: stop - start])
            stream(out[start:stop], beside)
        else:
            _write(data[start:stop], base, step, out[start:stop])
        if ranks > ZERO:
            finish(out[start:stop], ranks)
    if streams:
        finish_streams()


@kernel("void(table, table, i64, int64, boolean, boolean, boolean, int64, int64, f32)")
def _decode(
    rows: Longs,
    payloads: Longs,
    ends: Longs,
    bucket_size: int,
    accumulate: bool,
    streams: bool,
    finishes: bool,
    first: int,
    last: int,
    beside: Floats,
) -> None:
    beside = borrow(beside)
    ranks = payloads.shape[1]
    vector = 0
    while first < last:
        vector, start, stop = run_of(ends, vector, first, last)
        for rank in range(ranks):
            data, out = output_vectors(rows, payloads, vector, rank)
            divisor = F(ranks) if finishes and rank == ranks - 1 else ZERO
            _decode_vector(
                data, bucket_size, out, accumulate or rank > 0, streams, divisor, start, stop, beside
            )
        first += stop - start
