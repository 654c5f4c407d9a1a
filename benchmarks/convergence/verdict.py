"""Makes the tables and pictures of the study from the files of its runs."""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean, stdev

import page
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter

from convergence.methods import BASELINE, METHODS
from convergence.task import Task
from convergence.training import Run
from convergence.volume import table as volume_table

__all__ = ["Paired", "read", "write"]


class Paired:
    """Comparison of a method's final metric with the baseline, seed by seed.

    Parameters
    ----------
    method, baseline : mapping of int to Run
        Runs by seed; only seeds in both are compared.
    """

    def __init__(self, method: Mapping[int, Run], baseline: Mapping[int, Run]) -> None:
        seeds = sorted(method.keys() & baseline.keys())
        finals = [method[seed].final for seed in seeds]
        exact = [baseline[seed].final for seed in seeds]
        differences = [a - b for a, b in zip(finals, exact, strict=True)]
        self.seeds = len(seeds)
        self.mean, self.spread = mean(finals), _spread(finals)
        self.difference, self.difference_spread = mean(differences), _spread(differences)
        self.baseline_spread = _spread(exact)
        self.volume_ratio = mean(method[seed].volume_ratio for seed in seeds)

    @property
    def keeps_up(self) -> bool:
        """Whether the mean difference is at most one standard deviation of the baseline over seeds."""
        return self.difference <= self.baseline_spread


def _spread(values: Sequence[float]) -> float:
    return stdev(values) if len(values) > 1 else math.nan


def _with_spread(value: float, spread: float, *, sign: str = "") -> str:
    return f"{value:{sign}.4f}" if math.isnan(spread) else f"{value:{sign}.4f} ± {spread:.4f}"


def read(folder: Path) -> dict[str, dict[str, dict[int, Run]]]:
    """Return all runs by task, method and seed."""
    found: dict[str, dict[str, dict[int, Run]]] = {}
    for path in sorted(folder.glob("*.json")):
        run = Run(**json.loads(path.read_text()))
        found.setdefault(run.task, {}).setdefault(run.method, {})[run.seed] = run
    return found


def write(out: Path, tasks: Mapping[str, type[Task]]) -> None:
    """Draw a picture for each task that has runs, and write its table into the page."""
    blocks = {}
    found = read(out / "runs")
    if {"onebit_adam", "zero_one_adam"} <= found.get("language_model", {}).keys():
        blocks["volume"] = volume_table(found["language_model"])
    for name, of_task in found.items():
        picture(of_task, tasks[name]).savefig(out / f"{name}.png", dpi=120)
        blocks[name] = table(of_task, tasks[name])
        print(f"\n{name}\n{blocks[name]}")
    page.rewrite(out, blocks)


def table(of_task: Mapping[str, Mapping[int, Run]], task: type[Task]) -> str:
    """Return a task's table, in Markdown."""
    baseline = of_task[BASELINE]
    run = next(iter(baseline.values()))
    rows = []
    for name, method in METHODS.items():
        if name not in of_task:
            continue
        result = Paired(of_task[name], baseline)
        several = result.seeds > 1  # one seed has no standard deviation
        verdict = "" if name == BASELINE or not several else "yes" if result.keeps_up else "**no**"
        difference = (
            "" if name == BASELINE else _with_spread(result.difference, result.difference_spread, sign="+")
        )
        rows.append(
            [
                method.label,
                _with_spread(result.mean, result.spread),
                difference,
                verdict,
                f"{result.volume_ratio:.2f}",
                str(result.seeds),
            ]
        )
    head = [
        "optimizer",
        task.metric,
        "minus Adam's, by seed",
        "keeps up",
        "volume: float32 over this",
        "seeds",
    ]
    about = f"{run.steps} steps, {run.ranks} ranks, {run.parameters:,} parameters."
    return f"{about}\n\n{page.table(head, rows)}"


WIDE = (1, 1.2, 1.5, 2, 3, 4, 5, 7)
NARROW = (1, 1.2, 1.4, 1.6, 1.8, 2, 2.2, 2.4, 2.6, 2.8, 3, 3.5, 4, 5, 6, 7, 8, 9)
"""The ticks in a decade of a logarithmic axis that shows a wide or a narrow range."""


def picture(of_task: Mapping[str, Mapping[int, Run]], task: type[Task]) -> Figure:
    """Return a plot of the mean curve of each method over seeds, with a band of one standard deviation."""
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    for name, method in METHODS.items():
        runs = list(of_task.get(name, {}).values())
        if len(runs) < (2 if method.tried else 1):  # one run of an added method is only for the table
            continue
        steps = [step for step, _ in runs[0].curve]
        values = [[value for _, value in run.curve] for run in runs]
        middle = [mean(at) for at in zip(*values, strict=True)]
        axes.plot(steps, middle, color=method.colour, label=method.label)
        if len(runs) > 1:
            spread = [stdev(at) for at in zip(*values, strict=True)]
            low = [m - s for m, s in zip(middle, spread, strict=True)]
            high = [m + s for m, s in zip(middle, spread, strict=True)]
            axes.fill_between(steps, low, high, color=method.colour, alpha=0.15, linewidth=0)
    axes.set(xlabel="step", ylabel=task.metric, yscale="log", title=task.title)
    least, most = axes.get_ylim()
    axes.yaxis.set_major_locator(LogLocator(subs=NARROW if most < 4 * least else WIDE))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.grid(visible=True, which="both", alpha=0.2)
    axes.legend()
    return figure
