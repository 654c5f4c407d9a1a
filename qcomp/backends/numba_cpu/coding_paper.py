"""Compiled loops of the QSGD paper's codes, as in `qcomp.core.coding.qsgd_codes`, with tables of short codewords."""

from __future__ import annotations

import functools

import numpy as np

from qcomp.backends.numba_cpu.coding_range import as_int
from qcomp.backends.numba_cpu.jit import Bytes, Halves, Longs, Words, borrow, inline, kernel
from qcomp.core.coding.elias import omega
from qcomp.core.coding.qsgd_codes import DENSE, SPARSE
from qcomp.core.errors import PayloadError

TABULATED = 1 << 10
"""A table holds the codewords of all numbers below this one, with their lengths in the lowest bits."""
LENGTH_BITS = 6
PEEK = 12
"""Bits with which a decoder looks up a codeword in a table, unless the codeword is longer."""
LONGEST = 40
"""Bits of the largest number that a decoder accepts: more than any vector has elements."""
PADDING = 8
"""Spare words after a decoder's input, or spare bytes after an encoder's output: enough for a codeword that starts
before the end."""


def encode(levels: memoryview, negative: memoryview) -> bytes:
    """See `qcomp.core.coding.PURE`."""
    k, signs = (
        np.frombuffer(levels, dtype="<u2").astype(np.uint16, copy=False),
        np.frombuffer(negative, np.uint8),
    )
    codewords, _ = _tables()
    dense, sparse, count = _lengths(k, codewords)
    data = np.empty((min(dense, sparse) + 7) // 8 + 1 + PADDING, dtype=np.uint8)
    data[0] = DENSE if dense <= sparse else SPARSE
    end = _encode(k, signs, codewords, -1 if dense <= sparse else count, data)
    return data[:end].tobytes()


def decode(data: memoryview, size: int, largest: int) -> tuple[bytearray, bytearray]:
    """See `qcomp.core.coding.PURE`."""
    if not data or data[0] not in (DENSE, SPARSE):
        raise PayloadError(f"the code starts with {bytes(data[:1])!r}; expected the byte {DENSE} or {SPARSE}")
    coded = len(data) - 1
    padded = np.zeros(-(-coded // 4) + PADDING, dtype="<u4")
    padded.view(np.uint8)[:coded] = np.frombuffer(data, dtype=np.uint8, offset=1)
    words = padded.view(">u4").astype(np.uint32)
    levels, negative = bytearray(2 * size), bytearray(size)
    k, signs = np.frombuffer(levels, dtype=np.uint16), np.frombuffer(negative, dtype=np.uint8)
    work = _decode_dense if data[0] == DENSE else _decode_sparse
    end = work(words, 8 * coded, _tables()[1], largest, k, signs)
    if end < 0:
        raise PayloadError(f"the code does not decode to {size} levels of at most {largest}")
    if -(-end // 8) != coded or (end % 8 and data[-1] & (1 << -end % 8) - 1):
        raise PayloadError(
            f"the code ends after {end} bits, which do not fill its {coded} bytes, or its padding is not zeros"
        )
    if not np.little_endian:
        k.byteswap(inplace=True)
    return levels, negative


@functools.cache
def _tables() -> tuple[Longs, Longs]:
    """Return a table of codewords by number, and one of numbers by their first bits; 0 marks empty entries."""
    codewords = np.zeros(TABULATED, dtype=np.int64)
    numbers = np.zeros(1 << PEEK, dtype=np.int64)
    for number in range(1, TABULATED):
        bits, size = omega(number)
        codewords[number] = bits << LENGTH_BITS | size
        if size <= PEEK:
            first = bits << PEEK - size
            numbers[first : first + (1 << PEEK - size)] = number << LENGTH_BITS | size
    return codewords, numbers


@inline
def _codeword(number: int, codewords: Longs) -> int:
    """Return the codeword of a number and its length, as a table entry."""
    if number < TABULATED:
        return as_int(codewords[number])
    bits, count = 0, 1
    while number > 1:
        size = 0
        while number >> size > 0:
            size += 1
        bits |= number << count
        count += size
        number = size - 1
    return bits << LENGTH_BITS | count


@kernel("triple(u16_in, i64)")
def _lengths(levels: Halves, codewords: Longs) -> tuple[int, int, int]:
    """Return the lengths in bits of the dense and the sparse code, and the number of nonzero levels."""
    levels, codewords = borrow(levels), borrow(codewords)
    mask = (1 << LENGTH_BITS) - 1
    dense, sparse, count, last = 0, 0, 0, -1
    for i in range(levels.size):
        level = as_int(levels[i])
        dense += _codeword(level + 1, codewords) & mask
        if level > 0:
            gap, value = _codeword(i - last, codewords), _codeword(level, codewords)
            sparse += (gap & mask) + (value & mask)
            count += 1
            last = i
    head = _codeword(count + 1, codewords) & mask
    return dense + count, head + sparse + count, count


@inline
def _put(entry: int, data: Bytes, at: int, bits: int, count: int) -> tuple[int, int, int]:
    """Append a codeword to fewer than 16 pending bits, and write whole 16-bit words."""
    size = entry & (1 << LENGTH_BITS) - 1
    bits = bits << size | entry >> LENGTH_BITS
    count += size
    while count >= 16:
        count -= 16
        data[at] = bits >> count + 8 & 0xFF
        data[at + 1] = bits >> count & 0xFF
        at += 2
    return at, bits & (1 << count) - 1, count


@kernel("int64(u16_in, u8_in, i64, int64, u8)")
def _encode(levels: Halves, negative: Bytes, codewords: Longs, nonzero: int, data: Bytes) -> int:
    """Write the code after the first byte, sparse if ``nonzero`` is not negative, and return its end."""
    levels, negative, codewords, data = borrow(levels), borrow(negative), borrow(codewords), borrow(data)
    at, bits, count, last = 1, 0, 0, -1
    if nonzero >= 0:
        at, bits, count = _put(_codeword(nonzero + 1, codewords), data, at, bits, count)
        for i in range(levels.size):
            level = as_int(levels[i])
            if level > 0:
                at, bits, count = _put(_codeword(i - last, codewords), data, at, bits, count)
                # The sign goes in front: one more bit, above the codeword.
                entry = _codeword(level, codewords)
                entry += (as_int(negative[i]) << (entry & (1 << LENGTH_BITS) - 1) + LENGTH_BITS) + 1
                at, bits, count = _put(entry, data, at, bits, count)
                last = i
    else:
        for i in range(levels.size):
            level = as_int(levels[i])
            entry = _codeword(level + 1, codewords)
            if level > 0:
                # The sign goes behind: one more bit, below the codeword.
                size = entry & (1 << LENGTH_BITS) - 1
                entry = (entry >> LENGTH_BITS << 1 | as_int(negative[i])) << LENGTH_BITS | size + 1
            at, bits, count = _put(entry, data, at, bits, count)
    while count > 0:
        data[at] = (bits << 8 >> count if count >= 8 else bits << 8 - count) & 0xFF
        count -= 8
        at += 1
    return at


@inline
def _peek(words: Words, at: int, count: int) -> int:
    """Return the 1 to 33 bits that start at a position."""
    pair = np.uint64(words[at >> 5]) << np.uint64(32) | np.uint64(words[(at >> 5) + 1])
    return as_int(np.uint64(pair << np.uint64(at & 31)) >> np.uint64(64 - count))


@inline
def _take(words: Words, at: int, numbers: Longs) -> tuple[int, int]:
    """Return the number of the omega codeword at a position, and its end; the number is 0 if it is too large."""
    entry = as_int(numbers[_peek(words, at, PEEK)])
    if entry > 0:
        return entry >> LENGTH_BITS, at + (entry & (1 << LENGTH_BITS) - 1)
    number = 1
    while _peek(words, at, 1):
        size = number + 1
        if size > LONGEST:
            return 0, at
        first = min(size, 32)
        number = _peek(words, at, first)
        if size > first:
            number = number << size - first | _peek(words, at + first, size - first)
        at += size
    return number, at + 1


@kernel("int64(u32, int64, i64, int64, u16, u8)")
def _decode_dense(
    words: Words, end: int, numbers: Longs, largest: int, levels: Halves, negative: Bytes
) -> int:
    """Fill levels and signs, and return the end of the code, or -1 if it is invalid."""
    words, numbers, levels, negative = borrow(words), borrow(numbers), borrow(levels), borrow(negative)
    at = 0
    for i in range(levels.size):
        number, at = _take(words, at, numbers)
        level = number - 1
        if number == 0 or level > largest or at > end:
            return -1
        levels[i] = level
        if level > 0:
            negative[i] = _peek(words, at, 1)
            at += 1
    return at if at <= end else -1


@kernel("int64(u32, int64, i64, int64, u16, u8)")
def _decode_sparse(
    words: Words, end: int, numbers: Longs, largest: int, levels: Halves, negative: Bytes
) -> int:
    """Fill levels and signs, which are initially zero, and return the end of the code, or -1 if it is invalid."""
    words, numbers, levels, negative = borrow(words), borrow(numbers), borrow(levels), borrow(negative)
    number, at = _take(words, 0, numbers)
    count = number - 1
    if number == 0 or count > levels.size or at > end:
        return -1
    index = -1
    for _ in range(count):
        number, at = _take(words, at, numbers)
        index += number
        if number == 0 or index >= levels.size or at > end:
            return -1
        negative[index] = _peek(words, at, 1)
        number, at = _take(words, at + 1, numbers)
        if number == 0 or number > largest or at > end:
            return -1
        levels[index] = number
    return at
