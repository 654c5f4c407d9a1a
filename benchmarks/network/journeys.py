"""Loss against seconds, from the loss at each step and the measured seconds of each step's stage."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import page
from matplotlib.figure import Figure

from network.recipes import RECIPES
from network.results import Results
from network.tables import NAMES, NOTHING

__all__ = ["Journey", "blocks", "picture", "seconds_to", "target"]

NEAR = (1.05, 1.02)
"""Largest ratios of a method's lowest loss to exact Adam's; methods above it do not set the target loss."""

TIMES, CHECK = "times", "check-"


@dataclass(frozen=True)
class Journey:
    """The losses of a method, and the stages of its steps."""

    method: str
    steps: int
    ranks: int
    parameters: int
    losses: list[tuple[int, float]]
    stages: list[tuple[str, int]]
    seconds: float
    """Seconds of all steps, on the link where they ran."""
    link: str
    machine: dict[str, Any]

    @property
    def lowest(self) -> float:
        """The lowest loss."""
        return min(loss for _, loss in self.losses)

    def clock(self, times: Mapping[str, float]) -> list[float]:
        """Return the seconds after 0, 1, 2, ... steps, each of which takes the time of its stage in `SETTLED`."""
        recipe = RECIPES[self.method]
        each = [times[recipe.stage(stage)] for stage, count in self.stages for _ in range(count)]
        return [0.0, *accumulate(each)]

    def seconds_to(self, loss: float, times: Mapping[str, float]) -> float | None:
        """Return the seconds until a loss is reached; None if never."""
        return seconds_to(loss, self.losses, self.clock(times))


def seconds_to(loss: float, losses: Sequence[tuple[int, float]], clock: Sequence[float]) -> float | None:
    """Return the seconds until a loss is reached, interpolated between measured losses; None if never reached.

    Parameters
    ----------
    loss : float
    losses : sequence of (int, float)
        Losses after some numbers of steps.
    clock : sequence of float
        Seconds after 0, 1, 2, ... steps.
    """
    for (before, high), (after, low) in pairwise(losses):
        if low <= loss:
            part = 0.0 if high <= loss else (high - loss) / (high - low)
            return clock[before] + part * (clock[after] - clock[before])
    return None


def target(journeys: Sequence[Journey], near: float) -> float:
    """Return the target: the lowest loss that is reached by every method within ``near`` of exact Adam's lowest."""
    exact = min(journey.lowest for journey in journeys if journey.method == "adam")
    return max(journey.lowest for journey in journeys if journey.lowest <= near * exact)


def blocks(results: Results) -> dict[str, str]:
    """Return the tables of the time to a loss."""
    journeys, times = _journeys(results), _times(results)
    if not journeys or not times:
        return {"loss": NOTHING, "check": NOTHING}
    stricter = {target(journeys, near): near for near in NEAR}  # one table if both give the same target
    return {
        "loss": "\n\n".join(_table(journeys, times, near) for near in stricter.values()),
        "check": _checked(results, times) or NOTHING,
    }


def _journeys(results: Results) -> list[Journey]:
    return [_journey(path) for name in RECIPES if (path := results.loss_path(name)).exists()]


def _journey(path: Path) -> Journey:
    return Journey(**json.loads(path.read_text()))


def _times(results: Results) -> dict[str, dict[str, float]]:
    path = results.loss_path(TIMES)
    links = json.loads(path.read_text())["links"] if path.exists() else {}
    return {link: {name: found["median"] for name, found in rows.items()} for link, rows in links.items()}


def _table(journeys: Sequence[Journey], times: Mapping[str, Mapping[str, float]], near: float) -> str:
    wanted = target(journeys, near)
    rows = []
    for journey in journeys:
        recipe = RECIPES[journey.method]
        counts = {stage: sum(n for s, n in journey.stages if s == stage) for stage, _ in journey.stages}
        row = [recipe.label, f"{journey.lowest:.3f}", f"{counts.get('exact', 0)} of {journey.steps}"]
        for link, of_link in times.items():
            taken = journey.seconds_to(wanted, of_link)
            exact = next((j.seconds_to(wanted, of_link) for j in journeys if j.method == "adam"), None)
            own = [f"{1e3 * of_link[recipe.stage(stage)]:.0f}" for stage in counts]
            gain = f", {exact / taken:.2f}x" if exact and taken else ""
            row += [" / ".join(own), f"{taken:.0f}{gain} ({NAMES[link]})" if taken is not None else "never"]
        rows.append(row)
    head = ["", "lowest loss", "exact steps"]
    for link in times:
        head += [f"ms of its steps, {NAMES[link]}", "seconds to the loss, times as fast as Adam"]
    first = journeys[0]
    about = (
        f"{first.parameters:,} parameters, {first.ranks} ranks, {first.steps} steps; the loss waited for is "
        f"{wanted:.3f} nats a byte, the lowest that all methods reach which come within {near - 1:.0%} of exact Adam's "
        "lowest."
    )
    return f"{about}\n\n{page.table(head, rows)}"


def _checked(results: Results, times: Mapping[str, Mapping[str, float]]) -> str:
    rows = []
    for name in RECIPES:
        path = results.loss_path(f"{CHECK}{name}")
        if not path.exists():
            continue
        journey = _journey(path)
        product = journey.clock(times[journey.link])[-1]
        rows.append(
            [
                f"{RECIPES[name].label}, {journey.steps} steps, {NAMES[journey.link]}",
                f"{journey.seconds:.1f}",
                f"{product:.1f}",
                f"{product / journey.seconds - 1:+.0%}",
            ]
        )
    return page.table(["", "seconds by the clock", "steps x measured stages", "off by"], rows) if rows else ""


def picture(results: Results) -> Figure | None:
    """Return the losses against seconds, a panel for each link; None if there are none."""
    journeys, times = _journeys(results), _times(results)
    if not journeys or not times:
        return None
    figure = Figure(figsize=(5.5 * len(times), 5), layout="constrained")
    panels = figure.subplots(1, len(times), squeeze=False)[0]
    for panel, (link, of_link) in zip(panels, times.items(), strict=True):
        for journey in journeys:
            clock, recipe = journey.clock(of_link), RECIPES[journey.method]
            # Without the loss at 0 s, which a logarithmic axis cannot show.
            points = [(clock[step], loss) for step, loss in journey.losses if step > 0]
            panel.plot(*zip(*points, strict=True), color=recipe.colour, marker=".", label=recipe.label)
        for wanted in {target(journeys, near) for near in NEAR}:
            panel.axhline(wanted, color="0.4", lw=1, ls="--")
            panel.annotate(
                f"target {wanted:.3f}",
                (0.01, wanted),
                xycoords=("axes fraction", "data"),
                xytext=(0, 3),
                textcoords="offset points",
                fontsize=9,
            )
        panel.set(xscale="log", xlabel="seconds", title=NAMES[link])
        panel.xaxis.set_major_formatter("{x:g}")
        panel.grid(alpha=0.3, which="both")
    panels[0].set_ylabel("validation loss, nats a byte")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=3, fontsize=9)
    return figure
