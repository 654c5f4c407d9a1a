"""Watch the memory of a process that trains for a long time: one job, a few jobs in turn, and ever new ones.

    python benchmarks/memory_soak.py

Writes docs/reliability/memory.json and the table of the page beside it.
"""

import argparse
import ctypes
import gc
import json
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import page
from timing import machine

import qcomp
from qcomp.comm.local import LocalCommunicator, run_local

PAGE_BYTES = 4096
PARTS = 10
FREEZE = 3
STEPS_OF_A_JOB = 10


def main() -> int:
    """Run the three soaks, and write the file and the page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("docs/reliability"), help="default: %(default)s")
    parser.add_argument("--steps", type=int, default=10_000, help="of each soak (default: %(default)s)")
    options = parser.parse_args()
    rows = []
    for name, jobs in (
        ("one job", one_job(options.steps)),
        ("8 jobs in turn", jobs_of(options.steps, different=8)),
        ("ever new jobs", jobs_of(options.steps, different=None)),
    ):
        memory, _ = run_local(2, partial(soak, jobs=list(jobs), steps=options.steps), timeout=3600)
        rows.append({"soak": name, "steps": options.steps, "MiB": memory})
        print(rows[-1], flush=True)
    options.out.mkdir(parents=True, exist_ok=True)
    document = {"machine": machine(), "rows": rows}
    (options.out / "memory.json").write_text(json.dumps(document, indent=1) + "\n")
    page.rewrite(options.out, {"memory": table(rows)})
    return 0


def one_job(steps: int) -> Iterator[tuple[int, list[tuple[int, ...]]]]:
    """Yield the steps and the shapes of a single job."""
    yield steps, [(64, 100), (100,), (33, 7)]


def jobs_of(steps: int, *, different: int | None) -> Iterator[tuple[int, list[tuple[int, ...]]]]:
    """Yield the steps and the shapes of many jobs."""
    for number in range(steps // STEPS_OF_A_JOB):
        random = np.random.default_rng(number if different is None else number % different)
        shapes = [tuple(map(int, random.integers(1, 200, size=dims))) for dims in (2, 1, 2)]
        yield STEPS_OF_A_JOB, shapes


def soak(comm: LocalCommunicator, jobs: list[tuple[int, list[tuple[int, ...]]]], steps: int) -> list[float]:
    """Train all jobs, and return the memory of this process after each tenth of the steps."""
    done, memory = 0, []
    for length, shapes in jobs:
        optimizer = qcomp.OneBitAdam(
            learning_rate=1e-3, betas=(0.9, 0.9), freeze=FREEZE, exact=None, watch=None
        )
        params = [np.zeros(shape, np.float32) for shape in shapes]
        state = optimizer.init(params, comm)
        random = np.random.default_rng(comm.rank)
        for _ in range(length):
            gradients = [random.standard_normal(p.shape, dtype=np.float32) for p in params]
            params, state = optimizer.step(params, gradients, state, comm)
            done += 1
            if done % (steps // PARTS) == 0:
                memory.append(resident_mib())
    return memory


def resident_mib() -> float:
    """Return the MiB of memory that this process holds, after it has released unused memory."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return round(pages * PAGE_BYTES / 2**20, 1)


def table(rows: list[dict[str, Any]]) -> str:
    """Return the table of the page."""
    head = ["", "steps", "MiB after a tenth", "after a half", "at the end", "growth in the second half"]
    lines = []
    for row in rows:
        memory = row["MiB"]
        half = memory[PARTS // 2 - 1]
        cells = [row["soak"], str(row["steps"]), f"{memory[0]:.0f}", f"{half:.0f}", f"{memory[-1]:.0f}"]
        lines.append([*cells, f"{memory[-1] - half:+.1f}"])
    return page.table(head, lines)


if __name__ == "__main__":
    sys.exit(main())
