"""The numba kernels as the set that the core calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from array_api_compat import is_torch_array
from numpy.typing import NDArray

from qcomp.backends.numba_cpu.adam import frozen_adam_step
from qcomp.backends.numba_cpu.codec import Decoder, Encoder, Mix, decode, encode
from qcomp.backends.numba_cpu.jit import Bytes, Floats
from qcomp.backends.numba_cpu.means import average, compress_mean
from qcomp.backends.numba_cpu.memory import empty
from qcomp.backends.numba_cpu.minmax import minmax_decoder, minmax_encoder
from qcomp.backends.numba_cpu.qsgd import qsgd_encoder
from qcomp.backends.numba_cpu.qsgd_decoder import qsgd_decoder
from qcomp.backends.numba_cpu.sign import sign_decoder, sign_encoder
from qcomp.backends.numba_cpu.vectors import finish_mean, momentum
from qcomp.core.compressor import Compressor
from qcomp.core.compressors import QSGD, MinMaxUInt8, Scaled, ScaledSign, WholeFields
from qcomp.core.compressors.qsgd import WideQSGD
from qcomp.core.kernels import Blend, Encoded, StepNumbers
from qcomp.core.numeric.arrays import array_namespace, dtype_name, to_compute_dtype
from qcomp.core.numeric.random import Key, draws_are_replaced, fold_key

__all__ = ["KERNELS", "NumbaKernels"]

Array = Any

_DTYPES = ("float32", "float16", "bfloat16")


class NumbaKernels:
    """Kernels for C-contiguous arrays in the memory of the CPU: NumPy's, and torch's without a copy.

    float32 is computed in place; float16 and bfloat16 are converted first, which the library does.
    """

    name = "numba"

    def takes(self, x: Array) -> bool:
        """Return whether x is a NumPy array or a tensor on the CPU, of a dtype that is computed in float32."""
        if is_torch_array(x):
            return x.device.type == "cpu" and dtype_name(x.dtype) in _DTYPES
        return isinstance(x, np.ndarray) and x.dtype.name in _DTYPES

    def encode(
        self,
        compressor: Compressor,
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
        self, compressor: Compressor, data: Array, like: Array, *, out: Array | None, accumulate: bool
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
        self, compressor: Compressor, payloads: Sequence[Array], like: Array, *, out: Array | None
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
        compressor: Compressor,
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
        old, mean, variance = _values(p), _values(m), _values(v)
        if old is None or mean is None or variance is None or not mean.flags.writeable:
            return None
        moved = empty(old.shape)
        frozen_adam_step(
            old,
            mean,
            variance,
            numbers,
            p_out=moved,
            m_out=mean,
        )
        return _as_array_of(p, moved.reshape(p.shape)), m


KERNELS = NumbaKernels()


def _as_array_of(x: Array, values: NDArray[Any]) -> Array:
    """Return a NumPy array as an array of the library of x, on the same memory."""
    return array_namespace(x).asarray(values) if is_torch_array(x) else values


def _empty(like: Array) -> Array:
    return _as_array_of(like, empty(tuple(like.shape)))


def _room(like: Array, out: Array | None) -> tuple[Array, Floats] | None:
    """Return an array for a result, and it as a flat NumPy array; None if the kernels cannot write to it."""
    if dtype_name(like.dtype) != "float32":
        return None
    target = _empty(like) if out is None else out
    values = _values(target)
    return None if values is None or not values.flags.writeable else (target, values)


def _values(x: Array) -> Floats | None:
    """Return an array as a flat NumPy array on the same memory, None if that is not possible."""
    if is_torch_array(x):
        if x.device.type != "cpu" or x.requires_grad or not x.is_contiguous():
            return None
        x = x.numpy()
    if not isinstance(x, np.ndarray) or x.dtype != np.float32 or not x.flags.c_contiguous:
        return None
    return x.reshape(-1)


def _unwrapped(c: Compressor) -> tuple[QSGD, float | None, int | None] | None:
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


def _encode_qsgd(c: Compressor, x: Floats, key: Key | None, data: Bytes, blend: Mix | None) -> Encoder | None:
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


def _decode_qsgd(c: Compressor, data: Bytes, out: Floats) -> Decoder | None:
    inside = _unwrapped(c)
    if inside is None:
        return None
    inner, factor, held = inside
    return qsgd_decoder(data, inner.levels, inner.bucket_size, out, factor=factor, held=held)


_ENCODERS: dict[type[Compressor], Callable[[Any, Floats, Key | None, Bytes, Mix | None], Encoder | None]] = {
    ScaledSign: _encode_sign,
    MinMaxUInt8: _encode_minmax,
    QSGD: _encode_qsgd,
    WideQSGD: _encode_qsgd,
    Scaled: _encode_qsgd,
    WholeFields: _encode_qsgd,
}
"""By exact type: a subclass may compress in another way. From compressor, x, key, payload and blend."""
_DECODERS: dict[type[Compressor], Callable[[Any, Bytes, Floats], Decoder | None]] = {
    ScaledSign: _decode_sign,
    MinMaxUInt8: _decode_minmax,
    QSGD: _decode_qsgd,
    WideQSGD: _decode_qsgd,
    Scaled: _decode_qsgd,
    WholeFields: _decode_qsgd,
}


def _encoder(
    c: Compressor, x: Floats, key: Key | None, data: Bytes, blend: Mix | None = None
) -> Encoder | None:
    make = _ENCODERS.get(type(c))
    return None if make is None else make(c, x, key, data, blend)


def _decoders(c: Compressor, payloads: Sequence[Array], out: Floats) -> list[Decoder] | None:
    made = [_decoder(c, data, out) for data in payloads]
    return None if None in made else [decoder for decoder in made if decoder is not None]


def _decoder(c: Compressor, data: Array, out: Floats) -> Decoder | None:
    make = _DECODERS.get(type(c))
    return None if make is None else make(c, data.numpy() if is_torch_array(data) else data, out)
