"""`check_kernels` catches kernel sets with one fault each, and accepts a correct one."""

import os
import socket
from typing import Any

import numpy as np
import pytest

import qcomp
from qcomp.core import primitives
from qcomp.core.compressors.qsgd import WideQSGD
from qcomp.core.errors import NonFiniteError
from qcomp.core.kernels import Encoded, EncodedFrame, use_kernels
from qcomp.core.mean.codec import Codec
from qcomp.core.numeric.arrays import write_into
from qcomp.testing import ContractError, check_kernels
from qcomp.testing import kernels as laws_of_kernels
from qcomp.testing.kernel_chunks import check_chunks

SIGN = qcomp.ScaledSign(bucket_size=64)
LEVELS = qcomp.QSGD(levels=7, bucket_size=64)
RANGE = qcomp.MinMaxUInt8(bucket_size=64)
WIDE = WideQSGD(levels=1000, bucket_size=64)


class Whole:
    """Kernels that run the pure version and keep every rule of the protocol."""

    name = "whole"
    weighs_blends = True

    def takes(self, x):
        return isinstance(x, np.ndarray) and x.dtype == np.float32

    def encode(self, compressor, x, residual, key, *, out, blend):
        with use_kernels(None):
            try:
                return primitives.encode(compressor, x, residual, key, out=out, blend=blend)
            except NonFiniteError:
                return None

    def decode(self, compressor, data, like, *, out, accumulate):
        payload = qcomp.Payload(compressor.spec, like.size, "float32", data)
        with use_kernels(None):
            return primitives.decode(compressor, payload, like, out=out, accumulate=accumulate)

    def empty_like(self, x):
        return np.empty_like(x)

    def average(self, compressor, payloads, like, *, out):
        sent = [qcomp.Payload(compressor.spec, like.size, "float32", data) for data in payloads]
        with use_kernels(None):
            return primitives.average(compressor, sent, like, out=out)

    def compress_mean(self, compressor, payloads, like, residual, key, *, out):
        with use_kernels(None):
            mean = self.average(compressor, payloads, like, out=None)
            try:
                encoded = primitives.encode(compressor, mean, residual, key)
            except NonFiniteError:
                return None
        if out is None or encoded.residual is None:
            return encoded
        return encoded._replace(residual=write_into(out, encoded.residual))

    def empty_likes(self, arrays):
        return [np.empty_like(x) for x in arrays]

    def encode_frames(self, frames, tensors, residuals, outs, key, *, blends):
        with use_kernels(None):
            sent = Codec(tensors).encode(
                frames, tensors, residuals, key, donate=outs is tensors, blends=blends, into=outs
            )
        if sent.error and outs is tensors:
            raise sent.error
        return None if sent.error else list(sent.messages)

    def decode_frames(self, frames, messages, outs):
        with use_kernels(None):
            codec = Codec(outs)
            codec.decode_into(
                outs, [codec.open_from(0, *each) for each in zip(messages, frames, strict=True)]
            )
        return True

    def average_frame(self, frame, messages, outs):
        with use_kernels(None):
            codec = Codec(outs)
            codec.average([codec.open_from(0, message, frame) for message in messages], outs)
        return True

    def compress_mean_frame(self, frame, messages, like, residuals, key, *, into):
        with use_kernels(None):
            sizes = {segment.tensor: segment.stop for segment in frame.chunk}
            codec = Codec(
                [np.empty(sizes.get(i, 0), like.dtype) for i in range(max(sizes, default=-1) + 1)], like
            )
            opened = [codec.open_from(0, message, frame) for message in messages]
            sent = codec.encode_average(opened, residuals, key, into=into)
        return None if sent.error else EncodedFrame(sent.messages[0], sent.residuals)

    def finish_mean(self, total, count):
        with use_kernels(None):
            return primitives.finish_mean(total, count)

    def momentum(self, m, g, beta1, scale):
        with use_kernels(None):
            return primitives.momentum(m, g, beta1, scale)

    def nesterov(self, m, g, beta1):
        with use_kernels(None):
            return primitives.nesterov(m, g, beta1)

    def descend(self, p, d, rate, decay, *, out):
        with use_kernels(None):
            return primitives.descend(p, d, rate, decay, out=out)

    def scale(self, x, factor):
        with use_kernels(None):
            return primitives.scale(x, factor)

    def frozen_step(self, p, m, v, numbers):
        with use_kernels(None):
            return primitives.frozen_step(p, m, v, numbers)

    def frozen_steps(self, params, momenta, variances, numbers, *, donate):
        with use_kernels(None):
            moved = primitives.frozen_steps(params, momenta, variances, numbers)
        return (
            [(write_into(p, new), m) for p, (new, m) in zip(params, moved, strict=True)] if donate else moved
        )

    def adam_steps(self, params, momenta, variances, gradients, numbers, *, donate):
        with use_kernels(None):
            moved = primitives.adam_steps(params, momenta, variances, gradients, numbers)
        if not donate:
            return moved
        old = zip(params, momenta, variances, strict=True)
        return [tuple(map(write_into, *each)) for each in zip(old, moved, strict=True)]

    def adam_directions(self, params, momenta, variances, gradients, numbers, *, donate):
        with use_kernels(None):
            found = primitives.adam_directions(params, momenta, variances, gradients, numbers)
        if not donate:
            return found
        old = zip(momenta, variances, strict=True)
        return [(d, *map(write_into, own, new)) for own, (d, *new) in zip(old, found, strict=True)]

    def steps_of_sums(self, params, sums, variances, numbers, divisors, *, donate):
        with use_kernels(None):
            moved = primitives.steps_of_sums(params, sums, variances, numbers, divisors)
        return (
            [(write_into(p, new), m) for p, (new, m) in zip(params, moved, strict=True)] if donate else moved
        )

    def sums_of_squares(self, arrays):
        with use_kernels(None):
            return primitives.sums_of_squares(arrays)

    def fresh_variances(self, means, momenta, variances, fresh, numbers, *, donate):
        with use_kernels(None):
            found = primitives.fresh_variances(means, momenta, variances, fresh, numbers)
        if not donate:
            return found
        return [(m, write_into(f, new), growth) for f, (m, new, growth) in zip(fresh, found, strict=True)]

    def in_range(self, x):
        flushed = np.where(np.abs(x) < 2.0**-126, np.float32(0), x)
        return flushed.tobytes() == x.tobytes() and bool((np.abs(x) < 2.0**100).all())

    def compensate(self, x, residual, *, out):
        with use_kernels(None):
            try:
                values, _ = primitives.compensate(x, residual, what=self.name, out=out)
            except NonFiniteError:
                return x, np.inf
        return values, float(np.abs(values).max(initial=0))

    def take_low_rank(self, left, right, matrix, *, out):
        with use_kernels(None):
            return primitives.take_low_rank(left, right, matrix, out=out)

    def orthonormal(self, rows):
        with use_kernels(None):
            return primitives.orthonormal([rows])[0]

    def next_factor(self, new, old):
        with use_kernels(None):
            return primitives.next_factors([new], [old])[0]


