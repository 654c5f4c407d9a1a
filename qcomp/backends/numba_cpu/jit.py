"""Compiles kernels at their first call, with strict IEEE arithmetic, without the GIL, and cached on disk."""

from __future__ import annotations

import functools
import hashlib
import logging
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import numba
import numpy as np
from llvmlite import ir
from numba import extending
from numpy.typing import NDArray

from qcomp.backends.private_folder import private_folder
from qcomp.private_names.numba import cache_of, use_cache, value_of

if sys.platform != "win32":
    import fcntl

Floats = NDArray[np.float32]
"""All floats of a call are float32 or all are float64. Annotations name float32 for both."""
Words = NDArray[np.uint32]
Halves = NDArray[np.uint16]
Bytes = NDArray[np.uint8]
Codes = Bytes | Halves
"""One code per element; bytes for codes of up to 8 bits."""
Longs = NDArray[np.int64]

_Function = TypeVar("_Function", bound=Callable[..., Any])

# No fastmath, which would fuse, reassociate and flush operations. With "numpy" a division by zero does not raise.
_OPTIONS = {"nogil": True, "error_model": "numpy"}

_compiling = threading.RLock()
_log = logging.getLogger("qcomp")


def inline(function: _Function) -> _Function:
    """Compile a function that becomes a part of each kernel that calls it.

    Most of these functions contain one loop. LLVM vectorises a loop whose arrays are arguments of the function, but
    gives up if it must prove for all code of a bucket that the arrays do not overlap.
    """
    compiled: _Function = numba.njit(**_OPTIONS)(function)
    return compiled


def inline_always(function: _Function) -> _Function:
    """Compile a function that is always inlined into its kernel: calls would take a tenth of a bucket's time."""
    compiled: _Function = numba.njit(**_OPTIONS, forceinline=True)(function)
    return compiled


