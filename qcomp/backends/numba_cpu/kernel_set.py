"""The numba kernels as a kernel set, which the core calls."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Sequence
from functools import cache
from operator import attrgetter
from types import NoneType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qcomp.backends.numba_cpu.adam import adam_steps, frozen_steps
from qcomp.backends.numba_cpu.codec import (
    CompressorKernels,
    average,
    compress_mean,
    encode,
    encoder_of,
    run_decoder,
    run_encoder,
)
from qcomp.backends.numba_cpu.frames import kernels_of, plan_of
from qcomp.backends.numba_cpu.jit import Bytes, Floats
from qcomp.backends.numba_cpu.lamb import fresh_variances, sums_of_squares
from qcomp.backends.numba_cpu.low_rank import compensate, next_factor, orthonormal, take_low_rank
from qcomp.backends.numba_cpu.memory import empties, empty, message
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
    addresses_of_bytes,
    computed_dtype,
    decoded_vectors,
    encoded_vectors,
    is_of_torch,
    table_of,
    weights_of,
)
from qcomp.backends.numba_cpu.vectors import descend, finish_mean, in_range, momentum, nesterov, scale
from qcomp.core.kernels import AdamNumbers, Blend, Encoded, EncodedFrame, FreshNumbers, StepNumbers
from qcomp.core.mean.framing import Frame
from qcomp.core.numeric.arrays import Array, dtype_name, to_compute_dtype
from qcomp.core.numeric.random import Key
from qcomp.core.primitives import refusal
from qcomp.core.traits import AnyCompressor

_DTYPES = ("float32", "float64", "float16", "bfloat16")


class NumbaKernels:
    """Kernels for C-contiguous NumPy arrays, and for torch tensors on the CPU, whose memory they share.

    float32 and float64 need no conversion; the array library converts float16 and bfloat16 first.
    """

    name = "numba"
    any_shape = True
    weighs_blends = True

    def takes(self, x: Any) -> bool:
        """Return whether x is a NumPy array or a tensor on the CPU, of a dtype that can be compressed."""
        kind: Any = type(x)
        return _is_taken(kind, x.dtype) and (kind is np.ndarray or isinstance(x, np.ndarray) or x.is_cpu)

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
        values = _values(to_compute_dtype(x))
        if values is None:
            return None
        old = None if residual is None else _values(residual, values.dtype)
        m = None if blend is None else _values(blend.m, values.dtype)
        if (residual is not None and old is None) or (blend is not None and (m is None or out is x)):
            return None
        mixed = None if blend is None or m is None else (m, blend)
        data = _payload(compressor, values)
        kernels = kernels_of(compressor)
        run = None if kernels is None else kernels.encode(key)
        if kernels is None or run is None:
            return None
        encoder = encoder_of(run, kernels.bucket_size, values, data, mixed, key.bucket if key else 0)
        new = None
        if old is not None:  # the kernels recognise shared memory by the arrays' identity
            shared = old if out is residual else values if out is x else None
            new = empty(old.shape, old.dtype) if out is None else shared
            if new is None:
                new = _values(out, old.dtype)
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
        run_decoder(
            kernels.decode,
            kernels.bucket_size,
            decoded_vectors([_bytes(data)], kernels.bucket_size, values),
            accumulate=accumulate,
            streams=not accumulate and pays(values.size),
        )
        return target

    def empty_like(self, x: Array) -> Array | None:
        """Return an uninitialised array like x, in reused memory if available; None for float16 and bfloat16."""
        dtype = computed_dtype(x.dtype)
        return None if dtype is None else _empties(x, [x.shape], dtype)[0]

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
        room = _room(like, out)
        if room is None:
            return None
        rest, values = room
        old = None if residual is None else _values(residual, values.dtype)
        if residual is not None and old is None:
            return None
        data = _payload(compressor, values)
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
        """Apply `empty_like` to each of several arrays."""
        dtype, *others = {*map(computed_dtype, map(_DTYPE, arrays))} or {None}
        return None if others or dtype is None else _empties(arrays[0], map(_SHAPE, arrays), dtype)

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
        plan = plan_of(tuple(frames))
        donated, mode = outs is tensors, NO_RESIDUAL
        if plan.groups is None or (blends and donated):
            return None
        found: dict[int, Any] = {VALUES: addresses(tensors, plan.dtype, plan.tensors)}
        if residuals:
            mode = OVER_INPUT if donated else FRESH
            found[RESIDUAL] = addresses(residuals, plan.dtype, plan.tensors)
            found[RESIDUAL_OUT] = addresses(outs, plan.dtype, plan.tensors, written=True)
        weights = None
        if blends and plan.tensors:
            if len(plan.tensors) < len(blends):
                blends = [blends[number] for number in plan.tensors]
            momenta, *_ = zip(*blends, strict=True)
            found[MOMENTUM], weights = addresses(momenta, plan.dtype), weights_of(blends)
        if NoneType in map(type, found.values()):
            return None
        messages = list(map(message, map(_NBYTES, frames), plan.gaps))
        to: Any = addresses_of_bytes(messages)
        for group in plan.groups:
            run = group.kernels.encode(key)
            if run is None:
                return None
            vectors = group.encoded(found, to, key.bucket, weights)
            if not run_encoder(run, group.kernels.bucket_size, vectors, mode):
                if donated:
                    raise refusal(group.compressor)
                return None  # the pure version raises
        return _as_arrays_of(tensors[0], messages)

    def decode_frames(
        self, frames: Sequence[Frame], messages: Sequence[Array], outs: Sequence[Array]
    ) -> bool:
        """Decompress all segments of some chunks, with one kernel call for each compressor."""
        plan = plan_of(tuple(frames))
        to, at = addresses(outs, plan.dtype, plan.tensors, written=True), addresses_of_bytes(messages)
        if plan.groups is None or to is None or at is None:
            return False
        for group in plan.groups:
            vectors = group.decoded(to[group.positions] + group.starts, group.of_each_frame(at))
            run, bucket_size = group.kernels.decode, group.kernels.bucket_size
            run_decoder(run, bucket_size, vectors, accumulate=False, streams=group.streams)
        return True

    def average_frame(self, frame: Frame, messages: Sequence[Array], outs: Sequence[Array]) -> bool:
        """Average all segments of a chunk, a block at a time."""
        plan = plan_of((frame,))
        to, at = addresses(outs, plan.dtype, plan.tensors, written=True), addresses_of_bytes(messages)
        if plan.groups is None or to is None or at is None:
            return False
        for group in plan.groups:
            vectors = group.decoded(to[group.positions] + group.starts, group.of_each_rank(at))
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
        plan = plan_of((frame,))
        if not plan.groups:
            return None
        outs: Sequence[Any] = into or _empties(like, plan.shapes, plan.dtype)
        new = addresses(outs, plan.dtype, written=True)
        old = addresses(residuals, plan.dtype) if residuals else new
        at = addresses_of_bytes(messages)
        if new is None or old is None or at is None:
            return None
        mode = OVER_INPUT if residuals else NO_RESIDUAL
        sent_to_all = message(frame.nbytes, plan.gaps[0])
        to: Any = addresses_of_bytes([sent_to_all])
        for group in plan.groups:
            kernels, run = group.kernels, group.kernels.encode(key)
            if run is None:
                return None
            received = group.decoded(new[group.numbers], group.of_each_rank(at))
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
        pair = _two(m, g)
        if pair is None:
            return None
        mixed = empty(pair[0].shape, pair[0].dtype)
        momentum(*pair, beta1, scale, mixed)
        return _as_array_of(m, mixed.reshape(m.shape))

    def nesterov(self, m: Array, g: Array, beta1: float) -> tuple[Array, Array] | None:
        """Return the momentum and Nesterov's momentum in new arrays."""
        pair = _two(m, g)
        if pair is None:
            return None
        new, ahead = empties([pair[0].shape] * 2, pair[0].dtype)
        nesterov(*pair, beta1, new, ahead)
        return _as_array_of(m, new.reshape(m.shape)), _as_array_of(m, ahead.reshape(m.shape))

    def descend(self, p: Array, d: Array, rate: float, decay: float, *, out: Array | None) -> Array | None:
        """Return the parameters after a step, in ``out`` if given."""
        pair, room = _two(p, d), _room(p, out)
        if pair is None or room is None:
            return None
        target, new = room
        descend(*pair, rate, decay, new)
        _tell_torch([target])
        return target

    def scale(self, x: Array, factor: float) -> Array | None:
        """Return ``factor * x`` in a new array."""
        values = _values(x)
        if values is None:
            return None
        scaled = empty(values.shape, values.dtype)
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
        """Return the parameters, in new arrays or in place, and the masked momenta, always in place."""
        return self.steps_of_sums(params, momenta, variances, numbers, [1.0] * len(numbers), donate=donate)

    def steps_of_sums(
        self,
        params: Sequence[Array],
        sums: Sequence[Array],
        variances: Sequence[Array],
        numbers: Sequence[StepNumbers],
        divisors: Sequence[float],
        *,
        donate: bool,
    ) -> list[tuple[Array, Array]] | None:
        """Return the results of `frozen_steps` for momenta that are given as sums, each with its divisor."""
        dtype = computed_dtype(params[0].dtype)
        if dtype is None:
            return None
        moved = (
            params if donate and _are_writable(params) else _empties(params[0], map(_SHAPE, params), dtype)
        )
        table = table_of((params, sums, variances), (moved, sums), dtype)
        if table is None:
            return None
        frozen_steps(*table, numbers, divisors, dtype)
        _tell_torch([*sums, *(params if donate else ())])
        return list(zip(moved, sums, strict=True))

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
        """Return parameters, momenta and variances, in new arrays or in place."""
        return _adam(params, (momenta, variances), gradients, numbers, donate=donate, moves=True)

    def adam_directions(
        self,
        params: Sequence[Array],
        momenta: Sequence[Array],
        variances: Sequence[Array],
        gradients: Sequence[Array],
        numbers: Sequence[AdamNumbers],
        *,
        donate: bool,
    ) -> list[tuple[Array, Array, Array]] | None:
        """Return directions in new arrays, and momenta and variances in new arrays or in place."""
        return _adam(params, (momenta, variances), gradients, numbers, donate=donate, moves=False)

    def sums_of_squares(self, arrays: Sequence[Array]) -> list[float] | None:
        """Return the sum of the squares of the elements of each array."""
        dtype = computed_dtype(arrays[0].dtype)
        at = None if dtype is None else addresses(arrays, dtype)
        if dtype is None or at is None:
            return None
        return sums_of_squares(at, list(map(math.prod, map(_SHAPE, arrays))), dtype)

    def fresh_variances(
        self,
        means: Sequence[Array],
        momenta: Sequence[Array],
        variances: Sequence[Array],
        fresh: Sequence[Array],
        numbers: Sequence[FreshNumbers],
        *,
        donate: bool,
    ) -> list[tuple[Array, Array, float]] | None:
        """Return the momenta in the buffers of the means, and the fresh variances in new arrays or in place."""
        dtype = computed_dtype(means[0].dtype)
        if dtype is None:
            return None
        donate = donate and _are_writable(fresh)
        new = fresh if donate else _empties(means[0], map(_SHAPE, fresh), dtype)
        table = table_of((means, momenta, variances, fresh), (means, new), dtype)
        if table is None:
            return None
        growths = fresh_variances(np.delete(table[0], 4, axis=1), table[1], numbers, dtype)
        _tell_torch([*means, *(fresh if donate else ())])
        return list(zip(means, new, growths, strict=True))

    def in_range(self, x: Array) -> bool:
        """Return whether every value is +0, or of a magnitude from 2^-126 to below 2^100."""
        values = _values(x)
        return values is not None and in_range(values)

    def compensate(
        self, x: Array, residual: Array | None, *, out: Array | None
    ) -> tuple[Array, float] | None:
        """Return x plus the residual, if there is one, and the largest magnitude of the sum."""
        values, room = _values(x), _room(x, out)
        if values is None or room is None:
            return None
        old = values[:0] if residual is None else _values(residual, values.dtype)
        if old is None:
            return None
        target, new = room
        largest = compensate(values, old, new)
        _tell_torch([target])
        return target, largest

    def take_low_rank(
        self, left: Array, right: Array, matrix: Array, *, out: Array | None
    ) -> tuple[Array, Array] | None:
        """Return the product of two factors, and the matrix minus this product in the matrix's buffer."""
        factors, whole, room = _two(left, right), _values(matrix), _room(matrix, out)
        if factors is None or whole is None or room is None or factors[0].dtype != whole.dtype:
            return None
        if not whole.flags.writeable:
            return None
        target, product = room
        take_low_rank(*factors, whole, product, left.shape[1])
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
        pair, room = _two(new, old), _room(new, None)
        if pair is None or room is None:
            return None
        target, scaled = room
        next_factor(*pair, new.shape[0], scaled)
        return target


