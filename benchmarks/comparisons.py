"""Comparison of the kernels with straightforward NumPy and with code of other projects, on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import baselines
import numpy as np
import torch
from cases import COMPRESSORS, Vectors, calls_of, under
from timing import Candidate, timer

__all__ = ["TASKS", "comparisons"]

TASKS = [
    "signs: encode with feedback",
    "signs: decode",
    "8 bits: encode without feedback",
    "8 bits: decode",
]
ENCODE_SIGNS, DECODE_SIGNS, ENCODE_BYTES, DECODE_BYTES = TASKS
BUCKET = 4096
BLOCK = 2048

Calls = dict[tuple[str, str], Callable[[], object]]


def comparisons(vectors: Vectors) -> list[Candidate]:
    """Return all candidates for one size, a multiple of the block, compared with a copy of the input."""
    x = vectors.x
    copy = np.empty_like(x)
    warm = timer(lambda: np.copyto(copy, x))
    calls = (
        qcomp_calls(vectors) | numpy_calls(vectors) | deepspeed_calls(vectors) | bitsandbytes_calls(vectors)
    )
    return [
        Candidate(
            {"task": task, "by": by, "elements": x.size},
            timer(call, under("numba")),
            {"over_copy": warm},
        )
        for (task, by), call in calls.items()
    ]


def qcomp_calls(vectors: Vectors) -> Calls:
    """Return the calls of the kernels."""
    calls: Calls = {}
    for subject, (encode, decode, what) in {
        "sign l1": (ENCODE_SIGNS, DECODE_SIGNS, "encode in a step"),
        "sign rms": (ENCODE_SIGNS, DECODE_SIGNS, "encode in a step"),
        "QSGD 8-bit": (ENCODE_BYTES, DECODE_BYTES, "encode, no feedback"),
        "min-max 8-bit": (ENCODE_BYTES, DECODE_BYTES, "encode, no feedback"),
    }.items():
        of = calls_of(COMPRESSORS[subject], vectors)
        calls[encode, f"qcomp, {subject}"] = of[what]
        calls[decode, f"qcomp, {subject}"] = of["decode into a buffer"]
    return calls


def numpy_calls(vectors: Vectors) -> Calls:
    """Return the calls of the straightforward NumPy version."""
    x, residual = vectors.x, np.zeros_like(vectors.x)
    bucket = min(BUCKET, x.size)
    codes, scales, _ = baselines.numpy_sign_encode(x, residual, bucket)
    by = "NumPy, packbits"
    return {
        (ENCODE_SIGNS, by): lambda: baselines.numpy_sign_encode(x, residual, bucket),
        (DECODE_SIGNS, by): lambda: baselines.numpy_sign_decode(codes, scales, bucket),
    }


def deepspeed_calls(vectors: Vectors) -> Calls:
    """Return DeepSpeed's operations; every call continues from the momentum that the previous one has overwritten."""
    pack, unpack = baselines.packbits_numpy, baselines.unpackbits_numpy
    momentum, error = torch.from_numpy(vectors.x.copy()), torch.zeros(vectors.x.size)
    codes, scale = baselines.deepspeed_encode(momentum, error, pack)
    by = "DeepSpeed's operations in torch"
    return {
        (ENCODE_SIGNS, by): lambda: baselines.deepspeed_encode(momentum, error, pack),
        (DECODE_SIGNS, by): lambda: baselines.deepspeed_decode(codes, scale, unpack),
    }


def bitsandbytes_calls(vectors: Vectors) -> Calls:
    """Return the 8-bit quantizer of bitsandbytes, if installed."""
    quantizer: Any = baselines.block_quantizer()
    if quantizer is None:
        return {}
    x = torch.from_numpy(vectors.x)
    codes, state = quantizer.quantize_blockwise(x, blocksize=BLOCK)
    by = "bitsandbytes, blockwise"
    return {
        (ENCODE_BYTES, by): lambda: quantizer.quantize_blockwise(x, blocksize=BLOCK),
        (DECODE_BYTES, by): lambda: quantizer.dequantize_blockwise(codes, state),
    }
