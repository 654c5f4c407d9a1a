"""`QSGD`: unbiased stochastic rounding to a few evenly spaced levels."""

from dataclasses import dataclass, replace
from functools import cached_property
from math import sqrt
from typing import TYPE_CHECKING, ClassVar, Literal

from qcomp.core.compressors.bucketed import BucketedCompressor
from qcomp.core.numeric.arrays import TINY, Array, array_namespace, bitcast, device, divide
from qcomp.core.numeric.buckets import Block, validate_bucket_size
from qcomp.core.numeric.random import Key, draws16
from qcomp.core.numeric.sums import norm2
from qcomp.core.payload import PayloadSpec
from qcomp.core.registry import register
from qcomp.core.traits import Traits

if TYPE_CHECKING:
    from qcomp.core.compressors.coded import LevelCoder

_MOST_LEVELS = 32767
_ROUNDING_SLACK = 1 + 2**-14
"""An upper bound of the factor by which rounding the step up to 17 bits, and the draws to 16, raises the variance."""


@register
@dataclass(frozen=True)
class QSGD(BucketedCompressor):
    """C(v)_i = sign(v_i) * k_i * step, where k_i rounds |v_i| / step up or down at random, so that E C(v) = v.

    Parameters
    ----------
    levels : int
        Number of levels s above zero: 1 to 127, or 1 to 32767 with a coder. A code takes one bit for the sign and as
        many bits as s needs; with s of 1, 7 and 127 it fills 2, 4 and 8 bits.
    bucket_size : int
        Elements that share a step, a power of two from 8.
    norm : {"max", "l2"}
        The step is this norm of the bucket divided by ``levels``, rounded up to 17 significant bits. If ``levels``
        needs more than 7 bits, the step has one bit less for each bit above 7. ``"max"`` gives a much smaller variance;
        ``"l2"`` matches the paper's theory and makes sparse codes.
    coding : {"fixed", "elias", "range"}
        ``"fixed"``: all codes have the same width. With a coder, which runs on the host, a payload is shorter if more
        of its levels are small. ``"elias"`` is the paper's code, and ``"range"`` comes close to the entropy of up to
        127 levels. In ``"range"``, levels above 127 with the same length and the same first 7 bits take equally many
        bits, however frequent each is.

    Notes
    -----
    E ||C(v) - v||^2 is exactly step^2 * sum_i p_i (1 - p_i), where p_i is the fractional part of |v_i| / step. Sends
    bits + 32 / bucket_size bits per element. A coder adds at most one byte in total to this, since codes that it would
    not shorten are sent unchanged. A coder is lossless. It runs on the host, so `jax.jit` cannot trace it. Source:
    Alistarh et al., NeurIPS 2017, section 3.1.

    Examples
    --------
    >>> import numpy as np, qcomp
    >>> c = QSGD(levels=1, bucket_size=8)
    >>> x = np.asarray([4.0, 0.0, -4.0, 0.0], dtype=np.float32)  # on the grid, so it stays exact
    >>> c.decompress(c.compress(x, key=qcomp.Key()), like=x)
    array([ 4.,  0., -4.,  0.], dtype=float32)
    >>> coded = QSGD(levels=255, norm="l2", coding="range")  # 9 bits per element in fixed width
    >>> sparse = np.random.default_rng(0).standard_normal(4096).astype(np.float32)
    >>> coded.compress(sparse, key=qcomp.Key()).nbytes < 6 * 4096 / 8
    True
    """

    name: ClassVar[str] = "qsgd"
    scales: ClassVar[tuple[str, ...]] = ("step",)

    levels: int = 7
    bucket_size: int = 512
    norm: Literal["max", "l2"] = "max"
    coding: Literal["fixed", "elias", "range"] = "fixed"

    _most_uncoded: ClassVar[int] = 127

    def __post_init__(self) -> None:
        validate_bucket_size(self.bucket_size)
        if self.coding not in ("fixed", "elias", "range"):
            raise ValueError(f"coding is {self.coding!r}; expected 'fixed', 'elias' or 'range'")
        most = self._most_uncoded if self.coding == "fixed" else _MOST_LEVELS
        if type(self.levels) is not int or not 1 <= self.levels <= most:
            raise ValueError(
                f"levels is {self.levels!r}; expected an integer from 1 to {most}"
                + (f", or to {_MOST_LEVELS} with coding='range' or 'elias'" if most < _MOST_LEVELS else "")
            )
        if self.norm not in ("max", "l2"):
            raise ValueError(f"norm is {self.norm!r}; expected 'max' or 'l2'")

    @cached_property
    def spec(self) -> str:
        """The spec string, which leaves out ``coding="fixed"``, so that such payloads keep their old name."""
        return super().spec.replace(",coding=fixed", "")

    @cached_property
    def coder(self) -> "LevelCoder | None":
        """The coder that shortens payloads of fixed width, or None."""
        if self.coding == "fixed":
            return None
        from qcomp.core.compressors.coded import LevelCoder  # noqa: PLC0415 - few coders are used

        plain = (
            replace(self, coding="fixed")
            if self.levels <= self._most_uncoded
            else WideQSGD(self.levels, self.bucket_size, self.norm)
        )
        return LevelCoder(plain, self.coding, self.levels, self.bucket_size)

    def payload_spec(self, size: int, dtype: str = "float32") -> PayloadSpec:
        """Return the layout: codes and steps; with a coder: steps, a byte that says how codes are sent, codes."""
        return super().payload_spec(size, dtype) if self.coder is None else self.coder.payload_spec(size)

    @cached_property
    def traits(self) -> Traits:
        """Unbiased, with the variance bound of its norm for a full bucket."""
        n, s = self.bucket_size, self.levels
        if self.norm == "max":
            omega = min((n - 1) / (4 * s**2), (1 + sqrt(n)) / (2 * s))
        else:
            omega = min(n / (4 * s**2), sqrt(n) / s)
        if self.bits > 8:
            # A draw shifts p by 2^-17, rounding shifts a position of up to s by 2^-24 of it, and the step may
            # be rounded up.
            omega += n * 2**-17 / s**2 + sqrt(n) * 2**-24 / s
            omega *= (1 + 2 ** (1 - self._step_bits)) ** 2
        else:
            omega *= _ROUNDING_SLACK
        # The largest error is a step, which may be rounded up.
        peak = 1.01 / s if self.norm == "max" else 1.01 * sqrt(n) / s
        return Traits(n, random=True, unbiased=True, omega=omega, keeps_zero=True, peak=peak)

    @property
    def bits(self) -> int:
        """The bits of the largest level, plus one for the sign."""
        return self.levels.bit_length() + 1

    @property
    def _step_bits(self) -> int:
        """Significant bits of a step, few enough that every level times the step is exact in float32."""
        return min(17, 24 - self.levels.bit_length())

    def encode_block(self, rows: Array, block: Block, key: Key | None) -> tuple[Array, tuple[Array, ...]]:
        """Return the codes (the level, with the sign bit on top) and the step of each bucket."""
        xp = array_namespace(rows)
        assert key is not None  # `compress` has checked it
        magnitude = xp.abs(rows)
        norm = xp.max(magnitude, axis=1) if self.norm == "max" else norm2(rows)
        step = round_up_step(norm, self.levels, bits=self._step_bits)
        divisor = xp.astype(xp.where(step > 0, step, xp.ones_like(step)), rows.dtype, copy=False)
        position = divide(magnitude, divisor[:, None])
        # Rounding may give a position above the largest level.
        position = xp.where(position < self.levels, position, xp.full_like(position, float(self.levels)))
        level = xp.floor(position)
        draws = draws16(key, block, bucket_size=self.bucket_size, like=rows)
        up = draws < xp.round((position - level) * 65536.0)
        dtype = xp.uint8 if self.bits <= 8 else xp.int32
        level = xp.astype(level, dtype) + xp.astype(up, dtype)
        sign = xp.asarray(1 << (self.bits - 1), dtype=dtype, device=device(rows))
        return level + sign * xp.astype((rows < 0) & (level > 0), dtype), (step,)

    def decode_block(self, codes: Array, scales: tuple[Array, ...]) -> Array:
        """Return the signed level times the step, an exact product."""
        xp = array_namespace(codes)
        (step,) = scales
        sign = 1 << (self.bits - 1)
        level = xp.bitwise_and(codes, xp.asarray(sign - 1, dtype=codes.dtype, device=device(codes)))
        return xp.astype(level, step.dtype) * (1.0 - 2.0 * xp.astype(codes > sign, step.dtype)) * step


