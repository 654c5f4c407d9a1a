"""Old public names that still work, with the new name of each, and the release that removes the old one."""

from __future__ import annotations

from operator import attrgetter
from typing import Any, NamedTuple

from qcomp.core.reporting import warn_caller


class Former(NamedTuple):
    """The new name that replaces an old one."""

    new: str
    """The new name, from the top-level package on."""
    goes: str
    """The first release without the old name."""


FORMER = {
    "qcomp.OuterLoop.groups": Former("qcomp.OuterLoop.outer.groups", "1.1"),
    "qcomp.OuterLoop.learning_rate": Former("qcomp.OuterLoop.outer.learning_rate", "1.1"),
    "qcomp.extend.AnyFrame": Former("qcomp.extend.Frame", "1.1"),
    "qcomp.extend.Partial": Former("builtins.object", "1.1"),
}
"""Every old name that still works. Its module has a ``__getattr__`` that calls `former`, or its class a
`FormerAttribute`."""
_told: set[str] = set()
"""The old names that this process has warned of."""


def former(module: str, name: str) -> Any:
    """Return the object that a module's old name stands for, with a warning at its first use; else AttributeError."""
    old = f"{module}.{name}"
    if old not in FORMER:
        raise AttributeError(f"module {module!r} has no attribute {name!r}")
    from pkgutil import resolve_name  # noqa: PLC0415  (rarely needed)

    _tell(old)
    return resolve_name(FORMER[old].new)


class FormerAttribute:
    """An old attribute, such as ``"qcomp.OuterLoop.groups"``; objects now keep its value under a new name."""

    def __init__(self, old: str) -> None:
        self.old = old

    def __get__(self, instance: object, owner: type) -> Any:
        if instance is None:
            return self
        _tell(self.old)
        kind = self.old.rpartition(".")[0]
        return attrgetter(FORMER[self.old].new.removeprefix(f"{kind}."))(instance)


def _tell(old: str) -> None:
    """Warn once that a name is old; if warnings are errors, raise every time."""
    if old not in _told:
        new, goes = FORMER[old]
        shown = new.removeprefix("builtins.")
        warn_caller(f"{old} is now called {shown}; release {goes} removes the old name", DeprecationWarning)
        _told.add(old)
