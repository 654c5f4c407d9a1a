"""A few elements of every bucket, drawn at random; unbiased."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

from qcomp.core.coding.bits import bytes_below
from qcomp.core.compressor import Compressor
from qcomp.core.compressors.positions import join_bytes, split_bytes, validate_sparsity
from qcomp.core.numeric.arrays import Array, array_namespace, device, flush
from qcomp.core.numeric.buckets import Block, blocks, join_blocks
from qcomp.core.numeric.random import Key, draws16
from qcomp.core.payload import Field, PayloadSpec
from qcomp.core.registry import register
from qcomp.core.traits import Traits

__all__ = ["RandK"]


@register
@dataclass(frozen=True)
class RandK(Compressor):
    """C(v)_i = v_i * bucket_size / k for k elements drawn from every bucket, and 0 for the others: E C(v) = v.

    Element i of a bucket is in stratum i mod k. Each stratum draws one of its elements, all with equal probability. So
    k elements are kept, each with probability k / bucket_size exactly.

    Parameters
    ----------
    k : int
        Number of elements kept per bucket, a power of two from 1 to ``bucket_size``.
    bucket_size : int
        Elements to draw from, a power of two from 8 to 65536.

    Notes
    -----
    Exactly, E ||C(v) - v||^2 = omega ||v||^2 for every v, with omega = bucket_size / k - 1. For error feedback use
    ``Scaled(RandK(...))``, a contraction without the factor, with delta = k / bucket_size. Sends 40 bits for each kept
    element, its value in float32 and its number within the stratum in a byte; 48 bits if a stratum has more than 256
    elements. A tail draws from its padded length, a power of two from 8. Source: Stich et al., NeurIPS 2018, definition
    2.1, with strata instead of all subsets; the probability of each element is the same.

    Examples
    --------
    >>> import numpy as np, qcomp
    >>> c = RandK(k=2, bucket_size=8)
    >>> x = np.ones(8, dtype=np.float32)
    >>> y = c.decompress(c.compress(x, key=qcomp.Key(seed=1)), like=x)
    >>> sorted(y.tolist())
    [0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 4.0, 4.0]
    """

    name: ClassVar[str] = "randk"

    k: int = 32
    bucket_size: int = 1024

    def __post_init__(self) -> None:
        validate_sparsity(self.k, self.bucket_size)
        if self.k & (self.k - 1):
            raise ValueError(f"k is {self.k}; expected a power of two")

    @cached_property
    def traits(self) -> Traits:
        """Unbiased, with omega = bucket_size / k - 1."""
        omega = self.bucket_size / self.k - 1
        return Traits(self.bucket_size, random=True, unbiased=True, omega=omega, keeps_zero=True, kept=self.k)

    def payload_spec(self, size: int, dtype: str = "float32") -> PayloadSpec:  # noqa: ARG002
        """Return the layout: the bytes of the numbers, the low ones first, and the values."""
        count = sum(block.rows * self._strata(block) for block in blocks(size, self.bucket_size))
        return PayloadSpec(
            (Field("numbers", "uint8", self._width * count), Field("values", "float32", count))
        )

    def encode(self, x: Array, key: Key | None) -> Mapping[str, Array]:
        """Return the number of the drawn element within each stratum, and its value."""
        assert key is not None  # `compress` has checked it
        xp = array_namespace(x)
        numbers, values = [], []
        for block in blocks(x.shape[0], self.bucket_size):
            rows, strata = flush(block.read(x)), self._strata(block)
            draws = draws16(key, block, bucket_size=self.bucket_size, like=rows)[:, :strata]
            drawn = xp.astype(xp.floor(draws * (block.length / strata / 65536)), xp.int32)
            rows = xp.reshape(rows, (block.rows, -1, strata))
            kept = xp.where(self._at(drawn, block), rows, xp.zeros_like(rows))
            numbers.append(xp.reshape(drawn, (-1,)))
            values.append(xp.reshape(xp.sum(kept, axis=1), (-1,)))  # sums of one number and zeros, so exact
        drawn = split_bytes(join_blocks(numbers, dtype=xp.uint8, like=x), self._width)
        sent = xp.astype(join_blocks(values, dtype=x.dtype, like=x), xp.float32, copy=False)
        return {"numbers": drawn, "values": flush(sent)}

    def decode(self, parts: Mapping[str, Array], size: int, dtype: Any) -> Array:
        """Return the values times a power of two at the drawn elements, and zeros elsewhere."""
        xp = array_namespace(parts["values"])
        numbers = join_bytes(parts["numbers"], self._width)
        values = xp.astype(parts["values"], dtype, copy=False)
        decoded, offset = [], 0
        for block in blocks(size, self.bucket_size):
            strata = self._strata(block)
            part = slice(offset, offset + block.rows * strata)
            offset = part.stop
            drawn = xp.reshape(numbers[part], (block.rows, strata))
            kept = xp.reshape(values[part], (block.rows, 1, strata)) * (block.length / strata)
            rows = xp.where(self._at(drawn, block), kept, xp.zeros_like(kept))
            decoded.append(block.flat(xp.reshape(rows, (block.rows, block.length))))
        return join_blocks(decoded, dtype=dtype, like=values)

    @property
    def _width(self) -> int:
        return bytes_below(self.bucket_size // self.k)

    def _strata(self, block: Block) -> int:
        return min(self.k, block.length)

    def _at(self, drawn: Array, block: Block) -> Array:
        """Return a mask of the drawn elements, of shape (rows, elements of a stratum, strata)."""
        xp = array_namespace(drawn)
        each = xp.arange(block.length // self._strata(block), dtype=xp.int32, device=device(drawn))
        return each[None, :, None] == drawn[:, None, :]
