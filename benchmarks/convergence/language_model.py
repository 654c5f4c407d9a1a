"""A byte-level transformer on the sources of Python's standard library: the model of the demo."""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

import torch
from torch import nn

from convergence.task import Task
from qcomp.cli.corpus import Corpus, training_batch, validation_windows

sys.path.append(str(Path(__file__).parents[2] / "examples"))

from lm.model import LanguageModel

__all__ = ["LanguageModelTask"]

CONTEXT = 128
BATCH = 8
WINDOWS = 256
"""Number of windows of the validation set, always the same ones."""


class LanguageModelTask(Task):
    """Predict the next byte; 0.87 million parameters, 8 windows of 128 bytes per rank and step."""

    name: ClassVar[str] = "language_model"
    title: ClassVar[str] = "byte-level transformer on the standard library"
    metric: ClassVar[str] = "validation loss, nats a byte"
    steps: ClassVar[int] = 1000
    learning_rate: ClassVar[float] = 2e-3
    clip_norm: ClassVar[float | None] = 1.0

    corpus: ClassVar[Corpus | None] = None
    """The corpus, read once and shared by all runs of a process."""

    def build(self) -> Mapping[str, nn.Module]:
        """Return the transformer."""
        if LanguageModelTask.corpus is None:
            LanguageModelTask.corpus = Corpus.of_standard_library()
        self.data = LanguageModelTask.corpus
        self.model = LanguageModel(context=CONTEXT)
        return {"transformer": self.model}

    def loss(self, network: str, step: int) -> torch.Tensor:  # noqa: ARG002 - there is only one
        """Return the cross-entropy of random windows."""
        key = (self.seed, self.rank, step)
        return self.model.loss(torch.from_numpy(training_batch(self.data.train, BATCH, CONTEXT, key)))

    def judge(self) -> float:
        """Return the cross-entropy of the validation windows."""
        windows = torch.from_numpy(validation_windows(self.data.validation, WINDOWS, CONTEXT))
        with torch.inference_mode():
            losses = [self.model.loss(part).item() for part in torch.split(windows, 32)]
        return sum(losses) / len(losses)