class WideQSGD(QSGD):
    """The plain compressor of a coder with more levels than payloads of fixed width may have.

    It is a class of its own, so that kernels for codes of up to 8 bits do not treat it as a `QSGD`.
    """

    _most_uncoded: ClassVar[int] = _MOST_LEVELS


def round_up_step(norm: Array, levels: int, *, bits: int = 17) -> Array:
    """Return norm / levels as float32, rounded up to ``bits`` significant bits, and at least 2**-126.

    The product of such a step and a level of up to 24 - bits bits is exact, so that no fused
    multiply-add changes a result. Zero gives zero.
    """
    xp = array_namespace(norm)
    exact = divide(norm, levels)
    step = xp.astype(exact, xp.float32, copy=False)
    low = (1 << 24 - bits) - 1
    rounded = _add_bits(step, low, ~low)
    # float64 only: rounding to float32 may have rounded down to a step that is too small.
    short = xp.astype(rounded, exact.dtype, copy=False) < exact
    rounded = xp.where(short, _add_bits(rounded, low + 1, -1), rounded)
    rounded = xp.where(rounded < TINY, xp.full_like(rounded, TINY), rounded)
    return xp.where(norm > 0, rounded, xp.astype(norm, xp.float32, copy=False))


def _add_bits(x: Array, addend: int, mask: int) -> Array:
    """Return the float32 whose bits are ``(bits of x + addend) & mask``."""
    xp = array_namespace(x)
    bits = bitcast(x, xp.int32) + xp.asarray([addend], dtype=xp.int32, device=device(x))
    return bitcast(xp.bitwise_and(bits, xp.asarray([mask], dtype=xp.int32, device=device(x))), xp.float32)
