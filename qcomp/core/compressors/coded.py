"""Payloads of signs and levels, shortened by a coder on the host."""

from dataclasses import dataclass, replace
from functools import lru_cache

from qcomp.core import bitplanes, coding
from qcomp.core.arrays import (
    Array,
    array_namespace,
    concat,
    device,
    from_host_bytes,
    host_bytes,
    is_traced,
)
from qcomp.core.buckets import blocks
from qcomp.core.compressor import Compressor
from qcomp.core.errors import PayloadError
from qcomp.core.payload import Field, PayloadSpec

__all__ = ["LevelCoder"]

_STORED, _CODED = 0, 1
"""How the codes of a payload are sent: as they were, because coding would not shorten them, or coded."""


@dataclass(frozen=True)
class LevelCoder:
    """Codes the levels of a quantizer, and leaves those payloads as they are that would not be shorter.

    Parameters
    ----------
    plain : Compressor
        Whose payloads have the fields "codes", packed, and "step", one a bucket.
    coding : {"elias", "range"}
        See `qcomp.core.coding`.
    largest : int
        The largest level. A code is a level with the sign bit on top.
    bucket_size : int

    Notes
    -----
    A payload is the steps, a byte that says how the codes are sent, and these: at most a byte longer than a plain one.
    Padding is not coded.
    """

    plain: Compressor
    coding: str
    largest: int
    bucket_size: int

    def around(self, plain: Compressor) -> "LevelCoder":
        """Return this coder for another compressor with the same payloads."""
        return replace(self, plain=plain)

    def payload_spec(self, size: int) -> PayloadSpec:
        """Return the layout of the longest payload of ``size`` elements."""
        return _layout(self.plain.payload_spec(size))

    def shorten(self, data: Array, size: int) -> Array:
        """Return the data of a payload from that of the plain compressor."""
        if is_traced(data):
            raise TypeError(
                f"coding is {self.coding!r}: how long a payload is depends on its values, and a compiler traces, when "
                "there are none; expected coding='fixed'"
            )
        parts = self.plain.payload_spec(size).split(data)
        method, codes = _STORED, host_bytes(parts["codes"])
        if size:
            levels, negative = self._unpack(parts["codes"], size)
            coded = coding.encode(
                self.coding, levels, negative, bucket_size=self.bucket_size, largest=self.largest
            )
            if len(coded) < len(codes):
                method, codes = _CODED, coded
        return from_host_bytes(host_bytes(parts["step"]) + bytes([method]) + codes, data)

    def restore(self, data: Array, size: int) -> Array:
        """Return the data of the plain payload.

        Raises
        ------
        PayloadError
            If the bytes are not those of a payload of so many elements.
        """
        spec = self.plain.payload_spec(size)
        start = self.payload_spec(size).shortest
        raw = host_bytes(data)
        steps, method, codes = raw[: start - 1], raw[start - 1], raw[start:]
        if method == _STORED:
            if len(codes) != spec.fields[0].size:
                raise PayloadError(
                    f"the payload has {len(codes)} bytes of uncoded codes; expected {spec.fields[0].size}"
                )
            packed = from_host_bytes(codes, data)
        elif method == _CODED and size:
            levels, negative = coding.decode(
                self.coding, codes, size=size, bucket_size=self.bucket_size, largest=self.largest
            )
            packed = self._pack(from_host_bytes(levels, data), from_host_bytes(negative, data))
        else:
            raise PayloadError(f"the payload has codes of kind {method}; expected {_STORED} or {_CODED}")
        return spec.join({"codes": packed, "step": from_host_bytes(steps, data)})

    @property
    def _bits(self) -> int:
        return self.largest.bit_length() + 1

    def _unpack(self, packed: Array, size: int) -> tuple[bytes, bytes]:
        """Return the levels, 16 bits each, and whether they are negative, a byte each, of packed codes."""
        xp = array_namespace(packed)
        parts, offset = [], 0
        for block in blocks(size, self.bucket_size):
            nbytes = block.rows * block.length * self._bits // 8
            rows = xp.reshape(packed[offset : offset + nbytes], (block.rows, -1))
            parts.append(block.flat(bitplanes.unpack(rows, self._bits)))
            offset += nbytes
        codes = concat(parts)

        def number(value: int) -> Array:
            return xp.asarray(value, dtype=codes.dtype, device=device(codes))

        level = xp.bitwise_and(codes, number((1 << self._bits - 1) - 1))
        negative = xp.bitwise_right_shift(codes, number(self._bits - 1))
        low, high = level, xp.zeros_like(level)
        if self._bits > 8:
            low = xp.bitwise_and(level, number(0xFF))
            high = xp.bitwise_right_shift(level, number(8))
        halves = [xp.astype(half, xp.uint8, copy=False) for half in (low, high)]
        return host_bytes(xp.stack(halves, axis=1)), host_bytes(xp.astype(negative, xp.uint8, copy=False))

    def _pack(self, levels: Array, negative: Array) -> Array:
        """Return packed codes, the inverse of `_unpack`."""
        xp = array_namespace(levels)
        dtype = xp.uint8 if self._bits <= 8 else xp.int32

        def shifted(values: Array, count: int) -> Array:
            shift = xp.asarray(count, dtype=dtype, device=device(levels))
            return xp.bitwise_left_shift(xp.astype(values, dtype, copy=False), shift)

        pairs = xp.reshape(levels, (-1, 2))
        codes = xp.astype(pairs[:, 0], dtype, copy=False) + shifted(negative, self._bits - 1)
        if self._bits > 8:
            codes = codes + shifted(pairs[:, 1], 8)
        return concat(
            [
                xp.reshape(bitplanes.pack(block.read(codes), self._bits), (-1,))
                for block in blocks(codes.shape[0], self.bucket_size)
            ]
        )


@lru_cache(1024)
def _layout(plain: PayloadSpec) -> PayloadSpec:
    codes, step = plain.fields
    return PayloadSpec((step, Field("method", "uint8", 1), codes), variable_length=True)
