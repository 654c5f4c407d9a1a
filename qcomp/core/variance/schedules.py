"""`DoublingIntervals` and `LocalSteps`: functions that select steps by number, equally on all ranks."""

from collections.abc import Callable
from dataclasses import dataclass

from qcomp.core.settings import plain_numbers

Schedule = Callable[[int], bool]
"""Returns whether a step, counted from 1, belongs to a set. In a program that JAX compiles, the step is traced, so the
function must consist of arithmetic and comparisons without branches, as in `DoublingIntervals`."""


@dataclass(frozen=True)
class DoublingIntervals:
    """Steps at growing intervals: step 1, then steps after intervals j = 0, 1, ... of 2^floor(j / each) steps.

    Parameters
    ----------
    each : int
        Number of intervals of each length, at least 1.
    longest : int, optional
        Largest interval, a power of two. None, the default, lets intervals grow without bound.

    Notes
    -----
    About each * log2(T / each + 1) of T steps belong to the set: 201 of 100 000 with ``each=16``. Source: Lu et al.,
    ICLR 2023 (0/1 Adam), the policies of section 4.

    Examples
    --------
    >>> [step for step in range(1, 20) if DoublingIntervals(2)(step)]
    [1, 2, 3, 5, 7, 11, 15]
    """

    each: int = 16
    longest: int | None = None

    def __post_init__(self) -> None:
        plain_numbers(self)
        _require_positive("each", self.each)
        if self.longest is not None:
            _require_positive("longest", self.longest)
            if self.longest.bit_count() != 1:
                raise ValueError(f"longest is {self.longest}; expected a power of two")

    def __call__(self, step: int) -> bool:
        """Return whether a step belongs to the set."""
        done = step - 1
        # Before the intervals of 2^b there are each * (1 + 2 + ... + 2^(b-1)) = each * (2^b - 1) steps.
        power = _floor_log2(done // self.each + 1)
        if self.longest is not None:
            power = _at_most(power, self.longest.bit_length() - 1)
        return (done - self.each * ((1 << power) - 1)) % (1 << power) == 0


@dataclass(frozen=True)
class LocalSteps:
    """Steps at the ends of intervals of 1, then 2, then 4 steps and so on, each length for ``double_every`` steps.

    Parameters
    ----------
    double_every : int
        Number of steps after which the intervals double, at least 1.
    longest : int
        The longest interval, at least 1; with 1 every step belongs to the set.

    Notes
    -----
    No interval is longer than ``longest``. If a length does not divide ``double_every``, the last interval of that
    length is shorter. The defaults are DeepSpeed's ``local_step_scaler`` and ``local_step_clipper``, chosen for a
    learning rate that halves about as often.

    Examples
    --------
    >>> [step for step in range(1, 20) if LocalSteps(double_every=4, longest=4)(step)]
    [1, 2, 3, 4, 6, 8, 12, 16]
    """

    double_every: int = 32_678
    longest: int = 16

    def __post_init__(self) -> None:
        plain_numbers(self)
        _require_positive("double_every", self.double_every)
        _require_positive("longest", self.longest)

    def __call__(self, step: int) -> bool:
        """Return whether a step belongs to the set."""
        # In phase number b the intervals are 2^b long; the last phase has no end.
        last = (self.longest - 1).bit_length()
        phase = _at_most((step - 1) // self.double_every, last)
        since = step - phase * self.double_every
        interval = _at_most(1 << phase, self.longest)
        return (since % interval == 0) | ((phase < last) & (since == self.double_every))


def require_schedule(argument: str, value: object, does: str) -> None:
    """Raise TypeError unless a setting is a schedule."""
    if not callable(value):
        raise TypeError(
            f"{argument} is {value!r}; expected a schedule, which returns whether a step {does}, such as "
            "qcomp.DoublingIntervals(each=4)"
        )


def _floor_log2(number: int) -> int:
    """Return the logarithm of an integer from 1 to 2^32 - 1, rounded down; the integer may be traced by a compiler."""
    power = 0
    for step in (16, 8, 4, 2, 1):
        power += step * (number >> (power + step) > 0)
    return power


def _at_most(number: int, most: int) -> int:
    """Return the smaller of an integer and a bound; the integer may be traced by a compiler."""
    return number - (number - most) * (number > most)


def _require_positive(argument: str, value: int) -> None:
    if type(value) is not int or value < 1:
        raise ValueError(f"{argument} is {value!r}; expected an integer of at least 1")
