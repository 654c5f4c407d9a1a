"""The sign of every element and a scale for every bucket, with feedback: `qcomp.core.compressors.sign`.

p = flush(flush(x) + residual); scale = mean |p| or root mean p^2 of the bucket; code = 1 where p < 0;
residual' = flush(p - (scale or -scale)).

Bytes read and written per element: encode with feedback 8 and 4.125, without 4 and 0.125; decode 0.125 and 4, plus
4 read to accumulate. Memory bandwidth is the limit: encoding passes over a bucket three times (sum; signs and sums;
new residual), but only the first pass reads it from memory.
"""

from __future__ import annotations

import math
from typing import Literal

import numpy as np

from qcomp.backends.numba_cpu.codec import (
    DecodeRun,
    EncodeRun,
    Weights,
)
from qcomp.backends.numba_cpu.jit import Bytes, Floats, Longs, borrow, inline, kernel
from qcomp.backends.numba_cpu.primitives import (
    NO_RESIDUAL,
    SIGN,
    ZERO,
    F,
    U,
    as_bits,
    as_float,
    bucket_length,
    finish,
    flush,
    largest_bits,
    load,
    load_scale,
    scaled_squares,
    store_scale,
    too_large,
    tree_sum,
)
from qcomp.backends.numba_cpu.stream import finish_streams, stream
from qcomp.backends.numba_cpu.tables import Decoded, ToEncode, input_vectors, output_vectors, run_of

__all__ = ["decode_sign", "encode_sign"]


def encode_sign(bucket_size: int, scale: Literal["l1", "rms"]) -> EncodeRun:
    """Return a function that compresses vectors to signs and scales."""

    def run(vectors: ToEncode, mode: int, weights: Weights, first: int, last: int) -> int:
        scratch = np.empty(2 * bucket_size, dtype=np.float32)
        failed: int = _encode(
            vectors.rows, vectors.ends, mode, *weights, bucket_size, scale == "rms", first, last, scratch
        )
        return failed

    return run


def decode_sign(bucket_size: int) -> DecodeRun:
    """Return a function that decompresses payloads of signs and scales."""

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
def _signs_and_sums(p: Floats, codes: Bytes, sums: Floats) -> None:
    """Pack the signs, and let sums hold the third level of the halving tree over the magnitudes.

    Bit k of byte j is the sign of element k * W + j. Three halvings add up the same eight elements, so one loop does
    both.
    """
    width = codes.size
    p0, p1, p2, p3 = p[:width], p[width : 2 * width], p[2 * width : 3 * width], p[3 * width : 4 * width]
    p4, p5, p6, p7 = (
        p[4 * width : 5 * width],
        p[5 * width : 6 * width],
        p[6 * width : 7 * width],
        p[7 * width :],
    )
    for j in range(codes.size):
        a, b, c, d, e, f, g, h = p0[j], p1[j], p2[j], p3[j], p4[j], p5[j], p6[j], p7[j]
        lower = (abs(a) + abs(e)) + (abs(c) + abs(g))
        upper = (abs(b) + abs(f)) + (abs(d) + abs(h))
        sums[j] = lower + upper
        codes[j] = np.uint8(
            as_bits(a) >> U(31)
            | as_bits(b) >> U(31) << U(1)
            | as_bits(c) >> U(31) << U(2)
            | as_bits(d) >> U(31) << U(3)
            | as_bits(e) >> U(31) << U(4)
            | as_bits(f) >> U(31) << U(5)
            | as_bits(g) >> U(31) << U(6)
            | as_bits(h) >> U(31) << U(7)
        )


@inline
def _subtract(p: Floats, scale: np.float32) -> None:
    """Let p = flush(p - decoded)."""
    scale_bits = as_bits(scale)
    for i in range(p.size):
        value = p[i]
        p[i] = flush(value - as_float(scale_bits | as_bits(value) & SIGN))


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
    rms: bool,
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
    codes_end = (size - rest) // 8 + (bucket_length(rest) // 8 if rest > 0 else 0)
    scales = (codes_end + 3) // 4 * 4
    beside, sums = scratch[:bucket_size], scratch[bucket_size:]
    for bucket in range(first, last):
        start = bucket * bucket_size
        stop = min(start + bucket_size, size)
        filled = stop - start
        length = bucket_size if filled == bucket_size else bucket_length(filled)
        p = load(x, residual, out, mode, m, keep, new, start, stop, length, beside)
        width = length // 8
        _signs_and_sums(p, data[start // 8 : start // 8 + width], sums[:width])
        if rms:
            largest = largest_bits(p)
            if too_large(largest):
                return bucket
            total, power = scaled_squares(p, largest, sums[: length // 2])
            scale = flush(F(math.sqrt(total / F(filled))) * power)
        else:
            # No magnitude exceeds the sum, so the elements are checked only if the sum is too large.
            total = tree_sum(sums[:width])
            if too_large(as_bits(total)) and too_large(largest_bits(p)):
                return bucket
            scale = flush(total / F(filled))
        store_scale(data, scales + 4 * bucket, scale)
        if mode != NO_RESIDUAL:
            _subtract(p, scale)
            if filled < length:
                out[start:stop] = p[:filled]
    if last == count:
        data[codes_end:scales] = np.uint8(0)
    return -1


@kernel("int64(table, i64, int64, float32, float32, int64, boolean, int64, int64, f32)")
def _encode(
    rows: Longs,
    ends: Longs,
    mode: int,
    keep: np.float32,
    new: np.float32,
    bucket_size: int,
    rms: bool,
    first: int,
    last: int,
    scratch: Floats,
) -> int:
    scratch = borrow(scratch)
    vector = 0
    while first < last:
        vector, start, stop = run_of(ends, vector, first, last)
        x, residual, out, m, data = input_vectors(rows, vector)
        failed = _encode_vector(
            x, residual, out, mode, m, keep, new, bucket_size, rms, start, stop, data, scratch
        )
        if failed >= 0:
            return first - start + failed
        first += stop - start
    return -1


# Choosing between two values uses every lane of a vector; numba would shift bytes in 64 bits.


@inline
def _write(codes: Bytes, bit: np.uint8, scale: np.float32, out: Floats) -> None:
    negative = as_float(as_bits(scale) ^ SIGN)
    for j in range(out.size):
        out[j] = negative if codes[j] & bit else scale


@inline
def _accumulate(codes: Bytes, bit: np.uint8, scale: np.float32, out: Floats) -> None:
    negative = as_float(as_bits(scale) ^ SIGN)
    for j in range(out.size):
        out[j] += negative if codes[j] & bit else scale


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
    size = out.size
    rest = size - size // bucket_size * bucket_size
    codes_end = (size - rest) // 8 + (bucket_length(rest) // 8 if rest > 0 else 0)
    scales = (codes_end + 3) // 4 * 4
    for bucket in range(first, last):
        start = bucket * bucket_size
        stop = min(start + bucket_size, out.size)
        width = min(bucket_size, bucket_length(stop - start)) // 8
        codes = data[start // 8 : start // 8 + width]
        scale = load_scale(data, scales + 4 * bucket)
        for plane in range(8):
            a, bit = start + plane * width, np.uint8(1 << plane)
            values = out[min(a, stop) : min(a + width, stop)]
            if accumulate:
                _accumulate(codes, bit, scale, values)
            elif streams:
                _write(codes, bit, scale, beside[plane * width : (plane + 1) * width])
            else:
                _write(codes, bit, scale, values)
        if streams:
            stream(out[start:stop], beside)
        elif ranks > ZERO:
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
