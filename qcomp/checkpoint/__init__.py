"""Checkpoints: flat states that any number of ranks can load, atomic file writes, copies in memory, and signals."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from qcomp.core.checkpoint.format import to_arrays
from qcomp.core.checkpoint.schema import plain

if TYPE_CHECKING:
    from qcomp.checkpoint.copies import Copies, Kept
    from qcomp.checkpoint.files import write_whole
    from qcomp.checkpoint.signals import on_signal

__all__ = ["Copies", "Kept", "on_signal", "plain", "to_arrays", "write_whole"]

_MODULES = {"Copies": "copies", "Kept": "copies", "on_signal": "signals", "write_whole": "files"}
"""Names that are imported on first use, and their modules."""


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(import_module(f"qcomp.checkpoint.{_MODULES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
