"""What the Array API standard lacks: bit-casts, bytes, dtype names, exact roots and divisions, checks, tracing.

All code that depends on the library of an array is in this module; the rest of the core is one code path for NumPy,
torch, CuPy, JAX and any other library of the standard.
"""

import hashlib
import importlib
import math
import operator
import struct
import sys
from collections.abc import Callable, Mapping, Sequence, ValuesView
from functools import cache, lru_cache
from itertools import accumulate, pairwise
from typing import Any, TypeGuard

import array_api_compat
from array_api_compat import is_array_api_obj, is_jax_array, is_numpy_array, is_torch_array

from qcomp.core.errors import NonFiniteError
from qcomp.core.numeric.array_type import Array, Kind, Mutable, Namespace

__all__ = [
    "LIMIT",
    "TINY",
    "Array",
    "Kind",
    "all_below",
    "array_namespace",
    "as_count",
    "as_list",
    "bitcast",
    "bytes_of",
    "concat",
    "cut_like",
    "detached",
    "device",
    "digest",
    "divide",
    "dtype_name",
    "exact_bounds",
    "flat",
    "flush",
    "flushes_subnormals",
    "from_bytes_of",
    "from_host_bytes",
    "host_bytes",
    "host_numbers",
    "in_numpy",
    "is_mutable",
    "is_on_host",
    "is_read_late",
    "is_traced",
    "itemsize",
    "kind_of_array",
    "loop",
    "matmul",
    "one_of_each_kind",
    "out_of_range",
    "require_apart",
    "require_below",
    "require_dense",
    "require_like",
    "shaped_like",
    "sharing",
    "sqrt",
    "to_compute_dtype",
    "truncate_last_bit",
    "vectors_of",
    "write_into",
]


TINY = 2.0**-126
"""The smallest normal float32: smaller magnitudes count as zero (`flush`)."""

LIMIT = 2.0**100
"""Magnitudes from this one on are refused like infinities; below it, no sum, range or norm of a bucket overflows."""

_EXACT_FLOAT64 = 2.0**-1022, 2.0**996
"""The same two bounds for float64 values sent exactly. Below the second, sums of 2^28 values are finite."""

_ITEMSIZE = {
    **dict.fromkeys(("bool", "int8", "uint8"), 1),
    **dict.fromkeys(("int16", "uint16", "float16", "bfloat16"), 2),
    **dict.fromkeys(("int32", "uint32", "float32"), 4),
    **dict.fromkeys(("int64", "uint64", "float64", "complex64"), 8),
    "complex128": 16,
}

if sys.byteorder != "little":
    raise ImportError(f"qcomp's wire format is little-endian; this machine is {sys.byteorder}-endian")


_OLDEST = "2023.12"
"""The oldest version of the array API standard that has all functions that qcomp uses, such as `maximum`."""
_namespaces: dict[object, Namespace] = {}


def array_namespace(*arrays: Array) -> Namespace:
    """Return the library of arrays, as array-api-compat does, but cached: a lookup would dominate small calls."""
    kind: object = type(arrays[0])
    if len(arrays) > 1 and any(type(x) is not kind for x in arrays):
        return array_api_compat.array_namespace(*arrays)
    found = _namespaces.get(kind)
    if found is None:
        if (reason := _why_not(kind)) is not None:
            raise TypeError(f"an array is a {kind_of_array(arrays[0])}, {reason}")
        found = array_api_compat.array_namespace(*arrays)
        version = getattr(found, "__array_api_version__", _OLDEST)
        if version < _OLDEST:
            raise TypeError(
                f"an array is a {kind_of_array(arrays[0])}, whose library follows version {version} of the array API "
                f"standard; expected {_OLDEST} or newer: install a newer release of that library"
            )
        _namespaces[kind] = found
    return found


def device(x: Array) -> Any:
    """Return the device of an array, None while a compiler traces.

    A tracer of JAX has no device, and asking it for one is slow: it searches its whole program to explain the error.
    """
    kind: object = type(x)
    if _library(kind) in ("numpy", "torch"):
        found: Any = x
        return found.device
    return None if is_traced(x) else array_api_compat.device(x)


