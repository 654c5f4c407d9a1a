"""`Replica`, the base of optimizers and outer loops: how they start from a first or saved state, and are saved."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cached_property
from typing import Any, Generic, Literal, NamedTuple, TypeVar

from qcomp.core.checkpoint.format import (
    MAKER,
    SERVER,
    TOPOLOGY,
    WORKER,
    from_state_dict,
    named_arrays,
    read_arrays,
    read_scalars,
    require_intact,
    require_sizes,
    sealed,
    to_state_dict,
)
from qcomp.core.checkpoint.manifest import CURES, as_of_rank, own_kinds_in, phrase
from qcomp.core.checkpoint.reshard import regroup
from qcomp.core.checkpoint.schema import Number, shown
from qcomp.core.checkpoint.world import World
from qcomp.core.handshake import agree_stages, gather_texts, handshake_stages
from qcomp.core.mean.averaging import Averaging
from qcomp.core.mean.compressed_mean import CompressedMean
from qcomp.core.mean.nodes import require_rank_in
from qcomp.core.mean.stages import Owner, Stages, Transport, drive, owned, place_in
from qcomp.core.mean.topologies.registry import AUTO
from qcomp.core.numeric.arrays import Array, dtype_name
from qcomp.core.optimizers.agreement import (
    choices,
    compare_states,
    digests,
    explain_values,
    settings_of,
    stream_of,
)
from qcomp.core.optimizers.compression import EXACT, Compressing
from qcomp.core.optimizers.groups import Group, patterns_of
from qcomp.core.optimizers.makers import maker, require_maker
from qcomp.core.optimizers.own_counts import limits_of_own, with_numbers_of
from qcomp.core.optimizers.tensors import as_given, as_tensors, require_whole
from qcomp.core.policies.patterns import require_matches
from qcomp.core.primitives.rehearsal import rehearse
from qcomp.core.settings import plain_numbers
from qcomp.core.state import OptimizerState

Saved = Mapping[str, Any]
Loaded = TypeVar("Loaded")

_ANY_KIND = "optimizer"
"""`Owner.kind` of all ranks before the handshake, which compares the classes and reports differences better."""

_STEPS = (0, 1, 10, 100, 1_000, 10_000, 100_000)

_EXPLAIN: Mapping[str, Callable[[Sequence[Any]], str | None]] = {"values": explain_values}


class Place(NamedTuple):
    """The rank and the world in which a replica starts."""

    rank: int
    size: int
    host: str | None
    """Name of this rank's machine, if it is known."""
    number: int = 0
    """The number of this replica among the replicas that start over the same communicator."""


def names_of(names: Sequence[str] | None, tensors: Sequence[Array]) -> tuple[str, ...]:
    """Return the names of parameters, by default their numbers."""
    chosen = tuple(map(str, range(len(tensors)))) if names is None else tuple(names)
    for index, name in enumerate(chosen):
        if not isinstance(name, str):
            raise TypeError(f"names[{index}] is {name!r}; expected a str")
    if len(set(chosen)) != len(tensors) or len(chosen) != len(tensors):
        raise ValueError(f"names has {len(set(chosen))} different names; params has {len(tensors)} tensors")
    return chosen


