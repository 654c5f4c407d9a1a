"""Copies of parameters inside optimizers' states: an outer loop that moves a parameter must move its copies too."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from qcomp.core.reporting import warn_caller
from qcomp.integrations.ddp.parameters import mark_of
from qcomp.torch.buffers import own_part
from qcomp.torch.optimizer import AveragingOptimizer

Place = tuple[int, tuple[str | int, ...]]
"""The number of an optimizer, and the keys to an entry in the state of each of its parameters."""

_SAVED = "positions"
"""The key of the known positions in a saved state."""

_DEPTH = 8
"""The greatest depth of entries: with a limit, a search ends even in a list that contains itself."""


class Positions:
    """Which entries of optimizers' states are positions, such as float32 copies of parameters in half precision.

    An optimizer moves from its copy, not from the parameter. So if an outer loop writes only into the parameter, the
    next step undoes the change. An entry is a position if, after the parameters had moved, its tensors have once
    equalled all their parameters, in the lower of the two precisions. Before parameters move, a fixed reference, such
    as Prodigy's starting point, equals them as well. Zeros are no evidence, since a momentum may be zero. Single
    numbers are no evidence, since they may equal a count of steps. If all parameters are constant or have not moved, an
    entry counts as a position only while it equals them.

    Copies may also lie outside the state, as in apex: in an attribute of the optimizer whose tensors once were all
    copies of different parameters.
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._optimizers = optimizers
        self.known: set[Place] = set()
        self._now: set[Place] = set()
        self._beside: dict[Place, Any] = {}
        self._first: dict[int, int] = {}
        self._is_told = False
        self.forget()

    def begin(self, params: Sequence[Any]) -> None:
        """Remember the values of parameters before they move."""
        self._first = {id(p): mark_of(own_part(p)) for p in params}

    def _has_moved(self, p: Any) -> bool:
        return self._first.get(id(p)) != mark_of(own_part(p))

    def forget(self) -> None:
        """Forget all positions but ``anchor`` of qcomp's optimizers, where 0/1 Adam keeps synchronised parameters."""
        self.known = {
            (number, ("anchor",))
            for number, one in enumerate(self._optimizers)
            if isinstance(one, AveragingOptimizer)
        }
        self._beside = {}

    @property
    def saved(self) -> dict[str, list[list[str | int]]]:
        """The entry of a saved state that names the positions. A copy such as schedule-free's z soon differs."""
        named = [
            [number, *keys] for number, keys in self.known if all(type(key) in (str, int) for key in keys)
        ]
        return {_SAVED: sorted(named, key=str)}

    def resume(self, named: Iterable[Iterable[Any] | None]) -> None:
        """Go on with the positions that the saved states of each rank name; None if these have no such entry."""
        for places in named:
            if places is not None:
                self._is_told = True
                found = filter(None, map(_place, places))
                self.known |= {place for place in found if place[0] < len(self._optimizers)}

    def warn_of_strays(self) -> None:
        """Warn of entries near their parameters that no saved state names, and that may have been copies of them."""
        self.note()
        for number, optimizer in enumerate(self._optimizers):
            distances = defaultdict[tuple[str | int, ...], list[float]](lambda: [0.0, 0.0])
            for p, state in () if self._is_told else optimizer.state.items():
                for keys, entry in entries(state):
                    if isinstance(p, torch.Tensor) and entry.shape == own_part(p).shape and p.numel() > 1:
                        own = own_part(p).float()
                        distances[keys][0] += float(
                            (entry.to(own.device, torch.float32) - own).square().sum()
                        )
                        distances[keys][1] += float(own.square().sum())
            for keys, (squared, of_params) in distances.items():
                if squared < of_params / 4 and (number, keys) not in self.known | self._now:
                    warn_caller(
                        f"optimizer {number} has a state {'.'.join(map(str, keys))!r} with values close to its "
                        "parameters, and no saved state of this loop names it: if it is a copy of the parameters that "
                        "has moved on, such as z of schedule-free or slow weights, no exchange will move it, and "
                        "training goes wrong. Make the loop before the optimizer's first step, and resume with the "
                        "loop's state_dict(). If it is a fixed reference, ignore this warning"
                    )

    def note(self, *, at_start: bool = False) -> None:
        """Learn which entries equal their parameters now.

        ``at_start`` says that no parameter has moved, so that a fixed reference is a copy too.
        """
        self._now = set()
        for number, optimizer in enumerate(self._optimizers):
            found: dict[tuple[str | int, ...], list[tuple[Any, Any]]] = {}
            for p, state in optimizer.state.items():
                if isinstance(p, torch.Tensor):
                    for keys, entry in entries(state):
                        if entry.shape == own_part(p).shape:
                            found.setdefault(keys, []).append((entry, p))
            for keys, pairs in found.items():
                place = number, keys
                evidence = None if place in self.known else _evidence(pairs)
                if evidence is not None:
                    is_position = evidence and any(self._has_moved(p) for _, p in pairs)
                    (self.known if is_position else self._now).add(place)
            self._note_beside(number, optimizer, at_start=at_start)

    def _note_beside(self, number: int, optimizer: torch.optim.Optimizer, *, at_start: bool) -> None:
        """Learn which attributes hold only copies of parameters, each of a different parameter."""
        for name, value in _attributes(optimizer).items():
            copies = _copies(entries(value, (name,)), optimizer)
            pairs = [(entry, p) for entry, p in copies.values()]
            if _evidence(pairs) and (at_start or any(self._has_moved(p) for _, p in pairs)):
                self._beside |= {(number, keys): p for keys, (_, p) in copies.items()}

    def has(self, number: int, name: str) -> bool:
        """Return whether an entry of an optimizer's states is a position."""
        return (number, (name,)) in self.known | self._now

    def move(self, p: Any, new: Any) -> None:
        """Move a parameter's positions by the difference between its new and its present value."""
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
        """Make positions relative to their parameters within a context; raise ValueError if some lie elsewhere."""
        for number, keys in self._beside:
            raise ValueError(
                f"optimizer {number} keeps a copy of a parameter in its attribute {'.'.join(map(str, keys))!r}, which "
                "state_dict() does not contain, so a replica could not restore it; expected the copy in "
                "optimizer.state"
            )
        absolute = [(entry, entry.clone()) for p in params for entry in self._of(p)]
        self._add(params, -1)
        try:
            yield
        finally:
            for entry, value in absolute:
                entry.copy_(value)

    def place(self, params: Sequence[Any], known: Iterable[Place]) -> None:
        """Make the given positions absolute again, in states that were copied in a `relative` context."""
        self.known, self._now = set(known), set()
        self._add(params, 1)

    def _add(self, params: Sequence[Any], factor: int) -> None:
        for p in params:
            for entry in self._of(p):
                entry.add_(own_part(p).to(entry.device, entry.dtype), alpha=factor)

    def _of(self, p: Any) -> list[Any]:
        """Return the positions of a parameter, each once."""
        value, found = own_part(p), {}
        in_states = [
            (keys, self._optimizers[number].state.get(p))
            for number, keys in sorted(self.known | self._now, key=str)
        ]
        beside = [
            (keys, _attributes(self._optimizers[number]))
            for (number, keys), owner in self._beside.items()
            if owner is p
        ]
        for keys, state in in_states + beside:
            for entry in _at(state, keys):
                if entry.shape == value.shape and entry.data_ptr() != value.data_ptr():
                    found[entry.data_ptr()] = entry
        return list(found.values())


