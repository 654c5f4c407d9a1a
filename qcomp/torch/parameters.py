"""Reads, names and checks the parameters that an optimizer for torch is given."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from qcomp.core.numeric.arrays import sharing
from qcomp.integrations.ddp.parameters import averaged_by, plain_name


def inside_wrapper(optimizer: Any) -> Any:
    """Return the torch optimizer inside the wrapper of Accelerate, Fabric or Lightning."""
    inner = getattr(optimizer, "optimizer", None)
    return inner if isinstance(inner, torch.optim.Optimizer) else optimizer


def names_of(groups: Sequence[Mapping[str, Any]], model: Any) -> list[list[str]]:
    """Return, for each group, the names of its parameters that require gradients.

    With a model, names are those within its module; without one, the given names, else numbers. Each is a `plain_name`.
    Raises ValueError if the parameters are not the model's.
    """
    of_model = None if model is None else {id(p): name for name, p in averaged_by(model)}
    found: list[list[str]] = []
    number = 0
    for index, group in enumerate(groups):
        given = group.get("param_names") or [""] * len(group["params"])
        names = []
        for name, p in zip(given, group["params"], strict=True):
            if p.requires_grad:
                if of_model is not None and id(p) not in of_model:
                    raise ValueError(
                        f"param_groups[{index}] has a parameter of shape {tuple(p.shape)} that model does not average; "
                        "expected parameters of model.module"
                    )
                names.append(plain_name(name or str(number)) if of_model is None else of_model.pop(id(p)))
                number += 1
        found.append(names)
    if of_model:
        raise ValueError(
            f"params lacks {', '.join(map(repr, list(of_model.values())[:3]))}, which model averages; expected all "
            "parameters of model.module that require gradients, in groups if they differ. Two optimizers, as for a "
            "generator and its discriminator, need a DistributedDataParallel each; if one must hold both models, "
            "leave out model= and register torch's noop_hook on it"
        )
    return found


def require_values(named: Iterable[tuple[str, Any]]) -> None:
    """Raise ValueError unless every parameter has values."""
    for name, p in named:
        if is_lazy(p):
            raise ValueError(
                f"the parameter {name!r} has no shape yet, as in a LazyModule before its first forward pass; expected "
                "one with values: call the model with a batch first"
            )
        if p.is_meta:
            raise ValueError(
                f"the parameter {name!r} is on the meta device; expected one with values: call model.to_empty and "
                "initialise it first"
            )


def require_memory_of_its_own(named: Iterable[tuple[str, Any]]) -> None:
    """Raise ValueError unless every parameter has values, in memory that no other parameter uses.

    Sparse and sharded parameters are refused elsewhere.
    """
    named = list(named)
    require_values(named)
    own = [
        (name, p)
        for name, p in named
        if p.layout is torch.strided and not hasattr(p, "device_mesh") and p.numel()
    ]
    for name, p in own:
        if any(stride == 0 for stride, size in zip(p.stride(), p.shape, strict=True) if size > 1):
            raise ValueError(
                f"the parameter {name!r} repeats elements in memory, as expand does: make it from a contiguous copy"
            )
    if pair := sharing([p for _, p in own]):
        one, other = (own[number][0] for number in pair)
        raise ValueError(
            f"the parameters {one!r} and {other!r} share memory, so each step would change it twice; expected each "
            "parameter once: share the Parameter itself between modules"
        )


def require_dense(named: Iterable[tuple[str, Any]]) -> None:
    """Raise TypeError if a gradient is sparse.

    A parameter without a gradient has None.
    """
    for name, grad in named:
        if grad is not None and grad.layout is not torch.strided:
            raise TypeError(
                f"the gradient of {name!r} is sparse; expected a dense one: make an Embedding with sparse=False"
            )


def plain_products(like: torch.Tensor) -> Any:
    """Return a context in which autocast does not lower the precision of products, on the device of ``like``."""
    kind = like.device.type
    return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext()
