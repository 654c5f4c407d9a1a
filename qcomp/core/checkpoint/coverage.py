"""Checks that parts of a tensor cover each of its elements equally often, or share no element."""

from collections import Counter
from collections.abc import Sequence

Part = tuple[int, int]
"""Where a part of a tensor starts and stops."""


def is_within(part: Part, others: Sequence[Part]) -> bool:
    """Return whether a part of a tensor lies within one of the others."""
    return any(start <= part[0] and part[1] <= stop for start, stop in others)


def coverage(parts: Sequence[Part], size: int, what: str) -> int:
    """Return how many parts cover each element of a tensor; the number must be equal for all elements."""
    changes = Counter({0: 0, size: 0})
    for start, stop in parts:
        changes[start] += 1
        changes[stop] -= 1
    edges = sorted(edge for edge in changes if changes[edge] or edge in (0, size))
    if size and (edges != [0, size] or not changes[0]):
        raise ValueError(
            f"the states have {what} for the ranges {sorted(set(parts))}; expected ranges that cover each of the "
            f"tensor's {size} elements equally often"
        )
    return max(1, changes[0])


def require_disjoint(parts: Sequence[Part], size: int, what: str) -> None:
    """Raise ValueError unless parts lie within a tensor, and no two of them share an element."""
    end = 0
    for start, stop in sorted(parts):
        if start < end or stop > size:
            raise ValueError(
                f"the state has {what} for the ranges {sorted(parts)}; expected disjoint ranges within the tensor's "
                f"{size} elements"
            )
        end = stop
