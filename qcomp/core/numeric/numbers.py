"""Arithmetic on the numbers that a step computes from arrays: floats, or float64 scalars while a compiler traces."""

import math
from collections.abc import Sequence
from typing import Any

from qcomp.core.numeric.arrays import Array, array_namespace, is_traced

Number = float
"""A float, or a float64 scalar array while a compiler traces."""


def as_number(x: Array) -> Number:
    """Return the only element of an array."""
    xp: Any = array_namespace(x)
    found: Number = xp.astype(x, xp.float64) if is_traced(x) else float(x)
    return found


def factor_of(x: Array, number: Number) -> Number:
    """Return a number in a type by which an array can be multiplied without changing the array's dtype."""
    traced: Any = number
    found: Number = traced.astype(x.dtype) if is_traced(traced) else number
    return found


def choose(condition: Any, one: Number, other: Number) -> Number:
    """Return one number if a condition holds, else the other."""
    if is_traced(condition):
        xp: Any = array_namespace(condition)
        found: Number = xp.where(condition, one, other)
        return found
    return one if condition else other


def clamp(x: Number, low: Number, high: Number) -> Number:
    """Return a number, or the nearest bound if it lies outside the bounds."""
    return choose(x < low, low, choose(x > high, high, x))


def root(x: Number) -> Number:
    """Return the square root."""
    if is_traced(x):
        traced: Any = x
        xp: Any = array_namespace(traced)
        found: Number = xp.sqrt(traced)
        return found
    return math.sqrt(x)


def mean_of_positive(numbers: Sequence[Number]) -> Number:
    """Return the mean of the numbers above 0, and 1 if there are none."""
    if any(map(is_traced, numbers)):
        some = sum(choose(x > 0, 1.0, 0.0) for x in numbers)
        return choose(
            some > 0, sum(choose(x > 0, x, 0.0) for x in numbers) / choose(some > 0, some, 1.0), 1.0
        )
    positive = [x for x in numbers if x > 0]
    return math.fsum(positive) / len(positive) if positive else 1.0