BROKEN = []


def broken(label, compressor=SIGN, **methods):
    """Add a set with some methods replaced by ``change(self, whole, *args)``, where ``whole`` is the correct method."""

    def method(name, change):
        def call(self, *args, **options):
            return change(self, lambda *a, **o: getattr(Whole, name)(self, *a, **{**options, **o}), *args)

        return call

    changed = {name: method(name, change) for name, change in methods.items()}
    BROKEN.append(pytest.param(type("Broken", (Whole,), {"name": label, **changed})(), compressor, id=label))


def flip(data, index):
    data[index] ^= 1


def encodes(change, when=lambda x, key: True):
    """Return an encoder that also changes the data of a payload."""

    def encode(self, whole, compressor, x, residual, key):
        encoded = whole(compressor, x, residual, key)
        if encoded is not None and encoded.data.size and when(x, key):
            change(encoded.data)
        return encoded

    return encode


broken(
    "wrong above a power of two", encode=encodes(lambda data: flip(data, 0), lambda x, key: x.size == 4097)
)
broken(
    "wrong below a power of two", encode=encodes(lambda data: flip(data, -1), lambda x, key: x.size == 1023)
)
broken("wrong for one element", encode=encodes(lambda data: flip(data, 0), lambda x, key: x.size == 1))
broken("wrong where large", encode=encodes(lambda data: flip(data, 0), lambda x, key: x.size > 50_000))
broken("wrong for 3000", encode=encodes(lambda data: flip(data, 7), lambda x, key: x.size == 3000))
broken("wrong from 2^17 on", encode=encodes(lambda data: flip(data, 9), lambda x, key: x.size >= 2**17))
broken(
    "wrong where strided", encode=encodes(lambda data: flip(data, 0), lambda x, key: not x.flags.c_contiguous)
)
broken(
    "seed of 32 bits",
    LEVELS,
    encode=lambda self, whole, c, x, r, key: whole(c, x, r, key._replace(seed=key.seed % 2**32)),
)
broken(
    "step of 31 bits",
    LEVELS,
    encode=lambda self, whole, c, x, r, key: whole(c, x, r, key._replace(step=key.step % 2**31)),
)
broken(
    "hop of a byte",
    LEVELS,
    encode=lambda self, whole, c, x, r, key: whole(c, x, r, key.at(hop=key.hop % 256)),
)
broken(
    "bucket of 24 bits",
    LEVELS,
    encode=lambda self, whole, c, x, r, key: whole(c, x, r, key.at(bucket=key.bucket % 2**24)),
)


