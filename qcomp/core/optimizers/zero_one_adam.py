"""`ZeroOneAdam`: 0/1 Adam, which sends one bit per element in some steps, and nothing in the others.

In the stage "local", the ranks have different parameters, and ``arrays`` holds:

- "anchor": the parameters of the last synchronisation.
- "pending": the sums of this rank's weighted momenta since the last synchronisation.

``numbers`` holds:

- "updates": the number of updates of the variance.
- "frozen": the step in which the variance was frozen, or 0.
- "synced": the step of the last synchronisation.
- "rates" and "weights": the sums of learning rates and of weights since the last synchronisation.
- In the stage "local", the `Sums` of each tensor, as ``factor.NAME``, ``weight.NAME`` and ``decay.NAME``.
"""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from operator import mul
from typing import Any, NamedTuple

from qcomp.core import primitives
from qcomp.core.checkpoint.schema import Number
from qcomp.core.compressor import Compressor
from qcomp.core.compressors.sign import ScaledSign
from qcomp.core.errors import NonFiniteError
from qcomp.core.kernels import Blend
from qcomp.core.mean.averaging import Averaging
from qcomp.core.mean.stages import Stages, Transport, drive, owned
from qcomp.core.numeric.arrays import LIMIT, Array, array_namespace, require_below, to_compute_dtype
from qcomp.core.numeric.sums import sum_of_squares
from qcomp.core.optimizers.adam import Adam, rate_rises
from qcomp.core.optimizers.base import Optimizer
from qcomp.core.optimizers.compression import Average, Means
from qcomp.core.optimizers.groups import group_of_each, setting_of_each
from qcomp.core.optimizers.local_sums import Sums, named, sums_of, with_step
from qcomp.core.optimizers.own_counts import as_updates, own_counts
from qcomp.core.optimizers.replica import owner_of
from qcomp.core.optimizers.tensors import as_given, as_tensors, copy, each_in_blocks
from qcomp.core.policies.by_name import CompressorPolicy
from qcomp.core.policies.exact_below import ExactBelow, ExactPolicy
from qcomp.core.state import OptimizerState
from qcomp.core.variance.arithmetic import bias_corrections, divided, floored, measured, step_on_codes
from qcomp.core.variance.policy import VariancePolicy, warn_of_zeros
from qcomp.core.variance.rules import FreezeAt, FreezeRule, freeze_rule
from qcomp.core.variance.schedules import DoublingIntervals, LocalSteps, Schedule, require_schedule


class Rounds(NamedTuple):
    """How many steps of a run send each kind of message."""

    exact: int
    """Steps that average the gradient exactly, for the variance."""
    compressed: int
    """Steps that average the sum of the momenta with compression. A step may be both exact and compressed."""
    silent: int
    """Steps that send nothing."""


class _Plan(NamedTuple):
    """The exchanges of a step."""

    exact: bool
    """Whether the step averages the gradients exactly."""
    compressed: bool
    """Whether the step averages the sums of the momenta with compression."""


