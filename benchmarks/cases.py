"""The cases that the kernel benchmarks time: every primitive, kernel set and array library."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from timing import Candidate, Timer, timer

import qcomp
from qcomp.core import primitives
from qcomp.core.kernels import Blend, Encoded, StepNumbers, kernel_of
from qcomp.core.primitives import empty_like

__all__ = [
    "COMPRESSORS",
    "DECODES",
    "ENCODES",
    "KINDS",
    "VECTORS",
    "Vectors",
    "calls_of",
    "candidates",
    "has_kernels",
    "under",
]

Array = Any
Calls = dict[str, Callable[[], object]]

COMPRESSORS: dict[str, qcomp.Compressor] = {
    "sign l1": qcomp.ScaledSign(bucket_size=4096),
    "sign rms": qcomp.ScaledSign(bucket_size=4096, scale="rms"),
    "QSGD 2-bit": qcomp.Scaled(qcomp.QSGD(levels=1, bucket_size=512)),
    "QSGD 4-bit": qcomp.QSGD(levels=7, bucket_size=512),
    "QSGD 8-bit": qcomp.QSGD(levels=127, bucket_size=512),
    "LloydMax 4-bit": qcomp.LloydMax(bits=4, bucket_size=128),
    "min-max 8-bit": qcomp.MinMaxUInt8(bucket_size=2048),
    "64 of 4096, 2-bit": qcomp.TopK(k=64, bucket_size=4096, value_bits=2, coding="fixed"),
}
"""QSGD with 2 bits is scaled, since the benchmark feeds back its residual, which would otherwise grow without bound."""

VECTORS = "vectors"
"""The subject of primitives that need no compressor."""

KINDS = [("pure", "numpy"), ("numba", "numpy"), ("numba", "torch")]
"""Kernels and arrays that are timed together."""

PURE_LIMIT = 1 << 22
"""Elements above which the pure version is not timed: it takes as long as 20 copies, or hundreds with draws."""

ENCODES = [
    "encode, no feedback",
    "encode in a step",
    "encode in a step, blended",
    "encode, residual donated",
]
"""In a step the new residual has its own buffer, and 1-bit Adam blends the gradient into its momentum."""
DECODES = ["decode, fresh", "decode into a buffer", "decode and add"]
FRESH = ["encode in a step", "encode in a step, blended", "decode, fresh", "momentum", "frozen_step"]
"""Cases that return a new array as large as the input; they are also compared with ``x.copy()``."""


@dataclass(frozen=True)
class Vectors:
    """The arrays of one size and library."""

    x: Array
    residual: Array
    out: Array
    variance: Array
    m: Array

    @classmethod
    def draw(cls, size: int) -> Vectors:
        """Return NumPy arrays, float32."""
        x = np.random.default_rng(0).standard_normal(size, dtype=np.float32)
        return cls(x, np.zeros_like(x), np.zeros_like(x), np.full_like(x, 0.5), x.copy())

    def as_library(self, library: str) -> Vectors:
        """Return arrays of "numpy" or "torch" on the same memory."""
        if library == "numpy":
            return self
        parts = (self.x, self.residual, self.out, self.variance, self.m)
        return Vectors(*(torch.from_numpy(part) for part in parts))


def candidates(vectors: Vectors) -> list[Candidate]:
    """Return all candidates for one size, compared with a copy of the input into a buffer that was used before."""
    x = vectors.x
    copy = np.empty_like(x)
    warm = timer(lambda: np.copyto(copy, x))
    fresh = timer(x.copy)
    found = []
    for kernels, library in KINDS:
        if kernels == "pure" and x.size > PURE_LIMIT:
            continue
        arrays = vectors.as_library(library)
        for subject, compressor in [*COMPRESSORS.items(), (VECTORS, None)]:
            for what, call in calls_of(compressor, arrays).items():
                row = {
                    "subject": subject,
                    "what": what,
                    "kernels": kernels,
                    "arrays": library,
                    "elements": x.size,
                }
                over: dict[str, Timer] = {"over_copy": warm}
                if what in FRESH:
                    over["over_fresh_copy"] = fresh
                found.append(Candidate(row, timer(call, under(kernels)), over))
    return found


def under(kernels: str) -> Callable[[], AbstractContextManager[None]]:
    """Return a function that makes a context in which these kernels are used."""
    return lambda: qcomp.backends.use(kernels)


def has_kernels(compressor: qcomp.Compressor, kernels: str, x: Array) -> bool:
    """Return whether a kernel set supports a compressor on such arrays; the pure version always does."""
    with qcomp.backends.use(kernels):
        encode = kernel_of("encode", x)
        if encode is None:
            return kernels == "pure"
        return encode(compressor, x, None, qcomp.Key(), out=None, blend=None) is not None


def calls_of(compressor: qcomp.Compressor | None, arrays: Vectors) -> Calls:
    """Return the timed calls of a compressor by name; without one, those of primitives that need none."""
    if compressor is None:
        return vector_calls(arrays)
    return encode_calls(compressor, arrays) | decode_calls(compressor, arrays)


def encode_calls(compressor: qcomp.Compressor, arrays: Vectors) -> Calls:
    """Return the ways to compress."""
    key, x, residual = qcomp.Key(), arrays.x, arrays.residual
    blend = Blend(arrays.m, 0.9, 1.0)

    def step(blend: Blend | None) -> Encoded:
        """Do the same as `qcomp.core.mean.codec.SegmentCodec` with a tensor that it must not write to."""
        return primitives.encode(compressor, x, residual, key, out=empty_like(residual), blend=blend)

    calls: list[Callable[[], object]] = [
        lambda: compressor.compress(x, key=key),
        lambda: step(None),
        lambda: step(blend),
        lambda: qcomp.feedback.compress(compressor, x, residual, key=key, donate=True),
    ]
    return dict(zip(ENCODES, calls, strict=True))


def decode_calls(compressor: qcomp.Compressor, arrays: Vectors) -> Calls:
    """Return the ways to decompress."""
    x, out = arrays.x, arrays.out
    with qcomp.backends.use("numba"):  # for speed; every kernel set makes the same payload
        payload = compressor.compress(x, key=qcomp.Key())
    calls: list[Callable[[], object]] = [
        lambda: compressor.decompress(payload, like=x),
        lambda: compressor.decompress(payload, like=x, out=out),
        lambda: compressor.add(payload, out),
    ]
    return dict(zip(DECODES, calls, strict=True))


def vector_calls(arrays: Vectors) -> Calls:
    """Return the primitives of the mean and of the optimizers."""
    x, residual, out, variance = arrays.x, arrays.residual, arrays.out, arrays.variance
    step = StepNumbers(1e-3, 0.9, 1e-8, 0.01)
    return {
        # Dividing by 1 keeps the values the same in every repetition.
        "finish_mean": lambda: primitives.finish_mean(out, 1),
        "momentum": lambda: primitives.momentum(residual, x, 0.9, 1.0),
        "frozen_step": lambda: primitives.frozen_step(x, residual, variance, step),
    }