def nudged(self, whole, compressor, x, residual, key):
    """Round ties the other way: exactly half a step counts as slightly less."""
    return whole(
        compressor, (x * np.float32(1 - 2.0**-22)).astype(x.dtype) if residual is None else x, residual, key
    )


broken("ties", RANGE, encode=nudged)


def writes_to_x(self, whole, compressor, x, residual, key):
    encoded = whole(compressor, x, residual, key)
    x[:1] = 0
    return encoded


def writes_to_residual(self, whole, compressor, x, residual, key):
    encoded = whole(compressor, x, residual, key)
    if residual is not None and (encoded is None or encoded.residual is not residual):
        residual[:1] = 7
    return encoded


def writes_behind_out(self, whole, compressor, data, like):
    result = whole(compressor, data, like)
    data[-1:] = 0
    return result


broken("writes to x", encode=writes_to_x)
broken("writes to the residual", encode=writes_to_residual)
broken("writes to a payload", decode=writes_behind_out)
broken(
    "forgets to blend",
    encode=lambda self, whole, c, x, r, key: whole(c, x, r, key, blend=None),
)


class OneBeta(Whole):
    name = "one beta"

    def encode(self, compressor, x, residual, key, *, out, blend):
        blend = None if blend is None else blend._replace(beta1=0.9)
        return super().encode(compressor, x, residual, key, out=out, blend=blend)


class ForgetsFactors(Whole):
    name = "forgets the factors of a blend"

    def encode(self, *args, blend, **options):
        return super().encode(*args, blend=blend and blend._replace(factor=1.0, weight=1.0), **options)


class NoNewBuffer(Whole):
    """The residual is right, but not in the buffer given for it."""

    name = "another buffer"

    def encode(self, compressor, x, residual, key, *, out, blend):
        return super().encode(compressor, x, residual, key, out=None, blend=blend)


class Pool(Whole):
    """Every result reuses the memory of the previous one."""

    name = "pool"
    memory: dict[Any, Any] = {}

    def decode(self, compressor, data, like, *, out, accumulate):
        if out is None:
            out = self.memory.setdefault(like.shape, np.empty_like(like))
        return super().decode(compressor, data, like, out=out, accumulate=accumulate)


class OneBuffer(Pool):
    name = "one buffer"
    decode = Whole.decode

    def empty_like(self, x):
        return self.memory.setdefault(("empty", x.shape), np.empty(x.shape, dtype=x.dtype))


class RemembersPayloads(Whole):
    """Decompresses a buffer once, whatever it holds later."""

    name = "remembers payloads"
    last = None

    def decode(self, compressor, data, like, *, out, accumulate):
        if out is not None or accumulate:
            return super().decode(compressor, data, like, out=out, accumulate=accumulate)
        if self.last is None or self.last[0] is not data:
            self.last = data, super().decode(compressor, data, like, out=None, accumulate=False)
        return self.last[1].copy()


class InFloat32(Whole):
    """Compresses float64 as float32, whose payload has the same layout."""

    name = "rounds float64"

    def takes(self, x):
        return isinstance(x, np.ndarray) and x.dtype in (np.float32, np.float64)

    def encode(self, compressor, x, residual, key, *, out, blend):
        if x.dtype == np.float64 and residual is None and blend is None:
            x = x.astype(np.float32)
        return super().encode(compressor, x, residual, key, out=out, blend=blend)

    def decode(self, compressor, data, like, *, out, accumulate):
        if like.dtype == np.float64:
            return None
        return super().decode(compressor, data, like, out=out, accumulate=accumulate)


class TakesNaN(Whole):
    name = "takes NaN"

    def encode(self, compressor, x, residual, key, *, out, blend):
        if x.size > 20 and not np.isfinite(x.reshape(-1)[8]):
            return Encoded(np.zeros(compressor.payload_spec(x.size).nbytes, dtype=np.uint8), residual, None)
        return super().encode(compressor, x, residual, key, out=out, blend=blend)


