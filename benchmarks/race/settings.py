"""The settings that every method of the race is made from, and the trainer that it makes."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import torch
from torch import nn

__all__ = ["BETAS", "DECAY", "Optimizers", "Settings", "Trainer", "adamw", "muon", "others", "short_muon"]

BETAS = (0.9, 0.99)
DECAY = 0.01
"""The weight decay of all methods."""
OTHERS = ("*embedding*", "head*", "*.wte.*", "*.wpe.*")
"""The names of embeddings and heads, in the race's models and in nanoGPT's."""


@dataclass(frozen=True)
class Settings:
    """The settings of a training, which its method may use.

    Parameters
    ----------
    rate : callable
        The learning rate of a step, from the number of completed ones.
    warmup : int
        Number of exact first steps, for methods that have them.
    every : int
        Steps of an outer round.
    seed : int
    settled : bool
        Whether steps after the warm-up have one phase, or those of an outer round, so that they can be timed.
    """

    rate: Callable[[int], float]
    warmup: int
    every: int
    seed: int = 0
    settled: bool = False


class Trainer(NamedTuple):
    """A model to call, the optimizers to step, and a function that releases their resources."""

    model: Any
    optimizers: Sequence[Any]
    close: Callable[[], None] = lambda: None


Optimizers = Callable[[nn.Module, Settings], list[torch.optim.Optimizer]]
"""Makes the optimizers of torch that move a model; the race sets their learning rates."""


def adamw(model: nn.Module, _: Settings) -> list[torch.optim.Optimizer]:
    """Return AdamW for all parameters."""
    return [torch.optim.AdamW(model.parameters(), betas=BETAS, weight_decay=DECAY)]


def others(model: nn.Module) -> list[str]:
    """Return the names of the embeddings and heads, which AdamW moves under Muon."""
    names = [name for name, _ in model.named_parameters()]
    return [name for name in names if any(fnmatchcase(name, pattern) for pattern in OTHERS)]


def muon(model: nn.Module, _: Settings, iterations: int = 5) -> list[torch.optim.Optimizer]:
    """Return AdamW for embeddings, head and norms, and torch's Muon for the matrices between hidden layers.

    With "match_rms_adamw" its updates are as large as AdamW's, so that one learning rate suits both.
    """
    outside = others(model)
    hidden = [p for name, p in model.named_parameters() if p.ndim == 2 and name not in outside]
    rest = [p for p in model.parameters() if all(p is not q for q in hidden)]
    return [
        torch.optim.AdamW(rest, betas=BETAS, weight_decay=DECAY),
        torch.optim.Muon(hidden, weight_decay=DECAY, adjust_lr_fn="match_rms_adamw", ns_steps=iterations),
    ]


def short_muon(model: nn.Module, settings: Settings) -> list[torch.optim.Optimizer]:
    """Return `muon` with three Newton-Schulz iterations instead of five; they take most of a step on a CPU."""
    return muon(model, settings, iterations=3)
