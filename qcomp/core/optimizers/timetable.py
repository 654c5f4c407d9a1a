"""What each step of 0/1 Adam exchanges: a function of the number of the step, the same on all ranks."""

from dataclasses import dataclass
from typing import NamedTuple

from qcomp.core.optimizers.freeze import FreezeAt, FreezeRule
from qcomp.core.optimizers.schedules import Schedule

__all__ = ["Rounds", "StepPlan", "Timetable"]


class StepPlan(NamedTuple):
    """What a step exchanges."""

    exact: bool
    """The exact mean of the gradients."""
    compressed: bool
    """The compressed mean of the sums of the momenta."""


class Rounds(NamedTuple):
    """The numbers of steps of a run, by what they send."""

    exact: int
    """Steps that average the gradient exactly, for the variance."""
    compressed: int
    """Steps that average the sum of the momenta with compression; a step may do both."""
    silent: int
    """Steps that send nothing."""


@dataclass(frozen=True)
class Timetable:
    """The schedules of `ZeroOneAdam`, see there."""

    variance_steps: Schedule
    sync_steps: Schedule
    freeze: FreezeRule | None

    def plan(self, step: int, frozen: int, *, apart: bool, moves: bool = True) -> StepPlan:
        """Return what a step exchanges.

        Parameters
        ----------
        step : int
            The number of the step, from 1.
        frozen : int
            The step after which the variance was frozen; 0 if it is not.
        apart : bool
            Whether the ranks have made steps alone since the last synchronisation.
        moves : bool
            Whether the learning rate is above 0.
        """
        if not frozen and self.variance_steps(step):
            return StepPlan(exact=True, compressed=apart)
        if not (moves or apart):
            return StepPlan(exact=False, compressed=False)
        waits = self.freeze is not None and not frozen
        return StepPlan(exact=False, compressed=waits or self.sync_steps(step - frozen))

    def rounds(self, steps: int) -> Rounds:
        """Count the first ``steps`` steps by what they send."""
        if self.freeze is not None and not isinstance(self.freeze, FreezeAt):
            raise ValueError(f"freeze is {self.freeze!r}; expected a number of steps, or None")
        exact = compressed = silent = frozen = 0
        apart = False
        for step in range(1, steps + 1):
            plan = self.plan(step, frozen, apart=apart)
            exact, compressed = exact + plan.exact, compressed + plan.compressed
            apart = not any(plan)
            silent += apart
            if self.freeze is not None and step >= self.freeze.step:
                frozen = self.freeze.step
        return Rounds(exact, compressed, silent)
