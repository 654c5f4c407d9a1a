"""The primitives: the few computations that kernels replace, each with its pure version, which is the definition.

- `encode` and `decode` with a compressor (and feedback);
- `average` and `compress_mean` over ranks, which are made of these and of `finish_mean`;
- `average_of_senders`, which is made of `decode`;
- `momentum`, `nesterov` of Muon, `descend`, `scale`, `adam_steps`, and `frozen_steps` of the frozen-variance
  optimizers, also as `steps_of_sums` of 0/1 Adam;
- `adam_directions` and `sums_of_squares` of LAMB, and `fresh_variances` of 1-bit LAMB;
- `compensate`, `take_low_rank`, `orthonormal` and `next_factors` of PowerSGD, and `in_range` of a rank that is alone.

All else in the core is made of these, or runs once a step on small arrays.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial, wraps
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from qcomp.core.errors import NonFiniteError
from qcomp.core.kernels import (
    AdamNumbers,
    Blend,
    Encoded,
    FreshNumbers,
    StepNumbers,
    chosen,
    kernel_of,
    takes_blends,
)
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
    sqrt,
    to_compute_dtype,
    write_into,
)
from qcomp.core.numeric.cache_blocks import in_blocks
from qcomp.core.numeric.random import require_key
from qcomp.core.numeric.sums import sum_of_squares

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from qcomp.core.numeric.random import Key
    from qcomp.core.payload import Payload
    from qcomp.core.traits import AnyCompressor, Coder

__all__ = [
    "adam_directions",
    "adam_step",
    "adam_steps",
    "add_up",
    "average",
    "average_of_senders",
    "blended",
    "compensate",
    "compress_mean",
    "decode",
    "descend",
    "empty_like",
    "empty_likes",
    "encode",
    "finish_mean",
    "fresh_variances",
    "frozen_step",
    "frozen_steps",
    "in_range",
    "momentum",
    "nesterov",
    "next_factors",
    "orthonormal",
    "refusal",
    "require_accepted",
    "scale",
    "steps_of_sums",
    "sums_of_squares",
    "take_low_rank",
]

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def primitive(
    like: str, *, several: bool = False
) -> Callable[[Callable[Arguments, Result]], Callable[Arguments, Result]]:
    """Let kernels with the name of a pure function replace it; the function defines their arguments and results.

    Parameters
    ----------
    like : str
        The argument that selects the kernel. The kernel gets all arguments; the pure function runs if it returns None.
    several : bool
        Whether this argument is a sequence of arrays, the first of which decides.
    """

    def decorate(pure: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
        name, defaults = pure.__name__, pure.__kwdefaults__ or {}
        place = pure.__code__.co_varnames.index(like)

        @wraps(pure)
        def call(*args: Arguments.args, **options: Arguments.kwargs) -> Result:
            x: Any = args[place] if place < len(args) else options.get(like)
            if several:
                x = x[0] if x else None
            kernel = None if x is None else kernel_of(name, x)
            found: Result | None = kernel and kernel(*args, **{**defaults, **options})
            return pure(*args, **options) if found is None else found

        return call

    return decorate


@primitive("x")
def empty_like(x: Array) -> Array | None:
    """Return a buffer of the shape and dtype of x, with any values, or None in a library with immutable arrays."""
    buffer = array_namespace(x).empty_like(x)
    return buffer if is_mutable(buffer) else None


@primitive("arrays", several=True)
def empty_likes(arrays: Sequence[Array]) -> list[Array | None]:
    """Apply `empty_like` to each of several arrays of one library and device."""
    return [empty_like(x) for x in arrays]


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
        A buffer for the new residual: the old one, x itself if it has the dtype of the residual, or one that shares
        memory with neither, which is the fastest. x is used up if it is the buffer; the old residual is used up only if
        nothing is out of range.
    blend : Blend, optional
        Compress what x is `blended` into instead of x; a kernel may do both at once.

    Returns
    -------
    Encoded
        Its ``refused`` reports values out of range that a device has found, or that a compiled program will find.

    Raises
    ------
    NonFiniteError
        If values out of range were found before this returned.

    Notes
    -----
    p = flush(flush(x) + residual); data = C(p); residual' = flush(p - decode(data)). All values of p must be below
    2^100 in magnitude, or in `exact_bounds` if C loses nothing. A coder loses nothing: the residual is the same as with
    the plain compressor whose data it shortens.

    A kernel that finds a value out of range before it returns may return None: then the pure version reports it. A
    kernel that would find it later never writes to the old residual, and returns the new one in another array.
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
        # The code below must process refused values, although they are meaningless: so it gets zeros.
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
    if refused is not None and out is residual:  # the old one is still needed if a value is refused
        lost = xp.where(accepted, lost, residual)
    return Encoded(data, lost if out is None else write_into(out, lost, argument="residual"), refused)


def _shortened(coder: Coder, plain: Encoded, size: int) -> Encoded:
    data = plain.data
    if _is_refused(plain):
        data = array_namespace(data).zeros_like(data)  # refused data may not be valid codes
    return plain._replace(data=coder.shorten(data, size))


def require_accepted(compressor: AnyCompressor, encoded: Encoded) -> None:
    """Raise `NonFiniteError` if a device has found a value out of range; waits for the device, unless traced."""
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
        A buffer to write the result into, or to add it to.
    accumulate : bool
        Whether to add; returns ``out`` plus the result, in the buffer of ``out`` where that can be written to.

    Notes
    -----
    Adding has the roundings of ``out + decode(data)`` in the dtype of ``out``.
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
    """Return a result as `decode` is asked to."""
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
        One from each rank; their sizes must have been checked.
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
    """Return at each element the mean of the decompressed payloads that are not 0 there; 0 if there is none.

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

    def add(total: Array, senders: Array, value: Array) -> tuple[Array, Array]:
        return total + value, senders + xp.astype(value != 0, value.dtype)

    for payload in payloads:
        value = decode(compressor, payload, like, out=buffer)
        total, senders = in_blocks(add, (total, senders, value), (total, senders))

    def finish(total: Array, senders: Array) -> tuple[Array]:
        return (flush(divide(total, xp.where(senders > 0, senders, xp.ones_like(senders)))),)

    (mean,) = in_blocks(finish, (total, senders), (total,))
    return mean if out is None else write_into(out, mean)


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
    """Return the mean from a sum over ranks: correctly rounded, zero below 2^-126; its buffer may be reused.

    In float64 it is zero below 2^-1022.
    """
    return flush(divide(total, count), exact=True)


