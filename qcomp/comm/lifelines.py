"""Connections through which a rank learns soon that another one has died, given up, stopped or become unreachable.

MPI does not report a dead rank, and gloo does not report it to a rank in the middle of a message. So every two ranks
have one more TCP connection, which a thread watches. If it closes, the peer has ended. If it stays silent, the peer has
stopped or cannot be reached. When a rank announces its end or failure, it names the first exchange that it will not
complete, so a rank that ends after its last exchange does not disturb ranks that are still receiving.
"""

from __future__ import annotations

import os
import secrets
import selectors
import socket
import struct
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from typing import NamedTuple

from qcomp.comm.deadlocks import Station
from qcomp.core.mean.stages import Owner
from qcomp.core.reporting import name_ranks

__all__ = ["SILENCE", "Lifelines", "lifelines"]

SILENCE = 20.0
"""Default for the seconds without a sign of life after which a rank counts as lost."""

Share = Callable[[bytes], list[bytes]]
"""Sends text to all ranks and returns what each one sent; the call is collective."""

_MESSAGE = struct.Struct("<cQH")
"""Kind, the first exchange that the sender will not complete, bytes of the reason that follows."""
_BEAT, _FINISHED, _FAILED, _WAITING = b".", b"f", b"x", b"w"
_HELLO = struct.Struct("<16sI")
"""The token of the rank that accepts, and the rank that connects."""
_LONGEST_REASON = 1000
_BEATS = 4
"""Signs of life that a rank sends within the seconds of `silence`."""
_GRACE_SECONDS = 0.3
"""Time for the last messages of a dead rank to arrive, or for this rank to find the same fault itself."""
_CONNECT_SECONDS = 2.0
_REPLY_SECONDS = 15.0
_PATIENCE_SECONDS = 0.05
_SIOCGIFADDR = 0x8915
"""Linux: the IPv4 address of an interface."""
_ALL_EXCHANGES = 0
_NO_RANK = -1
_ENDED = "has finished, died or given up: its connection is closed"


class _Loss(NamedTuple):
    """What is known about a rank that takes no further part."""

    first: int
    """The first exchange that it will not complete."""
    reason: str
    dead: bool
    """Whether its process has ended, or shows no sign of life."""


