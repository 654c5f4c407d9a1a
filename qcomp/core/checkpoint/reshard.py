"""Resuming a saved state on another number of ranks, each of which may have only a part of the state."""

import json
import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any

from qcomp.core.checkpoint.coverage import Part, coverage, is_within, require_disjoint
from qcomp.core.checkpoint.format import (
    SCHEMA,
    SERVER,
    WORKER,
    named_arrays,
    owned_keys,
    read_arrays,
    read_scalars,
    require_dtype,
    require_fit,
    require_intact,
    require_keys,
    require_sizes,
)
from qcomp.core.checkpoint.manifest import (
    CURES,
    ArrayEntry,
    Described,
    Manifest,
    describe,
    facts_of,
    holders,
    kind_of,
    name_missing,
    own_kinds_in,
    phrase,
    require_agreement,
    require_no_problem,
)
from qcomp.core.checkpoint.schema import shown
from qcomp.core.handshake import gather_texts
from qcomp.core.mean.compressed_mean import EXACT, CompressedMean, MeanState
from qcomp.core.mean.framing import join, joined_size, split
from qcomp.core.mean.stages import AllGather, AllToAll, Stages
from qcomp.core.numeric.arrays import (
    Array,
    array_namespace,
    bytes_of,
    compute_dtype_name,
    concat,
    device,
    divide,
    dtype_name,
    flush,
)
from qcomp.core.reporting import name_ranks, warn_caller
from qcomp.core.state import OptimizerState

Saved = Mapping[str, Any]


@dataclass(frozen=True)
class World:
    """The world in which a saved state resumes."""

    replica: Described
    """The optimizer or outer loop."""
    fresh: OptimizerState
    """The state before the first step, on this rank."""
    params: Sequence[Array]
    strict: bool = True
    """Whether to accept only dicts that this replica would save, with the same compressors."""
    lost: Collection[int] = ()
    """The old ranks whose own arrays are lost, and are zeros in their dicts; the same on all ranks."""
    drops: bool = False
    """Whether dicts may be missing although their ranks had arrays of their own, which are then lost."""

    @property
    def rank(self) -> int:
        """The number of this rank."""
        return self.fresh.rank

    @property
    def size(self) -> int:
        """The number of ranks."""
        return self.fresh.size

    @property
    def like(self) -> Array:
        """Gives the library and the device of exchanged arrays."""
        return self.params[0]

    @cached_property
    def sizes(self) -> Mapping[str, int]:
        """Elements of each parameter, by name."""
        return dict(zip(self.fresh.names, map(math.prod, self.replica.shapes_of(self.params)), strict=True))

    @cached_property
    def mean(self) -> CompressedMean:
        """The mean whose residuals the state holds."""
        return self.replica.mean_of(self.fresh)

    @cached_property
    def owned(self) -> Sequence[str]:
        """The keys of all arrays that exist once in the world; the same on all ranks."""
        return owned_keys(self.fresh, self.mean)

    @property
    def part_kinds(self) -> tuple[str, ...]:
        """The kinds of arrays that are cut: each rank holds a part for each tensor."""
        return self.mean.part_kinds

    @property
    def owned_kinds(self) -> tuple[str, ...]:
        """The kinds of arrays that exist once in the world."""
        return tuple(sorted({kind_of(key) for key in self.owned}))

    def template(self, step: int, stage: str) -> Mapping[str, Array]:
        """Return the arrays that this rank holds at the start of a stage, by key."""
        return dict(named_arrays(self.replica.enter(self.fresh._replace(step=step), stage), self.mean))

    def accept(self, one: Saved) -> None:
        """If `strict`, raise ValueError unless this replica would save a dict with these scalars."""
        if self.strict:
            self.replica.require_maker(one)

    def place(self, key: str) -> tuple[str, int]:
        """Return the tensor of a residual, and the offset of the residual within it."""
        _, _, name = key.partition(".")
        if name in self.sizes:
            return name, 0
        name, _, start = name.rpartition("@")
        if name not in self.sizes or not start.isdecimal():
            raise ValueError(
                f"the state has {shown(key)}; params has no such tensor: another model or optimizer"
            )
        return name, int(start)


