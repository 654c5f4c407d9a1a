"""One process that times steps of PowerSGD, torch's hook and qcomp's, and follows their losses.

powersgd_times.py starts it on every rank. The variants take turns, so that all are measured in the same seconds.
"""

import argparse
import json
import os
import random
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from timing import machine, rounded, spread
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

import qcomp
from network.launch import RATES
from network.models import MODELS, loss
from network.shaped import VARIABLE, limit, transmitted
from qcomp.integrations import ddp

EXACT, TORCH, QCOMP, HALF = "exact", "torch", "qcomp", "qcomp, bfloat16"
RANKS = (1, 2, 4)
"""Ranks of the approximation."""
VARIANTS = {EXACT: (EXACT, 0)} | {
    f"{kind}, rank {rank}": (kind, rank) for rank in RANKS for kind in (TORCH, QCOMP, HALF)
}
START = 2
"""Exact steps before the first compressed one; torch demands two for its warm start."""
WARM = 2
"""Turns of each variant that are not counted: DDP rebuilds its buckets, and the first steps are exact."""
FRESH = 10
"""Batches that curves go through again and again, so that there is something to learn."""


class Trainee:
    """A model under DistributedDataParallel with AdamW and a process group of its own: no hook waits for another."""

    def __init__(self, model: str, variant: str) -> None:
        kind, rank = VARIANTS[variant]
        group = dist.new_group(backend="gloo")
        torch.manual_seed(0)
        # Over gloo torch's hook needs one bucket: with several the job aborts.
        self.model = DistributedDataParallel(
            MODELS[model].make(),
            process_group=group,
            bucket_cap_mb=1000 if kind == TORCH else 25,
            gradient_as_bucket_view=True,
        )
        if kind == TORCH:
            state = powerSGD_hook.PowerSGDState(
                group, matrix_approximation_rank=rank, start_powerSGD_iter=START, min_compression_rate=2
            )
            self.model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        elif kind != EXACT:
            compressor = qcomp.Cast("bfloat16") if kind == HALF else qcomp.Identity()
            averaging = qcomp.PowerSGD(rank=rank)
            hook = ddp.hook(compressor, self.model, averaging=averaging, exact=None, exact_iterations=START)
            self.model.register_comm_hook(*hook)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        torch.manual_seed(dist.get_rank())
        self.batches = [MODELS[model].batch() for _ in range(FRESH)]
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
            trainees[name].step()  # in training the step before is of the same variant
            dist.barrier()
            before, start = transmitted("eth0"), time.perf_counter()
            trainees[name].step()
            sample = torch.tensor([time.perf_counter() - start, transmitted("eth0") - before])
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


def main() -> None:
    """Time all variants on a link, or follow their losses."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", choices=list(MODELS), required=True)
    parser.add_argument("--variants", nargs="+", choices=list(VARIANTS), default=list(VARIANTS))
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
        trainees = {name: Trainee(options.model, name) for name in options.variants}
        found["steps"] = timed(trainees, options.rounds)
    if options.steps:
        found["curves"] = {
            name: curve(Trainee(options.model, name), options.steps) for name in options.variants
        }
    if dist.get_rank() == 0:
        options.out.write_text(json.dumps(found, indent=1) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
