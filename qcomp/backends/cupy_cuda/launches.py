"""A kernel set that is independent of the array library: it chooses kernels, their arguments and their threads."""

from __future__ import annotations

import math
from numbers import Integral
from typing import Any, NamedTuple, Protocol

import numpy as np

from qcomp.backends.cupy_cuda.sources import DTYPES, kernel_name
from qcomp.core.compressors import QSGD, MinMaxUInt8, Scaled, ScaledSign
from qcomp.core.compressors.bucketed import BucketedCompressor
from qcomp.core.kernels import Blend, Encoded, StepNumbers
from qcomp.core.numeric.arrays import Array, device, dtype_name
from qcomp.core.numeric.buckets import bucket_count, padded_size
from qcomp.core.numeric.random import Key, draws_are_replaced, fold_key
from qcomp.core.traits import AnyCompressor

Scalars = tuple[np.generic, ...]

_GROUP = 32
"""Elements of a bucket that a thread works on at once."""
_MOST_LANES = 512
"""The most threads that share a bucket. `_GROUP` and this number must equal those in ``buckets.cuh``."""
_BLOCK = 128
"""Threads of a block, unless one bucket needs more."""
_WORD = 0xFFFFFFFF


class Launch(NamedTuple):
    """A kernel with its grid, block and arguments."""

    name: str
    grid: int
    block: int
    arguments: Scalars
    """Scalars of exactly the parameters' types. A pointer is a uint64, 0 if it is null."""


class Runtime(Protocol):
    """An array library, and a device that runs kernels on its arrays."""

    def owns(self, x: Array) -> bool:
        """Return whether kernels can access the memory of an array."""
        ...

    def address(self, x: Array) -> int:
        """Return the address of an array's first element."""
        ...

    def empty(self, shape: tuple[int, ...], dtype: str, *, like: Array) -> Array:
        """Return a new array on the device of ``like``."""
        ...

    def zeros(self, shape: tuple[int, ...], dtype: str, *, like: Array) -> Array:
        """Return a new array of zeros on the device of ``like``."""
        ...

    def run(self, launch: Launch, *, like: Array) -> None:
        """Queue a kernel on the device of ``like``, after all earlier ones."""
        ...


