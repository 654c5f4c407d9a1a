"""`TorchCommunicator`: a communicator whose ranks are processes of torch.distributed, over gloo or NCCL."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import multiprocessing.util
import os
import platform
import weakref
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any

import array_api_compat

from qcomp.comm.buffers import check_buffer, stage_exchange, to_host
from qcomp.comm.host import host_name
from qcomp.comm.lifelines import Lifelines, lifelines
from qcomp.comm.patience import Patience, patience
from qcomp.comm.torch_exchange import UNUSED_TAG, TorchExchange
from qcomp.comm.torch_library import dist, is_of_transport, torch, transport_errors
from qcomp.comm.torch_meeting import StoreMeeting
from qcomp.comm.verbs import Pending, Verbs, described
from qcomp.comm.waiting import Waiter, Waiting
from qcomp.core.errors import CommunicatorError
from qcomp.core.mean.stages import Owner, as_mismatch, require_communicator
from qcomp.core.numeric.arrays import Array
from qcomp.private_names.torch import default_store, timeout_of

_AT_ONCE = timedelta(milliseconds=1)
_END_SECONDS = 1.0
_CREATION = 0
"""The number of creation, as an exchange: ranks that fail in it complete no exchange, not even the first."""
_ABSENT_TAG = 0x71636F6D
"""Nobody sends with this tag over the user's connections."""

# Keeps alive memory that gloo may still access, and connections that a thread may still wait for, after a failure.
_unfinished: list[tuple[Any, object]] = []

# Number of communicators per group name, equal on all ranks of the group.
_created: defaultdict[str, itertools.count[int]] = defaultdict(itertools.count)


_alive: weakref.WeakSet[TorchCommunicator] = weakref.WeakSet()
_of_parents: list[Any] = []
"""The default process groups, which hold all ranks, of the parents of this process."""