@primitive("m")
def momentum(m: Array, g: Array, beta1: float, scale: float) -> Array:
    """Return ``beta1 * m + ((1 - beta1) * scale) * g`` in a new array, each operation rounded to the dtype of m."""
    gradient = to_compute_dtype(g)
    if gradient is not g:  # there may be a kernel for the wider gradient
        return momentum(m, gradient, beta1, scale)
    return beta1 * m + ((1 - beta1) * scale) * g


def blended(blend: Blend, x: Array) -> Array:
    """Return ``weight * momentum(factor * m, factor * x)`` in a new array, where factors of 1 change nothing."""
    m, beta1, scale, factor, weight = blend
    if factor != 1:
        (m,), (x,) = (
            in_blocks(partial(_times, factor), [y], [empty_like(y)]) for y in (m, to_compute_dtype(x))
        )
    mixed = momentum(m, x, beta1, scale)
    return mixed if weight == 1 else in_blocks(partial(_times, weight), [mixed], [mixed])[0]


def _times(factor: float, x: Array) -> tuple[Array]:
    return (factor * x,)


@primitive("m")
def nesterov(m: Array, g: Array, beta1: float) -> tuple[Array, Array]:
    """Return the new `momentum` m' of m and g, and Nesterov's momentum, which is the `momentum` of m' and g."""
    new = momentum(m, g, beta1, 1.0)
    return new, momentum(new, g, beta1, 1.0)


