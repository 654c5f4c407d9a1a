"""A residual network on scikit-learn's 1,797 images of handwritten digits."""

from functools import cache

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional

__all__ = ["ResidualNetwork", "digits", "shifted"]

CLASSES, GROUPS, KERNEL = 10, 8, 3
PARTS = {"validation": slice(0, 300), "other files": slice(300, 600), "training": slice(600, None)}
"""Which images, in a fixed random order, are for what."""


class Convolution(nn.Module):
    """A convolution of 3 x 3 that keeps its weight as a matrix, which `torch.optim.Muon` asks for."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.shape = (outputs, inputs, KERNEL, KERNEL)
        self.weight = nn.Parameter(nn.init.kaiming_normal_(torch.empty(outputs, inputs * KERNEL**2)))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return functional.conv2d(images, self.weight.view(self.shape), padding=1)


class Block(nn.Module):
    """Two convolutions with normalization, around which the input is added."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.GroupNorm(GROUPS, width),
            nn.ReLU(),
            Convolution(width, width),
            nn.GroupNorm(GROUPS, width),
            nn.ReLU(),
            Convolution(width, width),
        )

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = values + self.layers(values)
        return result


class ResidualNetwork(nn.Module):
    """Blocks of convolutions, in half the resolution after half of them, and a mean over the pixels.

    The names of its first and last layer match `race.settings.OTHERS`.
    """

    def __init__(self, width: int, blocks: int) -> None:
        super().__init__()
        self.embedding = Convolution(1, width)
        first, last = ([Block(width) for _ in range(count)] for count in (blocks // 2, blocks - blocks // 2))
        self.blocks = nn.Sequential(*first, nn.AvgPool2d(2), *last)
        self.norm = nn.GroupNorm(GROUPS, width)
        self.head = nn.Linear(width, CLASSES)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return a logit for each digit."""
        values = self.norm(self.blocks(self.embedding(images))).relu()
        logits: torch.Tensor = self.head(values.mean((-2, -1)))
        return logits


@cache
def digits(of: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return images of 1 x 8 x 8 with values from 0 to 1, and their digits."""
    found = load_digits()
    order = np.random.default_rng(0).permutation(len(found.target))[PARTS[of]]
    images = torch.from_numpy(found.images[order].astype(np.float32) / 16).unsqueeze(1)
    return images, torch.from_numpy(found.target[order].astype(np.int64))


def shifted(images: torch.Tensor, random: np.random.Generator) -> torch.Tensor:
    """Return each image moved by at most one pixel along both axes."""
    rows, columns = random.integers(-1, 2, size=(2, len(images)))
    padded, size = functional.pad(images, (1, 1, 1, 1)), images.shape[-1]
    moved = [
        image[:, 1 + row : 1 + row + size, 1 + column : 1 + column + size]
        for image, row, column in zip(padded, rows, columns, strict=True)
    ]
    return torch.stack(moved)
