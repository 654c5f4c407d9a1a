"""Handles the exit of a rank of an MPI job, so that no other rank waits for it forever.

`MPI_Finalize` waits for all ranks, and mpirun does not end the others when one exits by an exception or `sys.exit`:
without this module such a job hangs.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import stat
import sys
import threading
import time
import weakref
from collections.abc import Callable
from types import TracebackType
from typing import Any, TextIO

import numpy as np

from qcomp.comm.lifelines import Lifelines
from qcomp.comm.mpi_library import MPI
from qcomp.core.errors import CommunicatorError

FINISHED_TAG = 3
FAILED_TAG = 4
OWNER_TAG = 5

_LONGEST_REPORT = 1000
_PAUSE_SECONDS = 1e-3
_INTERRUPTED = 130  # what a shell reports for Ctrl-C: 128 + SIGINT

_process = os.getpid()
"""The id of the process that imported this module. Its forked children are not ranks."""
_open: list[tuple[MPI.Intracomm, Lifelines]] = []
_closed: list[MPI.Intracomm] = []
"""Communicators that this rank no longer uses, while others may."""
_leaving: weakref.WeakKeyDictionary[object, weakref.finalize[..., object]] = weakref.WeakKeyDictionary()
# MPI may access the memory of exchanges in flight even after one has failed, so that memory stays.
_unfinished: list[object] = []


@functools.cache
def guard() -> None:
    """Make an uncaught exception abort the whole job after printing, and make a normal end wait for the others."""
    previous = sys.excepthook

    def print_and_abort(
        kind: type[BaseException], value: BaseException, traceback: TracebackType | None
    ) -> None:
        if os.getpid() != _process:
            previous(kind, value, traceback)
        elif issubclass(kind, KeyboardInterrupt):
            _abort(_INTERRUPTED)
        else:
            try:
                previous(kind, value, traceback)
            finally:
                _abort(1)

    sys.excepthook = print_and_abort
    sys.unraisablehook = functools.partial(_abort_if_interrupted, sys.unraisablehook)
    atexit.register(_take_leave)  # mpi4py finalizes MPI after all of Python's exit functions
    if hasattr(os, "register_at_fork"):  # not on Windows
        os.register_at_fork(after_in_child=_become_child)


@functools.cache
def abort_at_exit() -> None:
    """Make this process abort the job when it ends, since a rank that waits for it would wait forever."""
    atexit.register(_abort, 1)


def keep(anything: object) -> None:
    """Never free what MPI may still access."""
    _unfinished.append(anything)


def kept_list() -> list[Any]:
    """Return a new list whose items are never freed."""
    kept: list[Any] = []
    keep(kept)
    return kept


def require_rank() -> None:
    """Raise in a forked child of a rank."""
    if os.getpid() != _process:
        raise CommunicatorError(
            f"MPICommunicator: process {os.getpid()} is a forked child of a rank (process {_process}), whose "
            "connections it must not use: create communicators in ranks only"
        )


def require_alive(ranks: MPI.Group) -> None:
    """Raise if one of these ranks has ended, according to the communicators that it shares with this rank."""
    for comm, lines in _open:
        known = comm.Get_group()
        peers = _peers(comm)
        for peer, rank in zip(peers, known.Translate_ranks(peers, ranks), strict=True):
            if rank != MPI.UNDEFINED and (lines.is_dead(peer) or comm.Iprobe(source=peer, tag=FINISHED_TAG)):
                raise CommunicatorError(f"MPICommunicator: rank {rank} ended before it created its own")
        known.Free()


def report_failure(comm: MPI.Intracomm, reason: str) -> None:
    """Tell all other ranks that this one takes no further part in `comm`."""
    abort_at_exit()
    # If MPI itself failed, the others notice through their timeout or the end of this process.
    with contextlib.suppress(MPI.Exception):
        send_all(comm, reason, FAILED_TAG)


def send_all(comm: MPI.Intracomm, text: str, tag: int) -> None:
    """Start to send a text to all other ranks."""
    _unfinished.extend(_send_all(comm, np.frombuffer(text.encode()[:_LONGEST_REPORT], dtype=np.uint8), tag))


def take_leave_at_exit(owner: object, comm: MPI.Intracomm, lines: Lifelines) -> weakref.finalize[..., object]:
    """When this process ends, tell all other ranks of `comm`, and wait for their end.

    The returned function frees what this rank can free without the others. It runs when ``owner``, a communicator, is
    freed. Ranks that still use `comm` learn of that, and of the end of this process.
    """
    entry = comm, lines
    if comm.Get_size() > 1:
        _open.append(entry)
    leave = weakref.finalize(owner, _close, entry)
    leave.atexit = False
    _leaving[owner] = leave
    return leave


def _close(entry: tuple[MPI.Intracomm, Lifelines]) -> None:
    comm, lines = entry
    lines.finish()
    if entry in _open:
        _open.remove(entry)
        _closed.append(comm)


def _take_leave() -> None:
    if MPI.Is_finalized() or os.getpid() != _process:
        return
    try:
        nothing = np.empty(0, dtype=np.uint8)
        comms = [*(comm for comm, _ in _open), *_closed]
        farewells = [request for comm in comms for request in _send_all(comm, nothing, FINISHED_TAG)]
        for comm, lines in _open:
            for peer in _peers(comm):
                _await_farewell(comm, peer, lines)
        while not MPI.Request.Testall(farewells):
            time.sleep(_PAUSE_SECONDS)
    except KeyboardInterrupt:
        _abort(_INTERRUPTED)


def _become_child() -> None:
    """Let a forked child act for no rank: it frees nothing, takes no leave, and does not finalize MPI."""
    for leave in list(_leaving.values()):
        leave.detach()
    atexit.register(_end_child)


def _end_child() -> None:
    """End a forked child before mpi4py finalizes MPI in it, which would break the job."""
    sys.stderr.write(
        f"qcomp: process {os.getpid()}, a forked child of an MPI rank, ends here with status 1, because mpi4py would "
        "finalize MPI in the child and break the job: end forked children with os._exit\n"
    )
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)


def _abort_if_interrupted(
    previous: Callable[[sys.UnraisableHookArgs], Any], ignored: sys.UnraisableHookArgs
) -> None:
    """Let Ctrl-C abort the job even after the script's last line, where Python only prints it and goes on."""
    if os.getpid() != _process:
        previous(ignored)
        return
    ended = ignored.object is threading or not threading.main_thread().is_alive()
    if ended and issubclass(ignored.exc_type, KeyboardInterrupt):
        _abort(_INTERRUPTED)
    else:
        previous(ignored)


