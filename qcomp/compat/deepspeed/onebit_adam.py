"""DeepSpeed's 1-bit Adam."""

from dataclasses import dataclass

from qcomp.compat.deepspeed.base import Arrays, DeepSpeedOptimizer, Moved
from qcomp.core.state import OptimizerState

__all__ = ["OnebitAdam", "onebit_adam"]


@dataclass(frozen=True, kw_only=True)
class OnebitAdam(DeepSpeedOptimizer):
    """DeepSpeed's ``OneBitAdam``, with its parameters' names and defaults.

    Parameters
    ----------
    learning_rate, betas, eps, weight_decay, exp_avg_mask, groups, nonfinite
        See `DeepSpeedOptimizer`; the first is DeepSpeed's ``lr``.
    freeze_step : int
        The last call with an exact mean gradient; values below 2 mean 2.

    Notes
    -----
    Calls are counted from 1. Call 1 changes nothing. Calls 2 to ``freeze_step``: m = b1 m + (1 - b1) g, v = b2 v + (1 -
    b2) g^2, x = x - rate (m / (sqrt(v) + eps) + weight_decay x), without bias correction: the first steps are (1 - b1)
    / sqrt(1 - b2) times the rate. After that, in the stage "compressed", v stays constant, and m is the `sign_mean` of
    b1 m + (1 - b1) g_i, times the mask. DeepSpeed accepts ``bias_correction``, ``eps_inside_sqrt`` and
    ``max_grad_norm`` but never uses them; here they do not exist. Sends 2 (N - 1) / N bits per element and step,
    including padding. Source: DeepSpeed 0.19.6, which it reproduces step by step; Tang et al., ICML 2021.

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

    def _warmup_step(self, params: Arrays, grads: Arrays, state: OptimizerState) -> Moved:
        state = yield from self._with_moments(grads, state)
        freezes = state.step + 1 >= self.freeze_step
        return self._moved(params, state), self.enter(state, "compressed") if freezes else state

    def _last_step(self, params: Arrays, grads: Arrays, state: OptimizerState) -> Moved:
        means, state = yield from self._sign_means(self._blended(state, grads), state)
        state = state._replace(momentum=self._masked(means, state))
        return self._moved(params, state), state


onebit_adam = OnebitAdam
