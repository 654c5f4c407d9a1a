"""Registers topologies, and finds them by name."""

from functools import cache
from typing import TYPE_CHECKING

from qcomp.core.entry_points import offered
from qcomp.core.mean.topologies.all_gather import GatherAll
from qcomp.core.mean.topologies.base import Topology
from qcomp.core.mean.topologies.hierarchical import Hierarchical
from qcomp.core.mean.topologies.ring import Ring
from qcomp.core.mean.topologies.two_phase import TwoPhase

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

AUTO = "auto"
"""The name that stands for the fastest topology, which `qcomp.CompressedMean.init` chooses."""

_registered: dict[str, Topology] = {t.name: t for t in (TwoPhase(), Ring(), GatherAll(), Hierarchical())}


def register(topology: Topology) -> Topology:
    """Register a topology under its name in this process; every rank must do so.

    Installed packages need no call: they list the class or an instance in the entry point group ``qcomp.topologies``,
    and qcomp imports it when its name is used. ``"auto"`` considers registered topologies only, because packages may
    be installed on some ranks and missing on others.

    Parameters
    ----------
    topology : Topology

    Returns
    -------
    Topology
        The same object.

    Raises
    ------
    TypeError
        If the argument is not a `Topology`.
    ValueError
        If the name is taken by another class.
    """
    if not isinstance(topology, Topology):
        raise TypeError(f"topology is {topology!r}; expected an instance of qcomp.topologies.Topology")
    known = _registered.get(topology.name)
    if topology.name == AUTO or (known is not None and type(known) is not type(topology)):
        raise ValueError(f"topology has the name {topology.name!r}, which is taken; expected a new one")
    _registered[topology.name] = topology
    return topology


def names() -> tuple[str, ...]:
    """Return the names of the topologies, in the order in which they were registered."""
    return tuple(_registered)


def topology(name: str) -> Topology:
    """Return the topology of a name.

    Raises
    ------
    ValueError
        If no topology has the name.

    Examples
    --------
    >>> topology("two_phase").roundings
    2
    """
    found = _registered.get(name)
    return _load(name) if found is None else found


@cache
def _load(name: str) -> Topology:
    """Return a topology of an installed package."""
    point = _offered().get(name)
    if point is None:
        known = dict.fromkeys((*names(), *_offered()))
        raise ValueError(f"topology is {name!r}; expected one of {', '.join((*known, AUTO))}")
    loaded = point.load()
    found = loaded() if isinstance(loaded, type) else loaded
    if not isinstance(found, Topology) or found.name != name:
        raise ValueError(
            f"the entry point {name!r} leads to {loaded!r}; expected a qcomp.topologies.Topology of that name"
        )
    return found


@cache
def _offered() -> "dict[str, EntryPoint]":
    """Return the topologies of installed packages, by name."""
    return offered("topology", {name: type(known) for name, known in _registered.items()})


def require_divisor(divisor: str, topology: str) -> None:
    """Raise ValueError unless a divisor is known, and fits the topology."""
    if divisor not in ("ranks", "senders"):
        raise ValueError(f"divisor is {divisor!r}; expected 'ranks' or 'senders'")
    if divisor == "senders" and topology != "all_gather":
        raise ValueError(
            f"divisor is 'senders' with topology={topology!r}; expected topology='all_gather', in which every rank "
            "sees what each rank has sent"
        )


def require_name(name: str) -> None:
    """Raise ValueError unless ``name`` is the name of a topology, or ``"auto"``."""
    if name != AUTO:
        topology(name)
