"""The numba kernels as the set that the core calls."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

import numpy as np
from array_api_compat import is_torch_array
from numpy.typing import NDArray

from qcomp.backends.numba_cpu.adam import adam_steps, frozen_steps
from qcomp.backends.numba_cpu.codec import Decoder, Encoder, Mix, decode, encode
from qcomp.backends.numba_cpu.jit import Bytes, Floats
from qcomp.backends.numba_cpu.means import average, compress_mean
from qcomp.backends.numba_cpu.memory import empty
from qcomp.backends.numba_cpu.minmax import minmax_decoder, minmax_encoder
from qcomp.backends.numba_cpu.qsgd import qsgd_encoder
from qcomp.backends.numba_cpu.qsgd_decoder import qsgd_decoder
from qcomp.backends.numba_cpu.sign import sign_decoder, sign_encoder
from qcomp.backends.numba_cpu.vectors import finish_mean, momentum
from qcomp.core.compressors import QSGD, MinMaxUInt8, Scaled, ScaledSign, WholeFields
from qcomp.core.compressors.qsgd import WideQSGD
from qcomp.core.kernels import AdamNumbers, Blend, Encoded, StepNumbers
from qcomp.core.numeric.arrays import array_namespace, dtype_name, is_mutable, to_compute_dtype
from qcomp.core.numeric.random import Key, draws_are_replaced, fold_key
from qcomp.core.traits import AnyCompressor

__all__ = ["KERNELS", "NumbaKernels"]

Array = Any

_DTYPES = ("float32", "float16", "bfloat16")


class NumbaKernels:
    """Kernels for C-contiguous arrays in the memory of the CPU: NumPy's, and torch's without a copy.

    float32 is computed in place; float16 and bfloat16 are converted first, which the library does.
    """

    name = "numba"
    any_shape = True

    def takes(self, x: Array) -> bool:
        """Return whether x is a NumPy array or a tensor on the CPU, of a dtype that is computed in float32."""
        if is_torch_array(x):
            return x.device.type == "cpu" and dtype_name(x.dtype) in _DTYPES
        return isinstance(x, np.ndarray) and x.dtype.name in _DTYPES

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
        """Compress x plus the residual; None if there is no kernel, or if a value is out of range."""
        values, old = _values(to_compute_dtype(x)), None if residual is None else _values(residual)
        m = None if blend is None else _values(blend.m)
        if (
            values is None
            or (residual is not None and old is None)
            or (blend is not None and (m is None or out is x))
        ):
            return None
        mixed = None if blend is None or m is None else (m, blend.beta1, (1 - blend.beta1) * blend.scale)
        data = np.empty(compressor.payload_spec(values.size).nbytes, dtype=np.uint8)
        encoder = _encoder(compressor, values, key, data, mixed)
        if encoder is None:
            return None
        new = None
        if old is not None:  # the kernels tell by identity what shares memory
            shared = old if out is residual else values if out is x else None
            new = empty(old.shape) if out is None else _values(out) if shared is None else shared
            if new is None or not new.flags.writeable:
                return None
        if not encode(encoder, old, new):
            if out is not x:
                return None  # the pure version says so
            return Encoded(_as_array_of(x, data), out, _as_array_of(x, np.ones(1, dtype=np.uint8)))
        rest = out
        if new is not None and out is None:
            rest = _as_array_of(x, new.reshape(x.shape))
        return Encoded(_as_array_of(x, data), rest, None)

    def decode(
        self, compressor: AnyCompressor, data: Array, like: Array, *, out: Array | None, accumulate: bool
    ) -> Array | None:
        """Return what a payload decompresses to, in ``out`` if that is given."""
        room = _room(like, out)
        if room is None:
            return None
        target, values = room
        decoder = _decoder(compressor, data, values)
        if decoder is None:
            return None
        decode(decoder, accumulate=accumulate)
        return target

    def empty_like(self, x: Array) -> Array | None:
        """Return room for an array like x on memory that was used before, if it is computed in float32."""
        return _empty(x) if dtype_name(x.dtype) == "float32" else None

    def average(
        self, compressor: AnyCompressor, payloads: Sequence[Array], like: Array, *, out: Array | None
    ) -> Array | None:
        """Return the mean of what payloads decompress to, a block at a time."""
        room = _room(like, out)
        if room is None:
            return None
        mean, values = room
        decoders = _decoders(compressor, payloads, values)
        if decoders is None:
            return None
        average(decoders)
        return mean

    def compress_mean(
        self,
        compressor: AnyCompressor,
        payloads: Sequence[Array],
        like: Array,
        residual: Array | None,
        key: Key | None,
        *,
        out: Array | None,
    ) -> Encoded | None:
        """Compress the mean of what payloads decompress to, a block at a time; None if a value is out of range."""
        old = None if residual is None else _values(residual)
        room = _room(like, out)
        if room is None or (residual is not None and old is None):
            return None
        rest, values = room
        data = np.empty(compressor.payload_spec(values.size).nbytes, dtype=np.uint8)
        encoder, decoders = _encoder(compressor, values, key, data), _decoders(compressor, payloads, values)
        if encoder is None or decoders is None or not compress_mean(decoders, encoder, old):
            return None
        return Encoded(_as_array_of(like, data), None if residual is None else rest, None)

    def finish_mean(self, total: Array, count: int) -> Array | None:
        """Divide a sum over ranks by their number, in place."""
        values = _values(total)
        if values is None or not values.flags.writeable:
            return None
        finish_mean(values, count)
        return total

    def momentum(self, m: Array, g: Array, beta1: float, scale: float) -> Array | None:
        """Return the momentum in a new array."""
        old, gradient = _values(m), _values(g)
        if old is None or gradient is None:
            return None
        mixed = empty(old.shape)
        momentum(old, gradient, beta1, scale, mixed)
        return _as_array_of(m, mixed.reshape(m.shape))

    def frozen_step(self, p: Array, m: Array, v: Array, numbers: StepNumbers) -> tuple[Array, Array] | None:
        """Return the parameters in a new array, and the masked momentum in the buffer of m."""
        moved = self.frozen_steps([p], [m], [v], [numbers], donate=False)
        return None if moved is None else moved[0]

    def frozen_steps(
        self,
        params: Sequence[Array],
        momenta: Sequence[Array],
        variances: Sequence[Array],
        numbers: Sequence[StepNumbers],
        *,
        donate: bool,
    ) -> list[tuple[Array, Array]] | None:
        """Return the parameters in new arrays or in their own, and the masked momenta in their buffers."""
        old = _addresses(params, momenta, variances)
        if old is None or not all(map(is_mutable, momenta)):
            return None
        moved = [p if donate and is_mutable(p) else _empty(p) for p in params]
        address = _address_of_tensor if _is_tensor(moved[0]) else _address_of_array
        rows = [
            (*row, row[0] if new is p else address(new), row[1])
            for row, p, new in zip(old, params, moved, strict=True)
        ]
        frozen_steps(rows, _sizes(params), numbers)
        _tell_torch([*momenta, *(params if donate else ())])
        return list(zip(moved, momenta, strict=True))

    def adam_steps(
        self,
        params: Sequence[Array],
        momenta: Sequence[Array],
        variances: Sequence[Array],
        gradients: Sequence[Array],
        numbers: Sequence[AdamNumbers],
        *,
        donate: bool,
    ) -> list[tuple[Array, Array, Array]] | None:
        """Return parameters, momenta and variances in new arrays, or in their own."""
        old = _addresses(params, momenta, variances, gradients)
        if old is None:
            return None
        moved = [
            tensor
            if donate and all(map(is_mutable, tensor))
            else (_empty(tensor[0]), _empty(tensor[0]), _empty(tensor[0]))
            for tensor in zip(params, momenta, variances, strict=True)
        ]
        address = _address_of_tensor if _is_tensor(params[0]) else _address_of_array
        rows = [
            (*row, *(row[:3] if new[0] is p else map(address, new)))
            for row, p, new in zip(old, params, moved, strict=True)
        ]
        adam_steps(rows, _sizes(params), numbers)
        if donate:
            _tell_torch([*params, *momenta, *variances])
        return moved


KERNELS = NumbaKernels()


def _is_tensor(x: Array) -> bool:
    return type(x) is not np.ndarray and is_torch_array(x)  # the first test takes a tenth of the second


def _as_array_of(x: Array, values: NDArray[Any]) -> Array:
    """Return a NumPy array as an array of the library of x, on the same memory."""
    return array_namespace(x).asarray(values) if _is_tensor(x) else values


def _empty(like: Array) -> Array:
    return _as_array_of(like, empty(tuple(like.shape)))


def _addresses(*arrays: Sequence[Array]) -> list[list[int]] | None:
    """Return the addresses of the arrays of each tensor, None if the kernels do not reach them all."""
    address = _address_of_tensor if _is_tensor(arrays[0][0]) else _address_of_array
    rows = []
    for tensor in zip(*arrays, strict=True):
        row = [address(x) for x in tensor]
        if -1 in row or any(x.shape != tensor[0].shape for x in tensor):
            return None
        rows.append(row)
    return rows


_FLOAT32 = np.dtype(np.float32)


def _sizes(arrays: Sequence[Array]) -> list[int]:
    return [math.prod(x.shape) for x in arrays]


def _address_of_array(x: Array) -> int:
    """Return where the elements of a NumPy array are, -1 if they are not float32 side by side."""
    if not isinstance(x, np.ndarray) or x.dtype != _FLOAT32:
        return -1
    flags = x.flags
    if not (flags.c_contiguous and flags.aligned):
        return -1
    at: int = x.__array_interface__["data"][0]
    return at


def _address_of_tensor(x: Array) -> int:
    """Return where the elements of a tensor of torch are, -1 if they are not float32 side by side on the CPU."""
    if not x.is_cpu or x.requires_grad or dtype_name(x.dtype) != "float32" or not x.is_contiguous():
        return -1
    at: int = x.data_ptr()
    return at


def _tell_torch(written: Sequence[Array]) -> None:
    """Tell automatic differentiation which tensors were written to, as torch's own operations do."""
    if _is_tensor(written[0]):
        increment_version = import_module("torch").autograd.graph.increment_version
        for x in written:
            increment_version(x)


