"""`Optimizer`, the base of all optimizers: explicit state, and a step with two pure halves around an exchange."""

import math
from abc import abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, Literal

from qcomp.core.errors import NonFiniteError
from qcomp.core.mean.stages import Stages, Transport, drive, owned, require_rank
from qcomp.core.numeric.arrays import Array, is_traced, require_apart
from qcomp.core.numeric.random import Key
from qcomp.core.optimizers.agreement import compare_gradients, compare_new_stage
from qcomp.core.optimizers.compression import Average, Means
from qcomp.core.optimizers.groups import Group, as_groups, group_of_each, setting_of_each
from qcomp.core.optimizers.moved_zeros import keeps_zeros, look_at, moved_zeros, warn_of_moved_zeros
from qcomp.core.optimizers.nonfinite import name_gradients
from qcomp.core.optimizers.own_counts import without
from qcomp.core.optimizers.replica import Replica, owner_of
from qcomp.core.optimizers.tensors import as_given, as_gradients, as_tensors
from qcomp.core.settings import require
from qcomp.core.state import OptimizerState

_LOOKED_AT = frozenset(10**power for power in range(2, 8))
"""The steps, by number, that check whether parameters in half precision move."""


@dataclass(frozen=True, kw_only=True)
class Optimizer(Replica[OptimizerState]):
    """Base of all optimizers.

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
        ``"stochastic"`` keeps them on average. A step then computes with float32 copies, which take 4 bytes per element
        and are freed after the step. It rounds every new value at random to one of its two neighbours in bfloat16, more
        often to the nearer one, so that the result is right on average. All ranks draw the same random numbers. A state
        does not depend on the rounding, and can be loaded with either. Parameters in float16 are rounded to nearest in
        any case, and need float32 masters.
    """

    of_groups = tuple[str, ...]()
    """The settings that a `Group` may replace, besides learning rate and weight decay."""
    compares_gradients = True
    """Whether a first step warns if all ranks have the same gradients."""
    two_gradients = ""
    """The part of an error that says why a step takes two gradients; empty if a step takes one."""
    mixes_elements = False
    """Whether an element's update depends on other elements' gradients, except where whole slices are 0."""

    learning_rate: float | Callable[[int], float]
    weight_decay: float = 0.0
    clip_norm: float | None = None
    seed: int = 0
    nonfinite: Literal["raise", "skip"] = "raise"
    groups: Sequence[Group] = ()
    rounding: Literal["nearest", "stochastic"] = "nearest"

    def __post_init__(self) -> None:
        super().__post_init__()
        rate: Any = self.learning_rate
        fits = callable(rate) or (isinstance(rate, Real) and 0 <= float(rate) < math.inf)
        require("learning_rate", rate, fits, "a finite number >= 0 or a schedule")
        fits = 0 <= self.weight_decay < math.inf
        require("weight_decay", self.weight_decay, fits, "a finite number >= 0")
        require("clip_norm", self.clip_norm, self.clip_norm is None or self.clip_norm > 0, "a number > 0")
        seed: Any = self.seed
        fits = isinstance(seed, Integral) and 0 <= int(seed) < 1 << 64
        require("seed", seed, fits, "an integer from 0 to 2**64 - 1")
        require("nonfinite", self.nonfinite, self.nonfinite in ("raise", "skip"), "'raise' or 'skip'")
        require(
            "rounding", self.rounding, self.rounding in ("nearest", "stochastic"), "'nearest' or 'stochastic'"
        )
        object.__setattr__(self, "groups", as_groups(self.groups))
        for group in self.groups:
            for name in {"betas", "eps"}.difference(self.of_groups):
                value, expected = getattr(group, name), f"None: {type(self).__name__} has one value for all"
                require(f"{name} of the group {group.pattern!r}", value, value is None, expected)
        self.compression  # noqa: B018 - raises if compressor, averaging and policies do not go together

    def moves(self) -> tuple[Sequence[Group], float | Callable[[int], float]]:
        """Return the groups and the learning rate."""
        return self.groups, self.learning_rate

    def _loaded(self, params: Any, state: OptimizerState) -> OptimizerState:  # noqa: ARG002
        return state

    @abstractmethod
    def prepare(self, grads: Any, state: OptimizerState, *, scale: float = 1.0) -> Average:
        """Return what to average in this step. This is the first half of `step`.

        Parameters
        ----------
        grads : array or sequence of arrays
            This rank's gradients.
        state : OptimizerState
            The state of the last step.
        scale : float
            Factor of the gradients, equal on all ranks (clipping).
        """

    @abstractmethod
    def apply(self, params: Any, means: Means, state: OptimizerState) -> tuple[Any, OptimizerState]:
        """Return the parameters and the state after this step. This is the second half of `step`.

        Parameters
        ----------
        params : array or sequence of arrays
            The parameters.
        means : Means
            The averages that `prepare` requested.
        state : OptimizerState
            The state of the last step.
        """

    def counts(self, state: OptimizerState) -> Mapping[str, float]:
        """Return, by name, the common counts from which each tensor's own counts are computed; see `own_counts`.

        Parameters
        ----------
        state : OptimizerState
            The state of the last step.
        """
        return {"steps": state.step}

    def advance(self, state: OptimizerState, before: OptimizerState) -> OptimizerState:  # noqa: ARG002
        """Return the state with which the next step begins, perhaps in a new stage; called after each `apply`.

        Parameters
        ----------
        state : OptimizerState
            The state that `apply` has returned.
        before : OptimizerState
            The state that `apply` was given, whose arrays may have been overwritten.
        """
        return state

    def finish(self, params: Any, means: Means, state: OptimizerState) -> tuple[Any, OptimizerState]:
        """Return the parameters and the state after this step: `apply`, then `advance`.

        Tensors in ``means.left_out`` stay as they are, with their moments, residuals and counts.

        Parameters
        ----------
        params : array or sequence of arrays
            The parameters.
        means : Means
            The averages that `prepare` requested.
        state : OptimizerState
            The state of the last step.
        """
        stochastic = self.rounding == "stochastic"
        apply = self._apply_rounded if stochastic else self.apply
        if state.step + 1 in _LOOKED_AT and self.rate(state):
            from qcomp.core.optimizers.lost_steps import samples, warn_of_lost_steps  # noqa: PLC0415 - few steps look

            before = samples(params, stochastic=stochastic)
            new_params, new_state = apply(params, means, state)
            warn_of_lost_steps(before, new_params, means.values, state)
        else:
            new_params, new_state = apply(params, means, state)
        # While the ranks have different parameters, a missing gradient counts as zeros.
        if means.left_out and not (self.apart(state.stage) or self.apart(new_state.stage)):
            pairs = enumerate(zip(params, new_params, strict=True))
            new_params = [p if number in means.left_out else new for number, (p, new) in pairs]
            new_state = without(self, means.left_out, state, new_state)
        return new_params, self.advance(new_state, state)

    def _apply_rounded(self, params: Any, means: Means, state: OptimizerState) -> tuple[Any, OptimizerState]:
        """Return the result of `apply` on `widened` parameters, with the new parameters `rounded`."""
        from qcomp.core.optimizers.rounding import rounded, widened  # noqa: PLC0415 - few round stochastically

        tensors = as_tensors(params, "params")
        wide, new_state = self.apply(widened(tensors), means, state)
        return rounded(wide, tensors, self.key(state), donate=means.donate), new_state

    def step(
        self,
        params: Any,
        grads: Any,
        state: OptimizerState,
        comm: Transport,
        *,
        donate: bool = False,
        weight: float | None = None,
    ) -> tuple[Any, OptimizerState]:
        """Make one step over a communicator.

        Parameters
        ----------
        params, grads : array or sequence of arrays
            Parameters, the same on all ranks, and this rank's gradients of them. Neither is written to, unless the
            parameters are donated.
        state : OptimizerState
            From `init` or the last step.
        comm : Communicator
            The communicator passed to `init`, or another with the same rank and size.
        donate : bool
            Whether the new parameters and moments may take the buffers of the old ones, which saves memory and time.
            Then only the returned arrays are valid, and anything that shares memory with the old arrays changes, such
            as a dict from `state_dict`. No two of the arrays may share memory. Only kernels reuse buffers, and only
            after a successful exchange: if the exchange raises, nothing has changed. If a freeze rule raises, or a
            warning is an error, the old values are already gone.
        weight : float, optional
            How much this rank's gradients count in this step, such as its number of valid tokens; see `weighted`.
            Either all ranks pass a weight, or no rank does; then all ranks count alike. ``clip_norm`` clips the
            weighted gradients.

        Returns
        -------
        params : array or list of arrays
            New or donated arrays, the same on all ranks bit for bit. A skipped step may return the arrays that it was
            given.
        state : OptimizerState

        Raises
        ------
        NonFiniteError
            On every rank, if a gradient on any rank is not finite (with ``nonfinite="raise"``).
        CommunicatorError
            If the exchange failed. The parameters and the state passed in are still valid.

        Warns
        -----
        UserWarning
            On every rank, if all ranks have the same gradients in the first step. This check sends 4 bytes to all
            others. Also, if the first step moves slices or many elements whose gradients are 0 on all ranks, because
            the compressor cannot encode 0. This check sends a bit for each slice along the first and the last axis, and
            for each element of a sample.
        """
        require_rank(state, comm)
        if weight is not None:
            from qcomp.core.mean.weights import weighted  # noqa: PLC0415 - few scripts weigh

            params = list(params) if isinstance(params, Iterator) else params
            gradients = as_gradients(grads, as_tensors(params, "params"), state.names)
            grads = weighted(gradients, weight, comm)
        return drive(self.stages(params, grads, state, donate=donate), comm)

    def stages(
        self,
        params: Any,
        grads: Any,
        state: OptimizerState,
        *,
        donate: bool = False,
        left_out: Collection[int] = (),
    ) -> Stages[tuple[Any, OptimizerState]]:
        """Make one step as a generator of pure stages, for callers that move the buffers themselves.

        Parameters
        ----------
        params, grads : array or sequence of arrays
            As for `step`.
        state : OptimizerState
            From `init` or the last step.
        donate : bool
            As for `step`.
        left_out : collection of int
            The parameters that stay as they are, because no rank has a gradient of them. The collection is read only
            after the exchange, so that the caller can fill it during the exchange.
        """
        stages = self._stages(params, grads, state, donate=donate, left_out=left_out)
        return owned(stages, owner_of(self, state))

    def _stages(
        self, params: Any, grads: Any, state: OptimizerState, *, donate: bool, left_out: Collection[int]
    ) -> Stages[tuple[Any, OptimizerState]]:
        tensors = as_tensors(params, "params")
        if donate and not state.step:  # the parameters of later steps are results of steps
            require_apart(params, "params")
        self.require_own(tensors, state)
        gradients = as_gradients(grads, tensors, state.names)
        if self.compares_gradients and not state.step:
            yield from compare_gradients(gradients, state.size, tensors[0], type(self).__name__)
        try:
            scale = 1.0 if self.clip_norm is None else (yield from self.clip_scale(gradients, state))
            means = yield from self.prepare(gradients, state, scale=scale).stages()
        except NonFiniteError as error:
            if self.nonfinite == "raise":  # a rank does not know which gradients of other ranks are bad
                raise (yield from name_gradients(error, gradients, state.names, state)) from error
            return as_given(tensors, params), state._replace(skipped=state.skipped + 1)
        if self.may_move_zeros(state):
            sample = not self.mixes_elements
            before = look_at(gradients, state.exact, sample=sample)
            after = look_at(means.values, state.exact, sample=sample)
            found = yield from moved_zeros(before, after, state, tensors[0])
            warn_of_moved_zeros(found, self.mean_of(state))
        if len(left_out) == len(tensors):  # no tensor is left for a step
            return as_given(tensors, params), state
        means = means._replace(donate=donate, left_out=frozenset(left_out))
        new_params, new_state = self.finish(tensors, means, state)
        if new_state.stage != state.stage:
            yield from compare_new_stage(self, state, new_state, tensors[0])
        return as_given(new_params, params), new_state

    def may_move_zeros(self, state: OptimizerState) -> bool:
        """Return whether the next step is the very first, is compressed, and may move elements without a gradient.

        After a warm-up no check is needed, since elements whose variance was 0 are masked.

        Parameters
        ----------
        state : OptimizerState
            The state of the last step.
        """
        begins = state.stage == "compressed" and not state.step and not all(state.exact)
        return begins and not keeps_zeros(self.mean_of(state))

    def require_own(self, params: Sequence[Array], state: OptimizerState) -> None:
        """Raise ValueError unless parameters have the number and the shapes for which a state was made.

        Parameters
        ----------
        params : sequence of arrays
            The parameters of a step.
        state : OptimizerState
            The state of the last step.
        """
        if len(params) != len(state.names):
            raise ValueError(f"params has {len(params)} arrays; state has {len(state.names)}")
        kept, compressed = self.moments_like_params(state), iter(state.exchange.shapes)
        for index, is_exact in enumerate(state.exact):
            shape = None if is_exact else next(compressed, None)
            if shape is None and not kept:
                continue
            shape = kept[index].shape if shape is None else shape
            given = params[index].shape
            if given != shape and tuple(given) != tuple(shape):
                raise ValueError(
                    f"params[{index}], the parameter {state.names[index]!r}, has shape {tuple(given)}; expected "
                    f"{tuple(shape)}, as when the state was made"
                )

    def moments_like_params(self, state: OptimizerState) -> tuple[Array, ...]:
        """Return one array of the state per parameter, in the parameter's shape, or an empty tuple.

        Parameters
        ----------
        state : OptimizerState
            The state of the last step.
        """
        return state.momentum

    def state_dict(self, state: OptimizerState) -> dict[str, Any]:
        """Return a state as a flat dict of named arrays and scalars, for `numpy.savez`, `torch.save` and the like.

        Parameters are named as in `init`. Residuals differ between ranks, so every rank must save its own dict. The
        entry "digests" holds a SHA-256 digest of every other entry, which loading verifies; remove it if you change a
        dict on purpose.

        Parameters
        ----------
        state : OptimizerState
            The state to save.
        """
        return self.record(state)

    def rate(self, state: OptimizerState) -> float:
        """Return the learning rate of the next step.

        Parameters
        ----------
        state : OptimizerState
            The state of the last step.

        Raises
        ------
        ValueError
            If a schedule does not return a finite number >= 0.
        """
        if not callable(self.learning_rate):
            return self.learning_rate
        given: Any = self.learning_rate(state.step)
        if is_traced(given):
            traced: float = given
            return traced
        try:
            rate = float(given)
        except (TypeError, ValueError):
            rate = math.nan
        if not 0 <= rate < math.inf:
            raise ValueError(
                f"learning_rate({state.step}) is {given!r}; expected a finite number >= 0 in every step"
            )
        return rate

    def rates(self, state: OptimizerState) -> tuple[float, ...]:
        """Return the learning rate of each tensor in the next step.

        Parameters
        ----------
        state : OptimizerState
            The state of the last step.
        """
        rate = self.rate(state)
        return tuple([rate * g.learning_rate_factor for g in group_of_each(tuple(self.groups), state.names)])

    def weight_decays(self, state: OptimizerState) -> tuple[float, ...]:
        """Return the weight decay of each tensor.

        Parameters
        ----------
        state : OptimizerState
            The state of the last step.
        """
        return setting_of_each(tuple(self.groups), state.names, "weight_decay", self.weight_decay)

    def clip_scale(self, grads: Sequence[Array], state: OptimizerState) -> Stages[float]:
        """Return the factor that brings sqrt(mean_i |g_i|^2) down to ``clip_norm``, the same on all ranks.

        Parameters
        ----------
        grads : sequence of arrays
            This rank's gradients.
        state : OptimizerState
            The state of the last step.
        """
        from qcomp.core.optimizers.clipping import clip_scale  # noqa: PLC0415 - few scripts clip

        assert self.clip_norm is not None
        return clip_scale(self.clip_norm, grads, state.size)

    def key(self, state: OptimizerState) -> Key:
        """Return the key of the next step's random draws.

        Parameters
        ----------
        state : OptimizerState
            The state of the last step.
        """
        return Key(seed=self.seed, step=state.step, tensor=state.stream, rank=state.rank)
