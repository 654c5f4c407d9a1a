"""SGD with momentum on a compressed mean gradient."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from qcomp.core.compressor import Compressor
from qcomp.core.compressors.qsgd import QSGD
from qcomp.core.numeric.arrays import Array, to_compute_dtype
from qcomp.core.optimizers.average import Average, Means
from qcomp.core.optimizers.compression import CompressingOptimizer
from qcomp.core.optimizers.tensors import as_tensors, update, zeros_like
from qcomp.core.state import OptimizerState

__all__ = ["CompressedSGD"]


@dataclass(frozen=True, kw_only=True)
class CompressedSGD(CompressingOptimizer):
    """SGD with momentum, Nesterov momentum and weight decay, for any compressor.

    Parameters
    ----------
    learning_rate, weight_decay, clip_norm, seed, nonfinite, groups
        See `Optimizer`; weight decay is added to the mean gradient, as usual for SGD.
    compressor, feedback, topology, link, exact, compressors, rescale_feedback, tensorwise
        See `CompressingOptimizer`.
    momentum : float
        From 0 to below 1.
    nesterov : bool
        Whether to look ahead; needs momentum.

    Notes
    -----
    d = mean(g) + weight_decay x, m' = momentum m + d, x' = x - rate (d + momentum m' with Nesterov, else m'), where
    mean is a `CompressedMean`. Momentum acts on the decompressed mean, the same on all ranks. Sends 2 (N - 1) / N times
    the payload. Source: Alistarh et al., NeurIPS 2017 (QSGD); Karimireddy et al., ICML 2019 (feedback).

    Examples
    --------
    >>> import numpy as np, qcomp
    >>> opt = qcomp.CompressedSGD(learning_rate=0.1, exact=None)
    >>> comm = qcomp.comm.LocalCommunicator.alone()
    >>> params = np.ones(4, dtype=np.float32)
    >>> state = opt.init(params, comm)
    >>> params, state = opt.step(params, params, state, comm)
    >>> params.round(3)
    array([0.9, 0.9, 0.9, 0.9], dtype=float32)
    """

    compressor: Compressor = QSGD(levels=7, bucket_size=128)
    momentum: float = 0.9
    nesterov: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.momentum < 1:
            raise ValueError(f"momentum is {self.momentum!r}; expected a number from 0 to below 1")
        if self.nesterov and not self.momentum:
            raise ValueError("nesterov is True and momentum is 0; expected a momentum above 0")

    def start(self, params: Sequence[Array], names: tuple[str, ...], rank: int, size: int) -> OptimizerState:
        """Return a momentum and residuals of zero; there is no warm-up."""
        state = OptimizerState.first("compressed", names, rank, size)._replace(
            momentum=zeros_like(params) if self.momentum else ()
        )
        state = self._chosen(state, params)
        return state._replace(exchange=self._no_residuals(params, state))

    def prepare(self, grads: Any, state: OptimizerState, *, scale: float = 1.0) -> Average:
        """Ask for the compressed mean of the gradients."""
        scaled = [to_compute_dtype(g) * scale for g in as_tensors(grads, "grads")]
        return self._average(scaled, state)._replace(of_gradients=True)

    def apply(self, params: Any, means: Means, state: OptimizerState) -> tuple[list[Array], OptimizerState]:
        """Update the momentum with the mean gradient, and the parameters with it."""
        tensors = as_tensors(params, "params")
        directions = [
            d + decay * to_compute_dtype(p) if decay else d
            for d, p, decay in zip(means.values, tensors, self.weight_decays(state), strict=True)
        ]
        momentum: tuple[Array, ...] = ()
        if self.momentum:
            pairs = list(zip(state.momentum, directions, strict=True))
            momentum = tuple(self.momentum * m + d for m, d in pairs)
            ahead = [d + self.momentum * m for m, d in zip(momentum, directions, strict=True)]
            directions = ahead if self.nesterov else list(momentum)
        rates = self.rates(state)
        moved = [update(p, rate * d) for p, d, rate in zip(tensors, directions, rates, strict=True)]
        return moved, self._paid(state, means)._replace(step=state.step + 1, momentum=momentum)