def regroup(saved: Sequence[Saved], world: World) -> Stages[dict[str, Any]]:
    """Return this rank's dict in a new world from the dicts of an old one, spread over the new ranks in any way.

    In a world like the old one, every rank gets the dict with its own number, unchanged. If the worlds differ only in
    the servers of some chunks, as with and without ``tensorwise``, server residuals go to the new servers, unchanged.
    In any other world, every worker residual becomes mean_i e_i + e_s of the old world, and server residuals become
    zero. Arrays of the optimizer's own kinds become their means, arrays that exist once in the world go to their new
    owners, and everything else, which must be equal in all dicts, stays the same. A server that is not a worker for its
    chunk, as around a ring, gets 1/N of that worker residual: the share that it would have contributed to the mean as a
    worker. Parts of tensors that are cut into shards go to the ranks that hold them now, unchanged. Where arrays of old
    ranks are lost, the total lacks their residuals, the optimizer's own kinds are means over the other ranks, and
    arrays that exist once begin at zero. If a dict is missing, its rank still counts among the old ranks, so no
    residual counts more than once; in a hierarchy, where ranks of a node share residuals, a part is lost.

    The mean over the new ranks equals the old total, so feedback still adds everything that was lost: the sum identity
    of `CompressedMean` continues to hold. Each rank sends the facts of its dicts as text, and 2 (N - 1) / N * 32 bits
    per averaged element. If a rank has no dict to contribute, one rank sends the entries that are equal in all dicts to
    all ranks.

    All ranks together must have all dicts, unless the old ranks had no arrays of their own. If several ranks have
    copies of a dict, one of them is used. Raises ValueError on every rank, with the same text, if dicts are missing,
    given twice, or do not belong together. Warns if the world differs from the old one.
    """
    facts = yield from _told(facts_of(saved, world.accept), world)
    by, size = holders(facts)
    if size != world.size and not world.replica.resizes:
        raise ValueError(
            f"saved comes from another number of ranks; expected {world.size} instead of {size}: a state of "
            f"{type(world.replica).__name__} has arrays that fit only the number of ranks that saved it"
        )
    _, _, step, stage = next(chain.from_iterable(facts))  # the same in all
    template = world.template(step, stage)
    intact: dict[int, Saved] = {}
    mine: dict[int, Saved] = {}
    described: Any = {}
    try:
        for scalars, one in [(read_scalars(one), one) for one in saved]:
            if by[scalars["rank"]] == world.rank:
                intact[scalars["rank"]] = scalars | read_arrays(one)
        for old, one in intact.items():
            require_sizes(one, world.sizes.values(), template.values())
            known = world.replica.adopt(one, world.fresh)
            mine[old] = {key: x for key, x in known.items() if hasattr(x, "shape")}
            described[old] = describe(known, mine[old], (*world.replica.own_kinds(stage), *world.owned_kinds))
    except Exception as error:  # share the error, so that no rank waits
        described = str(error)
    told = yield from _told(described, world)
    require_no_problem(told)
    found = {int(old): facts for of_rank in told for old, facts in of_rank.items()}
    manifests = {
        old: Manifest(scalars, {key: ArrayEntry(tuple(e[0]), *e[1:]) for key, e in arrays.items()})
        for old, (scalars, arrays) in sorted(found.items())
    }
    require_agreement(manifests, (*world.owned_kinds, *world.part_kinds))
    differing = sorted(
        {kind for m in manifests.values() for kind in own_kinds_in(world.replica, {**m.scalars, **m.arrays})}
    )
    averaged = tuple(kind for kind in world.replica.own_kinds(stage) if kind not in world.part_kinds)
    if len(by) < size:
        given = {key for manifest in manifests.values() for key in manifest.arrays}
        lost_once = {kind_of(key) for key in world.owned if key not in given}
        differing = sorted(lost_once.union(kind for kind in differing if kind not in world.owned_kinds))
        if differing and not world.drops:
            raise ValueError(
                f"no rank passes the dict of old {name_missing(by, size)}; expected all {size}, each on some rank, "
                f"since their {phrase(differing)} are in no other dict. {CURES}"
            )
        averaged = tuple(kind for kind in averaged if kind in differing)
    whole = not world.lost and len(by) == size == world.size
    fits = whole and _fits(manifests[world.rank], template)
    if all((yield from _told(fits, world))):
        arrays = yield from _hand_over(mine, by, manifests, world)
        scalars = manifests[world.rank].scalars
    elif (yield from _only_servers_move(manifests, template, world, whole=whole)):
        handed = yield from _hand_over(mine, by, manifests, world)
        served = yield from _parts(mine, by, manifests, template, world, kinds=(SERVER,))
        arrays = {key: served[key] if kind_of(key) == SERVER else handed[key] for key in template}
        scalars = manifests[world.rank].scalars
    else:
        covered = _require_mergeable(manifests, template, world, size)
        _warn_of_merging(differing, averaged, by, size, world)
        arrays = yield from _merge(mine, by, manifests, template, world, covered=covered, averaged=averaged)
        skipped = max(
            manifest.scalars["skipped"] for manifest in manifests.values()
        )  # a rank may skip a step that others make
        scalars = {**manifests[min(by)].scalars, "skipped": skipped}
    require_no_problem((yield from _told(_damage(intact), world)))  # last, since other messages say more
    return {"schema": SCHEMA, **scalars, "rank": world.rank, "size": world.size, **arrays}


