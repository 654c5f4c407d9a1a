"""DeepSpeed's 0/1 Adam."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from qcomp.compat.deepspeed.base import DeepSpeedOptimizer
from qcomp.compat.deepspeed.onebit_adam import require_step
from qcomp.core.checkpoint.schema import Number
from qcomp.core.mean.stages import Stages
from qcomp.core.numeric.arrays import Array, array_namespace, divide, sqrt
from qcomp.core.state import OptimizerState

__all__ = ["ZeroOneAdam", "zero_one_adam"]

_ACCUMULATOR = "momentum_accumulator"


@dataclass(frozen=True, kw_only=True)
class ZeroOneAdam(DeepSpeedOptimizer):
    """DeepSpeed's ``ZeroOneAdam``, with its parameters' names and defaults.

    - Stage "warmup": in some calls momentum and variance use the exact mean gradient; in the others the momentum uses
      the compressed mean gradient.
    - Stage "local", from the second call after call number max(1, ``var_freeze_step``): the variance is constant, every
      rank makes local steps, and in some calls the ranks synchronise. Between these calls their parameters and momenta
      differ.

    Parameters
    ----------
    learning_rate : float or callable
        DeepSpeed's ``lr``. A schedule receives the number of completed calls. Once the variance is constant, it must be
        above 0 in some step before each synchronisation.
    betas, eps, weight_decay, exp_avg_mask, groups
        See `DeepSpeedOptimizer`.
    var_freeze_step : int
        The variance is constant from the second call after this one.
    var_update_scaler : int
        Number of variance updates after which the interval between them doubles.
    local_step_scaler : int
        Number of calls after which the interval between synchronisations doubles.
    local_step_clipper : int
        The longest interval between synchronisations.

    Notes
    -----
    Calls are counted from 1. Call 1 changes nothing. While the variance changes, in every k-th call m = b1 m + (1 - b1)
    g, v = b2 v + (1 - b2) g^2 with the exact mean gradient g. In the other calls m = b1 m + (1 - b1) `sign_mean` (g_i),
    times the mask; a single rank then does not change m, and its gradient has no effect. In every call x = x - rate (m
    / (sqrt(v) + eps) + weight_decay x), without bias correction.

    Once the variance is constant, the errors restart at zero, and each rank makes such steps with its own gradient and
    adds them up in u. In every h-th call U = `sign_mean` (u (sqrt(v) + eps)), times the mask if there are several
    ranks, replaces these steps: x = x - u + U / (sqrt(v) + eps), m = -U / (sum of the rates), u = 0.

    Every rank subtracts its own u, so after a synchronisation the ranks' parameters are equal only up to rounding;
    `qcomp.ZeroOneAdam` keeps the common parameters instead.

    Sends 2 (N - 1) / N bits per element for a `sign_mean`, 32 times as much for an exact mean, and nothing in local
    steps. A non-finite gradient in a local step goes unnoticed until the next synchronisation, where all ranks raise.
    Source: DeepSpeed 0.19.6, which it reproduces step by step; Lu et al., ICLR 2023.

    Examples
    --------
    >>> import numpy as np, qcomp
    >>> opt = qcomp.compat.deepspeed.zero_one_adam(
    ...     learning_rate=0.02, betas=(0.9, 0.95), var_freeze_step=30, local_step_scaler=20, local_step_clipper=4
    ... )
    >>> def rank_main(comm):
    ...     params = np.zeros(100, dtype=np.float32)
    ...     state = opt.init(params, comm)
    ...     for _ in range(120):
    ...         params, state = opt.step(params, params - 1 - comm.rank, state, comm)
    ...     return state.stage, float(abs(params - 1.5).max()) < 0.2
    >>> qcomp.comm.run_local(2, rank_main)
    [('local', True), ('local', True)]
    """

    var_freeze_step: int = 100_000
    var_update_scaler: int = 16
    local_step_scaler: int = 32_678
    local_step_clipper: int = 16

    def __post_init__(self) -> None:
        super().__post_init__()
        require_step("var_freeze_step", self.var_freeze_step)
        for name in ("var_update_scaler", "local_step_scaler", "local_step_clipper"):
            require_step(name, getattr(self, name), 1)
        if self.nonfinite != "raise":
            raise ValueError(
                f"nonfinite is {self.nonfinite!r}; expected 'raise': a rank that steps alone cannot agree to skip"
            )

    def own_kinds(self, stage: str) -> tuple[str, ...]:
        """Return the errors, and in the local stage the other arrays that differ between ranks."""
        local = ("momentum", _ACCUMULATOR) if stage == "local" else ()
        return (*super().own_kinds(stage), *local)

    def apart(self, stage: str) -> bool:
        """Return whether the ranks make local steps."""
        return stage == "local"

    def limits(self, state: OptimizerState) -> Mapping[str, Number]:  # noqa: ARG002
        """Return the valid ranges of the intervals and counters."""
        interval, counter = Number(least=1, whole=True), Number(least=0, whole=True)
        return {
            "var_interval": interval,
            "var_counter": counter,
            "local_step_interval": interval,
            "local_step_counter": counter,
        }

    def initial_state(
        self, params: Sequence[Array], names: tuple[str, ...], rank: int, size: int
    ) -> OptimizerState:
        """Return zero moments and errors."""
        state = super().initial_state(params, names, rank, size)
        numbers = {
            "var_interval": 1.0,
            "var_counter": 0.0,
            "local_step_interval": 1.0,
            "local_step_counter": 0.0,
            **{f"lrs.{name}": 0.0 for name in names},
        }
        return state._replace(arrays=self._errors(state), numbers=numbers)

    def enter(self, state: OptimizerState, stage: str) -> OptimizerState:
        """Return the state of the warm-up, or of the local stage with zero errors."""
        if stage != "local":
            return super().enter(state, stage)
        zeros = tuple(array_namespace(m).zeros_like(m) for m in state.momentum)
        return state._replace(stage=stage, arrays={**self._errors(state), _ACCUMULATOR: zeros})

    def _advance(
        self, params: Sequence[Array], grads: Sequence[Array], state: OptimizerState
    ) -> Stages[tuple[list[Array], OptimizerState]]:
        steps = self._local_step if state.stage == "local" else self._variance_step
        return (yield from steps(params, grads, state))

    def _variance_step(
        self, params: Sequence[Array], grads: Sequence[Array], state: OptimizerState
    ) -> Stages[tuple[list[Array], OptimizerState]]:
        call, numbers = state.step + 1, dict(state.numbers)
        momentum: Sequence[Array] = state.momentum
        variance: Sequence[Array] = state.variance
        updates_variance = call % int(numbers["var_interval"]) == 0
        new_state = state
        if updates_variance:
            means = yield from self._exact_mean(grads, state)
            momentum, variance = self._blended(momentum, means), self._varied(variance, means)
        else:
            exchanged, new_state = yield from self._sign_means(dict(enumerate(grads)), state)
            if state.size > 1:  # a single rank does not change its momentum
                momentum = self._blended(momentum, self._masked(list(exchanged.values()), state))
        updates = self._updates(params, momentum, variance, state)
        moved = [p - rate * u for p, u, rate in zip(params, updates, self.rates(state), strict=True)]
        if updates_variance:
            numbers["var_counter"] += 1
            if numbers["var_counter"] == self.var_update_scaler:
                numbers |= {"var_counter": 0.0, "var_interval": 2 * numbers["var_interval"]}
        new_state = new_state._replace(momentum=tuple(momentum), variance=tuple(variance), numbers=numbers)
        return moved, self.enter(new_state, "local") if call > self.var_freeze_step else new_state

    def _local_step(
        self, params: Sequence[Array], grads: Sequence[Array], state: OptimizerState
    ) -> Stages[tuple[list[Array], OptimizerState]]:
        call, numbers, rates = state.step + 1, dict(state.numbers), self.rates(state)
        momentum = self._blended(state.momentum, grads)
        changes = [
            rate * u
            for u, rate in zip(self._updates(params, momentum, state.variance, state), rates, strict=True)
        ]
        moved = [p - change for p, change in zip(params, changes, strict=True)]
        pending = [u - change for u, change in zip(state.arrays[_ACCUMULATOR], changes, strict=True)]
        sums = [f"lrs.{name}" for name in state.names]
        for key, rate in zip(sums, rates, strict=True):
            numbers[key] += rate
        new_state = state
        if call % int(numbers["local_step_interval"]) == 0:
            if not all(numbers[key] > 0 for key in sums):
                raise ValueError(
                    f"learning_rate was 0 in all steps that call {call} synchronises; expected a number > 0 once "
                    "the variance is constant: the momentum is divided by the sum of the rates"
                )
            divisors = [sqrt(v) + self.eps for v in state.variance]
            scaled = {i: u * d for i, (u, d) in enumerate(zip(pending, divisors, strict=True))}
            means, new_state = yield from self._sign_means(scaled, state)
            averages = list(means.values())
            if state.size > 1:
                averages = self._masked(averages, state)
            momentum = [divide(-a, numbers[key]) for a, key in zip(averages, sums, strict=True)]
            moved = [(p - u) + a / d for p, u, a, d in zip(moved, pending, averages, divisors, strict=True)]
            pending = [array_namespace(u).zeros_like(u) for u in pending]
            numbers |= dict.fromkeys(sums, 0.0)
        numbers["local_step_counter"] += 1
        if numbers["local_step_counter"] == self.local_step_scaler:
            numbers["local_step_counter"] = 0.0
            numbers["local_step_interval"] = min(
                float(self.local_step_clipper), 2 * numbers["local_step_interval"]
            )
        arrays = {**new_state.arrays, _ACCUMULATOR: tuple(pending)}
        return moved, new_state._replace(momentum=tuple(momentum), arrays=arrays, numbers=numbers)


zero_one_adam = ZeroOneAdam
