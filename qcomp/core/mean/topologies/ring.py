"""`Ring`: each rank adds its part to the sum from its neighbour, and compresses the new sum for the next rank."""

from collections.abc import Mapping, Sequence

from qcomp.core import primitives
from qcomp.core.errors import NonFiniteError
from qcomp.core.mean.chunks import Chunk, Chunks, Segment
from qcomp.core.mean.codec import Codec, Compressed, unsealed
from qcomp.core.mean.costs import Cluster, Cost, Load, announcements, around
from qcomp.core.mean.framing import seal, sealed_size
from qcomp.core.mean.layout import Layout, Operands, Residuals
from qcomp.core.mean.stages import AllToAll, Stages
from qcomp.core.mean.topologies.base import Averaged, Call, Topology, decode_means
from qcomp.core.numeric.arrays import Array, flush, from_host_bytes
from qcomp.core.reporting import name_ranks

_SERVER, _FIRST_HOP = 1, 2
"""The hops of the draws: one for the mean, and one for the sums of the first exchange."""


def residuals_of(chunks: Sequence[Chunk], rank: int, tensors: int) -> Residuals:
    """Return the ranges whose residuals a rank stores: as worker, all chunks but its own; as server, its own chunk.

    The worker has at least one range of each tensor, which may be empty; ``tensors`` is the number of tensors.

    Examples
    --------
    >>> from qcomp.core.mean.chunks import cut
    >>> worker, server = residuals_of(cut([20, 8], 8, 2), 1, tensors=2)
    >>> worker
    (Segment(tensor=0, start=0, stop=16, bucket=0), Segment(tensor=1, start=0, stop=0, bucket=0))
    >>> server
    (Segment(tensor=0, start=16, stop=20, bucket=2), Segment(tensor=1, start=0, stop=8, bucket=3))
    """
    passed = [segment for owner, chunk in enumerate(chunks) if owner != rank for segment in chunk]
    absent = set(range(tensors)) - {segment.tensor for segment in passed}
    worker = sorted([*passed, *(Segment(tensor, 0, 0, 0) for tensor in absent)])
    return Residuals(tuple(worker), chunks[rank])


class Ring(Topology):
    """The sum of each chunk grows from rank to rank around a ring, and then its mean goes around unchanged.

    The vector is cut into chunks, and each rank owns one of them. The sum of a chunk starts at the right neighbour of
    its owner. In N - 1 exchanges each rank decodes the sum that arrives from its left neighbour, adds its own part, and
    compresses the result for its right neighbour. Finally the owner adds its part, divides by N and compresses the
    mean, which travels around the ring unchanged in N - 1 more exchanges, so that all ranks decode the same bytes. A
    rank sends to its right neighbour only. A rank compresses each chunk once: the sum, or the mean if the rank owns the
    chunk.

    A rank that finds values out of range sends a refusal instead of a sum. The other ranks pass the refusal on with the
    ranks to blame. At the end all ranks have all N verdicts, and raise errors with the same text.

    The sums of exchange s draw with hop 2 + s of a rank's key, the mean with hop 1.

    Notes
    -----
    With feedback, rank i compresses q = s + p_i + e_i: the sum s that arrived, its part p_i, and its residual for the
    chunk. It sends C(q) and keeps e_i' = q - C(q). At the owner c the sum is then
    sum_i p_i + sum_(i != c) (e_i - e_i'). The owner adds its own residual e_s to the mean, and sends
    C(mean + e_s) = (1/N) sum_i p_i + (1/N) sum_(i != c) (e_i - e_i') + e_s - e_s'. Over T steps from residuals of zero,
    the means add up to the sum of the exact means minus ((1/N) sum_(i != c) e_i + e_s). This is (mean_i e_i + e_s) if
    an owner's e_i counts as zero for its chunk. A rank stores worker residuals for N - 1 chunks and the server residual
    for one, n elements in all; two phases store n + n / N.

    If b is the bytes of the payload of the whole vector, a rank sends 2 (N - 1) / N * b bytes, as in two phases, but
    all to one neighbour. Each message also has 8 bytes of verdict and one byte for each rank, padded. Values are added
    in the order of the ring. The part of the k-th rank on the way, where the owner is the N-th, is rounded in N - k
    sums and once in the mean. With an unbiased compressor the mean is unbiased. Its variance is the sum of the
    variances of all roundings; the variances from rounding sums are divided by N^2. The owner's part is rounded only
    once. With two ranks, this is the only difference from two phases, where a server also rounds its own part. The sum
    of values just below 2^100 may be out of range even if their mean is not. A rank checks the sum or the mean that it
    compresses, not its own part: a finite value of 2^100 or more passes if that sum or mean is below 2^100.
    """

    name = "ring"
    roundings = None

    def lay_out(self, operands: Operands, chunks: Chunks | None = None) -> Layout:
        """Cut the tensors into a chunk for every rank."""
        assert chunks is None
        found = operands.chunks(operands.world)
        return Layout(operands, found, residuals_of(found, operands.rank, len(operands.sizes)))

    def stages(self, call: Call) -> Stages[Averaged]:
        """Run the 2 (N - 1) exchanges."""
        return _Share(call).stages()

    def cost(self, load: Load, cluster: Cluster) -> Cost:
        """Return by a formula what a mean costs each rank."""
        n = cluster.ranks
        sent = 2 * (n - 1) / n * load.payload
        # A rank adds the arriving sum to a copy of its own part.
        codec = load.packed * (load.encode + (n - 1) / n * (load.copy + load.add) + load.decode)
        codec += 2 * (n - 1) * load.call
        return Cost(codec, around(sent, cluster) + announcements(load, 2 * (n - 1), cluster), sent)

    def suits(self, nodes: int, ranks_per_node: int) -> bool:
        """Return whether there are several ranks."""
        return nodes * ranks_per_node > 1


