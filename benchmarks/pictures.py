"""The pictures of the benchmarks."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

__all__ = ["bars", "line", "ratios"]

Rows = Sequence[dict[str, Any]]

COLOURS = {
    "encode, no feedback": "#e0962b",
    "encode in a step": "#d1495b",
    "decode into a buffer": "#2e86ab",
    "decode and add": "#3d9970",
    "finish_mean": "#7b5ea7",
    "momentum": "#8c564b",
    "frozen_step": "black",
}
STYLES = {"pure": ":", "numba": "-"}


def ratios(rows: Rows, path: Path) -> None:
    """Draw time over a copy against size, a panel for each compressor, on NumPy arrays."""
    subjects = list(dict.fromkeys(row["subject"] for row in rows))
    columns = len(subjects) // 2 + 1  # one panel is for the legend
    figure = Figure(figsize=(4.25 * columns, 8), layout="constrained")
    panels = figure.subplots(2, columns, sharex=True, sharey=True)
    for panel, subject in zip(panels.flat, subjects, strict=False):
        for kernels, style in STYLES.items():
            for what, colour in COLOURS.items():
                chosen = [
                    r
                    for r in rows
                    if (r["subject"], r["what"], r["kernels"], r["arrays"])
                    == (subject, what, kernels, "numpy")
                ]
                points = [(r["elements"], r["over_copy"]) for r in chosen]
                line(panel, points, style=style, color=colour, label=f"{what} ({kernels})")
        finish(panel, subject)
    for panel in panels.flat[len(subjects) :]:
        panel.axis("off")
    handles = [Line2D([], [], color=colour, marker="o", ms=4, label=what) for what, colour in COLOURS.items()]
    handles += [Line2D([], [], color="0.4", ls=style, label=kernels) for kernels, style in STYLES.items()]
    panels.flat[-1].legend(handles=handles, loc="center", fontsize=11)
    figure.supylabel("time over a copy of the input")
    figure.savefig(path, dpi=100)


def line(
    panel: Axes, points: Iterable[tuple[float, dict[str, Any]]], *, style: str, color: str, label: str
) -> None:
    """Draw medians with their quartiles, unless there are no points."""
    found = list(points)
    if not found:
        return
    xs, spreads = [x for x, _ in found], [spread for _, spread in found]
    panel.plot(xs, [s["median"] for s in spreads], style, color=color, marker="o", ms=4, label=label)
    low, high = [s["quartiles"][0] for s in spreads], [s["quartiles"][1] for s in spreads]
    panel.fill_between(xs, low, high, color=color, alpha=0.15, lw=0)


def finish(panel: Axes, title: str) -> None:
    """Make both axes logarithmic, and mark the time of a copy."""
    panel.set(xscale="log", yscale="log", xlabel="float32 elements", title=title)
    panel.axhline(1, color="0.6", lw=1)
    panel.grid(alpha=0.3)


def bars(rows: Rows, path: Path) -> None:
    """Draw the comparisons of one size, a panel for each task."""
    tasks = list(dict.fromkeys(row["task"] for row in rows))
    figure = Figure(figsize=(9, 2.2 * len(tasks)), layout="constrained")
    panels = figure.subplots(len(tasks), 1, squeeze=False)[:, 0]
    for panel, task in zip(panels, tasks, strict=True):
        chosen = [row for row in rows if row["task"] == task][::-1]
        medians = [row["over_copy"]["median"] for row in chosen]
        colours = ["#2e86ab" if row["by"].startswith("qcomp") else "0.6" for row in chosen]
        drawn = panel.barh([row["by"] for row in chosen], medians, color=colours)
        panel.bar_label(drawn, labels=[f"{median:.3g}" for median in medians], padding=3)
        panel.set(title=f"{task}, {chosen[0]['elements']:,} elements")
        panel.margins(x=0.12)
    panels[-1].set_xlabel("time over a copy of the input")
    figure.savefig(path, dpi=100)
