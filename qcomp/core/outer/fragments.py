"""Decides, from sizes and step numbers, which tensors an outer loop exchanges together, and after which inner steps."""

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache

LOCAL = "local"
"""The stage in which no exchange is under way."""

_UNDER_WAY = "under way "
_STAGE = re.compile(rf"{_UNDER_WAY}\d{{1,16}}@\d{{1,16}}(,\d{{1,16}}@\d{{1,16}})*")


def assign(sizes: Sequence[int], count: int) -> tuple[tuple[int, ...], ...]:
    """Assign whole tensors to ``count`` fragments: the largest tensor first, each tensor to the smallest fragment.

    Examples
    --------
    >>> assign([10, 6, 5, 3], 2)
    ((0, 3), (1, 2))
    """
    return _assign(tuple(sizes), count)


@lru_cache(64)
def _assign(sizes: tuple[int, ...], count: int) -> tuple[tuple[int, ...], ...]:
    fragments: list[list[int]] = [[] for _ in range(count)]
    loads = [0] * count
    for tensor in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        smallest = min(range(count), key=lambda f: (loads[f], len(fragments[f]), f))
        fragments[smallest].append(tensor)
        loads[smallest] += sizes[tensor]
    return tuple(tuple(sorted(members)) for members in fragments)


def first_step(fragment: int, every: int, count: int) -> int:
    """Return the inner step after which a fragment is first sent; turns are equally spaced, the last at ``every``."""
    return (fragment + 1) * every // count


def due(step: int, every: int, count: int) -> int | None:
    """Return the fragment that is sent after an inner step (counted from 1), or None.

    Examples
    --------
    >>> [due(step, 4, 2) for step in range(1, 9)]
    [None, 0, None, 1, None, 0, None, 1]
    """
    for fragment in range(count):
        if (step - first_step(fragment, every, count)) % every == 0:
            return fragment
    return None


def stage_of(sent: Mapping[int, int]) -> str:
    """Return the stage in which these fragments are under way; ``sent`` has the step after which each was sent.

    Examples
    --------
    >>> stage_of({}), stage_of({1: 30, 0: 35})
    ('local', 'under way 1@30,0@35')
    """
    if not sent:
        return LOCAL
    return _UNDER_WAY + ",".join(f"{fragment}@{step}" for fragment, step in sent.items())


def under_way(stage: str) -> dict[int, int]:
    """Return the fragments under way in a stage, in the order of sending; the inverse of `stage_of`.

    Examples
    --------
    >>> under_way("under way 1@30,0@35"), under_way("warmup")
    ({1: 30, 0: 35}, {})
    """
    if not _STAGE.fullmatch(stage):
        return {}
    pairs = (entry.partition("@") for entry in stage.removeprefix(_UNDER_WAY).split(","))
    return {int(fragment): int(step) for fragment, _, step in pairs}
