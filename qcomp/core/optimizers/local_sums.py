"""The numbers that 0/1 Adam keeps for each tensor between two synchronisations, as groups may change settings."""

from collections.abc import Sequence
from typing import NamedTuple, TypeVar

from qcomp.core.kernels import StepNumbers
from qcomp.core.state import OptimizerState

T = TypeVar("T")


class Sums(NamedTuple):
    """A tensor's own sums since the last synchronisation; they differ between tensors if groups have own settings."""

    factor: float
    """The learning rate factor by which "pending" is to be multiplied."""
    weight: float
    """The sum of the weights of the momenta in "pending"."""
    decay: float
    """The sum of learning rate times weight decay."""

    def step_numbers(self, rates: float, weights: float, eps: float) -> StepNumbers:
        """Return the `StepNumbers` with which a synchronisation applies this factor, this weight and this decay."""
        rate = rates * self.factor * (self.weight / weights)
        return StepNumbers(rate, rates / weights, eps, self.decay / rate if rate else 0.0)


def with_step(
    sums: Sums | None, rate: float, weight: float, factor: float, decay: float
) -> tuple[bool, float, Sums]:
    """Return the result of `ZeroOneAdam._added` for one tensor, from its sums before the step, if any.

    A step is weighted by its learning rate factor, in units of the first step's factor. If the first factor was 0, the
    momenta so far have moved nothing, and were summed only for their mean.
    """
    if sums is None or (weight and factor and not sums.factor):
        return True, weight, Sums(factor, weight, rate * factor * decay)
    share = weight * (factor / sums.factor) if sums.factor else weight
    return False, share, Sums(sums.factor, sums.weight + share, sums.decay + rate * factor * decay)


def named(names: Sequence[str], of_tensors: Sequence[tuple[T, T, T]]) -> dict[str, T]:
    """Return the value of each tensor for each field of `Sums`, by its key in the numbers of a state."""
    pairs = zip(names, of_tensors, strict=True)
    return {f"{kind}.{name}": x for name, of in pairs for kind, x in zip(Sums._fields, of, strict=True)}


def sums_of(state: OptimizerState) -> list[Sums]:
    """Return the sums of all tensors."""
    return [Sums(*(state.numbers[f"{kind}.{name}"] for kind in Sums._fields)) for name in state.names]
