"""The kernels of LAMB besides those of Adam: `sums_of_squares` and `fresh_variances` of `qcomp.core.primitives`.

Kernels take addresses, so one call and all threads work on all tensors, however many and small.

Bytes read and written per element: `sums_of_squares` 8 and 0, `fresh_variances` 16 and 8. Memory bandwidth limits both.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from qcomp.backends.numba_cpu import threads
from qcomp.backends.numba_cpu.adam import divide
from qcomp.backends.numba_cpu.jit import Floats, Longs, borrow, inline, kernel
from qcomp.backends.numba_cpu.primitives import ZERO, F, as_signed, by_width, largest
from qcomp.backends.numba_cpu.tables import floats_at, run_of
from qcomp.core.kernels import FreshNumbers

_RUN = 1 << 10
"""Elements per pass, few enough that the runs of all arrays stay in the first-level cache."""
_COLUMNS = 1 << 12
"""Columns that are added up at once, few enough that the unfinished sums stay in the second-level cache."""
_ROWS_OF = 1 << 15
"""The sums of a tensor's halving tree are computed in two passes. The first leaves at most so many to the second."""


def sums_of_squares(addresses: Longs, sizes: Sequence[int], dtype: np.dtype[Any]) -> list[float]:
    """Return the sum of the squares of each array; see `qcomp.core.numeric.sums.sum_of_squares`."""
    peaks = _peaks(addresses, sizes, dtype)
    powers = [math.ldexp(1.0, math.frexp(peak)[1] - 1) if math.isfinite(peak) else 1.0 for peak in peaks]
    heights = [_height(size) for size in sizes]
    columns = np.array([-(-size >> height) for size, height in zip(sizes, heights, strict=True)], np.int64)
    lengths, ends = np.asarray(sizes, np.int64), np.cumsum(-(-columns // _COLUMNS))
    starts = np.cumsum(columns) - columns
    sums, scales = np.empty(int(columns.sum()), dtype), np.asarray(powers, dtype)
    kernel, room = _fold.of(dtype).compiled, _COLUMNS * (max(heights) + 1)

    def work(first: int, last: int) -> None:
        kernel(addresses, lengths, columns, starts, ends, scales, sums, np.empty(room, dtype), first, last)

    blocks = int(ends[-1])
    threads.run(work, blocks, -(-sum(sizes) // max(1, blocks)))
    _finish.of(dtype).compiled(columns, starts, sums)
    found = [
        float(sums[start]) * power * power if size else 0.0
        for start, power, size in zip(starts, powers, sizes, strict=True)
    ]
    return [x if math.isfinite(peak) else math.inf for x, peak in zip(found, peaks, strict=True)]


def fresh_variances(
    tensors: Longs, sizes: Sequence[int], numbers: Sequence[FreshNumbers], dtype: np.dtype[Any]
) -> list[float]:
    """Make the momentum and the fresh variance of each of several tensors; return the growth of each.

    A row of ``tensors`` has the addresses of the averaged momentum, which the new momentum overwrites; the last
    momentum; the frozen variance; the fresh variance; and the array for the new fresh variance, which may be the old
    one.
    """
    table, lengths = tensors.reshape(-1), np.asarray(sizes, np.int64)
    ends = np.cumsum(-(-lengths // _RUN))
    rows = [
        (n.divisor, n.divisor != 1, beta1, 1 - beta1, beta2, 1 - beta2, n.eps)
        for n in numbers
        for beta1, beta2 in [n.betas]
    ]
    rounded, kernel = np.asarray(rows, dtype).reshape(-1), _refresh.of(dtype).compiled

    def work(first: int, last: int) -> Floats:
        growth = np.zeros(len(sizes), dtype)
        kernel(table, lengths, ends, rounded, growth, np.empty(_RUN, dtype), first, last)
        return growth

    found: list[float] = np.max(threads.run(work, int(ends[-1]), _RUN), axis=0).tolist()
    return found


def _height(size: int) -> int:
    """Return how many times the first pass over a halving tree halves."""
    return max(0, (max(1, size) - 1).bit_length() - (_ROWS_OF - 1).bit_length())


def _peaks(addresses: Longs, sizes: Sequence[int], dtype: np.dtype[Any]) -> list[float]:
    """Return the largest magnitude in each array, or NaN if the array contains one."""
    lengths = np.asarray(sizes, np.int64)
    ends, kernel = np.cumsum(-(-lengths // _COLUMNS)), _peak.of(dtype).compiled

    def work(first: int, last: int) -> Floats:
        peaks = np.zeros(len(sizes), dtype)
        kernel(addresses, lengths, ends, peaks, first, last)
        return peaks

    found: list[float] = np.max(threads.run(work, int(ends[-1]), _COLUMNS), axis=0).tolist()
    return found


@inline
def _larger(a: np.float32, b: np.float32) -> np.float32:
    """Return the larger of two magnitudes, or NaN if one is NaN."""
    return b if b > a or b != b else a  # noqa: PLR0124


@kernel("void(i64, i64, i64, f32, int64, int64)")
def _peak(addresses: Longs, sizes: Longs, ends: Longs, peaks: Floats, first: int, last: int) -> None:
    peaks = borrow(peaks)
    vector = 0
    while first < last:
        vector, begin, end = run_of(ends, vector, first, last)
        x = floats_at(addresses[vector], sizes[vector], peaks)
        for block in range(begin, end):
            found = largest(x[block * _COLUMNS : min((block + 1) * _COLUMNS, x.size)])
            peaks[vector] = _larger(peaks[vector], found)
        first += end - begin


@inline
def _squares(x: Floats, power: np.float32, out: Floats) -> None:
    inverse = F(1) / power
    # Multiplying by the inverse of a power of two rounds in the same way, and is faster.
    if inverse * power == F(1):
        for i in range(x.size):
            scaled = x[i] * inverse
            out[i] = scaled * scaled
    else:
        for i in range(x.size):
            scaled = x[i] / power
            out[i] = scaled * scaled


@inline
def _add_to(total: Floats, x: Floats) -> None:
    for i in range(x.size):
        total[i] += x[i]


@kernel("void(i64, i64, i64, i64, i64, f32, f32, f32, int64, int64)")
def _fold(
    addresses: Longs,
    sizes: Longs,
    columns: Longs,
    starts: Longs,
    ends: Longs,
    powers: Floats,
    sums: Floats,
    room: Floats,
    first: int,
    last: int,
) -> None:
    # Halving k times leaves columns. Each is the sum of elements at 2^k places, added in pairs. The pairs are visited
    # depth first, for a block of columns at once, so the array is read once, in blocks.
    sums, room = borrow(sums), borrow(room)
    vector = 0
    halves = np.empty(64, np.int64)
    while first < last:
        vector, begin, end = run_of(ends, vector, first, last)
        x, width = floats_at(addresses[vector], sizes[vector], sums), columns[vector]
        levels = 0
        length = x.size
        while length > width:
            length = (length + 1) // 2
            halves[levels] = length
            levels += 1
        for block in range(begin, end):
            start, stop = block * _COLUMNS, min((block + 1) * _COLUMNS, width)
            for leaf in range(1 << levels):
                a, b = start, stop
                for level in range(levels - 1, -1, -1):
                    if leaf >> level & 1:
                        a += halves[level]
                        b += halves[level]
                    b = min(b, halves[level - 1] if level > 0 else x.size)
                # The sums of the leaves before this one wait in the room, one for each 1 bit of this leaf's number.
                depth = 0
                for level in range(levels):
                    depth += leaf >> level & 1
                at = room[depth * _COLUMNS : depth * _COLUMNS + stop - start]
                filled = max(0, b - a)
                if filled > 0:
                    _squares(x[a:b], powers[vector], at[:filled])
                at[filled:] = ZERO
                level = 0
                while leaf >> level & 1:
                    below = room[(depth - 1) * _COLUMNS : (depth - 1) * _COLUMNS + stop - start]
                    _add_to(below, room[depth * _COLUMNS : depth * _COLUMNS + stop - start])
                    depth -= 1
                    level += 1
            sums[starts[vector] + start : starts[vector] + stop] = room[: stop - start]
        first += end - begin


@kernel("void(i64, i64, f32)")
def _finish(columns: Longs, starts: Longs, sums: Floats) -> None:
    sums = borrow(sums)
    for vector in range(columns.size):
        of_vector = sums[starts[vector] : starts[vector] + columns[vector]]
        length = columns[vector]
        while length > 1:
            half = (length + 1) // 2
            _add_to(of_vector[:half], of_vector[half:length])
            length = half


@inline
def _mask(m: Floats, v: Floats) -> None:
    for i in range(m.size):
        m[i] = m[i] if v[i] > ZERO else ZERO


@inline
def _gradient(m: Floats, old: Floats, beta1: np.float32, rest: np.float32, out: Floats) -> None:
    for i in range(out.size):
        out[i] = (m[i] - beta1 * old[i]) / rest


@inline
def _mix_squares(f: Floats, g: Floats, keep: np.float32, new: np.float32, out: Floats) -> None:
    for i in range(out.size):
        out[i] = keep * f[i] + new * (g[i] * g[i])


@inline
def _mix_squares_into(f: Floats, g: Floats, keep: np.float32, new: np.float32) -> None:
    for i in range(f.size):
        f[i] = keep * f[i] + new * (g[i] * g[i])


@inline
def _may_exceed(v: Floats, f: Floats, bound: np.float32) -> bool:
    """Return whether v / f may exceed the bound anywhere; also True if products may be subnormal."""
    small = by_width(v, F(2.0**-100), 2.0**-1000)
    bits = as_signed(v.dtype.type(0))
    for i in range(v.size):
        fits = (v[i] <= bound * f[i]) & ((v[i] >= small) | (v[i] == ZERO))
        bits = max(bits, as_signed(v.dtype.type(0) if fits else v.dtype.type(1)))
    return bool(bits != 0)


@inline
def _grown(v: Floats, f: Floats, eps: np.float32, out: Floats) -> None:
    for i in range(out.size):
        finite = v[i] if v[i] < np.inf else ZERO
        out[i] = (np.sqrt(finite) + eps) / (np.sqrt(f[i]) + eps)


@kernel("void(i64, i64, i64, f32, f32, f32, int64, int64)")
def _refresh(
    addresses: Longs,
    sizes: Longs,
    ends: Longs,
    numbers: Floats,
    growth: Floats,
    beside: Floats,
    first: int,
    last: int,
) -> None:
    numbers, growth, beside = borrow(numbers), borrow(growth), borrow(beside)
    vector = 0
    while first < last:
        vector, begin, end = run_of(ends, vector, first, last)
        row, size = 5 * vector, sizes[vector]
        mean, old = floats_at(addresses[row], size, numbers), floats_at(addresses[row + 1], size, numbers)
        frozen, fresh = (
            floats_at(addresses[row + 2], size, numbers),
            floats_at(addresses[row + 3], size, numbers),
        )
        new_fresh = floats_at(addresses[row + 4], size, numbers)
        step = numbers[7 * vector : 7 * vector + 7]
        eps = step[6]
        for run in range(begin, end):
            start, stop = run * _RUN, min((run + 1) * _RUN, size)
            m, v, f, g = mean[start:stop], frozen[start:stop], new_fresh[start:stop], beside[: stop - start]
            if step[1] != ZERO:
                divide(m, step[0])
            _mask(m, v)
            _gradient(m, old[start:stop], step[2], step[3], g)
            if addresses[row + 3] == addresses[row + 4]:
                _mix_squares_into(f, g, step[4], step[5])
            else:
                _mix_squares(fresh[start:stop], g, step[4], step[5], f)
            # (sqrt(v) + eps) / (sqrt(f) + eps) is at most the larger of 1 and sqrt(v / f). So roots are taken only if
            # some v / f exceeds the square of the growth so far, less what roundings can add.
            last_growth = growth[vector]
            known = eps > ZERO and last_growth > F(1.00001)
            if not known or _may_exceed(v, f, last_growth * last_growth * F(0.99999)):
                _grown(v, f, eps, g)
                growth[vector] = _larger(last_growth, largest(g))
        first += end - begin
