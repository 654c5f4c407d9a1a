"""Checks of kernels that work on all segments of a chunk at once."""

from collections.abc import Sequence
from itertools import pairwise, product
from typing import Any, NamedTuple

import numpy as np

from qcomp.core.compressor import Compressor
from qcomp.core.errors import NonFiniteError
from qcomp.core.kernels import Blend, KernelSet, use_kernels
from qcomp.core.mean.chunks import cut
from qcomp.core.mean.codec import Codec, Compressed, Verdicts
from qcomp.core.mean.framing import Frame, Opened
from qcomp.core.mean.layout import Operands
from qcomp.core.mean.nodes import Nodes
from qcomp.core.numeric.arrays import dtype_name, is_mutable
from qcomp.core.numeric.random import Key
from qcomp.testing.inputs import vector
from qcomp.testing.kernel_memory import Untouched
from qcomp.testing.libraries import Namespace, to_library, to_numpy

_RANKS = 2
_WAYS = ("without feedback", "with feedback", "with values that are used up", "with momenta")


class _FlatTensors(NamedTuple):
    """Arguments of a comparison: flat tensors of a library."""

    values: list[Any]
    residuals: list[Any]
    momenta: list[Any]


def check_chunks(kernels: KernelSet, xp: Namespace, compressors: Sequence[Compressor]) -> None:
    """Check that chunks of several tensors get the same bytes as from the pure version.

    The tensors of a chunk have one of these compressors, or two that are adjacent in this sequence.
    """
    for chosen in ([c] for c in compressors):
        _check(kernels, xp, chosen)
    for pair in pairwise(compressors):
        _check(kernels, xp, pair)


def _check(kernels: KernelSet, xp: Namespace, compressors: Sequence[Compressor]) -> None:
    dtype = dtype_name(to_library(xp, vector("gaussian", 1, 0)).dtype)
    operands = _operands(compressors, dtype)
    for way in _WAYS:
        key = Key(seed=3, step=2**33, rank=1, hop=1, bucket=1 << 20 if way == _WAYS[1] else 0)
        pure, own = (_results(k, xp, operands, way, key) for k in (None, kernels))
        for name, expected in pure.items():
            assert own[name] == expected, f"{name} of a chunk of {len(operands.sizes)} tensors, {way}"
    for tensor, way in product((0, len(operands.sizes) - 1), _WAYS[1:3]):
        _check_refusal(kernels, xp, operands, way, tensor)


