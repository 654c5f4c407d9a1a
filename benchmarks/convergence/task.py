"""What a training task is to the study: networks to train, gradients of each, and one number to judge them by."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import nn

__all__ = ["Task"]


class Task(ABC):
    """A task that all ranks train together, each on draws of its own.

    Everything follows from the seed: the first parameters, which are the same on all ranks, and the draws, which
    follow from (seed, rank, step) alone.

    Parameters
    ----------
    seed : int
    rank : int
        Of this process.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    metric: ClassVar[str]
    """What `judge` returns, in words; less is better."""
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
        """Return the networks by name; each has an optimizer of its own, and they take turns in every step."""

    @abstractmethod
    def loss(self, network: str, step: int) -> torch.Tensor:
        """Return this rank's loss of a network in a step."""

    @abstractmethod
    def judge(self) -> float:
        """Return how good the networks are; the same on all ranks, which hold the same parameters."""
