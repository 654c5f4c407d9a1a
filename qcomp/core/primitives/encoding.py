"""The primitives of compressed means: `encode`, `decode`, averages, and the products of PowerSGD."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from qcomp.core.errors import NonFiniteError
from qcomp.core.kernels import Blend, Encoded, chosen, kernel_of, primitive, takes_blends
from qcomp.core.numeric import low_rank
from qcomp.core.numeric.arrays import (
    LIMIT,
    Array,
    array_namespace,
    compute_dtype_name,
    divide,
    dtype_name,
    exact_bounds,
    flush,
    is_mutable,
    is_on_host,
    is_read_late,
    is_traced,
    out_of_range,
    require_below,
    to_compute_dtype,
    write_into,
)
from qcomp.core.numeric.cache_blocks import in_blocks
from qcomp.core.numeric.random import require_key
from qcomp.core.primitives.steps import (
    blended,
    empty_like,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from qcomp.core.numeric.random import Key
    from qcomp.core.payload import Payload
    from qcomp.core.traits import AnyCompressor, Coder


def encode(
    compressor: AnyCompressor,
    x: Array,
    residual: Array | None,
    key: Key | None,
    *,
    out: Array | None = None,
    blend: Blend | None = None,
) -> Encoded:
    """Compress x, plus the residual if there is one, and return the compression error as the new residual.

    Parameters
    ----------
    compressor : AnyCompressor
    x : array of float16, bfloat16, float32 or float64
    residual : array or None
        Has the shape of x and the dtype in which x is computed.
    key : Key or None
        For compressors that draw.
    out : array, optional
        A buffer for the new residual: the old residual, x itself if it has the dtype of the residual, or a buffer that
        shares memory with neither. The last is the fastest. If x is the buffer, its values are lost. The old residual
        is overwritten only if nothing is out of range.
    blend : Blend, optional
        Compress the result of `blended` for x instead of x; a kernel may do both at once.

    Returns
    -------
    Encoded
        Its ``refused`` reports values out of range that a device finds, or that a compiled program will find.

    Raises
    ------
    NonFiniteError
        If values out of range were found before this returned.

    Notes
    -----
    p = flush(flush(x) + residual); data = C(p); residual' = flush(p - decode(data)). All values of p must be below
    2^100 in magnitude, or in `exact_bounds` if C loses nothing. A coder loses nothing: the residual is the same as with
    the plain compressor whose data it shortens.

    A kernel that finds a value out of range before it returns may return None; then the pure version reports the value.
    A kernel that may find such a value later never writes to the old residual, and returns the new residual in a
    separate array.
    """
    if compressor.traits.random:
        require_key(key, compressor.spec)
    coder = compressor.coder
    if coder is not None:
        plain = encode(coder.plain, x, residual, key, out=out, blend=blend)
        return _shortened(coder, plain, math.prod(x.shape))
    kernel = kernel_of("encode", x)
    if kernel and blend is not None and not takes_blends(chosen(x), [blend]):
        kernel = None
    encoded: Encoded | None = kernel and kernel(compressor, x, residual, key, out=out, blend=blend)
    if encoded is not None:
        return encoded
    if blend is not None:
        mixed = blended(blend, x)
        if out is None and residual is not None and is_mutable(mixed):
            out = mixed
        return encode(compressor, mixed, residual, key, out=out)
    xp = array_namespace(x)
    compensated = to_compute_dtype(x)
    exact = compressor.traits.lossless
    if residual is not None:
        old = to_compute_dtype(residual, argument="residual")
        compensated = flush(flush(compensated, exact=exact) + old, exact=exact)
    values = xp.reshape(compensated, (-1,))
    refused = None
    limit = exact_bounds(values)[1] if exact else LIMIT
    if not is_read_late(values):
        require_below(values, limit, compressor.spec)
    else:
        refused = out_of_range(values, limit)
        accepted = refused == 0
        # The code below runs even if values are refused, so it gets zeros instead of them.
        if not is_traced(values):
            values = xp.where(accepted, values, xp.zeros_like(values))
            compensated = xp.reshape(values, compensated.shape)
    spec = compressor.payload_spec(values.shape[0], dtype_name(values.dtype))
    parts = compressor.encode(values, key)
    data = spec.join(parts)
    if residual is None:
        return Encoded(data, None, refused)
    decoded = xp.reshape(compressor.decode(spec.split(data), values.shape[0], values.dtype), x.shape)
    lost = flush(compensated - decoded, exact=exact)
    if refused is not None and out is residual:  # the old residual is still needed if a value is refused
        lost = xp.where(accepted, lost, residual)
    return Encoded(data, lost if out is None else write_into(out, lost, argument="residual"), refused)


def _shortened(coder: Coder, plain: Encoded, size: int) -> Encoded:
    data = plain.data
    if _is_refused(plain):
        data = array_namespace(data).zeros_like(data)  # refused data may not be valid codes
    return plain._replace(data=coder.shorten(data, size))


def require_accepted(compressor: AnyCompressor, encoded: Encoded) -> None:
    """Raise `NonFiniteError` if a device has found a value out of range; this waits for the device, unless traced."""
    if _is_refused(encoded):
        raise refusal(compressor)


def _is_refused(encoded: Encoded) -> bool:
    """Return whether a device has found a value out of range; False while a compiler traces."""
    refused = encoded.refused
    return refused is not None and not is_traced(refused) and bool(int(refused[0]))


def refusal(compressor: AnyCompressor) -> NonFiniteError:
    """Return the error for values out of range."""
    return NonFiniteError(
        f"x cannot be compressed by {compressor.spec}: it holds a value that is not finite, or too large"
    )


def decode(
    compressor: AnyCompressor,
    payload: Payload,
    like: Array,
    *,
    out: Array | None = None,
    accumulate: bool = False,
) -> Array:
    """Decompress a payload whose size has been checked.

    Parameters
    ----------
    compressor : AnyCompressor
    payload : Payload
    like : array
        Gives the shape, the dtype and the device of the result.
    out : array, optional
        A buffer into which the result is written, or to which it is added.
    accumulate : bool
        Whether to return ``out`` plus the result, in the buffer of ``out`` if that is mutable.

    Notes
    -----
    The sum is rounded as ``out + decode(data)`` in the dtype of ``out``.
    """
    coder = compressor.coder
    if coder is not None:
        return decode(coder.plain, _restored(coder, payload), like, out=out, accumulate=accumulate)
    xp = array_namespace(like)
    name = compute_dtype_name(dtype_name(like.dtype), argument="like")
    compute = getattr(xp, name)
    # The layout of a payload may depend on its dtype, and kernels see only bytes.
    if payload.dtype == name:
        kernel = kernel_of("decode", like)
        decoded: Array | None = kernel and kernel(
            compressor, payload.data, like, out=out, accumulate=accumulate
        )
        if decoded is not None:
            return decoded
        if compute != like.dtype:
            values = decode(compressor, payload, xp.empty_like(like, dtype=compute))
            return _deliver(xp.astype(values, like.dtype), out, accumulate=accumulate)
    parts = compressor.payload_spec(payload.size, payload.dtype).split(payload.data)
    flat = compressor.decode(parts, payload.size, compute)
    result = xp.astype(xp.reshape(flat, like.shape), like.dtype, copy=False)
    return _deliver(result, out, accumulate=accumulate)


def _restored(coder: Coder, payload: Payload) -> Payload:
    data = coder.restore(payload.data, payload.size)
    return replace(payload, compressor=coder.plain.spec, data=data)


def _deliver(result: Array, out: Array | None, *, accumulate: bool) -> Array:
    """Return a result in the way that the arguments of `decode` say."""
    if out is None:
        return result
    if accumulate:
        result = out + result
        return write_into(out, result) if is_mutable(out) else result
    return write_into(out, result)


def add_up(
    compressor: AnyCompressor, payloads: Sequence[Payload], like: Array, *, out: Array | None = None
) -> Array:
    """Return the sum of the decompressed payloads, added in their order; their sizes must have been checked."""
    total = decode(compressor, payloads[0], like, out=empty_like(like) if out is None else out)
    for payload in payloads[1:]:
        total = decode(compressor, payload, total, out=total, accumulate=True)
    return total


def average(
    compressor: AnyCompressor, payloads: Sequence[Payload], like: Array, *, out: Array | None = None
) -> Array:
    """Return the mean of the decompressed payloads: `finish_mean` of `add_up`.

    Parameters
    ----------
    compressor : AnyCompressor
    payloads : sequence of Payload
        The payload of each rank; their sizes must have been checked.
    like : array
        Gives the shape, the dtype and the device of the result.
    out : array, optional
        A buffer for the result.
    """
    coder = compressor.coder
    if coder is not None:
        return average(coder.plain, [_restored(coder, payload) for payload in payloads], like, out=out)
    kernel = kernel_of("average", like)
    mean: Array | None = kernel and kernel(compressor, [each.data for each in payloads], like, out=out)
    if mean is not None:
        return mean
    mean = finish_mean(add_up(compressor, payloads, like, out=out), len(payloads))
    return mean if out is None or mean is out else write_into(out, mean)


def average_of_senders(
    compressor: AnyCompressor, payloads: Sequence[Payload], like: Array, *, out: Array | None = None
) -> Array:
    """Return at each element the mean of the decompressed payloads that are not 0 there; 0 if all are 0.

    If the compressor drops no elements, this is the `average`.

    Parameters
    ----------
    compressor, payloads, like, out
        See `average`.
    """
    if compressor.traits.kept is None:
        return average(compressor, payloads, like, out=out)
    xp = array_namespace(like)
    total, senders = xp.zeros_like(like), xp.zeros_like(like)
    buffer = empty_like(like)
    for payload in payloads:
        value = decode(compressor, payload, like, out=buffer)
        total, senders = in_blocks(add_sender, (total, senders, value), (total, senders))
    (mean,) = in_blocks(lambda *sums: (finish_senders(*sums),), (total, senders), (total,))
    return mean if out is None else write_into(out, mean)


def add_sender(total: Array, senders: Array, value: Array) -> tuple[Array, Array]:
    """Return the sum and the number of senders at each element after adding one more rank's decompressed payload."""
    return total + value, senders + array_namespace(value).astype(value != 0, value.dtype)


