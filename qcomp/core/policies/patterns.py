"""Patterns of parameter names."""

from collections.abc import Sequence
from fnmatch import fnmatchcase

__all__ = ["require_matches"]

_SHOWN = 20


def require_matches(argument: str, patterns: Sequence[str], names: Sequence[str]) -> None:
    """Raise ValueError unless every pattern matches a name.

    Examples
    --------
    >>> require_matches("groups", ["*.bias"], ["head.bias", "head.weight"])
    >>> require_matches("groups", ["*.bais"], ["head.bias", "head.weight"])
    Traceback (most recent call last):
        ...
    ValueError: groups has the pattern '*.bais', which matches no name; the names are ['head.bias', 'head.weight']
    """
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
            raise ValueError(
                f"{argument} has the pattern {pattern!r}, which matches no name; "
                f"the names are {list(names[:_SHOWN])}{more}"
            )
