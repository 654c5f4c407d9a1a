"""Checks and converts the parameters and gradients that callers pass to optimizers."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from qcomp.core.numeric.arrays import (
    Array,
    array_namespace,
    compute_dtype_name,
    detached,
    device,
    dtype_name,
    is_traced,
    kind_of_array,
    one_of_each_kind,
    require_dense,
    to_compute_dtype,
    write_into,
)
from qcomp.core.numeric.cache_blocks import in_blocks
from qcomp.core.primitives import empty_like


class _Checked(list[Array]):
    """Tensors that `as_tensors` or `as_gradients` has checked, and need not check again in the same step."""


def as_tensors(values: Any, argument: str) -> list[Array]:
    """Return an array or a sequence of arrays as a list, detached from automatic differentiation.

    Raises TypeError if a value is not a dense array, or the values mix libraries or precisions; ValueError if there is
    none.
    """
    if type(values) is _Checked:
        return values
    several = isinstance(values, list | tuple | Iterator)
    tensors = list(values) if several else [values]
    if not tensors:
        raise ValueError(f"{argument} is empty; expected an array, or a sequence of at least one array")
    different = one_of_each_kind(tensors)
    for index, tensor in different:
        require_dense(tensor, f"{argument}[{index}]" if several else argument)
    names = set()
    for index, tensor in different:
        if index and array_namespace(tensor).__name__ != array_namespace(tensors[0]).__name__:
            raise TypeError(
                f"{argument}[0] is a {kind_of_array(tensors[0])}, {argument}[{index}] a "
                f"{kind_of_array(tensor)}; expected arrays of one library"
            )
        name = f"{argument}[{index}]" if several else argument
        names.add(compute_dtype_name(dtype_name(tensor.dtype), argument=name))
    if len(names) > 1:
        raise TypeError(f"{argument} mixes float64 with other dtypes; expected one precision of arithmetic")
    return _Checked(detached(tensors))


def as_given(tensors: Sequence[Array], values: Any) -> Any:
    """Return a list of tensors if ``values``, an argument of `as_tensors`, was a sequence; else the one tensor."""
    # NumPy's arithmetic turns arrays of shape () into scalars.
    arrays = [t if hasattr(t, "__setitem__") else array_namespace(t).asarray(t) for t in tensors]
    return arrays if isinstance(values, list | tuple | Iterator) else arrays[0]


def as_gradients(grads: Any, params: Sequence[Array], names: Sequence[str]) -> list[Array]:
    """Return the gradients of some parameters as a list, detached from automatic differentiation.

    Raises TypeError or ValueError, which names the first gradient that differs from its parameter in shape, library or
    precision.
    """
    several = isinstance(grads, list | tuple | Iterator)
    given = list(grads) if several else [grads]
    if not several and grads is not None:
        require_dense(grads, "grads")
    if len(given) != len(params):
        raise ValueError(f"grads has {len(given)} arrays; params has {len(params)}")
    for index, g in one_of_each_kind(given):
        if g is None:
            raise ValueError(
                f"grads[{index}] is None: the parameter {names[index]!r} has no gradient in this step; pass zeros as "
                "its gradient, or leave a parameter that never has a gradient out of params in init and step"
            )
        require_dense(g, f"grads[{index}]")
    for index, (g, p) in enumerate(zip(given, params, strict=True)):
        if g.shape != p.shape and tuple(g.shape) != tuple(p.shape):
            raise ValueError(
                f"grads[{index}], the gradient of {names[index]!r}, has shape {tuple(g.shape)}; "
                f"expected {tuple(p.shape)}"
            )
    for index, (g, p) in enumerate(zip(given, params, strict=True)):
        if g.dtype is not p.dtype or type(g) is not type(p):
            _require_alike(g, p, f"grads[{index}]", names[index])
    require_whole(given, "grads", params[0])
    return _Checked(detached(given))


def require_whole(tensors: Sequence[Array], argument: str, like: Array) -> None:
    """Raise TypeError unless arrays are on the device of ``like``, and none is sharded; ignore traced arrays."""
    is_of_jax = hasattr(like, "sharding")
    there = _place(like, "the first parameter") if is_of_jax else getattr(like, "device", None)
    for index, x in enumerate(tensors):
        here = _place(x, f"{argument}[{index}]") if is_of_jax else getattr(x, "device", None)
        if here != there and here is not None and there is not None:
            raise TypeError(
                f"{argument}[{index}] of shape {tuple(x.shape)} is on {here}; expected it on {there}, as the first "
                "parameter: move it there, or make an optimizer for the parameters of each device"
            )


def _place(x: Any, what: str) -> Any:
    """Return the devices that each hold a whole JAX array; None if JAX itself moves the array where it is needed."""
    if is_traced(x) or not getattr(x, "committed", True):
        return None
    if not x.sharding.is_fully_replicated:
        raise TypeError(
            f"{what} of shape {tuple(x.shape)} is cut over {len(x.sharding.device_set)} devices by {x.sharding}; "
            "expected an array on one device or replicated, such as jax.device_put(x, NamedSharding(mesh, "
            "PartitionSpec())); inside compiled programs, average with qcomp.jax.MeshMean"
        )
    if not x.sharding.is_fully_addressable:
        raise TypeError(
            f"{what} of shape {tuple(x.shape)} is also on devices of other processes, by {x.sharding}; expected an "
            "array of this process, such as x.addressable_data(0); inside compiled programs, average with "
            "qcomp.jax.MeshMean"
        )
    return x.sharding.device_set


def _require_alike(g: Array, p: Array, argument: str, name: str) -> None:
    """Raise TypeError unless a gradient has the library and the precision of its parameter."""
    which = f"{argument}, the gradient of {name!r},"
    if array_namespace(g) is not array_namespace(p):
        raise TypeError(f"{which} is a {kind_of_array(g)}; expected a {kind_of_array(p)}, as the parameter")
    computed = compute_dtype_name(dtype_name(g.dtype), argument=argument)
    expected = compute_dtype_name(dtype_name(p.dtype))
    if computed != expected:
        raise TypeError(
            f"{which} has dtype {dtype_name(g.dtype)}, and the parameter has {dtype_name(p.dtype)}; expected a "
            f"gradient that is computed in {expected}"
        )


def zeros_like(tensors: Sequence[Array]) -> tuple[Array, ...]:
    """Return zeros with the shapes and compute dtypes of these tensors, in C order."""
    zeros = []
    for t in tensors:
        xp = array_namespace(t)
        dtype = getattr(xp, compute_dtype_name(dtype_name(t.dtype)))
        zeros.append(xp.zeros(tuple(t.shape), dtype=dtype, device=device(t)))
    return tuple(zeros)


def update(param: Array, change: Array) -> Array:
    """Compute ``param - change`` in the dtype of the change, and return it in the dtype of the parameter."""
    return array_namespace(param).astype(to_compute_dtype(param) - change, param.dtype, copy=False)


def copy(x: Array) -> Array:
    """Return a copy of an array in new memory."""
    room = empty_like(x)
    # JAX copies only if it is told to; callers may give away the memory of their arrays.
    return array_namespace(x).astype(x, x.dtype, copy=True) if room is None else write_into(room, x)


def each_in_blocks(function: Callable[..., Array], *tensors: Sequence[Array]) -> list[Array]:
    """Return ``function(*arrays)`` for each of several tensors, computed block by block; see `in_blocks`.

    The result of the function has the dtype of its first argument.
    """

    def results(*parts: Array) -> tuple[Array, ...]:
        return (function(*parts),)

    return [in_blocks(results, arrays, [empty_like(arrays[0])])[0] for arrays in zip(*tensors, strict=True)]
