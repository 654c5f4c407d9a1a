"""Packs the codes of one bucket, of 1 to 16 bits each, into the planes of `qcomp.core.numeric.bitplanes`, and back."""

from __future__ import annotations

import numpy as np

from qcomp.backends.numba_cpu.jit import Bytes, Codes, inline
from qcomp.backends.numba_cpu.primitives import bucket_length

B = np.uint8


def empty_codes(count: int, bits: int) -> Codes:
    """Return a buffer for codes of this many bits, with one or two bytes per code."""
    return np.empty(count, dtype=np.uint8) if bits <= 8 else np.empty(count, dtype=np.uint16)


@inline
def codes_and_scales(size: int, held: int, length: int, bits: int) -> tuple[int, int]:
    """Return where a payload's codes end and its scales begin, if ``held`` elements fill a bucket of ``length``."""
    full = size // held
    rest = size - full * held
    codes_end = (full * length + (bucket_length(rest) if rest > 0 else 0)) * bits // 8
    return codes_end, (codes_end + 3) // 4 * 4


@inline
def pack(codes: Codes, bits: int, data: Bytes) -> None:
    """Pack codes, of one or two bytes each, into len(codes) * bits / 8 bytes."""
    if bits == 8:
        _copy(codes, data)
    elif bits == 4:
        _join2(codes, data)
    elif bits == 2:
        _join4(codes, data)
    else:
        width = codes.size // 8
        for plane in range(bits):
            target = data[plane * width : (plane + 1) * width]
            target[:] = B(0)
            for part in range(8):
                _collect(codes[part * width : (part + 1) * width], plane, part, target)


@inline
def unpack(data: Bytes, bits: int, codes: Codes) -> None:
    """Unpack bytes into codes of one or two bytes each, the inverse of `pack`."""
    if bits == 8:
        _copy(data, codes)
    elif bits == 4:
        _split2(data, codes)
    elif bits == 2:
        _split4(data, codes)
    else:
        width = codes.size // 8
        for part in range(8):
            target = codes[part * width : (part + 1) * width]
            target[:] = B(0)
            for plane in range(bits):
                _collect(data[plane * width : (plane + 1) * width], part, plane, target)


@inline
def _copy(source: Codes, target: Codes) -> None:
    for j in range(target.size):
        target[j] = source[j]


@inline
def _join2(codes: Codes, data: Bytes) -> None:
    lower = codes[: data.size]
    upper = codes[data.size :]
    for j in range(data.size):
        data[j] = lower[j] | upper[j] << B(4)


@inline
def _join4(codes: Codes, data: Bytes) -> None:
    width = data.size
    c0, c1, c2, c3 = codes[:width], codes[width : 2 * width], codes[2 * width : 3 * width], codes[3 * width :]
    for j in range(data.size):
        data[j] = c0[j] | c1[j] << B(2) | c2[j] << B(4) | c3[j] << B(6)


@inline
def _split2(data: Bytes, codes: Codes) -> None:
    lower = codes[: data.size]
    upper = codes[data.size :]
    for j in range(data.size):
        lower[j] = data[j] & B(15)
        upper[j] = data[j] >> B(4)


@inline
def _split4(data: Bytes, codes: Codes) -> None:
    width = data.size
    c0, c1, c2, c3 = codes[:width], codes[width : 2 * width], codes[2 * width : 3 * width], codes[3 * width :]
    for j in range(width):
        c0[j] = data[j] & B(3)
        c1[j] = data[j] >> B(2) & B(3)
        c2[j] = data[j] >> B(4) & B(3)
        c3[j] = data[j] >> B(6)


@inline
def _collect(source: Codes, come: int, go: int, target: Codes) -> None:
    """Copy bit ``come`` of every source element to bit ``go`` of the target.

    It uses masks, since numba shifts by a variable in 64 bits, which would use only an eighth of a vector's lanes.
    """
    from_bit, to_bit, none = source.dtype.type(1 << come), target.dtype.type(1 << go), target.dtype.type(0)
    for j in range(target.size):
        target[j] |= to_bit if source[j] & from_bit else none
