"""Steps of Adam for several tensors at once: `adam_steps`, `adam_directions` and `frozen_steps` of the primitives.

Adam: m' = b1 * m + (1 - b1) * g; v' = b2 * v + (1 - b2) * (g * g); with a frozen variance: m' = m where v > 0, else 0.
p' = p - rate * ((m' / correction) / (sqrt(v') + eps) [+ decay * p]), each operation rounded as in NumPy's expression.

A kernel takes addresses, so one call and all threads work on all tensors, however many and small.

Bytes read and written per element, in place: 16 and 12, with a frozen variance 12 and 8. Memory bandwidth is the limit,
but up to three divisions and a root take almost as long as the memory accesses.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from qcomp.backends.numba_cpu import threads
from qcomp.backends.numba_cpu.jit import Floats, Kernel, Longs, borrow, inline, kernel
from qcomp.backends.numba_cpu.primitives import ZERO, F, mix, mix_into
from qcomp.backends.numba_cpu.tables import floats_at
from qcomp.core.kernels import AdamNumbers, StepNumbers

_RUN = 1 << 10
"""Elements per pass, few enough that the runs of all arrays stay in the first-level cache."""

Table = Longs | Sequence[Sequence[int]]
"""A row for each tensor: the addresses of its arrays, which are contiguous and of one dtype and size."""


def frozen_steps(
    tensors: Table,
    sizes: Sequence[int],
    numbers: Sequence[StepNumbers],
    divisors: Sequence[float],
    dtype: np.dtype[Any],
) -> None:
    """Make a step with a frozen variance for each of several tensors.

    A row of ``tensors`` has the addresses of p, m and v, then of the arrays for the new p and m, which may be the old
    ones. ``divisors`` has a number for each m, by which m is divided first; unless the number is 1, this overwrites m.
    """
    of_each = zip(numbers, divisors, strict=True)
    rows = [(*step, step.weight_decay != 0, divisor, divisor != 1) for step, divisor in of_each]
    _run(_frozen_steps, tensors, sizes, rows, dtype)


def adam_steps(
    tensors: Table,
    sizes: Sequence[int],
    numbers: Sequence[AdamNumbers],
    dtype: np.dtype[Any],
    *,
    moves: bool = True,
) -> None:
    """Make a step of Adam for each of several tensors.

    A row of ``tensors`` has the addresses of p, m, v and the mean gradient, then of the arrays for the new p, m and v.
    These may be the old arrays: all three, or only those of m and v. If ``moves`` is False, the array for the new p is
    not the old one, and gets the direction of the step, which a rate would multiply.
    """
    rows = [
        (
            *n.step,
            n.step.weight_decay != 0,  # a decay may round to zero
            n.variance_correction,
            n.coupled_decay,
            n.coupled_decay != 0,
            beta1,
            1 - beta1,
            beta2,
            1 - beta2,
            moves,
        )
        for n in numbers
        for beta1, beta2 in [n.betas]
    ]
    _run(_adam_steps, tensors, sizes, rows, dtype)


def _run(
    steps: Kernel,
    tensors: Table,
    sizes: Sequence[int],
    numbers: Sequence[Sequence[float]],
    dtype: np.dtype[Any],
) -> None:
    """Call a kernel on runs of elements, each of which is part of one tensor."""
    table = np.asarray(tensors, dtype=np.int64).reshape(-1)
    lengths = np.asarray(sizes, dtype=np.int64)
    ends = np.cumsum(-(-lengths // _RUN))
    rounded, kernel = np.asarray(numbers, dtype).reshape(-1), steps.of(dtype).compiled

    def work(first: int, last: int) -> None:
        kernel(table, lengths, ends, rounded, np.empty(_RUN, dtype), first, last)

    threads.run(work, int(ends[-1]), _RUN)


# LLVM does not vectorise a loop that reads and writes one array under two names, since it assumes an overlap. It also
# gives up on loops over many arrays. So a step in place is one loop, and a step into new arrays has several.


@inline
def _direction(m: np.float32, v: np.float32, correction: np.float32, eps: np.float32) -> np.float32:
    direction: np.float32 = (m / correction) / (np.sqrt(v) + eps)
    return direction


@inline
def _copy(x: Floats, out: Floats) -> None:
    for i in range(out.size):
        out[i] = x[i]


@inline
def _mask(m: Floats, v: Floats, out: Floats) -> None:
    for i in range(out.size):
        out[i] = m[i] if v[i] > ZERO else ZERO


@inline
def divide(m: Floats, divisor: np.float32) -> None:
    """Divide an array in place."""
    for i in range(m.size):
        m[i] = m[i] / divisor


@inline
def _add_decay(p: Floats, g: Floats, decay: np.float32, out: Floats) -> None:
    for i in range(out.size):
        out[i] = g[i] + decay * p[i]


@inline
def _mix_squares(v: Floats, g: Floats, keep: np.float32, new: np.float32, out: Floats) -> None:
    for i in range(out.size):
        out[i] = keep * v[i] + new * (g[i] * g[i])


@inline
def _move(
    p: Floats, m: Floats, v: Floats, step: Floats, variance_correction: np.float32, out: Floats
) -> None:
    rate, correction, eps, decay = step[0], step[1], step[2], step[3]
    if step[4] != ZERO:
        for i in range(out.size):
            direction = _direction(m[i], v[i] / variance_correction, correction, eps)
            out[i] = p[i] - rate * (direction + decay * p[i])
    else:
        for i in range(out.size):
            out[i] = p[i] - rate * _direction(m[i], v[i] / variance_correction, correction, eps)


@inline
def _direct(
    p: Floats, m: Floats, v: Floats, step: Floats, variance_correction: np.float32, out: Floats
) -> None:
    correction, eps, decay = step[1], step[2], step[3]
    if step[4] != ZERO:
        for i in range(out.size):
            out[i] = _direction(m[i], v[i] / variance_correction, correction, eps) + decay * p[i]
    else:
        for i in range(out.size):
            out[i] = _direction(m[i], v[i] / variance_correction, correction, eps)


@inline
def _mix_squares_into(v: Floats, g: Floats, keep: np.float32, new: np.float32) -> None:
    for i in range(v.size):
        v[i] = keep * v[i] + new * (g[i] * g[i])


@inline
def _frozen_in_place(p: Floats, m: Floats, v: Floats, step: Floats) -> None:
    rate, correction, eps, decay = step[0], step[1], step[2], step[3]
    if step[4] != ZERO:
        for i in range(p.size):
            m[i] = m[i] if v[i] > ZERO else ZERO
            p[i] = p[i] - rate * (_direction(m[i], v[i], correction, eps) + decay * p[i])
    else:
        for i in range(p.size):
            m[i] = m[i] if v[i] > ZERO else ZERO
            p[i] = p[i] - rate * _direction(m[i], v[i], correction, eps)


@inline
def _adam_in_place(p: Floats, m: Floats, v: Floats, g: Floats, step: Floats) -> None:
    rate, correction, eps, decay, variance_correction = step[0], step[1], step[2], step[3], step[5]
    keep, new, keep_square, new_square = step[8], step[9], step[10], step[11]
    if step[4] != ZERO:
        for i in range(p.size):
            m[i] = keep * m[i] + new * g[i]
            v[i] = keep_square * v[i] + new_square * (g[i] * g[i])
            direction = _direction(m[i], v[i] / variance_correction, correction, eps)
            p[i] = p[i] - rate * (direction + decay * p[i])
    else:
        for i in range(p.size):
            m[i] = keep * m[i] + new * g[i]
            v[i] = keep_square * v[i] + new_square * (g[i] * g[i])
            p[i] = p[i] - rate * _direction(m[i], v[i] / variance_correction, correction, eps)


@kernel("void(i64, i64, i64, f32, f32, int64, int64)")
def _frozen_steps(
    addresses: Longs, sizes: Longs, ends: Longs, numbers: Floats, scratch: Floats, first: int, last: int
) -> None:
    numbers, scratch = borrow(numbers), borrow(scratch)
    tensor = 0
    for run in range(first, last):
        while ends[tensor] <= run:
            tensor += 1
        start = (run - (ends[tensor - 1] if tensor > 0 else 0)) * _RUN
        size, at, row = min(_RUN, sizes[tensor] - start), numbers.itemsize * start, 5 * tensor
        old_p, old_m, new_p, new_m = (
            addresses[row],
            addresses[row + 1],
            addresses[row + 3],
            addresses[row + 4],
        )
        p, m, v = (
            floats_at(old_p + at, size, numbers),
            floats_at(old_m + at, size, numbers),
            floats_at(addresses[row + 2] + at, size, numbers),
        )
        step = numbers[7 * tensor : 7 * tensor + 7]
        if step[6] != ZERO:
            divide(m, step[5])
        if new_p == old_p and new_m == old_m:
            _frozen_in_place(p, m, v, step)
            continue
        masked = scratch[:size]
        _mask(m, v, masked)
        _move(p, masked, v, step, F(1), floats_at(new_p + at, size, numbers))
        _copy(masked, floats_at(new_m + at, size, numbers))


@kernel("void(i64, i64, i64, f32, f32, int64, int64)")
def _adam_steps(
    addresses: Longs, sizes: Longs, ends: Longs, numbers: Floats, scratch: Floats, first: int, last: int
) -> None:
    numbers, scratch = borrow(numbers), borrow(scratch)
    tensor = 0
    for run in range(first, last):
        while ends[tensor] <= run:
            tensor += 1
        start = (run - (ends[tensor - 1] if tensor > 0 else 0)) * _RUN
        size, at, row = min(_RUN, sizes[tensor] - start), numbers.itemsize * start, 7 * tensor
        p, m = (
            floats_at(addresses[row] + at, size, numbers),
            floats_at(addresses[row + 1] + at, size, numbers),
        )
        v, g = (
            floats_at(addresses[row + 2] + at, size, numbers),
            floats_at(addresses[row + 3] + at, size, numbers),
        )
        step = numbers[13 * tensor : 13 * tensor + 13]
        if step[7] != ZERO:
            _add_decay(p, g, step[6], scratch[:size])
            g = scratch[:size]
        new_p, new_m = (
            floats_at(addresses[row + 4] + at, size, numbers),
            floats_at(addresses[row + 5] + at, size, numbers),
        )
        new_v = floats_at(addresses[row + 6] + at, size, numbers)
        if addresses[row] == addresses[row + 4]:
            _adam_in_place(p, m, v, g, step)
            continue
        if addresses[row + 1] == addresses[row + 5]:
            mix_into(m, g, step[8], step[9])
            _mix_squares_into(v, g, step[10], step[11])
        else:
            mix(m, g, step[8], step[9], new_m)
            _mix_squares(v, g, step[10], step[11], new_v)
        if step[12] != ZERO:
            _move(p, new_m, new_v, step, step[5], new_p)
        else:
            _direct(p, new_m, new_v, step, step[5], new_p)
