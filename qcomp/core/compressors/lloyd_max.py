"""`LloydMax`: rounds to the best levels for a normal distribution, with one to four bits per element."""

from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from math import sqrt
from typing import TYPE_CHECKING, ClassVar, Literal

from qcomp.core.compressors.bucketed import BucketedCompressor
from qcomp.core.numeric.arrays import (
    Array,
    array_namespace,
    bitcast,
    device,
    divide,
    flush,
    truncate_last_bit,
)
from qcomp.core.numeric.buckets import Block, validate_bucket_size
from qcomp.core.numeric.random import Key
from qcomp.core.numeric.sums import mean_abs, rms, tree_sum
from qcomp.core.payload import PayloadSpec
from qcomp.core.registry import register
from qcomp.core.traits import Traits

if TYPE_CHECKING:
    from qcomp.core.compressors.coded import LevelCoder

LEVELS = {1: (1,), 2: (3, 10), 3: (10, 31, 55, 88), 4: (5, 15, 25, 36, 48, 62, 79, 104)}
"""The magnitudes of the codes, in steps, by the bits of a code: the table of Max (1960), scaled and rounded to whole
numbers up to 127. Rounding increases the error for a normal distribution by at most a thousandth."""
THRESHOLDS: dict[int, tuple[float, ...]] = {
    1: (),
    2: (0.9816,),
    3: (0.5006, 1.0500, 1.7479),
    4: (0.2582, 0.5224, 0.7995, 1.0993, 1.4371, 1.8435, 2.4008),
}
"""The thresholds between these magnitudes, in units of the root mean square."""


