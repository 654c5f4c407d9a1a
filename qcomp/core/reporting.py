"""Texts that name ranks, and warnings that point at the caller's code."""

import inspect
import warnings
from collections.abc import Iterable

__all__ = ["name_ranks", "warn_caller"]

_PACKAGE = __file__[: -len("core/reporting.py")]
"""The folder of the package, with a separator at its end; importing pathlib would slow down `import qcomp`."""


def name_ranks(ranks: Iterable[int]) -> str:
    """Return a phrase that names some ranks.

    Examples
    --------
    >>> name_ranks([2])
    'rank 2'
    >>> name_ranks([3, 0, 1])
    'ranks 0, 1 and 3'
    """
    names = [str(rank) for rank in sorted(ranks)]
    if len(names) == 1:
        return f"rank {names[0]}"
    return f"ranks {', '.join(names[:-1])} and {names[-1]}"


def warn_caller(message: str, category: type[Warning] = UserWarning) -> None:
    """Warn at the innermost calling line outside qcomp."""
    level, frame = 1, inspect.currentframe()
    while frame and frame.f_back and frame.f_code.co_filename.startswith(_PACKAGE):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, category, stacklevel=level)
