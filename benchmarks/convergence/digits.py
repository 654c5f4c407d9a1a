"""The handwritten digits of scikit-learn: 1797 pictures of 8 by 8, always split in the same way."""

from functools import cache

import numpy as np
import torch
from sklearn.datasets import load_digits

__all__ = ["digits", "draw"]

HELD_OUT = 360
"""Number of held-out pictures."""


@cache
def digits() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return pictures, float32 of shape (n, 1, 8, 8) from -1 to 1, with labels, for training and held out."""
    bunch = load_digits()
    pictures = torch.from_numpy(bunch.images.astype(np.float32)).unsqueeze(1) / 8 - 1
    labels = torch.from_numpy(bunch.target.astype(np.int64))
    order = torch.from_numpy(np.random.default_rng(0).permutation(len(labels)))
    train, held_out = order[HELD_OUT:], order[:HELD_OUT]
    return pictures[train], labels[train], pictures[held_out], labels[held_out]


def draw(count: int, batch: int, key: tuple[int, ...]) -> torch.Tensor:
    """Return the indices of ``batch`` of ``count`` pictures, which depend on a key alone."""
    return torch.from_numpy(np.random.default_rng(key).integers(0, count, size=batch))
