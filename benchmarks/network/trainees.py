"""Models that take turns in one process on every rank, to time their steps and follow their losses."""

import argparse
import json
import os
import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from timing import machine, rounded, spread

from network.launch import RATES
from network.models import MODELS, loss
from network.shaped import VARIABLE, limit, transmitted

__all__ = ["Trainee", "run", "timed"]

WARM = 2
"""Turns of each variant that are not counted: DDP rebuilds its buckets, and some first steps are exact."""
FRESH = 10
"""Number of batches, which curves repeat so that there is something to learn."""


class Trainee:
    """A model that averages its gradients itself, with AdamW.

    Parameters
    ----------
    name : str
        One of `MODELS`, which makes the batches.
    module : Module
        The wrapped model.
    """

    def __init__(self, name: str, module: Any) -> None:
        self.model = module
        self.optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
        torch.manual_seed(dist.get_rank())
        self.batches = [MODELS[name].batch() for _ in range(FRESH)]
        self.steps = 0

    def step(self) -> torch.Tensor:
        """Make one step, and return its loss on this rank."""
        batch = self.batches[self.steps % FRESH]
        self.steps += 1
        value = loss(self.model, batch)
        value.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return value.detach()


def timed(trainees: dict[str, Trainee], rounds: int) -> dict[str, Any]:
    """Return the seconds of the slowest rank, and the bytes of a rank, of a step of each variant."""
    samples: dict[str, list[tuple[float, float]]] = {name: [] for name in trainees}
    for number in range(WARM + rounds):
        order = list(trainees)
        random.Random(number).shuffle(order)
        for name in order:
            trainees[name].step()  # in training the previous step is of the same variant
            dist.barrier()
            before, start = transmitted("eth0"), time.perf_counter()
            trainees[name].step()
            sample = torch.tensor(
                [time.perf_counter() - start, transmitted("eth0") - before], dtype=torch.float64
            )
            dist.all_reduce(sample, op=dist.ReduceOp.MAX)
            if number >= WARM:
                samples[name].append((sample[0].item(), sample[1].item()))
    return {
        name: {
            "seconds": spread([seconds for seconds, _ in found]),
            "each": [rounded(seconds) for seconds, _ in found],
            "bytes": round(sorted(sent for _, sent in found)[len(found) // 2]),
        }
        for name, found in samples.items()
    }


def curve(trainee: Trainee, steps: int) -> list[float]:
    """Return the mean loss of the ranks at each step."""
    found = []
    for _ in range(steps):
        value = trainee.step().float()
        dist.all_reduce(value)
        found.append(rounded(value.item() / dist.get_world_size()))
    return found


def run(
    description: str,
    variants: Sequence[str],
    make: Callable[[str, str], Trainee],
    time_steps: Callable[[str, Sequence[str], int], dict[str, Any]],
) -> None:
    """Time all variants on a link, or follow their losses, as the command line says.

    Parameters
    ----------
    description : str
        The first line of the help.
    variants : sequence of str
        Their names.
    make : callable
        Returns the trainee of a model and a variant.
    time_steps : callable
        Returns the results of `timed` for a model, variants and the number of rounds.
    """
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    parser.add_argument("--model", choices=list(MODELS), required=True)
    parser.add_argument("--variants", nargs="+", choices=variants, default=variants)
    parser.add_argument("--link", choices=list(RATES), help="on which steps are timed")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=0, help="of the curves")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    found: dict[str, Any] = {"machine": machine() | {"torch": torch.__version__}, "model": options.model}
    found |= {"ranks": dist.get_world_size(), "link": options.link, "rounds": options.rounds}
    if options.link:
        if dist.get_rank() == 0:
            limit(os.environ[VARIABLE], dist.get_world_size(), options.link)
        dist.barrier()
        found["steps"] = time_steps(options.model, options.variants, options.rounds)
    if options.steps:
        found["curves"] = {name: curve(make(options.model, name), options.steps) for name in options.variants}
    if dist.get_rank() == 0:
        options.out.write_text(json.dumps(found, indent=1) + "\n")
    dist.destroy_process_group()