class ReturnsWhatWasGiven(Whole):
    """The residual is computed, but the given buffer is returned unchanged."""

    name = "returns what was given"

    def encode(self, compressor, x, residual, key, *, out, blend):
        encoded = super().encode(compressor, x, residual, key, out=None, blend=blend)
        return encoded if out is None or encoded is None else encoded._replace(residual=out)


class SharesScratch(Whole):
    """Works in memory that calls of all threads share."""

    name = "shares scratch"
    scratch = np.empty(5000, dtype=np.float32)

    def encode(self, compressor, x, residual, key, *, out, blend):
        if x.size > self.scratch.size or out is not None or blend is not None:
            return super().encode(compressor, x, residual, key, out=out, blend=blend)
        working = self.scratch[: x.size]
        working[...] = x
        return super().encode(compressor, working, residual, key, out=None, blend=None)


class SharesScratchInsideALine(SharesScratch):
    """Uses the shared memory in one line, as compiled code does."""

    name = "shares scratch inside a line"
    scratch = np.empty(1 << 18, dtype=np.float32)

    def encode(self, compressor, x, *args, **options):
        if x.size > self.scratch.size:
            return Whole.encode(self, compressor, x, *args, **options)
        copied = np.positive(x, out=self.scratch[: x.size]).copy()
        return Whole.encode(self, compressor, copied, *args, **options)


BROKEN += [
    pytest.param(kind(), SIGN, id=kind.name)
    for kind in (
        SharesScratch,
        SharesScratchInsideALine,
        OneBeta,
        ForgetsFactors,
        NoNewBuffer,
        ReturnsWhatWasGiven,
        Pool,
        OneBuffer,
        RemembersPayloads,
        InFloat32,
        TakesNaN,
    )
]


def skips_the_range_check(self, whole, compressor, x, residual, key):
    if residual is None or (np.abs(x.astype(np.float32)) < 2.0**100).all():
        return whole(compressor, x, residual, key)
    residual[...] = x
    return Encoded(np.zeros(compressor.payload_spec(x.size).nbytes, dtype=np.uint8), residual, None)


def rounds_the_residual(self, whole, compressor, x, residual, key):
    encoded = whole(compressor, x, residual, key)
    if encoded is None or encoded.residual is None or x.size < 8:
        return encoded
    return encoded._replace(residual=encoded.residual.astype(np.float16).astype(np.float32))


for kind, c in (("signs", SIGN), ("wide codes", WIDE)):
    broken(f"{kind}: skips the range check", c, encode=skips_the_range_check)
    broken(f"{kind}: rounds the residual", c, encode=rounds_the_residual)
    broken(
        f"{kind}: forgets the old residual",
        c,
        encode=lambda self, whole, c, x, r, key: whole(c, x, None if r is None else np.zeros_like(r), key),
    )
    broken(
        f"{kind}: adds where it should write",
        c,
        decode=lambda self, whole, c, data, like: whole(
            c, data, like, out=np.ones_like(like), accumulate=True
        ),
    )
    broken(
        f"{kind}: writes where it should add",
        c,
        decode=lambda self, whole, c, data, like: whole(c, data, like, accumulate=False),
    )
broken(
    "loses the ninth bit",
    WIDE,
    encode=encodes(lambda data: data[64:72].fill(0), lambda x, key: x.size >= 64),  # the first bucket
)

# Means.
broken("mean of up to eight", average=lambda self, whole, c, payloads, like: whole(c, payloads[:8], like))
broken("adds in another order", average=lambda self, whole, c, payloads, like: whole(c, payloads[::-1], like))
broken(
    "writes to the residual of a server",
    compress_mean=lambda self, whole, c, payloads, like, r, key: (
        whole(c, payloads, like, r, key),
        None if r is None else r.fill(0),
    )[0],
)
broken(
    "forgets the residual of a server",
    compress_mean=lambda self, whole, c, payloads, like, r, key: whole(
        c, payloads, like, None if r is None else r * 0, key
    ),
)
broken(
    "halves wrongly",
    average=lambda self, whole, c, payloads, like: write_into(
        mean := whole(c, payloads, like), mean * np.float32(0.5 if len(payloads) == 2 else 1)
    ),
)
broken(
    "compresses another rank's mean",
    compress_mean=lambda self, whole, c, payloads, like, r, key: whole(c, payloads[1:], like, r, key),
)
broken("counts to 64", finish_mean=lambda self, whole, total, count: whole(total, min(count, 64)))
broken(
    "multiplies by the reciprocal of 24",
    finish_mean=lambda self, whole, total, count: (
        (total * np.float32(1 / 24)).astype(total.dtype) if count == 24 else whole(total, count)
    ),
)
broken(
    "multiplies by the reciprocal",
    finish_mean=lambda self, whole, total, count: (total * np.float32(1 / count)).astype(total.dtype),
)
broken(
    "keeps subnormals",
    finish_mean=lambda self, whole, total, count: (total / np.float32(count)).astype(total.dtype),
)


