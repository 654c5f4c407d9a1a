"""Laws of a compressor's memory: a call writes only to given buffers, and results share no memory with anything.

The layout of an array in memory does not change results.
"""

import math
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any

import numpy as np

from qcomp.core import feedback
from qcomp.core.numeric.arrays import array_namespace, compute_dtype_name, dtype_name, is_mutable
from qcomp.core.numeric.random import Key
from qcomp.testing.compressor_case import Case
from qcomp.testing.inputs import flushed, vector
from qcomp.testing.libraries import Vector, has_dtype, library_name, to_numpy

_KEY = Key(seed=1, step=4, rank=2)


def _sizes(case: Case) -> tuple[int, ...]:
    bucket = min(case.compressor.traits.bucket_size, 3000)
    return (1, bucket, 2 * bucket, 2 * bucket + 5, 20_000)


def _dtypes(case: Case) -> list[str]:
    return [name for name in ("float32", "float64", "float16", "bfloat16") if has_dtype(case.xp, name)]


def _layouts(case: Case, x: Vector, dtype: str) -> Iterator[tuple[str, Any, Any]]:
    """Yield the name of each layout, an array with the elements of x in it, and the whole memory around the array."""
    plain = case.array(x, dtype)
    yield "a separate array", plain, plain
    doubled = case.array(np.repeat(x, 2), dtype)
    yield "every other element of an array", doubled[::2], doubled
    padded = case.array(np.pad(x, (3, 5)), dtype)
    yield "a part of an array", padded[3 : 3 + x.size], padded
    if library_name(case.xp) in ("numpy", "read_only_numpy", "array_api_strict"):
        backwards = case.array(x[::-1].copy(), dtype)
        yield "an array read backwards", backwards[::-1], backwards


