"""The primitives of optimizer steps: momenta, and the steps of Adam, LAMB and the frozen-variance optimizers.

`qcomp.core.primitives` says what a primitive is, and lists these among all others.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

from qcomp.core.kernels import AdamNumbers, Blend, FreshNumbers, StepNumbers, kernel_of, primitive
from qcomp.core.numeric.arrays import (
    Array,
    array_namespace,
    divide,
    flush,
    is_mutable,
    is_traced,
    sqrt,
    to_compute_dtype,
)
from qcomp.core.numeric.cache_blocks import in_blocks
from qcomp.core.numeric.numbers import Number, as_number
from qcomp.core.numeric.sums import sum_of_squares

Result = TypeVar("Result")


@primitive("x")
def empty_like(x: Array) -> Array | None:
    """Return a buffer of the shape and dtype of x, with any values, or None in a library with immutable arrays."""
    buffer = array_namespace(x).empty_like(x)
    return buffer if is_mutable(buffer) else None


@primitive("arrays", several=True)
def empty_likes(arrays: Sequence[Array]) -> list[Array | None]:
    """Apply `empty_like` to each of several arrays, which have one library and device."""
    return [empty_like(x) for x in arrays]


@primitive("m")
def momentum(m: Array, g: Array, beta1: float, scale: float) -> Array:
    """Return ``beta1 * m + ((1 - beta1) * scale) * g`` in a new array, each operation rounded to the dtype of m."""
    gradient = to_compute_dtype(g)
    if gradient is not g:  # there may be a kernel for the converted gradient
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
        A buffer for the result, which may be p. For small arrays the result may still be a new array.
    """

    def move(p: Array, d: Array) -> tuple[Array]:
        own = to_compute_dtype(p)
        change = rounded(rate * (d + rounded(decay * own) if decay else d))
        return (array_namespace(p).astype(own - change, p.dtype, copy=False),)

    (moved,) = in_blocks(move, (p, d), (out,))
    return moved


def rounded(x: Array) -> Array:
    """Return x unchanged, but make a compiler round x, instead of fusing its computation with an operation on x."""
    kernel = kernel_of("rounded", x) if is_traced(x) else None
    found: Array | None = kernel and kernel(x)
    return x if found is None else found


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
    m' = m if v > 0, else 0: one bit cannot represent zero, so an element that never had a gradient would move by about
    rate * scale / eps in every step. p' = p - rate * ((m' / correction) / (sqrt(v) + eps) + weight_decay * p).
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
    if len(params) != 1:
        return _each_alone(frozen_steps, params, momenta, variances, numbers, donate=donate)
    (p,), (m,), (v,), (own,) = params, momenta, variances, numbers
    return [frozen_step(p, m, v, own)]


def _each_alone(primitive: Callable[..., list[Result]], *lists: Sequence[Any], donate: bool) -> list[Result]:
    """Apply a primitive of several tensors to one at a time, since the kernels may refuse only some of them."""
    return [
        found for one in zip(*lists, strict=True) for found in primitive(*([x] for x in one), donate=donate)
    ]


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
    """Return the parameters, momenta and variances of several tensors after a step of Adam.

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
    if len(params) != 1:
        return _each_alone(adam_steps, params, momenta, variances, gradients, numbers, donate=donate)
    (p,), (m,), (v,), (g,), (own,) = params, momenta, variances, gradients, numbers
    m, v = _moments(p, m, v, g, own)
    return [(adam_step(p, m, divide(v, own.variance_correction), own.step), m, v)]


def _moments(p: Array, m: Array, v: Array, g: Array, numbers: AdamNumbers) -> tuple[Array, Array]:
    beta1, beta2 = numbers.betas
    if numbers.coupled_decay:
        g = g + rounded(numbers.coupled_decay * to_compute_dtype(p))
    return momentum(m, g, beta1, 1.0), momentum(v, g * g, beta2, 1.0)


def adam_step(p: Array, m: Array, v: Array, numbers: StepNumbers) -> Array:
    """Return ``p - rate * ((m / correction) / (sqrt(v) + eps) + weight_decay * p)``, in the dtype of p."""
    moved = to_compute_dtype(p) - rounded(numbers.rate * direction(p, m, v, numbers))
    return array_namespace(p).astype(moved, p.dtype, copy=False)


def direction(p: Array, m: Array, v: Array, numbers: StepNumbers) -> Array:
    """Return ``(m / correction) / (sqrt(v) + eps) + weight_decay * p``, in the dtype of m."""
    _, correction, eps, weight_decay = numbers
    found = divide(rounded(divide(m, correction)), sqrt(v) + eps)
    return found + rounded(weight_decay * to_compute_dtype(p)) if weight_decay else found


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
    """Return the directions, momenta and variances of several tensors after a step of Adam.

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
    if len(params) != 1:
        return _each_alone(adam_directions, params, momenta, variances, gradients, numbers, donate=donate)
    (own,), arrays = numbers, (*params, *momenta, *variances, *gradients)
    rooms = [empty_like(x) for x in (*momenta, *momenta, *variances)]
    d, m, v = in_blocks(partial(_directed, own), arrays, rooms)
    return [(d, m, v)]


def _directed(numbers: AdamNumbers, p: Array, m: Array, v: Array, g: Array) -> tuple[Array, Array, Array]:
    m, v = _moments(p, m, v, g, numbers)
    return direction(p, m, rounded(divide(v, numbers.variance_correction)), numbers.step), m, v


@primitive("arrays", several=True)
def sums_of_squares(arrays: Sequence[Array]) -> list[Number]:
    """Return, for each of several arrays, the sum of the squares of its elements; see `sum_of_squares`."""
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
) -> list[tuple[Array, Array, Number]]:
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
    m' = mean / divisor if v > 0, else 0, as in `frozen_step`; g = (m' - b1 * m) / (1 - b1); f' is `momentum` of f and
    g * g. The growth is the largest (sqrt(v) + eps) / (sqrt(f') + eps). There, an infinite v counts as 0: its element
    does not move, so it must not affect the growth. An empty tensor has growth 0.
    """
    if len(means) != 1:
        return _each_alone(fresh_variances, means, momenta, variances, fresh, numbers, donate=donate)
    (own,), arrays = numbers, (*means, *momenta, *variances, *fresh)
    rooms = [empty_like(x) for x in (*variances, *variances, *variances)]
    m, f, growth = in_blocks(partial(_refreshed, own), arrays, rooms)
    return [(m, f, as_number(array_namespace(growth).max(growth)) if math.prod(growth.shape) else 0.0)]


def _refreshed(
    numbers: FreshNumbers, mean: Array, old: Array, v: Array, f: Array
) -> tuple[Array, Array, Array]:
    xp, (beta1, beta2) = array_namespace(mean), numbers.betas
    m = divide(mean, numbers.divisor)
    m = xp.where(v > 0, m, xp.zeros_like(m))
    gradient = divide(m - rounded(beta1 * old), 1 - beta1)
    f = momentum(f, gradient * gradient, beta2, 1.0)
    finite = xp.where(xp.isfinite(v), v, xp.zeros_like(v))
    return m, f, divide(sqrt(finite) + numbers.eps, sqrt(f) + numbers.eps)
