"""One process of the race: it trains with one method, or times the steps of several on a link.

loss_race.py starts it on every rank. The losses do not depend on the link, nor the seconds of a step on the losses.
So a curve is trained once, without a limit, and the seconds are measured on short runs.
"""

import argparse
import json
import math
import os
import random
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from network.launch import RATES
from network.methods import SLOW
from network.shaped import VARIABLE, limit, transmitted
from schedule import Cosine
from timing import machine, rounded, spread

import qcomp
from race.methods import EXACT, EXCHANGE, METHODS, Method
from race.products import InFloat32, are_slow
from race.settings import Settings
from race.tasks import JUDGEMENTS, TASKS, Task, loss_of

__all__ = ["WARMUP", "Learner", "curve", "timed"]

WARMUP = 0.15
"""The share of exact first steps."""
WARM = 2
"""Turns that are not counted: DDP rebuilds its buckets, and the first steps of some methods are exact."""
NEVER = 10**9


class Learner:
    """A rank's model with a method, the number of its steps, and a context in which optimizers compute theirs."""

    def __init__(self, task: Task, method: Method, settings: Settings) -> None:
        self.task, self.method, self.settings, self.done = task, method, settings, 0
        self.computing: AbstractContextManager[Any] = nullcontext()
        self.model = task.model(settings.seed)
        self.trainer = self.method.make(self.model, settings)

    def step(self) -> tuple[str, float]:
        """Make a step, and return its phase and its seconds on this rank."""
        inputs, wanted = self.task.draw(self.settings.seed, dist.get_rank(), self.done)
        optimizers = self.trainer.optimizers
        dist.barrier()
        start = time.perf_counter()
        for optimizer in optimizers:
            for group in getattr(optimizer, "param_groups", ()):
                group["lr"] = self.settings.rate(self.done)
            optimizer.zero_grad()
        torch.autograd.backward(loss_of(self.trainer.model(inputs), wanted))
        with self.computing:
            for optimizer in optimizers:
                optimizer.step()
        seconds = time.perf_counter() - start
        self.done += 1
        return self.method.phase(self.done - 1, self.settings), seconds

    def validate(self) -> float:
        """Return the validation loss of the mean of the ranks' parameters."""
        with self.averaged():
            (loss,) = over_ranks([self.task.validate(self.model, dist.get_rank(), dist.get_world_size())])
        return loss

    @contextmanager
    def averaged(self) -> Iterator[float]:
        """Give the model the mean of the ranks' parameters, and yield its largest difference from this rank's own."""
        values = [p.detach() for p in self.model.parameters()]
        own, apart = [value.clone() for value in values], 0.0
        for value, before in zip(values, own, strict=True):
            dist.all_reduce(value)
            value.div_(dist.get_world_size())
            apart = max(apart, (value - before).abs().max().item())
        try:
            yield apart
        finally:
            for value, before in zip(values, own, strict=True):
                value.copy_(before)


def over_ranks(values: Sequence[float], how: Any = dist.ReduceOp.SUM) -> list[float]:
    """Return the sum of each value over the ranks, or its maximum."""
    total = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(total, op=how)
    found: list[float] = total.tolist()
    return found


def curve(
    task: Task, method: str, rate: float, seed: int, steps: int, *, in_float32: bool = False
) -> dict[str, Any]:
    """Train, and return the validation loss at some steps, and the final loss and accuracy on other files."""
    warmup = max(1, round(WARMUP * steps))
    learner = Learner(task, METHODS[method], Settings(Cosine(rate, steps), warmup, task.every, seed))
    if in_float32:
        learner.computing = InFloat32()  # type: ignore[no-untyped-call]  # torch's class has no types
    rank, size = dist.get_rank(), dist.get_world_size()
    judge_at = {round(steps * part / JUDGEMENTS) for part in range(JUDGEMENTS + 1)}
    losses: list[tuple[int, float | None]] = []
    found: dict[str, Any] = {"steps": steps, "losses": losses}
    seconds = 0.0
    while True:
        if learner.done in judge_at:
            loss = learner.validate()
            losses.append((learner.done, round(loss, 4) if math.isfinite(loss) else None))
        if learner.done == steps:
            break
        try:
            seconds += learner.step()[1]
        except qcomp.NonFiniteError as error:  # on all ranks; torch's methods go on with a loss of NaN
            return found | {"failed": str(error)[:200]}
    with learner.averaged() as apart:
        held_out, accuracy = over_ranks(task.examine(learner.model, rank, size))
    learner.trainer.close()
    slowest, furthest = over_ranks([seconds, apart], dist.ReduceOp.MAX)
    if not math.isfinite(held_out):
        return found | {"failed": "the loss is not finite"}
    found |= {"held_out": round(held_out, 4), "accuracy": round(accuracy, 4), "apart": rounded(furthest)}
    return found | {"seconds": rounded(slowest)}