def _told(own: Any, world: World) -> Stages[list[Any]]:
    """Exchange a value that JSON can hold; return the value of every rank."""
    texts = yield from gather_texts(json.dumps(own), world.size, world.like)
    return [json.loads(text) for text in texts]


def _damage(saved: Mapping[int, Saved]) -> str | None:
    """Return a text about the first dict that differs from its digests, or None."""
    try:
        for one in saved.values():
            require_intact(one)
    except Exception as error:  # share the error, so that no rank waits
        return str(error)
    return None


def _fits(manifest: Manifest, template: Mapping[str, Array]) -> bool:
    """Return whether a dict has exactly the arrays of a rank in this world."""
    return {key: entry.shape for key, entry in manifest.arrays.items()} == {
        key: tuple(like.shape) for key, like in template.items()
    }


def _only_servers_move(
    manifests: Mapping[int, Manifest], template: Mapping[str, Array], world: World, *, whole: bool
) -> Stages[bool]:
    """Return whether the dicts have the arrays of this world, and only the servers of some elements differ.

    ``whole`` says whether there is a dict of each rank of this world.
    """
    fits = False
    if whole:
        scalars, arrays = manifests[world.rank].scalars, manifests[world.rank].but_kinds(SERVER)
        fits = _fits(
            Manifest(scalars, arrays), {key: x for key, x in template.items() if kind_of(key) != SERVER}
        )
    own = [(key, like.shape[0]) for key, like in template.items() if kind_of(key) == SERVER]
    told = yield from _told((fits, own), world)
    new = _served_once(chain.from_iterable(parts for _, parts in told), world)
    old = _served_once(
        (
            (key, math.prod(x.shape))
            for each in manifests.values()
            for key, x in each.of_kinds(SERVER).items()
        ),
        world,
    )
    return all(fits for fits, _ in told) and bool(old) and old == new


def _served_once(lengths: Iterable[tuple[str, int]], world: World) -> set[str] | None:
    """Return the tensors that have server residuals, or None unless each of their elements has exactly one.

    ``lengths`` are the keys and the elements of the server residuals of all ranks.
    """
    served: dict[str, list[Part]] = {}
    try:
        for key, length in lengths:
            name, start = world.place(key)
            served.setdefault(name, []).append((start, start + length))
        counts = {coverage(parts, world.sizes[name], name) for name, parts in served.items()}
    except ValueError:  # merging reports it, on all ranks alike
        return None
    return set(served) if counts <= {1} else None


def _parts(
    mine: Mapping[int, Saved],
    by: Mapping[int, int],
    manifests: Mapping[int, Manifest],
    template: Mapping[str, Array],
    world: World,
    *,
    kinds: Sequence[str],
) -> Stages[dict[str, Array]]:
    """Return the parts of tensors that this rank has now, from the ranks that had them; equal parts are sent once."""
    wanted = {
        key: (kind_of(key), *world.place(key), like)
        for key, like in template.items()
        if kind_of(key) in kinds
    }
    pieces: dict[str, list[tuple[int, Array]]] = {key: [] for key in wanted}
    seen: set[tuple[str, tuple[int, ...]]] = set()
    for old, manifest in manifests.items():
        for key, entry in manifest.of_kinds(*kinds).items():  # one at a time, as in `_unmerged`
            if (key, entry.shape) in seen:
                continue
            seen.add((key, entry.shape))
            part = yield from _from_one(by[old], mine.get(old), key, entry, world)
            name, start = world.place(key)
            stop = start + math.prod(entry.shape)
            for own, (kind, tensor, first, like) in wanted.items():
                low, high = max(first, start), min(first + like.shape[0], stop)
                if (kind, tensor) == (kind_of(key), name) and low < high:
                    pieces[own].append((low, part[low - start : high - start]))
    return {
        key: concat([piece for _, piece in sorted(parts, key=lambda part: part[0])])
        if parts
        else template[key]
        for key, parts in pieces.items()
    }


