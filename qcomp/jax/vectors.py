"""The arithmetic of optimizers on a mesh: many arrays as one vector, and numbers that depend on the step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from qcomp.core.numeric.arrays import compute_dtype_name
from qcomp.core.variance.arithmetic import bias_corrections
from qcomp.jax.packing import Array, cut
from qcomp.jax.trees import PyTree

__all__ = ["correction", "cut_like", "joined", "zeros_like"]


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
    (found,) = bias_corrections([(beta, beta)], 0, [count])
    return found
