"""One process that times steps of FSDP2 with and without compression, and follows their losses.

sharded_times.py starts it on every rank. The variants take turns, so that all are measured in the same seconds.
"""

import argparse
import json
import os
import random
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from timing import machine, rounded, spread
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import qcomp
from network.launch import RATES
from network.models import MODELS, loss
from network.shaped import VARIABLE, limit, transmitted
from qcomp.torch.fsdp import compress

BFLOAT16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
FOUR_BITS = qcomp.QSGD(levels=7, bucket_size=128)
WARM = 2
"""Steps of each variant that are not counted."""
FRESH = 10
"""Batches that curves go through again and again, so that there is something to learn."""


def variants() -> dict[str, tuple[bool, Callable[[Any], Any] | None]]:
    """Return whether each variant computes and sends bfloat16, and what compresses it."""
    gradients = partial(compress, gradients=FOUR_BITS)
    return {
        "float32": (False, None),
        "bfloat16": (True, None),
        "4-bit gradients": (False, gradients),
        "4-bit gradients, 8-bit weights": (False, partial(gradients, weights=qcomp.MinMaxUInt8())),
        "4-bit gradients and changes": (False, partial(gradients, weights=FOUR_BITS, weight_changes=True)),
        "bfloat16, 4-bit gradients": (True, gradients),
        "bfloat16, 4-bit gradients, 8-bit weights": (True, partial(gradients, weights=qcomp.MinMaxUInt8())),
    }


class Trainee:
    """A sharded model with AdamW.

    Parameters
    ----------
    model : str
        One of `MODELS`.
    variant : str
        One of `variants`.
    keep : bool
        Whether weights stay gathered between the forward and the backward pass.
    """

    def __init__(self, model: str, variant: str, *, keep: bool) -> None:
        in_bfloat16, prepare = variants()[variant]
        torch.manual_seed(0)
        self.model: Any = MODELS[model].make()
        options: dict[str, Any] = {"reshard_after_forward": not keep}
        if in_bfloat16:
            options["mp_policy"] = BFLOAT16
        for layer in list(self.model.modules()):
            if isinstance(layer, nn.TransformerEncoderLayer):
                fully_shard(layer, **options)
        fully_shard(self.model, **options)
        if prepare is not None:
            prepare(self.model)
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
    parser.add_argument("--variants", nargs="+", choices=list(variants()), default=list(variants()))
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
        found["steps"] = {
            label: timed(
                {name: Trainee(options.model, name, keep=keep) for name in options.variants}, options.rounds
            )
            for label, keep in (("freed", False), ("kept", True))
        }
    if options.steps:
        found["curves"] = {
            name: curve(Trainee(options.model, name, keep=False), options.steps) for name in options.variants
        }
    if dist.get_rank() == 0:
        options.out.write_text(json.dumps(found, indent=1) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
