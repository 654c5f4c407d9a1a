"""One exchange over MPI, from posting the sends to the received data."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from qcomp.comm.cuda_buffers import copy_of, empty, finish_queued, to_library
from qcomp.comm.mpi_exit import FAILED_TAG, FINISHED_TAG, OWNER_TAG, send_all
from qcomp.comm.mpi_library import MPI
from qcomp.core.errors import CommunicatorError, MismatchError
from qcomp.core.mean.stages import Owner, other_owners, told
from qcomp.core.numeric.arrays import Array
from qcomp.core.reporting import name_ranks

# A message's tag has its verb in the lowest bits and a part of the owner's digest in the others, so that a rank at
# another place in the program is detected.
_VERB_TAGS = 8
_TAGS = {"all_to_all": 1, "all_gather": 2}
_VERBS = {tag: verb for verb, tag in _TAGS.items()}
_OWNER_SECONDS = 2.0
"""How long a rank waits for the others to tell their owners, once these differ."""

_SPIN_SECONDS = 100e-6
_LONGEST_PAUSE = 1e-3
# A sleep of 0 seconds takes up to 100 us. Without sched_yield (Windows), spin.
_let_others_run: Callable[[], None] = getattr(os, "sched_yield", lambda: None)


class _Ranks(Protocol):
    """The part of the communicator that an exchange uses."""

    rank: int
    size: int

    def begin(self) -> int:
        """Return the number of a new exchange."""
        ...

    def complete(self, exchange: MPIExchange) -> None:
        """Wait until an exchange is complete."""
        ...


class MPIExchange:
    """One exchange in flight.

    Messages are probed before they are received (MPI's matched probe), so that a message of an unexpected size or verb
    is reported, not truncated. In MPICH this is as fast as receives posted in advance, from 0 bytes to 50 MB. A rank's
    messages arrive in the order of sending, so the first one belongs to the first exchange that still waits for that
    rank. ``like`` are the caller's buffers, and ``buffers`` the same in memory that MPI can read.
    """

    def __init__(
        self,
        comm: _Ranks,
        verb: str,
        like: Sequence[Array],
        buffers: list[Array],
        sizes: Sequence[int],
        *,
        owner: Owner | None,
    ) -> None:
        self._comm = comm
        self.owner = owner
        self._tag = 0
        self.number = comm.begin()
        self.verb = verb
        self._like = list(like)
        self._buffers = buffers
        self._received = [
            empty(bytes_from, like=of_caller, staged=buffer)
            for bytes_from, of_caller, buffer in zip(sizes, like, buffers, strict=True)
        ]
        n, rank = comm.size, comm.rank
        # Each rank starts with its right neighbour, so that not all send to rank 0 first.
        self.peers = [(rank + k) % n for k in range(1, n)]
        self.awaited = set(self.peers)
        self._receiving: dict[int, MPI.Request] = {}
        self._sending: dict[int, MPI.Request] = {}
        self._result: list[Array] | None = None

    def post(self, ranks: MPI.Intracomm) -> None:
        """Send every peer its share, even an empty one, since the peer must learn its size."""
        # Receive buffers also need this wait: earlier work may still be queued on memory that a pool hands out again.
        finish_queued(self._buffers)
        of_owner = 0 if self.owner is None else self.owner.digest
        largest = ranks.Get_attr(MPI.TAG_UB)
        assert isinstance(largest, int)
        self._tag = _TAGS[self.verb] + _VERB_TAGS * (of_owner % (largest // _VERB_TAGS))
        for peer in self.peers:
            self._sending[peer] = ranks.Isend([self._buffers[peer], MPI.BYTE], dest=peer, tag=self._tag)

    def advance(self, ranks: MPI.Intracomm, earlier: set[int]) -> None:
        """Make progress without waiting; ``earlier`` are the ranks that an earlier exchange still waits for."""
        status = MPI.Status()
        for peer in self.awaited - earlier:
            message = ranks.Improbe(source=peer, tag=MPI.ANY_TAG, status=status)
            if message is not None:
                self._check(ranks, peer, message, status)
                self._receiving[peer] = message.Irecv([self._received[peer], MPI.BYTE])
                self.awaited.remove(peer)
        self._receiving = _incomplete(self._receiving)
        self._sending = _incomplete(self._sending)
        for peer in self._sending:
            # This peer's own message has arrived, but if the peer has failed it will never receive ours.
            message = ranks.Improbe(source=peer, tag=FAILED_TAG, status=status)
            if message is not None:
                self._check(ranks, peer, message, status)

    def _check(self, ranks: MPI.Intracomm, peer: int, message: MPI.Message, status: MPI.Status) -> None:
        tag, size, rank = status.Get_tag(), status.Get_count(MPI.BYTE), self._comm.rank
        if tag == FINISHED_TAG:
            raise CommunicatorError(f"{self.verb}: rank {peer} has finished without calling it")
        if tag == FAILED_TAG:
            raise CommunicatorError(f"{self.verb}: rank {peer} failed: {_text_of(message, size)}")
        if tag == OWNER_TAG:
            raise self._mismatch(ranks, {peer: _text_of(message, size)})
        if tag // _VERB_TAGS != self._tag // _VERB_TAGS:
            raise self._mismatch(ranks, {})
        if tag != self._tag:
            verb = _VERBS[tag % _VERB_TAGS]
            raise CommunicatorError(f"rank {rank} called {self.verb} where rank {peer} called {verb}")
        expected = self._received[peer].shape[0]
        if size != expected:
            raise CommunicatorError(
                f"{self.verb}: rank {peer} sent {size} bytes to rank {rank}, which expected {expected} bytes"
            )

    def _mismatch(self, ranks: MPI.Intracomm, known: dict[int, str]) -> MismatchError:
        """Return the error that names the owners of all ranks; every rank has seen that they differ."""
        own = told(self.owner)
        send_all(ranks, own, OWNER_TAG)
        texts = {self._comm.rank: own, **known}
        status = MPI.Status()

        def all_told() -> bool:
            for peer in set(self.peers) - texts.keys():
                message = ranks.Improbe(source=peer, tag=OWNER_TAG, status=status)
                if message is not None:
                    texts[peer] = _text_of(message, status.Get_count(MPI.BYTE))
            return len(texts) == self._comm.size

        poll(all_told, _OWNER_SECONDS)
        return MismatchError(other_owners(dict.fromkeys(self.peers, "something else") | texts, self.owner))

    @property
    def is_complete(self) -> bool:
        """Whether everything has been received and sent."""
        return not (self.awaited or self._receiving or self._sending)

    @property
    def is_flowing(self) -> bool:
        """Whether some peer and this rank have both come to the exchange, so that bytes are travelling."""
        return bool(self._receiving) or not self._sending.keys() <= self.awaited

    def whats_missing(self) -> str:
        """Name the peers that the exchange still waits for."""
        missing = []
        if self.awaited:
            missing.append(f"nothing came from {name_ranks(self.awaited)}")
        if self._receiving:
            missing.append(f"only a part came from {name_ranks(self._receiving)}")
        silent = self._sending.keys() - self.awaited
        if silent:
            missing.append(f"{name_ranks(silent)} did not receive what was sent")
        return ", ".join(missing)

    def wait(self) -> list[Array]:
        """Return what each rank sent here."""
        if self._result is None:
            self._comm.complete(self)
            own = self._comm.rank
            # A rank's own share is copied too, since received data never shares memory with sent data.
            self._received[own] = copy_of(self._buffers[own])
            self._result = [
                to_library(x, like=like) for x, like in zip(self._received, self._like, strict=True)
            ]
            self._buffers, self._received, self._like = [], [], []
        return self._result


def _text_of(message: MPI.Message, size: int) -> str:
    data = np.empty(size, dtype=np.uint8)
    message.Recv([data, MPI.BYTE])
    return data.tobytes().decode(errors="replace")


def _incomplete(requests: dict[int, MPI.Request]) -> dict[int, MPI.Request]:
    return {peer: request for peer, request in requests.items() if not request.Test()}


def poll(done: Callable[[], bool], timeout: float, *, flowing: Callable[[], bool] = lambda: False) -> bool:
    """Call `done` until it returns true, at most for `timeout` seconds; return its last result.

    There is no pause while `flowing` returns true: MPI moves bytes only inside its calls.
    """
    start = time.monotonic()
    while not done():
        waited = time.monotonic() - start
        if waited > timeout:
            return False
        # MPI's own waiting occupies a core, which a rank that still computes may need. Pauses of a tenth of
        # the time waited so far delay an exchange by a tenth at most.
        if waited < _SPIN_SECONDS or flowing():
            _let_others_run()
        else:
            time.sleep(min(waited / 10, _LONGEST_PAUSE))
    return True
