"""Adam whose ranks make local steps between synchronisations: the local step, and the synchronisation."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from operator import mul
from typing import NamedTuple, TypeVar

from qcomp.core import primitives
from qcomp.core.checkpoint.schema import Number
from qcomp.core.compressor import Compressor
from qcomp.core.errors import NonFiniteError
from qcomp.core.kernels import StepNumbers
from qcomp.core.mean.averaging import Averaging
from qcomp.core.numeric.arrays import LIMIT, Array, array_namespace, divide, require_below, to_compute_dtype
from qcomp.core.optimizers.adam import Adam, bias_corrections, divided
from qcomp.core.optimizers.base import Optimizer
from qcomp.core.optimizers.compression import Means
from qcomp.core.optimizers.groups import group_of_each, setting_of_each
from qcomp.core.optimizers.own_counts import own_counts
from qcomp.core.optimizers.tensors import copy, each_in_blocks
from qcomp.core.policies.by_name import CompressorPolicy
from qcomp.core.policies.exact_below import ExactBelow, ExactPolicy
from qcomp.core.state import OptimizerState

__all__ = ["LocalAdam", "copy"]

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class LocalAdam(Optimizer):
    """Adam with local steps; a subclass decides which steps are local.

    In the stage "local", while the ranks are apart, ``arrays`` holds "anchor", the parameters of the last
    synchronisation, and "pending", the sums of this rank's weighted momenta since then. ``numbers`` holds "updates",
    the number of updates of the variance; "frozen", the step in which it was frozen, or 0; "synced", the step of the
    last synchronisation; "rates" and "weights", their sums since then; and in the stage "local" the `_Sums` of each
    tensor, as ``factor.NAME``, ``weight.NAME`` and ``decay.NAME``.
    """

    of_groups = ("betas", "eps")

    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    decoupled_weight_decay: bool = True
    compressor: Compressor
    averaging: Averaging = Averaging()
    exact: ExactPolicy | None = ExactBelow(10_000)
    compressors: CompressorPolicy | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.adam  # noqa: B018 - raises if its settings do not fit

    @cached_property
    def adam(self) -> Adam:
        """Makes the exact steps."""
        return Adam.within(self)

    def own_kinds(self, stage: str) -> tuple[str, ...]:
        """Return the kinds of arrays that differ between the ranks while they are apart."""
        return ("momentum", "pending") if stage == "local" else ()

    def limits(self, state: OptimizerState) -> Mapping[str, Number]:
        """Return the limits of the numbers: steps until now, and sums of rates and weights."""
        until_now = Number(least=0, most=state.step, whole=True)
        warmup = state.stage == "warmup"  # which ends with the freeze
        updates = until_now._replace(least=0 if warmup else 1)
        frozen = until_now._replace(most=0 if warmup else state.step)
        # Sums over this rank's local steps; the next synchronisation divides by them.
        sums = Number(least=math.ulp(0.0) if state.stage == "local" else 0)
        limits = {"updates": updates, "frozen": frozen, "synced": until_now, "rates": sums, "weights": sums}
        if state.stage == "local":
            of_tensor = Number(least=0), sums, Number(least=0)
            limits |= _named(state.names, [of_tensor] * len(state.names))
        return limits

    def _with_room(self, state: OptimizerState) -> OptimizerState:
        """Return a state with arrays and numbers of the stage "local", for their shapes and names."""
        nothing = [_Sums(0.0, 0.0, 0.0)] * len(state.names)
        return state._replace(
            arrays={"anchor": state.momentum, "pending": state.momentum},
            numbers={**state.numbers, **_named(state.names, nothing)},
        )

    def counts(self, state: OptimizerState) -> Mapping[str, float]:
        """Return the steps, and the updates of the variance."""
        return {**super().counts(state), "updates": state.numbers["updates"]}

    def apart(self, stage: str) -> bool:
        """Return whether the ranks make local steps in this stage."""
        return stage == "local"

    def _local_step(
        self, params: Sequence[Array], momenta: Sequence[Array], state: OptimizerState
    ) -> tuple[list[Array], OptimizerState]:
        """Make a step of this rank alone."""
        apart = state.stage == "local"
        if not (apart or self.rate(state)):
            return list(params), state._replace(step=state.step + 1)
        skipped = state.skipped
        if self.nonfinite == "skip" and not _in_range(momenta):
            momenta, skipped = [copy(m) for m in state.momentum], skipped + 1
        pending = self._summed(momenta, state)
        anchor = state.arrays["anchor"] if apart else [copy(to_compute_dtype(p)) for p in params]
        moved = primitives.frozen_steps(params, momenta, self._divisor(state), self.adam.numbers(state))
        return [p for p, _ in moved], state._replace(
            step=state.step + 1,
            stage="local",
            skipped=skipped,
            momentum=tuple(m for _, m in moved),
            arrays={"anchor": tuple(anchor), "pending": tuple(pending)},
            numbers=self._numbers_after(state),
        )

    def _synchronised(
        self, params: Sequence[Array], means: Means, state: OptimizerState
    ) -> tuple[list[Array], OptimizerState]:
        """Return the common parameters and state, given the mean over the ranks of the sums of momenta."""
        rates, weights = state.numbers["rates"], state.numbers["weights"]
        anchor = state.arrays["anchor"] if state.stage == "local" else params
        sums = _sums_of(state)
        momenta = [_in_blocks(_over, of.weight, u) for u, of in zip(means.values, sums, strict=True)]
        eps = setting_of_each(tuple(self.groups), state.names, "eps", self.eps)
        numbers = [of.step_numbers(rates, weights, x) for of, x in zip(sums, eps, strict=True)]
        moved = primitives.frozen_steps(anchor, momenta, self._divisor(state), numbers)
        new_params = [
            array_namespace(p).astype(new, p.dtype, copy=False)
            for p, (new, _) in zip(params, moved, strict=True)
        ]
        return new_params, state._replace(
            stage="compressed",
            momentum=tuple(m for _, m in moved),
            exchange=means.exchange,
            arrays={},
            numbers={
                **{key: x for key, x in state.numbers.items() if key.partition(".")[0] not in _Sums._fields},
                "synced": float(state.step),
                "rates": 0.0,
                "weights": 0.0,
            },
        )

    def _divisor(self, state: OptimizerState) -> Sequence[Array]:
        """Return the bias-corrected variance to divide by; a frozen one is corrected already."""
        if state.numbers["frozen"]:
            return state.variance
        return divided(state.variance, self._corrections(state, state.numbers["updates"]))

    def _corrections(self, state: OptimizerState, updates: float) -> list[float]:
        """Return the bias correction of each tensor's variance, when all tensors together have had so many updates."""
        return bias_corrections(self.adam.betas_of(state), 1, own_counts(state, updates, "updates"))

    def _summed(self, momenta: Sequence[Array], state: OptimizerState) -> list[Array]:
        """Return the sums of the weighted momenta since the last synchronisation, including this step's."""
        pending = state.arrays["pending"] if state.stage == "local" else momenta
        return [
            _in_blocks(mul, weight, m) if starts else _in_blocks(_plus, weight, u, m)
            for u, m, (starts, weight, _) in zip(pending, momenta, self._added(state), strict=True)
        ]

    def _numbers_after(self, state: OptimizerState) -> dict[str, float]:
        """Return the numbers with the next step in the sums."""
        return {
            **state.numbers,
            "rates": state.numbers["rates"] + self.rate(state),
            "weights": state.numbers["weights"] + self._weight(state),
            **_named(state.names, [sums for _, _, sums in self._added(state)]),
        }

    def _added(self, state: OptimizerState) -> list[tuple[bool, float, "_Sums"]]:
        """Return, for each tensor, whether the next step starts its sums, its weight in them, and the sums after it."""
        rate, of_groups = self.rate(state), group_of_each(tuple(self.groups), state.names)
        corrections = bias_corrections(self.adam.betas_of(state), 0, own_counts(state, state.step + 1))
        settings = zip(corrections, of_groups, self.weight_decays(state), strict=True)
        before = _sums_of(state) if state.stage == "local" else [None] * len(state.names)
        return [
            _with_step(sums, rate, rate / correction, group.learning_rate_factor, decay)
            for sums, (correction, group, decay) in zip(before, settings, strict=True)
        ]

    def _weight(self, state: OptimizerState) -> float:
        """Return the rate of the next step divided by the bias correction of a momentum that has missed no step."""
        return self.rate(state) / (1 - self.betas[0] ** (state.step + 1))

    def _located(self, error: NonFiniteError, state: OptimizerState, step: int) -> NonFiniteError:
        """Return the error with the steps that may have caused it."""
        first = int(state.numbers["synced"]) + 1
        steps = f"step {step}" if first == step else f"one of the steps {first} to {step}"
        return NonFiniteError(f"{error}, in {steps}")


