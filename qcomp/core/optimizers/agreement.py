"""What the ranks of an optimizer must agree on before the first step, in words that are equal where it is."""

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from qcomp.core.arrays import Array, dtype_name
from qcomp.core.compressor import Compressor
from qcomp.core.state import OptimizerState

__all__ = ["choices", "facts"]


def facts(optimizer: Any, names: Sequence[str], params: Sequence[Array]) -> dict[str, Any]:
    """Return what an optimizer, a dataclass, was started with."""
    return {
        "optimizer": type(optimizer).__name__,
        "settings": {f.name: _describe(getattr(optimizer, f.name)) for f in fields(optimizer)},
        "names": list(names),
        "shapes": [list(p.shape) for p in params],
        "dtypes": [dtype_name(p.dtype) for p in params],
    }


def choices(state: OptimizerState) -> list[object]:
    """Return what policies have chosen for each tensor: whether it is compressed, or the compressor that it has."""
    if not state.compressors:
        return [not is_exact for is_exact in state.exact]
    compressors = iter(state.compressors)
    return [None if is_exact else next(compressors).spec for is_exact in state.exact]


def _describe(value: object) -> str:
    """Describe a setting in words that are equal on ranks with equal settings."""
    if isinstance(value, Compressor):
        return value.spec
    if hasattr(value, "__qualname__"):  # a function; its repr has an address
        return str(value.__qualname__)
    return type(value).__qualname__ if type(value).__repr__ is object.__repr__ else repr(value)
