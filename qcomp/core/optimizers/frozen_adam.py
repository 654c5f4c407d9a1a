"""Adam that freezes its variance and then exchanges a compressed momentum, as a state machine."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from qcomp.core import primitives
from qcomp.core.checkpoint.format import NUMBER
from qcomp.core.checkpoint.schema import Number
from qcomp.core.compressor import Compressor
from qcomp.core.kernels import Blend
from qcomp.core.mean.averaging import Averaging
from qcomp.core.numeric.arrays import Array
from qcomp.core.numeric.sums import totals
from qcomp.core.optimizers.adam import Adam, corrected, rate_rises
from qcomp.core.optimizers.base import Optimizer
from qcomp.core.optimizers.compression import Average, Means
from qcomp.core.optimizers.floor import floored, require_floor
from qcomp.core.optimizers.freeze import FreezeRule, ask, freeze_rule, warn_if_early
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
        warn_if_early(freeze_rule(self.freeze), self.betas[1], type(self).__name__)
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

        A state may have been saved without a watch, by a release whose watch kept other values, or with another sample.
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
        beta1, _ = self.betas
        gradients = as_tensors(grads, "grads")
        average = self._average(gradients, state, [Blend(m, beta1, scale) for m in state.momentum])
        if self.watch is None or not self.watch.due(state, self.betas[1]):
            return average
        count = len(gradients)
        samples = [scale * sample for sample in self.watch.take(gradients, state)]
        beside = self.compression.exact_part(range(count, 2 * count), samples, state)
        return average._replace(parts=(*average.parts, beside))

    def apply(self, params: Any, means: Means, state: OptimizerState) -> tuple[list[Array], OptimizerState]:
        """Make a step of Adam and ask the freeze rule, or a step with the frozen variance."""
        if state.stage == "warmup":
            # A schedule may raise, so it is asked before anything is overwritten.
            rising = rate_rises(self, state._replace(step=state.step + 1))
            new_params, new_state = self.adam.apply(params, means, state)
            return new_params, self._observed(new_state, rising=rising)
        if state.stage == "rewarm":
            new_params, new_state = self.adam.exact_step(params, means, state, correction=1.0)
            return new_params, self._rewarmed(new_state)
        tensors = as_tensors(params, "params")
        if self._measures(state):
            return self._measuring_step(tensors, means, state)
        own, beside = means.values[: len(tensors)], means.values[len(tensors) :]
        momentum = self.adam.decayed(own, tensors, state, factor=1 - self.betas[0])
        moved = primitives.frozen_steps(
            tensors, momentum, state.variance, self.adam.numbers(state), donate=means.donate
        )
        new_state = state._replace(
            step=state.step + 1, momentum=tuple([m for _, m in moved]), exchange=means.exchange
        )
        return [p for p, _ in moved], self._watched(new_state, beside, tensors)

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
        beta1, beta2 = self.betas
        gradients = self.adam.decayed(means.values, params, state)
        kept = kept_after(beta2, state.step + 1 - int(state.numbers[_MEASURED]))
        variance = measured(state.variance, gradients, state.exact, kept=kept, floor=self.variance_floor)
        numbers = self.adam.numbers(state)
        new_params, momentum = step_on_codes(
            params, gradients, state.momentum, variance, numbers, beta1=beta1, donate=means.donate
        )
        new_state = self._as_measured(
            state._replace(step=state.step + 1, momentum=momentum, variance=variance),
            since=state.numbers[_SINCE],
        )
        if self.watch is None:
            return new_params, new_state
        beside = self.watch.take(means.values, state) if self.watch.due(state, beta2) else ()
        return new_params, self._watched(self.watch.measured(new_state), beside, params)

    def _average(self, values: Sequence[Array], state: OptimizerState, blends: Sequence[Blend]) -> Average:
        """Ask for the mean of the momenta that gradients are blended into."""
        return self.compression.average(values, state, self.key(state), blends)

    def _observed(self, state: OptimizerState, *, rising: bool) -> OptimizerState:
        """Return the state after the freeze rule has seen this step of the warm-up."""
        _, beta2 = self.betas

        def norm() -> float:
            # The values are the same on all ranks, and summed in a fixed order, so that all ranks decide alike.
            return sum(totals(state.variance)) / (1 - beta2**state.step)

        verdict = ask(freeze_rule(self.freeze), state.step, norm, state.history, beta2, rising=rising)
        if not verdict.frozen:
            return state._replace(history=verdict.history)
        frozen = floored(corrected(state.variance, beta2, state.step), state.exact, self.variance_floor)
        return self.enter(state._replace(variance=frozen, history=()), "compressed")

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
        state, news = self.watch.observe(state, gradients, self.betas, self.eps)
        if not news:
            return state
        again = self.watch.rewarm_steps
        warn_caller(
            f"the variance of {type(self).__name__} no longer fits the gradients: at step {state.step}, "
            f"{'; '.join(news)}. "
            + (f"Now makes {again} exact steps and freezes it again" if again else self._cure())
        )
        return self._rewarming(state, again)._replace(stage="rewarm") if again else state

    def _cure(self) -> str:
        return (
            f"Training may diverge, or learn no more: pass watch=VarianceWatch(rewarm_steps={3 * self._window}), which "
            "then measures the variance again, or freeze later"
        )

    @property
    def _window(self) -> int:
        return round(1 / (1 - self.betas[1]))

    def _rewarmed(self, state: OptimizerState) -> OptimizerState:
        """Return the state after an exact step of a re-warm: compressed again after the last of them."""
        left = int(state.numbers[_LEFT]) - 1
        # In every step, since momenta hold codes until exact gradients have replaced them.
        variance = floored(state.variance, state.exact, self.variance_floor)
        state = self._rewarming(state._replace(variance=variance), left)
        if left:
            return state
        assert self.watch is not None
        return self._as_measured(self.watch.begin(state)._replace(stage="compressed"))

    @staticmethod
    def _rewarming(state: OptimizerState, left: int) -> OptimizerState:
        return state._replace(numbers={**state.numbers, _LEFT: float(left)})
