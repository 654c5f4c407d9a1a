"""Tables with the addresses and sizes of vectors, so that one kernel call works on many vectors, however small.

The buckets of all vectors of a table are numbered in order. A kernel call works on a run of these numbers, so threads
share a table evenly, however its vectors differ in size.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from functools import cache
from operator import attrgetter
from types import NoneType
from typing import Any, NamedTuple

import numba
import numpy as np
from numba import extending, types

from qcomp.backends.numba_cpu.jit import Bytes, Floats, Longs, inline, kernel
from qcomp.backends.numba_cpu.primitives import Weights, as_float
from qcomp.core.kernels import Blend
from qcomp.core.numeric.arrays import dtype_name

VALUES, RESIDUAL, RESIDUAL_OUT, MOMENTUM, DATA = range(5)
"""The columns of addresses in `ToEncode.rows`."""
BUCKET = 7
WEIGHTS = slice(8, 12)
"""The columns of the first bucket, and of the weights of a blend as the bits of float64."""
OUT = 0
"""The column of the addresses of vectors in `Decoded.rows`."""


class ToEncode(NamedTuple):
    """Vectors to compress."""

    rows: Longs
    """Shape (n, 12): the addresses of the values, of the old and the new residual, of the momentum that the values are
    blended into, and of the payload, 0 where there is none; the number of values; the bytes of the payload; the number
    of the first bucket, with which the draws begin; and the `weights_of` the blend, meaningless without a momentum."""
    ends: Longs
    """For each vector, the number of the bucket after its last one; the last entry is the number of all buckets."""
    dtype: np.dtype[Any]
    """The dtype of all vectors."""


class Decoded(NamedTuple):
    """Vectors to decompress, each the sum of one or several payloads."""

    rows: Longs
    """Shape (n, 3): the address of the vector, the number of values, and the bytes of a payload."""
    payloads: Longs
    """Shape (n, ranks): the addresses of the payloads."""
    ends: Longs
    """For each vector, the number of the bucket after its last one; the last entry is the number of all buckets."""
    dtype: np.dtype[Any]
    """The dtype of all vectors."""


def ends_of(sizes: Sequence[int], bucket_size: int) -> Longs:
    """Return, for each vector, the number of the bucket after its last one."""
    return np.cumsum([-(-size // bucket_size) for size in sizes], dtype=np.int64)


def encoded_vectors(
    x: Floats, bucket_size: int, data: Bytes, blend: tuple[Floats, Blend] | None, bucket: int = 0
) -> ToEncode:
    """Return a table that holds one vector to compress and the buffer ``data`` for its payload.

    ``blend`` begins with a flat view of the momentum.
    """
    momentum = 0 if blend is None else address(blend[0])
    end = -(-x.size // bucket_size)
    # One array for both tables, since making an array takes as long as compressing a hundred elements.
    row = np.array(
        (address(x), 0, 0, momentum, address(data), x.size, data.size, bucket, 0, 0, 0, 0, end),
        dtype=np.int64,
    )
    if blend is not None:
        row[WEIGHTS] = weights_of([blend[1]])[0]
    return ToEncode(row[np.newaxis, :-1], row[-1:], x.dtype)


def weights_of(blends: Sequence[Blend]) -> Longs:
    """Return the four `Weights` of each blend, as the bits of float64 numbers."""
    _, *numbers = zip(*blends, strict=True)
    rows = np.array(numbers, dtype=np.float64)
    rows[1] *= 1 - rows[0]
    return np.ascontiguousarray(rows.T).view(np.int64)


def decoded_vectors(payloads: Sequence[Bytes], bucket_size: int, out: Floats) -> Decoded:
    """Return a table that holds one vector, ``out``, and the payloads that are added up in it."""
    end = -(-out.size // bucket_size)
    row = np.array((address(out), out.size, payloads[0].size, end, *map(address, payloads)), dtype=np.int64)
    return Decoded(row[np.newaxis, :3], row[np.newaxis, 4:], row[3:4], out.dtype)


def address(x: Floats | Bytes) -> int:
    """Return the address of a flat array of floats or uint8, ten times as fast as NumPy does."""
    at: int = (_address_of_bytes if x.itemsize == 1 else _address_of_floats.of(x.dtype)).compiled(x)
    return at


def addresses(
    arrays: Sequence[Any],
    dtype: np.dtype[Any],
    numbers: Sequence[int] | None = None,
    *,
    written: bool = False,
) -> Longs | None:
    """Return the addresses of the arrays at the indices ``numbers``, by default of all. They belong to one library.

    Returns None if one of them is not a contiguous array of this dtype in the memory of the CPU, or is read-only and
    will be written to.
    """
    if numbers is not None and len(numbers) < len(arrays):
        arrays = [arrays[number] for number in numbers]
    if arrays and is_of_torch(type(arrays[0])):
        of_torch = arrays[0].dtype if computed_dtype(arrays[0].dtype) == dtype else None
        found = [
            x.data_ptr()
            for x in arrays
            if x.dtype is of_torch and x.is_cpu and x.is_contiguous() and not x.requires_grad
        ]
        return np.array(found, dtype=np.int64) if len(found) == len(arrays) else None
    if written and not all(map(_WRITEABLE, arrays)):
        return None
    try:
        if {*map(_NDIM, arrays)} != {1}:
            arrays = list(map(_flat, arrays))
        return np.array([*map(_address_of_floats.of(dtype).compiled, arrays)], dtype=np.int64)
    except TypeError:  # from a kernel, which accepts no other arrays, or from `_flat`
        return None


def table_of(
    read: Sequence[Sequence[Any]], written: Sequence[Sequence[Any]], dtype: np.dtype[Any]
) -> tuple[Longs, list[int]] | None:
    """Return a table with a row for each tensor, which has the addresses of its arrays, and the sizes of the tensors.

    Returns None if kernels cannot access all arrays, or if the arrays of a tensor differ in shape.
    """
    shapes = list(map(_SHAPE, read[0]))
    found: dict[int, Any] = {}
    for is_written, kinds in ((True, written), (False, read)):
        for arrays in kinds:
            if id(arrays) not in found:  # a step in place reads what it writes
                if list(map(_SHAPE, arrays)) != shapes:
                    return None
                found[id(arrays)] = addresses(arrays, dtype, written=is_written)
    if NoneType in map(type, found.values()):
        return None
    columns = [found[id(arrays)] for arrays in (*read, *written)]
    return np.stack(columns, axis=1), list(map(math.prod, shapes))


def addresses_of_bytes(arrays: Sequence[Any]) -> Longs | None:
    """Return the addresses of uint8 arrays of one library; None if one is not contiguous in the memory of the CPU."""
    if is_of_torch(type(arrays[0])):
        found = [x.data_ptr() for x in arrays if x.is_cpu and x.is_contiguous()]
        return np.array(found, dtype=np.int64) if len(found) == len(arrays) else None
    if not all(map(_CONTIGUOUS, arrays)):
        return None
    return np.array([*map(_address_of_bytes.compiled, arrays)], dtype=np.int64)


def _is_of_torch(kind: Any) -> bool:
    return "torch" in sys.modules and issubclass(kind, sys.modules["torch"].Tensor)


is_of_torch: Callable[[Any], bool] = cache(_is_of_torch)
"""Returns whether a class is one of torch's tensors."""