def finish_senders(total: Array, senders: Array) -> Array:
    """Return the mean from a sum over ranks and the number of senders at each element; 0 without senders."""
    xp = array_namespace(total)
    return flush(divide(total, xp.where(senders > 0, senders, xp.ones_like(senders))))


def compress_mean(
    compressor: AnyCompressor,
    payloads: Sequence[Payload],
    like: Array,
    residual: Array | None,
    key: Key | None,
    *,
    out: Array | None = None,
) -> Encoded:
    """Compress the mean of the decompressed payloads, plus the residual if there is one: `encode` of `average`.

    Parameters
    ----------
    compressor, payloads, like
        See `average`.
    residual : array or None
        Has the shape and dtype of ``like``; it is not written to.
    key : Key or None
        For compressors that draw.
    out : array, optional
        A buffer for the new residual.

    Returns
    -------
    Encoded
        See `encode`.

    Raises
    ------
    NonFiniteError
        If values out of range were found before this returned.
    """
    coder = compressor.coder
    if coder is not None:
        restored = [_restored(coder, payload) for payload in payloads]
        plain = compress_mean(coder.plain, restored, like, residual, key, out=out)
        return _shortened(coder, plain, math.prod(like.shape))
    kernel = kernel_of("compress_mean", like)
    encoded: Encoded | None = kernel and kernel(
        compressor, [payload.data for payload in payloads], like, residual, key, out=out
    )
    if encoded is not None:
        return encoded
    mean = average(compressor, payloads, like, out=out)
    return encode(
        compressor, mean, residual, key, out=mean if residual is not None and is_mutable(mean) else None
    )


