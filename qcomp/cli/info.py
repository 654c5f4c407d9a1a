"""``qcomp info``: prints which kernels run for which arrays, and why, and which plugins are installed."""

import argparse
import os
import platform
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from qcomp.backends import explain
from qcomp.backends.registry import BUILT_IN, UnavailableError, load, names
from qcomp.cli.output import print_json, say, table
from qcomp.core.entry_points import GROUPS, offered, source_of
from qcomp.core.mean.topologies.registry import topology
from qcomp.core.numeric.arrays import Array
from qcomp.core.registry import find_class
from qcomp.version import __version__

EPILOG = """
examples:
  qcomp info
  qcomp info --json
  QCOMP_KERNELS=pure qcomp info
"""

_DTYPES = ("float32", "float16", "bfloat16", "float64")
_JAX_DEVICE = "its device"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``qcomp info``."""


def run(options: argparse.Namespace) -> int:
    """Print the output; the status is 1 if a plugin cannot be loaded."""
    facts = gather()
    if options.json:
        print_json(facts)
    else:
        say(_text(facts))
    return int(any(plugin["problem"] for plugin in facts["plugins"]))


def _text(facts: Mapping[str, Any]) -> str:
    setting = facts["setting"]
    head = ["arrays", *_DTYPES, ""]
    rows = [
        [row["arrays"], *(row["kernels"][name] or "-" for name in _DTYPES), row["reason"]]
        for row in facts["arrays"]
    ]
    lines = [
        f"qcomp {facts['qcomp']}, Python {facts['python']}, {facts['cores']} cores",
        f"kernels: {setting or 'auto'} (QCOMP_KERNELS is {'set' if setting else 'not set'})",
        "",
        *table([head, *rows]),
        "",
        *(f"{kernels['name']}: {kernels['reason']}" for kernels in facts["kernels"]),
    ]
    if facts["plugins"]:
        lines.append("")
    for plugin in facts["plugins"]:
        problem = f"; cannot be loaded: {plugin['problem']}" if plugin["problem"] else ""
        lines.append(f"{plugin['kind']} {plugin['name']!r}: {plugin['source']}{problem}")
    return "\n".join(lines)


def gather() -> dict[str, Any]:
    """Return the output of ``qcomp info --json``.

    Returns
    -------
    dict
        ``qcomp`` and ``python``: versions. ``cores``: their number. ``setting``: the value of QCOMP_KERNELS, or None.
        ``arrays``: for each kind of array the ``kernels`` for each dtype, None if such arrays do not exist, and the
        ``reason``. ``kernels``: for each set its ``name``, whether it is ``available``, and the ``reason``.
        ``plugins``: for each entry point of an installed package its ``kind``, ``name``, ``source``, and the
        ``problem`` or None.

    Examples
    --------
    >>> [row["arrays"] for row in gather()["arrays"]][:2]
    ['numpy on cpu', 'torch on cpu']
    """
    kinds = [_ArrayKind(*kind) for kind in _kinds()]
    missing = {(kind.library, kind.device): kind.missing for kind in kinds if kind.missing is not None}
    return {
        "qcomp": __version__,
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "setting": os.environ.get("QCOMP_KERNELS"),
        "arrays": [kind.row() for kind in kinds],
        "kernels": [_describe_set(name, missing) for name in names()],
        "plugins": list(_plugins()),
    }


def _plugins() -> Iterator[dict[str, str | None]]:
    """Yield the plugins of installed packages, each with the reason why it cannot be loaded, or None."""
    for kind, group in GROUPS.items():
        try:
            points = offered(kind, {})
        except ValueError as error:  # two packages use one name
            yield {"kind": kind, "name": "?", "source": group, "problem": str(error)}
            continue
        for name, point in points.items():
            problem = None
            try:
                _find(kind, name)
            except Exception as error:  # the package is broken
                problem = f"{type(error).__name__}: {error}"
            yield {"kind": kind, "name": name, "source": source_of(point), "problem": problem}


def _find(kind: str, name: str) -> object:
    if kind == "compressor":
        return find_class(name)
    return topology(name) if kind == "topology" else load(name)


class _ArrayKind:
    """A kind of array: an array for each dtype, or the reason why there is none."""

    def __init__(self, library: str, device: str, make: Callable[[str], Array | None]) -> None:
        self.library, self.device = library, device
        self.arrays: dict[str, Array | None] = {}
        self.missing: str | None = None
        try:
            self.arrays = {name: make(name) for name in _DTYPES}
        except ImportError:
            self.missing = f"{library} is not installed"
        except Exception as error:  # whatever a driver raises is the reason
            self.missing = str(error).partition("\n")[0]

    def row(self) -> dict[str, Any]:
        """Return which kernels run for each dtype, and why."""
        choices = {name: explain(x) for name, x in self.arrays.items() if x is not None}
        return {
            "arrays": f"{self.library} on {self.device}",
            "kernels": {name: choices[name].kernels if name in choices else None for name in _DTYPES},
            "reason": self.missing or choices["float32"].reason,
        }


def _kinds() -> Iterator[tuple[str, str, Callable[[str], Array | None]]]:
    """Yield libraries and devices, each with a function that makes an array, or None for a missing dtype."""
    yield "numpy", "cpu", _of_numpy
    yield "torch", "cpu", lambda name: _of_torch(name, "cpu")
    yield "torch", "cuda", lambda name: _of_torch(name, "cuda")
    yield "cupy", "cuda", _of_cupy
    yield "jax", _JAX_DEVICE, _of_jax


def _of_numpy(name: str) -> Any:
    return _empty("numpy", name)


def _empty(library: str, name: str) -> Any:
    """Return an array of NumPy, or of CuPy, which takes the same dtypes."""
    dtype = name
    if name == "bfloat16":
        try:
            dtype = import_module("ml_dtypes").bfloat16
        except ImportError:
            return None
    return import_module(library).empty(1, dtype=dtype)


def _of_torch(name: str, device: str) -> Any:
    torch = import_module("torch")
    if device == "cuda" and not torch.cuda.is_available():
        raise RuntimeError("torch sees no CUDA device")
    return torch.zeros(1, dtype=getattr(torch, name), device=device)


def _of_cupy(name: str) -> Any:
    cupy = import_module("cupy")
    if not cupy.cuda.is_available():
        raise RuntimeError("cupy sees no CUDA device")
    return _empty("cupy", name)


def _of_jax(name: str) -> Any:
    jax: Any = import_module("jax")
    if name == "float64" and not jax.config.jax_enable_x64:
        return None
    return jax.numpy.zeros(1, dtype=name)


def _describe_set(name: str, missing: Mapping[tuple[str, str], str]) -> dict[str, Any]:
    """Return whether a kernel set can run: it needs its dependencies, and a library and a device for its arrays."""
    if name == "pure":
        return {"name": name, "available": True, "reason": "the reference version, for every array"}
    try:
        load(name)
    except UnavailableError as error:
        return {"name": name, "available": False, "reason": f"not available; {error}"}
    except Exception as error:  # another package's set is broken
        return {"name": name, "available": False, "reason": f"not available; {type(error).__name__}: {error}"}
    lacking = sorted({missing.get(kind, "") for kind in _arrays_of(name)})
    if lacking and all(lacking):
        return {"name": name, "available": False, "reason": f"not available; {'; '.join(lacking)}"}
    return {"name": name, "available": True, "reason": f"available{_version_of(name)}"}


def _arrays_of(name: str) -> list[tuple[str, str]]:
    """Return the libraries and devices, as in `_kinds`, of the arrays that a set supports."""
    arrays = BUILT_IN[name].arrays if name in BUILT_IN else ()
    return [(library, _JAX_DEVICE if library == "jax" else device) for library, device in arrays]


def _version_of(name: str) -> str:
    try:
        return f", {name} {version(name)}" if name in BUILT_IN else ""
    except PackageNotFoundError:  # installed under another name, as cupy is
        return ""