def without_positions(saved: Any) -> tuple[Any, list[Any] | None]:
    """Return saved states, or one state, without the entry of `Positions.saved`, and the places that it named, or None.

    An entry that is damaged stays, so that loading refuses the state on every rank.
    """
    if isinstance(saved, list):
        parts = [without_positions(one) for one in saved]
        told = [named for _, named in parts if named is not None]
        return [one for one, _ in parts], [place for named in told for place in named] if told else None
    named = saved.get(_SAVED) if isinstance(saved, Mapping) else None
    if not isinstance(named, list) or None in map(_place, named):
        return saved, None
    return {key: value for key, value in saved.items() if key != _SAVED}, named


def _place(saved: Any) -> Place | None:
    """Return the place that a saved list names; None if it names none."""
    if (
        not isinstance(saved, list)
        or not {int} <= {*map(type, saved[:1])}
        or not {*map(type, saved)} <= {int, str}
    ):
        return None
    return saved[0], tuple(saved[1:])


def entries(state: Any, keys: tuple[str | int, ...] = ()) -> Iterator[tuple[tuple[str | int, ...], Any]]:
    """Yield the floating-point tensors in a state, with their keys."""
    if isinstance(state, torch.Tensor):
        if state.is_floating_point() and state.layout is torch.strided:
            yield keys, own_part(state)
    elif isinstance(state, Mapping | list | tuple) and len(keys) < _DEPTH:
        for key, value in state.items() if isinstance(state, Mapping) else enumerate(state):
            yield from entries(value, (*keys, key))


def _attributes(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return an optimizer's attributes outside its state; none for qcomp's optimizers, which keep no copies there."""
    if isinstance(optimizer, AveragingOptimizer):
        return {}
    return {key: value for key, value in vars(optimizer).items() if key not in ("state", "param_groups")}


def _at(state: Any, keys: tuple[str | int, ...]) -> list[Any]:
    return [entry for found, entry in entries(state) if found == keys]


def _copies(
    held: Iterable[tuple[tuple[str | int, ...], Any]], optimizer: torch.optim.Optimizer
) -> dict[tuple[str | int, ...], tuple[Any, Any]]:
    """Return tensors by their keys, each with the parameter that it equals; nothing if any tensor equals none."""
    rest = [p for group in optimizer.param_groups for p in group["params"]]
    found = {}
    for keys, entry in held:
        for number, p in enumerate(rest):
            value = own_part(p)
            is_other = entry.shape == value.shape and entry.data_ptr() != value.data_ptr()
            if is_other and _in_common(entry, value) is not None:
                found[keys] = entry, rest.pop(number)
                break
        else:
            return {}
    return found


def _in_common(entry: Any, value: Any) -> Any:
    """Return the values of two tensors in the lower of both precisions if they are equal, else None."""
    coarse = min(entry.dtype, value.dtype, key=lambda dtype: dtype.itemsize)
    own = value.to(coarse)
    return own if torch.equal(entry.to(own.device, coarse), own) else None


def _evidence(pairs: list[tuple[Any, Any]]) -> bool | None:
    """Return None unless all entries equal the parameters beside them, in the lower of both precisions.

    If they do, return whether any of them has differing elements; None if all are zeros or single numbers.
    """
    found = None
    for entry, p in sorted(pairs, key=lambda pair: pair[1].numel()):
        own = _in_common(entry, own_part(p))
        if own is None:
            return None
        if not found and own.numel() > 1:
            is_varied = bool((own != own.flatten()[0]).any())
            found = is_varied if is_varied or own.any() else found
    return found
