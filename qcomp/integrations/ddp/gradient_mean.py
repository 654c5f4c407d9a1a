"""The optimizer of the core behind the gradient hook: its step returns the mean gradients."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from qcomp.core.checkpoint.format import MAKER
from qcomp.core.compressor import Compressor
from qcomp.core.mean.averaging import Averaging
from qcomp.core.numeric.arrays import Array
from qcomp.core.optimizers.base import Optimizer
from qcomp.core.optimizers.compression import Average, Means
from qcomp.core.optimizers.makers import maker
from qcomp.core.optimizers.moved_zeros import keeps_zeros
from qcomp.core.optimizers.tensors import as_tensors
from qcomp.core.policies.by_name import CompressorPolicy
from qcomp.core.policies.exact_below import ExactBelow, ExactPolicy
from qcomp.core.state import OptimizerState


@dataclass(frozen=True, kw_only=True)
class GradientMean(Optimizer):
    """Returns the mean gradients instead of parameters: exact ones at first, then compressed ones."""

    learning_rate: float | Callable[[int], float] = 0.0
    compressor: Compressor
    averaging: Averaging = Averaging()
    exact: ExactPolicy | None = ExactBelow(10_000)
    compressors: CompressorPolicy | None = None
    exact_iterations: int = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        if type(self.exact_iterations) is not int or self.exact_iterations < 0:
            raise ValueError(
                f"exact_iterations is {self.exact_iterations!r}; expected an integer, at least 0"
            )

    def initial_state(
        self, params: Sequence[Array], names: tuple[str, ...], rank: int, size: int
    ) -> OptimizerState:
        """Return residuals of zero."""
        first = OptimizerState.first("compressed", names, rank, size)
        return self.compression.begin(first, params, "the hook")

    def differing_kinds(self, saved: Mapping[str, Any]) -> tuple[str, ...]:
        """Return the kinds of arrays in which the ranks may differ: none until the first compressed step."""
        is_exact = saved["step"] <= self.exact_iterations and saved.get(MAKER) == maker(self)
        return () if is_exact else super().differing_kinds(saved)

    def may_move_zeros(self, state: OptimizerState) -> bool:
        """Return whether the next step is the first compressed one, and may move elements whose gradients are all 0."""
        begins = state.step == self.exact_iterations and not all(state.exact)
        return begins and not keeps_zeros(self.mean_of(state))

    def prepare(self, grads: Any, state: OptimizerState, *, scale: float = 1.0) -> Average:  # noqa: ARG002
        """Request the mean of the gradients, which it may overwrite; ``scale`` is 1, since nothing is clipped."""
        gradients = as_tensors(grads, "grads")
        if state.step < self.exact_iterations:
            average = self.compression.exactly(gradients, state)
        else:
            average = self.compression.average(gradients, state, self.key(state))
        return average._replace(overwrite=True)

    def apply(
        self,
        params: Any,  # noqa: ARG002
        means: Means,
        state: OptimizerState,
    ) -> tuple[list[Array], OptimizerState]:
        """Return the means, and the state after this step."""
        return list(means.values), state._replace(step=state.step + 1, exchange=means.exchange)
