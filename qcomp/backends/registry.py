"""The kernel sets that there are: where they are, what they need, and for which arrays they are the best."""

from __future__ import annotations

import functools
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import Any, NamedTuple

from qcomp.core.kernels import Coders, KernelSet

__all__ = ["BUILT_IN", "Entry", "UnavailableError", "load", "load_coders", "names"]


class Entry(NamedTuple):
    """A set of this package."""

    module: str
    """Has the set as ``KERNELS``."""
    extra: str
    """Installs what the set needs."""
    arrays: frozenset[tuple[str, str]]
    """The libraries and kinds of device of the arrays for which it is chosen automatically."""


BUILT_IN = {
    "numba": Entry(
        "qcomp.backends.numba_cpu.kernel_set", "numba", frozenset({("numpy", "cpu"), ("torch", "cpu")})
    ),
    "triton": Entry("qcomp.backends.torch_triton.kernel_set", "triton", frozenset({("torch", "cuda")})),
    "cupy": Entry("qcomp.backends.cupy_cuda.kernel_set", "cuda", frozenset({("cupy", "cuda")})),
    "jax": Entry(
        "qcomp.backends.jax_xla", "jax", frozenset({("jax", "cpu"), ("jax", "cuda"), ("jax", "tpu")})
    ),
}
"""The sets of this package. Others come in by the entry point group ``qcomp.kernels``, and are used when asked for."""


CODERS = "qcomp.backends.numba_cpu.coding_set"
"""Has the compiled loops for host bytes as ``CODERS``."""


class UnavailableError(ImportError):
    """A set is there, but what it needs is not installed."""


def names() -> list[str]:
    """Return the names of all sets, the pure version first."""
    return ["pure", *BUILT_IN, *sorted(_foreign())]


@functools.cache
def load(name: str) -> KernelSet:
    """Return the set of a name.

    Raises
    ------
    UnavailableError
        If what it needs is not installed; the message says how to install it.
    """
    if name in BUILT_IN:
        kernels: KernelSet = _imported(name, BUILT_IN[name].module).KERNELS
        return kernels
    found: KernelSet = _foreign()[name].load()
    return found


def load_coders() -> Coders:
    """Return the compiled loops for host bytes.

    Raises
    ------
    UnavailableError
        If numba is not installed.
    """
    coders: Coders = _imported("numba", CODERS).CODERS
    return coders


def _imported(name: str, module: str) -> Any:
    try:
        return import_module(module)
    except ImportError as error:
        hint = f"pip install 'qcomp[{BUILT_IN[name].extra}]'"
        raise UnavailableError(f"the kernels {name!r} need {error.name or error}: {hint}") from error


def _foreign() -> dict[str, EntryPoint]:
    """Return the sets that other packages have announced."""
    return {entry.name: entry for entry in entry_points(group="qcomp.kernels")}
