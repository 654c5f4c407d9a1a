"""The mean around a ring as pure stages: sums that grow from rank to rank, each of them compressed for the next."""

from collections.abc import Mapping, Sequence

from qcomp.core import primitives
from qcomp.core.compressor import Compressor
from qcomp.core.errors import NonFiniteError
from qcomp.core.mean.chunks import Chunks, Segment
from qcomp.core.mean.codec import Encoded, SegmentCodec
from qcomp.core.mean.stages import AllToAll, Stages
from qcomp.core.mean.topologies.hierarchical import Received
from qcomp.core.mean.verdicts import seal, sealed_size, unseal
from qcomp.core.numeric.arrays import Array, flush, from_host_bytes
from qcomp.core.numeric.random import Key
from qcomp.core.reporting import name_ranks

__all__ = ["Ring", "kept"]

Chunk = tuple[Segment, ...]

_SERVER, _FIRST_HOP = 1, 2


def kept(chunks: Sequence[Chunk], rank: int, tensors: int) -> tuple[Chunk, Chunk]:
    """Return what a rank's residuals are of: all chunks but its own as worker, and its own as server.

    Each of so many tensors has at least one part as worker, which may have no elements.

    Examples
    --------
    >>> from qcomp.core.mean.chunks import cut
    >>> worker, server = kept(cut([20, 8], 8, 2), 1, tensors=2)
    >>> worker
    (Segment(tensor=0, start=0, stop=16, bucket=0), Segment(tensor=1, start=0, stop=0, bucket=0))
    >>> server
    (Segment(tensor=0, start=16, stop=20, bucket=2), Segment(tensor=1, start=0, stop=8, bucket=3))
    """
    passed = [segment for owner, chunk in enumerate(chunks) if owner != rank for segment in chunk]
    absent = set(range(tensors)) - {segment.tensor for segment in passed}
    return tuple(sorted([*passed, *(Segment(tensor, 0, 0, 0) for tensor in absent)])), chunks[rank]


