"""`NCCLCommunicator`: a communicator whose ranks have one GPU each, through CuPy's NCCL."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import array_api_compat
import numpy as np

from qcomp.comm.buffers import check_buffer, from_host, stage_exchange, to_host
from qcomp.comm.headers import disagreement, header, header_size
from qcomp.comm.verbs import Verbs
from qcomp.core.errors import CommunicatorError
from qcomp.core.mean.stages import AllGather, Owner, answer
from qcomp.core.numeric.arrays import Array

if TYPE_CHECKING:
    from qcomp.comm.base import Communicator


class NCCLCommunicator(Verbs):
    """The ranks of another communicator, with one GPU each; buffers travel from GPU to GPU.

    Before each exchange the ranks exchange the verb and all sizes over the other communicator, because NCCL itself
    cannot detect a rank that is at another place in the program, absent or dead. Then all sends and receives are queued
    as one operation on CuPy's current stream, so work queued there later sees the received data. Buffers in host memory
    are copied to the current device and back.

    Creating one is collective. Set the device first: ``cupy.cuda.Device(number).use()``.

    Parameters
    ----------
    comm : Communicator
        A communicator of the same ranks, for instance an `MPICommunicator`. It carries the headers, 16 + 16 N bytes per
        message among N ranks. The timeout of ``comm`` and its handling of exits also apply to this communicator.

    Attributes
    ----------
    rank, size : int
        As in `comm`.
    host : str
        As in `comm`.
    bytes_sent : int
        Bytes that this rank has passed to NCCL for other ranks, without headers.

    Raises
    ------
    ImportError
        If CuPy is missing or older than 14, or has no NCCL.
    CommunicatorError
        If NCCL fails.

    Examples
    --------
    >>> import cupy, qcomp  # doctest: +SKIP
    >>> comm = NCCLCommunicator(qcomp.comm.world())  # doctest: +SKIP
    >>> comm.all_gather(cupy.array([7], dtype=cupy.uint8), [1])  # doctest: +SKIP
    [array([7], dtype=uint8)]
    """

    def __init__(self, comm: Communicator) -> None:
        self.rank = comm.rank
        self.size = comm.size
        self.host = comm.host
        self.bytes_sent = 0
        self._comm = comm
        self._closed: str | None = None
        self._cupy, self._nccl = _import()
        own = np.frombuffer(self._nccl.get_unique_id() if self.rank == 0 else b"", dtype=np.uint8)
        size = np.asarray([own.size], dtype=np.uint8)
        sizes = [int(x[0]) for x in comm.all_gather(size, [1] * self.size)]
        identity = np.asarray(comm.all_gather(own, sizes)[0]).tobytes()
        try:
            self._ranks = self._nccl.NcclCommunicator(self.size, identity, self.rank)
        except self._nccl.NcclError as error:
            raise CommunicatorError(f"NCCLCommunicator: NCCL failed: {error}") from error

    def __repr__(self) -> str:
        return f"NCCLCommunicator(rank={self.rank}, size={self.size})"

    def _exchange(
        self, verb: str, send: Sequence[Array], receive: Sequence[int], owner: Owner | None = None
    ) -> list[Array]:
        buffers, sizes = stage_exchange(send, receive, rank=self.rank, size=self.size, stage=self._to_device)
        if self._closed is not None:
            raise CommunicatorError(f"{verb}: this communicator is closed: {self._closed}")
        # Each rank starts with its right neighbour, so that not all send to rank 0 first.
        peers = [(self.rank + k) % self.size for k in range(1, self.size)]
        received = {peer: self._cupy.empty((sizes[peer],), dtype=self._cupy.uint8) for peer in peers}
        try:
            self._agree(verb, [buffer.shape[0] for buffer in buffers], sizes, owner)
            self._move(peers, buffers, received)
        except self._nccl.NcclError as error:
            self._close(f"{verb}: NCCL failed: {error}")
            raise CommunicatorError(self._closed) from error
        except CommunicatorError as error:
            self._close(str(error))
            raise
        except BaseException as error:
            self._close(f"{verb} was interrupted by {type(error).__name__}")
            raise
        self.bytes_sent += sum(buffers[peer].shape[0] for peer in peers)
        # A rank's own share is copied too, since received data never shares memory with sent data.
        received[self.rank] = buffers[self.rank].copy()
        return [self._to_library(received[peer], like=like) for peer, like in enumerate(send)]

    @property
    def compares_owners(self) -> bool:
        """Whether the communicator that carries the headers compares owners."""
        return getattr(self._comm, "compares_owners", False)

    def _agree(self, verb: str, sent: list[int], expected: list[int], owner: Owner | None) -> None:
        """Raise on every rank unless all call the same verb for the same owner with matching sizes."""
        message = header(verb, sent, expected)
        request = AllGather(message, (header_size(self.size),) * self.size, owner=owner)
        problem = disagreement(list(map(np.asarray, answer(request, self._comm))))
        if problem is not None:
            raise CommunicatorError(problem)

    def _move(self, peers: list[int], buffers: list[Any], received: dict[int, Any]) -> None:
        stream = self._cupy.cuda.get_current_stream().ptr
        self._nccl.groupStart()
        try:
            for peer in peers:
                if received[peer].shape[0]:
                    target = received[peer]
                    self._ranks.recv(target.data.ptr, target.shape[0], self._nccl.NCCL_UINT8, peer, stream)
            for peer in peers:
                if buffers[peer].shape[0]:
                    source = buffers[peer]
                    self._ranks.send(source.data.ptr, source.shape[0], self._nccl.NCCL_UINT8, peer, stream)
        finally:
            self._nccl.groupEnd()

    def _close(self, reason: str) -> None:
        self._closed = reason
        self._ranks.abort()  # otherwise work queued for an absent peer would block the stream forever

    def _to_device(self, x: Array, *, name: str) -> Any:
        if not array_api_compat.is_cupy_array(x):
            return self._cupy.asarray(to_host(x, name=name))
        check_buffer(x, name=name)
        return self._cupy.ascontiguousarray(x)

    def _to_library(self, x: Any, like: Array) -> Array:
        return x if array_api_compat.is_cupy_array(like) else from_host(self._cupy.asnumpy(x), like=like)


def _import() -> tuple[Any, Any]:
    """Return CuPy and its NCCL."""
    try:
        import cupy  # noqa: PLC0415  (only needed to create a communicator)
        from cupy.cuda import nccl  # noqa: PLC0415

        if not nccl.available:  # CuPy puts an empty module in its place
            raise ImportError("CuPy found no NCCL library")
        if int(cupy.__version__.partition(".")[0]) < 14:  # older ones identify a world by a tuple
            raise ImportError(f"this is CuPy {cupy.__version__}")
    except ImportError as error:
        raise ImportError(
            "an NCCL communicator needs CuPy 14 with NCCL: pip install 'qcomp[cuda]', and NVIDIA's NCCL"
        ) from error
    return cupy, nccl
