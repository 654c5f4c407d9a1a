"""`OuterLoop`: every rank trains alone for some steps, then an outer optimizer moves the shared parameters."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from qcomp.core import primitives
from qcomp.core.errors import NonFiniteError
from qcomp.core.mean.stages import Stages, Transport, drive, owned, require_rank
from qcomp.core.numeric.arrays import Array, array_namespace, as_count, to_compute_dtype
from qcomp.core.numeric.random import Key
from qcomp.core.optimizers.agreement import compare_gradients
from qcomp.core.optimizers.compression import Average, Means
from qcomp.core.optimizers.nonfinite import name_gradients
from qcomp.core.optimizers.replica import owner_of
from qcomp.core.optimizers.tensors import as_given, as_gradients, as_tensors, copy
from qcomp.core.outer.fragment_state import put, take
from qcomp.core.outer.fragments import LOCAL, due, stage_of, under_way
from qcomp.core.outer.requirements import beside, fitting, require_equal, same_step
from qcomp.core.outer.settings import ANCHOR, OWN, SENT, WARMUP, OuterSettings, nothing_like, rounds_key
from qcomp.core.state import OptimizerState

_IN_EVERY_STEP = (
    "every rank must call OuterLoop.step of the same loops in the same order after each of its steps, and all must "
    "resume from checkpoints of the same step"
)
_NAME = "an outer loop"


@dataclass(frozen=True, kw_only=True)
class OuterLoop(OuterSettings):
    """Local steps with any optimizer, and after every ``every`` steps a compressed exchange of their sum.

    In an outer round every rank makes ``every`` inner steps on its own, from the shared parameters. Then the ranks
    average their outer gradients, the differences between the shared parameters and their own, and an outer optimizer
    moves the shared parameters. All ranks begin the next outer round from the moved parameters. LocalSGD, DiLoCo and
    SparseLoCo are this loop with certain settings; see `qcomp.outer`.

    Parameters
    ----------
    outer : Optimizer, default SGD(learning_rate=1.0)
        The outer optimizer: `SGD`, `Adam`, `Lion` or `Lamb`, which do not compress. Its schedules get the number of
        completed outer rounds. ``SGD(learning_rate=1.0)`` averages the parameters.
    every : int
        Inner steps in an outer round, at least 1. Required.
    compressor : Compressor, default Identity()
        Compresses the outer gradients, on workers and servers.
    averaging : Averaging, default Averaging()
        Topology and error feedback of the exchange, see `Averaging`; or a `PowerSGD`. Each tensor is always compressed
        separately.
    exact : callable or None, default ExactBelow(10_000)
        Policy that gets all tensors and selects the tensors that stay exact, see `ExactBelow`. None compresses
        everything.
    compressors : callable, optional
        Policy that replaces ``compressor``: it returns a compressor for each tensor, or None if the tensor stays exact,
        see `ByName`. By default, ``compressor`` compresses all tensors.
    decay : float, default 1
        Multiplies the residuals before feedback adds them, from 0 to 1. 1 keeps everything that compression lost.
    scale : float, default 1
        Multiplies the outer gradients of compressed tensors before they are added to the residuals, above 0. The code
        of MuLoCo and of SparseLoCo uses the outer learning rate here, and once more in the outer optimizer.
    fragments : int, default 1
        Number of groups of whole tensors, balanced by size, at most ``every`` and at most the number of tensors. Each
        group is exchanged once in ``every`` steps, at equally spaced turns.
    delay : int, default 0
        Steps from sending a fragment to applying the result, below ``every``. The result does not depend on how long
        the bytes travel. With `Overlapped`, the bytes travel during these steps.
    turn : {"send", "apply"}, default "send"
        What happens in a fragment's turn. With ``"send"``, as in the paper, the fragment is sent, and the result is
        applied ``delay`` steps later. With ``"apply"``, as in torchft, the result is applied, and the fragment was sent
        ``delay`` steps earlier; ``delay`` must then be below every // fragments.
    mixing : float, default 0
        Weight of a rank's own parameters when a result is applied, from 0 to 1: x_i' = mixing x_i + (1 - mixing) x',
        where x' are the shared parameters. With 1 a rank keeps its own parameters, and results move only the shared
        parameters.
    warmup : int, default 0
        Number of steps before the first outer round in which gradients are averaged exactly, see `average`.
    seed : int, default 0
        Seed of the compressor's random draws, 0 to 2**64 - 1.

    Notes
    -----
    With the shared parameters x, and x_i after the inner steps of rank i: d_i = x - x_i, p_i = decay e_i + scale d_i,
    e_i' = p_i - C(p_i), D = mean_i C(p_i), x' = outer(x, D). In two phases the server compresses the mean again, with a
    residual e_s of its own, which also decays. With decay 1, the sum of D over all rounds is the sum of mean_i scale
    d_i, minus the final (mean_i e_i + e_s). For exact tensors D = mean_i d_i.

    Once in ``every`` steps a rank sends 2 (N - 1) / N times the payload of the model in two phases, or (N - 1) times by
    all-gather. It also sends 8 bytes per fragment to every rank, and 4 bytes more in the first round. A step of the
    warm-up sends 2 (N - 1) / N * 32 bits per element. A state holds the shared parameters, residuals and outer moments,
    and the outer gradients of the fragments under way. If parameters have half precision, shared parameters are kept in
    float32.

    If a job resumes on a different number of ranks, every rank gets the mean of the old ranks' parameters, and the mean
    of their outer gradients under way, so that the mean of the outer gradients does not change. Residuals become mean_i
    e_i + e_s. A state from the warm-up, or from a loop without compression at the end of an outer round, fits every
    rank, on any number of ranks.

    The loop neither sees nor averages the state of the inner optimizer or the buffers of a model. The caller saves and
    restores both, and gives a new rank the state of an old rank, or a fresh state. `qcomp.outer.InnerStates` averages
    optimizer states. Source: Stich, ICLR 2019 (LocalSGD); Douillard et al., arXiv 2311.08105 (DiLoCo) and 2501.18512
    (fragments, delay, mixing); Sarfi et al., arXiv 2508.15706 (decaying residuals).

    Examples
    --------
    >>> import numpy as np, qcomp
    >>> loop = qcomp.OuterLoop(every=4, outer=qcomp.SGD(learning_rate=1.0))
    >>> inner, alone = qcomp.SGD(learning_rate=0.5), qcomp.comm.LocalCommunicator.alone()
    >>> def rank_main(comm):
    ...     params = np.zeros(2)
    ...     state, own = loop.init(params, comm), inner.init(params, alone)
    ...     for _ in range(8):
    ...         gradient = params - comm.rank  # towards 0 on one rank, and towards 1 on the other
    ...         params, own = inner.step(params, gradient, own, alone)
    ...         params, state = loop.step(params, state, comm)
    ...     return params.round(3).tolist()
    >>> qcomp.comm.run_local(2, rank_main)
    [[0.498, 0.498], [0.498, 0.498]]
    """

    def average(self, grads: Any, state: OptimizerState, comm: Transport) -> Any:
        """Return the exact mean of the gradients over the ranks in the warm-up, and the given gradients afterwards.

        Call it before each inner step, if there is a warm-up. The inner optimizers of all ranks then make the same
        steps, so their states are equal when the first outer round begins.

        Parameters
        ----------
        grads : array or sequence of arrays
            This rank's gradients, with the shapes of the parameters.
        state : OptimizerState
            From `init` or the last step.
        comm : Communicator
            As for `step`.

        Raises
        ------
        NonFiniteError
            On every rank, if a gradient on any rank is not finite. The inner and the outer state have not changed.
        """
        require_rank(state, comm)
        return drive(self.average_stages(grads, state), comm)

    def average_stages(self, grads: Any, state: OptimizerState) -> Stages[Any]:
        """`average` as a generator of pure stages.

        Parameters
        ----------
        grads : array or sequence of arrays
            As for `average`.
        state : OptimizerState
            As for `average`.
        """
        return (yield from owned(self._average_stages(grads, state), owner_of(self, state)))

    def _average_stages(self, grads: Any, state: OptimizerState) -> Stages[Any]:
        if state.stage != WARMUP:
            return grads
        gradients = as_gradients(grads, state.arrays[ANCHOR], state.names)
        if not state.step:
            yield from compare_gradients(gradients, state.size, gradients[0], _NAME)
        try:
            means = yield from self.compression.exactly([copy(g) for g in gradients], state).stages()
        except NonFiniteError as error:
            raise (yield from name_gradients(error, gradients, state.names, state)) from error
        return as_given(means.values, grads)

    def step(
        self,
        params: Any,
        state: OptimizerState,
        comm: Transport,
        *,
        shares: bool = False,
        weight: float | None = None,
    ) -> tuple[Any, OptimizerState]:
        """Count an inner step, exchange the fragments whose turn it is, and apply the results that are due.

        Call it after each inner step. Most calls only count, and return the parameters that they were given.

        Parameters
        ----------
        params : array or sequence of arrays
            This rank's parameters after an inner step. They are not written to.
        state : OptimizerState
            From `init` or the last step.
        comm : Communicator
            The communicator given to `init`, or another with the same rank and size.
        shares : bool, default False
            Whether the returned parameters may share memory with the state, for callers that copy them.
        weight : float, optional
            How much this rank's outer gradients count in the mean, if a fragment is sent in this step: for instance the
            number of tokens since the fragment was last sent; see `weighted`. In such a step either all ranks pass a
            weight, or no rank does; then all ranks count alike. In the warm-up, this weight is ignored: instead, pass
            `average` gradients that `weighted` has multiplied.

        Returns
        -------
        params : array or list of arrays
            The parameters from which the next inner step begins. With ``mixing=0``, applied results are the same on all
            ranks bit for bit.
        state : OptimizerState

        Raises
        ------
        NonFiniteError
            On every rank, if an outer gradient on any rank is not finite.
        MismatchError
            On every rank, if the ranks are at different inner steps; or, at the end of the warm-up, if their parameters
            differ.
        CommunicatorError
            If the exchange failed. Whatever is raised, the parameters and the state passed in are still valid.

        Warns
        -----
        UserWarning
            On every rank, if all ranks have the same outer gradients in the first round, because they train on the same
            data, or because the gradients were already averaged. The check sends 4 bytes to all others. With a warm-up,
            `average` compares gradients instead.
        """
        require_rank(state, comm)
        stages = self.stages(params, state, shares=shares, compares=True, weight=weight)
        return drive(stages, comm)

    def stages(
        self,
        params: Any,
        state: OptimizerState,
        landed: Mapping[int, Means] = MappingProxyType({}),
        *,
        shares: bool = False,
        compares: bool = False,
        weight: float | None = None,
    ) -> Stages[tuple[Any, OptimizerState]]:
        """`step` as a generator of pure stages, for callers that move the buffers themselves.

        Parameters
        ----------
        params : array or sequence of arrays
            As for `step`.
        state : OptimizerState
            As for `step`.
        landed : mapping of int to Means
            Results of `exchange` for some of the fragments that `landing` returns. The others are exchanged in this
            step.
        shares : bool
            As for `step`.
        compares : bool
            Whether to warn, as `step` does, if all ranks have the same outer gradients in the first round. Use False if
            ranks may join or leave, since a new rank begins with another rank's parameters.
        weight : float, optional
            As for `step`.
        """
        stages = self._stages(params, state, landed, shares=shares, compares=compares, weight=weight)
        return (yield from owned(stages, owner_of(self, state)))

    def _stages(
        self,
        params: Any,
        state: OptimizerState,
        landed: Mapping[int, Means],
        *,
        shares: bool,
        compares: bool,
        weight: float | None,
    ) -> Stages[tuple[Any, OptimizerState]]:
        tensors = fitting(params, state)
        after = state._replace(step=state.step + 1)
        if state.stage == WARMUP:
            if after.step >= self.warmup:
                yield from require_equal(tensors, after, self.warmup)
                anchor = tuple(copy(to_compute_dtype(p)) for p in tensors)
                after = after._replace(stage=LOCAL, arrays={**after.arrays, ANCHOR: anchor})
            return as_given(tensors, params), after
        for fragment in self.landing(state):
            means = landed[fragment] if fragment in landed else (yield from self.exchange(after, fragment))
            if compares:
                yield from self._compare(after)
            tensors, after = self.land(fragment, means, tensors, after)
        departing = self._departing(after)
        if departing is not None:
            factor = 1.0
            if weight is not None:
                from qcomp.core.mean.weights import weight_stages  # noqa: PLC0415 - few scripts weigh

                factor = yield from weight_stages(weight, state.size, tensors[0])
            after = self.depart(departing, tensors, after, factor)
            if not self.delay:
                means = yield from self.exchange(after, departing)
                if compares:
                    yield from self._compare(after)
                tensors, after = self.land(departing, means, tensors, after)
        if not shares:
            pairs = zip(tensors, after.arrays[ANCHOR], strict=True)
            tensors = [copy(p) if p is x else p for p, x in pairs]
        return as_given(tensors, params), after

    def shared(self, params: Any, state: OptimizerState) -> Any:
        """Return the shared parameters, to evaluate or publish. They are the same on all ranks after every step.

        Parameters
        ----------
        params : array or sequence of arrays
            This rank's parameters, which give the dtypes.
        state : OptimizerState
            The state of the last step.

        Returns
        -------
        array or list of arrays
            New arrays. In the warm-up, ``params`` themselves are the shared parameters.
        """
        tensors = fitting(params, state)
        shared = tensors if state.stage == WARMUP else state.arrays[ANCHOR]
        return as_given([_in_dtype_of(p, x) for p, x in zip(tensors, shared, strict=True)], params)

    def landing(self, state: OptimizerState) -> tuple[int, ...]:
        """Return the fragments under way whose results the next step applies.

        Parameters
        ----------
        state : OptimizerState
            The state of the last step.
        """
        sent = under_way(state.stage).items()
        return tuple(fragment for fragment, step in sent if state.step + 1 >= step + self.delay)

    def exchanges(self, state: OptimizerState) -> bool:
        """Return whether the next step exchanges anything; in the warm-up, `average` exchanges before each step.

        Parameters
        ----------
        state : OptimizerState
            The state of the last step.
        """
        if state.stage == WARMUP:
            return state.step + 1 >= self.warmup
        departs = self._departing(state._replace(step=state.step + 1)) is not None
        return bool(self.landing(state)) or (departs and not self.delay)

    def members(self, state: OptimizerState, fragment: int) -> tuple[int, ...]:
        """Return the numbers of the tensors in a fragment.

        Parameters
        ----------
        state : OptimizerState
            Any state of this loop.
        fragment : int
            The number of the fragment, below ``fragments``.
        """
        return self._fragments(state.arrays[ANCHOR])[fragment]

    def exchange(self, state: OptimizerState, fragment: int) -> Stages[Means]:
        """Average a fragment that is under way, as a generator of pure stages, without changing the state.

        Parameters
        ----------
        state : OptimizerState
            A state in which the fragment is under way.
        fragment : int
            The number of the fragment.
        """
        sent = under_way(state.stage)[fragment]
        doing = f"fragment {fragment} after step {sent}"
        owner = owner_of(self, state)._replace(doing=doing, advice=_IN_EVERY_STEP)
        return (yield from owned(self._exchange(state, fragment, sent), owner))

    def _exchange(self, state: OptimizerState, fragment: int, sent: int) -> Stages[Means]:
        average = self.prepare(state, fragment)
        values = average.own
        check = same_step(sent, state, values[0])
        try:
            if self.delay:
                return (yield from beside(check, average.stages()))
            # Nothing overlaps with the check, so it runs first: different steps are found before different sizes.
            yield from check
            return (yield from average.stages())
        except NonFiniteError as error:
            names = [state.names[i] for i in self.members(state, fragment)]
            before = state._replace(step=sent - 1)
            raise (yield from name_gradients(error, values, names, before, what="outer gradient")) from error

    def prepare(self, state: OptimizerState, fragment: int) -> Average:
        """Return what `exchange` averages: the outer gradients of a fragment, and the residuals after their decay.

        Parameters
        ----------
        state : OptimizerState
            A state in which the fragment is under way.
        fragment : int
            The number of the fragment.
        """
        part = take(state, self.members(state, fragment), self.compression)
        if self.decay != 1 and not all(part.exact):
            rescaled = self.mean_of(part).rescaled(part.exchange, self.decay)
            part = part._replace(exchange=rescaled)
        values = part.arrays[SENT]
        if self.scale != 1:
            values = tuple(
                x if exact else primitives.scale(x, self.scale)
                for x, exact in zip(values, part.exact, strict=True)
            )
        step = under_way(state.stage)[fragment]
        key = Key(seed=self.seed, step=step, tensor=state.stream, rank=state.rank)
        average = self.compression.average(values, part, key)
        return average._replace(own=values, at_once=True)

    def state_dict(self, params: Any, state: OptimizerState) -> dict[str, Any]:
        """Return parameters and state as a flat dict of named arrays and scalars, as `Optimizer.state_dict` does.

        Call it after any inner step. Ranks differ in their parameters and residuals, so every rank must save its own
        dict, and the state of its inner optimizer.

        Parameters
        ----------
        params : array or sequence of arrays
            This rank's parameters. The dict has copies of them in the compute dtype.
        state : OptimizerState
            The state to save.
        """
        return self.record(self.whole(params, state))

    def whole(self, params: Any, state: OptimizerState) -> OptimizerState:
        """Return the state with copies of this rank's parameters added, as in a saved state."""
        local = tuple(copy(to_compute_dtype(p)) for p in fitting(params, state))
        return state._replace(arrays={**state.arrays, OWN: local})

    def parted(self, like: Any, whole: OptimizerState) -> tuple[Any, OptimizerState]:
        """Split the result of `whole` into this rank's parameters and its state."""
        arrays = dict(whole.arrays)
        pairs = zip(as_tensors(like, "like"), arrays.pop(OWN), strict=True)
        return as_given([_in_dtype_of(p, x) for p, x in pairs], like), whole._replace(arrays=arrays)

    def _departing(self, state: OptimizerState) -> int | None:
        """Return the fragment that is sent after the last step of a state, or None."""
        ahead = self.delay if self.turn == "apply" else 0
        return due(state.step - self.warmup + ahead, self.every, self.fragments)

    def depart(
        self, fragment: int, tensors: Sequence[Array], state: OptimizerState, factor: float
    ) -> OptimizerState:
        """Return the state in which a fragment's outer gradients are under way; `exchange` then averages them.

        Parameters
        ----------
        fragment : int
            The number of the fragment.
        tensors : sequence of arrays
            This rank's parameters.
        state : OptimizerState
            The state of the last step, which has counted that step.
        factor : float
            Multiplies the outer gradients.
        """
        from qcomp.core.mean.weights import product  # noqa: PLC0415 - few scripts weigh

        anchor = state.arrays[ANCHOR]
        sent = list(state.arrays.get(SENT) or map(nothing_like, anchor))
        for i in self.members(state, fragment):
            # The round began from the shared parameters, rounded to the parameter's own precision.
            xp = array_namespace(anchor[i])
            start = to_compute_dtype(xp.astype(anchor[i], tensors[i].dtype, copy=False))
            moved = primitives.descend(start, to_compute_dtype(tensors[i]), 1.0, 0.0)
            sent[i] = moved if factor == 1 else product(moved, factor)
        stage = stage_of({**under_way(state.stage), fragment: state.step})
        return state._replace(stage=stage, arrays={**state.arrays, SENT: tuple(sent)})

    def _compare(self, state: OptimizerState) -> Stages[None]:
        """Warn on every rank if all send the same outer gradients in the first exchange, unless there was a warm-up."""
        if not self.warmup and not state.numbers[rounds_key(0)]:
            sent = state.arrays[SENT]
            yield from compare_gradients(
                sent, state.size, sent[0], _NAME, "outer gradients in the first round"
            )

    def land(
        self, fragment: int, means: Means, tensors: Sequence[Array], state: OptimizerState
    ) -> tuple[list[Array], OptimizerState]:
        """Move a fragment's shared parameters, and move this rank's towards them; both may end up as the same arrays.

        Parameters
        ----------
        fragment : int
            The number of the fragment.
        means : Means
            The result of its exchange.
        tensors : sequence of arrays
            This rank's parameters.
        state : OptimizerState
            A state in which the fragment is under way.
        """
        members = self.members(state, fragment)
        part = take(state, members, self.compression)
        rounds = state.numbers[rounds_key(fragment)]
        anchor, moved = self.outer.apply(
            list(part.arrays[ANCHOR]), means, part._replace(step=as_count(rounds))
        )
        arrays = {**moved.arrays, ANCHOR: tuple(anchor), SENT: tuple(map(nothing_like, anchor))}
        part = part._replace(
            momentum=moved.momentum, variance=moved.variance, exchange=means.exchange, arrays=arrays
        )
        after = put(part, state, members, self.compression)
        still = under_way(state.stage)
        del still[fragment]
        kept = {kind: xs for kind, xs in after.arrays.items() if still or kind != SENT}
        numbers = {**state.numbers, **moved.numbers, rounds_key(fragment): rounds + 1}
        new = list(tensors)
        for i, x in zip(members, anchor, strict=True):
            mixed = primitives.momentum(to_compute_dtype(new[i]), x, self.mixing, 1.0) if self.mixing else x
            new[i] = array_namespace(x).astype(mixed, new[i].dtype, copy=False)
        return new, after._replace(stage=stage_of(still), arrays=kept, numbers=numbers)


def _in_dtype_of(p: Array, x: Array) -> Array:
    """Return a copy of an array in the dtype of a parameter."""
    return copy(x) if x.dtype == p.dtype else array_namespace(x).astype(x, p.dtype)
