"""Damaged payloads and messages: fields of their layouts get values that are likely to break a reader."""

import struct
import zlib
from functools import cache

import numpy as np

import qcomp
from qcomp.core.numeric.arrays import itemsize

NUMBERS = (
    0,
    1,
    2,
    7,
    8,
    255,
    1 << 16,
    (1 << 31) - 1,
    1 << 31,
    (1 << 32) - 1,
    1 << 60,
    (1 << 63) - 1,
    (1 << 64) - 1,
)
FLOATS = np.array([0.0, -0.0, 1e-45, 1e-38, 1.0, -1.0, 2.0**100, 3e38, np.inf, -np.inf, np.nan])
BYTES = (0, 1, 0x55, 0x7F, 0x80, 0xAA, 0xFE, 0xFF)


def vectors_of(size, rng):
    """Return a vector: dense, sparse, all zero, or with very different magnitudes."""
    x = rng.standard_normal(size).astype(np.float32)
    kind = rng.integers(4)
    if kind == 1:
        x[rng.random(size) < 0.9] = 0
    elif kind == 2:
        x[:] = 0
    elif kind == 3:
        x *= np.float32(2) ** rng.integers(-120, 12, size)  # float16 ends at 2^16
    return x


@cache
def sizes_of(compressor):
    """Return sizes around bucket boundaries, of a few hundred elements, so that many inputs fit into a second."""
    bucket = min(compressor.traits.bucket_size, 130)
    return (1, bucket + 1) if bucket < 8 else (1, bucket - 1, bucket, bucket + 9)


def payload_of(compressor, size, rng):
    """Return one of a few payloads made by a compressor."""
    return made(compressor, size, int(rng.integers(8)))


@cache
def made(compressor, size, number):
    vector = vectors_of(size, np.random.default_rng(number))
    return compressor.compress(vector, key=qcomp.Key(seed=number))


def mutated(data, fields, rng):
    """Return damaged bytes: some changes in fields of the layout or anywhere, and sometimes another length.

    ``fields`` has the start, the end and the dtype of each part.
    """
    data = bytearray(data)
    for _ in range(1 + rng.integers(4)):
        kind = rng.integers(7)
        if kind == 0 or not data:
            change_length(data, rng)
            continue
        at = int(rng.integers(len(data)))
        if kind == 1:
            data[at] ^= 1 << int(rng.integers(8))
        elif kind == 2:
            data[at] = int(rng.choice(BYTES))
        elif kind == 3:
            end = min(len(data), at + int(rng.integers(1, 65)))
            data[at:end] = bytes([int(rng.choice(BYTES))]) * (end - at)
        elif kind == 4:
            source = int(rng.integers(len(data)))
            part = data[source : source + int(rng.integers(1, 33))]
            data[at : at + len(part)] = part[: len(data) - at]
        elif fields:
            change_field(data, fields[int(rng.integers(len(fields)))], rng)
    return bytes(data)


def change_length(data, rng):
    end = int(
        rng.choice([0, 1, 4, 7, 8, len(data) // 2, max(len(data) - 1, 0), len(data) + 1, len(data) + 8])
    )
    data.extend(rng.bytes(max(end - len(data), 0)))
    del data[end:]


def change_field(data, field, rng):
    start, end, dtype = field
    item = itemsize(dtype)
    end = min(end, len(data))
    if end - start < item:
        return
    at = start + int(rng.integers((end - start) // item)) * item
    if dtype.startswith("float") and item >= 4:
        value = rng.choice(FLOATS).astype(dtype).tobytes()
    elif dtype == "uint8" and rng.integers(2):
        value = rng.bytes(int(rng.integers(1, end - at + 1)))  # a run of codes
    else:
        value = (int(rng.choice(NUMBERS)) % (1 << 8 * item)).to_bytes(item, "little")
    data[at : at + len(value)] = value


def fields_of(spec):
    """Return the start, the end and the dtype of each field of a layout."""
    return tuple((part.start, part.stop, dtype) for _, dtype, part in spec.places if part.stop > part.start)


def with_checksum(blob):
    """Return a serialized payload with a corrected checksum, so that later checks are reached."""
    if len(blob) < 28:
        return blob
    (length,) = struct.unpack_from("<H", blob, 6)
    start = 24 + length
    if len(blob) < start + 4:
        return blob
    checksum = zlib.crc32(blob[start + 4 :], zlib.crc32(blob[:start]))
    return blob[:start] + struct.pack("<I", checksum) + blob[start + 4 :]