@primitive("total")
def finish_mean(total: Array, count: int) -> Array:
    """Return the mean from a sum over ranks, correctly rounded, with 0 for magnitudes below 2^-126 (float64: 2^-1022).

    The buffer of the sum may be reused.
    """
    return flush(divide(total, count), exact=True)


@primitive("x")
def in_range(x: Array) -> bool:  # noqa: ARG001
    """Return True if a kernel finds that each value is +0, or has a magnitude from 2^-126 to below 2^100.

    `compensate` leaves such values as they are.
    """
    return False


def compensate(
    x: Array, residual: Array | None, *, what: str, out: Array | None = None
) -> tuple[Array, Array | None]:
    """Return ``flush(flush(x) + residual)``, and a flag for values out of range, like `Encoded.refused`.

    Parameters
    ----------
    x : array, shape (size,)
    residual : array, shape (size,), or None
        Has the dtype in which x is computed; None for values that are exact.
    what : str
        What refuses values, for error texts, such as the spec string of a compressor.
    out : array, optional
        A buffer for the result, which may be x.

    Raises
    ------
    NonFiniteError
        If values out of range, from 2^100 on (2^996 for exact float64), were found before this returned. Then the
        values of x are lost if ``out`` is x.
    """
    exact = residual is None
    limit = exact_bounds(x)[1] if exact else LIMIT
    kernel = kernel_of("compensate", x)
    found: tuple[Array, float] | None = kernel and kernel(x, residual, out=out)
    if found is not None:
        values, largest = found
        if not largest < limit:
            raise NonFiniteError(
                f"x cannot be compressed by {what}: it holds {largest:.6g}; expected below {limit:.6g}"
            )
        return values, None
    compensated = flush(x, exact=exact) if residual is None else flush(flush(x) + residual)
    refused = None
    if is_read_late(x):
        refused = out_of_range(compensated, limit)
    else:
        require_below(compensated, limit, what)
    return compensated if out is None else write_into(out, compensated), refused


