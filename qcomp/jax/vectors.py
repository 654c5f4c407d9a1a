"""The arithmetic of optimizers on a mesh: many arrays as one vector, and numbers that depend on the step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from qcomp.core import primitives
from qcomp.core.numeric.arrays import compute_dtype_name
from qcomp.core.numeric.numbers import factor_of
from qcomp.core.variance.arithmetic import bias_corrections, floored
from qcomp.jax.moves import Array, cut
from qcomp.jax.trees import PyTree

__all__ = [
    "as_pairs",
    "correction",
    "cut_like",
    "floored_like",
    "from_pairs",
    "joined",
    "update_of",
    "zeros_like",
]


def joined(arrays: Sequence[Array]) -> Array:
    """Return the elements of arrays as one vector, since each operation on each array takes compile time."""
    return jax.lax.concatenate([jnp.ravel(x) for x in arrays], 0)


def cut_like(vector: Array, like: PyTree) -> Any:
    """Cut a vector into a pytree with the structure, shapes and dtypes of another; the inverse of `joined`."""
    leaves, structure = jax.tree.flatten(like)
    parts = zip(cut(vector, [jnp.size(x) for x in leaves]), leaves, strict=True)
    return jax.tree.unflatten(
        structure, [jnp.reshape(part, jnp.shape(x)).astype(x.dtype) for part, x in parts]
    )


def zeros_like(x: Array) -> Array:
    """Return zeros in the dtype in which an array is computed, wherever JAX places them."""
    return jnp.zeros(x.shape, compute_dtype_name(x.dtype.name))


def correction(beta: float, count: Array) -> Array:
    """Return the bias correction 1 - beta^count of a traced count of updates, from a table as the core computes it."""
    (found,) = bias_corrections([(beta, beta)], 1, [count])
    return found


def floored_like(variance: Array, like: Sequence[Array], exact: Sequence[bool], floor: float) -> Array:
    """Return `floored` of joined variances of arrays like these; variances of one size are floored together."""
    parts = cut(variance, [x.size for x in like])
    of_size = defaultdict(list)
    for index, (part, is_exact) in enumerate(zip(parts, exact, strict=True)):
        if not is_exact and part.size:
            of_size[part.size].append(index)
    for size, indexes in of_size.items():
        rows = jnp.stack([parts[i] for i in indexes])
        raised: Any = jax.vmap(lambda v: floored([v], [False], floor)[0])(rows)
        for index, part in zip(indexes, cut(jnp.ravel(raised), [size] * len(indexes)), strict=True):
            parts[index] = part
    return jax.lax.concatenate(parts, 0)


def update_of(direction: Array, rate: Any) -> Array:
    """Return ``-rate * direction``, computed as a step from zero."""
    return primitives.descend(jnp.zeros_like(direction), direction, factor_of(direction, rate), 0.0)


def as_pairs(numbers: Array) -> Array:
    """Return float64 numbers as two rows of float32, which hold 48 bits: rounded values and remainders."""
    # XLA drops a conversion to float32 before one to float64, but not this rounding.
    high = jax.lax.reduce_precision(numbers, exponent_bits=8, mantissa_bits=23)
    return jnp.stack([high, numbers - high]).astype(jnp.float32)


def from_pairs(pairs: Array) -> Array:
    """Return the numbers of which `as_pairs` has made pairs."""
    return jnp.sum(pairs.astype(jnp.float64), axis=0)
