"""Draws the milliseconds of a step: of each method over all links, and of a few methods for the README."""

from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter

from network.launch import LINKS, RATES
from network.methods import COMPUTE, METHODS
from network.results import Run
from network.tables import NAMES

__all__ = ["gain", "picture"]

MARKERS = "osD^v<>P"
SHOWN = {
    "none": "DistributedDataParallel",
    "fp16": "with torch's fp16 hook",
    "powersgd1": "with torch's PowerSGD hook",
    "qsgd4": "with qcomp, 4 bits",
    "sign": "with qcomp, 1 bit",
}
"""The methods in the README's picture."""


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


def gain(runs: Sequence[Run]) -> Figure | None:
    """Return a figure with a panel of bars for each limited link, of the first model on two ranks."""
    found = [r for r in runs if (r.model, r.ranks, r.link) in {(runs[0].model, 2, link) for link in RATES}]
    if not found:
        return None
    figure = Figure(figsize=(9, 2.3), layout="constrained")
    for run, panel in zip(found, figure.subplots(1, len(found), sharey=True, squeeze=False)[0], strict=True):
        names = [name for name in reversed(SHOWN) if name in run.methods]
        bars = panel.barh(
            [SHOWN[name] for name in names],
            [run.seconds(name) for name in names],
            color=[METHODS[name].colour for name in names],
        )
        panel.bar_label(bars, fmt="%.2f s", padding=3, fontsize=9)
        panel.axvline(run.compute, color="black", ls="--", lw=1)
        panel.set_title(NAMES[run.link], fontsize=10)
        panel.margins(x=0.25)
        panel.set_xticks([])
        panel.spines[["top", "right", "bottom"]].set_visible(False)
    return figure