KERNELS = NumbaKernels()

_DTYPE, _SHAPE, _NBYTES = attrgetter("dtype"), attrgetter("shape"), attrgetter("nbytes")
_WRITEABLE = attrgetter("flags.writeable")


@cache  # NumPy takes longer for a dtype's name than a kernel for a small array
def _is_taken(kind: Any, dtype: Any) -> bool:
    """Return whether arrays of a class and dtype are accepted, provided that they are in CPU memory."""
    return (issubclass(kind, np.ndarray) or is_of_torch(kind)) and dtype_name(dtype) in _DTYPES


def _as_array_of(x: Array, values: NDArray[Any]) -> Array:
    """Return a NumPy array as an array of the library of x that shares its memory."""
    return sys.modules["torch"].from_numpy(values) if is_of_torch(type(x)) else values


def _as_arrays_of(x: Array, values: list[Any]) -> list[Array]:
    """Apply `_as_array_of` to each of several arrays."""
    return list(map(sys.modules["torch"].from_numpy, values)) if is_of_torch(type(x)) else values


def _empties(like: Array, shapes: Iterable[tuple[int, ...]], dtype: np.dtype[Any]) -> list[Array]:
    """Return uninitialised arrays of these shapes and this dtype, in the library of ``like``."""
    return _as_arrays_of(like, empties(shapes, dtype))