class Ring:
    """One rank's share in a mean around a ring of N ranks.

    The vector is cut into a chunk for every rank. The sum of a chunk starts at the right neighbour of its owner, and in
    N - 1 exchanges each rank decodes the sum that arrives from its left neighbour, adds its own part, and compresses
    it again for its right neighbour. The owner, at the end, adds its part, divides by N and compresses the mean,
    which goes around as bytes in N - 1 more exchanges: so all ranks decode the same ones. In each exchange a rank
    sends to its right neighbour only, and of every chunk it compresses one thing: a sum, or of its own one the mean.

    A rank that finds values out of range sends a refusal in place of that sum, and who hears of it passes that
    on, with the ranks that are to blame. All ranks have all N verdicts in the end, and raise then, with the same words.

    Parameters
    ----------
    compressors : sequence of Compressor
        Of each tensor.
    flat : sequence of arrays
        This rank's values, flat, in the dtype in which they are computed. They are not written to.
    chunks : sequence of sequences of Segment
        The chunk of each rank.
    key : Key
        Of this rank. The sums of exchange s draw from hop 2 + s of it, the mean from hop 1.

    Notes
    -----
    With feedback, what is compressed is q = s + p_i + e_i: the sum s that arrived, the part of rank i, and what rank i
    lost of the sum of that chunk one step before. It sends C(q) and keeps e_i' = q - C(q). So the sum at the owner c is
    sum_i p_i + sum_(i != c) (e_i - e_i'), the residuals being of sums; of the mean it is that over N, and with the
    owner's own residual, which is of the mean, C(mean + e_s) = (1/N) sum_i p_i + (1/N) sum_(i != c) (e_i - e_i') +
    e_s - e_s'. Over T steps from residuals of zero the means add up to the sum of the exact means minus
    (1/N) sum_(i != c) e_i + e_s. That is mean_i e_i + e_s, where an owner has no e_i of its chunk. A rank has residuals
    of N - 1 chunks as worker and of one as server: in all one vector, where two phases keep n + n / N elements.

    With b bytes in the payload of the whole vector a rank sends 2 (N - 1) / N * b, as in two phases, to one neighbour,
    and with each message 8 bytes for the verdict and one for each rank, padded. Values are added in the order of the
    ring. What the k-th rank adds is rounded with N - k sums, and then with the mean. With a compressor that is unbiased
    the mean is too, and its variance is the sum of those of all roundings, of sums over N^2. What the owner adds is
    rounded once only: for two ranks that is the difference from two phases, in which a server rounds its own part as
    well. The sum of values just below 2^100 may be out of range where their mean is not.
    """

    def __init__(
        self, compressors: Sequence[Compressor], flat: Sequence[Array], chunks: Chunks, key: Key
    ) -> None:
        self.flat = flat
        self.chunks = chunks
        self.size = len(chunks)
        self.rank: int = key.rank
        self.key = key
        self.codec = SegmentCodec(compressors, flat)

    def stages(self, worker: Sequence[Array], server: Sequence[Array]) -> Stages[Received]:
        """Run the 2 (N - 1) exchanges, with this rank's residuals, which are not written to."""
        parts = kept(self.chunks, self.rank, len(self.flat))
        owed = dict(zip((*parts[0], *parts[1]), (*worker, *server), strict=bool(worker)))
        left: dict[Segment, Array] = {}
        errors: list[NonFiniteError] = []
        sealed = arrived = None
        for hop in range(self.size):
            owner = (self.rank - 1 - hop) % self.size
            encoded, blamed = self._passed_on(owner, hop, arrived, owed)
            left.update(zip(self.chunks[owner], encoded.residuals, strict=False))
            errors += [encoded.error] if encoded.error else []
            sealed = seal(encoded.messages[0], blamed, self.size)
            if owner != self.rank:
                arrived = (yield self._to_the_right(sealed, owner))[self._left]
        finished = {self.rank: sealed}
        for hop in range(self.size - 1):
            owner = (self.rank - hop) % self.size
            came = (yield self._to_the_right(finished[owner], owner))[self._left]
            finished[(owner - 1) % self.size] = came
        messages, accused = [], set()
        for owner, chunk in enumerate(self.chunks):
            message, blamed = self._opened(finished[owner], chunk, owner)
            messages.append(message)
            accused |= blamed
        if accused:
            raise NonFiniteError(
                f"a value on {name_ranks(accused)} is not finite, or too large to compress"
            ) from (errors[0] if errors else None)
        payloads = self.codec.open(messages, self.chunks, None)
        after = {**owed, **left}  # what has no elements stays as it was
        new_worker, new_server = (tuple(after[s] for s in of_kind) if owed else () for of_kind in parts)
        return Received(payloads, list(self.chunks), new_worker, new_server)

    @property
    def _left(self) -> int:
        return (self.rank - 1) % self.size

    def _passed_on(
        self, owner: int, hop: int, sealed: Array | None, owed: Mapping[Segment, Array]
    ) -> tuple[Encoded, set[int]]:
        """Return what this rank sends on of a chunk, and who is to blame if others refused before.

        That is the sum that arrived plus this rank's part, or of its own chunk the mean.
        """
        chunk, is_mean = self.chunks[owner], owner == self.rank
        values = [self.flat[s.tensor][s.start : s.stop] for s in chunk]
        if hop or is_mean:  # our own then, and below 2^-126 zero before it is added to anything
            values = [flush(x) for x in values]
        blamed: set[int] = set()
        if sealed is not None:
            message, blamed = self._opened(sealed, chunk, self._left)
            if not blamed:
                (payloads,) = self.codec.open([message], [chunk], None)
                values = [
                    self.codec.compressors[s.tensor].add(payload, x)
                    for s, payload, x in zip(chunk, payloads, values, strict=True)
                ]
        if is_mean:
            values = [primitives.finish_mean(x, self.size) for x in values]
        # The sums are tensors of their own now, whole but numbered by the buckets of the segments.
        whole = tuple(Segment(index, 0, s.size, s.bucket) for index, s in enumerate(chunk))
        encoded = self.codec.of_averages(values, chunk).encode(
            [whole],
            values,
            [owed[s] for s in chunk] if owed else (),
            self.key.at(hop=_SERVER if is_mean else _FIRST_HOP + hop),
            donate=hop > 0 or is_mean,
        )
        if (
            blamed
        ):  # nothing but refusals goes on from here; this rank's own values may be out of range as well
            if self.codec.refuses(encoded.messages[0], chunk, self.rank):
                blamed |= {self.rank}
            encoded = Encoded((self.codec.refusal(chunk),), (), encoded.error)
        return encoded, blamed

    def _opened(self, sealed: Array, chunk: Chunk, sender: int) -> tuple[Array, set[int]]:
        """Return a message, and who is to blame if it is a refusal."""
        message, accused = unseal(sealed, self.size)
        return message, (accused or {sender}) if self.codec.refuses(message, chunk, sender) else set()

    def _to_the_right(self, sealed: Array, owner: int) -> AllToAll:
        """Return an exchange in which a message of the chunk of an owner goes right, and that of the next comes."""
        nothing = from_host_bytes(b"", sealed)
        size = sealed_size(self.codec.message_size(self.chunks[(owner - 1) % self.size]), self.size)
        right, ranks = (self.rank + 1) % self.size, range(self.size)
        return AllToAll(
            tuple(sealed if rank == right else nothing for rank in ranks),
            tuple(size if rank == self._left else 0 for rank in ranks),
        )
