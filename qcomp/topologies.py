"""Topologies: who sends what to whom.

To write one, subclass `Topology` with what `qcomp.extend` has, and pass an instance to `register`: the name then works
wherever a ``topology`` is asked for. `qcomp.testing.check_topology` says which promises it breaks.
"""

from qcomp.core.mean.topologies.base import Topology
from qcomp.core.mean.topologies.registry import names, register, topology

__all__ = ["Topology", "names", "register", "topology"]
