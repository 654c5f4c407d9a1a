"""Which topology a compressed mean takes when it is asked to choose."""

from collections.abc import Sequence
from typing import Literal, get_args

from qcomp.core.compressor import Compressor
from qcomp.core.mean.costs import Cluster, Link, Load, cost
from qcomp.core.mean.nodes import Nodes

__all__ = ["ETHERNET", "TOPOLOGIES", "Topology", "choose_topology"]

Topology = Literal["two_phase", "all_gather", "hierarchical", "ring", "auto"]
TOPOLOGIES: tuple[str, ...] = get_args(Topology)

ETHERNET = Link(bandwidth=1.25e9, latency=50e-6)
"""What is taken for the link between nodes unless another is named: 10 Gbit/s, and 50 microseconds a message."""

_NOTHING = Load(0, 0, variable_length=False, encode=1.0e-9, decode=0.2e-9, add=0.2e-9, copy=0.4e-9)
"""Seconds an element: about those of one CPU core with kernels, which docs/benchmarks/kernels.json has."""

_CLEARLY = 1.1
"""How many times as fast a ring must be: the formulas are not more exact than that, and it rounds more often."""


def choose_topology(
    compressors: Sequence[Compressor], sizes: Sequence[int], nodes: Nodes, link: Link = ETHERNET
) -> Topology:
    """Return the topology that takes the shortest time by the formulas of `qcomp.core.mean.costs`.

    Of those that take equally long it is the one that rounds least. A hierarchical mean is considered where there are
    several nodes and several ranks on a node, a ring chosen where it is 1.1 times as fast as all others. Inside a node
    there are the 10 GB/s of `qcomp.core.mean.costs.INSIDE`; nodes of unequal sizes count as of their
    mean size, rounded up.

    Parameters
    ----------
    compressors : sequence of Compressor
        Of each tensor.
    sizes : sequence of int
        Elements of each tensor.
    nodes : Nodes
        Which ranks share a machine.
    link : Link
        Between nodes.

    Returns
    -------
    str
        A function of nothing but the arguments: the same on all ranks.

    Examples
    --------
    >>> import qcomp
    >>> def chosen(elements, nodes, **link):
    ...     return choose_topology([qcomp.ScaledSign()], [elements], Nodes(nodes), **link)
    >>> chosen(25_000_000, (0, 1)), chosen(25_000_000, (0, 1, 2, 3)), chosen(10_000, (0, 1, 2, 3))
    ('all_gather', 'two_phase', 'all_gather')
    >>> chosen(25_000_000, tuple(rank // 8 for rank in range(32)))
    'hierarchical'
    """
    count = nodes.count
    several = -(-len(nodes.of_rank) // count)  # ranks on a node
    cluster = Cluster(count * several, link, several)
    load = _NOTHING._replace(
        size=sum(sizes),
        payload=sum(c.payload_spec(size).nbytes for c, size in zip(compressors, sizes, strict=True)),
        variable_length=any(c.variable_length for c in compressors),
    )
    topologies: list[Topology] = ["all_gather", "two_phase"]
    if count > 1 and several > 1:
        topologies.insert(1, "hierarchical")
    seconds = {topology: cost(topology, load, cluster).seconds for topology in (*topologies, "ring")}
    best = min(topologies, key=lambda topology: seconds[topology])
    return "ring" if _CLEARLY * seconds["ring"] <= seconds[best] and cluster.ranks > 1 else best
