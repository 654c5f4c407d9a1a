"""Train three tasks with each optimizer at equal steps, over several seeds, and compare them with exact Adam.

    python benchmarks/study.py

Writes a file for each run into docs/benchmarks/convergence/runs, and skips runs whose files exist, so it can be stopped
and restarted at any time. Then it draws the curves and writes the tables of that folder's README.md. The two ranks of a
run take turns in one process.
"""

import argparse
import json
from pathlib import Path

import torch
from convergence.adversarial_network import AdversarialNetworkTask
from convergence.language_model import LanguageModelTask
from convergence.methods import METHODS
from convergence.residual_network import ResidualNetworkTask
from convergence.task import Task
from convergence.training import train
from convergence.verdict import write

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
    parser.add_argument("--seeds", type=int, default=5, help="number of seeds, from 0 (default: %(default)s)")
    parser.add_argument("--steps", type=int, help="of every run, for a trial (default: those of the task)")
    parser.add_argument("--page", action="store_true", help="only draw and write the tables, from the files")
    options = parser.parse_args()
    if not options.page:
        torch.set_num_threads(1)
        runs = options.out / "runs"
        runs.mkdir(parents=True, exist_ok=True)
        for name in options.tasks:
            for seed in range(options.seeds):
                for method in options.methods:
                    path = runs / f"{name}-{method}-{seed}.json"
                    if not path.exists():
                        run = train(TASKS[name], method, seed, options.steps or TASKS[name].steps)
                        path.write_text(json.dumps(run.document()) + "\n")
    write(options.out, TASKS)


if __name__ == "__main__":
    main()