class Replica(ABC, Generic[Loaded]):
    """Base of optimizers and outer loops: dataclasses of settings, equal on all ranks, whose state is kept outside.

    A replica starts once the ranks have compared settings and parameters. Its methods describe its state, so that it
    can be saved, loaded and resized.
    """

    resizes = True
    """Whether saved states can be loaded on a different number of ranks, even without the arrays of some ranks."""
    sharded = False
    """Whether each rank has a part of each parameter."""

    def __post_init__(self) -> None:
        plain_numbers(self)
        averaging = getattr(self, "averaging", None)
        if averaging is not None and not isinstance(averaging, Averaging):
            raise TypeError(f"averaging is {averaging!r}; expected a qcomp.Averaging")

    @abstractmethod
    def moves(self) -> tuple[Sequence[Group], float | Callable[[int], float]]:
        """Return the groups and the learning rate with which parameters move."""

    @abstractmethod
    def initial_state(
        self, params: Sequence[Array], names: tuple[str, ...], rank: int, size: int
    ) -> OptimizerState:
        """Return the state before the first step, without an exchange.

        Parameters
        ----------
        params : sequence of arrays
            The parameters.
        names : tuple of str
            Their names.
        rank, size : int
            This rank, and the number of ranks.
        """

    def shapes_of(self, params: Sequence[Array]) -> list[tuple[int, ...]]:
        """Return the shapes of whole parameters.

        Parameters
        ----------
        params : sequence of arrays
            This rank's parameters.
        """
        return [tuple(p.shape) for p in params]

    @cached_property
    def compression(self) -> Compressing:
        """What is compressed, and how. A class without a setting ``averaging`` compresses nothing."""
        fields: Any = self  # a class with averaging also has these settings
        if not hasattr(fields, "averaging"):
            return Compressing(EXACT)
        return Compressing(fields.averaging.mean(fields.compressor), fields.exact, fields.compressors)

    @property
    def mean(self) -> CompressedMean:
        """The mean of the compressed stage, if all tensors use one compressor; its residuals are in the state."""
        return self.compression.mean

    def mean_of(self, state: OptimizerState) -> CompressedMean:
        """Return the mean of the compressed stage, with the compressors and the topology that a state has chosen.

        Parameters
        ----------
        state : OptimizerState
            The state of the last step.
        """
        return self.compression.mean_of(state)

    def own_kinds(self, stage: str) -> tuple[str, ...]:  # noqa: ARG002
        """Return the kinds of arrays that differ between ranks in a stage, besides the residuals.

        Possible kinds are the keys of ``state.arrays``, "momentum" and "variance". On a different number of ranks,
        every rank resumes with the mean of these arrays over the old ranks, see `load_state_dict`. Arrays of all other
        kinds must be equal on all ranks.

        Parameters
        ----------
        stage : str
            A stage, such as "warmup" or "compressed".
        """
        return ()

    def differing_kinds(self, saved: Mapping[str, Any]) -> tuple[str, ...]:
        """Return the kinds of arrays in which the saved states of the ranks may differ: residuals, and `own_kinds`.

        A state without such arrays, as in an exact warm-up, fits every rank, so one rank may save it for all.

        Parameters
        ----------
        saved : mapping of str to array or scalar
            From `state_dict`; numbers and texts are Python objects.
        """
        return (WORKER, SERVER, *self.mean.owned_kinds, *self.own_kinds(saved["stage"]))

    def apart(self, stage: str) -> bool:  # noqa: ARG002
        """Return whether the ranks have different parameters in a stage by design.

        Parameters
        ----------
        stage : str
            A stage, such as "warmup" or "compressed".
        """
        return False

    def limits(self, state: OptimizerState) -> Mapping[str, Number]:  # noqa: ARG002
        """Return the limits of ``state.numbers`` in a saved state, by name.

        A number without limits may have any finite value; if it is not finite in ``state``, it may have any value at
        all.

        Parameters
        ----------
        state : OptimizerState
            What `enter` returns for the stage of a saved state, with its step.
        """
        return {}

    def adopt(self, saved: Mapping[str, Any], fresh: OptimizerState) -> Mapping[str, Any]:  # noqa: ARG002
        """Convert a saved state with other entries, if this optimizer accepts it, to exactly this optimizer's entries.

        Parameters
        ----------
        saved : mapping of str to array or scalar
            From `state_dict`, perhaps of another optimizer; numbers and texts are Python objects.
        fresh : OptimizerState
            The state before the first step.
        """
        return saved

    def enter(self, state: OptimizerState, stage: str) -> OptimizerState:
        """Return the state at the start of a stage, with zero residuals.

        Parameters
        ----------
        state : OptimizerState
            The state before the stage.
        stage : str
            A stage, such as "warmup" or "compressed".
        """
        if stage != state.stage:
            raise ValueError(f"stage is {shown(stage)}; {type(self).__name__} has only {state.stage!r}")
        return state

    def whole(self, params: Any, state: OptimizerState) -> OptimizerState:  # noqa: ARG002
        """Return a state that holds everything to be saved; the inverse of `parted`.

        Parameters
        ----------
        params : array or sequence of arrays
            This rank's parameters.
        state : OptimizerState
            The state of the last step.
        """
        return state

    def parted(self, like: Any, whole: OptimizerState) -> tuple[Any, OptimizerState]:
        """Return this rank's parameters and its state, from the result of `whole`.

        Parameters
        ----------
        like : array or sequence of arrays
            The parameters. If the ranks have parameters of their own, the values do not matter, only the dtypes.
        whole : OptimizerState
            From `whole`.
        """
        return like, whole

    def require_maker(self, saved: Mapping[str, Any]) -> None:
        """Raise ValueError if another class or compressor made a saved state; warn if other settings differ.

        Parameters
        ----------
        saved : mapping of str to scalar
            The numbers and texts of a saved state, as Python objects.
        """
        require_maker(saved, self)

    def _compare_parameters(self, names: Sequence[str], params: Sequence[Array], size: int) -> Stages[None]:
        """Raise MismatchError on every rank unless ranks that must hold the same parameters do so."""
        values = {"values": digests(names, params)}
        yield from handshake_stages(values, size=size, like=params[0], explain=_EXPLAIN)

    @abstractmethod
    def _loaded(self, params: Any, state: OptimizerState) -> Loaded:
        """Return what `load_state_dict` returns."""

    def record(self, whole: OptimizerState) -> dict[str, Any]:
        """Return a flat dict of named arrays and scalars, with digests, made from the result of `whole`.

        Parameters
        ----------
        whole : OptimizerState
            From `whole`.
        """
        saved = to_state_dict(whole, self.mean_of(whole)) | {MAKER: maker(self)}
        chosen = {TOPOLOGY: whole.exchange.topology} if self.mean.topology == AUTO else {}
        return sealed({**saved, **chosen})

    def init(self, params: Any, comm: Transport, names: Sequence[str] | None = None) -> OptimizerState:
        """Return the state before the first step, after verifying that all ranks were started alike.

        Parameters
        ----------
        params : array or sequence of arrays
            The parameters, of one library and device; equal on all ranks.
        comm : Communicator
            The communicator. The state keeps the rank and size and, if the topology needs it, which ranks share a
            ``host``.
        names : sequence of str, optional
            Names of the parameters in checkpoints and policies; by default their numbers.

        Raises
        ------
        MismatchError
            On every rank, if the ranks differ in version, class, settings, names or shapes, or in a parameter's
            values, see `qcomp.comm.broadcast`.
        ValueError
            On every rank, if a group or a policy has a pattern that matches no name, or a setting does not fit the
            parameters.
        """
        return drive(self.init_stages(params, **place_in(comm), names=names), comm)

    def init_stages(
        self,
        params: Any,
        *,
        rank: int,
        size: int,
        host: str | None = None,
        names: Sequence[str] | None = None,
        number: int = 0,
    ) -> Stages[OptimizerState]:
        """`init` as a generator of pure stages, for callers that move the buffers themselves.

        Parameters
        ----------
        params, names
            As for `init`.
        rank, size : int
            This rank, and the number of ranks.
        host : str, optional
            Name of this rank's machine, which a topology may depend on.
        number : int
            Number of this replica among the replicas that start over the same communicator. The exchanges of its steps
            carry the number, so that exchanges of two optimizers are not confused.

        Raises
        ------
        MismatchError, ValueError
            As for `init`.
        """
        tensors = as_tensors(params, "params")
        place = Place(rank, size, host, number)
        names = names_of(names, tensors)
        begun = begin(self, tensors, names, place, compare=True)
        return (yield from owned(begun, _owner_of_start(place, names, "init")))

    def load_state_dict(
        self,
        saved: Mapping[str, Any] | Sequence[Mapping[str, Any]],
        params: Any,
        comm: Transport,
        names: Sequence[str] | None = None,
        *,
        strict: bool = True,
        lost: Literal["raise", "drop"] = "raise",
    ) -> Loaded:
        """Return the state saved by `state_dict`; training resumes as if it had never stopped.

        Parameters
        ----------
        saved : mapping of str to array or scalar, or sequence of them
            This rank's own dict. Or a list of dicts, in any order; together, the ranks must pass the dicts of all ranks
            that saved. Either every rank passes all dicts, as from a shared folder, or one rank passes each dict, and
            ranks without a dict pass an empty list. A dict fits every rank, on any number of ranks, if it has no arrays
            that only its rank has, as from an exact optimizer or an exact warm-up.
        params, comm, names
            As for `init`. For an `OuterLoop` the values of the parameters do not matter, only the dtypes.
        strict : bool
            Whether the state must come from the same class with the same compressors. False also silences the warning
            about other settings.
        lost : {"raise", "drop"}
            What to do if dicts are missing from ranks that had residuals or other arrays of their own. With ``"drop"``
            these arrays are lost: the residuals count as zero, every rank gets the mean of the other ranks' arrays of
            `own_kinds`, and arrays that one rank kept for all begin at zero.

        Returns
        -------
        OptimizerState
            For an `OuterLoop` a pair: this rank's parameters, and the state.

        Raises
        ------
        ValueError
            If the dict belongs to a different rank, number of ranks, model or optimizer. If the dict is damaged: if an
            entry is missing or invalid, or differs from its digest. On every rank, if a list of dicts is incomplete,
            mixes jobs or steps, or contains such a dict.
        MismatchError
            On the other ranks, if some rank raises ValueError. On every rank, if the dicts belong to different steps,
            or a parameter differs between ranks.

        Warns
        -----
        UserWarning
            If the state was saved with settings that differ from this optimizer's; the warning names them. If the dicts
            come from a different number of ranks, or from ranks with different chunks: every rank then starts with
            mean_i e_i + e_s of the old residuals, which preserves the sum identity of `CompressedMean`. On every rank,
            if ``lost="drop"`` has dropped arrays.
        """
        stages = self.load_stages(saved, params, **place_in(comm), names=names, strict=strict, lost=lost)
        return drive(stages, comm)

    def load_stages(
        self,
        saved: Mapping[str, Any] | Sequence[Mapping[str, Any]],
        params: Any,
        *,
        rank: int,
        size: int,
        host: str | None = None,
        names: Sequence[str] | None = None,
        strict: bool = True,
        lost: Literal["raise", "drop"] = "raise",
        number: int = 0,
    ) -> Stages[Loaded]:
        """`load_state_dict` as a generator of pure stages.

        Parameters
        ----------
        saved, params, names, strict, lost
            As for `load_state_dict`.
        rank, size, host, number
            As for `init_stages`.
        """
        tensors = as_tensors(params, "params")
        names, place = names_of(names, tensors), Place(rank, size, host, number)
        whole = yield from resume(self, saved, tensors, names, place, strict=strict, missing=lost)
        own, state = self.parted(tensors, whole)
        return self._loaded(as_given(own, params), state)


