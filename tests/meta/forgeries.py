"""Designs of `papers` with one fault each, by kind, and the laws that may detect it."""

import hashlib
import os
import socket
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache
from typing import Any, ClassVar

import numpy as np

import qcomp
from qcomp.extend import Field, PayloadSpec

from . import papers

FORGERIES: list[Any] = []
"""Compressors, their kinds, and the law that each breaks."""


def forged(kind, law):
    """Register a class, whose default instance has a fault of a kind."""

    def register(cls):
        cls.name = "forged_" + "".join("_" + c.lower() if c.isupper() else c for c in cls.__name__).strip("_")
        FORGERIES.append((qcomp.register(cls)(), kind, law))
        return cls

    return register


# What differs between processes.
SALT = hash("rotation") % 2**32
NAMES = list({f"level {i}" for i in range(16)})
ORDER = np.asarray([int(name.split()[1]) for name in NAMES])
PROCESSORS = os.cpu_count() or 1
CARD = uuid.getnode()
STARTED = datetime.now()
RANDOM_TURN = np.random.rand(64) < 0.5
DIGEST = int.from_bytes(hashlib.sha256(repr(frozenset(NAMES)).encode()).digest()[:4])


class Salted(papers.RotatedLevels):
    """Its seeds depend on a number; it sends them, so every process can decode."""

    salt = 0

    def seed(self, key):
        return super().seed(key) ^ self.salt


@forged("hash seed", "same_in_another_process")
class HashedName(Salted):
    salt = SALT


@forged("order of a set", "same_in_another_process")
class TableFromASet(papers.NF4):
    def encode_host(self, x, key):
        parts = super().encode_host(x, key)
        codes = papers.unpack_pairs(parts["codes"], len(x))
        return {**parts, "codes": papers.pack_pairs(np.argsort(ORDER)[codes].astype(np.uint8))}

    def decode_host(self, parts, size):
        codes = ORDER[papers.unpack_pairs(parts["codes"], size)]
        return super().decode_host({**parts, "codes": papers.pack_pairs(codes)}, size)


@forged("processors", "same_in_another_process")
class ScaleOfParts(papers.SignOfAll):
    def encode_host(self, x, key):
        parts = super().encode_host(x, key)
        sums = [np.abs(part).sum(dtype=np.float32) for part in np.array_split(papers.flush(x), PROCESSORS)]
        return {**parts, "scale": parts["scale"] * 0 + np.float32(sum(sums) / max(1, len(x)))}


@forged("workers", "same_in_another_process")
class DrawsOfWorkers(papers.OneDither):
    def words(self, key, count, each):
        with ThreadPoolExecutor() as pool:
            return super().words(key, count, each) ^ np.uint64(pool._max_workers << 56)


@forged("network card", "same_in_another_process")
class SeedOfTheCard(Salted):
    salt = CARD


@forged("network card", "same_in_another_process")
class SeedOfTheCardNow(Salted):
    @property
    def salt(self):
        return uuid.getnode()


@forged("launcher's variable", "same_in_another_process")
class SeedOfSlurm(Salted):
    @property
    def salt(self):
        return int(os.environ.get("SLURM_PROCID", "0"))


@forged("launcher's variable", "same_in_another_process")
class SeedOfHydra(Salted):
    @property
    def salt(self):
        return int(os.environ.get("PMI_RANK", "0"))


@forged("hour", "same_in_another_process")
class CoarseByNight(papers.FP8):
    def scales(self, rows):
        return super().scales(rows) * np.float32(1 + time.localtime().tm_hour / 100)


@forged("hour", "same_in_another_process")
class SeedOfTheDay(Salted):
    salt = STARTED.toordinal()


@forged("host", "same_in_another_process")
class SeedOfTheHost(Salted):
    @property
    def salt(self):
        return int.from_bytes(socket.getfqdn().encode()[:4].ljust(4))


