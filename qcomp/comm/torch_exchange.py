"""One exchange over torch.distributed, from posting its receives to the received data."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any, Protocol

import array_api_compat

from qcomp.comm.buffers import from_host
from qcomp.comm.headers import disagreement, have_different_owners, header, header_size
from qcomp.comm.torch_library import is_of_transport, torch, transport_errors
from qcomp.core.errors import CommunicatorError, MismatchError
from qcomp.core.mean.stages import Owner, other_owners, told
from qcomp.core.numeric.arrays import Array
from qcomp.core.reporting import name_ranks

_HEADER_TAG, UNUSED_TAG, _OWNER_TAG = 0, 1, 2
_PAYLOAD_TAGS = 3
_OWNER_BYTES = 512
"""Bytes in which ranks tell each other their owners, once these differ."""
_OWNER_SECONDS = 2.0
"""How long a rank waits for the owners."""
_IN_TURN_FROM = 1 << 16
"""Smallest payload that is sent in turn, in bytes; the time of shorter ones is mostly latency."""
_AT_ONCE = timedelta(milliseconds=1)


class _Connections(Protocol):
    """The part of the communicator that an exchange uses."""

    rank: int
    timeout: float

    def require_open(self, verb: str) -> None:
        """Raise if an exchange has failed before."""
        ...

    def begin(self) -> int:
        """Return the number of a new exchange."""
        ...

    def attend(
        self,
        exchange: int,
        verb: str,
        owner: Owner | None,
        wait: Callable[[], None],
        meanwhile: Callable[[], Any],
    ) -> Any:
        """Call ``wait`` on another thread and ``meanwhile`` on this one; wait for both, and return the second's result.

        Raises if a rank is lost.
        """
        ...

    def cause(self, exchange: int, verb: str) -> str | None:
        """Return why gloo has lost a connection, or None if no other rank has reported a reason."""
        ...

    def end(self, exchange: int) -> None:
        """Take note that an exchange is complete."""
        ...

    def silent(self) -> str:
        """Return a text for an error that names the silent ranks."""
        ...

    def closing_on_failure(self, verb: str, exchange: object) -> AbstractContextManager[None]:
        """Close the communicator and tell the others if an exchange fails in this context."""
        ...

    def post_send(self, tensor: Any, peer: int, tag: int) -> Any:
        """Start to send a tensor in host memory."""
        ...

    def post_receive(self, tensor: Any, peer: int, tag: int) -> Any:
        """Start to receive into a tensor in host memory."""
        ...

    def post_on_device(self, receives: Mapping[int, Any], sends: Mapping[int, Any]) -> list[Any]:
        """Start to receive from and to send to several peers, as one operation of NCCL."""
        ...


class TorchExchange:
    """One exchange in flight.

    gloo aborts the process if a message is longer than its receive buffer, and accepts a shorter one silently. So a
    payload's tag is its size: a payload of another size matches no receive, and the header reveals it. NCCL has no
    tags, so there the headers are read before the payloads are sent.
    """

    def __init__(
        self,
        comm: _Connections,
        verb: str,
        like: Sequence[Array],
        tensors: list[Any],
        sizes: list[int],
        *,
        owner: Owner | None,
        on_device: bool,
    ) -> None:
        self._comm = comm
        self._verb = verb
        self._owner = owner
        self._like = list(like)
        self._tensors = tensors
        n = len(sizes)
        # Each rank starts with its right neighbour, so that not all send to rank 0 first.
        self.peers = [(comm.rank + k) % n for k in range(1, n)]
        self._sizes = sizes
        self._moves_on_device = on_device
        self.number = comm.begin()
        self._deadline = 0.0
        sent = [tensor.shape[0] for tensor in tensors]
        self._header = torch.from_numpy(header(verb, sent, sizes, owner))
        self._headers = [torch.empty(header_size(n), dtype=torch.uint8) for _ in range(n)]
        self._headers[comm.rank] = self._header
        pinned = not on_device and any(array_api_compat.is_torch_array(x) and x.is_cuda for x in like)
        self._received = {
            peer: tensors[peer].new_empty((sizes[peer],), pin_memory=pinned) for peer in self.peers
        }
        self._receiving_headers: dict[int, Any] = {}
        self._receiving: dict[int, Any] = {}
        self._sending: list[tuple[int, Any]] = []
        self._in_turn: list[int] = []
        self._on_device: list[Any] = []
        self._result: list[Array] | None = None

    def start(self, *, in_turn: bool = False) -> None:
        """Post all receives, then all sends, which is faster than torch's own collectives over gloo.

        For callers that wait at once, ``in_turn`` lets `wait` send long payloads to one peer after the other. In every
        turn each rank sends to one peer and receives from one. Concurrent streams to several peers would share the link
        unevenly: the last stream would have it to itself while other links idle. The ranks may differ in this choice.
        """
        comm, peers = self._comm, self.peers
        on_host = not self._moves_on_device
        for peer in peers:
            self._receiving_headers[peer] = self._receive(self._headers[peer], peer, _HEADER_TAG)
        if on_host:
            for peer in peers:
                if self._sizes[peer]:
                    payload = self._received[peer]
                    self._receiving[peer] = self._receive(payload, peer, _tag(payload))
        for peer in peers:
            self._send(self._header, peer, _HEADER_TAG)
        if on_host:
            if in_turn and max((self._tensors[peer].shape[0] for peer in peers), default=0) >= _IN_TURN_FROM:
                self._in_turn = peers[1:]
            for peer in peers[: len(peers) - len(self._in_turn)]:
                self._send_payload(peer)
        else:
            self._deadline = time.monotonic() + comm.timeout
            comm.attend(self.number, self._verb, self._owner, self._read_headers, lambda: None)
            sends = {peer: self._tensors[peer] for peer in peers}
            with transport_errors(f"{self._verb}: torch.distributed failed"):
                self._on_device = comm.post_on_device(self._received, sends)

    @property
    def works(self) -> list[Any]:
        """The transfers in host memory that are under way. gloo cancels those that nothing refers to."""
        return [*self._receiving_headers.values(), *self._receiving.values(), *(w for _, w in self._sending)]

    def _receive(self, tensor: Any, peer: int, tag: int) -> Any:
        try:
            return self._comm.post_receive(tensor, peer, tag)
        except RuntimeError as error:
            raise self._gone(peer, error) from error

    def _send(self, tensor: Any, peer: int, tag: int) -> None:
        try:
            self._sending.append((peer, self._comm.post_send(tensor, peer, tag)))
        except RuntimeError as error:
            raise self._gone(peer, error) from error

    def _send_payload(self, peer: int) -> None:
        payload = self._tensors[peer]
        if payload.shape[0]:
            self._send(payload, peer, _tag(payload))

    def _gone(self, peer: int, error: RuntimeError) -> RuntimeError:
        """Return what an error says about a peer; errors that do not come from the connection say nothing."""
        if not is_of_transport(error):
            return error
        return CommunicatorError(
            self._comm.cause(self.number, self._verb)
            or f"{self._verb}: rank {peer} has finished, died or given up: its connection is closed"
        )

    def wait(self) -> list[Array]:
        """Return what each rank sent here."""
        if self._result is None:
            self._comm.require_open(self._verb)
            with self._comm.closing_on_failure(self._verb, self):
                self._result = self._complete()
        return self._result

    def _complete(self) -> list[Array]:
        self._deadline = time.monotonic() + self._comm.timeout
        # A rank's own share is copied too, since received data never shares memory with sent data. The copy
        # is made while the other data travels.
        own = self._comm.attend(
            self.number,
            self._verb,
            self._owner,
            self._finish_on_host,
            self._tensors[self._comm.rank].clone,
        )
        with transport_errors(f"{self._verb}: torch.distributed failed"):
            for work in self._on_device:
                work.wait()  # the current stream waits, not this thread
        self._comm.end(self.number)
        received = self._received | {self._comm.rank: own}
        return [_to_library(received[peer], like=like) for peer, like in enumerate(self._like)]

    def _finish_on_host(self) -> None:
        """Wait until all transfers in host memory are complete."""
        self._read_headers()
        # While this rank sends to its k-th peer, its k-th last peer sends to it.
        for peer, sender in zip(self._in_turn, reversed(self.peers), strict=False):
            self._finish_sending()
            if sender in self._receiving:
                self._wait_for("only a part came from", [(sender, self._receiving[sender])])
                del self._receiving[sender]
            self._send_payload(peer)
        self._wait_for("only a part came from", self._receiving.items())
        self._finish_sending()

    def _finish_sending(self) -> None:
        self._wait_for("sent data was not received by", self._sending)
        self._sending.clear()

    def _read_headers(self) -> None:
        pending, self._receiving_headers = self._receiving_headers, {}
        self._wait_for("nothing came from", pending.items())
        headers = [data.numpy() for data in self._headers]
        if have_different_owners(headers):
            raise MismatchError(other_owners(self._owners(), self._owner))
        problem = disagreement(headers)
        if problem is not None:
            raise CommunicatorError(problem)

    def _owners(self) -> dict[int, str]:
        """Return what each rank tells about its owner; all ranks have seen that the owners differ."""
        own = told(self._owner)
        data = bytearray(own.encode()[:_OWNER_BYTES].ljust(_OWNER_BYTES))
        message = torch.frombuffer(data, dtype=torch.uint8)
        arriving = {peer: torch.empty(_OWNER_BYTES, dtype=torch.uint8) for peer in self.peers}
        texts = {self._comm.rank: own} | dict.fromkeys(self.peers, "something else")
        end = time.monotonic() + _OWNER_SECONDS

        def wait(work: Any) -> None:
            work.wait(timedelta(seconds=max(0.0, end - time.monotonic())) + _AT_ONCE)

        # A rank may still compute and read its headers later, or it has read them and is gone.
        with contextlib.suppress(RuntimeError):
            works = [self._comm.post_receive(text, peer, _OWNER_TAG) for peer, text in arriving.items()]
            own_works = [self._comm.post_send(message, peer, _OWNER_TAG) for peer in self.peers]
            for (peer, text), work in zip(arriving.items(), works, strict=True):
                wait(work)
                texts[peer] = text.numpy().tobytes().decode(errors="replace").rstrip()
            for work in own_works:
                wait(work)
        return texts

    def _wait_for(self, trouble: str, pending: Iterable[tuple[int, Any]]) -> None:
        works = list(pending)
        for index, (peer, work) in enumerate(works):
            left = timedelta(seconds=max(0.0, self._deadline - time.monotonic()))
            try:
                work.wait(left + _AT_ONCE)  # torch rounds down to whole milliseconds
            except RuntimeError as error:
                if time.monotonic() < self._deadline:
                    raise self._gone(peer, error) from error
                missing = {peer} | {other for other, rest in works[index + 1 :] if not _is_over(rest)}
                raise CommunicatorError(
                    f"{self._verb}: waited {self._comm.timeout:g} s: {trouble} {name_ranks(missing)}"
                    f"{self._comm.silent()}"
                ) from error


def _is_over(work: Any) -> bool:
    try:
        work.wait(_AT_ONCE)
    except RuntimeError:
        return False
    return True


def _tag(payload: Any) -> int:
    # Tags are 31 bits wide. Two sizes with the same tag are 2 GiB apart.
    return int(_PAYLOAD_TAGS + payload.shape[0] % (2**31 - _PAYLOAD_TAGS))


def _to_library(x: Any, like: Any) -> Any:
    if array_api_compat.is_torch_array(like):
        # The stream orders copies to a GPU; copies from a GPU must finish before the caller reads.
        return x.to(like.device, non_blocking=not x.is_cuda)
    return from_host(x.cpu().numpy(), like=like)
