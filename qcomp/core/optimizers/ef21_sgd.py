"""SGD on gradients that EF21 tracks, with momentum on every rank."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from qcomp.core import primitives
from qcomp.core.compressor import Compressor
from qcomp.core.compressors.topk import TopK
from qcomp.core.mean.ef21 import EF21Mean
from qcomp.core.numeric.arrays import Array, to_compute_dtype
from qcomp.core.optimizers.average import Average, Means
from qcomp.core.optimizers.compression import CompressingOptimizer
from qcomp.core.optimizers.tensors import as_tensors, update, zeros_like
from qcomp.core.state import OptimizerState

__all__ = ["EF21SGD"]

_SMOOTHED = "smoothed"


@dataclass(frozen=True, kw_only=True)
class EF21SGD(CompressingOptimizer):
    """SGD with `EF21Mean`: no floor where the ranks' data differ, and with ``eta`` below 1 for noisy gradients too.

    Parameters
    ----------
    learning_rate, weight_decay, clip_norm, seed, nonfinite, groups
        See `Optimizer`; weight decay is added to the common estimate of the gradient.
    compressor : Compressor
        A contraction, see `EF21Mean`.
    exact, compressors : callable or None
        See `CompressingOptimizer`.
    eta : float
        Above 0, at most 1: the weight of the new gradient in the moving average that a rank sends changes of. 1 is
        EF21 itself, for full gradients.
    feedback : bool
        False: the estimates stand in for residuals.
    topology : {"all_gather"}
        See `EF21Mean`.

    Notes
    -----
    v_i' = (1 - eta) v_i + eta grad_i, of the first step grad_i; g = what `EF21Mean` has as the mean of v_i;
    x' = x - rate (g + weight_decay x). EF21 with full gradients converges for rate <= 1 / (L + L' r), with
    r = sqrt(1 - delta) / (1 - sqrt(1 - delta)) and L' the root of the mean square of the ranks' L_i: small for strong
    compression. With the noise of small batches and eta = 1 it may not. Sends (N - 1) times the payload, and 2 (N - 1)
    / N * 32 bits for every element that stays exact. A state holds the estimates in ``exchange`` and v_i as
    ``arrays["smoothed"]``; going on with another number of ranks, every rank has the means of the old estimates
    and averages. Source: Richtarik, Sokolov and Fatkhullin, NeurIPS 2021, algorithm 2; Fatkhullin, Tyurin and
    Richtarik, NeurIPS 2023, algorithm 1 (EF21-SGDM).

    Examples
    --------
    >>> import numpy as np, qcomp
    >>> opt = qcomp.EF21SGD(learning_rate=0.1, compressor=qcomp.TopK(k=1, bucket_size=8), exact=None)
    >>> def rank_main(comm):
    ...     params = np.zeros(4)
    ...     state = opt.init(params, comm)
    ...     for _ in range(300):
    ...         params, state = opt.step(params, params - np.arange(4.0) * (1 + comm.rank), state, comm)
    ...     return params.round(6).tolist()
    >>> qcomp.comm.run_local(2, rank_main)
    [[0.0, 1.5, 3.0, 4.5], [0.0, 1.5, 3.0, 4.5]]
    """

    compressor: Compressor = TopK()
    feedback: bool = False
    topology: str = "all_gather"
    eta: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.feedback:
            raise ValueError("feedback is True; expected False: the estimates of EF21 stand in for residuals")
        if self.topology != "all_gather":
            raise ValueError(
                f"topology is {self.topology!r}; expected 'all_gather': all ranks must know the same estimates"
            )
        if not 0 < self.eta <= 1:
            raise ValueError(f"eta is {self.eta!r}; expected a number above 0, at most 1")

    @property
    def mean(self) -> EF21Mean:
        """How the ranks track the mean of their gradients."""
        return EF21Mean(self.compressor)

    def own_kinds(self, stage: str) -> tuple[str, ...]:  # noqa: ARG002
        """Return what is of one rank: its estimate, and its moving average."""
        return (EF21Mean.kinds[0], _SMOOTHED)

    def start(self, params: Sequence[Array], names: tuple[str, ...], rank: int, size: int) -> OptimizerState:
        """Return estimates of zero; there is no warm-up."""
        state = OptimizerState.first("compressed", names, rank, size)._replace(
            arrays={_SMOOTHED: zeros_like(params)} if self.eta < 1 else {}
        )
        state = self._chosen(state, params)
        return state._replace(exchange=self._no_residuals(params, state))

    def prepare(self, grads: Any, state: OptimizerState, *, scale: float = 1.0) -> Average:
        """Ask for the tracked mean of the moving averages, after this step's gradients."""
        gradients = as_tensors(grads, "grads")
        if self.eta == 1 or not state.step:
            averages = [to_compute_dtype(g) * scale for g in gradients]
        else:
            averages = [
                primitives.momentum(v, g, 1 - self.eta, scale)
                for v, g in zip(state.arrays[_SMOOTHED], gradients, strict=True)
            ]
        average = self._average(averages, state)
        return average if self.eta == 1 else average._replace(own=tuple(averages))

    def apply(self, params: Any, means: Means, state: OptimizerState) -> tuple[list[Array], OptimizerState]:
        """Move the parameters against the tracked mean."""
        tensors = as_tensors(params, "params")
        directions = [
            g + decay * to_compute_dtype(p) if decay else g
            for g, p, decay in zip(means.values, tensors, self.weight_decays(state), strict=True)
        ]
        moved = [
            update(p, rate * d) for p, d, rate in zip(tensors, directions, self.rates(state), strict=True)
        ]
        arrays = {} if self.eta == 1 else {_SMOOTHED: means.own}
        return moved, self._paid(state, means)._replace(step=state.step + 1, arrays=arrays)
