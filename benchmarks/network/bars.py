"""Draws the matrix: the milliseconds of a step of each method, over the links."""

from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter

from network.launch import LINKS
from network.methods import COMPUTE, METHODS
from network.results import Run
from network.tables import NAMES

__all__ = ["picture"]

MARKERS = "osD^v<>P"


def picture(runs: Sequence[Run]) -> Figure | None:
    """Return a figure with a column for each model and a row for each number of ranks; None if there are no runs."""
    if not runs:
        return None
    models, counts = (list(dict.fromkeys(getattr(run, name) for run in runs)) for name in ("model", "ranks"))
    links = [link for link in LINKS if any(run.link == link for run in runs)]
    figure = Figure(figsize=(5.2 * len(models), 3.6 * len(counts) + 0.9), layout="constrained")
    panels = figure.subplots(len(counts), len(models), squeeze=False, sharex=True)
    handles: dict[str, Any] = {}
    for ranks, row in zip(counts, panels, strict=True):
        for model, panel in zip(models, row, strict=True):
            of_panel = {run.link: run for run in runs if (run.ranks, run.model) == (ranks, model)}
            if not of_panel:
                panel.axis("off")
                continue
            handles |= _draw(panel, of_panel, links)
            panel.set_title(f"{model}, {ranks} ranks")
    for row in panels:
        row[0].set_ylabel("ms a step")
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=3, fontsize=9)
    return figure


def _draw(panel: Axes, runs: dict[str, Run], links: Sequence[str]) -> dict[str, Any]:
    """Draw a line for each method, and return the lines by their labels."""
    lines = {}
    for marker, (name, method) in zip(MARKERS, _averaging(), strict=False):
        points = [
            (links.index(link), 1e3 * run.seconds(name)) for link, run in runs.items() if name in run.methods
        ]
        if points:
            (lines[method.label],) = panel.plot(
                *zip(*points, strict=True), marker=marker, ms=5, lw=1.3, color=method.colour
            )
    points = [(links.index(link), 1e3 * run.compute) for link, run in runs.items()]
    (lines[METHODS[COMPUTE].label],) = panel.plot(*zip(*points, strict=True), color="black", ls="--", lw=1)
    panel.set(yscale="log", xlim=(-0.3, len(links) - 0.7))
    panel.set_xticks(range(len(links)), [NAMES[link] for link in links])
    panel.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    panel.yaxis.set_major_formatter("{x:g}")
    panel.yaxis.set_minor_formatter(NullFormatter())
    panel.grid(alpha=0.3)
    return lines


def _averaging() -> list[tuple[str, Any]]:
    return [(name, method) for name, method in METHODS.items() if name != COMPUTE]
