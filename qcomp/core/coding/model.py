"""The model of the range coder: the frequency of each class of levels, fitted to a vector and sent before it.

A level k >= 1 is sent as its class (`qcomp.core.coding.integer_classes`), in fewer bits the more frequent the class is,
followed by plain bits: the spare bits of k, then its sign, 1 if it is negative. A level of 0 is sent as only its class.
The number of fine bits is chosen for each vector, so that the model's own size never dominates.

Levels up to 127 can have a class each: from a few thousand elements on, the code is then within a few per cent of the
entropy. Of a larger level, all bits but the first `FINEST` + 1 are plain, which is best if the levels of a class are
equally frequent. They are nearly so if values vary smoothly. But if only a few of many levels occur, as in a vector of
one value, the code is longer than the entropy by up to b - `FINEST` - 1 bits per element, where b is the length of the
largest level.

The bits of the model: first the method in three bits, which is `FLAT`, or 1 plus the number of fine bits. If the method
is not `FLAT`, the number of classes up to the last that occurs follows in gamma, then the weight of each class. A
weight is a class with 2 fine bits: the class whose smallest number is nearest to the number of occurrences (halfway,
the larger class). It is sent as its difference d to the previous weight: gamma of 1 - 2d, or of 2d if d is positive.
The first weight is compared with the weight of the number of elements. Zeros pad the last byte.

Shares: every class that occurs gets one of the 2^13 units. The other units are divided in proportion to the smallest
number in the class of each weight, and rounded down. The remainder goes to the first of the most frequent classes.
"""

from bisect import bisect_right
from collections.abc import Sequence
from functools import cache, lru_cache
from itertools import pairwise, zip_longest
from typing import NamedTuple

from qcomp.core.coding.bits import BitReader, BitWriter
from qcomp.core.coding.elias import gamma, take_gamma
from qcomp.core.coding.integer_classes import class_of, smallest, spare_bits
from qcomp.core.errors import PayloadError

FLAT = 0
"""The method without a model, in which all bits are plain."""
UNITS_BITS = 13
"""Shares are multiples of 2^-UNITS_BITS."""
_METHOD_BITS = 3
FINEST = 6
"""The most fine bits; levels up to 127 can then have a class each."""
WEIGHT_FINE = 2
LARGEST_WEIGHT = class_of(1 << 40, WEIGHT_FINE)

_FRACTION = 12
"""Fractional bits in estimates of lengths."""
_MANTISSA = 8


class Model(NamedTuple):
    """The model of a vector: the properties of each class."""

    method: int
    units: list[int]
    """The share of each class; they add up to 2^13."""
    smallest: list[int]
    """The smallest level of each class, which is the level with spare bits of zero."""
    plain: list[int]
    """The number of plain bits after each class: the spare bits and the sign."""


def finest(largest: int) -> int:
    """Return the most fine bits that are useful for levels up to ``largest``."""
    return min(FINEST, largest.bit_length() - 1)


def flat(largest: int) -> Model:
    """Return the model with one class, in which all levels have the same fixed width."""
    return Model(FLAT, [1 << UNITS_BITS], [0], [largest.bit_length() + 1])


def fit(counts: Sequence[int], largest: int) -> tuple[Model, bytes]:
    """Return the model that makes a vector's code shortest, by an estimate in integers, and the model's bytes.

    Parameters
    ----------
    counts : sequence of int
        The number of elements in each class, with ``finest(largest)`` fine bits.
    largest : int
        The largest possible level.

    Examples
    --------
    >>> model, data = fit([90, 10], largest=1)
    >>> model.method, model.units, data.hex()
    (1, [7419, 773], '2a1b')
    """
    size = sum(counts)
    least, best = size * (largest.bit_length() + 1) << _FRACTION, None
    classes = list(counts)
    for fine in range(finest(largest), -1, -1):
        while classes and not classes[-1]:
            classes.pop()
        if not classes:
            break
        weights = [_weight(count) for count in classes]
        estimate = _estimate(classes, weights, fine) + (_bits(weights, size) << _FRACTION)
        if estimate < least:
            least, best = estimate, (weights, fine)
        classes = _coarser(classes, fine) if fine else []
    bits = BitWriter()
    if best is None:
        bits.put(FLAT, _METHOD_BITS)
        return flat(largest), bits.finish()
    weights, fine = best
    bits.put(1 + fine, _METHOD_BITS)
    bits.put(*gamma(len(weights)))
    for step in _steps(weights, size):
        bits.put(*gamma(step))
    return _model(weights, fine), bits.finish()


