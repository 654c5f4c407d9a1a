"""Time of a step of a small model, with all ranks of a world in one thread and without a network.

    python benchmarks/steps.py                       # writes docs/benchmarks/steps.json
    python benchmarks/steps.py --against ../other    # takes turns with another checkout

The stages of two ranks run in turns and hand over their messages, so that no thread waits for another. A time is that
of one rank's arithmetic and Python. Each turn is a process of its own, which takes the median of many steps.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import page
import torch
from timing import machine, spread

import qcomp

WORLD = 2
CASES: dict[str, list[tuple[int, ...]]] = {
    "1 tensor of 1,000": [(1000,)],
    "1 tensor of 40,000": [(40_000,)],
    "40 tensors of 1,000": [(1000,)] * 40,
    "a multilayer perceptron": [(64, 64), (64,), (64, 64), (64,), (10, 64), (10,)],
}
"""Shapes of the parameters. All tensors are compressed, even small ones."""


def main() -> None:
    """Measure, perhaps two checkouts in turns, and write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("docs/benchmarks"), help="(default: %(default)s)")
    parser.add_argument("--against", type=Path, help="another checkout, whose times are called 'before'")
    parser.add_argument("--turns", type=int, default=7, help="(default: %(default)s)")
    parser.add_argument("--steps", type=int, default=200, help="of a turn (default: %(default)s)")
    parser.add_argument("--one-turn", action="store_true", help="only print the medians of this process")
    options = parser.parse_args()
    if options.one_turn:
        print(json.dumps({"/".join(case): median_of(*case, options.steps) for case in cases()}))
        return
    checkouts = {"now": Path(__file__).parents[1]} | ({"before": options.against} if options.against else {})
    turns: dict[str, list[dict[str, float]]] = {name: [] for name in checkouts}
    for _ in range(options.turns):
        for name, checkout in checkouts.items():
            turns[name].append(one_turn(checkout, options.steps))
    page.rewrite(options.out, blocks(write(options.out / "steps.json", turns)))


def cases() -> Iterator[tuple[str, str, str]]:
    """Yield all cases: the library, the kernels, and the model; the pure version only with the smallest."""
    for library in ("numpy", "torch"):
        for model in CASES:
            yield library, "numba", model
        yield library, "pure", next(iter(CASES))


def median_of(library: str, kernels: str, model: str, steps: int) -> float:
    """Return the microseconds of a compressed step of one rank, the median of ``steps`` steps."""
    with qcomp.backends.use(kernels), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        opt = qcomp.OneBitAdam(learning_rate=1e-3, freeze=2, exact=None, watch=None)
        params, grads = (
            arrays(library, CASES[model], 0),
            [arrays(library, CASES[model], r) for r in range(WORLD)],
        )
        states = qcomp.comm.run_local(WORLD, lambda comm: opt.init(params, comm))
        own = [params] * WORLD
        samples = []
        for step in range(steps + 10):
            begun = time.perf_counter()
            found = in_turns([opt.stages(own[r], grads[r], states[r]) for r in range(WORLD)])
            if step >= 10:  # the first steps are exact
                samples.append(time.perf_counter() - begun)
            own, states = [list(f[0]) for f in found], [f[1] for f in found]
    assert states[0].stage == "compressed"
    return 1e6 * statistics.median(samples) / WORLD


def in_turns(ranks: list[Any]) -> list[Any]:
    """Run the stages of all ranks and hand over what they send; return the results."""
    answers: list[Any] = [None] * len(ranks)
    while True:
        requests, results = [], []
        for stages, answer in zip(ranks, answers, strict=True):
            try:
                requests.append(next(stages) if answer is None else stages.send(answer))
            except StopIteration as stop:
                results.append(stop.value)
        if results:
            return results
        answers = [
            [send if hasattr(send := r.send, "shape") else send[rank] for r in requests]
            for rank in range(len(ranks))
        ]


def arrays(library: str, shapes: list[tuple[int, ...]], seed: int) -> list[Any]:
    """Return arrays of a library."""
    rng = np.random.default_rng(seed)
    found = [rng.standard_normal(shape, dtype=np.float32) for shape in shapes]
    if library == "numpy":
        return found
    return [torch.from_numpy(x) for x in found]


def one_turn(checkout: Path, steps: int) -> dict[str, float]:
    """Return the medians of a checkout, in a process of its own with one thread."""
    environment = os.environ | {"PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "1"}
    command = [sys.executable, __file__, "--one-turn", "--steps", str(steps)]
    done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True, timeout=600)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def write(path: Path, turns: dict[str, list[dict[str, float]]]) -> dict[str, Any]:
    """Write the times, and before over now if there are both."""
    rows = []
    for case in turns["now"][0]:
        times = {name: [turn[case] for turn in of_name] for name, of_name in turns.items()}
        row = {"case": case, **{f"{name}_us": spread(each) for name, each in times.items()}}
        if "before" in times:
            row["before_over_now"] = spread(
                [b / n for b, n in zip(times["before"], times["now"], strict=True)]
            )
        rows.append(row)
    document = {"machine": machine(), "rounds": len(turns["now"]), "results": rows}
    path.write_text(json.dumps(document, indent=1) + "\n")
    return document


def blocks(document: dict[str, Any]) -> dict[str, str]:
    """Return the part of the page made from these results."""
    rows = [
        [*row["case"].split("/"), page.cell(row["now_us"]), page.cell(row.get("before_over_now"))]
        for row in document["results"]
    ]
    head = ["library", "kernels", "model", "microseconds", "before, over now"]
    text = f"A compressed step of one rank of {WORLD}, without a network. {page.made(document)}"
    return {"steps": f"{text}\n\n{page.table(head, rows)}"}


if __name__ == "__main__":
    main()
