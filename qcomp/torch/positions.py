"""The entries of optimizers' states that are positions of parameters: whoever moves a parameter must move them too."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from qcomp.torch.buffers import own_part
from qcomp.torch.optimizer import AveragingOptimizer

__all__ = ["Place", "Positions", "entries"]

Place = tuple[int, tuple[str | int, ...]]
"""The number of an optimizer, and the keys to an entry in the state of each of its parameters."""


class Positions:
    """Which entries of optimizers' states are positions, such as float32 copies of parameters in half precision.

    An optimizer moves from its copy, not from the parameter. So what an outer loop writes into the parameter alone is
    undone by the next step. An entry is a position if it once had the values of all its parameters, rounded to their
    precision. Zeros are no evidence, since they equal a momentum of zero, and neither are single numbers, which may
    equal a count of steps. Where all parameters are constant, an entry is one only while it equals them.

    Parameters
    ----------
    optimizers : sequence of torch.optim.Optimizer
        The optimizers.
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._optimizers = optimizers
        self.known: set[Place] = set()
        self._now: set[Place] = set()
        self.forget()

    def forget(self) -> None:
        """Know only what optimizers of qcomp tell: 0/1 Adam has the parameters of the last synchronisation."""
        self.known = {
            (number, ("anchor",))
            for number, one in enumerate(self._optimizers)
            if isinstance(one, AveragingOptimizer)
        }

    def note(self) -> None:
        """Learn which entries have the values of their parameters now."""
        self._now = set()
        for number, optimizer in enumerate(self._optimizers):
            found: dict[tuple[str | int, ...], list[tuple[Any, Any]]] = {}
            for p, state in optimizer.state.items():
                if isinstance(p, torch.Tensor):
                    value = own_part(p)
                    for keys, entry in entries(state):
                        if entry.shape == value.shape:
                            found.setdefault(keys, []).append((entry, value))
            for keys, pairs in found.items():
                place = number, keys
                evidence = None if place in self.known else _evidence(pairs)
                if evidence is not None:
                    (self.known if evidence else self._now).add(place)

    def move(self, p: Any, new: Any) -> None:
        """Move the positions of a parameter by the difference to what it is now."""
        old, found = own_part(p), self._of(p)
        if not found or torch.equal(old, new):
            return
        for entry in found:
            wide = torch.promote_types(entry.dtype, old.dtype)
            # So a copy that equals the parameter ends at the new value exactly, and what rounding hides is kept.
            hidden = entry.to(wide) - old.to(entry.device, wide)
            entry.copy_(new.to(entry.device, wide) + hidden)

    @contextmanager
    def relative(self, params: Sequence[Any]) -> Iterator[None]:
        """Have positions relative to their parameters in a context, in which states are copied."""
        absolute = [(entry, entry.clone()) for p in params for entry in self._of(p)]
        self._add(params, -1)
        try:
            yield
        finally:
            for entry, value in absolute:
                entry.copy_(value)

    def place(self, params: Sequence[Any], known: Iterable[Place]) -> None:
        """Make positions absolute in states that were copied in a `relative` context, where these were known."""
        self.known, self._now = set(known), set()
        self._add(params, 1)

    def _add(self, params: Sequence[Any], factor: int) -> None:
        for p in params:
            for entry in self._of(p):
                entry.add_(own_part(p).to(entry.device, entry.dtype), alpha=factor)

    def _of(self, p: Any) -> list[Any]:
        """Return the positions of a parameter, each once."""
        value, found = own_part(p), {}
        for number, keys in sorted(self.known | self._now, key=str):
            for entry in _at(self._optimizers[number].state.get(p), keys):
                if entry.shape == value.shape and entry.data_ptr() != value.data_ptr():
                    found[entry.data_ptr()] = entry
        return list(found.values())


def entries(state: Any, keys: tuple[str | int, ...] = ()) -> Iterator[tuple[tuple[str | int, ...], Any]]:
    """Yield the floating-point tensors in a state, with their keys."""
    if isinstance(state, torch.Tensor):
        if state.is_floating_point() and state.layout is torch.strided:
            yield keys, own_part(state)
    elif isinstance(state, Mapping | list | tuple):
        for key, value in state.items() if isinstance(state, Mapping) else enumerate(state):
            yield from entries(value, (*keys, key))


def _at(state: Any, keys: tuple[str | int, ...]) -> list[Any]:
    return [entry for found, entry in entries(state) if found == keys]


def _evidence(pairs: list[tuple[Any, Any]]) -> bool | None:
    """Return None unless all entries equal their parameters, in the lower of both precisions.

    If they do, return whether any has two values; None also if all are zeros or single numbers.
    """
    found = None
    for entry, value in sorted(pairs, key=lambda pair: pair[1].numel()):
        coarse = min(entry.dtype, value.dtype, key=lambda dtype: dtype.itemsize)
        own = value.to(coarse)
        if not torch.equal(entry.to(own.device, coarse), own):
            return None
        if not found and own.numel() > 1:
            is_varied = bool((own != own.flatten()[0]).any())
            found = is_varied if is_varied or own.any() else found
    return found
