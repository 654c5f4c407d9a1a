"""Topologies: who sends what to whom.

To write a topology, subclass `Topology` with the names in `qcomp.extend`, and pass an instance to `register`. Its name
then works wherever a ``topology`` is accepted. `qcomp.testing.check_topology` reports the laws that it breaks.
"""

from qcomp.core.mean.topologies.base import Topology
from qcomp.core.mean.topologies.registry import names, register, topology

__all__ = ["Topology", "names", "register", "topology"]
