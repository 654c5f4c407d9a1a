"""`unpack` and `pack`: convert a quantizer's packed codes to levels and signs, and back, on host bytes.

The layout is as in `qcomp.core.numeric.bitplanes`; a code is a level with the sign bit on top. The conversion looks
up bytes in tables and shifts integers of many bytes, one bucket at a time: no loop runs over elements.
"""

from functools import cache

from qcomp.core.numeric.buckets import blocks


def unpack(packed: memoryview, size: int, bits: int, bucket_size: int) -> tuple[bytearray, bytearray]:
    """Return levels and signs of packed codes, without padding.

    A code has 2 to 16 bits. Levels are 16-bit integers in little endian; a sign is 1 for a negative element, else 0.

    Examples
    --------
    >>> levels, negative = unpack(memoryview(bytes.fromhex("01000902")), 4, 4, 8)  # 1, 0, -1, 2
    >>> levels.hex(), negative.hex()
    ('0100000001000200', '00000100')
    """
    low, high, at = bytearray(), bytearray(), 0
    for block in blocks(size, bucket_size):
        nbytes = block.length * bits // 8
        for _ in range(block.rows):
            bucket = packed[at : at + nbytes].tobytes()
            cut = block.length if bits > 8 else nbytes
            low += _split(bucket[:cut], min(bits, 8), planes=bits > 8)[: block.filled]
            if bits > 8:
                high += _split(bucket[cut:], bits - 8, planes=True)[: block.filled]
            at += nbytes
    top, signed = (bits - 1) % 8, high if bits > 8 else low
    rest, negative = signed.translate(_field(0, top)), signed.translate(_field(top, 1))
    levels = bytearray(2 * size)
    levels[::2], levels[1::2] = (low, rest) if bits > 8 else (rest, bytes(size))
    return levels, negative


def pack(levels: memoryview, negative: memoryview, bits: int, bucket_size: int) -> bytearray:
    """Return packed codes, with zeros as padding, the inverse of `unpack`.

    Examples
    --------
    >>> levels = bytes.fromhex("0100000001000200")  # 1, 0, 1, 2
    >>> pack(memoryview(levels), memoryview(bytes([0, 0, 1, 0])), 4, 8).hex()
    '01000902'
    """
    numbers = bytes(levels)
    low, high = numbers[::2], numbers[1::2]
    signs = (negative, (bits - 1) % 8)
    if bits > 8:
        high = _joined([(high, 0), signs])
    else:
        low = _joined([(low, 0), signs])
    packed = bytearray()
    for block in blocks(len(negative), bucket_size):
        for row in range(block.rows):
            start = block.start + row * block.length
            filled = slice(start, start + block.filled)
            packed += _gather(low[filled].ljust(block.length, b"\0"), min(bits, 8), planes=bits > 8)
            if bits > 8:
                packed += _gather(high[filled].ljust(block.length, b"\0"), bits - 8, planes=True)
    return packed


def _split(data: bytes, bits: int, *, planes: bool) -> bytes:
    """Return the codes of a bucket, one per byte, from one-bit planes or from code planes."""
    if 8 % bits == 0 and not planes:
        return b"".join(data.translate(_field(part * bits, bits)) for part in range(8 // bits))
    width = len(data) // bits
    return _joined(
        [
            (
                b"".join(
                    data[plane * width : (plane + 1) * width].translate(_field(part, 1)) for part in range(8)
                ),
                plane,
            )
            for plane in range(bits)
        ]
    )


def _gather(codes: bytes, bits: int, *, planes: bool) -> bytes:
    """Return the bytes of a bucket, the inverse of `_split`."""
    if 8 % bits == 0 and not planes:
        width = len(codes) * bits // 8
        return _joined([(codes[part * width : (part + 1) * width], part * bits) for part in range(8 // bits)])
    width = len(codes) // 8
    ones = [codes.translate(_field(plane, 1)) for plane in range(bits)]
    return b"".join(
        _joined([(one[part * width : (part + 1) * width], part) for part in range(8)]) for one in ones
    )


def _joined(parts: list[tuple[bytes | memoryview, int]]) -> bytes:
    """Return the bitwise OR of the parts, each shifted left by its shift; no bit may leave its byte."""
    total = 0
    for data, shift in parts:
        total |= int.from_bytes(data, "little") << shift
    return total.to_bytes(len(parts[0][0]), "little")


@cache
def _field(first: int, width: int) -> bytes:
    """Return the table that extracts some bits of a byte."""
    return bytes(byte >> first & (1 << width) - 1 for byte in range(256))
