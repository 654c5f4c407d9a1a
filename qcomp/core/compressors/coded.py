"""`LevelCoder`: shortens payloads of signs and levels, on the host."""

from dataclasses import dataclass, replace
from functools import lru_cache

from qcomp.core import coding
from qcomp.core.errors import PayloadError
from qcomp.core.numeric.arrays import Array, from_host_bytes, host_bytes, is_traced
from qcomp.core.payload import Field, PayloadSpec
from qcomp.core.traits import AnyCompressor

_STORED, _CODED = 0, 1
"""How the codes of a payload are sent: unchanged if coding would not shorten them, else coded."""

_ONE_UP = bytes([*range(1, 256), 0])
_ONE_DOWN = bytes([255, *range(255)])
"""Tables that raise and lower the low bytes of levels by one; a compressor with lowest level 1 has at most 255
levels."""


@dataclass(frozen=True)
class LevelCoder:
    """Codes the levels of a quantizer, unless coding would not shorten the payload.

    Plain payloads have the fields "codes", packed, and "step", one per bucket. A code is a level minus the lowest
    level, with the sign bit on top. The lowest level is 0, or 1 if elements of the lowest level have a sign too. A
    shortened payload holds the steps, a byte that says how the codes are sent, and the codes. It is at most a byte
    longer than the plain payload. Padding is not coded.
    """

    plain: AnyCompressor
    coding: str
    largest: int
    bucket_size: int
    lowest: int = 0

    def around(self, plain: AnyCompressor) -> "LevelCoder":
        """Return a coder like this one for a compressor with the same payloads."""
        return replace(self, plain=plain)

    def payload_spec(self, size: int) -> PayloadSpec:
        """Return the layout of the longest payload of ``size`` elements."""
        return _layout(self.plain.payload_spec(size))

    def shorten(self, data: Array, size: int) -> Array:
        """Return the shortened data of a payload of the plain compressor."""
        if is_traced(data):
            raise TypeError(
                f"coding is {self.coding!r}, with which the length of a payload depends on the values; expected "
                "coding='fixed', since a compiler such as jax.jit needs a fixed length"
            )
        parts = self.plain.payload_spec(size).split(data)
        method, codes = _STORED, host_bytes(parts["codes"])
        if size:
            levels, negative = coding.unpack(codes, size=size, bits=self._bits, bucket_size=self.bucket_size)
            if self.lowest:
                levels[::2] = levels[::2].translate(_ONE_UP)
            coded = coding.encode(self.coding, levels, negative, largest=self.largest)
            if len(coded) < len(codes):
                method, codes = _CODED, coded
        return from_host_bytes(host_bytes(parts["step"]) + bytes([method]) + codes, data)

    def restore(self, data: Array, size: int) -> Array:
        """Return the data of the plain payload; raises PayloadError unless the bytes hold ``size`` elements."""
        spec = self.plain.payload_spec(size)
        start = self.payload_spec(size).shortest
        raw = host_bytes(data)
        steps, method, codes = raw[: start - 1], raw[start - 1], raw[start:]
        packed: bytes | bytearray = codes
        if method == _STORED:
            if len(codes) != spec.fields[0].size:
                raise PayloadError(
                    f"the payload has {len(codes)} bytes of uncoded codes; expected {spec.fields[0].size}"
                )
        elif method == _CODED and size:
            levels, negative = coding.decode(self.coding, codes, size=size, largest=self.largest)
            if self.lowest:
                lower = levels[::2]
                if 0 in lower:
                    raise PayloadError("the codes have a level 0; expected levels from 1 on")
                levels[::2] = lower.translate(_ONE_DOWN)
            packed = coding.pack(levels, negative, bits=self._bits, bucket_size=self.bucket_size)
        else:
            raise PayloadError(f"the payload has codes of kind {method}; expected {_STORED} or {_CODED}")
        return spec.join({"codes": from_host_bytes(packed, data), "step": from_host_bytes(steps, data)})

    @property
    def _bits(self) -> int:
        return (self.largest - self.lowest).bit_length() + 1


@lru_cache(1024)
def _layout(plain: PayloadSpec) -> PayloadSpec:
    codes, step = plain.fields
    return PayloadSpec((step, Field("method", "uint8", 1), codes), variable_length=True)
