"""0/1 Adam: one bit per element in some steps, nothing in the others."""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from qcomp.core import primitives
from qcomp.core.compressor import Compressor
from qcomp.core.compressors.sign import ScaledSign
from qcomp.core.errors import NonFiniteError
from qcomp.core.mean.stages import Stages, Transport, drive, owned
from qcomp.core.numeric.arrays import Array, to_compute_dtype
from qcomp.core.numeric.sums import sum_of_squares
from qcomp.core.optimizers.adam import corrected_sum, rate_rises
from qcomp.core.optimizers.compression import Average, Means
from qcomp.core.optimizers.floor import floored, require_floor
from qcomp.core.optimizers.freeze import FreezeRule, ask, freeze_rule, warn_of_zeros
from qcomp.core.optimizers.local_adam import LocalAdam
from qcomp.core.optimizers.own_counts import as_updates, own_counts
from qcomp.core.optimizers.remeasure import measured, step_on_codes
from qcomp.core.optimizers.replica import owner_of
from qcomp.core.optimizers.schedules import DoublingIntervals, LocalSteps, Schedule, require_schedule
from qcomp.core.optimizers.tensors import as_given, as_tensors, copy
from qcomp.core.optimizers.timetable import Rounds, StepPlan, Timetable
from qcomp.core.state import OptimizerState

__all__ = ["ZeroOneAdam"]


