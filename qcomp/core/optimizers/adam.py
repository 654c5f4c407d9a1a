"""Adam on the exact mean gradient: the baseline, and the warm-up of the frozen-variance optimizers."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Self

from qcomp.core import primitives
from qcomp.core.kernels import AdamNumbers, StepNumbers
from qcomp.core.numeric.arrays import Array, to_compute_dtype
from qcomp.core.optimizers.base import Optimizer
from qcomp.core.optimizers.compression import Average, Means
from qcomp.core.optimizers.groups import require_betas, require_eps, setting_of_each
from qcomp.core.optimizers.own_counts import own_counts
from qcomp.core.optimizers.tensors import as_tensors, zeros_like
from qcomp.core.state import OptimizerState
from qcomp.core.variance.arithmetic import bias_corrections


@dataclass(frozen=True, kw_only=True)
class Adam(Optimizer):
    """Data-parallel Adam, or AdamW, with the exact mean gradient.

    Parameters
    ----------
    learning_rate : float or callable
        Step size: a finite number >= 0, or a schedule that returns it from the number of completed steps. Required.
    weight_decay : float, default 0
        Weight decay coefficient, >= 0.
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
    betas : tuple of two floats, default (0.9, 0.999)
        Decay rates b1 of the momentum and b2 of the variance, each from 0 to below 1.
    eps : float, default 1e-8
        Added to the square root of the variance, >= 0.
    decoupled_weight_decay : bool, default True
        True: each step subtracts rate * weight_decay * x from the parameters x, like ``torch.optim.AdamW``. False:
        weight_decay * x is added to the mean gradient after clipping, like ``torch.optim.Adam``.

    Notes
    -----
    Sends 2 (N - 1) / N * 32 bits per parameter and step. Source: Kingma and Ba, ICLR 2015; Loshchilov and Hutter, ICLR
    2019 (weight decay).

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

    of_groups = ("betas", "eps")

    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    decoupled_weight_decay: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        require_betas(self.betas)
        require_eps(self.eps)
        if type(self.decoupled_weight_decay) is not bool:
            raise TypeError(
                f"decoupled_weight_decay is {self.decoupled_weight_decay!r}; expected True or False"
            )

    @classmethod
    def within(cls, optimizer: Optimizer) -> Self:
        """Return an optimizer of this class with another optimizer's settings, to make that optimizer's exact steps.

        Parameters
        ----------
        optimizer : Optimizer
            An optimizer that has at least the settings of this class.
        """
        return cls(**{f.name: getattr(optimizer, f.name) for f in fields(cls)})

    def initial_state(
        self, params: Sequence[Array], names: tuple[str, ...], rank: int, size: int
    ) -> OptimizerState:
        """Return moments of zero."""
        return OptimizerState.first("warmup", names, rank, size)._replace(
            exact=(True,) * len(params), momentum=zeros_like(params), variance=zeros_like(params)
        )

    def prepare(self, grads: Any, state: OptimizerState, *, scale: float = 1.0) -> Average:
        """Ask for the exact mean of the gradients."""
        gradients = [to_compute_dtype(g) for g in as_tensors(grads, "grads")]
        scaled = gradients if scale == 1 else [g * scale for g in gradients]
        return self.compression.exactly(scaled, state)._replace(of_gradients=True)

    def apply(self, params: Any, means: Means, state: OptimizerState) -> tuple[list[Array], OptimizerState]:
        """Update both moments with the mean gradient, and the parameters with the moments."""
        corrections = bias_corrections(self.betas_of(state), 1, own_counts(state, state.step + 1))
        return self.exact_step(params, means, state, corrections=corrections)

    def exact_step(
        self, params: Any, means: Means, state: OptimizerState, *, corrections: Sequence[float]
    ) -> tuple[list[Array], OptimizerState]:
        """Make a step with given bias corrections of the variance.

        Parameters
        ----------
        params : array or sequence of arrays
            The parameters.
        means : Means
            The exact means of the gradients.
        state : OptimizerState
            The state of the last step.
        corrections : sequence of float
            The divisor of each tensor's variance.
        """
        moved = primitives.adam_steps(
            as_tensors(params, "params"),
            state.momentum,
            state.variance,
            means.values,
            self._adam_numbers(state, corrections),
            donate=means.donate,
        )
        new_params, momentum, variance = zip(*moved, strict=True)
        state = state._replace(step=state.step + 1, momentum=momentum, variance=variance)
        return list(new_params), state

    def _adam_numbers(self, state: OptimizerState, corrections: Sequence[float]) -> list[AdamNumbers]:
        """Return the `AdamNumbers` of each tensor for the next step, with given bias corrections of the variance."""
        return [
            AdamNumbers(betas, correction, 0.0 if self.decoupled_weight_decay else decay, step)
            for betas, correction, step, decay in zip(
                self.betas_of(state), corrections, self.numbers(state), self.weight_decays(state), strict=True
            )
        ]

    def decayed(
        self,
        values: Sequence[Array],
        params: Sequence[Array],
        state: OptimizerState,
        *,
        of_momenta: bool = False,
    ) -> tuple[Array, ...]:
        """Return values plus weight_decay * params, if weight decay is part of the gradient.

        Parameters
        ----------
        values, params : sequence of arrays
            Gradients or momenta, and the parameters.
        state : OptimizerState
            The state of the last step.
        of_momenta : bool
            Whether the values are momenta. A gradient enters a momentum with the weight 1 - b1, and so does weight
            decay.
        """
        if self.decoupled_weight_decay:
            return tuple(values)
        settings = zip(self.betas_of(state), self.weight_decays(state), strict=True)
        weights = [(1 - beta1 if of_momenta else 1.0) * decay for (beta1, _), decay in settings]
        return tuple(
            v + primitives.rounded(weight * to_compute_dtype(p)) if weight else v
            for v, p, weight in zip(values, params, weights, strict=True)
        )

    def betas_of(self, state: OptimizerState) -> tuple[tuple[float, float], ...]:
        """Return the decay rates of each tensor.

        Parameters
        ----------
        state : OptimizerState
            The state of the last step.
        """
        return setting_of_each(tuple(self.groups), state.names, "betas", self.betas)

    def slowest(self, state: OptimizerState) -> float:
        """Return the largest decay rate of a variance, by which freeze rules and watches measure time.

        Parameters
        ----------
        state : OptimizerState
            The state of the last step.
        """
        return max([beta2 for _, beta2 in self.betas_of(state)])

    def numbers(self, state: OptimizerState) -> tuple[StepNumbers, ...]:
        """Return the `StepNumbers` of each tensor for the next step.

        Parameters
        ----------
        state : OptimizerState
            The state of the last step.
        """
        settings = zip(
            self.rates(state),
            bias_corrections(self.betas_of(state), 0, own_counts(state, state.step + 1)),
            setting_of_each(tuple(self.groups), state.names, "eps", self.eps),
            self.weight_decays(state),
            strict=True,
        )
        return tuple(
            [
                StepNumbers(rate, correction, eps, decay if self.decoupled_weight_decay else 0.0)
                for rate, correction, eps, decay in settings
            ]
        )


def rate_rises(optimizer: Optimizer, state: OptimizerState) -> bool:
    """Return whether the next step has a larger learning rate than the last."""
    return optimizer.rate(state) > optimizer.rate(state._replace(step=state.step - 1))
