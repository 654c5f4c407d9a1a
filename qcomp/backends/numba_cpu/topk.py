"""The largest elements of every bucket, with feedback: `qcomp.core.compressors.topk`.

p = flush(flush(x) + residual); C(p) keeps the k largest magnitudes of a bucket, the first ones among equals;
residual' = flush(p - C(p)), which differs from p only in the kept elements.

Bytes read and written per element, without the payload: encode with feedback 8 and 4, without 4 and 0; decode 0 and 4.
To accumulate, 4 more are read, but only the kept elements are written. In the first-level cache, an encoder counts the
magnitudes at or above a threshold, and tries other thresholds until it finds few more than k. It begins with the
threshold of the bucket before. Only these candidates are compared with each other.
"""

from __future__ import annotations

import numpy as np

from qcomp.backends.numba_cpu.codec import DecodeRun, EncodeRun, Weights
from qcomp.backends.numba_cpu.coding_range import as_int
from qcomp.backends.numba_cpu.jit import Bytes, Floats, Longs, borrow, inline, kernel
from qcomp.backends.numba_cpu.primitives import (
    MAGNITUDE,
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
    store_scale,
    too_large,
    tree_sum,
)
from qcomp.backends.numba_cpu.stream import finish_streams, stream
from qcomp.backends.numba_cpu.tables import Decoded, ToEncode, input_vectors, output_vectors, run_of
from qcomp.core.coding.bits import bytes_below
from qcomp.core.compressors.kept_values import DROPPED_BITS

__all__ = ["decode_topk", "encode_topk"]

EXACT = 32
"""The bits of a value that is not rounded."""
ENOUGH = 4
"""At most this many times k candidates count as few."""
EIGHTH = 1 << 20
"""An eighth of an octave, in the bits of a float32."""
HALF = U(1 << DROPPED_BITS - 1)
KEPT_BITS = U(0xFFFFFFFF << DROPPED_BITS & 0xFFFFFFFF)


def encode_topk(k: int, bucket_size: int, value_bits: int) -> EncodeRun:
    """Return a function that compresses vectors to their largest elements."""
    width = _width(bucket_size, value_bits)
    room = bucket_length(k)

    def run(vectors: ToEncode, mode: int, weights: Weights, first: int, last: int) -> int:
        scratch = np.empty(bucket_size + 2 * room, dtype=np.float32)
        found = np.empty(2 * bucket_size + 1, dtype=np.int64)
        failed: int = _encode(
            vectors.rows,
            vectors.ends,
            mode,
            *weights,
            bucket_size,
            k,
            value_bits,
            width,
            first,
            last,
            scratch,
            found,
        )
        return failed

    return run


def decode_topk(k: int, bucket_size: int, value_bits: int) -> DecodeRun:
    """Return a function that decompresses payloads of largest elements."""
    width = _width(bucket_size, value_bits)

    def run(vectors: Decoded, accumulate: bool, streams: bool, finish: bool, first: int, last: int) -> None:
        beside = np.empty(bucket_size if streams else 0, dtype=np.float32)
        _decode(*vectors, bucket_size, k, value_bits, width, accumulate, streams, finish, first, last, beside)

    return run


def _width(bucket_size: int, value_bits: int) -> int:
    """Return the bytes of an entry."""
    return bytes_below(bucket_size << (0 if value_bits == EXACT else value_bits))


@inline
def _magnitude_bits(x: np.float32) -> np.int32:
    """Return the bits of a magnitude; they are ordered like the magnitudes."""
    return np.int32(as_bits(x) & MAGNITUDE)


@inline
def _count_from(p: Floats, threshold: np.int32) -> int:
    count = np.int32(0)
    for i in range(p.size):
        count = np.int32(count + np.int32(_magnitude_bits(p[i]) >= threshold))
    return as_int(count)


