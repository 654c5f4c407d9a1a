"""`Cast`: half precision on the wire, float16 or bfloat16, rounded to nearest even."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from qcomp.core.compressor import Compressor
from qcomp.core.numeric.arrays import Array, array_namespace, bitcast, device, flush, require_below
from qcomp.core.numeric.random import Key
from qcomp.core.payload import Field, PayloadSpec
from qcomp.core.registry import register
from qcomp.core.traits import Traits


@register
@dataclass(frozen=True)
class Cast(Compressor):
    """C(v) = v rounded to a 16-bit format.

    The conversions use integer arithmetic on the bits of float32. So they give the same bits in every library, even in
    a library without the 16-bit dtype.

    Parameters
    ----------
    dtype : {"bfloat16", "float16"}
        bfloat16 keeps float32's range and 8 significant bits: a contraction with relative error at most 2^-8. float16
        keeps 11 bits from 2^-14 to 65504. Smaller magnitudes have an absolute error of up to 2^-25, and magnitudes of
        65520 or more raise NonFiniteError.

    Notes
    -----
    Sends 16 bits per element, little-endian.

    Examples
    --------
    >>> import numpy as np
    >>> x = np.asarray([1 / 3, -65504.0], dtype=np.float32)
    >>> Cast("float16").decompress(Cast("float16").compress(x), like=x)
    array([ 3.3325195e-01, -6.5504000e+04], dtype=float32)
    """

    name: ClassVar[str] = "cast"

    dtype: Literal["bfloat16", "float16"] = "bfloat16"

    def __post_init__(self) -> None:
        if self.dtype not in ("bfloat16", "float16"):
            raise ValueError(f"dtype is {self.dtype!r}; expected 'bfloat16' or 'float16'")

    @property
    def traits(self) -> Traits:
        """A contraction for bfloat16; float16 has only an absolute bound for small values."""
        # float64 input is rounded twice, first to float32, so the error slightly exceeds 2^-8.
        loss = (2**-8 * (1 + 2**-12)) ** 2
        return Traits(1, delta=1 - loss if self.dtype == "bfloat16" else None, keeps_zero=True)

    @property
    def fields_by_bucket(self) -> bool:
        """True, since elements are independent."""
        return True

    def payload_spec(self, size: int, dtype: str = "float32") -> PayloadSpec:  # noqa: ARG002
        """Return the layout: two bytes per element."""
        return PayloadSpec((Field("halves", "uint8", 2 * size),))

    def encode(self, x: Array, key: Key | None) -> Mapping[str, Array]:  # noqa: ARG002
        """Return the 16-bit values as bytes."""
        xp = array_namespace(x)
        value = flush(xp.astype(x, xp.float32, copy=False))
        if self.dtype == "float16":
            require_below(value, 65520.0, self.spec)  # from there on rounding gives infinity
        code = _to_bfloat16(value) if self.dtype == "bfloat16" else _to_float16(value)
        low = xp.bitwise_and(code, _int32(0xFF, code))
        high = xp.bitwise_and(xp.bitwise_right_shift(code, _int32(8, code)), _int32(0xFF, code))
        both = xp.stack([xp.astype(low, xp.uint8), xp.astype(high, xp.uint8)], axis=1)
        return {"halves": xp.reshape(both, (-1,))}

    def decode(self, parts: Mapping[str, Array], size: int, dtype: Any) -> Array:
        """Return the values of the 16-bit codes."""
        halves = parts["halves"]
        xp = array_namespace(halves)
        both = xp.astype(xp.reshape(halves, (size, 2)), xp.int32)
        code = xp.bitwise_or(both[:, 0], xp.bitwise_left_shift(both[:, 1], _int32(8, both)))
        return xp.astype(self._values(code), dtype, copy=False)

    def _values(self, code: Array) -> Array:
        return _from_bfloat16(code) if self.dtype == "bfloat16" else _from_float16(code)


def _int32(value: int, like: Array) -> Array:
    return array_namespace(like).asarray([value], dtype=array_namespace(like).int32, device=device(like))


def _round_off(bits: Array, count: int) -> Array:
    """Return non-negative integers shifted right by ``count`` bits, rounded to nearest, ties to even."""
    xp = array_namespace(bits)
    odd = xp.bitwise_and(xp.bitwise_right_shift(bits, _int32(count, bits)), _int32(1, bits))
    return xp.bitwise_right_shift(bits + odd + _int32((1 << count - 1) - 1, bits), _int32(count, bits))


def _split_sign(x: Array) -> tuple[Array, Array]:
    """Return the bits of the magnitude, and the sign bit at position 15, both int32."""
    xp = array_namespace(x)
    bits = bitcast(x, xp.int32)
    sign = xp.where(bits < 0, _int32(0x8000, bits), _int32(0, bits))
    return xp.bitwise_and(bits, _int32(0x7FFFFFFF, bits)), sign


def _to_bfloat16(x: Array) -> Array:
    magnitude, sign = _split_sign(x)
    return _round_off(magnitude, 16) + sign


def _from_bfloat16(code: Array) -> Array:
    xp = array_namespace(code)
    return bitcast(xp.bitwise_left_shift(code, _int32(16, code)), xp.float32)


def _to_float16(x: Array) -> Array:
    xp = array_namespace(x)
    magnitude, sign = _split_sign(x)
    normal = _round_off(magnitude, 13) - _int32((127 - 15) << 10, magnitude)
    # Below 2^-14 the code counts multiples of 2^-24; a count of 1024 is the code of the smallest normal number.
    small = xp.abs(x) < 2.0**-14
    subnormal = xp.round(xp.where(small, xp.abs(x), xp.zeros_like(x)) * 2.0**24)
    code = xp.where(small, xp.astype(subnormal, xp.int32), normal)
    # Traced values have not been checked: from 65520 on they become infinity.
    infinity = _int32(0x7C00, code)
    return xp.where(code > infinity, infinity, code) + sign


def _from_float16(code: Array) -> Array:
    xp = array_namespace(code)
    magnitude = xp.bitwise_and(code, _int32(0x7FFF, code))
    bits = xp.bitwise_left_shift(magnitude, _int32(13, code)) + _int32((127 - 15) << 23, code)
    normal = bitcast(bits, xp.float32)
    small = xp.astype(magnitude, xp.float32) * 2.0**-24
    value = xp.where(magnitude < _int32(0x400, code), small, normal)
    value = xp.where(magnitude < _int32(0x7C00, code), value, xp.full_like(value, float("inf")))
    return xp.where(code >= _int32(0x8000, code), -value, value)
