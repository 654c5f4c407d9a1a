"""The numba kernels as a kernel set, which the core calls."""

from __future__ import annotations

import math
from collections.abc import Sequence
from importlib import import_module
from typing import Any

import numpy as np
from array_api_compat import is_torch_array
from numpy.typing import NDArray

from qcomp.backends.numba_cpu.adam import adam_steps, frozen_steps
from qcomp.backends.numba_cpu.codec import (
    NO_MOMENTUM,
    Weights,
    decode,
    decoder_of,
    encode,
    encoder_of,
    run_decoder,
    run_encoder,
)
from qcomp.backends.numba_cpu.frames import CompressorKernels, kernels_of, plan_of
from qcomp.backends.numba_cpu.jit import Bytes, Floats, Longs
from qcomp.backends.numba_cpu.low_rank import NO_VALUES, compensate, next_factor, orthonormal, take_low_rank
from qcomp.backends.numba_cpu.means import average, compress_mean
from qcomp.backends.numba_cpu.memory import empty, message
from qcomp.backends.numba_cpu.primitives import FRESH, NO_RESIDUAL, OVER_INPUT
from qcomp.backends.numba_cpu.stream import pays
from qcomp.backends.numba_cpu.tables import (
    MOMENTUM,
    RESIDUAL,
    RESIDUAL_OUT,
    VALUES,
    Decoded,
    address,
    addresses,
    decoded_vectors,
    encoded_vectors,
)
from qcomp.backends.numba_cpu.vectors import descend, finish_mean, in_range, momentum, nesterov, scale
from qcomp.core.kernels import AdamNumbers, Blend, Encoded, EncodedFrame, StepNumbers
from qcomp.core.mean.framing import Frame
from qcomp.core.numeric.arrays import (
    Array,
    dtype_name,
    is_mutable,
    to_compute_dtype,
)
from qcomp.core.numeric.random import Key
from qcomp.core.primitives import refusal
from qcomp.core.traits import AnyCompressor

__all__ = ["KERNELS", "NumbaKernels"]


_DTYPES = ("float32", "float16", "bfloat16")


