"""The models and data of the race, and how a model is judged."""

import sys
from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

sys.path.append(str(Path(__file__).parents[2] / "examples"))

from lm.model import LanguageModel

from qcomp.cli.corpus import Corpus, training_batch, validation_windows
from race.images import ResidualNetwork, digits, shifted

__all__ = ["JUDGEMENTS", "TASKS", "Task"]

JUDGEMENTS = 20
"""Number of validation losses of a curve, without the one before the first step."""
WINDOWS = {"validation": 64, "other files": 128}
AT_ONCE = 16

Examples = tuple[torch.Tensor, torch.Tensor]
"""Inputs of a model, and what it is to predict."""


@dataclass(frozen=True)
class Task(ABC):
    """A model, its data and how long it is trained.

    Parameters
    ----------
    label : str
    sizes : tuple of int
        Sizes of the model.
    batch : int
        Examples of a rank in a step.
    steps : int
        Steps of a training, a multiple of `JUDGEMENTS`.
    every : int
        Steps of an outer round. Outer rounds end where a model is judged.
    """

    label: str
    sizes: tuple[int, ...]
    batch: int
    steps: int
    every: int

    @property
    @abstractmethod
    def cost(self) -> float:
        """The amount of computation of a rank's training, in an arbitrary unit."""

    @abstractmethod
    def model(self, seed: int) -> nn.Module:
        """Return the model before its first step, the same on all ranks."""

    @abstractmethod
    def draw(self, seed: int, rank: int, step: int) -> Examples:
        """Return the examples of a rank in a step."""

    @abstractmethod
    def held_out(self, of: str) -> Examples:
        """Return the examples for "validation", or the "other files" that judge a trained model; always the same."""

    def validate(self, model: nn.Module, rank: int, size: int) -> float:
        """Return this rank's part of the validation loss, in nats a prediction; the parts of all ranks add up."""
        return judge(model, self.held_out("validation"), rank, size)[0]

    def examine(self, model: nn.Module, rank: int, size: int) -> tuple[float, float]:
        """Return this rank's parts of the loss and of the share of right predictions, on examples of no other use."""
        return judge(model, self.held_out("other files"), rank, size)


class Text(Task):
    """A byte-level transformer on Python's standard library; sizes are its width, layers, heads and context."""

    @property
    def cost(self) -> float:
        width, layers, _, context = self.sizes
        return self.steps * self.batch * context * layers * width**2

    def model(self, seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return LanguageModel(*self.sizes)

    def draw(self, seed: int, rank: int, step: int) -> Examples:
        windows = training_batch(library().train, self.batch, self.sizes[-1], (seed, rank, step))
        return predicting(torch.from_numpy(windows))

    def held_out(self, of: str) -> Examples:
        return predicting(windows(of, self.sizes[-1]))


class Images(Task):
    """A residual network on scikit-learn's images of digits; sizes are its channels and its blocks."""

    @property
    def cost(self) -> float:
        width, blocks = self.sizes
        return self.steps * self.batch * digits("training")[0][0].numel() * blocks * width**2

    def model(self, seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return ResidualNetwork(*self.sizes)

    def draw(self, seed: int, rank: int, step: int) -> Examples:
        random = np.random.default_rng((seed, rank, step))
        images, labels = digits("training")
        chosen = torch.from_numpy(random.integers(len(images), size=self.batch))
        return shifted(images[chosen], random), labels[chosen]

    def held_out(self, of: str) -> Examples:
        return digits(of)


TASKS: dict[str, Task] = {
    "demo": Text("the demo's model, 0.87 M parameters", (128, 4, 4, 128), 4, 300, 15),
    "transformer": Text("a transformer of 10.2 M parameters", (408, 5, 6, 64), 4, 600, 30),
    "long": Text("the demo's model, trained for long", (128, 4, 4, 128), 4, 3000, 30),
    "images": Images("a residual network of 0.30 M parameters on images", (64, 4), 16, 300, 15),
}


@cache
def library() -> Corpus:
    """Return the standard library."""
    return Corpus.of_standard_library()


@cache
def windows(of: str, context: int) -> torch.Tensor:
    """Return windows of held-out files of the standard library, or of NumPy's sources, always the same ones."""
    data = library().validation if of == "validation" else other_files()
    return torch.from_numpy(validation_windows(data, WINDOWS[of], context))


def predicting(these: torch.Tensor) -> Examples:
    """Return all bytes of windows but the last, and the bytes that follow them."""
    return these[:, :-1], these[:, 1:]


def other_files() -> np.ndarray:
    """Return the bytes of NumPy's Python sources without its tests: another project than the one trained on."""
    found = find_spec("numpy")
    assert found is not None
    assert found.origin is not None
    root = Path(found.origin).parent
    paths = sorted(path for path in root.rglob("*.py") if "tests" not in path.relative_to(root).parts)
    return np.frombuffer(b"\0".join(path.read_bytes() for path in paths), np.uint8)


def judge(model: nn.Module, these: Examples, rank: int, size: int) -> tuple[float, float]:
    """Return a rank's parts of the mean loss and of the share of right predictions, on every ``size``-th example."""
    loss = right = 0.0
    own = (torch.split(each[rank::size], AT_ONCE) for each in these)
    with torch.inference_mode():
        for inputs, wanted in zip(*own, strict=True):
            found = model(inputs)
            loss += loss_of(found, wanted, reduction="sum").item()
            right += (found.argmax(-1) == wanted).sum().item()
    count = these[1].numel()
    return loss / count, right / count


def loss_of(found: torch.Tensor, wanted: torch.Tensor, **options: Any) -> torch.Tensor:
    """Return the cross entropy of predictions, whose last axis is over classes."""
    return functional.cross_entropy(found.flatten(0, -2), wanted.flatten(), **options)
