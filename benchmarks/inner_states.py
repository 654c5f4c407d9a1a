"""States of inner optimizers in an outer loop: kept, averaged, reset, or averaged on periods of their own.

    python benchmarks/inner_states.py                 # trains what has no row yet, and writes the table
    python benchmarks/inner_states.py --ranks 2 --seeds 0 --outer local_sgd
    python benchmarks/inner_states.py --table         # only writes the table

The race's demo of 0.87 M parameters, with AdamW inside; all ranks are threads of one process. A row has the loss of the
shared parameters, and the megabytes that a rank has sent. A link needs 8 times these, divided by its rate in Mbit/s, in
seconds.
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import page
import torch
from race.settings import BETAS, DECAY
from race.tasks import TASKS, loss_of
from schedule import Cosine
from tqdm import tqdm

import qcomp
import qcomp.torch
from qcomp.comm import Communicator, run_local
from qcomp.outer import InnerStates

TASK = TASKS["demo"]
EVERY = TASK.every
RATE = 1e-3
"""The rate with the lowest loss of exact AdamW in the race."""
MBIT = 10


def periods(first: int, second: int) -> InnerStates:
    """Return the periods of both moments of AdamW, given in outer rounds."""
    return InnerStates({"exp_avg": first * EVERY, "exp_avg_sq": second * EVERY})


CHOICES: dict[str, tuple[int, Any]] = {
    "keep": (EVERY, "keep"),
    "keep, three times as many outer rounds": (EVERY // 3, "keep"),
    "average": (EVERY, "average"),
    "average, bfloat16": (EVERY, InnerStates(EVERY, qcomp.Cast("bfloat16"))),
    "first 6, second 3": (EVERY, periods(6, 3)),
    "first 3, second 6": (EVERY, periods(3, 6)),
    "reset": (EVERY, "reset"),
}
"""The steps of an outer round, and ``inner_state``. The second row sends as much as averages of both moments do."""

OUTER = {"local_sgd": qcomp.outer.local_sgd, "diloco": qcomp.outer.diloco}


def main() -> None:
    """Train what has no row, and write the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add, default = parser.add_argument, "(default: %(default)s)"
    add("--out", type=Path, default=Path("docs/benchmarks"), help=default)
    add("--choices", nargs="+", choices=list(CHOICES), default=list(CHOICES), metavar="CHOICE")
    add("--outer", nargs="+", choices=list(OUTER), default=list(OUTER), help=default)
    add("--ranks", nargs="+", type=int, default=[2, 4], help=default)
    add("--seeds", nargs="+", type=int, default=[0, 1], help=default)
    add("--steps", type=int, default=TASK.steps, help=default)
    add("--table", action="store_true", help="only write the table, from the file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    options.out.mkdir(parents=True, exist_ok=True)
    results = options.out / "inner_states.json"
    runs = json.loads(results.read_text()) if results.exists() else []
    wanted = product(options.outer, options.ranks, options.seeds, options.choices)
    for outer, ranks, seed, choice in () if options.table else wanted:
        which = {"outer": outer, "ranks": ranks, "seed": seed, "choice": choice, "steps": options.steps}
        if not any(which.items() <= run.items() for run in runs):
            runs.append(which | train(**which))
            results.write_text("[\n" + ",\n".join(map(json.dumps, runs)) + "\n]\n")
            print(runs[-1], flush=True)
    page.rewrite(options.out, blocks(runs))


def train(outer: str, ranks: int, seed: int, choice: str, steps: int) -> dict[str, float]:
    """Return the loss of the shared parameters, what a rank has sent, and the largest update after an exchange."""
    models = [TASK.model(seed) for _ in range(ranks)]  # in one thread, since torch's generator is one for all

    def rank_main(comm: Communicator) -> tuple[float, int, float]:
        model = models[comm.rank]
        optimizer = torch.optim.AdamW(model.parameters(), betas=BETAS, weight_decay=DECAY)
        every, inner_state = CHOICES[choice]
        settings = OUTER[outer](every, seed=seed)
        loop = qcomp.torch.OuterLoop(model, optimizer, settings, comm=comm, inner_state=inner_state)
        rate, before, largest = Cosine(RATE, steps), comm.bytes_sent, 0.0
        for step in tqdm(range(steps), desc=choice, disable=comm.rank > 0, mininterval=10):
            inputs, wanted = TASK.draw(seed, comm.rank, step)
            optimizer.param_groups[0]["lr"] = rate(step)
            optimizer.zero_grad()
            torch.autograd.backward(loss_of(model(inputs), wanted))
            optimizer.step()
            if (step + 1) % EVERY == 0:
                largest = max([largest, *map(largest_update, optimizer.state.values())])
        sent = comm.bytes_sent - before
        model.load_state_dict(loop.shared_parameters())
        loss = TASK.validate(model, comm.rank, comm.size)
        loop.remove()
        return loss, sent, largest

    losses, sent, largest = zip(*run_local(ranks, rank_main, timeout=7200), strict=True)
    return {
        "loss": round(sum(losses), 4),
        "megabytes": round(max(sent) / 1e6, 1),
        "largest_update": round(max(largest), 1),
    }


def largest_update(state: Mapping[str, Any]) -> float:
    """Return the largest |m| / (sqrt(v) + eps) of a parameter; 0 after a reset."""
    if not state:
        return 0.0
    return float((state["exp_avg"].abs() / (state["exp_avg_sq"].sqrt() + 1e-8)).max())


def blocks(runs: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Return the table of the page: the losses by outer loop and ranks, in the order of the seeds."""
    columns = sorted({(run["outer"], run["ranks"]) for run in runs}, reverse=True)
    columns.sort(key=lambda column: column[1])
    few = min(run["ranks"] for run in runs)
    head = ["inner states", "MB", f"seconds at {MBIT} Mbit/s", "largest update"]
    head += [f"{outer}, {ranks} ranks" for outer, ranks in columns]
    rows = []
    for choice in CHOICES:
        own = sorted((run for run in runs if run["choice"] == choice), key=lambda run: run["seed"])
        sent = [run["megabytes"] for run in own if run["ranks"] == few]
        if not sent:
            continue
        largest = max(run["largest_update"] for run in own)
        row = [choice, f"{sent[0]:.0f}", f"{8 * sent[0] / MBIT:.0f}", f"{largest:,.0f}" if largest else ""]
        for column in columns:
            losses = [f"{run['loss']:.4f}" for run in own if (run["outer"], run["ranks"]) == column]
            row.append(", ".join(losses))
        rows.append(row)
    steps = max(run["steps"] for run in runs)
    told = f"{steps} steps. Losses in the order of the seeds; megabytes that a rank sends, and seconds, of {few} ranks."
    return {"inner_states": f"{told}\n\n{page.table(head, rows)}"}


if __name__ == "__main__":
    main()
