"""PowerSGD's passes over whole matrices: a gradient plus its residual, and the product of two factors.

Bytes read and written per element: `compensate` 8 and 4, `take_low_rank` 4 and 8. Memory bandwidth is the limit for
low ranks.
"""

from __future__ import annotations

import numpy as np

from qcomp.backends.numba_cpu import threads
from qcomp.backends.numba_cpu.jit import Floats, inline, kernel
from qcomp.backends.numba_cpu.primitives import U, as_bits, as_float, flush, largest_bits

__all__ = ["NO_VALUES", "compensate", "take_low_rank"]

_RUN = 1 << 12
"""Elements per pass, few enough to stay in the first-level cache between loops over them."""

NO_VALUES: Floats = np.empty(0, dtype=np.float32)


def compensate(x: Floats, residual: Floats, out: Floats) -> float:
    """Let out = flush(flush(x) + residual), and return its largest magnitude, or NaN if it holds one.

    Parameters
    ----------
    x : array of float32, shape (n,)
    residual : array of float32, shape (n,)
        `NO_VALUES` stands for a residual of zeros, which is not read.
    out : array of float32, shape (n,)
        May be x.
    """
    over = x.ctypes.data == out.ctypes.data
    runs = -(-x.size // _RUN)
    found = threads.run(lambda a, b: _compensate(x, residual, out, over, a * _RUN, b * _RUN), runs, _RUN)
    return max(found) if all(part == part for part in found) else float("nan")  # noqa: PLR0124


def take_low_rank(left: Floats, right: Floats, matrix: Floats, out: Floats, rows: int) -> None:
    """Let out = the product of two factors, and subtract it from the matrix; see `qcomp.core.primitives`.

    Parameters
    ----------
    left, right : array of float32, shapes (rank * rows,) and (rank * columns,)
    matrix, out : array of float32, shape (rows * columns,)
    rows : int
        At least 1.
    """
    columns = matrix.size // rows
    threads.run(lambda a, b: _take_low_rank(left, right, matrix, out, rows, columns, a, b), rows, columns)


@inline
def _flush(x: Floats, out: Floats) -> None:
    for i in range(out.size):
        out[i] = flush(x[i])


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
    largest = np.int32(0)
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
        largest = max(largest, np.int32(largest_bits(part)))
    return as_float(U(largest))


@inline
def _set(factor: np.float32, right: Floats, out: Floats) -> None:
    for j in range(out.size):
        out[j] = as_float(as_bits(factor * right[j]) & U(0xFFFFFFFE))


@inline
def _increase(factor: np.float32, right: Floats, out: Floats) -> None:
    for j in range(out.size):
        out[j] += as_float(as_bits(factor * right[j]) & U(0xFFFFFFFE))


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
