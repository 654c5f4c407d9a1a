"""Adam that freezes its variance and then exchanges a compressed momentum, as a state machine of two stages."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from qcomp.core import primitives
from qcomp.core.arrays import Array
from qcomp.core.kernels import Blend
from qcomp.core.optimizers.adam import Adam
from qcomp.core.optimizers.base import Average, Means, as_tensors
from qcomp.core.optimizers.compression import CompressingOptimizer
from qcomp.core.optimizers.freeze import FreezeRule, freeze_rule
from qcomp.core.state import OptimizerState
from qcomp.core.sums import total

__all__ = ["FrozenVarianceAdam"]


@dataclass(frozen=True, kw_only=True)
class FrozenVarianceAdam(CompressingOptimizer, Adam):
    """Base of 1-bit Adam and QAdam.

    - Stage "warmup": `Adam` on the exact mean gradient. After each step the freeze rule is asked; when it says
      so, the bias-corrected variance is kept for ever and the residuals start at zero.
    - Stage "compressed": every rank puts its own gradient into the common momentum of the last step, the results
      are averaged with compression, and that average is the new common momentum.

    The variance of exact tensors is frozen too; only their momentum is averaged exactly. Elements whose frozen
    variance is zero, because they never had a gradient, keep a momentum of zero and do not move.
    """

    freeze: int | FreezeRule

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "freeze", freeze_rule(self.freeze))

    def start(self, params: Sequence[Array], names: tuple[str, ...], rank: int, size: int) -> OptimizerState:
        """Return moments of zero, in the warm-up."""
        state = super().start(params, names, rank, size)
        return state._replace(exact=self._choose_exact(params, names))

    def enter(self, state: OptimizerState, stage: str) -> OptimizerState:
        """Return the state of the warm-up, or with residuals of zero the one of the compressed stage."""
        if stage == "warmup":
            return super().enter(state, stage)
        residuals = self._no_residuals(state.momentum, state.exact, state.rank, state.size)
        return state._replace(stage=stage, exchange=residuals)

    def prepare(self, grads: Any, state: OptimizerState, *, scale: float = 1.0) -> Average:
        """Ask for the exact mean gradient, or for the compressed mean of the momentum."""
        if state.stage == "warmup":
            return super().prepare(grads, state, scale=scale)
        beta1, _ = self.betas
        blends = [Blend(m, beta1, scale) for m in state.momentum]
        return self._average(as_tensors(grads, "grads"), state, blends)

    def apply(self, params: Any, means: Means, state: OptimizerState) -> tuple[list[Array], OptimizerState]:
        """Make a step of Adam and ask the freeze rule, or a step with the frozen variance."""
        if state.stage == "warmup":
            new_params, new_state = super().apply(params, means, state)
            return new_params, self._observed(new_state)
        numbers = self._numbers(state)
        moved = [
            primitives.frozen_step(p, m, v, numbers)
            for p, m, v in zip(as_tensors(params, "params"), means.values, state.variance, strict=True)
        ]
        new_state = state._replace(
            step=state.step + 1, momentum=tuple(m for _, m in moved), exchange=means.exchange
        )
        return [p for p, _ in moved], new_state

    def _observed(self, state: OptimizerState) -> OptimizerState:
        """Return the state after the freeze rule has seen this step of the warm-up."""

        def norm() -> float:
            # Sums in a fixed order of values that are the same on all ranks, so that all decide alike.
            return sum(float(total(v)) for v in state.variance)

        rule = freeze_rule(self.freeze)
        verdict = rule.observe(state.step, norm, state.history, self.betas[1])
        if not verdict.frozen:
            return state._replace(history=verdict.history)
        frozen = self._corrected(state.variance, state.step)
        return self.enter(state, "compressed")._replace(variance=frozen, history=())
