"""A code for the few elements that a sparse compressor keeps of every bucket: gaps between them, levels and signs.

The plain payload has k entries for each bucket, or one for each element of a bucket shorter than k. With b bits for a
sign and a level, an entry is position * 2^b + sign * 2^(b - 1) + level, in 1 to 3 bytes. Positions rise within a
bucket; the low bytes of all entries come first. An entry is unused if its position is not above the position of the
entry before it in its bucket; in a bucket whose lowest level is 0, all entries are unused. After the entries, at a
multiple of 4 bytes, come the lowest levels of all buckets and then their steps. These scales are float32 with zeros in
the last 20 bits; the bits above them are called the *number* of a scale here.

The code of a bucket of n elements, of which c are kept, where c is at most K = min(k, n):

- a 1 if c = K; else a 0, and c in as many bits as K - 1 has;
- if c > 0: the number of the lowest level, minus the same number of the previous bucket with c > 0, or minus
  `FIRST_LOWEST` if there is none; then, if b > 1, the number of the step minus the number of the lowest level, minus
  the same difference in the previous bucket with c > 0, or minus `FIRST_RATIO`. A difference d is sent as u = 2d, or as
  u = -2d - 1 if d is negative: the gamma code of u // 2 + 1, and the last bit of u;
- for each of the c elements, the number of elements skipped since the previous kept one, in Golomb's code, then sign
  and level in b bits.

Golomb's code of g, with m = max(1, (11 n + 8 c) // (16 c)), about 0.69 n / c: g // m zeros and a one, then g mod m in
truncated binary. For 64 random positions of 4096, each needs 0.07 bits more than log2 binom(n, c) / c. Sources: Golomb,
IEEE Trans. Information Theory 12, 1966; Gallager and van Voorhis, IEEE Trans. Information Theory 21, 1975.
"""

from __future__ import annotations

import struct
from functools import lru_cache
from typing import NamedTuple

from qcomp.core.coding.bits import BitReader, BitWriter
from qcomp.core.coding.elias import gamma, take_gamma
from qcomp.core.errors import PayloadError
from qcomp.core.numeric.buckets import bucket_count, bytes_below

SMALLEST, LARGEST = 8, 1816
"""The numbers of 2^-126 and 2^100, the smallest and the largest scale that is not 0."""
FIRST_LOWEST = 952
"""The number of 2^-8, since gradients are small."""
FIRST_RATIO = -16
"""The number of the step minus the number of the lowest level, if the step is a quarter of that level."""
_DROPPED = 20


class Shape(NamedTuple):
    """The parameters of a sparse compressor, which determine the layout of its payloads."""

    k: int
    bucket_size: int
    bits: int
    """Bits of a level and a sign."""

    @property
    def width(self) -> int:
        """Bytes of an entry."""
        return bytes_below(self.bucket_size << self.bits)


