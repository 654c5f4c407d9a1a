"""Converts saved states of the optimizers for torch between torch's nested dicts and the core's flat ones."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from itertools import chain
from typing import Any, NamedTuple

from qcomp.core.checkpoint.format import renamed, some
from qcomp.core.checkpoint.gathering import of_rank, rank_of
from qcomp.core.checkpoint.schema import Entries, Several, read, shown
from qcomp.core.optimizers.makers import without_groups
from qcomp.integrations.ddp.parameters import plain_name

_SHARED = "shared"
"""The key of a parameter's entry with the arrays that are equal on all ranks, and the parameter's name."""

_PARAMETER = "parameter."
"""Prefix of the names of a rank's own parameters in a flat dict, which also has the entries of its state."""


class OfRank(NamedTuple):
    """The part of a saved state that belongs to one rank."""

    state: dict[str, Any]
    """The state of the core."""
    parameters: dict[str, Any]
    """The parameters by name, if they differed between the ranks."""
    bucketed: bool
    """Whether a model's backward passes averaged bucket by bucket, which decides which elements each rank served."""


def nested(
    of_params: Mapping[int, tuple[str, Iterable[str]]],
    whole: Mapping[str, Any],
    own_kinds: Sequence[str],
    parameters: Mapping[str, Any],
    *,
    bucketed: bool,
) -> dict[int, dict[str, Any]]:
    """Return a state of the core as entries by parameter, for the "state" of a saved dict.

    Values are tuples, which torch.distributed.checkpoint saves and reads whole. Arrays it would read in place, into the
    optimizer's own arrays, before any check that they fit. If entries of several ranks have the same key, it keeps one
    of them.

    ``of_params`` has the name of each parameter in the groups, and the kinds of its arrays, by the parameter's number.
    ``whole`` is a state dict of the core, and ``parameters`` has parameters that differ between ranks. ``bucketed``
    says whether a model averages bucket by bucket.
    """
    rest = dict(whole)
    entries: dict[int, dict[str, Any]] = {}
    for number, (name, kinds) in of_params.items():
        shared = {kind: rest.pop(f"{kind}.{name}").cpu() for kind in kinds if kind not in own_kinds}
        entries[number] = {_SHARED: (shared, name)}
    own = {key: value.cpu() if hasattr(value, "cpu") else value for key, value in rest.items()}
    entries[min(entries)][of_rank(whole["rank"], whole["size"])] = (
        own,
        {name: p.to("cpu", copy=True) for name, p in parameters.items()},
        bucketed,
    )
    return entries


def own_part(entries: Mapping[int, Mapping[str, Any]]) -> dict[str, Any]:
    """Return the entries of a rank from its own result of `nested`, as a flat dict for `gather_dicts`."""
    ((own, parameters, _),) = [
        value for entry in entries.values() for key, value in entry.items() if rank_of(key)
    ]
    return {**own, **{f"{_PARAMETER}{name}": p for name, p in parameters.items()}}


def of_ranks(gathered: Mapping[str, Mapping[str, Any]], *, bucketed: bool) -> dict[str, Any]:
    """Return the ranks' entries as `nested` makes them, from the dicts that `own_part` returned on each rank."""
    found: dict[str, Any] = {}
    for key, one in gathered.items():
        parameters = {name: p for name, p in one.items() if name.startswith(_PARAMETER)}
        own = {name: x for name, x in one.items() if name not in parameters}
        found[key] = own, {name.removeprefix(_PARAMETER): p for name, p in parameters.items()}, bucketed
    return found


def flattened(saved: Mapping[str, Any], names: Sequence[str | None], sizes: Sequence[int]) -> list[OfRank]:
    """Return, for each rank in a saved state, the part that belongs to it.

    ``names`` has the name of each parameter now, None for one that requires no gradient; ``sizes`` the number of
    parameters of each group. Raises ValueError if ``saved`` belongs to another optimizer, or to other groups or
    parameters.
    """
    _require("it", saved, Mapping)
    groups = read(saved, "param_groups", Several(), "state_dict")
    state = read(saved, "state", Entries(), "state_dict")
    for group in groups:
        _require("param_groups has a group that", group, Mapping)
    _require_sizes(groups, sizes)
    numbers = list(chain.from_iterable(group["params"] for group in groups))
    then: list[str | None] = []
    shared: dict[str, Any] = {}
    ranks: list[OfRank] = []
    ours = False
    for number, name in zip(numbers, names, strict=True):
        _require("param_groups has a parameter that", number, int | str)
        # torch.distributed.checkpoint adds what it has read under the number as text, beside the number itself.
        entry = state.get(str(number), state.get(number, {}))
        _require(f"the entry of parameter {number}", entry, Mapping)
        ours = ours or _SHARED in entry
        then.append(name)
        for key, value in entry.items():
            if rank_of(key):
                own, parameters, bucketed = _of_length(3, value, key)
                _require(key, own, Mapping)
                _require(f"the parameters of {key}", parameters, Mapping)
                ranks.append(OfRank(dict(own), dict(parameters), bucketed is True))
            elif key == _SHARED:
                kinds, then[-1] = _of_length(2, value, key)
                _require(key, kinds, Mapping)
                _require("the name of a parameter", then[-1], str)
                shared |= {f"{kind}.{then[-1]}": x for kind, x in kinds.items()}
            else:  # which loading refuses
                shared[f"{key}.{name or number}"] = value
    if not ours:
        raise ValueError(
            f"state_dict has the keys {sorted(map(shown, saved))}, but not those of an optimizer of qcomp; expected "
            "what the state_dict() of an optimizer returned on this rank, or a list with the results of all ranks; "
            "OneBitAdam, QAdam and ZeroOneAdam also take the state_dict() of a torch.optim.AdamW"
        )
    now_of = _matched(then, names, sizes)
    return [
        OfRank(
            _copied(without_groups(renamed({**shared, **one.state}, now_of.get))),
            {now_of.get(name, name): p for name, p in one.parameters.items()},
            one.bucketed,
        )
        for one in ranks
    ]