@inline
def _candidates_from(p: Floats, threshold: np.int32, found: Longs) -> int:
    """Store the indices of all magnitudes at or above a threshold, and return how many there are."""
    count = 0
    for i in range(p.size):
        found[count] = i
        count += 1 if _magnitude_bits(p[i]) >= threshold else 0
    return count


@inline
def _threshold(p: Floats, k: int, top: int, guess: int) -> int:
    """Return the bits of a magnitude that at least k elements reach, and, if possible, not many more."""
    most = ENOUGH * k
    low, high, stride = 0, top + 1, 2 * EIGHTH
    if p.size <= most:
        return low
    at = guess
    while high - low > 1:
        if not low < at < high:
            at = (low + high) // 2
        count = _count_from(p, np.int32(at))
        if count < k:
            high = at
            at = at - stride if low == 0 else (low + high) // 2
            stride *= 2
        else:
            low = at
            if count <= most:
                break
            at = at + stride if high > top else (low + high) // 2
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
    count = _candidates_from(p, np.int32(low), found)
    bits = found[count + 1 : 2 * count + 1]
    for i in range(count):
        bits[i] = _magnitude_bits(p[found[i]])
    high = top + 1
    if count > k:  # find the largest magnitude that at least k elements reach
        while high - low > 1:
            middle = (low + high) // 2
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
    return kept, low - EIGHTH


@inline
def _short(x: np.float32) -> np.float32:
    return as_float(U(as_bits(x) + HALF) & KEPT_BITS)


@inline
def _mean_between(magnitudes: Floats, low: np.float32, high: np.float32, sums: Floats) -> np.float32:
    """Return the mean of the magnitudes above 0, at least ``low`` and below ``high``; 0 if there are none."""
    count = 0
    for i in range(magnitudes.size):
        chosen = magnitudes[i] > ZERO and magnitudes[i] >= low and magnitudes[i] < high
        sums[i] = magnitudes[i] if chosen else ZERO
        count += chosen
    return F(tree_sum(sums)) / F(max(count, 1))


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
def _entries_of(size: int, bucket_size: int, k: int) -> int:
    full = size // bucket_size
    return full * k + min(size - full * bucket_size, k)


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
    k: int,
    value_bits: int,
    width: int,
    first: int,
    last: int,
    data: Bytes,
    scratch: Floats,
    found: Longs,
) -> int:
    x, residual, out, data, scratch = borrow(x), borrow(residual), borrow(out), borrow(data), borrow(scratch)
    m, found = borrow(m), borrow(found)
    size = x.size
    count = (size + bucket_size - 1) // bucket_size
    entries = _entries_of(size, bucket_size, k)
    numbers = (width * entries + 3) // 4 * 4
    room = (scratch.size - bucket_size) // 2
    guess = -1
    for bucket in range(first, last):
        start = bucket * bucket_size
        stop = min(start + bucket_size, size)
        # No padding, which must not be chosen.
        p = load(x, residual, out, mode, m, keep, new, start, stop, stop - start, scratch[:bucket_size])
        top = largest_bits(p)
        if too_large(top):
            return bucket
        most = min(k, stop - start)
        if guess < 0:
            guess = as_int(top) - 4 * EIGHTH
        kept, guess = _select(p, most, as_int(top), guess, value_bits == EXACT, found)
        at = bucket * k
        if value_bits == EXACT:
            for i in range(kept):
                index = found[i]
                _store(data, index, at + i, entries, width)
                store_scale(data, numbers + 4 * (at + i), p[index])
                p[index] = ZERO
            continue
        length = 1
        while length < most:
            length *= 2
        magnitudes = scratch[bucket_size : bucket_size + length]
        magnitudes[kept:] = ZERO
        for i in range(kept):
            magnitudes[i] = abs(p[found[i]])
        lowest, step = _scales(
            magnitudes, scratch[bucket_size + room : bucket_size + room + length], value_bits
        )
        for i in range(kept):
            index = found[i]
            level, negative = _level(magnitudes[i], lowest, step, value_bits), p[index] < ZERO
            entry = (index << 1 | negative) << value_bits - 1 | level
            _store(data, entry, at + i, entries, width)
            p[index] = flush(p[index] - _rounded(level, negative, lowest, step))
        for i in range(kept, most):
            _store(data, 0, at + i, entries, width)
        store_scale(data, numbers + 4 * bucket, lowest)
        store_scale(data, numbers + 4 * (count + bucket), step)
    if last == count:
        data[width * entries : numbers] = np.uint8(0)
    return -1


