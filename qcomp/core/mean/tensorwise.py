"""`TensorwiseMean`, which treats each tensor separately, so that any tensors can be exchanged together."""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Self

from qcomp.core.mean.chunks import Cutter, cut, cut_each
from qcomp.core.mean.compressed_mean import CompressedMean, MeanState
from qcomp.core.numeric.arrays import Array


class SeparableMean(CompressedMean, ABC):
    """A mean whose tensors can be exchanged in any groups, with the same bits as in one exchange of all.

    A tensor's place holds all that its exchange depends on besides the tensor, such as its number in random draws.
    """

    @abstractmethod
    def places(self, shapes: Sequence[tuple[int, ...]], size: int) -> tuple[Any, ...]:
        """Return the place of each tensor, for a model with tensors of these shapes on ``size`` ranks."""

    @abstractmethod
    def numbered(self, places: tuple[Any, ...]) -> Self:
        """Return this mean for tensors that have these places: the same object for the same places."""

    def split(self, state: MeanState, count: int) -> list[MeanState]:
        """Return the state of each of ``count`` tensors."""
        if not state.shapes:
            return [state] * count
        layout = self.layout(state.shapes, rank=state.rank, size=state.size, nodes=state.nodes)
        of_tensor: list[tuple[list[Array], list[Array]]] = [([], []) for _ in state.shapes]
        kinds = zip((state.worker, state.server), layout.residual_shapes, strict=True)
        for kind, (residuals, (_, tensors)) in enumerate(kinds):
            for residual, tensor in zip(residuals, tensors, strict=True):
                of_tensor[tensor][kind].append(residual)
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


@dataclass(frozen=True)
class TensorwiseMean(SeparableMean):
    """A `CompressedMean` that cuts every tensor separately into chunks.

    So a tensor's residuals and mean do not depend on the tensors that are exchanged with it, and the groups of tensors
    may change from step to step, as a backward pass delivers them.

    ``numbers`` has the number of each tensor's first bucket, which is part of the key of its draws; see
    `bucket_numbers`. By default, they are the numbers in a model of only these tensors.

    Notes
    -----
    The compression of a bucket does not depend on its chunk. So the means equal the means of a `CompressedMean` of all
    tensors bit for bit, with two exceptions. A bucket may have a different server, whose draws differ. A ring may add
    the values of the ranks in a different order.

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
        """Return the number of each tensor's first bucket, for a model with tensors of these shapes."""
        lengths = [c.traits.bucket_size for c in self.compressors_of(shapes)]
        (whole,) = cut([math.prod(shape) for shape in shapes], lengths, 1)
        first = {segment.tensor: segment.bucket for segment in whole}
        return tuple(first.get(i, 0) for i in range(len(shapes)))

    def cutter(self, shapes: Sequence[tuple[int, ...]]) -> Cutter:
        """Return the function that cuts tensors of these shapes into chunks, each separately."""
        return partial(cut_each, numbers=self.numbers or self.bucket_numbers(shapes))

    def places(self, shapes: Sequence[tuple[int, ...]], size: int) -> tuple[int, ...]:  # noqa: ARG002
        """Return the number of each tensor's first bucket; see `SeparableMean.places`."""
        return self.bucket_numbers(shapes)

    def numbered(self, places: tuple[int, ...]) -> Self:
        """Return this mean with these bucket numbers; see `SeparableMean.numbered`."""
        return self._like(places, numbers=places)
