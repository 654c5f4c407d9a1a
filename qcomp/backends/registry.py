"""The table of kernel sets: their modules, what they need, and the arrays for which they are selected."""

from __future__ import annotations

import builtins
import functools
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple

from qcomp.core.entry_points import offered
from qcomp.core.kernels import Coders, KernelSet

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint


class BuiltIn(NamedTuple):
    """A kernel set of this package."""

    module: str
    """The module that defines it as ``KERNELS``."""
    extra: str
    """The extra of this package that installs its dependencies."""
    arrays: frozenset[tuple[str, str]]
    """The libraries and kinds of device for which the kernel set is selected automatically."""


BUILT_IN = {
    "numba": BuiltIn(
        "qcomp.backends.numba_cpu.kernel_set", "numba", frozenset({("numpy", "cpu"), ("torch", "cpu")})
    ),
    "triton": BuiltIn("qcomp.backends.torch_triton.kernel_set", "triton", frozenset({("torch", "cuda")})),
    "cupy": BuiltIn("qcomp.backends.cupy_cuda.kernel_set", "cuda", frozenset({("cupy", "cuda")})),
    "jax": BuiltIn(
        "qcomp.backends.jax_xla", "jax", frozenset({("jax", "cpu"), ("jax", "cuda"), ("jax", "tpu")})
    ),
}
"""This package's kernel sets. The sets of other packages, found by the entry points ``qcomp.kernels``, are used only on
request."""


CODERS = "qcomp.backends.numba_cpu.coding_set"
"""The module that defines the compiled coders as ``CODERS``."""


class UnavailableError(ImportError):
    """A kernel set exists, but its dependencies are not installed."""


def names() -> list[str]:
    """Return the names of all kernel sets, the pure version first."""
    return ["pure", *BUILT_IN, *sorted(_foreign())]


@functools.cache
def load(name: str) -> KernelSet:
    """Return the kernel set with a name; raises UnavailableError, which says how to install what is missing."""
    if name in BUILT_IN:
        kernels: KernelSet = _imported(name, BUILT_IN[name].module).KERNELS
        return kernels
    found: KernelSet = _foreign()[name].load()
    return found


def load_coders() -> Coders:
    """Return the compiled coders; raises UnavailableError if numba is not installed."""
    coders: Coders = _imported("numba", CODERS).CODERS
    return coders


def _imported(name: str, module: str) -> Any:
    try:
        with _named_print():
            return import_module(module)
    except ImportError as error:
        hint = f"pip install 'qcomp[{BUILT_IN[name].extra}]'"
        needed = error.name or str(error).removeprefix("qcomp needs ")
        raise UnavailableError(f"the kernels {name!r} need {needed}: {hint}") from error


@contextmanager
def _named_print() -> Iterator[None]:
    """If a script has replaced ``print``, give the replacement the name and module of the builtin for a while.

    Scripts replace ``print`` so that only rank 0 prints. During its import, numba looks builtins up by name and module.
    """
    given: Any = builtins.print

    def stand_in(*args: Any, **options: Any) -> None:
        given(*args, **options)

    stand_in.__module__, stand_in.__name__ = "builtins", "print"
    if getattr(given, "__module__", None) != "builtins":
        builtins.print = stand_in
    try:
        yield
    finally:
        builtins.print = given


def _foreign() -> dict[str, EntryPoint]:
    """Return the entry points of other packages' kernel sets."""
    return {
        name: point
        for name, point in offered("kernel set", {}).items()
        if name != "pure" and name not in BUILT_IN
    }
