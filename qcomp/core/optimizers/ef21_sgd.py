"""`EF21SGD`: SGD on a mean gradient that EF21 tracks: each rank sends compressed changes of its gradient."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from qcomp.core import primitives
from qcomp.core.compressor import Compressor
from qcomp.core.compressors.topk import TopK
from qcomp.core.mean.ef21 import EF21Mean
from qcomp.core.numeric.arrays import Array, to_compute_dtype
from qcomp.core.optimizers.base import Optimizer
from qcomp.core.optimizers.compression import Average, Compressing, Means
from qcomp.core.optimizers.tensors import as_tensors, update, zeros_like
from qcomp.core.policies.by_name import CompressorPolicy
from qcomp.core.policies.exact_below import ExactBelow, ExactPolicy
from qcomp.core.state import OptimizerState

_SMOOTHED = "smoothed"


@dataclass(frozen=True, kw_only=True)
class EF21SGD(Optimizer):
    """SGD with `EF21Mean`, which has no error floor if the ranks' data differ. Set ``eta`` below 1 for noisy gradients.

    Parameters
    ----------
    learning_rate : float or callable
        Step size: a finite number >= 0, or a schedule that returns it from the number of completed steps. Required.
    weight_decay : float, default 0
        Weight decay coefficient, >= 0; weight_decay * x is added to the common estimate of the gradient.
    clip_norm : float, optional
        Largest global gradient norm sqrt(mean_i |g_i|^2) over the ranks i, above 0. If the norm is larger, every rank
        multiplies its gradients by the same factor. Costs an exchange of 8 bytes per step. None, the default, never
        clips.
    seed : int, default 0
        Seed of the random draws of compressors and of stochastic rounding, 0 to 2**64 - 1. Draws also depend on the
        names and shapes of the parameters. If two optimizers in one job have parameters with equal names and shapes,
        give them different seeds.
    nonfinite : {"raise", "skip"}, default "raise"
        What to do if a gradient on any rank is infinite or NaN. ``"raise"``: all ranks raise `NonFiniteError`.
        ``"skip"``: all ranks skip the step and count it in ``state.skipped``. Neither changes parameters or moments.
    groups : sequence of Group, default ()
        Learning-rate factors and weight decays for parameters selected by name, see `Group`.
    rounding : {"nearest", "stochastic"}, default "nearest"
        How new bfloat16 parameters are rounded: ``"nearest"`` loses steps below half of a parameter's last bit;
        ``"stochastic"`` keeps them on average, see `Optimizer`.
    compressor : Compressor, default TopK(k=32, bucket_size=1024)
        Compresses the changes of the gradients. It must be a contraction, see `EF21Mean`.
    exact : callable or None, default ExactBelow(10_000)
        Policy that gets all tensors and selects the tensors that stay exact, see `ExactBelow`. None compresses
        everything.
    compressors : callable, optional
        Policy that replaces ``compressor``: it returns a compressor for each tensor, or None for a tensor that stays
        exact, see `ByName`. Tensors that ``exact`` selects stay exact in any case. None, the default, uses
        ``compressor`` for all.
    eta : float, default 1
        Weight of a new gradient in the moving average of a rank's gradients, above 0 and at most 1. A rank sends the
        changes of this average. 1 is EF21 itself, for full gradients.

    Notes
    -----
    v_i' = (1 - eta) v_i + eta grad_i (in the first step v_i' = grad_i); g = the estimate of mean_i v_i by `EF21Mean`;
    x' = x - rate (g + weight_decay x). EF21 with full gradients converges for rate <= 1 / (L + L' r), with r = sqrt(1 -
    delta) / (1 - sqrt(1 - delta)) and L' the root of the mean square of the ranks' L_i. This bound is small for strong
    compression. With noisy gradients of small batches and eta = 1, EF21 may not converge. A rank sends (N - 1) times
    the payload, and 2 (N - 1) / N * 32 bits per exact element. A state holds the estimates in ``exchange`` and v_i as
    ``arrays["smoothed"]``. On a different number of ranks, every rank resumes with the means of the old estimates and
    averages. Source: Richtarik, Sokolov and Fatkhullin, NeurIPS 2021, algorithm 2; Fatkhullin, Tyurin and Richtarik,
    NeurIPS 2023, algorithm 1 (EF21-SGDM).

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
    exact: ExactPolicy | None = ExactBelow(10_000)
    compressors: CompressorPolicy | None = None
    eta: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.eta <= 1:
            raise ValueError(f"eta is {self.eta!r}; expected a number above 0, at most 1")

    @cached_property
    def compression(self) -> Compressing:
        """What this optimizer compresses, with the mean of EF21."""
        return Compressing(EF21Mean(self.compressor), self.exact, self.compressors)

    def own_kinds(self, stage: str) -> tuple[str, ...]:  # noqa: ARG002
        """Return the kinds of the arrays that differ between ranks: a rank's estimate and its moving average."""
        return (EF21Mean.kinds[0], _SMOOTHED)

    def moments_like_params(self, state: OptimizerState) -> tuple[Array, ...]:
        """Return the moving averages of the gradients, if the state has any."""
        return state.arrays.get(_SMOOTHED, ())

    def initial_state(
        self, params: Sequence[Array], names: tuple[str, ...], rank: int, size: int
    ) -> OptimizerState:
        """Return estimates of zero; there is no warm-up."""
        state = OptimizerState.first("compressed", names, rank, size)._replace(
            arrays={_SMOOTHED: zeros_like(params)} if self.eta < 1 else {}
        )
        return self.compression.begin(state, params, type(self).__name__)

    def prepare(self, grads: Any, state: OptimizerState, *, scale: float = 1.0) -> Average:
        """Ask for the tracked mean of the moving averages, which include this step's gradients."""
        gradients = as_tensors(grads, "grads")
        if self.eta == 1 or not state.step:
            averages = [to_compute_dtype(g) * scale for g in gradients]
        else:
            averages = [
                primitives.momentum(v, g, 1 - self.eta, scale)
                for v, g in zip(state.arrays[_SMOOTHED], gradients, strict=True)
            ]
        average = self.compression.average(averages, state, self.key(state))
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
        return moved, state._replace(step=state.step + 1, arrays=arrays, exchange=means.exchange)
