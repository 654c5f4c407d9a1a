"""Headers that the ranks send before an exchange, if the transport itself does not report sizes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

    HostBuffer = npt.NDArray[np.uint8]

__all__ = ["disagreement", "failure_header", "header", "header_size", "reason_size"]

_FAILED = 0
_NUMBERS = {"all_to_all": 1, "all_gather": 2}
_VERBS = {number: verb for verb, number in _NUMBERS.items()}


def header_size(size: int) -> int:
    """Return the bytes of a header among ``size`` ranks."""
    return 8 * (1 + 2 * size)


def header(verb: str, sent: Sequence[int], expected: Sequence[int]) -> HostBuffer:
    """Return a header: the verb that a rank calls, and the bytes that it sends to and expects from each rank.

    Every rank receives all headers, so that all reach the same verdict.
    """
    return np.asarray([_NUMBERS[verb], *sent, *expected], dtype="<i8").view(np.uint8)


def failure_header(length: int, *, size: int) -> HostBuffer:
    """Return the header of a rank that drops out and sends a reason of ``length`` bytes."""
    return np.asarray([_FAILED, length] + [0] * (2 * size - 1), dtype="<i8").view(np.uint8)


def reason_size(data: HostBuffer) -> int | None:
    """Return the length of the following text if this header announces a failure."""
    numbers = data.view("<i8")
    return int(numbers[1]) if numbers[0] == _FAILED else None


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
    sent, expected = numbers[:, 1 : 1 + size], numbers[:, 1 + size :].T
    wrong = np.argwhere(sent != expected)
    if not len(wrong):
        return None
    sender, receiver = map(int, wrong[0])
    return (
        f"{verbs[0]}: rank {sender} sent {sent[sender, receiver]} bytes to rank {receiver}, "
        f"which expected {expected[sender, receiver]} bytes"
    )
