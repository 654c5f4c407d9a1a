"""How the kernels are compiled: strict IEEE arithmetic, without the GIL, cached on disk, at their first call."""

from __future__ import annotations

import functools
import hashlib
import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import numba
import numpy as np
from numba import extending
from numba.core import cgutils
from numpy.typing import NDArray

__all__ = ["Bytes", "Codes", "Floats", "Halves", "Kernel", "Longs", "Words", "borrow", "inline", "kernel"]

Floats = NDArray[np.float32]
Words = NDArray[np.uint32]
Halves = NDArray[np.uint16]
Bytes = NDArray[np.uint8]
Codes = Bytes | Halves
"""One to an element: bytes where a code has up to 8 bits."""
Longs = NDArray[np.int64]

_Function = TypeVar("_Function", bound=Callable[..., Any])

# No fastmath: it would contract, reassociate and flush. "numpy": a division by zero is not an exception.
_OPTIONS = {"nogil": True, "error_model": "numpy"}

_compiling = threading.RLock()
_log = logging.getLogger("qcomp")


def inline(function: _Function) -> _Function:
    """Compile a function that kernels call; it becomes a part of each of them.

    Most are one loop: LLVM vectorises a loop whose arrays are its own arguments, and gives up where it must
    prove for a whole bucket's worth of code that they do not overlap.
    """
    compiled: _Function = numba.njit(**_OPTIONS)(function)
    return compiled


@extending.intrinsic
def borrow(typing_context: Any, array: Any) -> Any:  # noqa: ARG001 - numba's protocol
    """Return an argument of a kernel as an array that counts no references.

    Every slice of an array costs two atomic operations to keep its owner alive, in all a tenth of an encoder's
    time. The arguments of a kernel are kept alive by its caller; what a kernel allocates itself must not be borrowed.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        struct = context.make_array(signature.args[0])(context, builder, arguments[0])
        struct.meminfo = cgutils.get_null_value(struct.meminfo.type)
        struct.parent = cgutils.get_null_value(struct.parent.type)
        return struct._getvalue()

    return array(array), generate


class Kernel:
    """A function with one fixed signature, compiled or read from the cache at its first call.

    One signature, whose input arrays are declared read-only, serves read-only and writable arrays alike; numba
    by itself would compile a version for every combination.

    Parameters
    ----------
    function : callable
        In the subset of Python that numba compiles.
    signature : str
        In numba's notation, with ``f32_in``, ``f32``, ``u8_in``, ``u8`` and the like for one-dimensional arrays.

    Notes
    -----
    Compiled code goes where numba puts it: ``NUMBA_CACHE_DIR``, else ``__pycache__`` beside the source, else, where
    that cannot be written, the user's cache directory. Where none of them can be written, every process
    compiles anew. numba alone would not notice a change of a function that a kernel inlines from another file; so
    the names of its cache files, which it takes from ``__qualname__``, have a digest of all files of this package.
    """

    def __init__(self, function: Callable[..., Any], signature: str) -> None:
        self.function = function
        self.signature = signature
        self._compiled: Callable[..., Any] | None = None

    def __call__(self, *arguments: Any) -> Any:
        """Call the compiled function."""
        return (self._compiled or self.compile())(*arguments)

    @property
    def compiled(self) -> Callable[..., Any]:
        """The compiled function, for callers that call it many times."""
        return self._compiled or self.compile()

    def compile(self) -> Callable[..., Any]:
        """Return the compiled function."""
        with _compiling:
            if self._compiled is None:
                signature = eval(self.signature, _types())
                self.function.__qualname__ = f"{self.function.__name__}_{_digest_of_sources()}"
                try:
                    unfinished = numba.njit(cache=True, **_OPTIONS)(self.function)
                    _tell_once(unfinished.stats.cache_path, self.function.__qualname__)
                    self._compiled = numba.njit(signature, cache=True, **_OPTIONS)(self.function)
                except RuntimeError as error:
                    if "locator" not in str(error):
                        raise
                    self._compiled = numba.njit(signature, **_OPTIONS)(self.function)
            assert self._compiled is not None
            return self._compiled


def kernel(signature: str) -> Callable[[Callable[..., Any]], Kernel]:
    """Make a function a `Kernel` of this signature."""
    return lambda function: Kernel(function, signature)


_told = False


def _tell_once(cache: str, name: str) -> None:
    """Say, once in a process, that kernels are being compiled, if this one is not in the cache."""
    global _told  # noqa: PLW0603
    if not _told and not any(Path(cache).glob(f"*{name}-*.nbi")):
        _told = True
        _log.warning("compiling kernels, which takes some seconds for each, once: they are kept in %s", cache)


@functools.cache
def _digest_of_sources() -> str:
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def _types() -> dict[str, Any]:
    types = numba.types
    return {
        "f32_in": types.Array(types.float32, 1, "C", readonly=True),
        "f32": types.Array(types.float32, 1, "C"),
        "u8_in": types.Array(types.uint8, 1, "C", readonly=True),
        "u8": types.Array(types.uint8, 1, "C"),
        "u16_in": types.Array(types.uint16, 1, "C", readonly=True),
        "u16": types.Array(types.uint16, 1, "C"),
        "u32": types.Array(types.uint32, 1, "C"),
        "i64": types.Array(types.int64, 1, "C"),
        "table": types.Array(types.int64, 2, "C"),
        "float32": types.float32,
        "int64": types.int64,
        "uint32": types.uint32,
        "boolean": types.boolean,
        "void": types.void,
        "triple": types.UniTuple(types.int64, 3),
    }
