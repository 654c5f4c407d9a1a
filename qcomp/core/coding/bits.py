"""`BitWriter` and `BitReader`: bits in bytes, the most significant bit first, the last byte padded with zeros.

`numbers` and `little_endian` convert bytes to 16-bit numbers and back, in little endian on every machine.
"""

from __future__ import annotations

import sys
from array import array

from qcomp.core.errors import PayloadError

_FLUSH = 256
"""The most bits kept in an integer; with more, the time of writing would grow quadratically."""


class BitWriter:
    """Collects bits.

    Examples
    --------
    >>> bits = BitWriter()
    >>> bits.put(0b101, 3)
    >>> bits.put(1, 6)
    >>> bits.finish().hex()
    'a080'
    """

    def __init__(self) -> None:
        self._bytes = bytearray()
        self._pending = self._count = 0

    def put(self, value: int, length: int) -> None:
        """Append a value of at most ``length`` bits, as ``length`` bits."""
        self._pending = self._pending << length | value
        self._count += length
        if self._count >= _FLUSH:
            whole, self._count = divmod(self._count, 8)
            self._bytes += (self._pending >> self._count).to_bytes(whole, "big")
            self._pending &= (1 << self._count) - 1

    def finish(self) -> bytes:
        """Return all bytes. No method may be called afterwards."""
        padding = -self._count % 8
        return bytes(self._bytes) + (self._pending << padding).to_bytes((self._count + padding) // 8, "big")


class BitReader:
    """Reads the bits of a buffer.

    Examples
    --------
    >>> bits = BitReader(bytes.fromhex("a080"))
    >>> bits.take(3), bits.take(6)
    (5, 1)
    >>> bits.finish()
    """

    def __init__(self, data: bytes | bytearray | memoryview) -> None:
        self._data = memoryview(data).cast("B")
        self._at = 0

    def take(self, length: int) -> int:
        """Return the next bits as an integer; raises PayloadError if fewer are left."""
        start, self._at = self._at, self._at + length
        if self._at > 8 * len(self._data):
            raise PayloadError(
                f"the coded bits end after {len(self._data)} bytes, in the middle of a codeword"
            )
        part = int.from_bytes(self._data[start // 8 : -(-self._at // 8)], "big")
        return part >> -self._at % 8 & (1 << length) - 1

    def align(self) -> int:
        """Skip the padding of the last byte, and return the next index; raises PayloadError if the padding is not 0."""
        if self.take(-self._at % 8):
            raise PayloadError("the coded bits are padded with ones; expected zeros")
        return self._at // 8

    def finish(self) -> None:
        """Raise PayloadError unless all bits were read except the padding of the last byte."""
        end = self.align()
        if end != len(self._data):
            raise PayloadError(
                f"the code ends after {end} bytes; expected it to fill all {len(self._data)} bytes"
            )


def numbers(data: memoryview) -> array[int]:
    """Return the 16-bit numbers of a buffer.

    Examples
    --------
    >>> numbers(memoryview(bytes([1, 0, 0, 1])))
    array('H', [1, 256])
    """
    values = array("H")
    values.frombytes(data)
    if sys.byteorder == "big":
        values.byteswap()
    return values


def little_endian(values: array[int]) -> bytearray:
    """Return the bytes of 16-bit numbers, the inverse of `numbers`; overwrites the numbers."""
    if sys.byteorder == "big":
        values.byteswap()
    return bytearray(values)
