"""Which set of kernels works on an array: by context, else by setting, else the best there is, else none."""

from __future__ import annotations

import logging
import os
from contextlib import AbstractContextManager
from typing import NamedTuple

from qcomp.backends.registry import BUILT_IN, UnavailableError, load, load_coders, names
from qcomp.core.kernels import Coders, KernelSet, chosen, use_chooser, use_kernels
from qcomp.core.numeric.arrays import Array, dtype_name, is_traced

__all__ = ["Choice", "automatic", "choose", "choose_coders", "explain", "set_default", "use"]

_log = logging.getLogger("qcomp")


class Choice(NamedTuple):
    """What works on an array, and why."""

    kernels: str
    """Name of the set, or ``"pure"``."""
    reason: str


def use(name: str) -> AbstractContextManager[None]:
    """Use a set of kernels inside the context, on all ranks that `qcomp.comm.run_local` starts there too.

    Parameters
    ----------
    name : str
        ``"auto"``, ``"pure"``, ``"numba"`` (NumPy arrays and torch tensors on the CPU), ``"triton"`` (torch tensors
        on a CUDA or ROCm device), ``"cupy"``, ``"jax"``, or what another package has announced. Whatever a set has
        no kernel for is done by the pure version.

    Raises
    ------
    ValueError
        If there is no such set.
    ImportError
        If what it needs is not installed; the message says how to install it.

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
    """Use a set of kernels wherever no context says otherwise, in this process.

    Parameters
    ----------
    name : str
        As for `use`. At the start it is what the environment variable ``QCOMP_KERNELS`` says, else ``"auto"``.

    Raises
    ------
    ValueError, ImportError
        As for `use`.
    """
    global _default  # noqa: PLW0603
    kernels = None if name == "auto" else _set_named(name)
    _default = (name, kernels)


_default: tuple[str, KernelSet | None] | None = None
"""The name of the setting and its set; None until the environment was looked at."""


def _setting() -> tuple[str, KernelSet | None]:
    """Return the name of the setting and its set."""
    if _default is None:
        set_default(os.environ.get("QCOMP_KERNELS", "auto"))
    assert _default is not None
    return _default


def choose(x: Array) -> KernelSet | None:
    """Return the set for an array by the setting."""
    name, kernels = _default or _setting()
    if name == "auto":
        return automatic(x)
    return kernels if kernels is not None and kernels.takes(x) else None


def choose_coders(by_setting: bool) -> Coders | None:
    """Return the compiled loops for host bytes, None for the pure ones: if nothing compiles, or the setting is pure."""
    if by_setting and _setting()[0] == "pure":
        return None
    try:
        return load_coders()
    except UnavailableError as error:
        _warn_once("coders", "vectors are coded", error)
        return None


_choices: dict[tuple[type, object, object], KernelSet | None] = {}


def automatic(x: Array) -> KernelSet | None:
    """Return the best set that is available for an array; the choice is kept for its library, device and dtype."""
    kind = (type(x), getattr(x, "device", None), x.dtype)
    try:
        return _choices[kind]
    except KeyError:
        choice = _choices[kind] = _best(x)
        return choice


def explain(x: Array) -> Choice:
    """Return which set works on an array here and now, and why.

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


def kind_of(x: Array) -> tuple[str, str]:
    """Return the library and the kind of device of an array: ``"cpu"``, ``"cuda"`` or another."""
    library = type(x).__module__.partition(".")[0].removesuffix("lib")
    if library == "cupy":
        return library, "cuda"
    if library == "jax":
        platforms = {device.platform for device in x.devices()}
        return library, "cuda" if platforms & {"gpu", "cuda", "rocm"} else min(platforms)
    return library, str(getattr(getattr(x, "device", None), "type", "cpu"))


def _set_named(name: str) -> KernelSet | None:
    """Return the set of a name, None for the pure version."""
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


def _available(name: str, kind: tuple[str, str]) -> KernelSet | None:
    """Return a set if what it needs is installed; else say so, once."""
    try:
        return load(name)
    except UnavailableError as error:
        _warn_once(name, f"{kind[0]} arrays on {kind[1]} are compressed", error)
        return None


def _warn_once(name: str, what: str, error: UnavailableError) -> None:
    """Say that something is done slowly, once for each name."""
    if name not in _told:
        _told.add(name)
        _log.warning("%s by the pure version, which is many times slower: %s", what, error)
