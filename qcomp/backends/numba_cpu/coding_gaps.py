"""Compiled loops of `qcomp.core.coding.gaps`, which codes the elements that a sparse compressor keeps."""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import extending, types

from qcomp.backends.numba_cpu.coding_range import as_int
from qcomp.backends.numba_cpu.jit import Bytes, Words, borrow, inline, kernel
from qcomp.core.coding.gaps import FIRST_LOWEST, FIRST_RATIO, LARGEST, SMALLEST, Plain, Shape, longest
from qcomp.core.compressors.sparse_levels import DROPPED_BITS
from qcomp.core.errors import PayloadError

LOST = -1
"""A reader's position after it has met an invalid code."""
LONGEST_HALF = 12
"""Bits of the largest number that a gamma code may hold: more than any difference of scales needs."""
PADDING = 8
"""Spare words after a decoder's input, or spare bytes after an encoder's output: enough for an element that starts
before the end."""


def encode(plain: memoryview, size: int, k: int, bucket_size: int, bits: int) -> bytes:
    """See `qcomp.core.coding.PURE`."""
    shape = Shape(k, bucket_size, bits)
    layout = Plain.of(size, shape)
    data = np.empty(longest(size, shape) + PADDING, dtype=np.uint8)
    end = _encode(np.frombuffer(plain, dtype=np.uint8), size, *shape, shape.width, *layout[:3], data)
    return data[:end].tobytes()


