"""Turns Ctrl-C into a request that stops all ranks after the same step."""

import signal
from types import FrameType

__all__ = ["StopRequest"]


class StopRequest:
    """Whether this rank was asked to stop, by Ctrl-C or by a batch system's SIGTERM.

    An exception in the middle of a step would leave the other ranks waiting in a collective, and the signal may reach
    ranks at different steps. So the handler only sets a flag. The training loop exchanges it after every step, and all
    ranks leave together. A second Ctrl-C ends the process at once.
    """

    def __init__(self) -> None:
        self.made = False
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._note)

    def _note(self, number: int, _frame: FrameType | None) -> None:
        self.made = True
        signal.signal(number, signal.SIG_DFL)
