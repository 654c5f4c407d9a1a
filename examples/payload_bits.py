"""Reads a payload's bytes for `read_payload.py`: fields, codes, draws, and the coded levels and gaps."""

import struct
from bisect import bisect_right
from typing import Any

MASK = (1 << 32) - 1
Signed = list[tuple[int, int]]  # a level and a sign for each element


class RefusedError(ValueError):
    """The bytes are no payload."""


def require(holds: object, problem: str) -> None:
    if not holds:
        raise RefusedError(problem)


class Source:
    """The data of a payload, read from its start as fields, bytes or bits."""

    def __init__(self, data: bytes) -> None:
        self.data, self.at = data, 0

    def bits(self, count: int) -> int:
        """Return the next bits as a number, the highest bit first."""
        start, self.at = self.at, self.at + count
        require(self.at <= 8 * len(self.data), "the bits end early")
        part = int.from_bytes(self.data[start // 8 : -(-self.at // 8)], "big")
        return part >> -self.at % 8 & (1 << count) - 1

    def gamma(self) -> int:
        """Return the number of the next gamma codeword."""
        zeros = 0
        while not self.bits(1):
            zeros += 1
            require(zeros < 64, "a number has more than 64 bits")
        return 1 << zeros | self.bits(zeros)

    def omega(self) -> int:
        """Return the number of the next omega codeword."""
        number = 1
        while self.bits(1):
            require(number < 64, "a number has more than 64 bits")
            number = 1 << number | self.bits(number)
        return number

    def bytes(self, count: int) -> bytes:
        """Return the next bytes, after the zeros that fill up the last byte of bits."""
        require(not self.bits(-self.at % 8), "the bits are filled up with ones")
        start, self.at = self.at // 8, self.at + 8 * count
        require(self.at <= 8 * len(self.data), "the data is too short")
        return self.data[start : start + count]

    def left(self) -> int:
        """Return how many whole bytes are left."""
        return len(self.data) - -(-self.at // 8)

    def field(self, kind: str, count: int) -> list[Any]:
        """Return the next field, whose items have a format of `struct`."""
        size = struct.calcsize(f"<{kind}")
        self.bytes(-(self.at // 8) % size if count else 0)
        return list(struct.unpack(f"<{count}{kind}", self.bytes(count * size)))

    def by_significance(self, count: int, end: int) -> list[int]:
        """Return numbers below ``end``, stored as all low bytes, then all second bytes."""
        width = max(1, -(-(end - 1).bit_length() // 8))
        data = self.bytes(width * count)
        return [int.from_bytes(data[i::count], "little") for i in range(count)]

    def codes(self, bits: int, counts: list[int], padded: list[int]) -> list[int]:
        """Return the codes of fixed width of all elements, without padding."""
        found = []
        planes = 1 if 8 % bits == 0 else bits
        width = bits // planes
        for count, length in zip(counts, padded, strict=True):
            w, data = length * width // 8, self.bytes(length * bits // 8)
            for e in range(count):
                parts = [data[p * w + e % w] >> e // w * width & (1 << width) - 1 for p in range(planes)]
                found.append(sum(part << p for p, part in enumerate(parts)))
        return found


def elias(source: Source, n: int, most: int) -> Signed:
    found, at, is_sparse = [(0, 0)] * n, -1, source.bits(8)
    require(is_sparse < 2, "there is no such method")
    count = source.omega() - 1 if is_sparse else n
    require(count <= n, "there are more levels than elements")
    for _ in range(count):
        at += source.omega() if is_sparse else 1
        require(at < n, "a level is beyond the vector")
        if is_sparse:
            sign, level = source.bits(1), source.omega()
        else:
            level = source.omega() - 1
            sign = source.bits(1) if level else 0
        require(level <= most, "a level is too large")
        found[at] = level, sign
    return found


def smallest(number: int, fine: int) -> tuple[int, int]:
    """Return the smallest integer of a class, and its spare bits."""
    spare = max(0, (number >> fine) - 1)
    return number - (spare << fine) << spare, spare


def classes(source: Source, n: int, most: int) -> list[tuple[int, int, int]]:
    """Return the smallest level, the plain bits and the units of each class of a model."""
    fine = source.bits(3) - 1
    require(fine <= min(6, most.bit_length() - 1), "there is no such method")
    if fine < 0:
        return [(0, most.bit_length() + 1, 1 << 13)]
    count, spare = source.gamma(), max(0, most.bit_length() - 1 - fine)
    require(count <= (spare << fine) + (most >> spare) + 1, "the model has too many classes")
    counts = [smallest(weight, 2)[0] for weight in range(157)]
    least = [0, *(counts[w] - (1 << smallest(w - 1, 2)[1]) // 2 for w in range(1, 157))]
    weight, shares = bisect_right(least, n) - 1, []
    for _ in range(count):
        q = source.gamma()
        weight += -(q // 2) if q % 2 else q // 2
        require(0 <= weight <= 156, "a weight is out of range")
        shares.append(counts[weight])
    require(weight, "the last class does not occur")
    left = (1 << 13) - sum(share > 0 for share in shares)
    units = [1 + share * left // sum(shares) if share else 0 for share in shares]
    units[shares.index(max(shares))] += (1 << 13) - sum(units)
    return [(*_with_sign(c, fine), unit) for c, unit in enumerate(units)]


def _with_sign(number: int, fine: int) -> tuple[int, int]:
    low, spare = smallest(number, fine)
    return low, spare + (number > 0)


def ranges(source: Source, n: int, most: int) -> Signed:
    model, lanes, found = classes(source, n, most), 4 if n >= 1 << 14 else 1, []
    at_unit = [(c, u) for c, (_, _, units) in enumerate(model) for u in range(units)]
    states = list(struct.unpack(f"<{lanes}I", source.bytes(4 * lanes)))
    require(source.left() % 2 == 0, "half a word is left over")
    words = list(struct.unpack(f"<{source.left() // 2}H", source.bytes(source.left())))[::-1]

    def refilled(x: int) -> int:
        require(x >= 1 << 16 or words, "the words end early")
        return x if x >= 1 << 16 else x << 16 | words.pop()

    for i in range(n):
        x = states[i % lanes]
        c, u = at_unit[x % (1 << 13)]
        low, plain, units = model[c]
        x = refilled(units * (x >> 13) + u)
        t = x & (1 << plain) - 1
        level, sign = (low + (t >> 1), t & 1) if plain else (0, 0)
        require(level <= most and level >= sign, "a level is too large, or 0 with a sign")
        found.append((level, sign))
        states[i % lanes] = refilled(x >> plain) if plain else x
    require(not words and set(states) == {1 << 16}, "the states and words do not end with the vector")
    return found


def gaps(
    source: Source, k: int, v: int, counts: list[int]
) -> tuple[list[tuple[int, int]], list[int], list[int]]:
    """Return the bucket and the entry of each kept element, and the numbers of all lowest levels and steps."""
    last, ratio, entries, lowest, step = 952, -16, [], [0] * len(counts), [0] * len(counts)

    def difference() -> int:
        half = source.gamma() - 1
        return -half - 1 if source.bits(1) else half

    for bucket, count in enumerate(counts):
        most, at = min(k, count), -1
        q = most if source.bits(1) else source.bits((most - 1).bit_length())
        require(q <= most, "a bucket keeps too many elements")
        if not q:
            continue
        last += difference()
        ratio += difference() if v > 1 else 0
        lowest[bucket], step[bucket] = last, last + ratio if v > 1 else 0
        require(
            8 <= last <= 1816 and (not step[bucket] or 8 <= step[bucket] <= 1816), "a scale is out of range"
        )
        d = max(1, (11 * count + 8 * q) // (16 * q))
        w = (d - 1).bit_length()
        for _ in range(q):
            at += 1
            while not source.bits(1):
                at += d
                require(at < count, "an element is beyond its bucket")
            y, short = source.bits(max(0, w - 1)), (1 << w) - d
            at += y if w == 0 or y < short else (y << 1 | source.bits(1)) - short
            require(at < count, "an element is beyond its bucket")
            entries.append((bucket, at << v | source.bits(v)))
    return entries, lowest, step