def _await_farewell(comm: MPI.Intracomm, peer: int, lines: Lifelines) -> None:
    # Without a timeout, like MPI_Finalize: the peer may still compute.
    while (message := comm.Improbe(source=peer, tag=FINISHED_TAG)) is None:
        if lines.is_dead(peer):
            sys.stderr.write(f"qcomp: rank {peer} ended unexpectedly, so the job is aborted\n")
            _abort(1)
        time.sleep(_PAUSE_SECONDS)
    message.Recv([np.empty(0, dtype=np.uint8), MPI.BYTE])


def _send_all(comm: MPI.Intracomm, message: np.ndarray, tag: int) -> list[MPI.Request]:
    return [comm.Isend([message, MPI.BYTE], dest=peer, tag=tag) for peer in _peers(comm)]


def _peers(comm: MPI.Intracomm) -> list[int]:
    return [peer for peer in range(comm.Get_size()) if peer != comm.Get_rank()]


def _abort(exit_code: int) -> None:
    if MPI.Is_finalized() or os.getpid() != _process:
        return
    try:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
            _wait_until_read(stream)
    finally:
        MPI.COMM_WORLD.Abort(exit_code)


def _wait_until_read(stream: TextIO) -> None:
    """Wait at most a second until the launcher has read a pipe, since an abort discards unread data."""
    try:
        import fcntl  # noqa: PLC0415  (POSIX only)
        import termios  # noqa: PLC0415

        file = stream.fileno()
        if not stat.S_ISFIFO(os.fstat(file).st_mode):
            return
        deadline = time.monotonic() + 1.0
        while time.monotonic() < deadline and any(fcntl.ioctl(file, termios.FIONREAD, bytes(4))):
            time.sleep(_PAUSE_SECONDS)
    except (ImportError, OSError):
        return  # not supported by this system or stream
