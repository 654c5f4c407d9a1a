"""One process that trains a language model's loss curve, or times the steps of such curves.

network_times.py starts it on every rank. A curve over steps is the same on every link, so it is trained once, on an
unlimited link; the times of its steps are measured on the limited ones.
"""

import argparse
import itertools
import json
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from race.methods import Method
from race.peers import data_parallel
from race.rank import Learner
from race.settings import Settings, Trainer
from race.tasks import JUDGEMENTS, TASKS
from schedule import Cosine
from timing import machine, rounded, spread
from torch import nn
from tqdm import tqdm

import qcomp
from network.launch import RATES
from network.methods import SLOW
from network.recipes import BETAS, PEAK, RECIPES, SETTLED, WARMUP, Recipe
from network.shaped import VARIABLE, limit
from qcomp.integrations import ddp

TASK = TASKS["transformer"]
WARM = 2


def learner(recipe: Recipe, rate: Cosine, exact: int) -> Learner:
    """Return a transformer that learns by a recipe, with some exact steps first."""

    def make(model: nn.Module, settings: Settings) -> Trainer:
        wrapped = data_parallel(model)
        if recipe.make is not None:
            own = recipe.make(settings.rate, settings.warmup)
            return Trainer(wrapped, [ddp.OverlappedOptimizer(wrapped, own)])
        if recipe.hook is not None:
            wrapped.register_comm_hook(*ddp.hook(qcomp.compressor(recipe.hook), wrapped))
        return Trainer(wrapped, [torch.optim.Adam(model.parameters(), betas=BETAS)])

    return Learner(TASK, Method(recipe.label, make, recipe.phase), Settings(rate, exact, every=1))


def turn(training: Learner) -> float:
    """Make two steps, and return this rank's seconds of the second, since in training a step follows another one."""
    training.step()
    return training.step()[1]


def curve(name: str, steps: int, link: str) -> dict[str, Any]:
    """Train, and return the loss at some steps, and the stages and seconds of all steps."""
    training = learner(RECIPES[name], Cosine(PEAK, steps), max(1, round(WARMUP * steps)))
    judge_at = {round(steps * part / JUDGEMENTS) for part in range(1, JUDGEMENTS + 1)}
    losses, stages, seconds = [(0, rounded(training.validate()))], [], 0.0
    for step in tqdm(range(steps), desc=f"{name}, {link}", unit="step", disable=dist.get_rank() != 0):
        stage, taken = training.step()
        stages.append(stage)
        seconds += taken
        if step + 1 in judge_at:
            losses.append((step + 1, rounded(training.validate())))
    slowest = torch.tensor([seconds], dtype=torch.float64)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return {
        "method": name,
        "link": link,
        "steps": steps,
        "parameters": sum(p.numel() for p in training.model.parameters()),
        "losses": losses,
        "stages": [(stage, len(list(run))) for stage, run in itertools.groupby(stages)],
        "seconds": rounded(slowest.item()),
    }


def times(links: list[str], rounds: list[int]) -> dict[str, Any]:
    """Return the seconds of the slowest rank's steps for each link and timed recipe."""
    rate = Cosine(SLOW, 1000)
    learners = {name: learner(recipe, rate, exact) for name, (recipe, exact) in SETTLED.items()}
    results = {}
    for link, count in zip(["none", *links], [WARM, *rounds], strict=True):
        if dist.get_rank() == 0 and link in RATES:
            limit(os.environ[VARIABLE], dist.get_world_size(), link)
        rounds_done = tqdm(range(count), desc=f"steps, {link}", unit="round", disable=dist.get_rank() != 0)
        rows = [[turn(one) for one in learners.values()] for _ in rounds_done]
        of_all = torch.tensor(rows, dtype=torch.float64)
        dist.all_reduce(of_all, op=dist.ReduceOp.MAX)
        results[link] = {name: spread(of_all[:, i].tolist()) for i, name in enumerate(learners)}
    return {"rounds": rounds, "links": {link: results[link] for link in links}}


def main() -> None:
    """Train one curve, or time all steps, and write one file."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--curve", choices=list(RECIPES))
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--links", nargs="+", required=True)
    parser.add_argument("--rounds", nargs="+", type=int, default=[])
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    if options.curve:
        document = curve(options.curve, options.steps, options.links[0])
    else:
        document = times(options.links, options.rounds)
    if dist.get_rank() == 0:
        document |= {"ranks": dist.get_world_size(), "machine": machine() | {"torch": torch.__version__}}
        options.out.write_text(json.dumps(document) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
