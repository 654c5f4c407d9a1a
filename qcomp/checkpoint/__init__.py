"""Optimizer states as flat dicts, saved by one world and loaded by another; files that are whole or absent; copies."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from qcomp.checkpoint.files import write_whole
from qcomp.core.checkpoint.format import to_arrays
from qcomp.core.checkpoint.schema import plain

if TYPE_CHECKING:
    from qcomp.checkpoint.copies import Copies, Kept

__all__ = ["Copies", "Kept", "plain", "to_arrays", "write_whole"]


def __getattr__(name: str) -> Any:
    """Import on first use what needs NumPy."""
    if name in ("Copies", "Kept"):
        return getattr(import_module("qcomp.checkpoint.copies"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