def owner_of(replica: Replica[Any], state: OptimizerState) -> Owner:
    """Return the `Owner` of the exchanges that the next step makes."""
    doing = f"step {state.step + 1} ({state.stage})"
    return Owner(type(replica).__name__, state.number, state.names, state.stream, doing)


def begin(
    replica: Replica[Any], tensors: Sequence[Array], names: tuple[str, ...], place: Place, *, compare: bool
) -> Stages[OptimizerState]:
    """Return the state before the first step, see `Replica.init`.

    With ``compare`` the ranks also compare the values of their parameters.
    """
    require_whole(tensors, "params", tensors[0])
    require_rank_in(place.rank, place.size)
    state, problem = None, None
    try:
        state = replica.initial_state(tensors, names, place.rank, place.size)
    except Exception as error:
        problem = error  # from a policy, perhaps on this rank alone: tell all ranks, so that none waits
    compressed = choices(state) if state else f"{type(problem).__name__}: {problem}"
    values = digests(names, tensors) if compare and not replica.sharded else []
    told = facts_of(replica, names, tensors) | {"compressed": compressed, "values": values}
    yield from handshake_stages(told, size=place.size, like=tensors[0], explain=_EXPLAIN)
    if state is None:
        assert problem is not None
        raise problem
    if compare and replica.sharded:
        yield from replica._compare_parameters(names, tensors, place.size)
    require_matches("groups", patterns_of(replica.moves()[0]), names)
    state = state._replace(stream=stream_of(names, replica.shapes_of(tensors)), number=place.number)
    mean = replica.mean_of(state)
    rehearse([*EXACT.compressors, *mean.sends], tensors[0], steps=True, low_rank=mean.low_rank)
    nodes = yield from replica.mean.node_stages(place.host, size=place.size, like=tensors[0])
    return replica.compression.on_nodes(state, tensors, nodes)