@cache
def _library(kind: Any) -> str:
    """Return the name of the package of a class."""
    library: str = kind.__module__.partition(".")[0]
    return library


def require_dense(x: Any, argument: str) -> None:
    """Raise TypeError unless x is a dense, unsharded array without a mask."""
    kind: object = type(x)
    if (reason := _why_not(kind)) is not None:
        raise TypeError(f"{argument} is a {kind_of_array(x)}, {reason}")
    if hasattr(kind, "is_sparse") and (x.is_sparse or getattr(x, "is_sparse_csr", False)):
        raise TypeError(f"{argument} is sparse; expected a dense array, such as {argument}.to_dense()")
    if not is_array_api_obj(x):
        values = f"{argument}.values()" if isinstance(x, Mapping) else argument
        expected = f"list({values})" if isinstance(x, Mapping | ValuesView) else "an array"
        raise TypeError(f"{argument} is a {kind_of_array(x)}; expected {expected}")


def as_list(x: Array | Sequence[Array]) -> list[Array]:
    """Return one or several tensors as a list; raise TypeError unless all are dense arrays."""
    several = isinstance(x, list | tuple)
    tensors: list[Any] = list(x) if several else [x]
    if not tensors:
        raise ValueError("x is empty; expected an array, or a sequence of at least one array")
    for index, tensor in one_of_each_kind(tensors):
        require_dense(tensor, f"x[{index}]" if several else "x")
    return tensors


def require_apart(values: Any, argument: str) -> None:
    """Raise ValueError if arrays of a list share memory, since a write to one array would change the other."""
    if isinstance(values, list | tuple) and is_mutable(values[0]) and (pair := sharing(values)):
        raise ValueError(
            f"{argument}[{pair[0]}] and {argument}[{pair[1]}] share memory that may be written to; expected separate "
            "memory, or donate=False and overwrite=False"
        )


def sharing(arrays: Sequence[Array]) -> tuple[int, int] | None:
    """Return the numbers of two arrays that share memory, or None.

    The gaps between the elements of an array may belong to a different array. So only the first byte counts of an array
    with gaps.
    """
    spans = sorted((*_span(x), number) for number, x in enumerate(arrays) if 0 not in x.shape)
    for (_, stop, one), (start, _, other) in pairwise(spans):
        if start < stop:
            return min(one, other), max(one, other)
    return None


def _span(x: Any) -> tuple[int, int]:
    """Return the addresses at which an array begins and ends; if it has gaps, only its first byte counts."""
    if hasattr(type(x), "data_ptr"):  # torch
        size, start, strides = x.itemsize, x.data_ptr(), [step * x.itemsize for step in x.stride()]
    elif hasattr(type(x), "strides") and hasattr(x, "__array_interface__"):  # NumPy
        size, start, strides = x.itemsize, x.__array_interface__["data"][0], x.strides
    else:
        return id(x), id(x) + 1
    length = size + sum(step * (n - 1) for step, n in zip(strides, x.shape, strict=True))
    return start, start + (length if length == size * math.prod(x.shape) else 1)


def one_of_each_kind(tensors: Sequence[Any]) -> list[tuple[int, Any]]:
    """Return the first tensor of each class, dtype and layout, with its number; each tensor is like one of these.

    To check every one of many small tensors would take longer than their arithmetic.
    """
    kinds: dict[object, tuple[int, Any]] = {}
    for index, tensor in enumerate(tensors):
        layout = tensor.layout if hasattr(type(tensor), "layout") else None  # asks the class, see `device`
        kind = (type(tensor), getattr(tensor, "dtype", None), layout)
        if kind not in kinds:
            kinds[kind] = index, tensor
    return list(kinds.values())


@cache
def _why_not(kind: Any) -> str | None:
    """Return why arrays of a class are refused, or None."""
    if hasattr(kind, "device_mesh") and hasattr(kind, "placements"):
        return (
            "of which each rank holds a shard; expected whole arrays: compress what FSDP2 exchanges with "
            "qcomp.torch.fsdp.compress and keep its optimizer, or use DistributedDataParallel"
        )
    if any(
        c.__module__.startswith("numpy") and c.__name__ in ("MaskedArray", "matrix") for c in kind.__mro__
    ):
        return "whose operators differ from an array's; expected a numpy.ndarray, such as numpy.asarray(x)"
    if hasattr(kind, "compute"):  # dask, which computes a buffer again at each use
        return "whose values are computed later; expected an array that has its values, such as x.compute()"
    return None


