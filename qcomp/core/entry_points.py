"""The compressors, topologies and kernel sets that installed packages offer by entry points."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

GROUPS = {
    "compressor": "qcomp.compressors",
    "topology": "qcomp.topologies",
    "kernel set": "qcomp.kernels",
}
"""The group of entry points for each kind of object that packages may add."""


def offered(kind: str, known: Mapping[str, type]) -> dict[str, EntryPoint]:
    """Return the entry points of installed packages for one kind of object in `GROUPS`, by name.

    An entry point may lead to a class that is known already: the import of its package may have registered the class.
    Raises ValueError if two packages offer one name, or a package offers a name that a different class already has.
    """
    from importlib.metadata import entry_points  # noqa: PLC0415  (a tenth of the time of `import qcomp`)

    found: dict[str, EntryPoint] = {}
    for point in entry_points(group=GROUPS[kind]):
        own = known.get(point.name)
        if own is not None and (own.__module__, own.__qualname__) != (point.module, point.attr):
            raise ValueError(
                f"{source_of(point)} offers {kind} {point.name!r}, but {own.__module__}.{own.__qualname__} already "
                "has this name; expected another name"
            )
        other = found.get(point.name)
        if other is not None and (other.value, other.dist and other.dist.name) != (
            point.value,
            point.dist and point.dist.name,
        ):
            raise ValueError(
                f"{kind} {point.name!r} is offered by {source_of(other)} and by {source_of(point)}; remove one of them"
            )
        found[point.name] = point
    return found


def source_of(point: EntryPoint) -> str:
    """Return a text that names the target and the package of an entry point."""
    return f"{point.value} of {point.dist.name if point.dist else 'an unknown package'}"