def _matrices(case: Case, x: Vector, dtype: str) -> Iterator[tuple[str, Any, Any]]:
    """Yield a matrix in C order, and one in Fortran order, with the same elements."""
    rows = x[: x.size // 3 * 3].reshape(3, -1)
    c_order, transposed = case.array(rows.copy(), dtype), case.array(rows.T.copy(), dtype)
    yield "a matrix", c_order, c_order
    yield "a matrix in Fortran order", transposed.T, transposed


def _tensors(case: Case, x: Vector, dtype: str) -> Iterator[tuple[str, Any, Any]]:
    """Yield a tensor of four axes in C order, and one with the channels last in memory, with the same elements."""
    tensor = x[: min(x.size, 1500) // 30 * 30].reshape(-1, 5, 2, 3)
    c_order, last = case.array(tensor.copy(), dtype), case.array(tensor.transpose(0, 2, 3, 1).copy(), dtype)
    yield "a tensor of four axes", c_order, c_order
    yield "a tensor with the channels last", array_namespace(last).permute_dims(last, (0, 3, 1, 2)), last


def _kinds(case: Case) -> tuple[Callable[[Case, Vector, str], Iterator[tuple[str, Any, Any]]], ...]:
    """Return the functions that lay out an array; fewer for JAX, which compiles for every shape and has no views."""
    few = (_layouts, _matrices)
    return few if library_name(case.xp) == "jax.numpy" else (*few, _tensors)


def any_layout(case: Case) -> None:
    """A view, a matrix in Fortran order, channels last or a reversed array compresses like a contiguous copy."""
    if case.jit:
        return  # JAX arrays are never views
    for dtype in _dtypes(case):
        for size in _sizes(case):
            x = vector("gaussian", size, 25)
            for layouts in _kinds(case):
                _require_alike(case, layouts(case, x, dtype), f"{size} elements of {dtype}")


def _require_alike(case: Case, layouts: Iterator[tuple[str, Any, Any]], what: str) -> None:
    expected: list[bytes] = []
    for name, array, _ in layouts:
        payload = case.compressor.compress(array, key=_KEY)
        decoded = to_numpy(case.compressor.decompress(payload, like=array)).tobytes()
        got = [to_numpy(payload.data).tobytes(), decoded]
        expected = expected or got
        assert got[0] == expected[0], f"{name}, {what}, gives another payload"
        assert got[1] == expected[1], f"{name}, {what}, decompresses to something else"


def pure(case: Case) -> None:
    """The vector (in any layout and dtype), the residual, the payload and ``like`` are not modified."""
    if case.jit:
        return  # traced arrays cannot be modified
    for dtype in _dtypes(case):
        for size in _sizes(case):
            x = vector("gaussian", size, 26)
            for name, array, memory in chain(*(layouts(case, x, dtype) for layouts in _kinds(case))):
                _require_untouched(case, array, memory, f"{name}, {size} elements of {dtype}")
        x = vector("subnormal", 300, 26)
        for name, array, memory in _layouts(case, x, dtype):
            _require_untouched(case, array, memory, f"{name}, 300 subnormal elements of {dtype}")


def _require_untouched(case: Case, array: Any, memory: Any, what: str) -> None:
    before = to_numpy(memory).tobytes()
    payload = case.compressor.compress(array, key=_KEY)
    assert to_numpy(memory).tobytes() == before, f"compressing changed the vector ({what})"
    data = to_numpy(payload.data).tobytes()
    case.compressor.decompress(payload, like=array)
    assert to_numpy(payload.data).tobytes() == data, f"decompressing changed the payload ({what})"
    assert to_numpy(memory).tobytes() == before, f"decompressing changed `like` ({what})"
    name = compute_dtype_name(dtype_name(array.dtype))
    residual = case.array(flushed(np.ones(tuple(array.shape)) * 0.5), name)
    old = to_numpy(residual).tobytes()
    feedback.compensated(case.compressor, array, residual, key=_KEY)
    assert to_numpy(memory).tobytes() == before, f"compressing with feedback changed the vector ({what})"
    assert to_numpy(residual).tobytes() == old, (
        f"compressing changed a residual that was not donated ({what})"
    )


def _overwrite(array: Any) -> None:
    array[...] = 1


def nothing_is_shared(case: Case) -> None:
    """Vector, payload and results share no memory: writing to one does not change the others."""
    if case.jit:
        return
    for dtype in _dtypes(case):
        for shape in (*((size,) for size in _sizes(case)), (30, 50), (4, 5, 2, 3)):
            if not is_mutable(case.array(np.zeros(1, dtype=np.float32))):
                return
            _require_own_memory(case, shape, dtype)


def _require_own_memory(case: Case, shape: tuple[int, ...], dtype: str) -> None:
    def array(seed: int) -> Any:
        return case.array(vector("gaussian", math.prod(shape), seed).reshape(shape), dtype)

    what = f"shape {shape}, {dtype}"
    x, like = array(27), array(27)
    payload = case.compressor.compress(x, key=_KEY)
    data = to_numpy(payload.data).tobytes()
    later = case.compressor.compress(array(28), key=_KEY)
    assert to_numpy(payload.data).tobytes() == data, f"the next payload is written over the last ({what})"
    _overwrite(x)
    assert to_numpy(payload.data).tobytes() == data, f"the payload shares memory with the vector ({what})"
    first = case.compressor.decompress(payload, like=like)
    values = to_numpy(first).tobytes()
    second = case.compressor.decompress(payload, like=like)
    case.compressor.decompress(later, like=like)
    assert to_numpy(first).tobytes() == values, f"the next result is written over the last ({what})"
    _overwrite(first)
    assert to_numpy(payload.data).tobytes() == data, f"a result shares memory with the payload ({what})"
    assert to_numpy(second).tobytes() == values, f"a result shares memory with the next ({what})"
    _overwrite(payload.data)
    assert to_numpy(second).tobytes() == values, f"a result shares memory with the payload ({what})"


def results_into_buffers(case: Case) -> None:
    """With ``out``, `decompress` puts its result into the buffer; `add` adds to the total. Nothing else changes."""
    if case.jit:
        return
    for dtype in _dtypes(case):
        for shape in (*((size,) for size in _sizes(case)), (6, 10)):
            x = case.array(vector("gaussian", math.prod(shape), 29).reshape(shape), dtype)
            payload = case.compressor.compress(x, key=_KEY)
            expected = case.compressor.decompress(payload, like=x)
            total = case.array(vector("uniform", math.prod(shape), 30).reshape(shape), dtype)
            what = f"shape {shape}, {dtype}"
            _require_filled(case, payload, x, expected, what)
            _require_added(case, payload, total, expected, what)
    _require_refused(case)


def _rooms(shape: tuple[int, ...]) -> dict[str, tuple[tuple[int, ...], Callable[[Any], Any]]]:
    """Return by name the shape of a larger array, and a function that returns the buffer in it."""
    n = shape[0]
    if len(shape) == 1:
        return {
            "a buffer": ((2 * n + 6,), lambda room: room[3 : 3 + n]),
            "a strided buffer": ((2 * n + 6,), lambda room: room[3 : 3 + 2 * n : 2]),
        }
    return {
        "a matrix in Fortran order": (shape[::-1], lambda room: room.T),
        "a strided matrix": ((2 * n, 2 * shape[1]), lambda room: room[::2, ::2]),
    }


def _require_filled(case: Case, payload: Any, x: Any, expected: Any, what: str) -> None:
    values, like = to_numpy(expected).tobytes(), to_numpy(x).tobytes()
    for name, (shape, part) in _rooms(tuple(x.shape)).items():
        room = case.array(np.full(shape, 7.0, dtype=np.float32), dtype_name(x.dtype))
        if not is_mutable(room):
            return
        out = part(room)
        got = case.compressor.decompress(payload, like=x, out=out)
        assert got is out, f"decompress(out=...) does not return out ({name}, {what})"
        assert to_numpy(out).tobytes() == values, f"in {name}, the result differs ({what})"
        outside = np.full(shape, fill_value=True)
        part(outside)[...] = False
        assert np.all(to_numpy(room)[outside] == 7), f"around {name}, memory changed ({what})"
        assert to_numpy(x).tobytes() == like, f"with out=, `like` is written to ({what})"


def _require_added(case: Case, payload: Any, total: Any, expected: Any, what: str) -> None:
    before, wanted = to_numpy(total).tobytes(), to_numpy(total + expected).tobytes()
    totals = {"an array": total}
    if is_mutable(total):
        for name, (shape, part) in _rooms(tuple(total.shape)).items():
            totals[name] = part(case.array(np.zeros(shape, dtype=np.float32), dtype_name(total.dtype)))
            totals[name][...] = total
    for name, buffer in totals.items():
        added = case.compressor.add(payload, buffer)
        assert to_numpy(added).tobytes() == wanted, (
            f"`add` is not total + decompress(payload) ({name}, {what})"
        )
        after = wanted if is_mutable(total) else before
        assert to_numpy(buffer).tobytes() == after, (
            f"`add` {'did not use' if is_mutable(total) else 'wrote to'} the buffer of total ({name}, {what})"
        )


def _require_refused(case: Case) -> None:
    """Check that buffers of another size or dtype are refused."""
    x = case.array(vector("gaussian", 9, 30))
    payload = case.compressor.compress(x, key=_KEY)
    wrong: dict[str, Callable[[], Any]] = {
        "of another size": lambda: case.array(np.zeros(8, dtype=np.float32))
    }
    if has_dtype(case.xp, "float64"):
        wrong["of another dtype"] = lambda: case.array(np.zeros(9))
    for what, make in wrong.items():
        out = make()
        if not is_mutable(out):
            return
        try:
            case.compressor.decompress(payload, like=x, out=out)
        except (ValueError, TypeError):
            continue
        raise AssertionError(f"out {what} was accepted without an error")
