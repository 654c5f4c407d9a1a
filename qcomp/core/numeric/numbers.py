"""Arithmetic on numbers that a step computes from arrays: floats, or float64 scalars while a compiler traces."""

import math
from collections.abc import Sequence
from typing import Any

from qcomp.core.numeric.arrays import Array, array_namespace, is_traced

__all__ = ["Number", "as_number", "choose", "clamp", "factor_of", "mean_of_positive", "root"]

Number = Any


def as_number(x: Array) -> Number:
    """Return the only element of an array."""
    xp = array_namespace(x)
    return xp.astype(x, xp.float64) if is_traced(x) else float(x)


def factor_of(x: Array, number: Number) -> Number:
    """Return a number in a type that multiplies an array without changing the array's dtype."""
    return number.astype(x.dtype) if is_traced(number) else number


def choose(condition: Any, one: Number, other: Number) -> Number:
    """Return one number if a condition holds, else the other."""
    if is_traced(condition):
        return array_namespace(condition).where(condition, one, other)
    return one if condition else other


def clamp(x: Number, low: Number, high: Number) -> Number:
    """Return a number, or the nearest bound if it lies outside the bounds."""
    return choose(x < low, low, choose(x > high, high, x))


def root(x: Number) -> Number:
    """Return the square root."""
    return array_namespace(x).sqrt(x) if is_traced(x) else math.sqrt(x)


def mean_of_positive(numbers: Sequence[Number]) -> Number:
    """Return the mean of the numbers above 0, and 1 if there are none."""
    if any(map(is_traced, numbers)):
        some = sum(choose(x > 0, 1.0, 0.0) for x in numbers)
        return choose(
            some > 0, sum(choose(x > 0, x, 0.0) for x in numbers) / choose(some > 0, some, 1.0), 1.0
        )
    some = [x for x in numbers if x > 0]
    return math.fsum(some) / len(some) if some else 1.0
