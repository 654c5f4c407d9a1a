"""`Layout`: everything about a compressed mean that does not depend on values, computed once for many steps."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from qcomp.core.compressor import Compressor
from qcomp.core.mean.chunks import Chunk, Chunks, Cutter, Segment, cut
from qcomp.core.mean.framing import Frame
from qcomp.core.mean.nodes import Nodes


class Residuals(NamedTuple):
    """The tensor ranges whose residuals a rank stores."""

    worker: Chunk
    server: Chunk


@dataclass(frozen=True, eq=False)
class Operands:
    """The tensors of a mean, and the rank that averages them.

    Parameters
    ----------
    compressors : tuple of Compressor
        The compressor of each tensor.
    sizes : tuple of int
        Elements of each tensor.
    dtypes : tuple of str
        The name of the dtype in which each tensor is computed, ``"float32"`` or ``"float64"``.
    rank : int
        Number of this rank.
    nodes : Nodes
        Which ranks share a machine.
    cut : callable
        Cuts tensors into chunks; see `qcomp.core.mean.chunks.cut`.
    shapes : tuple of tuple of int
        The shape of each tensor; empty if nothing needs it.
    """

    compressors: tuple[Compressor, ...]
    sizes: tuple[int, ...]
    dtypes: tuple[str, ...]
    rank: int
    nodes: Nodes
    cut: Cutter = cut
    shapes: tuple[tuple[int, ...], ...] = ()

    @property
    def world(self) -> int:
        """Number of ranks."""
        return len(self.nodes.of_rank)

    @cached_property
    def bucket_sizes(self) -> tuple[int, ...]:
        """The bucket size of each tensor, in elements."""
        return tuple(c.traits.bucket_size for c in self.compressors)

    @cached_property
    def variable_length(self) -> bool:
        """Whether the length of any payload depends on the values."""
        return any(c.variable_length for c in self.compressors)

    @property
    def whole(self) -> Chunk:
        """All tensors, each as one segment; its bucket number must not be used for draws."""
        return tuple(Segment(i, 0, size, 0) for i, size in enumerate(self.sizes))

    def chunks(self, count: int) -> Chunks:
        """Return the tensors, cut into ``count`` chunks of whole buckets."""
        return self.cut(self.sizes, self.bucket_sizes, count)

    def frame(self, chunk: Chunk, compressor: Compressor | None = None) -> Frame:
        """Return the frame of a chunk's messages; without ``compressor``, each tensor has its own compressor."""
        chosen = [self.compressors[s.tensor] if compressor is None else compressor for s in chunk]
        dtypes = tuple(self.dtypes[s.tensor] for s in chunk)
        return Frame(chunk, tuple(chosen), dtypes, self.variable_length and compressor is None)


@dataclass(frozen=True, eq=False)
class Layout:
    """The layout of a mean of certain tensors on certain ranks, for one rank.

    A topology makes it once from the operands, and each step looks it up.

    Parameters
    ----------
    operands : Operands
    chunks : tuple of chunks
        The chunks that the topology's messages hold: one for each server, in the order of the ranks.
    residuals : Residuals
        The tensor ranges whose residuals this rank stores.
    """

    operands: Operands
    chunks: Chunks
    residuals: Residuals

    @property
    def rank(self) -> int:
        """Number of this rank."""
        return self.operands.rank

    @cached_property
    def world(self) -> int:
        """Number of ranks."""
        return self.operands.world

    @cached_property
    def lossless(self) -> bool:
        """Whether the mean is exact."""
        return all(c.traits.lossless for c in self.operands.compressors)

    @cached_property
    def frames(self) -> tuple[Frame, ...]:
        """The frame of each chunk's messages."""
        return tuple(map(self.operands.frame, self.chunks))

    @cached_property
    def own(self) -> Frame:
        """The frame of the chunk that this rank serves."""
        return self.frames[self.rank]

    @cached_property
    def arriving(self) -> tuple[Frame, ...]:
        """The frame of each rank's message to this rank in the first phase."""
        return (self.own,) * self.world

    @cached_property
    def arriving_sizes(self) -> tuple[int, ...]:
        """The bytes of each message in `arriving`."""
        return tuple(frame.nbytes for frame in self.arriving)

    @cached_property
    def message_sizes(self) -> tuple[int, ...]:
        """Bytes of each chunk's message; if the length varies, of the longest message."""
        return tuple(frame.nbytes for frame in self.frames)

    @cached_property
    def server_residuals(self) -> dict[int, int]:
        """Maps each tensor with a segment that this rank serves to the index of that segment's server residual."""
        return {segment.tensor: number for number, segment in enumerate(self.residuals.server)}

    @cached_property
    def residual_shapes(self) -> tuple[tuple[list[tuple[int]], list[int]], ...]:
        """For the worker and for the server: the shapes of its residuals, and the tensor of each residual."""
        return tuple(([(s.size,) for s in ranges], [s.tensor for s in ranges]) for ranges in self.residuals)

    def frame_of(self, chunks: Sequence[Chunk]) -> tuple[Frame, ...]:
        """Return the frame of each chunk."""
        return tuple(map(self.operands.frame, chunks))
