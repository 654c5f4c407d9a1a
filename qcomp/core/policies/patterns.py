"""Checks of patterns of parameter names: their type, and that each matches a name."""

from collections.abc import Sequence
from fnmatch import fnmatchcase

_SHOWN = 20


def as_patterns(argument: str, patterns: object, or_else: str = "") -> tuple[str, ...]:
    """Return patterns as a tuple; raise TypeError unless they are a sequence. ``or_else`` ends the error text."""
    if not isinstance(patterns, list | tuple) or not all(isinstance(pattern, str) for pattern in patterns):
        raise TypeError(
            f"{argument} is {patterns!r}; expected a sequence of patterns, such as ('embed*', 'head.*'){or_else}"
        )
    return tuple(patterns)


def require_matches(argument: str, patterns: Sequence[str], names: Sequence[str], what: str = "name") -> None:
    """Raise ValueError unless every pattern matches a name; ``what`` describes the names in the error text.

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
                f"{argument} has the pattern {pattern!r}, which matches no {what}; "
                f"the names are {list(names[:_SHOWN])}{more}"
            )