@register
@dataclass(frozen=True)
class LloydMax(BucketedCompressor):
    """C(v)_i = sign(v_i) * l_k * step, with the levels l of least error for a normal distribution; nothing is random.

    Parameters
    ----------
    bits : int
        Bits of a code, 1 to 4: the sign, and 1, 2, 4 or 8 magnitudes.
    bucket_size : int
        Elements that share a step, a power of two from 8.
    coding : {"fixed", "range"}
        ``"fixed"``: all codes have the same width. ``"range"``, for 2 bits or more: a range coder, which runs on the
        host, shortens payloads; for values of a normal distribution, codes of 2, 3 and 4 bits then take 1.91, 2.82 and
        3.77 bits.

    Notes
    -----
    The thresholds between levels suit a normal distribution with the mean square of the bucket. The step is then the
    best one for the chosen levels l, <|v|, l> / ||l||^2, so C(v) is the projection of v onto a line, and

        ||C(v) - v||^2 = ||v||^2 - <|v|, l>^2 / ||l||^2 = (1 - delta(v)) ||v||^2.

    So C is a contraction for every v of n elements. With a = |v| / rms(v), so that ||a||^2 = n and a <= sqrt(n), let m
    be the least l / a and r the largest l / a above the first threshold. Then <a, l> >= m n, and ||l||^2 <= r <a, l> +
    n l_0^2, so delta(v) = <a, l>^2 / (n ||l||^2) >= m^2 / (r m + l_0^2), with m = min(l_k / t_(k+1), l_max / sqrt(n)).
    `traits` states this bound; for values of a normal distribution, 1 - delta(v) is .363, .117, .0345 and .0095 for 1
    to 4 bits. With 1 bit this is `ScaledSign`, bit for bit.

    An element that is 0 becomes the smallest level. Sends bits + 32 / bucket_size bits per element, and at most one
    byte more in total with a coder. Source: Max, "Quantizing for minimum distortion", 1960; Lloyd, "Least squares
    quantization in PCM", 1982.

    Examples
    --------
    >>> import numpy as np, qcomp
    >>> c = LloydMax(bits=2, bucket_size=8)
    >>> x = np.asarray([3.0, -3.0, 10.0, -3.0], dtype=np.float32)  # in proportion to the levels
    >>> c.decompress(c.compress(x), like=x)
    array([ 3., -3., 10., -3.], dtype=float32)
    >>> normal = np.random.default_rng(0).standard_normal(1 << 16).astype(np.float32)
    >>> y = LloydMax(bits=2, bucket_size=512)
    >>> lost = y.decompress(y.compress(normal), like=normal) - normal
    >>> round(float(lost @ lost / (normal @ normal)), 2)
    0.12
    """

    name: ClassVar[str] = "lloyd_max"
    scales: ClassVar[tuple[str, ...]] = ("step",)

    bits: int = 2
    bucket_size: int = 128
    coding: Literal["fixed", "range"] = "fixed"

    def __post_init__(self) -> None:
        validate_bucket_size(self.bucket_size)
        if type(self.bits) is not int or self.bits not in LEVELS:
            raise ValueError(f"bits is {self.bits!r}; expected an integer from 1 to {max(LEVELS)}")
        if self.coding not in ("fixed", "range"):
            raise ValueError(f"coding is {self.coding!r}; expected 'fixed' or 'range'")
        if self.coding == "range" and self.bits == 1:
            raise ValueError(
                "coding is 'range' and bits is 1, but signs alone cannot be shortened; expected 'fixed', or more bits"
            )

    @cached_property
    def coder(self) -> "LevelCoder | None":
        """The coder that shortens payloads of fixed width, or None."""
        if self.coding == "fixed":
            return None
        from qcomp.core.compressors.coded import LevelCoder  # noqa: PLC0415 - few coders are used

        plain = replace(self, coding="fixed")
        return LevelCoder(plain, self.coding, len(LEVELS[self.bits]), self.bucket_size, lowest=1)

    def payload_spec(self, size: int, dtype: str = "float32") -> PayloadSpec:
        """Return the layout: codes and steps; with a coder: steps, a byte that says how codes are sent, codes."""
        return super().payload_spec(size, dtype) if self.coder is None else self.coder.payload_spec(size)

    @cached_property
    def traits(self) -> Traits:
        """A contraction with the bound from the class docstring, reduced for the rounding of the step."""
        levels, thresholds = LEVELS[self.bits], THRESHOLDS[self.bits]
        least = levels[-1] / sqrt(self.bucket_size)
        least = min([least, *(level / t for level, t in zip(levels, thresholds, strict=False))])
        most = max([level / t for level, t in zip(levels[1:], thresholds, strict=True)], default=0.0)
        delta = least**2 / (most * least + levels[0] ** 2)
        return Traits(self.bucket_size, delta=delta * (1 - 2**-12))

    def encode_block(
        self,
        rows: Array,
        block: Block,
        key: Key | None,  # noqa: ARG002
    ) -> tuple[Array, tuple[Array, ...]]:
        """Return the codes (the number of the level, with the sign bit on top) and the step of each bucket."""
        xp = array_namespace(rows)
        magnitude, levels = xp.abs(rows), LEVELS[self.bits]
        scale = flush(rms(rows, block.filled))
        codes = xp.zeros(rows.shape, dtype=xp.uint8, device=device(rows))
        level = xp.full_like(rows, float(levels[0]))
        for threshold, (lower, upper) in zip(THRESHOLDS[self.bits], pairwise(levels), strict=True):
            above = magnitude > flush(threshold * scale)[:, None]
            codes = codes + xp.astype(above, xp.uint8)
            level = level + (upper - lower) * xp.astype(above, rows.dtype)
        sign = xp.asarray(len(levels), dtype=xp.uint8, device=device(rows))
        step = mean_abs(rows, block.filled) if self.bits == 1 else _step(magnitude, level, block.filled)
        return codes + sign * xp.astype(rows < 0, xp.uint8), (step,)

    def decode_block(self, codes: Array, scales: tuple[Array, ...]) -> Array:
        """Return the signed level times the step, an exact product."""
        xp = array_namespace(codes)
        (step,) = scales
        levels = LEVELS[self.bits]
        number = xp.bitwise_and(codes, xp.asarray(len(levels) - 1, dtype=codes.dtype, device=device(codes)))
        level = xp.full(codes.shape, float(levels[0]), dtype=step.dtype, device=device(codes))
        for place, (lower, upper) in enumerate(pairwise(levels)):
            level = level + (upper - lower) * xp.astype(number > place, step.dtype)
        return level * (1.0 - 2.0 * xp.astype(codes >= len(levels), step.dtype)) * step


def _step(magnitude: Array, level: Array, filled: int) -> Array:
    """Return <magnitude, level> / ||level||^2 of each row, with 17 bits, so that level * step is exact in float32."""
    xp = array_namespace(magnitude)
    index = xp.arange(level.shape[1], device=device(level))
    squares = xp.where((index < filled)[None, :], level * level, xp.zeros_like(level))
    products = truncate_last_bit(magnitude * level)  # so that no compiler fuses the product and the sum
    step = xp.astype(divide(tree_sum(products), tree_sum(squares)), xp.float32, copy=False)
    mask = xp.asarray([~0x7F], dtype=xp.int32, device=device(step))
    return bitcast(xp.bitwise_and(bitcast(step, xp.int32), mask), xp.float32)
