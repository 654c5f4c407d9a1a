"""The numba kernels as the set that the core calls."""

from __future__ import annotations

from typing import Any

import numpy as np
from array_api_compat import array_namespace, is_torch_array

from qcomp.backends.numba_cpu.jit import Bytes, Floats
from qcomp.backends.numba_cpu.minmax import minmax_decode, minmax_encode
from qcomp.backends.numba_cpu.qsgd import qsgd_decode, qsgd_encode
from qcomp.backends.numba_cpu.sign import sign_decode, sign_encode
from qcomp.core.compressor import Compressor
from qcomp.core.compressors import QSGD, MinMaxUInt8, ScaledSign
from qcomp.core.random import Key, draws_are_replaced, fold_key

__all__ = ["KERNELS", "NumbaKernels"]

Array = Any


class NumbaKernels:
    """Kernels for C-contiguous float32 arrays in the memory of the CPU: NumPy's, and torch's without a copy."""

    name = "numba"

    def encode(
        self, compressor: Compressor, x: Array, residual: Array | None, key: Key | None, *, donate: bool
    ) -> tuple[Array, Array | None] | None:
        """Return the data of the payload and the new residual, or None if the pure version must do it."""
        values, old = _values(x), None if residual is None else _values(residual)
        if values is None or (residual is not None and old is None):
            return None
        if type(compressor) not in (ScaledSign, QSGD, MinMaxUInt8):
            return None
        if compressor.traits.random and (draws_are_replaced() or key is None):
            return None
        data = np.empty(compressor.payload_spec(values.size).nbytes, dtype=np.uint8)
        new = None
        if old is not None:
            new = old if donate and old.flags.writeable else np.empty_like(old)
        if _encode(compressor, values, old, key, data, new) is None:
            return None  # out of range, and nothing was touched: the pure version says so
        xp = array_namespace(x)
        if new is None:
            return xp.asarray(data), None
        return xp.asarray(data), residual if new is old else xp.reshape(xp.asarray(new), x.shape)

    def decode(self, compressor: Compressor, data: Array, out: Array, *, accumulate: bool) -> bool:
        """Write what a payload decompresses to into a buffer, or add it; return whether that was possible."""
        values = _values(out)
        if values is None or not values.flags.writeable:
            return False
        payload = data.numpy() if is_torch_array(data) else data
        if type(compressor) is ScaledSign:
            sign_decode(payload, values.size, compressor.bucket_size, values, accumulate=accumulate)
        elif type(compressor) is MinMaxUInt8:
            minmax_decode(payload, values.size, compressor.bucket_size, values, accumulate=accumulate)
        elif type(compressor) is QSGD:
            options = (compressor.levels, compressor.bucket_size)
            qsgd_decode(payload, values.size, *options, values, accumulate=accumulate)
        else:
            return False
        return True


KERNELS = NumbaKernels()


def _values(x: Array) -> Floats | None:
    """Return an array as a flat NumPy array on the same memory, None if that is not possible."""
    if is_torch_array(x):
        if x.device.type != "cpu" or x.requires_grad or not x.is_contiguous():
            return None
        x = x.numpy()
    if not isinstance(x, np.ndarray) or x.dtype != np.float32 or not x.flags.c_contiguous:
        return None
    return x.reshape(-1)


def _encode(
    compressor: Compressor, x: Floats, old: Floats | None, key: Key | None, data: Bytes, new: Floats | None
) -> float | None:
    """Call the kernel of a compressor; None if a value is out of range."""
    if isinstance(compressor, ScaledSign):
        return sign_encode(x, old, compressor.bucket_size, compressor.scale, data, new)
    if isinstance(compressor, MinMaxUInt8):
        return minmax_encode(x, old, compressor.bucket_size, data, new)
    assert isinstance(compressor, QSGD)
    assert key is not None
    options = (compressor.levels, compressor.bucket_size, compressor.norm)
    words = fold_key(key, like=x)
    return qsgd_encode(x, old, *options, words, key.hop, key.bucket, data, new)