# Chunks.
def encodes_frames(change):
    """Return an encoder of frames that also changes the messages of chunks."""

    def encode_frames(self, whole, frames, tensors, residuals, outs, key):
        messages = whole(frames, tensors, residuals, outs, key)
        if messages is not None:
            change(frames, messages)
        return messages

    return encode_frames


broken(
    "the last payload of a chunk is wrong",
    encode_frames=encodes_frames(lambda frames, messages: flip(messages[0], frames[0].offsets[-2])),
)
broken(
    "the last chunk is wrong",
    encode_frames=encodes_frames(lambda frames, messages: flip(messages[-1], 0)),
)
broken(
    "chunks: never refuses",
    encode_frames=lambda self, whole, frames, tensors, residuals, outs, key: (
        whole(frames, tensors, residuals, outs, key)
        if all(np.isfinite(x).all() for x in tensors)
        else [np.zeros(frame.nbytes, np.uint8) for frame in frames]
    ),
)
broken(
    "chunks: draws from the first bucket on",
    LEVELS,
    encode_frames=lambda self, whole, frames, tensors, residuals, outs, key: whole(
        frames, tensors, residuals, outs, key.at(bucket=0)
    ),
)
broken(
    "chunks: writes to the residuals",
    encode_frames=lambda self, whole, frames, tensors, residuals, outs, key: (
        whole(frames, tensors, residuals, outs, key),
        [residual.fill(0) for residual in residuals],
    )[0],
)
broken(
    "chunks: forgets the last to decompress",
    decode_frames=lambda self, whole, frames, messages, outs: whole(frames[:-1], messages[:-1], outs),
)
broken(
    "chunks: averages one rank",
    average_frame=lambda self, whole, frame, messages, outs: whole(frame, messages[:1], outs),
)
broken(
    "chunks: a server forgets its residuals",
    compress_mean_frame=lambda self, whole, frame, messages, like, residuals, key: whole(
        frame, messages, like, [r * 0 for r in residuals], key
    ),
)

# Matrices of low rank.
broken("refuses no values", compensate=lambda self, whole, x, e: (whole(x, e)[0], 0.0))
broken("forgets the residual of a matrix", compensate=lambda self, whole, x, e: whole(x, 0 * e))
broken(
    "keeps the last bit of products",
    take_low_rank=lambda self, whole, left, right, matrix: (
        (left.T @ right).reshape(-1),
        whole(left, right, matrix)[1],
    ),
)
broken(
    "leaves the whole matrix",
    take_low_rank=lambda self, whole, left, right, matrix: (whole(left, right, matrix.copy())[0], matrix),
)
broken("rows as they are", orthonormal=lambda self, whole, rows: rows * np.float32(1))
broken(
    "orthogonal to the first row alone",
    orthonormal=lambda self, whole, rows: np.concatenate(
        [whole(rows[:1]), *[whole(np.stack([rows[0], row]))[1:] for row in rows[1:]]]
    ),
)
broken(
    "a direction of rounding errors",
    orthonormal=lambda self, whole, rows: np.where(
        whole(rows) == 0, np.float32(1 / rows.shape[1] ** 0.5), whole(rows)
    ),
)
broken("the factor unscaled", next_factor=lambda self, whole, new, old: new * np.float32(1))
broken("zeros for ever", next_factor=lambda self, whole, new, old: whole(new, new))

