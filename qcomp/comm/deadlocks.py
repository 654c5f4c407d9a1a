"""Finds two ranks that wait for each other in different communicators.

A rank that has waited for one second tells the other ranks of its communicator which exchange it waits in, and how many
exchanges it has begun over each communicator that only the waiting thread uses. An example: rank 0 waits in exchange 5
of communicator A, which rank 1 has not begun. Rank 1 waits in exchange 3 of communicator B, which rank 0 has not begun.
Only the two waiting threads would begin these exchanges, so neither rank can go on. Threads that share a communicator
are not judged: one of them may still begin the exchange that a rank waits for.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import NamedTuple

from qcomp.core.mean.stages import Owner, other_owners, told

_TELL_SECONDS = 1.0
_LONGEST_OWNER = 300
"""The most characters of an owner in a message, which has at most a thousand bytes."""

_stations: weakref.WeakSet[Station] = weakref.WeakSet()
_changing = threading.Lock()


class _Wait(NamedTuple):
    """A thread of this rank that waits in an exchange."""

    thread: threading.Thread
    since: float
    owner: Owner | None


class _Heard(NamedTuple):
    """What another rank has said about its wait."""

    exchange: int
    begun: dict[str, int]
    owner: str


class Station:
    """One communicator of a rank: how many exchanges it has begun, which threads began them, and which wait.

    The communicator's name is the same on all ranks; without a name nothing is found. ``refuse`` is called with an
    exchange and a text if the exchange cannot be completed.
    """

    def __init__(self, name: str, rank: int, refuse: Callable[[int, str], None]) -> None:
        self._name = name
        self._rank = rank
        self._refuse = refuse
        self._user: threading.Thread | None = None
        self._is_shared = False
        self._begun = 0
        self._waits: dict[int, _Wait] = {}
        self._told: set[int] = set()
        self._heard: dict[int, _Heard] = {}
        with _changing:
            _stations.add(self)

    def close(self) -> None:
        """Stop taking part in the search for deadlocks."""
        self._name = ""

    def begin(self) -> int:
        """Return the number of a new exchange; all ranks begin theirs in the same order."""
        thread = threading.current_thread()
        self._is_shared |= self._user not in (None, thread)
        self._user = thread
        number = self._begun
        self._begun += 1
        return number

    @contextlib.contextmanager
    def waiting(self, exchange: int, owner: Owner | None) -> Iterator[None]:
        """Take note that this thread waits in an exchange."""
        self._waits[exchange] = _Wait(threading.current_thread(), time.monotonic(), owner)
        try:
            yield
        finally:
            del self._waits[exchange]

    def pause(self) -> float:
        """Return the seconds after which to call `tell` again; infinity with a single communicator."""
        return _TELL_SECONDS / 2 if self._name and len(_stations) > 1 else math.inf

    def tell(self) -> list[str]:
        """Return what to tell the other ranks about threads that have waited for long."""
        texts = []
        with _changing:
            for exchange, wait in list(self._waits.items()):
                begun = {one._name: one._begun for one in _used_by(wait.thread)}
                late = time.monotonic() - wait.since >= _TELL_SECONDS
                if late and exchange not in self._told and self._name in begun:
                    self._told.add(exchange)
                    owner = told(wait.owner)[:_LONGEST_OWNER]
                    texts.append(json.dumps([exchange, begun, owner], separators=(",", ":")))
        return texts

    def hear(self, peer: int, text: str) -> None:
        """Take note of what another rank tells."""
        with contextlib.suppress(ValueError), _changing:  # a text that was cut off
            self._heard[peer] = _Heard(*json.loads(text))

    def judge(self) -> None:
        """Refuse exchanges in which this rank waits for a rank that waits for this rank in another communicator."""
        for exchange, wait in list(self._waits.items()):
            found = self._crossed(exchange, wait) if exchange in self._told else {}
            for peer, owner in found.items():
                texts = {self._rank: told(wait.owner), peer: owner}
                how = "over different communicators, so that each waits for the other"
                self._refuse(exchange, other_owners(texts, wait.owner, how))

    def _crossed(self, exchange: int, wait: _Wait) -> dict[int, str]:
        """Return the ranks that wait for this thread elsewhere while it waits for them here, and what they wait in."""
        with _changing:
            return {
                peer: heard.owner
                for other in _used_by(wait.thread)
                if other is not self
                for peer, heard in other._heard.items()
                if heard.exchange >= other._begun and heard.begun.get(self._name, math.inf) <= exchange
            }


def _used_by(thread: threading.Thread) -> list[Station]:
    """Return the stations that only one thread has used."""
    return [one for one in _stations if one._name and one._user is thread and not one._is_shared]


def _renew_in_child() -> None:
    global _changing  # noqa: PLW0603
    _changing = threading.Lock()  # another thread of the parent may have held it


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_renew_in_child)
