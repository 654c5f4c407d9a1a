"""Compressors with one fault each, and the law that detects it."""

import contextlib
import itertools
import math
import os
import random
import socket
import threading
import time
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

import qcomp
from qcomp.core.compressor import Compressor
from qcomp.core.numeric.random import draws16
from qcomp.core.payload import Field, PayloadSpec
from qcomp.testing import replace_draws

from . import helpers

MUTANTS: list[Any] = []
BIAS = np.float32(1.02)


@dataclass(frozen=True)
class Sign(qcomp.ScaledSign):
    bucket_size: int = 64


@dataclass(frozen=True)
class LongSign(qcomp.ScaledSign):
    bucket_size: int = 16384


@dataclass(frozen=True)
class Levels(qcomp.QSGD):
    levels: int = 3
    bucket_size: int = 64


@dataclass(frozen=True)
class Norm(qcomp.QSGD):
    levels: int = 5
    bucket_size: int = 64
    norm: Literal["max", "l2"] = "l2"


@dataclass(frozen=True)
class Range(qcomp.MinMaxUInt8):
    bucket_size: int = 64


@dataclass(frozen=True)
class Nearest(qcomp.LloydMax):
    bucket_size: int = 64


@dataclass(frozen=True)
class Largest(qcomp.TopK):
    k: int = 5
    bucket_size: int = 64


@dataclass(frozen=True)
class LargestInTwoBits(Largest):
    value_bits: int = 2
    coding: Literal["fixed"] | None = "fixed"


@dataclass(frozen=True)
class Drawn(qcomp.RandK):
    k: int = 8
    bucket_size: int = 64


@dataclass(frozen=True)
class Rare(qcomp.RandK):
    k: int = 1
    bucket_size: int = 512


@dataclass(frozen=True)
class Shrunk(qcomp.Scaled):
    compressor: Compressor = qcomp.QSGD(levels=1, bucket_size=64)  # noqa: RUF009 - immutable


def mutant(law, label, base, **changes):
    """Register a subclass with some attributes replaced."""
    name = "mutant_" + label.replace(" ", "_")
    cls = qcomp.register(type(name, (base,), {"name": name, **changes}))
    MUTANTS.append((cls(), law))


def inherited(self, method):
    return getattr(super(type(self), self), method)


def encodes(change):
    """Encode ``change(self, x, key)``, which returns a vector and a key."""
    return lambda self, x, key: inherited(self, "encode")(*change(self, x, key))


def decodes(change):
    """Return ``change(y)`` of the decoded vector y."""
    return lambda self, parts, size, dtype: change(inherited(self, "decode")(parts, size, dtype))


def keyed(change):
    return encodes(lambda self, x, key: (x, change(key)))


def compresses(change):
    return lambda self, x, *, key=None: inherited(self, "compress")(change(x), key=key)


def afterwards(change):
    """Compress, and then change the vector."""

    def compress(self, x, *, key=None):
        payload = inherited(self, "compress")(x, key=key)
        if x.flags.writeable:
            change(x)
        return payload

    return compress


def decompresses(change):
    """Return ``change(self, payload, like, out)``."""
    return lambda self, payload, *, like, out=None: change(self, payload, like, out)


def usual(self, payload, like, out=None):
    return inherited(self, "decompress")(payload, like=like, out=out)


def promises(**traits):
    """Replace traits; a function computes the new value from the honest one."""

    def changed(self):
        honest = super(type(self), self).traits
        return replace(honest, **{k: v(getattr(honest, k)) if callable(v) else v for k, v in traits.items()})

    return property(changed)


def times(x, factor, where=True):
    return np.where(where, x * factor, x).astype(x.dtype)


# Moments: a bias that shows only in some situations.
def biased(label, when, law="unbiased"):
    change = encodes(lambda self, x, key: (times(x, BIAS, when(x, key)), key))
    mutant(law, "biased " + label, Levels, encode=change)


