"""Chunks as tables: what the kernels need to know of the frame of a message, derived once for many steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple
from weakref import WeakKeyDictionary

import numpy as np

from qcomp.backends.numba_cpu.codec import DecodeRun, EncodeRun
from qcomp.backends.numba_cpu.jit import Bytes, Longs
from qcomp.backends.numba_cpu.minmax import decode_minmax, encode_minmax
from qcomp.backends.numba_cpu.qsgd import encode_qsgd
from qcomp.backends.numba_cpu.qsgd_decoder import decode_qsgd
from qcomp.backends.numba_cpu.sign import decode_sign, encode_sign
from qcomp.backends.numba_cpu.tables import (
    DATA,
    OUT,
    RESIDUAL,
    RESIDUAL_OUT,
    VALUES,
    Decoded,
    Encoded,
    address,
    ends_of,
)
from qcomp.core.compressors import QSGD, MinMaxUInt8, Scaled, ScaledSign, WholeFields
from qcomp.core.compressors.qsgd import WideQSGD
from qcomp.core.kernels import AnyFrame
from qcomp.core.numeric.random import Key, draws_are_replaced, fold_key
from qcomp.core.traits import AnyCompressor

__all__ = ["CompressorKernels", "Group", "Plan", "kernels_of", "plan_of"]


class CompressorKernels(NamedTuple):
    """The kernels of a compressor."""

    bucket_size: int
    """Elements of a vector in a bucket."""
    encode: Callable[[Key | None], EncodeRun | None]
    """Returns what compresses with the draws of a key; None if the pure version would now draw in another way."""
    decode: DecodeRun


def kernels_of(compressor: AnyCompressor) -> CompressorKernels | None:
    """Return the kernels of a compressor, None if there are none."""
    c, kind = compressor, type(compressor)  # by exact type: a subclass may compress in another way
    if isinstance(c, ScaledSign) and kind is ScaledSign:
        return _without_draws(c.bucket_size, encode_sign(c.bucket_size, c.scale), decode_sign(c.bucket_size))
    if isinstance(c, MinMaxUInt8) and kind is MinMaxUInt8:
        return _without_draws(c.bucket_size, encode_minmax(c.bucket_size), decode_minmax(c.bucket_size))
    return _qsgd_kernels(c)


def _without_draws(bucket_size: int, encode: EncodeRun, decode: DecodeRun) -> CompressorKernels:
    return CompressorKernels(bucket_size, lambda key: encode, decode)  # noqa: ARG005


def _qsgd_kernels(c: AnyCompressor) -> CompressorKernels | None:
    """Return the kernels of QSGD, perhaps scaled, and perhaps filled with zeros."""
    held: int | None = None
    factor: float | None = None
    if isinstance(c, WholeFields) and type(c) is WholeFields:
        held, c = c.traits.bucket_size, c.compressor
    if isinstance(c, Scaled) and type(c) is Scaled:
        factor, c = c.factor, c.compressor
    if not isinstance(c, QSGD) or type(c) not in (QSGD, WideQSGD):
        return None
    inner = c

    def encode(key: Key | None) -> EncodeRun | None:
        if key is None or draws_are_replaced():
            return None
        words = fold_key(key, like=_LIKE)
        return encode_qsgd(
            inner.levels, inner.bucket_size, inner.norm, words, key.hop, factor=factor, held=held
        )

    decode = decode_qsgd(inner.levels, inner.bucket_size, factor=factor, held=held)
    return CompressorKernels(held or inner.bucket_size, encode, decode)


_LIKE = np.empty(0, dtype=np.float32)


class Group(NamedTuple):
    """The segments of a chunk that have the same compressor."""

    compressor: AnyCompressor
    kernels: CompressorKernels
    elements: int
    positions: Longs
    """The place of each segment's tensor in ``Plan.tensors``."""
    numbers: Longs
    """The place of each segment in the chunk."""
    starts: Longs
    """Bytes before each segment in its tensor."""
    sent: Longs
    """The rows of `Encoded`, with offsets in place of the addresses of payloads."""
    received: Longs
    """The rows of `Decoded`, without the addresses of vectors."""
    ends: Longs

    def encoded(self, addresses: Mapping[int, Longs], message: Bytes, first_bucket: int) -> Encoded:
        """Return the segments of tensors as a table, from the addresses of these tensors for each column."""
        rows = self._into(message, first_bucket)
        for column, of_tensors in addresses.items():
            rows[:, column] = of_tensors[self.positions] + self.starts
        return Encoded(rows, self.ends)

    def encoded_alone(self, values: Longs, residuals: Longs, message: Bytes, first_bucket: int) -> Encoded:
        """Return the segments as a table, from addresses of each, where new residuals take the place of the values."""
        rows = self._into(message, first_bucket)
        rows[:, VALUES] = rows[:, RESIDUAL_OUT] = values[self.numbers]
        rows[:, RESIDUAL] = residuals[self.numbers]
        return Encoded(rows, self.ends)

    def decoded(self, outs: Longs, messages: Longs) -> Decoded:
        """Return the segments of tensors at these addresses as a table."""
        rows = self.received.copy()
        rows[:, OUT] = outs[self.positions] + self.starts
        return Decoded(rows, self.ends, messages)

    def decoded_alone(self, outs: Longs, messages: Longs) -> Decoded:
        """Return the segments, at these addresses, as a table."""
        rows = self.received.copy()
        rows[:, OUT] = outs[self.numbers]
        return Decoded(rows, self.ends, messages)

    def _into(self, message: Bytes, first_bucket: int) -> Longs:
        rows = self.sent.copy()
        rows[:, DATA] += address(message)
        rows[:, -1] += first_bucket
        return rows