@kernel("int64(table, i64, int64, float32, float32, int64, int64, int64, int64, int64, int64, f32, i64)")
def _encode(
    rows: Longs,
    ends: Longs,
    mode: int,
    keep: np.float32,
    new: np.float32,
    bucket_size: int,
    k: int,
    value_bits: int,
    width: int,
    first: int,
    last: int,
    scratch: Floats,
    found: Longs,
) -> int:
    scratch, found = borrow(scratch), borrow(found)
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
            k,
            value_bits,
            width,
            start,
            stop,
            data,
            scratch,
            found,
        )
        if failed >= 0:
            return first - start + failed
        first += stop - start
    return -1


@inline
def _has_negative_zero(out: Floats) -> bool:
    count = np.int32(0)
    for i in range(out.size):
        count |= np.int32(as_bits(out[i]) == SIGN)
    return bool(count != 0)


@inline
def _add_zero(out: Floats) -> None:
    """Turn -0 into +0, as adding zeros does; decompressed values and their sums contain no -0."""
    if _has_negative_zero(out):
        for i in range(out.size):
            out[i] += ZERO


@inline
def _decode_bucket(
    data: Bytes,
    bucket: int,
    entries: int,
    numbers: int,
    buckets: int,
    k: int,
    value_bits: int,
    width: int,
    accumulate: bool,
    out: Floats,
) -> None:
    """Decompress a bucket into ``out``, or add it to ``out``."""
    lowest, step = ZERO, ZERO
    if value_bits != EXACT:
        lowest = load_scale(data, numbers + 4 * bucket)
        step = load_scale(data, numbers + 4 * (buckets + bucket))
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
            out[index] = out[index] + value if accumulate else value


@inline
def _decode_vector(
    data: Bytes,
    bucket_size: int,
    k: int,
    value_bits: int,
    width: int,
    out: Floats,
    accumulate: bool,
    foreign: bool,
    streams: bool,
    ranks: np.float32,
    first: int,
    last: int,
    beside: Floats,
) -> None:
    data, out, beside = borrow(data), borrow(out), borrow(beside)
    count = (out.size + bucket_size - 1) // bucket_size
    entries = _entries_of(out.size, bucket_size, k)
    numbers = (width * entries + 3) // 4 * 4
    for bucket in range(first, last):
        start = bucket * bucket_size
        stop = min(start + bucket_size, out.size)
        target = beside[: stop - start] if streams else out[start:stop]
        if not accumulate:
            target[:] = ZERO
        elif foreign:
            _add_zero(target)
        _decode_bucket(data, bucket, entries, numbers, count, k, value_bits, width, accumulate, target)
        if streams:
            stream(out[start:stop], target)
        if ranks > ZERO:
            finish(out[start:stop], ranks)
    if streams:
        finish_streams()


@kernel("void(table, table, i64, int64, int64, int64, int64, boolean, boolean, boolean, int64, int64, f32)")
def _decode(
    rows: Longs,
    payloads: Longs,
    ends: Longs,
    bucket_size: int,
    k: int,
    value_bits: int,
    width: int,
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
                data,
                bucket_size,
                k,
                value_bits,
                width,
                out,
                accumulate or rank > 0,
                accumulate and rank == 0,
                streams,
                divisor,
                start,
                stop,
                beside,
            )
        first += stop - start