@primitive("d")
def descend(p: Array, d: Array, rate: float, decay: float, *, out: Array | None = None) -> Array:
    """Return ``p - rate * (d + decay * p)``, each operation rounded to the dtype of d, in the dtype of p.

    Parameters
    ----------
    p : array
        Parameters.
    d : array
        A direction, with the shape of p, in the dtype in which p is computed.
    rate : float
        Learning rate.
    decay : float
        Weight decay coefficient; with 0 the direction stays as it is.
    out : array, optional
        A buffer that the result may take, which may be p; for small arrays the result can still be a new array.
    """

    def move(p: Array, d: Array) -> tuple[Array]:
        own = to_compute_dtype(p)
        change = rate * (d + decay * own if decay else d)
        return (array_namespace(p).astype(own - change, p.dtype, copy=False),)

    (moved,) = in_blocks(move, (p, d), (out,))
    return moved


@primitive("x")
def scale(x: Array, factor: float) -> Array:
    """Return ``flush(factor * x)`` in a new array, the product rounded to the dtype of x."""
    (scaled,) = in_blocks(lambda part: (flush(factor * part),), (x,), (empty_like(x),))
    return scaled


@primitive("m")
def frozen_step(p: Array, m: Array, v: Array, numbers: StepNumbers) -> tuple[Array, Array]:
    """Return the parameters after a step of Adam with a frozen variance, and the momentum to keep.

    Parameters
    ----------
    p, m, v : array
        Parameters, averaged momentum, frozen and bias-corrected variance. The buffer of m may be reused.
    numbers : StepNumbers

    Notes
    -----
    m' = m where v > 0, else 0: one bit cannot represent zero, so an element that never had a gradient would drift by a
    scale over eps in every step. p' = p - rate * ((m' / correction) / (sqrt(v) + eps) + weight_decay * p).
    """
    xp = array_namespace(p)
    masked = xp.where(v > 0, m, xp.zeros_like(m))
    return adam_step(p, masked, v, numbers), masked


@primitive("momenta", several=True)
def frozen_steps(
    params: Sequence[Array],
    momenta: Sequence[Array],
    variances: Sequence[Array],
    numbers: Sequence[StepNumbers],
    *,
    donate: bool = False,
) -> list[tuple[Array, Array]]:
    """Apply `frozen_step` to each of several tensors.

    Parameters
    ----------
    params, momenta, variances, numbers
        See `frozen_step`, one for each tensor.
    donate : bool
        Whether new parameters may take the buffers of the old ones.
    """
    tensors = list(zip(params, momenta, variances, numbers, strict=True))
    if len(tensors) == 1:
        return [frozen_step(*tensors[0])]
    # One at a time, since the kernels may refuse only some of them.
    return [moved for p, m, v, n in tensors for moved in frozen_steps([p], [m], [v], [n], donate=donate)]


@primitive("sums", several=True)
def steps_of_sums(
    params: Sequence[Array],
    sums: Sequence[Array],
    variances: Sequence[Array],
    numbers: Sequence[StepNumbers],
    divisors: Sequence[float],
    *,
    donate: bool = False,
) -> list[tuple[Array, Array]]:
    """Apply `frozen_step` to sums of momenta, each divided by its divisor; see `frozen_steps`.

    Parameters
    ----------
    params, sums, variances, numbers, divisors
        One for each tensor. The buffers of the sums may be reused.
    donate : bool
        Whether new parameters may take the buffers of the old ones.
    """
    momenta = [
        x if by == 1 else in_blocks(partial(_over, by), [x], [empty_like(x)])[0]
        for x, by in zip(sums, divisors, strict=True)
    ]
    return frozen_steps(params, momenta, variances, numbers, donate=donate)


def _over(divisor: float, x: Array) -> tuple[Array]:
    return (divide(x, divisor),)


