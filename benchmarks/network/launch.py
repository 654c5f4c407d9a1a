"""Starts a program on every rank, over gloo or MPI, on the nodes of a shaped network or all on one node."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from network.shaped import ENTER, VARIABLE, address, ended_by_signals, enter, shaped_network

__all__ = ["LINKS", "RATES", "RankError", "launch", "launch_here"]

LINKS = ("10mbit", "100mbit", "1gbit", "10gbit", "loopback")
RATES = {"10mbit": 1e7 / 8, "100mbit": 1e8 / 8, "1gbit": 1e9 / 8, "10gbit": 1e10 / 8}
"""Bytes per second; the loopback of one node has no limit."""
FOLDERS = [Path(__file__).parents[1], Path(__file__).parents[2], Path(__file__).parents[2] / "examples"]
"""The folders from which ranks import."""
PORT = 29511


class RankError(Exception):
    """A rank that failed."""


def launch(
    transport: str,
    ranks: int,
    program: Sequence[str],
    *,
    link: str | None = None,
    limit_seconds: float = 1500,
) -> None:
    """Run ``python *program`` on every rank of a new network, and wait.

    Parameters
    ----------
    transport : {"gloo", "mpi"}
        Starts the ranks and carries their messages; both use TCP.
    ranks : int
    program : sequence of str
        Arguments of Python.
    link : str, optional
        One of `LINKS`. Without it each rank has a node, and no limit until a rank sets one by `limit`.
    limit_seconds : float
        Seconds after which the ranks are ended.

    Raises
    ------
    NetworkError
        If no network can be made here.
    RankError
        If a rank fails, or the ranks take too long.
    """
    alone = link == "loopback"
    with shaped_network(1 if alone else ranks, link if link in RATES else None) as name:
        starts = _mpi if transport == "mpi" else _gloo
        _wait(starts(name, ranks, [sys.executable, *program], alone=alone), limit_seconds)


def launch_here(ranks: int, program: Sequence[str], *, limit_seconds: float) -> None:
    """Run ``python *program`` on every rank as processes of this node, over gloo, without a shaped network.

    Parameters
    ----------
    ranks : int
    program : sequence of str
        Arguments of Python.
    limit_seconds : float
        Seconds after which the ranks are ended.

    Raises
    ------
    RankError
        If a rank fails, or the ranks take too long.
    """
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
    command = [sys.executable, *program]
    addresses = ["127.0.0.1"] * ranks
    own = [_rank(rank, addresses, interface="lo", port=port) for rank in range(ranks)]
    with ended_by_signals():
        _wait([_start(command, _environment("") | variables) for variables in own], limit_seconds)


def _rank(rank: int, addresses: Sequence[str], *, interface: str, port: int) -> dict[str, str]:
    """Return the environment variables of a rank over gloo."""
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(len(addresses)),
        "MASTER_ADDR": addresses[0],
        "MASTER_PORT": str(port),
        "OWN_ADDR": addresses[rank],
        "GLOO_SOCKET_IFNAME": interface,
    }


def _gloo(name: str, ranks: int, command: Sequence[str], *, alone: bool) -> list[subprocess.Popen[bytes]]:
    addresses = [address(0 if alone else rank) for rank in range(ranks)]
    processes = []
    for rank in range(ranks):
        own = _rank(rank, addresses, interface="lo" if alone else "eth0", port=PORT)
        processes.append(_start(enter(0 if alone else rank, command), _environment(name) | own))
    return processes


def _mpi(name: str, ranks: int, command: Sequence[str], *, alone: bool) -> list[subprocess.Popen[bytes]]:
    # MPICH: libfabric's TCP comes closer to the wire rate than the default, UCX.
    own = {"MPIR_CVAR_CH4_NETMOD": "ofi", "FI_PROVIDER": "tcp", "FI_TCP_IFACE": "lo" if alone else "eth0"}
    mpiexec = [str(Path(sys.executable).parent / "mpiexec"), "-n", str(ranks)]
    if not alone:
        hosts = ",".join(address(node) for node in range(ranks))
        mpiexec += ["-launcher", "ssh", "-launcher-exec", str(ENTER), "-hosts", hosts, "-ppn", "1"]
    return [_start(enter(0, [*mpiexec, *command]), _environment(name) | own)]


def _environment(name: str) -> dict[str, str]:
    paths = [str(folder) for folder in FOLDERS]
    paths += [path for path in [os.environ.get("PYTHONPATH", "")] if path]
    return {
        **os.environ,
        VARIABLE: name,
        "PYTHONPATH": os.pathsep.join(paths),
        "OMP_NUM_THREADS": "1",
        "NUMBA_NUM_THREADS": "1",
        "THP_MEM_ALLOC_ENABLE": "1",  # large pages for torch's large tensors, as NumPy uses
    }


def _start(command: Sequence[str], environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, start_new_session=True)


def _wait(processes: Sequence[subprocess.Popen[bytes]], seconds: float) -> None:
    """Wait for all ranks, and end all if one fails or they take too long."""
    deadline = time.monotonic() + seconds
    try:
        while any(process.poll() is None for process in processes):
            if any(process.returncode for process in processes):
                time.sleep(2)  # the other ranks may notice and report more
                break
            if time.monotonic() > deadline:
                raise RankError(f"the ranks did not end within {seconds:g} s")
            time.sleep(0.05)
    finally:
        for process in processes:
            if process.poll() is None:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    failed = {rank: process.returncode for rank, process in enumerate(processes) if process.returncode}
    if failed:
        raise RankError(f"ranks ended with a status other than 0: {failed}")
