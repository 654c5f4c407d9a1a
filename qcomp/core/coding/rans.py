"""The pure loops of the range coder: levels to the coder's states and 16-bit words, and back."""

from __future__ import annotations

from array import array

from qcomp.core.coding.bits import little_endian, numbers
from qcomp.core.coding.integer_classes import class_of
from qcomp.core.coding.model import FLAT, UNITS_BITS, Model
from qcomp.core.errors import PayloadError

LOW = 1 << 16
"""The smallest state, and the first state of an encoder."""
_MASK = (1 << UNITS_BITS) - 1


def count_classes(levels: memoryview, largest: int, fine: int) -> list[int]:
    """Return the number of levels in each class, up to the class of ``largest``."""
    counts = [0] * (class_of(largest, fine) + 1)
    for level in numbers(levels):
        counts[class_of(level, fine)] += 1
    return counts


def push(levels: memoryview, negative: memoryview, model: Model, lanes: int) -> bytes:
    """Return the states and the words of a vector; see `qcomp.core.coding.range_coder`."""
    before = _before(model)
    states, words, values = [LOW] * lanes, array("H"), numbers(levels)
    for i in range(len(values) - 1, -1, -1):
        level = values[i]
        c = 0 if model.method == FLAT else class_of(level, model.method - 1)
        x, plain, units = states[i % lanes], model.plain[c], model.units[c]
        if plain:
            if x >> 32 - plain:
                words.append(x & 0xFFFF)
                x >>= 16
            x = x << plain | level - model.smallest[c] << 1 | negative[i]
        if x >= units << 32 - UNITS_BITS:
            words.append(x & 0xFFFF)
            x >>= 16
        states[i % lanes] = (x // units << UNITS_BITS) + x % units + before[c]
    words.reverse()
    return b"".join(x.to_bytes(4, "little") for x in states) + little_endian(words)


def pop(data: memoryview, size: int, largest: int, model: Model, lanes: int) -> tuple[bytearray, bytearray]:
    """Return the levels and signs of a vector from its states and words; raise PayloadError if these are invalid."""
    if len(data) < 4 * lanes or len(data) & 1:
        raise PayloadError(
            f"the code has {len(data)} bytes for states and words; expected an even number, at least {4 * lanes} for "
            f"{lanes} states"
        )
    states = [int.from_bytes(data[4 * lane : 4 * lane + 4], "little") for lane in range(lanes)]
    words = numbers(data[4 * lanes :])
    levels, negative = array("H", bytes(2 * size)), bytearray(size)
    before = _before(model)
    class_at = [c for c, units in enumerate(model.units) for _ in range(units)]
    word, end = iter(words), len(words)

    def refilled(x: int) -> int:
        nonlocal end
        if x >= LOW:
            return x
        end -= 1
        return x << 16 | next(word, 0)

    for i in range(size):
        x = states[i % lanes]
        unit = x & _MASK
        c = class_at[unit]
        x = refilled(model.units[c] * (x >> UNITS_BITS) + unit - before[c])
        if plain := model.plain[c]:
            rest = x & (1 << plain) - 1
            x = refilled(x >> plain)
            levels[i] = level = model.smallest[c] + (rest >> 1)
            negative[i] = rest & 1
            if level > largest or (rest & 1 and not level):
                raise PayloadError(
                    f"the code has a level {level}, sign {rest & 1}; expected at most {largest}"
                )
        states[i % lanes] = x
        if end < 0:
            break
    if end or any(x != LOW for x in states):
        raise PayloadError("the code is damaged: its states and words do not end with the last element")
    return little_endian(levels), negative


def _before(model: Model) -> list[int]:
    """Return the sum of the shares before each class."""
    before, total = [], 0
    for units in model.units:
        before.append(total)
        total += units
    return before
