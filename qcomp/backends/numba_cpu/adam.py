"""The step of Adam with a frozen variance: `qcomp.core.optimizers.frozen_adam`.

m' = m where v > 0, else 0; p' = p - rate * ((m' / correction) / (sqrt(v) + eps) [+ decay * p]), each operation rounded
as in NumPy's expression.

Bytes read and written per element: 12 and 8. The bound is the memory; two divisions and a root come close.
"""

from __future__ import annotations

import math

import numpy as np

from qcomp.backends.numba_cpu import threads
from qcomp.backends.numba_cpu.jit import Floats, inline, kernel
from qcomp.backends.numba_cpu.primitives import ZERO, F
from qcomp.core.kernels import StepNumbers

__all__ = ["frozen_adam_step"]

_RUN = 1 << 12
"""Elements that are worked on between two looks at memory: m and p stay in the cache from one loop to the next."""


def frozen_adam_step(
    p: Floats,
    m: Floats,
    v: Floats,
    numbers: StepNumbers,
    *,
    p_out: Floats,
    m_out: Floats,
) -> None:
    """Update the parameters from the averaged momentum and the frozen, bias-corrected variance.

    Parameters
    ----------
    p, m, v : array of float32, shape (n,)
        Parameters, averaged momentum, variance.
    numbers : StepNumbers
    p_out, m_out : array of float32, shape (n,)
        For the new parameters and the masked momentum; may be p and m.
    """
    rounded = [F(number) for number in numbers]
    decays = numbers.weight_decay != 0

    def work(first: int, last: int) -> None:
        _step(p, m, v, *rounded, decays, p_out, m_out, p_out is p, m_out is m, first, last)

    threads.run(work, -(-p.size // _RUN), _RUN)


@inline
def _mask(m: Floats, v: Floats, out: Floats) -> None:
    for i in range(out.size):
        out[i] = m[i] if v[i] > ZERO else ZERO


@inline
def _mask_in_place(m: Floats, v: Floats) -> None:
    for i in range(m.size):
        m[i] = m[i] if v[i] > ZERO else ZERO


@inline
def _direction(m: np.float32, v: np.float32, correction: np.float32, eps: np.float32) -> np.float32:
    return (m / correction) / (F(math.sqrt(v)) + eps)


@inline
def _move(
    p: Floats, m: Floats, v: Floats, rate: np.float32, correction: np.float32, eps: np.float32, out: Floats
) -> None:
    for i in range(out.size):
        out[i] = p[i] - rate * _direction(m[i], v[i], correction, eps)


@inline
def _move_in_place(
    p: Floats, m: Floats, v: Floats, rate: np.float32, correction: np.float32, eps: np.float32
) -> None:
    for i in range(p.size):
        p[i] = p[i] - rate * _direction(m[i], v[i], correction, eps)


@inline
def _move_and_decay(
    p: Floats,
    m: Floats,
    v: Floats,
    rate: np.float32,
    correction: np.float32,
    eps: np.float32,
    decay: np.float32,
    out: Floats,
) -> None:
    for i in range(out.size):
        out[i] = p[i] - rate * (_direction(m[i], v[i], correction, eps) + decay * p[i])


@inline
def _move_and_decay_in_place(
    p: Floats,
    m: Floats,
    v: Floats,
    rate: np.float32,
    correction: np.float32,
    eps: np.float32,
    decay: np.float32,
) -> None:
    for i in range(p.size):
        p[i] = p[i] - rate * (_direction(m[i], v[i], correction, eps) + decay * p[i])


@kernel(
    "void(f32_in, f32_in, f32_in, float32, float32, float32, float32, boolean, f32, f32, boolean, boolean, "
    "int64, int64)"
)
def _step(
    p: Floats,
    m: Floats,
    v: Floats,
    rate: np.float32,
    correction: np.float32,
    eps: np.float32,
    decay: np.float32,
    decays: bool,
    p_out: Floats,
    m_out: Floats,
    p_in_place: bool,
    m_in_place: bool,
    first: int,
    last: int,
) -> None:
    for run in range(first, last):
        part = slice(run * _RUN, min((run + 1) * _RUN, p.size))
        variance, moved, masked = v[part], p_out[part], m_out[part]
        if m_in_place:
            _mask_in_place(masked, variance)
        else:
            _mask(m[part], variance, masked)
        # Loops of their own for what is in place: LLVM takes an array that is read under one name and written under
        # another for an overlap, and does not vectorise.
        if decays and p_in_place:
            _move_and_decay_in_place(moved, masked, variance, rate, correction, eps, decay)
        elif decays:
            _move_and_decay(p[part], masked, variance, rate, correction, eps, decay, moved)
        elif p_in_place:
            _move_in_place(moved, masked, variance, rate, correction, eps)
        else:
            _move(p[part], masked, variance, rate, correction, eps, moved)
