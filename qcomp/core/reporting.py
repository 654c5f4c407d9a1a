"""Texts that name ranks, and warnings that point at the caller's code."""

import inspect
import warnings
from collections.abc import Iterable

_BETWEEN = {
    "accelerate",
    "contextlib",
    "jax",
    "lightning",
    "optax",
    "pytorch_lightning",
    "torch",
    "transformers",
}
"""Libraries that call qcomp for scripts: a warning at a line of theirs would tell nobody what to change."""
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
    """Warn at the innermost calling line that is in a script: not in qcomp, and not in a library of `_BETWEEN`.

    If there is no such line, as in a thread of a library, warn at the innermost line outside qcomp.
    """
    level, outside, frame = 1, 0, inspect.currentframe()
    while frame is not None:
        if not frame.f_code.co_filename.startswith(_PACKAGE):
            outside = outside or level
            if frame.f_globals.get("__name__", "").partition(".")[0] not in _BETWEEN:
                outside = level
                break
        level, frame = level + 1, frame.f_back
    warnings.warn(message, category, stacklevel=outside or level - 1)
