"""The kernels of PowerSGD: add a residual, subtract a product, make a factor orthonormal, and scale the next factor.

Bytes read and written per element: `compensate` 8 and 4, `take_low_rank` 4 and 8. If the rank of the
approximation is low, memory bandwidth is the limit.
"""

from __future__ import annotations

import numpy as np

from qcomp.backends.numba_cpu import threads
from qcomp.backends.numba_cpu.jit import Floats, inline, kernel
from qcomp.backends.numba_cpu.primitives import (
    EXACT_TINY,
    ZERO,
    F,
    by_width,
    flush,
    largest,
    power_of_two_below,
    tree_sum,
    truncate_last_bit,
)

_RUN = 1 << 12
"""Elements per pass, few enough to stay in the first-level cache between loops over them."""


def compensate(x: Floats, residual: Floats, out: Floats) -> float:
    """Let out = flush(flush(x) + residual), and return the largest magnitude in out, or NaN if out holds one.

    If the residual is empty, values are exact: out is x, flushed as exact values are. ``out`` may be x.
    """
    over = x.ctypes.data == out.ctypes.data
    kernel, runs = _compensate.of(x.dtype), -(-x.size // _RUN)
    found = threads.run(lambda a, b: kernel(x, residual, out, over, a * _RUN, b * _RUN), runs, _RUN)
    return max(found) if all(part == part for part in found) else float("nan")  # noqa: PLR0124


def take_low_rank(left: Floats, right: Floats, matrix: Floats, out: Floats, rows: int) -> None:
    """Let out = the product of two factors, and subtract it from the matrix; see `qcomp.core.primitives`."""
    kernel, columns = _take_low_rank.of(matrix.dtype), matrix.size // rows
    threads.run(lambda a, b: kernel(left, right, matrix, out, rows, columns, a, b), rows, columns)


def orthonormal(rows: Floats, count: int, out: Floats) -> None:
    """Let out = an orthonormal basis of the rows; see `qcomp.core.numeric.low_rank.orthonormal`."""
    length = rows.size // count
    padded = 1 << max(0, length - 1).bit_length()
    row, shares, sums = (np.empty(size, rows.dtype) for size in (length, count, padded))
    _orthonormal.of(rows.dtype)(rows, out, row, shares, sums)


def next_factor(new: Floats, old: Floats, count: int, out: Floats) -> None:
    """Write ``count`` rows to ``out``: each new row divided by a power of two, or the old row if the new one is 0."""
    _next_factor.of(new.dtype)(new, old, out, count)


@inline
def _flush(x: Floats, out: Floats) -> None:
    tiny = by_width(x, *EXACT_TINY)
    for i in range(out.size):
        out[i] = flush(x[i], tiny)


@inline
def _add(x: Floats, residual: Floats, out: Floats) -> None:
    for i in range(out.size):
        out[i] = flush(flush(x[i]) + residual[i])


@inline
def _add_over(x: Floats, residual: Floats) -> None:
    for i in range(x.size):
        x[i] = flush(flush(x[i]) + residual[i])


@kernel("float32(f32_in, f32_in, f32, boolean, int64, int64)")
def _compensate(x: Floats, residual: Floats, out: Floats, over: bool, first: int, last: int) -> np.float32:
    most = ZERO
    last = min(last, out.size)
    for start in range(first, last, _RUN):
        stop = min(last, start + _RUN)
        part = out[start:stop]
        if residual.size == 0:
            _flush(x[start:stop], part)
        elif over:
            _add_over(part, residual[start:stop])
        else:
            _add(x[start:stop], residual[start:stop], part)
        found = largest(part)
        most = found if most < found or np.isnan(found) else most
    return most


@inline
def _set(factor: np.float32, right: Floats, out: Floats) -> None:
    for j in range(out.size):
        out[j] = truncate_last_bit(factor * right[j])


@inline
def _increase(factor: np.float32, right: Floats, out: Floats) -> None:
    for j in range(out.size):
        out[j] += truncate_last_bit(factor * right[j])


@inline
def _subtract(matrix: Floats, product: Floats) -> None:
    for j in range(matrix.size):
        matrix[j] = flush(matrix[j] - product[j])


@kernel("void(f32_in, f32_in, f32, f32, int64, int64, int64, int64)")
def _take_low_rank(
    left: Floats, right: Floats, matrix: Floats, out: Floats, rows: int, columns: int, first: int, last: int
) -> None:
    rank = left.size // rows
    for row in range(first, last):
        for start in range(0, columns, _RUN):
            stop = min(columns, start + _RUN)
            part = out[row * columns + start : row * columns + stop]
            _set(left[row], right[start:stop], part)
            for k in range(1, rank):
                _increase(left[k * rows + row], right[k * columns + start : k * columns + stop], part)
            _subtract(matrix[row * columns + start : row * columns + stop], part)


_LEAST = F(2.0**-51)
"""As in `qcomp.core.numeric.low_rank`."""
_INDEPENDENT = F(0.5)


@inline
def _without_small(x: np.float32) -> np.float32:
    return ZERO if abs(x) < _LEAST else x


@inline
def _divide(x: Floats, divisor: np.float32, out: Floats) -> None:
    for i in range(out.size):
        out[i] = _without_small(x[i] / divisor)


@inline
def _multiply(x: Floats, y: Floats, out: Floats) -> None:
    for i in range(x.size):
        out[i] = truncate_last_bit(x[i] * y[i])
    for i in range(x.size, out.size):
        out[i] = ZERO


@inline
def _subtract_share(row: Floats, share: np.float32, other: Floats) -> None:
    for i in range(row.size):
        row[i] -= truncate_last_bit(share * other[i])


@inline
def _project(row: Floats, basis: Floats, shares: Floats, sums: Floats) -> None:
    """Subtract from a row what lies in the span of a basis."""
    length = row.size
    count = basis.size // length
    for k in range(count):
        _multiply(basis[k * length : (k + 1) * length], row, sums)
        shares[k] = _without_small(tree_sum(sums))
    for k in range(count):
        _subtract_share(row, shares[k], basis[k * length : (k + 1) * length])
    _divide(row, F(1), row)


@inline
def _normalise(row: Floats, sums: Floats) -> np.float32:
    """Divide a row by its norm, unless that is 0, and return the norm."""
    _multiply(row, row, sums)
    norm: np.float32 = np.sqrt(tree_sum(sums))
    _divide(row, norm if norm > ZERO else F(1), row)
    return norm


@kernel("void(f32_in, f32, f32, f32, f32)")
def _orthonormal(rows: Floats, out: Floats, row: Floats, shares: Floats, sums: Floats) -> None:
    length = row.size
    for start in range(0, rows.size, length):
        given = rows[start : start + length]
        _divide(given, power_of_two_below(largest(given)), row)
        norm = ZERO
        for _ in range(2):
            if start > 0:
                _project(row, out[:start], shares, sums)
            norm = _normalise(row, sums)
        if norm < _INDEPENDENT:
            out[start : start + length] = ZERO
        else:
            out[start : start + length] = row


@inline
def _divide_flushed(x: Floats, divisor: np.float32, out: Floats) -> None:
    for i in range(out.size):
        out[i] = flush(x[i] / divisor)


@kernel("void(f32_in, f32_in, f32, int64)")
def _next_factor(new: Floats, old: Floats, out: Floats, count: int) -> None:
    length = out.size // count
    for start in range(0, out.size, length):
        peak = largest(new[start : start + length])
        if peak > ZERO:
            _divide_flushed(
                new[start : start + length], power_of_two_below(peak), out[start : start + length]
            )
        else:
            out[start : start + length] = old[start : start + length]