def kind_of_array(x: Any) -> str:
    """Return the library and the class of an array, such as ``"torch.Tensor"``."""
    kind: Any = type(x)
    library = _library(kind)
    return kind.__name__ if library == "builtins" else f"{library}.{kind.__name__}"


@lru_cache(None, typed=True)  # NumPy builds the name each time; the dtypes of two libraries may be equal
def dtype_name(dtype: Any) -> str:
    """Return the name of a dtype of any library, such as ``"float32"``."""
    if isinstance(dtype, type):  # numpy.float32 itself, not numpy.dtype("float32")
        return dtype.__name__
    if not getattr(dtype, "isnative", True):  # its bytes would be read as other values
        raise TypeError(
            f"an array has dtype {dtype.str!r}, in another byte order; expected the byte order of this machine, such "
            f"as x.astype({dtype.name!r})"
        )
    return getattr(dtype, "name", None) or str(dtype).rsplit(".", maxsplit=1)[-1]


def itemsize(name: str) -> int:
    """Return the bytes of an element of the dtype with this name; raise TypeError if it has no portable bytes."""
    if name not in _ITEMSIZE:
        raise TypeError(f"an array has dtype {name}; expected one of {', '.join(_ITEMSIZE)}")
    return _ITEMSIZE[name]


@cache
def compute_dtype_name(name: str, *, argument: str = "x") -> str:
    """Return the dtype in which values of dtype ``name`` are computed: float64 for float64, else float32."""
    if name == "float64":
        return "float64"
    if name in ("float32", "float16", "bfloat16"):
        return "float32"
    raise TypeError(f"{argument} has dtype {name}; expected float64, float32, float16 or bfloat16")


def vectors_of(tensors: Sequence[Array]) -> list[Array]:
    """Return tensors as vectors in the dtype in which they are computed; see `flat` and `to_compute_dtype`."""
    computed = [x if _is_computed(x.dtype) else to_compute_dtype(x) for x in tensors]
    return [x if x.ndim == 1 else flat(x) for x in computed]


@lru_cache(None, typed=True)
def _is_computed(dtype: Any) -> bool:
    name = dtype_name(dtype)
    return compute_dtype_name(name) == name


def to_compute_dtype(x: Array, *, argument: str = "x") -> Array:
    """Return x in the dtype in which it is computed."""
    name = dtype_name(x.dtype)
    compute = compute_dtype_name(name, argument=argument)
    if compute == name:
        return x
    xp = array_namespace(x)
    return xp.astype(x, getattr(xp, compute))


def detached(tensors: Sequence[Any]) -> list[Array]:
    """Return tensors detached from torch's automatic differentiation, with pending negations carried out.

    The memory of a torch tensor may hold the negatives of its values, as for ``z.conj().imag``. Torch then returns
    neither its bits nor a NumPy view.
    """
    if not hasattr(type(tensors[0]), "detach"):
        return list(tensors)
    return [x.detach().resolve_neg() if x.requires_grad or x.is_neg() else x for x in tensors]


def bitcast(x: Array, dtype: Any) -> Array:
    """Return the bits of x read as another dtype; the last axis grows or shrinks with the item size.

    The Array API standard has no bit-cast. Arrays of NumPy, CuPy, torch and JAX have ``view``; arrays without ``view``
    are read through NumPy.
    """
    if x.dtype == dtype:
        return x
    if not hasattr(x, "view"):
        values = in_numpy(x).copy().view(dtype_name(dtype))
        return array_namespace(x).asarray(values, device=device(x))
    bits: Array
    try:
        bits = x.view(dtype)
    except (RuntimeError, ValueError):
        # x has gaps, or in torch an address that is no multiple of the item size.
        dense: Any = array_namespace(x).concat([x, x[:0]])
        bits = dense.view(dtype)
    return bits


def in_numpy(x: Any) -> Any:
    """Return an array that is in CPU memory as a NumPy array, by whichever protocol its library has.

    The result may share memory with x, and may be read-only.
    """
    has_dlpack_alone = hasattr(x, "__dlpack__") and not hasattr(x, "__array__")
    return _numpy().from_dlpack(x) if has_dlpack_alone else _numpy().asarray(x)


