"""One process of the time to a loss: a language model's loss curve, or the times of the steps of such curves.

network_times.py starts it on every rank. A curve over steps is the same on every link, so it is trained once, on an
unlimited link; the times of its steps are measured on the limited ones.
"""

import argparse
import itertools
import json
import os
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lm.data import Corpus, training_batch, validation_windows
from lm.model import LanguageModel
from schedule import Cosine
from timing import machine, rounded, spread
from torch.nn.parallel import DistributedDataParallel
from tqdm import tqdm

import qcomp
from network.launch import RATES
from network.methods import SLOW
from network.recipes import BETAS, PEAK, RECIPES, SETTLED, WARMUP, Recipe
from network.shaped import VARIABLE, limit
from qcomp.integrations import ddp

WIDTH, LAYERS, HEADS, CONTEXT = 408, 5, 6, 64
BATCH = 4
WINDOWS, AT_ONCE = 64, 16
JUDGEMENTS = 20
WARM = 2


class Learner:
    """A model, its optimizer and its method of averaging, with its own process group."""

    def __init__(self, recipe: Recipe, rate: Cosine, exact: int, corpus: Corpus) -> None:
        torch.manual_seed(0)
        model = LanguageModel(WIDTH, LAYERS, HEADS, CONTEXT)
        self.parameters = sum(p.numel() for p in model.parameters())
        self.model = DistributedDataParallel(
            model, process_group=dist.new_group(), gradient_as_bucket_view=True
        )
        self.rate, self.corpus, self.done = rate, corpus, 0
        self.comm: Any = None
        self.optimizer: Any
        if recipe.make is not None:
            self.comm = qcomp.comm.TorchCommunicator(self.model.process_group)
            own = recipe.make(self.rate, exact)
            self.optimizer = ddp.OverlappedOptimizer(self.model, own, comm=self.comm)
        else:
            self.optimizer = torch.optim.Adam(self.model.parameters(), betas=BETAS)
            if recipe.hook is not None:
                self.model.register_comm_hook(*ddp.hook(qcomp.compressor(recipe.hook), self.model))
        self._stage = "exact" if recipe.hook is None else "compressed"

    def step(self) -> tuple[str, float]:
        """Do a step, and return its stage and its seconds on this rank."""
        windows = training_batch(self.corpus.train, BATCH, CONTEXT, (0, dist.get_rank(), self.done))
        dist.barrier()
        sent, start = self.comm.bytes_sent if self.comm else 0, time.perf_counter()
        for group in getattr(self.optimizer, "param_groups", ()):
            group["lr"] = self.rate(self.done)
        self.optimizer.zero_grad()
        logits = self.model(windows[:, :-1])
        error = torch.nn.functional.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())
        torch.autograd.backward(error)
        self.optimizer.step()
        seconds = time.perf_counter() - start
        self.done += 1
        if not self.comm:
            return self._stage, seconds
        # Exact means take four bytes per element, the longest payloads one.
        each = (self.comm.bytes_sent - sent) / self.parameters / (2 - 2 / self.comm.size)
        return "exact" if each > 2 else "compressed", seconds

    def turn(self) -> float:
        """Return the seconds of the second of two steps on this rank, since steps follow each other in training."""
        self.step()
        return self.step()[1]

    def judge(self) -> float:
        """Return the validation loss in nats per byte; each rank evaluates a share of the windows."""
        windows = validation_windows(self.corpus.validation, WINDOWS, CONTEXT)
        parts = torch.split(windows, AT_ONCE)[dist.get_rank() :: dist.get_world_size()]
        with torch.inference_mode():
            losses = [self.model.module.loss(part).item() * len(part) for part in parts]
        total = torch.tensor([sum(losses)], dtype=torch.float64)
        dist.all_reduce(total)
        return float(total.item()) / WINDOWS


def curve(name: str, steps: int, link: str, corpus: Corpus) -> dict[str, Any]:
    """Train, and return the loss at some steps, and the stages and seconds of all steps."""
    learner = Learner(RECIPES[name], Cosine(PEAK, steps), max(1, round(WARMUP * steps)), corpus)
    judge_at = {round(steps * part / JUDGEMENTS) for part in range(1, JUDGEMENTS + 1)}
    losses, stages, seconds = [(0, rounded(learner.judge()))], [], 0.0
    for step in tqdm(range(steps), desc=f"{name}, {link}", unit="step", disable=dist.get_rank() != 0):
        stage, taken = learner.step()
        stages.append(stage)
        seconds += taken
        if step + 1 in judge_at:
            losses.append((step + 1, rounded(learner.judge())))
    slowest = torch.tensor([seconds], dtype=torch.float64)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return {
        "method": name,
        "link": link,
        "steps": steps,
        "parameters": learner.parameters,
        "losses": losses,
        "stages": [(stage, len(list(run))) for stage, run in itertools.groupby(stages)],
        "seconds": rounded(slowest.item()),
    }


def times(links: list[str], rounds: list[int], corpus: Corpus) -> dict[str, Any]:
    """Return the seconds of the slowest rank's steps on each link, by the timed recipe."""
    rate = Cosine(SLOW, 1000)
    learners = {name: Learner(recipe, rate, exact, corpus) for name, (recipe, exact) in SETTLED.items()}
    results = {}
    for link, count in zip(["none", *links], [WARM, *rounds], strict=True):
        if dist.get_rank() == 0 and link in RATES:
            limit(os.environ[VARIABLE], dist.get_world_size(), link)
        rounds_done = tqdm(range(count), desc=f"steps, {link}", unit="round", disable=dist.get_rank() != 0)
        rows = [[learner.turn() for learner in learners.values()] for _ in rounds_done]
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
    corpus = Corpus.of_standard_library()
    if options.curve:
        document = curve(options.curve, options.steps, options.links[0], corpus)
    else:
        document = times(options.links, options.rounds, corpus)
    if dist.get_rank() == 0:
        document |= {"ranks": dist.get_world_size(), "machine": machine() | {"torch": torch.__version__}}
        options.out.write_text(json.dumps(document) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
