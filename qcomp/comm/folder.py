"""A communicator whose ranks exchange files, in a folder that all ranks see, or in an object store.

Each message is a file: a line of JSON, then the bytes. A rank deletes its messages once all others have read them.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import time
import weakref
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, NamedTuple

import numpy as np

from qcomp.comm.beats import Beats
from qcomp.comm.buffers import from_host, stage_exchange
from qcomp.comm.host import host_name
from qcomp.comm.patience import patience
from qcomp.comm.stores import Store, store_at
from qcomp.comm.verbs import Pending, Verbs, described, require_rank_of_its_own
from qcomp.core.errors import CommunicatorError
from qcomp.core.mean.stages import Owner, as_mismatch, other_owners, told
from qcomp.core.reporting import name_ranks

Array = Any

_HERE, _GO, _BEAT, _END = "here", "go", "beat", "end"
"""Files of a session: a rank has come, all have come, a rank's sign of life, and how a rank has ended."""
_SHORTEST_PAUSE = 5e-4
_GROWTH = 1.3


class _Head(NamedTuple):
    """The first line of a message."""

    verb: str
    owner: int
    told: str
    sizes: list[int]
    """The bytes for each rank."""
    digest: str
    done: int
    """The sender has completed all exchanges up to this number, inclusive."""


class _Session:
    """The files of a rank in a folder that only the ranks of its job know."""

    def __init__(self, store: Store, name: str, rank: int, size: int) -> None:
        self._store, self._name, self._rank, self._size = store, name, rank, size
        self._process = os.getpid()
        self.sent: dict[int, list[str]] = {}
        """The names of the messages that are not deleted yet, by number of their exchange."""
        self.beats: Beats | None = None

    def begin_beats(self, silence: float) -> None:
        """Write signs of life from now on, and watch the signs of the other ranks."""
        self.beats = Beats(
            lambda sign: self.write(f"{_BEAT}.{self._rank}", sign),
            lambda r: self.read(f"{_BEAT}.{r}"),
            silence,
        )

    def write(self, name: str, *parts: bytes) -> None:
        self._store.write(f"{self._name}/{name}", *parts)

    def read(self, name: str) -> bytes | None:
        return self._store.read(f"{self._name}/{name}")

    def delete(self, name: str) -> None:
        self._store.delete(f"{self._name}/{name}")

    def end(self, how: str) -> None:
        """Write why this rank has failed, or an empty line if it has not, and the names of its remaining messages."""
        left = [name for names in self.sent.values() for name in names]
        self.write(f"{_END}.{self._rank}", "\n".join([" ".join(how.split()), *left]).encode())

    def leave(self) -> None:
        """End this rank's part, unless this is a forked child; the last rank deletes what all have left behind."""
        if self._size == 1 or os.getpid() != self._process:
            return
        if self.beats is not None:
            self.beats.end()
        with contextlib.suppress(Exception):  # the folder may be gone
            if self.read(f"{_END}.{self._rank}") is None:
                self.end("")
            ends = [self.read(f"{_END}.{r}") for r in range(self._size)]
            if None not in ends:
                left = [name for end in ends for name in (end or b"").decode().splitlines()[1:]]
                of_ranks = [f"{kind}.{r}" for kind in (_HERE, _BEAT, _END) for r in range(self._size)]
                for name in (*left, _GO, *of_ranks):
                    self.delete(name)
                self._store.delete_folder(self._name)


