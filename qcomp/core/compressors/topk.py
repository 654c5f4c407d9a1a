"""The largest elements of every bucket, exactly; zeros elsewhere."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

from qcomp.core.compressor import Compressor
from qcomp.core.compressors.positions import join_bytes, split_bytes, validate_sparsity
from qcomp.core.numeric.arrays import Array, array_namespace, device, flush
from qcomp.core.numeric.buckets import blocks, join_blocks
from qcomp.core.numeric.random import Key
from qcomp.core.payload import Field, PayloadSpec
from qcomp.core.registry import register
from qcomp.core.traits import Traits

__all__ = ["TopK"]


@register
@dataclass(frozen=True)
class TopK(Compressor):
    """C(v)_i = v_i for the k elements of largest magnitude in every bucket, and 0 for the others.

    Among equal magnitudes the lowest index wins.

    Parameters
    ----------
    k : int
        Number of elements kept per bucket, 1 to ``bucket_size``.
    bucket_size : int
        Elements to choose from, a power of two from 8 to 65536.

    Notes
    -----
    A contraction: ||C(v) - v||^2 is exactly the squared norm of the dropped elements, at most (1 - k / bucket_size)
    ||v||^2, with equality only if all magnitudes are equal. Sends 40 bits for each kept element, its value in float32
    and its index in a byte; 48 bits in buckets of more than 256. Source: Stich et al., NeurIPS 2018, definition 2.1.

    Examples
    --------
    >>> import numpy as np
    >>> c = TopK(k=2, bucket_size=8)
    >>> x = np.asarray([1.0, -5.0, 0.5, 3.0, -3.0], dtype=np.float32)
    >>> c.decompress(c.compress(x), like=x)
    array([ 0., -5.,  0.,  3.,  0.], dtype=float32)
    """

    name: ClassVar[str] = "topk"

    k: int = 32
    bucket_size: int = 1024

    def __post_init__(self) -> None:
        validate_sparsity(self.k, self.bucket_size)

    @cached_property
    def traits(self) -> Traits:
        """A contraction by k / bucket_size."""
        return Traits(self.bucket_size, delta=self.k / self.bucket_size, keeps_zero=True, kept=self.k)

    def payload_spec(self, size: int, dtype: str = "float32") -> PayloadSpec:  # noqa: ARG002
        """Return the layout: the low bytes of the indices, the high bytes if they have any, the values."""
        full, rest = divmod(size, self.bucket_size)
        count = full * self.k + min(rest, self.k)
        high = count if self.bucket_size > 256 else 0
        return PayloadSpec(
            (Field("low", "uint8", count), Field("high", "uint8", high), Field("values", "float32", count))
        )

    def encode(self, x: Array, key: Key | None) -> Mapping[str, Array]:  # noqa: ARG002
        """Return the indices within each bucket, in rising order, and the values there."""
        xp = array_namespace(x)
        indices, values = [], []
        for block in blocks(x.shape[0], self.bucket_size):
            rows = flush(block.read(x))[:, : block.filled]
            order = xp.argsort(-xp.abs(rows), axis=1, stable=True)
            chosen = xp.sort(order[:, : min(self.k, block.filled)], axis=1)
            starts = xp.arange(block.rows, dtype=chosen.dtype, device=device(x)) * block.filled
            places = xp.reshape(chosen + starts[:, None], (-1,))
            indices.append(xp.reshape(chosen, (-1,)))
            values.append(xp.take(xp.reshape(rows, (-1,)), places, axis=0))
        low, high = split_bytes(join_blocks(indices, dtype=xp.uint8, like=x), two=self.bucket_size > 256)
        kept = xp.astype(join_blocks(values, dtype=x.dtype, like=x), xp.float32, copy=False)
        return {"low": low, "high": high, "values": flush(kept)}

    def decode(self, parts: Mapping[str, Array], size: int, dtype: Any) -> Array:
        """Return zeros with the values at their indices; each element searches for its index among them."""
        values = parts["values"]
        xp = array_namespace(values)
        count = values.shape[0]
        if not count:
            return xp.zeros((size,), dtype=dtype, device=device(values))
        elements = xp.arange(size, device=device(values))
        numbers = xp.arange(count, device=device(values))
        within = xp.astype(join_bytes(parts["low"], parts["high"]), numbers.dtype)
        places = xp.floor_divide(numbers, xp.full_like(numbers, self.k)) * self.bucket_size + within
        found = xp.searchsorted(places, elements)
        found = xp.where(found < count, found, xp.full_like(found, count - 1))
        there = xp.take(places, found, axis=0) == elements
        kept = xp.astype(xp.take(values, found, axis=0), dtype, copy=False)
        return xp.where(there, kept, xp.zeros_like(kept))
