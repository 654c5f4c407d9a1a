"""`RandK`: keeps a few random elements of every bucket, in 32 bits or rounded at random to a few levels; unbiased."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

from qcomp.core.compressor import Compressor
from qcomp.core.compressors.positions import join_bytes, split_bytes, validate_sparsity
from qcomp.core.compressors.qsgd import QSGD
from qcomp.core.numeric import bitplanes
from qcomp.core.numeric.arrays import Array, array_namespace, device, flush
from qcomp.core.numeric.buckets import Block, blocks, bucket_count, bytes_below, join_blocks
from qcomp.core.numeric.random import Key, draws16, draws16_again, stream_of
from qcomp.core.payload import Field, PayloadSpec
from qcomp.core.registry import register
from qcomp.core.traits import Traits

_VALUES = 1 << 30
"""Added to the hop of a key for the draws that round values, so that they are independent of the draws of positions."""


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
    value_bits : int
        32 sends values in float32, and their positions. 2 to 8 round the values by `QSGD`, with 2^(value_bits - 1) - 1
        levels and one step for the kept elements of a bucket, and send no positions, since the receiver draws these
        again.

    Notes
    -----
    E ||C(v) - v||^2 is exactly omega ||v||^2 for every v, with omega = bucket_size / k - 1. For error feedback use
    ``Scaled(RandK(...))``, which omits the factor bucket_size / k, and is a contraction with delta = k / bucket_size.
    Sends 40 bits for each kept element: its value in float32, and its number within the stratum in a byte. If a stratum
    has more than 256 elements, an element takes 48 bits. A tail draws from its padded length, a power of two from 8.

    With fewer bits per value, omega is at most bucket_size / k * (1 + omega of the rounding) - 1. Sends ``value_bits``
    bits for each kept element (but for no fewer than 8 elements per bucket), 32 bits for each bucket, and 128 bits that
    determine the draws. Source: Stich et al., NeurIPS 2018, definition 2.1, with strata instead of all subsets; the
    probability of each element is the same.

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
    value_bits: int = 32

    def __post_init__(self) -> None:
        validate_sparsity(self.k, self.bucket_size)
        if self.k & (self.k - 1):
            raise ValueError(f"k is {self.k}; expected a power of two")
        if type(self.value_bits) is not int or not (2 <= self.value_bits <= 8 or self.value_bits == 32):
            raise ValueError(f"value_bits is {self.value_bits!r}; expected an integer from 2 to 8, or 32")

    @cached_property
    def spec(self) -> str:
        """The spec string, which leaves out ``value_bits=32``, so that such payloads keep their old name."""
        return super().spec.removesuffix(",value_bits=32")

    @cached_property
    def _rounding(self) -> QSGD | None:
        """The compressor that rounds the kept values of a bucket; None for 32 bits."""
        if self.value_bits == 32:
            return None
        return QSGD(levels=(1 << self.value_bits - 1) - 1, bucket_size=max(8, self.k))

    @cached_property
    def traits(self) -> Traits:
        """Unbiased, with omega = bucket_size / k - 1, or more with fewer bits per value."""
        of_rounding = 0.0 if self._rounding is None else self._rounding.traits.omega
        assert of_rounding is not None  # QSGD states it
        omega = self.bucket_size / self.k * (1 + of_rounding) - 1
        return Traits(self.bucket_size, random=True, unbiased=True, omega=omega, keeps_zero=True, kept=self.k)

    def payload_spec(self, size: int, dtype: str = "float32") -> PayloadSpec:  # noqa: ARG002
        """Return the layout: the bytes of the numbers within strata, the low ones first, and the values.

        With fewer bits per value: the codes of the values, the step of each bucket, and the stream of the draws.
        """
        if self._rounding is not None:
            codes = sum(block.rows * self._held(block).length for block in blocks(size, self.bucket_size))
            return PayloadSpec(
                (
                    Field("codes", "uint8", codes * self.value_bits // 8),
                    Field("step", "float32", bucket_count(size, self.bucket_size)),
                    Field("stream", "int32", 4),
                )
            )
        count = sum(block.rows * self._strata(block) for block in blocks(size, self.bucket_size))
        return PayloadSpec(
            (Field("numbers", "uint8", self._width * count), Field("values", "float32", count))
        )

    def encode(self, x: Array, key: Key | None) -> Mapping[str, Array]:
        """Return the number of each stratum's drawn element, and its value; or codes, steps and the stream."""
        assert key is not None  # `compress` has checked it
        xp = array_namespace(x)
        rounding = self._rounding
        numbers, values, steps = [], [], []
        for block in blocks(x.shape[0], self.bucket_size):
            rows, strata = flush(block.read(x)), self._strata(block)
            draws = draws16(key, block, bucket_size=self.bucket_size, like=rows)[:, :strata]
            drawn = self._drawn(draws, block)
            rows = xp.reshape(rows, (block.rows, -1, strata))
            kept = xp.where(self._at(drawn, block), rows, xp.zeros_like(rows))
            value = xp.sum(kept, axis=1)  # sums of one number and zeros, so exact
            if rounding is not None:
                held = self._held(block)
                padding = xp.zeros((held.rows, held.length - strata), dtype=x.dtype, device=device(x))
                value, (step,) = rounding.encode_block(
                    xp.concat([value, padding], axis=1), held, _of_values(key)
                )
                value = bitplanes.pack(value, rounding.bits)
                steps.append(step)
            numbers.append(xp.reshape(drawn, (-1,)))
            values.append(xp.reshape(value, (-1,)))
        if rounding is not None:
            return {
                "codes": join_blocks(values, dtype=xp.uint8, like=x),
                "step": join_blocks(steps, dtype=xp.float32, like=x),
                "stream": stream_of(key, like=x),
            }
        drawn = split_bytes(join_blocks(numbers, dtype=xp.uint8, like=x), self._width)
        sent = xp.astype(join_blocks(values, dtype=x.dtype, like=x), xp.float32, copy=False)
        return {"numbers": drawn, "values": flush(sent)}

    def decode(self, parts: Mapping[str, Array], size: int, dtype: Any) -> Array:
        """Return the values times a power of two at the drawn elements, and zeros elsewhere."""
        some = next(iter(parts.values()))
        xp = array_namespace(some)
        decoded, offset = [], 0
        for block in blocks(size, self.bucket_size):
            strata = self._strata(block)
            if self._rounding is None:
                part = slice(offset, offset + block.rows * strata)
                offset = part.stop
                numbers = join_bytes(parts["numbers"], self._width)
                drawn = xp.reshape(numbers[part], (block.rows, strata))
                values = xp.astype(xp.reshape(parts["values"][part], (block.rows, strata)), dtype, copy=False)
            else:
                held = self._held(block)
                part = slice(offset, offset + block.rows * held.length * self.value_bits // 8)
                offset = part.stop
                codes = bitplanes.unpack(xp.reshape(parts["codes"][part], (block.rows, -1)), self.value_bits)
                step = parts["step"][block.first_bucket : block.first_bucket + block.rows]
                values = self._rounding.decode_block(codes, (xp.astype(step, dtype, copy=False)[:, None],))
                values = values[:, :strata]
                draws = draws16_again(parts["stream"], block, bucket_size=self.bucket_size, like=some)
                drawn = self._drawn(draws[:, :strata], block)
            kept = xp.reshape(values, (block.rows, 1, strata)) * (block.length / strata)
            rows = xp.where(self._at(drawn, block), kept, xp.zeros_like(kept))
            decoded.append(block.flat(xp.reshape(rows, (block.rows, block.length))))
        return join_blocks(decoded, dtype=dtype, like=some)

    @property
    def _width(self) -> int:
        return bytes_below(self.bucket_size // self.k)

    def _strata(self, block: Block) -> int:
        return min(self.k, block.length)

    def _held(self, block: Block) -> Block:
        """Return the block of only the kept elements of a block, with the same number of buckets."""
        strata = self._strata(block)
        return Block(block.start, block.rows, max(8, strata), strata, block.first_bucket)

    def _drawn(self, draws: Array, block: Block) -> Array:
        """Return the number of the drawn element of each stratum."""
        xp = array_namespace(draws)
        return xp.astype(xp.floor(draws * (block.length / self._strata(block) / 65536)), xp.int32)

    def _at(self, drawn: Array, block: Block) -> Array:
        """Return a mask of the drawn elements, of shape (rows, elements of a stratum, strata)."""
        xp = array_namespace(drawn)
        each = xp.arange(block.length // self._strata(block), dtype=xp.int32, device=device(drawn))
        chosen: Array = each[None, :, None] == drawn[:, None, :]
        return chosen


def _of_values(key: Key) -> Key:
    """Return the key of the draws that round values."""
    hop = key.hop + _VALUES
    return key.at(hop=hop % (1 << 32) if isinstance(hop, int) else hop)
