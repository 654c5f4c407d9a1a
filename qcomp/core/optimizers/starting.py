"""How an optimizer starts: with a first or saved state, once the ranks have compared settings and parameters."""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

from qcomp.core.checkpoint.format import (
    TOPOLOGY,
    from_state_dict,
    named_arrays,
    owned_keys,
    read_arrays,
    read_scalars,
    require_intact,
    require_sizes,
)
from qcomp.core.checkpoint.manifest import CURES, as_of_rank, own_kinds_in, phrase
from qcomp.core.checkpoint.reshard import World, regroup
from qcomp.core.handshake import agree_stages, gather_texts, handshake_stages
from qcomp.core.mean.nodes import require_rank_in
from qcomp.core.mean.stages import Owner, Stages, owned
from qcomp.core.mean.topologies.registry import AUTO
from qcomp.core.numeric.arrays import Array
from qcomp.core.optimizers.agreement import (
    choices,
    compare_states,
    digests,
    explain_values,
    facts,
    stream_of,
)
from qcomp.core.optimizers.compression import EXACT
from qcomp.core.optimizers.groups import patterns_of
from qcomp.core.optimizers.makers import require_maker
from qcomp.core.optimizers.own_counts import limits_of_own, with_numbers_of
from qcomp.core.optimizers.tensors import require_whole
from qcomp.core.policies.patterns import require_matches
from qcomp.core.rehearsal import rehearse
from qcomp.core.state import OptimizerState

__all__ = ["Place", "begin", "names_of", "owner_of", "resume"]

Saved = Mapping[str, Any]

_ANY_KIND = "optimizer"
"""The kind of owners until a handshake has compared the kinds, and tells more about a difference."""

_EXPLAIN: Mapping[str, Callable[[Sequence[Any]], str | None]] = {"values": explain_values}


class Place(NamedTuple):
    """Where an optimizer starts."""

    rank: int
    size: int
    host: str | None
    """Name of this rank's machine, if it is known."""
    number: int = 0
    """The number of this optimizer among all that start over the same communicator."""


def names_of(names: Sequence[str] | None, tensors: Sequence[Array]) -> tuple[str, ...]:
    """Return the names of parameters, by default their numbers."""
    chosen = tuple(map(str, range(len(tensors)))) if names is None else tuple(names)
    for index, name in enumerate(chosen):
        if not isinstance(name, str):
            raise TypeError(f"names[{index}] is {name!r}; expected a str")
    if len(set(chosen)) != len(tensors) or len(chosen) != len(tensors):
        raise ValueError(f"names has {len(set(chosen))} different names; params has {len(tensors)} tensors")
    return chosen


def owner_of(optimizer: Any, state: OptimizerState) -> Owner:
    """Return the owner of the exchanges of the next step."""
    doing = f"step {state.step + 1} ({state.stage})"
    return Owner(type(optimizer).__name__, state.number, state.names, state.stream, doing)


def begin(
    optimizer: Any, tensors: Sequence[Array], names: tuple[str, ...], place: Place, *, compare: bool
) -> Stages[OptimizerState]:
    """Return the state before the first step, see `Optimizer.init`.

    With ``compare`` the ranks also compare the values of their parameters.
    """
    begun = _begin(optimizer, tensors, names, place, compare=compare)
    return (yield from owned(begun, Owner(_ANY_KIND, place.number, names, 0, "init")))


def _begin(
    optimizer: Any, tensors: Sequence[Array], names: tuple[str, ...], place: Place, *, compare: bool
) -> Stages[OptimizerState]:
    require_whole(tensors, "params", tensors[0])
    require_rank_in(place.rank, place.size)
    state, problem = None, None
    try:
        state = optimizer.initial_state(tensors, names, place.rank, place.size)
    except Exception as error:
        problem = error  # from a policy, perhaps on this rank alone: share it, so that no rank waits
    compressed = choices(state) if state else f"{type(problem).__name__}: {problem}"
    values = digests(names, tensors) if compare else []
    told = facts(optimizer, names, tensors) | {"compressed": compressed, "values": values}
    yield from handshake_stages(told, size=place.size, like=tensors[0], explain=_EXPLAIN)
    if state is None:
        assert problem is not None
        raise problem
    require_matches("groups", patterns_of(optimizer.groups), names)
    state = state._replace(stream=stream_of(names, tensors), number=place.number)
    mean = optimizer.mean_of(state)
    rehearse([*EXACT.compressors, *mean.sends], tensors[0], steps=True, low_rank=mean.low_rank)
    nodes = yield from optimizer.mean.node_stages(place.host, size=place.size, like=tensors[0])
    begun: OptimizerState = optimizer.compression.on_nodes(state, tensors, nodes)
    return begun


def resume(
    optimizer: Any,
    saved: Saved | Sequence[Saved],
    tensors: Sequence[Array],
    names: tuple[str, ...],
    place: Place,
    *,
    strict: bool = True,
    lost: Collection[int] = (),
    missing: str = "raise",
) -> Stages[OptimizerState]:
    """Return the state to resume from, see `Optimizer.load_state_dict`.

    ``lost`` is as in `World`, ``missing`` what ``lost`` is there.
    """
    owner = Owner(_ANY_KIND, place.number, names, 0, "load_state_dict")
    stages = _resume(optimizer, saved, tensors, names, place, strict=strict, lost=lost, missing=missing)
    return (yield from owned(stages, owner))


