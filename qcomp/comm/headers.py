"""Headers that the ranks send before an exchange, for transports that do not report sizes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from qcomp.core.mean.stages import Owner

if TYPE_CHECKING:
    import numpy.typing as npt

    HostBuffer = npt.NDArray[np.uint8]

_NUMBERS = {"all_to_all": 1, "all_gather": 2}
_VERBS = {number: verb for verb, number in _NUMBERS.items()}


def header_size(size: int) -> int:
    """Return the size in bytes of a header among ``size`` ranks."""
    return 8 * (2 + 2 * size)


def header(verb: str, sent: Sequence[int], expected: Sequence[int], owner: Owner | None = None) -> HostBuffer:
    """Return a header: the verb, a digest of the owner, and the bytes that a rank sends to and expects from each rank.

    Every rank receives all headers, so that all reach the same verdict.
    """
    digest = 0 if owner is None else owner.digest
    return np.asarray([_NUMBERS[verb], digest, *sent, *expected], dtype="<i8").view(np.uint8)


def have_different_owners(headers: Sequence[HostBuffer]) -> bool:
    """Return whether the headers of all ranks name different owners of the exchange."""
    return len({int(one.view("<i8")[1]) for one in headers}) > 1


def disagreement(headers: Sequence[HostBuffer]) -> str | None:
    """Describe a contradiction between the headers of all ranks, if there is one.

    Examples
    --------
    >>> disagreement([header("all_gather", [7, 7], [7, 6]), header("all_gather", [5, 5], [7, 5])])
    'all_gather: rank 1 sent 5 bytes to rank 0, which expected 6 bytes'
    """
    size = len(headers)
    numbers = np.stack(headers).view("<i8")
    verbs = [_VERBS[int(number)] for number in numbers[:, 0]]
    for rank, verb in enumerate(verbs):
        if verb != verbs[0]:
            return f"rank 0 called {verbs[0]} where rank {rank} called {verb}"
    sent, expected = numbers[:, 2 : 2 + size], numbers[:, 2 + size :].T
    wrong = np.argwhere(sent != expected)
    if not len(wrong):
        return None
    sender, receiver = map(int, wrong[0])
    return (
        f"{verbs[0]}: rank {sender} sent {sent[sender, receiver]} bytes to rank {receiver}, "
        f"which expected {expected[sender, receiver]} bytes"
    )