class _Sums(NamedTuple):
    """A tensor's sums since the last synchronisation: its group may change its settings between two steps."""

    factor: float
    """The learning rate factor by which "pending" is to be multiplied."""
    weight: float
    """The sum of the weights of the momenta in "pending"."""
    decay: float
    """The sum of learning rate times weight decay."""

    def step_numbers(self, rates: float, weights: float, eps: float) -> StepNumbers:
        """Return the numbers that multiply the mean momentum by factor and weight, and the parameters by the decay."""
        rate = rates * self.factor * (self.weight / weights)
        return StepNumbers(rate, rates / weights, eps, self.decay / rate if rate else 0.0)


def _with_step(
    sums: _Sums | None, rate: float, weight: float, factor: float, decay: float
) -> tuple[bool, float, _Sums]:
    """Return what `LocalAdam._added` returns for a tensor, from its sums before the step if there are any.

    A step counts as much as its factor, in units of the first one. If that was 0, the momenta before were only summed
    to have their mean, and have moved nothing.
    """
    if sums is None or (weight and factor and not sums.factor):
        return True, weight, _Sums(factor, weight, rate * factor * decay)
    share = weight * (factor / sums.factor) if sums.factor else weight
    return False, share, _Sums(sums.factor, sums.weight + share, sums.decay + rate * factor * decay)