def facts_of(replica: Replica[Any], names: Sequence[str], params: Sequence[Array]) -> dict[str, Any]:
    """Return the facts about a replica and its parameters that must be equal on all ranks."""
    return {
        "optimizer": type(replica).__name__,
        "settings": settings_of(replica),
        "rates": _rates(replica.moves()[1]),
        "names": list(names),
        "shapes": [list(shape) for shape in replica.shapes_of(params)],
        "dtypes": [dtype_name(p.dtype) for p in params],
    }


def _rates(learning_rate: float | Callable[[int], float]) -> list[str]:
    """Return a schedule's values at a few steps, since its name does not tell one lambda from another."""
    if not callable(learning_rate):
        return []
    rates = []
    for step in _STEPS:
        try:
            rates.append(repr(float(learning_rate(step))))
        except Exception as error:  # the schedule ends before this step
            rates.append(type(error).__name__)
    return rates


def resume(
    replica: Replica[Any],
    saved: Saved | Sequence[Saved],
    tensors: Sequence[Array],
    names: tuple[str, ...],
    place: Place,
    *,
    strict: bool = True,
    lost: Collection[int] = (),
    missing: str = "raise",
) -> Stages[OptimizerState]:
    """Return the state to resume from, see `Replica.load_state_dict`.

    ``lost`` is as in `World`; ``missing`` is the ``lost`` of `Replica.load_state_dict`.
    """
    begun = begin(replica, tensors, names, place, compare=False)
    fresh = yield from owned(begun, _owner_of_start(place, names, "init"))
    world = World(replica, fresh, tensors, strict, lost, drops=missing == "drop")
    loading = _load(replica, saved, world, missing)
    return (yield from owned(loading, _owner_of_start(place, names, "load_state_dict")))


