"""Topologies by name."""

from qcomp.core.mean.topologies.all_gather import AllGather
from qcomp.core.mean.topologies.base import Topology
from qcomp.core.mean.topologies.hierarchical import Hierarchical
from qcomp.core.mean.topologies.ring import Ring
from qcomp.core.mean.topologies.two_phase import TwoPhase

__all__ = ["AUTO", "names", "register", "require_name", "topology"]

AUTO = "auto"
"""The name that stands for the fastest topology, which `qcomp.CompressedMean.init` chooses."""

_registered: dict[str, Topology] = {t.name: t for t in (TwoPhase(), Ring(), AllGather(), Hierarchical())}


def register(topology: Topology) -> Topology:
    """Make a topology known by its name, in this process; every rank must do so.

    Parameters
    ----------
    topology : Topology

    Returns
    -------
    Topology
        The same.

    Raises
    ------
    TypeError
        If it is no `Topology`.
    ValueError
        If its name is taken by another class.
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
        If there is none.

    Examples
    --------
    >>> topology("two_phase").roundings
    2
    """
    found = _registered.get(name)
    if found is None:
        raise ValueError(f"topology is {name!r}; expected one of {', '.join(names())}")
    return found


def require_name(name: str) -> None:
    """Raise ValueError unless this is the name of a topology, or ``"auto"``."""
    if name != AUTO and name not in _registered:
        raise ValueError(f"topology is {name!r}; expected one of {', '.join((*names(), AUTO))}")