class FolderCommunicator(Verbs):
    """A communicator for machines that open no connections to each other, but see one folder or object store.

    It is as fast as the store: in an exchange, each rank writes a file for each other rank, or one for all, and reads
    one from each. That suits outer loops, which exchange once in hundreds of steps. Creating a communicator is
    collective.

    Parameters
    ----------
    folder : str
        A folder that all ranks see, such as one on NFS, or a URL of a store for fsspec, such as ``"s3://bucket/path"``.
        It is created.
    rank, size : int
        The number of this rank, from 0, and the number of ranks.
    job : str, default "job"
        A name that no other job in the same folder has at the same time.
    timeout : float, optional
        Seconds to wait for a rank, as for `qcomp.comm.world`.
    silence : float, optional
        Seconds without a sign of life after which a rank counts as dead, as for `qcomp.comm.world`. A thread writes a
        few bytes four times in this period. If this rank or the dead one has None, the default, the death is noticed
        only at the timeout.

    Raises
    ------
    CommunicatorError
        If not all ranks arrive in time, they differ in ``size``, another process comes with the same rank after this
        one, or the folder cannot be used.
    ValueError
        If ``rank`` is not from 0 to ``size`` - 1, or ``job`` cannot be the name of a folder.

    Notes
    -----
    Files hold their length and a BLAKE2b digest; a file that does not match them counts as not yet written. On a disk,
    files are renamed into place. A rank deletes its files once all ranks have read them, and the last ones when all
    have ended.

    Examples
    --------
    >>> import numpy as np, qcomp, tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     comm = qcomp.comm.FolderCommunicator(folder, rank=0, size=1)
    ...     comm.all_gather(np.array([7], dtype=np.uint8), [1])
    [array([7], dtype=uint8)]
    """

    compares_owners = True

    def __init__(
        self,
        folder: str | os.PathLike[str],
        rank: int,
        size: int,
        *,
        job: str = "job",
        timeout: float | None = None,
        silence: float | None = None,
    ) -> None:
        if not 0 <= rank < size:
            raise ValueError(f"rank is {rank!r} and size {size!r}; expected a rank from 0 to size - 1")
        if not job or {*job} & {*"/\\"} or job.startswith("."):
            raise ValueError(f"job is {job!r}; expected a valid name of a folder")
        if size > 1:
            require_rank_of_its_own("FolderCommunicator")
        self.rank, self.size = rank, size
        self.host = host_name(socket.gethostname())
        self.timeout, self.silence = patience(timeout=timeout, silence=silence)
        self.bytes_sent = 0
        self._store = store_at(folder)
        self._closed: str | None = None
        self._started = 0
        self._open: set[int] = set()
        self._done = dict.fromkeys((r for r in range(size) if r != rank), 0)
        with self._closing_on_failure("creation"):
            name = self._meet(job) if size > 1 else job
            self._session = _Session(self._store, name, rank, size)
            if size > 1 and self.silence is not None:
                self._session.begin_beats(self.silence)
        self._leave = weakref.finalize(self, self._session.leave)

    def __repr__(self) -> str:
        return f"FolderCommunicator(rank={self.rank}, size={self.size})"

    def close(self) -> None:
        """End this rank's part. Not collective: later exchanges fail, here and on the other ranks."""
        self._closed = self._closed or "close was called"
        self._leave()

    def _meet(self, job: str) -> str:
        """Return the name of a folder that only these ranks know, even if an earlier job has left files behind.

        Rank 0 proposes a name made from the tokens of all ranks. If a token changes, it proposes a new name. It stops
        when each rank has confirmed that the name was made from its own token.
        """
        token = secrets.token_hex(8)
        self._store.write(f"{job}/hello.{self.rank}", token.encode())
        return self._invited(job, token) if self.rank else self._proposed(job, token)

    def _proposed(self, job: str, token: str) -> str:
        everyone = range(self.size)
        missing, last = {*everyone}, ""
        for _ in self._looks("creation", missing):
            found = {r: self._store.read(f"{job}/hello.{r}") for r in everyone}
            tokens = {r: hello.decode() for r, hello in found.items() if hello and len(hello) == len(token)}
            self._require_own(job, token, tokens.get(0, token))
            missing.clear()
            missing.update(everyone - tokens.keys())
            if missing:
                continue
            name = f"{job}/{_digest(' '.join(tokens.values()).encode())}"
            if name != last:
                self._store.write(f"{job}/session", json.dumps([name, [*tokens.values()]]).encode())
                last = name
            for r in everyone[1:]:
                size = _read_json(self._store.read(f"{name}/{_HERE}.{r}"))
                if size is None:
                    missing.add(r)
                else:
                    self._require_size(r, *size)
            if not missing:
                self._store.write(f"{name}/{_GO}", b"")
                break
        return last

    def _invited(self, job: str, token: str) -> str:
        last = ""
        for _ in self._looks("creation", [0]):
            name, tokens = _read_json(self._store.read(f"{job}/session")) or ("", [])
            if tokens[self.rank : self.rank + 1] != [token]:
                hello = self._store.read(f"{job}/hello.{self.rank}") if tokens else None
                self._require_own(job, token, hello.decode() if hello and len(hello) == len(token) else token)
                continue
            if name != last:
                self._store.write(f"{name}/{_HERE}.{self.rank}", json.dumps([self.size]).encode())
                last = name
            self._require_size(0, len(tokens))
            if self._store.read(f"{name}/{_GO}") is not None:
                break
        return last

    def _require_own(self, job: str, token: str, found: str) -> None:
        """Raise CommunicatorError if another process with this rank's number has come after this one."""
        if found != token:
            raise CommunicatorError(
                f"creation: another process joined {job!r} as rank {self.rank} after this one: give each process a "
                "rank of its own; if several jobs use this folder, give each a name of its own by job="
            )

    def _require_size(self, r: int, size: int) -> None:
        """Raise CommunicatorError if another rank expects another number of ranks."""
        if size != self.size:
            raise CommunicatorError(
                f"creation: size is {self.size} on rank {self.rank} and {size} on rank {r}; expected the same on all"
            )

    def _looks(self, verb: str, missing: Collection[int]) -> Iterator[int]:
        """Yield the number of each look for files, with growing pauses; raise CommunicatorError after the timeout."""
        start, pause = time.monotonic(), _SHORTEST_PAUSE
        look = 0
        while True:
            yield look
            look += 1
            if time.monotonic() - start > self.timeout:
                ranks = name_ranks(missing)
                raise CommunicatorError(
                    f"{verb}: waited {self.timeout:g} s for a file from {ranks}: a rank has died, is late, or uses "
                    "another folder"
                )
            time.sleep(pause)
            pause = min(self._store.longest_pause, _GROWTH * pause)

    def _exchange(
        self, verb: str, send: Sequence[Array], receive: Sequence[int], owner: Owner | None = None
    ) -> list[Array]:
        return self._start(verb, send, receive, owner).wait()

    def _start(
        self, verb: str, send: Sequence[Array], receive: Sequence[int], owner: Owner | None = None
    ) -> Pending:
        buffers, sizes = stage_exchange(send, receive, rank=self.rank, size=self.size)
        self._require_open(verb)
        self._started += 1
        number = self._started
        self._open.add(number)
        with self._closing_on_failure(verb):
            self._write(number, verb, buffers, owner)
        own = from_host(np.array(buffers[self.rank], copy=True), like=send[self.rank])
        return _Exchange(self, number, verb, send, sizes, own, owner)

    def _write(self, number: int, verb: str, buffers: Sequence[Any], owner: Owner | None) -> None:
        """Write a file for each other rank, or a single file if all get the same."""
        others = [r for r in range(self.size) if r != self.rank]
        to_all = verb == "all_gather"
        self._session.sent[number] = []
        for r in others[:1] if to_all else others:
            data = buffers[r].tobytes()
            sizes = [buffer.shape[0] for buffer in buffers]
            digest = 0 if owner is None else owner.digest
            done = min(self._open) - 1
            head = _Head(verb, digest, told(owner), sizes, _digest(data), done)
            name = _name(number, self.rank, None if to_all else r)
            self._session.sent[number].append(name)
            self._session.write(name, json.dumps(head).encode() + b"\n", data)
        self.bytes_sent += sum(buffers[r].shape[0] for r in others)

    def complete(self, exchange: _Exchange) -> list[Array]:
        """Return what all ranks have sent in an exchange, once everything has arrived."""
        self._require_open(exchange.verb)
        with self._closing_on_failure(exchange.verb):
            received = []
            for r in range(self.size):
                if r == self.rank:
                    received.append(exchange.own)
                    continue
                head, data = self._read(exchange, r)
                self._done[r] = max(self._done[r], head.done)
                received.append(from_host(np.array(data, np.uint8), like=exchange.send[r]))
            self._open.discard(exchange.number)
            self._forget()
        return received

    def _read(self, exchange: _Exchange, r: int) -> tuple[_Head, memoryview]:
        """Return the message of a rank, once it has arrived; raise unless it is what the exchange expects."""
        verb, number = exchange.verb, exchange.number
        mine, all_ = _name(number, r, self.rank), _name(number, r, None)
        first, other = (all_, mine) if verb == "all_gather" else (mine, all_)
        for look in self._looks(verb, [r]):
            found = self._session.read(first)
            if found is None and look % 8 == 7:
                ended = self._session.read(f"{_END}.{r}")
                found = self._session.read(first) or self._session.read(other)
                if ended is not None and found is None:
                    reason = ended.decode().partition("\n")[0]
                    if reason:
                        raise as_mismatch(CommunicatorError(f"{verb}: rank {r} failed: {reason}"))
                    raise CommunicatorError(f"{verb}: rank {r} has finished without calling it")
                beats = self._session.beats
                if found is None and beats is not None and beats.is_silent(r, time.monotonic()):
                    raise CommunicatorError(
                        f"{verb}: rank {r} has given no sign of life for {self.silence:g} s: it has died, was stopped, "
                        "or cannot use the folder"
                    )
            message = None if found is None else _parsed(found)
            if message is not None:
                self._require_fitting(message, exchange, r)
                return message
        raise AssertionError  # the looks end in an error

    def _require_fitting(self, message: tuple[_Head, memoryview], exchange: _Exchange, r: int) -> None:
        """Raise CommunicatorError if a rank's message is not what an exchange expects of it."""
        (head, data), verb, own = message, exchange.verb, told(exchange.owner)
        if head.owner != (0 if exchange.owner is None else exchange.owner.digest):
            raise as_mismatch(CommunicatorError(other_owners({self.rank: own, r: head.told}, exchange.owner)))
        if head.verb != verb:
            raise CommunicatorError(f"rank {self.rank} called {verb} where rank {r} called {head.verb}")
        if len(data) != exchange.sizes[r]:
            raise CommunicatorError(
                f"{verb}: rank {r} sent {len(data)} bytes to rank {self.rank}, which expected {exchange.sizes[r]} bytes"
            )

    def _forget(self) -> None:
        """Delete this rank's messages of exchanges that all ranks have completed."""
        done = min(self._done.values(), default=0)
        for number in [number for number in self._session.sent if number <= done]:
            for name in self._session.sent.pop(number):
                self._session.delete(name)

    @contextlib.contextmanager
    def _closing_on_failure(self, verb: str) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            known = isinstance(error, CommunicatorError)
            self._closed = str(error) if known else f"{verb} was interrupted by {described(error)}"
            with contextlib.suppress(Exception):  # the store may be what has failed
                self._session.end(str(self._closed))
            if isinstance(error, OSError):
                raise CommunicatorError(f"{verb}: the folder cannot be used: {described(error)}") from error
            raise


@dataclass
class _Exchange:
    """An exchange under way, for which this rank has written its messages."""

    comm: FolderCommunicator
    number: int
    verb: str
    send: Sequence[Array]
    sizes: Sequence[int]
    own: Array
    owner: Owner | None
    received: list[Array] | None = None

    def wait(self) -> list[Array]:
        """Return what each rank has sent to this rank."""
        if self.received is None:
            self.received = self.comm.complete(self)
        return self.received


def _read_json(found: bytes | None) -> Any:
    """Return the JSON document in a file; None if the file is missing or not whole."""
    try:
        return json.loads(found or b"")
    except ValueError:
        return None


def _digest(data: bytes | memoryview) -> str:
    return blake2b(data, digest_size=16).hexdigest()


def _name(number: int, sender: int, receiver: int | None) -> str:
    return f"{number}.{sender}.{'all' if receiver is None else receiver}"


def _parsed(found: bytes) -> tuple[_Head, memoryview] | None:
    """Return a message, or None if it is not whole."""
    end = found.find(b"\n")
    data = memoryview(found)[end + 1 :]
    try:
        head = _Head(*json.loads(found[: max(0, end)]))
    except (TypeError, ValueError):
        return None
    return (head, data) if head.digest == _digest(data) else None
