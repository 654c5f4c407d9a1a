"""Connections through which a rank learns soon that another one has died, given up, stopped or become unreachable.

MPI does not report that a rank has died. gloo does not report it to a rank that is in the middle of a message. So every
two ranks have one more TCP connection, which a thread watches. If the peer's process ends, the peer's system closes the
connection. If the peer's machine no longer answers, the local system closes it. Neither needs Python to run on the
peer. A process that is only silent still lives, but holds Python's lock or is stopped: the ranks that wait for it warn,
and go on waiting unless the caller has limited the silence. When a rank announces its end or failure, it names the
first exchange that it will not complete. So a rank that ends after its last exchange does not disturb ranks that are
still receiving.
"""

from __future__ import annotations

import errno
import os
import secrets
import selectors
import socket
import struct
import threading
import time
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from typing import NamedTuple

from qcomp.comm.connecting import Share, connect
from qcomp.comm.deadlocks import Station
from qcomp.comm.patience import SILENCE
from qcomp.core.mean.stages import Owner
from qcomp.core.reporting import name_ranks, warn_caller

_MESSAGE = struct.Struct("<cQH")
"""Kind of message, first exchange that the sender will not complete, bytes of the reason that follows."""
_BEAT, _FINISHED, _FAILED, _WAITING = b".", b"f", b"x", b"w"
_LONGEST_REASON = 1000
_BEATS = 4
"""Signs of life that a rank sends within the shortest silence limit of any rank."""
_LONGEST_TIMER = 32767.0
"""The most seconds that the system accepts for its timers."""
_GRACE_SECONDS = 0.3
"""Time for the last messages of a dead rank to arrive, or for this rank to find the same fault itself."""
_PAUSE_SECONDS = 0.02
_ALL_EXCHANGES = 0
_NO_RANK = -1
_ENDED = "has finished, died or given up: its connection is closed"
_OUT_OF_REACH = {errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ENETDOWN}


class _Loss(NamedTuple):
    """What is known about a rank that takes no further part."""

    first: int
    """The first exchange that it will not complete."""
    reason: str
    dead: bool
    """Whether its process has ended without a word, or cannot be reached."""