class CudaKernels:
    """The kernels of this package, for a runtime's C-contiguous arrays of float32, float16 or bfloat16.

    Nothing waits for the device. When an encoder returns, the host does not know yet whether x is refused. So an
    encoder never overwrites the old residual: if ``out`` is the old residual, the new one is a new array.
    """

    def __init__(self, name: str, runtime: Runtime) -> None:
        self.name = name
        self.runtime = runtime

    def takes(self, x: Array) -> bool:
        """Return whether there are kernels for arrays of this library and dtype."""
        return self.runtime.owns(x) and dtype_name(x.dtype) in DTYPES

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
        """Compress x, or the momentum that x is blended into, plus the residual; the same pass checks the range."""
        codec = _codec(compressor)
        stream = () if codec is None else _stream(codec, compressor, key, x)
        if codec is None or stream is None:
            return None
        if not self._reaches(x, x) or not self._suit(
            (residual, out, None if blend is None else blend.m), x, "float32"
        ):
            return None
        new = None
        if residual is not None:
            fresh = out is None or self.runtime.address(out) == self.runtime.address(residual)
            new = self.runtime.empty(tuple(x.shape), "float32", like=x) if fresh else out
        size, bucket_size = math.prod(x.shape), codec.inner.traits.bucket_size
        data = self.runtime.empty((compressor.payload_spec(size).nbytes,), "uint8", like=x)
        refused = self.runtime.zeros((1,), "uint8", like=x)
        if size:
            lanes = min(max(1, bucket_size // _GROUP), _MOST_LANES)
            block = max(lanes, _BLOCK)
            role = "encode" if blend is None else "encode_blended"
            if bucket_size > lanes * _GROUP:
                role += "_large"
            arguments: Scalars = (
                self._pointer(x),
                *(() if blend is None else (self._pointer(blend.m), *_weights(blend.beta1, blend.scale))),
                *(self._pointer(array) for array in (residual, new, data, refused)),
                np.int64(size),
                np.int32(bucket_size),
                np.int32(lanes),
                np.int64(codec.code_bytes(size)),
                *codec.encoder,
                *stream,
            )
            name = kernel_name(codec.family, role, dtype_name(x.dtype))
            grid = -(-bucket_count(size, bucket_size) // (block // lanes))
            self.runtime.run(Launch(name, grid, block, arguments), like=x)
        return Encoded(data, new, refused)

    def decode(
        self, compressor: AnyCompressor, data: Array, like: Array, *, out: Array | None, accumulate: bool
    ) -> Array | None:
        """Return the decompressed payload, which may start at any address."""
        codec = _codec(compressor)
        dtype = dtype_name(like.dtype)
        if codec is None or not self._suit((out,), like, dtype) or not self._reaches(data, like):
            return None
        target = self.runtime.empty(tuple(like.shape), dtype, like=like) if out is None else out
        size, bucket_size = math.prod(like.shape), codec.inner.traits.bucket_size
        if size:
            arguments: Scalars = (
                self._pointer(data),
                self._pointer(target),
                np.int64(size),
                np.int32(bucket_size),
                np.int64(codec.code_bytes(size)),
                *codec.decoder,
                np.int32(accumulate),
            )
            groups = bucket_count(size, bucket_size) * max(1, bucket_size // _GROUP)
            name = kernel_name(codec.family, "decode", dtype)
            self.runtime.run(Launch(name, -(-groups // _BLOCK), _BLOCK, arguments), like=like)
        return target

    def finish_mean(self, total: Array, count: int) -> Array | None:
        """Divide a sum over ranks by their number, in place."""
        if not self._suit((total,), total, "float32"):
            return None
        self._pass_over("finish_mean", (total,), np.float32(count))
        return total

    def momentum(self, m: Array, g: Array, beta1: float, scale: float) -> Array | None:
        """Return ``beta1 * m + (1 - beta1) * scale * g`` in a new array."""
        if not self._suit((m, g), m, "float32"):
            return None
        out = self.runtime.empty(tuple(m.shape), "float32", like=m)
        self._pass_over("momentum", (m, g, out), *_weights(beta1, scale))
        return out

    def frozen_step(self, p: Array, m: Array, v: Array, numbers: StepNumbers) -> tuple[Array, Array] | None:
        """Return the new parameters in a new array, and the momentum masked in place."""
        if not self._suit((p, m, v), m, "float32"):
            return None
        out = self.runtime.empty(tuple(p.shape), "float32", like=p)
        decays = np.int32(numbers.weight_decay != 0)
        self._pass_over("frozen_step", (p, m, v, out), *map(np.float32, numbers), decays)
        return out, m

    def _pass_over(self, name: str, arrays: tuple[Array, ...], *numbers: np.generic) -> None:
        size = math.prod(arrays[0].shape)
        if size:
            arguments = (*(self._pointer(array) for array in arrays), np.int64(size), *numbers)
            self.runtime.run(Launch(name, -(-size // (4 * _BLOCK)), _BLOCK, arguments), like=arrays[0])

    def _pointer(self, array: Array | None) -> np.uint64:
        return np.uint64(0 if array is None else self.runtime.address(array))

    def _suit(self, arrays: tuple[Array | None, ...], like: Array, dtype: str) -> bool:
        """Return whether each array is None, or has this dtype and the size and device of ``like``."""
        return all(
            array is None
            or (
                self._reaches(array, like)
                and dtype_name(array.dtype) == dtype
                and math.prod(array.shape) == math.prod(like.shape)
            )
            for array in arrays
        )

    def _reaches(self, array: Any, like: Array) -> bool:
        """Return whether an array is contiguous and on the device of ``like``: kernels then need only its address."""
        return self.runtime.owns(array) and bool(array.flags.c_contiguous) and device(array) == device(like)


def _weights(beta1: float, scale: float) -> Scalars:
    """Return the factors of the old momentum and of the gradient."""
    return np.float32(beta1), np.float32((1 - beta1) * scale)


class _Codec(NamedTuple):
    """A compressor's kernel family and arguments."""

    family: str
    inner: BucketedCompressor
    """The compressor itself, or the one inside `Scaled`."""
    encoder: Scalars
    """The arguments that only encoders of this family take, except those that identify the draws."""
    decoder: Scalars

    def code_bytes(self, size: int) -> int:
        """Return how many bytes the packed codes take."""
        return padded_size(size, self.inner.traits.bucket_size) * self.inner.bits // 8


def _codec(compressor: AnyCompressor) -> _Codec | None:
    """Return a compressor's family and arguments; None if there are no kernels. A subclass has none: it may differ."""
    inner, factor = compressor, np.float32(0)  # 0: none
    if type(compressor) is Scaled:
        inner, factor = compressor.compressor, np.float32(compressor.factor)
    if type(inner) is QSGD:
        bits = np.int32(inner.bits)
        encoder = (np.int32(inner.levels), bits, np.int32(inner.norm == "l2"), factor)
        return _Codec("qsgd", inner, encoder, (bits, factor))
    if type(inner) is ScaledSign and inner is compressor:
        return _Codec("sign", inner, (np.int32(inner.scale == "rms"),), ())
    if type(inner) is MinMaxUInt8 and inner is compressor:
        return _Codec("minmax", inner, (), ())
    return None


def _stream(codec: _Codec, compressor: AnyCompressor, key: Key | None, like: Array) -> Scalars | None:
    """Return the arguments that identify an encoder's draws; None if draws are replaced, or the host knows no key."""
    if not compressor.traits.random:
        return ()
    if key is None or draws_are_replaced():
        return None
    words = (*fold_key(key, like=like), key.hop, key.bucket * (codec.inner.traits.bucket_size // 8))
    if not all(isinstance(word, Integral) for word in words):
        return None  # reading a key from the device would wait for it
    return tuple(np.uint32(int(word) & _WORD) for word in words)