def timed(task: Task, methods: Sequence[str], link: str, rounds: int) -> list[dict[str, Any]]:
    """Return the seconds of the slowest rank's steps, and a rank's bytes, of each phase of each method.

    The methods take turns in an order that changes, so that all are measured over the same period. The first step of a
    turn is not counted, since in training the previous step is of the same method.
    """
    learners = [(name, Learner(task, METHODS[name], of)) for name in methods for of in settled(name)]
    samples: dict[tuple[str, str], list[tuple[float, float]]] = defaultdict(list)
    for number in range(-WARM, rounds):
        if number == 0:
            if dist.get_rank() == 0 and link in RATES:
                limit(os.environ[VARIABLE], dist.get_world_size(), link)
            dist.barrier()
        random.Random(number).shuffle(learners)
        for name, learner in learners:
            for counted in turn(name, learner):
                before = transmitted("eth0")
                phase, seconds = learner.step()
                if number >= 0 and counted:
                    samples[name, phase].append((seconds, transmitted("eth0") - before))
    for _, learner in sorted(learners, key=lambda pair: methods.index(pair[0])):
        learner.trainer.close()
    rows = []
    for (name, phase), found in samples.items():
        most = over_ranks([value for sample in found for value in sample], dist.ReduceOp.MAX)
        row = {"method": name, "phase": phase, "seconds": spread(most[::2]), "rounds": len(found)}
        rows.append(row | {"bytes": round(median(most[1::2]))})
    return rows


def settled(method: str) -> list[Settings]:
    """Return settings under which each separately timed phase of a method occurs again and again."""
    chosen = METHODS[method]
    found = [Settings(lambda _: SLOW, warmup=3, every=3, settled=True)]
    phases = {chosen.phase(step, found[0]) for step in range(9)}
    if EXACT in phases and chosen.exact_as is None:
        found.append(Settings(lambda _: SLOW, warmup=NEVER, every=3, settled=True))
    return found


def turn(method: str, learner: Learner) -> list[bool]:
    """Return for each step of a turn whether it is counted; a turn of an outer loop is a whole round."""
    phases = {METHODS[method].phase(learner.done + ahead, learner.settings) for ahead in range(3, 9)}
    return [False, True, True] if EXCHANGE in phases else [False, True]


def main() -> None:
    """Train one curve, or time the steps of methods, and write one file."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--task", choices=list(TASKS), required=True)
    parser.add_argument("--methods", nargs="+", choices=list(METHODS), required=True)
    parser.add_argument("--rate", type=float, help="train, with this largest learning rate")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--link", choices=list(RATES), help="train or time steps on this link")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    task = TASKS[options.task]
    about = {"task": options.task, "ranks": dist.get_world_size()}
    where = {"machine": machine() | {"torch": torch.__version__}}
    if options.rate is not None:
        (method,) = options.methods
        about |= {"method": method, "rate": options.rate, "seed": options.seed}
        about |= {"link": options.link} if options.link else {}
        if options.link and dist.get_rank() == 0:
            limit(os.environ[VARIABLE], dist.get_world_size(), options.link)
        dist.barrier()
        # Only the seconds on a link are compared; losses are those of any processor, up to rounding.
        slow = not options.link and are_slow()
        steps = options.steps or task.steps
        rows = [curve(task, method, options.rate, options.seed, steps, in_float32=slow)]
    else:
        about |= {"link": options.link}
        rows = timed(task, options.methods, options.link, options.rounds)
    if dist.get_rank() == 0:
        options.out.write_text("".join(json.dumps(about | row | where) + "\n" for row in rows))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
