"""A compressed mean that treats each tensor separately, so that any group of them can be exchanged together."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from qcomp.core.mean.chunks import Cutter, cut, cut_each
from qcomp.core.mean.compressed_mean import CompressedMean, MeanState
from qcomp.core.numeric.arrays import Array

__all__ = ["TensorwiseMean"]


@dataclass(frozen=True)
class TensorwiseMean(CompressedMean):
    """A `CompressedMean` that cuts every tensor separately into chunks.

    A tensor's residuals and mean then do not depend on the tensors that are exchanged with it. So the groups of tensors
    may change from step to step, as a backward pass delivers them.

    Parameters
    ----------
    compressor, topology, feedback, link
        See `CompressedMean`.
    numbers : sequence of int
        The number of each tensor's first bucket, which is part of the key of its draws; see `bucket_numbers`. By
        default the numbers in a model of these tensors alone.

    Notes
    -----
    Compression of a bucket does not depend on its chunk, so the means equal a `CompressedMean` of all tensors
    bit for bit, with two exceptions: another rank may serve a bucket, with other draws, and the order of sums in a ring
    differs.

    Examples
    --------
    >>> import numpy as np, qcomp
    >>> mean = TensorwiseMean(qcomp.ScaledSign(bucket_size=8))
    >>> x = [np.full(16, 3.0, dtype=np.float32), np.full(8, 5.0, dtype=np.float32)]
    >>> first, second = mean.split(mean.init(x, qcomp.comm.LocalCommunicator.alone()), 2)
    >>> first.shapes, second.shapes
    (((16,),), ((8,),))
    """

    in_one: ClassVar[bool] = True

    numbers: Sequence[int] = ()

    def bucket_numbers(self, shapes: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
        """Return the number of each tensor's first bucket, in a model with these shapes."""
        lengths = [c.traits.bucket_size for c in self.compressors_of(shapes)]
        (whole,) = cut([math.prod(shape) for shape in shapes], lengths, 1)
        first = {segment.tensor: segment.bucket for segment in whole}
        return tuple(first.get(i, 0) for i in range(len(shapes)))

    def cutter(self, shapes: Sequence[tuple[int, ...]]) -> Cutter:
        """Return the function that cuts tensors of these shapes into chunks, each separately."""
        return partial(cut_each, numbers=self.numbers or self.bucket_numbers(shapes))

    def split(self, state: MeanState, count: int) -> list[MeanState]:
        """Return the state of each of ``count`` tensors."""
        if not state.shapes:
            return [state] * count
        ranges = self.layout(state.shapes, rank=state.rank, size=state.size, nodes=state.nodes).residuals
        of_tensor: list[tuple[list[Array], list[Array]]] = [([], []) for _ in state.shapes]
        for kind, (residuals, segments) in enumerate(zip((state.worker, state.server), ranges, strict=True)):
            for residual, segment in zip(residuals, segments, strict=True):
                of_tensor[segment.tensor][kind].append(residual)
        return [
            state._replace(worker=tuple(worker), server=tuple(server), shapes=(shape,))
            for (worker, server), shape in zip(of_tensor, state.shapes, strict=True)
        ]

    @staticmethod
    def join(states: Sequence[MeanState]) -> MeanState:
        """Return the joint state of several tensors, the inverse of `split`."""
        return states[0]._replace(
            worker=tuple(e for state in states for e in state.worker),
            server=tuple(e for state in states for e in state.server),
            shapes=tuple(shape for state in states for shape in state.shapes),
        )

    def numbered(self, numbers: tuple[int, ...]) -> "TensorwiseMean":
        """Return this mean with these bucket numbers: the same object for the same numbers."""
        return self._like(numbers, numbers=numbers)
