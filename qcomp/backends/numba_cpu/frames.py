"""Tables that tell the numba kernels where the segments of messages lie; they are made once for many steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from qcomp.backends.numba_cpu.codec import CompressorKernels
from qcomp.backends.numba_cpu.identity import identity_kernels
from qcomp.backends.numba_cpu.jit import Longs
from qcomp.backends.numba_cpu.lloyd_max import lloyd_max_kernels
from qcomp.backends.numba_cpu.minmax import minmax_kernels
from qcomp.backends.numba_cpu.qsgd import qsgd_kernels
from qcomp.backends.numba_cpu.sign import sign_kernels
from qcomp.backends.numba_cpu.stream import pays
from qcomp.backends.numba_cpu.tables import (
    BUCKET,
    DATA,
    OUT,
    RESIDUAL,
    RESIDUAL_OUT,
    VALUES,
    WEIGHTS,
    Decoded,
    ToEncode,
    ends_of,
)
from qcomp.backends.numba_cpu.topk import topk_kernels
from qcomp.core.compressors import (
    QSGD,
    Identity,
    LloydMax,
    MinMaxUInt8,
    Scaled,
    ScaledSign,
    TopK,
    WholeFields,
)
from qcomp.core.compressors.qsgd import WideQSGD
from qcomp.core.mean.framing import Frame
from qcomp.core.traits import AnyCompressor

_KERNELS: dict[type, Callable[[Any], CompressorKernels]] = {
    Identity: lambda _: identity_kernels(),
    ScaledSign: lambda c: sign_kernels(c.bucket_size, c.scale),
    MinMaxUInt8: lambda c: minmax_kernels(c.bucket_size),
    LloydMax: lambda c: lloyd_max_kernels(c.bits, c.bucket_size),
    TopK: lambda c: topk_kernels(c.k, c.bucket_size, c.value_bits),
}
"""The kernels of each class without a coder; `_of_inner` has those of QSGD."""


def kernels_of(compressor: AnyCompressor) -> CompressorKernels | None:
    """Return the kernels of a compressor, or None if there are none for it. Kernels are cached."""
    make = _KERNELS.get(type(compressor))  # by exact type: a subclass may compress in another way
    if make is not None and compressor.coder is None:
        return make(compressor)
    return _of_inner(compressor)


def _of_inner(c: AnyCompressor) -> CompressorKernels | None:
    """Return the kernels of QSGD, plain or inside `Scaled` or `WholeFields`."""
    held: int | None = None
    factor: float | None = None
    if isinstance(c, WholeFields) and type(c) is WholeFields:
        held, c = c.traits.bucket_size, c.compressor
    if isinstance(c, Scaled) and type(c) is Scaled:
        factor, c = c.factor, c.compressor
    if isinstance(c, QSGD) and type(c) in (QSGD, WideQSGD):
        return qsgd_kernels(c.levels, c.bucket_size, c.norm, factor, held)
    return None


class Alike(NamedTuple):
    """The segments of some frames that have the same compressor."""

    compressor: AnyCompressor
    kernels: CompressorKernels
    streams: bool
    """Whether it pays to write past the caches when all segments are decoded."""
    positions: Longs
    """The index of each segment's tensor in ``FramePlan.tensors``."""
    numbers: Longs
    """The index of each segment among the segments of all frames."""
    frames: Longs
    """The frame of each segment."""
    starts: Longs
    """Bytes before each segment in its tensor."""
    offsets: Longs
    """Bytes before each segment's payload in its message."""
    sent: Longs
    """The rows of `ToEncode`, without addresses."""
    received: Longs
    """The rows of `Decoded`, without addresses."""
    ends: Longs
    dtype: np.dtype[Any]
    """The dtype of the tensors."""

    def encoded(
        self,
        addresses: Mapping[int, Longs],
        messages: Longs,
        first_bucket: int,
        weights: Longs | None = None,
    ) -> ToEncode:
        """Return the segments as a table, given the addresses of the messages and, for each column, of all tensors.

        ``weights`` are the `weights_of` the blend of each tensor.
        """
        rows = self._into(messages, first_bucket)
        for column, of_tensors in addresses.items():
            rows[:, column] = of_tensors[self.positions] + self.starts
        if weights is not None:
            rows[:, WEIGHTS] = weights[self.positions]
        return ToEncode(rows, self.ends, self.dtype)

    def encoded_alone(self, values: Longs, residuals: Longs, messages: Longs, first_bucket: int) -> ToEncode:
        """Return the segments as a table, given the addresses of each segment; new residuals overwrite the values."""
        rows = self._into(messages, first_bucket)
        rows[:, VALUES] = rows[:, RESIDUAL_OUT] = values[self.numbers]
        rows[:, RESIDUAL] = residuals[self.numbers]
        return ToEncode(rows, self.ends, self.dtype)

    def decoded(self, vectors: Longs, payloads: Longs) -> Decoded:
        """Return the segments as a table, given the address of each segment and the addresses of its payloads."""
        rows = self.received.copy()
        rows[:, OUT] = vectors
        return Decoded(rows, payloads, self.ends, self.dtype)

    def of_each_frame(self, messages: Longs) -> Longs:
        """Return, for each frame, the addresses of the payloads in its message."""
        return (messages[self.frames] + self.offsets)[:, None]

    def of_each_rank(self, messages: Longs) -> Longs:
        """Return the addresses of the payloads in several messages of the same frame."""
        return self.offsets[:, None] + messages

    def _into(self, messages: Longs, first_bucket: int) -> Longs:
        rows = self.sent.copy()
        rows[:, DATA] = messages[self.frames] + self.offsets
        if first_bucket:
            rows[:, BUCKET] += first_bucket
        return rows


