"""Computes the volume of a run: the numbers of exact, compressed and silent steps, and the bytes of each kind."""

from collections.abc import Mapping

import page

import qcomp
from convergence.methods import first
from convergence.training import Run

__all__ = ["compressed_ratio", "table", "volume"]

LONG = 150_000
"""Steps of a pre-training as long as those in the papers."""
WARMUP = 0.15


def compressed_ratio(onebit_adam: Run) -> float:
    """Return the bytes of an exact step relative to a compressed one, from a run of 1-bit Adam with both."""
    exact = first(onebit_adam.steps, WARMUP)
    bytes_exact = 2 * (onebit_adam.ranks - 1) / onebit_adam.ranks * 4 * onebit_adam.parameters
    compressed = (onebit_adam.bytes_sent - exact * bytes_exact) / (onebit_adam.steps - exact)
    return bytes_exact / compressed


def volume(steps: int, exact: int, compressed: int, ratio: float) -> float:
    """Return the volume of only exact steps over that of a run, in which a step may be both exact and compressed."""
    return steps / (exact + compressed / ratio)


def table(runs: Mapping[str, Mapping[int, Run]]) -> str:
    """Return the computed and the measured volumes of 1-bit Adam and 0/1 Adam as a table in Markdown."""
    onebit, zero_one = (next(iter(runs[name].values())) for name in ("onebit_adam", "zero_one_adam"))
    ratio = compressed_ratio(onebit)
    short = onebit.steps
    doubling = qcomp.ZeroOneAdam(learning_rate=1.0, variance_steps=qcomp.DoublingIntervals(4))
    default = qcomp.ZeroOneAdam(learning_rate=1.0)
    plans = [
        ("1-bit Adam, 15% warm-up", short, _frozen(short), onebit.volume_ratio),
        ("1-bit Adam, 15% warm-up", LONG, _frozen(LONG), None),
        ("0/1 Adam, variance intervals double every 4", short, doubling.rounds(short), zero_one.volume_ratio),
        ("0/1 Adam, variance intervals double every 4", LONG, doubling.rounds(LONG), None),
        ("0/1 Adam as it is by default, every 16", LONG, default.rounds(LONG), None),
    ]
    rows = [
        [
            label,
            f"{steps:,}",
            *(f"{count:,}" for count in rounds),
            f"{volume(steps, rounds[0], rounds[1], ratio):.2f}",
            "" if sent is None else f"{sent:.2f}",
        ]
        for label, steps, rounds, sent in plans
    ]
    head = ["optimizer", "steps", "exact", "1 bit", "silent", "volume: float32 over this", "as it was sent"]
    return f"A compressed step sends {ratio:.1f} times less than an exact one.\n\n{page.table(head, rows)}"


def _frozen(steps: int) -> tuple[int, int, int]:
    exact = first(steps, WARMUP)
    return exact, steps - exact, 0
