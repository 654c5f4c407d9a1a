"""Records which optimizer made a state, and checks whether a given optimizer may load the state."""

import json
from collections.abc import Mapping
from typing import Any

from qcomp.core.checkpoint.format import MAKER, replaced
from qcomp.core.checkpoint.schema import Text, from_json, read, shown
from qcomp.core.optimizers.agreement import UNTOLD, settings_of
from qcomp.core.reporting import warn_caller

_COMPRESSORS = ("compressor", "compressors", "update_compressor")
_NOT_COMPARED = ("tensorwise", "topology", "link", "shards")  # the keys of a state show where residuals lie
_TEXTS = {name: repr(value) for name, value in UNTOLD.items()}
_GROUPS = "groups"
"""The setting that states from `without_groups` do not name."""


def maker(replica: Any) -> str:
    """Return a record of a state's maker: class and settings of an optimizer or loop as JSON text."""
    settings = {name: text for name, text in settings_of(replica).items() if name not in _NOT_COMPARED}
    return json.dumps({"optimizer": type(replica).__name__, "settings": settings})


def require_maker(saved: Mapping[str, Any], replica: Any) -> None:
    """Raise ValueError if a saved state was made by another optimizer or compressor; warn if other settings differ.

    A state that was built from another library's moments, such as AdamW's, does not name its maker, and is accepted.
    """
    if MAKER not in saved:
        return
    then, now = _read(saved[MAKER]), json.loads(maker(replica))
    if then["optimizer"] != now["optimizer"]:
        raise ValueError(
            f"the state was saved by {then['optimizer']}; this is {now['optimizer']}. Load it with the optimizer that "
            "saved it, or pass strict=False if its arrays mean the same in both optimizers"
        )
    before, after = then["settings"], now["settings"]
    compared = {*before, *after} - ({_GROUPS} - before.keys())
    differing = [n for n in sorted(compared) if before.get(n) != after.get(n)]
    for name in differing:
        if name in _COMPRESSORS:
            raise ValueError(
                f"the state was saved with {name}={before.get(name)}; this {now['optimizer']} has {after.get(name)}: "
                "load it with the setting it was saved with, or pass strict=False to continue with the new one"
            )
    if differing:
        before, after = ({**_TEXTS, **settings} for settings in (before, after))
        changes = ", ".join(f"{name}={before.get(name)} (now {after.get(name)})" for name in differing)
        warn_caller(
            f"the state was saved by {then['optimizer']} with {changes}; pass strict=False if this is intended"
        )


def without_groups(saved: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state whose record leaves out the groups, for callers that save and load the groups separately."""
    if MAKER not in saved:
        return dict(saved)
    record = _read(read(saved, MAKER, Text()))
    settings = {name: text for name, text in record["settings"].items() if name != _GROUPS}
    return replaced(saved, MAKER, json.dumps({**record, "settings": settings}))


def _read(text: str) -> Any:
    """Parse a text from `maker`; raise ValueError for anything else."""
    try:
        found = from_json(text)
    except ValueError:
        found = None
    if (
        isinstance(found, dict)
        and isinstance(found.get("optimizer"), str)
        and isinstance(settings := found.get("settings"), dict)
        and all(isinstance(value, str) for value in settings.values())
    ):
        return found
    raise ValueError(
        f"the state has {MAKER}={shown(text)}; expected class and settings of an optimizer as JSON text: it is "
        "damaged; load an earlier one"
    )