class NumbaKernels:
    """Kernels for C-contiguous NumPy arrays, and for torch tensors on the CPU, whose memory they share.

    float32 needs no conversion; the array library converts float16 and bfloat16 first.
    """

    name = "numba"
    any_shape = True

    def takes(self, x: Any) -> bool:
        """Return whether x is a NumPy array or a tensor on the CPU, of a dtype that is computed in float32."""
        if _is_tensor(x) and not x.is_cpu:
            return False
        kind = type(x), x.dtype
        taken = _taken.get(kind)
        if taken is None:  # cached: NumPy takes longer for a dtype's name than a kernel for a small array
            known = isinstance(x, np.ndarray) or is_torch_array(x)
            taken = _taken[kind] = known and dtype_name(x.dtype) in _DTYPES
        return taken

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
        kernels = kernels_of(compressor)
        run = None if kernels is None else kernels.encode(key)
        if kernels is None or run is None:
            return None
        encoder = encoder_of(run, kernels.bucket_size, values, data, mixed, key.bucket if key else 0)
        new = None
        if old is not None:  # the kernels recognise shared memory by the arrays' identity
            shared = old if out is residual else values if out is x else None
            new = empty(old.shape) if out is None else _values(out) if shared is None else shared
            if new is None or not new.flags.writeable:
                return None
        if not encode(encoder, old, new):
            if out is not x:
                return None  # the pure version raises
            raise refusal(compressor)
        rest = out
        if new is not None and out is None:
            rest = _as_array_of(x, new.reshape(x.shape))
        return Encoded(_as_array_of(x, data), rest, None)

    def decode(
        self, compressor: AnyCompressor, data: Array, like: Array, *, out: Array | None, accumulate: bool
    ) -> Array | None:
        """Return the decompressed payload, in ``out`` if given."""
        room = _room(like, out)
        if room is None:
            return None
        target, values = room
        kernels = kernels_of(compressor)
        if kernels is None:
            return None
        decode(decoder_of(kernels.decode, kernels.bucket_size, _bytes(data), values), accumulate=accumulate)
        return target

    def empty_like(self, x: Array) -> Array | None:
        """Return an uninitialised array like x, in reused memory if available; None unless x is float32."""
        return _empty(x) if dtype_name(x.dtype) == "float32" else None

    def average(
        self, compressor: AnyCompressor, payloads: Sequence[Array], like: Array, *, out: Array | None
    ) -> Array | None:
        """Return the mean of decompressed payloads, computed a block at a time."""
        room = _room(like, out)
        if room is None:
            return None
        mean, values = room
        kernels = kernels_of(compressor)
        if kernels is None:
            return None
        average(kernels.decode, kernels.bucket_size, _received(kernels, payloads, values))
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
        """Compress the mean of decompressed payloads, a block at a time; None if a value is out of range."""
        old = None if residual is None else _values(residual)
        room = _room(like, out)
        if room is None or (residual is not None and old is None):
            return None
        rest, values = room
        data = np.empty(compressor.payload_spec(values.size).nbytes, dtype=np.uint8)
        kernels = kernels_of(compressor)
        encode = None if kernels is None else kernels.encode(key)
        if kernels is None or encode is None:
            return None
        sent = encoded_vectors(values, kernels.bucket_size, data, None, key.bucket if key else 0)
        if old is not None:
            sent.rows[0, RESIDUAL], sent.rows[0, RESIDUAL_OUT] = address(old), address(values)
        received = _received(kernels, payloads, values)
        mode = NO_RESIDUAL if old is None else OVER_INPUT
        if not compress_mean(kernels.decode, encode, kernels.bucket_size, received, sent, mode):
            return None
        return Encoded(_as_array_of(like, data), None if residual is None else rest, None)

    def empty_likes(self, arrays: Sequence[Array]) -> list[Array] | None:
        """Return `empty_like` of each of several arrays."""
        if any(dtype_name(dtype) != "float32" for dtype in {x.dtype for x in arrays}):
            return None
        buffers = [empty(tuple(x.shape)) for x in arrays]
        return (
            [_as_array_of(arrays[0], buffer) for buffer in buffers] if _is_tensor(arrays[0]) else [*buffers]
        )

    def encode_frames(
        self,
        frames: Sequence[Frame],
        tensors: Sequence[Array],
        residuals: Sequence[Array],
        outs: Sequence[Array | None],
        key: Key,
        *,
        blends: Sequence[Blend],
    ) -> list[Array] | None:
        """Compress all segments of some chunks, with one kernel call for each compressor."""
        plan = plan_of(frames)
        donated = outs is tensors
        if plan.groups is None or (blends and (donated or len({b[1:] for b in blends}) > 1)):
            return None
        found = {VALUES: _addresses_of(tensors, plan.tensors)}
        if residuals:
            found[RESIDUAL] = _addresses_of(residuals, plan.tensors)
            found[RESIDUAL_OUT] = _addresses_of(outs, plan.tensors, written=True)
        if blends:
            found[MOMENTUM] = _addresses_of([blend.m for blend in blends], plan.tensors)
        addresses = {column: at for column, at in found.items() if at is not None}
        if len(addresses) < len(found):
            return None
        mode = NO_RESIDUAL if not residuals else OVER_INPUT if donated else FRESH
        weights = _weights(blends[0]) if blends else NO_MOMENTUM
        messages = [message(frame.nbytes, gaps) for frame, gaps in zip(frames, plan.gaps, strict=True)]
        to = _longs([*map(address, messages)])
        for group in plan.groups:
            run = group.kernels.encode(key)
            if run is None:
                return None
            vectors = group.encoded(addresses, to, key.bucket)
            if not run_encoder(run, group.kernels.bucket_size, vectors, mode, weights):
                if donated:
                    raise refusal(group.compressor)
                return None  # the pure version raises
        return [_as_array_of(tensors[0], each) for each in messages]

    def decode_frames(
        self, frames: Sequence[Frame], messages: Sequence[Array], outs: Sequence[Array]
    ) -> bool:
        """Decompress all segments of some chunks, with one kernel call for each compressor."""
        plan = plan_of(frames)
        to, at = _addresses_of(outs, plan.tensors, written=True), _addresses_of_messages(messages)
        if plan.groups is None or to is None or at is None:
            return False
        for group in plan.groups:
            vectors = group.decoded(to, group.of_each_frame(at))
            run, bucket_size = group.kernels.decode, group.kernels.bucket_size
            run_decoder(run, bucket_size, vectors, accumulate=False, streams=pays(group.elements))
        return True

    def average_frame(self, frame: Frame, messages: Sequence[Array], outs: Sequence[Array]) -> bool:
        """Average all segments of a chunk, a block at a time."""
        plan = plan_of([frame])
        to, at = _addresses_of(outs, plan.tensors, written=True), _addresses_of_messages(messages)
        if plan.groups is None or to is None or at is None:
            return False
        for group in plan.groups:
            vectors = group.decoded(to, group.of_each_rank(at))
            average(group.kernels.decode, group.kernels.bucket_size, vectors)
        return True

    def compress_mean_frame(
        self,
        frame: Frame,
        messages: Sequence[Array],
        like: Array,
        residuals: Sequence[Array],
        key: Key,
        *,
        into: Sequence[Array | None],
    ) -> EncodedFrame | None:
        """Compress the means of all segments of a chunk, a block at a time; None if a value is out of range."""
        plan = plan_of([frame])
        if not plan.groups:
            return None
        outs: Sequence[Any] = into or [_as_array_of(like, empty((size,))) for size in plan.sizes]
        segments = range(len(plan.sizes))
        new = _addresses_of(outs, segments, written=True)
        old = _addresses_of(residuals, segments) if residuals else new
        at = _addresses_of_messages(messages)
        if new is None or old is None or at is None:
            return None
        mode = OVER_INPUT if residuals else NO_RESIDUAL
        sent_to_all = message(frame.nbytes, plan.gaps[0])
        to = _longs([address(sent_to_all)])
        for group in plan.groups:
            kernels, run = group.kernels, group.kernels.encode(key)
            if run is None:
                return None
            received = group.decoded_alone(new, group.of_each_rank(at))
            sent = group.encoded_alone(new, old, to, key.bucket)
            if not compress_mean(kernels.decode, run, kernels.bucket_size, received, sent, mode):
                return None
        return EncodedFrame(_as_array_of(like, sent_to_all), tuple(outs) if residuals else ())

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

    def nesterov(self, m: Array, g: Array, beta1: float) -> tuple[Array, Array] | None:
        """Return the momentum and Nesterov's momentum in new arrays."""
        old, gradient = _values(m), _values(g)
        if old is None or gradient is None:
            return None
        new, ahead = empty(old.shape), empty(old.shape)
        nesterov(old, gradient, beta1, new, ahead)
        return _as_array_of(m, new.reshape(m.shape)), _as_array_of(m, ahead.reshape(m.shape))

    def descend(self, p: Array, d: Array, rate: float, decay: float, *, out: Array | None) -> Array | None:
        """Return the parameters after a step, in ``out`` if given."""
        values, direction, room = _values(p), _values(d), _room(p, out)
        if values is None or direction is None or room is None:
            return None
        target, new = room
        descend(values, direction, rate, decay, new)
        _tell_torch([target])
        return target

    def scale(self, x: Array, factor: float) -> Array | None:
        """Return ``factor * x`` in a new array."""
        values = _values(x)
        if values is None:
            return None
        scaled = empty(values.shape)
        scale(values, factor, scaled)
        return _as_array_of(x, scaled.reshape(x.shape))

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
        """Return the parameters, in new arrays or in their own, and the masked momenta in the momenta's buffers."""
        moved = [p if donate and is_mutable(p) else _empty(p) for p in params]
        table = _table(params, momenta, variances, moved, momenta)
        if table is None or not all(map(is_mutable, momenta)):
            return None
        frozen_steps(table, _sizes(params), numbers)
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
        moved = [
            tensor
            if donate and all(map(is_mutable, tensor))
            else (_empty(tensor[0]), _empty(tensor[0]), _empty(tensor[0]))
            for tensor in zip(params, momenta, variances, strict=True)
        ]
        table = _table(params, momenta, variances, gradients, *zip(*moved, strict=True))
        if table is None:
            return None
        adam_steps(table, _sizes(params), numbers)
        if donate:
            _tell_torch([*params, *momenta, *variances])
        return moved

    def in_range(self, x: Array) -> bool:
        """Return whether every value is +0, or of a magnitude from 2^-126 to below 2^100."""
        values = _values(x)
        return values is not None and in_range(values)

    def compensate(
        self, x: Array, residual: Array | None, *, out: Array | None
    ) -> tuple[Array, float] | None:
        """Return x plus the residual, if there is one, and the largest magnitude of the sum."""
        values, room = _values(x), _room(x, out)
        old = NO_VALUES if residual is None else _values(residual)
        if values is None or old is None or room is None:
            return None
        target, new = room
        largest = compensate(values, old, new)
        _tell_torch([target])
        return target, largest

    def take_low_rank(
        self, left: Array, right: Array, matrix: Array, *, out: Array | None
    ) -> tuple[Array, Array] | None:
        """Return the product of two factors, and the matrix minus this product in the matrix's buffer."""
        factors, whole, room = [_values(left), _values(right)], _values(matrix), _room(matrix, out)
        if factors[0] is None or factors[1] is None or whole is None or room is None:
            return None
        if not whole.flags.writeable:
            return None
        target, product = room
        take_low_rank(factors[0], factors[1], whole, product, left.shape[1])
        _tell_torch([target, matrix])
        return target, matrix

    def orthonormal(self, rows: Array) -> Array | None:
        """Return an orthonormal basis of the rows of a factor."""
        values, room = _values(rows), _room(rows, None)
        if values is None or room is None:
            return None
        target, basis = room
        orthonormal(values, rows.shape[0], basis)
        return target

    def next_factor(self, new: Array, old: Array) -> Array | None:
        """Return each row divided by a power of two, or the old row instead of zeros."""
        values, kept, room = _values(new), _values(old), _room(new, None)
        if values is None or kept is None or room is None:
            return None
        target, scaled = room
        next_factor(values, kept, new.shape[0], scaled)
        return target