def _named(names: Sequence[str], of_tensors: Sequence[tuple[T, T, T]]) -> dict[str, T]:
    """Return what each tensor has for the fields of `_Sums`, by the names of these in the numbers of a state."""
    pairs = zip(names, of_tensors, strict=True)
    return {f"{kind}.{name}": x for name, of in pairs for kind, x in zip(_Sums._fields, of, strict=True)}


def _sums_of(state: OptimizerState) -> list[_Sums]:
    """Return the sums of all tensors."""
    return [_Sums(*(state.numbers[f"{kind}.{name}"] for kind in _Sums._fields)) for name in state.names]


def _in_blocks(function: Callable[..., Array], number: float, *arrays: Array) -> Array:
    """Return ``function(number, *arrays)``; see `each_in_blocks`."""
    (result,) = each_in_blocks(partial(function, number), *([x] for x in arrays))
    return result


def _plus(weight: float, u: Array, m: Array) -> Array:
    return u + weight * m


def _over(weight: float, u: Array) -> Array:
    return divide(u, weight)


def _in_range(tensors: Sequence[Array]) -> bool:
    """Return whether all values can be compressed, by the test that compressors use."""
    try:
        for x in tensors:
            require_below(array_namespace(x).reshape(x, (-1,)), LIMIT, "a momentum")
    except NonFiniteError:
        return False
    return True
