"""`require_mergeable`: checks, with the same result on all ranks, that an old world's dicts can be merged."""

import math
from collections import Counter
from collections.abc import Mapping

from qcomp.core.checkpoint.coverage import Part, coverage, is_within, require_disjoint
from qcomp.core.checkpoint.format import SERVER, WORKER, require_dtype, require_fit, require_keys
from qcomp.core.checkpoint.manifest import Manifest, kind_of
from qcomp.core.checkpoint.world import World
from qcomp.core.numeric.arrays import Array, compute_dtype_name, dtype_name


def require_mergeable(
    manifests: Mapping[int, Manifest], template: Mapping[str, Array], world: World, size: int
) -> dict[str, int]:
    """Return the number of old ranks over which each tensor's residuals are averaged, by tensor name.

    This is the number of ranks with a worker or a server residual for an element: the server of a chunk need not be a
    worker for it. If some of the ``size`` dicts are missing, it is the number of all old ranks.
    """
    apart = (WORKER, SERVER, *world.owned_kinds, *world.part_kinds)
    alike = manifests[min(manifests)].but_kinds(*apart)
    expected = {key: like for key, like in template.items() if kind_of(key) not in apart}
    require_keys(alike, expected)
    _require_owned(manifests, world, size)
    _require_columns(manifests, world)
    _require_parts(manifests, template, world)
    for key, like in expected.items():
        require_fit(alike[key].shape, alike[key].dtype, like, key)
    likes = {world.place(key)[0]: like for key, like in template.items() if kind_of(key) == WORKER}
    held = [manifest.of_kinds(WORKER, SERVER) for manifest in manifests.values()]
    if not any(held):  # without compression or without feedback
        return {}
    if not likes:
        raise ValueError(
            f"the states have residuals, such as {min(held[0] or held[-1])}, but this optimizer keeps none, because "
            "the ranks share one node or feedback is False; expected feedback between nodes, such as with "
            "topology='two_phase'"
        )
    taking_part: dict[str, list[Part]] = {}
    served: dict[str, list[Part]] = {}
    for entries in held:
        tensors = {world.place(key)[0] for key in entries if kind_of(key) == WORKER}
        require_keys((f"{WORKER}.{name}" for name in tensors), (f"{WORKER}.{name}" for name in likes))
        own: dict[str, dict[str, list[Part]]] = {WORKER: {}, SERVER: {}}
        for key, entry in entries.items():
            name, start, _ = world.place(key)
            if name not in likes:
                raise ValueError(
                    f"the state has {key}, but this optimizer keeps that tensor exact: the state belongs to another "
                    "model or optimizer"
                )
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
    """Raise ValueError, on all ranks, unless each owner's array is in one dict, with the right size and dtype.

    If some of the ``size`` dicts are missing, some of these arrays may also be missing.
    """
    owned = [
        entry for manifest in manifests.values() for entry in manifest.of_kinds(*world.owned_kinds).items()
    ]
    given = {key for key, _ in owned}
    require_keys(given, world.owned if len(manifests) == size else given.intersection(world.owned))
    twice = sorted(key for key, count in Counter(key for key, _ in owned).items() if count > 1)
    if twice:
        raise ValueError(
            f"several states have {twice[0]}, which only one state of a job can have: the states belong to different "
            "jobs"
        )
    dtype = compute_dtype_name(dtype_name(world.like.dtype))
    for key, entry in owned:
        if (entry.shape, entry.dtype) != ((world.sizes[world.place(key)[0]],), dtype):
            raise ValueError(
                f"the state has {key} of shape {entry.shape} and dtype {entry.dtype}; expected "
                f"{(world.sizes[world.place(key)[0]],)} and {dtype}"
            )


def _require_columns(manifests: Mapping[int, Manifest], world: World) -> None:
    """Raise the same ValueError on all ranks unless all parts of a tensor are columns of one matrix."""
    rows: dict[str, int] = {}
    for manifest in manifests.values():
        for key, entry in manifest.of_kinds(WORKER, SERVER, *world.part_kinds).items():
            place, size = world.place(key), math.prod(entry.shape)
            if any(x % place.rows for x in (place.start, size)) or place.rows != rows.setdefault(
                place.name, place.rows
            ):
                raise ValueError(
                    f"the state has {key} of {size} elements, which are not whole columns of a matrix of "
                    f"{rows.get(place.name, place.rows)} rows, as other parts of this tensor are: the state is damaged"
                )


def _require_parts(manifests: Mapping[int, Manifest], template: Mapping[str, Array], world: World) -> None:
    """Raise the same ValueError on all ranks unless the dicts have all parts of the tensors, with the right dtype."""
    here = {(kind_of(key), world.place(key)[0]): like for key, like in template.items()}
    kept = dict(zip(world.fresh.names, world.fresh.exact, strict=True))
    found: dict[tuple[str, str], set[Part]] = {
        (kind, name): set() for kind, name in here if kind in world.part_kinds
    }
    for manifest in manifests.values():
        for key, entry in manifest.of_kinds(*world.part_kinds).items():
            name, start, _ = world.place(key)
            place = kind_of(key), name
            if place not in found or len(entry.shape) != 1 or (entry.shape[0] and not kept[name]):
                raise ValueError(
                    f"the state has {key} of shape {entry.shape}, which this optimizer does not keep: the state "
                    "belongs to another model or optimizer"
                )
            require_dtype(entry.dtype, here[place], key)
            found[place].add((start, start + entry.shape[0]))
    for (kind, name), parts in found.items():
        if kept[name]:
            once = [part for part in parts if part[0] < part[1]]
            coverage(once, world.sizes[name], f"{kind}.{name}")
            require_disjoint(once, world.sizes[name], f"{kind}.{name}")
