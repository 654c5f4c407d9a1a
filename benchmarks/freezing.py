"""Measure when the default rule freezes the variance, at what cost, and how the watch reacts to a wrong freeze.

    python benchmarks/freezing.py

Writes freezing.json and the tables of docs/freezing/README.md. There are three parts: gradients whose size follows a
known course; three small trainings, with the rule, the best of several fixed steps, and exact Adam; and four trainings
in which a variance that was frozen at a fixed step no longer fits, with a watch that only warns and one that re-warms.
"""

import argparse
import json
import math
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import page
from freezing_tasks import TASKS, Task, drifts
from tqdm import tqdm

import qcomp
from qcomp.comm import LocalCommunicator, run_local

BETAS = (0.9, 0.99)
WINDOW = 100
FIXED = (100, 200, 400, 800, 1600)
STEPS = 2000
RISE = 200
RATE = 0.003
LONGEST = 60
"""The number of windows for which a course is followed."""

COURSES: dict[str, Callable[[float], float]] = {
    "stationary": lambda _: 1.0,
    "1 / sqrt(t)": lambda windows: (1 + WINDOW * windows) ** -0.5,
    "halve every 0.6 windows": lambda windows: 2 ** (-windows / 0.6),
    "halve every 2 windows": lambda windows: 2 ** (-windows / 2),
    "a bump at 0.6 windows, then 1/160 of it": lambda windows: (
        8 * math.exp(-(((windows - 0.6) / 0.25) ** 2)) + 0.05
    ),
    "double every 2 windows": lambda windows: 2 ** (windows / 2),
    "double every 2 windows, up to 6": lambda windows: 2 ** (min(windows, 6) / 2),
    "zero for 2 windows, then stationary": lambda windows: float(windows >= 2),
    "stationary, the rate rises for 5 windows": lambda _: 1.0,
}


class Followed(NamedTuple):
    """When the rule froze on a course of gradients, in windows of 1 / (1 - b2) steps."""

    freeze: float | None
    before: float
    """The factor by which the bias-corrected variance changed in the window before the freeze."""
    after: float


