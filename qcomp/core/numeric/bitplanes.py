"""`pack` and `unpack`: small integer codes as bytes, plane by plane.

In a bucket of B elements, W = B/8, bit p of byte j belongs to element p*W + j. Codes of b = 1, 2, 4 or 8 bits are
packed as code planes: code q of byte j belongs to element q*(B*b/8) + j. Codes of other widths, up to 16, are packed as
b one-bit planes; plane q holds bit q of all codes. Byte j of a plane holds only elements whose index modulo the plane's
number of bytes is j. So SIMD lanes, GPU threads, and the shifts and sums below can all make the same bytes.
"""

from qcomp.core.numeric.arrays import Array, array_namespace, device


def _shifts(like: Array, planes: int, width: int) -> Array:
    """Return the shift of each plane, shaped to broadcast over (rows, planes, bytes), in the dtype of the codes."""
    xp = array_namespace(like)
    steps = xp.arange(0, planes * width, width, dtype=like.dtype, device=device(like))
    return xp.reshape(steps, (1, planes, 1))


def pack(codes: Array, bits: int) -> Array:
    """Pack codes below 2**bits, of shape (rows, B), into uint8 of shape (rows, B*bits/8).

    Codes of up to 8 bits are uint8, wider codes int32.
    """
    xp = array_namespace(codes)
    rows, length = codes.shape
    if bits == 8:
        return codes
    if 8 % bits == 0:
        planes = xp.reshape(codes, (rows, 8 // bits, length * bits // 8))
        shifted = xp.bitwise_left_shift(planes, _shifts(codes, 8 // bits, bits))
        return xp.sum(shifted, axis=1, dtype=xp.uint8)
    if bits > 8:  # byte by byte, since int32 planes would take four times the memory
        low = xp.bitwise_and(codes, xp.asarray(0xFF, dtype=codes.dtype, device=device(codes)))
        high = xp.bitwise_right_shift(codes, xp.asarray(8, dtype=codes.dtype, device=device(codes)))
        halves = ((low, 8), (high, bits - 8))
        return xp.concat([_pack_planes(xp.astype(half, xp.uint8), width) for half, width in halves], axis=1)
    return _pack_planes(codes, bits)


def _pack_planes(codes: Array, bits: int) -> Array:
    """Pack uint8 codes as one-bit planes."""
    xp = array_namespace(codes)
    rows, length = codes.shape
    one = xp.asarray(1, dtype=codes.dtype, device=device(codes))
    single = xp.bitwise_and(xp.bitwise_right_shift(codes[:, None, :], _shifts(codes, bits, 1)), one)
    packed = pack(xp.reshape(single, (rows * bits, length)), 1)
    return xp.reshape(packed, (rows, bits * (length // 8)))


def unpack(data: Array, bits: int) -> Array:
    """Unpack uint8 of shape (rows, B*bits/8) into codes of shape (rows, B), the inverse of `pack`."""
    xp = array_namespace(data)
    rows, size = data.shape
    if bits == 8:
        return data
    if 8 % bits == 0:
        mask = xp.asarray((1 << bits) - 1, dtype=xp.uint8, device=device(data))
        shifted = xp.bitwise_right_shift(data[:, None, :], _shifts(data, 8 // bits, bits))
        return xp.reshape(xp.bitwise_and(shifted, mask), (rows, size * 8 // bits))
    if bits > 8:
        cut = 8 * (size // bits)
        low = xp.astype(_unpack_planes(data[:, :cut], 8), xp.int32)
        high = xp.astype(_unpack_planes(data[:, cut:], bits - 8), xp.int32)
        return low + xp.bitwise_left_shift(high, xp.asarray(8, dtype=xp.int32, device=device(data)))
    return _unpack_planes(data, bits)


def _unpack_planes(data: Array, bits: int) -> Array:
    """Unpack one-bit planes into uint8 codes, the inverse of `_pack_planes`."""
    xp = array_namespace(data)
    rows, size = data.shape
    single = xp.reshape(unpack(xp.reshape(data, (rows * bits, size // bits)), 1), (rows, bits, -1))
    return xp.sum(xp.bitwise_left_shift(single, _shifts(single, bits, 1)), axis=1, dtype=xp.uint8)
