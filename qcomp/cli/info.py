"""``qcomp info``: which kernels would run for which array, and why."""

import os
import platform
from collections.abc import Callable, Iterator
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any, NamedTuple

from qcomp.backends import explain
from qcomp.backends.registry import BUILT_IN, UnavailableError, load, names
from qcomp.core.arrays import Array
from qcomp.version import __version__

__all__ = ["info"]

_DTYPES = ("float32", "float16", "bfloat16", "float64")


class _Row(NamedTuple):
    """A kind of array: what runs for each dtype, and why."""

    arrays: str
    kernels: tuple[str, ...]
    reason: str


def info() -> str:
    """Return what ``qcomp info`` prints.

    Examples
    --------
    >>> print(info())  # doctest: +ELLIPSIS
    qcomp ...
    """
    setting = os.environ.get("QCOMP_KERNELS")
    lines = [
        f"qcomp {__version__}, Python {platform.python_version()}, {os.cpu_count()} cores",
        f"kernels: {setting or 'auto'} (QCOMP_KERNELS is {'set' if setting else 'not set'})",
        "",
        *_table([_Row("arrays", _DTYPES, ""), *_rows()]),
        "",
        *map(_describe_set, names()),
    ]
    return "\n".join(lines)


def _rows() -> Iterator[_Row]:
    for library, device, make in _kinds():
        title = f"{library} on {device}"
        try:
            arrays = {name: make(name) for name in _DTYPES}
        except ImportError:
            yield _Row(title, ("-",) * len(_DTYPES), f"{library} is not installed")
        except Exception as error:  # what a driver raises is its own affair, and the answer
            yield _Row(title, ("-",) * len(_DTYPES), str(error).partition("\n")[0])
        else:
            choices = {name: explain(x) for name, x in arrays.items() if x is not None}
            found = tuple(choices[name].kernels if name in choices else "-" for name in _DTYPES)
            yield _Row(title, found, choices["float32"].reason)


def _kinds() -> Iterator[tuple[str, str, Callable[[str], Array | None]]]:
    """Yield libraries and devices, and what makes an array there, None for a dtype that there is not."""
    yield "numpy", "cpu", _of_numpy
    yield "torch", "cpu", lambda name: _of_torch(name, "cpu")
    yield "torch", "cuda", lambda name: _of_torch(name, "cuda")
    yield "cupy", "cuda", _of_cupy
    yield "jax", "its device", _of_jax


def _of_numpy(name: str) -> Array | None:
    numpy = import_module("numpy")
    if name == "bfloat16":
        try:
            return numpy.zeros(1, dtype=import_module("ml_dtypes").bfloat16)
        except ImportError:
            return None
    return numpy.zeros(1, dtype=name)


def _of_torch(name: str, device: str) -> Array:
    torch = import_module("torch")
    if device == "cuda" and not torch.cuda.is_available():
        raise RuntimeError("torch sees no CUDA device")
    return torch.zeros(1, dtype=getattr(torch, name), device=device)


def _of_cupy(name: str) -> Array | None:
    cupy = import_module("cupy")
    if not cupy.cuda.is_available():
        raise RuntimeError("cupy sees no CUDA device")
    return None if name == "bfloat16" else cupy.zeros(1, dtype=name)


def _of_jax(name: str) -> Array | None:
    jax: Any = import_module("jax")
    if name == "float64" and not jax.config.jax_enable_x64:
        return None
    return jax.numpy.zeros(1, dtype=name)


def _table(rows: list[_Row]) -> Iterator[str]:
    cells = [(row.arrays, *row.kernels) for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for row, texts in zip(rows, cells, strict=True):
        aligned = "  ".join(text.ljust(width) for text, width in zip(texts, widths, strict=True))
        yield f"{aligned}  {row.reason}".rstrip()


def _describe_set(name: str) -> str:
    if name == "pure":
        return "pure: the definition, for every array"
    try:
        load(name)
    except UnavailableError as error:
        return f"{name}: not available; {error}"
    return f"{name}: available{_version_of(name)}"


def _version_of(name: str) -> str:
    try:
        return f", {name} {version(name)}" if name in BUILT_IN else ""
    except PackageNotFoundError:  # installed under another name, as cupy is
        return ""
