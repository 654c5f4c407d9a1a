"""How the tensors of a hierarchical mean are cut into lanes, and these into chunks: pure integers."""

from dataclasses import dataclass
from functools import cached_property

from qcomp.core.mean.chunks import Chunks, Cutter, Segment, cut
from qcomp.core.mean.nodes import Nodes

__all__ = ["Lanes"]

Chunk = tuple[Segment, ...]


@dataclass(frozen=True)
class Lanes:
    """How tensors are cut: into a lane for every rank of the smallest node, and a lane into a chunk for every node.

    Rank number l of a node works on lane l; of the others in its lane, one of each node, it serves the chunk that has
    the number of its node. With nodes of one rank there is one lane, and its chunks are those of two phases.

    Parameters
    ----------
    nodes : Nodes
    sizes, bucket_sizes : tuple of int
        Of each tensor.
    cut : callable
        Cuts tensors into chunks.

    Examples
    --------
    >>> lanes = Lanes(Nodes((0, 0, 1, 1)), (40, 8), (8, 8))
    >>> lanes.parts(0), lanes.parts(1)  # three buckets of 8 for the first rank of a node, three for the second
    ([(0, 24), (0, 0)], [(24, 40), (0, 8)])
    """

    nodes: Nodes
    sizes: tuple[int, ...]
    bucket_sizes: tuple[int, ...]
    cut: Cutter = cut

    @cached_property
    def cuts(self) -> Chunks:
        """The lanes, as segments of the tensors."""
        return self.cut(self.sizes, self.bucket_sizes, self.nodes.lanes)

    def parts(self, lane: int | None) -> list[tuple[int, int]]:
        """Return where the part of each tensor that is in a lane starts and stops; nothing is in no lane."""
        parts = [(0, 0)] * len(self.sizes)
        for segment in () if lane is None else self.cuts[lane]:
            parts[segment.tensor] = (segment.start, segment.stop)
        return parts

    def chunks(self, lane: int) -> list[Chunk]:
        """Return the chunks of a lane, as segments of the tensors."""
        parts = self.parts(lane)
        numbers = {segment.tensor: segment.bucket for segment in self.cuts[lane]}

        def whole(part: Segment) -> Segment:
            start = parts[part.tensor][0]
            bucket = numbers[part.tensor] + part.start // self.bucket_sizes[part.tensor]
            return Segment(part.tensor, start + part.start, start + part.stop, bucket)

        sizes = [stop - start for start, stop in parts]
        return [
            tuple(whole(part) for part in chunk)
            for chunk in self.cut(sizes, self.bucket_sizes, self.nodes.count)
        ]

    def kept(self, rank: int) -> tuple[Chunk, Chunk]:
        """Return what a rank's residuals are of: its part of each tensor as worker, and its chunk as server."""
        lane = self.nodes.lane(rank)
        worker = tuple(Segment(i, start, stop, 0) for i, (start, stop) in enumerate(self.parts(lane)))
        return worker, () if lane is None else self.chunks(lane)[self.nodes.of_rank[rank]]

    def own_chunks(self, lane: int) -> list[Chunk]:
        """Return the chunks of a lane, as segments of its parts of the tensors."""
        starts = [start for start, _ in self.parts(lane)]
        return [
            tuple(s._replace(start=s.start - starts[s.tensor], stop=s.stop - starts[s.tensor]) for s in chunk)
            for chunk in self.chunks(lane)
        ]
