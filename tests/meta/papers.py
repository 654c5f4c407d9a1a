"""Correct compressors after published designs, which draw, cut and code in ways that qcomp itself does not."""

import hashlib
import math
import os
import struct
import time
import zlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import ClassVar

import numpy as np

import qcomp
from qcomp.extend import BucketedCompressor, Field, PayloadSpec, draws16

from .strangers import OnHost, flush, rows_of

GOLDEN = 0x9E3779B97F4A7C15
WHOLE = 1 << 31
"""A bucket longer than any tensor."""


# Draws: a generator unlike qcomp's.
def scrambled(words):
    """Return the words of splitmix64 for these counters."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


def seed_of(key):
    """Return 64 bits that depend on all parts of a key but the bucket."""
    word = np.zeros(1, np.uint64)
    for part in (key.seed, key.step, key.tensor, key.rank, key.hop):
        word = scrambled(word + np.uint64((GOLDEN + part) % 2**64))
    return int(word[0])


def words_of(seed, buckets, count):
    """Return ``count`` words for each of these buckets."""
    bases = scrambled(np.uint64(seed) + np.uint64(GOLDEN) * (np.asarray(buckets, np.uint64) + np.uint64(1)))
    return scrambled(
        bases[:, None] + np.uint64(0xD1B54A32D192ED03) * np.arange(1, count + 1, dtype=np.uint64)
    )


def numbered(first, count):
    """Return the numbers of buckets; a damaged payload may say that the first is anything."""
    return np.uint64(first) + np.arange(count, dtype=np.uint64)


def uniforms(words):
    """Return numbers from 0 to 1 of words."""
    return (words >> np.uint64(11)).astype(np.float64) * 2.0**-53


def sent_seed(seed, bucket):
    return np.frombuffer(struct.pack("<QQ", seed, bucket), np.uint8)


def read_seed(field):
    return struct.unpack("<QQ", field.tobytes())


SEED = Field("seed", "uint8", 16)


class Drawing(OnHost):
    """Base of designs that draw by the words of `words_of`."""

    def words(self, key, count, each):
        """Return words for each of ``count`` buckets; broken designs draw others."""
        return words_of(self.seed(key), numbered(key.bucket, count), each)

    def seed(self, key):
        return seed_of(key)


def hadamard(rows):
    """Return rows times the orthonormal Hadamard matrix of their length."""
    length = rows.shape[1]
    half = 1
    while half < length:
        pairs = rows.reshape(len(rows), length // (2 * half), 2, half)
        rows = np.stack([pairs[:, :, 0] + pairs[:, :, 1], pairs[:, :, 0] - pairs[:, :, 1]], axis=2)
        rows = rows.reshape(len(rows), length)
        half *= 2
    return rows / math.sqrt(length)


def signs_of(words):
    return np.where(words >> np.uint64(63), -1.0, 1.0)


def nearest(values, table):
    """Return the index of the nearest entry of an ascending table."""
    return np.searchsorted((table[1:] + table[:-1]) / 2, values)


# Blocks with shared exponents, and tables.
def float_grid(exponent_bits, mantissa_bits, bias, most):
    """Return the magnitudes that a small floating-point format has, in order."""
    codes = np.arange(1 << exponent_bits + mantissa_bits)
    exponent, mantissa = codes >> mantissa_bits, codes % (1 << mantissa_bits)
    values = np.where(
        exponent > 0,
        (1 + mantissa / (1 << mantissa_bits)) * 2.0 ** (exponent - bias),
        mantissa / (1 << mantissa_bits) * 2.0 ** (1 - bias),
    )
    return values[values <= most]


E2M1 = float_grid(2, 1, 1, 6.0)
E4M3 = float_grid(4, 3, 7, 448.0)


@qcomp.register
@dataclass(frozen=True)
class MX(OnHost):
    """Blocks of 32 with one exponent: the formats of the Open Compute Project (OCP MX)."""

    name: ClassVar[str] = "paper_mx"
    element: str = "e4m3"

    @property
    def grid(self):
        return E4M3 if self.element == "e4m3" else E2M1

    @property
    def traits(self):
        return qcomp.Traits(32, delta=0.95 if self.element == "e4m3" else 0.85, keeps_zero=True)

    def payload_spec(self, size, dtype="float32"):
        return PayloadSpec((Field("exponents", "uint8", -(-size // 32)), Field("codes", "uint8", size)))

    def exponents(self, rows):
        largest = np.abs(rows).max(axis=1, initial=0.0)
        above = math.frexp(float(self.grid[-1]))[1]
        return np.clip(np.frexp(largest)[1] - above, -127, 127)

    def codes(self, scaled):
        return nearest(np.abs(scaled), self.grid)

    def encode_host(self, x, key):
        rows, _ = rows_of(flush(x).astype(np.float64), 32)
        exponents = self.exponents(rows)
        codes = self.codes(np.ldexp(rows, -exponents[:, None])).astype(np.uint8)
        codes |= (rows < 0).astype(np.uint8) << 7
        return {
            "exponents": (exponents + 127).astype(np.uint8),
            "codes": codes.reshape(-1)[: len(x)],
        }

    def table(self):
        return np.pad(self.grid, (0, 128 - len(self.grid)), constant_values=np.nan)

    def decode_host(self, parts, size):
        exponents = np.repeat(parts["exponents"].astype(np.int32) - 127, 32)[:size]
        magnitudes = self.table()[parts["codes"] & 127]
        return flush(np.ldexp(np.where(parts["codes"] >> 7, -magnitudes, magnitudes), exponents))


@qcomp.register
@dataclass(frozen=True)
class FP8(OnHost):
    """FP8 values with a float32 scale for 128 elements, such that the largest becomes 448."""

    name: ClassVar[str] = "paper_fp8"

    @property
    def traits(self):
        return qcomp.Traits(128, delta=0.95, keeps_zero=True)

    def payload_spec(self, size, dtype="float32"):
        return PayloadSpec((Field("scale", "float32", -(-size // 128)), Field("codes", "uint8", size)))

    def scales(self, rows):
        largest = np.abs(rows).max(axis=1, initial=0.0)
        return np.maximum(largest / 448, 2.0**-126).astype(np.float32)

    def codes(self, scaled):
        return nearest(np.abs(scaled), E4M3)

    def encode_host(self, x, key):
        rows, _ = rows_of(flush(x).astype(np.float64), 128)
        scales = self.scales(rows)
        codes = self.codes(rows / scales[:, None]) | (rows < 0).astype(np.int64) << 7
        return {"scale": scales, "codes": codes.astype(np.uint8).reshape(-1)[: len(x)]}

    def table(self):
        return np.pad(E4M3, (0, 128 - len(E4M3)), constant_values=np.nan)

    def decode_host(self, parts, size):
        magnitudes = self.table()[parts["codes"] & 127]
        scales = np.repeat(parts["scale"].astype(np.float64), 128)[:size]
        return flush(np.where(parts["codes"] >> 7, -magnitudes, magnitudes) * scales)


NF4_TABLE = np.asarray(
    [
        -1.0,
        -0.6961928,
        -0.52507305,
        -0.3949175,
        -0.28444138,
        -0.18477343,
        -0.09105003,
        0.0,
        0.0795803,
        0.1609302,
        0.2461123,
        0.33791524,
        0.44070983,
        0.562617,
        0.72295684,
        1.0,
    ]
)


def pack_pairs(codes):
    """Return two codes of four bits in each byte."""
    even = np.concatenate([codes, np.zeros(len(codes) % 2, codes.dtype)])
    return (even[::2] | even[1::2] << 4).astype(np.uint8)


def unpack_pairs(packed, size):
    return np.stack([packed & 15, packed >> 4], axis=1).reshape(-1)[:size]


@qcomp.register
@dataclass(frozen=True)
class NF4(OnHost):
    """QLoRA's table of 16 values, relative to the largest of 64."""

    name: ClassVar[str] = "paper_nf4"

    @property
    def traits(self):
        return qcomp.Traits(64, delta=0.85, keeps_zero=True)

    def payload_spec(self, size, dtype="float32"):
        fields = Field("codes", "uint8", -(-size // 2)), Field("largest", "float32", -(-size // 64))
        return PayloadSpec(fields)

    def table(self):
        return NF4_TABLE

    def largest(self, rows):
        return np.abs(rows).max(axis=1, initial=0.0).astype(np.float32)

    def encode_host(self, x, key):
        rows, _ = rows_of(flush(x).astype(np.float64), 64)
        largest = self.largest(rows)
        codes = nearest(rows / np.where(largest > 0, largest, 1)[:, None], self.table())
        return {"codes": pack_pairs(codes.reshape(-1)[: len(x)]), "largest": largest}

    def decode_host(self, parts, size):
        values = self.table()[unpack_pairs(parts["codes"], size)]
        return flush(values * np.repeat(parts["largest"].astype(np.float64), 64)[:size])


@qcomp.register
@dataclass(frozen=True)
class Pairs(OnHost):
    """Two elements share a code of 6 bits for an angle and 2 for a radius."""

    name: ClassVar[str] = "paper_pairs"

    @property
    def traits(self):
        return qcomp.Traits(48, delta=0.5)

    def payload_spec(self, size, dtype="float32"):
        fields = Field("codes", "uint8", -(-size // 2)), Field("largest", "float32", -(-size // 48))
        return PayloadSpec(fields)

    def encode_host(self, x, key):
        rows, _ = rows_of(flush(x).astype(np.float64), 48)
        points = rows[:, ::2] + 1j * rows[:, 1::2]
        radius = np.abs(points)
        largest = radius.max(axis=1, initial=0.0).astype(np.float32)
        relative = radius / np.where(largest > 0, largest, 1)[:, None]
        ring = nearest(relative, np.asarray([0.0, 0.3, 0.65, 1.0]))
        angle = np.rint(np.angle(points) / (2 * np.pi) * 64).astype(np.int64) % 64
        codes = (ring << 6 | angle).astype(np.uint8).reshape(-1)
        return {"codes": codes[: -(-len(x) // 2)], "largest": largest}

    def decode_host(self, parts, size):
        codes = parts["codes"]
        radius = np.asarray([0.0, 0.3, 0.65, 1.0])[codes >> 6]
        points = radius * np.exp(2j * np.pi * (codes & 63) / 64)
        values = np.stack([points.real, points.imag], axis=1).reshape(-1)[:size]
        return flush(values * np.repeat(parts["largest"].astype(np.float64), 48)[:size])


@qcomp.register
@dataclass(frozen=True)
class ClippedAtAQuantile(OnHost):
    """Four bits, clipped at the 90th percentile of a vector's own magnitudes; it promises little."""

    name: ClassVar[str] = "paper_clipped"

    @property
    def traits(self):
        return qcomp.Traits(WHOLE, keeps_zero=True)

    def payload_spec(self, size, dtype="float32"):
        return PayloadSpec((Field("codes", "int8", size), Field("step", "float32", min(size, 1))))

    def top(self, x):
        return np.quantile(np.abs(x), 0.9)

    def encode_host(self, x, key):
        x = flush(x).astype(np.float64)
        if not len(x):
            return {"codes": np.zeros(0, np.int8), "step": np.zeros(0, np.float32)}
        step = np.float32(max(self.top(x) / 7, 2.0**-126))
        return {"codes": np.rint(x / step).clip(-7, 7).astype(np.int8), "step": step.reshape(1)}

    def decode_host(self, parts, size):
        return parts["codes"] * parts["step"]


@qcomp.register
@dataclass(frozen=True)
class FixedGrid(OnHost):
    """Multiples of 1/1024 below 2^20; larger values are refused, smaller ones become zero."""

    name: ClassVar[str] = "paper_fixed_grid"

    @property
    def traits(self):
        return qcomp.Traits(1, keeps_zero=True)

    def payload_spec(self, size, dtype="float32"):
        return PayloadSpec((Field("codes", "int32", size),))

    def encode_host(self, x, key):
        if np.any(np.abs(x) >= 2.0**20):
            raise qcomp.NonFiniteError("a magnitude is 2^20 or more; expected less")
        return {"codes": np.rint(x.astype(np.float64) * 1024).astype(np.int32)}

    def decode_host(self, parts, size):
        return parts["codes"] / 1024


@qcomp.register
@dataclass(frozen=True)
class SignOfAll(OnHost):
    """signSGD: the sign of each element, and the mean magnitude of the tensor."""

    name: ClassVar[str] = "paper_sign_of_all"

    @property
    def traits(self):
        return qcomp.Traits(WHOLE)

    def payload_spec(self, size, dtype="float32"):
        return PayloadSpec((Field("signs", "uint8", -(-size // 8)), Field("scale", "float32", min(size, 1))))

    def encode_host(self, x, key):
        x = flush(x)
        scale = np.abs(x.astype(np.float64)).sum() / max(1, len(x))
        return {"signs": np.packbits(x < 0), "scale": np.full(min(len(x), 1), scale, np.float32)}

    def decode_host(self, parts, size):
        negative = np.unpackbits(parts["signs"])[:size]
        return flush(np.where(negative, -1.0, 1.0) * (parts["scale"] if size else 1.0))


# Lossless.
@qcomp.register
@dataclass(frozen=True)
class Planes(OnHost):
    """The bytes of the vector, plane by plane, deflated: lossless."""

    name: ClassVar[str] = "paper_planes"

    @property
    def traits(self):
        return qcomp.Traits(1, unbiased=True, omega=0.0, delta=1.0, lossless=True, keeps_zero=True)

    def payload_spec(self, size, dtype="float32"):
        nbytes = size * np.dtype(dtype).itemsize
        return PayloadSpec((Field("bytes", "uint8", 14 + nbytes + nbytes // 1000),), variable_length=True)

    def encode_host(self, x, key):
        width = x.dtype.itemsize
        planes = x.view(np.uint8).reshape(-1, width).T.tobytes()
        return {"bytes": np.frombuffer(bytes([width]) + zlib.compress(planes, 1), np.uint8)}

    def decode_host(self, parts, size):
        data = parts["bytes"].tobytes()
        reader = zlib.decompressobj()
        try:
            raw = reader.decompress(data[1:])
        except zlib.error as error:
            raise qcomp.PayloadError(f"the payload is damaged: {error}") from error
        width = data[0] if data else 0
        if not reader.eof or reader.unused_data or width not in (4, 8) or len(raw) != width * size:
            raise qcomp.PayloadError("the payload is cut off, too long, or of another width")
        planes = np.frombuffer(raw, np.uint8).reshape(width, size)
        return np.ascontiguousarray(planes.T).view(f"<f{width}").reshape(-1)


# Sparse.
def varint(numbers):
    """Return numbers as bytes of seven bits each, the low ones first."""
    found = bytearray()
    for number in map(int, numbers):
        rest = number
        while rest > 127:
            found.append(rest & 127 | 128)
            rest >>= 7
        found.append(rest)
    return bytes(found)


def read_varint(data):
    """Return all numbers of such bytes."""
    data = np.asarray(data, np.uint8)
    if len(data) and data[-1] >> 7:
        raise qcomp.PayloadError("the payload is cut off inside a number")
    ends = np.flatnonzero(data < 128)
    starts = np.concatenate([[0], ends[:-1] + 1]) if len(ends) else ends
    if len(ends) and np.max(ends - starts) > 8:
        raise qcomp.PayloadError("the payload has a number of more than 63 bits")
    shifts = 7 * (np.arange(len(data)) - np.repeat(starts, ends - starts + 1))
    return np.add.reduceat((data & 127).astype(np.int64) << shifts, starts) if len(ends) else ends


@qcomp.register
@dataclass(frozen=True)
class TopOfAll(OnHost):
    """The largest hundredth of a tensor, as gaps and values."""

    name: ClassVar[str] = "paper_top_of_all"

    @property
    def traits(self):
        return qcomp.Traits(WHOLE, delta=0.01 - 1e-9, keeps_zero=True)

    def kept(self, size):
        return -(-size // 100)

    def payload_spec(self, size, dtype="float32"):
        count = self.kept(size)
        fields = Field("values", "float32", count), Field("gaps", "uint8", 5 * count)
        return PayloadSpec(fields, variable_length=True)

    def chosen(self, x):
        return np.sort(np.argsort(-np.abs(x), kind="stable")[: self.kept(len(x))])

    def encode_host(self, x, key):
        x = flush(x)
        chosen = self.chosen(x)
        values = flush(x[chosen].astype(np.float32))
        gaps = self.gaps(np.diff(chosen, prepend=-1) - 1)
        return {"values": values, "gaps": np.frombuffer(varint(gaps), np.uint8)}

    def gaps(self, gaps):
        return gaps

    def positions(self, gaps, size):
        return np.cumsum(gaps + 1) - 1

    def decode_host(self, parts, size):
        gaps = read_varint(parts["gaps"])
        values = parts["values"]
        if len(gaps) != len(values) or np.any(gaps > size):
            raise qcomp.PayloadError("the payload has gaps that do not fit its values")
        positions = self.positions(gaps, size)
        if len(gaps) and (positions[-1] >= size or positions.min() < 0):
            raise qcomp.PayloadError("the payload has a position behind the last element")
        found = np.zeros(size)
        found[positions] = values
        return found


@qcomp.register
@dataclass(frozen=True)
class TopOfChunks(OnHost):
    """The largest of every hundred neighbours, the last of which may be fewer."""

    name: ClassVar[str] = "paper_top_of_chunks"

    @property
    def traits(self):
        return qcomp.Traits(100, delta=0.01, keeps_zero=True, kept=1)

    def payload_spec(self, size, dtype="float32"):
        count = -(-size // 100)
        return PayloadSpec((Field("values", "float32", count), Field("places", "uint8", count)))

    def encode_host(self, x, key):
        rows, _ = rows_of(flush(x), 100)
        places = np.argmax(np.abs(rows), axis=1) if len(rows) else np.zeros(0, np.int64)
        values = rows[np.arange(len(rows)), places]
        return {"values": flush(values.astype(np.float32)), "places": places.astype(np.uint8)}

    def decode_host(self, parts, size):
        count = len(parts["values"])
        rows = np.zeros((count, 100))
        rows[np.arange(count), parts["places"] % 100] = parts["values"]
        return rows.reshape(-1)[:size]


@qcomp.register
@dataclass(frozen=True)
class Above(OnHost):
    """All elements above half the largest of 4096, as the zeros between them and their values."""

    name: ClassVar[str] = "paper_above"
    bucket: int = 4096

    @property
    def traits(self):
        return qcomp.Traits(self.bucket, delta=1 / self.bucket - 1e-9, keeps_zero=True)

    def payload_spec(self, size, dtype="float32"):
        buckets = -(-size // self.bucket)
        fields = Field("counts", "int32", buckets), Field("bytes", "uint8", 4 * size + 3 * size)
        return PayloadSpec(fields, variable_length=True)

    def kept(self, rows):
        magnitude = np.abs(rows)
        largest = magnitude.max(axis=1, initial=0.0)
        return (magnitude > 0.5 * largest[:, None]) & (magnitude > 0)

    def encode_host(self, x, key):
        rows, _ = rows_of(flush(x), self.bucket)
        kept = self.kept(rows)
        row, place = np.nonzero(kept)
        first = np.concatenate([[True], np.diff(row) > 0]) if len(row) else np.zeros(0, bool)
        gaps = np.where(first, place, np.diff(place, prepend=0) - 1)
        values = flush(rows[kept].astype(np.float32))
        data = values.tobytes() + varint(self.gaps(gaps))
        return {"counts": self.counts(kept.sum(axis=1)), "bytes": np.frombuffer(data, np.uint8)}

    def gaps(self, gaps):
        return gaps

    def counts(self, counts):
        return counts.astype(np.int32)

    def decode_host(self, parts, size):
        counts = parts["counts"].astype(np.int64)
        total = int(counts.sum())
        data = parts["bytes"]
        if np.any(counts < 0) or np.any(counts > self.bucket) or 4 * total > len(data):
            raise qcomp.PayloadError("the payload has counts that do not fit its values")
        values, gaps = data[: 4 * total].view(np.float32), read_varint(data[4 * total :])
        if len(gaps) != total or np.any(gaps > self.bucket):
            raise qcomp.PayloadError("the payload has gaps that do not fit its values")
        rows = np.zeros((len(counts), self.bucket))
        row = np.repeat(np.arange(len(counts)), counts)
        ends = np.cumsum(gaps + 1)
        before = np.repeat(np.concatenate([[0], ends])[np.cumsum(counts) - counts], counts)
        places = ends - before - 1
        if np.any(places >= self.bucket):
            raise qcomp.PayloadError("the payload has a position behind its bucket")
        rows[row, places] = values
        return rows.reshape(-1)[:size]


def rice(numbers, low):
    """Return Rice codes: quotients by 2^low in unary, then the rests, as bits."""
    quotients, rests = numbers >> low, numbers % (1 << low)
    ends = np.cumsum(quotients + 1 + low)
    bits = np.zeros(int(ends[-1]) if len(ends) else 0, np.uint8)
    starts = ends - (quotients + 1 + low)
    inside = np.arange(len(bits)) - np.repeat(starts, quotients + 1 + low)
    bits[inside < np.repeat(quotients, quotients + 1 + low)] = 1
    for bit in range(low):
        bits[ends - low + bit] = rests >> (low - 1 - bit) & 1
    return bits


def read_rice(bits, low, count):
    """Return ``count`` numbers of their Rice codes."""
    zeros = np.flatnonzero(bits == 0)
    found, start = [], 0
    for _ in range(count):
        at = np.searchsorted(zeros, start)
        if at >= len(zeros) or zeros[at] + low >= len(bits):
            raise qcomp.PayloadError("the payload is cut off")
        stop = int(zeros[at]) + 1
        rest = int("".join(map(str, bits[stop : stop + low])) or "0", 2)
        found.append((stop - 1 - start) << low | rest)
        start = stop + low
    return np.asarray(found, np.int64), start


@qcomp.register
@dataclass(frozen=True)
class SparseTernary(OnHost):
    """Sparse ternary compression: the mean magnitude of the k largest with their signs, gaps in Golomb codes."""

    name: ClassVar[str] = "paper_sparse_ternary"
    k: int = 40
    low: ClassVar[int] = 4

    @property
    def traits(self):
        return qcomp.Traits(WHOLE, keeps_zero=True, kept=self.k)

    def payload_spec(self, size, dtype="float32"):
        count = min(self.k, size)
        most = (size >> self.low) + count * (self.low + 2)
        fields = Field("scale", "float32", min(size, 1)), Field("bits", "uint8", -(-most // 8) + 1)
        return PayloadSpec(fields, variable_length=True)

    def encode_host(self, x, key):
        x = flush(x)
        chosen = np.argsort(-np.abs(x), kind="stable")[: self.k]
        chosen = np.sort(chosen[x[chosen] != 0])
        scale = np.abs(x[chosen].astype(np.float64)).mean() if len(chosen) else 0.0
        gaps = self.gaps(np.diff(chosen, prepend=-1) - 1)
        bits = np.concatenate([rice(gaps, self.low), (x[chosen] < 0).astype(np.uint8)])
        data = np.concatenate([[len(chosen)], np.packbits(bits)]).astype(np.uint8)
        return {"scale": np.full(min(len(x), 1), scale, np.float32), "bits": data}

    def gaps(self, gaps):
        return gaps

    def decode_host(self, parts, size):
        data = parts["bits"]
        if not len(data):
            raise qcomp.PayloadError("the payload has no count")
        count, bits = int(data[0]), np.unpackbits(data[1:])
        gaps, end = read_rice(bits, self.low, count)
        positions = np.cumsum(gaps + 1) - 1
        signs = bits[end : end + count]
        if len(bits) // 8 != -(-(end + count) // 8) or (count and positions[-1] >= size):
            raise qcomp.PayloadError("the payload is cut off, or goes on behind its end")
        found = np.zeros(size)
        found[positions] = np.where(signs, -1.0, 1.0) * (parts["scale"] if size else 1.0)
        return flush(found)


@qcomp.register
@dataclass(frozen=True)
class ThreeLC(OnHost):
    """3LC: -m, 0 or m, five of them in a byte, and runs of zero bytes by their length."""

    name: ClassVar[str] = "paper_3lc"
    bucket: int = 1000

    @property
    def traits(self):
        return qcomp.Traits(self.bucket, delta=1 / self.bucket - 1e-9, keeps_zero=True)

    def payload_spec(self, size, dtype="float32"):
        fields = Field("largest", "float32", -(-size // self.bucket)), Field("bytes", "uint8", -(-size // 5))
        return PayloadSpec(fields, variable_length=True)

    def encode_host(self, x, key):
        rows, _ = rows_of(flush(x).astype(np.float64), self.bucket)
        largest = np.abs(rows).max(axis=1, initial=0.0).astype(np.float32)
        digits = np.rint(rows / np.where(largest > 0, largest, 1)[:, None]).astype(np.int64) + 1
        digits = digits.reshape(-1)[: len(x)]
        digits = np.concatenate([digits, np.ones(-len(x) % 5, np.int64)]).reshape(-1, 5)
        packed = (digits @ 3 ** np.arange(5)).astype(np.uint8)
        return {"largest": largest, "bytes": self.shortened(packed)}

    zero: ClassVar[int] = 121
    longest: ClassVar[int] = 14

    def shortened(self, packed):
        """Replace two to fourteen zero bytes by one of 243 to 255."""
        found, run = bytearray(), 0
        for byte in (*packed.tolist(), None):
            if byte == self.zero and run < self.longest:
                run += 1
                continue
            if run:
                found.append(self.zero if run == 1 else 241 + run)
            run = int(byte == self.zero)
            if byte is not None and not run:
                found.append(byte)
        if run:
            found.append(self.zero)
        return np.frombuffer(bytes(found), np.uint8)

    def decode_host(self, parts, size):
        data = parts["bytes"].astype(np.int64)
        packed = np.repeat(np.where(data > 242, self.zero, data), np.where(data > 242, data - 241, 1))
        if len(packed) != -(-size // 5):
            raise qcomp.PayloadError("the payload has another number of digits than elements")
        digits = packed[:, None] // 3 ** np.arange(5) % 3 - 1
        return digits.reshape(-1)[:size] * np.repeat(parts["largest"].astype(np.float64), self.bucket)[:size]


# Rotations and sketches.
@qcomp.register
@dataclass(frozen=True)
class Drive(Drawing):
    """DRIVE's signs after a randomized Hadamard transform, scaled so that the error is smallest."""

    name: ClassVar[str] = "paper_drive"
    bucket: int = 64

    @property
    def traits(self):
        return qcomp.Traits(self.bucket, random=True, delta=1 / self.bucket - 1e-5)

    def payload_spec(self, size, dtype="float32"):
        count = -(-size // self.bucket)
        fields = Field("signs", "uint8", count * self.bucket // 8), Field("scale", "float32", count), SEED
        return PayloadSpec(fields)

    def turns(self, seed, bucket, count):
        return signs_of(words_of(seed, numbered(bucket, count), self.bucket))

    def encode_host(self, x, key):
        rows, _ = rows_of(flush(x).astype(np.float64), self.bucket)
        seed = self.seed(key)
        rotated = hadamard(rows * self.turns(seed, key.bucket, len(rows)))
        return {
            "signs": np.packbits(rotated < 0, axis=1).reshape(-1),
            "scale": np.abs(rotated).mean(axis=1).astype(np.float32),
            "seed": sent_seed(seed, key.bucket),
        }

    def decode_host(self, parts, size):
        seed, bucket = read_seed(parts["seed"])
        negative = np.unpackbits(parts["signs"].reshape(-1, self.bucket // 8), axis=1)
        rows = np.where(negative, -1.0, 1.0) * parts["scale"].astype(np.float64)[:, None]
        turned = hadamard(rows) * self.turns(seed, bucket, len(rows))
        return flush(turned.reshape(-1)[:size].astype(np.float32))


@qcomp.register
@dataclass(frozen=True)
class UnbiasedDrive(Drawing):
    """DRIVE with uniformly random rotations of eight elements, which make it unbiased."""

    name: ClassVar[str] = "paper_unbiased_drive"

    @property
    def traits(self):
        return qcomp.Traits(8, random=True, unbiased=True, omega=0.75)

    def payload_spec(self, size, dtype="float32"):
        count = -(-size // 8)
        return PayloadSpec((Field("signs", "uint8", count), Field("scale", "float32", count), SEED))

    def turns(self, seed, bucket, count):
        words = uniforms(words_of(seed, numbered(bucket, count), 128)).reshape(-1, 2, 8, 8)
        normal = np.sqrt(-2 * np.log1p(-words[:, 0])) * np.cos(2 * np.pi * words[:, 1])
        q, r = np.linalg.qr(normal) if count else (normal, normal)
        return q * np.sign(np.diagonal(r, axis1=1, axis2=2))[:, None, :]

    def encode_host(self, x, key):
        rows, _ = rows_of(flush(x).astype(np.float64), 8)
        seed = self.seed(key)
        rotated = np.einsum("bi,bij->bj", rows, self.turns(seed, key.bucket, len(rows)))
        absolute = np.abs(rotated).sum(axis=1)
        scale = np.sum(rows**2, axis=1) / np.where(absolute > 0, absolute, 1)
        return {
            "signs": np.packbits(rotated < 0, axis=1).reshape(-1),
            "scale": flush(scale.astype(np.float32)),
            "seed": sent_seed(seed, key.bucket),
        }

    def decode_host(self, parts, size):
        seed, bucket = read_seed(parts["seed"])
        negative = np.unpackbits(parts["signs"].reshape(-1, 1), axis=1)
        rows = np.where(negative, -1.0, 1.0) * parts["scale"].astype(np.float64)[:, None]
        turned = np.einsum("bj,bij->bi", rows, self.turns(seed, bucket, len(rows)))
        return flush(turned.reshape(-1)[:size].astype(np.float32))


@qcomp.register
@dataclass(frozen=True)
class RotatedLevels(Drawing):
    """Suresh et al.: a randomized Hadamard transform, then rounding to seven levels at random."""

    name: ClassVar[str] = "paper_rotated_levels"
    bucket: int = 64

    @property
    def traits(self):
        return qcomp.Traits(self.bucket, random=True, unbiased=True, omega=self.bucket / (4 * 49) + 1e-4)

    def payload_spec(self, size, dtype="float32"):
        count = -(-size // self.bucket)
        fields = Field("codes", "int8", count * self.bucket), Field("step", "float32", count), SEED
        return PayloadSpec(fields)

    def turns(self, seed, bucket, count):
        return signs_of(words_of(seed ^ 0x5555, numbered(bucket, count), self.bucket))

    def encode_host(self, x, key):
        rows, _ = rows_of(flush(x).astype(np.float64), self.bucket)
        turning = self.turning_seed(key)
        rotated = hadamard(rows * self.turns(turning, key.bucket, len(rows)))
        step = np.maximum(np.abs(rotated).max(axis=1, initial=0.0) / 7, 2.0**-126).astype(np.float32)
        up = uniforms(self.words(key, len(rows), self.bucket))
        codes = np.floor(rotated / step[:, None] + up).clip(-8, 8)
        return {
            "codes": codes.astype(np.int8).reshape(-1),
            "step": step,
            "seed": sent_seed(turning, key.bucket),
        }

    def turning_seed(self, key):
        return self.seed(key)

    def decode_host(self, parts, size):
        seed, bucket = read_seed(parts["seed"])
        rows = parts["codes"].reshape(-1, self.bucket) * parts["step"].astype(np.float64)[:, None]
        turned = hadamard(rows) * self.turns(seed, bucket, len(rows))
        return flush(turned.reshape(-1)[:size].astype(np.float32))


@qcomp.register
@dataclass(frozen=True)
class CountSketch(Drawing):
    """A count sketch of 16 sums of 64 elements."""

    name: ClassVar[str] = "paper_count_sketch"

    @property
    def traits(self):
        return qcomp.Traits(64, random=True, unbiased=True, omega=63 / 16 + 1e-3)

    def payload_spec(self, size, dtype="float32"):
        return PayloadSpec((Field("sums", "float32", 16 * -(-size // 64)), SEED))

    def hashes(self, seed, bucket, count):
        words = words_of(seed, numbered(bucket, count), 64)
        return (words % np.uint64(16)).astype(np.int64), signs_of(words)

    def encode_host(self, x, key):
        seed = self.seed(key)
        return {"sums": self.sums(x, seed, key.bucket), "seed": sent_seed(seed, key.bucket)}

    def sums(self, x, seed, bucket):
        rows, _ = rows_of(flush(x).astype(np.float64), 64)
        places, signs = self.hashes(seed % 2**64, bucket, len(rows))
        flat = places + 16 * np.arange(len(rows))[:, None]
        sums = np.bincount(flat.reshape(-1), (rows * signs).reshape(-1), 16 * len(rows))
        return flush(sums.astype(np.float32))

    def decode_host(self, parts, size):
        seed, bucket = read_seed(parts["seed"])
        sums = parts["sums"].reshape(-1, 16)
        places, signs = self.hashes(seed, bucket, len(sums))
        return (np.take_along_axis(sums, places, axis=1) * signs).reshape(-1)[:size]


@qcomp.register
@dataclass(frozen=True)
class MedianSketch(CountSketch):
    """The median of three count sketches of a tensor: it draws, and promises no more."""

    name: ClassVar[str] = "paper_median_sketch"

    @property
    def traits(self):
        return qcomp.Traits(64, random=True)

    def payload_spec(self, size, dtype="float32"):
        return PayloadSpec((Field("sums", "float32", 3 * 16 * -(-size // 64)), SEED))

    def encode_host(self, x, key):
        seed = self.seed(key)
        sums = [self.sums(x, seed + i, key.bucket) for i in range(3)]
        return {"sums": np.concatenate(sums), "seed": sent_seed(seed, key.bucket)}

    def decode_host(self, parts, size):
        seed, bucket = read_seed(parts["seed"])
        found = [
            super(MedianSketch, self).decode_host(
                {"sums": s, "seed": sent_seed((seed + i) % 2**64, bucket)}, size
            )
            for i, s in enumerate(np.split(parts["sums"], 3))
        ]
        return np.median(found, axis=0)


# Sampling.
@qcomp.register
@dataclass(frozen=True)
class Importance(Drawing):
    """Eight samples of 64 elements, drawn in proportion to their magnitudes."""

    name: ClassVar[str] = "paper_importance"

    @property
    def traits(self):
        return qcomp.Traits(64, random=True, unbiased=True, omega=63 / 8 + 1e-3, keeps_zero=True, kept=8)

    def payload_spec(self, size, dtype="float32"):
        count = -(-size // 64)
        return PayloadSpec((Field("places", "uint8", 8 * count), Field("total", "float32", count)))

    def encode_host(self, x, key):
        rows, _ = rows_of(flush(x).astype(np.float64), 64)
        sums = np.cumsum(np.abs(rows), axis=1)
        total = sums[:, -1] if len(rows) else np.zeros(0)
        drawn = uniforms(self.words(key, len(rows), 8)) * total[:, None]
        places = (sums[:, None, :] <= drawn[:, :, None]).sum(axis=2).clip(0, 63)
        negative = np.take_along_axis(rows, places, axis=1) < 0
        codes = (places | negative.astype(np.int64) << 7).astype(np.uint8)
        return {"places": codes.reshape(-1), "total": flush((total / 8).astype(np.float32))}

    def decode_host(self, parts, size):
        count = len(parts["total"])
        codes = parts["places"].astype(np.int64).reshape(count, 8)
        flat = (codes & 63) + 64 * np.arange(count)[:, None]
        signs = np.where(codes >> 7, -1.0, 1.0) * parts["total"].astype(np.float64)[:, None]
        return np.bincount(flat.reshape(-1), signs.reshape(-1), 64 * count)[:size]


@qcomp.register
@dataclass(frozen=True)
class Coin(Drawing):
    """Twice the tensor or nothing: one coin for all elements."""

    name: ClassVar[str] = "paper_coin"

    @property
    def traits(self):
        return qcomp.Traits(WHOLE, random=True, unbiased=True, omega=1.0, keeps_zero=True)

    def payload_spec(self, size, dtype="float32"):
        return PayloadSpec((Field("values", "uint8", 4 * size),), variable_length=True)

    def encode_host(self, x, key):
        heads = uniforms(self.words(key, 1, 1))[0, 0] < 0.5
        sent = flush(x.astype(np.float32))[: len(x) if heads else 0]
        return {"values": np.frombuffer(sent.tobytes(), np.uint8)}

    def decode_host(self, parts, size):
        if len(parts["values"]) not in (0, 4 * size):
            raise qcomp.PayloadError("the payload is cut off")
        return 2 * parts["values"].view(np.float32) if len(parts["values"]) else np.zeros(size, np.float32)


@qcomp.register
@dataclass(frozen=True)
class OneOfEight(Drawing):
    """One of eight interleaved parts of a tensor, times eight."""

    name: ClassVar[str] = "paper_one_of_eight"

    @property
    def traits(self):
        return qcomp.Traits(WHOLE, random=True, unbiased=True, omega=7.0, keeps_zero=True)

    def payload_spec(self, size, dtype="float32"):
        return PayloadSpec((Field("part", "uint8", 4), Field("values", "float32", -(-size // 8))))

    def encode_host(self, x, key):
        part = int(self.words(key, 1, 1)[0, 0] >> np.uint64(61))
        x = np.concatenate([flush(x), np.zeros(-len(x) % 8, x.dtype)])
        return {"part": np.full(4, part, np.uint8), "values": flush(x[part::8].astype(np.float32))}

    def decode_host(self, parts, size):
        found = np.zeros(8 * len(parts["values"]))
        found[int(parts["part"][0]) % 8 :: 8] = 8 * parts["values"].astype(np.float64)
        return found[:size]


@qcomp.register
@dataclass(frozen=True)
class OneDither(Drawing):
    """Seven bits, the rounding of which one dither for the whole tensor decides."""

    name: ClassVar[str] = "paper_one_dither"

    @property
    def traits(self):
        return qcomp.Traits(WHOLE, random=True, unbiased=True)

    def payload_spec(self, size, dtype="float32"):
        return PayloadSpec((Field("codes", "int8", size), Field("step", "float32", min(size, 1))))

    def encode_host(self, x, key):
        x = flush(x).astype(np.float64)
        dither = uniforms(self.words(key, 1, 1))[0, 0]
        step = np.maximum(np.abs(x).max(axis=0, keepdims=True, initial=0.0) / 63, 2.0**-126)
        step = step[: len(x)].astype(np.float32)
        return {"codes": np.floor(x / (step if len(x) else 1) + dither).astype(np.int8), "step": step}

    def decode_host(self, parts, size):
        return parts["codes"] * (parts["step"].astype(np.float64) if size else 1.0)


@qcomp.register
@dataclass(frozen=True)
class StochasticBfloat(Drawing):
    """bfloat16 with stochastic rounding."""

    name: ClassVar[str] = "paper_stochastic_bfloat"

    @property
    def traits(self):
        return qcomp.Traits(1, random=True, unbiased=True, omega=2.0**-15, keeps_zero=True)

    def payload_spec(self, size, dtype="float32"):
        return PayloadSpec((Field("halves", "uint8", 2 * size),))

    def encode_host(self, x, key):
        bits = flush(x.astype(np.float32)).view(np.uint32)
        drawn = self.words(key, len(x), 1)[:, 0] >> np.uint64(48)
        halves = (bits + drawn.astype(np.uint32) >> 16).astype(np.uint16)
        return {"halves": halves.view(np.uint8)}

    def decode_host(self, parts, size):
        return flush((parts["halves"].view(np.uint16).astype(np.uint32) << 16).view(np.float32))


def other_key(key):
    """Return the key of a second stream of draws."""
    return key.at(hop=(key.hop + (1 << 31)) % (1 << 32))


@qcomp.register
@dataclass(frozen=True)
class TwoDraws(BucketedCompressor):
    """TernGrad of half of the elements: one draw keeps an element, another one rounds it."""

    name: ClassVar[str] = "paper_two_draws"
    scales: ClassVar[tuple[str, ...]] = ("largest",)
    bucket_size: int = 64

    @property
    def traits(self):
        omega = 1 + math.sqrt(self.bucket_size)
        return qcomp.Traits(self.bucket_size, random=True, unbiased=True, omega=omega, keeps_zero=True)

    @property
    def bits(self):
        return 2

    def draws(self, key, block, like):
        keys = key, other_key(key)
        return [draws16(each, block, bucket_size=self.bucket_size, like=like) for each in keys]

    def encode_block(self, rows, block, key):
        largest = np.abs(rows).max(axis=1)
        keep, up = self.draws(key, block, rows)
        chance = np.abs(rows) / np.where(largest > 0, largest, 1)[:, None]
        codes = np.where((keep < 32768) & (up < np.round(chance * 65536)), np.where(rows < 0, 3, 1), 0)
        return codes.astype(np.uint8), (largest,)

    def decode_block(self, codes, scales):
        return np.asarray([0, 2, 0, -2], scales[0].dtype)[codes] * scales[0]


@qcomp.register
@dataclass(frozen=True)
class WideDraws(TwoDraws):
    """TernGrad with uniforms of 32 bits, made of two draws."""

    name: ClassVar[str] = "paper_wide_draws"

    @property
    def traits(self):
        omega = (1 + math.sqrt(self.bucket_size)) / 2
        return qcomp.Traits(self.bucket_size, random=True, unbiased=True, omega=omega, keeps_zero=True)

    def encode_block(self, rows, block, key):
        largest = np.abs(rows).max(axis=1)
        high, low = (each.astype(np.float64) for each in self.draws(key, block, rows))
        chance = np.abs(rows).astype(np.float64) / np.where(largest > 0, largest, 1)[:, None]
        codes = np.where(high * 65536 + low < chance * 2.0**32, np.where(rows < 0, 3, 1), 0)
        return codes.astype(np.uint8), (largest,)

    def decode_block(self, codes, scales):
        return np.asarray([0, 1, 0, -1], scales[0].dtype)[codes] * scales[0]


# Harmless habits.
DIGEST = np.frombuffer(hashlib.sha256(b"a rotation of 32").digest() * 4, np.uint8)


@qcomp.register
@dataclass(frozen=True)
class TurnedByADigest(OnHost):
    """The signs after a rotation that a digest of a constant fixes."""

    name: ClassVar[str] = "paper_digest"

    @property
    def traits(self):
        return qcomp.Traits(32, delta=1 / 32 - 1e-5)

    def payload_spec(self, size, dtype="float32"):
        count = -(-size // 32)
        return PayloadSpec((Field("signs", "uint8", 4 * count), Field("scale", "float32", count)))

    def turns(self):
        return np.where(DIGEST[:32] > 127, -1.0, 1.0)

    def encode_host(self, x, key):
        rotated = hadamard(rows_of(flush(x).astype(np.float64), 32)[0] * self.turns())
        signs = np.packbits(rotated < 0, axis=1).reshape(-1)
        return {"signs": signs, "scale": np.abs(rotated).mean(axis=1).astype(np.float32)}

    def decode_host(self, parts, size):
        negative = np.unpackbits(parts["signs"].reshape(-1, 4), axis=1)
        rows = np.where(negative, -1.0, 1.0) * parts["scale"].astype(np.float64)[:, None]
        return flush((hadamard(rows) * self.turns()).reshape(-1)[:size].astype(np.float32))


@lru_cache
def edges_of(size, count):
    """Return where parts of a vector begin."""
    return tuple(size * part // count for part in range(count + 1))


@qcomp.register
@dataclass(frozen=True)
class Busy(OnHost):
    """It counts its calls, reads the clock, the environment and the processors; the result shows none of it."""

    name: ClassVar[str] = "paper_busy"
    calls: ClassVar[list[float]] = []

    @property
    def traits(self):
        return qcomp.Traits(8, delta=0.99, keeps_zero=True)

    def payload_spec(self, size, dtype="float32"):
        return PayloadSpec((Field("codes", "int8", size), Field("step", "float32", -(-size // 8))))

    def encode_host(self, x, key):
        if os.environ.get("PAPER_QUIET") is None:
            type(self).calls.append(time.time())
            del self.calls[:-100]
        rows, _ = rows_of(flush(x).astype(np.float64), 8)
        workers = min(4, os.cpu_count() or 1)
        with ThreadPoolExecutor(workers) as pool:
            edges = edges_of(len(rows), workers)
            found = list(pool.map(self.part, [rows[a:b] for a, b in pairwise(edges)]))
        codes = np.concatenate([codes for codes, _ in found]).reshape(-1)
        return {"codes": codes[: len(x)], "step": np.concatenate([step for _, step in found])}

    @staticmethod
    def part(rows):
        step = np.maximum(np.abs(rows).max(axis=1, initial=0.0) / 127, 2.0**-126).astype(np.float32)
        return np.rint(rows / step[:, None]).astype(np.int8), step

    def decode_host(self, parts, size):
        return flush(parts["codes"] * np.repeat(parts["step"].astype(np.float64), 8)[:size])


PAPERS = [
    MX(),
    MX(element="e2m1"),
    FP8(),
    NF4(),
    Pairs(),
    ClippedAtAQuantile(),
    FixedGrid(),
    SignOfAll(),
    Planes(),
    TopOfAll(),
    TopOfChunks(),
    Above(),
    SparseTernary(),
    ThreeLC(),
    Drive(),
    UnbiasedDrive(),
    RotatedLevels(),
    CountSketch(),
    MedianSketch(),
    Importance(),
    Coin(),
    OneOfEight(),
    OneDither(),
    StochasticBfloat(),
    TwoDraws(),
    WideDraws(),
    TurnedByADigest(),
    Busy(),
    qcomp.Scaled(CountSketch()),
    qcomp.Scaled(Importance()),
    qcomp.Scaled(Coin()),
    qcomp.Scaled(OneOfEight()),
    qcomp.Scaled(TwoDraws()),
]
