"""LAMB on the exact mean gradient: the baseline, and the warm-up of 1-bit LAMB."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from qcomp.core import primitives
from qcomp.core.kernels import StepNumbers
from qcomp.core.numeric.arrays import Array, divide, sqrt, to_compute_dtype
from qcomp.core.numeric.cache_blocks import in_blocks
from qcomp.core.numeric.sums import sum_of_squares
from qcomp.core.optimizers.adam import Adam
from qcomp.core.optimizers.compression import Means
from qcomp.core.optimizers.tensors import as_tensors
from qcomp.core.state import OptimizerState

__all__ = ["Lamb", "direction", "require_bounds", "trust_key"]


@dataclass(frozen=True, kw_only=True)
class Lamb(Adam):
    """LAMB: Adam with steps scaled to the norm of each tensor, for large batches.

    Parameters
    ----------
    learning_rate : float or callable
        Step size: a finite number >= 0, or a schedule that returns it from the number of completed steps. Required.
    weight_decay : float, default 0
        Weight decay coefficient, >= 0.
    clip_norm : float, optional
        Largest global gradient norm sqrt(mean_i |g_i|^2) over the ranks i, above 0. Larger gradients are scaled down
        by the same factor on all ranks. Costs an exchange of 8 bytes per step. None, the default, never clips.
    seed : int, default 0
        Seed of random draws, 0 to 2**64 - 1. Exact averaging draws nothing, so it has no effect here.
    nonfinite : {"raise", "skip"}, default "raise"
        What to do if a gradient on any rank is infinite or NaN. ``"raise"``: all ranks raise `NonFiniteError`.
        ``"skip"``: all ranks skip the step and count it in ``state.skipped``. Neither changes parameters or moments.
    groups : sequence of Group, default ()
        Learning-rate factors and weight decays for parameters selected by name, see `Group`.
    rounding : {"nearest", "stochastic"}, default "nearest"
        How new bfloat16 parameters are rounded: ``"nearest"`` loses steps below half of a parameter's last bit;
        ``"stochastic"`` keeps them on average, see `Optimizer`.
    betas : tuple of two floats, default (0.9, 0.999)
        Decay rates b1 of the momentum and b2 of the variance, each from 0 to below 1.
    eps : float, default 1e-8
        Added to the square root of the variance, >= 0.
    decoupled_weight_decay : bool, default True
        True: weight_decay * x is added to the direction, before the trust ratio, as in LAMB. False: it is added to the
        mean gradient after clipping.
    trust_bounds : tuple of two floats, default (0.01, 10.0)
        Smallest and largest trust ratio, the first above 0.

    Notes
    -----
    d = m / (1 - b1^t) / (sqrt(v / (1 - b2^t)) + eps) + weight_decay x, and for each tensor x' = x - rate c d with the
    trust ratio c = |x|_2 / |d|_2 within its bounds, and 1 if either norm is 0. ``state.numbers["trust.NAME"]`` holds c.
    The norms are sums in a fixed order, so all ranks make the same step. Sends as much as `Adam`. Source: You et al.,
    ICLR 2020, algorithm 2; the bounds come from 1-bit LAMB (Li et al., 2021).

    Examples
    --------
    >>> import numpy as np, qcomp
    >>> opt = qcomp.Lamb(learning_rate=0.1)
    >>> comm = qcomp.comm.LocalCommunicator.alone()
    >>> params = np.asarray([4.0, -4.0])
    >>> state = opt.init(params, comm)
    >>> params, state = opt.step(params, params, state, comm)
    >>> params.round(3), round(state.numbers["trust.0"], 3)
    (array([ 3.6, -3.6]), 4.0)
    """

    trust_bounds: tuple[float, float] = (0.01, 10.0)

    def __post_init__(self) -> None:
        super().__post_init__()
        require_bounds("trust_bounds", self.trust_bounds)

    def initial_state(
        self, params: Sequence[Array], names: tuple[str, ...], rank: int, size: int
    ) -> OptimizerState:
        """Return moments of zero and trust ratios of 1."""
        state = super().initial_state(params, names, rank, size)
        return state._replace(numbers={**state.numbers, **{trust_key(name): 1.0 for name in names}})

    def exact_step(
        self, params: Any, means: Means, state: OptimizerState, *, corrections: Sequence[float]
    ) -> tuple[list[Array], OptimizerState]:
        """Make a step of LAMB with these bias corrections of the variance, and note its trust ratios."""
        tensors = as_tensors(params, "params")
        gradients = self.decayed(means.values, tensors, state)
        moved: list[Array] = []
        trust, moments = [], []
        arrays = zip(gradients, tensors, state.momentum, state.variance, strict=True)
        settings = zip(self.betas_of(state), corrections, self.numbers(state), strict=True)
        for of_tensor, (betas, correction, numbers) in zip(arrays, settings, strict=True):
            _, p, m, v = of_tensor
            rooms = [primitives.empty_like(x) for x in (m, v, m)]
            new_m, new_v, d = in_blocks(partial(_folded, numbers, betas, correction), of_tensor, rooms)
            c = self._trust(p, d)
            room = p if means.donate else primitives.empty_like(p)
            moved.append(primitives.descend(p, d, numbers.rate * c, 0.0, out=room))
            trust.append(c)
            moments.append((new_m, new_v))
        momentum, variance = zip(*moments, strict=True)
        ratios = {trust_key(name): c for name, c in zip(state.names, trust, strict=True)}
        return moved, state._replace(
            step=state.step + 1,
            momentum=momentum,
            variance=variance,
            numbers={**state.numbers, **ratios},
        )

    def _trust(self, param: Array, step: Array) -> float:
        """Return the trust ratio of a tensor."""
        own, length = (math.sqrt(sum_of_squares(to_compute_dtype(x))) for x in (param, step))
        low, high = self.trust_bounds
        return min(max(own / length, low), high) if own > 0 and length > 0 else 1.0


def _folded(
    numbers: StepNumbers, betas: tuple[float, float], correction: float, *arrays: Array
) -> tuple[Array, Array, Array]:
    """Return the moments after a step, and its direction."""
    (g, p, m, v), (beta1, beta2) = arrays, betas
    m, v = primitives.momentum(m, g, beta1, 1.0), primitives.momentum(v, g * g, beta2, 1.0)
    return m, v, direction(p, m, divide(v, correction), numbers)


def direction(p: Array, m: Array, v: Array, numbers: StepNumbers) -> Array:
    """Return ``(m / correction) / (sqrt(v) + eps) + weight_decay * p``, in the dtype of m."""
    step = divide(divide(m, numbers.correction), sqrt(v) + numbers.eps)
    return step + numbers.weight_decay * to_compute_dtype(p) if numbers.weight_decay else step


def trust_key(name: str) -> str:
    """Return the key of a parameter's trust ratio in the ``numbers`` of a state."""
    return f"trust.{name}"


def require_bounds(argument: str, bounds: tuple[float, float]) -> None:
    """Raise ValueError unless these are two numbers, in order and above 0."""
    if len(bounds) != 2 or not 0 < bounds[0] <= bounds[1]:
        raise ValueError(f"{argument} is {bounds!r}; expected two numbers above 0, the smaller first")
