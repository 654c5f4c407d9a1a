"""Warnings that point at the caller's line, however deep in qcomp they arise."""

import sys
import warnings
from pathlib import Path

__all__ = ["warn_caller"]

_PACKAGE = str(Path(__file__).parents[1])


def warn_caller(message: str) -> None:
    """Warn of something at the innermost line outside qcomp that led here."""
    level, frame = 2, sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, stacklevel=level)
