"""`Payload`, a compressed vector in one uint8 buffer; the buffer's layout; and the serialized form of payloads."""

import struct
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from qcomp.core.errors import PayloadError
from qcomp.core.numeric.arrays import (
    Array,
    array_namespace,
    bytes_of,
    concat,
    device,
    from_bytes_of,
    from_host_bytes,
    host_bytes,
    itemsize,
)

_MAGIC = b"QCMP"
_VERSION = 1
_HEADER = struct.Struct("<4sBBHQQ")
"""Magic, version, dtype, length of the compressor's spec, number of elements, length of the data.

After the header come the spec, a CRC-32 and the data.
"""
_CHECKSUM = struct.Struct("<I")
_DTYPES = ("float32", "float64")
LONGEST_SPEC = 1000
"""The most characters of a spec string that is read: spec strings arrive in files and messages, and can be nested."""


class Field(NamedTuple):
    """One part of a payload: a one-dimensional array of ``size`` elements of a dtype."""

    name: str
    dtype: str
    size: int


@dataclass(frozen=True)
class PayloadSpec:
    """The layout of a payload: its fields in order, each aligned to its item size.

    Parameters
    ----------
    fields : tuple of Field
        The parts, in the order in which they lie in the buffer.
    variable_length : bool
        Whether the last field, which must then be uint8, may be shorter than its ``size``.

    Examples
    --------
    >>> PayloadSpec((Field("codes", "uint8", 5), Field("scales", "float32", 1))).nbytes
    12
    """

    fields: tuple[Field, ...]
    variable_length: bool = False

    def __post_init__(self) -> None:
        if self.variable_length and (not self.fields or self.fields[-1].dtype != "uint8"):
            raise ValueError(
                f"fields are {self.fields}; expected dtype uint8 for the last, whose length varies"
            )

    @cached_property
    def _offsets(self) -> tuple[int, ...]:
        """Return the offset of each field, then the end of the buffer."""
        offsets, end = [], 0
        for field in self.fields:
            size = itemsize(field.dtype)
            start = -(-end // size) * size if field.size else end
            offsets.append(start)
            end = start + field.size * size
        return (*offsets, end)

    @cached_property
    def nbytes(self) -> int:
        """Bytes of the buffer; if the length varies, of the longest buffer."""
        return self._offsets[-1]

    @cached_property
    def shortest(self) -> int:
        """Bytes of the shortest buffer."""
        return self._offsets[-2] if self.variable_length else self.nbytes

    def join(self, parts: Mapping[str, Array]) -> Array:
        """Return the buffer of these fields, uint8 of shape (nbytes,), or shorter if the length varies.

        Parameters
        ----------
        parts : mapping of str to array
            The fields by name.
        """
        if not self.fields:
            raise ValueError("the layout has no fields; expected at least one, which may have size 0")
        pieces, end = [], 0
        for field, start in zip(self.fields, self._offsets, strict=False):
            part = parts[field.name]
            if start > end:
                xp = array_namespace(part)
                pieces.append(xp.zeros((start - end,), dtype=xp.uint8, device=device(part)))
            pieces.append(bytes_of(part))
            end = start + pieces[-1].shape[0]
        return concat(pieces)

    def check(self, data: Array) -> None:
        """Raise `PayloadError` unless a buffer has the size of this layout.

        Parameters
        ----------
        data : array of uint8
            The buffer.
        """
        if len(data.shape) != 1 or not self.admits(data.shape[0]):
            expected = (
                f"({self.shortest},) to ({self.nbytes},)" if self.variable_length else f"({self.nbytes},)"
            )
            raise PayloadError(f"the payload has shape {tuple(data.shape)}; expected {expected}")

    def admits(self, nbytes: int) -> bool:
        """Return whether a buffer of this layout may have this many bytes.

        Parameters
        ----------
        nbytes : int
            Bytes of a buffer.
        """
        return self.shortest <= nbytes <= self.nbytes

    def split(self, data: Array) -> dict[str, Array]:
        """Return the fields of a buffer, the inverse of `join`.

        Parameters
        ----------
        data : array of uint8
            The buffer.
        """
        self.check(data)
        return {name: from_bytes_of(data[part], dtype) for name, dtype, part in self.places}

    @cached_property
    def places(self) -> tuple[tuple[str, str, slice], ...]:
        """The name and the dtype of each field, and where its bytes are in the buffer."""
        pairs = zip(self.fields, self._offsets, strict=False)
        return tuple((f.name, f.dtype, slice(at, at + f.size * itemsize(f.dtype))) for f, at in pairs)


def _unknown(spec: str) -> Any:
    raise ValueError(f"no compressors are known, so {spec!r} cannot be made")


_maker: Callable[[str], Any] = _unknown


def make_compressors_with(maker: Callable[[str], Any]) -> None:
    """Let ``maker`` make the compressor of a spec string, for `Payload.from_bytes`."""
    global _maker  # noqa: PLW0603
    _maker = maker


@dataclass(frozen=True, eq=False)
class Payload:
    """A compressed vector.

    Parameters
    ----------
    compressor : str
        The spec string of the compressor that made the payload, such as ``"sign:bucket_size=4096,scale=l1"``.
    size : int
        Number of compressed elements.
    dtype : str
        Name of the dtype of the computation: ``"float64"`` for float64 input, else ``"float32"``.
    data : array of uint8, shape (nbytes,)
        The bytes on the wire, on the device of the compressed vector.

    Examples
    --------
    >>> import numpy as np, qcomp
    >>> x = np.asarray([3.0, -1.0], dtype=np.float32)
    >>> payload = qcomp.ScaledSign(bucket_size=8).compress(x)
    >>> payload.nbytes  # a byte of signs, padding to 4, a float32 scale
    8
    >>> blob = payload.to_bytes()
    >>> back = qcomp.Payload.from_bytes(blob, like=x)
    >>> qcomp.compressor(back.compressor).decompress(back, like=x)
    array([ 2., -2.], dtype=float32)
    """

    compressor: str
    size: int
    dtype: str
    data: Array

    @property
    def nbytes(self) -> int:
        """Bytes on the wire."""
        return int(self.data.shape[0])

    def to_bytes(self) -> bytes:
        """Return the payload as self-describing bytes with a checksum, for files and other transports.

        The bytes are a header of 24 bytes (magic, version, dtype, lengths), the compressor's spec string, a CRC-32 of
        everything else, and the data.

        Raises
        ------
        ValueError
            If the spec string has more than 1000 characters, which `from_bytes` refuses.
        """
        if len(self.compressor) > LONGEST_SPEC:
            raise ValueError(
                f"compressor has a spec string of {len(self.compressor)} characters; at most {LONGEST_SPEC} are read: "
                "nest fewer compressors"
            )
        spec = self.compressor.encode()
        data = host_bytes(self.data)
        header = _HEADER.pack(_MAGIC, _VERSION, _DTYPES.index(self.dtype), len(spec), self.size, len(data))
        return header + spec + _CHECKSUM.pack(zlib.crc32(data, zlib.crc32(header + spec))) + data

    @classmethod
    def from_bytes(cls, blob: bytes | bytearray | memoryview, *, like: Array) -> "Payload":
        """Return the payload from its bytes, in the library and on the device of ``like``.

        Parameters
        ----------
        blob : bytes-like
            Made by `to_bytes`.
        like : array
            Gives the library and the device of the payload.

        Raises
        ------
        PayloadError
            If the bytes are truncated, too long, damaged, of an unknown version, or contradict themselves. Wrong
            lengths in the bytes cannot cause large allocations.
        """
        view = memoryview(blob).cast("B")
        if len(view) < _HEADER.size:
            raise PayloadError(f"the payload has {len(view)} bytes; a header has {_HEADER.size}")
        magic, version, dtype, spec_length, size, data_length = _HEADER.unpack_from(view)
        if magic != _MAGIC:
            raise PayloadError(f"the payload starts with {magic!r}; expected {_MAGIC!r}")
        if version != _VERSION:
            raise PayloadError(f"the payload has version {version}; this release reads version {_VERSION}")
        start = _HEADER.size + spec_length + _CHECKSUM.size
        if len(view) != start + data_length:
            raise PayloadError(
                f"the payload has {len(view)} bytes; its header announces {start + data_length}"
            )
        described, data = view[: start - _CHECKSUM.size], view[start:]
        (checksum,) = _CHECKSUM.unpack_from(view, start - _CHECKSUM.size)
        if zlib.crc32(data, zlib.crc32(described)) != checksum:
            raise PayloadError("the payload is damaged: its checksum does not match")
        if dtype >= len(_DTYPES):
            raise PayloadError(f"the payload has dtype number {dtype}; expected 0 to {len(_DTYPES) - 1}")
        try:
            made_by = _maker(bytes(described[_HEADER.size :]).decode())
            expected = made_by.payload_spec(size, _DTYPES[dtype])
        except (ValueError, TypeError) as error:
            raise PayloadError(f"the payload names a compressor that cannot be made: {error}") from error
        if made_by.for_shape((size,)) != made_by:
            raise PayloadError(
                f"the payload names {made_by}, which does not itself compress vectors; expected "
                f"{made_by.for_shape((size,))}"
            )
        if not expected.admits(data_length):
            most = "at most " if expected.variable_length else ""
            raise PayloadError(
                f"the payload has {data_length} bytes of data; {made_by} makes {most}{expected.nbytes} from {size} "
                "elements"
            )
        return cls(made_by.spec, size, _DTYPES[dtype], from_host_bytes(data, like))
