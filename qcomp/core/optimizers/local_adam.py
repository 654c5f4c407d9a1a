"""Adam whose ranks make local steps between synchronisations: the local step, and the synchronisation."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from qcomp.core import primitives
from qcomp.core.checkpoint.schema import Number
from qcomp.core.compressor import Compressor
from qcomp.core.errors import NonFiniteError
from qcomp.core.kernels import StepNumbers
from qcomp.core.mean.averaging import Averaging
from qcomp.core.numeric.arrays import LIMIT, Array, array_namespace, divide, require_below, to_compute_dtype
from qcomp.core.optimizers.adam import Adam, corrected
from qcomp.core.optimizers.base import Optimizer
from qcomp.core.optimizers.compression import Means
from qcomp.core.optimizers.groups import group_of_each
from qcomp.core.optimizers.tensors import copy, each_in_blocks
from qcomp.core.policies.by_name import CompressorPolicy
from qcomp.core.policies.exact_below import ExactBelow, ExactPolicy
from qcomp.core.state import OptimizerState

__all__ = ["LocalAdam", "copy"]


@dataclass(frozen=True, kw_only=True)
class LocalAdam(Optimizer):
    """Adam with local steps; a subclass decides which steps are local.

    In the stage "local", while the ranks are apart, ``arrays`` holds "anchor", the parameters of the last
    synchronisation, and "pending", the sums of this rank's weighted momenta since then. ``numbers`` holds "updates",
    the number of updates of the variance; "frozen", the step in which it was frozen, or 0; "synced", the step of the
    last synchronisation; and "rates" and "weights", their sums since then.
    """

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
        return {"updates": updates, "frozen": frozen, "synced": until_now, "rates": sums, "weights": sums}

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
        numbers = dict(state.numbers)
        numbers["rates"] += self.rate(state)
        numbers["weights"] += self._weight(state)
        return [p for p, _ in moved], state._replace(
            step=state.step + 1,
            stage="local",
            skipped=skipped,
            momentum=tuple(m for _, m in moved),
            arrays={"anchor": tuple(anchor), "pending": tuple(pending)},
            numbers=numbers,
        )

    def _synchronised(
        self, params: Sequence[Array], means: Means, state: OptimizerState
    ) -> tuple[list[Array], OptimizerState]:
        """Return the common parameters and state, given the mean over the ranks of the sums of momenta."""
        rates, weights = state.numbers["rates"], state.numbers["weights"]
        anchor = state.arrays["anchor"] if state.stage == "local" else params
        momenta = each_in_blocks(lambda u: divide(u, weights), means.values)
        settings = zip(group_of_each(tuple(self.groups), state.names), self.weight_decays(state), strict=True)
        # These multiply the momentum by the sum of the weights, and the decay by the sum of the rates.
        numbers = [
            StepNumbers(rates * group.learning_rate_factor, rates / weights, self.eps, decay)
            for group, decay in settings
        ]
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
            numbers={**state.numbers, "synced": float(state.step), "rates": 0.0, "weights": 0.0},
        )

    def _divisor(self, state: OptimizerState) -> Sequence[Array]:
        """Return the bias-corrected variance to divide by; a frozen one is corrected already."""
        if state.numbers["frozen"]:
            return state.variance
        return corrected(state.variance, self.betas[1], int(state.numbers["updates"]))

    def _summed(self, momenta: Sequence[Array], state: OptimizerState) -> list[Array]:
        """Return the sums of the weighted momenta since the last synchronisation, including this step's."""
        weight = self._weight(state)
        if state.stage != "local":
            return each_in_blocks(lambda m: weight * m, momenta)
        return each_in_blocks(lambda u, m: u + weight * m, state.arrays["pending"], momenta)

    def _weight(self, state: OptimizerState) -> float:
        """Return the rate of the next step divided by its bias correction of the momentum."""
        return self.rate(state) / (1 - self.betas[0] ** (state.step + 1))

    def _located(self, error: NonFiniteError, state: OptimizerState, step: int) -> NonFiniteError:
        """Return the error with the steps that may have caused it."""
        first = int(state.numbers["synced"]) + 1
        steps = f"step {step}" if first == step else f"one of the steps {first} to {step}"
        return NonFiniteError(f"{error}, in {steps}")


def _in_range(tensors: Sequence[Array]) -> bool:
    """Return whether all values can be compressed, by the test that compressors use."""
    try:
        for x in tensors:
            require_below(array_namespace(x).reshape(x, (-1,)), LIMIT, "a momentum")
    except NonFiniteError:
        return False
    return True
