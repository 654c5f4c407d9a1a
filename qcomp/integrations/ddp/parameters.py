"""The parameters whose gradients DistributedDataParallel averages, and their places in its buckets."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from qcomp.core.numeric.arrays import host_bytes
from qcomp.private_names.torch import COMPILED, ignored_by

_ROW = 1 << 12


class AveragedParameters:
    """The parameters of a model whose gradients DistributedDataParallel averages, numbered as in the model.

    ``names`` are their `plain_name`, without the parameters that DistributedDataParallel ignores. If
    ``some_may_be_unused``, a backward pass may skip parameters, and `used` is tracked. Raises ValueError if a layer has
    sparse gradients.
    """

    def __init__(self, model: Any) -> None:
        named = averaged_by(model)
        for name, layer in model.module.named_modules():
            if isinstance(layer, torch.nn.Embedding | torch.nn.EmbeddingBag) and layer.sparse:
                raise ValueError(
                    f"the layer {name!r} has sparse gradients, which cannot be compressed: make it with sparse=False"
                )
        self.names = tuple(name for name, _ in named)
        self.tensors: list[Any] = [p for _, p in named]
        self.some_may_be_unused = bool(model.find_unused_parameters or model.static_graph)
        self._frozen = [(name, p) for name, p in model.module.named_parameters() if not p.requires_grad]
        self._number = {id(p): number for number, p in enumerate(self.tensors)}
        self._used: set[int] = set()
        if self.some_may_be_unused:
            for number, p in enumerate(self.tensors):
                p.register_hook(self._note_use(number))

    def _note_use(self, number: int) -> Any:
        def note(gradient: Any) -> None:
            if gradient is not None:
                self._used.add(number)

        return note

    def used(self, number: int) -> bool:
        """Return whether this rank has computed the gradient since `forget_uses`, including in ``no_sync()``."""
        return not self.some_may_be_unused or number in self._used

    def forget_uses(self) -> None:
        """Restart the tracking of uses, once the gradients are averaged."""
        self._used.clear()

    def require_frozen(self) -> None:
        """Raise RuntimeError if a parameter now requires a gradient but did not when the model was wrapped."""
        thawed = [name for name, p in self._frozen if p.requires_grad]
        if thawed:
            raise RuntimeError(
                f"DistributedDataParallel does not average the gradient of the parameter {thawed[0]!r}, which "
                "requires a gradient now, but did not when the model was wrapped: wrap the model again"
            )

    def gradients_in(self, bucket: Any) -> list[tuple[int, Any]]:
        """Return the number and the gradient of each parameter in a bucket, in the order of their numbers.

        The gradients are views of the bucket's buffer in the shapes of the parameters.
        """
        buffer = bucket.buffer()
        views = [
            _gradient_view(buffer, p, rows)
            for p, rows in zip(bucket.parameters(), bucket.gradients(), strict=True)
        ]
        numbers = [self._number[id(p)] for p in bucket.parameters()]
        return sorted(zip(numbers, views, strict=True), key=lambda pair: pair[0])

    def named(self, numbers: Sequence[int]) -> str:
        """Return the names of the first three parameters, and the number of the others."""
        first = ", ".join(repr(self.names[number]) for number in numbers[:3])
        return f"{first} and {len(numbers) - 3} more" if len(numbers) > 3 else first


def averaged_by(model: Any) -> list[tuple[str, Any]]:
    """Return the parameters that a DistributedDataParallel averages, with their `plain_name` in ``model.module``."""
    ignored = ignored_by(model)
    return [
        (plain_name(name), p)
        for name, p in model.module.named_parameters()
        if p.requires_grad and name not in ignored
    ]


def wrapped_in(model: Any) -> Any:
    """Return the DistributedDataParallel that holds all parameters of a model, perhaps the model itself, or None."""
    if not isinstance(model, torch.nn.Module):
        return None
    own = frozenset(map(id, model.parameters()))
    found = (module for module in model.modules() if isinstance(module, DistributedDataParallel))
    return next((module for module in found if own.issubset(map(id, module.parameters()))), None)


def inside(model: Any) -> Any:
    """Return the DistributedDataParallel in a model that a framework or torch.compile has wrapped once more.

    Hooks and optimizers call it themselves. A script calls it to register a hook on a model that Fabric has wrapped.

    Parameters
    ----------
    model : torch.nn.Module

    Returns
    -------
    torch.nn.parallel.DistributedDataParallel
        ``model`` itself, or the module in it that has all its parameters.

    Raises
    ------
    TypeError
        If no DistributedDataParallel has all parameters of the model.
    """
    found = wrapped_in(model)
    if found is None:
        raise TypeError(
            f"model is a {type(model).__name__}; expected a torch.nn.parallel.DistributedDataParallel: wrap the "
            "model, even for one rank. To average in step() instead, make an optimizer of qcomp.torch without model="
        )
    return found


def plain_name(name: str) -> str:
    """Return a parameter's name without the ``_orig_mod`` that torch.compile inserts.

    Examples
    --------
    >>> plain_name("_orig_mod.layers.0._orig_mod.weight")
    'layers.0.weight'
    """
    return ".".join(part for part in name.split(".") if part != COMPILED)


def is_dense(x: Any) -> bool:
    """Return whether the elements of a tensor fill its memory, in any order, without gaps or overlaps."""
    # empty_like keeps the strides of exactly these tensors.
    return bool(torch.empty_like(x, device="meta").stride() == x.stride())


def _gradient_view(buffer: Any, parameter: Any, rows: Any) -> Any:
    """Return the view of a parameter's gradient in its bucket.

    ``GradBucket.gradients()`` returns ``rows``, which reads the buffer in the C order of the shape. But
    DistributedDataParallel gives a gradient the strides of its parameter if that is dense, else C order.
    """
    if parameter.is_contiguous() or not is_dense(parameter):
        return rows
    return buffer.as_strided(parameter.shape, parameter.stride(), rows.storage_offset())


def mark_of(x: torch.Tensor) -> int:
    """Return a hash of all bits of a tensor, 64 bits long, computed by sums on its device."""
    kinds = {1: torch.int8, 2: torch.int16}
    bits = x.contiguous().flatten().view(kinds.get(x.dtype.itemsize, torch.int32))
    whole = len(bits) // _ROW * _ROW
    rows = bits[:whole].view(-1, _ROW)
    sums = torch.cat([rows.sum(0), rows.sum(1), bits[whole:].long()])
    return int.from_bytes(hashlib.sha256(host_bytes(sums)).digest()[:8], "little")