KERNELS = NumbaKernels()

_taken: dict[tuple[type, object], bool] = {}
"""Whether arrays of a class and dtype are accepted, provided that they are in CPU memory."""


def _is_tensor(x: Array) -> bool:
    return type(x) is not np.ndarray and is_torch_array(x)  # the first test takes a tenth of the second


def _as_array_of(x: Array, values: NDArray[Any]) -> Array:
    """Return a NumPy array as an array of the library of x that shares its memory."""
    shared: Array = import_module("torch").from_numpy(values) if _is_tensor(x) else values
    return shared


def _empty(like: Array) -> Array:
    return _as_array_of(like, empty(tuple(like.shape)))


def _table(*arrays: Sequence[Array]) -> Longs | None:
    """Return the addresses of each tensor's arrays, one row per tensor; None if the kernels cannot access them all."""
    together = [x for of_kind in arrays for x in of_kind]
    shapes = [x.shape for x in together]
    found = _addresses(together)
    if found is None or shapes != shapes[: len(arrays[0])] * len(arrays):
        return None
    return np.asarray(found, dtype=np.int64).reshape(len(arrays), -1).T


def _addresses(arrays: Sequence[Array], *, written: bool = False) -> list[int] | None:
    """Return the addresses of arrays, or None if the kernels cannot access all of them."""
    if not arrays or type(arrays[0]) is np.ndarray or not is_torch_array(arrays[0]):
        return addresses(arrays, written=written)
    found = list(map(_address_of_tensor, arrays))
    return None if -1 in found else found


