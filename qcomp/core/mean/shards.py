"""`Shards`: averages tensors so that each rank keeps its shard of the mean, and gathers all shards on all ranks."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from qcomp.core import feedback
from qcomp.core.compressor import Compressor
from qcomp.core.mean.codec import Codec, Verdicts
from qcomp.core.mean.layout import Layout, Operands, Residuals
from qcomp.core.mean.nodes import Nodes
from qcomp.core.mean.stages import AllGather, Stages, announce_lengths
from qcomp.core.mean.topologies.two_phase import to_servers
from qcomp.core.numeric.arrays import Array, concat, cut_like, dtype_name, is_mutable, to_compute_dtype
from qcomp.core.numeric.random import Key


@dataclass(frozen=True)
class Shards:
    """Tensors and their compressors. Each tensor is cut into one shard per rank, and all its shards have the same size.

    All shards form one vector: first rank 0's shard of every tensor, then rank 1's, and so on.

    ``sizes`` has the elements of a shard of each tensor, the same on all ranks; shorter shards are padded.
    """

    compressors: tuple[Compressor, ...]
    sizes: tuple[int, ...]
    rank: int
    world: int

    @property
    def size(self) -> int:
        """Elements of all shards of one rank."""
        return sum(self.sizes)

    def require_contraction(self) -> None:
        """Raise ValueError if error feedback would diverge."""
        for compressor in self.compressors:
            feedback.require_contraction(compressor)

    def scatter_mean(
        self, values: Array, residual: Array | None, key: Key
    ) -> Stages[tuple[Array, Array | None]]:
        """Average over the ranks, and keep this rank's shards.

        The values and the residual have shape (world * size,). The residual is zero at first, then what the last call
        returned, or always None without feedback; it is not written to. The rank of the key is filled in. Raises
        NonFiniteError on every rank, if a value on any rank is not finite.

        With b bytes in the payload of all shards, each of N ranks sends (N - 1) / N * b bytes. Sum identity: the means
        of T steps add up to the sum of the exact means minus mean_i e_i, the residuals after the last step.
        """
        result: tuple[Array, Array | None] = yield from self._announced(
            self._scatter_mean(to_compute_dtype(values), residual, key._replace(rank=self.rank))
        )
        return result

    def gather(self, own: Array, key: Key, *, into: Array | None = None) -> Stages[Array]:
        """Return the shards of all ranks as every rank decodes them, including this rank's own.

        The result has shape (world * size,), in the buffer ``into`` if given, of which ``own`` may be a part. Raises
        NonFiniteError on every rank, if a value on any rank is not finite.
        """
        result: Array = yield from self._announced(
            self._gather(to_compute_dtype(own), key._replace(rank=self.rank), into)
        )
        return result

    def gather_changes(self, own: Array, reference: Array, key: Key) -> Stages[Array]:
        """Return the shards of all ranks as a reference plus decoded changes from it; this loses less than `gather`.

        The reference is the result of the last call, the same on all ranks. Raises NonFiniteError on every rank, if a
        value on any rank is not finite.

        What one call loses is part of the next change, so the error stays bounded for contractions. Source: Richtarik
        et al. (EF21), NeurIPS 2021.
        """
        start = self.rank * self.size
        changes = to_compute_dtype(own) - reference[start : start + self.size]
        found: Array = reference + (yield from self.gather(changes, key))
        return found

    def _scatter_mean(
        self, values: Array, residual: Array | None, key: Key
    ) -> Stages[tuple[Array, Array | None]]:
        layout = self._layout(dtype_name(values.dtype))
        pieces = self._pieces(values)
        codec = Codec(pieces)
        owed = () if residual is None else self._pieces(residual)
        sent, messages, verdicts = yield from to_servers(codec, layout, pieces, owed, key)
        opened = codec.open(messages, (layout.own,) * layout.world, verdicts, sent.error)
        verdicts.require_accepted(sent.error)
        return concat(codec.average(opened)), concat(list(sent.residuals)) if owed else None

    def _gather(self, own: Array, key: Key, into: Array | None) -> Stages[Array]:
        layout = self._layout(dtype_name(own.dtype))
        mine = cut_like(own, self.sizes)
        codec = Codec(mine * self.world)
        frame, verdicts = layout.frames[self.rank], Verdicts(at_once=layout.operands.variable_length)
        sent = codec.encode([frame], mine * self.world, (), key, donate=False)
        arrived = yield AllGather(sent.messages[0], layout.message_sizes)
        opened = codec.open(arrived, layout.frames, verdicts, sent.error)
        verdicts.require_accepted(sent.error)
        if into is not None and is_mutable(into):
            codec.decode_into(self._pieces(into), opened)
            return into
        return concat([value for one in opened for value in codec.decode(one)])

    def _announced(self, stages: Stages[Any]) -> Stages[Any]:
        variable = any(c.variable_length for c in self.compressors)
        return announce_lengths(stages, self.rank) if variable else stages

    def _pieces(self, vector: Array) -> list[Array]:
        """Return views of each rank's shard of each tensor."""
        return cut_like(vector, self.sizes * self.world)

    def _layout(self, dtype: str) -> Layout:
        known = self._layouts
        if dtype not in known:
            known[dtype] = self._resolved(dtype)
        return known[dtype]

    @cached_property
    def _layouts(self) -> dict[str, Layout]:
        return {}

    def _resolved(self, dtype: str) -> Layout:
        """Return the layout whose chunks are the ranks' shards; no two chunks share the draws of a bucket."""
        count = len(self.sizes)
        operands = Operands(
            self.compressors * self.world,
            self.sizes * self.world,
            (dtype,) * (count * self.world),
            self.rank,
            Nodes.of(self.world, ()),
        )
        (whole,) = operands.chunks(1)
        chunks = tuple(
            tuple(segment for segment in whole if segment.tensor // count == rank)
            for rank in range(self.world)
        )
        return Layout(operands, chunks, Residuals(operands.whole, ()))