def _payload(compressor: AnyCompressor, values: Floats) -> Bytes:
    """Return a buffer for the payload of a vector."""
    name = "float32" if values.itemsize == 4 else "float64"
    return np.empty(compressor.payload_spec(values.size, name).nbytes, dtype=np.uint8)


def _are_writable(arrays: Sequence[Array]) -> bool:
    return is_of_torch(type(arrays[0])) or all(map(_WRITEABLE, arrays))


def _adam(
    params: Sequence[Array],
    moments: tuple[Sequence[Array], Sequence[Array]],
    gradients: Sequence[Array],
    numbers: Sequence[AdamNumbers],
    *,
    donate: bool,
    moves: bool,
) -> list[tuple[Array, Array, Array]] | None:
    """Return new parameters or directions, and new moments. Directions get new arrays, even if buffers are donated."""
    dtype = computed_dtype(params[0].dtype)
    if dtype is None:
        return None
    old: tuple[Sequence[Array], ...] = (params, *moments) if moves else moments
    donate = donate and all(map(_are_writable, old))
    news = old if donate else tuple([_empties(params[0], map(_SHAPE, params), dtype) for _ in old])
    found = news if moves else (_empties(params[0], map(_SHAPE, params), dtype), *news)
    table = table_of((params, *moments, gradients), found, dtype)
    if table is None:
        return None
    adam_steps(*table, numbers, dtype, moves=moves)
    if donate:
        _tell_torch([x for arrays in old for x in arrays])
    return list(zip(*found, strict=True))


