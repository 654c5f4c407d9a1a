"""The kernels of `qcomp.core.compressors.topk`: the largest elements of every bucket, with feedback.

p = flush(flush(x) + residual); C(p) keeps the k largest magnitudes of a bucket, the first ones among equals;
residual' = flush(p - C(p)), which differs from p only in the kept elements.

Bytes read and written per element, without the payload: encode with feedback 8 and 4, without 4 and 0; decode 0 and 4.
To accumulate, 4 more are read, but only the kept elements are written. In the first-level cache, an encoder counts the
magnitudes at or above a threshold, and tries other thresholds until it finds only a few more than k. It begins with the
threshold of the previous bucket. Only these candidates are compared with each other.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

from qcomp.backends.numba_cpu.codec import CompressorKernels, decode_run, encode_run
from qcomp.backends.numba_cpu.coding_range import as_int
from qcomp.backends.numba_cpu.drivers import ADD, WRITE, Layout, Own, decoder, encoder
from qcomp.backends.numba_cpu.jit import Bytes, Floats, Longs, inline, inline_always
from qcomp.backends.numba_cpu.primitives import (
    TINY,
    ZERO,
    F,
    U,
    as_bits,
    as_float,
    bucket_length,
    by_width,
    flush,
    largest,
    load_scale,
    magnitude_bits,
    store_scale,
    too_large,
    tree_sum,
)
from qcomp.core.compressors.sparse_levels import DROPPED_BITS
from qcomp.core.numeric.buckets import bytes_below

EXACT = 32
"""The bits of a value that is not rounded."""
ENOUGH = 4
"""Candidates count as few if they are at most this many times k."""
EIGHTHS = 1 << 20, 1 << 49
"""An eighth of an octave, in the bits of a float32 and of a float64."""
HALF = U(1 << DROPPED_BITS - 1)
KEPT_BITS = U(0xFFFFFFFF << DROPPED_BITS & 0xFFFFFFFF)


@inline
def _count_from(p: Floats, bits: int) -> int:
    threshold = by_width(p, np.int32(bits), bits)
    count = np.int32(0)
    for i in range(p.size):
        count = np.int32(count + np.int32(magnitude_bits(p[i]) >= threshold))
    return as_int(count)


@inline
def _candidates_from(p: Floats, bits: int, found: Longs) -> int:
    """Store the indices of all magnitudes whose bits are at least ``bits``, and return how many there are."""
    threshold = by_width(p, np.int32(bits), bits)
    count = 0
    for i in range(p.size):
        found[count] = i
        count += 1 if magnitude_bits(p[i]) >= threshold else 0
    return count


@inline
def _threshold(p: Floats, k: int, top: int, guess: int) -> int:
    """Return the bits of a magnitude that at least k elements reach, but if possible not many more than k."""
    most = ENOUGH * k
    low, high, stride = 0, top + 1, 2 * by_width(p, *EIGHTHS)
    if p.size <= most:
        return low
    at = guess
    while high - low > 1:
        if not low < at < high:
            at = low + (high - low) // 2
        count = _count_from(p, at)
        if count < k:
            high = at
            at = at - stride if low == 0 else low + (high - low) // 2
            stride *= 2
        else:
            low = at
            if count <= most:
                break
            at = at + stride if high > top else low + (high - low) // 2
            stride *= 2
    return low


@inline
def _count_among(bits: Longs, threshold: int) -> int:
    count = 0
    for i in range(bits.size):
        count += bits[i] >= threshold
    return count


@inline
def _select(p: Floats, k: int, top: int, guess: int, zeros: bool, found: Longs) -> tuple[int, int]:
    """Store the indices of the k largest magnitudes in rising order; return how many, and a guess for the next bucket.

    Without ``zeros``, zeros do not count, so there may be fewer.
    """
    low = _threshold(p, k, top, guess)
    count = _candidates_from(p, low, found)
    bits = found[count + 1 : 2 * count + 1]
    for i in range(count):
        bits[i] = magnitude_bits(p[found[i]])
    high = top + 1
    if count > k:  # find the largest magnitude that at least k elements reach
        while high - low > 1:
            middle = low + (high - low) // 2
            if _count_among(bits, middle) >= k:
                low = middle
            else:
                high = middle
    equal = k - _count_among(bits, low + 1)
    kept = 0
    for i in range(count):
        if bits[i] < low or (bits[i] == 0 and not zeros):
            continue
        if bits[i] == low:
            if equal <= 0:
                continue
            equal -= 1
        found[kept] = found[i]
        kept += 1
    return kept, low - by_width(p, *EIGHTHS)


@inline
def _short(x: np.float32) -> np.float32:
    single = max(F(x), TINY) if x > ZERO else ZERO
    short: np.float32 = as_float(U(U(as_bits(single) + HALF) & KEPT_BITS))
    return short


@inline
def _mean_between(magnitudes: Floats, low: np.float32, high: np.float32, sums: Floats) -> np.float32:
    """Return the mean of the magnitudes above 0, at least ``low`` and below ``high``; 0 if there are none."""
    count = 0
    for i in range(magnitudes.size):
        chosen = magnitudes[i] > ZERO and magnitudes[i] >= low and magnitudes[i] < high
        sums[i] = magnitudes[i] if chosen else ZERO
        count += chosen
    return tree_sum(sums) / sums.dtype.type(max(count, 1))


@inline
def _scales(magnitudes: Floats, sums: Floats, value_bits: int) -> tuple[np.float32, np.float32]:
    """Return the lowest level and the step of some magnitudes, which are padded with zeros."""
    if value_bits <= 2:
        mean = _mean_between(magnitudes, ZERO, F(np.inf), sums)
        if value_bits == 1:
            return _short(mean), ZERO
        low = _mean_between(magnitudes, ZERO, mean, sums)
        high = _mean_between(magnitudes, mean, F(np.inf), sums)
        low, high = low if low > ZERO else high, high if high > ZERO else low
    else:
        low, high = F(np.inf), ZERO
        for i in range(magnitudes.size):
            high = max(high, magnitudes[i])
            if magnitudes[i] > ZERO:
                low = min(low, magnitudes[i])
        if high == ZERO:
            low = ZERO
    lowest = _short(low)
    spread = flush(high - lowest)
    if not spread > ZERO:
        spread = ZERO
    return lowest, _short(flush(spread / F((1 << value_bits - 1) - 1)))


@inline
def _level(magnitude: np.float32, lowest: np.float32, step: np.float32, value_bits: int) -> int:
    level = 0
    for j in range((1 << value_bits - 1) - 1):
        level += 1 if magnitude >= lowest + step * (F(j) + F(0.5)) else 0
    return level


@inline
def _store(data: Bytes, entry: int, at: int, entries: int, width: int) -> None:
    for plane in range(width):
        data[plane * entries + at] = np.uint8(entry >> 8 * plane & 0xFF)


@inline
def _load(data: Bytes, at: int, entries: int, width: int) -> int:
    entry = 0
    for plane in range(width):
        entry |= as_int(data[plane * entries + at]) << 8 * plane
    return entry


@inline
def _rounded(level: int, negative: bool, lowest: np.float32, step: np.float32) -> np.float32:
    magnitude = lowest + step * F(level)
    return flush(-magnitude if negative else magnitude)


@inline
def _layout(size: int, bucket_size: int, own: Own) -> Layout:
    """Return the end of the entries, the start of the numbers, and how many entries and buckets there are."""
    k, width = own[0], own[2]
    full = size // bucket_size
    rest = size - full * bucket_size
    entries = full * k + min(rest, k)
    return width * entries, (width * entries + 3) // 4 * 4, entries, full + int(rest > 0)


@inline_always
def _encode_bucket(
    p: Floats,
    filled: int,
    start: int,  # noqa: ARG001
    bucket: int,
    data: Bytes,
    layout: Layout,
    feeds: bool,  # noqa: ARG001
    own: Own,
    scratch: Floats,
) -> bool:
    k, value_bits, width, found = own
    _, numbers, entries, buckets = layout
    peak = largest(p)
    if too_large(peak):
        return False
    top = as_int(magnitude_bits(peak))
    most = min(k, filled)
    guess = found[-1] if found[-1] >= 0 else top - 4 * by_width(p, *EIGHTHS)
    kept, found[-1] = _select(p, most, top, guess, value_bits == EXACT, found)
    at = bucket * k
    if value_bits == EXACT:
        for i in range(kept):
            index = found[i]
            _store(data, index, at + i, entries, width)
            value = F(p[index])
            store_scale(data, numbers + 4 * (at + i), value)
            p[index] = flush(p[index] - value)
        return True
    length = 1
    while length < most:
        length *= 2
    magnitudes = scratch[:length]
    magnitudes[kept:] = ZERO
    for i in range(kept):
        magnitudes[i] = abs(p[found[i]])
    scales = _scales(magnitudes, scratch[length : 2 * length], value_bits)
    lowest, step = p.dtype.type(scales[0]), p.dtype.type(scales[1])
    for i in range(kept):
        index = found[i]
        level, negative = _level(magnitudes[i], lowest, step, value_bits), p[index] < ZERO
        entry = (index << 1 | negative) << value_bits - 1 | level
        _store(data, entry, at + i, entries, width)
        p[index] = flush(p[index] - _rounded(level, negative, lowest, step))
    for i in range(kept, most):
        _store(data, 0, at + i, entries, width)
    store_scale(data, numbers + 4 * bucket, lowest)
    store_scale(data, numbers + 4 * (buckets + bucket), step)
    return True


@inline
def _has_negative_zero(out: Floats) -> bool:
    count = np.int32(0)
    for i in range(out.size):
        count |= np.int32(as_bits(out[i]) == by_width(out, U(1 << 31), np.uint64(1 << 63)))
    return bool(count != 0)


@inline
def _add_zero(out: Floats) -> None:
    """Turn -0 into +0, as adding zeros does; decompressed values and their sums contain no -0."""
    if _has_negative_zero(out):
        for i in range(out.size):
            out[i] += ZERO


@inline_always
def _decode_bucket(
    data: Bytes,
    layout: Layout,
    start: int,  # noqa: ARG001
    bucket: int,
    adds: int,
    out: Floats,
    own: Own,
) -> None:
    k, value_bits, width = own
    _, numbers, entries, buckets = layout
    if adds == WRITE:
        out[:] = ZERO
    elif adds == ADD:
        _add_zero(out)
    lowest = step = out.dtype.type(0)
    if value_bits != EXACT:
        lowest = out.dtype.type(load_scale(data, numbers + 4 * bucket))
        step = out.dtype.type(load_scale(data, numbers + 4 * (buckets + bucket)))
    before = -1
    for at in range(bucket * k, bucket * k + min(k, out.size)):
        entry = _load(data, at, entries, width)
        if value_bits == EXACT:
            index, value = entry, load_scale(data, numbers + 4 * at)
        else:
            sign = 1 << value_bits - 1
            index = entry >> value_bits
            value = _rounded(entry & sign - 1, entry & sign != 0, lowest, step)
            nothing = index <= before
            before = index
            if nothing:
                continue
        if index < out.size:  # else the payload is damaged
            out[index] = out[index] + value if adds else value


_encode = encoder("encode_topk", "(int64, int64, int64, i64)", _layout, _encode_bucket, pads=False)
_decode = decoder("decode_topk", "(int64, int64, int64)", _layout, _decode_bucket)


@lru_cache(256)
def topk_kernels(k: int, bucket_size: int, value_bits: int) -> CompressorKernels:
    """Return the kernels of `qcomp.TopK` without a coder."""
    width = bytes_below(bucket_size << (0 if value_bits == EXACT else value_bits))

    def encodes(_: np.dtype[Any]) -> Own:
        found = np.empty(2 * bucket_size + 2, dtype=np.int64)
        found[-1] = -1  # the guess: there is none yet
        return k, value_bits, width, found

    encode = encode_run(_encode, bucket_size, encodes, scratch=2 * bucket_length(k))
    decode = decode_run(_decode, bucket_size, (k, value_bits, width))
    return CompressorKernels.without_draws(bucket_size, encode, decode)
