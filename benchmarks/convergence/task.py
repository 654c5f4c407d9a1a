"""The interface of a training task: networks to train, their losses, and a number that measures their quality."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import nn

__all__ = ["Task"]


class Task(ABC):
    """A task that all ranks train together, each on its own draws.

    The seed determines everything: the initial parameters, which are the same on all ranks, and the draws, which depend
    on (seed, rank, step) alone.

    Parameters
    ----------
    seed : int
    rank : int
        The rank of this process.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    metric: ClassVar[str]
    """A description of the number that `judge` returns; less is better."""
    steps: ClassVar[int]
    learning_rate: ClassVar[float]
    betas: ClassVar[tuple[float, float]] = (0.9, 0.99)
    clip_norm: ClassVar[float | None] = None

    def __init__(self, seed: int, rank: int) -> None:
        torch.manual_seed(seed)
        self.seed = seed
        self.rank = rank
        self.networks = self.build()

    @abstractmethod
    def build(self) -> Mapping[str, nn.Module]:
        """Return the networks by name; each has its own optimizer, and they take turns in every step."""

    @abstractmethod
    def loss(self, network: str, step: int) -> torch.Tensor:
        """Return this rank's loss of a network in a step."""

    @abstractmethod
    def judge(self) -> float:
        """Return the metric of the networks; the same on all ranks, since they hold the same parameters."""
