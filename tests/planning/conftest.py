"""A simulated network with given transfer times, on a clock that does not wait."""

import struct

import numpy as np
import pytest


class SimulatedNetwork:
    """A communicator over another one, with a simulated clock.

    The messages of an exchange take ``latency``, ``per_message`` for each after the first, and their transfer. Between
    nodes a rank has ``bandwidth``, and all ranks of a node together ``streams`` times that; inside a node, the link is
    ``inside``. An exchange ends when this rank and all ranks that send to it are done.
    """

    compares_owners = True  # so that nothing is joined to messages

    def __init__(self, comm, *, latency, bandwidth, per_message, streams=1.0, inside=None):
        self.comm, self.rank, self.size, self.host = comm, comm.rank, comm.size, comm.host
        self.latency, self.bandwidth, self.per_message = latency, bandwidth, per_message
        self.streams, self.inside = streams, inside or (latency, bandwidth)
        self.now = float(comm.rank)  # the clocks of the ranks differ
        self.hosts = None

    def clock(self):
        return self.now

    def _tell(self, values):
        layout = f"<{len(values)}d"
        message = np.frombuffer(struct.pack(layout, *values), dtype=np.uint8)
        arrived = self.comm.all_gather(message, [message.size] * self.size)
        return [struct.unpack(layout, buffer.tobytes()) for buffer in arrived]

    def _elapse(self, sizes):
        """Advance the clock by the time of an exchange in which every rank sends these sizes."""
        if self.hosts is None:
            names = self.comm.all_gather(
                np.frombuffer(self.host.ljust(16).encode(), np.uint8), [16] * self.size
            )
            self.hosts = [name.tobytes() for name in names]
        table = self._tell([self.start, *sizes])
        starts = [row[0] for row in table]
        taken = [self._sending(sender, [row[1:] for row in table]) for sender in range(self.size)]
        mine = [s for s in range(self.size) if s == self.rank or table[s][1 + self.rank]]
        # Clocks differ by the rank: only the time since each one's own start counts.
        self.now += max(starts[s] - s - (starts[self.rank] - self.rank) + taken[s] for s in mine)

    def _sending(self, rank, sizes):
        def cost(peers, latency, bandwidth, crowd):
            sent = [sizes[rank][peer] for peer in peers if sizes[rank][peer]]
            if not sent:
                return 0.0
            return latency + (len(sent) - 1) * self.per_message + sum(sent) * crowd / bandwidth

        ranks = [peer for peer in range(self.size) if peer != rank]
        near = [peer for peer in ranks if self.hosts[peer] == self.hosts[rank]]
        far = [peer for peer in ranks if peer not in near]
        senders = sum(
            any(sizes[r][p] for p in ranks if self.hosts[p] != self.hosts[r])
            for r in range(self.size)
            if self.hosts[r] == self.hosts[rank]
        )
        return max(
            cost(far, self.latency, self.bandwidth, max(1.0, senders / self.streams)),
            cost(near, *self.inside, 1.0),
        )

    def all_to_all(self, send, receive):
        self.start = self.now
        self._elapse([buffer.shape[0] for buffer in send])
        return self.comm.all_to_all(send, receive)

    def all_gather(self, send, receive):
        self.start = self.now
        arrived = self.comm.all_gather(send, receive)
        # All ranks leave at the same moment.
        latest = max(start - rank for rank, (start,) in enumerate(self._tell([self.start])))
        self.now = latest + self.rank
        return arrived


@pytest.fixture
def simulated():
    """Return a function that makes a simulated network over a communicator."""
    return SimulatedNetwork
