"""Passes over whole vectors, such as the division of a sum over ranks, the momentum and a step.

Bytes read and written per element: `largest_sum` 8 and 0, `in_range` 4 and 0, `finish_mean` and `scale` 4 and 4,
`momentum` and `descend` 8 and 4, `nesterov` 8 and 8. Memory bandwidth limits all of them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from qcomp.backends.numba_cpu import threads
from qcomp.backends.numba_cpu.jit import Floats, inline, kernel
from qcomp.backends.numba_cpu.primitives import (
    LIMIT,
    TINY,
    U,
    as_bits,
    as_float,
    finish,
    flush,
    magnitude_bits,
    mix,
    mix_into,
)

_RUN = 1 << 12
"""A thread's share is a multiple of this many elements."""


def largest_sum(x: Floats, y: Floats) -> float:
    """Return the largest ``|x_i| + |y_i|``, rounded to their dtype; NaN if one is NaN, 0 if the arrays are empty.

    No ``fl(x_i + y_i)`` has a larger magnitude.
    """
    return _maximum(
        threads.run(lambda a, b: _largest_sum.of(x.dtype)(x, y, a * _RUN, b * _RUN), -(-x.size // _RUN), _RUN)
    )


def finish_mean(total: Floats, count: int) -> None:
    """Divide a sum over ranks by their number, in place; a mean below 2**-126 becomes +0."""
    threads.run(
        lambda a, b: _finish.of(total.dtype)(total, count, a * _RUN, b * _RUN), -(-total.size // _RUN), _RUN
    )


def momentum(m: Floats, g: Floats, beta1: float, scale: float, out: Floats) -> None:
    """Let out = beta1 * m + (1 - beta1) * scale * g, with the roundings of NumPy's expression; out may be m."""
    kernel, new = _momentum.of(m.dtype), (1 - beta1) * scale

    def work(a: int, b: int) -> None:
        kernel(m, g, beta1, new, out, out is m, a * _RUN, b * _RUN)

    threads.run(work, -(-m.size // _RUN), _RUN)


def nesterov(m: Floats, g: Floats, beta1: float, new: Floats, ahead: Floats) -> None:
    """Let new = beta1 * m + (1 - beta1) * g, and ahead = beta1 * new + (1 - beta1) * g, rounded like `momentum`.

    The arrays ``new`` and ``ahead`` must not overlap m or g.
    """
    kernel = _nesterov.of(m.dtype)
    threads.run(
        lambda a, b: kernel(m, g, beta1, 1 - beta1, new, ahead, a * _RUN, b * _RUN), -(-m.size // _RUN), _RUN
    )


def in_range(x: Floats) -> bool:
    """Return whether every value is +0, or has a magnitude from 2^-126 to below 2^100."""
    return all(
        threads.run(lambda a, b: _in_range.of(x.dtype)(x, a * _RUN, b * _RUN), -(-x.size // _RUN), _RUN)
    )


def descend(p: Floats, d: Floats, rate: float, decay: float, out: Floats) -> None:
    """Let out, perhaps p, be p - rate * (d + decay * p), rounded like NumPy's expression; a decay of 0 adds nothing."""
    kernel, in_place = _descend.of(p.dtype), p.ctypes.data == out.ctypes.data

    def work(a: int, b: int) -> None:
        kernel(p, d, rate, decay, decay != 0, out, in_place, a * _RUN, b * _RUN)

    threads.run(work, -(-p.size // _RUN), _RUN)


def scale(x: Floats, factor: float, out: Floats) -> None:
    """Let out, which must not overlap x, be factor * x, rounded once; a product below 2**-126 becomes +0."""
    threads.run(lambda a, b: _scale.of(x.dtype)(x, factor, out, a * _RUN, b * _RUN), -(-x.size // _RUN), _RUN)


def _maximum(parts: Sequence[float]) -> float:
    """Return the largest part, or NaN if one is NaN: the result of `max` alone would depend on their order."""
    return max(parts) if all(part == part for part in parts) else float("nan")  # noqa: PLR0124


@inline
def _largest_of(x: Floats, y: Floats) -> np.float32:
    bits = magnitude_bits(x.dtype.type(0))
    for i in range(x.size):
        bits = max(bits, magnitude_bits(abs(x[i]) + abs(y[i])))
    found: np.float32 = as_float(bits)
    return found


@kernel("float32(f32_in, f32_in, int64, int64)")
def _largest_sum(x: Floats, y: Floats, first: int, last: int) -> np.float32:
    return _largest_of(x[first:last], y[first:last])


@kernel("void(f32, float32, int64, int64)")
def _finish(total: Floats, count: np.float32, first: int, last: int) -> None:
    finish(total[first:last], count)


@kernel("void(f32_in, f32_in, float32, float32, f32, boolean, int64, int64)")
def _momentum(
    m: Floats,
    g: Floats,
    keep: np.float32,
    new: np.float32,
    out: Floats,
    in_place: bool,
    first: int,
    last: int,
) -> None:
    part = out[first:last]
    if in_place:
        mix_into(part, g[first:last], keep, new)
    else:
        mix(m[first:last], g[first:last], keep, new, part)


_CACHED = 1 << 11
"""Elements per pass, few enough that four vectors' passes stay in the first-level cache between two loops."""


@kernel("void(f32_in, f32_in, float32, float32, f32, f32, int64, int64)")
def _nesterov(
    m: Floats,
    g: Floats,
    keep: np.float32,
    weight: np.float32,
    new: Floats,
    ahead: Floats,
    first: int,
    last: int,
) -> None:
    last = min(last, m.size)
    for start in range(first, last, _CACHED):
        stop = min(last, start + _CACHED)
        gradient, part = g[start:stop], new[start:stop]
        mix(m[start:stop], gradient, keep, weight, part)
        mix(part, gradient, keep, weight, ahead[start:stop])


@inline
def _all_in_range(x: Floats) -> bool:
    one = magnitude_bits(x.dtype.type(1))
    least = most = one
    for i in range(x.size):
        bits = one if as_bits(x[i]) == U(0) else magnitude_bits(x[i])
        least, most = min(least, bits), max(most, bits)
    return bool(as_float(least) >= TINY and as_float(most) < LIMIT)


@kernel("boolean(f32_in, int64, int64)")
def _in_range(x: Floats, first: int, last: int) -> bool:
    last = min(last, x.size)
    found = True
    for start in range(first, last, _RUN):
        found = found and _all_in_range(x[start : min(last, start + _RUN)])
    return found


@inline
def _multiply(x: Floats, factor: np.float32, out: Floats) -> None:
    for i in range(out.size):
        out[i] = flush(factor * x[i])


@kernel("void(f32_in, float32, f32, int64, int64)")
def _scale(x: Floats, factor: np.float32, out: Floats, first: int, last: int) -> None:
    _multiply(x[first:last], factor, out[first:last])


@inline
def _descend_over(p: Floats, d: Floats, rate: np.float32, decay: np.float32) -> None:
    for i in range(p.size):
        p[i] = p[i] - rate * (d[i] + decay * p[i])


@inline
def _descend_into(p: Floats, d: Floats, rate: np.float32, decay: np.float32, out: Floats) -> None:
    for i in range(out.size):
        out[i] = p[i] - rate * (d[i] + decay * p[i])


@inline
def _subtract_over(p: Floats, d: Floats, rate: np.float32) -> None:
    for i in range(p.size):
        p[i] = p[i] - rate * d[i]


@inline
def _subtract_into(p: Floats, d: Floats, rate: np.float32, out: Floats) -> None:
    for i in range(out.size):
        out[i] = p[i] - rate * d[i]


@kernel("void(f32_in, f32_in, float32, float32, boolean, f32, boolean, int64, int64)")
def _descend(
    p: Floats,
    d: Floats,
    rate: np.float32,
    decay: np.float32,
    decays: bool,
    out: Floats,
    in_place: bool,
    first: int,
    last: int,
) -> None:
    part, direction = out[first:last], d[first:last]
    if not decays:
        if in_place:
            _subtract_over(part, direction, rate)
        else:
            _subtract_into(p[first:last], direction, rate, part)
    elif in_place:
        _descend_over(part, direction, rate, decay)
    else:
        _descend_into(p[first:last], direction, rate, decay, part)
