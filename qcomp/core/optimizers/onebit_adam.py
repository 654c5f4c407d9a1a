"""`OneBitAdam`, the base of 1-bit LAMB and QAdam: Adam with a frozen variance and a compressed momentum.

- Stage "warmup": `Adam` on the exact mean gradient, until the freeze rule freezes the variance.
- Stage "compressed": every rank adds its own gradient to the common momentum of the last step, and the compressed mean
  of the results is the new common momentum. Residuals start at zero. Coupled weight decay is added to the new momentum
  exactly, with a gradient's weight 1 - b1. Steps that measure the variance again average gradients exactly. So do all
  steps for late tensors (see `qcomp.core.variance.late`), in the same messages.
- Stage "rewarm": Adam again, which continues from the frozen variance, and does not bias-correct it a second time.

The momentum of exact tensors is averaged exactly; their variance is also frozen. Elements whose frozen variance is
zero, because they never had a gradient, keep a momentum of zero and do not move. Elements that no longer have a
gradient move by the rest of their momentum and then by the corrections of feedback, so their total displacement stays
bounded.

See `qcomp.core.variance.policy` for what happens to the variance.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from qcomp.core import primitives
from qcomp.core.checkpoint.schema import Number
from qcomp.core.compressor import Compressor
from qcomp.core.compressors.sign import ScaledSign
from qcomp.core.kernels import Blend
from qcomp.core.mean.averaging import Averaging
from qcomp.core.numeric.arrays import Array, array_namespace, flat, to_compute_dtype
from qcomp.core.optimizers.adam import Adam, rate_rises
from qcomp.core.optimizers.base import Optimizer
from qcomp.core.optimizers.compression import Average, Means
from qcomp.core.optimizers.groups import setting_of_each
from qcomp.core.optimizers.own_counts import own_counts
from qcomp.core.optimizers.tensors import as_tensors
from qcomp.core.policies.by_name import CompressorPolicy
from qcomp.core.policies.exact_below import ExactBelow, ExactPolicy
from qcomp.core.state import OptimizerState
from qcomp.core.variance.arithmetic import bias_corrections, step_on_codes
from qcomp.core.variance.late import EXACT_STEPS, late_tensors, steps_of_parts
from qcomp.core.variance.policy import VariancePolicy
from qcomp.core.variance.rules import FreezeRule, VarianceStable, freeze_rule
from qcomp.core.variance.schedules import Schedule
from qcomp.core.variance.watch import VarianceWatch


@dataclass(frozen=True, kw_only=True)
class OneBitAdam(Optimizer):
    """1-bit Adam: exact Adam until the variance is stable, then a momentum with one bit per element.

    Parameters
    ----------
    learning_rate : float or callable
        Step size: a finite number >= 0, or a schedule that returns it from the number of completed steps. Required.
    weight_decay : float, default 0
        Weight decay coefficient, >= 0.
    clip_norm : float, optional
        Largest global gradient norm sqrt(mean_i |g_i|^2) over the ranks i, above 0. If the norm is larger, every rank
        multiplies its gradients by the same factor. Costs an exchange of 8 bytes per step. None, the default, never
        clips.
    seed : int, default 0
        Seed of the random draws of compressors and of stochastic rounding, 0 to 2**64 - 1. Draws also depend on the
        names and shapes of the parameters. If two optimizers in one job have parameters with equal names and shapes,
        give them different seeds.
    nonfinite : {"raise", "skip"}, default "raise"
        What to do if a gradient on any rank is infinite or NaN. ``"raise"``: all ranks raise `NonFiniteError`.
        ``"skip"``: all ranks skip the step and count it in ``state.skipped``. Neither changes parameters or moments.
    groups : sequence of Group, default ()
        Learning-rate factors and weight decays for parameters selected by name, see `Group`.
    rounding : {"nearest", "stochastic"}, default "nearest"
        How new bfloat16 parameters are rounded: ``"nearest"`` loses steps below half of a parameter's last bit;
        ``"stochastic"`` keeps them on average, see `Optimizer`.
    betas : tuple of two floats, default (0.9, 0.999)
        Decay rates b1 of the momentum and b2 of the variance, each from 0 to below 1.
    eps : float, default 1e-8
        Added to the square root of the variance, >= 0.
    decoupled_weight_decay : bool, default True
        True: each step subtracts rate * weight_decay * x from the parameters x, like ``torch.optim.AdamW``. False:
        weight_decay * x is added to the mean gradient after clipping, like ``torch.optim.Adam``.
    compressor : Compressor, default ScaledSign(scale="rms")
        Compresses the exchanges of the compressed stage, on workers and servers.
    averaging : Averaging, default Averaging()
        Topology and error feedback of the exchange, see `Averaging`.
    exact : callable or None, default ExactBelow(10_000)
        Policy that gets all tensors and selects the tensors that stay exact, see `ExactBelow`. None compresses
        everything.
    compressors : callable, optional
        Policy that replaces ``compressor``: it returns a compressor for each tensor, or None for a tensor that stays
        exact, see `ByName`. Tensors that ``exact`` selects stay exact in any case. None, the default, uses
        ``compressor`` for all.
    freeze : int or FreezeRule, default VarianceStable()
        When to freeze the variance: the number of exact steps, or a rule such as `VarianceStable`.
    variance_floor : float, default 0.03
        Smallest frozen variance of an element of a compressed tensor, as a fraction of the tensor's mean, from 0 to 1;
        elements that never had a gradient keep a variance of zero, and do not move. With 0, steps divide by the
        unchanged variance, as published, and units that are almost never active, such as dead ReLUs, can ruin a
        training run.
    variance_steps : callable, optional
        A function, such as ``DoublingIntervals(4)``, that returns whether a step, counted from 1 after the freeze,
        averages the gradient exactly and measures the variance again. None, the default, leaves the variance frozen, as
        published.
    watch : VarianceWatch or None, default VarianceWatch()
        Checks in the compressed stage whether the frozen variance still fits the gradients, and warns if not. None
        disables the check.

    Notes
    -----
    In the compressed stage with N ranks, worker i: p_i = b1 m + (1 - b1) g_i + e_i, sends C(p_i), e_i' = p_i - C(p_i);
    server: q = mean_i C(p_i) + e_s, sends m' = C(q), e_s' = q - m'; all: x' = x - rate m' / (sqrt(v) + eps). With E =
    mean_i e_i + e_s, in every step m' + E' = b1 m + (1 - b1) mean_i g_i + E. Sends 2 (N - 1) / N times 1 bit per
    parameter and 32 bits per bucket. Source: Tang et al., ICML 2021, algorithm 1, with bias correction; the correction
    of the variance is frozen.

    Examples
    --------
    >>> import numpy as np, qcomp
    >>> opt = qcomp.OneBitAdam(learning_rate=0.1, betas=(0.9, 0.9), freeze=20, exact=None)
    >>> def rank_main(comm):
    ...     params = np.zeros(100, dtype=np.float32)
    ...     state = opt.init(params, comm)
    ...     for _ in range(60):
    ...         params, state = opt.step(params, params - 1 - comm.rank, state, comm)
    ...     return state.stage, float(abs(params - 1.5).max()) < 0.2
    >>> qcomp.comm.run_local(2, rank_main)
    [('compressed', True), ('compressed', True)]
    """

    of_groups = ("betas", "eps")

    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    decoupled_weight_decay: bool = True
    compressor: Compressor = ScaledSign(scale="rms")
    averaging: Averaging = Averaging()
    exact: ExactPolicy | None = ExactBelow(10_000)
    compressors: CompressorPolicy | None = None
    freeze: int | FreezeRule = VarianceStable()
    variance_floor: float = 0.03
    variance_steps: Schedule | None = None
    watch: VarianceWatch | None = VarianceWatch()

    def __post_init__(self) -> None:
        super().__post_init__()
        self.adam  # noqa: B018 - raises if the settings do not fit
        object.__setattr__(self, "freeze", freeze_rule(self.freeze))
        self._policy  # noqa: B018 - raises if the settings of the variance do not fit

    @cached_property
    def adam(self) -> Adam:
        """Makes the exact steps."""
        return Adam.within(self)

    @cached_property
    def _policy(self) -> VariancePolicy:
        return VariancePolicy(freeze_rule(self.freeze), self.variance_floor, self.variance_steps, self.watch)

    def initial_state(
        self, params: Sequence[Array], names: tuple[str, ...], rank: int, size: int
    ) -> OptimizerState:
        """Return moments of zero, in the warm-up."""
        state = self.adam.initial_state(params, names, rank, size)
        self._policy.warn_if_early(self.adam.betas_of(state), type(self).__name__)
        return self.compression.choose(state, params, type(self).__name__)

    def enter(self, state: OptimizerState, stage: str) -> OptimizerState:
        """Return the state with which a stage begins; after the warm-up, residuals are zero."""
        if stage not in self._policy.stages:
            return super().enter(state, stage)
        residuals = self.compression.zero_residuals(state.momentum, state)
        return self._policy.begun(state._replace(stage=stage, exchange=residuals))

    def limits(self, state: OptimizerState) -> Mapping[str, Number]:
        """Return the limits of the state's numbers that belong to the variance."""
        return self._policy.limits(state)

    def adopt(self, saved: Mapping[str, Any], fresh: OptimizerState) -> Mapping[str, Any]:
        """Return a saved state with entries that fit this ``watch`` and ``variance_steps``."""
        if saved["stage"] not in self._policy.stages:
            return saved
        return self._policy.adopt(saved, self.enter(fresh._replace(step=saved["step"]), saved["stage"]))

    def prepare(self, grads: Any, state: OptimizerState, *, scale: float = 1.0) -> Average:
        """Ask for the exact mean gradient, or for the compressed mean of the momentum."""
        # A re-warm averages like the warm-up, in the topology of the warm-up.
        if state.stage != "compressed" or (self.variance_steps is not None and self._policy.measures(state)):
            return self.adam.prepare(grads, state._replace(stage="warmup"), scale=scale)
        gradients = as_tensors(grads, "grads")
        values, momenta = list(gradients), list(state.momentum)
        beside: list[list[Array]] = []
        if EXACT_STEPS in state.numbers:  # the model has late tensors, though perhaps none among these
            late = late_tensors(state)
            values, momenta = (_with_zeros(xs, late) for xs in (values, momenta))
            own = [g if i in late else flat(g)[:0] for i, g in enumerate(gradients)]
            beside.append([to_compute_dtype(g) * scale for g in own])
        if self.watch is not None and self.watch.due(state, self.adam.slowest(state)):
            beside.append([scale * sample for sample in self.watch.take(gradients, state)])
        betas = setting_of_each(tuple(self.groups), state.names, "betas", self.betas)
        blends = [Blend(m, beta1, scale) for m, (beta1, _) in zip(momenta, betas, strict=True)]
        average = self._average(values, state, blends)
        for exact in beside:
            average = self.compression.beside(average, exact, state)
        return average

    def apply(self, params: Any, means: Means, state: OptimizerState) -> tuple[list[Array], OptimizerState]:
        """Make a step of Adam, or a step with the frozen variance."""
        if state.stage == "warmup":
            # A schedule may raise, so it is asked before anything is overwritten.
            self.rate(state._replace(step=state.step + 1))
        if state.stage != "compressed":
            return self._exact_step(params, means, state)
        tensors = as_tensors(params, "params")
        measures = self.variance_steps is not None and self._policy.measures(state)
        count, step = len(tensors), self._measuring_step if measures else self._frozen_step
        watch, decays = self.watch, list[Array]()
        if (
            watch is not None
            and not self.decoupled_weight_decay
            and watch.due(state, self.adam.slowest(state))
        ):
            # A step may overwrite the parameters.
            decays = watch.take(tensors, state, self.weight_decays(state))
        values, beside = means.values[:count], means.values[count:]
        if EXACT_STEPS in state.numbers:
            late = late_tensors(state)
            exact, beside = (values, ()) if measures else (beside[:count], beside[count:])
            rest = [i for i in range(count) if i not in late]
            parts = [(rest, step, values), (late, self._exact_step, exact)]
            new_params, new_state = steps_of_parts(parts, tensors, means, state)
        else:
            new_params, new_state = step(tensors, means._replace(values=values), state)
        new_state = new_state._replace(exchange=means.exchange)
        if watch is None:
            return new_params, new_state
        beta2, samples = self.adam.slowest(state), list(beside)
        if measures:
            new_state = watch.measured(new_state)
            if watch.due(state, beta2):
                samples = watch.take(values, state)
        if samples and decays:
            samples = [g + decay for g, decay in zip(samples, decays, strict=True)]
        eps = setting_of_each(tuple(self.groups), state.names, "eps", self.eps)
        new_state, news = watch.observe(new_state, samples, beta2, eps)
        if news:
            new_state = self._policy.reported(new_state, news, beta2, type(self).__name__)
        return new_params, new_state

    def advance(self, state: OptimizerState, before: OptimizerState) -> OptimizerState:
        """Return the state after the freeze rule has seen this step, or after a step of a re-warm."""
        if before.stage == "compressed" and EXACT_STEPS not in state.numbers:
            return state
        policy, betas, counts = self._policy, self.adam.betas_of(state), own_counts(state, state.step)
        if before.stage == "warmup":
            state = policy.observed(state, betas, counts, rising=rate_rises(self, state))
            return state if state.stage == "warmup" else self.enter(state, "compressed")
        if before.stage == "rewarm":
            state = policy.rewarmed(state)
        return policy.finished(state, betas, counts)

    def _exact_step(
        self, params: Any, means: Means, state: OptimizerState
    ) -> tuple[list[Array], OptimizerState]:
        """Make an exact step of the warm-up, or of a re-warm, in which variances are not bias-corrected again."""
        corrections = bias_corrections(self.adam.betas_of(state), 1, own_counts(state, state.step + 1))
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

    def _measuring_step(
        self, params: Sequence[Array], means: Means, state: OptimizerState
    ) -> tuple[list[Array], OptimizerState]:
        """Make a step with exact mean gradients, and with the variance that is measured from them."""
        gradients, betas = self.adam.decayed(means.values, params, state), self.adam.betas_of(state)
        numbers, state = self.adam.numbers(state), self._policy.measured(state, gradients, betas)
        new_params, momentum = step_on_codes(
            params, gradients, state.momentum, state.variance, numbers, betas=betas, donate=means.donate
        )
        return new_params, state._replace(step=state.step + 1, momentum=momentum)

    def _average(self, values: Sequence[Array], state: OptimizerState, blends: Sequence[Blend]) -> Average:
        """Ask for the mean of the momenta into which gradients are blended."""
        return self.compression.average(values, state, self.key(state), blends)


def _with_zeros(tensors: Sequence[Array], which: Collection[int]) -> list[Array]:
    """Return tensors, with zeros instead of the tensors in ``which``."""
    return [array_namespace(x).zeros_like(x) if i in which else x for i, x in enumerate(tensors)]
