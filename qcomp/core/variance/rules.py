"""`VarianceStable` and `FreezeAt`: rules that decide when an optimizer freezes its variance."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from qcomp.core.settings import plain_numbers


class Observation(NamedTuple):
    """The answer of a rule after a step of the warm-up."""

    frozen: bool
    history: tuple[float, ...]
    """The history that the rule gets when it is asked after the next step."""


class FreezeRule(Protocol):
    """Decides after every step of the warm-up, from values that are equal on all ranks."""

    def observe(
        self, step: int, norm: Callable[[], float], history: tuple[float, ...], beta2: float
    ) -> Observation:
        """Return whether to freeze after ``step`` steps.

        Parameters
        ----------
        step : int
            Completed steps, from 1.
        norm : callable
            Returns ||v||_1 of the variance after bias correction; called only by rules that need it.
        history : tuple of float
            The history that the rule returned after the last step; empty at first, and while the learning rate rises,
            since no variance settles before the end of the rise.
        beta2 : float
            The decay rate of the variance.
        """
        ...


@dataclass(frozen=True)
class FreezeAt:
    """Freezes after a fixed step: steps 1 to ``step`` are exact, and the next step is the first compressed one.

    Parameters
    ----------
    step : int
        The last exact step, at least 1. 15% to 25% of all steps is usual.
    """

    step: int

    def __post_init__(self) -> None:
        plain_numbers(self)
        if type(self.step) is not int or self.step < 1:
            raise ValueError(f"freeze is {self.step!r}; expected an integer of at least 1, or a rule")

    def observe(
        self,
        step: int,
        norm: Callable[[], float],  # noqa: ARG002
        history: tuple[float, ...],
        beta2: float,  # noqa: ARG002
    ) -> Observation:
        """Return whether ``step`` is at least the last exact step, ``self.step``.

        Parameters
        ----------
        step : int, from 1
            Completed steps.
        norm : callable
            Returns ||v||_1 of the bias-corrected variance.
        history : tuple of float
            What the rule returned after the last step; empty at first.
        beta2 : float
            The decay rate of the variance.
        """
        return Observation(step >= self.step, history)


@dataclass(frozen=True)
class VarianceStable:
    """Freezes once the variance is stable.

    Let d = 1 / (1 - b2), n_t = ||v_t||_1 after bias correction, and r = n_{t-d} / n_t. The rule freezes the variance
    once two conditions hold. First, in each of the last d steps, min(r, 1 / r) >= threshold, and the learning rate did
    not rise. Second, gradients from before the last d steps have a share of the weights in v_t that is at least
    threshold times their share after infinitely many steps.

    Parameters
    ----------
    threshold : float
        The smallest min(r, 1 / r) that counts as stable, above 0 and at most 1. Default 0.96.
    after : int
        The freeze comes later than this step. If the learning rate rises without a schedule, set ``after`` to the end
        of the rise. Default 0.

    Notes
    -----
    If gradients have no trend, the freeze comes after about 3.8 / (1 - b2) steps: 378 for b2 = 0.99, 3783 for 0.999.
    After a learning-rate warm-up of w steps, it comes no earlier than w + 2 / (1 - b2). Source: Tang et al., ICML 2021,
    section 7.1, which compares two norms. Here both directions of change count, since the variance may also shrink. A
    whole window must be stable, since norms that rise and then fall may be equal once by chance.
    """

    threshold: float = 0.96
    after: int = 0

    def __post_init__(self) -> None:
        plain_numbers(self)
        if not 0 < self.threshold <= 1:
            raise ValueError(f"threshold is {self.threshold!r}; expected above 0 and at most 1")

    def observe(
        self, step: int, norm: Callable[[], float], history: tuple[float, ...], beta2: float
    ) -> Observation:
        """Compare the norm with the norm d steps ago.

        Parameters
        ----------
        step : int, from 1
            Completed steps.
        norm : callable
            Returns ||v||_1 of the bias-corrected variance.
        history : tuple of float
            What the rule returned after the last step; empty at first.
        beta2 : float
            The decay rate of the variance.
        """
        delay = round(1 / (1 - beta2))
        # The history is -1 minus the number of stable steps, then the last d norms; other rules' histories are ignored.
        known = history and history[0] < 0
        calm, norms = (int(min(-1 - history[0], delay)), history[1:]) if known else (0, ())
        now = norm()
        before = norms[0] if len(norms) == delay else 0.0
        is_calm = min(before, now) >= self.threshold * max(before, now) > 0
        calm = min(calm + 1, delay) if is_calm else 0
        settled = 1 - beta2 ** max(0, step - delay) >= self.threshold * (1 - beta2**step)
        return Observation(
            calm == delay and settled and step > self.after, (-1.0 - calm, *(*norms, now)[-delay:])
        )


def freeze_rule(freeze: int | FreezeRule) -> FreezeRule:
    """Return the rule for an optimizer's ``freeze``."""
    return freeze if hasattr(freeze, "observe") else FreezeAt(freeze)
