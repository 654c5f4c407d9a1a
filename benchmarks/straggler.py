"""Measures what share of its own pace a rank keeps if another is four times slower, with and without waiting.

    python benchmarks/straggler.py            # about seven minutes

Ranks are processes that share a folder. An inner step is a pause of a fixed length, so that no rank takes another's
processor. Writes docs/reliability/straggler.json, and the table of the page beside it.
"""

import argparse
import json
import multiprocessing
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import page
from timing import machine

import qcomp

RANKS, SLOWER = 4, 4
PAUSE = 0.1
"""Seconds for which a fast rank pauses in an inner step."""
EVERY = 100
KINDS = ("alone", "synchronous", "asynchronous")


def main() -> int:
    """Run both loops, and write the figures and the page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("docs/reliability"), help="default: %(default)s")
    parser.add_argument("--seconds", type=float, default=120.0, help="of each run (default: %(default)s)")
    parser.add_argument("--size", type=int, default=100_000, help="parameters (default: %(default)s)")
    options = parser.parse_args()
    results = {kind: run(kind, options.seconds, options.size) for kind in KINDS}
    document = {
        "machine": machine(),
        "seconds": options.seconds,
        "parameters": options.size,
        "every": EVERY,
        "results": results,
    }
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "straggler.json").write_text(json.dumps(document, indent=1) + "\n")
    page.rewrite(options.out, {"straggler": summary(document)})
    print(summary(document))
    return 0


def run(kind: str, seconds: float, size: int) -> list[dict[str, Any]]:
    """Return the figures of each rank, the slow one last."""
    with tempfile.TemporaryDirectory() as folder:
        context = multiprocessing.get_context("spawn")
        with context.Pool(RANKS) as pool:
            jobs = [(kind, folder, rank, seconds, size) for rank in range(RANKS)]
            return pool.starmap(train, jobs, chunksize=1)


def train(kind: str, folder: str, rank: int, seconds: float, size: int) -> dict[str, Any]:
    """Train for some seconds, and return what share of its own pace a rank has kept, and what counted of its steps."""
    comm = qcomp.comm.FolderCommunicator(folder, rank, RANKS, job="ranks", timeout=600)
    settings = qcomp.outer.sparse_loco(EVERY, compressor=qcomp.TopK(64, 4096, value_bits=2), exact=None)
    params = np.zeros(size, np.float32)
    draws = np.random.default_rng(rank)
    state: Any = None
    _load_kernels(settings, params)
    pause = PAUSE * (SLOWER if rank == RANKS - 1 else 1)
    if kind == "alone":
        qcomp.comm.broadcast(params, comm)
    elif kind == "synchronous":
        state = settings.init(params, comm)
    else:
        loop = qcomp.outer.Asynchronous(loop=settings, quorum=2, grace=0.5, pause=0.25, max_age=4)
        mailbox = qcomp.comm.FolderMailbox(f"{folder}/mailbox")
        qcomp.comm.broadcast(params, comm)  # begin together
        params, state = loop.begin(params, mailbox, rank=rank)
    rounds = max(1, int(seconds / (EVERY * PAUSE * SLOWER)))
    steps, start = 0, time.monotonic()
    # Synchronous ranks must all make the same number of steps.
    while steps < rounds * EVERY if kind == "synchronous" else time.monotonic() - start < seconds:
        time.sleep(pause)
        moved = params - np.float32(1e-3) * draws.random(size, np.float32)
        if kind == "alone":
            params = moved
        elif kind == "synchronous":
            params, state = settings.step(moved, state, comm)
        else:
            params, state = loop.step(moved, state, mailbox)
        steps += 1
    figures = {"steps_per_second": steps / (time.monotonic() - start)}
    if kind == "alone":
        return figures
    if kind == "synchronous":
        return figures | {"rounds": int(state.numbers["rounds.0"]), "counted": steps}
    merged, _ = state.counted.get(rank, (0, 0))
    return figures | {"rounds": state.version, "counted": merged * EVERY}


def _load_kernels(settings: qcomp.OuterLoop, params: np.ndarray) -> None:
    """Make a round alone, and one over a mailbox, so that no kernel is loaded while it counts."""
    loop = qcomp.outer.Asynchronous(loop=settings, quorum=1, grace=0, pause=0)
    with tempfile.TemporaryDirectory() as folder:
        mailbox = qcomp.comm.FolderMailbox(folder)
        params, state = loop.begin(params, mailbox)
        while state.version < 2:
            params, state = loop.step(params - 1, state, mailbox)
    alone = qcomp.comm.LocalCommunicator.alone()
    found = settings.init(params, alone)
    for _ in range(EVERY):
        params, found = settings.step(params - 1, found, alone)


def summary(document: dict[str, Any]) -> str:
    """Return the table of the page."""
    alone, rows = document["results"]["alone"], []
    for kind in KINDS[1:]:
        ranks = document["results"][kind]
        *fast, slow = (
            rank["steps_per_second"] / own["steps_per_second"] for rank, own in zip(ranks, alone, strict=True)
        )
        rounds = max(rank["rounds"] for rank in ranks)
        counted = sum(rank["counted"] for rank in ranks) / document["seconds"]
        rows.append([kind, f"{100 * min(fast):.0f} %", f"{100 * slow:.0f} %", f"{rounds}", f"{counted:.0f}"])
    head = [
        "rounds",
        "slowest of the fast ranks",
        "slow rank",
        "rounds closed",
        "steps a second that counted",
    ]
    words = ", ".join(f"{name} {value}" for name, value in document["machine"].items())
    return f"{page.table(head, rows)}\n\n{RANKS} ranks, {document['seconds']:.0f} s; {words}."


if __name__ == "__main__":
    raise SystemExit(main())
