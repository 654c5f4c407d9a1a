"""Units of a sharded model: the parameters that one module gathers and reduces together."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate, Shard

from qcomp.private_names.torch import COMPILED, averages_over_replicas, fsdp_state_of, has_gradients
from qcomp.torch.parameters import require_values

_state_of = fsdp_state_of()


@dataclass(frozen=True)
class Unit:
    """The parameters of one call of ``fully_shard``; every rank has a shard of them.

    ``names`` are the names of the parameters within the model, and ``params`` their DTensors, both in FSDP2's order.
    ``name`` is the name of the module, empty for the model itself.
    """

    module: Any
    name: str
    names: tuple[str, ...]
    params: tuple[Any, ...]

    @property
    def label(self) -> str:
        """The unit's name in errors."""
        return f"the module {self.name!r}" if self.name else "the model"

    @property
    def is_sharded_once(self) -> bool:
        """Whether each parameter is sharded along at most one dimension of the mesh."""
        return all(_shard_dims(p) <= 1 for p in self.params)

    @property
    def group(self) -> Any:
        """The process group over which the parameters are sharded."""
        p = self.params[0]
        (dim,) = [i for i, placement in enumerate(p.placements) if isinstance(placement, Shard)]
        return p.device_mesh.get_group(dim)

    @property
    def shards(self) -> int:
        """Into how many shards each parameter is cut; 1 where it is replicated."""
        return self._size_of(Shard)

    @property
    def shard(self) -> int:
        """The index of this rank's shard."""
        p = self.params[0]
        at = zip(p.placements, p.device_mesh.get_coordinate(), strict=True)
        return max((number for placement, number in at if isinstance(placement, Shard)), default=0)

    @property
    def copies(self) -> int:
        """How many ranks of the mesh hold the same shard; FSDP2 itself sums over them."""
        return self._size_of(Replicate)

    @property
    def is_averaged_now(self) -> bool:
        """Whether replicas average gradients now, see ``set_requires_all_reduce`` of FSDP2."""
        return averages_over_replicas(_state_of(self.module))

    @property
    def has_gradients(self) -> bool:
        """Whether any parameter has a gradient, perhaps of zeros, from earlier backward passes."""
        return has_gradients(_state_of(self.module))

    def _size_of(self, kind: type) -> int:
        p = self.params[0]
        sizes = [p.device_mesh.size(i) for i, at in enumerate(p.placements) if isinstance(at, kind)]
        return max(sizes, default=1)

    def trained(self) -> Unit:
        """Return a unit with only the parameters that require a gradient now."""
        return self.only([n for n, p in zip(self.names, self.params, strict=True) if p.requires_grad])

    def only(self, names: Collection[str]) -> Unit:
        """Return a unit with only the parameters of these names."""
        pairs = [(n, p) for n, p in zip(self.names, self.params, strict=True) if n in names]
        return Unit(self.module, self.name, tuple(n for n, _ in pairs), tuple(p for _, p in pairs))

    def sizes(self, world: int) -> tuple[int, ...]:
        """Return the number of elements in a shard of each parameter, with padding if ``world`` does not divide it."""
        return tuple(_padded_shape(p, world).numel() for p in self.params)

    @property
    def axes(self) -> list[int]:
        """The axis along which each parameter is sharded."""
        return list(map(_shard_dim, self.params))

    def own_shards(self, world: int) -> list[Any]:
        """Return this rank's shard of each parameter, flat, with zeros as padding."""
        local = [p.detach().to_local().flatten() for p in self.params]
        return [
            torch.nn.functional.pad(x, (0, size - x.shape[0]))
            for x, size in zip(local, self.sizes(world), strict=True)
        ]

    def to_whole(self, vector: Any, world: int) -> list[Any]:
        """Return whole tensors in the shapes of the parameters, from a vector with the shards of all ranks."""
        pieces = vector.split(self.sizes(world) * world)
        count = len(self.params)
        whole = []
        for i, p in enumerate(self.params):
            dim, shape = _shard_dim(p), _padded_shape(p, world)
            joined = torch.cat([pieces[r * count + i].reshape(shape) for r in range(world)], dim)
            whole.append(joined.narrow(dim, 0, p.shape[dim]).contiguous())
        return whole

    def to_vector(self, whole: Sequence[Any], world: int) -> Any:
        """Return the vector of all ranks' shards of whole tensors; the inverse of `to_whole`."""
        of_params = []
        for x, p in zip(whole, self.params, strict=True):
            dim, shape = _shard_dim(p), _padded_shape(p, world)
            missing = shape[dim] * world - x.shape[dim]
            filling = x.new_zeros((*x.shape[:dim], missing, *x.shape[dim + 1 :]))
            of_params.append(torch.cat([x, filling], dim).split(shape[dim], dim))
        return torch.cat([of_param[r].flatten() for r in range(world) for of_param in of_params])

    def padding(self, world: int) -> Any:
        """Return the positions of the padding in a vector that `to_vector` returns."""
        everything = [torch.ones(p.shape, dtype=torch.bool, device=p.device) for p in self.params]
        return (~self.to_vector(everything, world)).nonzero().flatten()


def units_of(model: Any) -> list[Unit]:
    """Return the units of a model, in the order of its modules. Weights that an evaluation left gathered are freed.

    Raises TypeError if nothing in it was sharded, and ValueError if a parameter has no values yet.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    found: dict[int, tuple[Any, str, list[tuple[str, Any]]]] = {}
    for owner, module_name, name, p in _owned(model, "", None, ""):
        _, _, named = found.setdefault(id(_state_of(owner)), (owner, module_name, []))
        if isinstance(p, DTensor) and all(p is not other for _, other in named):
            named.append((name, p))
    units = [
        Unit(module, name, tuple(n for n, _ in named), tuple(p for _, p in named))
        for module, name, named in found.values()
        if named
    ]
    require_values((name, p) for unit in units for name, p in zip(unit.names, unit.params, strict=True))
    if not units:
        raise TypeError(
            f"model is a {type(model).__name__} without sharded parameters; expected one after "
            "torch.distributed.fsdp.fully_shard(model)"
        )
    return units


def _owned(module: Any, prefix: str, owner: Any, owner_name: str) -> Iterator[tuple[Any, str, str, Any]]:
    """Yield the sharded module of each parameter, the module's name, the parameter's name, and the parameter.

    Children come first. Names are without the ``_orig_mod`` of torch.compile.
    """
    if isinstance(module, FSDPModule):
        owner, owner_name = module, prefix.removesuffix(".")
    for name, child in module.named_children():
        yield from _owned(child, prefix if name == COMPILED else f"{prefix}{name}.", owner, owner_name)
    if owner is not None:
        for name, p in module.named_parameters(recurse=False):
            yield owner, owner_name, prefix + name, p


def _shard_dims(p: Any) -> int:
    return sum(not isinstance(placement, Replicate) for placement in p.placements)


def _shard_dim(p: Any) -> int:
    """Return the dimension along which a parameter is sharded; the first dimension if it is not sharded."""
    dims = [placement.dim for placement in p.placements if isinstance(placement, Shard)]
    return int(dims[0]) if dims else 0


def _padded_shape(p: Any, world: int) -> torch.Size:
    """Return the shape of the largest shard of a parameter."""
    dim = _shard_dim(p)
    return torch.Size([-(-n // world) if i == dim else n for i, n in enumerate(p.shape)])
