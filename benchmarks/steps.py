"""Time of a step of a small model, with all ranks of a world in one thread and without a network.

    python benchmarks/steps.py                       # writes docs/benchmarks/steps.json
    python benchmarks/steps.py --against ../other    # takes turns with another checkout
    python benchmarks/steps.py --float64             # large steps in float64 and float32: docs/benchmarks/float64.json

The stages of two ranks run in turns and hand over their messages, so that no thread waits for another. A time is that
of one rank's arithmetic and Python. Each turn is a process of its own, which takes the median of many steps.
"""

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import page
import torch
from timing import machine, spread

import qcomp
from qcomp.backends import numba_cpu

WORLD = 2
CASES: dict[str, list[tuple[int, ...]]] = {
    "1 tensor of 1,000": [(1000,)],
    "1 tensor of 40,000": [(40_000,)],
    "40 tensors of 1,000": [(1000,)] * 40,
    "a multilayer perceptron": [(64, 64), (64,), (64, 64), (64,), (10, 64), (10,)],
}
"""Shapes of the parameters. All tensors are compressed, even small ones."""
LARGE = 4_000_000
"""Elements of the tensor of `precisions`."""
_AFTER_TWO: dict[str, Any] = {"learning_rate": 1e-3, "freeze": 2, "exact": None, "watch": None}
_AT_ONCE: dict[str, Any] = {"learning_rate": 1e-3, "exact": None}
OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "OneBitAdam/ScaledSign": lambda: qcomp.OneBitAdam(**_AFTER_TWO),
    "OneBitAdam/MinMaxUInt8": lambda: qcomp.OneBitAdam(**_AFTER_TWO, compressor=qcomp.MinMaxUInt8()),
    "QAdam/MinMaxUInt8": lambda: qcomp.QAdam(**_AFTER_TWO, compressor=qcomp.MinMaxUInt8()),
    "CompressedSGD/ScaledSign": lambda: qcomp.CompressedSGD(**_AT_ONCE, compressor=qcomp.ScaledSign()),
    "CompressedSGD/QSGD": lambda: qcomp.CompressedSGD(**_AT_ONCE, compressor=qcomp.QSGD()),
}
"""The optimizers and compressors of `precisions`. After two steps, or at once, they compress."""


def main() -> None:
    """Measure, perhaps two checkouts in turns, and write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("docs/benchmarks"), help="(default: %(default)s)")
    parser.add_argument("--against", type=Path, help="another checkout, whose times are called 'before'")
    parser.add_argument("--turns", type=int, default=7, help="(default: %(default)s)")
    parser.add_argument("--steps", type=int, default=200, help="of a turn (default: %(default)s)")
    parser.add_argument("--one-turn", action="store_true", help="only print the medians of this process")
    parser.add_argument("--float64", action="store_true", help="only compare float64 with float32")
    options = parser.parse_args()
    if options.float64:
        page.rewrite(options.out, blocks_of_float64(precisions(options.out / "float64.json", options.turns)))
        return
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
        training = times_of(qcomp.OneBitAdam(**_AFTER_TWO), library, CASES[model])
        samples = [next(training) for _ in range(steps + 10)][10:]  # the first steps are exact
    return 1e6 * statistics.median(samples) / WORLD


def times_of(
    opt: Any, library: str, shapes: list[tuple[int, ...]], dtype: str = "float32"
) -> Iterator[float]:
    """Train and yield the seconds of each step of all ranks."""
    params = arrays(library, shapes, 0, dtype)
    grads = [arrays(library, shapes, rank, dtype) for rank in range(WORLD)]
    states = qcomp.comm.run_local(WORLD, lambda comm: opt.init(params, comm))
    own = [params] * WORLD
    for step in itertools.count():
        assert step < 4 or getattr(states[0], "stage", "compressed") == "compressed"
        begun = time.perf_counter()
        found = in_turns([opt.stages(own[r], grads[r], states[r]) for r in range(WORLD)])
        yield time.perf_counter() - begun
        own, states = [list(f[0]) for f in found], [f[1] for f in found]


def precisions(path: Path, turns: int) -> dict[str, Any]:
    """Write the milliseconds of a large step in both dtypes, which take turns, and their ratio."""
    numba_cpu.set_num_threads(1)
    torch.set_num_threads(1)
    rows = []
    for (case, make), library in itertools.product(OPTIMIZERS.items(), ("numpy", "torch")):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            training = [times_of(make(), library, [(LARGE,)], dtype) for dtype in ("float32", "float64")]
            found = [[1e3 * next(each) / WORLD for each in training] for _ in range(turns + 5)][5:]
        narrow, wide = zip(*found, strict=True)
        ratio = spread([b / a for a, b in found])
        rows.append(
            {
                "case": f"{library}/{case}",
                "float32_ms": spread(narrow),
                "float64_ms": spread(wide),
                "ratio": ratio,
            }
        )
    document = {"machine": machine(), "rounds": turns, "results": rows}
    path.write_text(json.dumps(document, indent=1) + "\n")
    return document


def blocks_of_float64(document: dict[str, Any]) -> dict[str, str]:
    """Return the part of the page that compares the dtypes."""
    columns = ("float32_ms", "float64_ms", "ratio")
    rows = [
        [*row["case"].split("/"), *(page.cell(row[column]) for column in columns)]
        for row in document["results"]
    ]
    head = ["library", "optimizer", "compressor", "float32, ms", "float64, ms", "float64 over float32"]
    text = f"A step of one rank of {WORLD} with {LARGE:,} elements, without a network. {page.made(document)}"
    return {"float64": f"{text}\n\n{page.table(head, rows)}"}


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


def arrays(library: str, shapes: list[tuple[int, ...]], seed: int, dtype: str = "float32") -> list[Any]:
    """Return arrays of a library."""
    rng = np.random.default_rng(seed)
    found = [rng.standard_normal(shape).astype(dtype) for shape in shapes]
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
