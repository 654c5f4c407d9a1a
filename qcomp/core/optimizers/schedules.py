"""Which steps are special: schedules as functions of the number of the step, the same on all ranks."""

from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["DoublingIntervals", "LocalSteps", "Schedule"]

Schedule = Callable[[int], bool]
"""Says of a step, counted from 1, whether it belongs to a set."""


@dataclass(frozen=True)
class DoublingIntervals:
    """Steps at growing intervals: step 1 first, and interval number j, from 0, is 2^floor(j / each) steps long.

    Parameters
    ----------
    each : int
        How many intervals of each length there are, at least 1.
    longest : int, optional
        A power of two at which the intervals stop growing.

    Notes
    -----
    Of T steps about each * log2(T / each + 1) belong to the set: 201 of 100 000 with ``each=16``. Source: Lu et al.,
    ICLR 2023 (0/1 Adam), the policies of section 4.

    Examples
    --------
    >>> [step for step in range(1, 20) if DoublingIntervals(2)(step)]
    [1, 2, 3, 5, 7, 11, 15]
    """

    each: int = 16
    longest: int | None = None

    def __post_init__(self) -> None:
        _require_positive("each", self.each)
        if self.longest is not None:
            _require_positive("longest", self.longest)
            if self.longest.bit_count() != 1:
                raise ValueError(f"longest is {self.longest}; expected a power of two")

    def __call__(self, step: int) -> bool:
        """Return whether a step belongs to the set."""
        done = step - 1
        # Before the intervals of 2^b there are each * (1 + 2 + ... + 2^(b-1)) = each * (2^b - 1) steps.
        power = (done // self.each + 1).bit_length() - 1
        if self.longest is not None:
            power = min(power, self.longest.bit_length() - 1)
        return (done - self.each * ((1 << power) - 1)) % (1 << power) == 0


@dataclass(frozen=True)
class LocalSteps:
    """Steps that end intervals of 1, then 2, 4 and so on, each length for a number of steps.

    Parameters
    ----------
    double_every : int
        Steps after which the intervals double, at least 1.
    longest : int
        The longest interval, at least 1; 1 makes every step belong to the set.

    Notes
    -----
    No interval is longer than ``longest``: where a length does not divide ``double_every``, the last interval of that
    length is cut short. The defaults are DeepSpeed's ``local_step_scaler`` and ``local_step_clipper``, where the
    learning rate halves about as often.

    Examples
    --------
    >>> [step for step in range(1, 20) if LocalSteps(double_every=4, longest=4)(step)]
    [1, 2, 3, 4, 6, 8, 12, 16]
    """

    double_every: int = 32_678
    longest: int = 16

    def __post_init__(self) -> None:
        _require_positive("double_every", self.double_every)
        _require_positive("longest", self.longest)

    def __call__(self, step: int) -> bool:
        """Return whether a step belongs to the set."""
        # In phase number b the intervals are 2^b long; the last phase has no end.
        last = (self.longest - 1).bit_length()
        phase = min((step - 1) // self.double_every, last)
        since = step - phase * self.double_every
        interval = min(1 << phase, self.longest)
        return since % interval == 0 or (phase < last and since == self.double_every)


def _require_positive(argument: str, value: int) -> None:
    if type(value) is not int or value < 1:
        raise ValueError(f"{argument} is {value!r}; expected an integer of at least 1")
