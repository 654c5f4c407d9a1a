"""Eight bits between the extremes of every bucket, with feedback: `qcomp.core.compressors.minmax`.

p = flush(flush(x) + residual); step = (max - min) / 255, rounded up to 16 bits; base = a whole number of steps where
the bucket spans zero, else min; code = rint(flush(p - base) / step) within 0 to 255; residual' = flush(p - (base +
code * step)).

Bytes read and written per element: encode with feedback 8 and 5, without 4 and 1; decode 1 and 4, and 4 more are
read to accumulate. Nearly bound by the memory; the division is most of the arithmetic.
"""

from __future__ import annotations

import numpy as np

from qcomp.backends.numba_cpu.codec import Decoder, Encoder, Mix, mix
from qcomp.backends.numba_cpu.jit import Bytes, Floats, borrow, inline, kernel
from qcomp.backends.numba_cpu.layout import code_bytes
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

__all__ = ["minmax_decoder", "minmax_encoder"]


def minmax_encoder(x: Floats, bucket_size: int, data_out: Bytes, blend: Mix | None = None) -> Encoder:
    """Return what compresses an array to eight bits an element.

    Parameters
    ----------
    x, bucket_size, data_out, blend
        See `qcomp.backends.numba_cpu.sign.sign_encoder`.
    """
    m, keep, new = mix(blend)

    def run(old: Floats, out: Floats, mode: int, first: int, last: int) -> int:
        scratch = np.empty(bucket_size, dtype=np.float32)
        result: int = _encode(x, old, out, mode, m, keep, new, bucket_size, first, last, data_out, scratch)
        return result

    return Encoder(run, x, bucket_size, blended=blend is not None)


def minmax_decoder(data: Bytes, bucket_size: int, out: Floats) -> Decoder:
    """Return what decompresses a payload of eight bits an element.

    Parameters
    ----------
    data, bucket_size, out
        See `qcomp.backends.numba_cpu.sign.sign_decoder`.
    """
    codes_end = code_bytes(out.size, bucket_size, 8)

    def run(accumulate: bool, streams: bool, ranks: int, first: int, last: int) -> None:
        beside = np.empty(bucket_size if streams else 0, dtype=np.float32)
        _decode(data, bucket_size, codes_end, out, accumulate, streams, F(ranks), first, last, beside)

    return Decoder(run, out, bucket_size)


@inline
def _ordered(bits: np.uint32) -> np.int32:
    """Return an integer that is ordered as the float32 of these bits, NaN outside the infinities; its own inverse.

    Comparisons of floats that may be NaN do not vectorise.
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
        # Clamped before it is rounded, which changes nothing, and rounded by an addition: the code is in the last byte.
        rounded = _clamp(flush(value - base) / divisor) + ROUND
        codes[i] = np.uint8(as_bits(rounded))
        p[i] = flush(value - (base + (rounded - ROUND) * step))


@kernel("int64(f32_in, f32_in, f32, int64, f32_in, float32, float32, int64, int64, int64, u8, f32)")
def _encode(
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
        # No padding: it has no part in the extremes.
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


@inline
def _write(codes: Bytes, base: np.float32, step: np.float32, out: Floats) -> None:
    for i in range(out.size):
        out[i] = base + F(np.int32(codes[i])) * step


@inline
def _accumulate(codes: Bytes, base: np.float32, step: np.float32, out: Floats) -> None:
    for i in range(out.size):
        out[i] += base + F(np.int32(codes[i])) * step


@kernel("void(u8_in, int64, int64, f32, boolean, boolean, float32, int64, int64, f32)")
def _decode(
    data: Bytes,
    bucket_size: int,
    codes_end: int,
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