class FramePlan(NamedTuple):
    """Facts about some frames that do not depend on values."""

    tensors: tuple[int, ...]
    """The tensors that have a segment in a frame."""
    shapes: tuple[tuple[int], ...]
    """The shape of each segment."""
    groups: tuple[Alike, ...] | None
    """The segments by compressor; None if the kernels cannot compress all of them."""
    dtype: np.dtype[Any]
    """The dtype of the computation, if the kernels can compress all segments."""
    gaps: tuple[Longs, ...]
    """For each frame, the bytes of a message that belong to no payload."""


@lru_cache(256)  # a frame equals only itself
def plan_of(frames: tuple[Frame, ...]) -> FramePlan:
    """Return the plan of some frames."""
    segments = [
        _Segment(index, compressor, tensor, start, stop - start, bucket, *place)
        for index, frame in enumerate(frames)
        for compressor, (tensor, start, stop, bucket), *place in zip(
            frame.compressors,
            frame.chunk,
            frame.offsets,
            frame.sizes,
            strict=False,  # the verdict has a place too
        )
    ]
    tensors = tuple(sorted({segment.tensor for segment in segments}))
    shapes = tuple((segment.size,) for segment in segments)
    by_spec: dict[str, list[int]] = {}
    for number, segment in enumerate(segments):
        by_spec.setdefault(segment.compressor.spec, []).append(number)
    dtypes = {name for frame in frames for name in frame.dtypes} or {"float32"}
    dtype = np.dtype(min(dtypes))
    groups = [_group(segments, numbers, tensors, dtype) for numbers in by_spec.values()]
    plain = len(dtypes) == 1 and not any(frame.variable_length for frame in frames)
    found = tuple(group for group in groups if group is not None)
    return FramePlan(
        tensors,
        shapes,
        found if plain and len(found) == len(groups) else None,
        dtype,
        tuple(map(_gaps, frames)),
    )


def _gaps(frame: Frame) -> Longs:
    """Return the positions of the bytes of a message that belong to no payload: the verdict and padding.

    Returns none for messages of variable length, whose payloads have no fixed places.
    """
    if frame.variable_length:
        return _longs([])
    *ends, _ = [offset + size for offset, size in zip(frame.offsets, frame.sizes, strict=True)]
    gaps = [*zip(ends, frame.offsets[1:], strict=True), (frame.offsets[-1], frame.nbytes)]
    return _longs([byte for end, start in gaps for byte in range(end, start)])


class _Segment(NamedTuple):
    """A segment of a frame, and the place of its payload in the message."""

    of_frame: int
    """The number of the frame."""
    compressor: AnyCompressor
    tensor: int
    start: int
    size: int
    bucket: int
    """The number of its first bucket."""
    offset: int
    nbytes: int


def _group(
    segments: Sequence[_Segment], numbers: Sequence[int], tensors: Sequence[int], dtype: np.dtype[Any]
) -> Alike | None:
    """Return the group of some segments, or None if there are no kernels for them."""
    own = [segments[number] for number in numbers]
    compressor = own[0].compressor
    kernels = kernels_of(compressor)
    if kernels is None:
        return None
    place = {tensor: position for position, tensor in enumerate(tensors)}
    return Alike(
        compressor,
        kernels,
        pays(sum(s.size for s in own)),
        positions=_longs([place[s.tensor] for s in own]),
        numbers=_longs(numbers),
        frames=_longs([s.of_frame for s in own]),
        starts=_longs([dtype.itemsize * s.start for s in own]),
        offsets=_longs([s.offset for s in own]),
        sent=_longs([(0, 0, 0, 0, 0, s.size, s.nbytes, s.bucket, 0, 0, 0, 0) for s in own]),
        received=_longs([(0, s.size, s.nbytes) for s in own]),
        ends=ends_of([s.size for s in own], kernels.bucket_size),
        dtype=dtype,
    )


def _longs(values: object) -> Longs:
    return np.asarray(values, dtype=np.int64)