# Optimizers.
broken("always beta of .9", momentum=lambda self, whole, m, g, beta1, scale: whole(m, g, 0.9, scale))
broken("never clips", momentum=lambda self, whole, m, g, beta1, scale: whole(m, g, beta1, 1.0))
broken(
    "the momentum of many elements",
    momentum=lambda self, whole, m, g, beta1, scale: (
        whole(m, g, beta1, scale)
        if m.size < 10_000 or m.size % 8 == 0
        else np.nextafter(whole(m, g, beta1, scale), np.float32(np.inf))
    ),
)
broken(
    "the momentum of a million elements",
    momentum=lambda self, whole, m, g, beta1, scale: (
        whole(m, g, beta1, scale) if m.size < 2**20 else whole(m, g, 0.9001, scale)
    ),
)
broken(
    "writes to the momentum",
    momentum=lambda self, whole, m, g, beta1, scale: write_into(m, whole(m, g, beta1, scale)),
)
broken(
    "the momentum of half a gradient is rounded to half",
    momentum=lambda self, whole, m, g, beta1, scale: (
        whole(m, g, beta1, scale) if g.dtype == m.dtype else beta1 * m + ((1 - beta1) * scale) * g
    ),
)
broken("Nesterov: the momentum twice", nesterov=lambda self, whole, m, g, beta1: (whole(m, g, beta1)[0],) * 2)
broken("Nesterov: blends the old one", nesterov=lambda self, whole, m, g, beta1: (whole(m, g, beta1)[0], m))
broken("Nesterov: other weights", nesterov=lambda self, whole, m, g, beta1: whole(m, g, 0.9))
broken(
    "Nesterov: writes to the momentum",
    nesterov=lambda self, whole, m, g, beta1: (
        write_into(m, whole(m, g, beta1)[0]),
        m * np.float32(beta1) + np.float32(1 - beta1) * g,
    ),
)
broken("all is in range", in_range=lambda self, whole, x: True)
broken("negative zeros are in range", in_range=lambda self, whole, x: whole(x + np.float32(0)))
broken(
    "subnormals are in range",
    in_range=lambda self, whole, x: whole(
        np.asarray(np.where(np.abs(x) < 2.0**-126, np.copysign(0, x), x), dtype="f4")
    ),
)
broken(
    "2^100 is in range",
    in_range=lambda self, whole, x: whole(np.where(np.abs(x) == 2.0**100, 1, x).astype("f4")),
)
broken(
    "NaN is in range", in_range=lambda self, whole, x: whole(np.nan_to_num(x, posinf=np.inf, neginf=-np.inf))
)
broken("the last value is in range", in_range=lambda self, whole, x: x.size < 2 or whole(x[:-1]))
broken("descends: never decays", descend=lambda self, whole, p, d, rate, decay: whole(p, d, rate, 0.0))
broken(
    "descends: decays before the rate",
    descend=lambda self, whole, p, d, rate, decay: whole(p - np.float32(decay) * p, d, rate, 0.0),
)
broken(
    "descends: returns parameters in the dtype of the direction",
    descend=lambda self, whole, p, d, rate, decay: (
        whole(p, d, rate, decay) if p.dtype == d.dtype else p - rate * (d + decay * p)
    ),
)
broken(
    "descends: writes to the parameters",
    descend=lambda self, whole, p, d, rate, decay: write_into(p, whole(p, d, rate, decay)),
)
broken(
    "descends: writes to the direction",
    descend=lambda self, whole, p, d, rate, decay: (whole(p, d, rate, decay), d.fill(0))[0],
)
broken("scales by another factor", scale=lambda self, whole, x, factor: whole(x, factor * 1.001))
broken("scales and keeps subnormals", scale=lambda self, whole, x, factor: np.float32(factor) * x)
broken("scales in place", scale=lambda self, whole, x, factor: write_into(x, whole(x, factor)))
broken("always eps of 1e-8", frozen_step=lambda self, whole, p, m, v, n: whole(p, m, v, n._replace(eps=1e-8)))
broken(
    "never decays", frozen_step=lambda self, whole, p, m, v, n: whole(p, m, v, n._replace(weight_decay=0.0))
)
broken(
    "never corrects", frozen_step=lambda self, whole, p, m, v, n: whole(p, m, v, n._replace(correction=0.19))
)
broken(
    "moves what never had a gradient",
    frozen_step=lambda self, whole, p, m, v, n: whole(p, m, np.where(v > 0, v, np.float32(2.0**-126)), n),
)
broken("never masks", frozen_step=lambda self, whole, p, m, v, n: (whole(p, m.copy(), v, n)[0], m))
broken(
    "writes to the parameters",
    frozen_step=lambda self, whole, p, m, v, n: (write_into(p, whole(p, m, v, n)[0]), np.where(v > 0, m, 0)),
)


