"""The learning rate of all training runs of the benchmarks."""

import math
from dataclasses import dataclass

__all__ = ["Cosine"]


@dataclass(frozen=True)
class Cosine:
    """Learning rate of a step: rises linearly over the first tenth, then falls as a cosine to a tenth."""

    peak: float
    steps: int

    def __call__(self, step: int) -> float:
        """Return the rate after ``step`` completed steps."""
        rise = max(1, self.steps // 10)
        if step < rise:
            return self.peak * (step + 1) / rise
        progress = (step - rise) / max(1, self.steps - rise)
        return self.peak * (0.55 + 0.45 * math.cos(math.pi * progress))