@dataclass(frozen=True, kw_only=True)
class ZeroOneAdam(LocalAdam):
    """0/1 Adam: updates the variance ever more rarely, and makes local steps between synchronisations.

    Parameters
    ----------
    learning_rate : float or callable
        Step size: a finite number >= 0, or a schedule that returns it from the number of completed steps. Required.
    weight_decay : float, default 0
        Weight decay coefficient, >= 0.
    clip_norm : float, optional
        Largest global gradient norm sqrt(mean_i |g_i|^2) over the ranks i, above 0. Larger gradients are scaled down
        by the same factor on all ranks. Costs an exchange of 8 bytes per step. In a step that sends nothing, each rank
        clips by its own norm, without an exchange. None, the default, never clips.
    seed : int, default 0
        Seed of the compressor's random draws, 0 to 2**64 - 1. Draws also depend on the names and shapes of the
        parameters. If two optimizers in one job have parameters with equal names and shapes, give them different
        seeds.
    nonfinite : {"raise", "skip"}, default "raise"
        What to do if a gradient on any rank is infinite or NaN. ``"raise"``: all ranks raise `NonFiniteError`; after a
        step that sends nothing, they raise it at the next synchronisation. ``"skip"``: all ranks skip a step that
        sends; in a step that sends nothing, a rank with such a gradient repeats its own momentum. Skipped steps are
        counted in ``state.skipped``.
    groups : sequence of Group, default ()
        Learning-rate factors and weight decays for parameters selected by name, see `Group`.
    betas : tuple of two floats, default (0.9, 0.999)
        Decay rates b1 of the momentum and b2 of the variance, each from 0 to below 1.
    eps : float, default 1e-8
        Added to the square root of the variance, >= 0.
    decoupled_weight_decay : bool, default True
        Must be True: each step subtracts rate * weight_decay * x from the parameters x, like ``torch.optim.AdamW``.
    compressor : Compressor, default ScaledSign(scale="rms")
        Compresses what the ranks exchange in the compressed stage, on workers and servers.
    averaging : Averaging, default Averaging()
        Topology and error feedback of the exchange, see `Averaging`.
    exact : callable or None, default ExactBelow(10_000)
        Policy that selects the tensors that stay exact, a function of all tensors, see `ExactBelow`. None compresses
        everything. Exact tensors too are averaged only when the ranks synchronise.
    compressors : callable, optional
        Policy that returns a compressor for each tensor, used instead of ``compressor``, or None for a tensor that
        stays exact, see `ByName`. Tensors that ``exact`` selects stay exact in any case. None, the default, uses
        ``compressor`` for all.
    variance_steps : callable, default DoublingIntervals(16)
        Returns whether a step, counted from 1, updates the variance with the exact mean gradient. It must be true for
        step 1.
    sync_steps : callable, default LocalSteps()
        Returns whether a step synchronises the ranks with compression. Steps are counted from 1 after the freeze, or
        without ``freeze`` from the first step.
    freeze : int or FreezeRule, optional
        The last step that may change the variance, or a rule such as `VarianceStable`; until then every step
        synchronises. None, the default, never stops updating the variance.
    variance_floor : float, default 1e-3
        From the first compressed step on, the variance of an element of a compressed tensor is at least this fraction
        of the tensor's mean, from 0 to 1. Elements with a variance of zero keep it. 0 is the algorithm as published,
        which destroys networks in which some units are hardly ever active.

    Notes
    -----
    Between two synchronisations rank i computes from its own gradient g_i: m_i' = b1 m_i + (1 - b1) g_i, x_i' = x_i - w
    m_i' / (sqrt(v) + eps) and u_i' = u_i + w m_i' with w = rate / (1 - b1^t). A synchronising step does the same and
    then computes s, the compressed mean of u_i with feedback on workers and servers: m = s / sum of w, x = x of the
    last synchronisation - s / (sqrt(v) + eps), u_i = 0. After it all ranks hold the same parameters and momentum, bit
    for bit; in between they differ and send nothing. A step in ``variance_steps`` is a step of exact Adam if the ranks
    are in sync; otherwise it synchronises them, with the new variance. After the first compressed step it divides by
    the variance with its floor, since its momentum still holds codes. The bias correction of v counts the updates of v.
    Weight decay acts on the local x, and at a synchronisation on the last common x with the sum of the rates. Elements
    with v = 0 do not move, as in `OneBitAdam`. The settings of a group may change in any step, which counts with its
    own.

    A compressed step sends 2 (N - 1) / N times 1 bit per parameter and 32 bits per bucket, an exact step 2 (N - 1) / N
    times 32 bits per parameter; `rounds` counts both. Between synchronisations the state holds two more arrays of the
    parameters' size: ``arrays["anchor"]``, the parameters of the last synchronisation, and ``arrays["pending"]``, u_i.

    A rank cannot report a non-finite gradient before the next synchronisation. There all ranks raise, naming the steps
    since the last one; ``arrays["anchor"]`` has the parameters from before. With ``nonfinite="skip"`` a rank in a local
    step repeats its momentum instead of using such a gradient, and only this rank counts the step as skipped; all ranks
    skip steps that send. With ``clip_norm`` a rank clips by its own norm in a step that sends nothing. A step with a
    rate of 0 changes nothing while the ranks are in sync. Source: Lu et al., ICLR 2023, algorithm 1.

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

    compressor: Compressor = ScaledSign(scale="rms")
    variance_steps: Schedule = DoublingIntervals(16)
    sync_steps: Schedule = LocalSteps(32_678, 16)
    freeze: int | FreezeRule | None = None
    variance_floor: float = 1e-3

    def __post_init__(self) -> None:
        super().__post_init__()
        require_floor(self.variance_floor)
        if self.freeze is not None:
            object.__setattr__(self, "freeze", freeze_rule(self.freeze))
        require_schedule("variance_steps", self.variance_steps, "measures the variance")
        require_schedule("sync_steps", self.sync_steps, "synchronises the ranks")
        if not self.variance_steps(1):
            raise ValueError(
                f"variance_steps is {self.variance_steps!r}, which excludes step 1; expected a schedule with step 1, "
                "since there is no variance before"
            )
        if not self.decoupled_weight_decay:
            raise ValueError("decoupled_weight_decay is False; expected True: local gradients have no decay")

    def initial_state(
        self, params: Sequence[Array], names: tuple[str, ...], rank: int, size: int
    ) -> OptimizerState:
        """Return moments of zero, in the warm-up, which ends before the first step that is not exact."""
        numbers = {"updates": 0.0, "frozen": 0.0, "synced": 0.0, "rates": 0.0, "weights": 0.0}
        state = self.adam.initial_state(params, names, rank, size)
        return self.compression.choose(state._replace(numbers=numbers), params, type(self).__name__)

    def enter(self, state: OptimizerState, stage: str) -> OptimizerState:
        """Return the state of the warm-up, or one with residuals of zero and, if local, room for local steps."""
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
        """Return the state after some steps of `Adam`, each of which has updated the variance.

        Parameters
        ----------
        state : OptimizerState
            A first state, with the count of these steps and the moments after them.
        """
        step = float(state.step)
        counted = {"updates": step, "synced": step, **as_updates(state)}
        state = state._replace(numbers={**state.numbers, **counted})
        return self._observed(state) if state.step else state

    def rounds(self, steps: int) -> Rounds:
        """Return how many of the first steps are exact, compressed and silent, if all rates are above 0.

        Parameters
        ----------
        steps : int
            Number of steps, from the first.

        Raises
        ------
        ValueError
            If the freeze rule needs the variance.
        """
        return self._timetable.rounds(steps)

    def prepare(self, grads: Any, state: OptimizerState, *, scale: float = 1.0) -> Average:
        """Ask for the exact mean gradient, the compressed mean of the summed momenta, both, or nothing."""
        plan = self._plan(state)
        if plan.exact and not plan.compressed:
            return self.adam.prepare(grads, state._replace(stage="warmup"), scale=scale)
        tensors, betas = as_tensors(grads, "grads"), self.adam.betas_of(state)
        of_each = zip(state.momentum, tensors, betas, strict=True)
        momenta = [primitives.momentum(m, g, beta1, scale) for m, g, (beta1, _) in of_each]
        if not plan.compressed:
            return Average((), state.exchange, tuple(momenta))
        average = self.compression.average(self._summed(momenta, state), state, self.key(state))
        if not plan.exact:
            return average
        count = len(tensors)
        gradients = [to_compute_dtype(g) * scale for g in tensors]
        return average._replace(
            parts=(*average.parts, self.compression.exact_part(range(count, 2 * count), gradients, state))
        )

    def apply(self, params: Any, means: Means, state: OptimizerState) -> tuple[list[Array], OptimizerState]:
        """Make a step of Adam, a synchronisation, or a step of this rank alone."""
        plan, tensors = self._plan(state), as_tensors(params, "params")
        if not any(plan):
            return self._local_step(tensors, means.values, state)
        count, numbers = len(tensors), dict(state.numbers)
        if state.stage == "warmup":
            numbers["updates"] += 1
            corrections = self._corrections(state, numbers["updates"])
            new_params, state = self.adam.exact_step(tensors, means, state, corrections=corrections)
            return new_params, state._replace(numbers=numbers | {"synced": float(state.step)})
        gradients = means.values[count:] if plan.compressed else means.values
        if plan.exact:
            numbers["updates"] += 1
            kept = [beta2 for _, beta2 in self.adam.betas_of(state)]
            variance = measured(state.variance, gradients, state.exact, kept=kept, floor=self.variance_floor)
            variance = self._levelled(variance, state._replace(numbers=numbers))
            state = state._replace(variance=variance, numbers=numbers)
        if plan.compressed:
            new_params, state = self._synchronised(
                tensors,
                means._replace(values=means.values[:count]),
                state._replace(step=state.step + 1, numbers=self._numbers_after(state)),
            )
        else:
            new_params, state = self._frozen_step(tensors, gradients, state, donate=means.donate)
        return new_params, state

    def _levelled(self, variance: Sequence[Array], state: OptimizerState) -> tuple[Array, ...]:
        """Return the variance with a higher floor for tensors that have missed updates.

        One that begins late is measured rarely. The mean of a few squares is often near zero, and would divide many
        steps: so after k own updates no element is below a kth of the mean.
        """
        updates = state.numbers["updates"]
        own = own_counts(state, updates, "updates")
        return tuple(
            floored([v], [count == updates], max(self.variance_floor, 1 / max(1, count)))[0]
            for v, count in zip(variance, own, strict=True)
        )

    def advance(self, state: OptimizerState, before: OptimizerState) -> OptimizerState:
        """Return the state after the freeze rule has seen a step with an exchange, ready for that of the next step."""
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
        """Make one step as a generator of pure stages; in a step that sends nothing it yields nothing."""
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
        # The next step draws with the key of this state, so this exchange needs another one.
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
        new_params, new_state = self._synchronised(tensors, means, state)
        return as_given(new_params, params), new_state

    def _frozen_step(
        self, params: Sequence[Array], gradients: Sequence[Array], state: OptimizerState, *, donate: bool
    ) -> tuple[list[Array], OptimizerState]:
        """Make a step of exact mean gradients while the ranks are in sync."""
        new_params, momentum = step_on_codes(
            params,
            gradients,
            state.momentum,
            self._divisor(state),
            self.adam.numbers(state),
            betas=self.adam.betas_of(state),
            donate=donate,
        )
        step = state.step + 1
        numbers = {**state.numbers, "synced": float(step)}
        return new_params, state._replace(step=step, momentum=momentum, numbers=numbers)

    @property
    def _timetable(self) -> Timetable:
        rule = None if self.freeze is None else freeze_rule(self.freeze)
        return Timetable(self.variance_steps, self.sync_steps, rule)

    def _plan(self, state: OptimizerState) -> StepPlan:
        """Return what the next step exchanges, the same on all ranks."""
        frozen, apart = int(state.numbers["frozen"]), state.stage == "local"
        return self._timetable.plan(state.step + 1, frozen, apart=apart, moves=self.rate(state) != 0)

    def _observed(self, state: OptimizerState) -> OptimizerState:
        """Return the state after the freeze rule has seen this step, ready for the exchange of the next step."""

        def norm() -> float:
            return corrected_sum(state.variance, self._corrections(state, state.numbers["updates"]))

        if self.freeze is not None and not state.numbers["frozen"]:
            verdict = ask(
                freeze_rule(self.freeze),
                state.step,
                norm,
                state.history,
                self.adam.slowest(state),
                rising=rate_rises(self, state),
            )
            state = state._replace(history=verdict.history)
            if verdict.frozen:
                state = state._replace(
                    variance=tuple(self._divisor(state)),
                    history=(),
                    numbers={**state.numbers, "frozen": float(state.step)},
                )
        frozen = int(state.numbers["frozen"])
        if state.stage == "warmup" and not self._timetable.plan(state.step + 1, frozen, apart=False).exact:
            variance = self._levelled(floored(state.variance, state.exact, self.variance_floor), state)
            until = (
                "from now on, since it is frozen"
                if frozen
                else "before one of variance_steps measures it again"
            )
            warn_of_zeros(state, range(len(state.names)), until)
            state = self.enter(state._replace(variance=variance), "compressed")
        return state

    def clip_scale(self, grads: Sequence[Array], state: OptimizerState) -> Stages[float]:
        """Return the factor of `Optimizer.clip_scale`; in a step that sends nothing, from this rank's own norm."""
        if any(self._plan(state)):
            return (yield from super().clip_scale(grads, state))
        assert self.clip_norm is not None
        norm = math.sqrt(math.fsum(sum_of_squares(to_compute_dtype(g)) for g in grads))
        return min(1.0, self.clip_norm / norm) if 0 < norm < math.inf else 1.0
