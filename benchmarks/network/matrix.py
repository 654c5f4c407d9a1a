"""One process of the matrix: all methods in turn, step by step, on one link after the other.

network_times.py starts it on every rank. The methods take turns, so that all are measured over the same period on the
same machine.
"""

import argparse
import json
import os
import random
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from timing import machine, rounded, spread
from tqdm import tqdm

from network.launch import RATES
from network.methods import COMPUTE, METHODS, Trainee, parameter_shapes
from network.models import MODELS
from network.shaped import VARIABLE, limit, transmitted
from network.timeline import readiness
from network.volume import volume

READY_ROUNDS = 10
"""Steps that measure when gradients are ready."""
WARM = 2
"""Turns of each method that are not counted: DDP rebuilds its buckets, and some methods start with exact steps."""
ALONE = " alone"
"""Suffix of the name of a method with which every rank trains alone."""
PATIENCE = timedelta(seconds=120)
"""Time after which a method fails if its ranks no longer hear from each other."""


class Field:
    """The methods that still run.

    Parameters
    ----------
    model : str
    methods : sequence of str
    interface : str
        The network interface whose counter gives the bytes.
    alone : sequence of str
        Methods with which every rank also trains alone.
    """

    def __init__(self, model: str, methods: Sequence[str], interface: str, alone: Sequence[str] = ()) -> None:
        self.interface = interface
        self.failures: dict[str, str] = {}
        self.trainees: dict[str, Trainee] = {}
        for method in methods:
            with self._recorded(method):
                self.trainees[method] = Trainee(method, MODELS[model], _group(solo=False))
        for method in alone:
            with self._recorded(method + ALONE):
                self.trainees[method + ALONE] = Trainee(method, MODELS[model], _group(solo=True))

    @contextmanager
    def _recorded(self, method: str) -> Iterator[None]:
        """Drop a method on all ranks if it fails on one."""
        error = ""
        try:
            yield
        except Exception as problem:  # whatever a method raises, the others continue
            error = f"{type(problem).__name__}: {problem}"[:300]
        failed = torch.tensor([bool(error)], dtype=torch.uint8)
        dist.all_reduce(failed, op=dist.ReduceOp.MAX)
        if failed.item():
            errors: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(errors, error)
            self.failures[method] = next(text for text in errors if text)
            self.trainees.pop(method, None)
            if dist.get_rank() == 0:
                tqdm.write(f"{method} failed: {self.failures[method]}")

    def step(self, method: str) -> tuple[float, float]:
        """Return the seconds and the bytes of one step on this rank."""
        dist.barrier()
        before, seconds = transmitted(self.interface), 0.0
        with self._recorded(method):
            start = time.perf_counter()
            self.trainees[method].step()
            seconds = time.perf_counter() - start
        return seconds, float(transmitted(self.interface) - before)

    def turn(self, method: str) -> tuple[float, float]:
        """Make two steps, and return the seconds and the bytes of the second on this rank.

        In training the previous step is of the same method. After seconds of other methods' steps, the system has
        reclaimed the memory that a method frees and allocates in each step, and its first step pays for that.
        """
        self.step(method)
        return self.step(method) if method in self.trainees else (0.0, 0.0)

    def rounds(self, count: int, title: str) -> dict[str, list[tuple[float, float]]]:
        """Return the seconds and bytes of each turn of each method on this rank."""
        samples: dict[str, list[tuple[float, float]]] = {method: [] for method in self.trainees}
        for number in tqdm(range(count), desc=title, unit="round", disable=dist.get_rank() != 0):
            order = list(self.trainees)
            # The order is the same on all ranks. It changes, so that no method always follows the same one, which
            # would always leave memory in the same state.
            random.Random(number).shuffle(order)
            for method in order:
                samples[method].append(self.turn(method))
        return {method: samples[method] for method in self.trainees}


def _group(*, solo: bool) -> Any:
    """Return a new process group: of all ranks, or of this one."""
    if not solo:
        return dist.new_group(timeout=PATIENCE)
    groups = [dist.new_group([rank], timeout=PATIENCE) for rank in range(dist.get_world_size())]
    return groups[dist.get_rank()]


def summary(samples: dict[str, list[tuple[float, float]]], shared: int) -> dict[str, Any]:
    """Return the seconds of the slowest rank, and the bytes of a rank without the benchmark's own messages.

    Parameters
    ----------
    samples : dict of str to list of (float, float)
        The samples of this rank; all ranks have the same methods. Collective.
    shared : int
        The ranks that share the interface.
    """
    of_all = torch.tensor([samples[method] for method in samples], dtype=torch.float64)
    dist.all_reduce(of_all, op=dist.ReduceOp.MAX)
    idle = median(of_all[list(samples).index(COMPUTE), :, 1].tolist()) if COMPUTE in samples else 0.0
    return {
        method: {
            "seconds": spread(seconds := of_all[i, :, 0].tolist()),
            "each": [rounded(s) for s in seconds],
            "bytes": round(max(0.0, median(of_all[i, :, 1].tolist()) - idle) / shared),
        }
        for i, method in enumerate(samples)
    }


def main() -> None:
    """Run the requested links, and write a file for each."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", choices=list(MODELS), required=True)
    parser.add_argument("--methods", nargs="+", choices=list(METHODS), required=True)
    parser.add_argument(
        "--alone",
        nargs="*",
        choices=list(METHODS),
        default=[],
        help="methods with which every rank also trains alone",
    )
    parser.add_argument("--links", nargs="+", required=True)
    parser.add_argument("--rounds", nargs="+", type=int, required=True, help="on each of the links")
    parser.add_argument("--out", nargs="+", type=Path, required=True, help="a file for each of the links")
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    on_one_node = options.links == ["loopback"]
    field = Field(options.model, options.methods, "lo" if on_one_node else "eth0", options.alone)
    field.rounds(WARM, "warm-up, no limit")
    ready = readiness(MODELS[options.model], _group(solo=True), READY_ROUNDS) if options.alone else []
    shapes = parameter_shapes(MODELS[options.model].make())
    for link, rounds, path in zip(options.links, options.rounds, options.out, strict=True):
        if rank == 0 and link in RATES:
            limit(os.environ[VARIABLE], ranks, link)
        dist.barrier()
        samples = field.rounds(rounds, f"{options.model}, {ranks} ranks, {link}")
        results = summary(samples, ranks if on_one_node else 1)
        alone = {m: results.pop(m + ALONE) for m in options.alone if m + ALONE in results}
        for method, result in results.items():
            result["predicted_bytes"] = round(volume(method, shapes).sent(ranks))
        if rank == 0:
            document = {
                "model": options.model,
                "ranks": ranks,
                "link": link,
                "rounds": rounds,
                "machine": machine() | {"torch": torch.__version__},
                "shapes": shapes,
                "methods": results,
                "failures": field.failures,
                "alone": alone,
                "ready": ready,
            }
            path.write_text(json.dumps(document) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