def main() -> None:
    """Measure, write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("docs/freezing"), help="(default: %(default)s)")
    parser.add_argument("--steps", type=int, default=STEPS, help="of every training (default: %(default)s)")
    parser.add_argument("--seeds", type=int, default=1, help="(default: %(default)s)")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    results = {
        "courses": {name: follow(name)._asdict() for name in tqdm(COURSES, desc="courses", unit="case")},
        "trainings": trainings(options.steps, options.seeds),
        "drifts": drifting(),
    }
    (options.out / "freezing.json").write_text(json.dumps(results, indent=1) + "\n")
    blocks = {
        "courses": of_courses(results),
        "trainings": of_trainings(results),
        "drifts": of_drifts(results),
    }
    page.rewrite(options.out, blocks)
    print(*blocks.values(), sep="\n\n")


def follow(name: str) -> Followed:
    """Run the default rule on gradients of a known size until it freezes."""
    rise = 5 * WINDOW if "rises" in name else 0
    opt = qcomp.OneBitAdam(
        learning_rate=lambda step: min(1.0, (step + 1) / rise) if rise else 1.0, betas=BETAS, exact=None
    )
    comm, draws = LocalCommunicator.alone(), np.random.default_rng(0)
    params = np.zeros(500, np.float32)
    state = opt.init(params, comm)
    raw, corrected, freeze = 0.0, [], None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for step in range(LONGEST * WINDOW):
            gradient = (draws.standard_normal(500) * COURSES[name](step / WINDOW)).astype(np.float32)
            raw = BETAS[1] * raw + (1 - BETAS[1]) * float(gradient @ gradient)
            corrected.append(raw / (1 - BETAS[1] ** (step + 1)))
            if freeze is None:
                params, state = opt.step(params, gradient, state, comm)
                freeze = state.step if state.stage != "warmup" else None
            elif step == freeze + WINDOW:
                before, at, after = (corrected[freeze - 1 + shift] for shift in (-WINDOW, 0, WINDOW))
                return Followed(freeze / WINDOW, at / before, after / at)
    return Followed(None, math.nan, math.nan)


class Trained(NamedTuple):
    """The end of a training."""

    freeze: int | None
    loss: float
    first_warning: int | None = None
    exact: int = 0
    """The number of exact steps."""


def train(opt: qcomp.Optimizer, task: Task, steps: int, seed: int, ranks: int = 2) -> Trained:
    """Train on ranks with different batches, and return the loss on all data at the end."""

    def rank_main(comm: Any) -> Trained:
        params = task.start(seed)
        state = opt.init(params, comm)
        draws = np.random.default_rng([seed, comm.rank])
        freeze, exact, warned = None, 0, None
        for step in range(steps):
            before = len(found)
            exact += state.stage != "compressed"
            params, state = opt.step(params, task.gradients(params, draws, step), state, comm)
            if freeze is None and state.stage == "compressed":
                freeze = state.step
            if warned is None and len(found) > before:
                warned = state.step
        return Trained(freeze, task.loss(params), warned, exact)

    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        warnings.filterwarnings("ignore", "overflow|invalid|the variance is frozen after")
        return run_local(ranks, rank_main, timeout=600)[0]


def rate(step: int, rise: int, steps: int) -> float:
    """Return the rate: it rises linearly, then falls as a cosine to a tenth; constant without a rise."""
    if not rise:
        return RATE
    if step < rise:
        return RATE * (step + 1) / rise
    return RATE * (0.1 + 0.9 * (1 + math.cos(math.pi * (step - rise) / max(1, steps - rise))) / 2)


def trainings(steps: int, seeds: int) -> list[dict[str, Any]]:
    """Train every task with the rule, with fixed steps, and with exact Adam."""
    results = []
    for (name, task), rise in tqdm([(t, r) for t in TASKS.items() for r in (0, RISE)], desc="trainings"):
        shared: dict[str, Any] = {
            "learning_rate": lambda step, rise=rise: rate(step, rise, steps),
            "betas": BETAS,
        }
        compressing: dict[str, Any] = {**shared, "exact": qcomp.ExactBelow(500)}
        methods: dict[str, qcomp.Optimizer] = {
            "Adam": qcomp.Adam(**shared),
            "rule": qcomp.OneBitAdam(**compressing),
            **{f"fixed {k}": qcomp.OneBitAdam(**compressing, freeze=k) for k in FIXED if k < steps},
        }
        runs = {
            method: [train(opt, task, steps, seed)._asdict() for seed in range(seeds)]
            for method, opt in methods.items()
        }
        results.append({"task": name, "rise": rise, "steps": steps, "runs": runs})
    return results


def drifting() -> list[dict[str, Any]]:
    """Train tasks that change after the freeze: with the default watch, one that re-warms, and exact Adam."""
    results = []
    for name, (task, settings, freeze, steps) in tqdm(drifts().items(), desc="drifts"):
        again = qcomp.VarianceWatch(rewarm_steps=3 * WINDOW)
        shared = {"betas": BETAS, **settings}
        methods: dict[str, qcomp.Optimizer] = {
            "Adam": qcomp.Adam(**shared),
            "1-bit Adam": qcomp.OneBitAdam(**shared, exact=None, freeze=freeze),
            "1-bit Adam, measured again": qcomp.OneBitAdam(**shared, exact=None, freeze=freeze, watch=again),
            "QAdam": qcomp.QAdam(**shared, exact=None, freeze=freeze, variance_steps=None),
            "QAdam, measured again": qcomp.QAdam(
                **shared, exact=None, freeze=freeze, watch=again, variance_steps=None
            ),
        }
        runs = {method: train(opt, task, steps, 0)._asdict() for method, opt in methods.items()}
        results.append({"drift": name, "freeze": freeze, "steps": steps, "runs": runs})
    return results


def of_courses(results: dict[str, Any]) -> str:
    """Return the table of the first part."""
    rows = [
        [name, "not in 60", "", ""]
        if f["freeze"] is None
        else [name, f"{f['freeze']:.2f}", f"{f['before']:.2f}", f"{f['after']:.2f}"]
        for name, f in results["courses"].items()
    ]
    return page.table(
        [
            "size of the gradients",
            "freeze, in windows",
            "v over that a window before",
            "v a window later over v",
        ],
        rows,
    )


def of_trainings(results: dict[str, Any]) -> str:
    """Return the table of the second part."""
    rows = []
    for each in results["trainings"]:
        runs = each["runs"]
        ends = {method: _ends(of_seeds) for method, of_seeds in runs.items()}
        fixed = {m: end for m, end in ends.items() if m.startswith("fixed")}
        best = min(fixed, key=lambda m: np.mean(fixed[m]))
        worst = max(fixed, key=lambda m: np.mean(fixed[m]))
        steps = [r["freeze"] for r in runs["rule"]]
        rows.append(
            [
                each["task"]
                + (f", the rate rises for {each['rise']}" if each["rise"] else ", constant rate"),
                _spread(ends["Adam"]),
                " / ".join("not" if s is None else str(s) for s in steps),
                _spread(ends["rule"]),
                f"{best.split()[1]}: {_spread(ends[best])}",
                f"{worst.split()[1]}: {_spread(ends[worst])}",
            ]
        )
    return page.table(
        ["training", "Adam", "the rule freezes at", "loss", "best fixed step", "worst fixed step"], rows
    )


def of_drifts(results: dict[str, Any]) -> str:
    """Return the table of the third part."""
    rows = []
    for each in results["drifts"]:
        for method, run in each["runs"].items():
            rows.append(
                [
                    each["drift"],
                    method,
                    f"{run['loss']:.3g}",
                    "" if run["first_warning"] is None else str(run["first_warning"]),
                    f"{run['exact']} of {each['steps']}",
                ]
            )
    return page.table(["what changes", "method", "loss at the end", "first warning", "exact steps"], rows)


def _ends(of_seeds: Sequence[dict[str, Any]]) -> list[float]:
    return [run["loss"] for run in of_seeds]


def _spread(values: Sequence[float]) -> str:
    low, high = min(values), max(values)
    return f"{np.mean(values):.3g}" + (f" ({low:.3g} to {high:.3g})" if len(values) > 1 else "")


if __name__ == "__main__":
    main()
