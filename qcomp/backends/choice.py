"""Selects an array's kernel set: by context, else by setting, else the best available one, else the pure version."""

from __future__ import annotations

import math
import os
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

from qcomp.backends.registry import BUILT_IN, UnavailableError, load, load_coders, names
from qcomp.core.kernels import Coders, KernelSet, chosen, use_chooser, use_kernels
from qcomp.core.numeric.arrays import Array, dtype_name, is_traced


class Choice(NamedTuple):
    """The kernel set that is used for an array, and the reason."""

    kernels: str
    """Name of the kernel set, or ``"pure"``."""
    reason: str


def use(name: str) -> AbstractContextManager[None]:
    """Use a kernel set inside the context, and on all ranks that `qcomp.comm.run_local` starts there.

    Parameters
    ----------
    name : str
        ``"auto"``, ``"pure"``, ``"numba"`` (NumPy arrays and torch tensors on the CPU), ``"triton"`` (torch tensors
        on a CUDA or ROCm device), ``"cupy"``, ``"jax"``, or the name of another package's kernel set. Operations
        without a kernel in the set use the pure version.

    Raises
    ------
    ValueError
        If there is no such kernel set.
    ImportError
        If its dependencies are not installed; the message says how to install them.

    Examples
    --------
    >>> import numpy as np, qcomp
    >>> x = np.linspace(-1, 1, 1000, dtype=np.float32)
    >>> with qcomp.backends.use("pure"):
    ...     expected = qcomp.ScaledSign().compress(x).to_bytes()
    >>> qcomp.ScaledSign().compress(x).to_bytes() == expected
    True
    """
    if name == "auto":
        return use_chooser(automatic)
    return use_kernels(_set_named(name))


def set_default(name: str) -> None:
    """Use a kernel set in this process, except inside contexts that select another.

    Parameters
    ----------
    name : str
        As for `use`. The initial value is the environment variable ``QCOMP_KERNELS``, else ``"auto"``.

    Raises
    ------
    ValueError, ImportError
        As for `use`.
    """
    global _default  # noqa: PLW0603
    kernels = None if name == "auto" else _set_named(name)
    _default = (name, kernels)


_default: tuple[str, KernelSet | None] | None = None
"""The name in the setting and its kernel set; None until the environment has been read."""


def _setting() -> tuple[str, KernelSet | None]:
    """Return the name in the setting and its kernel set."""
    if _default is None:
        set_default(os.environ.get("QCOMP_KERNELS", "auto"))
    assert _default is not None
    return _default


def choose(x: Array) -> KernelSet | None:
    """Return the kernel set that the setting selects for an array."""
    name, kernels = _default or _setting()
    if name == "auto":
        return automatic(x)
    return kernels if kernels is not None and kernels.takes(x) else None


def choose_coders(by_setting: bool) -> Coders | None:
    """Return the compiled coders; without numba, or if the setting is ``"pure"``, None, which selects the pure ones."""
    if by_setting and _setting()[0] == "pure":
        return None
    try:
        return load_coders()
    except UnavailableError as error:
        _warn_once("coders", "vectors are coded", error)
        return None


_choices: dict[tuple[type, object, object], KernelSet | None] = {}


def automatic(x: Array) -> KernelSet | None:
    """Return the best available kernel set for an array; the choice is cached by library, device and dtype."""
    where = getattr(x, "device", None)
    if type(where).__hash__ is None:  # CuPy's devices
        where = str(where)
    kind = (type(x), where, x.dtype)
    try:
        choice = _choices[kind]
    except KeyError:
        choice = _choices[kind] = _best(x)
    if choice is None and "float64" not in _told:
        _warn_of_float64(x)
    return choice


def explain(x: Array) -> Choice:
    """Return which kernel set is used for an array in the current context, and why.

    Examples
    --------
    >>> import numpy as np
    >>> with use("pure"):
    ...     explain(np.zeros(3, dtype=np.float32)).kernels
    'pure'
    """
    kernels = chosen(x)
    library, device = kind_of(x)
    what = f"{library} arrays of {dtype_name(x.dtype)} on {device}"
    if kernels is not None:
        return Choice(kernels.name, f"has kernels for {what}")
    candidates = [name for name, entry in BUILT_IN.items() if (library, device) in entry.arrays]
    reasons = []
    for name in candidates:
        try:
            if load(name).takes(x):
                return Choice("pure", f"was asked for; {name} would take {what}")
            reasons.append(f"{name} has no kernels for {what}")
        except UnavailableError as error:
            reasons.append(str(error))
    return Choice("pure", "; ".join(reasons) or f"there are no kernels for {library} arrays on {device}")


def kind_of(x: Any) -> tuple[str, str]:
    """Return the library and the kind of device of an array: ``"cpu"``, ``"cuda"`` or another."""
    library = type(x).__module__.partition(".")[0].removesuffix("lib")
    if library == "cupy":
        return library, "cuda"
    if library == "jax":
        platforms = {device.platform for device in x.devices()}
        return library, "cuda" if platforms & {"gpu", "cuda", "rocm"} else min(platforms)
    return library, str(getattr(getattr(x, "device", None), "type", "cpu"))


def _set_named(name: str) -> KernelSet | None:
    """Return the kernel set with a name; None for the pure version."""
    if name == "pure":
        return None
    if name not in names():
        raise ValueError(f"name is {name!r}; expected one of auto, {', '.join(names())}")
    return load(name)


def _best(x: Array) -> KernelSet | None:
    if is_traced(x):
        return None
    kind = kind_of(x)
    for name, entry in BUILT_IN.items():
        if kind in entry.arrays:
            kernels = _available(name, kind)
            if kernels is not None and kernels.takes(x):
                return kernels
    return None


_told: set[str] = set()

_LARGE = 10_000
"""A smaller array of float64 causes no warning. By default, optimizers do not compress smaller tensors."""


def _warn_of_float64(x: Array) -> None:
    """Warn if x is a large array of float64, and kernels exist for such arrays in float32."""
    if is_traced(x) or dtype_name(x.dtype) != "float64" or math.prod(x.shape) < _LARGE:
        return
    kind = kind_of(x)
    if any(kind in entry.arrays and _available(name, kind) for name, entry in BUILT_IN.items()):
        _warn_once(
            "float64",
            f"{kind[0]} arrays of float64 on {kind[1]} are compressed",
            "kernels take a twentieth of the time, but there are none for float64; convert the arrays to float32 if "
            "that is precise enough",
        )


def _available(name: str, kind: tuple[str, str]) -> KernelSet | None:
    """Return a kernel set if its dependencies are installed; else warn once."""
    try:
        return load(name)
    except UnavailableError as error:
        _warn_once(name, f"{kind[0]} arrays on {kind[1]} are compressed", error)
        return None


def _warn_once(name: str, what: str, error: UnavailableError | str) -> None:
    """Warn that something is slow, once for each name."""
    if name not in _told:
        import logging  # noqa: PLC0415  (would slow down `import qcomp`)

        _told.add(name)
        logging.getLogger("qcomp").warning(
            "%s by the pure version, which is many times slower: %s", what, error
        )