class Lifelines:
    """The connections of one rank to the others, and the thread that watches them.

    Parameters
    ----------
    sockets : mapping from int to socket
        By rank.
    silence : float
        Seconds without a sign of life after which a rank counts as lost.
    name : str, optional
        The name of the communicator, the same on all ranks and in no other communicator.
    rank : int, optional
        This rank.

    Attributes
    ----------
    changed : threading.Condition
        Notified when a rank is lost.
    """

    def __init__(
        self, sockets: Mapping[int, socket.socket], *, silence: float, name: str = "", rank: int = 0
    ) -> None:
        self.changed = threading.Condition()
        self._station = Station(name, rank, self._refuse)
        self._begun = 0
        self._sockets = dict(sockets)
        self._silence = silence
        self._incomplete: set[int] = set()
        self._lost: dict[int, _Loss] = {}
        self._dead: set[int] = set()
        self._unread = dict.fromkeys(sockets, b"")
        now = time.monotonic()
        self._heard = dict.fromkeys(sockets, now)
        self._expected: list[tuple[float, int, _Loss]] = []
        self._turned = self._spoke = now
        self._sending = threading.Lock()
        self._thread = threading.Thread(target=self._watch, name="qcomp lifelines", daemon=True)
        _open.add(self)
        if not sockets:
            return
        self._selector = selectors.DefaultSelector()
        for peer, connection in self._sockets.items():
            connection.setblocking(False)
            self._selector.register(connection, selectors.EVENT_READ, peer)
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
        """Let an exchange fail in which this rank waits in vain."""
        self._lose(_NO_RANK, _Loss(exchange, reason, dead=False))

    def complete(self, exchange: int) -> None:
        """Take note that this rank has sent and received all of an exchange."""
        self._incomplete.discard(exchange)

    def problem(self, exchange: int, verb: str) -> str | None:
        """Return why an exchange cannot be completed, or None while no rank that it needs is lost."""
        return _reason(list(self._lost.values()), exchange, verb)

    def cause(self, exchange: int, verb: str) -> str | None:
        """Return why the transport has failed in an exchange, or None if no rank has announced its end.

        The transport only knows which connection closed: its peer may have given up because of another rank.
        """
        with self.changed:
            return self.changed.wait_for(
                lambda: _reason(
                    [*self._lost.values(), *(loss for _, _, loss in self._expected)], exchange, verb
                ),
                timeout=_GRACE_SECONDS,
            )

    def is_dead(self, peer: int) -> bool:
        """Return whether the process of a rank has ended, or shows no sign of life."""
        return peer in self._dead

    def give_up(self, reason: str) -> None:
        """Tell the others that this rank has failed, and why."""
        self._send(_FAILED, reason)

    def finish(self) -> None:
        """Tell the others that this rank ends, and close the connections."""
        self._send(_FINISHED)
        self._station.close()
        if self._thread.ident is not None:
            self._waker.close()
        with self._sending:
            self._close()

    def join(self, timeout: float) -> None:
        """Wait for the end of the thread after `finish`, at most for some seconds."""
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
            for connection in self._sockets.values():
                try:
                    whole = connection.send(data) == len(data)
                except BlockingIOError:
                    whole = True  # the peer does not read: it has stopped
                except OSError:
                    continue  # the peer has ended; `_read` notices this on the same connection
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
        pause = self._silence / _BEATS
        next_tell = self._turned + self._station.pause()
        soonest = min([next_tell, self._spoke + pause, *(due for due, _, _ in self._expected)])
        events = self._selector.select(max(0.0, soonest - time.monotonic()))
        now = time.monotonic()
        if now - self._turned > 2 * pause:
            # This process itself was stopped, and has not read what the others sent meanwhile.
            self._heard = dict.fromkeys(self._heard, now)
        self._turned = now
        for key, _ in events:
            if key.data is None:
                return False
            self._read(key.data, now)
        if now >= self._spoke + pause:
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
            if now - heard > self._silence:
                del self._heard[peer]
                text = f"nothing was heard of rank {peer} for {self._silence:g} s: it was stopped or cut off"
                self._lose(peer, _Loss(_ALL_EXCHANGES, text, dead=True))
        return True

    def _read(self, peer: int, now: float) -> None:
        connection = self._sockets.get(peer)
        try:
            data = b"" if connection is None else connection.recv(1 << 16)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            if connection is not None:
                self._selector.unregister(connection)
            self._heard.pop(peer, None)
            self._expect(peer, _Loss(_ALL_EXCHANGES, f"rank {peer} {_ENDED}", dead=True), now)
            return
        if peer in self._heard:
            self._heard[peer] = now
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
                self._expect(peer, _Loss(first, f"rank {peer} {_ENDED}", dead=False), now)

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
        """Close this child's copies of the connections, so that they end with the parent."""
        self._sending = threading.Lock()  # the parent's thread may have held it
        self._close()


def _reason(losses: Sequence[_Loss], exchange: int, verb: str) -> str | None:
    """Return why an exchange cannot be completed, if one of these ranks is needed."""
    return next((f"{verb}: {loss.reason}" for loss in losses if exchange >= loss.first), None)


_open: weakref.WeakSet[Lifelines] = weakref.WeakSet()


def _forget_in_child() -> None:
    for each in list(_open):
        each.after_fork()


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_forget_in_child)


