"""Baselines for the kernels: a straightforward NumPy version, and code of other projects.

All except `block_quantizer` compress a vector plus a residual to signs and scales.
"""

import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.utils.dlpack

__all__ = [
    "block_quantizer",
    "deepspeed_decode",
    "deepspeed_encode",
    "numpy_sign_decode",
    "numpy_sign_encode",
    "packbits_cupy",
    "packbits_numpy",
    "unpackbits_cupy",
    "unpackbits_numpy",
]

Floats = np.ndarray[Any, np.dtype[np.float32]]
Bytes = np.ndarray[Any, np.dtype[np.uint8]]


def numpy_sign_encode(x: Floats, residual: Floats, bucket_size: int) -> tuple[Bytes, Floats, Floats]:
    """Compress x plus the residual in straightforward NumPy, to signs and the mean magnitude of each bucket.

    Parameters
    ----------
    x, residual : array of float32, shape (n,)
        n is a multiple of the bucket size.
    bucket_size : int
        A multiple of 8.

    Returns
    -------
    codes : array of uint8, shape (n / 8,)
        Packed as by `numpy.packbits`: 1 for negative, the first element in the highest bit.
    scales : array of float32, shape (n / bucket_size,)
    residual : array of float32, shape (n,)
        What compression has lost.
    """
    p = (x + residual).reshape(-1, bucket_size)
    scales = np.abs(p).mean(axis=1)
    negative = p < 0
    lost = p - np.where(negative, -scales[:, None], scales[:, None])
    return np.packbits(negative), scales, lost.reshape(-1)


def numpy_sign_decode(codes: Bytes, scales: Floats, bucket_size: int) -> Floats:
    """Return the values that the result of `numpy_sign_encode` stands for."""
    negative = np.unpackbits(codes).reshape(-1, bucket_size)
    result: Floats = np.where(negative, -scales[:, None], scales[:, None]).reshape(-1)
    return result


def deepspeed_encode(
    buffer_m: torch.Tensor, worker_error: torch.Tensor, packbits: Callable[[torch.Tensor], Any]
) -> tuple[Any, torch.Tensor]:
    """Run the operations of DeepSpeed 0.19.6 up to its first exchange, for one rank without padding.

    Parameters
    ----------
    buffer_m : tensor of float32, shape (n,)
        The momentum; used up, as in DeepSpeed.
    worker_error : tensor of float32, shape (n,)
        The residual; overwritten by the new one.
    packbits : callable
        Packs a tensor of bool, the first element into the highest bit.

    Returns
    -------
    codes
        The result of ``packbits``: 1 for elements that are not negative.
    scale : tensor of float32, shape ()
        The root mean square of all elements.

    Notes
    -----
    Microsoft DeepSpeed, ``deepspeed/runtime/comm``, ``compressed_allreduce``.
    """
    buffer_m.add_(worker_error)
    worker_scale = torch.linalg.norm(buffer_m) / np.sqrt(buffer_m.numel())
    worker_error.set_(buffer_m - worker_scale * buffer_m.sign().add_(1).bool().float().add_(-0.5).mul_(2.0))
    return packbits(buffer_m.sign_().add_(1).bool()), worker_scale


def deepspeed_decode(
    codes: Any, scale: torch.Tensor, unpackbits: Callable[[Any], torch.Tensor]
) -> torch.Tensor:
    """Run the operations of DeepSpeed 0.19.6 on the data that one rank received from another."""
    return unpackbits(codes).float().add_(-0.5).mul_(2.0).mul_(scale)


def packbits_numpy(bits: torch.Tensor) -> Bytes:
    """Pack a tensor of bool in CPU memory."""
    return np.packbits(bits.numpy())


def unpackbits_numpy(codes: Bytes) -> torch.Tensor:
    """Unpack into a tensor in CPU memory."""
    return torch.from_numpy(np.unpackbits(codes))


def packbits_cupy(bits: torch.Tensor) -> Any:
    """Pack a tensor of bool on a CUDA device, viewed as uint8, since old versions of DLPack lack bool."""
    cupy = importlib.import_module("cupy")
    return cupy.packbits(cupy.from_dlpack(bits.view(torch.uint8)))


def unpackbits_cupy(codes: Any) -> torch.Tensor:
    """Unpack into a tensor on a CUDA device."""
    cupy = importlib.import_module("cupy")
    return torch.utils.dlpack.from_dlpack(cupy.unpackbits(codes))


def block_quantizer() -> Any | None:
    """Return ``bitsandbytes.functional``, which quantizes blocks of elements to 8 bits, or None without it."""
    if importlib.util.find_spec("bitsandbytes") is None:
        return None
    return importlib.import_module("bitsandbytes.functional")