def steps_with(**changes):
    """Return Adam steps that use other numbers."""

    def adam_steps(self, whole, params, momenta, variances, gradients, numbers):
        changed = [
            n._replace(**{name: change(n) for name, change in changes.items() if name in n._fields})._replace(
                step=n.step._replace(
                    **{name: change(n) for name, change in changes.items() if name in n.step._fields}
                )
            )
            for n in numbers
        ]
        return whole(params, momenta, variances, gradients, changed)

    return adam_steps


broken("Adam: the first beta for both", adam_steps=steps_with(betas=lambda n: (n.betas[0], n.betas[0])))
broken("Adam: never corrects", adam_steps=steps_with(variance_correction=lambda n: 1.0))
broken("Adam: never couples decay", adam_steps=steps_with(coupled_decay=lambda n: 0.0))
broken("Adam: always eps of 1e-8", adam_steps=steps_with(eps=lambda n: 1e-8))
broken("Adam: never decays", adam_steps=steps_with(weight_decay=lambda n: 0.0))
broken(
    "Adam: the numbers of the first tensor for all",
    adam_steps=lambda self, whole, p, m, v, g, numbers: whole(p, m, v, g, [numbers[0]] * len(numbers)),
)
broken(
    "Adam: writes to the gradients",
    adam_steps=lambda self, whole, p, m, v, g, numbers: (whole(p, m, v, g, numbers), g[0].fill(0))[0],
)
broken(
    "Adam: contracts a product and a sum",
    adam_steps=lambda self, whole, p, m, v, g, numbers: [
        (
            moved,
            (np.float64(np.float32(n.betas[0])) * old + np.float64(np.float32(1 - n.betas[0])) * new).astype(
                np.float32
            ),
            square,
        )
        for (moved, _, square), old, new, n in zip(whole(p, m, v, g, numbers), m, g, numbers, strict=True)
    ],
)


broken(
    "Adam: shrinks matrices",
    adam_steps=lambda self, whole, p, m, v, g, numbers: [
        (new * np.float32(0.999) if new.ndim == 2 else new, *moments)
        for new, *moments in whole(p, m, v, g, numbers)
    ],
)


broken("directions: never couples decay", adam_directions=steps_with(coupled_decay=lambda n: 0.0))
broken("directions: never decays", adam_directions=steps_with(weight_decay=lambda n: 0.0))
broken(
    "directions: multiplies by the rate",
    adam_directions=lambda self, whole, p, m, v, g, numbers: [
        (np.float32(n.step.rate) * d, *moments)
        for n, (d, *moments) in zip(numbers, whole(p, m, v, g, numbers), strict=True)
    ],
)
broken(
    "sums of squares: in another order",
    sums_of_squares=lambda self, whole, arrays: [
        x if not np.isfinite(x) else float(np.sum(np.square(a)))
        for a, x in zip(arrays, whole(arrays), strict=True)
    ],
)
broken(
    "sums of squares: without a scale",
    sums_of_squares=lambda self, whole, arrays: [
        x if 1e-20 < x < 1e30 else float(np.sum(np.square(a)))
        for a, x in zip(arrays, whole(arrays), strict=True)
    ],
)
broken(
    "sums: multiplied by the inverse",
    steps_of_sums=lambda self, whole, p, sums, v, numbers, divisors: whole(
        p,
        [np.float32(1 / by) * x for x, by in zip(sums, divisors, strict=True)],
        v,
        numbers,
        [1.0] * len(divisors),
    ),
)
broken(
    "fresh: never divides",
    fresh_variances=lambda self, whole, x, m, v, f, numbers: whole(
        x, m, v, f, [n._replace(divisor=1.0) for n in numbers]
    ),
)
broken(
    "fresh: looks at the first thousand elements only",
    fresh_variances=lambda self, whole, x, m, v, f, numbers: [
        (new_m, new_f, growth_of(old.reshape(-1)[:1000], new_f.reshape(-1)[:1000], n.eps))
        for (new_m, new_f, _), old, n in zip(whole(x, m, v, f, numbers), v, numbers, strict=True)
    ],
)
broken(
    "fresh: elements with an infinite variance grow",
    fresh_variances=lambda self, whole, x, m, v, f, numbers: [
        (new_m, new_f, growth_of(old, new_f, n.eps))
        for (new_m, new_f, _), old, n in zip(whole(x, m, v, f, numbers), v, numbers, strict=True)
    ],
)


