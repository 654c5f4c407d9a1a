"""The primitives of means and optimizers as compiled programs that round as the pure version does."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from qcomp.core.numeric.arrays import bitcast, divide, flush, sqrt

Array = Any  # as the functions of JAX take it


@jax.jit
def finish_mean(total: Array, count: Array) -> Array:
    """Return a sum over ranks divided by their number; see `qcomp.core.primitives.finish_mean`."""
    return flush(divide(total, count), exact=True)


@jax.jit
def momentum(m: Array, g: Array, numbers: Mapping[str, Array]) -> Array:
    """Return ``beta1 * m + weight * g``, with each product rounded."""
    return rounded(numbers["beta1"] * m, numbers) + rounded(numbers["weight"] * g, numbers)


@jax.jit
def frozen_step(p: Array, m: Array, v: Array, numbers: Mapping[str, Array]) -> tuple[Array, Array]:
    """Return the new parameters and the masked momentum; see `qcomp.core.primitives.frozen_step`."""
    masked = jnp.where(v > 0, m, jnp.zeros_like(m))
    return _moved(p, masked, v, numbers), masked


@jax.jit
def adam_step(
    p: Array, m: Array, v: Array, g: Array, numbers: Mapping[str, Array]
) -> tuple[Array, Array, Array]:
    """Return the new parameters and moments, without coupled decay; see `qcomp.core.primitives.adam_steps`."""
    m = momentum(m, g, numbers)
    v = momentum(
        v, rounded(g * g, numbers), {**numbers, "beta1": numbers["beta2"], "weight": numbers["weight2"]}
    )
    corrected = rounded(divide(v, numbers["variance_correction"]), numbers)
    return _moved(p, m, corrected, numbers), m, v


def _moved(p: Array, m: Array, v: Array, numbers: Mapping[str, Array]) -> Array:
    """Return the new parameters; see `qcomp.core.primitives.adam_step`."""
    corrected = rounded(divide(m, numbers["correction"]), numbers)
    direction = divide(corrected, sqrt(v) + numbers["eps"])
    if "weight_decay" in numbers:
        direction = direction + rounded(numbers["weight_decay"] * p, numbers)
    return p - rounded(numbers["rate"] * direction, numbers)


def rounded(x: Array, numbers: Mapping[str, Array]) -> Array:
    """Return x unchanged, but force the compiler to round it first.

    XLA fuses a product and a sum into one operation with one rounding, and turns x / a / b into x / (a * b). An integer
    operation on the bits prevents this: its operand is always 0, but known only at run time.
    """
    nothing = numbers["nothing"]
    bits: Any = bitcast(x, nothing.dtype)
    return bitcast(jnp.bitwise_or(bits, nothing), x.dtype)


def scalars(like: Array, **values: float) -> dict[str, Array]:
    """Return numbers as arguments in the dtype of an array, so that new values need no new compilation."""
    integer = np.int64 if like.dtype == np.float64 else np.int32
    return {"nothing": np.zeros((), integer)} | {
        name: np.asarray(value, like.dtype) for name, value in values.items()
    }