@primitive("momenta", several=True)
def adam_steps(
    params: Sequence[Array],
    momenta: Sequence[Array],
    variances: Sequence[Array],
    gradients: Sequence[Array],
    numbers: Sequence[AdamNumbers],
    *,
    donate: bool = False,
) -> list[tuple[Array, Array, Array]]:
    """Return parameters, momentum and variance of each of several tensors after a step of Adam.

    Parameters
    ----------
    params, momenta, variances, gradients : sequence of arrays
        Parameters, moments, mean gradients.
    numbers : sequence of AdamNumbers
    donate : bool
        Whether the results may take the buffers of the old parameters and moments.

    Notes
    -----
    g' = g + coupled_decay * p; m' and v' are `momentum` of m and g', of v and g' * g'; p' is `adam_step` of m' and
    v' / variance_correction. Everything is checked before anything is written.
    """
    tensors = list(zip(params, momenta, variances, gradients, numbers, strict=True))
    if len(tensors) == 1:
        return [_whole_adam_step(*tensors[0])]
    return [
        moved for p, m, v, g, n in tensors for moved in adam_steps([p], [m], [v], [g], [n], donate=donate)
    ]


def _whole_adam_step(
    p: Array, m: Array, v: Array, g: Array, numbers: AdamNumbers
) -> tuple[Array, Array, Array]:
    m, v = _moments(p, m, v, g, numbers)
    return adam_step(p, m, divide(v, numbers.variance_correction), numbers.step), m, v


def _moments(p: Array, m: Array, v: Array, g: Array, numbers: AdamNumbers) -> tuple[Array, Array]:
    beta1, beta2 = numbers.betas
    if numbers.coupled_decay:
        g = g + numbers.coupled_decay * to_compute_dtype(p)
    return momentum(m, g, beta1, 1.0), momentum(v, g * g, beta2, 1.0)


def adam_step(p: Array, m: Array, v: Array, numbers: StepNumbers) -> Array:
    """Return ``p - rate * ((m / correction) / (sqrt(v) + eps) + weight_decay * p)``, in the dtype of p."""
    moved = to_compute_dtype(p) - numbers.rate * _direction(p, m, v, numbers)
    return array_namespace(p).astype(moved, p.dtype, copy=False)


def _direction(p: Array, m: Array, v: Array, numbers: StepNumbers) -> Array:
    _, correction, eps, weight_decay = numbers
    direction = divide(divide(m, correction), sqrt(v) + eps)
    return direction + weight_decay * to_compute_dtype(p) if weight_decay else direction


@primitive("momenta", several=True)
def adam_directions(
    params: Sequence[Array],
    momenta: Sequence[Array],
    variances: Sequence[Array],
    gradients: Sequence[Array],
    numbers: Sequence[AdamNumbers],
    *,
    donate: bool = False,
) -> list[tuple[Array, Array, Array]]:
    """Return the direction, momentum and variance of each of several tensors after a step of Adam.

    Parameters
    ----------
    params, momenta, variances, gradients, numbers
        See `adam_steps`.
    donate : bool
        Whether the results may take the buffers of the old moments.

    Notes
    -----
    The direction is what `adam_steps` multiplies by the rate, in a new array.
    """
    tensors = list(zip(params, momenta, variances, gradients, numbers, strict=True))
    if len(tensors) == 1:
        *arrays, own = tensors[0]
        rooms = [empty_like(x) for x in (momenta[0], momenta[0], variances[0])]
        d, m, v = in_blocks(partial(_directed, own), arrays, rooms)
        return [(d, m, v)]
    return [
        found
        for p, m, v, g, n in tensors
        for found in adam_directions([p], [m], [v], [g], [n], donate=donate)
    ]


def _directed(numbers: AdamNumbers, p: Array, m: Array, v: Array, g: Array) -> tuple[Array, Array, Array]:
    m, v = _moments(p, m, v, g, numbers)
    return _direction(p, m, divide(v, numbers.variance_correction), numbers.step), m, v


@primitive("arrays", several=True)
def sums_of_squares(arrays: Sequence[Array]) -> list[float]:
    """Return the sum of the squares of all elements of each of several arrays; see `sum_of_squares`."""
    if len(arrays) > 1:
        return [found for x in arrays for found in sums_of_squares([x])]
    wide = to_compute_dtype(arrays[0])
    return [sum_of_squares(wide)] if wide is arrays[0] else sums_of_squares([wide])


