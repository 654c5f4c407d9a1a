"""Correct compressors with designs unlike qcomp's own, written from the public documentation."""

import math
import zlib
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

import qcomp
from qcomp.extend import (
    Block,
    Field,
    PayloadSpec,
    array_namespace,
    device,
    draws16,
    from_host_bytes,
    host_bytes,
)


def like_numpy(values, x, dtype=None):
    """Return a NumPy array in the library and on the device of x."""
    xp = array_namespace(x)
    return xp.asarray(values.copy(), dtype=dtype, device=device(x))


def to_numpy(x):
    name = str(x.dtype).rsplit(".", maxsplit=1)[-1]
    return np.frombuffer(host_bytes(x), dtype=name).copy()


def rows_of(x, bucket):
    """Return the buckets of a flat NumPy vector, padded with zeros, and the number of elements of each."""
    count = -(-len(x) // bucket)
    rows = np.zeros((count, bucket), dtype=x.dtype)
    rows.reshape(-1)[: len(x)] = x
    filled = np.minimum(bucket, len(x) - bucket * np.arange(count))
    return rows, filled


def flush(x):
    return np.where(np.abs(x) < 2.0**-126, np.zeros_like(x), x)


def generators(key, count):
    """Yield a generator for every bucket, seeded with all parts of the key: NumPy's own, not qcomp's draws."""
    for index in range(count):
        parts = (key.seed, key.step, key.tensor, key.rank, key.hop, key.bucket + index)
        yield np.random.Generator(np.random.PCG64([int(part) for part in parts]))


class OnHost(qcomp.Compressor):
    """Base of compressors that compute in NumPy, whatever the library."""

    def encode(self, x, key):
        return {name: like_numpy(part, x) for name, part in self.encode_host(to_numpy(x), key).items()}

    def decode(self, parts, size, dtype):
        some = next(iter(parts.values()))
        values = self.decode_host({name: to_numpy(part) for name, part in parts.items()}, size)
        return array_namespace(some).astype(like_numpy(values, some), dtype)


@qcomp.register
@dataclass(frozen=True)
class Ternary(OnHost):
    """-m, 0 or m, with m the largest magnitude in a bucket: TernGrad."""

    name: ClassVar[str] = "stranger_ternary"
    bucket: int = 40  # not a power of two

    @property
    def traits(self):
        omega = (1 + math.sqrt(self.bucket)) / 2 - 1  # attained by one large element among equal ones
        return qcomp.Traits(self.bucket, random=True, unbiased=True, omega=omega + 1e-3, keeps_zero=True)

    def payload_spec(self, size, dtype="float32"):
        return PayloadSpec(
            (Field("codes", "int8", size), Field("largest", "float32", -(-size // self.bucket)))
        )

    def encode_host(self, x, key):
        rows, _ = rows_of(flush(x), self.bucket)
        largest = np.max(np.abs(rows), axis=1, initial=0.0).astype(np.float32)
        draws = np.stack([g.random(self.bucket) for g in generators(key, len(rows))]) if len(rows) else rows
        up = draws * largest[:, None] < np.abs(rows)
        codes = (np.sign(rows) * up).astype(np.int8)
        return {"codes": codes.reshape(-1)[: len(x)], "largest": largest}

    def decode_host(self, parts, size):
        return parts["codes"] * np.repeat(parts["largest"], self.bucket)[:size]


@qcomp.register
@dataclass(frozen=True)
class StochasticSign(OnHost):
    """-m or m, with mean v; so zeros do not stay zeros."""

    name: ClassVar[str] = "stranger_stochastic_sign"
    bucket: int = 16

    @property
    def traits(self):
        return qcomp.Traits(self.bucket, random=True, unbiased=True, omega=self.bucket - 1)

    def payload_spec(self, size, dtype="float32"):
        return PayloadSpec(
            (Field("signs", "uint8", size), Field("largest", "float32", -(-size // self.bucket)))
        )

    def encode_host(self, x, key):
        rows, _ = rows_of(flush(x), self.bucket)
        largest = np.max(np.abs(rows), axis=1, initial=0.0).astype(np.float32)
        draws = np.stack([g.random(self.bucket) for g in generators(key, len(rows))]) if len(rows) else rows
        signs = (2 * draws - 1) * largest[:, None] < rows
        return {"signs": signs.astype(np.uint8).reshape(-1)[: len(x)], "largest": largest}

    def decode_host(self, parts, size):
        scale = np.repeat(parts["largest"], self.bucket)[:size]
        return np.where(parts["signs"] == 1, scale, -scale)


@qcomp.register
@dataclass(frozen=True)
class OneDitherPerBucket(qcomp.QSGD):
    """Round all elements of a bucket with one draw: unbiased, although elements have no draws of their own."""

    name: ClassVar[str] = "stranger_one_dither"
    bucket_size: int = 64

    def encode_block(self, rows, block, key):
        draw = draws16(key, block, bucket_size=self.bucket_size, like=rows)[:, :1]
        with qcomp.testing.replace_draws(lambda _key, _block: draw):
            return super().encode_block(rows, block, key)


@qcomp.register
@dataclass(frozen=True)
class EveryEighthDraw(qcomp.QSGD):
    """Eight elements share a draw, and only one of eight draws is used."""

    name: ClassVar[str] = "stranger_every_eighth_draw"
    bucket_size: int = 64

    def encode_block(self, rows, block, key):
        xp = array_namespace(rows)
        draws = draws16(key, block, bucket_size=self.bucket_size, like=rows)[:, ::8]
        shared = xp.reshape(
            xp.broadcast_to(draws[:, :, None], (block.rows, block.length // 8, 8)), (block.rows, block.length)
        )
        with qcomp.testing.replace_draws(lambda _key, _block: shared):
            return super().encode_block(rows, block, key)


@qcomp.register
@dataclass(frozen=True)
class Natural(OnHost):
    """Round to a power of two below or above: natural compression; elements share draws in groups of eight."""

    name: ClassVar[str] = "stranger_natural"

    @property
    def traits(self):
        return qcomp.Traits(8, random=True, unbiased=True, omega=1 / 8 + 1e-4, keeps_zero=True)

    def payload_spec(self, size, dtype="float32"):
        return PayloadSpec((Field("exponents", "int16", size), Field("signs", "int8", size)))

    def encode_host(self, x, key):
        x = flush(x)
        mantissa, exponent = np.frexp(np.abs(x))  # 0.5 <= mantissa < 1
        draws = self._draws(key, len(x))
        up = draws < np.round((2 * mantissa - 1) * 65536)
        return {"exponents": (exponent - 1 + up).astype(np.int16), "signs": np.sign(x).astype(np.int8)}

    @staticmethod
    def _draws(key, size):
        count = -(-size // 8)
        if not count:
            return np.zeros(0)
        like = np.zeros(1, dtype=np.float32)
        block = Block(start=0, rows=count, length=8, filled=8, first_bucket=0)
        return np.asarray(draws16(key, block, bucket_size=8, like=like)).reshape(-1)[:size]

    def decode_host(self, parts, size):
        return parts["signs"] * np.ldexp(np.float32(1.0), parts["exponents"].astype(np.int32))


@qcomp.register
@dataclass(frozen=True)
class Deadzone(OnHost):
    """The sign of elements above half of the mean magnitude, times the mean of these; zero for others."""

    name: ClassVar[str] = "stranger_deadzone"
    bucket: int = 24

    @property
    def traits(self):
        return qcomp.Traits(self.bucket, delta=1 / self.bucket - 1e-6, keeps_zero=True)

    def payload_spec(self, size, dtype="float32"):
        return PayloadSpec((Field("scale", "float32", -(-size // self.bucket)), Field("codes", "int8", size)))

    def encode_host(self, x, key):
        rows, filled = rows_of(flush(x), self.bucket)
        magnitude = np.abs(rows).astype(np.float64)
        kept = magnitude > 0.5 * magnitude.sum(axis=1, keepdims=True) / np.maximum(filled, 1)[:, None]
        scale = np.where(kept, magnitude, 0).sum(axis=1) / np.maximum(kept.sum(axis=1), 1)
        codes = (np.sign(rows) * kept).astype(np.int8)
        return {"scale": scale.astype(np.float32), "codes": codes.reshape(-1)[: len(x)]}

    def decode_host(self, parts, size):
        return parts["codes"] * np.repeat(parts["scale"], self.bucket)[:size]


@qcomp.register
@dataclass(frozen=True)
class Deflated(OnHost):
    """The bytes of the vector, compressed by zlib: lossless, of variable length."""

    name: ClassVar[str] = "stranger_deflated"

    @property
    def traits(self):
        return qcomp.Traits(1, unbiased=True, omega=0.0, delta=1.0, lossless=True, keeps_zero=True)

    def payload_spec(self, size, dtype="float32"):
        nbytes = size * np.dtype(dtype).itemsize
        return PayloadSpec((Field("bytes", "uint8", nbytes + 13 + nbytes // 1000),), variable_length=True)

    def encode_host(self, x, key):
        return {"bytes": np.frombuffer(zlib.compress(x.tobytes()), dtype=np.uint8)}

    def decode(self, parts, size, dtype):
        some = parts["bytes"]
        xp = array_namespace(some)
        reader = zlib.decompressobj()
        try:
            raw = reader.decompress(host_bytes(some))
        except zlib.error as error:
            raise qcomp.PayloadError(f"the payload is damaged: {error}") from error
        if not reader.eof or reader.unused_data:
            raise qcomp.PayloadError("the payload is cut off, or goes on behind its end")
        width = len(raw) // size if size else 4
        if width not in (4, 8) or width * size != len(raw):
            raise qcomp.PayloadError(
                f"the payload holds {len(raw)} bytes; expected 4 or 8 for each of {size} elements"
            )
        data = from_host_bytes(raw, some)
        values = like_numpy(np.frombuffer(host_bytes(data), "float32" if width == 4 else "float64"), some)
        return xp.astype(values, dtype)


@qcomp.register
@dataclass(frozen=True)
class Rotated(OnHost):
    """The signs of the bucket after a Hadamard transform, and the mean magnitude after it."""

    name: ClassVar[str] = "stranger_rotated"
    bucket: int = 32

    @property
    def traits(self):
        return qcomp.Traits(self.bucket, delta=1 / self.bucket - 1e-5)

    def payload_spec(self, size, dtype="float32"):
        count = -(-size // self.bucket)
        return PayloadSpec(
            (Field("signs", "uint8", count * self.bucket // 8), Field("scale", "float32", count))
        )

    def _rotate(self, rows):
        for half in (1 << k for k in range(self.bucket.bit_length() - 1)):
            pairs = rows.reshape(len(rows), self.bucket // (2 * half), 2, half)
            rows = np.stack([pairs[:, :, 0] + pairs[:, :, 1], pairs[:, :, 0] - pairs[:, :, 1]], axis=2)
            rows = rows.reshape(len(rows), self.bucket)
        return rows / math.sqrt(self.bucket)

    def encode_host(self, x, key):
        rotated = self._rotate(rows_of(flush(x), self.bucket)[0].astype(np.float64))
        signs = np.packbits(rotated < 0, axis=1).reshape(-1)
        return {"signs": signs, "scale": np.abs(rotated).mean(axis=1).astype(np.float32)}

    def decode_host(self, parts, size):
        signs = np.unpackbits(parts["signs"].reshape(-1, self.bucket // 8), axis=1)
        rows = np.where(signs == 1, -1.0, 1.0) * parts["scale"].astype(np.float64)[:, None]
        return flush(self._rotate(rows).reshape(-1)[:size].astype(np.float32))


@qcomp.register
@dataclass(frozen=True)
class Bernoulli(OnHost):
    """Keep each element with probability 1/4, times 4: a bit for each element, then the kept values."""

    name: ClassVar[str] = "stranger_bernoulli"
    bucket: int = 16

    @property
    def traits(self):
        return qcomp.Traits(self.bucket, random=True, unbiased=True, omega=3.0, keeps_zero=True)

    def payload_spec(self, size, dtype="float32"):
        return PayloadSpec(
            (Field("mask", "uint8", -(-size // 8)), Field("values", "uint8", 4 * size)), variable_length=True
        )

    def encode_host(self, x, key):
        x = flush(x).astype(np.float32)
        count = -(-len(x) // self.bucket)
        drawn = [g.random(self.bucket) for g in generators(key, count)]
        kept = (np.concatenate(drawn)[: len(x)] if drawn else x) < 0.25
        return {"mask": np.packbits(kept), "values": np.frombuffer(x[kept].tobytes(), dtype=np.uint8)}

    def decode_host(self, parts, size):
        mask = np.unpackbits(parts["mask"])[:size].astype(bool)
        if len(parts["values"]) != 4 * np.count_nonzero(mask):
            raise qcomp.PayloadError("the payload has another number of values than its mask has bits")
        values = np.zeros(size, dtype=np.float32)
        values[mask] = 4 * parts["values"].view(np.float32)
        return values


@qcomp.register
@dataclass(frozen=True)
class Folded(OnHost):
    """A sketch: random signs fold the bucket to a quarter of its length; unfolding it is unbiased."""

    name: ClassVar[str] = "stranger_folded"
    bucket: int = 32
    folds: int = 4

    @property
    def traits(self):
        return qcomp.Traits(self.bucket, random=True, unbiased=True, omega=self.folds - 1 + 1e-3)

    def payload_spec(self, size, dtype="float32"):
        count = -(-size // self.bucket)
        return PayloadSpec(
            (
                Field("signs", "uint8", count * self.bucket // 8),
                Field("sums", "float32", count * self.bucket // self.folds),
            )
        )

    def encode_host(self, x, key):
        rows, _ = rows_of(flush(x).astype(np.float64), self.bucket)
        drawn = [g.integers(0, 2, self.bucket) for g in generators(key, len(rows))]
        negative = np.stack(drawn) if drawn else rows
        signed = np.where(negative == 1, -rows, rows).reshape(
            len(rows), self.folds, self.bucket // self.folds
        )
        sums = flush(signed.sum(axis=1).reshape(-1).astype(np.float32))
        return {"signs": np.packbits(negative.astype(np.uint8), axis=1).reshape(-1), "sums": sums}

    def decode_host(self, parts, size):
        negative = np.unpackbits(parts["signs"].reshape(-1, self.bucket // 8), axis=1)
        sums = np.tile(parts["sums"].reshape(len(negative), self.bucket // self.folds), (1, self.folds))
        return np.where(negative == 1, -sums, sums).reshape(-1)[:size]


@qcomp.register
@dataclass(frozen=True)
class Bytes(OnHost):
    """One byte per element: a sign and an exponent in steps of 2^(1/2), relative to the largest of eight."""

    name: ClassVar[str] = "stranger_log"

    @property
    def traits(self):
        return qcomp.Traits(8, delta=0.9, keeps_zero=True)

    def payload_spec(self, size, dtype="float32"):
        return PayloadSpec((Field("codes", "uint8", size), Field("largest", "float32", -(-size // 8))))

    def encode_host(self, x, key):
        rows, _ = rows_of(flush(x).astype(np.float32), 8)
        largest = np.max(np.abs(rows), axis=1, initial=0.0)
        with np.errstate(divide="ignore", invalid="ignore"):
            below = np.round(-2 * np.log2(np.abs(rows, dtype=np.float64) / largest[:, None]))
        codes = np.where(np.isfinite(below) & (below < 126), below + 1, 0)
        codes = np.where((rows < 0) & (codes > 0), codes + 128, codes)
        return {"codes": codes.astype(np.uint8).reshape(-1)[: len(x)], "largest": largest}

    def decode_host(self, parts, size):
        level = (parts["codes"] & 127).astype(np.float64)
        values = np.where(level > 0, np.repeat(parts["largest"], 8)[:size] * 2.0 ** (-(level - 1) / 2), 0.0)
        return flush(np.where(parts["codes"] > 128, -values, values).astype(np.float32))


@qcomp.register
@dataclass(frozen=True)
class Whole(OnHost):
    """One scale for a tensor of any size: a bucket longer than memory."""

    name: ClassVar[str] = "stranger_whole"
    bucket: int = 1 << 31

    @property
    def traits(self):
        return qcomp.Traits(self.bucket, keeps_zero=True)

    def payload_spec(self, size, dtype="float32"):
        return PayloadSpec((Field("codes", "int8", size), Field("step", "float32", min(size, 1))))

    def encode_host(self, x, key):
        step = np.max(np.abs(flush(x)), axis=0, keepdims=True, initial=0.0).astype(np.float32) / np.float32(
            127
        )
        step = np.maximum(step, np.float32(2.0**-126))[: len(x)]
        return {"codes": np.rint(flush(x) / step).clip(-127, 127).astype(np.int8), "step": step}

    def decode_host(self, parts, size):
        return parts["codes"].astype(np.float32) * parts["step"]


@qcomp.register
@dataclass(frozen=True)
class Nothing(OnHost):
    """Zeros, for which nothing is sent; all stays in the residual."""

    name: ClassVar[str] = "stranger_nothing"

    @property
    def traits(self):
        return qcomp.Traits(1, keeps_zero=True, kept=0)

    def payload_spec(self, size, dtype="float32"):
        return PayloadSpec((Field("nothing", "uint8", 0),))

    def encode_host(self, x, key):
        return {"nothing": np.zeros(0, dtype=np.uint8)}

    def decode_host(self, parts, size):
        return np.zeros(size, dtype=np.float32)


STRANGERS = [
    Ternary(),
    StochasticSign(),
    OneDitherPerBucket(),
    EveryEighthDraw(),
    Natural(),
    Deadzone(),
    Deflated(),
    Rotated(),
    Bernoulli(),
    Folded(),
    Bytes(),
    Whole(),
    Nothing(),
]
