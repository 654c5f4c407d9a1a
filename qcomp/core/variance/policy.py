"""`VariancePolicy`: when Adam's variance is frozen, how, and what may change it afterwards.

- The freeze: after each step of the warm-up `VariancePolicy.observed` asks the rule. Once the rule freezes, the
  variance of each tensor is divided by its bias correction and gets its floor.
- Tensors that have made too few steps by the freeze are late: their variance is frozen once they have made enough
  steps, see `finished`.
- In the steps of a schedule, the frozen variance is measured again, see `measures` and `measured`.
- A watch may start a re-warm: exact steps, after which the variance is frozen again, see `reported` and `rewarmed`.

`limits` and `adopt` handle the policy's entries of a saved state.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from qcomp.core.checkpoint.format import NUMBER, some
from qcomp.core.checkpoint.schema import Number
from qcomp.core.numeric.arrays import Array
from qcomp.core.numeric.sums import totals
from qcomp.core.reporting import warn_caller
from qcomp.core.state import OptimizerState
from qcomp.core.variance.arithmetic import (
    bias_corrections,
    corrected_sum,
    floored,
    frozen,
    kept_after,
    measured,
)
from qcomp.core.variance.late import EXACT_STEPS, late_tensors, with_late, without_late
from qcomp.core.variance.rules import FreezeAt, FreezeRule, Observation
from qcomp.core.variance.schedules import Schedule, require_schedule
from qcomp.core.variance.watch import WATCHED, VarianceWatch, is_of_watch, watch_limits

Betas = Sequence[tuple[float, float]]

_PATIENCE = 10
"""How many windows of 1 / (1 - b2) steps pass without a freeze before a warning."""

_LEFT = "rewarm_steps_left"
_SINCE, _MEASURED = "variance_steps_since", "variance_measured"
"""The step from which ``variance_steps`` counts, and the step of the last measurement of the variance."""


@dataclass(frozen=True)
class VariancePolicy:
    """What an optimizer's settings say about its variance.

    In all methods, ``betas`` and ``counts`` hold each tensor's decay rates and the number of updates of its variance.

    ``floor`` is the smallest frozen variance of an element of a compressed tensor, as a fraction of the tensor's mean.
    ``schedule`` says which steps measure a frozen variance again.
    """

    rule: FreezeRule | None
    floor: float
    schedule: Schedule | None = None
    watch: VarianceWatch | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.floor <= 1:
            raise ValueError(
                f"variance_floor is {self.floor!r}; expected a fraction of the mean, from 0 to 1"
            )
        if self.schedule is not None:
            require_schedule("variance_steps", self.schedule, "measures the variance again")
        if self.watch is not None and not isinstance(self.watch, VarianceWatch):
            raise TypeError(f"watch is {self.watch!r}; expected a qcomp.VarianceWatch, or None")

    @property
    def stages(self) -> tuple[str, ...]:
        """The stages after the warm-up."""
        return ("compressed", "rewarm") if self.watch else ("compressed",)

    def warn_if_early(self, betas: Betas, optimizer: str) -> None:
        """Warn of a freeze before a tenth of the steps over which the variance averages.

        By chance, the mean of k squares is below c times its expected value for about c^(k/2) of all elements. So some
        of many elements move 1 / sqrt(c) times too far in every step.
        """
        rule, window = self.rule, round(1 / (1 - _slowest(betas)))
        if isinstance(rule, FreezeAt) and 10 * rule.step < window:
            warn_caller(
                f"the variance is frozen after {rule.step} steps, but averages over 1 / (1 - b2) = {window} steps: "
                f"{optimizer} expects a freeze after at least {-(-window // 10)} steps, better {3 * window}, or a "
                "smaller b2"
            )

    def asked(
        self, state: OptimizerState, betas: Betas, counts: Sequence[int], *, rising: bool
    ) -> Observation:
        """Return the answer of the rule after a step; ``rising`` says whether the next step has a larger learning rate.

        This warns of a freeze while the rate rises, and of a very long wait.
        """
        rule, step, beta2 = self.rule, state.step, _slowest(betas)
        assert rule is not None

        def norm() -> float:
            return corrected_sum(state.variance, bias_corrections(betas, 1, counts))

        verdict = rule.observe(step, norm, () if rising else state.history, beta2)
        if rising:
            verdict = verdict._replace(history=())
        if verdict.frozen and rising:
            warn_caller(
                f"the variance is frozen after {step} steps, while the learning rate still rises, which changes the "
                "gradients. Freeze after the rise"
            )
        patience = getattr(rule, "after", 0) + _PATIENCE * round(1 / (1 - beta2))
        if step == patience and not verdict.frozen and not isinstance(rule, FreezeAt):
            cause = "the learning rate still rises" if rising else "the variance is not stable yet"
            warn_caller(
                f"nothing is compressed yet after {step} steps: {rule} waits, because {cause}. To freeze anyway, "
                "pass freeze as a number of steps, or a rule with a lower threshold, and see the warnings of "
                "VarianceWatch"
            )
        return verdict

    def observed(
        self, state: OptimizerState, betas: Betas, counts: Sequence[int], *, rising: bool
    ) -> OptimizerState:
        """Return the state after a step of the warm-up, in the stage "compressed" if the rule freezes the variance."""
        verdict = self.asked(state, betas, counts, rising=rising)
        if not verdict.frozen:
            return state._replace(history=verdict.history)
        windows = [min(state.step, round(1 / (1 - beta2))) for _, beta2 in betas]
        late = [i for i, count in enumerate(counts) if count < windows[i]]
        others = [i for i in range(len(counts)) if i not in late]
        state = self._frozen(others, state, betas, counts)
        warn_of_zeros(state, others, "from now on, since the variance is frozen")
        return with_late(late, state._replace(stage="compressed", history=()), float(state.step))

    def finished(self, state: OptimizerState, betas: Betas, counts: Sequence[int]) -> OptimizerState:
        """Return the state after freezing the variance of those late tensors that have made enough steps."""
        done = [i for i in late_tensors(state) if counts[i] >= state.numbers[EXACT_STEPS]]
        if not done:
            return state
        state = without_late(done, self._frozen(done, state, betas, counts))
        return state if self.watch is None else self.watch.measured(state)

    def _frozen(
        self, tensors: Sequence[int], state: OptimizerState, betas: Betas, counts: Sequence[int]
    ) -> OptimizerState:
        """Return the state with the variance of some tensors frozen."""
        corrections, variance = bias_corrections(betas, 1, counts), list(state.variance)
        own, by = [variance[i] for i in tensors], [corrections[i] for i in tensors]
        for i, v in zip(tensors, frozen(own, by, [state.exact[i] for i in tensors], self.floor), strict=True):
            variance[i] = v
        return state._replace(variance=tuple(variance))

    def begun(self, state: OptimizerState) -> OptimizerState:
        """Return the state at the start of a stage after the warm-up, from which measurements and the watch count."""
        if self.schedule is not None:
            numbers = dict.fromkeys((_SINCE, _MEASURED), float(state.step))
            state = state._replace(numbers={**state.numbers, **numbers})
        return state if self.watch is None else self._with_left(0, self.watch.begin(state))

    def measures(self, state: OptimizerState) -> bool:
        """Return whether the next step of the compressed stage measures the variance again."""
        if self.schedule is None:
            return False
        if _SINCE not in state.numbers:
            raise ValueError(
                f"variance_steps is {self.schedule!r}, but the state was made without them; expected a state of this "
                "optimizer: make one with load_state_dict(old.state_dict(state), params, comm), where old is the "
                "optimizer that made the state"
            )
        return self.schedule(state.step + 1 - int(state.numbers[_SINCE]))

    def measured(self, state: OptimizerState, gradients: Sequence[Array], betas: Betas) -> OptimizerState:
        """Return the state with the variance measured again, k steps after the last time: v' = w v + (1 - w) g^2.

        w = b2^k, within the limits of `kept_after`, so v averages over 1 / (1 - b2) steps as before. The gradients are
        the exact means of the next step.
        """
        steps = state.step + 1 - int(state.numbers[_MEASURED])
        kept = [kept_after(beta2, steps) for _, beta2 in betas]
        variance = measured(state.variance, gradients, state.exact, kept=kept, floor=self.floor)
        return state._replace(variance=variance, numbers={**state.numbers, _MEASURED: state.step + 1.0})

    def reported(
        self, state: OptimizerState, news: Sequence[str], beta2: float, optimizer: str
    ) -> OptimizerState:
        """Warn of ``news`` from the watch, and return the state, in a re-warm if the watch has ``rewarm_steps``."""
        steps = self.watch.rewarm_steps if self.watch else 0
        enough = 3 * round(1 / (1 - beta2))
        cure = (
            f"Training may diverge or stop learning: pass watch=VarianceWatch(rewarm_steps={enough}), which measures "
            f"the variance again in such a case, or freeze later, or raise variance_floor above {self.floor:g}"
        )
        warn_caller(
            f"the variance of {optimizer} no longer fits the gradients: at step {state.step}, {'; '.join(news)}. "
            + (
                f"The optimizer now makes {steps} exact steps and freezes the variance again"
                if steps
                else cure
            )
        )
        return self._with_left(steps, state)._replace(stage="rewarm") if steps else state

    def rewarmed(self, state: OptimizerState) -> OptimizerState:
        """Return the state after an exact step of a re-warm; after the last one, in the stage "compressed"."""
        left = int(state.numbers[_LEFT]) - 1
        # Floored in every step, since momenta hold compressed values until exact gradients have replaced these.
        late = late_tensors(state)  # their variance is not frozen yet
        has_none = [is_exact or i in late for i, is_exact in enumerate(state.exact)]
        state = state._replace(variance=floored(state.variance, has_none, self.floor))
        return self._with_left(left, state) if left else self.begun(state._replace(stage="compressed"))

    @staticmethod
    def _with_left(steps: int, state: OptimizerState) -> OptimizerState:
        return state._replace(numbers={**state.numbers, _LEFT: float(steps)})

    def limits(self, state: OptimizerState) -> dict[str, Number]:
        """Return the limits of the numbers of a saved state that belong to this policy."""
        left = Number(least=1 if state.stage == "rewarm" else 0, whole=True)
        until_now = Number(least=0, most=state.step, whole=True)
        return {_LEFT: left, _SINCE: until_now, _MEASURED: until_now} | watch_limits(state.numbers)

    def adopt(self, saved: Mapping[str, Any], begun: OptimizerState) -> Mapping[str, Any]:
        """Return a saved state with exactly this policy's entries: the saved entries if they fit, else new entries.

        A state may have been saved without a watch, or by a watch with a different sample. If it was saved without
        ``variance_steps``, these are counted from its step. ``begun`` is a state at the start of the saved state's
        stage, with the same step.
        """
        watched = zip(begun.names, begun.arrays.get(WATCHED, ()), strict=False)
        wanted: dict[str, Any] = {NUMBER + name: x for name, x in begun.numbers.items()}
        wanted |= {f"{WATCHED}.{name}": w for name, w in watched}
        adopted = dict(saved)
        for belongs in (
            is_of_watch,
            (NUMBER + _LEFT).__eq__,
            (NUMBER + _SINCE, NUMBER + _MEASURED).__contains__,
        ):
            own, new = ({key: x for key, x in of.items() if belongs(key)} for of in (saved, wanted))
            if _shapes(own) != _shapes(new):
                adopted = {key: x for key, x in adopted.items() if key not in own} | new
        return adopted


def _shapes(entries: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    return {key: tuple(getattr(x, "shape", ())) for key, x in entries.items()}


def _slowest(betas: Betas) -> float:
    return max(beta2 for _, beta2 in betas)


def warn_of_zeros(state: OptimizerState, tensors: Iterable[int], until: str) -> None:
    """Warn of tensors that do not move, because all their gradients were 0 so far; ``until`` says how long."""
    sums = totals(state.variance)
    still = [i for i in tensors if not sums[i] and 0 not in state.variance[i].shape]
    if still:
        warn_caller(
            f"all gradients of {some(state.names[i] for i in still)} were 0 in the first {state.step} steps, so "
            f"their variance is 0, and these parameters do not move {until}. If they begin to learn later, make "
            "another optimizer for them, with another seed"
        )
