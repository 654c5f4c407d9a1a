"""One run: a task, a method and a seed, on ranks that take turns in one process."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from tqdm import tqdm

import qcomp
from convergence.methods import METHODS
from convergence.task import Task
from qcomp.core.diagnostics import counted
from qcomp.testing.one_thread import lockstep

__all__ = ["Run", "train"]

RANKS = 2

JUDGEMENTS = 10
"""Number of times that the metric is computed in a run, including its end."""


@dataclass(frozen=True)
class Run:
    """The result of a run."""

    task: str
    method: str
    seed: int
    steps: int
    ranks: int
    parameters: int
    curve: list[tuple[int, float]]
    """(completed steps, the task's metric)"""
    bytes_sent: int
    """Bytes that rank 0 sent in all steps."""

    @property
    def final(self) -> float:
        """The metric at the end."""
        return self.curve[-1][1]

    @property
    def volume_ratio(self) -> float:
        """Bytes of a ring all-reduce of float32 gradients relative to the bytes sent; infinite if nothing was sent."""
        ring = 2 * (self.ranks - 1) / self.ranks * 4 * self.parameters * self.steps
        return ring / self.bytes_sent if self.bytes_sent else float("inf")

    def document(self) -> dict[str, Any]:
        """Return the contents of a JSON file."""
        return asdict(self)


def train(task: type[Task], method: str, seed: int, steps: int) -> Run:
    """Train a task's networks in turn, and compute the metric at intervals; all ranks end with the same parameters."""
    ranks = [task(seed, rank) for rank in range(RANKS)]
    trainers = [
        _Trainer(ranks, name, METHODS[method].optimizer(ranks[0], steps)) for name in ranks[0].networks
    ]
    judge_at = {round(steps * part / JUDGEMENTS) for part in range(1, JUDGEMENTS + 1)}
    curve: list[tuple[int, float]] = []
    for step in tqdm(range(steps), desc=f"{task.name}, {method}, seed {seed}", unit="step", mininterval=1):
        for trainer in trainers:
            trainer.step(step)
        if step + 1 in judge_at:
            curve.append((step + 1, ranks[0].judge()))
    return Run(
        task=task.name,
        method=method,
        seed=seed,
        steps=steps,
        ranks=RANKS,
        parameters=sum(p.numel() for trainer in trainers for p in trainer.parameters[0]),
        curve=curve,
        bytes_sent=sum(trainer.sent for trainer in trainers),
    )


class _Trainer:
    """One network on all ranks, and its optimizer."""

    def __init__(self, ranks: Sequence[Task], name: str, optimizer: qcomp.Optimizer) -> None:
        self.ranks, self.name, self.optimizer = ranks, name, optimizer
        self.own = [list(task.networks[name].parameters()) for task in ranks]
        self.parameters = [[p.detach() for p in own] for own in self.own]
        names = [key for key, _ in ranks[0].networks[name].named_parameters()]
        self.states = lockstep(
            [
                optimizer.init_stages(own, rank=rank, size=len(ranks), host="one", names=names)
                for rank, own in enumerate(self.parameters)
            ]
        )
        self.sent = 0

    def step(self, step: int) -> None:
        """Do one step of this network."""
        gradients = [
            list(torch.autograd.grad(task.loss(self.name, step), own))
            for task, own in zip(self.ranks, self.own, strict=True)
        ]
        of_ranks = zip(self.parameters, gradients, self.states, strict=True)
        moved = lockstep(
            [counted(self.optimizer.stages(*of_rank), rank) for rank, of_rank in enumerate(of_ranks)]
        )
        self.sent += moved[0][1]
        self.states = [state for (_, state), _ in moved]
        for own, ((new, _), _) in zip(self.parameters, moved, strict=True):
            for parameter, value in zip(own, new, strict=True):
                parameter.copy_(value)
