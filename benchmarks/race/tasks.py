"""The models and data of the race, and how a model is judged."""

import sys
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
from torch.nn import functional

sys.path.append(str(Path(__file__).parents[2] / "examples"))

from lm.model import LanguageModel

from qcomp.cli.corpus import Corpus, training_batch, validation_windows

__all__ = ["JUDGEMENTS", "TASKS", "Task"]

JUDGEMENTS = 20
"""Number of validation losses of a curve, without the one before the first step."""
WINDOWS = {"validation": 64, "other files": 128}
AT_ONCE = 16


@dataclass(frozen=True)
class Task:
    """A byte-level transformer on Python's standard library.

    Parameters
    ----------
    label : str
    sizes : tuple of int
        Width, layers, heads and context of `LanguageModel`.
    batch : int
        Windows of a rank in a step.
    steps : int
        Steps of a training, a multiple of `JUDGEMENTS`.
    every : int
        Steps of an outer round. Outer rounds end where a model is judged.
    """

    label: str
    sizes: tuple[int, int, int, int]
    batch: int
    steps: int
    every: int

    @property
    def context(self) -> int:
        """The bytes of a window."""
        return self.sizes[-1]

    def model(self, seed: int) -> LanguageModel:
        """Return the model before its first step, the same on all ranks."""
        torch.manual_seed(seed)
        return LanguageModel(*self.sizes)

    def draw(self, seed: int, rank: int, step: int) -> torch.Tensor:
        """Return the windows of a rank in a step."""
        return torch.from_numpy(training_batch(library().train, self.batch, self.context, (seed, rank, step)))

    def validate(self, model: LanguageModel, rank: int, size: int) -> float:
        """Return this rank's part of the validation loss, in nats a byte; the parts of all ranks add up."""
        return judge(model, windows("validation", self.context), rank, size)[0]

    def examine(self, model: LanguageModel, rank: int, size: int) -> tuple[float, float]:
        """Return this rank's parts of the loss and of the share of next bytes guessed right, on other files."""
        return judge(model, windows("other files", self.context), rank, size)


TASKS = {
    "demo": Task("the demo's model, 0.87 M parameters", (128, 4, 4, 128), 4, 300, 15),
    "transformer": Task("a transformer of 10.2 M parameters", (408, 5, 6, 64), 4, 600, 30),
    "long": Task("the demo's model, trained for long", (128, 4, 4, 128), 4, 3000, 30),
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


def other_files() -> np.ndarray:
    """Return the bytes of NumPy's Python sources without its tests: another project than the one trained on."""
    found = find_spec("numpy")
    assert found is not None
    assert found.origin is not None
    root = Path(found.origin).parent
    paths = sorted(path for path in root.rglob("*.py") if "tests" not in path.relative_to(root).parts)
    return np.frombuffer(b"\0".join(path.read_bytes() for path in paths), np.uint8)


def judge(model: LanguageModel, these: torch.Tensor, rank: int, size: int) -> tuple[float, float]:
    """Return a rank's parts of the mean loss and of the share of right guesses; it takes every ``size``-th window."""
    loss = right = 0.0
    with torch.inference_mode():
        for part in torch.split(these[rank::size], AT_ONCE):
            logits, wanted = model(part[:, :-1]), part[:, 1:]
            loss += functional.cross_entropy(logits.flatten(0, 1), wanted.flatten(), reduction="sum").item()
            right += (logits.argmax(-1) == wanted).sum().item()
    count = these[:, 1:].numel()
    return loss / count, right / count
