"""DeepSpeed's compressed mean: signs in two phases, with one scale per tensor and one per server's shard."""

import math
from collections.abc import Sequence
from typing import NamedTuple

from qcomp.core.errors import NonFiniteError
from qcomp.core.mean.stages import AllGather, AllToAll, Stages
from qcomp.core.numeric.arrays import (
    Array,
    array_namespace,
    bytes_of,
    device,
    divide,
    dtype_name,
    from_bytes_of,
    itemsize,
    require_below,
    sqrt,
)
from qcomp.core.numeric.bitplanes import pack, unpack
from qcomp.core.numeric.sums import total
from qcomp.core.reporting import name_ranks

__all__ = ["Errors", "norm", "padded_size", "sign_mean"]

_LIMIT = 2.0**48
"""Magnitudes of at least this are refused like infinities; below it, no sum of squares overflows."""


class Errors(NamedTuple):
    """The errors of a rank between two means of one tensor."""

    worker: Array
    """The compression error of this rank's values, flat and padded; empty on a single rank."""
    server: Array
    """The compression error of the mean, in this rank's shard."""

    @classmethod
    def zeros(cls, like: Array, count: int, ranks: int) -> "Errors":
        """Return zero errors for a tensor of ``count`` elements, in the library and dtype of ``like``."""
        length = padded_size(count, ranks) if ranks > 1 else 0
        xp = array_namespace(like)
        sizes = (length, length // ranks)
        return cls(*(xp.zeros((size,), dtype=like.dtype, device=device(like)) for size in sizes))


def padded_size(count: int, ranks: int) -> int:
    """Return the padded number of elements for ``count`` elements: a multiple of ranks * lcm(ranks, 8).

    Examples
    --------
    >>> [padded_size(35, ranks) for ranks in (1, 2, 3)]
    [40, 48, 72]
    """
    unit = ranks * math.lcm(ranks, 8)
    return -(-count // unit) * unit


def norm(x: Array) -> Array:
    """Return the Euclidean norm of all elements, of shape ()."""
    return sqrt(total(array_namespace(x).square(x)))


def sign_mean(x: Array, errors: Errors, ranks: int) -> Stages[tuple[Array, Errors]]:
    """Average x over the ranks with one bit per element, as a generator of pure stages.

    Parameters
    ----------
    x : array
        This rank's values, any shape, float32 or float64.
    errors : Errors
        The errors of the last mean, or `Errors.zeros`.
    ranks : int
        Number of ranks. A single rank compresses nothing.

    Yields
    ------
    AllToAll, then AllGather

    Returns
    -------
    mean : array
        Has the shape and dtype of x; all ranks get the same bits.
    errors : Errors

    Raises
    ------
    NonFiniteError
        On every rank, if a value on any rank is not finite or is 2^48 or more.

    Notes
    -----
    Let P be the padded size, b = (x, 0) + worker error, s = ||b||_2 / sqrt(P) and sign(0) = +1. Worker i sends s_i
    sign(b_i). A server computes c = sum_i s_i sign(b_i) / N + server error for its P / N elements, and sends t sign(c)
    with t = ||c||_2 / sqrt(P / N). What each of them loses is its new error. The padding counts in the scales and has
    errors too. Sends 2 (N - 1) / N * P bits and a scale of 32 bits to each peer, twice.

    The bits are packed as in `qcomp.core.numeric.bitplanes`, with 1 for negative. DeepSpeed's wire format puts the most
    significant bits first, with 1 for positive; this is the only difference. Source: DeepSpeed 0.19.6, whose
    ``compressed_allreduce`` this reproduces; Tang et al., ICML 2021.

    Examples
    --------
    >>> import numpy as np, qcomp
    >>> from qcomp.core.mean.stages import drive
    >>> def rank_main(comm):
    ...     x = np.asarray([1.0, -1.0, 2.0 * comm.rank], dtype=np.float32)
    ...     mean, errors = drive(sign_mean(x, Errors.zeros(x, 3, comm.size), comm.size), comm)
    ...     return mean.round(3)
    >>> qcomp.comm.run_local(2, rank_main)[1]
    array([ 0.483, -0.483,  0.483], dtype=float32)
    """
    xp = array_namespace(x)
    count = math.prod(x.shape)
    flat = xp.reshape(x, (-1,))
    if ranks == 1 or count == 0:
        require_below(flat, _LIMIT, "one bit")
        return x, errors
    length = errors.worker.shape[0]
    if length > count:
        padding = xp.zeros((length - count,), dtype=x.dtype, device=device(x))
        flat = xp.concat([flat, padding])
    shard = length // ranks
    size = itemsize(dtype_name(x.dtype)) + shard // 8
    worker = _signed(flat + errors.worker)
    arrived = yield AllToAll(worker.messages(ranks), (size,) * ranks)
    received = _opened(arrived, x, worker.refusal)
    average = _values(received[0].scale * (1 / ranks), received[0].negative)
    for message in received[1:]:
        average = average + _values(message.scale * (1 / ranks), message.negative)
    server = _signed(average + errors.server)
    arrived = yield AllGather(server.messages(1)[0], (size,) * ranks)
    received = _opened(arrived, x, server.refusal)
    mean = xp.concat([_values(message.scale, message.negative) for message in received])
    return xp.reshape(mean[:count], x.shape), Errors(worker.error, server.error)


class _Message(NamedTuple):
    scale: Array
    negative: Array


class _Signed(NamedTuple):
    """Compressed values."""

    scale: Array
    negative: Array
    error: Array
    refusal: NonFiniteError | None
    """The reason why the values could not be compressed; the scale is then NaN, which tells all ranks."""

    def messages(self, count: int) -> tuple[Array, ...]:
        """Return the scale and the packed signs of each of ``count`` equal parts."""
        xp = array_namespace(self.negative)
        rows = pack(xp.reshape(self.negative, (count, -1)), 1)
        scale = bytes_of(self.scale)
        return tuple(xp.concat([scale, rows[part, :]]) for part in range(count))


def _signed(b: Array) -> _Signed:
    xp = array_namespace(b)
    refusal = None
    try:
        require_below(b, _LIMIT, "one bit")
    except NonFiniteError as error:
        refusal = error
        b = xp.zeros_like(b)
    scale = xp.reshape(divide(norm(b), math.sqrt(b.shape[0])), (1,))
    if refusal is not None:
        scale = xp.full_like(scale, math.nan)
    negative = xp.astype(b < 0, xp.uint8)
    return _Signed(scale, negative, b - _values(scale, negative), refusal)


def _values(scale: Array, negative: Array) -> Array:
    return array_namespace(scale).where(negative == 1, -scale, scale)


def _opened(messages: Sequence[Array], like: Array, refusal: NonFiniteError | None) -> list[_Message]:
    """Return the messages of all ranks, or raise if one of them refused."""
    xp = array_namespace(like)
    name = dtype_name(like.dtype)
    start = itemsize(name)
    scales = [from_bytes_of(message[:start], name) for message in messages]
    refused = [rank for rank, scale in enumerate(scales) if not math.isfinite(float(scale[0]))]
    if refused:
        raise NonFiniteError(
            f"a value on {name_ranks(refused)} is not finite, or too large to compress"
        ) from refusal
    bits = [unpack(xp.reshape(message[start:], (1, -1)), 1)[0, :] for message in messages]
    return [_Message(scale, negative) for scale, negative in zip(scales, bits, strict=True)]
