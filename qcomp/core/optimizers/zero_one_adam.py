"""0/1 Adam: one bit an element at some steps, nothing at all at the others."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from qcomp.core import primitives
from qcomp.core.compressor import Compressor
from qcomp.core.compressors.sign import ScaledSign
from qcomp.core.errors import NonFiniteError
from qcomp.core.mean.stages import Stages, Transport, drive
from qcomp.core.numeric.arrays import Array, to_compute_dtype
from qcomp.core.numeric.sums import sum_of_squares, totals
from qcomp.core.optimizers.average import Average, Means
from qcomp.core.optimizers.freeze import FreezeRule, ask, freeze_rule
from qcomp.core.optimizers.local_adam import LocalAdam, copy
from qcomp.core.optimizers.schedules import DoublingIntervals, LocalSteps, Schedule
from qcomp.core.optimizers.tensors import as_given, as_tensors
from qcomp.core.optimizers.timetable import Plan, Rounds, Timetable
from qcomp.core.state import OptimizerState

__all__ = ["ZeroOneAdam"]


@dataclass(frozen=True, kw_only=True)
class ZeroOneAdam(LocalAdam):
    """0/1 Adam: the variance is updated at ever fewer steps, and between some steps every rank goes on alone.

    Parameters
    ----------
    learning_rate, weight_decay, clip_norm, seed, nonfinite, groups
        See `Optimizer` and the notes below. Weight decay must be decoupled.
    betas, eps
        See `Adam`.
    compressor, feedback, topology, exact, compressors
        See `CompressingOptimizer`. Small tensors too are averaged only when the ranks synchronise, exactly.
    variance_steps : callable
        Whether a step, counted from 1, updates the variance with the exact mean gradient; step 1 must be among them.
    sync_steps : callable
        Whether a step synchronises the ranks with compression. Counted from 1 after the freeze, or if there is none,
        from the first step on.
    freeze : int or rule, optional
        The last step in which the variance may change, or a rule such as `VarianceStable`; up to then every step
        synchronises. Without one the variance is updated for ever.

    Notes
    -----
    Between two synchronisations rank i makes, from its own gradient g_i, m_i' = b1 m_i + (1 - b1) g_i,
    x_i' = x_i - w m_i' / (sqrt(v) + eps) and u_i' = u_i + w m_i' with w = rate / (1 - b1^t). A synchronising step does
    the same and then takes s, the compressed mean of u_i with feedback on workers and servers: m = s / sum of w,
    x = x of the last synchronisation - s / (sqrt(v) + eps), u_i = 0. After it all ranks hold the same parameters and
    momentum, bit for bit; in between they differ, and nothing at all is sent. A step in ``variance_steps`` that
    finds the ranks synchronised is a step of exact Adam; one that does not synchronises them, with the new
    variance. The bias correction of v counts the updates that v had. Decay acts on the local x, and at a
    synchronisation on the last common x with the sum of the rates. Where v is 0 nothing moves, as in `OneBitAdam`.

    A compressed step sends 2 (N - 1) / N bits a parameter and 32 bits a bucket, an exact one 32 times as much, and
    `rounds` counts them. The state holds two more arrays of the parameters' size while the ranks are apart:
    ``arrays["anchor"]``, the parameters of the last synchronisation, and ``arrays["pending"]``, u_i.

    A rank cannot tell the others of a gradient that is not finite before the next synchronisation. There all
    ranks raise, naming the steps since the last; the parameters from before are in ``arrays["anchor"]``. With
    ``nonfinite="skip"`` the rank repeats its momentum in place of such a gradient, and alone counts the step as
    skipped; steps that send are skipped by all ranks. With ``clip_norm`` a rank clips by its own norm in a step that
    sends nothing. A rate of 0 leaves synchronised ranks as they are. Source: Lu et al., ICLR 2023, algorithm 1.

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

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.freeze is not None:
            object.__setattr__(self, "freeze", freeze_rule(self.freeze))
        if not self.variance_steps(1):
            raise ValueError(
                f"variance_steps is {self.variance_steps!r}, without step 1; expected a schedule with it: "
                "there is no variance before"
            )
        if not self.decoupled_weight_decay:
            raise ValueError("decoupled_weight_decay is False; expected True: local gradients have no decay")
        if self.rescale_feedback:
            raise ValueError(
                "rescale_feedback is True; expected False: what is sent has the rates in it already"
            )

    def start(self, params: Sequence[Array], names: tuple[str, ...], rank: int, size: int) -> OptimizerState:
        """Return moments of zero, in the warm-up, which lasts until a step is not exact."""
        numbers = {"updates": 0.0, "frozen": 0.0, "synced": 0.0, "rates": 0.0, "weights": 0.0}
        state = super().start(params, names, rank, size)
        return self._chosen(state._replace(numbers=numbers), params)

    def enter(self, state: OptimizerState, stage: str) -> OptimizerState:
        """Return the state of the warm-up, or one with residuals of zero, and with room for local steps."""
        if stage not in ("compressed", "local"):
            return super().enter(state, stage)
        residuals = self._no_residuals(state.momentum, state)
        room = {"anchor": state.momentum, "pending": state.momentum} if stage == "local" else {}
        return state._replace(stage=stage, exchange=residuals, arrays=room)

    def rounds(self, steps: int) -> Rounds:
        """Return how many of the first steps send what, if all rates are above 0.

        Raises
        ------
        ValueError
            If the freeze is left to a rule that must see the variance.
        """
        return self._timetable.rounds(steps)

    def prepare(self, grads: Any, state: OptimizerState, *, scale: float = 1.0) -> Average:
        """Ask for the exact mean gradient, the compressed mean of the summed momenta, both, or nothing."""
        plan = self._plan(state)
        if plan.exact and not plan.compressed:
            return super().prepare(grads, state._replace(stage="warmup"), scale=scale)
        tensors, (beta1, _) = as_tensors(grads, "grads"), self.betas
        momenta = [
            primitives.momentum(m, g, beta1, scale) for m, g in zip(state.momentum, tensors, strict=True)
        ]
        if not plan.compressed:
            return Average((), state.exchange, tuple(momenta))
        average = self._average(self._summed(momenta, state), state)
        if not plan.exact:
            return average
        count = len(tensors)
        gradients = [to_compute_dtype(g) * scale for g in tensors]
        return average._replace(
            parts=(*average.parts, self._exact_part(range(count, 2 * count), gradients, state))
        )

    def apply(self, params: Any, means: Means, state: OptimizerState) -> tuple[list[Array], OptimizerState]:
        """Make a step of Adam, a synchronisation, or a step of this rank alone."""
        plan, tensors = self._plan(state), as_tensors(params, "params")
        if not any(plan):
            return self._local_step(tensors, means.values, state)
        count, numbers = len(tensors), dict(state.numbers)
        numbers["updates"] += plan.exact
        new_params: list[Array]
        if plan.compressed:
            if plan.exact:
                _, beta2 = self.betas
                variance = tuple(
                    primitives.momentum(v, g * g, beta2, 1.0)
                    for v, g in zip(state.variance, means.values[count:], strict=True)
                )
                state = state._replace(variance=variance)
            numbers["rates"] += self.rate(state)
            numbers["weights"] += self._weight(state)
            new_params, state = self._synchronised(
                tensors,
                means._replace(values=means.values[:count]),
                state._replace(step=state.step + 1, numbers=numbers),
            )
        else:
            correction = 1 - self.betas[1] ** numbers["updates"]
            new_params, state = self._exact_step(tensors, means, state, correction=correction)
            state = state._replace(numbers=numbers | {"synced": float(state.step)})
        return new_params, self._observed(state)

    def stages(
        self, params: Any, grads: Any, state: OptimizerState, *, donate: bool = False
    ) -> Stages[tuple[Any, OptimizerState]]:
        """Make one step as a generator of pure stages; in a step that sends nothing it yields nothing."""
        try:
            return (yield from super().stages(params, grads, state, donate=donate))
        except NonFiniteError as error:
            raise self._located(error, state, state.step + 1) from error

    def synchronize(self, params: Any, state: OptimizerState, comm: Transport) -> tuple[Any, OptimizerState]:
        """Synchronise the ranks now, without a further step: before the parameters are validated or saved.

        Parameters
        ----------
        params : array or sequence of arrays
            This rank's own.
        state : OptimizerState
            Of the last step.
        comm : Communicator
            As for `step`; sends as a compressed step does, and nothing if the ranks are together.

        Returns
        -------
        params : array or list of arrays
            The same on all ranks bit for bit.
        state : OptimizerState

        Raises
        ------
        NonFiniteError
            On every rank, if a gradient on any rank was not finite since the last synchronisation.
        """
        tensors = as_tensors(params, "params")
        if state.stage != "local":
            return as_given(tensors, params), state
        sums = self._average([copy(u) for u in state.arrays["pending"]], state)
        # The next step draws with the key of this number of steps.
        parts = tuple(part._replace(key=part.key._replace(tensor=state.stream ^ 1)) for part in sums.parts)
        try:
            means = drive(sums._replace(parts=parts).stages(), comm)
        except NonFiniteError as error:
            raise self._located(error, state, state.step) from error
        new_params, new_state = self._synchronised(tensors, means, state)
        return as_given(new_params, params), new_state

    @property
    def _timetable(self) -> Timetable:
        rule = None if self.freeze is None else freeze_rule(self.freeze)
        return Timetable(self.variance_steps, self.sync_steps, rule)

    def _plan(self, state: OptimizerState) -> Plan:
        """Return what the next step exchanges, the same on all ranks."""
        frozen, apart = int(state.numbers["frozen"]), state.stage == "local"
        return self._timetable.plan(state.step + 1, frozen, apart=apart, moves=self.rate(state) != 0)

    def _observed(self, state: OptimizerState) -> OptimizerState:
        """Return the state after the freeze rule has seen this step, ready for what the next step exchanges."""

        def norm() -> float:
            correction = 1 - self.betas[1] ** int(state.numbers["updates"])
            return sum(totals(state.variance)) / correction

        if self.freeze is not None and not state.numbers["frozen"]:
            verdict = ask(
                freeze_rule(self.freeze),
                state.step,
                norm,
                state.history,
                self.betas[1],
                rising=self._rate_rises(state),
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
            state = self.enter(state, "compressed")
        return state

    def clip_scale(self, grads: Sequence[Array], state: OptimizerState) -> Stages[float]:
        """Return the factor of `Optimizer`; in a step that sends nothing, that of this rank's own norm."""
        if any(self._plan(state)):
            return (yield from super().clip_scale(grads, state))
        assert self.clip_norm is not None
        norm = math.sqrt(math.fsum(sum_of_squares(to_compute_dtype(g)) for g in grads))
        return min(1.0, self.clip_norm / norm) if 0 < norm < math.inf else 1.0