def _hand_over(
    mine: Mapping[int, Saved], by: Mapping[int, int], manifests: Mapping[int, Manifest], world: World
) -> Stages[dict[str, Array]]:
    """Return the arrays of the dict with this rank's number, which another rank may hold."""
    if all(old == new for old, new in by.items()):
        return {key: mine[world.rank][key] for key in manifests[world.rank].arrays}
    messages = {
        old: join([_bytes(each[key], world) for key in manifests[old].arrays] or [_nothing(world)])
        for old, each in mine.items()
    }
    sizes = [entry.nbytes for entry in manifests[world.rank].arrays.values()]
    receive = [joined_size(sizes) if rank == by[world.rank] else 0 for rank in range(world.size)]
    send = tuple(messages.get(rank, _nothing(world)) for rank in range(world.size))
    arrived = yield AllToAll(send, tuple(receive))
    buffers = split(arrived[by[world.rank]], sizes)
    entries = manifests[world.rank].arrays.items()
    return {key: entry.read(buffer) for buffer, (key, entry) in zip(buffers, entries, strict=True)}


def _warn_of_merging(
    differing: Sequence[str], averaged: Sequence[str], by: Mapping[int, int], size: int, world: World
) -> None:
    """If ranks had arrays of their own, warn that they resume in another world, and say what is lost."""
    if not differing:
        return
    if not world.lost and len(by) == size:
        warn_caller(
            f"a state of {size} ranks resumes with {world.size}, or with other chunks: every rank starts with the "
            "total of the residuals, so feedback loses nothing, but the run differs from one without a stop"
        )
        return
    means = [kind for kind in differing if kind in averaged]
    lost_once = [kind for kind in differing if kind in world.owned_kinds]
    starts = {
        "the total of the other residuals": {WORKER, SERVER}.intersection(differing),
        f"the mean of the others' {phrase(means)}": means,
        f"zeros where {phrase(lost_once)} are lost": lost_once,
    }
    told = ", and with ".join(text for text, kinds in starts.items() if kinds)
    ranks = name_ranks(world.lost) if world.lost else name_missing(by, size)
    warn_caller(
        f"a state of {size} ranks resumes with {world.size}, without the {phrase(differing)} of {ranks}: every rank "
        f"starts with {told}"
    )


def _merge(
    mine: Mapping[int, Saved],
    by: Mapping[int, int],
    manifests: Mapping[int, Manifest],
    template: Mapping[str, Array],
    world: World,
    *,
    covered: Mapping[str, int],
    averaged: Sequence[str],
) -> Stages[dict[str, Array]]:
    """Return the initial arrays of this rank in a different world.

    ``covered`` is from `_require_mergeable`. Every rank gets the mean over the old ranks of the kinds in ``averaged``.
    """
    arrays = yield from _unmerged(mine, by, manifests, template, world, averaged=averaged)

    shares = {
        f"{WORKER}.{name}": _share(mine, name, count, template, world) for name, count in covered.items()
    }
    alive = len(manifests) - len(world.lost)
    for key in manifests[min(by)].of_kinds(*averaged):
        kind, _, name = key.partition(".")
        if kind in world.mean.tracked_kinds:
            mean = arrays[f"{world.mean.tracked_kinds[kind]}.{name}@0"]
            arrays[key] = array_namespace(mean).asarray(mean, copy=True)
            continue
        own = [_flat(each[key], world) for old, each in mine.items() if old not in world.lost]
        zero = array_namespace(template[key]).zeros_like(_flat(template[key], world))
        shares[key] = sum(own, zero) * (world.size / alive)
    totals = yield from _averaged(shares, world)
    workers: dict[str, list[Part]] = {}
    for key, like in template.items():
        if kind_of(key) == WORKER:
            name, start = world.place(key)
            workers.setdefault(name, []).append((start, start + like.shape[0]))

    for key, like in template.items():
        if kind_of(key) == WORKER:
            name, start = world.place(key)
            total = totals.get(f"{WORKER}.{name}")  # None if the old world had no residual
            arrays[key] = like if total is None else total[start : start + like.shape[0]]
        elif kind_of(key) == SERVER:
            name, start = world.place(key)
            total, part = totals.get(f"{WORKER}.{name}"), (start, start + like.shape[0])
            if total is None or is_within(part, workers[name]):
                arrays[key] = like
            else:
                arrays[key] = flush(divide(total[start : part[1]], world.size))
        elif key in totals:
            arrays[key] = array_namespace(like).reshape(totals[key], like.shape)
    return arrays