class Lifelines:
    """The connections of one rank to the others, by rank, and the thread that watches them.

    A rank counts as lost after ``silence`` seconds without a sign of life; with None it is only reported, after
    `SILENCE` seconds. This rank gives a sign every ``pause`` seconds. The communicator's name is the same on all ranks
    and in no other communicator. ``changed`` is notified when a rank is lost, or when there is something to say about a
    silent one.
    """

    def __init__(
        self,
        sockets: Mapping[int, socket.socket],
        *,
        silence: float | None,
        pause: float | None = None,
        name: str = "",
        rank: int = 0,
    ) -> None:
        self.changed = threading.Condition()
        self._station = Station(name, rank, self._refuse)
        self._begun = 0
        self._sockets = dict(sockets)
        self._limit = SILENCE if silence is None else silence
        self._pause = min(self._limit, SILENCE) / _BEATS if pause is None else pause
        self._incomplete: set[int] = set()
        self._lost: dict[int, _Loss] = {}
        self._dead: set[int] = set()
        self._left: set[int] = set()
        self._errors: dict[int, OSError] = {}
        self._unread = dict.fromkeys(sockets, b"")
        now = time.monotonic()
        self._heard = dict.fromkeys(sockets, now)
        self._silent: dict[int, float] = {}
        self._news: dict[int, str] = {}
        self._reported: set[int] = set()
        self._expected: list[tuple[float, int, _Loss]] = []
        self._turned = self._spoke = now
        self._sending = threading.RLock()  # the garbage collector may call `finish` anywhere
        self._thread = threading.Thread(target=self._watch, name="qcomp lifelines", daemon=True)
        _open.add(self)
        if not sockets:
            return
        self._selector = selectors.DefaultSelector()
        for peer, connection in self._sockets.items():
            connection.setblocking(False)
            self._selector.register(connection, selectors.EVENT_READ, peer)
        watched = {peer for peer, connection in self._sockets.items() if _is_watched(connection, self._limit)}
        self._fatal = self._sockets.keys() - watched if silence is None else self._sockets.keys()
        self._waker, self._woken = socket.socketpair()
        self._selector.register(self._woken, selectors.EVENT_READ, None)
        self._thread.start()

    def begin(self) -> int:
        """Return the number of a new exchange; all ranks begin theirs in the same order."""
        number = self._station.begin()
        self._begun = number + 1
        self._incomplete.add(number)
        return number

    def waiting(self, exchange: int, owner: Owner | None) -> AbstractContextManager[None]:
        """Let others know if this thread waits for long in an exchange; see `qcomp.comm.deadlocks`."""
        return self._station.waiting(exchange, owner)

    def _refuse(self, exchange: int, reason: str) -> None:
        """Make an exchange fail, because this rank waits in it for a rank that will not come."""
        self._lose(_NO_RANK, _Loss(exchange, reason, dead=False))

    def complete(self, exchange: int) -> None:
        """Take note that this rank has completed an exchange, in which it has heard from all ranks."""
        self._incomplete.discard(exchange)
        for peer in list(self._silent):
            self._hear(peer, time.monotonic())

    def problem(self, exchange: int, verb: str) -> str | None:
        """Return why an exchange cannot be completed, or None while no rank that it needs is lost."""
        return _reason(list(self._lost.values()), exchange, verb)

    def cause(self, exchange: int, verb: str) -> str | None:
        """Return why the transport has failed in an exchange, or None if no rank has announced its end.

        The transport only knows which connection closed. The peer at its other end may have given up because of a third
        rank.
        """
        with self.changed:
            return self.changed.wait_for(
                lambda: _reason(
                    [*self._lost.values(), *(loss for _, _, loss in self._expected)], exchange, verb
                ),
                timeout=_GRACE_SECONDS,
            )

    def is_dead(self, peer: int) -> bool:
        """Return whether the process of a rank has ended without a word, or cannot be reached."""
        return peer in self._dead

    @property
    def has_news(self) -> bool:
        """Whether `report` has something to say."""
        return bool(self._news)

    def report(self) -> None:
        """Warn of ranks that have fallen silent, and of ranks that are heard again; a rank calls it while it waits."""
        with self.changed:
            texts = list(self._news.values())
            self._news.clear()
            self._reported = set(self._silent)
        for text in texts:
            warn_caller(text, RuntimeWarning)

    def silent(self) -> str:
        """Return a text for an error that names the silent ranks; empty if no rank is silent."""
        silences = sorted(self._silent.items())
        now = time.monotonic()
        return "".join(f"; nothing was heard of rank {peer} for {now - x:.0f} s" for peer, x in silences)

    def give_up(self, reason: str) -> None:
        """Tell the others that this rank has failed, and why."""
        self._send(_FAILED, reason)

    def finish(self) -> None:
        """Tell the others that this rank takes no further part, and close the connections."""
        self._send(_FINISHED)
        self._station.close()
        if self._thread.ident is not None:
            self._waker.close()
        with self._sending:
            self._close()

    def join(self, timeout: float) -> None:
        """Wait for the thread to end after `finish`, for at most ``timeout`` seconds."""
        if self._thread.ident is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout)

    def _close(self) -> None:
        connections, self._sockets = self._sockets, {}
        for connection in connections.values():
            connection.close()

    def _send(self, kind: bytes, reason: str = "") -> None:
        text = reason.encode()[:_LONGEST_REASON]
        data = _MESSAGE.pack(kind, min(self._incomplete, default=self._begun), len(text)) + text
        with self._sending:
            for peer, connection in self._sockets.items():
                try:
                    whole = connection.send(data) == len(data)
                except BlockingIOError:
                    whole = True  # the peer does not read: it has stopped
                except OSError as error:
                    self._errors[peer] = error  # `_read` notices the end of the connection, but not the error
                    continue
                if not whole:  # the peer would misread any further message
                    with suppress(OSError):
                        connection.shutdown(socket.SHUT_WR)

    def _watch(self) -> None:
        while self._turn():
            pass
        self._selector.close()
        self._woken.close()

    def _turn(self) -> bool:
        """Wait a little, read what has arrived, and send a sign of life when due; return whether to go on."""
        due = [self._spoke + self._pause, self._turned + self._station.pause()]
        due += (due for due, _, _ in self._expected)
        due += (heard + self._limit for peer, heard in self._heard.items() if peer not in self._silent)
        events = self._selector.select(max(0.0, min(due) - time.monotonic()))
        now = time.monotonic()
        if now - self._turned > self._limit / 2:
            # This process itself was stopped, and has not read what the others sent meanwhile.
            self._heard = dict.fromkeys(self._heard, now)
        self._turned = now
        for key, _ in events:
            if key.data is None:
                return False
            self._read(key.data, now)
        if now >= self._spoke + self._pause:
            self._spoke = now
            self._send(_BEAT)
        for text in self._station.tell():
            self._send(_WAITING, text)
        self._station.judge()
        while self._expected and now >= self._expected[0][0]:
            _, peer, loss = self._expected[0]
            self._lose(peer, loss)
            del self._expected[0]
        for peer, heard in list(self._heard.items()):
            if now >= heard + self._limit and peer not in self._silent:
                self._miss(peer, heard)
        return True

    def _read(self, peer: int, now: float) -> None:
        connection = self._sockets.get(peer)
        try:
            data = b"" if connection is None else connection.recv(1 << 16)
        except BlockingIOError:
            return
        except OSError as error:
            self._errors[peer] = error
            data = b""
        if not data:
            if connection is not None:
                self._selector.unregister(connection)
            for known in (self._heard, self._silent, self._news):
                known.pop(peer, None)
            self._expect(peer, self._end_of(peer), now)
            return
        self._hear(peer, now)
        self._unread[peer] += data
        while len(text := self._unread[peer]) >= _MESSAGE.size:
            kind, first, length = _MESSAGE.unpack_from(text)
            end = _MESSAGE.size + length
            if len(text) < end:
                return
            self._unread[peer] = text[end:]
            why = text[_MESSAGE.size : end].decode(errors="replace")
            if kind == _WAITING:
                self._station.hear(peer, why)
            elif kind == _FAILED:
                self._expect(peer, _Loss(first, f"rank {peer} failed: {why}", dead=False), now)
            elif kind == _FINISHED:
                self._left.add(peer)
                self._expect(peer, _Loss(first, f"rank {peer} {_ENDED}", dead=False), now)

    def _end_of(self, peer: int) -> _Loss:
        """Return what the end of a connection says about the peer."""
        error = self._errors.get(peer)
        if error is not None and error.errno in _OUT_OF_REACH:
            text = f"rank {peer} cannot be reached: its machine is down or cut off ({error.strerror})"
            return _Loss(_ALL_EXCHANGES, text, dead=True)
        return _Loss(_ALL_EXCHANGES, f"rank {peer} {_ENDED}", dead=peer not in self._left)

    def _hear(self, peer: int, now: float) -> None:
        """Take note of a sign of life."""
        if peer not in self._heard:
            return
        self._heard[peer] = now
        if peer not in self._silent:
            return
        with self.changed:
            since = self._silent.pop(peer, now)
            if peer in self._reported:
                self._news[peer] = f"rank {peer} is heard again, after {now - since:.0f} s"
            else:
                self._news.pop(peer, None)

    def _miss(self, peer: int, heard: float) -> None:
        """Take note that nothing was heard of a rank for the longest time allowed."""
        if peer in self._fatal:
            del self._heard[peer]
            text = f"nothing was heard of rank {peer} for {self._limit:g} s: it was stopped or cut off"
            self._lose(peer, _Loss(_ALL_EXCHANGES, text, dead=True))
            return
        since = time.strftime("%H:%M:%S", time.localtime(time.time() - self._limit))
        with self.changed:
            self._silent[peer] = heard
            self._news[peer] = (
                f"nothing was heard of rank {peer} for {self._limit:g} s, since {since}: its process holds Python's "
                "lock or is stopped, or its machine is cut off, in which case an error follows within seconds. This "
                "rank waits until the timeout; to give up sooner, set silence= or QCOMP_SILENCE"
            )
            self.changed.notify_all()

    def _expect(self, peer: int, loss: _Loss, now: float) -> None:
        # In order of arrival, so that errors name the first failure, not a rank that gave up because of it.
        with self.changed:
            self._expected.append((now + _GRACE_SECONDS, peer, loss))
            self.changed.notify_all()

    def _lose(self, peer: int, loss: _Loss) -> None:
        with self.changed:
            self._lost.setdefault(peer, loss)
            if loss.dead:
                self._dead.add(peer)
            self.changed.notify_all()

    def after_fork(self) -> None:
        """Close this child's copies of the connections, so that the connections end with the parent."""
        self._sending = threading.RLock()  # the parent's thread may have held it
        self._close()