def decode(code: memoryview, size: int, k: int, bucket_size: int, bits: int) -> bytearray:
    """See `qcomp.core.coding.PURE`."""
    shape = Shape(k, bucket_size, bits)
    layout = Plain.of(size, shape)
    padded = np.zeros(-(-len(code) // 4) + PADDING, dtype="<u4")
    padded.view(np.uint8)[: len(code)] = np.frombuffer(code, dtype=np.uint8)
    plain = bytearray(layout.nbytes)
    out = np.frombuffer(plain, dtype=np.uint8)
    words = padded.view(">u4").astype(np.uint32)
    end = _decode(words, 8 * len(code), size, *shape, shape.width, *layout[:3], out)
    if end < 0:
        raise PayloadError(f"the payload's {len(code)} bytes do not encode a vector of {size} elements")
    if -(-end // 8) != len(code) or (end % 8 and code[-1] & (1 << -end % 8) - 1):
        raise PayloadError(
            f"the code ends after {end} bits, which do not fill its {len(code)} bytes, or its padding is not zeros"
        )
    return plain


@inline
def _length(number: int) -> int:
    """Return the number of bits of a number."""
    length = 0
    while number >> length > 0:
        length += 1
    return length


@inline
def _divisor(n: int, c: int) -> int:
    return max(1, (11 * n + 8 * c) // (16 * c))


@inline
def _load(plain: Bytes, at: int, entries: int, width: int) -> int:
    entry = 0
    for plane in range(width):
        entry |= as_int(plain[plane * entries + at]) << 8 * plane
    return entry


@inline
def _number(plain: Bytes, at: int) -> int:
    """Return the *number* of a scale."""
    return (as_int(plain[at + 2]) | as_int(plain[at + 3]) << 8) >> DROPPED_BITS - 16


@inline
def _put(value: int, length: int, data: Bytes, at: int, bits: int, count: int) -> tuple[int, int, int]:
    """Append up to 31 bits to fewer than 32 pending ones, and write whole words of 4 bytes."""
    bits = bits << length | value
    count += length
    if count >= 32:
        count -= 32
        word = bits >> count
        for i in range(4):
            data[at + i] = word >> 24 - 8 * i & 0xFF
        at += 4
        bits &= (1 << count) - 1
    return at, bits, count


@inline
def _put_difference(d: int, data: Bytes, at: int, bits: int, count: int) -> tuple[int, int, int]:
    half = d if d >= 0 else -d - 1
    value = (half + 1) << 1 | (1 if d < 0 else 0)
    return _put(value, 2 * _length(half + 1), data, at, bits, count)


@inline
def _put_element(
    g: int, m: int, width: int, code: int, value_bits: int, data: Bytes, at: int, bits: int, count: int
) -> tuple[int, int, int]:
    """Append Golomb's code of g, and the code of a value."""
    quotient = g // m
    rest, short = g - quotient * m, (1 << width) - m
    shorter = 1 if rest < short else 0
    rest += 0 if rest < short else short
    length = width - shorter + value_bits
    while quotient > 8:
        zeros = min(quotient, 31)
        at, bits, count = _put(0, zeros, data, at, bits, count)
        quotient -= zeros
    return _put(
        (1 << width - shorter | rest) << value_bits | code, quotient + 1 + length, data, at, bits, count
    )


@kernel("int64(u8_in, int64, int64, int64, int64, int64, int64, int64, int64, u8)")
def _encode(
    plain: Bytes,
    size: int,
    k: int,
    bucket_size: int,
    value_bits: int,
    width: int,
    entries: int,
    lowests: int,
    steps: int,
    data: Bytes,
) -> int:
    """Write the code, and return its end."""
    plain, data = borrow(plain), borrow(data)
    at, bits, count, last, ratio = 0, 0, 0, FIRST_LOWEST, FIRST_RATIO
    mask = (1 << value_bits) - 1
    for bucket in range((size + bucket_size - 1) // bucket_size):
        n = min(bucket_size, size - bucket * bucket_size)
        most, first, kept = min(k, n), bucket * k, 0
        lowest, step = _number(plain, lowests + 4 * bucket), _number(plain, steps + 4 * bucket)
        if lowest > 0:
            before = -1
            while kept < most:
                position = _load(plain, first + kept, entries, width) >> value_bits
                if position <= before:
                    break
                before = position
                kept += 1
        at, bits, count = _put(1 if kept == most else 0, 1, data, at, bits, count)
        if kept < most:
            at, bits, count = _put(kept, _length(most - 1), data, at, bits, count)
        if kept == 0:
            continue
        at, bits, count = _put_difference(lowest - last, data, at, bits, count)
        last = lowest
        if value_bits > 1:
            at, bits, count = _put_difference(step - lowest - ratio, data, at, bits, count)
            ratio = step - lowest
        m, before = _divisor(n, kept), -1
        golomb = _length(m - 1)
        for i in range(first, first + kept):
            entry = _load(plain, i, entries, width)
            position = entry >> value_bits
            at, bits, count = _put_element(
                position - before - 1, m, golomb, entry & mask, value_bits, data, at, bits, count
            )
            before = position
    end = at + (count + 7) // 8
    _put(0, 31 - count, data, at, bits << 1, count + 1)
    return end


@inline
def _peek(words: Words, at: int, count: int) -> int:
    """Return the 1 to 32 bits that start at a position."""
    pair = np.uint64(words[at >> 5]) << np.uint64(32) | np.uint64(words[(at >> 5) + 1])
    return as_int(np.uint64(pair << np.uint64(at & 31)) >> np.uint64(64 - count))


@inline
def _take_difference(words: Words, at: int) -> tuple[int, int]:
    """Return a difference and where it ends; the end is `LOST` if the code is invalid."""
    zeros = 0
    while _peek(words, at + zeros, 1) == 0:
        zeros += 1
        if zeros >= LONGEST_HALF:
            return 0, LOST
    half = _peek(words, at + zeros, zeros + 1) - 1
    at += 2 * zeros + 1
    return (-half - 1 if _peek(words, at, 1) else half), at + 1


@extending.intrinsic
def _leading_zeros(typing_context: Any, word: Any) -> Any:  # noqa: ARG001 - numba's protocol
    """Return the number of zeros above the highest one of 64 bits."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:  # noqa: ARG001
        return builder.ctlz(arguments[0], ir.Constant(ir.IntType(1), 0))

    return types.int64(types.int64), generate


@inline
def _take_element(
    words: Words, at: int, end: int, m: int, width: int, most: int, value_bits: int
) -> tuple[int, int, int]:
    """Return a number up to ``most`` in Golomb's code, a value's code, and where they end; `LOST` if invalid."""
    g = 0
    zeros = _leading_zeros(_peek(words, at, 32)) - 32
    while zeros == 32:
        g += 32 * m
        at += 32
        if g > most or at > end:
            return 0, 0, LOST
        zeros = _leading_zeros(_peek(words, at, 32)) - 32
    g += zeros * m
    at += zeros + 1
    short = (1 << width) - m
    both = _peek(words, at, width + value_bits)
    rest = both >> value_bits + 1
    shorter = 1 if rest < short and width > 0 else 0
    rest = rest if shorter else (both >> value_bits) - short
    g += rest
    code = both >> shorter & (1 << value_bits) - 1
    return (0, 0, LOST) if g > most else (g, code, at + width - shorter + value_bits)


@inline
def _is_number(number: int) -> bool:
    return number >= SMALLEST and number <= LARGEST


@kernel("int64(u32, int64, int64, int64, int64, int64, int64, int64, int64, int64, u8)")
def _decode(
    words: Words,
    end: int,
    size: int,
    k: int,
    bucket_size: int,
    value_bits: int,
    width: int,
    entries: int,
    lowests: int,
    steps: int,
    plain: Bytes,
) -> int:
    """Fill the plain payload, which is zero, and return the end of the code, or `LOST`.

    It never reads far beyond the end: one element takes a bounded number of bits, and the end is checked after each.
    """
    words, plain = borrow(words), borrow(plain)
    at, last, ratio = 0, FIRST_LOWEST, FIRST_RATIO
    for bucket in range((size + bucket_size - 1) // bucket_size):
        n = min(bucket_size, size - bucket * bucket_size)
        most, first = min(k, n), bucket * k
        kept = most
        if at > end:
            return LOST
        whole = _peek(words, at, 1)
        at += 1
        if whole == 0:
            length = _length(most - 1)
            kept = _peek(words, at, length) if length > 0 else 0
            at += length
        if kept > most:
            return LOST
        if kept == 0:
            continue
        difference, at = _take_difference(words, at)
        last += difference
        step = 0
        if value_bits > 1 and at >= 0:
            difference, at = _take_difference(words, at)
            ratio += difference
            step = last + ratio
        if at < 0 or not _is_number(last) or not (step == 0 or _is_number(step)):
            return LOST
        for byte in range(2):
            plain[lowests + 4 * bucket + 2 + byte] = last << DROPPED_BITS - 16 >> 8 * byte & 0xFF
            plain[steps + 4 * bucket + 2 + byte] = step << DROPPED_BITS - 16 >> 8 * byte & 0xFF
        m, position = _divisor(n, kept), -1
        golomb = _length(m - 1)
        for i in range(first, first + kept):
            if at > end:
                return LOST
            skipped, code, at = _take_element(words, at, end, m, golomb, n - position - 2, value_bits)
            if at < 0:
                return LOST
            position += 1 + skipped
            entry = position << value_bits | code
            for plane in range(width):
                plain[plane * entries + i] = entry >> 8 * plane & 0xFF
    return at if at <= end else LOST