_BLOCK = 1 << 15
"""Elements of a matrix that are computed at once on a CPU, so that its caches hold all intermediate results."""


@primitive("matrix")
def take_low_rank(
    left: Array, right: Array, matrix: Array, *, out: Array | None = None
) -> tuple[Array, Array]:
    """Return the product of two factors, and ``matrix`` minus the product; ``matrix`` may be overwritten.

    Parameters
    ----------
    left, right : array, shapes (rank, rows) and (rank, columns)
        The factors. The product of an element of one and an element of the other must be 0, or of a magnitude of at
        least 2^-102.
    matrix : array, shape (rows * columns,)
        Has the dtype of the factors.
    out : array, shape (rows * columns,), optional
        A buffer for the product.

    Returns
    -------
    product : array, shape (rows * columns,)
        ``product[i, j] = sum_k t(left[k, i] * right[k, j])``, added in the order of k, where t clears the last bit of a
        product. So no compiler can fuse a product and a sum, and every library returns the same bits.
    rest : array, shape (rows * columns,)
        ``flush(matrix - product)``, in the buffer of ``matrix`` if that is mutable.
    """
    xp = array_namespace(matrix)
    product: Any = empty_like(matrix) if out is None else out
    rows, columns = left.shape[1], right.shape[1]
    if product is None or not is_mutable(matrix):
        whole = low_rank.outer_product(left, right)
        return whole, flush(matrix - whole)
    step = max(1, _BLOCK // max(1, columns)) if is_on_host(matrix) else max(1, rows)
    for first in range(0, rows, step):
        part = slice(first * columns, min(rows, first + step) * columns)
        block = low_rank.outer_product(left[:, first : first + step], right)
        product[part] = block
        matrix[part] = flush(matrix[part] - block)
    return xp.reshape(product, (-1,)), matrix


def orthonormal(factors: Sequence[Array]) -> list[Array]:
    """Return an orthonormal basis of the rows of each factor; see `qcomp.core.numeric.low_rank.orthonormal`.

    Parameters
    ----------
    factors : sequence of arrays, shape (rank, length)
    """
    return _each("orthonormal", factors) or low_rank.together(low_rank.orthonormal, factors)


def next_factors(new: Sequence[Array], old: Sequence[Array]) -> list[Array]:
    """Return the factors of the next step; see `qcomp.core.numeric.low_rank.next_factor`.

    Parameters
    ----------
    new, old : sequence of arrays, shape (rank, length)
    """
    return _each("next_factor", new, old) or low_rank.together(low_rank.next_factor, new, old)


def _each(name: str, *lists: Sequence[Array]) -> list[Array]:
    """Return what a kernel returns for the factors of each matrix; an empty list if it does not support all."""
    kernel = kernel_of(name, lists[0][0]) if lists[0] else None
    found = [kernel(*factors) for factors in zip(*lists, strict=True)] if kernel else []
    return [] if any(factor is None for factor in found) else found
