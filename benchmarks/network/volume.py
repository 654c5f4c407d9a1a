"""The bytes that a step sends, computed from the shapes of the parameters and the lengths of payloads."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import qcomp
from network.methods import COMPUTE, METHODS, SMALLEST_GAIN

__all__ = ["Volume", "volume"]

Shape = tuple[int, ...]


class Volume(NamedTuple):
    """The sizes of the tensors that a step averages."""

    exact: int
    """Elements that are sent as float32."""
    compressed: int
    """Elements that are compressed."""
    payload: int
    """Bytes of a rank's payload for both."""
    tensors: int
    """Tensors that are compressed."""
    exchanges: int
    """Consecutive all-reduces: more than 1 only for PowerSGD."""

    def sent(self, ranks: int) -> float:
        """Return the bytes that a rank sends in a ring or in two phases, and with two ranks also by all-gather."""
        return 2 * (ranks - 1) / ranks * self.payload


def volume(method: str, shapes: Sequence[Shape]) -> Volume:
    """Return the sizes of the tensors that a step of a method averages."""
    chosen, total = METHODS[method], sum(map(math.prod, shapes))
    if method == COMPUTE:
        return Volume(0, 0, 0, 0, 0)
    if chosen.rank is not None:
        elements = sum(_factors(shape, chosen.rank) for shape in shapes)
        return Volume(elements, 0, 4 * elements, 0, 3)
    if chosen.compressor is None:
        return Volume(total, 0, (2 if method == "fp16" else 4) * total, 0, 1)
    tensors = [qcomp.Tensor(str(i), shape, math.prod(shape)) for i, shape in enumerate(shapes)]
    exact = qcomp.ExactBelow()(tensors)
    compressor = qcomp.compressor(chosen.compressor)
    payload = sum(
        4 * t.size if e else compressor.payload_spec(t.size).nbytes
        for t, e in zip(tensors, exact, strict=True)
    )
    kept = sum(t.size for t, e in zip(tensors, exact, strict=True) if e)
    return Volume(kept, total - kept, payload, len(shapes) - sum(exact), 1)


def _factors(shape: Shape, rank: int) -> int:
    """Return the elements of PowerSGD's two factors of a tensor, or of the tensor if they do not save enough."""
    size = math.prod(shape)
    if len(shape) <= 1:
        return size
    rows, columns = shape[0], size // shape[0]
    rank = min(rank, rows, columns)
    factors = (rows + columns) * rank
    return factors if factors * SMALLEST_GAIN < size else size