@primitive("means", several=True)
def fresh_variances(
    means: Sequence[Array],
    momenta: Sequence[Array],
    variances: Sequence[Array],
    fresh: Sequence[Array],
    numbers: Sequence[FreshNumbers],
    *,
    donate: bool = False,
) -> list[tuple[Array, Array, float]]:
    """Return the momentum, the fresh variance and the growth of each of several tensors.

    Parameters
    ----------
    means : sequence of arrays
        Averaged momenta, each multiplied by its divisor. Their buffers may be reused.
    momenta, variances, fresh : sequence of arrays
        The momenta before this step, the frozen variances v, and the variances f that follow the gradients.
    numbers : sequence of FreshNumbers
    donate : bool
        Whether the new fresh variances may take the buffers of the old ones.

    Notes
    -----
    m' = mean / divisor where v > 0, else 0, as in `frozen_step`; g = (m' - b1 * m) / (1 - b1); f' is `momentum` of f
    and g * g. The growth is the largest (sqrt(v) + eps) / (sqrt(f') + eps), where 0 takes the place of an infinite v:
    such an element rests, so it has no part in how much the steps of the tensor grow. It is 0 without elements.
    """
    tensors = list(zip(means, momenta, variances, fresh, numbers, strict=True))
    if len(tensors) == 1:
        *arrays, own = tensors[0]
        rooms = [empty_like(arrays[2]) for _ in range(3)]
        m, f, growth = in_blocks(partial(_refreshed, own), arrays, rooms)
        return [(m, f, float(array_namespace(growth).max(growth)) if math.prod(growth.shape) else 0.0)]
    return [
        found
        for x, m, v, f, n in tensors
        for found in fresh_variances([x], [m], [v], [f], [n], donate=donate)
    ]


def _refreshed(
    numbers: FreshNumbers, mean: Array, old: Array, v: Array, f: Array
) -> tuple[Array, Array, Array]:
    xp, (beta1, beta2) = array_namespace(mean), numbers.betas
    m = divide(mean, numbers.divisor) if numbers.divisor != 1 else mean
    m = xp.where(v > 0, m, xp.zeros_like(m))
    gradient = divide(m - beta1 * old, 1 - beta1)
    f = momentum(f, gradient * gradient, beta2, 1.0)
    finite = xp.where(xp.isfinite(v), v, xp.zeros_like(v))
    return m, f, divide(sqrt(finite) + numbers.eps, sqrt(f) + numbers.eps)


@primitive("x")
def in_range(x: Array) -> bool:  # noqa: ARG001
    """Return whether a kernel finds every value +0, or of a magnitude from 2^-126 to below 2^100.

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
        If values out of range, from 2^100 on (exact ones in float64: 2^996), were found before this returned; if x is
        ``out``, it is then used up.
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
    """Return the product of two factors, and ``matrix`` minus the product; ``matrix`` is used up.

    Parameters
    ----------
    left, right : array, shapes (rank, rows) and (rank, columns)
        The factors. The magnitudes of two elements whose product is not zero must multiply to at least 2^-102.
    matrix : array, shape (rows * columns,)
        Has the dtype of the factors.
    out : array, shape (rows * columns,), optional
        A buffer for the product.

    Returns
    -------
    product : array, shape (rows * columns,)
        ``product[i, j] = sum_k t(left[k, i] * right[k, j])``, added in the order of k, where t clears the last bit of a
        product. So no compiler can contract a product and a sum, and every library returns the same bits.
    rest : array, shape (rows * columns,)
        ``flush(matrix - product)``, in the buffer of ``matrix`` where that can be written to.
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
    """Return what a kernel returns for the factors of each matrix; an empty list if it does not serve all of them."""
    kernel = kernel_of(name, lists[0][0]) if lists[0] else None
    found = [kernel(*factors) for factors in zip(*lists, strict=True)] if kernel else []
    return [] if any(factor is None for factor in found) else found