class TorchCommunicator(Verbs):
    """The ranks of a process group of torch.distributed, with the backend gloo or nccl.

    With gloo, buffers travel through host memory; a GPU's buffers are copied to page-locked memory and back. With nccl,
    they travel from GPU to GPU on the current stream, and buffers in host memory are copied to the current device and
    back. In both cases the ranks may hold arrays of any library.

    Creating one is collective over the ranks of `group`. They open their own gloo connections, so that messages never
    mix with the user's. Only transfers from GPU to GPU use `group` itself, in order with the user's transfers.

    A header of 16 + 16 N bytes among N ranks precedes each message, over gloo even with nccl. It contains the verb, a
    digest of the exchange's owner, and all sizes, so that a difference is an error on all ranks, and nothing is
    truncated.

    Every two ranks have one more TCP connection. Ranks that wait for a rank learn within a second that its process has
    died, even in the middle of a message, where gloo notices nothing, and within 20 seconds that its machine is cut
    off. A process that is silent for as long holds Python's lock or is stopped: the ranks that wait for it warn, and
    wait until the timeout. A rank whose exchange fails tells the others why. The same holds while ranks create their
    communicators. If a rank ends before it creates one, the others notice at once if `group` has gloo, else after the
    timeout.

    A forked child, such as a data loader's worker, must not use its parent's communicator; every verb raises there.

    With nccl, `start` returns when all ranks have started the exchange; with gloo it returns at once.

    Parameters
    ----------
    group : torch.distributed.ProcessGroup, optional
        By default all ranks.
    timeout : float, optional
        Seconds that a rank waits for the others in an exchange. With nccl, if a peer dies after the exchange of
        headers, the watchdog of torch.distributed ends the process after the timeout of `group`. By default the value
        that `qcomp.comm.world` was given, else the environment variable QCOMP_TIMEOUT, else the timeout of `group`.
    silence : float, optional
        Seconds without a sign of life after which a rank counts as lost. A Python thread gives four such signs in this
        time, so the time must be longer than any code of a rank holds Python's lock. By default the value that
        `qcomp.comm.world` was given, else the environment variable QCOMP_SILENCE; without either, a silent rank is only
        reported.

    Attributes
    ----------
    rank, size : int
        As in `group`.
    host : str
        The machine's name, or the environment variable QCOMP_HOST.
    bytes_sent : int
        Bytes that this rank has passed to torch.distributed for other ranks, without headers.
    timeout : float
        Seconds.
    silence : float or None
        Seconds; None: a silent rank is only reported.

    Raises
    ------
    TypeError
        If `group` is not a process group that this process is a member of.
    ValueError
        If `timeout` or `silence` is not positive, or the group has another backend.
    CommunicatorError
        If torch.distributed is not initialised, or a parent process initialised it, or another rank ends or does not
        create its communicator in time.

    Warns
    -----
    RuntimeWarning
        If the additional connection to a rank cannot be made, or a rank is silent.

    Examples
    --------
    >>> store = torch.distributed.HashStore()
    >>> torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    >>> comm = TorchCommunicator()
    >>> comm.all_gather(torch.tensor([7], dtype=torch.uint8), [1])
    [tensor([7], dtype=torch.uint8)]
    >>> torch.distributed.destroy_process_group()
    """

    compares_owners = True

    def __init__(
        self, group: Any = None, *, timeout: float | None = None, silence: float | None = None
    ) -> None:
        if not dist.is_initialized():
            raise CommunicatorError(
                "torch.distributed is not initialised: call torch.distributed.init_process_group, or start this "
                "program with torchrun and use qcomp.comm.world()"
            )
        if group is None:
            group = dist.group.WORLD
        if not isinstance(group, dist.ProcessGroup):
            raise TypeError(f"group must be a torch.distributed.ProcessGroup of this process, got {group!r}")
        if any(dist.group.WORLD is known for known in _of_parents):
            raise CommunicatorError(
                "TorchCommunicator: torch.distributed was initialised in the parent of this forked process, and a "
                "child must not use its parent's connections: make communicators in the parent"
            )
        waits = patience(timeout=timeout, silence=silence, default=timeout_of(group))
        backends = str(dist.get_backend_config(group))
        on_device = "nccl" in backends
        if not (on_device or "gloo" in backends):
            raise ValueError(f"group must have the backend gloo or nccl, got {backends}")
        self._group: Any = group
        self._device = torch.device("cuda", torch.cuda.current_device()) if on_device else None
        # new_group will not do: all ranks of the job would have to call it, not only the ranks of this group.
        name = f"qcomp/{group.group_name}/{next(_created[group.group_name])}"
        store = dist.PrefixStore(name, default_store())
        rank, size = int(dist.get_rank(group)), int(dist.get_world_size(group))
        self._open(store, rank, size, waits, _seeker(group) if "gloo" in backends else _nothing)

    @classmethod
    def from_store(
        cls,
        store: Any,
        *,
        rank: int,
        size: int,
        timeout: float | None = None,
        silence: float | None = None,
    ) -> TorchCommunicator:
        """Return a gloo communicator of the ranks that meet in a store; it needs no process group. Collective.

        Parameters
        ----------
        store : torch.distributed.Store
            A store that all ranks reach and that has no other use, for instance a PrefixStore with a new prefix.
        rank, size : int
            This rank, and the number of ranks.
        timeout, silence : float, optional
            As for the class; the ranks must also connect within ``timeout``.

        Raises
        ------
        ValueError
            If a number is out of range.
        CommunicatorError
            If another rank ends or does not create its communicator in time.
        """
        waits = patience(timeout=timeout, silence=silence)
        if not 0 <= rank < size:
            raise ValueError(f"rank must be from 0 to size - 1 = {size - 1}, got {rank}")
        self = cls.__new__(cls)
        self._group = self._device = None
        self._open(store, rank, size, waits, _nothing)
        return self

    def _open(
        self,
        store: Any,
        rank: int,
        size: int,
        waits: Patience,
        look_for: Callable[[Collection[int]], None],
    ) -> None:
        """Connect this rank with the others."""
        self.rank, self.size = rank, size
        self.host = host_name(platform.node())
        self.bytes_sent = 0
        self.timeout, self.silence = waits
        self._closed: str | None = None
        self._under_way: dict[int, list[Any]] = {}
        self._waiter = Waiter()
        meeting = StoreMeeting(
            dist.PrefixStore("meeting", store), rank=rank, size=size, timeout=self.timeout, look_for=look_for
        )
        lines = None
        try:
            self._lifelines = lines = lifelines(
                rank, size, meeting.share, silence=self.silence, look_for=look_for
            )
            self._gloo = self._connected(store)
        except BaseException as error:
            if lines is None:
                meeting.fail(described(error))
            else:  # all have come, and gloo may occupy the store
                lines.give_up(described(error))
                lines.finish()
            raise
        self._counters = dist.PrefixStore("counters", store)
        self._leave = weakref.finalize(self, _leave, lines, self._waiter, self._gloo)
        _alive.add(self)
        if multiprocessing.parent_process() is not None:
            # A forked child of multiprocessing runs only these finalizers at its end.
            multiprocessing.util.Finalize(None, self._leave, exitpriority=0)

    def __repr__(self) -> str:
        return f"TorchCommunicator(rank={self.rank}, size={self.size})"

    def close(self) -> None:
        """Close the connections of this rank, and free what a failed exchange has left. Not collective.

        Exchanges that other ranks have not completed fail there, and all later ones fail here. Without this call the
        connections close when the last reference to this object goes, unless an exchange has failed.
        """
        self._closed = self._closed or "close was called"
        self._leave()
        if not self._waiter.is_waiting:
            _unfinished[:] = [(gloo, exchange) for gloo, exchange in _unfinished if gloo is not self._gloo]

    def count(self, key: str, amount: int) -> int:
        """Add to a counter that all ranks share, and return its value. Not collective; it asks the store of the ranks.

        Parameters
        ----------
        key : str
            The name of the counter, which begins at 0.
        amount : int
            What to add; 0 only reads the counter.
        """
        self.require_open("count")
        return int(self._counters.add(key, amount))

    def _exchange(
        self, verb: str, send: Sequence[Array], receive: Sequence[int], owner: Owner | None = None
    ) -> list[Array]:
        return self._begin(verb, send, receive, owner, in_turn=True).wait()

    def _start(
        self, verb: str, send: Sequence[Array], receive: Sequence[int], owner: Owner | None = None
    ) -> Pending:
        return self._begin(verb, send, receive, owner, in_turn=False)

    def _begin(
        self, verb: str, send: Sequence[Array], receive: Sequence[int], owner: Owner | None, *, in_turn: bool
    ) -> Pending:
        stage = self._to_device if self._device is not None else _to_host
        tensors, sizes = stage_exchange(send, receive, rank=self.rank, size=self.size, stage=stage)
        self.require_open(verb)
        on_device = self._device is not None
        exchange = TorchExchange(self, verb, send, tensors, sizes, owner=owner, on_device=on_device)
        with self.closing_on_failure(verb, exchange):
            exchange.start(in_turn=in_turn)
        # The caller may drop an exchange. If its receives were cancelled, its messages would reach the next exchange.
        self._under_way[exchange.number] = exchange.works
        self.bytes_sent += sum(tensors[peer].shape[0] for peer in exchange.peers)
        return exchange

    def begin(self) -> int:
        """Return the number of a new exchange."""
        return self._lifelines.begin()

    def attend(
        self,
        exchange: int,
        verb: str,
        owner: Owner | None,
        wait: Callable[[], None],
        meanwhile: Callable[[], Any],
    ) -> Any:
        """Call ``wait`` on another thread and ``meanwhile`` on this one; wait for both, and return the second's result.

        Raises if a rank is lost: gloo cannot be interrupted while it waits, and does not always notice a lost peer.
        """
        if self.size == 1:
            wait()
            return meanwhile()
        waiting = Waiting(wait, self._lifelines)
        self._waiter.start(waiting)
        made = meanwhile()
        with self._lifelines.waiting(exchange, owner):
            waiting.join(exchange, verb)
        return made

    def cause(self, exchange: int, verb: str) -> str | None:
        """Return why gloo has lost a connection, or None if no other rank has reported a reason."""
        return self._lifelines.cause(exchange, verb)

    def end(self, exchange: int) -> None:
        """Take note that an exchange is complete."""
        self._lifelines.complete(exchange)
        self._under_way.pop(exchange, None)
        self._lifelines.report()

    def silent(self) -> str:
        """Return a text for an error that names the silent ranks."""
        return self._lifelines.silent()

    def _connected(self, store: Any) -> Any:
        """Return gloo connections between all ranks, all of which have come."""
        made = []

        def make() -> None:
            with transport_errors("TorchCommunicator: gloo cannot connect the ranks"):
                within = timedelta(seconds=self.timeout)
                group: Any = dist.ProcessGroupGloo(store, self.rank, self.size, timeout=within)
                group.barrier().wait()  # so that no rank closes its connections while others still connect
                made.append(group)

        self.attend(_CREATION, "TorchCommunicator", None, make, lambda: None)
        return made[0]

    def _to_device(self, x: Array, *, name: str) -> Any:
        if not (array_api_compat.is_torch_array(x) and x.is_cuda):
            return _to_host(x, name=name).to(self._device)
        check_buffer(x, name=name)
        return x.contiguous()

    def require_open(self, verb: str) -> None:
        """Raise if an exchange has failed before, or this is another process."""
        if os.getpid() != self._process:
            self._refuse(verb)
        if self._closed is not None:
            raise CommunicatorError(f"{verb}: this communicator is closed: {self._closed}")

    @contextlib.contextmanager
    def closing_on_failure(self, verb: str, exchange: object) -> Iterator[None]:
        """Close this communicator and tell the others if the context raises."""
        try:
            yield
        except CommunicatorError as error:
            self._close(str(error), exchange)
            raise as_mismatch(error) from error.__cause__
        except BaseException as error:
            self._close(f"{verb} was interrupted by {described(error)}", exchange)
            raise

    def _close(self, reason: str, exchange: object) -> None:
        self._closed = reason
        self._lifelines.give_up(reason)
        _unfinished.append((self._gloo, exchange))

    def post_send(self, tensor: Any, peer: int, tag: int) -> Any:
        """Start to send a tensor in host memory."""
        return self._gloo.send([tensor], peer, tag)

    def post_receive(self, tensor: Any, peer: int, tag: int) -> Any:
        """Start to receive into a tensor in host memory."""
        return self._gloo.recv([tensor], peer, tag)

    def post_on_device(self, receives: Mapping[int, Any], sends: Mapping[int, Any]) -> list[Any]:
        """Start to receive from and to send to several peers, as one operation of NCCL."""
        numbers = dist.get_process_group_ranks(self._group)
        operations = [
            dist.P2POp(verb, tensor, numbers[peer], group=self._group)
            for verb, tensors in ((dist.irecv, receives), (dist.isend, sends))
            for peer, tensor in tensors.items()
            if tensor.shape[0]
        ]
        works: list[Any] = dist.batch_isend_irecv(operations) if operations else []
        return works


