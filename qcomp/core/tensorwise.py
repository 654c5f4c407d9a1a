"""The compressed mean of each of several tensors by itself, so that any of them can be exchanged together."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from qcomp.core.chunks import Segment, cut
from qcomp.core.exchange import CompressedMean, MeanState
from qcomp.core.running import Running, Terms
from qcomp.core.transport import fuse

__all__ = ["TensorwiseMean"]


@dataclass(frozen=True)
class TensorwiseMean(CompressedMean):
    """A `CompressedMean` that cuts every tensor into chunks for the ranks by itself.

    The residuals of a tensor, and the mean of it, are then the same whatever it is exchanged together with. That is
    what it takes to exchange tensors in groups which are not the same in every step, as a backward pass
    brings them.

    Parameters
    ----------
    compressor, topology, feedback, link
        See `CompressedMean`.
    numbers : sequence of int
        For compressors that draw, the number of the first bucket of each tensor, see `bucket_numbers`; by default
        that of a model which consists of these tensors.

    Notes
    -----
    The means are those of a `CompressedMean` of all tensors, bit for bit: a bucket is compressed alike in whichever
    chunk it is. What differs is which rank is the server of which bucket, and so whose draws it gets where compressors
    draw, and in a ring the order of its sums; and that every tensor has a message of its own within the message to a
    peer: up to 16 bytes more for each tensor, peer and phase.

    Examples
    --------
    >>> import numpy as np, qcomp
    >>> mean = TensorwiseMean(qcomp.ScaledSign(bucket_size=8))
    >>> x = [np.full(16, 3.0, dtype=np.float32), np.full(8, 5.0, dtype=np.float32)]
    >>> first, second = mean.split(mean.init(x, qcomp.comm.LocalCommunicator.alone()), 2)
    >>> first.shapes, second.shapes
    (((16,),), ((8,),))
    """

    numbers: Sequence[int] = ()

    def bucket_numbers(self, shapes: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
        """Return the number of the first bucket of each tensor of a model of these shapes."""
        lengths = [c.traits.bucket_size for c in self.compressors_of(shapes)]
        (whole,) = cut([math.prod(shape) for shape in shapes], lengths, 1)
        first = {segment.tensor: segment.bucket for segment in whole}
        return tuple(first.get(i, 0) for i in range(len(shapes)))

    def segments_of_shapes(
        self, shapes: Sequence[tuple[int, ...]], size: int
    ) -> tuple[tuple[Segment, ...], ...]:
        """Return the segments of each rank's chunks of tensors of these shapes."""
        each = [
            (i, number, single.segments_of_shapes((shape,), size))
            for i, (single, shape, number) in enumerate(
                zip(self._singles(len(shapes)), shapes, self.bucket_numbers(shapes), strict=True)
            )
        ]
        return tuple(
            tuple(
                segment._replace(tensor=i, bucket=number + segment.bucket)
                for i, number, chunks in each
                for segment in chunks[rank]
            )
            for rank in range(size)
        )

    def parts(
        self, shapes: Sequence[tuple[int, ...]], *, rank: int, size: int, nodes: tuple[int, ...] = ()
    ) -> tuple[tuple[Segment, ...], tuple[Segment, ...]]:
        """Return what a rank's residuals are of; see `CompressedMean.parts`."""
        worker: list[Segment] = []
        server: list[Segment] = []
        for i, (single, shape) in enumerate(zip(self._singles(len(shapes)), shapes, strict=True)):
            kept = single.parts((shape,), rank=rank, size=size, nodes=nodes)
            for own, segments in zip((worker, server), kept, strict=True):
                own += [segment._replace(tensor=i) for segment in segments]
        return tuple(worker), tuple(server)

    def split(self, state: MeanState, count: int) -> list[MeanState]:
        """Return the state of each of so many tensors."""
        if not state.worker:
            return [state] * count
        worker, server = iter(state.worker), iter(state.server)
        states = []
        for single, shape in zip(self._singles(count), state.shapes, strict=True):
            kept = single.parts((shape,), rank=state.rank, size=state.size, nodes=state.nodes)
            own, served = (
                tuple(itertools.islice(residuals, len(segments)))
                for residuals, segments in zip((worker, server), kept, strict=True)
            )
            states.append(state._replace(worker=own, server=served, shapes=(shape,)))
        return states

    @staticmethod
    def join(states: Sequence[MeanState]) -> MeanState:
        """Return the state of tensors of which these are the states, the inverse of `split`."""
        return states[0]._replace(
            worker=tuple(e for state in states for e in state.worker),
            server=tuple(e for state in states for e in state.server),
            shapes=tuple(shape for state in states for shape in state.shapes),
        )

    def start(self, x: Any, state: MeanState, terms: Terms) -> Running:
        """Return the one round of this mean; see `CompressedMean.start`."""
        if self.topology == "auto":
            return replace(self, topology=state.topology).start(x, state, terms)
        tensors = list(x) if isinstance(x, list | tuple) else [x]
        numbers = self.numbers or self.bucket_numbers([tuple(t.shape) for t in tensors])
        states, key = self.split(state, len(tensors)), terms.key
        each = []
        for i, (single, number) in enumerate(zip(self._singles(len(tensors)), numbers, strict=True)):
            own_terms = terms._replace(
                key=None if key is None else key.at(bucket=number),
                blends=terms.blends[i : i + 1],
                at_once=True,
            )
            each.append(single.start([tensors[i]], states[i], own_terms))

        def finish(results: Sequence[Any]) -> tuple[Any, MeanState]:
            means, states = [], []
            for running, result in zip(each, results[0], strict=True):
                (mean,), kept = running.finish([result])
                means.append(mean)
                states.append(kept)
            return (means if isinstance(x, list | tuple) else means[0]), self.join(states)

        return Running([fuse([running.rounds[0] for running in each])], finish)

    def _singles(self, count: int) -> list[CompressedMean]:
        """Return the mean of each of so many tensors."""
        chosen = self.compressors if isinstance(self.compressor, tuple) else self.compressors * count
        if len(chosen) != count:
            raise ValueError(f"x has {count} arrays; compressor has {len(chosen)} entries")
        return [CompressedMean(c, topology=self.topology, feedback=self.feedback) for c in chosen]
