"""The kernel set for torch tensors on GPUs, in Triton."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import triton
from torch import Tensor

from qcomp.backends.torch_triton import codec
from qcomp.backends.torch_triton.lloyd_max import lloyd_max
from qcomp.backends.torch_triton.minmax import minmax
from qcomp.backends.torch_triton.qsgd import qsgd
from qcomp.backends.torch_triton.sign import sign
from qcomp.backends.torch_triton.tiles import MAX_BUCKET_SIZE
from qcomp.backends.torch_triton.vectors import finish_mean, frozen_step, momentum
from qcomp.core.compressors import QSGD, LloydMax, MinMaxUInt8, Scaled, ScaledSign
from qcomp.core.kernels import Blend, Encoded, StepNumbers
from qcomp.core.numeric.random import Key, draws_are_replaced, fold_key
from qcomp.core.traits import AnyCompressor

if tuple(map(int, triton.__version__.split(".")[:2])) < (3, 4):  # older ones flush subnormal numbers
    raise ImportError(f"Triton 3.4 or newer, which comes with torch 2.8, instead of {triton.__version__}")

_FAMILIES: dict[type, Callable[..., codec.Family]] = {
    ScaledSign: sign,
    QSGD: qsgd,
    LloydMax: lloyd_max,
    MinMaxUInt8: minmax,
}
_WORD = 0xFFFFFFFF
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_DEVICES = ("cuda", "cpu") if triton.knobs.runtime.interpret else ("cuda",)
"""torch also calls ROCm devices cuda. Triton's interpreter runs on the CPU."""


class TritonKernels:
    """Kernels for contiguous torch tensors on CUDA and ROCm devices, of dtypes that are computed in float32.

    They serve `ScaledSign`, `QSGD`, `LloydMax`, `MinMaxUInt8`, and `Scaled` around `QSGD`, with buckets of up to 32768
    elements. Each call launches one kernel on the current stream, and does not wait for the device.
    """

    name = "triton"

    def takes(self, x: Tensor) -> bool:
        """Return whether x is a tensor on a CUDA or ROCm device, or on the CPU under Triton's interpreter."""
        return isinstance(x, torch.Tensor) and x.device.type in _DEVICES and x.dtype in _DTYPES

    def encode(
        self,
        compressor: AnyCompressor,
        x: Tensor,
        residual: Tensor | None,
        key: Key | None,
        *,
        out: Tensor | None,
        blend: Blend | None,
    ) -> Encoded | None:
        """Compress x, or the momentum that x is blended into, plus the residual.

        If ``out`` is the old residual, the new residual gets a new buffer: only the device knows whether x is refused,
        and then the old residual is still needed.
        """
        family = _family(compressor)
        if family is None or x.numel() == 0 or not _matches(x, x, x.dtype):
            return None
        if blend is not None and not _matches(blend.m, x):
            return None
        stream = codec.NO_DRAWS
        if compressor.traits.random:
            if key is None or draws_are_replaced():
                return None
            low, high = fold_key(key, like=x)
            if not (isinstance(low, int) and isinstance(high, int)):
                return None  # the key holds arrays, whose values are only on the device
            first_block = key.bucket * (compressor.traits.bucket_size // 8)
            stream = (low | high << 32, key.hop & _WORD, first_block & _WORD)
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
            codec.encode(family, x, blend, residual, stream, spec.split(data), new, refused)
        return Encoded(data, new, refused)

    def decode(
        self, compressor: AnyCompressor, data: Tensor, like: Tensor, *, out: Tensor | None, accumulate: bool
    ) -> Tensor | None:
        """Return the decompressed payload, in ``out`` if given."""
        family = _family(compressor)
        target = torch.empty_like(like) if out is None else out
        if family is None or like.numel() == 0 or not _matches(target, like, like.dtype):
            return None
        with _on_device_of(like):
            parts = compressor.payload_spec(like.numel()).split(data.contiguous())
            codec.decode(family, parts, target, accumulate=accumulate)
        return target

    def finish_mean(self, total: Tensor, count: int) -> Tensor | None:
        """Divide a sum over ranks by their number, in place."""
        if not _matches(total, total):
            return None
        with _on_device_of(total):
            finish_mean(total, count)
        return total

    def momentum(self, m: Tensor, g: Tensor, beta1: float, scale: float) -> Tensor | None:
        """Return the new momentum in a new tensor."""
        if not (_matches(m, m) and _matches(g, m)):
            return None
        mixed = torch.empty_like(m)
        with _on_device_of(m):
            momentum(m, g, beta1, scale, mixed)
        return mixed

    def frozen_step(
        self, p: Tensor, m: Tensor, v: Tensor, numbers: StepNumbers
    ) -> tuple[Tensor, Tensor] | None:
        """Return the new parameters in a new tensor, and the masked momentum in the buffer of m."""
        if not all(_matches(x, m) for x in (p, m, v)):
            return None
        moved = torch.empty_like(p)
        with _on_device_of(m):
            frozen_step(p, m, v, numbers, out=moved)
        return moved, m


KERNELS = TritonKernels()


def _family(c: AnyCompressor) -> codec.Family | None:
    """Return the functions of a compressor, by exact type: a subclass may compress differently."""
    inner, *factor = (c.compressor, c.factor) if type(c) is Scaled and type(c.compressor) is QSGD else (c,)
    make = _FAMILIES.get(type(inner))
    return make(inner, *factor) if make is not None and inner.traits.bucket_size <= MAX_BUCKET_SIZE else None


def _matches(x: Any, like: Tensor, dtype: torch.dtype = torch.float32) -> bool:
    """Return whether x is a plain tensor of a dtype, with the device and number of elements of ``like``."""
    return (
        isinstance(x, torch.Tensor)
        and x.dtype == dtype
        and x.device == like.device
        and x.numel() == like.numel()
        and x.is_contiguous()
        and not x.requires_grad
    )


def _same_memory(x: Tensor, y: Tensor) -> bool:
    same: bool = x.data_ptr() == y.data_ptr()
    return same


def _on_device_of(x: Tensor) -> AbstractContextManager[Any]:
    """Return a context that launches kernels on the device of x."""
    return torch.cuda.device(x.device) if x.is_cuda else nullcontext()
