"""Kernel sets: faster ways to compress and decompress, which return the same bytes as the pure version.

>>> import qcomp
>>> with qcomp.backends.use("pure"):
...     pass
"""

from contextlib import AbstractContextManager
from importlib import import_module

from qcomp.core.kernels import KernelSet, use_kernels

__all__ = ["KernelSet", "names", "use"]

_SETS = {"numba": ("qcomp.backends.numba_cpu.kernel_set", "numba")}
"""The module of each set, and the extra that installs what it needs."""


def names() -> list[str]:
    """Return the names that `use` takes."""
    return ["pure", *_SETS]


def use(name: str) -> AbstractContextManager[None]:
    """Use a set of kernels inside the context, on all ranks that `run_local` starts there too.

    Parameters
    ----------
    name : str
        ``"pure"``, or ``"numba"``: float32 NumPy arrays and torch tensors on the CPU, for `ScaledSign`, `QSGD` and
        `MinMaxUInt8`. Whatever a set has no kernel for is done by the pure version.

    Raises
    ------
    ValueError
        If there is no such set.
    ImportError
        If what it needs is not installed; the message says how to install it.
    """
    if name == "pure":
        return use_kernels(None)
    if name not in _SETS:
        raise ValueError(f"name is {name!r}; expected one of {', '.join(names())}")
    module, extra = _SETS[name]
    try:
        kernels: KernelSet = import_module(module).KERNELS
    except ImportError as error:
        raise ImportError(f"the kernels {name!r} need {error.name}: pip install 'qcomp[{extra}]'") from error
    return use_kernels(kernels)
