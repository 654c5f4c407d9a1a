"""The optimizers whose time to a loss is compared, and the stages of their steps."""

from collections.abc import Callable
from dataclasses import dataclass

from race.settings import Settings

import qcomp
from network.methods import QSGD4, SIGN

__all__ = ["PEAK", "RECIPES", "SETTLED", "Recipe"]

BETAS = (0.9, 0.99)
PEAK = 1e-3
WARMUP = 0.15
"""The share of exact steps of optimizers that freeze the variance."""
NEVER = 10**9
GROWING = qcomp.DoublingIntervals(2)

Rate = Callable[[int], float]


@dataclass(frozen=True)
class Recipe:
    """An optimizer, and the entry of `SETTLED` with the times of its steps."""

    label: str
    colour: str
    make: Callable[[Rate, int], qcomp.Optimizer] | None = None
    """Makes an optimizer of qcomp from a rate and the number of exact steps; None for torch's Adam."""
    hook: str | None = None
    """The spec of the compressor of gradients; None to average them exactly."""
    exact: str = "warmup"
    compressed: str = ""
    variance_steps: Callable[[int], bool] | None = None
    """Returns whether a step, counted from 1, is exact; for a recipe whose exact steps are not all at the start."""

    def phase(self, step: int, settings: Settings) -> str:
        """Return the stage of a step, counted from 0: "exact" or "compressed"."""
        if not self.compressed or not self.make:
            return "compressed" if self.compressed else "exact"
        exact = self.variance_steps(step + 1) if self.variance_steps else step < settings.warmup
        return "exact" if exact else "compressed"

    def stage(self, name: str) -> str:
        """Return the entry of `SETTLED` with the time of a step."""
        return {"exact": self.exact, "compressed": self.compressed}[name]


def _onebit_adam(rate: Rate, exact: int) -> qcomp.Optimizer:
    return qcomp.OneBitAdam(learning_rate=rate, betas=BETAS, freeze=exact)


def _qadam(rate: Rate, exact: int) -> qcomp.Optimizer:
    return qcomp.QAdam(learning_rate=rate, betas=BETAS, freeze=exact, variance_steps=None)


def _zero_one_adam(rate: Rate, _exact: int) -> qcomp.Optimizer:
    return qcomp.ZeroOneAdam(learning_rate=rate, betas=BETAS, variance_steps=GROWING)


def _zero_one_settled(rate: Rate, exact: int) -> qcomp.Optimizer:
    return qcomp.ZeroOneAdam(learning_rate=rate, betas=BETAS, variance_steps=lambda step: step <= exact)


RECIPES = {
    "adam": Recipe("Adam, exact", "#4d4d4d", exact="adam"),
    "onebit_adam": Recipe("1-bit Adam", "#d1495b", _onebit_adam, compressed="onebit_adam"),
    "qadam": Recipe("QAdam, 8 bits", "#3d9970", _qadam, compressed="qadam"),
    "zero_one_adam": Recipe(
        "0/1 Adam", "#7a4fa3", _zero_one_adam, compressed="zero_one_adam", variance_steps=GROWING
    ),
    "sign_hook": Recipe("gradients of 1 bit, Adam", "#e0962b", hook=SIGN, compressed="sign_hook"),
    "qsgd4_hook": Recipe("gradients of 4 bits, Adam", "#2e86ab", hook=QSGD4, compressed="qsgd4_hook"),
}

SETTLED = {
    "adam": (RECIPES["adam"], NEVER),
    "warmup": (RECIPES["onebit_adam"], NEVER),
    "onebit_adam": (RECIPES["onebit_adam"], 2),
    "qadam": (RECIPES["qadam"], 2),
    "zero_one_adam": (Recipe("0/1 Adam", "#7a4fa3", _zero_one_settled), 2),
    "sign_hook": (RECIPES["sign_hook"], NEVER),
    "qsgd4_hook": (RECIPES["qsgd4_hook"], NEVER),
}
"""The timed recipes with their numbers of exact steps; all timed steps of one are in the same stage."""
