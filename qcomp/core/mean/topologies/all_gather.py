"""`GatherAll`: each rank sends its payload to all ranks, and all compute the same average."""

from qcomp.core.mean.chunks import Chunks
from qcomp.core.mean.codec import Verdicts
from qcomp.core.mean.costs import Cluster, Cost, Load, announcements, to_all
from qcomp.core.mean.layout import Layout, Operands, Residuals
from qcomp.core.mean.stages import AllGather, Stages
from qcomp.core.mean.topologies.base import Averaged, Call, Topology, assemble

_WORKER = 0
"""The hop in the keys of random draws."""


class GatherAll(Topology):
    """Every rank sends its payload to every other in one exchange, so that values are compressed only once.

    With b bytes in the payload of the whole vector, each of N ranks sends (N - 1) * b bytes. There is no server.
    """

    name = "all_gather"
    allows_rounds = True
    blends = True
    roundings = 1

    def lay_out(self, operands: Operands, chunks: Chunks | None = None) -> Layout:
        """Lay out all tensors as one chunk."""
        return Layout(
            operands, operands.chunks(1) if chunks is None else chunks, Residuals(operands.whole, ())
        )

    def stages(self, call: Call) -> Stages[Averaged]:
        """Send each rank's payload to all ranks, and average all payloads on each rank."""
        layout, codec = call.layout, self.codec(call.values)
        (whole,) = layout.frames
        verdicts = Verdicts(at_once=layout.operands.variable_length)
        worker = codec.encode(
            layout.frames,
            call.values,
            call.worker,
            call.key.at(hop=_WORKER),
            donate=call.donate,
            blends=call.blends,
            into=call.into.worker,
        )
        arrived = yield AllGather(worker.messages[0], (whole.nbytes,) * layout.world)
        opened = codec.open(arrived, (whole,) * layout.world, verdicts, worker.error)
        unread = verdicts.require_accepted(worker.error)
        places = call.places
        if places is not None:
            codec.average(opened, places, divisor=call.divisor)
            return Averaged(places, worker.residuals, ())
        means = assemble(layout.chunks, [codec.average(opened, divisor=call.divisor)], call.values)
        return Averaged(means, worker.residuals, (), unread)

    def cost(self, load: Load, cluster: Cluster) -> Cost:
        """Return by a formula what a mean costs each rank."""
        n = cluster.ranks
        wire = to_all(load.payload, cluster) + announcements(load, 1, cluster)
        codec = load.packed * (load.encode + n * load.add) + load.call
        return Cost(codec, wire, (n - 1) * load.payload)
