"""Saved states of the optimizers for torch: nested as torch has them, flat as the core has them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

from qcomp.core.checkpoint.schema import Entries, Several, read, shown

__all__ = ["flattened", "nested", "of_rank", "rank_of"]

_SHARED = "shared"
"""The key of a parameter's entries that are equal on all ranks."""

_OF_RANK = re.compile(r"rank (\d{1,10}) of (\d{1,10})")

_BEFORE = "averaging"
"""The key of everything that belonged to no parameter, in states of earlier releases."""


def of_rank(rank: int, size: int) -> str:
    """Return the key of the entries that belong to one rank."""
    return f"rank {rank} of {size}"


def rank_of(key: Any) -> tuple[int, int] | None:
    """Return the rank and the number of ranks in a key of `of_rank`, None for another."""
    found = _OF_RANK.fullmatch(str(key))
    return None if found is None else (int(found[1]), int(found[2]))


def nested(
    of_params: Mapping[int, tuple[str, Iterable[str]]],
    whole: Mapping[str, Any],
    own_kinds: Sequence[str],
    parameters: Sequence[Any],
) -> dict[int, dict[str, Any]]:
    """Return a state of the core as the entries of parameters, for the "state" of a saved state.

    Values are tuples, which torch.distributed.checkpoint saves and reads whole. Otherwise it would read into the arrays
    of the optimizer before anything has checked that they fit. It keeps one of several entries with equal keys, and all
    entries with different keys.

    Parameters
    ----------
    of_params : mapping of int
        The name of each parameter and the kinds of arrays that it has, by its number in the groups.
    whole : mapping
        The result of ``state_dict`` of the core.
    own_kinds : sequence of str
        Kinds of arrays that differ between ranks.
    parameters : sequence of arrays
        The parameters, if they differ between ranks.
    """
    rest = dict(whole)
    entries: dict[int, dict[str, Any]] = {}
    for number, (name, kinds) in of_params.items():
        shared = {kind: rest.pop(f"{kind}.{name}").cpu() for kind in kinds if kind not in own_kinds}
        entries[number] = {_SHARED: (shared,)}
    own = {key: value.cpu() if hasattr(value, "cpu") else value for key, value in rest.items()}
    entries[min(entries)][of_rank(whole["rank"], whole["size"])] = (
        own,
        [p.to("cpu", copy=True) for p in parameters],
    )
    return entries


def flattened(
    saved: Mapping[str, Any], names: Sequence[str | None], sizes: Sequence[int]
) -> tuple[list[dict[str, Any]], list[Any]]:
    """Return the states of the core in a saved state, one for each rank that is in it, and the parameters of the last.

    Parameters
    ----------
    saved : mapping
        With "state" and "param_groups".
    names : sequence of str or None
        The name of each parameter now; None for one that does not require a gradient.
    sizes : sequence of int
        The number of parameters of each group now.

    Raises
    ------
    ValueError
        If it is of another optimizer, or of other groups.
    """
    _require("it", saved, Mapping)
    groups = read(saved, "param_groups", Several(), "state_dict")
    state = read(saved, "state", Entries(), "state_dict")
    for group in groups:
        _require("param_groups has a group that", group, Mapping)
    of_groups = [read(group, "params", Several(), "a group of param_groups") for group in groups]
    found = [len(numbers) for numbers in of_groups]
    if found != list(sizes):
        raise ValueError(f"state_dict has groups of {found} parameters; this optimizer has {list(sizes)}")
    numbers = list(chain.from_iterable(of_groups))
    shared: dict[str, Any] = {}
    ours, parameters = _BEFORE in saved, []
    ranks = [read(saved, _BEFORE, Entries(), "state_dict")] if ours else []
    for number, name in zip(numbers, names, strict=True):
        _require("param_groups has a parameter that", number, int | str)
        # torch.distributed.checkpoint puts what it has read under the text of a number, beside the number.
        entry = state.get(str(number), state.get(number, {}))
        _require(f"what it has of parameter {number}", entry, Mapping)
        ours = ours or _SHARED in entry
        for key, value in entry.items():
            if rank_of(key):
                own, parameters = _of_length(2, value, key)
                _require(key, own, Mapping)
                _require(f"the parameters of {key}", parameters, list | tuple)
                ranks.append(own)
                continue
            kinds = _of_length(1, value, key)[0] if key == _SHARED else {key: value}
            _require(key, kinds, Mapping)
            shared |= {f"{kind}.{number if name is None else name}": x for kind, x in kinds.items()}
    if not ours:
        raise ValueError(
            f"state_dict has the keys {sorted(map(shown, saved))}, but nothing of one of qcomp's optimizers; expected "
            "what the state_dict of one returned on this rank, or a list with that of all ranks"
        )
    return [_copied({**shared, **own}) for own in ranks], parameters


def _require(what: str, value: Any, kind: Any) -> None:
    """Raise ValueError unless a part of a saved state is of a type."""
    if not isinstance(value, kind):
        names = {Mapping: "a dict", int | str: "an integer or a text"}
        raise ValueError(f"{what} is {shown(value)}; expected {names.get(kind, 'a list')}")


def _of_length(length: int, value: Any, key: str) -> Sequence[Any]:
    """Return a tuple; raise ValueError unless it has this length."""
    _require(key, value, list | tuple)
    if len(value) != length:
        raise ValueError(f"{key} is {shown(value)}; expected {length}")
    found: Sequence[Any] = value
    return found


def _copied(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state with arrays of its own, since steps overwrite them."""
    return {key: x.clone() if hasattr(x, "clone") else x for key, x in flat.items()}
