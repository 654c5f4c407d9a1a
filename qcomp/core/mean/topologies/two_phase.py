"""`TwoPhase`: each rank averages a chunk of the vector, and sends the compressed average to all."""

from collections.abc import Sequence
from typing import NamedTuple

from qcomp.core.errors import NonFiniteError
from qcomp.core.kernels import Blend
from qcomp.core.mean.chunks import Chunks
from qcomp.core.mean.codec import Codec, Compressed, Verdicts
from qcomp.core.mean.costs import Cluster, Cost, Load, announcements, to_all
from qcomp.core.mean.layout import Layout, Operands, Residuals
from qcomp.core.mean.stages import AllGather, AllToAll, Stages
from qcomp.core.mean.topologies.base import Averaged, Call, Topology, decode_means
from qcomp.core.numeric.arrays import Array
from qcomp.core.numeric.random import Key

_WORKER, SERVER = 0, 1
"""The hops in the keys of random draws."""


class Arrived(NamedTuple):
    """What a server holds after the first phase."""

    sent: Compressed
    """The messages that this rank has sent to all servers."""
    messages: Sequence[Array]
    """The message of each rank for this server's chunk."""
    verdicts: Verdicts
    """Collects the verdicts of the ranks."""


def to_servers(
    codec: Codec,
    layout: Layout,
    values: Sequence[Array],
    residuals: Sequence[Array],
    key: Key,
    *,
    donate: bool = False,
    blends: Sequence[Blend] = (),
    into: Sequence[Array | None] = (),
) -> Stages[Arrived]:
    """Make the first phase: send each server the payload of its chunk; see `Codec.encode` for the parameters."""
    verdicts = Verdicts(at_once=layout.operands.variable_length)
    sent = codec.encode(layout.frames, values, residuals, key, donate=donate, blends=blends, into=into)
    arrived = yield AllToAll(sent.messages, layout.arriving_sizes)
    return Arrived(sent, arrived, verdicts)


class TwoPhase(Topology):
    """Each rank is the server of a chunk: it averages the chunk, and compresses the average again.

    In the first phase every rank sends each server the payload of its chunk; in the second every server sends the
    payload of its average to all. With b bytes in the payload of the whole vector, a rank of N sends
    2 (N - 1) / N * b bytes. Source: Tang et al. (DoubleSqueeze), ICML 2019.
    """

    name = "two_phase"
    allows_rounds = True
    blends = True

    def lay_out(self, operands: Operands, chunks: Chunks | None = None) -> Layout:
        """Cut the tensors into a chunk for every rank."""
        found = operands.chunks(operands.world) if chunks is None else chunks
        return Layout(operands, found, Residuals(operands.whole, found[operands.rank]))

    def stages(self, call: Call) -> Stages[Averaged]:
        """Send each chunk to its server, and each server's average to all."""
        layout, codec = call.layout, self.codec(call.values)
        worker, arrived, verdicts = yield from to_servers(
            codec,
            layout,
            call.values,
            call.worker,
            call.key.at(hop=_WORKER),
            donate=call.donate,
            blends=call.blends,
            into=call.into.worker,
        )
        server = self.serve(codec, call, arrived, verdicts, worker.error)
        answers = self.answers(layout)
        arrived = yield AllGather(server.messages[0], answers.message_sizes)
        opened = codec.open(arrived, answers.frames, verdicts, server.error)
        unread = verdicts.require_accepted(worker.error or server.error)
        return Averaged(decode_means(codec, opened, call), worker.residuals, server.residuals, unread)

    def answers(self, layout: Layout) -> Layout:
        """Return the layout of the messages that servers send; the messages that they receive have the same layout."""
        return layout

    def serve(
        self,
        codec: Codec,
        call: Call,
        arrived: Sequence[Array],
        verdicts: Verdicts,
        error: NonFiniteError | None,
    ) -> Compressed:
        """Average the messages for this rank's chunk, and compress the average for all.

        ``error`` is what kept this rank from compressing its own values.
        """
        frames = (call.layout.own,) * call.layout.world
        opened = codec.open(arrived, frames, verdicts, error)
        return codec.encode_average(opened, call.server, call.key.at(hop=SERVER), into=call.into.server)

    def cost(self, load: Load, cluster: Cluster) -> Cost:
        """Return by a formula what a mean costs each rank."""
        n, share = cluster.ranks, load.payload / cluster.ranks
        codec = load.packed * (load.encode * (1 + 1 / n) + load.add + load.decode) + 2 * load.call
        wire = 2 * to_all(share, cluster) + announcements(load, 2, cluster)
        return Cost(codec, wire, 2 * (n - 1) * share)
