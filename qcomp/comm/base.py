"""The interface of communicators, which move byte buffers between ranks, whatever the bytes mean."""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from qcomp.core.numeric.arrays import Array


@runtime_checkable
class Communicator(Protocol):
    """A group of ranks that exchange buffers.

    A buffer is a one-dimensional, contiguous uint8 array of any supported library, on any device; the result is an
    array of the library and device of the sent buffer. Every verb is collective: all ranks call it in the same order.
    Both sides know the sizes beforehand, so a buffer of a different size is an error, and is never truncated.

    Errors: if a peer is dead, stopped, absent or later than the communicator's timeout, every rank that waits for it
    raises `CommunicatorError`. Afterwards the communicator is closed for good, and its errors say so.
    """

    rank: int
    size: int
    host: str
    """Name of the machine, equal on ranks that share one; a hierarchical mean needs it."""
    bytes_sent: int
    """Bytes that this rank has handed to other ranks so far (a rank's own share is never sent)."""

    def all_to_all(self, send: Sequence[Array], receive: Sequence[int]) -> list[Array]:
        """Send ``send[r]`` to rank r and return what each rank sent here: ``receive[r]`` bytes from rank r.

        The result from rank r is an array of the library and device of ``send[r]``.
        """
        ...

    def all_gather(self, send: Array, receive: Sequence[int]) -> list[Array]:
        """Send ``send`` to every rank and return what each rank sent: ``receive[r]`` bytes from rank r."""
        ...