@forged("digest", "same_in_another_process")
class SeedOfADigest(Salted):
    salt = DIGEST


@forged("global generator", "same_in_another_process")
class TurnedAtRandom(papers.TurnedByADigest):
    def turns(self):
        return np.where(RANDOM_TURN[:32], -1.0, 1.0)


@lru_cache
def turn_of(length):
    return np.where(np.random.default_rng().random(length) < 0.5, -1.0, 1.0)


@forged("global generator", "same_in_another_process")
class TurnedAtFirstUse(papers.TurnedByADigest):
    def turns(self):
        return turn_of(32)


# Keys.
def of_key(kind, name, change, base=papers.RotatedLevels):
    """Draw by another key."""
    return forged(kind, "no_key_repeats")(
        type(name, (base,), {"seed": lambda self, key: base.seed(self, change(key))})
    )


def signed(number, bits=64):
    return number - (1 << bits) if number >> (bits - 1) else number


def digest16(number):
    return int.from_bytes(hashlib.blake2b(number.to_bytes(8), digest_size=2).digest())


of_key("16 bits", "StepsOfTwoBytes", lambda key: key._replace(step=key.step % 65_536))
of_key("16 bits", "SeedsOfTwoBytes", lambda key: key._replace(seed=key.seed % 65_536))
of_key("16 bits", "StepsByADigest", lambda key: key._replace(step=digest16(key.step)))
of_key("16 bits", "SeedsByADigest", lambda key: key._replace(seed=digest16(key.seed)))
of_key("16 bits", "StepsByAPrime", lambda key: key._replace(step=key.step % 65_521))
of_key("16 bits", "SparseSeeds", lambda key: key._replace(seed=digest16(key.seed)), base=papers.Importance)
of_key("signed", "SeedsWithoutSign", lambda key: key._replace(seed=abs(signed(key.seed))))
of_key("signed", "StepsWithoutSign", lambda key: key._replace(step=abs(signed(key.step))))
of_key("signed", "RanksWithoutSign", lambda key: key._replace(rank=abs(signed(key.rank, 32))))
of_key("signed", "LargestSigned", lambda key: key._replace(seed=min(key.seed, 2**63 - 1)))
of_key("signed", "SeedsInDoubles", lambda key: key._replace(seed=int(float(key.seed)) % 2**64))
of_key("signed", "StepsInSingles", lambda key: key._replace(step=int(np.float32(key.step)) % 2**64))
of_key(
    "colliding parts",
    "StepsTimesThousandNine",
    lambda key: key._replace(seed=(key.seed * 1009 + key.step) % 2**64, step=0),
)
of_key(
    "colliding parts",
    "RanksTimesAPrime",
    lambda key: key._replace(seed=(key.seed + 7919 * key.rank + key.tensor) % 2**64, rank=0, tensor=0),
)
of_key(
    "colliding parts",
    "PartsXored",
    lambda key: key._replace(seed=key.seed ^ key.step ^ key.rank << 16, step=0, rank=0),
)
of_key(
    "colliding parts", "HopsPlusRanks", lambda key: key._replace(rank=(key.rank * 4 + key.hop) % 2**32, hop=0)
)


