"""Computes with the factors of low-rank matrices, with the same bits in every library and on every device."""

from collections.abc import Callable, Sequence
from typing import Any

from qcomp.core.numeric.arrays import Array, array_namespace, divide, flush, sqrt, truncate_last_bit
from qcomp.core.numeric.buckets import Block
from qcomp.core.numeric.random import SHARED_RANK, Key, draws16
from qcomp.core.numeric.sums import pad_to_power_of_two, power_of_two_below, tree_sum

LEAST_LEFT, LEAST_RIGHT = 2.0**-30, 2.0**-72
"""The least magnitudes in the left factor, whose rows have norm 1, and in the right factor; smaller ones count as zero.

A product of two nonzero elements is then at least 2^-102, so in float32 sums of products are multiples of 2^-126. So
these sums are never subnormal numbers, which some devices flush and others do not.
"""
_LEAST = 2.0**-51
"""The least magnitude while rows are made orthonormal, for the same reason."""
_INDEPENDENT = 0.5
"""The least norm that a row of norm 1 keeps in the second projection, unless it consists of rounding errors."""


def first_factor(count: int, length: int, like: Array) -> Array:
    """Return numbers between -1 and 1, of shape (count, length), which are the same on all ranks, in all jobs."""
    xp = array_namespace(like)
    padded = -(-length // 8) * 8
    draws = draws16(
        Key(rank=SHARED_RANK), Block(0, count, padded, length, 0), bucket_size=padded, like=like
    )  # 0 to 65535
    return xp.astype((2 * draws[:, :length] - 65535) / 65536, like.dtype, copy=False)


def next_factor(new: Array, old: Array) -> Array:
    """Return each row divided by a power of two, so that its largest magnitude is from 1 to 2; for zeros, the old row.

    The division is exact, so all ranks hold the same factor. A row of zeros would stay zero in all later steps.
    """
    xp = array_namespace(new)
    largest = xp.max(xp.abs(new), axis=-1, keepdims=True)
    return xp.where(largest > 0, flush(divide(new, power_of_two_below(largest))), old)


def outer_product(left: Array, right: Array) -> Array:
    """Return the sum of the outer products of the rows of two factors, flat; see `primitives.take_low_rank`."""
    total = None
    for index in range(left.shape[0]):
        product = truncate_last_bit(left[index, :, None] * right[index, None, :])
        total = product if total is None else total + product
    assert total is not None
    return array_namespace(left).reshape(total, (-1,))


def together(function: Callable[..., Array], *lists: Sequence[Array]) -> list[Array]:
    """Apply a function of stacked arrays to the arrays of the lists, with one call for all arrays of one shape."""
    alike: dict[Any, list[int]] = {}
    for index, x in enumerate(lists[0]):
        alike.setdefault((tuple(x.shape), x.dtype), []).append(index)
    found: dict[int, Array] = {}
    for indexes in alike.values():
        xp = array_namespace(lists[0][indexes[0]])
        stack = function(*(xp.stack([arrays[i] for i in indexes]) for arrays in lists))
        found.update((i, stack[number, ...]) for number, i in enumerate(indexes))
    return [found[i] for i in range(len(lists[0]))]


def without_small(x: Array, least: float) -> Array:
    """Return x with magnitudes below ``least`` replaced by zero."""
    xp = array_namespace(x)
    return xp.where(xp.abs(x) < least, xp.zeros_like(x), x)


def orthonormal(rows: Array) -> Array:
    """Return an orthonormal basis of the span of rows, with zeros for each row that depends on earlier rows.

    The result has the same bits in every library, since each product loses its last bit before it is added.

    The method is Gram-Schmidt with two projections of every row. They make the rows orthogonal to working precision,
    even if the rows were nearly dependent. A row that is nothing but rounding errors may become any direction
    orthogonal to the others, or zero.
    """
    xp = array_namespace(rows)
    largest = xp.max(xp.abs(rows), axis=-1, keepdims=True)
    scaled = without_small(divide(rows, power_of_two_below(largest)), _LEAST)  # no square overflows
    basis = scaled[..., :0, :]
    for index in range(rows.shape[-2]):
        first, _ = _unit(_projected(scaled[..., index : index + 1, :], basis))
        second, norm = _unit(_projected(first, basis))
        found = xp.where(norm < _INDEPENDENT, xp.zeros_like(second), second)
        basis = xp.concat([basis, found], axis=-2)
    return basis


def _projected(row: Array, basis: Array) -> Array:
    """Return the part of a row that is orthogonal to a basis."""
    if not basis.shape[-2]:
        return row
    # Without `matmul`, since its order of summation differs between libraries.
    shares = without_small(_sums(truncate_last_bit(basis * row)), _LEAST)
    for index in range(basis.shape[-2]):
        row = row - truncate_last_bit(shares[..., index : index + 1, :] * basis[..., index : index + 1, :])
    return without_small(row, _LEAST)


def _unit(row: Array) -> tuple[Array, Array]:
    """Return a row divided by its norm, or zeros, and the norm."""
    xp = array_namespace(row)
    norm = sqrt(_sums(truncate_last_bit(row * row)))
    unit = divide(row, xp.where(norm > 0, norm, xp.ones_like(norm)))
    return without_small(unit, _LEAST), norm


def _sums(x: Array) -> Array:
    """Return the sum of each row, of shape (..., count, 1), in an order that does not depend on the other rows."""
    xp = array_namespace(x)
    rows = pad_to_power_of_two(xp.reshape(x, (-1, x.shape[-1])))
    return xp.reshape(tree_sum(rows), (*x.shape[:-1], 1))
