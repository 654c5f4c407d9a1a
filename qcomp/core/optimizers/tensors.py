"""What all optimizers do with the tensors that they are given."""

from collections.abc import Sequence
from typing import Any

from qcomp.core.arrays import (
    Array,
    array_namespace,
    compute_dtype_name,
    detached,
    device,
    dtype_name,
    to_compute_dtype,
)

__all__ = ["as_tensors", "update", "zeros_like"]


def as_tensors(values: Any, argument: str) -> list[Array]:
    """Return an array or a sequence of arrays as a list, outside automatic differentiation."""
    tensors = [detached(v) for v in values] if isinstance(values, list | tuple) else [detached(values)]
    if not tensors:
        raise ValueError(f"{argument} is empty; expected an array or a sequence of at least one")
    array_namespace(*tensors)  # raises unless all are arrays of one library
    names = {compute_dtype_name(dtype_name(t.dtype), argument=argument) for t in tensors}
    if len(names) > 1:
        raise TypeError(f"{argument} mixes float64 with other dtypes; expected one precision of arithmetic")
    return tensors


def zeros_like(tensors: Sequence[Array]) -> tuple[Array, ...]:
    """Return zeros of the shapes of these tensors, in C order and in the dtype in which they are computed."""
    zeros = []
    for t in tensors:
        xp = array_namespace(t)
        dtype = getattr(xp, compute_dtype_name(dtype_name(t.dtype)))
        zeros.append(xp.zeros(tuple(t.shape), dtype=dtype, device=device(t)))
    return tuple(zeros)


def update(param: Array, change: Array) -> Array:
    """Return ``param - change``, computed in the dtype of the change, in the dtype of the parameter."""
    return array_namespace(param).astype(to_compute_dtype(param) - change, param.dtype, copy=False)
