"""The runs of the race, the most useful first, and how long they take."""

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from statistics import fmean, median
from typing import Any

from race.methods import MAIN, METHODS, REFERENCE
from race.tasks import TASKS

__all__ = [
    "RATES",
    "SEEDS",
    "Curve",
    "append",
    "best_rate",
    "counting_rate",
    "curves",
    "final",
    "mean",
    "missing",
    "next_rate",
    "of",
    "read",
    "seconds_of",
    "tuned",
]

RATES = (3e-3, 1e-3, 9e-3)
"""The largest learning rates that every method is tried with first, the middle one before the others."""
FACTOR = 2
"""Between the outermost rate of a method and the next one, until its best rate lies between two others."""
SEEDS = 3
TUNED_AS = {task: task for task in ("demo", "transformer", "images", "nanogpt")} | {"long": "demo"}
"""The task whose trainings with 2 ranks and seed 0 determine the learning rate."""
ORDER = [
    ("demo", 2, (0,)),
    ("demo", 2, range(1, SEEDS)),
    ("transformer", 2, (0,)),
    ("demo", 4, (0,)),
    ("transformer", 2, range(1, SEEDS)),
    ("transformer", 4, (0,)),
    ("long", 2, (0,)),
    ("demo", 4, range(1, SEEDS)),
    ("transformer", 4, range(1, SEEDS)),
    ("long", 2, range(1, SEEDS)),
    ("long", 4, range(SEEDS)),
    ("images", 2, (0,)),
    ("images", 2, range(1, SEEDS)),
    ("images", 4, range(SEEDS)),
]
"""Tasks, ranks and seeds, in the order in which they run."""
SEARCHED = ("transformer", 2)
"""The task and the ranks on which the settings of methods are searched."""

Rows = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Curve:
    """A training; the rate is None as long as trainings that determine it are missing."""

    task: str
    ranks: int
    method: str
    rate: float | None
    seed: int

    @property
    def which(self) -> dict[str, Any]:
        """The entries that identify the row of this training."""
        return asdict(self)

    @property
    def cost(self) -> float:
        """The amount of computation, in an arbitrary unit."""
        return self.ranks * TASKS[self.task].cost


def read(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a file, none if it is missing."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def whole(rows: Rows, steps: int | None = None) -> list[Mapping[str, Any]]:
    """Return the rows of trainings with all steps of their task, or with ``steps`` steps, for trials."""
    return [row for row in rows if row["steps"] == (steps or TASKS[row["task"]].steps)]


def append(path: Path, text: str) -> None:
    """Append rows to a file."""
    with path.open("a") as file:
        file.write(text)


def of(rows: Rows, **which: Any) -> list[Mapping[str, Any]]:
    """Return the rows that have these entries."""
    return [row for row in rows if which.items() <= row.items()]


def final(row: Mapping[str, Any]) -> float:
    """Return the validation loss at the end of a training; infinite if it failed."""
    losses: list[tuple[int, float | None]] = row["losses"]
    step, loss = losses[-1]
    return float("inf") if loss is None or step < row["steps"] else loss


def mean(curves: Sequence[Sequence[tuple[int, float | None]]]) -> list[tuple[int, float]]:
    """Return the mean of curves that are judged at the same steps, up to the first step at which one has failed."""
    found = []
    for points in zip(*curves, strict=False):  # a curve that fails is shorter
        (step,), losses = {step for step, _ in points}, [loss for _, loss in points if loss is not None]
        if len(losses) < len(curves):
            break
        found.append((step, fmean(losses)))
    return found


def tuned(rows: Rows, task: str, method: str) -> dict[float, float]:
    """Return the loss at the end for each rate tried so far, with 2 ranks and seed 0."""
    found = of(rows, task=TUNED_AS[task], ranks=2, method=method, seed=0)
    return {row["rate"]: final(row) for row in found if "rate" in row}


def next_rate(rows: Rows, task: str, method: str) -> float | None:
    """Return the rate to try next; None once the best one lies between two others."""
    losses = tuned(rows, task, method)
    for rate in RATES:
        if rate not in losses:
            return rate
    best = min(losses, key=losses.__getitem__)
    if best == min(losses):
        return best / FACTOR
    return best * FACTOR if best == max(losses) else None


def best_rate(rows: Rows, task: str, method: str) -> float | None:
    """Return the rate with the lowest loss at the end; None while it lies at an edge of those tried."""
    losses = tuned(rows, task, method)
    return None if next_rate(rows, task, method) else min(losses, key=losses.__getitem__)


def counting_rate(rows: Rows, task: str, ranks: int, method: str) -> float | None:
    """Return the rate of the trainings that count: among those with the most seeds, the best one; None without any."""
    ended = defaultdict[float, list[float]](list)
    for row in of(rows, task=task, ranks=ranks, method=method):
        ended[row["rate"]].append(final(row))
    most = max(map(len, ended.values()), default=0)
    losses = {rate: fmean(found) for rate, found in ended.items() if len(found) == most}
    return min(losses, key=losses.__getitem__, default=None)


def curves(rows: Rows, methods: Sequence[str] = tuple(METHODS)) -> Iterator[Curve]:
    """Yield all trainings of the race in their order: those of the main methods, then those of the others.

    A rate beyond the first three is among them once the rates before it have been tried. The trials of a search run
    last, each once, at the best rate of the method whose settings they vary.
    """
    main = [method for method in methods if method in MAIN]
    others = [method for method in methods if method not in MAIN and not METHODS[method].varies]
    for some, (task, ranks, seeds) in product((main, others), ORDER):
        if TUNED_AS[task] == task and ranks == 2 and 0 in seeds:
            pairs = sorted(product(RATES, some), key=lambda pair: pair[1] != REFERENCE)  # sets the target
            pairs += [
                (rate, method)
                for method in some
                for rate in (*tuned(rows, task, method), next_rate(rows, task, method))
                if rate is not None and rate not in RATES
            ]
            yield from (Curve(task, ranks, method, rate, 0) for rate, method in pairs)
        else:
            for seed, method in product(seeds, some):
                yield Curve(task, ranks, method, best_rate(rows, task, method), seed)
    task, ranks = SEARCHED
    for method in methods:
        if varied := METHODS[method].varies:
            yield Curve(task, ranks, method, best_rate(rows, task, varied), 0)


def missing(rows: Rows, methods: Sequence[str] = tuple(METHODS)) -> list[Curve]:
    """Return the trainings without a row."""
    return [curve for curve in curves(rows, methods) if not of(rows, **curve.which)]


def seconds_of(curve: Curve, rows: Rows) -> float | None:
    """Estimate the seconds of a training from others of its task, or from its cost; None without any row."""
    alike = of(rows, task=curve.task, ranks=curve.ranks)
    if not alike:
        each = [row["wall"] / Curve(**{name: row[name] for name in curve.which}).cost for row in rows]
        return median(each) * curve.cost if each else None
    own = of(alike, method=curve.method)
    return float(median(row["wall"] for row in own or alike))