class Plan(NamedTuple):
    """What is known of a frame before any value."""

    tensors: tuple[int, ...]
    """The tensors that have a segment in the chunk."""
    sizes: tuple[int, ...]
    """Elements of each segment."""
    groups: tuple[Group, ...]


_plans: WeakKeyDictionary[AnyFrame, Plan | None] = WeakKeyDictionary()


def plan_of(frame: AnyFrame) -> Plan | None:
    """Return the plan of a frame; None if the kernels cannot compress all of it."""
    try:
        return _plans[frame]
    except KeyError:
        plan = _plans[frame] = _resolved(frame)
        return plan


def _resolved(frame: AnyFrame) -> Plan | None:
    if frame.variable_length or any(dtype != "float32" for dtype in frame.dtypes):
        return None
    by_spec: dict[str, list[int]] = {}
    for number, compressor in enumerate(frame.compressors):
        by_spec.setdefault(compressor.spec, []).append(number)
    tensors = tuple(dict.fromkeys(tensor for tensor, _, _, _ in frame.chunk))
    sizes = tuple(stop - start for _, start, stop, _ in frame.chunk)
    groups = []
    for numbers in by_spec.values():
        compressor = frame.compressors[numbers[0]]
        kernels = kernels_of(compressor)
        if kernels is None:
            return None
        groups.append(_group(frame, compressor, kernels, numbers, tensors, sizes))
    return Plan(tensors, sizes, tuple(groups))


def _group(
    frame: AnyFrame,
    compressor: AnyCompressor,
    kernels: CompressorKernels,
    numbers: Sequence[int],
    tensors: Sequence[int],
    sizes: Sequence[int],
) -> Group:
    place = {tensor: position for position, tensor in enumerate(tensors)}
    segments = [frame.chunk[number] for number in numbers]
    own_sizes = [sizes[number] for number in numbers]
    payloads = [(frame.offsets[number], frame.sizes[number]) for number in numbers]
    sent = [
        (0, 0, 0, 0, offset, size, nbytes, bucket)
        for (offset, nbytes), size, (_, _, _, bucket) in zip(payloads, own_sizes, segments, strict=True)
    ]
    received = [(0, offset, size, nbytes) for (offset, nbytes), size in zip(payloads, own_sizes, strict=True)]
    return Group(
        compressor,
        kernels,
        sum(own_sizes),
        _longs([place[tensor] for tensor, _, _, _ in segments]),
        _longs(numbers),
        _longs([4 * start for _, start, _, _ in segments]),
        _longs(sent),
        _longs(received),
        ends_of(own_sizes, kernels.bucket_size),
    )


def _longs(values: object) -> Longs:
    return np.asarray(values, dtype=np.int64)