def _unmerged(
    mine: Mapping[int, Saved],
    by: Mapping[int, int],
    manifests: Mapping[int, Manifest],
    template: Mapping[str, Array],
    world: World,
    *,
    averaged: Sequence[str],
) -> Stages[dict[str, Array]]:
    """Return the arrays that need no arithmetic: arrays that are equal in all dicts, and arrays that exist once."""
    first = min(by)
    apart = (WORKER, SERVER, *averaged, *world.owned_kinds, *world.part_kinds)
    arrays = yield from _parts(mine, by, manifests, template, world, kinds=world.part_kinds)
    for key in world.owned:  # one at a time, so that no rank needs memory for the arrays of all others
        if key in template:
            arrays[key] = template[key]  # zeros, where the dict with it is missing
        for old in [old for old, manifest in manifests.items() if key in manifest.arrays]:
            found = yield from _from_one(by[old], mine.get(old), key, manifests[old].arrays[key], world)
            if key in template:
                arrays[key] = found
    for key, entry in manifests[first].but_kinds(*apart).items():
        if len(set(by.values())) == world.size:  # all ranks have it, and it is equal
            arrays[key] = mine[min(mine)][key]
        else:
            arrays[key] = yield from _from_one(by[first], mine.get(first), key, entry, world)
    return arrays


def _from_one(holder: int, saved: Saved | None, key: str, entry: ArrayEntry, world: World) -> Stages[Array]:
    """Return an array of a dict that one rank holds, and sends to all; ``saved`` is None on the others."""
    send = _nothing(world) if saved is None else _bytes(saved[key], world)
    sizes = [0] * world.size
    sizes[holder] = entry.nbytes
    arrived = yield AllGather(send, tuple(sizes))
    return entry.read(arrived[holder])


def _averaged(shares: Mapping[str, Array], world: World) -> Stages[dict[str, Array]]:
    """Return the exact means over the new ranks."""
    filled = {key: share for key, share in shares.items() if share.shape[0]}
    if not filled:
        return {**shares}
    nothing = MeanState(world.rank, world.size, (), ())
    means, _ = yield from EXACT.stages(list(filled.values()), nothing, donate=True)
    return {**shares, **dict(zip(filled, means, strict=True))}


def _require_mergeable(
    manifests: Mapping[int, Manifest], template: Mapping[str, Array], world: World, size: int
) -> dict[str, int]:
    """Return the number of old ranks over which each tensor's residuals are averaged, by tensor name.

    This is the number of ranks with a worker or a server residual for an element: the server of a chunk may not be a
    worker for it. If some of the ``size`` dicts are missing, it is the number of all old ranks.
    """
    apart = (WORKER, SERVER, *world.owned_kinds, *world.part_kinds)
    alike = manifests[min(manifests)].but_kinds(*apart)
    expected = {key: like for key, like in template.items() if kind_of(key) not in apart}
    require_keys(alike, expected)
    _require_owned(manifests, world, size)
    _require_parts(manifests, template, world)
    for key, like in expected.items():
        require_fit(alike[key].shape, alike[key].dtype, like, key)
    likes = {world.place(key)[0]: like for key, like in template.items() if kind_of(key) == WORKER}
    held = [manifest.of_kinds(WORKER, SERVER) for manifest in manifests.values()]
    if not any(held):  # without compression or without feedback
        return {}
    if not likes:
        raise ValueError(
            f"the states have residuals, such as {min(held[0] or held[-1])}, but this world keeps none: it has one "
            "node or feedback=False; expected a world with feedback between nodes, such as topology='two_phase'"
        )
    taking_part: dict[str, list[Part]] = {}
    served: dict[str, list[Part]] = {}
    for entries in held:
        tensors = {world.place(key)[0] for key in entries if kind_of(key) == WORKER}
        require_keys((f"{WORKER}.{name}" for name in tensors), (f"{WORKER}.{name}" for name in likes))
        own: dict[str, dict[str, list[Part]]] = {WORKER: {}, SERVER: {}}
        for key, entry in entries.items():
            name, start = world.place(key)
            if name not in likes:
                raise ValueError(f"the state has {key}, which stays exact here: another model or optimizer")
            require_dtype(entry.dtype, likes[name], key)
            own[kind_of(key)].setdefault(name, []).append((start, start + math.prod(entry.shape)))
        for kind, of_kind in own.items():
            for name, parts in of_kind.items():
                require_disjoint(parts, world.sizes[name], f"{kind}.{name}")
        for name, parts in own[WORKER].items():
            alone = [part for part in own[SERVER].get(name, []) if not is_within(part, parts)]
            taking_part.setdefault(name, []).extend([*parts, *alone])
        for name, parts in own[SERVER].items():
            served.setdefault(name, []).extend(parts)
    if len(manifests) < size:
        return dict.fromkeys(taking_part, size)
    for name, parts in served.items():
        coverage(parts, world.sizes[name], f"{SERVER}.{name}")
    return {
        name: coverage(parts, world.sizes[name], f"{WORKER}.{name}") for name, parts in taking_part.items()
    }


