"""DeepSpeed's compressed mean: signs in two phases, with one scale per tensor and one per server's shard."""

import math
from collections.abc import Sequence
from typing import NamedTuple

from qcomp.core.mean.codec import refused_by
from qcomp.core.mean.stages import AllGather, AllToAll, Stages
from qcomp.core.mean.state import zeros_for
from qcomp.core.numeric.arrays import (
    Array,
    all_below,
    array_namespace,
    bytes_of,
    divide,
    dtype_name,
    flat,
    from_bytes_of,
    itemsize,
    require_below,
    sqrt,
)
from qcomp.core.numeric.bitplanes import pack, unpack
from qcomp.core.numeric.sums import total

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
        return cls(zeros_for(like, length), zeros_for(like, length // ranks))


def padded_size(count: int, ranks: int) -> int:
    """Return the padded number of elements for ``count`` elements: a multiple of ranks * lcm(ranks, 8)."""
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

    Returns
    -------
    tuple of array and Errors
        The mean, with the shape and dtype of x and the same bits on all ranks; and the new errors.

    Raises
    ------
    NonFiniteError
        On every rank, if a value on any rank is not finite or is 2^48 or more.

    Notes
    -----
    Let P be the padded size, b = (x, 0) + worker error, s = ||b||_2 / sqrt(P) and sign(0) = +1. Worker i sends s_i
    sign(b_i). A server computes c = sum_i s_i sign(b_i) / N + server error for its P / N elements, and sends t sign(c)
    with t = ||c||_2 / sqrt(P / N). What each of them loses is its new error. The padding counts in the scales and has
    errors too. Sends 2 (N - 1) / N * P bits and a scale of 32 bits to each peer, twice. Source:
    ``compressed_allreduce`` of DeepSpeed 0.19.6, whose messages have another layout; Tang et al., ICML 2021.

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
    xp, count = array_namespace(x), math.prod(x.shape)
    if ranks == 1 or count == 0:
        require_below(flat(x), _LIMIT, "one bit")
        return x, errors
    length = errors.worker.shape[0]
    sizes = (itemsize(dtype_name(x.dtype)) + length // ranks // 8,) * ranks
    padded = xp.concat([flat(x), zeros_for(x, length - count)])
    messages, worker = _signs(padded + errors.worker, ranks)
    shares = _values((yield AllToAll(messages, sizes)), x, 1 / ranks)
    (message,), server = _signs(sum(shares[1:], shares[0]) + errors.server, 1)
    mean = xp.concat(_values((yield AllGather(message, sizes)), x, 1.0))
    return xp.reshape(mean[:count], x.shape), Errors(worker, server)


def _signs(b: Array, parts: int) -> tuple[tuple[Array, ...], Array]:
    """Return the scale and the packed signs of each of some equal parts, and the error of all.

    A scale of NaN tells all ranks that b cannot be compressed.
    """
    xp = array_namespace(b)
    fine = all_below(b, _LIMIT)
    b = xp.where(fine, b, xp.zeros_like(b))
    scale = xp.reshape(divide(norm(b), math.sqrt(b.shape[0])), (1,))
    negative = xp.astype(b < 0, xp.uint8)
    head = bytes_of(xp.where(fine, scale, xp.full_like(scale, math.nan)))
    rows = pack(xp.reshape(negative, (parts, -1)), 1)
    return tuple(xp.concat([head, rows[part, :]]) for part in range(parts)), b - _signed(scale, negative)


def _values(messages: Sequence[Array], like: Array, factor: float) -> list[Array]:
    """Return the values in the messages of all ranks times a factor, or raise if one of them refused."""
    xp, name = array_namespace(like), dtype_name(like.dtype)
    start = itemsize(name)
    scales = [from_bytes_of(message[:start], name) for message in messages]
    refused = [rank for rank, scale in enumerate(scales) if not math.isfinite(float(scale[0]))]
    if refused:
        raise refused_by(refused)
    bits = [unpack(xp.reshape(message[start:], (1, -1)), 1)[0, :] for message in messages]
    return [_signed(scale * factor, negative) for scale, negative in zip(scales, bits, strict=True)]


def _signed(scale: Array, negative: Array) -> Array:
    return array_namespace(scale).where(negative == 1, -scale, scale)
