"""Nearest rounding to the best levels for a normal distribution, with feedback: `qcomp.core.compressors.lloyd_max`.

p = flush(flush(x) + residual); code = how many thresholds * (root mean p^2 of the bucket) are below |p|, with the sign
in the top bit; step = <|p|, level> / ||level||^2, cut to 17 bits; residual' = flush(p - signed level * step).

Bytes read and written per element, with b bits: encode with feedback 8 and 4 + b/8, without 4 and b/8; decode b/8 and
4, plus 4 read to accumulate. Arithmetic is the limit: a pass over the bucket for each threshold.
"""

from __future__ import annotations

import math

import numpy as np

from qcomp.backends.numba_cpu.codec import DecodeRun, EncodeRun, Weights
from qcomp.backends.numba_cpu.jit import Bytes, Codes, Floats, Longs, borrow, inline, kernel
from qcomp.backends.numba_cpu.packing import empty_codes, pack, unpack
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
from qcomp.core.compressors.lloyd_max import LEVELS, THRESHOLDS

__all__ = ["decode_lloyd_max", "encode_lloyd_max"]


def encode_lloyd_max(bits: int, bucket_size: int) -> EncodeRun:
    """Return a function that compresses vectors to the levels for this many bits."""
    levels, thresholds = (np.asarray(table[bits], dtype=np.float32) for table in (LEVELS, THRESHOLDS))

    def run(vectors: ToEncode, mode: int, weights: Weights, first: int, last: int) -> int:
        codes, scratch = empty_codes(bucket_size, bits), np.empty(3 * bucket_size, dtype=np.float32)
        failed: int = _encode(
            vectors.rows,
            vectors.ends,
            mode,
            *weights,
            bucket_size,
            bits,
            levels,
            thresholds,
            first,
            last,
            codes,
            scratch,
        )
        return failed

    return run


def decode_lloyd_max(bits: int, bucket_size: int) -> DecodeRun:
    """Return a function that decompresses payloads of levels of this many bits."""
    levels = np.asarray(LEVELS[bits], dtype=np.float32)

    def run(vectors: Decoded, accumulate: bool, streams: bool, finish: bool, first: int, last: int) -> None:
        codes, values = empty_codes(bucket_size, bits), np.empty(2 * levels.size, dtype=np.float32)
        beside = np.empty(bucket_size if streams else 0, dtype=np.float32)
        _decode(
            *vectors,
            bucket_size,
            bits,
            levels,
            accumulate,
            streams,
            finish,
            first,
            last,
            codes,
            values,
            beside,
        )

    return run


@inline
def _choose(
    p: Floats, levels: Floats, thresholds: Floats, scale: np.float32, codes: Codes, chosen: Floats
) -> None:
    """Fill the codes and the levels."""
    sign = np.uint8(levels.size)
    for i in range(p.size):
        codes[i] = sign if p[i] < ZERO else np.uint8(0)
        chosen[i] = levels[0]
    for k in range(thresholds.size):
        threshold, more = flush(thresholds[k] * scale), levels[k + 1] - levels[k]
        for i in range(p.size):
            above = abs(p[i]) > threshold
            codes[i] += np.uint8(above)
            chosen[i] += more if above else ZERO


@inline
def _best_step(p: Floats, chosen: Floats, filled: int, sums: Floats) -> np.float32:
    """Return <|p|, levels> / ||levels||^2, cut to 17 bits."""
    for i in range(p.size):
        sums[i] = as_float(as_bits(abs(p[i]) * chosen[i]) & U(0xFFFFFFFE))
    along = tree_sum(sums)
    for i in range(p.size):
        sums[i] = chosen[i] * chosen[i] if i < filled else ZERO
    return as_float(as_bits(along / tree_sum(sums)) & U(0xFFFFFF80))


@inline
def _mean_magnitude(p: Floats, filled: int, sums: Floats) -> np.float32:
    for i in range(p.size):
        sums[i] = abs(p[i])
    return tree_sum(sums) / F(filled)