@extending.intrinsic
def borrow(typing_context: Any, value: Any) -> Any:  # noqa: ARG001 - numba's protocol
    """Return an argument of a kernel, an array or a tuple of several, without reference counting.

    Every slice of an array costs two atomic operations to keep its owner alive, in total a tenth of an encoder's time.
    The caller keeps a kernel's arguments alive. Arrays that a kernel allocates itself must not be borrowed.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return _borrowed(context, builder, signature.args[0], arguments[0])

    return value(value), generate


def _borrowed(context: Any, builder: Any, kind: Any, value: Any) -> Any:
    if isinstance(kind, numba.types.BaseTuple):
        for index, of_part in enumerate(kind):
            part = _borrowed(context, builder, of_part, builder.extract_value(value, index))
            value = builder.insert_value(value, part, index)
    elif isinstance(kind, numba.types.Array):
        struct = context.make_array(kind)(context, builder, value)
        struct.meminfo = ir.Constant(struct.meminfo.type, None)
        struct.parent = ir.Constant(struct.parent.type, None)
        value = value_of(struct)
    return value


class Kernel:
    """A function with one fixed signature, compiled or read from the cache at its first call.

    The signature declares input arrays as read-only, and accepts both read-only and writable ones. Without it numba
    would compile a version for every combination.

    The function is written in the subset of Python that numba compiles, and the signature in numba's notation, with
    ``f32_in``, ``f32``, ``u8_in``, ``u8`` and the like for one-dimensional arrays. ``kind`` distinguishes the version
    for float64 in the cache.

    The version for float64 is compiled at its first call. In its signature, float64 takes the place of float32.

    Compiled code is stored where ``NUMBA_CACHE_DIR`` or ``NUMBA_CACHE_LOCATOR_CLASSES`` say, else in a
    `private_folder`. If that folder is refused, every process compiles again. numba would miss a change of a function
    that a kernel inlines from another file. So the names of its cache files, taken from ``__qualname__``, contain a
    digest of all files of this package, as does the name of the folder.
    """

    def __init__(self, function: Callable[..., Any], signature: str, kind: str = "") -> None:
        self.function = function
        self.signature = signature
        self._kind = kind
        self._compiled: Callable[..., Any] | None = None

    def __call__(self, *arguments: Any) -> Any:
        """Call the compiled function."""
        return self.compiled(*arguments)

    @functools.cache  # noqa: B019 - kernels are never freed
    def of(self, dtype: np.dtype[Any]) -> Kernel:
        """Return the version for arrays of float32 or float64."""
        if dtype.itemsize == 4:
            return self
        signature = self.signature.replace("f32", "f64").replace("float32", "float64")
        return Kernel(self.function, signature, "_float64")

    @functools.cached_property
    def compiled(self) -> Callable[..., Any]:
        """The compiled function, for callers that call it many times."""
        return self.compile()

    def compile(self) -> Callable[..., Any]:
        """Return the compiled function."""
        with _compiling:
            if self._compiled is None:
                signature = eval(self.signature, _types())
                self.function.__qualname__ = f"{self.function.__name__}{self._kind}_{_digest_of_sources()}"
                dispatcher = numba.njit(**_OPTIONS)(self.function)
                cache = _cache_of(self.function)
                if cache is None:
                    dispatcher.compile(signature)
                else:
                    use_cache(dispatcher, cache)
                    with _alone(cache.cache_path, self.function.__qualname__):
                        _tell_once(cache.cache_path, self.function.__qualname__)
                        dispatcher.compile(signature)
                dispatcher.disable_compile()
                self._compiled = dispatcher
            assert self._compiled is not None
            return self._compiled


def kernel(signature: str, name: str | None = None) -> Callable[[Callable[..., Any]], Kernel]:
    """Turn a function into a `Kernel` with this signature. Functions made by the same ``def`` need different names."""

    def named(function: Callable[..., Any]) -> Kernel:
        function.__name__ = name or function.__name__
        return Kernel(function, signature)

    return named


class _Locator:
    """Gives numba the place of a compiled kernel on disk, and a stamp that shows when it is out of date."""

    def __init__(self, function: Callable[..., Any], folder: Path) -> None:
        self._py_file = function.__code__.co_filename  # numba names it in warnings
        self._line = function.__code__.co_firstlineno
        self._folder = folder

    @classmethod
    def from_function(cls, function: Callable[..., Any], _: str) -> _Locator | None:
        folder = _folder()
        return None if folder is None else cls(function, folder)

    def ensure_cache_path(self) -> None:
        pass

    def get_cache_path(self) -> str:
        return str(self._folder)

    def get_source_stamp(self) -> str:
        return _digest_of_sources() + hashlib.sha256(Path(self._py_file).read_bytes()).hexdigest()

    def get_disambiguator(self) -> str:
        return str(self._line)


def _cache_of(function: Callable[..., Any]) -> Any:
    """Return numba's cache of one function: in the user's folder if set, else in a private one; None without either."""
    is_set = numba.config.CACHE_DIR or getattr(numba.config, "CACHE_LOCATOR_CLASSES", "")
    try:
        return cache_of(function, None if is_set else _Locator)
    except RuntimeError as error:
        if "locator" not in str(error):
            raise
        return None


@functools.cache
def _folder() -> Path | None:
    """Return the private folder for these kernels and this version of numba, or None if it cannot be made."""
    try:
        return private_folder(f"numba-{numba.__version__}-{_digest_of_sources()}")
    except (OSError, RuntimeError) as error:  # RuntimeError: Path.home() finds no home
        _log.warning(
            "compiled kernels cannot be stored, so every process compiles them again: %s; set NUMBA_CACHE_DIR to a "
            "folder of your own",
            error,
        )
        return None


@contextmanager
def _alone(cache: str, name: str) -> Iterator[None]:
    """Wait while another process compiles a kernel, to find it in the cache afterwards: ranks often start together.

    On a disk without locks, each process compiles.
    """
    with ExitStack() as stack:
        with suppress(OSError):
            file = stack.enter_context(Path(cache, f"{name}.lock").open("w"))
            if sys.platform != "win32":
                fcntl.flock(file, fcntl.LOCK_EX)
        yield


_told = False


def _tell_once(cache: str, name: str) -> None:
    """Log once per process that kernels are being compiled, if this kernel is not in the cache."""
    global _told  # noqa: PLW0603
    if not _told and not any(Path(cache).glob(f"*{name}-*.nbi")):
        _told = True
        _log.warning("compiling kernels, which takes some seconds for each; they are cached in %s", cache)


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
        "f64_in": types.Array(types.float64, 1, "C", readonly=True),
        "f64": types.Array(types.float64, 1, "C"),
        "u8_in": types.Array(types.uint8, 1, "C", readonly=True),
        "u8": types.Array(types.uint8, 1, "C"),
        "u16_in": types.Array(types.uint16, 1, "C", readonly=True),
        "u16": types.Array(types.uint16, 1, "C"),
        "u32": types.Array(types.uint32, 1, "C"),
        "i64": types.Array(types.int64, 1, "C"),
        "table": types.Array(types.int64, 2, "C"),
        "float32": types.float32,
        "float64": types.float64,
        "int64": types.int64,
        "uint32": types.uint32,
        "boolean": types.boolean,
        "Tuple": types.Tuple,
        "void": types.void,
        "triple": types.UniTuple(types.int64, 3),
    }