def read(bits: BitReader, size: int, largest: int) -> Model:
    """Read the model for a vector of ``size`` elements, and skip the padding of its last byte.

    Raises PayloadError if the method does not exist for levels up to ``largest``, or a class or a weight is out of
    range.
    """
    method = bits.take(_METHOD_BITS)
    if method == FLAT:
        bits.align()
        return flat(largest)
    fine = method - 1
    if fine > finest(largest):
        raise PayloadError(f"the code names the method {method}; expected at most {finest(largest) + 1}")
    count = take_gamma(bits)
    if count > class_of(largest, fine) + 1:
        raise PayloadError(f"the model has {count} classes, too many for levels up to {largest}")
    weights, weight = [], _weight(size)
    for _ in range(count):
        number = take_gamma(bits)
        weight += -(number // 2) if number & 1 else number // 2
        if not 0 <= weight <= LARGEST_WEIGHT:
            raise PayloadError(f"the model has a weight {weight}; expected 0 to {LARGEST_WEIGHT}")
        weights.append(weight)
    if not weight:
        raise PayloadError("the last class of the model has weight 0; expected a weight above 0")
    bits.align()
    return _model(weights, fine)


def _steps(weights: Sequence[int], size: int) -> list[int]:
    """Return the positive integer that represents the difference of each weight to the previous one."""
    steps = (weight - last for last, weight in pairwise([_weight(size), *weights]))
    return [2 * step if step > 0 else 1 - 2 * step for step in steps]


def _bits(weights: Sequence[int], size: int) -> int:
    """Return the number of bits of a model, including the padding of its last byte."""
    numbers = [len(weights), *_steps(weights, size)]
    bits = _METHOD_BITS + sum(2 * number.bit_length() - 1 for number in numbers)
    return -(-bits // 8) * 8


def _weight(count: int) -> int:
    """Return the class whose smallest count is nearest to a count; halfway, the larger class."""
    return bisect_right(_least_counts(), count) - 1


@cache
def _least_counts() -> list[int]:
    """Return the smallest count of each weight: counts in the upper half of a class round up to the next class."""
    widths = [1 << spare_bits(weight, WEIGHT_FINE) for weight in range(LARGEST_WEIGHT)]
    return [0, *(smallest(weight, WEIGHT_FINE) - width // 2 for weight, width in enumerate(widths, 1))]


def _units(weights: Sequence[int]) -> list[int]:
    """Return the share of each class."""
    counts = _smallest(WEIGHT_FINE, LARGEST_WEIGHT + 1)
    shares = [counts[weight] for weight in weights]
    total, rest = sum(shares), (1 << UNITS_BITS) - len(shares) + shares.count(0)
    units = [1 + share * rest // total if share else 0 for share in shares]
    units[shares.index(max(shares))] += (1 << UNITS_BITS) - sum(units)
    return units


def _model(weights: Sequence[int], fine: int) -> Model:
    count = len(weights)
    return Model(1 + fine, _units(weights), list(_smallest(fine, count)), list(_plain(fine, count)))


@lru_cache
def _smallest(fine: int, count: int) -> tuple[int, ...]:
    """Return the smallest level of each class."""
    return tuple(smallest(c, fine) for c in range(count))


@lru_cache
def _plain(fine: int, count: int) -> tuple[int, ...]:
    """Return the number of bits after each class: the spare bits and, except for class 0, the sign."""
    return tuple(spare_bits(c, fine) + (c > 0) for c in range(count))


def _coarser(counts: Sequence[int], fine: int) -> list[int]:
    """Return the number of elements in each class with one fine bit less."""
    # The first 2^fine classes keep one number each; all others join in pairs.
    single = counts[: 1 << fine]
    pairs = zip_longest(counts[1 << fine :: 2], counts[(1 << fine) + 1 :: 2], fillvalue=0)
    return [*single, *(a + b for a, b in pairs)]


def _estimate(counts: Sequence[int], weights: Sequence[int], fine: int) -> int:
    """Return an estimate of the bits that a vector takes after its model, times 2^12."""
    table, total = _logarithms(), 0
    for count, units, plain in zip(counts, _units(weights), _plain(fine, len(weights)), strict=True):
        if count:
            whole = units.bit_length() - 1
            part = table[(units << _MANTISSA >> whole) - (1 << _MANTISSA)]
            total += count * ((UNITS_BITS - whole + plain << _FRACTION) - part)
    return total


@cache
def _logarithms() -> list[int]:
    """Return log2(1 + i/256) * 2^12, rounded down, for each i below 256; each squaring gives a bit."""
    table = []
    for i in range(1 << _MANTISSA):
        value, bits = (1 << _MANTISSA) + i << 30 - _MANTISSA, 0
        for _ in range(_FRACTION):
            value = value * value >> 30
            bit = value >> 31
            value >>= bit
            bits = bits << 1 | bit
        table.append(bits)
    return table