def groups_to_load(
    saved: Sequence[Mapping[str, Any]],
    groups: Sequence[Mapping[str, Any]],
    fixed: Sequence[Mapping[str, Any]],
) -> list[dict[str, Any]]:
    """Return the ``param_groups`` of an optimizer that continues with saved settings.

    Parameters keep their current names, by which they were matched. Groups without names get the saved names, as in
    torch. The settings in ``fixed`` stay as they are. Raises ValueError if the saved groups have other numbers of
    parameters, or names for only some parameters.
    """
    _require_sizes(saved, [len(group["params"]) for group in groups])
    found = []
    for number, (then, now, own) in enumerate(zip(saved, groups, fixed, strict=True)):
        kept = {key: now[key] for key in ("params", "param_names") if key in now}
        group = {**deepcopy(dict(then)), **own, **kept}
        names = None if "param_names" in kept else group.get("param_names")
        are_texts = isinstance(names, list | tuple) and all(isinstance(name, str) for name in names)
        if names is not None and not (are_texts and len(names) == len(now["params"])):
            raise ValueError(
                f"param_groups[{number}] has param_names={shown(names)}; expected a list with the name of each of its "
                f"{len(now['params'])} parameters"
            )
        found.append(group)
    return found


def of_no_parameter(saved: Mapping[str, Any]) -> dict[Any, Any]:
    """Return the entries of a saved state that belong to no parameter, as hooks and scripts may have added."""
    numbers = {str(number) for group in saved["param_groups"] for number in group["params"]}
    return {key: value for key, value in saved["state"].items() if str(key) not in numbers}


def _require_sizes(groups: Sequence[Mapping[str, Any]], sizes: Sequence[int]) -> None:
    """Raise ValueError unless saved groups have these numbers of parameters."""
    found = [len(read(group, "params", Several(), "a group of param_groups")) for group in groups]
    if found != list(sizes):
        raise ValueError(
            f"state_dict has {len(found)} param_groups of {found} parameters; this optimizer has {list(sizes)}: make "
            "it with the groups whose state was saved"
        )


def _matched(then: Sequence[str | None], now: Sequence[str | None], sizes: Sequence[int]) -> dict[str, str]:
    """Return each saved parameter's current name: the same, or the name at its position if either side has no names.

    A name is None for a parameter without a state; parameters without names have numbers. Raises ValueError if the
    parameters with a state in a group have changed.
    """
    inside, inside_now = _inside_wrappers(then), _inside_wrappers(now)
    by_position = any(all(name.isdecimal() for name in side if name) for side in (then, now))
    found: dict[str, str] = {}
    start = 0
    for number, size in enumerate(sizes):
        part = slice(start, start + size)
        start += size
        if by_position:
            for index, (old, new) in enumerate(zip(then[part], now[part], strict=True)):
                if (old is None) != (new is None):
                    raise ValueError(
                        f"param_groups[{number}] has at position {index} a parameter that "
                        f"{'required no gradient' if old is None else 'required a gradient'} when the state was saved, "
                        f"and {'requires one' if old is None else 'requires none'} now; expected the same"
                    )
            found |= {old: new for old, new in zip(then[part], now[part], strict=True) if old and new}
            continue
        names = {
            plain: name for plain, name in zip(inside_now[part], now[part], strict=True) if plain and name
        }
        saved = {plain: name for plain, name in zip(inside[part], then[part], strict=True) if plain and name}
        unknown = [plain for plain in saved if plain not in names]
        missing = [plain for plain in names if plain not in saved]
        if unknown or missing:
            told = [f"has {some(unknown)}, which this optimizer does not train there"] if unknown else []
            told += [f"lacks {some(missing)}"] if missing else []
            raise ValueError(
                f"the state of param_groups[{number}] {', and '.join(told)}. Parameters are matched by name in each "
                "group: make the optimizer with the same names and groups. If parameters were only renamed, load the "
                "state into an optimizer of model.parameters(), which have no names and are matched by position, "
                "without model=; what it saves fits any names"
            )
        found |= {old: names[plain] for plain, old in saved.items()}
    return found


def _inside_wrappers(names: Sequence[str | None]) -> list[str | None]:
    """Return names without what torch.compile and DistributedDataParallel put before them.

    The names of all parameters are needed, since "module." belongs to a wrapper only if all of them begin with it.

    Examples
    --------
    >>> _inside_wrappers(["module._orig_mod.0.weight", None, "module._orig_mod.module.weight"])
    ['0.weight', None, 'module.weight']
    """
    found = [name and plain_name(name) for name in names]
    while any(found) and all(name.startswith("module.") for name in found if name):
        found = [name and name.removeprefix("module.") for name in found]
    return found


def _require(what: str, value: Any, kind: Any) -> None:
    """Raise ValueError unless a part of a saved state has a type."""
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
    """Return a state with copies of the arrays, since steps overwrite them."""
    return {key: x.clone() if hasattr(x, "clone") else x for key, x in flat.items()}
