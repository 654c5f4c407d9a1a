"""DeepSpeed's 0/1 Adam."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf

from qcomp.compat.deepspeed.base import Arrays, DeepSpeedOptimizer, Moved
from qcomp.core.checkpoint.schema import Number
from qcomp.core.numeric.arrays import divide, sqrt
from qcomp.core.optimizers.lamb import direction
from qcomp.core.optimizers.tensors import zeros_like
from qcomp.core.settings import require
from qcomp.core.state import OptimizerState

__all__ = ["ZeroOneAdam", "zero_one_adam"]

_ACCUMULATOR = "momentum_accumulator"
_FIRST = {"var_interval": 1.0, "var_counter": 0.0, "local_step_interval": 1.0, "local_step_counter": 0.0}
"""The first values of the intervals and counters, which are also their least."""


@dataclass(frozen=True, kw_only=True)
class ZeroOneAdam(DeepSpeedOptimizer):
    """DeepSpeed's ``ZeroOneAdam``, with its parameters' names and defaults.

    Parameters
    ----------
    learning_rate : float or callable
        DeepSpeed's ``lr``. Once the variance is constant, it must be above 0 in some step before each synchronisation.
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

    Once the variance is constant, in the stage "local", the errors restart at zero, and each rank makes such steps with
    its own gradient and adds them up in u. In every h-th call U = `sign_mean` (u (sqrt(v) + eps)), times the mask if
    there are several ranks, replaces these steps: x = x - u + U / (sqrt(v) + eps), m = -U / (sum of the rates), u = 0.

    Every rank subtracts its own u, so after a synchronisation the ranks' parameters are equal only up to rounding;
    `qcomp.ZeroOneAdam` keeps the common parameters instead.

    Sends 2 (N - 1) / N bits per element for a `sign_mean`, 32 times as much for an exact mean, and nothing in local
    steps. A non-finite gradient in a local step goes unnoticed until the next synchronisation, where all ranks raise.
    Source: DeepSpeed 0.19.6, which it reproduces step by step; Lu et al., ICLR 2023.
    """

    last_stage = "local"

    var_freeze_step: int = 100_000
    var_update_scaler: int = 16
    local_step_scaler: int = 32_678
    local_step_clipper: int = 16

    def __post_init__(self) -> None:
        super().__post_init__()
        expected = "'raise': a rank that steps alone cannot agree to skip"
        require("nonfinite", self.nonfinite, self.nonfinite == "raise", expected)

    def own_kinds(self, stage: str) -> tuple[str, ...]:
        """Return the errors, and in the local stage the other arrays that differ between ranks."""
        return super().own_kinds(stage) + (("momentum", _ACCUMULATOR) if self.apart(stage) else ())

    def apart(self, stage: str) -> bool:
        """Return whether the ranks make local steps."""
        return stage == "local"

    def limits(self, state: OptimizerState) -> Mapping[str, Number]:  # noqa: ARG002
        """Return the valid ranges of the intervals and counters."""
        return {name: Number(least=first, whole=True) for name, first in _FIRST.items()}

    def initial_state(self, params: Arrays, names: tuple[str, ...], rank: int, size: int) -> OptimizerState:
        """Return zero moments and errors."""
        state = super().initial_state(params, names, rank, size)
        numbers = _FIRST | {f"lrs.{name}": 0.0 for name in names}
        return state._replace(arrays=self._zero_errors(state), numbers=numbers)

    def enter(self, state: OptimizerState, stage: str) -> OptimizerState:
        """Return the state of the warm-up, or of the local stage with zero errors and no steps to replace."""
        state = super().enter(state, stage)
        if not self.apart(stage):
            return state
        return state._replace(arrays={**state.arrays, _ACCUMULATOR: zeros_like(state.momentum)})

    def _warmup_step(self, params: Arrays, grads: Arrays, state: OptimizerState) -> Moved:
        call, numbers = state.step + 1, dict(state.numbers)
        if call % int(numbers["var_interval"]) == 0:
            state = yield from self._with_moments(grads, state)
            _count(numbers, "var", self.var_update_scaler)
        else:
            means, state = yield from self._sign_means(grads, state)
            if state.size > 1:  # a single rank does not change its momentum
                state = state._replace(momentum=self._blended(state, self._masked(means, state)))
        moved, state = self._moved(params, state), state._replace(numbers=numbers)
        return moved, self.enter(state, "local") if call > self.var_freeze_step else state

    def _last_step(self, params: Arrays, grads: Arrays, state: OptimizerState) -> Moved:
        call, numbers, settings = state.step + 1, dict(state.numbers), self._numbers(state)
        momentum = self._blended(state, grads)
        directions = map(direction, params, momentum, state.variance, settings)
        changes = [n.rate * d for n, d in zip(settings, directions, strict=True)]
        moved = [p - change for p, change in zip(params, changes, strict=True)]
        pending: Arrays = [u - d for u, d in zip(state.arrays[_ACCUMULATOR], changes, strict=True)]
        sums = [f"lrs.{name}" for name in state.names]
        numbers |= {key: numbers[key] + n.rate for key, n in zip(sums, settings, strict=True)}
        if call % int(numbers["local_step_interval"]) == 0:
            if not all(numbers[key] > 0 for key in sums):
                raise ValueError(
                    f"learning_rate was 0 in all steps that call {call} synchronises; expected a number > 0 once "
                    "the variance is constant: the momentum is divided by the sum of the rates"
                )
            divisors = [sqrt(v) + self.eps for v in state.variance]
            scaled = [u * d for u, d in zip(pending, divisors, strict=True)]
            means, state = yield from self._sign_means(scaled, state)
            averages = self._masked(means, state) if state.size > 1 else tuple(means)
            momentum = tuple(divide(-a, numbers[key]) for a, key in zip(averages, sums, strict=True))
            tensors = zip(moved, pending, averages, divisors, strict=True)
            moved = [(p - u) + a / d for p, u, a, d in tensors]
            pending = zeros_like(pending)
            numbers |= dict.fromkeys(sums, 0.0)
        _count(numbers, "local_step", self.local_step_scaler, self.local_step_clipper)
        arrays = {**state.arrays, _ACCUMULATOR: tuple(pending)}
        return moved, state._replace(momentum=momentum, arrays=arrays, numbers=numbers)


def _count(numbers: dict[str, float], what: str, scaler: int, most: float = inf) -> None:
    """Count a call; every ``scaler`` calls the interval doubles, up to ``most``."""
    counter, interval = f"{what}_counter", f"{what}_interval"
    numbers[counter] += 1
    if numbers[counter] == scaler:
        numbers.update({counter: 0.0, interval: min(float(most), 2 * numbers[interval])})


zero_one_adam = ZeroOneAdam