def growth_of(v, f, eps):
    """Return the largest growth of any element, also of those with an infinite variance."""
    with np.errstate(all="ignore"):
        return float(((np.sqrt(v) + np.float32(eps)) / (np.sqrt(f) + np.float32(eps))).max(initial=0))


class AlwaysDonates(Whole):
    """Overwrites the buffers of parameters and moments, donated or not."""

    name = "always donates"

    def adam_steps(self, params, momenta, variances, gradients, numbers, *, donate):
        return super().adam_steps(params, momenta, variances, gradients, numbers, donate=True)


class AlwaysMovesInPlace(Whole):
    name = "always moves in place"

    def frozen_steps(self, params, momenta, variances, numbers, *, donate):
        return super().frozen_steps(params, momenta, variances, numbers, donate=True)


class WritesToTheVariance(Whole):
    name = "writes to the frozen variance"

    def frozen_steps(self, params, momenta, variances, numbers, *, donate):
        moved = super().frozen_steps(params, momenta, variances, numbers, donate=donate)
        variances[0].fill(0)
        return moved


broken(
    "frozen: the numbers of the first tensor for all",
    frozen_steps=lambda self, whole, p, m, v, numbers: whole(p, m, v, [numbers[0]] * len(numbers)),
)
broken(
    "frozen: forgets the last tensor",
    frozen_steps=lambda self, whole, p, m, v, numbers: [*whole(p, m, v, numbers)[:-1], (p[-1], m[-1])],
)


def flipped_if(payload, is_wrong):
    """Return a payload, or one with other bits."""
    return payload._replace(data=255 - payload.data) if is_wrong and payload is not None else payload


broken(
    "encode: reads the name of the host",
    encode=lambda self, whole, *args: flipped_if(whole(*args), socket.gethostname() == "host-2"),
)
broken(
    "encode: reads a launcher's variable",
    encode=lambda self, whole, *args: flipped_if(whole(*args), os.environ.get("SLURM_PROCID") == "2"),
)
BROKEN += [
    pytest.param(kind(), SIGN, id=kind.name)
    for kind in (AlwaysDonates, AlwaysMovesInPlace, WritesToTheVariance)
]


@pytest.fixture(scope="module", autouse=True)
def pure_results():
    """Compute the results of the pure version once for all broken sets."""
    compute, known = laws_of_kernels._compute, {}

    def computed_once(kernels, xp, case):
        if kernels is not None:
            return compute(kernels, xp, case)
        inputs = (xp, case.compressor, case.x.tobytes(), *case[2:])
        if inputs not in known:
            known[inputs] = compute(None, xp, case)
        return known[inputs]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(laws_of_kernels, "_compute", computed_once)
        yield


OF_VECTORS = {"encode", "decode", "average", "compress_mean"}
OF_CHUNKS = {"encode_frames", "decode_frames", "average_frame", "compress_mean_frame"}
OF_LAWS = {
    "steps of Adam": {
        "adam_steps",
        "frozen_steps",
        "adam_directions",
        "sums_of_squares",
        "steps_of_sums",
        "fresh_variances",
    },
    "matrices of low rank": {"orthonormal", "next_factor", "take_low_rank"},
}


@pytest.mark.quick_cases(8)
@pytest.mark.parametrize(("kernels", "compressor"), BROKEN)
def test_broken_kernels_are_caught(kernels, compressor):
    """Only the checks of the broken methods run: running all other checks first would take most of the time."""
    wrong = vars(type(kernels)).keys()
    if wrong & OF_CHUNKS:
        with pytest.raises(AssertionError):
            check_chunks(kernels, np, [compressor])
    elif wrong & OF_VECTORS:
        contract = laws_of_kernels.kernel_contract(kernels, np, [compressor], max_examples=3)
        laws = (compressor.spec, "buffers", "threads", "environment")
        assert any(list(contract.broken(only=law)) for law in laws)
    else:
        contract = laws_of_kernels.kernel_contract(kernels, np, [])
        law = next((law for law, methods in OF_LAWS.items() if wrong & methods), None)
        assert any(contract.broken(only=law))  # ends at the first broken law


@pytest.mark.slow
def test_the_error_names_the_kernel_set():
    with pytest.raises(ContractError, match=r"the kernel set .* breaks"):
        check_kernels(AlwaysDonates(), compressors=[])


@pytest.mark.exhaustive
@pytest.mark.parametrize("compressor", [SIGN, LEVELS, RANGE, WIDE], ids=str)
def test_correct_kernels_pass(compressor):
    check_kernels(Whole(), compressors=[compressor], max_examples=3)
