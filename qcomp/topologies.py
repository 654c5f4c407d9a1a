"""Topologies, one a file: who sends what to whom. And what a topology of your own is made of.

Subclass `Topology` and pass an instance to `register`: the name then works wherever a ``topology`` is asked for.
"""

from qcomp.core.mean.chunks import Chunk, Segment
from qcomp.core.mean.codec import Codec, Compressed, Verdicts
from qcomp.core.mean.costs import Cluster, Cost, Link, Load
from qcomp.core.mean.framing import Frame
from qcomp.core.mean.layout import Layout, Operands, Residuals
from qcomp.core.mean.nodes import Nodes
from qcomp.core.mean.stages import AllGather, AllToAll, Stages
from qcomp.core.mean.topologies.base import Averaged, Call, Topology, decode_means
from qcomp.core.mean.topologies.registry import names, register, topology

__all__ = [
    "AllGather",
    "AllToAll",
    "Averaged",
    "Call",
    "Chunk",
    "Cluster",
    "Codec",
    "Compressed",
    "Cost",
    "Frame",
    "Layout",
    "Link",
    "Load",
    "Nodes",
    "Operands",
    "Residuals",
    "Segment",
    "Stages",
    "Topology",
    "Verdicts",
    "decode_means",
    "names",
    "register",
    "topology",
]
