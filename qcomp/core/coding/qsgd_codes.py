"""The codes of the QSGD paper: sparse (gaps and levels of the nonzero elements) and dense (the level of each element).

Levels and gaps are omega codewords (`qcomp.core.coding.elias`). For n elements of levels k_i:

- sparse: omega(m + 1), where m elements are nonzero; then for each nonzero element omega(gap), a sign bit (1 for
  negative), omega(k). A gap is the index minus the index of the previous nonzero element; the first gap is the index
  plus 1.
- dense: omega(k + 1) for each element, and a sign bit after it if k > 0.

Both codes run through the whole vector, without a restart at buckets. The first byte names the shorter code, `DENSE` or
`SPARSE`. If both have the same length, it is `DENSE`. Source: Alistarh et al., NeurIPS 2017, section 3.2 and its
appendix. In the paper, the dense code has a sign bit even for zeros.
"""

from __future__ import annotations

from array import array

from qcomp.core.coding.bits import BitReader, BitWriter, little_endian, numbers
from qcomp.core.coding.elias import length, omega, take_omega
from qcomp.core.errors import PayloadError

DENSE, SPARSE = 0, 1


def dense_length(levels: array[int]) -> int:
    """Return the number of bits of the dense code, without padding.

    Examples
    --------
    >>> dense_length(array("H", [0, 1, 0, 3]))  # 0, 100 and a sign, 0, 101000 and a sign
    13
    """
    return sum(length(level + 1) + (level > 0) for level in levels)


def sparse_length(levels: array[int]) -> int:
    """Return the number of bits of the sparse code, without padding.

    Examples
    --------
    >>> sparse_length(array("H", [0, 1, 0, 3]))  # 110 for 2; gap 100, sign, 0; gap 100, sign, 110
    15
    """
    total, count, last = 0, 0, -1
    for i, level in enumerate(levels):
        if level:
            total += length(i - last) + 1 + length(level)
            count, last = count + 1, i
    return length(count + 1) + total


def encode(data: memoryview, negative: memoryview) -> bytes:
    """Return the shorter of the two codes of a vector, after the byte that names it."""
    bits, levels = BitWriter(), numbers(data)
    dense = dense_length(levels) <= sparse_length(levels)
    bits.put(DENSE if dense else SPARSE, 8)
    if dense:
        for level, sign in zip(levels, negative, strict=True):
            bits.put(*omega(level + 1))
            if level:
                bits.put(sign, 1)
    else:
        bits.put(*omega(len(levels) - levels.count(0) + 1))
        last = -1
        for i, level in enumerate(levels):
            if level:
                bits.put(*omega(i - last))
                bits.put(negative[i], 1)
                bits.put(*omega(level))
                last = i
    return bits.finish()


def decode(data: memoryview, size: int, largest: int) -> tuple[bytearray, bytearray]:
    """Return levels and signs, the inverse of `encode`.

    Raises PayloadError if the bytes are not the code of a vector of that size with levels up to ``largest``.
    """
    bits, levels, negative = BitReader(data), array("H", bytes(2 * size)), bytearray(size)
    method = bits.take(8)
    if method == DENSE:
        for i in range(size):
            levels[i] = level = _level(take_omega(bits) - 1, largest)
            if level:
                negative[i] = bits.take(1)
    elif method == SPARSE:
        count, at = take_omega(bits) - 1, -1
        if count > size:
            raise PayloadError(f"the sparse code has {count} levels for {size} elements")
        for _ in range(count):
            at += take_omega(bits)
            if at >= size:
                raise PayloadError(f"the sparse code has a level at {at}; expected below {size}")
            negative[at] = bits.take(1)
            levels[at] = _level(take_omega(bits), largest)
    else:
        raise PayloadError(f"the code names the method {method}; expected {DENSE} or {SPARSE}")
    bits.finish()
    return little_endian(levels), negative


def _level(level: int, largest: int) -> int:
    if level > largest:
        raise PayloadError(f"the code has a level {level}; expected at most {largest}")
    return level
