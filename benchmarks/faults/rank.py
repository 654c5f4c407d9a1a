"""One rank that exchanges or trains until it is killed, stopped, or notices the fault of another."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import qcomp
from qcomp.core.errors import CommunicatorError

__all__ = ["EXCHANGES", "PHASES", "UNPLUG", "Case", "run"]

EXCHANGES = {"1 KiB": 1 << 10, "1 MiB": 1 << 20, "64 MiB": 64 << 20, "256 MiB": 256 << 20}
"""Bytes that a rank sends to each other rank."""
PHASES = (*(f"exchange of {size}" for size in EXCHANGES), "exact steps", "the freeze", "compressed steps")
FREEZE = 20
ELEMENTS = 1 << 18
BEFORE = 3
"""Undisturbed exchanges before the fault."""
TIMEOUT = 300.0
"""The communicator's default timeout in seconds; no rank should wait that long."""
SILENCE = 2.0
"""Seconds without a sign of life after which a rank counts as lost in most cases."""
UNPLUG = "unplugged"


class Case(NamedTuple):
    """A fault.

    Parameters
    ----------
    transport : {"gloo", "mpi"}
    phase : str
        One of `PHASES`.
    fault : {"SIGKILL", "SIGSTOP", "unplugged"}
        A signal to the victim, or its network interface taken down without notice to other nodes.
    victim : int
        The rank that has the fault.
    moment : float
        Seconds from the start of the phase on the victim to the fault.
    silence : float or None
        The communicators'; None is their default.
    """

    transport: str
    phase: str
    fault: str
    victim: int
    moment: float
    silence: float | None = SILENCE


class Diary:
    """The events of a rank, one line of JSON each, with times of a clock that all processes of the machine share."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("w", buffering=1)

    def write(self, event: str, **details: Any) -> None:
        """Add a line."""
        self._file.write(json.dumps({"event": event, "time": time.monotonic(), **details}) + "\n")


def run(case: Case, create: Callable[[], Any], rank: int, folder: Path) -> None:
    """Run a case, and write a diary into a folder; never returns."""
    diary = Diary(folder / f"{rank}.jsonl")

    def strike() -> None:
        time.sleep(case.moment)
        diary.write("struck")
        if case.fault == UNPLUG:
            subprocess.run(["ip", "link", "set", "eth0", "down"], check=True)
        else:
            os.kill(os.getpid(), getattr(signal, case.fault))

    fate = threading.Thread(target=strike, daemon=True) if rank == case.victim else None
    try:
        _act(case.phase, create, fate, rank)
        diary.write("ended")
    except CommunicatorError as error:
        diary.write("noticed", text=str(error))
    except BaseException:
        diary.write("broke", text=traceback.format_exc())
    os._exit(0)  # without waiting for other ranks


def _act(phase: str, create: Callable[[], Any], fate: threading.Thread | None, rank: int) -> None:
    comm = create()
    if phase in PHASES[: len(EXCHANGES)]:
        size = EXCHANGES[phase.removeprefix("exchange of ")]
        exchange(comm, size, BEFORE)
        if fate is not None:
            fate.start()
        exchange(comm, size, 10**9)
    train(comm, phase, fate, rank)


def exchange(comm: Any, size: int, times: int) -> None:
    """Exchange with all ranks, again and again."""
    data = [np.full(size, comm.rank, np.uint8) for _ in range(comm.size)]
    for _ in range(times):
        received = comm.all_to_all(data, [size] * comm.size)
        for peer, buffer in enumerate(received):
            if buffer[0] != peer or buffer[-1] != peer:
                raise AssertionError(f"rank {peer} sent {buffer[0]}")


def train(comm: Any, phase: str, fate: threading.Thread | None, rank: int) -> None:
    """Train with 1-bit Adam."""
    optimizer = qcomp.OneBitAdam(learning_rate=1e-3, betas=(0.9, 0.9), freeze=FREEZE)
    random = np.random.default_rng(rank)
    params = [np.zeros((512, ELEMENTS // 512), np.float32)]
    state = optimizer.init(params, comm)
    begin = {"exact steps": 3, "the freeze": FREEZE - 1, "compressed steps": FREEZE + 3}[phase]
    for step in range(10**9):
        if step == begin and fate is not None:
            fate.start()
        gradients = [random.standard_normal(params[0].shape, dtype=np.float32)]
        params, state = optimizer.step(params, gradients, state, comm)


def main() -> None:
    """Run one rank of a case over MPI."""
    from mpi4py import MPI  # noqa: PLC0415  (not for gloo)

    from qcomp.comm.mpi import MPICommunicator  # noqa: PLC0415

    # With -disable-auto-cleanup MPICH's launcher sends this signal to the survivors instead of ending them.
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    case = Case(**json.loads(sys.argv[1]))
    world = MPI.COMM_WORLD
    run(
        case,
        lambda: MPICommunicator(world, timeout=TIMEOUT, silence=case.silence),
        world.Get_rank(),
        Path(sys.argv[2]),
    )


if __name__ == "__main__":
    main()