def _resume(
    optimizer: Any,
    saved: Saved | Sequence[Saved],
    tensors: Sequence[Array],
    names: tuple[str, ...],
    place: Place,
    *,
    strict: bool,
    lost: Collection[int],
    missing: str,
) -> Stages[OptimizerState]:
    fresh = yield from begin(optimizer, tensors, names, place, compare=False)

    def accept(one: Saved) -> None:
        if strict:
            require_maker(one, optimizer)

    def load(own: Saved, *, regrouped: bool) -> OptimizerState:
        begun, one = fresh, read_scalars(own)
        if not regrouped:
            accept(one)
            if optimizer.mean.topology == AUTO and TOPOLOGY in one and one["size"] == place.size:
                begun = optimizer.compression.in_topology(one[TOPOLOGY], fresh, tensors)
        begun = with_numbers_of(one, begun)
        one |= read_arrays(own)
        mean = optimizer.mean_of(begun)

        def enter(step: int, stage: str) -> OptimizerState:
            found: OptimizerState = optimizer.enter(begun._replace(step=step), stage)
            return found

        mine = one
        if (one["rank"], one["size"]) != (place.rank, place.size):
            _require_of_any_rank(optimizer, one, place)
            template = dict(named_arrays(enter(one["step"], one["stage"]), mean))
            mine = as_of_rank(one, place.rank, place.size, template)
        state = from_state_dict(
            mine if regrouped else optimizer.adopt(mine, begun),
            enter,
            mean,
            lambda template: {**limits_of_own(template), **optimizer.limits(template)},
        )
        # Also of entries that the optimizer has not adopted.
        require_sizes(one, (math.prod(p.shape) for p in tensors), dict(named_arrays(state, mean)).values())
        require_intact(one)  # last, since other messages say more
        return state

    world = _world(optimizer, fresh, tensors, accept)._replace(lost=lost, drops=missing == "drop")
    loaded = yield from _load(saved, world, load, missing)
    yield from compare_states(optimizer, loaded, tensors[0], "when they resume")
    if not optimizer.apart(loaded.stage):
        values = {"values": digests(fresh.names, tensors)}
        yield from handshake_stages(values, size=place.size, like=tensors[0], explain=_EXPLAIN)
    return loaded


def _world(
    optimizer: Any, fresh: OptimizerState, params: Sequence[Array], accept: Callable[[Saved], None]
) -> World:
    """Describe the world in which the dicts of another world resume."""
    mean = optimizer.mean_of(fresh)
    return World(
        fresh.rank,
        fresh.size,
        optimizer.own_kinds,
        {name: math.prod(p.shape) for name, p in zip(fresh.names, params, strict=True)},
        lambda step, stage: dict(named_arrays(optimizer.enter(fresh._replace(step=step), stage), mean)),
        params[0],
        accept,
        lambda one: optimizer.adopt(one, fresh),
        lambda one: own_kinds_in(optimizer, one),
        owned_keys(fresh, mean),
        mean.tracked_kinds,
    )


def _require_of_any_rank(optimizer: Any, saved: Saved, place: Place) -> None:
    """Raise ValueError if another rank has saved a state with arrays that it alone had."""
    kinds = own_kinds_in(optimizer, saved)
    if kinds:
        raise ValueError(
            f"the state belongs to rank {saved['rank']} of {saved['size']}; this is rank {place.rank} of {place.size}: "
            f"its {phrase(kinds)} belong to that rank alone. Load what this rank has saved, or pass a list with the "
            f"dicts of all {saved['size']} ranks. {CURES}"
        )


def _load(
    saved: Saved | Sequence[Saved], world: World, load: Callable[..., OptimizerState], missing: str
) -> Stages[OptimizerState]:
    """Return what ``load`` makes from a dict of this rank, once all ranks have loaded theirs."""
    what = "a dict" if isinstance(saved, Mapping) else "a sequence of dicts"
    yield from handshake_stages({"saved": what, "lost": missing}, size=world.size, like=world.like)
    if missing not in ("raise", "drop"):
        raise ValueError(f"lost is {missing!r}; expected 'raise' or 'drop'")
    if isinstance(saved, Mapping) and world.drops:
        of_others = yield from gather_texts("x" * _is_of_another(saved, world), world.size, world.like)
        saved = [saved] if any(of_others) else saved
    own = saved if isinstance(saved, Mapping) else (yield from regroup(saved, world))
    loaded, problem = None, None
    try:
        loaded = load(own, regrouped=own is not saved)
    except Exception as error:  # perhaps of this rank alone: tell all, so that no rank waits
        problem = error
    yield from agree_stages(problem, what="load its state", size=world.size, like=world.like)
    assert loaded is not None
    verdict = f"of step {loaded.step}, {loaded.stage}, {loaded.exchange.topology}"
    yield from handshake_stages({"checkpoint": verdict}, size=world.size, like=world.like)
    return loaded


def _is_of_another(saved: Saved, world: World) -> bool:
    """Return whether a dict has arrays that another rank alone had."""
    try:
        one = {**saved, **read_scalars(saved)}
        return (one["rank"], one["size"]) != (world.rank, world.size) and bool(world.differing(one))
    except ValueError:  # which `load` reports
        return False