@inline
def _subtract(p: Floats, chosen: Floats, step: np.float32) -> None:
    """Let p = flush(p - decoded), where the decoded value has the sign of p."""
    for i in range(p.size):
        value = p[i]
        p[i] = flush(value - as_float(as_bits(chosen[i] * step) | as_bits(value) & SIGN))


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
    bits: int,
    levels: Floats,
    thresholds: Floats,
    first: int,
    last: int,
    data: Bytes,
    codes: Codes,
    scratch: Floats,
) -> int:
    x, residual, out, data, scratch = borrow(x), borrow(residual), borrow(out), borrow(data), borrow(scratch)
    m, codes, levels, thresholds = borrow(m), borrow(codes), borrow(levels), borrow(thresholds)
    size = x.size
    count = (size + bucket_size - 1) // bucket_size
    rest = size - size // bucket_size * bucket_size
    codes_end = (size - rest + (bucket_length(rest) if rest > 0 else 0)) * bits // 8
    scales = (codes_end + 3) // 4 * 4
    chosen, sums = scratch[:bucket_size], scratch[bucket_size : 2 * bucket_size]
    beside = scratch[2 * bucket_size :]
    for bucket in range(first, last):
        start = bucket * bucket_size
        stop = min(start + bucket_size, size)
        filled = stop - start
        length = bucket_size if filled == bucket_size else bucket_length(filled)
        p = load(x, residual, out, mode, m, keep, new, start, stop, length, beside)
        largest = largest_bits(p)
        if too_large(largest):
            return bucket
        total, power = scaled_squares(p, largest, sums[: length // 2])
        scale = flush(F(math.sqrt(total / F(filled))) * power)
        _choose(p, levels, thresholds, scale, codes[:length], chosen[:length])
        if bits == 1:
            step = flush(_mean_magnitude(p, filled, sums[:length]))
        else:
            step = flush(_best_step(p, chosen[:length], filled, sums[:length]))
        store_scale(data, scales + 4 * bucket, step)
        at = bucket * bucket_size * bits // 8
        pack(codes[:length], bits, data[at : at + length * bits // 8])
        if mode != NO_RESIDUAL:
            _subtract(p, chosen[:length], step)
            if filled < length:
                out[start:stop] = p[:filled]
    if last == count:
        data[codes_end:scales] = np.uint8(0)
    return -1


@kernel(
    "int64(table, i64, int64, float32, float32, int64, int64, f32, f32, int64, int64, u8, f32)",
)
def _encode(
    rows: Longs,
    ends: Longs,
    mode: int,
    keep: np.float32,
    new: np.float32,
    bucket_size: int,
    bits: int,
    levels: Floats,
    thresholds: Floats,
    first: int,
    last: int,
    codes: Codes,
    scratch: Floats,
) -> int:
    codes, scratch = borrow(codes), borrow(scratch)
    levels, thresholds = borrow(levels), borrow(thresholds)
    vector = 0
    while first < last:
        vector, start, stop = run_of(ends, vector, first, last)
        x, residual, out, m, data = input_vectors(rows, vector)
        failed = _encode_vector(
            x,
            residual,
            out,
            mode,
            m,
            keep,
            new,
            bucket_size,
            bits,
            levels,
            thresholds,
            start,
            stop,
            data,
            codes,
            scratch,
        )
        if failed >= 0:
            return first - start + failed
        first += stop - start
    return -1


@inline
def _write(codes: Codes, values: Floats, out: Floats) -> None:
    for j in range(out.size):
        out[j] = values[codes[j]]


@inline
def _accumulate(codes: Codes, values: Floats, out: Floats) -> None:
    for j in range(out.size):
        out[j] += values[codes[j]]


@inline
def _decode_vector(
    data: Bytes,
    bucket_size: int,
    bits: int,
    levels: Floats,
    out: Floats,
    accumulate: bool,
    streams: bool,
    ranks: np.float32,
    first: int,
    last: int,
    codes: Codes,
    values: Floats,
    beside: Floats,
) -> None:
    data, out, codes, beside = borrow(data), borrow(out), borrow(codes), borrow(beside)
    levels, values = borrow(levels), borrow(values)
    size = out.size
    rest = size - size // bucket_size * bucket_size
    codes_end = (size - rest + (bucket_length(rest) if rest > 0 else 0)) * bits // 8
    scales = (codes_end + 3) // 4 * 4
    for bucket in range(first, last):
        start = bucket * bucket_size
        stop = min(start + bucket_size, size)
        length = bucket_size if stop - start == bucket_size else bucket_length(stop - start)
        at = bucket * bucket_size * bits // 8
        unpack(data[at : at + length * bits // 8], bits, codes[:length])
        step = load_scale(data, scales + 4 * bucket)
        for k in range(levels.size):
            values[k] = levels[k] * step
            values[levels.size + k] = -values[k]
        if accumulate:
            _accumulate(codes[: stop - start], values, out[start:stop])
        elif streams:
            _write(codes[: stop - start], values, beside[: stop - start])
            stream(out[start:stop], beside)
        else:
            _write(codes[: stop - start], values, out[start:stop])
        if ranks > ZERO and not streams:
            finish(out[start:stop], ranks)
    if streams:
        finish_streams()


@kernel(
    "void(table, table, i64, int64, int64, f32, boolean, boolean, boolean, int64, int64, u8, f32, f32)",
)
def _decode(
    rows: Longs,
    payloads: Longs,
    ends: Longs,
    bucket_size: int,
    bits: int,
    levels: Floats,
    accumulate: bool,
    streams: bool,
    finishes: bool,
    first: int,
    last: int,
    codes: Codes,
    values: Floats,
    beside: Floats,
) -> None:
    codes, values, beside, levels = borrow(codes), borrow(values), borrow(beside), borrow(levels)
    ranks = payloads.shape[1]
    vector = 0
    while first < last:
        vector, start, stop = run_of(ends, vector, first, last)
        for rank in range(ranks):
            data, out = output_vectors(rows, payloads, vector, rank)
            divisor = F(ranks) if finishes and rank == ranks - 1 else ZERO
            _decode_vector(
                data,
                bucket_size,
                bits,
                levels,
                out,
                accumulate or rank > 0,
                streams,
                divisor,
                start,
                stop,
                codes,
                values,
                beside,
            )
        first += stop - start
