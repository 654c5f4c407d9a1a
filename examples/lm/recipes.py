"""The optimizers that the job can use, and their settings."""

import math
from dataclasses import dataclass
from typing import Any

import qcomp

__all__ = ["RECIPES", "Recipe", "Settings", "WarmupCosine", "make_optimizer"]


@dataclass(frozen=True)
class Settings:
    """The settings that determine the result of a run; a checkpoint resumes only with the same settings."""

    optimizer: str
    steps: int
    batch: int
    seed: int
    learning_rate: float
    warmup_fraction: float
    auto_freeze: bool
    compressor: str | None

    @property
    def warmup_steps(self) -> int:
        """Exact steps before the variance is frozen, unless the rule decides."""
        return max(1, round(self.warmup_fraction * self.steps))


@dataclass(frozen=True)
class WarmupCosine:
    """Learning rate of a step: rises linearly over the first tenth, then falls as a cosine to a tenth."""

    peak: float
    steps: int

    @property
    def rise(self) -> int:
        """Steps in the linear rise."""
        return max(1, self.steps // 10)

    def __call__(self, step: int) -> float:
        """Return the rate after ``step`` completed steps."""
        if step < self.rise:
            return self.peak * (step + 1) / self.rise
        progress = (step - self.rise) / max(1, self.steps - self.rise)
        return self.peak * (0.55 + 0.45 * math.cos(math.pi * progress))


@dataclass(frozen=True)
class Recipe:
    """A display name, and the learning rate that suits the optimizer here."""

    label: str
    learning_rate: float
    has_warmup: bool = False
    compresses: bool = True


RECIPES = {
    "adam": Recipe("Adam, exact", 2e-3, compresses=False),
    "onebit_adam": Recipe("1-bit Adam", 2e-3, has_warmup=True),
    "qadam": Recipe("QAdam, 8-bit", 2e-3, has_warmup=True),
    "qsgd": Recipe("SGD, 4-bit QSGD", 0.1),
}


def make_optimizer(settings: Settings) -> qcomp.Optimizer:
    """Return the qcomp optimizer for the settings."""
    schedule = WarmupCosine(settings.learning_rate, settings.steps)
    chosen: dict[str, Any] = {
        "learning_rate": schedule,
        "clip_norm": 1.0,
        "seed": settings.seed,
    }
    if settings.compressor is not None:
        chosen["compressor"] = qcomp.compressor(settings.compressor)
    stable = qcomp.VarianceStable(0.96, after=schedule.rise)
    freeze = stable if settings.auto_freeze else settings.warmup_steps
    match settings.optimizer:
        case "adam":
            return qcomp.Adam(**chosen, betas=(0.9, 0.99))
        case "onebit_adam":
            return qcomp.OneBitAdam(**chosen, betas=(0.9, 0.99), freeze=freeze)
        case "qadam":
            return qcomp.QAdam(**chosen, betas=(0.9, 0.99), freeze=freeze, variance_steps=None)
        case "qsgd":
            chosen = {"compressor": qcomp.QSGD(levels=7, bucket_size=128)} | chosen
            return qcomp.CompressedSGD(**chosen, momentum=0.9)
    raise ValueError(f"no recipe for {settings.optimizer!r}")