class _Share:
    """The work of one rank in a mean around a ring."""

    def __init__(self, call: Call) -> None:
        self.call = call
        self.layout = call.layout
        self.rank, self.size = call.layout.rank, call.layout.world
        self.codec = Codec(call.values)

    def stages(self) -> Stages[Averaged]:
        """Run the 2 (N - 1) exchanges."""
        layout, ranges = self.layout, self.layout.residuals
        residuals = (*self.call.worker, *self.call.server)
        owed = dict(zip((*ranges.worker, *ranges.server), residuals, strict=bool(residuals)))
        left: dict[Segment, Array] = {}
        errors: list[NonFiniteError] = []
        arrived = None
        for hop in range(self.size):
            owner = (self.rank - 1 - hop) % self.size
            compressed, blamed = self._passed_on(owner, hop, arrived, owed)
            left.update(zip(layout.chunks[owner], compressed.residuals, strict=False))
            errors += [compressed.error] if compressed.error else []
            sealed = seal(compressed.messages[0], blamed, self.size)
            if owner != self.rank:
                arrived = (yield self._to_the_right(sealed, owner))[self._left]
        finished = {self.rank: sealed}
        for hop in range(self.size - 1):
            owner = (self.rank - hop) % self.size
            came = (yield self._to_the_right(finished[owner], owner))[self._left]
            finished[(owner - 1) % self.size] = came
        messages, accused = [], set()
        for owner, frame in enumerate(layout.frames):
            message, blamed = unsealed(self.codec, finished[owner], frame, owner, self.size)
            messages.append(message)
            accused |= blamed
        if accused:
            raise NonFiniteError(
                f"a value on {name_ranks(accused)} is not finite, or too large to compress"
            ) from (errors[0] if errors else None)
        opened = [
            self.codec.open_from(owner, message, frame)
            for owner, (message, frame) in enumerate(zip(messages, layout.frames, strict=True))
        ]
        after = {**owed, **left}  # empty residuals stay as they were
        worker, server = (tuple(after[s] for s in of_kind) if owed else () for of_kind in ranges)
        return Averaged(decode_means(self.codec, opened, self.call), worker, server)

    @property
    def _left(self) -> int:
        return (self.rank - 1) % self.size

    def _passed_on(
        self, owner: int, hop: int, sealed: Array | None, owed: Mapping[Segment, Array]
    ) -> tuple[Compressed, set[int]]:
        """Return this rank's message for a chunk, and the ranks to blame if any refused before.

        The message holds the sum that arrived plus this rank's part, or the mean if this rank owns the chunk.
        """
        frame, is_mean = self.layout.frames[owner], owner == self.rank
        chunk = frame.chunk
        values = [self.call.values[s.tensor][s.start : s.stop] for s in chunk]
        if hop or is_mean:  # added into copies, which are flushed first
            values = [
                flush(x, exact=compressor.traits.lossless)
                for x, compressor in zip(values, frame.compressors, strict=True)
            ]
        blamed: set[int] = set()
        if sealed is not None:
            message, blamed = unsealed(self.codec, sealed, frame, self._left, self.size)
            if not blamed:
                arrived = self.codec.open_from(self._left, message, frame)
                values = [
                    compressor.add(payload, x)
                    for compressor, payload, x in zip(
                        frame.compressors, arrived.payloads, values, strict=True
                    )
                ]
        if is_mean:
            values = [primitives.finish_mean(x, self.size) for x in values]
        # The sums are whole tensors now, but keep the bucket numbers of their segments.
        compressed = Codec(values, self.codec.like).encode(
            [frame.as_tensors],
            values,
            [owed[s] for s in chunk] if owed else (),
            self.call.key.at(hop=_SERVER if is_mean else _FIRST_HOP + hop),
            donate=hop > 0 or is_mean,
        )
        if blamed:  # only refusals are passed on; this rank's own values may be out of range as well
            if self.codec.refuses(compressed.messages[0], frame, self.rank):
                blamed |= {self.rank}
            compressed = self.codec.refusals([frame], compressed.error)
        return compressed, blamed

    def _to_the_right(self, sealed: Array, owner: int) -> AllToAll:
        """Return an exchange: an owner's message goes to the right, and the previous owner's comes from the left."""
        nothing = from_host_bytes(b"", sealed)
        size = sealed_size(self.layout.message_sizes[(owner - 1) % self.size], self.size)
        right, ranks = (self.rank + 1) % self.size, range(self.size)
        return AllToAll(
            tuple(sealed if rank == right else nothing for rank in ranks),
            tuple(size if rank == self._left else 0 for rank in ranks),
        )