_FLOAT32 = np.dtype(np.float32)


def _sizes(arrays: Sequence[Array]) -> list[int]:
    return [math.prod(x.shape) for x in arrays]


def _address_of_tensor(x: Any) -> int:
    """Return the address of a torch tensor's elements, or -1 unless they are contiguous float32 on the CPU."""
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
    """Return an array for a result, and a flat NumPy view of it; None if the kernels cannot write to it."""
    if dtype_name(like.dtype) != "float32":
        return None
    if out is None:
        made = empty(tuple(like.shape))
        return _as_array_of(like, made), made.reshape(-1)
    values = _values(out)
    return None if values is None or not values.flags.writeable else (out, values)


def _values(x: Any) -> Floats | None:
    """Return a flat NumPy view of an array, or None if that is not possible."""
    if _is_tensor(x):
        if not x.is_cpu or x.requires_grad or dtype_name(x.dtype) != "float32" or not x.is_contiguous():
            return None
        x = x.numpy()
    if not isinstance(x, np.ndarray) or x.dtype != _FLOAT32 or not x.flags.c_contiguous:
        return None
    return x.reshape(-1)


def _bytes(data: Any) -> Bytes:
    found: Bytes = data.numpy() if _is_tensor(data) else data
    return found


def _received(kernels: CompressorKernels, payloads: Sequence[Array], out: Floats) -> Decoded:
    """Return the table of one vector and its payload from each rank."""
    return decoded_vectors([_bytes(payload) for payload in payloads], kernels.bucket_size, out)


def _addresses_of(arrays: Sequence[Any], numbers: Sequence[int], *, written: bool = False) -> Longs | None:
    """Return the addresses of the arrays with these numbers, or None if the kernels cannot access all of them."""
    some = arrays if len(numbers) == len(arrays) else [arrays[number] for number in numbers]
    found = _addresses(some, written=written)
    return None if found is None else np.asarray(found, dtype=np.int64)


def _addresses_of_messages(messages: Sequence[Any]) -> Longs | None:
    """Return the addresses of messages, or None if one is not contiguous in CPU memory."""
    if _is_tensor(messages[0]):
        found = [x.data_ptr() if x.is_cpu and x.is_contiguous() else -1 for x in messages]
    else:
        found = [address(x) if x.flags.c_contiguous else -1 for x in messages]
    return None if -1 in found else np.asarray(found, dtype=np.int64)


def _weights(blend: Blend) -> Weights:
    return np.float32(blend.beta1), np.float32((1 - blend.beta1) * blend.scale)


def _longs(values: Sequence[int]) -> Longs:
    return np.asarray(values, dtype=np.int64)
