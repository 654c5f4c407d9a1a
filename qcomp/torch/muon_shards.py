"""Reads how ``fully_shard`` has cut the parameters of Muon, as a `Sharding` for the core."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

from qcomp.comm.base import Communicator
from qcomp.core.handshake import agree_stages, gather_texts
from qcomp.core.mean.sharding import Sharding
from qcomp.core.mean.stages import Owner, Stages, drive, owned
from qcomp.core.reporting import name_ranks
from qcomp.torch.buffers import own_part


def own_shard(x: Any) -> Any:
    """Return this rank's shard of a parameter or gradient as a flat view; the shard is contiguous."""
    return own_part(x).reshape(-1)


def sharding_of(names: Sequence[str], params: Sequence[Any], comm: Communicator) -> Sharding | None:
    """Return how parameters are cut, the same on all ranks; None if no parameter is a DTensor. Collective if one is.

    ``comm`` has the ranks of the mesh, or of several meshes, of which each holds a replica. Raises TypeError if only
    some parameters are sharded, and ValueError if one is cut along several dimensions, or the ranks of the meshes are
    not the ranks of ``comm``; the other ranks then raise MismatchError.
    """
    if not any(hasattr(p, "device_mesh") for p in params):
        return None
    cut, problem = {}, None
    try:
        cut = _cut_of(names, params)
    except Exception as error:  # of this rank alone, perhaps
        problem = error
    stages = _told(cut, problem, comm.size, own_part(params[0]))
    told = drive(owned(stages, Owner("optimizer", 0, tuple(names), 0, "init with shards")), comm)
    axes = tuple(_cut_axis(p) for p in params)
    return Sharding(tuple(tuple(p.shape) for p in params), *_grid(told), axes)


def _told(
    cut: dict[str, Any], problem: Exception | None, size: int, like: Any
) -> Stages[list[dict[str, Any]]]:
    """Return how the parameters of each rank are cut; raise on all ranks if one has a problem."""
    yield from agree_stages(problem, what="make an optimizer for shards", size=size, like=like)
    return [json.loads(text) for text in (yield from gather_texts(json.dumps(cut), size, like))]


def _cut_axis(p: Any) -> int:
    """Return the axis along which a parameter is cut; the first axis if it is not cut."""
    axis = next((placement.dim for placement in p.placements if hasattr(placement, "dim")), 0)
    return int(axis % max(1, p.ndim))


def _cut_of(names: Sequence[str], params: Sequence[Any]) -> dict[str, Any]:
    """Return the ranks over which this rank's parameters are cut, and the index of its shard and of its replica."""
    from torch.distributed.tensor import Replicate, Shard  # noqa: PLC0415 - most models are not sharded

    first = next(p for p in params if hasattr(p, "device_mesh"))
    mesh = first.device_mesh
    kinds = list(map(type, first.placements))
    for name, p in zip(names, params, strict=True):
        if not hasattr(p, "device_mesh"):
            raise TypeError(
                f"the parameter {name!r} is whole, and others are sharded; expected all of them to be sharded: prepare "
                "the whole model by fully_shard, make another optimizer for parameters that fully_shard ignores, and "
                "call model.reshard() after an evaluation"
            )
        own = list(map(type, p.placements))
        if not set(own) <= {Shard, Replicate} or own.count(Shard) > 1:
            raise ValueError(
                f"the parameter {name!r} has the placements {p.placements}; expected Shard on one dimension of the "
                "mesh at most, and Replicate() on the others, as fully_shard makes them without tensor parallelism"
            )
        if p.device_mesh != mesh or own != kinds:
            raise ValueError(
                f"the parameter {name!r} is cut over {p.device_mesh} with {p.placements}, and {names[0]!r} over {mesh} "
                f"with {first.placements}; expected one mesh: make an optimizer for each mesh, with different seeds"
            )
        if not own_part(p).is_contiguous():
            raise ValueError(f"the shard of {name!r} is not contiguous; expected a contiguous one")
    at, sizes = mesh.get_coordinate(), [mesh.size(dim) for dim in range(mesh.ndim)]
    is_shard = [kind is Shard for kind in kinds]
    replica = 0
    for number, size, is_cut in zip(at, sizes, is_shard, strict=True):
        replica = replica if is_cut else replica * size + number
    return {
        "mesh": mesh.mesh.flatten().tolist(),
        "shard": sum(number for number, is_cut in zip(at, is_shard, strict=True) if is_cut),
        "shards": math.prod(size for size, is_cut in zip(sizes, is_shard, strict=True) if is_cut),
        "replica": replica,
    }


def _grid(cuts: Sequence[dict[str, Any]]) -> tuple[tuple[tuple[int, ...], ...], bool]:
    """Return the rank that holds each shard, replica by replica, and whether FSDP2 averages over the replicas."""
    held: dict[tuple[Any, ...], int] = {}
    for rank, cut in enumerate(cuts):
        held[*cut["mesh"], cut["replica"], cut["shard"]] = rank
    meshes = {tuple(cut["mesh"]) for cut in cuts}
    replicas = {(*cut["mesh"], cut["replica"]): cut["shards"] for cut in cuts}
    several = len(meshes) > 1
    complete = len(held) == len(cuts) and sum(replicas.values()) == len(cuts)
    if not complete or len(set(replicas.values())) > 1 or (several and len(replicas) > len(meshes)):
        by_mesh: dict[str, list[int]] = {}
        for rank, cut in enumerate(cuts):
            by_mesh.setdefault(str(cut["mesh"]), []).append(rank)
        told = "; ".join(f"on {name_ranks(ranks)} over {mesh}" for mesh, ranks in by_mesh.items())
        raise ValueError(
            f"comm has {len(cuts)} ranks, and the parameters are cut {told}; expected the ranks of one mesh, or of "
            "several meshes of one dimension and equal size, each of which holds a replica: pass the process group of "
            "these ranks as comm"
        )
    rows = [tuple(held[*place, shard] for shard in range(shards)) for place, shards in replicas.items()]
    return tuple(sorted(rows)), not several
