"""`MinMaxUInt8`: quantizes to eight bits between the smallest and the largest value of every bucket."""

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from qcomp.core.compressors.bucketed import BucketedCompressor
from qcomp.core.compressors.qsgd import round_up_step
from qcomp.core.numeric.arrays import Array, array_namespace, device, divide, flush
from qcomp.core.numeric.buckets import Block, validate_bucket_size
from qcomp.core.numeric.random import Key
from qcomp.core.registry import register
from qcomp.core.traits import Traits


@register
@dataclass(frozen=True)
class MinMaxUInt8(BucketedCompressor):
    """C(v)_i = base + code_i * step with 256 codes over the range of the bucket, rounded to nearest.

    Parameters
    ----------
    bucket_size : int
        Elements that share a range, a power of two from 8 to 65536.

    Notes
    -----
    step is (max - min) / 255 rounded up to 16 significant bits. If min <= 0 <= max, the base is a whole number of
    steps, so 0 stays exactly 0; otherwise the base is min. Every error is at most half a step, and a constant bucket
    stays exact. Sends 8 + 64 / bucket_size bits per element. Source: Bagua's ByteGrad and QAdam, but with rounding to
    nearest, and without Bagua's additive constant, which swamps small gradients.

    Examples
    --------
    >>> import numpy as np
    >>> c = MinMaxUInt8(bucket_size=8)
    >>> x = np.asarray([-1.0, 0.0, 0.5, 1.0], dtype=np.float32)
    >>> y = c.decompress(c.compress(x), like=x)
    >>> float(abs(y - x).max()) < 1 / 255, float(y[1])
    (True, 0.0)
    """

    name: ClassVar[str] = "minmax"
    scales: ClassVar[tuple[str, ...]] = ("base", "step")

    bucket_size: int = 2048

    def __post_init__(self) -> None:
        validate_bucket_size(self.bucket_size)
        if self.bucket_size > 65536:
            raise ValueError(f"bucket_size is {self.bucket_size}; expected at most 65536")

    @cached_property
    def traits(self) -> Traits:
        """A contraction: the error is at most n (step / 2)^2, and ||v||^2 at least (max - min)^2 / 2."""
        loss = self.bucket_size * 2 / 510**2 * (1 + 2**-12)
        return Traits(self.bucket_size, delta=1 - loss, keeps_zero=True)

    @property
    def bits(self) -> int:
        """Eight."""
        return 8

    def encode_block(
        self,
        rows: Array,
        block: Block,
        key: Key | None,  # noqa: ARG002
    ) -> tuple[Array, tuple[Array, ...]]:
        """Return the codes and the base and step of each bucket."""
        xp = array_namespace(rows)
        elements = rows[:, : block.filled]
        low, high = xp.min(elements, axis=1), xp.max(elements, axis=1)
        step = xp.astype(round_up_step(flush(high - low), 255, bits=16), rows.dtype, copy=False)
        divisor = xp.where(step > 0, step, xp.ones_like(step))
        zero_code = _clamp(xp.round(divide(-low, divisor)))
        spans_zero = (low <= 0) & (high >= 0)
        base = xp.where(spans_zero, -(zero_code * step), low)
        base = xp.astype(flush(xp.astype(base, xp.float32, copy=False)), rows.dtype, copy=False)
        codes = _clamp(xp.round(divide(flush(rows - base[:, None]), divisor[:, None])))
        index = xp.arange(block.length, device=device(rows))
        codes = xp.where((index < block.filled)[None, :], codes, xp.zeros_like(codes))
        return xp.astype(codes, xp.uint8), (base, step)

    def decode_block(self, codes: Array, scales: tuple[Array, ...]) -> Array:
        """Return base + code * step. The product is exact, so only the sum is rounded."""
        base, step = scales
        return base + array_namespace(codes).astype(codes, step.dtype) * step


def _clamp(codes: Array) -> Array:
    """Return the codes clamped to 0 to 255."""
    xp = array_namespace(codes)
    codes = xp.where(codes > 0, codes, xp.zeros_like(codes))
    return xp.where(codes > 255, xp.full_like(codes, 255.0), codes)
