"""`Lion`: steps along the sign of a momentum."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from qcomp.core import primitives
from qcomp.core.numeric.arrays import Array, array_namespace, to_compute_dtype
from qcomp.core.optimizers.base import Optimizer
from qcomp.core.optimizers.compression import Average, Means
from qcomp.core.optimizers.groups import require_betas, setting_of_each
from qcomp.core.optimizers.tensors import as_tensors, update, zeros_like
from qcomp.core.state import OptimizerState


@dataclass(frozen=True, kw_only=True)
class Lion(Optimizer):
    """Exact Lion: each step moves every parameter by the learning rate, along the sign of a momentum.

    Parameters
    ----------
    learning_rate : float or callable
        Step size: a finite number >= 0, or a schedule that returns it from the number of completed steps. Required.
    weight_decay : float, default 0
        Weight decay coefficient, >= 0; each step also subtracts rate * weight_decay * x.
    clip_norm : float, optional
        Largest global gradient norm sqrt(mean_i |g_i|^2) over the ranks i, above 0. If the norm is larger, every rank
        multiplies its gradients by the same factor. Costs an exchange of 8 bytes per step. None, the default, never
        clips.
    seed : int, default 0
        Seed of random draws, 0 to 2**64 - 1. Exact averaging draws nothing, so only stochastic rounding uses the seed.
    nonfinite : {"raise", "skip"}, default "raise"
        What to do if a gradient on any rank is infinite or NaN. ``"raise"``: all ranks raise `NonFiniteError`.
        ``"skip"``: all ranks skip the step and count it in ``state.skipped``. Neither changes parameters or moments.
    groups : sequence of Group, default ()
        Learning-rate factors and weight decays for parameters selected by name, see `Group`.
    rounding : {"nearest", "stochastic"}, default "nearest"
        How new bfloat16 parameters are rounded: ``"nearest"`` loses steps below half of a parameter's last bit;
        ``"stochastic"`` keeps them on average, see `Optimizer`.
    betas : tuple of two floats, default (0.9, 0.99)
        Weight b1 of the momentum in the direction, and decay rate b2 of the momentum, each from 0 to below 1. If b1 is
        0, steps follow the sign of the mean gradient.

    Notes
    -----
    u = b1 m + (1 - b1) mean(g), x' = x - rate (sign(u) + weight_decay x), m' = b2 m + (1 - b2) mean(g). Sends
    2 (N - 1) / N * 32 bits per element. As ``outer`` of an `OuterLoop` it is the global sign momentum of Yu et al.,
    arXiv 2411.17866. Source: Chen et al., NeurIPS 2023.

    Examples
    --------
    >>> import numpy as np, qcomp
    >>> opt, comm = qcomp.Lion(learning_rate=0.5), qcomp.comm.LocalCommunicator.alone()
    >>> params = np.asarray([1.0, -8.0, 0.0])
    >>> params, state = opt.step(params, params, opt.init(params, comm), comm)
    >>> params
    array([ 0.5, -7.5,  0. ])
    """

    of_groups = ("betas",)

    betas: tuple[float, float] = (0.9, 0.99)

    def __post_init__(self) -> None:
        super().__post_init__()
        require_betas(self.betas)

    def initial_state(
        self, params: Sequence[Array], names: tuple[str, ...], rank: int, size: int
    ) -> OptimizerState:
        """Return a momentum of zero."""
        return OptimizerState.first("warmup", names, rank, size)._replace(
            exact=(True,) * len(params), momentum=zeros_like(params)
        )

    def prepare(self, grads: Any, state: OptimizerState, *, scale: float = 1.0) -> Average:
        """Ask for the exact mean of the gradients."""
        scaled = [to_compute_dtype(g) * scale for g in as_tensors(grads, "grads")]
        return self.compression.exactly(scaled, state)._replace(of_gradients=True)

    def apply(self, params: Any, means: Means, state: OptimizerState) -> tuple[list[Array], OptimizerState]:
        """Move the parameters along the signs, and update the momentum."""
        tensors = as_tensors(params, "params")
        settings = zip(
            tensors,
            state.momentum,
            means.values,
            self.rates(state),
            self.weight_decays(state),
            setting_of_each(tuple(self.groups), state.names, "betas", self.betas),
            strict=True,
        )
        moved, momentum = [], []
        for p, m, g, rate, decay, (beta1, beta2) in settings:
            direction = array_namespace(m).sign(primitives.momentum(m, g, beta1, 1.0))
            if decay:
                direction = direction + primitives.rounded(decay * to_compute_dtype(p))
            moved.append(update(p, primitives.rounded(rate * direction)))
            momentum.append(primitives.momentum(m, g, beta2, 1.0))
        return moved, state._replace(step=state.step + 1, momentum=tuple(momentum), exchange=means.exchange)
