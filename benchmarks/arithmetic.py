"""Time of the arithmetic of a step, exact and with a frozen variance, relative to torch's AdamW.

    python benchmarks/arithmetic.py

It times `Optimizer.apply` of 1-bit Adam: all of a step except the exchange. Before the freeze this equals AdamW. Each
round also times ``step`` of torch.optim.AdamW, fused and foreach, which writes in place. Writes arithmetic.json, and
the table of README.md.
"""

import argparse
import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import page
import torch
from timing import Timer, machine, spread, timer
from tqdm import tqdm

import qcomp
from qcomp.backends import numba_cpu
from qcomp.core.optimizers.compression import Means

TENSORS = {"100 x 100,000": (100, 100_000), "1 x 10,000,000": (1, 10_000_000), "40 x 1,000": (40, 1000)}
LIBRARIES: dict[str, Callable[[Any], Any]] = {"numpy": np.asarray, "torch": torch.from_numpy}
STAGES = ("exact", "frozen")
PEERS = {"torch, fused": {"fused": True}, "torch, foreach": {"foreach": True}}
RATE, DECAY, STEP = 1e-3, 0.01, 10


def main() -> None:
    """Measure, write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("docs/benchmarks"), help="(default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=31, help="(default: %(default)s)")
    parser.add_argument(
        "--threads", type=int, nargs="+", default=[1, 2], help="numbers of threads (default: 1 2)"
    )
    parser.add_argument("--table", action="store_true", help="only write the table, from the JSON")
    options = parser.parse_args()
    path = options.out / "arithmetic.json"
    if not options.table:
        options.out.mkdir(parents=True, exist_ok=True)
        document = {"machine": machine() | {"torch": torch.__version__}, "rounds": options.rounds}
        document["results"] = measure(options.rounds, options.threads)
        path.write_text(json.dumps(document, indent=1) + "\n")
    page.rewrite(options.out, blocks(json.loads(path.read_text())))


def measure(rounds: int, numbers_of_threads: Sequence[int]) -> list[dict[str, Any]]:
    """Return all results, for all tensors and numbers of threads."""
    found = []
    for threads in numbers_of_threads:
        numba_cpu.set_num_threads(threads)
        torch.set_num_threads(threads)
        for title, (count, size) in TENSORS.items():
            timers = {name: torch_timer(count, size, **way) for name, way in PEERS.items()}
            for library in LIBRARIES:
                for stage in STAGES:
                    for donate in (True, False):
                        name = f"{library}, {stage}, {'donated' if donate else 'fresh'}"
                        timers[name] = qcomp_timer(library, stage, count, size, donate=donate)
            found += rows(sampled(timers, rounds, f"{title}, {threads} threads"), title, threads)
    numba_cpu.set_num_threads(None)
    return found


def torch_timer(count: int, size: int, **way: Any) -> Timer:
    """Return a timer of a step of torch's AdamW."""
    drawn = torch.Generator().manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(size, generator=drawn)) for _ in range(count)]
    for p in params:
        p.grad = torch.randn(size, generator=drawn)
    optimizer = torch.optim.AdamW(params, lr=RATE, weight_decay=DECAY, **way)
    return timer(optimizer.step)


def qcomp_timer(library: str, stage: str, count: int, size: int, *, donate: bool) -> Timer:
    """Return a timer of the arithmetic of a step of 1-bit Adam, which reuses the mean of the previous step."""
    rng, as_array = np.random.default_rng(0), LIBRARIES[library]

    def draw() -> list[Any]:
        return [as_array(rng.standard_normal(size, dtype=np.float32)) for _ in range(count)]

    optimizer = qcomp.OneBitAdam(learning_rate=RATE, weight_decay=DECAY, freeze=1000, exact=None, watch=None)
    params, mean = draw(), tuple(draw())
    with qcomp.backends.use("numba"):
        state = optimizer.init(params, qcomp.comm.LocalCommunicator.alone())
    state = state._replace(step=STEP, variance=tuple(x * x for x in draw()))
    if stage == "frozen":
        state = optimizer.enter(state, "compressed")

    def step() -> None:
        nonlocal params, state
        params, after = optimizer.apply(params, Means(mean, state.exchange, donate=donate), state)
        state = after._replace(step=STEP)

    return timer(step, partial(qcomp.backends.use, "numba"))


def sampled(timers: dict[str, Timer], rounds: int, title: str) -> dict[str, list[float]]:
    """Return the seconds of all timers in all rounds."""
    for each in timers.values():
        each()
    samples: dict[str, list[float]] = {name: [] for name in timers}
    for _ in tqdm(range(rounds), desc=title, unit="round"):
        for name, each in timers.items():
            samples[name].append(each())
    return samples


def rows(samples: dict[str, list[float]], title: str, threads: int) -> list[dict[str, Any]]:
    """Return a row for each timer; its ratio is to the faster peer, in the same round."""
    best = min(PEERS, key=lambda name: median(samples[name]))
    return [
        {
            "tensors": title,
            "threads": threads,
            "by": name,
            "peer": best,
            "seconds": spread(seconds),
            "over_torch": spread([own / peer for own, peer in zip(seconds, samples[best], strict=True)]),
        }
        for name, seconds in samples.items()
    ]


def blocks(document: dict[str, Any]) -> dict[str, str]:
    """Return the part of the page made from these results."""
    found = {(row["by"], row["tensors"], row["threads"]): row for row in document["results"]}
    kinds = dict.fromkeys((tensors, threads) for _, tensors, threads in found)
    cells = [
        [name, *(page.cell(found[name, *kind]["over_torch"]) for kind in kinds)]
        for name in dict.fromkeys(row["by"] for row in document["results"])
    ]
    head = ["", *(f"{tensors}, {threads} thread{'s' * (threads > 1)}" for tensors, threads in kinds)]
    text = f"Time over that of torch's AdamW, fused or foreach, whichever is faster. {page.made(document)}"
    return {"arithmetic": f"{text}\n\n{page.table(head, cells)}"}


if __name__ == "__main__":
    main()
