"""Ctrl-C as a request to stop, which all ranks obey at the same step."""

import signal
from types import FrameType

__all__ = ["StopRequest"]


class StopRequest:
    """Whether this rank was asked to stop, by Ctrl-C or by a batch system's SIGTERM.

    An exception in the middle of a step would leave the other ranks waiting in a collective, and one rank
    may hear of it a step later than another. So the handler only takes a note; the training loop tells the
    other ranks after every step, and all leave together. A second Ctrl-C ends the process at once.
    """

    def __init__(self) -> None:
        self.made = False
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._note)

    def _note(self, number: int, _frame: FrameType | None) -> None:
        self.made = True
        signal.signal(number, signal.SIG_DFL)
