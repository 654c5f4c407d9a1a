"""The compared optimizers."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from schedule import Cosine

import qcomp
from convergence.task import Task

__all__ = ["BASELINE", "METHODS", "Method"]

BASELINE = "adam"


@dataclass(frozen=True)
class Method:
    """A label, a colour, and the optimizer for a task and its number of steps."""

    label: str
    colour: str
    make: Callable[[dict[str, Any], int], qcomp.Optimizer]
    tried: bool = False
    """Whether it was added because another method fell behind; it runs only on request."""

    def optimizer(self, task: Task, steps: int) -> qcomp.Optimizer:
        """Return the optimizer of one of the task's networks."""
        shared = {
            "learning_rate": Cosine(task.learning_rate, steps),
            "betas": task.betas,
            "clip_norm": task.clip_norm,
            "seed": task.seed,
        }
        return self.make(shared, steps)


def first(steps: int, part: float) -> int:
    """Return the steps of the exact warm-up."""
    return max(1, round(part * steps))


def prompt(shared: dict[str, Any]) -> dict[str, Any]:
    """Return the settings without momentum, which delays the effect of a gradient by beta1 / (1 - beta1) steps."""
    return shared | {"betas": (0.0, shared["betas"][1])}


METHODS = {
    BASELINE: Method("Adam, exact", "#4d4d4d", lambda shared, _: qcomp.Adam(**shared)),
    "onebit_adam": Method(
        "1-bit Adam, 15% warm-up",
        "#d1495b",
        lambda shared, steps: qcomp.OneBitAdam(**shared, freeze=first(steps, 0.15)),
    ),
    "zero_one_adam": Method(
        "0/1 Adam, variance intervals double every 4",
        "#7a4fa3",
        lambda shared, _: qcomp.ZeroOneAdam(**shared, variance_steps=qcomp.DoublingIntervals(4)),
    ),
    "qadam": Method(
        "QAdam, 8 bits, 15% warm-up, frozen",
        "#2e86ab",
        lambda shared, steps: qcomp.QAdam(**shared, freeze=first(steps, 0.15), variance_steps=None),
    ),
    "qadam_measured": Method(
        "QAdam, then measured at intervals that double every 4",
        "#1b998b",
        lambda shared, steps: qcomp.QAdam(**shared, freeze=first(steps, 0.15)),
    ),
    "onebit_adam_measured": Method(
        "1-bit Adam, then measured at intervals that double every 4",
        "#f0a3ad",
        lambda shared, steps: qcomp.OneBitAdam(
            **shared, freeze=first(steps, 0.15), variance_steps=qcomp.DoublingIntervals(4)
        ),
        tried=True,
    ),
    "adam_prompt": Method(
        "Adam, exact, beta1 0", "#a0a0a0", lambda shared, _: qcomp.Adam(**prompt(shared)), tried=True
    ),
    "onebit_adam_prompt": Method(
        "1-bit Adam, 15% warm-up, beta1 0",
        "#e58f9c",
        lambda shared, steps: qcomp.OneBitAdam(**prompt(shared), freeze=first(steps, 0.15)),
        tried=True,
    ),
    "zero_one_adam_prompt": Method(
        "0/1 Adam, variance intervals double every 4, beta1 0",
        "#b79ad1",
        lambda shared, _: qcomp.ZeroOneAdam(**prompt(shared), variance_steps=qcomp.DoublingIntervals(4)),
        tried=True,
    ),
    "qadam_longer": Method(
        "QAdam, 30% warm-up",
        "#76b5d6",
        lambda shared, steps: qcomp.QAdam(**shared, freeze=first(steps, 0.3), variance_steps=None),
        tried=True,
    ),
    "qadam_half": Method(
        "QAdam, 50% warm-up",
        "#1b4965",
        lambda shared, steps: qcomp.QAdam(**shared, freeze=first(steps, 0.5), variance_steps=None),
        tried=True,
    ),
    "qadam_rewarm": Method(
        "QAdam, 15% warm-up, re-warms 50 steps at a ratio of 0.75 or an overlap of 0.3",
        "#8a6d3b",
        lambda shared, steps: qcomp.QAdam(
            **shared,
            freeze=first(steps, 0.15),
            variance_steps=None,
            watch=qcomp.VarianceWatch(
                largest=4 / 3, smallest=0.75, overlap=0.3, rewarm_steps=50, sample=4096, every=5
            ),
        ),
        tried=True,
    ),
    "qadam_faster": Method(
        "QAdam, 15% warm-up, 1.5 times the learning rate",
        "#edae49",
        lambda shared, steps: qcomp.QAdam(
            **(shared | {"learning_rate": Cosine(1.5 * shared["learning_rate"].peak, steps)}),
            freeze=first(steps, 0.15),
            variance_steps=None,
        ),
        tried=True,
    ),
}
