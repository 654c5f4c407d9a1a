"""One run: a task, a method and a seed, on all ranks of a communicator."""

from dataclasses import asdict, dataclass
from typing import Any

import torch
from tqdm import tqdm

import qcomp
from convergence.methods import METHODS
from convergence.task import Task
from qcomp.comm import Communicator

__all__ = ["Run", "train"]

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
    """Bytes sent by rank 0 in all steps, as the communicator counted them."""

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


def train(task: Task, method: str, steps: int, comm: Communicator) -> Run:
    """Train a task's networks in turn, and compute the metric at times; all ranks end with the same parameters."""
    trainers = [
        _Trainer(task, name, network, METHODS[method].optimizer(task, steps), comm)
        for name, network in task.networks.items()
    ]
    judge_at = {round(steps * part / JUDGEMENTS) for part in range(1, JUDGEMENTS + 1)}
    curve: list[tuple[int, float]] = []
    title = f"{task.name}, {method}, seed {task.seed}"
    for step in tqdm(range(steps), desc=title, unit="step", disable=comm.rank != 0, mininterval=1):
        for trainer in trainers:
            trainer.step(step)
        if step + 1 in judge_at:
            curve.append((step + 1, task.judge()))
    return Run(
        task=task.name,
        method=method,
        seed=task.seed,
        steps=steps,
        ranks=comm.size,
        parameters=sum(p.numel() for trainer in trainers for p in trainer.parameters),
        curve=curve,
        bytes_sent=sum(trainer.sent for trainer in trainers),
    )


class _Trainer:
    """One network and its optimizer."""

    def __init__(
        self,
        task: Task,
        name: str,
        network: torch.nn.Module,
        optimizer: qcomp.Optimizer,
        comm: Communicator,
    ) -> None:
        self.task, self.name, self.optimizer, self.comm = task, name, optimizer, comm
        self.own = list(network.parameters())
        self.parameters = [p.detach() for p in self.own]
        names = [key for key, _ in network.named_parameters()]
        self.state = self.optimizer.init(self.parameters, comm, names=names)
        self.sent = 0

    def step(self, step: int) -> None:
        """Do one step of this network."""
        gradients = list(torch.autograd.grad(self.task.loss(self.name, step), self.own))
        before = self.comm.bytes_sent
        moved, self.state = self.optimizer.step(self.parameters, gradients, self.state, self.comm)
        self.sent += self.comm.bytes_sent - before
        for own, new in zip(self.parameters, moved, strict=True):
            own.copy_(new)
