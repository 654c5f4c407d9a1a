"""The two verbs of a communicator, over one common exchange."""

import inspect
import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from types import FrameType
from typing import Any, NamedTuple, NoReturn, Protocol, Self

from qcomp.core.errors import CommunicatorError
from qcomp.core.mean.stages import AllToAll, Exchange, Owner, as_mismatch
from qcomp.core.numeric.arrays import Array


class Pending(Protocol):
    """A started exchange; every rank must wait for it."""

    def wait(self) -> list[Array]:
        """Return what each rank sent here; the result and the errors are the same as those of the verb."""
        ...


class Completed(NamedTuple):
    """A completed exchange with its received data."""

    received: list[Array]

    def wait(self) -> list[Array]:
        """Return what each rank sent here."""
        return self.received


class Verbs(ABC):
    """Base of the communicators: `all_to_all` and `all_gather` over one kind of exchange.

    A communicator belongs to the process that has made it: its verbs raise in a forked child, and it cannot be pickled.
    """

    rank: int
    size: int
    host: str
    _process: int
    _closed: str | None = None
    """Why no more exchanges are possible."""

    def __new__(cls, *_: Any, **__: Any) -> Self:
        """Take note of the process."""
        self = super().__new__(cls)
        self._process = os.getpid()
        return self

    def __reduce__(self) -> NoReturn:
        """Refuse to be copied or sent to another process."""
        raise TypeError(
            f"{self!r} cannot be copied or pickled, because it belongs to this process: do not pass it to other "
            "processes, such as a data loader's workers; if the other process is a rank, make another communicator "
            "there"
        )

    def _refuse(self, verb: str) -> NoReturn:
        """Raise because this process has not made the communicator."""
        raise CommunicatorError(
            f"{verb}: process {os.getpid()} is a forked child of rank {self.rank} (process {self._process}), whose "
            "connections it must not use: let children, such as a data loader's workers, only compute, and call "
            "exchanges in the rank"
        )

    def _require_open(self, verb: str) -> None:
        """Raise CommunicatorError in a forked child, and after a failure or `close`."""
        if os.getpid() != self._process:
            self._refuse(verb)
        if self._closed is not None:
            raise as_mismatch(CommunicatorError(f"{verb}: this communicator is closed: {self._closed}"))

    @abstractmethod
    def _exchange(
        self, verb: str, send: Sequence[Array], receive: Sequence[int], owner: Owner | None = None
    ) -> list[Array]:
        """Send ``send[r]`` to rank r and receive ``receive[r]`` bytes from it.

        A class whose `compares_owners` is True raises MismatchError on every rank if the owners differ; other classes
        ignore the owner.
        """

    def _start(
        self, verb: str, send: Sequence[Array], receive: Sequence[int], owner: Owner | None = None
    ) -> Pending:
        """Start an exchange. This default also completes it before it returns."""
        return Completed(self._exchange(verb, send, receive, owner))

    @property
    def compares_owners(self) -> bool:
        """Whether `_exchange` and `_start` raise MismatchError on every rank if owners differ; by default, they do not.

        If they do not, each message is sent with a digest of the owner, which the receiver compares.
        """
        return False

    def run(self, request: Exchange) -> list[Array]:
        """Complete an exchange, and compare its owner on all ranks if the communicator `compares_owners`.

        Parameters
        ----------
        request : AllToAll or AllGather
            A request that a computation in stages yields.

        Raises
        ------
        MismatchError
            On every rank, if the communicator compares owners, and the owners differ.
        CommunicatorError
            As for the verbs.
        """
        if os.getpid() != self._process:
            self._refuse("run")
        if isinstance(request, AllToAll):
            return self._exchange("all_to_all", request.send, request.receive, request.owner)
        return self._exchange("all_gather", [request.send] * self.size, request.receive, request.owner)

    def start(self, request: Exchange) -> Pending:
        """Start an exchange, so that the caller can compute while the bytes travel.

        Several exchanges may be in flight. All ranks start them in the same order, but may wait in any order.

        Parameters
        ----------
        request : AllToAll or AllGather
            A request that a computation in stages yields. Its buffers must not change until `wait` has returned.

        Returns
        -------
        Pending
            Its ``wait()`` returns the result of the verb. With `MPICommunicator`, `TorchCommunicator` and
            `FolderCommunicator` the exchange goes on while the caller computes. With `LocalCommunicator` and
            `NCCLCommunicator` it is already complete.

        Raises
        ------
        CommunicatorError
            As for the verbs. ``wait()`` may also raise it.

        Examples
        --------
        >>> import numpy as np, qcomp
        >>> from qcomp.core.mean.stages import AllGather
        >>> comm = qcomp.comm.LocalCommunicator.alone()
        >>> pending = comm.start(AllGather(np.array([7], dtype=np.uint8), (1,)))
        >>> pending.wait()
        [array([7], dtype=uint8)]
        """
        if os.getpid() != self._process:
            self._refuse("start")
        if isinstance(request, AllToAll):
            return self._start("all_to_all", request.send, request.receive, request.owner)
        return self._start("all_gather", [request.send] * self.size, request.receive, request.owner)

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
            In the library and on the device of ``send[r]``.

        Raises
        ------
        CommunicatorError
            If a rank fails, ends, is late, calls another verb, or sends another size than announced.
        """
        if os.getpid() != self._process:
            self._refuse("all_to_all")
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
            In the library and on the device of `send`.

        Raises
        ------
        CommunicatorError
            If a rank fails, ends, is late, calls another verb, or sends another size than announced.
        """
        if os.getpid() != self._process:
            self._refuse("all_gather")
        return self._exchange("all_gather", [send] * self.size, receive)


def require_rank_of_its_own(what: str) -> None:
    """Raise CommunicatorError if a child of multiprocessing imports the script now, since its parent is the rank.

    The children of several ranks would meet each other, and wait or exchange instead of the ranks.
    """
    frame: FrameType | None = inspect.currentframe()
    while frame is not None:
        if frame.f_globals.get("__name__") == "__mp_main__" and frame.f_code.co_name == "<module>":
            raise CommunicatorError(
                f"{what}: process {os.getpid()} is a child that only imports the script, such as a data loader's "
                "worker: put the code of the ranks under if __name__ == '__main__'"
            )
        frame = frame.f_back


def described(error: BaseException) -> str:
    """Return the class of an error and its text, if it has one."""
    return f"{type(error).__name__}: {error}".removesuffix(": ")
