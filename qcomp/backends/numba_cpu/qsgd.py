"""The kernels of `qcomp.core.compressors.qsgd`: stochastic rounding to evenly spaced levels, with feedback.

p = flush(flush(x) + residual); step = norm of the bucket / levels, rounded up to 17 bits;
position = min(|p| / step, levels); level = floor(position), plus 1 if draw < rint(fraction * 65536);
code = level, with the sign in the top bit; residual' = flush(p - signed level * step).

Bytes read and written per element, with b bits: encode with feedback 8 and 4 + b/8, without 4 and b/8.
Arithmetic is the limit: ten rounds of Philox for eight elements and a division for each.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Literal

import numpy as np

from qcomp.backends.numba_cpu.codec import CompressorKernels, EncodeRun
from qcomp.backends.numba_cpu.draws import philox, spread, spread_64
from qcomp.backends.numba_cpu.jit import Bytes, Codes, Floats, Halves, Longs, borrow, inline, kernel
from qcomp.backends.numba_cpu.packing import empty_codes, pack
from qcomp.backends.numba_cpu.primitives import (
    NO_RESIDUAL,
    TINY,
    ZERO,
    F,
    U,
    Weights,
    as_bits,
    as_float,
    bucket_length,
    by_width,
    flush,
    largest,
    load,
    rounding,
    scaled_squares,
    store_scale,
    too_large,
    with_sign,
)
from qcomp.backends.numba_cpu.qsgd_decoder import decode_qsgd, scaled
from qcomp.backends.numba_cpu.tables import ToEncode, input_vectors, input_weights, run_of
from qcomp.core.numeric.random import Key, draws_are_replaced, fold_key

BATCH = 1 << 9
"""Elements per batch: several whole buckets if these are small, so that loops are long enough. Reading memory in pieces
of at most a page lets prefetching go on during the arithmetic."""


@lru_cache(256)
def qsgd_kernels(
    levels: int, bucket_size: int, norm: Literal["max", "l2"], factor: float | None, held: int | None
) -> CompressorKernels:
    """Return the kernels of QSGD.

    ``factor`` multiplies decoded values, as in `qcomp.Scaled`, which clears the last bit of each product, even if the
    factor rounds to 1. A bucket holds ``held`` elements of a vector, then zeros, as in `qcomp.WholeFields`; if ``held``
    is None, elements of the vector fill the bucket.
    """
    bits, l2 = levels.bit_length() + 1, norm == "l2"
    room = max(bucket_size, BATCH)
    kernel = _encode if bits <= 8 else _encode_wide

    def encode(key: Key | None) -> EncodeRun | None:
        if key is None or draws_are_replaced():
            return None
        words = fold_key(key, like=_LIKE)
        options = bucket_size, held or bucket_size, levels, bits, l2, *words, key.hop

        def run(vectors: ToEncode, mode: int, first: int, last: int) -> int:
            *table, dtype = vectors
            codes, scratch = empty_codes(room, bits), np.empty(3 * room, dtype)
            failed: int = kernel.of(dtype).compiled(
                *table, mode, *options, first, last, codes, scratch, factor or 0.0
            )
            return failed

        return run

    return CompressorKernels(held or bucket_size, encode, decode_qsgd(levels, bucket_size, factor, held))


_LIKE = np.empty(0, dtype=np.float32)


@inline
def round_up_step(norm: np.float32, levels: int, low: int) -> np.float32:
    """Return norm / levels, rounded up until the bits of ``low`` are 0; see `qcomp.core.compressors.qsgd`.

    A quotient in float64 is rounded to float32 first. If that makes the step too small, the next larger one is used.
    """
    if not norm > ZERO:
        return F(norm)
    exact = norm / F(levels)
    step: np.float32 = as_float(U(np.int64(as_bits(F(exact))) + low & ~low))
    if step < exact:
        step = as_float(U(np.int64(as_bits(step)) + low + 1))
    return max(step, TINY)


@inline
def _level(value: np.float32, draw: np.uint16, divisor: np.float32, levels: np.float32) -> np.float32:
    """Return the level that a value is rounded to, given a draw."""
    position = abs(value) / divisor
    position = position if position < levels else levels
    level: np.float32 = np.floor(position)
    # rint(fraction * 65536), in float32 with other bits above it: comparing integers saves two conversions.
    threshold = np.int32(as_bits((position - level) * F(65536) + rounding(value)))
    above = by_width(value, np.int32(0x4B400000), np.int32(0))
    return level + F(1) if threshold > np.int32(np.int32(draw) + above) else level


@inline
def _code(value: np.float32, level: np.float32, top: np.uint32) -> np.uint32:
    """Return the code of a level, with the bit ``top`` set if the level is negative."""
    code = U(np.int32(level))
    return U(code | top if value < ZERO and level > ZERO else code)


@inline
def _rest(value: np.float32, magnitude: np.float32) -> np.float32:
    """Return flush(value - decoded), where the decoded value has the sign of the value."""
    return flush(value - with_sign(magnitude, value))


@inline
def _quantise(
    p: Floats,
    draws: Halves,
    step: np.float32,
    divisor: np.float32,
    levels: np.float32,
    top: np.uint32,
    codes: Codes,
) -> None:
    """Fill the codes, and let p = flush(p - decoded)."""
    for j in range(p.size):
        value = p[j]
        level = _level(value, draws[j], divisor, levels)
        codes[j] = _code(value, level, top)
        p[j] = _rest(value, level * step)


@inline
def _quantise_scaled(
    p: Floats,
    draws: Halves,
    step: np.float32,
    divisor: np.float32,
    levels: np.float32,
    top: np.uint32,
    codes: Codes,
    factor: np.float32,
) -> None:
    for j in range(p.size):
        value = p[j]
        level = _level(value, draws[j], divisor, levels)
        codes[j] = _code(value, level, top)
        p[j] = _rest(value, scaled(level * step, factor))


@inline
def _encode_vector(
    x: Floats,
    residual: Floats,
    out: Floats,
    mode: int,
    m: Floats,
    weights: Weights,
    bucket_size: int,
    held: int,
    levels: int,
    bits: int,
    l2: bool,
    k0: np.uint32,
    k1: np.uint32,
    hop: int,
    first_bucket: int,
    first: int,
    last: int,
    data: Bytes,
    codes: Codes,
    scratch: Floats,
    factor: np.float32,
) -> int:
    x, residual, out, data, scratch = borrow(x), borrow(residual), borrow(out), borrow(data), borrow(scratch)
    m, codes = borrow(m), borrow(codes)
    source = x, residual, out, mode, m, weights, TINY
    size = x.size
    full = size // held
    rest = size - full * held
    count = full + int(rest > 0)
    codes_end = (full * bucket_size + (bucket_length(rest) if rest > 0 else 0)) * bits // 8
    scales = (codes_end + 3) // 4 * 4
    room = codes.size
    # The product of a step and a level has to be exact.
    low = (1 << max(7, bits - 1)) - 1
    words = scratch[: room // 2].view(U)
    draws = scratch[room // 2 : room].view(np.uint16)
    squares = scratch[room : room + room // 2]
    beside = scratch[2 * room :]
    batch = first
    while batch < last:
        # A batch is as many full buckets as fit, or the tail alone, or one bucket with padding.
        start = batch * held
        filled = min(held, size - start)
        length = bucket_size if filled == held else bucket_length(filled)
        buckets = max(1, min(room // bucket_size, min(last, full) - batch)) if filled == length else 1
        width = length // 8
        philox((first_bucket + batch) * (bucket_size // 8), hop, k0, k1, words[: 4 * width * buckets])
        if length == 512:
            spread_64(words, buckets, draws)
        else:
            spread(words, buckets, width, draws)
        stop = start + filled * buckets
        values = load(source, start, stop, length * buckets, beside)
        for i in range(buckets):
            a, b = i * length, (i + 1) * length
            p = values[a:b]
            norm = largest(p)
            if too_large(norm):
                return batch + i
            if l2:
                total, power = scaled_squares(p, norm, squares[: length // 2])
                norm = np.sqrt(total) * power
            step = round_up_step(norm, levels, low)
            store_scale(data, scales + 4 * (batch + i), step)
            divisor = step if step > ZERO else F(1)
            top = U(1 << (bits - 1))
            if factor == ZERO:
                _quantise(p, draws[a:b], step, divisor, F(levels), top, codes[a:b])
            else:
                _quantise_scaled(p, draws[a:b], step, divisor, F(levels), top, codes[a:b], factor)
        if mode != NO_RESIDUAL and filled < length:
            out[start:stop] = values[:filled]
        at = batch * bucket_size * bits // 8
        for i in range(buckets):
            packed = data[at + i * width * bits : at + (i + 1) * width * bits]
            pack(codes[i * length : (i + 1) * length], bits, packed)
        batch += buckets
    if last == count:
        data[codes_end:scales] = np.uint8(0)
    return -1


def _encode_vectors(
    rows: Longs,
    ends: Longs,
    mode: int,
    bucket_size: int,
    held: int,
    levels: int,
    bits: int,
    l2: bool,
    k0: np.uint32,
    k1: np.uint32,
    hop: int,
    first: int,
    last: int,
    codes: Codes,
    scratch: Floats,
    factor: np.float32,
) -> int:
    codes, scratch = borrow(codes), borrow(scratch)
    vector = 0
    while first < last:
        vector, start, stop = run_of(ends, vector, first, last)
        x, residual, out, m, data = input_vectors(rows, vector, scratch)
        failed = _encode_vector(
            x,
            residual,
            out,
            mode,
            m,
            input_weights(rows, vector, scratch),
            bucket_size,
            held,
            levels,
            bits,
            l2,
            k0,
            k1,
            hop,
            rows[vector, 7],
            start,
            stop,
            data,
            codes,
            scratch,
            factor,
        )
        if failed >= 0:
            return first - start + failed
        first += stop - start
    return -1


_encode, _encode_wide = (
    kernel(
        "int64(table, i64, int64, int64, int64, int64, int64, boolean, "
        f"uint32, uint32, int64, int64, int64, {codes}, f32, float32)"
    )(_encode_vectors)
    for codes in ("u8", "u16")
)
"""Kernels for codes of up to 8 and of up to 16 bits. A vector register holds twice as many of the narrow codes."""