class Plain(NamedTuple):
    """The layout of a plain payload."""

    entries: int
    """The number of entries."""
    lowest: int
    """The offset of the lowest levels."""
    step: int
    """The offset of the steps."""
    nbytes: int

    @classmethod
    def of(cls, size: int, shape: Shape) -> Plain:
        """Return the layout for a vector of ``size`` elements."""
        full, rest = divmod(size, shape.bucket_size)
        entries = full * shape.k + min(rest, shape.k)
        lowest = -(-shape.width * entries // 4) * 4
        step = lowest + 4 * bucket_count(size, shape.bucket_size)
        return cls(entries, lowest, step, 2 * step - lowest)


def longest(size: int, shape: Shape) -> int:
    """Return how many bytes the code of a vector of ``size`` elements takes at most."""
    full, rest = divmod(size, shape.bucket_size)
    return -(-(full * _longest_bucket(shape.bucket_size, shape) + _longest_bucket(rest, shape)) // 8)


@lru_cache(1024)
def _longest_bucket(n: int, shape: Shape) -> int:
    """Return the most bits of a bucket of n elements; a difference of numbers has at most 22 bits, of ratios 24."""
    if not n:
        return 0
    most = min(shape.k, n)
    scales = 22 if shape.bits == 1 else 22 + 24
    elements = max(_longest_elements(n, c, shape.bits) for c in range(1, most + 1))
    return 1 + (most - 1).bit_length() + scales + elements


def _longest_elements(n: int, c: int, bits: int) -> int:
    m = divisor(n, c)
    return (n - c) // m + c * (1 + (m - 1).bit_length() + bits)


def divisor(n: int, c: int) -> int:
    """Return Golomb's m for c kept elements of n; it is at least 1, since c is at most n."""
    return (11 * n + 8 * c) // (16 * c)


def encode(plain: memoryview, size: int, k: int, bucket_size: int, bits: int) -> bytes:
    """Return the code of a plain payload."""
    shape = Shape(k, bucket_size, bits)
    layout = Plain.of(size, shape)
    planes = [plain[i * layout.entries : (i + 1) * layout.entries] for i in range(shape.width)]
    lowests, steps = (_numbers(plain[at : at + layout.step - layout.lowest]) for at in layout[1:3])
    writer, last, ratio = BitWriter(), FIRST_LOWEST, FIRST_RATIO
    for bucket, (lowest, step) in enumerate(zip(lowests, steps, strict=True)):
        n = min(bucket_size, size - bucket * bucket_size)
        most = min(k, n)
        at = slice(bucket * k, bucket * k + most)
        entries = [
            sum(byte << 8 * i for i, byte in enumerate(entry))
            for entry in zip(*(p[at] for p in planes), strict=True)
        ]
        count = _filled([entry >> bits for entry in entries]) if lowest else 0
        writer.put(count == most, 1)
        if count < most:
            writer.put(count, (most - 1).bit_length())
        if not count:
            continue
        _put_difference(writer, lowest - last)
        last = lowest
        if bits > 1:
            _put_difference(writer, step - lowest - ratio)
            ratio = step - lowest
        m, before = divisor(n, count), -1
        for entry in entries[:count]:
            _put_golomb(writer, (entry >> bits) - before - 1, m)
            writer.put(entry & (1 << bits) - 1, bits)
            before = entry >> bits
    return writer.finish()


def decode(code: memoryview, size: int, k: int, bucket_size: int, bits: int) -> bytearray:
    """Return the plain payload, the inverse of `encode`.

    Raises PayloadError if the bytes are not the code of such a vector.
    """
    shape = Shape(k, bucket_size, bits)
    layout = Plain.of(size, shape)
    plain, reader, last, ratio = bytearray(layout.nbytes), BitReader(code), FIRST_LOWEST, FIRST_RATIO
    for bucket in range(bucket_count(size, bucket_size)):
        n = min(bucket_size, size - bucket * bucket_size)
        most = min(k, n)
        count = most if reader.take(1) else reader.take((most - 1).bit_length())
        if count > most:
            raise PayloadError(
                f"bucket {bucket} of the payload keeps {count} elements; expected at most {most}"
            )
        if not count:
            continue
        last += _take_difference(reader)
        step = 0
        if bits > 1:
            ratio += _take_difference(reader)
            step = last + ratio
        if not SMALLEST <= last <= LARGEST or (step and not SMALLEST <= step <= LARGEST):
            raise PayloadError(
                f"bucket {bucket} of the payload gives its scales as {last} and {step} (float bits >> 20); expected "
                f"{SMALLEST} to {LARGEST}"
            )
        for start, number in ((layout.lowest, last), (layout.step, step)):
            struct.pack_into("<I", plain, start + 4 * bucket, number << _DROPPED)
        m, position = divisor(n, count), -1
        for i in range(bucket * k, bucket * k + count):
            position += 1 + _take_golomb(reader, m, n - position - 2)
            entry = position << bits | reader.take(bits)
            for plane in range(shape.width):
                plain[plane * layout.entries + i] = entry >> 8 * plane & 0xFF
    reader.finish()
    return plain


def _numbers(scales: memoryview) -> list[int]:
    return [word >> _DROPPED for (word,) in struct.iter_unpack("<I", scales)]


def _filled(positions: list[int]) -> int:
    """Return how many positions come before the first position that is not above its predecessor."""
    for i in range(1, len(positions)):
        if positions[i] <= positions[i - 1]:
            return i
    return len(positions)


def _put_difference(writer: BitWriter, difference: int) -> None:
    u = 2 * difference if difference >= 0 else -2 * difference - 1
    writer.put(*gamma(u // 2 + 1))
    writer.put(u & 1, 1)


def _take_difference(reader: BitReader) -> int:
    half = take_gamma(reader) - 1
    return -half - 1 if reader.take(1) else half


def _put_golomb(writer: BitWriter, g: int, m: int) -> None:
    quotient, rest = divmod(g, m)
    writer.put(1, quotient + 1)
    width = (m - 1).bit_length()
    short = (1 << width) - m  # the number of remainders that take one bit less
    writer.put(*((rest, width - 1) if rest < short else (rest + short, width)))


def _take_golomb(reader: BitReader, m: int, most: int) -> int:
    """Return the next number; raise PayloadError if it is above ``most``."""
    g = 0
    while not reader.take(1):
        g += m
        if g > most:
            break
    width = (m - 1).bit_length()
    short = (1 << width) - m
    rest = reader.take(width - 1) if width else 0
    if width and rest >= short:
        rest = (rest << 1 | reader.take(1)) - short
    if g + rest > most:
        raise PayloadError(f"the payload skips {g + rest} elements where at most {most} follow")
    return g + rest