def _room(like: Array, out: Array | None) -> tuple[Array, Floats] | None:
    """Return an array for a result, and it as a flat NumPy array; None if the kernels cannot write to it."""
    if dtype_name(like.dtype) != "float32":
        return None
    target = _empty(like) if out is None else out
    values = _values(target)
    return None if values is None or not values.flags.writeable else (target, values)


def _values(x: Array) -> Floats | None:
    """Return an array as a flat NumPy array on the same memory, None if that is not possible."""
    if _is_tensor(x):
        if x.device.type != "cpu" or x.requires_grad or not x.is_contiguous():
            return None
        x = x.numpy()
    if not isinstance(x, np.ndarray) or x.dtype != _FLOAT32 or not x.flags.c_contiguous:
        return None
    return x.reshape(-1)


def _unwrapped(c: AnyCompressor) -> tuple[QSGD, float | None, int | None] | None:
    """Return the QSGD inside, the factor of its values and the elements of a bucket, None if another one is inside."""
    held, factor = None, None
    if isinstance(c, WholeFields):
        held, c = c.traits.bucket_size, c.compressor
    if isinstance(c, Scaled):
        factor, c = c.factor, c.compressor
    return (c, factor, held) if isinstance(c, QSGD) and type(c) in (QSGD, WideQSGD) else None


