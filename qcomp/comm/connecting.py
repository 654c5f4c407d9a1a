"""Makes a TCP connection between every two ranks, in addition to the connections of the transport."""

from __future__ import annotations

import os
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from typing import NamedTuple

from qcomp.core.errors import CommunicatorError

Share = Callable[[str, Callable[[], None]], Iterable[tuple[int, str]]]
"""Gives a text to all ranks, and yields every rank with its text as soon as the text arrives; the call is collective.

While it waits, it calls the given function again and again; the function raises if a rank has ended.
"""

_HELLO = struct.Struct("<16sI")
"""The token of the accepting rank, and the number of the connecting rank."""
_TOKEN_BYTES = 16
_CONNECT_SECONDS = 2.0
_HELLO_SECONDS = 15.0
"""Time for a whole hello, and for the whole reply to it."""
_PAUSE_SECONDS = 0.05
_SIOCGIFADDR = 0x8915
"""Linux: the IPv4 address of an interface."""


class Connected(NamedTuple):
    """The connections of one rank to the others."""

    sockets: dict[int, socket.socket]
    """The connections by rank; ranks that cannot be reached are missing."""
    notes: dict[int, str]
    """The note of every rank, by rank."""


def connect(rank: int, size: int, share: Share, *, note: str) -> Connected:
    """Connect this rank with all others; each side proves that it knows a token that only ranks know.

    It calls ``share`` twice. ``note`` is one word, which the other ranks receive. Raises CommunicatorError if a rank
    ends meanwhile.
    """
    door = _Door(rank, size)
    try:
        notes = {}
        card = " ".join([note, door.token.hex(), str(door.port), *_addresses()])
        for peer, text in share(card, door.check):
            notes[peer], token, port, *addresses = text.split()
            if peer < rank:
                hello = _HELLO.pack(bytes.fromhex(token), rank)
                connection = _connection(addresses, int(port), hello)
                if connection is not None:
                    door.connected[peer] = connection
        reached = dict(share(" ".join(map(str, door.connected)), door.check))
        door.close()
    except BaseException:
        door.close()
        door.drop(door.connected)
        raise
    # A connection counts if the rank that made it has heard the reply.
    door.drop(peer for peer in door.connected if peer > rank and str(rank) not in reached[peer].split())
    return Connected(door.connected, notes)


class _Door:
    """Accepts the connections of ranks with higher numbers, and also keeps those to ranks with lower numbers."""

    def __init__(self, rank: int, size: int) -> None:
        self.token = secrets.token_bytes(_TOKEN_BYTES)
        self.connected: dict[int, socket.socket] = {}
        self._expected = set(range(rank + 1, size))
        self._changing = threading.Lock()
        self._listener = _listener(size)
        self._listener.settimeout(_PAUSE_SECONDS)
        self.port = self._listener.getsockname()[1]
        self._thread = threading.Thread(target=self._accept, name="qcomp connections", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raise if a connected rank has ended."""
        for peer, connection in list(self.connected.items()):
            if _is_closed(connection):
                raise CommunicatorError(f"rank {peer} ended while the ranks made their communicators")

    def close(self) -> None:
        """Accept no more connections."""
        with self._changing:
            self._expected.clear()
        self._thread.join()

    def drop(self, peers: Iterable[int]) -> None:
        """Close the connections to some ranks."""
        for peer in list(peers):
            self.connected.pop(peer).close()

    def _accept(self) -> None:
        """Accept connections until all higher ranks are there, or the door is closed."""
        with self._listener:
            while self._expected:
                with suppress(OSError):  # for instance if nobody has connected for a moment
                    connection, _ = self._listener.accept()
                    # Each connection has a thread, so that a stranger who says little or nothing delays no rank.
                    threading.Thread(target=self._welcome, args=(connection,), daemon=True).start()

    def _welcome(self, connection: socket.socket) -> None:
        """Keep a connection if a rank has made it."""
        try:
            token, peer = _HELLO.unpack(_exactly(connection, _HELLO.size))
            known = secrets.compare_digest(token, self.token)
            with self._changing:
                if known and peer in self._expected:
                    connection.sendall(token)
                    self.connected[peer] = connection
                    self._expected.remove(peer)
                    return
        except OSError:
            pass
        connection.close()


def _listener(backlog: int) -> socket.socket:
    if socket.has_dualstack_ipv6():
        with suppress(OSError):
            return socket.create_server(("", 0), family=socket.AF_INET6, backlog=backlog, dualstack_ipv6=True)
    return socket.create_server(("", 0), backlog=backlog)


def _connection(addresses: Sequence[str], port: int, hello: bytes) -> socket.socket | None:
    """Return a connection to the rank that knows the token, at the first of these addresses where it answers."""
    for address in addresses:
        with suppress(OSError):
            connection = socket.create_connection((address, port), timeout=_CONNECT_SECONDS)
            known = False
            try:
                connection.sendall(hello)
                known = secrets.compare_digest(_exactly(connection, _TOKEN_BYTES), hello[:_TOKEN_BYTES])
            finally:
                if not known:
                    connection.close()
            if known:
                return connection
    return None


def _exactly(connection: socket.socket, size: int) -> bytes:
    """Return the next ``size`` bytes, which must all arrive within `_HELLO_SECONDS`."""
    deadline, data = time.monotonic() + _HELLO_SECONDS, b""
    while len(data) < size:
        connection.settimeout(max(deadline - time.monotonic(), 1e-3))
        part = connection.recv(size - len(data))
        if not part:
            raise ConnectionError("the connection was closed")
        data += part
    return data


def _is_closed(connection: socket.socket) -> bool:
    """Return whether the peer has closed a connection without sending anything more."""
    connection.setblocking(False)
    try:
        return not connection.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        return False
    except OSError:
        return True


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
