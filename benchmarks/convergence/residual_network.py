"""A small residual network that classifies digits."""

from collections.abc import Mapping
from typing import ClassVar

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from convergence.digits import digits, draw
from convergence.task import Task

__all__ = ["ResidualNetworkTask"]

WIDTH = 48
BATCH = 32
NOISE = 0.5
"""Standard deviation of the noise added to pictures, whose pixels are from -1 to 1."""


class Block(nn.Module):
    """Two convolutions, each after a norm, added to the identity."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.GroupNorm(6, WIDTH) for _ in range(2))
        self.convolutions = nn.ModuleList(nn.Conv2d(WIDTH, WIDTH, 3, padding=1, bias=False) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (batch, width, height, width) to the same shape."""
        hidden = x
        for norm, convolution in zip(self.norms, self.convolutions, strict=True):
            hidden = convolution(functional.relu(norm(hidden)))
        return x + hidden


class ResidualNetworkTask(Task):
    """Classify digits under noise; three residual blocks, 0.13 million parameters, 32 pictures per rank and step."""

    name: ClassVar[str] = "residual_network"
    title: ClassVar[str] = "small ResNet on digits"
    metric: ClassVar[str] = "cross-entropy of held-out digits under noise, nats"
    steps: ClassVar[int] = 600
    learning_rate: ClassVar[float] = 2e-3

    def build(self) -> Mapping[str, nn.Module]:
        """Return the network."""
        self.model = nn.Sequential(
            nn.Conv2d(1, WIDTH, 3, padding=1, bias=False),
            *(Block() for _ in range(3)),
            nn.GroupNorm(6, WIDTH),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(2),
            nn.Flatten(),
            nn.Linear(4 * WIDTH, 10),
        )
        return {"network": self.model}

    def loss(self, network: str, step: int) -> torch.Tensor:  # noqa: ARG002 - there is only one
        """Return the cross-entropy of random digits."""
        pictures, labels, _, _ = digits()
        chosen = draw(len(labels), BATCH, (self.seed, self.rank, step))
        noisy = pictures[chosen] + noise((BATCH, 1, 8, 8), (self.seed, self.rank, step, 1))
        return functional.cross_entropy(self.model(noisy), labels[chosen])

    def judge(self) -> float:
        """Return the cross-entropy of the held-out digits, each under four draws of noise."""
        _, _, pictures, labels = digits()
        with torch.inference_mode():
            losses = [
                functional.cross_entropy(self.model(pictures + noise(tuple(pictures.shape), (i,))), labels)
                for i in range(4)
            ]
        return float(torch.stack(losses).mean())


def noise(shape: tuple[int, ...], key: tuple[int, ...]) -> torch.Tensor:
    """Return normal noise that depends on a key alone."""
    return NOISE * torch.from_numpy(np.random.default_rng(key).standard_normal(shape, dtype=np.float32))