def _tell_torch(written: Sequence[Array]) -> None:
    """Tell automatic differentiation which tensors were written to, as torch's own operations do."""
    if is_of_torch(type(written[0])):
        sys.modules["torch"].autograd.graph.increment_version(written)


def _room(like: Array, out: Array | None) -> tuple[Array, Floats] | None:
    """Return an array for a result, and a flat NumPy view of it; None if the kernels cannot write to it."""
    dtype = computed_dtype(like.dtype)
    if dtype is None:
        return None
    if out is None:
        made = empty(tuple(like.shape), dtype)
        return _as_array_of(like, made), made.reshape(-1)
    values = _values(out, dtype)
    return None if values is None or not values.flags.writeable else (out, values)


def _values(x: Any, dtype: np.dtype[Any] | None = None) -> Floats | None:
    """Return a flat NumPy view of an array, or None if that is not possible, or if it has another dtype."""
    found = computed_dtype(x.dtype)
    if found is None or (dtype is not None and found != dtype):
        return None
    if is_of_torch(type(x)):
        if not x.is_cpu or x.requires_grad or not x.is_contiguous():
            return None
        x = x.numpy()
    if not isinstance(x, np.ndarray) or not x.flags.c_contiguous:
        return None
    return x.reshape(-1)


def _two(x: Any, y: Any) -> tuple[Floats, Floats] | None:
    """Return flat views of two arrays, or None if that is not possible, or if their dtypes differ."""
    first = _values(x)
    second = None if first is None else _values(y, first.dtype)
    return None if first is None or second is None else (first, second)


def _bytes(data: Any) -> Bytes:
    found: Bytes = data.numpy() if is_of_torch(type(data)) else data
    return found


def _received(kernels: CompressorKernels, payloads: Sequence[Array], out: Floats) -> Decoded:
    """Return a table that holds one vector, ``out``, and each rank's payload, which the kernels add up in it."""
    return decoded_vectors([_bytes(payload) for payload in payloads], kernels.bucket_size, out)
