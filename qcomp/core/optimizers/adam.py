"""Adam on the exact mean gradient: the baseline, and the warm-up of the frozen-variance optimizers."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from qcomp.core import primitives
from qcomp.core.arrays import Array, to_compute_dtype
from qcomp.core.exchange import MeanState
from qcomp.core.kernels import StepNumbers
from qcomp.core.optimizers.base import Average, Means, Optimizer, as_tensors, zeros_like
from qcomp.core.state import OptimizerState

__all__ = ["Adam"]


@dataclass(frozen=True, kw_only=True)
class Adam(Optimizer):
    """Adam with decoupled weight decay, data-parallel with the exact mean gradient.

    Parameters
    ----------
    learning_rate, weight_decay, clip_norm, seed, nonfinite
        See `Optimizer`.
    betas : tuple of two floats
        Decay of momentum and variance, each from 0 to below 1.
    eps : float
        Added to the root of the variance.

    Notes
    -----
    Sends 2 (N - 1) / N * 32 bits a parameter and step. Source: Kingma and Ba, ICLR 2015; Loshchilov and Hutter,
    ICLR 2019 (weight decay).

    Examples
    --------
    >>> import numpy as np, qcomp
    >>> opt = qcomp.Adam(learning_rate=0.1)
    >>> comm = qcomp.comm.LocalCommunicator.alone()
    >>> params = np.asarray([1.0, -1.0])
    >>> state = opt.init(params, comm)
    >>> params, state = opt.step(params, 2 * params, state, comm)
    >>> params.round(3)
    array([ 0.9, -0.9])
    """

    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.betas) != 2 or not all(0 <= b < 1 for b in self.betas):
            raise ValueError(f"betas is {self.betas!r}; expected two numbers from 0 to below 1")
        if not self.eps >= 0:
            raise ValueError(f"eps is {self.eps!r}; expected a number >= 0")

    def start(self, params: Sequence[Array], names: tuple[str, ...], rank: int, size: int) -> OptimizerState:
        """Return moments of zero."""
        return OptimizerState(
            step=0,
            stage="warmup",
            rank=rank,
            size=size,
            names=names,
            exact=(True,) * len(params),
            momentum=zeros_like(params),
            variance=zeros_like(params),
            exchange=MeanState(rank, size, (), ()),
            history=(),
            skipped=0,
        )

    def prepare(self, grads: Any, state: OptimizerState, *, scale: float = 1.0) -> Average:
        """Ask for the exact mean of the gradients."""
        gradients = [to_compute_dtype(g) for g in as_tensors(grads, "grads")]
        scaled = gradients if scale == 1 else [g * scale for g in gradients]
        return Average((self._exact_part(range(len(scaled)), scaled, state),), state.exchange)

    def apply(self, params: Any, means: Means, state: OptimizerState) -> tuple[list[Array], OptimizerState]:
        """Update both moments with the mean gradient, and the parameters with them."""
        beta1, beta2 = self.betas
        step = state.step + 1
        momentum = tuple(
            beta1 * m + (1 - beta1) * g for m, g in zip(state.momentum, means.values, strict=True)
        )
        variance = tuple(
            beta2 * v + (1 - beta2) * (g * g) for v, g in zip(state.variance, means.values, strict=True)
        )
        corrected = self._corrected(variance, step)
        new_params = self._move(as_tensors(params, "params"), momentum, corrected, state)
        return new_params, state._replace(step=step, momentum=momentum, variance=variance)

    def _corrected(self, variance: Sequence[Array], step: int) -> tuple[Array, ...]:
        """Return the variance divided by 1 - b2^step."""
        return tuple(v / (1 - self.betas[1] ** step) for v in variance)

    def _move(
        self,
        params: Sequence[Array],
        momentum: Sequence[Array],
        corrected: Sequence[Array],
        state: OptimizerState,
    ) -> list[Array]:
        """Return the parameters after the step from the new momentum and the bias-corrected variance."""
        numbers = self._numbers(state)
        return [
            primitives.adam_step(p, m, v, numbers)
            for p, m, v in zip(params, momentum, corrected, strict=True)
        ]

    def _numbers(self, state: OptimizerState) -> StepNumbers:
        """Return the numbers of the next step of the parameters."""
        correction = 1 - self.betas[0] ** (state.step + 1)
        return StepNumbers(self.rate(state), correction, self.eps, self.weight_decay)
