"""LAMB on the exact mean gradient: the baseline, and the warm-up of 1-bit LAMB."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from qcomp.core import primitives
from qcomp.core.kernels import StepNumbers
from qcomp.core.numeric.arrays import Array, divide, sqrt, to_compute_dtype
from qcomp.core.numeric.sums import sum_of_squares
from qcomp.core.optimizers.adam import Adam
from qcomp.core.optimizers.average import Means
from qcomp.core.optimizers.tensors import as_tensors, update
from qcomp.core.state import OptimizerState

__all__ = ["Lamb", "direction", "require_bounds", "trust_key"]


@dataclass(frozen=True, kw_only=True)
class Lamb(Adam):
    """LAMB: Adam whose steps are as long as a share of each tensor, for large batches.

    Parameters
    ----------
    learning_rate, weight_decay, clip_norm, seed, nonfinite, groups
        See `Optimizer`.
    betas, eps, decoupled_weight_decay
        See `Adam`.
    trust_bounds : tuple of two floats
        Smallest and largest trust ratio, the first above 0.

    Notes
    -----
    d = m / (1 - b1^t) / (sqrt(v / (1 - b2^t)) + eps) + weight_decay x, and for each tensor x' = x - rate c d with the
    trust ratio c = |x|_2 / |d|_2 within its bounds, and 1 if either norm is 0. It is kept in
    ``state.numbers["trust.NAME"]``. The norms are sums in a fixed order, so all ranks take the same step. Sends what
    `Adam` sends. Source: You et al., ICLR 2020, algorithm 2; the bounds are those of 1-bit LAMB (Li et al., 2021).

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

    def start(self, params: Sequence[Array], names: tuple[str, ...], rank: int, size: int) -> OptimizerState:
        """Return moments of zero and trust ratios of 1."""
        state = super().start(params, names, rank, size)
        return state._replace(numbers={**state.numbers, **{trust_key(name): 1.0 for name in names}})

    def _exact_step(
        self, params: Any, means: Means, state: OptimizerState, *, correction: float
    ) -> tuple[list[Array], OptimizerState]:
        """Make a step of LAMB with this bias correction of the variance, and note its trust ratios."""
        beta1, beta2 = self.betas
        tensors = as_tensors(params, "params")
        gradients = self._decayed(means.values, tensors, state)
        momentum = tuple(
            primitives.momentum(m, g, beta1, 1.0) for m, g in zip(state.momentum, gradients, strict=True)
        )
        variance = tuple(
            primitives.momentum(v, g * g, beta2, 1.0) for v, g in zip(state.variance, gradients, strict=True)
        )
        directions = [
            direction(p, m, v / correction, numbers)
            for p, m, v, numbers in zip(tensors, momentum, variance, self._numbers(state), strict=True)
        ]
        trust = [self._trust(p, d) for p, d in zip(tensors, directions, strict=True)]
        moved = [
            update(p, (rate * c) * d)
            for p, d, c, rate in zip(tensors, directions, trust, self.rates(state), strict=True)
        ]
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


def direction(p: Array, m: Array, v: Array, numbers: StepNumbers) -> Array:
    """Return ``(m / correction) / (sqrt(v) + eps) + weight_decay * p``, in the dtype of m."""
    step = divide(divide(m, numbers.correction), sqrt(v) + numbers.eps)
    return step + numbers.weight_decay * to_compute_dtype(p) if numbers.weight_decay else step


def trust_key(name: str) -> str:
    """Return the name of the trust ratio of a parameter among the numbers of a state."""
    return f"trust.{name}"


def require_bounds(argument: str, bounds: tuple[float, float]) -> None:
    """Raise ValueError unless these are two numbers, in order and above 0."""
    if len(bounds) != 2 or not 0 < bounds[0] <= bounds[1]:
        raise ValueError(f"{argument} is {bounds!r}; expected two numbers above 0, the smaller first")
