"""Draws the matrix: a step of each method relative to computation alone, by link."""

from collections.abc import Sequence

from matplotlib.figure import Figure

from network.launch import LINKS
from network.methods import METHODS
from network.results import Run
from network.tables import NAMES

__all__ = ["picture"]


def picture(runs: Sequence[Run]) -> Figure | None:
    """Return a figure with a panel for each link, model and number of ranks; None if there are no runs."""
    if not runs:
        return None
    links = [link for link in LINKS if any(run.link == link for run in runs)]
    groups = list(dict.fromkeys((run.ranks, run.model) for run in runs))
    methods = [m for m in METHODS if any(m in run.averaging for run in runs)]
    figure = Figure(figsize=(4.2 * len(links), 2.4 * len(groups)), layout="constrained")
    panels = figure.subplots(len(groups), len(links), squeeze=False, sharey=True)
    for (ranks, model), of_group in zip(groups, panels, strict=True):
        for link, panel in zip(links, of_group, strict=True):
            run = next((r for r in runs if (r.ranks, r.model, r.link) == (ranks, model, link)), None)
            shown = [] if run is None else [m for m in methods if m in run.methods]
            if run is None or not shown:
                panel.axis("off")
                continue
            ratios = [run.seconds(m) / run.compute for m in shown]
            drawn = panel.barh(
                [METHODS[m].label for m in shown], ratios, color=[METHODS[m].colour for m in shown]
            )
            panel.bar_label(drawn, labels=[f"{ratio:.2f}" for ratio in ratios], padding=3, fontsize=8)
            panel.axvline(1, color="0.4", lw=1)
            panel.set(xscale="log", xlim=(0.7, 2.2 * max(ratios)))
            panel.xaxis.set_major_formatter("{x:g}")
            panel.xaxis.set_minor_formatter("")  # the bars are labelled
            panel.set_title(f"{model}, {ranks} ranks, {NAMES[link]}", fontsize=9)
            panel.grid(alpha=0.3, axis="x")
        of_group[0].invert_yaxis()
    figure.supxlabel("step over compute alone")
    return figure
