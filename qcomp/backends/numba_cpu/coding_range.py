"""Compiled loops of the range coder, as in `qcomp.core.coding.rans`, with one state for each lane of a vector.

Except at the ends, no branch depends on the data: whether a state emits or takes a word is as unpredictable as the
vector itself, so a branch on it would often be mispredicted.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from qcomp.backends.numba_cpu.jit import Bytes, Halves, Longs, borrow, inline, kernel
from qcomp.core.coding.integer_classes import class_of
from qcomp.core.coding.model import UNITS_BITS, Model
from qcomp.core.coding.rans import LOW
from qcomp.core.errors import PayloadError

UNITS = 1 << UNITS_BITS
LIMIT_SHIFT = 32 - UNITS_BITS
BEFORE, PLAIN, LEVEL = UNITS_BITS + 1, 2 * UNITS_BITS + 1, 2 * UNITS_BITS + 6
"""Bit positions in a table's row: units of earlier classes, plain bits, and a level. The class's units are at bit 0."""
PADDING = 16
"""The most words that are read beyond the last one."""


def first_invalid(levels: memoryview, negative: memoryview, largest: int) -> int:
    """See `qcomp.core.coding.PURE`, also for the other public functions."""
    k, signs = _halves(levels), np.frombuffer(negative, dtype=np.uint8)
    if _are_valid(k, signs, largest):
        return -1
    return int(np.argmax((k > largest) | (signs > np.minimum(k, 1))))


def count_classes(levels: memoryview, largest: int, fine: int) -> list[int]:
    """Return the number of levels in each class."""
    counts = np.zeros((4, largest + 1), dtype=np.int64)
    _count(_halves(levels), *counts)
    classes = np.zeros(class_of(largest, fine) + 1, dtype=np.int64)
    _classify(counts.sum(axis=0), fine, classes)
    result: list[int] = classes.tolist()
    return result


def push(levels: memoryview, negative: memoryview, model: Model, lanes: int) -> bytes:
    """Return the states and words of a vector."""
    k, signs = _halves(levels), np.frombuffer(negative, dtype=np.uint8)
    rows = np.ones(max(model.smallest[-1] + (1 << max(0, model.plain[-1] - 1)), 1), dtype=np.int64)
    _tabulate_levels(*_columns(model), rows)
    words = np.empty(2 * k.size + PADDING, dtype=np.uint16)
    states = np.full(lanes, LOW, dtype=np.int64)
    first = _push(k, signs, rows, states, words)
    return states.astype("<u4").tobytes() + words[first:].astype("<u2", copy=False).tobytes()


def pop(data: memoryview, size: int, largest: int, model: Model, lanes: int) -> tuple[bytearray, bytearray]:
    """Return the levels and signs of a vector."""
    if len(data) < 4 * lanes or len(data) & 1:
        raise PayloadError(
            f"the code has {len(data)} bytes for states and words; expected an even number, at least {4 * lanes} for "
            f"{lanes} states"
        )
    states = np.frombuffer(data, dtype="<u4", count=lanes).astype(np.int64)
    words = np.zeros(len(data) // 2 - 2 * lanes + PADDING, dtype=np.uint16)
    words[:-PADDING] = np.frombuffer(data, dtype="<u2", offset=4 * lanes)
    levels, negative = bytearray(2 * size), bytearray(size)
    units, before, plain, smallest = _columns(model)
    rows = units | before << BEFORE | plain << PLAIN | smallest << LEVEL
    class_at = np.repeat(np.arange(units.size, dtype=np.uint16), units)
    k = np.frombuffer(levels, dtype=np.uint16)
    if not _pop(words, states, rows, class_at, k, np.frombuffer(negative, dtype=np.uint8), largest):
        raise PayloadError("the code is damaged: its states and words do not decode to a vector of this size")
    if not np.little_endian:
        k.byteswap(inplace=True)
    return levels, negative


def _halves(data: memoryview) -> Halves:
    return np.frombuffer(data, dtype="<u2").astype(np.uint16, copy=False)


def _columns(model: Model) -> tuple[Longs, Longs, Longs, Longs]:
    """Return for each class its units, the units of all earlier classes, its plain bits and its smallest level."""
    units = np.array(model.units, dtype=np.int64)
    return units, np.cumsum(units) - units, np.array(model.plain, dtype=np.int64), np.array(model.smallest)


@inline
def as_int(x: Any) -> int:
    """Return any integer as a signed 64-bit one, since numba turns mixtures of signed and unsigned ones into floats."""
    return int(np.int64(x))


@kernel("boolean(u16_in, u8_in, int64)")
def _are_valid(levels: Halves, negative: Bytes, largest: int) -> bool:
    wrong = np.uint16(0)
    most = np.uint16(largest)
    for i in range(levels.size):
        level, sign = levels[i], np.uint16(negative[i])
        wrong |= np.uint16(level > most) | np.uint16(sign > min(level, np.uint16(1)))
    return bool(wrong == 0)


@kernel("void(u16_in, i64, i64, i64, i64)")
def _count(levels: Halves, a: Longs, b: Longs, c: Longs, d: Longs) -> None:
    """Count levels in four tables, since in a single table equal neighbours would wait for each other."""
    whole = levels.size // 4 * 4
    for i in range(0, whole, 4):
        a[levels[i]] += 1
        b[levels[i + 1]] += 1
        c[levels[i + 2]] += 1
        d[levels[i + 3]] += 1
    for i in range(whole, levels.size):
        a[levels[i]] += 1


@kernel("void(i64, int64, i64)")
def _classify(counts: Longs, fine: int, classes: Longs) -> None:
    spare = 0
    for level in range(counts.size):
        if level >> spare >= 2 << fine:
            spare += 1
        classes[(spare << fine) + (level >> spare)] += counts[level]


@kernel("void(i64, i64, i64, i64, i64)")
def _tabulate_levels(units: Longs, before: Longs, plain: Longs, smallest: Longs, rows: Longs) -> None:
    """Fill the row of each level in the classes that occur; a row's level field holds the level's spare bits."""
    for c in range(units.size):
        for spare in range(1 << max(plain[c] - 1, 0) if units[c] > 0 else 0):
            rows[smallest[c] + spare] = units[c] | before[c] << BEFORE | plain[c] << PLAIN | spare << LEVEL


@inline
def _push_one(x: int, row: int, sign: int, words: Halves, at: int) -> tuple[int, int]:
    """Return the state after an element, and the position of the last word."""
    units = row & 2 * UNITS - 1
    plain = row >> PLAIN & 31
    words[at - 1] = x & 0xFFFF
    full = int(x >> 32 - plain > 0)
    at -= full
    x = x >> 16 * full << plain | row >> LEVEL << 1 | sign
    words[at - 1] = x & 0xFFFF
    full = int(x >= units << LIMIT_SHIFT)
    at -= full
    x >>= 16 * full
    # In 32 bits, division takes half the time.
    ratio = as_int(np.uint32(x) // np.uint32(units))
    return (ratio << UNITS_BITS) + (x - ratio * units) + (row >> BEFORE & UNITS - 1), at


@kernel("int64(u16_in, u8_in, i64, i64, u16)")
def _push(levels: Halves, negative: Bytes, rows: Longs, states: Longs, words: Halves) -> int:
    """Fill words from the end, and return the index of the first one."""
    levels, negative, rows, words = borrow(levels), borrow(negative), borrow(rows), borrow(words)
    at, whole = words.size, levels.size
    if states.size == 4:
        whole = levels.size // 4 * 4
        for i in range(levels.size - 1, whole - 1, -1):
            states[i - whole], at = _push_one(states[i - whole], rows[levels[i]], negative[i], words, at)
        a, b, c, d = states[0], states[1], states[2], states[3]
        for i in range(whole - 4, -1, -4):
            d, at = _push_one(d, rows[levels[i + 3]], negative[i + 3], words, at)
            c, at = _push_one(c, rows[levels[i + 2]], negative[i + 2], words, at)
            b, at = _push_one(b, rows[levels[i + 1]], negative[i + 1], words, at)
            a, at = _push_one(a, rows[levels[i]], negative[i], words, at)
        states[0], states[1], states[2], states[3] = a, b, c, d
    elif states.size == 1:
        x = states[0]
        for i in range(levels.size - 1, -1, -1):
            x, at = _push_one(x, rows[levels[i]], negative[i], words, at)
        states[0] = x
    return at


@inline
def _pop_one(x: int, row: int, words: Halves, at: int) -> tuple[int, int, int]:
    """Return the state after an element, the position of the next word, and the level with its sign below it."""
    x = (row & 2 * UNITS - 1) * (x >> UNITS_BITS) + (x & UNITS - 1) - (row >> BEFORE & UNITS - 1)
    empty = int(x < LOW)
    x = x << 16 | as_int(words[at]) if empty else x
    at += empty
    plain = row >> PLAIN & 31
    rest = x & (1 << plain) - 1
    x >>= plain
    empty = int(x < LOW)
    x = x << 16 | as_int(words[at]) if empty else x
    return x, at + empty, (row >> LEVEL << 1) + rest


@kernel("boolean(u16, i64, i64, u16, u16, u8, int64)")
def _pop(
    words: Halves, states: Longs, rows: Longs, class_at: Halves, levels: Halves, negative: Bytes, largest: int
) -> bool:
    """Fill levels and signs, and return whether the code is valid."""
    words, rows, class_at = borrow(words), borrow(rows), borrow(class_at)
    levels, negative = borrow(levels), borrow(negative)
    at, end, most, wrong = 0, words.size - PADDING, 0, 0
    mask = UNITS - 1
    whole = levels.size // states.size * states.size if states.size > 0 else 0
    if states.size == 4:
        a, b, c, d = states[0], states[1], states[2], states[3]
        for i in range(0, whole, 4):
            if at > end:
                return False
            a, at, p = _pop_one(a, rows[class_at[a & mask]], words, at)
            b, at, q = _pop_one(b, rows[class_at[b & mask]], words, at)
            c, at, r = _pop_one(c, rows[class_at[c & mask]], words, at)
            d, at, s = _pop_one(d, rows[class_at[d & mask]], words, at)
            most = max(most, p, q, r, s)
            # 1 means a zero with a sign.
            wrong |= int(p == 1) | int(q == 1) | int(r == 1) | int(s == 1)
            levels[i], levels[i + 1], levels[i + 2], levels[i + 3] = p >> 1, q >> 1, r >> 1, s >> 1
            negative[i], negative[i + 1], negative[i + 2], negative[i + 3] = p & 1, q & 1, r & 1, s & 1
        states[0], states[1], states[2], states[3] = a, b, c, d
    elif states.size == 1:
        x = states[0]
        for i in range(whole):
            if at > end:
                return False
            x, at, p = _pop_one(x, rows[class_at[x & mask]], words, at)
            most = max(most, p)
            wrong |= int(p == 1)
            levels[i] = p >> 1
            negative[i] = p & 1
        states[0] = x
    for i in range(whole, levels.size):
        if at > end:
            return False
        lane = i - whole
        states[lane], at, p = _pop_one(states[lane], rows[class_at[states[lane] & mask]], words, at)
        most = max(most, p)
        wrong |= int(p == 1)
        levels[i] = p >> 1
        negative[i] = p & 1
    for lane in range(states.size):
        wrong |= int(states[lane] != LOW)
    return wrong == 0 and at == end and most >> 1 <= largest