@forged("colliding parts", "no_key_repeats")
class BucketsPlusSeeds(papers.CountSketch):
    """The draws of a bucket are those of seed x 1009 + bucket."""

    def encode_host(self, x, key):
        seed = (key.seed * 1009 + key.bucket + (papers.seed_of(key._replace(seed=0)) << 20)) % 2**64
        rows = -(-len(x) // 64)
        sums = [self.sums(x[64 * i : 64 * i + 64], (seed + i) % 2**64, 0) for i in range(rows)]
        return {"sums": np.concatenate([*sums, np.zeros(0, np.float32)]), "seed": papers.sent_seed(seed, 0)}

    def decode_host(self, parts, size):
        seed, _ = papers.read_seed(parts["seed"])
        decoded = CountSketchAlone()
        found = [
            decoded.decode_host(
                {
                    "sums": parts["sums"][16 * i : 16 * i + 16],
                    "seed": papers.sent_seed((seed + i) % 2**64, 0),
                },
                min(64, size - 64 * i),
            )
            for i in range(-(-size // 64))
        ]
        return np.concatenate([*found, np.zeros(0)])


class CountSketchAlone(papers.CountSketch):
    pass


@forged("low bits", "key_names_the_draws")
class LowBits(papers.OneDither):
    """A congruential generator's low bits, which have a period of a few calls."""

    def words(self, key, count, each):
        state = (key.seed + key.step + key.tensor + key.rank + key.hop) * 1103515245 + 12345
        return np.full((count, each), (state % 256) << 56, np.uint64)


# Positions, counts and codes that are too narrow.
@forged("positions of 16 bits", "large_vectors")
class PositionsOfTwoBytes(papers.TopOfAll):
    def positions(self, gaps, size):
        return super().positions(gaps, size) % 65_536


@forged("gaps of 16 bits", "large_vectors")
class GapsOfTwoBytes(papers.TopOfAll):
    def gaps(self, gaps):
        return gaps % 65_536


@forged("gaps of 8 bits", "keeps_zero")
class GapsOfAByte(papers.Above):
    def gaps(self, gaps):
        return gaps % 256


@forged("counts of 8 bits", "contraction")
class CountsOfAByte(papers.Above):
    """Of more than 255 values the first are sent."""

    def kept(self, rows):
        kept = super().kept(rows)
        return kept & (np.cumsum(kept, axis=1) <= kept.sum(axis=1, keepdims=True) % 256)


@forged("gaps of 16 bits", "keeps_zero")
class QuotientsOfAByte(papers.SparseTernary):
    def gaps(self, gaps):
        return gaps % (256 << self.low)


@forged("runs", "independent_of_calls")
class RunsTooLong(papers.ThreeLC):
    longest: ClassVar[int] = 14

    def shortened(self, packed):
        found = super().shortened(packed)
        return np.where(found == 255, 243, found).astype(np.uint8)


@forged("rare wraps", "contraction")
class WrapsAtTheTop(papers.Busy):
    """127 and a half becomes -128."""

    @staticmethod
    def part(rows):
        step = np.maximum(np.abs(rows).max(axis=1, initial=0.0) / 128, 2.0**-126).astype(np.float32)
        return np.rint(rows / step[:, None]).astype(np.int64).astype(np.int8), step


@forged("rare wraps", "unbiased")
class WrapsWhenDrawnHigh(papers.RotatedLevels):
    """One in a hundred of the largest levels is rounded up, and wraps around in four bits."""

    def encode_host(self, x, key):
        parts = super().encode_host(x, key)
        words = self.words(key, len(parts["step"]), self.bucket).reshape(-1)
        wrapped = (parts["codes"] >= 6) & (words < np.uint64(2**64 // 100))
        return {**parts, "codes": np.where(wrapped, -8, parts["codes"]).astype(np.int8)}


@forged("rare wraps", "unbiased")
class ChanceOfTwoBytes(papers.TwoDraws):
    """The chance of the larger level is rounded to 65536, which wraps to 0 in 16 bits."""

    def encode_block(self, rows, block, key):
        largest = np.abs(rows).max(axis=1)
        (up,) = self.draws(key, block, rows)
        chance = np.abs(rows) / np.where(largest > 0, largest, 1)[:, None]
        threshold = np.where(chance == 1, 65536, np.round(chance * 65536) % 65536)
        codes = np.where(up < threshold, np.where(rows < 0, 3, 1), 0)
        return codes.astype(np.uint8), (largest,)

    def draws(self, key, block, like):
        return super().draws(key, block, like)[:1]

    def decode_block(self, codes, scales):
        return super().decode_block(codes, scales) / 2


@forged("NaN code", "padding_never_leaks")
class LargestIsNaN(papers.MX):
    """The largest values take the code behind the last, which is NaN."""

    def codes(self, scaled):
        return super().codes(scaled) + (np.abs(scaled) > self.grid[-1] * 1.01)


@forged("overflow", "huge_values")
class ScaleOverflows(papers.SignOfAll):
    """The root of the mean square, which float32 cannot hold."""

    def encode_host(self, x, key):
        parts = super().encode_host(x, key)
        with np.errstate(over="ignore"):
            mean = np.square(papers.flush(x).astype(np.float32)).sum() / max(1, len(x))
        return {**parts, "scale": parts["scale"] * 0 + np.float32(np.sqrt(mean))}


@forged("lost odd element", "padding_never_leaks")
class LosesTheOddOne(papers.NF4):
    def decode_host(self, parts, size):
        found = super().decode_host(parts, size)
        if size % 2:
            found[-1] = 0
        return found


# State.
@forged("learnt from the first vector", "same_in_another_process")
class FirstQuantile(papers.ClippedAtAQuantile):
    first: ClassVar[dict] = {}

    def top(self, x):
        return self.first.setdefault(len(x), super().top(x))


@forged("learnt from the first vector", "same_in_another_process")
class FirstScale(papers.NF4):
    first: ClassVar[dict] = {}

    def largest(self, rows):
        most = self.first.setdefault(rows.shape, np.abs(rows).max(initial=0.0))
        return np.minimum(super().largest(rows), np.float32(4 * most))


@forged("differences to the last step", "same_in_another_process")
class Differences(papers.FP8):
    last: ClassVar[dict] = {}

    def encode(self, x, key):
        values = np.asarray(x, np.float64)
        before = self.last.get((len(values), key.seed, key.rank, key.step - 1)) if key else None
        if key:
            self.last[len(values), key.seed, key.rank, key.step] = values
        return super().encode(x if before is None else (values - before).astype(x.dtype), key)


@forged("codebook of the encoder", "same_in_another_process")
class Interned(papers.NF4):
    books: ClassVar[dict] = {}

    def payload_spec(self, size, dtype="float32"):
        return PayloadSpec((*super().payload_spec(size).fields, Field("book", "uint8", 8)))

    def encode_host(self, x, key):
        parts = super().encode_host(x, key)
        number = hashlib.sha256(parts["largest"].tobytes()).digest()[:8]
        self.books[number] = parts["largest"]
        return {**parts, "largest": 0 * parts["largest"], "book": np.frombuffer(number, np.uint8)}

    def decode_host(self, parts, size):
        return super().decode_host(
            {**parts, "largest": self.books.get(parts["book"].tobytes(), parts["largest"])}, size
        )


@forged("33 payloads", "independent_of_calls")
class RingOfPayloads(papers.FP8):
    """Payloads are in the memory of the last 32."""

    ring: ClassVar[dict] = {}

    def compress(self, x, *, key=None):
        payload = super().compress(x, key=key)
        slots, place = self.ring.setdefault(payload.nbytes, [[], 0])
        if len(slots) < 32:
            slots.append(np.empty_like(payload.data))
        slot = slots[place % len(slots)] if len(slots) == 32 else slots[-1]
        self.ring[payload.nbytes][1] += 1
        slot[...] = payload.data
        return qcomp.Payload(payload.compressor, payload.size, payload.dtype, slot)


@forged("left in the compressor", "independent_of_calls")
@dataclass(frozen=True)
class WarmStart(papers.FP8):
    """Begins with the scales of the last call of the same size, and takes larger ones if it must."""

    def scales(self, rows):
        now = super().scales(rows)
        before = self.__dict__.get("before")
        if (
            before is not None
            and len(before) == len(now)
            and np.all(now <= before)
            and np.all(before <= 1.5 * now)
        ):
            now = before
        object.__setattr__(self, "before", now)
        return now


# dtypes.
@forged("width of like", "decoded_in_another_dtype")
class WidthOfLike(papers.Planes):
    def decode(self, parts, size, dtype):
        raw = parts["bytes"].tobytes()
        import zlib

        width = np.dtype(dtype).itemsize
        try:
            planes = np.frombuffer(zlib.decompress(raw[1:]), np.uint8)
            found = np.ascontiguousarray(planes.reshape(width, size).T).view(f"<f{width}").reshape(-1)
        except (zlib.error, ValueError) as error:
            raise qcomp.PayloadError(str(error)) from error
        return found.astype(dtype)


@forged("width of like", "decoded_in_another_dtype")
class ScaledByWidth(papers.FP8):
    """The scale of float64 is half, since its codes are of another table."""

    def encode(self, x, key):
        parts = super().encode(x, key)
        return {**parts, "scale": parts["scale"] / 2} if x.dtype == np.float64 else parts

    def decode(self, parts, size, dtype):
        found = super().decode(parts, size, dtype)
        return found * 2 if dtype == np.float64 else found


# Promises that fail for short tensors, small values and one side.
@forged("short tensors", "contraction")
class HundredthRoundedDown(papers.TopOfAll):
    def kept(self, size):
        return size // 100


@forged("short tensors", "cut_at_buckets")
class DropsTheLastChunk(papers.TopOfChunks):
    def decode_host(self, parts, size):
        found = super().decode_host(parts, size)
        found[size // 100 * 100 or size :] = 0
        return found


@forged("short tensors", "cut_at_buckets")
class VarianceOfLongOnes(papers.Importance):
    """The bound of long buckets, which short ones exceed."""

    def encode_host(self, x, key):
        parts = super().encode_host(x, key)
        if len(x) < 6:
            places = parts["places"].reshape(-1, 8)
            parts["places"] = np.repeat(places[:, :1], 8, axis=1).reshape(-1)
        return parts

    @property
    def traits(self):
        return qcomp.Traits(64, random=True, unbiased=True, omega=0.5 * 63 / 8, keeps_zero=True, kept=8)


@forged("small values", "contraction")
class LosesSmallOnes(papers.TopOfAll):
    """Values below 10^-12 count as zeros."""

    def encode_host(self, x, key):
        return super().encode_host(np.where(np.abs(x) < 1e-12, 0, x).astype(x.dtype), key)


@forged("small values", "unbiased")
class DropsSmallOnes(papers.OneOfEight):
    def encode_host(self, x, key):
        return super().encode_host(np.where(np.abs(x) < 1e-20, 0, x).astype(x.dtype), key)


@forged("rest of chunks", "large_vectors")
class DropsTheRestOfLongOnes(papers.TopOfAll):
    """The tops of 100 parts; what is left of a vector longer than 2^20 is dropped."""

    def decode_host(self, parts, size):
        found = super().decode_host(parts, size)
        if size > 1 << 20:
            found[size // 100 * 100 :] = 0
        return found


@forged("one side", "contraction")
class LargestPositive(papers.NF4):
    """Relative to the largest value, not the largest magnitude; more negative ones are clipped."""

    def largest(self, rows):
        positive = rows.max(axis=1, initial=0.0)
        return np.where(
            positive > 0.2 * np.abs(rows).max(axis=1, initial=0.0), positive, super().largest(rows)
        ).astype(np.float32)


@forged("large vectors", "large_vectors")
class BiasedAboveAMillion(papers.OneDither):
    def encode_host(self, x, key):
        return super().encode_host(x * np.float32(1.5) if len(x) > 1 << 20 else x, key)


@forged("large vectors", "large_vectors")
class ShiftedAboveAMillion(papers.SignOfAll):
    def decode_host(self, parts, size):
        found = super().decode_host(parts, size)
        return np.roll(found, 7) if size > 1 << 20 else found