@dataclass(frozen=True, kw_only=True)
class ZeroOneAdam(Optimizer):
    """0/1 Adam: it updates the variance ever more rarely, and makes local steps between synchronisations.

    Parameters
    ----------
    learning_rate : float or callable
        Step size: a finite number >= 0, or a schedule that returns it from the number of completed steps. Required.
    weight_decay : float, default 0
        Weight decay coefficient, >= 0.
    clip_norm : float, optional
        Largest global gradient norm sqrt(mean_i |g_i|^2) over the ranks i, above 0. If the norm is larger, every rank
        multiplies its gradients by the same factor. Costs an exchange of 8 bytes per step. In a step that sends
        nothing, each rank clips by its own norm, without an exchange. None, the default, never clips.
    seed : int, default 0
        Seed of the random draws of compressors and of stochastic rounding, 0 to 2**64 - 1. Draws also depend on the
        names and shapes of the parameters. If two optimizers in one job have parameters with equal names and shapes,
        give them different seeds.
    nonfinite : {"raise", "skip"}, default "raise"
        What to do if a gradient on any rank is infinite or NaN. ``"raise"``: all ranks raise `NonFiniteError`; after a
        step that sends nothing, they raise it at the next synchronisation. ``"skip"``: all ranks skip a step that
        sends; in a step that sends nothing, a rank with such a gradient repeats its own momentum. Skipped steps are
        counted in ``state.skipped``.
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
        Must be True: each step subtracts rate * weight_decay * x from the parameters x, like ``torch.optim.AdamW``.
    compressor : Compressor, default ScaledSign(scale="rms")
        Compresses the exchanges of the compressed stage, on workers and servers.
    averaging : Averaging, default Averaging()
        Topology and error feedback of the exchange, see `Averaging`.
    exact : callable or None, default ExactBelow(10_000)
        Policy that gets all tensors and selects the tensors that stay exact, see `ExactBelow`. None compresses
        everything. Even exact tensors are averaged only when the ranks synchronise.
    compressors : callable, optional
        Policy that replaces ``compressor``: it returns a compressor for each tensor, or None for a tensor that stays
        exact, see `ByName`. Tensors that ``exact`` selects stay exact in any case. None, the default, uses
        ``compressor`` for all.
    variance_steps : callable, default DoublingIntervals(16)
        Says whether a step, counted from 1, updates the variance with the exact mean gradient: a function of the step,
        which must be true for step 1.
    sync_steps : callable, default LocalSteps()
        Says whether a step synchronises the ranks with compression: a function of the step, which is counted from 1
        after the freeze, or without ``freeze`` from the first step.
    freeze : int or FreezeRule, optional
        The last step that may change the variance, or a rule such as `VarianceStable`; until then every step
        synchronises. None, the default, never stops updating the variance.
    variance_floor : float, default 1e-3
        From the first compressed step on, the variance of an element of a compressed tensor is at least this fraction
        of the tensor's mean, from 0 to 1. Variances of zero stay zero. 0 is the algorithm as published, which destroys
        networks in which some units are hardly ever active.

    Notes
    -----
    Between two synchronisations rank i computes from its own gradient g_i: m_i' = b1 m_i + (1 - b1) g_i, x_i' = x_i - w
    m_i' / (sqrt(v) + eps) and u_i' = u_i + w m_i' with w = rate / (1 - b1^t). A synchronising step does the same and
    then computes s, the compressed mean of u_i with feedback on workers and servers: m = s / sum of w, x = x of the
    last synchronisation - s / (sqrt(v) + eps), u_i = 0. After a synchronisation all ranks hold the same parameters and
    momentum, bit for bit. Between synchronisations these differ, and the ranks send nothing. A step in
    ``variance_steps`` is a step of exact Adam if the ranks are in sync; otherwise it synchronises them, with the new
    variance. After the first compressed step, a step in ``variance_steps`` divides by the variance with its floor,
    since the momentum still contains compressed values. The bias correction of v counts the updates of v. Weight decay
    acts on the local x, and at a synchronisation on the last common x with the sum of the rates. Elements with v = 0 do
    not move, as in `OneBitAdam`. The settings of a group may change in any step. The sums contain each step with the
    settings of that step.

    A compressed step sends 2 (N - 1) / N times 1 bit per parameter and 32 bits per bucket, an exact step 2 (N - 1) / N
    times 32 bits per parameter; `rounds` counts both. Between synchronisations the state holds two more arrays of the
    parameters' size: ``arrays["anchor"]``, the parameters of the last synchronisation, and ``arrays["pending"]``, u_i.

    A rank cannot report a non-finite gradient before the next synchronisation. There all ranks raise an error that
    names the steps since the last synchronisation, whose parameters are in ``arrays["anchor"]``. With
    ``nonfinite="skip"`` a rank in a local step repeats its momentum instead of using such a gradient, and only this
    rank counts the step as skipped. A step that sends is skipped by all ranks. With ``clip_norm`` a rank clips by its
    own norm in a step that sends nothing. A step with a rate of 0 changes nothing while the ranks are in sync. Source:
    Lu et al., ICLR 2023, algorithm 1.

    Examples
    --------
    >>> import numpy as np, qcomp
    >>> opt = qcomp.ZeroOneAdam(
    ...     learning_rate=0.1, freeze=20, sync_steps=qcomp.LocalSteps(double_every=8, longest=4), exact=None
    ... )
    >>> opt.rounds(60)
    Rounds(exact=18, compressed=20, silent=22)
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
    variance_steps: Schedule = DoublingIntervals(16)
    sync_steps: Schedule = LocalSteps(32_678, 16)
    freeze: int | FreezeRule | None = None
    variance_floor: float = 1e-3

    def __post_init__(self) -> None:
        super().__post_init__()
        self.adam  # noqa: B018 - raises if its settings do not fit
        if self.freeze is not None:
            object.__setattr__(self, "freeze", freeze_rule(self.freeze))
        self._policy  # noqa: B018 - raises if its settings do not fit
        require_schedule("variance_steps", self.variance_steps, "measures the variance")
        require_schedule("sync_steps", self.sync_steps, "synchronises the ranks")
        if not self.variance_steps(1):
            raise ValueError(
                f"variance_steps is {self.variance_steps!r}, which excludes step 1; expected a schedule with step 1, "
                "since there is no variance before"
            )
        if not self.decoupled_weight_decay:
            raise ValueError("decoupled_weight_decay is False; expected True: local gradients have no decay")

    @cached_property
    def adam(self) -> Adam:
        """Makes the exact steps."""
        return Adam.within(self)

    @cached_property
    def _policy(self) -> VariancePolicy:
        rule = None if self.freeze is None else freeze_rule(self.freeze)
        return VariancePolicy(rule, self.variance_floor)

    def initial_state(
        self, params: Sequence[Array], names: tuple[str, ...], rank: int, size: int
    ) -> OptimizerState:
        """Return moments of zero, in the warm-up, which ends before the first step that is not exact."""
        numbers = {"updates": 0.0, "frozen": 0.0, "synced": 0.0, "rates": 0.0, "weights": 0.0}
        state = self.adam.initial_state(params, names, rank, size)
        return self.compression.choose(state._replace(numbers=numbers), params, type(self).__name__)

    def enter(self, state: OptimizerState, stage: str) -> OptimizerState:
        """Return the state with which a stage begins: with residuals of zero, unless it is the warm-up."""
        if stage not in ("compressed", "local"):
            if stage == state.stage and not self.variance_steps(state.step + 1):
                raise ValueError(
                    f"stage is {stage!r} after step {state.step}, but variance_steps={self.variance_steps!r} excludes "
                    f"step {state.step + 1}: the state was saved with other variance_steps, or is damaged"
                )
            return super().enter(state, stage)
        residuals = self.compression.zero_residuals(state.momentum, state)
        state = state._replace(stage=stage, exchange=residuals, arrays={})
        return self._with_room(state) if stage == "local" else state

    def after_adam(self, state: OptimizerState) -> OptimizerState:
        """Return the state that continues from some steps of `Adam`, each of which has updated the variance.

        Parameters
        ----------
        state : OptimizerState
            A first state, with the count of these steps, and the moments after the last of them.
        """
        step = float(state.step)
        counted = {"updates": step, "synced": step, **as_updates(state)}
        state = state._replace(numbers={**state.numbers, **counted})
        return self._observed(state) if state.step else state

    def rounds(self, steps: int) -> Rounds:
        """Return how many of the first steps are exact, compressed and silent, if all learning rates are above 0.

        Parameters
        ----------
        steps : int
            Number of steps, from the first.

        Raises
        ------
        ValueError
            If the freeze rule needs the variance.
        """
        rule = self.freeze
        if rule is not None and not isinstance(rule, FreezeAt):
            raise ValueError(f"freeze is {rule!r}; expected a number of steps, or None")
        exact = compressed = silent = frozen = 0
        apart = False
        for step in range(1, steps + 1):
            plan = self._plan_of(step, frozen, apart=apart)
            exact, compressed = exact + plan.exact, compressed + plan.compressed
            apart = not any(plan)
            silent += apart
            if rule is not None and step >= rule.step:
                frozen = rule.step
        return Rounds(exact, compressed, silent)

    def prepare(self, grads: Any, state: OptimizerState, *, scale: float = 1.0) -> Average:
        """Ask for the exact mean gradient, the compressed mean of the summed momenta, both, or nothing."""
        plan = self._plan(state)
        if plan.exact and not plan.compressed:
            return self.adam.prepare(grads, state._replace(stage="warmup"), scale=scale)
        tensors, betas = as_tensors(grads, "grads"), self.adam.betas_of(state)
        blends = [Blend(m, beta1, scale) for m, (beta1, _) in zip(state.momentum, betas, strict=True)]
        if plan.compressed and state.stage != "local":  # so each sum is one weighted momentum
            weights = [weight for _, weight, _ in self._added(state)]
            blends = [b._replace(weight=weight) for b, weight in zip(blends, weights, strict=True)]
            average = self.compression.average(tensors, state, self.key(state), blends)
        else:
            momenta = [primitives.blended(b, g) for b, g in zip(blends, tensors, strict=True)]
            if not plan.compressed:
                return Average((), state.exchange, tuple(momenta))
            average = self.compression.average(self._summed(momenta, state), state, self.key(state))
        if not plan.exact:
            return average
        return self.compression.beside(average, [to_compute_dtype(g) * scale for g in tensors], state)

    def apply(self, params: Any, means: Means, state: OptimizerState) -> tuple[list[Array], OptimizerState]:
        """Make a step of Adam, a synchronisation, or a step of this rank alone."""
        plan, tensors = self._plan(state), as_tensors(params, "params")
        if not any(plan):
            return self._local_step(tensors, means.values, state)
        count, numbers = len(tensors), dict(state.numbers)
        if state.stage == "warmup":
            numbers["updates"] += 1
            counts = own_counts(state, numbers["updates"], "updates")
            corrections = bias_corrections(self.adam.betas_of(state), 1, counts)
            new_params, state = self.adam.exact_step(tensors, means, state, corrections=corrections)
            return new_params, state._replace(numbers=numbers | {"synced": float(state.step)})
        gradients = means.values[count:] if plan.compressed else means.values
        if plan.exact:
            numbers["updates"] += 1
            kept = [beta2 for _, beta2 in self.adam.betas_of(state)]
            variance = measured(state.variance, gradients, state.exact, kept=kept, floor=self.variance_floor)
            variance = self._levelled(variance, state._replace(numbers=numbers))
            state = state._replace(variance=variance, numbers=numbers)
        step = state.step + 1
        if plan.compressed:
            sums = means._replace(values=means.values[:count])
            after = state._replace(step=step, numbers=self._numbers_after(state))
            return self._synchronised(tensors, sums, after)
        divisor, settings, betas = self._divisor(state), self.adam.numbers(state), self.adam.betas_of(state)
        new_params, momentum = step_on_codes(
            tensors, gradients, state.momentum, divisor, settings, betas=betas, donate=means.donate
        )
        numbers = {**state.numbers, "synced": float(step)}
        return new_params, state._replace(step=step, momentum=momentum, numbers=numbers)

    def _levelled(self, variance: Sequence[Array], state: OptimizerState) -> tuple[Array, ...]:
        """Return the variance with a higher floor for tensors that have missed updates.

        The variance of a tensor that begins late is measured rarely. A mean of few squares is often near zero, and many
        steps would divide by it. So after k updates of its own, no element is below 1 / k of the tensor's mean.
        """
        updates = state.numbers["updates"]
        own = own_counts(state, updates, "updates")
        return tuple(
            floored([v], [count == updates], max(self.variance_floor, 1 / max(1, count)))[0]
            for v, count in zip(variance, own, strict=True)
        )

    def advance(self, state: OptimizerState, before: OptimizerState) -> OptimizerState:
        """Return the state after the freeze rule has been asked, if the step had an exchange."""
        return self._observed(state) if any(self._plan(before)) else state

    def stages(
        self,
        params: Any,
        grads: Any,
        state: OptimizerState,
        *,
        donate: bool = False,
        left_out: Collection[int] = (),
    ) -> Stages[tuple[Any, OptimizerState]]:
        """Make one step as a generator of pure stages, which yields nothing in a step that sends nothing."""
        try:
            return (yield from super().stages(params, grads, state, donate=donate, left_out=left_out))
        except NonFiniteError as error:
            if str(error).endswith(f"in step {state.step + 1}"):
                raise
            raise self._located(error, state, state.step + 1) from error

    def synchronize(self, params: Any, state: OptimizerState, comm: Transport) -> tuple[Any, OptimizerState]:
        """Synchronise the ranks without a step, before a validation or before saving the parameters.

        Parameters
        ----------
        params : array or sequence of arrays
            This rank's parameters.
        state : OptimizerState
            The state of the last step.
        comm : Communicator
            As for `step`. Sends as much as a compressed step, or nothing if the ranks are in sync.

        Returns
        -------
        params : array or list of arrays
            Equal on all ranks bit for bit.
        state : OptimizerState

        Raises
        ------
        NonFiniteError
            On every rank, if a gradient on any rank was not finite since the last synchronisation.
        """
        tensors = as_tensors(params, "params")
        if state.stage != "local":
            return as_given(tensors, params), state
        # The next step draws with the key of this state, so this exchange needs another key.
        key = self.key(state)._replace(tensor=state.stream ^ 1)
        sums = self.compression.average([copy(u) for u in state.arrays["pending"]], state, key)
        try:
            means = drive(
                owned(
                    sums.stages(),
                    owner_of(self, state)._replace(doing=f"synchronize after step {state.step}"),
                ),
                comm,
            )
        except NonFiniteError as error:
            raise self._located(error, state, state.step) from error
        if self.rounding == "stochastic":
            from qcomp.core.optimizers.rounding import rounded, widened  # noqa: PLC0415 - few round stochastically

            wide, new_state = self._synchronised(widened(tensors), means, state)
            new_params = rounded(wide, tensors, key)
        else:
            new_params, new_state = self._synchronised(tensors, means, state)
        return as_given(new_params, params), new_state

    def _plan(self, state: OptimizerState) -> _Plan:
        """Return what the next step exchanges, the same on all ranks."""
        frozen, apart = int(state.numbers["frozen"]), state.stage == "local"
        return self._plan_of(state.step + 1, frozen, apart=apart, moves=self.rate(state) != 0)

    def _plan_of(self, step: int, frozen: int, *, apart: bool, moves: bool = True) -> _Plan:
        """Return what a step exchanges.

        ``frozen`` is the step of the freeze, or 0. The ranks are ``apart`` if they have made steps alone since the last
        synchronisation, and a step ``moves`` if its rate is above 0.
        """
        if not frozen and self.variance_steps(step):
            return _Plan(exact=True, compressed=apart)
        if not (moves or apart):
            return _Plan(exact=False, compressed=False)
        waits = self.freeze is not None and not frozen
        return _Plan(exact=False, compressed=waits or self.sync_steps(step - frozen))

    def _observed(self, state: OptimizerState) -> OptimizerState:
        """Return the state after the freeze rule has been asked, in the stage that the next step needs."""
        if self.freeze is not None and not state.numbers["frozen"]:
            counts = own_counts(state, state.numbers["updates"], "updates")
            betas, rising = self.adam.betas_of(state), rate_rises(self, state)
            verdict = self._policy.asked(state, betas, counts, rising=rising)
            state = state._replace(history=verdict.history)
            if verdict.frozen:  # the frozen variance keeps its floor
                numbers = {**state.numbers, "frozen": float(state.step)}
                state = state._replace(variance=tuple(self._divisor(state)), history=(), numbers=numbers)
        frozen = int(state.numbers["frozen"])
        if state.stage == "warmup" and not self._plan_of(state.step + 1, frozen, apart=False).exact:
            variance = self._levelled(floored(state.variance, state.exact, self.variance_floor), state)
            until = "from now on, since the variance is frozen"
            if not frozen:
                until = "until one of variance_steps measures the variance again"
            warn_of_zeros(state, range(len(state.names)), until)
            state = self.enter(state._replace(variance=variance), "compressed")
        return state

    def clip_scale(self, grads: Sequence[Array], state: OptimizerState) -> Stages[float]:
        """Return the factor as `Optimizer.clip_scale` does; in a step that sends nothing, from this rank's own norm."""
        if any(self._plan(state)):
            return (yield from super().clip_scale(grads, state))
        assert self.clip_norm is not None
        norm = math.sqrt(math.fsum(sum_of_squares(to_compute_dtype(g)) for g in grads))
        return min(1.0, self.clip_norm / norm) if 0 < norm < math.inf else 1.0

    def own_kinds(self, stage: str) -> tuple[str, ...]:
        """Return the kinds of arrays that differ between the ranks while they are apart."""
        return ("momentum", "pending") if stage == "local" else ()

    def limits(self, state: OptimizerState) -> Mapping[str, Number]:
        """Return the limits of ``state.numbers``: counts up to the step, and sums from 0, or above 0 in "local"."""
        until_now = Number(least=0, most=state.step, whole=True)
        warmup = state.stage == "warmup"  # a freeze ends it
        updates = until_now._replace(least=0 if warmup else 1)
        frozen = until_now._replace(most=0 if warmup else state.step)
        # Sums over this rank's local steps are above 0, since the next synchronisation divides by them.
        sums = Number(least=math.ulp(0.0) if state.stage == "local" else 0)
        limits = {"updates": updates, "frozen": frozen, "synced": until_now, "rates": sums, "weights": sums}
        if state.stage == "local":
            of_tensor = Number(least=0), sums, Number(least=0)
            limits |= named(state.names, [of_tensor] * len(state.names))
        return limits

    def _with_room(self, state: OptimizerState) -> OptimizerState:
        """Return a state with arrays and numbers of the stage "local", of which only shapes and names matter."""
        nothing = [Sums(0.0, 0.0, 0.0)] * len(state.names)
        return state._replace(
            arrays={"anchor": state.momentum, "pending": state.momentum},
            numbers={**state.numbers, **named(state.names, nothing)},
        )

    def counts(self, state: OptimizerState) -> Mapping[str, float]:
        """Return the steps, and the updates of the variance."""
        return {**super().counts(state), "updates": state.numbers["updates"]}

    def apart(self, stage: str) -> bool:
        """Return whether the ranks make local steps in this stage."""
        return stage == "local"

    def _local_step(
        self, params: Sequence[Array], momenta: Sequence[Array], state: OptimizerState
    ) -> tuple[list[Array], OptimizerState]:
        """Make a step of this rank alone."""
        apart = state.stage == "local"
        if not (apart or self.rate(state)):
            return list(params), state._replace(step=state.step + 1)
        skipped = state.skipped
        if self.nonfinite == "skip" and not _in_range(momenta):
            momenta, skipped = [copy(m) for m in state.momentum], skipped + 1
        pending = self._summed(momenta, state)
        anchor = state.arrays["anchor"] if apart else [copy(to_compute_dtype(p)) for p in params]
        moved = primitives.frozen_steps(params, momenta, self._divisor(state), self.adam.numbers(state))
        return [p for p, _ in moved], state._replace(
            step=state.step + 1,
            stage="local",
            skipped=skipped,
            momentum=tuple(m for _, m in moved),
            arrays={"anchor": tuple(anchor), "pending": tuple(pending)},
            numbers=self._numbers_after(state),
        )

    def _synchronised(
        self, params: Sequence[Array], means: Means, state: OptimizerState
    ) -> tuple[list[Array], OptimizerState]:
        """Return the common parameters and state, given the mean over the ranks of the sums of momenta."""
        rates, weights = state.numbers["rates"], state.numbers["weights"]
        anchor = state.arrays["anchor"] if state.stage == "local" else params
        sums = sums_of(state)
        eps = setting_of_each(tuple(self.groups), state.names, "eps", self.eps)
        numbers = [of.step_numbers(rates, weights, x) for of, x in zip(sums, eps, strict=True)]
        divisors = [of.weight for of in sums]
        moved = primitives.steps_of_sums(
            anchor, means.values, self._divisor(state), numbers, divisors, donate=means.donate
        )
        new_params = [
            array_namespace(p).astype(new, p.dtype, copy=False)
            for p, (new, _) in zip(params, moved, strict=True)
        ]
        return new_params, state._replace(
            stage="compressed",
            momentum=tuple(m for _, m in moved),
            exchange=means.exchange,
            arrays={},
            numbers={
                **{key: x for key, x in state.numbers.items() if key.partition(".")[0] not in Sums._fields},
                "synced": float(state.step),
                "rates": 0.0,
                "weights": 0.0,
            },
        )

    def _divisor(self, state: OptimizerState) -> Sequence[Array]:
        """Return the bias-corrected variance to divide by; a frozen variance is already corrected."""
        if state.numbers["frozen"]:
            return state.variance
        counts = own_counts(state, state.numbers["updates"], "updates")
        return divided(state.variance, bias_corrections(self.adam.betas_of(state), 1, counts))

    def _summed(self, momenta: Sequence[Array], state: OptimizerState) -> list[Array]:
        """Return the sums of the weighted momenta since the last synchronisation, including this step's."""
        pending = state.arrays["pending"] if state.stage == "local" else momenta
        return [
            _in_blocks(mul, weight, m) if starts else _in_blocks(_plus, weight, u, m)
            for u, m, (starts, weight, _) in zip(pending, momenta, self._added(state), strict=True)
        ]

    def _numbers_after(self, state: OptimizerState) -> dict[str, float]:
        """Return the numbers of the state, with the next step added to the sums."""
        return {
            **state.numbers,
            "rates": state.numbers["rates"] + self.rate(state),
            # Divided by the bias correction of a momentum that has missed no step.
            "weights": state.numbers["weights"] + self.rate(state) / (1 - self.betas[0] ** (state.step + 1)),
            **named(state.names, [sums for _, _, sums in self._added(state)]),
        }

    def _added(self, state: OptimizerState) -> list[tuple[bool, float, Sums]]:
        """Return, for each tensor, whether the next step starts its sums, its weight in them, and the sums after it."""
        rate, of_groups = self.rate(state), group_of_each(tuple(self.groups), state.names)
        corrections = bias_corrections(self.adam.betas_of(state), 0, own_counts(state, state.step + 1))
        settings = zip(corrections, of_groups, self.weight_decays(state), strict=True)
        before = sums_of(state) if state.stage == "local" else [None] * len(state.names)
        return [
            with_step(sums, rate, rate / correction, group.learning_rate_factor, decay)
            for sums, (correction, group, decay) in zip(before, settings, strict=True)
        ]

    def _located(self, error: NonFiniteError, state: OptimizerState, step: int) -> NonFiniteError:
        """Return the error with the steps added that may have caused it."""
        first = int(state.numbers["synced"]) + 1
        steps = f"step {step}" if first == step else f"one of the steps {first} to {step}"
        return NonFiniteError(f"{error}, in {steps}")


def _in_blocks(function: Callable[..., Array], number: float, *arrays: Array) -> Array:
    """Return ``function(number, *arrays)``; see `each_in_blocks`."""
    (result,) = each_in_blocks(partial(function, number), *([x] for x in arrays))
    return result


def _plus(weight: float, u: Array, m: Array) -> Array:
    return u + weight * m


def _in_range(tensors: Sequence[Array]) -> bool:
    """Return whether all values can be compressed, by the test that compressors use."""
    try:
        for x in tensors:
            require_below(array_namespace(x).reshape(x, (-1,)), LIMIT, "a momentum")
    except NonFiniteError:
        return False
    return True