@cache
def _numpy() -> Any:  # imported here, since `import qcomp` loads no array library
    return importlib.import_module("array_api_compat.numpy")


def bytes_of(x: Array) -> Array:
    """Return the bytes of an array as a one-dimensional uint8 array, little-endian."""
    return bitcast(flat(x), array_namespace(x).uint8)


def from_bytes_of(data: Array, name: str) -> Array:
    """Return a one-dimensional array of the named dtype from its bytes, the inverse of `bytes_of`.

    Raises
    ------
    TypeError
        If JAX has only dtypes of 32 bits.
    """
    if name == "uint8":
        return data
    xp = array_namespace(data)
    if itemsize(name) == 8 and is_jax_array(data) and not sys.modules["jax"].config.jax_enable_x64:
        raise TypeError(f"the bytes hold {name}, which JAX supports only in 64-bit mode: set jax_enable_x64")
    return bitcast(data, getattr(xp, name))


def host_bytes(data: Array) -> bytes:
    """Return the elements of an array on any device as bytes."""
    if dtype_name(data.dtype) != "uint8":
        data = bytes_of(data)  # as bits, since torch cannot export bfloat16
    to_host = getattr(data, "cpu", None) or getattr(data, "get", None)  # torch, CuPy
    host = data if to_host is None else to_host()
    return bytes((host if hasattr(host, "tobytes") else in_numpy(host)).tobytes())


def digest(x: Array) -> str:
    """Return a 128-bit digest in hexadecimal, equal for equal elements in any library and layout."""
    return hashlib.sha256(host_bytes(x)).hexdigest()[:32]


def from_host_bytes(data: bytes | bytearray | memoryview, like: Array) -> Array:
    """Return bytes as a one-dimensional uint8 array, in the library and on the device of ``like``."""
    xp = array_namespace(like)
    # An empty list, since not every library accepts an empty buffer.
    return xp.asarray(bytearray(data) if data else [], dtype=xp.uint8, device=device(like))


def concat(parts: list[Array]) -> Array:
    """Concatenate arrays along their first axis; a single array is returned unchanged."""
    return parts[0] if len(parts) == 1 else array_namespace(parts[0]).concat(parts)


def cut_like(joined: Array, sizes: Sequence[int]) -> list[Array]:
    """Return the parts of a flat vector that consists of tensors of these sizes."""
    return [joined[start:stop] for start, stop in pairwise(accumulate(sizes, initial=0))]


def exact_bounds(x: Array) -> tuple[float, float]:
    """Return the bounds that replace `TINY` and `LIMIT` for values like x that are sent exactly: wider in float64."""
    return _EXACT_FLOAT64 if dtype_name(x.dtype) == "float64" else (TINY, LIMIT)


def flush(x: Array, *, exact: bool = False) -> Array:
    """Return x with -0 and all magnitudes below 2^-126 (2^-1022 for float64 with ``exact``) replaced by +0.

    Some devices and compilers flush subnormals and others do not. After this, the results of all agree.
    """
    xp = array_namespace(x)
    tiny = exact_bounds(x)[0] if exact else TINY
    return xp.where(xp.abs(x) < tiny, xp.zeros_like(x), x)


def flushes_subnormals() -> bool:
    """Return whether this thread's processor takes subnormal numbers for 0. Imported libraries may change this mode."""
    return math.ldexp(1.0, -1060) * 1.0 == 0


def divide(x: Array, divisor: float | Array) -> Array:
    """Return x / divisor, correctly rounded under every compiler.

    XLA, and libraries on devices, turn a division by a number, or by an array that is broadcast, into a multiplication
    by the reciprocal, which rounds twice. So for them, the divisor is written as if it differed between elements (it
    does not, since x == x except for NaN).
    """
    xp = array_namespace(x)
    is_number, is_of_jax = isinstance(divisor, int | float), xp.__name__ == "jax.numpy"
    if not is_of_jax and is_on_host(x):
        return x / (float(divisor) if is_number else divisor)
    if is_number:
        divisor = xp.asarray(float(divisor), dtype=x.dtype, device=device(x))
    elif not isinstance(divisor, int | float) and is_traced(divisor):
        divisor = xp.astype(divisor, x.dtype)
    divisor = xp.where(x == x, divisor, xp.ones_like(x))  # noqa: PLR0124
    return _rounded_once(operator.truediv, x, divisor) if is_of_jax else x / divisor


