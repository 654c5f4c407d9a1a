"""The kernel set for torch tensors on GPUs, in Triton."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import triton

from qcomp.backends.torch_triton.lloyd_max import lloyd_max_decode, lloyd_max_encode
from qcomp.backends.torch_triton.minmax import minmax_decode, minmax_encode
from qcomp.backends.torch_triton.qsgd import qsgd_decode, qsgd_encode
from qcomp.backends.torch_triton.sign import sign_decode, sign_encode
from qcomp.backends.torch_triton.tiles import MAX_BUCKET_SIZE
from qcomp.backends.torch_triton.vectors import finish_mean, frozen_step, momentum
from qcomp.core.compressors import QSGD, LloydMax, MinMaxUInt8, Scaled, ScaledSign
from qcomp.core.kernels import Blend, Encoded, StepNumbers
from qcomp.core.numeric.random import Key, draws_are_replaced, fold_key
from qcomp.core.traits import AnyCompressor

__all__ = ["KERNELS", "TritonKernels"]

Array = Any

if tuple(map(int, triton.__version__.split(".")[:2])) < (3, 4):  # older ones flush subnormal numbers
    raise ImportError(f"Triton 3.4 or newer, which torch 2.8 brings, instead of {triton.__version__}")

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_DEVICES = ("cuda", "cpu") if triton.knobs.runtime.interpret else ("cuda",)
"""torch also calls ROCm devices cuda. Triton's interpreter runs on the CPU."""


class TritonKernels:
    """Kernels for contiguous torch tensors on CUDA and ROCm devices, of dtypes that are computed in float32.

    They serve `ScaledSign`, `QSGD`, `LloydMax`, `MinMaxUInt8` and a `Scaled` `QSGD`, with buckets of up to 32768
    elements. Each call launches one kernel on the current stream, and does not wait for the device.
    """

    name = "triton"

    def takes(self, x: Array) -> bool:
        """Return whether x is a tensor on a CUDA or ROCm device, or on the CPU under Triton's interpreter."""
        return isinstance(x, torch.Tensor) and x.device.type in _DEVICES and x.dtype in _DTYPES

    def encode(
        self,
        compressor: AnyCompressor,
        x: Array,
        residual: Array | None,
        key: Key | None,
        *,
        out: Array | None,
        blend: Blend | None,
    ) -> Encoded | None:
        """Compress x, or the momentum that x is blended into, plus the residual.

        If ``out`` is the old residual, the new residual gets a new buffer: only the device knows whether x is refused,
        and then the old residual is still needed.
        """
        inner, factor = _unwrapped(compressor)
        if not _has_kernel(inner) or x.numel() == 0 or not _matches(x, x, x.dtype):
            return None
        if blend is not None and not _matches(blend.m, x):
            return None
        words: tuple[Any, Any] = (0, 0)
        if isinstance(inner, QSGD):
            if key is None or draws_are_replaced():
                return None
            words = fold_key(key, like=x)
            if not all(isinstance(word, int) for word in words):
                return None  # the key holds arrays, whose values are only on the device
        new = None
        if residual is not None:
            if not (_matches(residual, x) and (out is None or _matches(out, x))):
                return None
            new = out
            if out is None or _same_memory(out, residual):
                new = torch.empty(x.shape, dtype=torch.float32, device=x.device)
        with _on_device_of(x):
            spec = compressor.payload_spec(x.numel())
            data = torch.empty(spec.nbytes, dtype=torch.uint8, device=x.device)
            refused = torch.zeros(1, dtype=torch.uint8, device=x.device)
            parts = spec.split(data)
            if isinstance(inner, ScaledSign):
                sign_encode(inner, x, blend, residual, parts, new, refused)
            elif isinstance(inner, MinMaxUInt8):
                minmax_encode(inner, x, blend, residual, parts, new, refused)
            elif isinstance(inner, LloydMax):
                lloyd_max_encode(inner, x, blend, residual, parts, new, refused)
            elif isinstance(inner, QSGD) and key is not None:
                qsgd_encode(
                    inner, factor, x, blend, residual, words, key.hop, key.bucket, parts, new, refused
                )
        return Encoded(data, new, refused)

    def decode(
        self, compressor: AnyCompressor, data: Array, like: Array, *, out: Array | None, accumulate: bool
    ) -> Array | None:
        """Return the decompressed payload, in ``out`` if given."""
        inner, factor = _unwrapped(compressor)
        target = torch.empty_like(like) if out is None else out
        if not _has_kernel(inner) or like.numel() == 0 or not _matches(target, like, like.dtype):
            return None
        with _on_device_of(like):
            parts = compressor.payload_spec(like.numel()).split(data.contiguous())
            if isinstance(inner, ScaledSign):
                sign_decode(inner, parts, target, accumulate=accumulate)
            elif isinstance(inner, MinMaxUInt8):
                minmax_decode(inner, parts, target, accumulate=accumulate)
            elif isinstance(inner, LloydMax):
                lloyd_max_decode(inner, parts, target, accumulate=accumulate)
            elif isinstance(inner, QSGD):
                qsgd_decode(inner, factor, parts, target, accumulate=accumulate)
        return target

    def finish_mean(self, total: Array, count: int) -> Array | None:
        """Divide a sum over ranks by their number, in place."""
        if not _matches(total, total):
            return None
        with _on_device_of(total):
            finish_mean(total, count)
        return total

    def momentum(self, m: Array, g: Array, beta1: float, scale: float) -> Array | None:
        """Return the new momentum in a new tensor."""
        if not (_matches(m, m) and _matches(g, m)):
            return None
        mixed = torch.empty_like(m)
        with _on_device_of(m):
            momentum(m, g, beta1, scale, mixed)
        return mixed

    def frozen_step(self, p: Array, m: Array, v: Array, numbers: StepNumbers) -> tuple[Array, Array] | None:
        """Return the new parameters in a new tensor, and the masked momentum in the buffer of m."""
        if not all(_matches(x, m) for x in (p, m, v)):
            return None
        moved = torch.empty_like(p)
        with _on_device_of(m):
            frozen_step(p, m, v, numbers, out=moved)
        return moved, m


KERNELS = TritonKernels()


def _unwrapped(c: AnyCompressor) -> tuple[AnyCompressor, float | None]:
    """Return a compressor and no factor, or the one inside `Scaled` and its factor."""
    return (c.compressor, c.factor) if type(c) is Scaled and type(c.compressor) is QSGD else (c, None)


def _has_kernel(c: AnyCompressor) -> bool:
    """Return whether there are kernels for a compressor, by exact type: a subclass may compress differently."""
    return type(c) in (ScaledSign, QSGD, LloydMax, MinMaxUInt8) and c.traits.bucket_size <= MAX_BUCKET_SIZE


def _matches(x: Array, like: Array, dtype: torch.dtype = torch.float32) -> bool:
    """Return whether x is a plain tensor of a dtype, with the device and number of elements of ``like``."""
    return (
        isinstance(x, torch.Tensor)
        and x.dtype == dtype
        and x.device == like.device
        and x.numel() == like.numel()
        and x.is_contiguous()
        and not x.requires_grad
    )


def _same_memory(x: Array, y: Array) -> bool:
    same: bool = x.data_ptr() == y.data_ptr()
    return same


def _on_device_of(x: Array) -> AbstractContextManager[Any]:
    """Return a context that launches kernels on the device of x."""
    return torch.cuda.device(x.device) if x.is_cuda else nullcontext()