def _owner_of_start(place: Place, names: tuple[str, ...], doing: str) -> Owner:
    return Owner(_ANY_KIND, place.number, names, 0, doing)


def _read(replica: Replica[Any], own: Saved, world: World, *, regrouped: bool) -> OptimizerState:
    """Return the state that is in this rank's own dict, or in a dict that fits every rank."""
    begun, one = world.fresh, read_scalars(own)
    if not regrouped:
        world.accept(one)
        if replica.mean.topology == AUTO and TOPOLOGY in one and one["size"] == world.size:
            begun = replica.compression.in_topology(one[TOPOLOGY], begun, world.params)
    begun = with_numbers_of(one, begun)
    one |= read_arrays(own)
    mean = replica.mean_of(begun)

    def enter(step: int, stage: str) -> OptimizerState:
        return replica.enter(begun._replace(step=step), stage)

    mine = one
    if (one["rank"], one["size"]) != (world.rank, world.size):
        _require_of_any_rank(one, world)
        template = dict(named_arrays(enter(one["step"], one["stage"]), mean))
        mine = as_of_rank(one, world.rank, world.size, template)
    state = from_state_dict(
        mine if regrouped else replica.adopt(mine, begun),
        enter,
        mean,
        lambda template: {**limits_of_own(template), **replica.limits(template)},
    )
    # The saved dict also has the entries that `adopt` left out: check their sizes too.
    require_sizes(one, world.sizes.values(), dict(named_arrays(state, mean)).values())
    require_intact(one)  # last, since the other errors say more
    return state


def _require_of_any_rank(saved: Saved, world: World) -> None:
    """Raise ValueError if a state of another rank holds arrays that only that rank had."""
    kinds = own_kinds_in(world.replica, saved)
    if kinds:
        raise ValueError(
            f"the state belongs to rank {saved['rank']} of {saved['size']}; this is rank {world.rank} of "
            f"{world.size}: the state's {phrase(kinds)} fit rank {saved['rank']} only. Load the state that this rank "
            f"has saved, or pass a list with the dicts of all {saved['size']} ranks. {CURES}"
        )


def _load(
    replica: Replica[Any], saved: Saved | Sequence[Saved], world: World, missing: str
) -> Stages[OptimizerState]:
    """Return the state in this rank's dict, once all ranks have loaded their states and compared them."""
    what = "a dict" if isinstance(saved, Mapping) else "a sequence of dicts"
    yield from handshake_stages({"saved": what, "lost": missing}, size=world.size, like=world.like)
    if missing not in ("raise", "drop"):
        raise ValueError(f"lost is {missing!r}; expected 'raise' or 'drop'")
    if world.drops and not replica.resizes:
        raise ValueError(
            f"lost is 'drop'; expected 'raise': a state of {type(replica).__name__} needs the states of all ranks"
        )
    if isinstance(saved, Mapping) and (world.drops or world.part_kinds):
        of_others = yield from gather_texts("x" * _is_of_another(saved, world), world.size, world.like)
        saved = [saved] if any(of_others) else saved
    own = saved if isinstance(saved, Mapping) else (yield from regroup(saved, world))
    loaded, problem = None, None
    try:
        loaded = _read(replica, own, world, regrouped=own is not saved)
    except Exception as error:  # perhaps only on this rank: tell all, so that no rank waits
        problem = error
    yield from agree_stages(problem, what="load its state", size=world.size, like=world.like)
    assert loaded is not None
    verdict = f"of step {loaded.step}, {loaded.stage}, {loaded.exchange.topology}"
    yield from handshake_stages({"checkpoint": verdict}, size=world.size, like=world.like)
    yield from compare_states(replica, loaded, world.like, "when they resume")
    if not replica.apart(loaded.stage):
        yield from replica._compare_parameters(loaded.names, world.params, world.size)
    return loaded


def _is_of_another(saved: Saved, world: World) -> bool:
    """Return whether a dict has another rank's arrays (if dicts may be missing), or parts that this rank lacks."""
    try:
        one = {**saved, **read_scalars(saved)}
        if (one["rank"], one["size"]) != (world.rank, world.size):
            return world.drops and bool(own_kinds_in(world.replica, one))
        return world.has_other_parts(one)
    except ValueError:  # `_read` reports it
        return False
