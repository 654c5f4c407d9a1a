"""Adam that freezes its variance and then exchanges a compressed momentum, as a state machine."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from qcomp.core import primitives
from qcomp.core.checkpoint.format import NUMBER
from qcomp.core.checkpoint.schema import Number
from qcomp.core.compressor import Compressor
from qcomp.core.kernels import Blend
from qcomp.core.mean.averaging import Averaging
from qcomp.core.numeric.arrays import Array, array_namespace, flat, to_compute_dtype
from qcomp.core.optimizers.adam import Adam, bias_corrections, corrected_sum, divided, rate_rises
from qcomp.core.optimizers.base import Optimizer
from qcomp.core.optimizers.compression import Average, Means
from qcomp.core.optimizers.floor import floored, require_floor
from qcomp.core.optimizers.freeze import (
    FreezeRule,
    ask,
    freeze_rule,
    warn_if_early,
    warn_of_zeros,
)
from qcomp.core.optimizers.groups import setting_of_each
from qcomp.core.optimizers.own_counts import (
    EXACT_STEPS,
    late_tensors,
    own_counts,
    steps_of_parts,
    with_late,
    without_late,
)
from qcomp.core.optimizers.remeasure import kept_after, measured, step_on_codes
from qcomp.core.optimizers.schedules import Schedule, require_schedule
from qcomp.core.optimizers.tensors import as_tensors
from qcomp.core.optimizers.watch import VarianceWatch, watch_entries, watch_limits, without_watch
from qcomp.core.policies.by_name import CompressorPolicy
from qcomp.core.policies.exact_below import ExactBelow, ExactPolicy
from qcomp.core.reporting import warn_caller
from qcomp.core.state import OptimizerState

__all__ = ["FrozenVarianceAdam"]

_LEFT = "rewarm_steps_left"
_SINCE, _MEASURED = "variance_steps_since", "variance_measured"
"""The step from which ``variance_steps`` counts, and the step of the last measurement of the variance."""


@dataclass(frozen=True, kw_only=True)
class FrozenVarianceAdam(Optimizer):
    """Base of 1-bit Adam and QAdam.

    - Stage "warmup": `Adam` on the exact mean gradient. After each step the freeze rule decides; once it freezes, the
      bias-corrected variance stays constant and the residuals start at zero.
    - Stage "compressed": every rank adds its own gradient to the common momentum of the last step, and the compressed
      mean of the results is the new common momentum. Coupled weight decay is added to it exactly, with the weight 1 -
      b1 that it has as a part of the gradient.
    - Stage "rewarm", only with ``rewarm_steps`` of a `VarianceWatch`: some Adam steps on the exact mean gradient, after
      which the variance is frozen again, without another bias correction.

    The variance of exact tensors is frozen too; only their momentum is averaged exactly. That of compressed tensors
    has a floor, see `variance_floor`. Elements whose frozen variance is zero, because they never had a gradient, keep a
    momentum of zero and do not move. Elements that no longer have a gradient receive the rest of their momentum and
    then the corrections of feedback, so their total displacement stays bounded.

    A step in ``variance_steps`` averages the gradient exactly and measures the variance again: v' = b2^k v + (1 - b2^k)
    g^2, with k steps since the last measurement, so that v averages over 1 / (1 - b2) steps as before. It leaves the
    residuals as they are.

    Each tensor counts its own steps, without those in which no rank had a gradient of it (see `stages_of_used`). One
    that had fewer than 1 / (1 - b2) steps at the freeze, and fewer than others, makes exact steps of its own instead:
    where a rank has its gradient, that is averaged exactly, in the same messages, until the tensor has made as many
    exact steps as the others had. Then its variance is frozen too.

    Parameters
    ----------
    betas, eps, decoupled_weight_decay
        See `Adam`.
    compressor, averaging, exact, compressors
        See `OneBitAdam`.
    freeze : int or rule
        When to freeze the variance: the number of exact steps, or a rule such as `VarianceStable`.
    variance_floor : float
        Smallest frozen variance of an element, as a fraction of the mean of its tensor.
    variance_steps : callable, optional
        Returns whether a step, counted from 1 after the freeze, measures the variance again.
    watch : VarianceWatch or None
        Checks in the compressed stage whether the frozen variance still fits the gradients, and warns if not.
    """

    of_groups = ("betas", "eps")

    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    decoupled_weight_decay: bool = True
    compressor: Compressor
    averaging: Averaging = Averaging()
    exact: ExactPolicy | None = ExactBelow(10_000)
    compressors: CompressorPolicy | None = None
    freeze: int | FreezeRule
    variance_floor: float = 1e-3
    variance_steps: Schedule | None = None
    watch: VarianceWatch | None = VarianceWatch()

    def __post_init__(self) -> None:
        super().__post_init__()
        self.adam  # noqa: B018 - raises if its settings do not fit
        object.__setattr__(self, "freeze", freeze_rule(self.freeze))
        require_floor(self.variance_floor)
        if self.variance_steps is not None:
            require_schedule("variance_steps", self.variance_steps, "measures the variance again")
        if self.watch is not None and not isinstance(self.watch, VarianceWatch):
            raise TypeError(f"watch is {self.watch!r}; expected a qcomp.VarianceWatch, or None")

    @cached_property
    def adam(self) -> Adam:
        """Makes the exact steps."""
        return Adam.within(self)

    def initial_state(
        self, params: Sequence[Array], names: tuple[str, ...], rank: int, size: int
    ) -> OptimizerState:
        """Return moments of zero, in the warm-up."""
        state = self.adam.initial_state(params, names, rank, size)
        warn_if_early(freeze_rule(self.freeze), self.adam.slowest(state), type(self).__name__)
        return self.compression.choose(state, params, type(self).__name__)

    def enter(self, state: OptimizerState, stage: str) -> OptimizerState:
        """Return the state of the warm-up, or that of another stage, which begins with residuals of zero."""
        if stage not in ("compressed", "rewarm" if self.watch else "compressed"):
            return super().enter(state, stage)
        residuals = self.compression.zero_residuals(state.momentum, state)
        state = self._as_measured(state._replace(stage=stage, exchange=residuals))
        if self.watch is None:
            return state
        return self._rewarming(self.watch.begin(state), 0)

    def limits(self, state: OptimizerState) -> Mapping[str, Number]:
        """Return the limits of the numbers of the watch, of a re-warm, and of ``variance_steps``."""
        left = Number(least=1 if state.stage == "rewarm" else 0, whole=True)
        until_now = Number(least=0, most=state.step, whole=True)
        own = {_LEFT: left, _SINCE: until_now, _MEASURED: until_now}
        return own | watch_limits(state.numbers)

    def adopt(self, saved: Mapping[str, Any], fresh: OptimizerState) -> Mapping[str, Any]:
        """Return a saved state with the entries of this watch: the saved ones if they fit, else those of a new watch.

        A state may have been saved without a watch, or by one with another sample.
        It may also have been saved without ``variance_steps``, which then begin at its step.
        """
        stage = saved["stage"]
        saved = self._with_measurement(saved, stage)
        rest = without_watch(saved)
        if self.watch is None and stage == "compressed":
            return {key: value for key, value in rest.items() if key != NUMBER + _LEFT}
        if self.watch is None or stage not in ("compressed", "rewarm"):
            return saved
        wanted = watch_entries(self.enter(fresh, stage))
        if saved.keys() - rest.keys() == wanted.keys() and all(
            tuple(getattr(saved[key], "shape", ())) == tuple(getattr(value, "shape", ()))
            for key, value in wanted.items()
            if not key.startswith(NUMBER)
        ):
            return saved
        return {NUMBER + _LEFT: 0.0, **rest, **wanted}

    def prepare(self, grads: Any, state: OptimizerState, *, scale: float = 1.0) -> Average:
        """Ask for the exact mean gradient, or for the compressed mean of the momentum."""
        # A re-warm averages like the warm-up, in the topology of the warm-up.
        if state.stage != "compressed" or self._measures(state):
            return self.adam.prepare(grads, state._replace(stage="warmup"), scale=scale)
        gradients = as_tensors(grads, "grads")
        values, momenta = list(gradients), list(state.momentum)
        beside: list[list[Array]] = []
        if EXACT_STEPS in state.numbers:  # in the whole model, of which this may be a part
            late = late_tensors(state)
            values, momenta = (_with_zeros(xs, late) for xs in (values, momenta))
            beside.append(
                [to_compute_dtype(g if i in late else flat(g)[:0]) * scale for i, g in enumerate(gradients)]
            )
        if self.watch is not None and self.watch.due(state, self.adam.slowest(state)):
            beside.append([scale * sample for sample in self.watch.take(gradients, state)])
        betas = setting_of_each(tuple(self.groups), state.names, "betas", self.betas)
        blends = [Blend(m, beta1, scale) for m, (beta1, _) in zip(momenta, betas, strict=True)]
        average, count = self._average(values, state, blends), len(gradients)
        for number, exact in enumerate(beside, start=1):
            part = self.compression.exact_part(range(number * count, (number + 1) * count), exact, state)
            average = average._replace(parts=(*average.parts, part))
        return average

    def apply(self, params: Any, means: Means, state: OptimizerState) -> tuple[list[Array], OptimizerState]:
        """Make a step of Adam, or a step with the frozen variance."""
        if state.stage == "warmup":
            # A schedule may raise, so it is asked before anything is overwritten.
            self.rate(state._replace(step=state.step + 1))
        if state.stage != "compressed":
            return self._exact_step(params, means, state)
        tensors, measures = as_tensors(params, "params"), self._measures(state)
        count = len(tensors)
        values, samples = means.values[:count], means.values[count:]
        step = self._measuring_step if measures else self._frozen_step
        if EXACT_STEPS in state.numbers:
            late = late_tensors(state)
            exact = values
            if not measures:
                exact, samples = samples[:count], samples[count:]
            rest = [i for i in range(count) if i not in late]
            new_params, new_state = steps_of_parts(
                [(rest, step, values), (late, self._exact_step, exact)], tensors, means, state
            )
        else:
            new_params, new_state = step(tensors, means._replace(values=values), state)
        new_state = new_state._replace(exchange=means.exchange)
        if self.watch is None:
            return new_params, new_state
        if measures:
            new_state = self.watch.measured(new_state)
            if self.watch.due(state, self.adam.slowest(state)):
                samples = tuple(self.watch.take(values, state))
        return new_params, self._watched(new_state, samples, tensors)

    def advance(self, state: OptimizerState, before: OptimizerState) -> OptimizerState:
        """Return the state after the freeze rule has seen this step, or after a step of a re-warm."""
        if before.stage == "warmup":
            return self._observed(state, rising=rate_rises(self, state))
        if before.stage == "rewarm":
            state = self._rewarmed(state)
        if EXACT_STEPS not in state.numbers:
            return state
        late, counts = late_tensors(state), own_counts(state, state.step)
        done = [i for i in late if counts[i] >= state.numbers[EXACT_STEPS]]
        if not done:
            return state
        state = without_late(done, self._with_frozen(done, state))
        return state if self.watch is None else self.watch.measured(state)

    def _exact_step(
        self, params: Any, means: Means, state: OptimizerState
    ) -> tuple[list[Array], OptimizerState]:
        """Make an exact step, of the warm-up or of a re-warm, whose variance is corrected already."""
        corrections = self._corrections(state, state.step + 1)
        if state.stage == "rewarm":
            late = late_tensors(state)
            corrections = [x if i in late else 1.0 for i, x in enumerate(corrections)]
        return self.adam.exact_step(params, means, state, corrections=corrections)

    def _frozen_step(
        self, params: Sequence[Array], means: Means, state: OptimizerState
    ) -> tuple[list[Array], OptimizerState]:
        """Make a step with the mean momentum and the frozen variance."""
        momentum = self.adam.decayed(means.values, params, state, of_momenta=True)
        moved = primitives.frozen_steps(
            params, momentum, state.variance, self.adam.numbers(state), donate=means.donate
        )
        new_params, momenta = zip(*moved, strict=True)
        return list(new_params), state._replace(step=state.step + 1, momentum=momenta)

    def _measures(self, state: OptimizerState) -> bool:
        """Return whether the next step of the compressed stage measures the variance again."""
        schedule = self.variance_steps
        if schedule is None:
            return False
        if _SINCE not in state.numbers:
            raise ValueError(
                f"variance_steps is {schedule!r}, but the state was made without them; expected a state of this "
                "optimizer: make one with load_state_dict(old.state_dict(state), params, comm), where old is the "
                "optimizer that made the state"
            )
        return schedule(state.step + 1 - int(state.numbers[_SINCE]))

    def _as_measured(self, state: OptimizerState, *, since: float | None = None) -> OptimizerState:
        """Return the state after a measurement; steps are counted from this one unless ``since`` names another."""
        if self.variance_steps is None:
            return state
        step = float(state.step)
        numbers = {**state.numbers, _SINCE: step if since is None else since, _MEASURED: step}
        return state._replace(numbers=numbers)

    def _with_measurement(self, saved: Mapping[str, Any], stage: str) -> Mapping[str, Any]:
        """Return a saved state that says when the variance was measured, if and only if this optimizer measures it."""
        keys = [NUMBER + name for name in (_SINCE, _MEASURED)]
        if self.variance_steps is None:
            return {key: value for key, value in saved.items() if key not in keys}
        if stage == "warmup":
            return saved
        return dict.fromkeys(keys, float(saved["step"])) | dict(saved)

    def _measuring_step(
        self, params: Sequence[Array], means: Means, state: OptimizerState
    ) -> tuple[list[Array], OptimizerState]:
        """Make a step with exact mean gradients, and with the variance that they give."""
        betas, steps = self.adam.betas_of(state), state.step + 1 - int(state.numbers[_MEASURED])
        gradients = self.adam.decayed(means.values, params, state)
        kept = [kept_after(beta2, steps) for _, beta2 in betas]
        variance = measured(state.variance, gradients, state.exact, kept=kept, floor=self.variance_floor)
        numbers = self.adam.numbers(state)
        new_params, momentum = step_on_codes(
            params, gradients, state.momentum, variance, numbers, betas=betas, donate=means.donate
        )
        return new_params, self._as_measured(
            state._replace(step=state.step + 1, momentum=momentum, variance=variance),
            since=state.numbers[_SINCE],
        )

    def _average(self, values: Sequence[Array], state: OptimizerState, blends: Sequence[Blend]) -> Average:
        """Ask for the mean of the momenta that gradients are blended into."""
        return self.compression.average(values, state, self.key(state), blends)

    def _observed(self, state: OptimizerState, *, rising: bool) -> OptimizerState:
        """Return the state after the freeze rule has seen this step of the warm-up."""
        beta2 = self.adam.slowest(state)

        def norm() -> float:
            return corrected_sum(state.variance, self._corrections(state, state.step))

        verdict = ask(freeze_rule(self.freeze), state.step, norm, state.history, beta2, rising=rising)
        if not verdict.frozen:
            return state._replace(history=verdict.history)
        counts, betas = own_counts(state, state.step), self.adam.betas_of(state)
        enough = [min(state.step, round(1 / (1 - beta2))) for _, beta2 in betas]
        late = [i for i, count in enumerate(counts) if count < enough[i]]
        measured_ones = [i for i in range(len(counts)) if i not in late]
        state = self._with_frozen(measured_ones, state)
        warn_of_zeros(state, measured_ones, "from now on, since it is frozen")
        return self.enter(with_late(late, state._replace(history=()), float(state.step)), "compressed")

    def _with_frozen(self, tensors: Sequence[int], state: OptimizerState) -> OptimizerState:
        """Return the state with the variance of some tensors as it is when they are frozen."""
        corrections, variance = self._corrections(state, state.step), list(state.variance)
        frozen = floored(
            divided([variance[i] for i in tensors], [corrections[i] for i in tensors]),
            [state.exact[i] for i in tensors],
            self.variance_floor,
        )
        for i, v in zip(tensors, frozen, strict=True):
            variance[i] = v
        return state._replace(variance=tuple(variance))

    def _corrections(self, state: OptimizerState, count: int) -> list[float]:
        """Return the bias correction of each tensor's variance, when there have been so many steps in all."""
        return bias_corrections(self.adam.betas_of(state), 1, own_counts(state, count))

    def _watched(
        self, state: OptimizerState, beside: Sequence[Array], params: Sequence[Array]
    ) -> OptimizerState:
        """Return the state after the watch has seen the step and, if any, the samples of the mean gradients."""
        if self.watch is None:
            return state
        gradients = list(beside)
        if beside and not self.decoupled_weight_decay:
            decays = self.watch.take(params, state, self.weight_decays(state))
            gradients = [g + decay for g, decay in zip(gradients, decays, strict=True)]
        state, news = self.watch.observe(
            state,
            gradients,
            self.adam.slowest(state),
            setting_of_each(tuple(self.groups), state.names, "eps", self.eps),
        )
        if not news:
            return state
        again = self.watch.rewarm_steps
        warn_caller(
            f"the variance of {type(self).__name__} no longer fits the gradients: at step {state.step}, "
            f"{'; '.join(news)}. "
            + (f"Now makes {again} exact steps and freezes it again" if again else self._cure(state))
        )
        return self._rewarming(state, again)._replace(stage="rewarm") if again else state

    def _cure(self, state: OptimizerState) -> str:
        steps = 3 * round(1 / (1 - self.adam.slowest(state)))
        return (
            f"Training may diverge, or learn no more: pass watch=VarianceWatch(rewarm_steps={steps}), which "
            f"then measures the variance again, or freeze later, or raise variance_floor above {self.variance_floor:g}"
        )

    def _rewarmed(self, state: OptimizerState) -> OptimizerState:
        """Return the state after an exact step of a re-warm: compressed again after the last of them."""
        left = int(state.numbers[_LEFT]) - 1
        # In every step, since momenta hold codes until exact gradients have replaced them.
        late = late_tensors(state)  # whose variance is not frozen yet
        has_none = [is_exact or i in late for i, is_exact in enumerate(state.exact)]
        variance = floored(state.variance, has_none, self.variance_floor)
        state = self._rewarming(state._replace(variance=variance), left)
        if left:
            return state
        assert self.watch is not None
        return self._as_measured(self.watch.begin(state)._replace(stage="compressed"))

    @staticmethod
    def _rewarming(state: OptimizerState, left: int) -> OptimizerState:
        return state._replace(numbers={**state.numbers, _LEFT: float(left)})


def _with_zeros(tensors: Sequence[Array], which: Collection[int]) -> list[Array]:
    """Return tensors, some of which are replaced by zeros."""
    return [array_namespace(x).zeros_like(x) if i in which else x for i, x in enumerate(tensors)]
