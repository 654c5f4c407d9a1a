"""How error messages name ranks."""

from collections.abc import Iterable

__all__ = ["name_ranks"]


def name_ranks(ranks: Iterable[int]) -> str:
    """Name some ranks in a sentence.

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
