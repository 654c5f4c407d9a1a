"""`choose_topology`: chooses the fastest topology by the cost model, for "auto"."""

from collections.abc import Sequence

from qcomp.core.compressor import Compressor
from qcomp.core.mean.costs import Cluster, Link, Load
from qcomp.core.mean.nodes import Nodes
from qcomp.core.mean.topologies.registry import names, topology

ETHERNET = Link(bandwidth=1.25e9, latency=50e-6)
"""The default link between nodes: 10 Gbit/s, and 50 microseconds per message."""

_NOTHING = Load(0, 0, variable_length=False, encode=1.0e-9, decode=0.2e-9, add=0.2e-9, copy=0.4e-9)
"""A load without elements; its times per element are about those of one CPU core, see docs/benchmarks/kernels.json."""

_CLEARLY = 1.1
"""A topology that rounds in every hop must be faster than others by this factor, since the formulas are not exact."""

_MANY = 3
"""The number of roundings assumed for a topology whose roundings grow with the number of ranks."""


def choose_topology(
    compressors: Sequence[Compressor], sizes: Sequence[int], nodes: Nodes, link: Link = ETHERNET
) -> str:
    """Return the name of the topology that takes the shortest time by the formulas of `Topology.cost`.

    If several take equally long, the topology that rounds least is chosen. A topology whose roundings grow with the
    number of ranks, such as a ring, must be 1.1 times as fast as all others. Links inside a node are assumed to have 10
    GB/s, and nodes of unequal sizes to have their mean size, rounded up.

    Parameters
    ----------
    compressors : sequence of Compressor
        The compressor of each tensor.
    sizes : sequence of int
        Elements of each tensor.
    nodes : Nodes
        Which ranks share a machine.
    link : Link
        The link between nodes.

    Returns
    -------
    str
        Depends only on the arguments and the registered topologies, so it is the same on all ranks.

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

    def merit(name: str) -> tuple[float, int]:
        candidate = topology(name)
        seconds = candidate.cost(load, cluster).seconds
        if candidate.roundings is None:
            return _CLEARLY * seconds, _MANY
        return seconds, candidate.roundings

    return min((name for name in names() if topology(name).suits(count, several)), key=merit)
