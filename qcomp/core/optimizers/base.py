"""What all optimizers share: explicit state, and a step of two pure halves around an exchange."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, Literal

from qcomp.core.checkpoint.format import MAKER, TOPOLOGY, from_state_dict, named_arrays, plain, to_state_dict
from qcomp.core.checkpoint.reshard import World
from qcomp.core.errors import NonFiniteError
from qcomp.core.handshake import handshake
from qcomp.core.mean.compressed_mean import CompressedMean, MeanState
from qcomp.core.mean.stages import Stages, Transport, drive
from qcomp.core.mean.topologies.registry import AUTO
from qcomp.core.mean.topologies.registry import names as topology_names
from qcomp.core.numeric.arrays import Array
from qcomp.core.numeric.random import Key
from qcomp.core.optimizers.agreement import choices, digests, explain_values, facts, stream_of
from qcomp.core.optimizers.average import EXACT, Average, Means, Part
from qcomp.core.optimizers.clipping import clip_scale
from qcomp.core.optimizers.groups import Group, as_groups, group_of_each
from qcomp.core.optimizers.makers import maker, require_maker
from qcomp.core.optimizers.nonfinite import name_gradients
from qcomp.core.optimizers.resuming import resume
from qcomp.core.optimizers.tensors import as_given, as_gradients, as_tensors
from qcomp.core.policies.patterns import require_matches
from qcomp.core.rehearsal import rehearse
from qcomp.core.state import OptimizerState

__all__ = ["Optimizer", "require_rank"]

_EXPLAIN: Mapping[str, Callable[[Sequence[Any]], str | None]] = {"values": explain_values}


@dataclass(frozen=True, kw_only=True)
class Optimizer(ABC):
    """Base of all optimizers.

    Parameters
    ----------
    learning_rate : float or callable
        A number, or a schedule: the learning rate as a function of the number of completed steps.
    weight_decay : float
        How strongly parameters are drawn to zero.
    clip_norm : float, optional
        The largest global norm sqrt(mean_i |g_i|^2) of the gradients; larger ones are scaled down on all ranks
        by the same factor. Costs an exchange of 8 bytes a step.
    seed : int
        Of the random draws of the compressor, which also depend on the names and shapes of the parameters. Two
        optimizers of models that are alike in both, in one job, want different seeds.
    nonfinite : {"raise", "skip"}
        What happens in a step in which a gradient on any rank is infinite or NaN: all ranks raise
        `NonFiniteError`, or all ranks leave the step out and count it. No state is touched either way.
    groups : sequence of Group
        Learning rates and weight decays of parameters by name.
    """

    learning_rate: float | Callable[[int], float]
    weight_decay: float = 0.0
    clip_norm: float | None = None
    seed: int = 0
    nonfinite: Literal["raise", "skip"] = "raise"
    groups: Sequence[Group] = ()

    def __post_init__(self) -> None:
        rate: Any = self.learning_rate
        fits = callable(rate) or (isinstance(rate, Real) and 0 <= float(rate) < math.inf)
        _require("learning_rate", rate, fits, "a finite number >= 0 or a schedule")
        _require("weight_decay", self.weight_decay, self.weight_decay >= 0, "a number >= 0")
        _require("clip_norm", self.clip_norm, self.clip_norm is None or self.clip_norm > 0, "a number > 0")
        seed: Any = self.seed
        fits = isinstance(seed, Integral) and 0 <= int(seed) < 1 << 64
        _require("seed", seed, fits, "an integer from 0 to 2**64 - 1")
        _require("nonfinite", self.nonfinite, self.nonfinite in ("raise", "skip"), "'raise' or 'skip'")
        object.__setattr__(self, "groups", as_groups(self.groups))

    @abstractmethod
    def start(self, params: Sequence[Array], names: tuple[str, ...], rank: int, size: int) -> OptimizerState:
        """Return the state before the first step, without an exchange."""

    @property
    def mean(self) -> CompressedMean:
        """How the compressed stage averages; its residuals are in the state."""
        return EXACT

    def mean_of(self, state: OptimizerState) -> CompressedMean:  # noqa: ARG002
        """Return how the compressed stage averages what this state is of."""
        return self.mean

    def own_kinds(self, stage: str) -> tuple[str, ...]:  # noqa: ARG002
        """Return which kinds of arrays are each rank's own in a stage, besides the residuals.

        Kinds of ``state.arrays``, "momentum" and "variance". With another number of ranks, every rank goes on from the
        mean of these over the old ones, see `load_state_dict`; all others must be the same on all ranks.
        """
        return ()

    def apart(self, stage: str) -> bool:  # noqa: ARG002
        """Return whether the ranks have different parameters in a stage, by design."""
        return False

    def adopt(self, saved: Mapping[str, Any], fresh: OptimizerState) -> Mapping[str, Any]:  # noqa: ARG002
        """Return a saved state with the entries that this optimizer keeps, if another may have saved other ones.

        Parameters
        ----------
        saved : mapping of str to array or scalar
            From `state_dict`, perhaps of another optimizer.
        fresh : OptimizerState
            Of this optimizer before the first step.
        """
        return saved

    def enter(self, state: OptimizerState, stage: str) -> OptimizerState:
        """Return a state as it is when a stage begins, with residuals of zero."""
        if stage != state.stage:
            raise ValueError(f"stage is {stage!r}; {type(self).__name__} has only {state.stage!r}")
        return state

    @abstractmethod
    def prepare(self, grads: Any, state: OptimizerState, *, scale: float = 1.0) -> Average:
        """Return what must be averaged in this step, the first half of `step`.

        Parameters
        ----------
        grads : array or sequence of arrays
            This rank's gradients.
        state : OptimizerState
            Of the last step.
        scale : float
            Factor of the gradients, the same on all ranks (clipping).
        """

    @abstractmethod
    def apply(self, params: Any, means: Means, state: OptimizerState) -> tuple[Any, OptimizerState]:
        """Return the parameters and the state after this step, from what was averaged, the second half."""

    def init(self, params: Any, comm: Transport, names: Sequence[str] | None = None) -> OptimizerState:
        """Return the state before the first step, after all ranks agreed that they were started alike.

        Parameters
        ----------
        params : array or sequence of arrays
            The parameters, of one library and device; the same on all ranks.
        comm : Communicator
            Its rank and size are kept, and if the topology asks for it which ranks have the same ``host``.
        names : sequence of str, optional
            Names of the parameters in checkpoints and policies; by default their numbers.

        Raises
        ------
        MismatchError
            On every rank, if the ranks differ in version, optimizer, settings, names or shapes, or in the value of a
            parameter: see `qcomp.comm.broadcast`.
        ValueError
            On every rank, if a group or a policy has a pattern that matches no name.
        """
        tensors = as_tensors(params, "params")
        names = self._names(names, tensors)
        return self._begin(tensors, comm, names, values=digests(names, tensors))

    @staticmethod
    def _names(names: Sequence[str] | None, tensors: Sequence[Array]) -> tuple[str, ...]:
        """Return the names of parameters, by default their numbers."""
        chosen = tuple(map(str, range(len(tensors)))) if names is None else tuple(names)
        if len(set(chosen)) != len(tensors) or len(chosen) != len(tensors):
            raise ValueError(
                f"names has {len(set(chosen))} different names; params has {len(tensors)} tensors"
            )
        return chosen

    def _begin(
        self,
        tensors: list[Array],
        comm: Transport,
        names: tuple[str, ...],
        *,
        values: Sequence[tuple[str, str]] = (),
    ) -> OptimizerState:
        """Return what `init` does, after the ranks have compared the digests of the ``values`` of their parameters."""
        state, problem = None, None
        try:
            state = self.start(tensors, names, comm.rank, comm.size)
        except Exception as error:
            problem = error  # of a policy, perhaps on this rank alone: tell all, so that no rank waits
        compressed = choices(state) if state else f"{type(problem).__name__}: {problem}"
        told = facts(self, names, tensors) | {"compressed": compressed, "values": values}
        handshake(comm, told, like=tensors[0], explain=_EXPLAIN)
        if state is None:
            assert problem is not None
            raise problem
        require_matches("groups", [group.pattern for group in self.groups], names)
        on_init = getattr(comm, "on_init", None)  # see qcomp.planning.watch
        if on_init is not None:
            on_init(self, tensors)
        state = state._replace(stream=stream_of(names, tensors))
        rehearse([*EXACT.compressors, *self.mean_of(state).compressors], tensors[0], steps=True)
        return self._on_nodes(state, tensors, self.mean.learn_nodes(comm, like=tensors[0]))

    def step(
        self, params: Any, grads: Any, state: OptimizerState, comm: Transport, *, donate: bool = False
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
            The one that `init` saw, or another of the same rank and size.
        donate : bool
            Whether the new parameters and moments may take the buffers of the old ones, which spares memory and time;
            only the returned ones are valid then, and what shares memory with the old ones, such as a dict of
            `state_dict`, changes. No two of the arrays may share memory. It does so where there are kernels, once the
            exchange has succeeded: whatever the exchange raises leaves everything as it was. A freeze rule that raises,
            or a warning that is an error, does so when the old values are gone.

        Returns
        -------
        params : array or list of arrays
            New arrays, or donated ones, the same on all ranks bit for bit.
        state : OptimizerState

        Raises
        ------
        NonFiniteError
            On every rank, if a gradient on any rank is not finite (with ``nonfinite="raise"``).
        CommunicatorError
            If the exchange did not complete. The parameters and the state passed in are still valid.
        """
        require_rank(state, comm)
        return drive(self.stages(params, grads, state, donate=donate), comm)

    def stages(
        self, params: Any, grads: Any, state: OptimizerState, *, donate: bool = False
    ) -> Stages[tuple[Any, OptimizerState]]:
        """Make one step as a generator of pure stages, for those who move the buffers themselves."""
        tensors = as_tensors(params, "params")
        gradients = as_gradients(grads, tensors, state.names)
        try:
            scale = 1.0 if self.clip_norm is None else (yield from self.clip_scale(gradients, state))
            means = yield from self.prepare(gradients, state, scale=scale).stages()
        except NonFiniteError as error:
            if self.nonfinite == "raise":  # which gradients it is about, no rank knows of the others
                raise (yield from name_gradients(error, gradients, state.names, state)) from error
            return as_given(tensors, params), state._replace(skipped=state.skipped + 1)
        new_params, new_state = self.apply(tensors, means._replace(donate=donate), state)
        return as_given(new_params, params), new_state

    def state_dict(self, state: OptimizerState) -> dict[str, Any]:
        """Return a state as a flat dict of named arrays and scalars, for `numpy.savez`, `torch.save` and the like.

        Parameters are named as in `init`. The residuals are this rank's own: every rank keeps its dict.
        """
        saved = to_state_dict(state, self.mean_of(state)) | {MAKER: maker(self)}
        return {**saved, TOPOLOGY: state.exchange.topology} if self.mean.topology == AUTO else saved

    def load_state_dict(
        self,
        saved: Mapping[str, Any] | Sequence[Mapping[str, Any]],
        params: Any,
        comm: Transport,
        names: Sequence[str] | None = None,
        *,
        strict: bool = True,
    ) -> OptimizerState:
        """Return the state that `state_dict` has saved; going on from it is as if there had been no stop.

        Parameters
        ----------
        saved : mapping of str to array or scalar, or sequence of them
            This rank's own dict. Or the dicts of all ranks that saved, however many those were, in any order and
            spread over the ranks in any way: all of them on every rank, as from a folder that all share, or each on
            one rank, and on some ranks an empty list.
        params, comm, names
            As for `init`.
        strict : bool
            Whether the optimizer that saved the state must be of this class, with the same compressors. False also
            silences the warning about other settings.

        Raises
        ------
        ValueError
            If the dict is of another rank, number of ranks, model or optimizer. On every rank alike, if a sequence of
            dicts is not complete, or not of one job and step.
        MismatchError
            On the other ranks, if that is so on some; on every rank, if the dicts are of different steps, or a
            parameter has different values on the ranks.

        Warns
        -----
        UserWarning
            If the state was saved with other settings than this optimizer has, naming them. And if dicts of another
            number of ranks were passed, or of ranks with other chunks. Every rank then begins with mean_i e_i + e_s of
            the old residuals, which keeps the sum identity of `CompressedMean`.
        """
        tensors = as_tensors(params, "params")
        fresh = self._begin(tensors, comm, self._names(names, tensors))
        if isinstance(saved, Sequence):
            saved = [self.adopt(one, fresh) for one in saved]

        def accept(one: Mapping[str, Any]) -> None:
            if strict:
                require_maker(one, self)

        def load(own: Mapping[str, Any]) -> OptimizerState:
            begun = fresh
            if isinstance(saved, Mapping) and self.mean.topology == AUTO and TOPOLOGY in saved:
                begun = self._in_topology(str(plain(saved[TOPOLOGY])), fresh, tensors)
            if isinstance(saved, Mapping):
                accept(own)
                own = self.adopt(own, begun)
            return from_state_dict(own, lambda stage: self.enter(begun, stage), self.mean_of(begun))

        loaded = resume(saved, self._world(fresh, tensors, accept), comm, load)
        if not self.apart(loaded.stage):
            handshake(comm, {"values": digests(fresh.names, tensors)}, like=tensors[0], explain=_EXPLAIN)
        return loaded

    def rate(self, state: OptimizerState) -> float:
        """Return the learning rate of the next step.

        Raises
        ------
        ValueError
            If a schedule gives something else than a finite number >= 0.
        """
        if not callable(self.learning_rate):
            return self.learning_rate
        given: Any = self.learning_rate(state.step)
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
        """Return the learning rate of each tensor in the next step."""
        rate = self.rate(state)
        return tuple(rate * g.learning_rate_factor for g in group_of_each(tuple(self.groups), state.names))

    def weight_decays(self, state: OptimizerState) -> tuple[float, ...]:
        """Return the weight decay of each tensor."""
        return tuple(
            self.weight_decay if g.weight_decay is None else g.weight_decay
            for g in group_of_each(tuple(self.groups), state.names)
        )

    def _world(
        self, fresh: OptimizerState, params: Sequence[Array], accept: Callable[[Mapping[str, Any]], None]
    ) -> World:
        """Describe where dicts of another world are to go on."""
        return World(
            fresh.rank,
            fresh.size,
            self.own_kinds,
            {name: math.prod(p.shape) for name, p in zip(fresh.names, params, strict=True)},
            lambda stage: dict(named_arrays(self.enter(fresh, stage), self.mean_of(fresh))),
            params[0],
            accept,
        )

    def clip_scale(self, grads: Sequence[Array], state: OptimizerState) -> Stages[float]:
        """Return the factor that brings sqrt(mean_i |g_i|^2) down to ``clip_norm``, the same on all ranks."""
        assert self.clip_norm is not None
        return clip_scale(self.clip_norm, grads, state.size)

    def _exact_part(self, tensors: Sequence[int], values: Sequence[Array], state: OptimizerState) -> Part:
        """Return a part in which these tensors are averaged exactly, in the stages of the compressed mean."""
        nothing = MeanState(state.rank, state.size, (), (), nodes=state.exchange.nodes)
        topology = EXACT.topology if state.stage == "warmup" else self.mean_of(state).topology
        return Part(EXACT.within(topology), tuple(tensors), tuple(values), nothing, self._key(state))

    def _on_nodes(
        self, state: OptimizerState, params: Sequence[Array], nodes: tuple[int, ...]
    ) -> OptimizerState:
        """Return a first state that knows the node of each rank, and the topology that is best for them."""
        on_nodes = state._replace(exchange=state.exchange._replace(nodes=nodes, topology=AUTO))
        compressed = [tuple(p.shape) for p, exact in zip(params, state.exact, strict=False) if not exact]
        topology = self.mean_of(on_nodes).chosen(compressed, state.size, nodes).topology
        return self._in_topology(topology, on_nodes, params)

    def _in_topology(self, topology: str, state: OptimizerState, params: Sequence[Array]) -> OptimizerState:
        """Return a first state in a topology, with the residuals that a rank keeps there."""
        if topology not in topology_names():
            raise ValueError(f"the state has topology {topology!r}; expected one that this release knows")
        exchange = state.exchange._replace(topology=topology)
        state = state._replace(exchange=exchange)
        if exchange.nodes and exchange.worker:
            compressed = [p for p, is_exact in zip(params, state.exact, strict=True) if not is_exact]
            exchange = self.mean_of(state).zeros(
                compressed, rank=state.rank, size=state.size, nodes=exchange.nodes
            )
            state = state._replace(exchange=exchange)
        return state

    def _key(self, state: OptimizerState) -> Key:
        return Key(seed=self.seed, step=state.step, tensor=state.stream, rank=state.rank)


def require_rank(state: OptimizerState, comm: Transport) -> None:
    """Raise ValueError unless a communicator is of the rank and size of a state."""
    if (comm.rank, comm.size) != (state.rank, state.size):
        raise ValueError(
            f"comm is rank {comm.rank} of {comm.size}; state is of rank {state.rank} of {state.size}"
        )


def _require(argument: str, value: object, holds: bool, expected: str) -> None:
    if not holds:
        raise ValueError(f"{argument} is {value!r}; expected {expected}")