def _reason(losses: Sequence[_Loss], exchange: int, verb: str) -> str | None:
    """Return why an exchange cannot be completed, if one of these ranks is needed."""
    return next((f"{verb}: {loss.reason}" for loss in losses if exchange >= loss.first), None)


def _is_watched(connection: socket.socket, limit: float) -> bool:
    """Let the system end a connection if the peer's machine does not answer for some seconds; return whether it can."""
    if connection.getsockname()[:1] == connection.getpeername()[:1]:
        return True  # the peer is on this machine
    seconds = min(limit, _LONGEST_TIMER)
    # A quarter of the limit may pass before the next sign of life is sent and stays unanswered.
    try:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in (
            ("TCP_KEEPIDLE", seconds / 2),
            ("TCP_KEEPINTVL", seconds / 8),
            ("TCP_KEEPCNT", 4),
            ("TCP_USER_TIMEOUT", 700 * seconds),
        ):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), max(1, int(value)))
    except (AttributeError, OSError):  # another system
        return False
    return True


_open: weakref.WeakSet[Lifelines] = weakref.WeakSet()


def _forget_in_child() -> None:
    for each in list(_open):
        each.after_fork()


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_forget_in_child)


def lifelines(
    rank: int,
    size: int,
    share: Share,
    *,
    silence: float | None,
    look_for: Callable[[Collection[int]], None] = lambda _: None,
) -> Lifelines:
    """Connect this rank with all others.

    ``share`` gives a text to all ranks; see `qcomp.comm.connecting`. ``look_for`` is called with the ranks to which no
    connection can be made, and raises if the transport knows that one has ended. Raises CommunicatorError if a rank
    ends meanwhile. Warns if no connection to a rank can be made: only the transport then notices its death.
    """
    if size == 1:
        return Lifelines({}, silence=silence)
    pause = min(SILENCE, SILENCE if silence is None else silence) / _BEATS
    sockets, notes = connect(rank, size, share, note=f"{pause!r},{secrets.token_hex(8)}")
    pauses, names = zip(*(notes[peer].split(",") for peer in range(size)), strict=True)
    missing = set(range(size)) - sockets.keys() - {rank}
    try:
        if missing:
            until = time.monotonic() + _GRACE_SECONDS
            while time.monotonic() < until:  # the transport takes a moment to notice an end
                look_for(missing)
                time.sleep(_PAUSE_SECONDS)
            warn_caller(
                f"rank {rank} has no connection to {name_ranks(missing)} besides the transport's, so it may notice "
                "their death only at the timeout: let the nodes reach each other on all TCP ports, or set "
                "GLOO_SOCKET_IFNAME to the interface on which they do",
                RuntimeWarning,
            )
    except BaseException:
        for connection in sockets.values():
            connection.close()
        raise
    for connection in sockets.values():
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return Lifelines(sockets, silence=silence, pause=min(map(float, pauses)), name=names[0], rank=rank)
