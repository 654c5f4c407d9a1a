"""Headers that the ranks send before an exchange, for transports that do not report sizes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from qcomp.core.errors import CommunicatorError, MismatchError

if TYPE_CHECKING:
    import numpy.typing as npt

    HostBuffer = npt.NDArray[np.uint8]

__all__ = ["DIFFERENT", "header", "header_size", "require_agreement"]

DIFFERENT = "the ranks exchange different things"
"""How the error begins if they do."""

_NUMBERS = {"all_to_all": 1, "all_gather": 2}
_VERBS = {number: verb for verb, number in _NUMBERS.items()}


def header_size(size: int) -> int:
    """Return the bytes of a header among ``size`` ranks."""
    return 8 * (1 + 2 * size)


def header(verb: str, sent: Sequence[int], expected: Sequence[int], subject: int = 0) -> HostBuffer:
    """Return a header: the verb that a rank calls, what about, and the bytes that it sends to and expects from each.

    Every rank receives all headers, so that all reach the same verdict.
    """
    return np.asarray([_NUMBERS[verb] + (subject << 8), *sent, *expected], dtype="<i8").view(np.uint8)


def require_agreement(headers: Sequence[HostBuffer], subjects: Sequence[str] = ()) -> None:
    """Raise CommunicatorError if the headers of all ranks contradict each other.

    Parameters
    ----------
    headers : sequence of arrays
        Of all ranks.
    subjects : sequence of str
        What the numbers of subjects mean. If these differ, the error is a MismatchError.

    Examples
    --------
    >>> require_agreement([header("all_gather", [7, 7], [7, 6]), header("all_gather", [5, 5], [7, 5])])
    Traceback (most recent call last):
    qcomp.core.errors.CommunicatorError: all_gather: rank 1 sent 5 bytes to rank 0, which expected 6 bytes
    """
    size = len(headers)
    numbers = np.stack(headers).view("<i8")
    about = [int(number) >> 8 for number in numbers[:, 0]]
    if len(set(about)) > 1 and max(about) < len(subjects):
        told = ", ".join(f"rank {rank} {subjects[number]}" for rank, number in enumerate(about))
        problem = f"{DIFFERENT}: {told}"
        raise MismatchError(problem)
    verbs = [_VERBS[int(number) & 255] for number in numbers[:, 0]]
    for rank, verb in enumerate(verbs):
        if verb != verbs[0]:
            problem = f"rank 0 called {verbs[0]} where rank {rank} called {verb}"
            raise CommunicatorError(problem)
    sent, expected = numbers[:, 1 : 1 + size], numbers[:, 1 + size :].T
    wrong = np.argwhere(sent != expected)
    if len(wrong):
        sender, receiver = map(int, wrong[0])
        raise CommunicatorError(
            f"{verbs[0]}: rank {sender} sent {sent[sender, receiver]} bytes to rank {receiver}, "
            f"which expected {expected[sender, receiver]} bytes"
        )
