"""Measure how the floor of the frozen variance changes the steps after the freeze, and the loss at the end.

    python benchmarks/floors.py

Writes floors.json and a table of docs/freezing/README.md. Each training makes the exact steps once, and goes on from
there with exact Adam and with every floor. The spike is the largest loss in the 50 steps after the freeze over the loss
before; a training counts as disturbed if that is twice exact Adam's, or if it failed.
"""

import argparse
import json
import warnings
from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import page
from freezing_tasks import Task, with_rare_activity
from tqdm import tqdm

import qcomp
from qcomp.testing.one_thread import lockstep

FLOORS = (0.0, 1e-3, 3e-3, 1e-2, 3e-2, 0.1)
EXACT = "exact"
NEAR, AFTER = 50, 100
"""The steps after the freeze in which the spike is measured, and all steps after it."""
FAILED = 1e6
"""What counts as the loss of a training that failed; larger losses count as this too."""
METHODS: dict[str, tuple[Any, dict[str, Any]]] = {
    "1-bit Adam": (qcomp.OneBitAdam, {}),
    "QAdam, 4 bits": (qcomp.QAdam, {"compressor": qcomp.QSGD(levels=7, bucket_size=128)}),
}


class Run(NamedTuple):
    """Where a training is."""

    params: Any
    states: Sequence[Any]
    draws: Sequence[np.random.Generator]


def main() -> None:
    """Measure, write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("docs/freezing"), help="(default: %(default)s)")
    parser.add_argument("--seeds", type=int, default=1, help="(default: %(default)s)")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    tasks = with_rare_activity()
    cases = [(name, method, seed) for seed in range(options.seeds) for method in METHODS for name in tasks]
    results = []
    for name, method, seed in tqdm(cases, unit="training"):
        results.append({"task": name, "method": method, "seed": seed, **measure(tasks[name], method, seed)})
        (options.out / "floors.json").write_text(json.dumps(results, indent=1) + "\n")
    page.rewrite(options.out, {"floors": table(results)})
    print(table(results))


def measure(case: tuple[Task, float, float, int], method: str, seed: int) -> dict[str, Any]:
    """Return the loss before the freeze, and of each floor the largest one after it and the last."""
    task, rate, beta2, freeze = case
    kind, settings = METHODS[method]
    shared = {"betas": (0.9, beta2), "exact": qcomp.ExactBelow(2000), "watch": None, "seed": seed, **settings}

    def falling(step: int) -> float:
        """Return the rate, which falls from the end of the spike on, to a tenth."""
        return rate * (0.1 + 0.9 * min(1.0, max(0.0, (freeze + AFTER - step) / (AFTER - NEAR))))

    params = task.start(seed)
    opt = kind(learning_rate=falling, freeze=10 * freeze, **shared)
    names = tuple(map(str, range(len(params))))
    states = [opt.initial_state(params, names, rank, 2) for rank in range(2)]
    run = Run(params, states, [np.random.default_rng([seed, rank]) for rank in range(2)])
    before = []
    for step in range(freeze - 1):
        run = step_of_all(opt, task, run, step)
        if step > freeze - 20 and step % 4 == 0:
            before.append(task.loss(run.params))
    results: dict[str, Any] = {"before": float(np.mean(before))}
    for floor in (EXACT, *FLOORS):
        freezing = {} if floor == EXACT else {"freeze": freeze, "variance_floor": floor}
        branch = kind(learning_rate=falling, **{"freeze": 10**6, **shared, **freezing})
        near, end = follow(branch, task, deepcopy(run), freeze - 1)
        results[str(floor)] = {"largest": near, "end": end}
    return results


def follow(opt: Any, task: Task, run: Run, first: int) -> tuple[float, float]:
    """Return the largest loss soon after the freeze, and the mean of the last ones."""
    near, end = [], []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for count in range(AFTER):
            try:
                run = step_of_all(opt, task, run, first + count)
            except qcomp.NonFiniteError:
                return FAILED, FAILED
            if count < NEAR and count % 4 == 1:
                near.append(_loss(task, run.params))
            if count >= AFTER - 20 and count % 4 == 0:
                end.append(_loss(task, run.params))
    return max(near), float(np.mean(end))


def _loss(task: Task, params: Any) -> float:
    found = task.loss(params)
    return found if found < FAILED else FAILED


def step_of_all(opt: Any, task: Task, run: Run, step: int) -> Run:
    """Make a step on two ranks with different batches, in one thread."""
    grads = [task.gradients(run.params, draws, step) for draws in run.draws]
    stages = [opt.stages(run.params, g, state) for g, state in zip(grads, run.states, strict=True)]
    results = lockstep(stages)
    return run._replace(params=results[0][0], states=[state for _, state in results])


def table(results: list[dict[str, Any]]) -> str:
    """Return the table of all floors."""
    rows = []
    for floor in map(str, FLOORS):
        cells = [floor]
        for method in METHODS:
            of_method = [r for r in results if r["method"] == method]
            relus = [r for r in of_method if "ReLU" in r["task"]]
            spikes = [r[floor]["largest"] / r["before"] for r in relus]
            disturbed = sum(r[floor]["largest"] > 2 * r[EXACT]["largest"] for r in relus)
            ends = [_ends(group, floor) for group in (relus, [r for r in of_method if r not in relus])]
            cells += [f"{disturbed} of {len(relus)}", f"{_ratio(median(spikes))}, {_ratio(max(spikes))}"]
            cells += [f"{_ratio(median(each))}, {_ratio(max(each))}" for each in ends]
        rows.append(cells)
    head = ["floor"]
    for method in METHODS:
        head += [
            f"{method}: disturbed",
            "spike, median and worst",
            "end over Adam's, ReLUs",
            "end over Adam's, others",
        ]
    return page.table(head, rows)


def _ends(results: list[dict[str, Any]], floor: str) -> list[float]:
    return [r[floor]["end"] / r[EXACT]["end"] for r in results]


def _ratio(value: float) -> str:
    return f"{value:.2f}" if value < 1000 else "failed"


if __name__ == "__main__":
    main()
