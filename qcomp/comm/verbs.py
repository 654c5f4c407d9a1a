"""The two verbs of a communicator, which differ in what goes to whom and share how it gets there."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

__all__ = ["Verbs"]

Array = Any


class Verbs(ABC):
    """Base of the communicators: `all_to_all` and `all_gather` over one kind of exchange."""

    size: int
    host: str

    @abstractmethod
    def _exchange(self, verb: str, send: Sequence[Array], receive: Sequence[int]) -> list[Array]:
        """Send ``send[r]`` to rank r, receive ``receive[r]`` bytes from it; all ranks name the same verb."""

    def all_to_all(self, send: Sequence[Array], receive: Sequence[int]) -> list[Array]:
        """Send ``send[r]`` to rank r and return what each rank sent here, ``receive[r]`` bytes from rank r.

        Parameters
        ----------
        send : sequence of arrays, shape (n,), dtype uint8
            One for each rank, this one included.
        receive : sequence of int
            The size in bytes that each rank sends here.

        Returns
        -------
        list of arrays, shape (receive[r],), dtype uint8
            Of the library and device of ``send[r]``.

        Raises
        ------
        CommunicatorError
            If a rank fails, finishes, does not come in time, calls another verb, or sends another size than
            announced.
        """
        return self._exchange("all_to_all", send, receive)

    def all_gather(self, send: Array, receive: Sequence[int]) -> list[Array]:
        """Send ``send`` to every rank and return what each rank sent, ``receive[r]`` bytes from rank r.

        Parameters
        ----------
        send : array, shape (n,), dtype uint8
        receive : sequence of int
            The size in bytes that each rank sends.

        Returns
        -------
        list of arrays, shape (receive[r],), dtype uint8
            Of the library and device of `send`.

        Raises
        ------
        CommunicatorError
            If a rank fails, finishes, does not come in time, calls another verb, or sends another size than
            announced.
        """
        return self._exchange("all_gather", [send] * self.size, receive)