def _computed_dtype(dtype: Any) -> np.dtype[Any] | None:
    name = dtype_name(dtype)
    return np.dtype(name) if name in ("float32", "float64") else None


computed_dtype: Callable[[Any], np.dtype[Any] | None] = cache(_computed_dtype)
"""Returns the NumPy dtype that matches a library's dtype, or None if the kernels do not compute in it."""


_NDIM, _SHAPE, _CONTIGUOUS = attrgetter("ndim"), attrgetter("shape"), attrgetter("flags.c_contiguous")
_WRITEABLE = attrgetter("flags.writeable")


def _flat(x: Any) -> Floats:
    if not isinstance(x, np.ndarray) or not x.flags.c_contiguous:
        raise TypeError
    return x.reshape(-1)


def _address(x: Floats | Bytes) -> int:
    at: int = x.ctypes.data
    return at


_address_of_floats, _address_of_bytes = (kernel(f"int64({kind})")(_address) for kind in ("f32_in", "u8_in"))


@extending.intrinsic
def _pointer(typing_context: Any, address: Any, like: Any) -> Any:  # noqa: ARG001 - numba's protocol
    """Return an address as a pointer to elements like those of an array."""
    return types.CPointer(like.dtype)(types.int64, like), _as_pointer


@extending.intrinsic
def _byte_pointer(typing_context: Any, address: Any) -> Any:  # noqa: ARG001 - numba's protocol
    return types.CPointer(types.uint8)(types.int64), _as_pointer


def _as_pointer(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
    return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))


@inline
def floats_at(address: int, size: int, like: Floats) -> Floats:
    """Return an array at an address, with the dtype of another array. It does not keep the memory alive."""
    array: Floats = numba.carray(_pointer(address, like), (size,))
    return array


@inline
def _bytes_at(address: int, size: int) -> Bytes:
    array: Bytes = numba.carray(_byte_pointer(address), (size,))
    return array


@inline
def run_of(ends: Longs, number: int, first: int, last: int) -> tuple[int, int, int]:
    """Return the vector from ``number`` on that holds bucket ``first``, and the range of its buckets up to ``last``."""
    while ends[number] <= first:
        number += 1
    begin = ends[number - 1] if number > 0 else 0
    return number, first - begin, min(last, ends[number]) - begin


@inline
def input_vectors(rows: Longs, number: int, like: Floats) -> tuple[Floats, Floats, Floats, Floats, Bytes]:
    """Return a vector's values, old and new residual, momentum and payload; an empty array stands for a missing one."""
    size = rows[number, 5]
    return (
        floats_at(rows[number, 0], size, like),
        floats_at(rows[number, 1], size if rows[number, 1] != 0 else 0, like),
        floats_at(rows[number, 2], size if rows[number, 2] != 0 else 0, like),
        floats_at(rows[number, 3], size if rows[number, 3] != 0 else 0, like),
        _bytes_at(rows[number, 4], rows[number, 6]),
    )


@inline
def input_weights(rows: Longs, number: int, like: Floats) -> Weights:
    """Return the weights of a vector's blend, rounded to the dtype of another array."""
    kind = like.dtype.type
    return (
        kind(as_float(rows[number, 8])),
        kind(as_float(rows[number, 9])),
        kind(as_float(rows[number, 10])),
        kind(as_float(rows[number, 11])),
    )


@inline
def output_vectors(
    rows: Longs, payloads: Longs, number: int, rank: int, like: Floats
) -> tuple[Bytes, Floats]:
    """Return a rank's payload for a vector, and the vector."""
    payload = _bytes_at(payloads[number, rank], rows[number, 2])
    return payload, floats_at(rows[number, 0], rows[number, 1], like)