def sqrt(x: Array) -> Array:
    """Return the correctly rounded square root.

    NumPy's root is correctly rounded in both precisions. Torch's root on the CPU is not, so NumPy computes it there.
    Elsewhere, rounding a float64 root of a float32 number gives the correctly rounded float32 root, even if the float64
    root is off by an ulp: the exact root differs from every rounding boundary by at least 2^-51 of itself.
    """
    xp = array_namespace(x)
    if is_numpy_array(x):
        return xp.asarray(xp.sqrt(x))
    if is_torch_array(x) and x.device.type == "cpu":
        host, root = x.detach().numpy(), xp.empty_like(x, requires_grad=False)
        array_namespace(host).sqrt(host, out=in_numpy(root))
        return root
    if xp.__name__ == "jax.numpy":
        return _rounded_once(xp.sqrt, x)
    info = xp.__array_namespace_info__()
    if "float64" not in info.dtypes(kind="real floating"):
        return xp.sqrt(x)
    return xp.astype(xp.sqrt(xp.astype(x, xp.float64)), x.dtype)


def _rounded_once(function: Callable[..., Array], *arrays: Any) -> Array:
    """Return the quotient or root of JAX arrays, correctly rounded.

    On GPUs, XLA's quotients and roots of float32 are off by an ulp. In float64 they are correct, and so is their
    rounding to float32, since the exact results differ from every rounding boundary of float32 by at least 2^-51 of
    themselves. `reduce_precision` makes XLA round, since it drops a conversion to float32 before a conversion to
    float64. Subnormal results become zero.
    """
    if arrays[0].dtype != "float32" or _compiles_for_host(arrays[0]):
        return function(*arrays)
    jax = sys.modules["jax"]
    with jax.enable_x64(True):
        wide = function(*(x.astype("float64") for x in arrays))
        rounded: Array = jax.lax.reduce_precision(wide, exponent_bits=8, mantissa_bits=23).astype("float32")
        return rounded


def _compiles_for_host(x: Any) -> bool:
    """Return whether XLA computes with a JAX array on a CPU. If there is a GPU, a traced array may be on it."""
    platforms = {sys.modules["jax"].default_backend()} if is_traced(x) else {d.platform for d in x.devices()}
    return platforms == {"cpu"}


def matmul(a: Array, b: Array) -> Array:
    """Return the product of matrices, with all bits of float32; on GPUs and TPUs, JAX drops some by default."""
    xp = array_namespace(a)
    return xp.matmul(a, b, precision="highest") if xp.__name__ == "jax.numpy" else xp.matmul(a, b)


def truncate_last_bit(x: Array) -> Array:
    """Return x with the last bit of its significand cleared.

    A compiler cannot fuse a product that goes through this integer operation with a following addition into one
    multiply-add, so ``truncate_last_bit(a * b) + c`` gives the same bits everywhere.
    """
    xp = array_namespace(x)
    integer = xp.int64 if dtype_name(x.dtype) == "float64" else xp.int32
    mask = xp.asarray(-2, dtype=integer, device=device(x))
    return bitcast(xp.bitwise_and(bitcast(x, integer), mask), x.dtype)


def is_traced(x: object) -> bool:
    """Return whether x has no value yet, because a compiler is tracing the computation."""
    jax = sys.modules.get("jax")
    return jax is not None and isinstance(x, jax.core.Tracer)


def as_count(number: Any) -> Any:
    """Return a count as an int; a traced count stays as it is."""
    return number if is_traced(number) else int(number)


def loop(turns: int, turn: Callable[[Any, Any], Any], values: tuple[Array, ...]) -> tuple[Array, ...]:
    """Return the values after ``turn(number, values)`` for each number below ``turns``, for traced arrays.

    XLA computes cheap operations again for each use of their results. So turns that are written out in a row may take
    minutes to compile, and far longer to run; a loop computes each turn once. ``turn`` must keep shapes and dtypes.
    """
    lax = sys.modules["jax"].lax
    # Five turns in a row, since a GPU writes the values to memory between two iterations.
    looped: tuple[Array, ...] = lax.fori_loop(0, turns, turn, values, unroll=5)
    return looped