def lifelines(rank: int, size: int, share: Share, *, silence: float) -> Lifelines:
    """Connect this rank with all others.

    Parameters
    ----------
    rank, size : int
    share : callable
        Sends text to all ranks and returns what each one sent. It is collective, and called twice.
    silence : float
        Seconds without a sign of life after which a rank counts as lost.

    Returns
    -------
    Lifelines

    Warns
    -----
    RuntimeWarning
        If no connection to a rank can be made. Only the transport then notices its death.
    """
    if size == 1:
        return Lifelines({}, silence=silence)
    with ExitStack() as stack:
        listener = stack.enter_context(_listener(size))
        listener.settimeout(_PATIENCE_SECONDS)
        own = secrets.token_bytes(_HELLO.size - 4)
        port = listener.getsockname()[1]
        lines = [
            text.decode().split() for text in share(" ".join([own.hex(), str(port), *_addresses()]).encode())
        ]
        accepted: dict[int, socket.socket] = {}
        accepting = threading.Thread(
            target=_accept, args=(listener, own, accepted, size - 1 - rank), daemon=True
        )
        accepting.start()
        found: dict[int, socket.socket] = {}
        for peer in range(rank):
            token, port_there, *addresses = lines[peer]
            hello = _HELLO.pack(bytes.fromhex(token), rank)
            connection = _connect(addresses, int(port_there), hello)
            if connection is not None:
                found[peer] = connection
        connected = share(" ".join(map(str, found)).encode())
        listener.close()
        accepting.join()
        expected = {peer for peer in range(rank + 1, size) if str(rank) in connected[peer].decode().split()}
        found |= {peer: connection for peer, connection in accepted.items() if peer in expected}
        for peer in accepted.keys() - expected:
            accepted[peer].close()
    missing = set(range(size)) - found.keys() - {rank}
    if missing:
        warnings.warn(
            f"rank {rank} has no connection to {name_ranks(missing)} beside the transport's, so their death is noticed "
            "only by the transport: let the nodes reach each other on all TCP ports, or set GLOO_SOCKET_IFNAME to the "
            "interface on which they do",
            RuntimeWarning,
            stacklevel=4,
        )
    for connection in found.values():
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return Lifelines(found, silence=silence, name=lines[0][0], rank=rank)


def _listener(backlog: int) -> socket.socket:
    if socket.has_dualstack_ipv6():
        with suppress(OSError):
            return socket.create_server(("", 0), family=socket.AF_INET6, backlog=backlog, dualstack_ipv6=True)
    return socket.create_server(("", 0), backlog=backlog)


def _accept(listener: socket.socket, token: bytes, accepted: dict[int, socket.socket], wanted: int) -> None:
    """Accept connections from ranks that know this rank's token, until all are there or the listener is closed."""
    while len(accepted) < wanted:
        try:
            connection, _ = listener.accept()
        except TimeoutError:
            continue
        except OSError:
            return
        try:
            connection.settimeout(_CONNECT_SECONDS)
            told, peer = _HELLO.unpack(_exactly(connection, _HELLO.size))
            if not secrets.compare_digest(told, token):
                raise OSError("the peer of this connection does not know the token")
            connection.sendall(token)
            accepted[peer] = connection
        except OSError:
            connection.close()


def _connect(addresses: Sequence[str], port: int, hello: bytes) -> socket.socket | None:
    """Return a connection to the rank that knows the token, at the first of these addresses where it answers."""
    for address in addresses:
        with suppress(OSError):
            connection = socket.create_connection((address, port), timeout=_CONNECT_SECONDS)
            try:
                connection.settimeout(_REPLY_SECONDS)
                connection.sendall(hello)
                if secrets.compare_digest(_exactly(connection, _HELLO.size - 4), hello[:-4]):
                    return connection
            except OSError:
                pass
            connection.close()
    return None


def _exactly(connection: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = connection.recv(size - len(data))
        if not part:
            raise ConnectionError("the connection was closed")
        data += part
    return data


def _addresses() -> list[str]:
    """Return the addresses at which others may reach this host, the most likely ones first."""
    found = [*_of_interfaces(), *_of_name()]
    first = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")
    addresses = [
        address for name, address in sorted(found, key=lambda pair: (pair[0] == "lo", pair[0] not in first))
    ]
    return list(dict.fromkeys([*addresses, "127.0.0.1"]))


def _of_interfaces() -> Iterator[tuple[str, str]]:
    """Yield each network interface with its IPv4 address."""
    try:
        import fcntl  # noqa: PLC0415  (not on Windows)
    except ImportError:
        return
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for _, name in socket.if_nameindex():
            with suppress(OSError):
                request = struct.pack("256s", name.encode()[:15])
                reply = fcntl.ioctl(any_socket.fileno(), _SIOCGIFADDR, request)
                yield name, socket.inet_ntoa(reply[20:24])


def _of_name() -> Iterator[tuple[str, str]]:
    """Yield the addresses that this host's name resolves to."""
    with suppress(OSError):
        for *_, address in socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM):
            yield "", str(address[0])
