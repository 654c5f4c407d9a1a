"""Passes over whole vectors: the division of a sum over ranks, the momentum, the step with a frozen variance.

Bytes read and written per element: `finish_mean` 4 and 4, `momentum` 8 and 4, `frozen_step` 12 and 8. Memory bandwidth
limits all of them.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from qcomp.backends.torch_triton.primitives import STRICT, flush
from qcomp.core.kernels import StepNumbers

_RUN = 2048
"""Elements of a program: four 16-byte loads per thread."""
_OPTIONS = {"RUN": _RUN, "num_warps": 4, **STRICT}


def finish_mean(total: Tensor, count: int) -> None:
    """Divide a sum over ranks by their number, in place; a mean below 2**-126 becomes +0."""
    _finish_mean[_grid(total)](total, total.numel(), float(count), **_OPTIONS)


def momentum(m: Tensor, g: Tensor, beta1: float, scale: float, out: Tensor) -> None:
    """Store beta1 * m + (1 - beta1) * scale * g in ``out``, which may be m."""
    _momentum[_grid(m)](m, g, out, m.numel(), float(beta1), float((1 - beta1) * scale), **_OPTIONS)


def frozen_step(p: Tensor, m: Tensor, v: Tensor, numbers: StepNumbers, *, out: Tensor) -> None:
    """Update the parameters from the averaged momentum and the frozen, bias-corrected variance, and mask the momentum.

    The masked momentum overwrites m, and the new parameters, in ``out``, may overwrite p.
    """
    decays = numbers.weight_decay != 0
    _frozen_step[_grid(p)](p, m, v, out, p.numel(), *map(float, numbers), DECAY=decays, **_OPTIONS)


def _grid(x: Tensor) -> tuple[int]:
    return (triton.cdiv(x.numel(), _RUN),)


@triton.jit
def _finish_run(total: tl.tensor, places: tl.tensor, inside: tl.tensor, count: tl.tensor) -> None:
    sums = tl.load(total + places, mask=inside)
    tl.store(total + places, flush(tl.div_rn(sums, tl.full(sums.shape, count, tl.float32))), mask=inside)


@triton.jit(do_not_specialize=["size"])
def _finish_mean(total: tl.tensor, size: tl.int64, count: tl.float32, RUN: tl.constexpr) -> None:
    places = tl.program_id(0).to(tl.int64) * RUN + tl.arange(0, RUN)
    # Avoid the mask where possible: with it, elements are loaded one by one.
    if (tl.program_id(0) + 1).to(tl.int64) * RUN <= size:
        _finish_run(total, places, None, count)
    else:
        _finish_run(total, places, places < size, count)


@triton.jit
def _mix_run(
    m: tl.tensor,
    g: tl.tensor,
    out: tl.tensor,
    places: tl.tensor,
    inside: tl.tensor,
    keep: tl.tensor,
    new: tl.tensor,
) -> None:
    mixed = keep * tl.load(m + places, mask=inside) + new * tl.load(g + places, mask=inside)
    tl.store(out + places, mixed, mask=inside)


@triton.jit(do_not_specialize=["size"])
def _momentum(
    m: tl.tensor,
    g: tl.tensor,
    out: tl.tensor,
    size: tl.int64,
    keep: tl.float32,
    new: tl.float32,
    RUN: tl.constexpr,
) -> None:
    places = tl.program_id(0).to(tl.int64) * RUN + tl.arange(0, RUN)
    if (tl.program_id(0) + 1).to(tl.int64) * RUN <= size:
        _mix_run(m, g, out, places, None, keep, new)
    else:
        _mix_run(m, g, out, places, places < size, keep, new)


@triton.jit
def _step_run(
    p: tl.tensor,
    m: tl.tensor,
    v: tl.tensor,
    out: tl.tensor,
    places: tl.tensor,
    inside: tl.tensor,
    rate: tl.tensor,
    correction: tl.tensor,
    eps: tl.tensor,
    weight_decay: tl.tensor,
    DECAY: tl.constexpr,
) -> None:
    variance = tl.load(v + places, mask=inside)
    masked = tl.where(variance > 0.0, tl.load(m + places, mask=inside), 0.0)
    tl.store(m + places, masked, mask=inside)
    values = tl.load(p + places, mask=inside)
    corrected = tl.div_rn(masked, tl.full(masked.shape, correction, tl.float32))
    direction = tl.div_rn(corrected, tl.sqrt_rn(variance) + eps)
    if DECAY:
        direction += weight_decay * values
    tl.store(out + places, values - rate * direction, mask=inside)


@triton.jit(do_not_specialize=["size"])
def _frozen_step(
    p: tl.tensor,
    m: tl.tensor,
    v: tl.tensor,
    out: tl.tensor,
    size: tl.int64,
    rate: tl.float32,
    correction: tl.float32,
    eps: tl.float32,
    weight_decay: tl.float32,
    DECAY: tl.constexpr,
    RUN: tl.constexpr,
) -> None:
    places = tl.program_id(0).to(tl.int64) * RUN + tl.arange(0, RUN)
    if (tl.program_id(0) + 1).to(tl.int64) * RUN <= size:
        _step_run(p, m, v, out, places, None, rate, correction, eps, weight_decay, DECAY)
    else:
        _step_run(p, m, v, out, places, places < size, rate, correction, eps, weight_decay, DECAY)