def over_ranks(of: Any) -> Any:
    """Return a communicator of a process group's ranks, or the given communicator; else raise TypeError."""
    if isinstance(of, dist.ProcessGroup):
        return TorchCommunicator(of)
    require_communicator(of)
    return of


def _leave(lines: Lifelines, waiter: Waiter, gloo: Any) -> None:
    """Tell the others that this rank takes no further part, and end the thread that waits for them."""
    lines.finish()
    if not waiter.end():
        # The thread still waits in gloo. If that wait returned while Python shuts down, the process would abort. When
        # one wait times out, gloo ends all others, except waits for partly received messages, which never end.
        for peer in set(range(gloo.size())) - {gloo.rank()}:
            with contextlib.suppress(RuntimeError):
                gloo.recv([torch.empty(1, dtype=torch.uint8)], peer, UNUSED_TAG).wait(_AT_ONCE)
    # No thread of ours may run while Python shuts down.
    waiter.join(_END_SECONDS)
    lines.join(_END_SECONDS)


def _to_host(x: Array, *, name: str) -> Any:
    host = to_host(x, name=name)
    # torch has no read-only arrays, and warns of them.
    return torch.from_numpy(host if host.flags.writeable else host.copy())


def _seeker(group: Any) -> Callable[[Collection[int]], None]:
    """Return a function that raises if a rank of a group of gloo has ended."""
    numbers = dist.get_process_group_ranks(group)

    def look_for(missing: Collection[int]) -> None:
        for rank in missing:
            try:
                # gloo refuses to receive over a closed connection, and takes back a receive that nothing refers to.
                dist.irecv(torch.empty(1, dtype=torch.uint8), numbers[rank], group=group, tag=_ABSENT_TAG)
            except RuntimeError as error:
                if not is_of_transport(error):
                    raise
                raise CommunicatorError(
                    f"TorchCommunicator: rank {rank} ended before it created its own"
                ) from error

    return look_for


def _nothing(_: Collection[int]) -> None:
    """Look for nobody: without a process group of gloo, nothing is known of ranks that have not come."""


def _leave_to_parent() -> None:
    """Keep a forked child from acting on the connections of its parent, whatever it frees and however it ends."""
    if dist.is_initialized():
        _of_parents.append(dist.group.WORLD)
    for comm in list(_alive):
        comm._leave.detach()
        # gloo's destructors would act on what parent and child share, and wait for threads that the child lacks.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(comm))
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(_unfinished))


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_leave_to_parent)
