"""Compiled loops of `qcomp.core.coding.planes`: packed codes to levels and signs, and back."""

from __future__ import annotations

import numpy as np

from qcomp.backends.numba_cpu import packing
from qcomp.backends.numba_cpu.jit import Bytes, Codes, Halves, borrow, inline, kernel
from qcomp.backends.numba_cpu.primitives import bucket_length
from qcomp.core.numeric.buckets import padded_size


def unpack(packed: memoryview, size: int, bits: int, bucket_size: int) -> tuple[bytearray, bytearray]:
    """See `qcomp.core.coding.PURE`."""
    levels, negative = bytearray(2 * size), bytearray(size)
    k = np.frombuffer(levels, dtype=np.uint16)
    work = _unpack if bits <= 8 else _unpack_wide
    data = np.frombuffer(packed, dtype=np.uint8)
    work(data, bits, packing.empty_codes(bucket_size, bits), k, np.frombuffer(negative, dtype=np.uint8))
    if not np.little_endian:
        k.byteswap(inplace=True)
    return levels, negative


def pack(levels: memoryview, negative: memoryview, bits: int, bucket_size: int) -> bytearray:
    """See `qcomp.core.coding.PURE`."""
    packed = bytearray(padded_size(len(negative), bucket_size) * bits // 8)
    k = np.frombuffer(levels, dtype="<u2").astype(np.uint16, copy=False)
    signs, data = np.frombuffer(negative, dtype=np.uint8), np.frombuffer(packed, dtype=np.uint8)
    work = _pack if bits <= 8 else _pack_wide
    work(k, signs, bits, packing.empty_codes(bucket_size, bits), data)
    return packed


@inline
def _separate(codes: Codes, shift: int, levels: Halves, negative: Bytes) -> None:
    """Fill levels and signs from codes whose sign is the bit ``shift``."""
    sign = codes.dtype.type(1 << shift)
    mask = codes.dtype.type((1 << shift) - 1)
    for i in range(levels.size):
        levels[i] = codes[i] & mask
        negative[i] = np.uint8(1) if codes[i] & sign else np.uint8(0)


@inline
def _merge(levels: Halves, negative: Bytes, shift: int, codes: Codes) -> None:
    sign, none = codes.dtype.type(1 << shift), codes.dtype.type(0)
    for i in range(levels.size):
        codes[i] = codes.dtype.type(levels[i]) | (sign if negative[i] else none)


def _unpack_buckets(data: Bytes, bits: int, codes: Codes, levels: Halves, negative: Bytes) -> None:
    data, codes, levels, negative = borrow(data), borrow(codes), borrow(levels), borrow(negative)
    at = 0
    for start in range(0, levels.size, codes.size):
        stop = min(start + codes.size, levels.size)
        length = min(codes.size, bucket_length(stop - start))
        packing.unpack(data[at : at + length * bits // 8], bits, codes[:length])
        _separate(codes, bits - 1, levels[start:stop], negative[start:stop])
        at += length * bits // 8


def _pack_buckets(levels: Halves, negative: Bytes, bits: int, codes: Codes, data: Bytes) -> None:
    data, codes, levels, negative = borrow(data), borrow(codes), borrow(levels), borrow(negative)
    at = 0
    for start in range(0, levels.size, codes.size):
        stop = min(start + codes.size, levels.size)
        length = min(codes.size, bucket_length(stop - start))
        _merge(levels[start:stop], negative[start:stop], bits - 1, codes)
        codes[stop - start : length] = 0
        packing.pack(codes[:length], bits, data[at : at + length * bits // 8])
        at += length * bits // 8


_unpack, _unpack_wide = (
    kernel(f"void(u8_in, int64, {codes}, u16, u8)")(_unpack_buckets) for codes in ("u8", "u16")
)
_pack, _pack_wide = (
    kernel(f"void(u16_in, u8_in, int64, {codes}, u8)")(_pack_buckets) for codes in ("u8", "u16")
)
