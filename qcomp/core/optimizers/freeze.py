"""Rules that decide when an optimizer freezes its variance."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from qcomp.core.checkpoint.format import some
from qcomp.core.numeric.sums import totals
from qcomp.core.reporting import warn_caller
from qcomp.core.settings import plain_numbers
from qcomp.core.state import OptimizerState

__all__ = [
    "FreezeAt",
    "FreezeRule",
    "Observation",
    "VarianceStable",
    "ask",
    "freeze_rule",
    "warn_if_early",
    "warn_of_zeros",
]

_PATIENCE = 10
"""Windows of 1 / (1 - b2) steps without a freeze before the warning."""


class Observation(NamedTuple):
    """The answer of a rule after a step of the warm-up."""

    frozen: bool
    history: tuple[float, ...]
    """The history that the rule receives after the next step."""


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
            What the rule returned after the last step; empty at first, and after each step in which the learning rate
            rises, since no variance settles before the end of the rise.
        beta2 : float
            The decay of the variance.
        """
        ...


@dataclass(frozen=True)
class FreezeAt:
    """Freezes after a fixed step: steps 1 to ``step`` are exact, the next one is the first compressed step.

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
        """Return whether the step has been reached.

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

    Let d = 1 / (1 - b2), n_t = ||v_t||_1 after bias correction, and r = n_{t-d} / n_t. It freezes once two conditions
    hold: in each of the last d steps, min(r, 1 / r) >= threshold and the learning rate did not rise; and the share of
    v_t from before the last d steps is at least threshold times its steady-state value.

    Parameters
    ----------
    threshold : float
        The smallest min(r, 1 / r) that counts as stable, above 0 and at most 1. Default 0.96.
    after : int
        The earliest step for the freeze. Set it to the end of a learning-rate warm-up that is not a schedule. Default
        0.

    Notes
    -----
    With gradients without a trend it freezes after about 3.8 / (1 - b2) steps: 378 for b2 = 0.99, 3783 for 0.999; after
    a learning-rate warm-up of w steps, no earlier than w + 2 / (1 - b2). Source: Tang et al., ICML 2021, section 7.1,
    which compares two norms. Here both directions of change count, since the variance may also shrink. A whole window
    must be stable, since norms that rise and then fall cross by chance.
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
        """Compare the norm with the one of d steps ago.

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
        # The history is the negative number of stable steps, then the last d norms; one of another rule starts anew.
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


def ask(
    rule: FreezeRule,
    step: int,
    norm: Callable[[], float],
    history: tuple[float, ...],
    beta2: float,
    *,
    rising: bool,
) -> Observation:
    """Return a rule's answer after ``step`` steps; warn of a freeze while the rate rises, and of a very long wait.

    Parameters
    ----------
    rule, step, norm, beta2
        See `FreezeRule`.
    history : tuple of float
        What the rule returned after the last step.
    rising : bool
        Whether the next step has a larger learning rate than this one.
    """
    verdict = rule.observe(step, norm, () if rising else history, beta2)
    if rising:
        verdict = verdict._replace(history=())
    if verdict.frozen and rising:
        warn_caller(
            f"the variance is frozen after {step} steps, while the learning rate still rises: gradients "
            "change with it. Freeze after the rise"
        )
    patience = getattr(rule, "after", 0) + _PATIENCE * round(1 / (1 - beta2))
    if step == patience and not verdict.frozen and not isinstance(rule, FreezeAt):
        cause = "the learning rate still rises" if rising else "the variance is not stable yet"
        warn_caller(
            f"nothing is compressed yet after {step} steps: {rule} waits, because {cause}. To freeze anyway, "
            "pass freeze as a number of steps, or a rule with a lower threshold, and see the warnings of VarianceWatch"
        )
    return verdict


def freeze_rule(freeze: int | FreezeRule) -> FreezeRule:
    """Return the rule for an optimizer's ``freeze``."""
    return freeze if hasattr(freeze, "observe") else FreezeAt(freeze)


def warn_if_early(rule: FreezeRule, beta2: float, optimizer: str) -> None:
    """Warn of a freeze before a tenth of the steps over which the variance averages.

    By chance, the mean of k squares is below c times its expected value for about c^(k/2) of all elements. Among many
    elements some then move 1 / sqrt(c) times too far in every step.
    """
    window = round(1 / (1 - beta2))
    if isinstance(rule, FreezeAt) and 10 * rule.step < window:
        warn_caller(
            f"the variance is frozen after {rule.step} steps, but averages over 1 / (1 - b2) = {window}: {optimizer} "
            f"expects a freeze after at least {-(-window // 10)}, better {3 * window}, or a smaller b2"
        )


def warn_of_zeros(state: OptimizerState, tensors: Iterable[int], until: str) -> None:
    """Warn of those among some tensors that do not move, because all their gradients were 0 in the exact steps.

    Parameters
    ----------
    state : OptimizerState
        The state after the last of these steps.
    tensors : iterable of int
        The tensors whose variance has been measured.
    until : str
        How long they do not move, as the warning says it.
    """
    sums = totals(state.variance)
    still = [i for i in tensors if not sums[i] and 0 not in state.variance[i].shape]
    if still:
        warn_caller(
            f"all gradients of {some(state.names[i] for i in still)} were 0 in the first {state.step} steps, so their "
            f"variance is 0, and they do not move {until}. If they begin to learn later, make another optimizer for "
            "them then, with another seed"
        )