def _operands(compressors: Sequence[Compressor], dtype: str) -> Operands:
    """Return tensors: some are cut into chunks, some have a tail, and one has a single element."""
    sizes: list[int] = []
    chosen: list[Compressor] = []
    for index, extra in enumerate((5, 0, 1, 9, 3)):
        compressor = compressors[index % len(compressors)]
        bucket = compressor.traits.bucket_size
        whole = (3, 2, 0, 1, 0)[index] * max(bucket, 700 // bucket * bucket)
        sizes.append(whole + extra)
        chosen.append(compressor.for_shape((whole + extra,)))
    return Operands(tuple(chosen), tuple(sizes), (dtype,) * len(sizes), 0, Nodes.of(_RANKS, ()), cut)


def _tensors(xp: Namespace, operands: Operands, rank: int) -> _FlatTensors:
    return _FlatTensors(
        *(
            [
                to_library(xp, vector("gaussian", size, 100 * kind + 10 * rank + i))
                for i, size in enumerate(operands.sizes)
            ]
            for kind in range(3)
        )
    )


def _frames(operands: Operands) -> list[Frame]:
    """Return the frames of the ranks' chunks; the second chunk is empty, as may happen in means of few buckets."""
    first, *others = operands.chunks(_RANKS)
    return [operands.frame(chunk) for chunk in (first, (), *others)]


def _encoded(codec: Codec, operands: Operands, tensors: _FlatTensors, way: str, key: Key) -> Compressed:
    return codec.encode(
        _frames(operands),
        tensors.values,
        [] if way == _WAYS[0] else tensors.residuals,
        key,
        donate=way == _WAYS[2],
        blends=[Blend(m, 0.9, 0.7, 1 + 0.3 * i, 1 - 0.1 * i) for i, m in enumerate(tensors.momenta)]
        if way == _WAYS[3]
        else (),
    )


def _results(
    kernels: KernelSet | None, xp: Namespace, operands: Operands, way: str, key: Key
) -> dict[str, list[bytes]]:
    """Return the bytes of everything that a codec computes from the tensors of some ranks."""
    untouched, ranks = Untouched(), [_tensors(xp, operands, rank) for rank in range(_RANKS)]
    for tensors in ranks:
        kept = tensors.residuals + tensors.momenta + ([] if way == _WAYS[2] else tensors.values)
        for index, x in enumerate(kept):
            untouched.keep(f"tensor {index}", x)
    frames = _frames(operands)
    with use_kernels(kernels):
        codec = Codec(_tensors(xp, operands, 0).values)
        sent = [_encoded(codec, operands, tensors, way, key) for tensors in ranks]
        opened = [
            [codec.open_from(rank, s.messages[chunk], frame) for rank, s in enumerate(sent)]
            for chunk, frame in enumerate(frames)
        ]
        served = []
        for chunk, frame in zip(opened, frames, strict=True):
            owed = [to_library(xp, vector("gaussian", s.size, 7)) for s in frame.chunk]
            for of_segment in owed:
                untouched.keep("the residual of a server", of_segment)
            served.append(codec.encode_average(chunk, [] if way == _WAYS[0] else owed, key.at(hop=2)))
        means = [
            codec.open_from(rank, s.messages[0], frame)
            for rank, (s, frame) in enumerate(zip(served, frames, strict=True))
        ]
        decoded, averaged = _decoded(codec, means, opened)
    untouched.check()
    return {
        "the messages": _bytes([m for s in sent for m in s.messages]),
        "the residuals": _bytes([e for s in sent for e in s.residuals]),
        "the messages of means": _bytes([s.messages[0] for s in served]),
        "the residuals of means": _bytes([e for s in served for e in s.residuals]),
        "the decompressed means": _bytes(decoded),
        "the averages": _bytes(averaged),
    }


def _decoded(
    codec: Codec, means: Sequence[Opened], opened: Sequence[Sequence[Opened]]
) -> tuple[list[Any], list[Any]]:
    """Return the decompressed means of all chunks and the averages of the messages, in given buffers if possible."""
    decoded: list[Any] = []
    averaged: list[Any] = []
    if all(map(is_mutable, codec.tensors)):
        decoded, averaged = [x * 1 for x in codec.tensors], [x * 1 for x in codec.tensors]
        codec.decode_into(decoded, means)
        for chunk in opened:
            codec.average(chunk, averaged)
        return decoded, averaged
    for mean, chunk in zip(means, opened, strict=True):
        decoded += codec.decode(mean)
        averaged += codec.average(chunk)
    return decoded, averaged


def _check_refusal(kernels: KernelSet, xp: Namespace, operands: Operands, way: str, tensor: int) -> None:
    """Check that a value out of range makes the messages of all chunks refuse, and leaves residuals unchanged."""
    tensors = _tensors(xp, operands, 0)
    bad = to_numpy(tensors.values[tensor]).copy()
    bad[-1] = np.inf
    tensors.values[tensor] = to_library(xp, bad)
    untouched = Untouched()
    for index, residual in enumerate(tensors.residuals):
        untouched.keep(f"the residual of tensor {index}", residual)
    with use_kernels(kernels):
        codec, verdicts = Codec(tensors.values), Verdicts(at_once=True)
        sent = _encoded(codec, operands, tensors, way, Key())
        for frame, message in zip(_frames(operands), sent.messages, strict=True):
            try:
                codec.open([message], [frame], verdicts, sent.error)
            except NonFiniteError:
                continue
            raise AssertionError(f"an infinity in tensor {tensor} was sent {way} without a refusal")
    untouched.check()


def _bytes(arrays: Sequence[Any]) -> list[bytes]:
    return [to_numpy(x).tobytes() for x in arrays]