def _encode_sign(c: ScaledSign, x: Floats, key: Key | None, data: Bytes, blend: Mix | None) -> Encoder | None:  # noqa: ARG001 - draws nothing
    return sign_encoder(x, c.bucket_size, c.scale, data, blend)


def _encode_minmax(
    c: MinMaxUInt8,
    x: Floats,
    key: Key | None,  # noqa: ARG001 - draws nothing
    data: Bytes,
    blend: Mix | None,
) -> Encoder | None:
    return minmax_encoder(x, c.bucket_size, data, blend)


def _encode_qsgd(
    c: AnyCompressor, x: Floats, key: Key | None, data: Bytes, blend: Mix | None
) -> Encoder | None:
    """Return None also where the pure version would now draw in another way."""
    inside = _unwrapped(c)
    if inside is None or key is None or draws_are_replaced():
        return None
    inner, factor, held = inside
    options = inner.levels, inner.bucket_size, inner.norm
    stream = fold_key(key, like=x), key.hop, key.bucket
    return qsgd_encoder(x, *options, *stream, data, blend, factor=factor, held=held)


def _decode_sign(c: ScaledSign, data: Bytes, out: Floats) -> Decoder | None:
    return sign_decoder(data, c.bucket_size, out)


def _decode_minmax(c: MinMaxUInt8, data: Bytes, out: Floats) -> Decoder | None:
    return minmax_decoder(data, c.bucket_size, out)


def _decode_qsgd(c: AnyCompressor, data: Bytes, out: Floats) -> Decoder | None:
    inside = _unwrapped(c)
    if inside is None:
        return None
    inner, factor, held = inside
    return qsgd_decoder(data, inner.levels, inner.bucket_size, out, factor=factor, held=held)


_ENCODERS: dict[type, Callable[[Any, Floats, Key | None, Bytes, Mix | None], Encoder | None]] = {
    ScaledSign: _encode_sign,
    MinMaxUInt8: _encode_minmax,
    QSGD: _encode_qsgd,
    WideQSGD: _encode_qsgd,
    Scaled: _encode_qsgd,
    WholeFields: _encode_qsgd,
}
"""By exact type: a subclass may compress in another way. From compressor, x, key, payload and blend."""
_DECODERS: dict[type, Callable[[Any, Bytes, Floats], Decoder | None]] = {
    ScaledSign: _decode_sign,
    MinMaxUInt8: _decode_minmax,
    QSGD: _decode_qsgd,
    WideQSGD: _decode_qsgd,
    Scaled: _decode_qsgd,
    WholeFields: _decode_qsgd,
}


def _encoder(
    c: AnyCompressor, x: Floats, key: Key | None, data: Bytes, blend: Mix | None = None
) -> Encoder | None:
    make = _ENCODERS.get(type(c))
    return None if make is None else make(c, x, key, data, blend)


def _decoders(c: AnyCompressor, payloads: Sequence[Array], out: Floats) -> list[Decoder] | None:
    made = [_decoder(c, data, out) for data in payloads]
    return None if None in made else [decoder for decoder in made if decoder is not None]


def _decoder(c: AnyCompressor, data: Array, out: Floats) -> Decoder | None:
    make = _DECODERS.get(type(c))
    return None if make is None else make(c, data.numpy() if _is_tensor(data) else data, out)
