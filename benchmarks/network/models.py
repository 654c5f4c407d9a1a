"""The trained models: a perceptron and a transformer of about ten million parameters, with random batches."""

from collections.abc import Callable
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional

__all__ = ["MODELS", "Model", "loss"]

VOCABULARY = 4096
WINDOW = 32


class Transformer(nn.Module):
    """An encoder that predicts a token at every position; 10.2 million parameters."""

    def __init__(self, width: int = 384, layers: int = 4, heads: int = 6) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        layer = nn.TransformerEncoderLayer(width, heads, 4 * width, 0.0, batch_first=True)
        self.body = nn.TransformerEncoder(layer, layers)
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Map tokens (batch, length) to logits (batch, length, vocabulary)."""
        logits: torch.Tensor = self.head(self.body(self.embedding(tokens)))
        return logits


def perceptron() -> nn.Module:
    """Return four layers with 10.5 million parameters."""
    widths = [1024, 2048, 2048, 2048]
    hidden = [[nn.Linear(a, b), nn.ReLU()] for a, b in pairwise(widths)]
    return nn.Sequential(*[layer for pair in hidden for layer in pair], nn.Linear(widths[-1], 10))


def vectors() -> tuple[torch.Tensor, torch.Tensor]:
    """Return 64 samples of 10 classes."""
    return torch.randn(64, 1024), torch.randint(0, 10, (64,))


def sentences() -> tuple[torch.Tensor, torch.Tensor]:
    """Return 4 windows of 32 tokens."""
    tokens = torch.randint(0, VOCABULARY, (4, WINDOW))
    return tokens, tokens.roll(-1, 1)


class Model(NamedTuple):
    """The functions that make a model and its batches."""

    label: str
    make: Callable[[], nn.Module]
    batch: Callable[[], tuple[torch.Tensor, torch.Tensor]]


MODELS = {
    "mlp": Model("MLP, 10.5M parameters, batches of 64", perceptron, vectors),
    "transformer": Model("transformer, 10.2M parameters, batches of 4 x 32", Transformer, sentences),
}


def loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Return the cross-entropy of a batch."""
    given, wanted = batch
    return functional.cross_entropy(model(given).flatten(0, -2), wanted.flatten())
