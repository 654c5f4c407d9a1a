"""A communicator whose messages carry keyed checksums, for networks that others can write to."""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from qcomp.comm.buffers import from_host, stage_exchange, to_host
from qcomp.comm.verbs import Completed, Pending, Verbs
from qcomp.core.errors import CommunicatorError
from qcomp.core.mean.stages import AllGather, AllToAll, Exchange, Owner, answer
from qcomp.core.numeric.arrays import Array
from qcomp.core.reporting import name_ranks

if TYPE_CHECKING:
    from qcomp.comm.base import Communicator
    from qcomp.comm.buffers import HostBuffer


_TAG_BYTES = 16
_NONCE_BYTES = 16
_KEY_BYTES = (16, 64)
"""Fewest and most bytes of a key; BLAKE2b accepts at most 64."""


class AuthenticatedCommunicator(Verbs):
    """Wraps a communicator, and detects messages that anyone without the key has forged or changed.

    A tag follows each message: a keyed hash (BLAKE2b) of its bytes, the verb, the number of the exchange, the sender
    and the receiver. So a message that is altered, forged, repeated, redirected to another rank, or out of order fails
    the check at its receiver. At creation every rank draws a random number, and the key of all tags depends on these
    numbers, so messages of an earlier job fail too.

    Nothing is encrypted: an eavesdropper sees all bytes. The key protects against everybody who does not have it, and
    against nobody who does.

    Creating one is collective, and raises if the keys of the ranks differ. Messages pass through host memory.

    Parameters
    ----------
    comm : Communicator
        Carries the messages. The caller must not use it for anything else meanwhile.
    key : bytes
        16 to 64 bytes that only the ranks know, for instance from ``secrets.token_bytes(32)``; the same on all ranks.

    Attributes
    ----------
    rank, size, host, bytes_sent
        As in `comm`; tags count among the bytes.
    tag_bytes : int
        Bytes of a tag, 16.

    Raises
    ------
    TypeError
        If `key` is not bytes.
    ValueError
        If `key` is too short or too long.
    CommunicatorError
        If the ranks have different keys, or a message fails its check. The error names the sender. Afterwards this
        communicator is closed.

    Notes
    -----
    Each message is 16 bytes longer. Each rank copies and hashes what it sends, and hashes what it receives. Creation
    sends 48 bytes to each rank.

    Examples
    --------
    >>> import numpy as np, qcomp
    >>> def rank_main(comm):
    ...     comm = qcomp.comm.AuthenticatedCommunicator(comm, key=b"sixteen or more bytes")
    ...     return [int(x[0]) for x in comm.all_gather(np.array([comm.rank], dtype=np.uint8), [1, 1])]
    >>> qcomp.comm.run_local(2, rank_main)
    [[0, 1], [0, 1]]
    """

    tag_bytes = _TAG_BYTES

    def __init__(self, comm: Communicator, key: bytes) -> None:
        if not isinstance(key, bytes):
            raise TypeError(f"key must be bytes, got {type(key).__name__}")
        least, most = _KEY_BYTES
        if not least <= len(key) <= most:
            raise ValueError(f"key must have {least} to {most} bytes, got {len(key)}")
        self.rank = comm.rank
        self.size = comm.size
        self.host = comm.host
        self._comm = comm
        self._number = 0
        self._closed: str | None = None
        nonce = np.frombuffer(secrets.token_bytes(_NONCE_BYTES), dtype=np.uint8)
        nonces = comm.all_gather(nonce, [_NONCE_BYTES] * self.size)
        self._key = hashlib.blake2b(
            b"".join(np.asarray(x).tobytes() for x in nonces), key=key, digest_size=32
        ).digest()
        self.all_gather(np.zeros(0, dtype=np.uint8), [0] * self.size)  # raises if keys differ

    def __repr__(self) -> str:
        return f"AuthenticatedCommunicator({self._comm!r})"

    @property
    def bytes_sent(self) -> int:
        """Bytes that this rank has handed to other ranks so far, tags included."""
        return self._comm.bytes_sent

    def _exchange(
        self, verb: str, send: Sequence[Array], receive: Sequence[int], owner: Owner | None = None
    ) -> list[Array]:
        received = list(answer(self._sealed(verb, send, receive, owner), self._comm))
        return self._started(verb, Completed(received), send).wait()

    def _start(
        self, verb: str, send: Sequence[Array], receive: Sequence[int], owner: Owner | None = None
    ) -> Pending:
        start = getattr(self._comm, "start", None)
        if start is None:
            return Completed(self._exchange(verb, send, receive, owner))
        return self._started(verb, start(self._sealed(verb, send, receive, owner)), send)

    @property
    def compares_owners(self) -> bool:
        """Whether the communicator that carries the messages compares owners."""
        return getattr(self._comm, "compares_owners", False)

    def _sealed(
        self, verb: str, send: Sequence[Array], receive: Sequence[int], owner: Owner | None
    ) -> Exchange:
        """Return the exchange of the messages with their tags."""
        contents, sizes = stage_exchange(send, receive, rank=self.rank, size=self.size)
        self._require_open(verb)

        def sealed(peer: int) -> HostBuffer:
            tag = self._tag(verb, self._number, self.rank, peer, contents[peer])
            return np.concatenate([contents[peer], np.frombuffer(tag, dtype=np.uint8)])

        with_tags = tuple(n + _TAG_BYTES for n in sizes)
        if verb == "all_gather":
            return AllGather(sealed(0), with_tags, owner=owner)
        return AllToAll(tuple(sealed(peer) for peer in range(self.size)), with_tags, owner=owner)

    def _started(self, verb: str, pending: Pending, send: Sequence[Array]) -> _Sealed:
        """Return the exchange just started, with the next number. A start that fails uses up no number."""
        number = self._number
        self._number += 1
        return _Sealed(self, verb, number, pending, send)

    def _tag(self, verb: str, number: int, sender: int, receiver: int, content: HostBuffer) -> bytes:
        # An all-gather sends the same message to all ranks, so its tag names no receiver.
        target = "all" if verb == "all_gather" else receiver
        digest = hashlib.blake2b(
            f"{verb} {number} from {sender} to {target}\n".encode(), key=self._key, digest_size=_TAG_BYTES
        )
        digest.update(content.data)
        return digest.digest()

    def check(self, verb: str, number: int, received: Sequence[HostBuffer]) -> list[HostBuffer]:
        """Return the contents of each rank's message; close this communicator and raise if one fails its check."""
        self._require_open(verb)
        contents = [message[:-_TAG_BYTES] for message in received]
        failed = [
            sender
            for sender, (content, message) in enumerate(zip(contents, received, strict=True))
            if not hmac.compare_digest(
                self._tag(verb, number, sender, self.rank, content), message[-_TAG_BYTES:].tobytes()
            )
        ]
        if failed:
            self._closed = (
                f"{verb}: a message from {name_ranks(failed)} fails its check: it was changed on the way, "
                "or the ranks have different keys"
            )
            raise CommunicatorError(self._closed)
        return contents

    def _require_open(self, verb: str) -> None:
        if self._closed is not None:
            raise CommunicatorError(f"{verb}: this communicator is closed: {self._closed}")


class _Sealed(NamedTuple):
    """An exchange under way whose messages have tags."""

    comm: AuthenticatedCommunicator
    verb: str
    number: int
    pending: Pending
    send: Sequence[Array]

    def wait(self) -> list[Array]:
        """Check what each rank sent here, and return it."""
        received = [to_host(x) for x in self.pending.wait()]
        contents = self.comm.check(self.verb, self.number, received)
        return [from_host(x, like=like) for x, like in zip(contents, self.send, strict=True)]
