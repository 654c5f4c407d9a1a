"""Integrations with other frameworks: each submodule is imported on first use, and needs its framework."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from qcomp.integrations import ddp, transformers

__all__ = ["ddp", "transformers"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        return importlib.import_module(f"qcomp.integrations.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