def _require_owned(manifests: Mapping[int, Manifest], world: World, size: int) -> None:
    """Raise ValueError, on all ranks, unless each array that exists once is in one dict, with its size and dtype.

    If some of the ``size`` dicts are missing, so may be some of these arrays.
    """
    owned = [
        entry for manifest in manifests.values() for entry in manifest.of_kinds(*world.owned_kinds).items()
    ]
    given = {key for key, _ in owned}
    require_keys(given, world.owned if len(manifests) == size else given.intersection(world.owned))
    twice = sorted(key for key, count in Counter(key for key, _ in owned).items() if count > 1)
    if twice:
        raise ValueError(
            f"several states have {twice[0]}, which exists once in a job: they belong to different jobs"
        )
    dtype = compute_dtype_name(dtype_name(world.like.dtype))
    for key, entry in owned:
        if (entry.shape, entry.dtype) != ((world.sizes[world.place(key)[0]],), dtype):
            raise ValueError(
                f"the state has {key} of shape {entry.shape} and dtype {entry.dtype}; expected "
                f"{(world.sizes[world.place(key)[0]],)} and {dtype}"
            )


def _require_parts(manifests: Mapping[int, Manifest], template: Mapping[str, Array], world: World) -> None:
    """Raise ValueError, on all ranks alike, unless the dicts have all parts of the tensors, of the right dtype."""
    here = {(kind_of(key), world.place(key)[0]): like for key, like in template.items()}
    kept = dict(zip(world.fresh.names, world.fresh.exact, strict=True))
    found: dict[tuple[str, str], list[Part]] = {
        (kind, name): [] for kind, name in here if kind in world.part_kinds
    }
    for manifest in manifests.values():
        for key, entry in manifest.of_kinds(*world.part_kinds).items():
            name, start = world.place(key)
            place = kind_of(key), name
            if place not in found or len(entry.shape) != 1 or (entry.shape[0] and not kept[name]):
                raise ValueError(
                    f"the state has {key} of shape {entry.shape}, which this optimizer does not keep: another model or "
                    "optimizer"
                )
            require_dtype(entry.dtype, here[place], key)
            found[place].append((start, start + entry.shape[0]))
    for (kind, name), parts in found.items():
        if kept[name]:
            coverage(parts, world.sizes[name], f"{kind}.{name}")


def _share(
    mine: Mapping[int, Saved], name: str, count: int, template: Mapping[str, Array], world: World
) -> Array:
    """Return the contribution of this rank's dicts to a tensor's total residual, times the number of ranks."""
    like = next(x for key, x in template.items() if kind_of(key) == WORKER and world.place(key)[0] == name)
    xp, length = array_namespace(like), world.sizes[name]
    share = xp.zeros((length,), dtype=like.dtype, device=device(like))
    for each in mine.values():
        for kind, weight in ((WORKER, world.size / count), (SERVER, float(world.size))):
            parts = {
                world.place(key)[1]: _flat(each[key], world)
                for key in each
                if kind_of(key) == kind and world.place(key)[0] == name
            }
            pieces, end = [], 0
            for start, part in sorted(parts.items(), key=lambda item: item[0]):
                pieces += [xp.zeros((start - end,), dtype=like.dtype, device=device(like)), weight * part]
                end = start + part.shape[0]
            rest = xp.zeros((length - end,), dtype=like.dtype, device=device(like))
            share = share + concat([*pieces, rest])
    return share


def _flat(x: Any, world: World) -> Array:
    xp = array_namespace(world.like)
    return xp.reshape(xp.asarray(x, device=device(world.like)), (-1,))


def _bytes(x: Any, world: World) -> Array:
    return bytes_of(_flat(x, world)) if math.prod(x.shape) else _nothing(world)


def _nothing(world: World) -> Array:
    xp = array_namespace(world.like)
    return xp.zeros((0,), dtype=xp.uint8, device=device(world.like))