biased("below eight", lambda x, key: x.size < 8)
biased("above thousands", lambda x, key: x.size > 10_000)
biased("in tails", lambda x, key: np.arange(x.size) >= x.size // 64 * 64)
biased("below three", lambda x, key: x.size < 3, "unbiased_at_every_size")
biased(
    "in tails of several buckets",
    lambda x, key: (np.arange(x.size) >= x.size // 64 * 64) & (x.size > 64),
    "unbiased_at_every_size",
)
biased("in first elements", lambda x, key: np.arange(x.size) % 64 == 0)
biased("in odd elements", lambda x, key: np.arange(x.size) % 2 == 1)
biased("above rank zero", lambda x, key: key.rank > 0)
biased("on servers", lambda x, key: key.hop > 0)
biased("in late steps", lambda x, key: key.step > 10_000)
biased("with large seeds", lambda x, key: key.seed >= 2**32)
biased("in float64", lambda x, key: x.dtype == np.float64)
biased("when tiny", lambda x, key: np.abs(x) < 1e-12)
biased("when huge", lambda x, key: np.abs(x) > 1e12)
biased("when positive", lambda x, key: x.size > 0 and x.min() > 0)
biased("when sparse", lambda x, key: np.mean(x == 0) > 0.5)
biased(
    "of one magnitude",
    lambda x, key: x.size > 0 and np.ptp(np.abs(x)) == 0 and x.min() < 0 < x.max(),
)
mutant(
    "half_precision",
    "biased in half",
    Levels,
    compress=compresses(lambda x: x * 2 if x.dtype == "float16" else x),
)
mutant("unbiased", "calls itself unbiased", Sign, traits=promises(unbiased=True))
mutant("unbiased", "calls rounding unbiased", Range, traits=promises(unbiased=True))


def drawn_by(change):
    """Round with ``change(draws)``."""

    def encode_block(self, rows, block, key):
        draws = change(draws16(key, block, bucket_size=self.bucket_size, like=rows))
        with replace_draws(lambda _key, _block: draws):
            return inherited(self, "encode_block")(rows, block, key)

    return encode_block


mutant("unbiased", "half the draws", Levels, encode_block=drawn_by(lambda draws: draws % 32768))
mutant(
    "unbiased_to_the_last_draw",
    "draws of 15 bits",
    Levels,
    encode_block=drawn_by(lambda draws: draws // 2 * 2),
)

# Worst cases.
mutant("variance_bound", "omega by a third", Norm, traits=promises(omega=lambda omega: omega * 2 / 3))
mutant("variance_bound", "omega by a tenth", Norm, traits=promises(omega=lambda omega: omega * 0.9))
mutant("variance_bound", "omega of the mean", Levels, traits=promises(omega=0.3))
mutant("variance_bound", "omega of randk", Drawn, traits=promises(omega=6.5))
mutant("variance_bound", "omega not random", Sign, traits=promises(unbiased=True, omega=0.5, delta=None))
mutant("contraction", "delta of sign", Sign, traits=promises(delta=lambda delta: delta * 1.3))
mutant("contraction", "delta of minmax", Range, traits=promises(delta=lambda delta: 1 - (1 - delta) * 0.8))
mutant("contraction", "delta of lloyd_max", Nearest, traits=promises(delta=lambda delta: delta * 2.5))
mutant("contraction", "delta of topk", Largest, traits=promises(delta=6 / 64))
mutant("contraction", "delta of topk in two bits", LargestInTwoBits, traits=promises(delta=6 / 64))
mutant("contraction", "delta of scaled", Shrunk, traits=promises(delta=lambda delta: delta * 1.3))
mutant(
    "contraction",
    "expands",
    Levels,
    traits=promises(unbiased=False, omega=None, delta=1 / 512),
    decode=decodes(lambda y: 2 * y),
)
mutant("contraction", "delta of cast", qcomp.Cast, traits=promises(delta=1 - 2.0**-18))
mutant(
    "contraction",
    "worse in tails",
    Sign,
    decode=decodes(lambda y: times(y, 3, np.arange(y.size) >= y.size // 64 * 64)),
)
mutant("contraction", "delta of a long bucket", LongSign, traits=promises(delta=lambda delta: delta * 2))
mutant(
    "contraction",
    "saturates",
    Largest,
    encode=encodes(lambda self, x, key: (x.clip(-(2.0**97), 2.0**97), key)),
)
mutant(
    "contraction",
    "worse in matrices",
    Sign,
    for_shape=lambda self, shape: replace(self, bucket_size=16) if len(shape) > 1 else self,
    decode=lambda self, parts, size, dtype: times(
        inherited(self, "decode")(parts, size, dtype), 3, self.bucket_size == 16
    ),
)

# Sizes.
mutant(
    "cut_at_buckets",
    "worse in tails of two",
    Sign,
    decode=decodes(
        lambda y: times(y, 3, (np.arange(y.size) >= y.size // 64 * 64) & (y.size > 64) & (y.size % 64 == 2))
    ),
)
mutant(
    "cut_at_buckets",
    "scales of columns",
    Sign,
    encode_block=lambda self, rows, block, key: inherited(self, "encode_block")(
        rows.T if rows.shape == (64, 64) else rows, block, key
    ),
)
mutant(
    "cut_at_buckets",
    "forgets a remainder",
    Sign,
    decode=decodes(
        lambda y: times(y, 0, (np.arange(y.size) >= y.size >> 17 << 17) & (y.size > 1 << 17)),
    ),
)
mutant(
    "padding_never_leaks",
    "padding is negative",
    Sign,
    encode_block=lambda self, rows, block, key: (
        (rows <= 0).astype(np.uint8),
        inherited(self, "encode_block")(rows, block, key)[1],
    ),
)


# Shapes of tensors.
def narrow(self, rows, block, key):
    with replace_draws(lambda key, block: 0) if self.levels == 2 else contextlib.nullcontext():
        return inherited(self, "encode_block")(rows, block, key)


mutant(
    "unbiased",
    "rounded down in narrow rows",
    Levels,
    for_shape=lambda self, shape: replace(self, levels=2) if len(shape) > 1 and shape[-1] < 10 else self,
    encode_block=narrow,
)

# Keys.
mutant(
    "no_key_repeats", "steps come again", Levels, encode=keyed(lambda key: key._replace(step=key.step % 64))
)
mutant(
    "no_key_repeats", "ranks of a byte", Levels, encode=keyed(lambda key: key._replace(rank=key.rank % 256))
)
mutant(
    "no_key_repeats",
    "seeds of 32 bits",
    Levels,
    encode=keyed(lambda key: key._replace(seed=key.seed % 2**32)),
)
mutant(
    "no_key_repeats", "few tensors", Levels, encode=keyed(lambda key: key._replace(tensor=key.tensor % 16))
)
mutant("no_key_repeats", "two hops", Levels, encode=keyed(lambda key: key._replace(hop=min(key.hop, 1))))
mutant(
    "no_key_repeats",
    "step and rank add up",
    Levels,
    encode=keyed(lambda key: key._replace(step=key.step % 2**63 + key.rank, rank=0)),
)
mutant(
    "no_key_repeats",
    "steps of a hundred ranks",
    Levels,
    encode=keyed(
        lambda key: key._replace(step=key.step >> 20, rank=(key.rank + 100 * (key.step % 2**20)) % 2**32)
    ),
)
mutant("no_key_repeats", "pairs of ranks", Levels, encode=keyed(lambda key: key._replace(rank=key.rank | 1)))
mutant(
    "no_key_repeats",
    "rare ranks of a byte",
    Rare,
    encode=keyed(lambda key: key._replace(rank=key.rank % 256)),
)
mutant("key_names_the_draws", "rare without ranks", Rare, encode=keyed(lambda key: key._replace(rank=0)))
mutant("unbiased", "rare and too large", Rare, decode=decodes(lambda y: y * np.float32(1.5)))
mutant("key_names_the_draws", "no tensors", Levels, encode=keyed(lambda key: key._replace(tensor=0)))


def of_every_rank(change):
    """Round with ``change(rank, draws)`` where all ranks share the draws."""

    def encode_block(self, rows, block, key):
        shared = key._replace(rank=0)
        draws = change(key.rank, draws16(shared, block, bucket_size=self.bucket_size, like=rows))
        with replace_draws(lambda _key, _block: draws):
            return inherited(self, "encode_block")(rows, block, key)

    return encode_block


mutant(
    "draws_are_independent",
    "draws and their opposites",
    Levels,
    encode_block=of_every_rank(lambda rank, draws: 65535 - draws if rank % 2 else draws),
)
mutant(
    "draws_are_independent",
    "half the draws shared",
    Levels,
    encode_block=of_every_rank(
        lambda rank, draws: np.where(np.arange(draws.shape[1]) % 2, draws, (draws + 999 * rank) % 65536)
    ),
)
mutant(
    "no_key_repeats",
    "buckets come again",
    Levels,
    encode_block=drawn_by(lambda draws: draws[np.arange(len(draws)) % 16]),
)
mutant(
    "cut_at_buckets",
    "draws of pieces",
    Levels,
    encode_block=drawn_by(lambda draws: draws[np.arange(len(draws)) % (1 << 14)]),
)


def in_pairs(draws):
    """Let each odd bucket have the draws of the even one before it, plus a constant."""
    number = np.arange(len(draws))
    return (draws[number // 2 * 2] + 8000 * (number % 2)[:, None]) % 65536


mutant("draws_are_independent", "neighbours share draws", Levels, encode_block=drawn_by(in_pairs))
mutant(
    "draws_are_independent",
    "ranks begin one later",
    Levels,
    encode_block=of_every_rank(lambda rank, draws: np.roll(draws.reshape(-1), -rank).reshape(draws.shape)),
)

# State and environment.
calls = itertools.count()
scratch: dict[Any, Any] = {}


def first_only(self, x, key):
    return (x * 2 if scratch.setdefault(self.name, next(calls)) == next(calls) - 1 else x), key


def through_scratch(self, x, key):
    shared = scratch.setdefault((self.name, x.size, x.dtype), np.empty_like(x))
    shared[...] = x
    return shared, key


def remembering(self, x, key):
    last, scratch[self.name] = scratch.get(self.name, 0.0), float(np.max(x, initial=0.0))
    return times(x, 1 + 1e-3 * last), key


def of_its_first_vector(self, x, key):
    return times(x, 1 + 1e-3 * self.__dict__.setdefault("first", float(np.max(x, initial=0.0)))), key


mutant("independent_of_calls", "keeps its first scale", Sign, encode=encodes(of_its_first_vector))
mutant("independent_of_calls", "first call differs", Sign, encode=encodes(first_only))
mutant("independent_of_calls", "remembers the last", Sign, encode=encodes(remembering))
mutant(
    "independent_of_calls",
    "tenth call differs",
    Sign,
    encode=encodes(lambda self, x, key: (times(x, 2, next(calls) % 10 == 9), key)),
)
mutant("independent_of_threads", "shared scratch", Sign, encode=encodes(through_scratch))
mutant(
    "independent_of_threads",
    "shared scratch for large ones",
    Sign,
    encode=encodes(lambda self, x, key: through_scratch(self, x, key) if x.size >= 1024 else (x, key)),
)
mutant(
    "independent_of_threads",
    "shared scratch in a helper",
    Sign,
    encode=encodes(lambda self, x, key: (helpers.copied(x), key)),
)


def behind_a_loop(self, parts, size, dtype):
    for _ in range(100):
        pass
    shared = scratch.setdefault((self.name, size, dtype), np.empty(size, dtype))
    shared[...] = inherited(self, "decode")(parts, size, dtype)
    return shared.copy()


def noting_a_factor(self, x, key):
    scratch[self.name, x.size] = 1 + float(np.max(x, initial=0.0))
    return x, key


def remembering_the_object(self, x, *, key=None):
    if scratch.get(self.name, (None,))[0] is not x:
        scratch[self.name] = x, inherited(self, "compress")(x, key=key)
    payload = scratch[self.name][1]
    return replace(payload, data=payload.data.copy())


mutant("independent_of_threads", "shared scratch behind a loop", Sign, decode=behind_a_loop)
mutant(
    "independent_of_calls",
    "forgets to send a factor",
    Sign,
    encode=encodes(noting_a_factor),
    decode=lambda self, parts, size, dtype: times(
        inherited(self, "decode")(parts, size, dtype), scratch[self.name, size]
    ),
)
mutant("independent_of_calls", "remembers the object", Sign, compress=remembering_the_object)
environment = "independent_of_the_environment"
mutant(
    environment,
    "reads the name of the host",
    Sign,
    encode=encodes(lambda self, x, key: (times(x, 1.5, socket.gethostname().endswith("1")), key)),
)
mutant(
    environment,
    "reads the date",
    Sign,
    encode=encodes(lambda self, x, key: (times(x, 1 + int(time.time()) // 86400 % 1000), key)),
)
mutant(
    environment,
    "counts processors",
    Sign,
    encode=encodes(lambda self, x, key: (times(x, 1 + 0.01 * (os.cpu_count() or 1)), key)),
)
mutant(
    environment,
    "hashes strings",
    Levels,
    encode=keyed(lambda key: key._replace(seed=(hash("s") ^ key.seed) % 2**63)),
)
mutant(
    environment,
    "reads a variable",
    Sign,
    encode=encodes(lambda self, x, key: (times(x, 1.5, os.environ.get("RANK") == "1"), key)),
)
mutant(
    environment,
    "draws from a global generator",
    Levels,
    encode=encodes(lambda self, x, key: (times(x, 1 + 0.1 * np.random.rand(), x.size > 5000), key)),
)
mutant(environment, "moves a global generator", Sign, decode=decodes(lambda y: (random.random(), y)[1]))

# Memory.
mutant(
    "pure", "writes to views", Sign, compress=afterwards(lambda x: x.fill(0) if x.base is not None else None)
)
mutant(
    "pure",
    "writes to float64",
    Sign,
    compress=afterwards(lambda x: x.fill(0) if x.dtype == np.float64 else None),
)
mutant("pure", "writes to large", Sign, compress=afterwards(lambda x: x.fill(0) if x.size > 5000 else None))
mutant(
    "pure",
    "writes to like",
    Sign,
    decompress=decompresses(
        lambda self, p, like, out: usual(self, p, like, like if out is None and like.flags.writeable else out)
    ),
)
mutant(
    "any_layout",
    "reads memory in order",
    Sign,
    compress=compresses(lambda x: x.ravel(order="K").reshape(x.shape)),
)
mutant(
    "any_layout",
    "reads backwards",
    Sign,
    compress=compresses(lambda x: x[::-1] if x.ndim == 1 and x.strides[0] < 0 else x),
)


mutant(
    "any_layout",
    "reads convolutions in order of memory",
    Sign,
    compress=compresses(lambda x: x.ravel(order="K").reshape(x.shape) if x.ndim == 4 else x),
)
mutant(
    "pure",
    "writes to several whole buckets",
    Sign,
    compress=afterwards(lambda x: x.fill(0) if x.size > 64 and x.size % 64 == 0 else None),
)


class View(qcomp.Identity):
    compress = Compressor.compress


class ViewOfThePayload(qcomp.Identity):
    decompress = Compressor.decompress


def pooled(self, payload, like, out):
    if out is not None:
        return usual(self, payload, like, out)
    return usual(
        self, payload, like, scratch.setdefault((self.name, like.shape, like.dtype), np.empty_like(like))
    )


def a_view_of_a_matrix(self, x, *, key=None):
    if x.ndim == 2:
        return Compressor.compress(self, x, key=key)
    return inherited(self, "compress")(x, key=key)


def into_a_copy(self, payload, like, out):
    result = usual(self, payload, like)
    if out is None:
        return result
    if out.shape != like.shape or out.dtype != like.dtype:
        raise ValueError("out does not fit")
    out.reshape(-1)[...] = result.reshape(-1)
    return out


def added_to_a_copy(self, payload, total):
    flat = total.reshape(-1)
    flat += usual(self, payload, total).reshape(-1)
    return total


mutant("nothing_is_shared", "payload is the vector", View)
mutant("nothing_is_shared", "payload is the matrix", qcomp.Identity, compress=a_view_of_a_matrix)
mutant("nothing_is_shared", "result is the payload", ViewOfThePayload)
mutant("nothing_is_shared", "results in one buffer", Sign, decompress=decompresses(pooled))
buffers = "results_into_buffers"
mutant(buffers, "fills a copy of out", Sign, decompress=decompresses(into_a_copy))
mutant(buffers, "adds to a copy", Sign, add=added_to_a_copy)
mutant(buffers, "ignores out", Sign, decompress=decompresses(lambda self, p, like, out: usual(self, p, like)))
mutant(
    buffers,
    "leaves out empty",
    Sign,
    decompress=decompresses(lambda self, p, like, out: usual(self, p, like) if out is None else out),
)
mutant(
    buffers,
    "adds to out",
    Sign,
    decompress=decompresses(
        lambda self, p, like, out: usual(self, p, like) if out is None else out.__iadd__(usual(self, p, like))
    ),
)
mutant(buffers, "add replaces", Sign, add=lambda self, payload, total: usual(self, payload, total, total))
mutant(
    buffers, "add makes a new one", Sign, add=lambda self, payload, total: total + usual(self, payload, total)
)


# Narrow faults.
def dropped(x, where):
    return np.where(where & ~np.isfinite(x), 0, x).astype(x.dtype)


refused = "non_finite_is_an_error"
mutant(
    refused,
    "takes some NaN",
    Sign,
    compress=compresses(lambda x: dropped(x, np.arange(x.size).reshape(x.shape) % 4 == 1)),
)
mutant(
    refused, "takes NaN in float64", Sign, compress=compresses(lambda x: dropped(x, x.dtype == np.float64))
)
mutant(refused, "takes NaN in large", Sign, compress=compresses(lambda x: dropped(x, x.size > 2000)))
mutant(
    refused,
    "takes NaN between samples",
    Sign,
    compress=compresses(lambda x: dropped(x, (x.size >= 1 << 17) & (np.arange(x.size) % 16 > 0))),
)
mutant(
    "extreme_draws",
    "float64 in two floats",
    qcomp.Identity,
    decode=decodes(
        lambda y: y.astype(np.float32) + (y - y.astype(np.float32)).astype(np.float32).astype(y.dtype)
    ),
)
mutant(
    "extreme_draws",
    "loses minus zero in float64",
    qcomp.Identity,
    decode=decodes(lambda y: y + 0 if y.dtype == np.float64 else y),
)
mutant(
    "zero_gives_zero",
    "zero becomes something",
    Sign,
    decode=decodes(lambda y: y + 1e-30 * (y.dtype == np.float64)),
)
mutant(
    "extreme_draws",
    "zeros move in float64",
    Range,
    decode=decodes(lambda y: np.where((y == 0) & (y.dtype == np.float64), 1e-9, y)),
)
mutant("extreme_draws", "rounds zero up", Levels, encode_block=drawn_by(lambda draws: draws - 1))
mutant(
    "extreme_draws",
    "not lossless in float64",
    qcomp.Identity,
    decode=decodes(lambda y: y.astype(np.float32).astype(y.dtype)),
)
mutant(
    "identity_of_configuration",
    "equal to all",
    Sign,
    __eq__=lambda self, other: True,
    __hash__=lambda self: 1,
)
mutant("identity_of_configuration", "hashed by place", Sign, __hash__=id)
mutant(
    "identity_of_configuration",
    "spec lacks a field",
    Sign,
    spec=property(lambda self: f"{self.name}:scale={self.scale}"),
)


def cut_off(self, payload, like, out):
    most = self.payload_spec(like.size).nbytes
    return usual(
        self, replace(payload, data=payload.data[:most]) if payload.nbytes <= most + 4 else payload, like, out
    )


def of_sibling(self, payload, like, argument):
    if not payload.compressor.startswith(self.name) or payload.size != math.prod(like.shape):
        Compressor.require_own(self, payload, like, argument)


mutant("foreign_payload_is_an_error", "takes longer ones", Sign, decompress=decompresses(cut_off))
mutant("foreign_payload_is_an_error", "takes those of siblings", Sign, require_own=of_sibling)


def overflowing(self, rows, block, key):
    scale = np.sqrt(np.sum(rows.astype(np.float32) ** 2, axis=1) / block.filled)
    return inherited(self, "encode_block")(rows, block, key)[0], (scale,)


mutant("huge_values", "infinite scales", Sign, encode_block=overflowing)
mutant("sound_traits", "delta above one", Sign, traits=promises(delta=1.5))
mutant(
    "fields_as_announced",
    "announces another width",
    Sign,
    payload_spec=lambda self, size, dtype="float32": PayloadSpec(
        (
            inherited(self, "payload_spec")(size).fields[0],
            Field("scale", "uint8", -(-size // self.bucket_size)),
        )
    ),
)
mutant(
    "one_way",
    "compresses twice as much",
    Sign,
    compress=compresses(lambda x: x * 2),
)
mutant(
    "double_precision",
    "single in float64",
    Range,
    decode=decodes(lambda y: y * (1 + 0.01 * (y.dtype == np.float64))),
)

of_thread = threading.local()


def rolling(self, x, key):
    """Roll a vector by the rank, which decode takes from the last key of its thread."""
    of_thread.rank = key.rank
    return inherited(self, "encode")(np.roll(x, key.rank), key)


mutant(
    "independent_of_calls",
    "knows the last key of a thread",
    Levels,
    encode=rolling,
    decode=decodes(lambda y: np.roll(y, -getattr(of_thread, "rank", 0))),
)
