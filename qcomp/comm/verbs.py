"""The two verbs of a communicator, which differ in what goes to whom and share how it gets there."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from qcomp.core.mean.stages import AllToAll, Exchange

__all__ = ["Completed", "Pending", "Verbs"]

Array = Any


class Pending(Protocol):
    """An exchange that was started; every rank must wait for it."""

    def wait(self) -> list[Array]:
        """Return what each rank sent here, as the verb does; raise what the verb raises."""
        ...


class Completed(NamedTuple):
    """An exchange that is over: what arrived."""

    received: list[Array]

    def wait(self) -> list[Array]:
        """Return what each rank sent here."""
        return self.received


class Verbs(ABC):
    """Base of the communicators: `all_to_all` and `all_gather` over one kind of exchange."""

    rank: int
    size: int
    host: str
    on_init: Callable[[Any, Sequence[Array]], None] | None = None
    """What `Optimizer.init` calls with the optimizer and the parameters, once the ranks have agreed on them."""

    @abstractmethod
    def _exchange(self, verb: str, send: Sequence[Array], receive: Sequence[int]) -> list[Array]:
        """Send ``send[r]`` to rank r, receive ``receive[r]`` bytes from it; all ranks name the same verb."""

    def _start(self, verb: str, send: Sequence[Array], receive: Sequence[int]) -> Pending:
        """Start an exchange; this one is over when it returns."""
        return Completed(self._exchange(verb, send, receive))

    def start(self, request: Exchange) -> Pending:
        """Start an exchange, and let the caller compute while the bytes are on their way.

        Several may be under way. All ranks start them in the same order, whatever the order in which they wait.

        Parameters
        ----------
        request : AllToAll or AllGather
            What a computation in stages yields. Its buffers must stay as they are until `wait` has returned.

        Returns
        -------
        Pending
            Its ``wait()`` returns what the verb would have returned. Over an `MPICommunicator` and a
            `TorchCommunicator` the exchange goes on meanwhile; over the others it is already complete.

        Raises
        ------
        CommunicatorError
            As the verbs do; so does ``wait()``.

        Examples
        --------
        >>> import numpy as np, qcomp
        >>> from qcomp.core.mean.stages import AllGather
        >>> comm = qcomp.comm.LocalCommunicator.alone()
        >>> pending = comm.start(AllGather(np.array([7], dtype=np.uint8), (1,)))
        >>> pending.wait()
        [array([7], dtype=uint8)]
        """
        if isinstance(request, AllToAll):
            return self._start("all_to_all", request.send, request.receive)
        return self._start("all_gather", [request.send] * self.size, request.receive)

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
