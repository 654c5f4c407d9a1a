"""`OneBitSGD`: the sign of every element, and the mean of the elements of each sign in every column."""

from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import ClassVar

from qcomp.core.compressors.bucketed import BucketedCompressor
from qcomp.core.numeric.arrays import Array, array_namespace, divide
from qcomp.core.numeric.buckets import Block
from qcomp.core.numeric.random import Key
from qcomp.core.numeric.sums import pad_to_power_of_two, tree_sum
from qcomp.core.registry import register
from qcomp.core.traits import Traits

_LARGEST = 1 << 20
"""The longest column: counts up to it are exact in float32."""
_BEYOND = 2.0**101
"""Exceeds every magnitude that can be compressed."""


@register
@dataclass(frozen=True)
class OneBitSGD(BucketedCompressor):
    """C(v)_i = the mean of those elements in the column of i that have the sign of v_i, where 0 counts as positive.

    A column holds the weights of one output unit: the consecutive elements at one index of the first axis, such as a
    row of torch's ``Linear.weight``. A vector, such as a bias, is one column.

    Parameters
    ----------
    column_size : int
        The longest column, 1 to 2^20. Vectors, and tensors with longer columns, are cut into columns of this many
        elements.

    Notes
    -----
    The two means minimise the error of a code of signs. In every column the losses of each sign add up to 0, so <v -
    C(v), C(v)> = 0, and with m elements ||C(v) - v||^2 <= (1 - ||v||_1^2 / (m ||v||_2^2)) ||v||^2, the loss of
    `ScaledSign`. This holds up to the rounding of the means to float32. A column whose elements of each sign are equal
    stays exact in float32, so compressing twice changes nothing. Sends 1 bit per element, in whole bytes per column,
    and 64 bits per column. Source: Seide et al., Interspeech 2014, section 3. The topology of two phases, with
    feedback, is the double quantization of their section 3.2.

    Examples
    --------
    >>> import numpy as np
    >>> c = OneBitSGD()
    >>> x = np.asarray([[1.0, 3.0, -1.0], [0.0, 4.0, 5.0]], dtype=np.float32)
    >>> payload = c.compress(x)
    >>> payload.compressor, payload.nbytes
    ('onebit_sgd:column_size=3', 20)
    >>> c.decompress(payload, like=x)
    array([[ 2.,  2., -1.],
           [ 3.,  3.,  3.]], dtype=float32)
    """

    name: ClassVar[str] = "onebit_sgd"
    scales: ClassVar[tuple[str, ...]] = ("positive", "negative")

    column_size: int = _LARGEST

    def __post_init__(self) -> None:
        if type(self.column_size) is not int or not 1 <= self.column_size <= _LARGEST:
            raise ValueError(f"column_size is {self.column_size!r}; expected an integer from 1 to {_LARGEST}")

    def for_shape(self, shape: tuple[int, ...]) -> "OneBitSGD":
        """Return the compressor with the columns of tensors of this shape: all axes but the first."""
        height = max(1, prod(shape[1:]))
        if len(shape) <= 1 or height >= self.column_size:
            return self
        return replace(self, column_size=height)

    @staticmethod
    def length_of(count: int) -> int:
        """Return the length of a column of ``count`` elements in bits, rounded up to whole bytes."""
        return -(-count // 8) * 8

    @cached_property
    def traits(self) -> Traits:
        """A contraction with delta 1 / column_size."""
        return Traits(self.column_size, delta=1 / self.column_size)

    @property
    def bits(self) -> int:
        """One bit: 1 for negative."""
        return 1

    def encode_block(
        self,
        rows: Array,
        block: Block,
        key: Key | None,  # noqa: ARG002
    ) -> tuple[Array, tuple[Array, ...]]:
        """Return the sign bits, and the mean of the elements of each sign in each column."""
        xp = array_namespace(rows)
        negative = rows < 0
        elements, below = rows[:, : block.filled], negative[:, : block.filled]
        means = (_mean_where(elements, chosen) for chosen in (~below, below))
        return xp.astype(negative, xp.uint8), tuple(means)

    def decode_block(self, codes: Array, scales: tuple[Array, ...]) -> Array:
        """Return the mean that each code stands for."""
        positive, negative = scales
        return array_namespace(codes).where(codes == 1, negative, positive)


def _mean_where(rows: Array, chosen: Array) -> Array:
    """Return the mean of the chosen elements of each row, 0 if no element is chosen.

    The rounded mean is clamped between the smallest and the largest chosen element, so it is exact if all are equal.
    """
    xp = array_namespace(rows)
    count = xp.sum(xp.astype(chosen, xp.int32), axis=1, dtype=xp.int32)
    total = tree_sum(pad_to_power_of_two(xp.where(chosen, rows, xp.zeros_like(rows))))
    mean = divide(total, xp.astype(xp.where(count > 0, count, xp.ones_like(count)), rows.dtype))
    low = xp.min(xp.where(chosen, rows, xp.full_like(rows, _BEYOND)), axis=1)
    high = xp.max(xp.where(chosen, rows, xp.full_like(rows, -_BEYOND)), axis=1)
    mean = xp.where(mean < low, low, mean)
    mean = xp.where(mean > high, high, mean)
    return xp.where(count > 0, mean, total)