def require_below(x: Array, limit: float, what: str) -> None:
    """Raise `NonFiniteError` unless all magnitudes are below a limit; traced values are not checked."""
    if is_traced(x) or x.shape[0] == 0:
        return
    if not all_below(x, limit):
        xp = array_namespace(x)
        largest = math.nan if bool(xp.any(xp.isnan(x))) else float(xp.max(xp.abs(x)))
        raise NonFiniteError(
            f"x cannot be compressed by {what}: it holds {largest:.6g}; expected below {limit:.6g}"
        )


def all_below(x: Array, limit: float) -> Array:
    """Return whether all magnitudes are below a limit, as an array of shape (), without waiting for the device.

    Every element is compared, since on the CPU XLA's maximum of a long vector drops NaN.
    """
    xp = array_namespace(x)
    return xp.all(xp.abs(x) < limit)


def is_read_late(x: Array) -> bool:
    """Return whether reading a value of x may have to wait for a device."""
    kind: object = type(x)
    return _library(kind) in ("cupy", "jax", "jaxlib", "torch")


def out_of_range(x: Array, limit: float) -> Array:
    """Return whether a magnitude of a vector is not below a limit, as a uint8 of shape (1,), without reading it."""
    xp = array_namespace(x)
    if x.shape[0] == 0:
        return xp.zeros((1,), dtype=xp.uint8, device=device(x))
    return xp.reshape(xp.astype(~all_below(x, limit), xp.uint8), (1,))


def host_numbers(x: Array) -> list[float]:
    """Return the elements of a float32 or float64 array as numbers, in one read."""
    data = host_bytes(x)
    code = "d" if dtype_name(x.dtype) == "float64" else "f"
    return list(struct.unpack(f"<{len(data) // struct.calcsize(code)}{code}", data))


def is_mutable(x: Array) -> TypeGuard[Mutable]:
    """Return whether the elements of x can be written to."""
    flags = getattr(x, "flags", None) if hasattr(type(x), "flags") else None
    if flags is not None:  # NumPy, and CuPy, whose arrays are always writeable
        return bool(getattr(flags, "writeable", True))
    return hasattr(type(x), "__setitem__") and array_namespace(x).__name__ != "jax.numpy"


def is_on_host(x: Array) -> bool:
    """Return whether x is in the memory of a CPU."""
    return str(device(x)).lower().startswith("cpu")


def flat(x: Array) -> Array:
    """Return x as a vector, without a copy if its memory allows that."""
    return x if x.ndim == 1 else array_namespace(x).reshape(x, (-1,))


def shaped_like(vectors: Sequence[Array], tensors: Sequence[Array]) -> list[Array]:
    """Return flat vectors in the shapes and dtypes of tensors."""
    return [
        x
        if x.shape == t.shape and x.dtype == t.dtype
        else array_namespace(t).astype(array_namespace(t).reshape(x, t.shape), t.dtype, copy=False)
        for t, x in zip(tensors, vectors, strict=True)
    ]


def require_like(out: Array, value: Array, *, argument: str = "out") -> None:
    """Raise ValueError unless ``out`` has as many elements as ``value``, and the same dtype."""
    if math.prod(out.shape) != math.prod(value.shape) or out.dtype != value.dtype:
        raise ValueError(
            f"{argument} has shape {tuple(out.shape)} and dtype {dtype_name(out.dtype)}; "
            f"expected {tuple(value.shape)} and {dtype_name(value.dtype)}"
        )


def write_into(out: Array, value: Array, *, argument: str = "out") -> Array:
    """Write ``value`` into the buffer ``out``, which must have the same size and dtype, and return ``out``."""
    require_like(out, value, argument=argument)
    buffer: Any = out
    try:
        buffer[...] = array_namespace(value).reshape(value, out.shape)
    except TypeError as error:
        raise TypeError(f"{argument} is an immutable {type(out).__name__}; pass None") from error
    return out
