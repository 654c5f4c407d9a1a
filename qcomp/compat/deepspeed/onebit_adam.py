"""DeepSpeed's 1-bit Adam."""

from collections.abc import Sequence
from dataclasses import dataclass

from qcomp.compat.deepspeed.base import DeepSpeedOptimizer
from qcomp.core.mean.stages import Stages
from qcomp.core.numeric.arrays import Array
from qcomp.core.state import OptimizerState

__all__ = ["OnebitAdam", "onebit_adam"]


@dataclass(frozen=True, kw_only=True)
class OnebitAdam(DeepSpeedOptimizer):
    """DeepSpeed's ``OneBitAdam``, with its parameters' names and defaults.

    - Stage "warmup": momentum and variance of the exact mean gradient.
    - Stage "compressed", after call number max(2, ``freeze_step``): every rank adds its own gradient to the common
      momentum, `sign_mean` averages the results, and the variance is constant.

    Parameters
    ----------
    learning_rate : float or callable
        DeepSpeed's ``lr``. A schedule receives the number of completed calls.
    freeze_step : int
        The last call with an exact mean gradient; values below 2 mean 2.
    betas, eps, weight_decay, exp_avg_mask, groups, nonfinite
        See `DeepSpeedOptimizer`.

    Notes
    -----
    Calls are counted from 1. Call 1 changes nothing. Calls 2 to ``freeze_step``: m = b1 m + (1 - b1) g, v = b2 v + (1 -
    b2) g^2, x = x - rate (m / (sqrt(v) + eps) + weight_decay x), without bias correction: the first steps are (1 - b1)
    / sqrt(1 - b2) times the rate. After that v stays constant, and m is the `sign_mean` of b1 m + (1 - b1) g_i, times
    the mask. DeepSpeed accepts ``bias_correction``, ``eps_inside_sqrt`` and ``max_grad_norm`` but never uses them; here
    they do not exist. Sends 2 (N - 1) / N bits per element and step, including padding. Source: DeepSpeed 0.19.6, which
    it reproduces step by step; Tang et al., ICML 2021.

    Examples
    --------
    >>> import numpy as np, qcomp
    >>> opt = qcomp.compat.deepspeed.onebit_adam(learning_rate=0.02, freeze_step=20, betas=(0.9, 0.95))
    >>> def rank_main(comm):
    ...     params = np.zeros(100, dtype=np.float32)
    ...     state = opt.init(params, comm)
    ...     for _ in range(120):
    ...         params, state = opt.step(params, params - 1 - comm.rank, state, comm)
    ...     return state.stage, float(abs(params - 1.5).max()) < 0.2
    >>> qcomp.comm.run_local(2, rank_main)
    [('compressed', True), ('compressed', True)]
    """

    freeze_step: int = 100_000

    def __post_init__(self) -> None:
        super().__post_init__()
        require_step("freeze_step", self.freeze_step)

    def enter(self, state: OptimizerState, stage: str) -> OptimizerState:
        """Return the state of the warm-up, or of the compressed stage with zero errors."""
        if stage != "compressed":
            return super().enter(state, stage)
        return state._replace(stage=stage, arrays=self._errors(state))

    def _advance(
        self, params: Sequence[Array], grads: Sequence[Array], state: OptimizerState
    ) -> Stages[tuple[list[Array], OptimizerState]]:
        variance: Sequence[Array] = state.variance
        if state.stage == "warmup":
            means = yield from self._exact_mean(grads, state)
            momentum = self._blended(state.momentum, means)
            variance = self._varied(variance, means)
            new_state = state
        else:
            blended = self._blended(state.momentum, grads)
            exchanged, new_state = yield from self._sign_means(dict(enumerate(blended)), state)
            momentum = self._masked(list(exchanged.values()), state)
        updates = self._updates(params, momentum, variance, state)
        moved = [p - rate * u for p, u, rate in zip(params, updates, self.rates(state), strict=True)]
        new_state = new_state._replace(momentum=tuple(momentum), variance=tuple(variance))
        if state.stage == "warmup" and state.step + 1 >= self.freeze_step:
            new_state = self.enter(new_state, "compressed")
        return moved, new_state


onebit_adam = OnebitAdam


def require_step(argument: str, value: int, least: int = 0) -> None:
    """Raise ValueError unless a number of steps is an integer, and at least ``least``."""
    if type(value) is not int or value < least:
        raise ValueError(f"{argument} is {value!r}; expected an integer, at least {least}")
