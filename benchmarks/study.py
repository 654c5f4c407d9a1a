"""Train three tasks with each optimizer at equal steps, over several seeds, and compare them with exact Adam.

    mpirun -n 2 python -m mpi4py benchmarks/study.py

Writes a file for each run into docs/benchmarks/convergence/runs, and skips runs whose files exist, so it can be stopped
and restarted at any time. Then it draws the curves and writes the tables of that folder's README.md.
"""

import argparse
import json
from pathlib import Path

import numpy as np
import torch
from convergence.adversarial_network import AdversarialNetworkTask
from convergence.language_model import LanguageModelTask
from convergence.methods import METHODS
from convergence.residual_network import ResidualNetworkTask
from convergence.task import Task
from convergence.training import train
from convergence.verdict import write

import qcomp

TASKS: dict[str, type[Task]] = {
    task.name: task for task in (LanguageModelTask, ResidualNetworkTask, AdversarialNetworkTask)
}


def main() -> None:
    """Run what is missing, then write the page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--out", type=Path, default=Path("docs/benchmarks/convergence"), help="(default: %(default)s)"
    )
    parser.add_argument("--tasks", nargs="+", choices=list(TASKS), default=list(TASKS), metavar="TASK")
    parser.add_argument(
        "--methods",
        nargs="+",
        choices=list(METHODS),
        default=[name for name, method in METHODS.items() if not method.tried],
        metavar="METHOD",
    )
    parser.add_argument("--seeds", type=int, default=5, help="0 to one below this (default: %(default)s)")
    parser.add_argument("--steps", type=int, help="of every run, for a trial (default: those of the task)")
    parser.add_argument("--page", action="store_true", help="only draw and write the tables, from the files")
    options = parser.parse_args()
    runs = options.out / "runs"
    comm = qcomp.comm.world()
    if not options.page:
        torch.set_num_threads(1)
        runs.mkdir(parents=True, exist_ok=True)
        wanted = [
            (task, method, seed)
            for task in options.tasks
            for seed in range(options.seeds)
            for method in options.methods
        ]
        for name, method, seed in missing(wanted, runs, comm):
            task = TASKS[name](seed, comm.rank)
            run = train(task, method, options.steps or task.steps, comm)
            if comm.rank == 0:
                path_of(runs, name, method, seed).write_text(json.dumps(run.document()) + "\n")
    if comm.rank == 0:
        write(options.out, TASKS)


def path_of(runs: Path, task: str, method: str, seed: int) -> Path:
    """Return the file of a run."""
    return runs / f"{task}-{method}-{seed}.json"


def missing(
    wanted: list[tuple[str, str, int]], runs: Path, comm: qcomp.comm.Communicator
) -> list[tuple[str, str, int]]:
    """Return the runs whose files are missing on rank 0, so that all ranks run the same ones."""
    there = np.array([path_of(runs, *run).exists() for run in wanted], dtype=np.uint8)
    (seen, *_) = comm.all_gather(there, [len(wanted)] * comm.size)
    return [run for run, done in zip(wanted, seen, strict=True) if not done]


if __name__ == "__main__":
    main()
