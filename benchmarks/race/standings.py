"""The page of the race: steps to a loss times the seconds of a step."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any

import page
from matplotlib.figure import Figure
from network.journeys import seconds_to
from network.tables import NAMES, NOTHING

from race import plan
from race.methods import MAIN, METHODS, REFERENCE
from race.rank import WARMUP
from race.settings import Settings
from race.tasks import TASKS

__all__ = ["Race", "read", "tables", "write"]

GOALS = {"10mbit": (100, 3), "100mbit": (25, 2), "1gbit": (5, 1.3), "10gbit": (None, 0.95)}
"""The speed-ups that qcomp's best method should reach: over the reference, and over the best of torch and torchft."""
JUDGED = ("transformer", 2)
"""The task and the ranks that the goals are for."""
NEVER = "not reached"
Times = Mapping[tuple[str, str], float]


@dataclass(frozen=True)
class Race:
    """The trainings of a task on a number of ranks, and the seconds of steps on a link.

    Parameters
    ----------
    task : str
    ranks : int
    rows : sequence of mapping
        The rows of all trainings.
    """

    task: str
    ranks: int
    rows: plan.Rows

    @property
    def label(self) -> str:
        """The task, the ranks and the steps."""
        task = TASKS[self.task]
        return f"{task.label}, {self.ranks} ranks, {task.steps} steps"

    @cached_property
    def runs(self) -> dict[str, list[Mapping[str, Any]]]:
        """The trainings of each method with the rate that counts, a row for each seed that counts.

        A seed counts once all main methods that have seed 0 have it, so that all are judged by the same seeds.
        """
        found = {}
        for name in METHODS:
            rate = plan.counting_rate(self.rows, self.task, self.ranks, name)
            own = plan.of(self.rows, task=self.task, ranks=self.ranks, method=name, rate=rate)
            if own:
                found[name] = sorted(own, key=lambda row: row["seed"])
        seeds = {name: {row["seed"] for row in own} for name, own in found.items()}
        shared = [each for name, each in seeds.items() if name in MAIN and 0 in each]
        counting = {0}.union(set.intersection(*shared)) if shared else set(range(plan.SEEDS))
        counted = {name: [row for row in own if row["seed"] in counting] for name, own in found.items()}
        return {name: own for name, own in counted.items() if own}

    def judgement(self, name: str) -> str:
        """Return how many rates a method was tried with, and whether the rate that counts is known to be its best."""
        losses = plan.tuned(self.rows, self.task, name)
        rate = self.runs[name][0]["rate"]
        best = min(losses, key=losses.__getitem__, default=rate)
        tried = f"{len(losses)} tried"
        if best != rate and (self.ranks, plan.TUNED_AS[self.task]) == (2, self.task):
            return f"{tried}, {best:g} is better with seed 0"
        return f"{tried}, at an edge" if plan.next_rate(self.rows, self.task, name) else tried

    @cached_property
    def target(self) -> float:
        """The loss to reach: the mean over seeds of the reference's final loss; NaN if it is missing."""
        own = self.losses(REFERENCE) if REFERENCE in self.runs else []
        return own[-1][1] if own and own[-1][0] == self.runs[REFERENCE][0]["steps"] else math.nan

    def losses(self, name: str) -> list[tuple[int, float]]:
        """Return the mean over seeds of a method's losses after some numbers of steps."""
        return plan.mean([row["losses"] for row in self.runs[name]])

    def reached(self, name: str, times: Times | None = None) -> float | None:
        """Return the seconds, or without times the steps, until a method's mean loss is the target; None if never."""
        return seconds_to(self.target, self.losses(name), clock(self.runs[name][0], times))

    def misses(self, name: str) -> bool:
        """Return whether a method never reaches the target, although it was tried with the first three rates."""
        trained = name in self.runs and plan.tuned(self.rows, self.task, name).keys() >= set(plan.RATES)
        return trained and not math.isnan(self.target) and self.reached(name) is None

    def never(self, name: str) -> str:
        """Return the words for a method that does not reach the target, which another rate might."""
        known = self.misses(name) and self.judgement(name).endswith("tried")
        return NEVER if known else f"{NEVER} at this rate"

    def timed(self, times: Times) -> list[str]:
        """Return the methods whose phases are all timed."""
        return [name for name, runs in self.runs.items() if set(phases(runs[0])) <= times.keys()]


def phases(row: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the method and the phase whose time each step of a training takes."""
    name, steps = row["method"], row["steps"]
    method = METHODS[name]
    settings = Settings(lambda _: 0.0, max(1, round(WARMUP * steps)), TASKS[row["task"]].every)
    return [method.timed_as(name, method.phase(step, settings)) for step in range(steps)]


def clock(row: Mapping[str, Any], times: Times | None) -> list[float]:
    """Return the seconds after 0, 1, 2, ... steps, or without times the numbers of steps."""
    each = [1.0] * row["steps"] if times is None else [times[phase] for phase in phases(row)]
    return [0.0, *accumulate(each)]


def times_of(seconds: plan.Rows, task: str, ranks: int, link: str) -> dict[tuple[str, str], float]:
    """Return the median seconds of each phase of each method; steps of a long training are those of the demo."""
    found = plan.of(seconds, task=plan.TUNED_AS[task], ranks=ranks, link=link)
    return {(row["method"], row["phase"]): row["seconds"]["median"] for row in found}


def write(folder: Path) -> None:
    """Write the tables into the page, and draw a picture of each link."""
    files = read(folder)
    blocks = tables(**files)
    races = list(of_rows(files["curves"]))
    pictures = []
    for link in [None, *GOALS]:
        figure = picture(races, files["seconds"], link)
        if figure is not None:
            name, title = (link, NAMES[link]) if link else ("steps", "Losses over steps")
            figure.savefig(folder / f"{name}.png", dpi=80)
            pictures.append(f"![{title}]({name}.png)")
    blocks["pictures"] = "\n\n".join(pictures) or NOTHING
    page.rewrite(folder, blocks)
    for name, text in blocks.items():
        print(f"\n{name}\n{text}")


def read(folder: Path) -> dict[str, plan.Rows]:
    """Return the rows of the files of a folder, without trials of fewer steps."""
    files = {name: plan.read(folder / f"{name}.jsonl") for name in ("seconds", "checks")}
    return {"curves": plan.whole(plan.read(folder / "curves.jsonl")), **files}


def of_rows(curves: plan.Rows) -> Iterator[Race]:
    """Yield the races that the reference has taken part in."""
    for task in TASKS:
        for ranks in (2, 4):
            race = Race(task, ranks, curves)
            if REFERENCE in race.runs:
                yield race


def tables(curves: plan.Rows, seconds: plan.Rows, checks: plan.Rows) -> dict[str, str]:
    """Return the tables of the page by name."""
    races = list(of_rows(curves))
    made = {"steps": [steps(race) for race in races]}
    made["seconds"] = [table for race in races if (table := on_links(race, seconds))]
    made["goals"] = [table for race in races if (table := against_goals(race, seconds))]
    made["check"] = [table] if (table := checked(checks, seconds)) else []
    made["missing"] = [left_out(curves, seconds)]
    return {name: "\n\n".join(found) or NOTHING for name, found in made.items()}


def steps(race: Race) -> str:
    """Return the table of the losses of a race, and of the steps to the target."""
    rows = []
    for name, runs in race.runs.items():
        ended = [row for row in runs if "failed" not in row]
        after = race.reached(name)
        rows.append(
            [
                label(name),
                f"{runs[0]['rate']:g} ({race.judgement(name)})",
                mean([plan.final(row) for row in ended], 3),
                f"{after:.0f}"
                if after is not None
                else NEVER
                if race.misses(name)
                else f"{NEVER} at this rate",
                mean([row["held_out"] for row in ended], 3),
                mean([100 * row["accuracy"] for row in ended], 1),
                str(len(runs)),
            ]
        )
    head = ["", "rate (tried)", "validation loss at the end", "steps to the target"]
    head += ["loss on other files", "right predictions there, %", "seeds"]
    of_target = f"The target is {race.target:.3f} nats."
    return f"**{race.label[0].upper()}{race.label[1:]}.** {of_target}\n\n{page.table(head, rows)}"


def on_links(race: Race, seconds: plan.Rows) -> str:
    """Return the table of the seconds to the target, or nothing if none are measured."""
    links = {link: times_of(seconds, race.task, race.ranks, link) for link in GOALS}
    links = {link: times for link, times in links.items() if race.timed(times)}
    rows = []
    for name in race.runs if links else ():
        row = [label(name)]
        for times in links.values():
            cell = race.never(name) if race.misses(name) else "not measured"
            if name in race.timed(times):
                after = race.reached(name, times)
                gain = gain_over(race, REFERENCE, after, times)
                cell = race.never(name) if after is None else f"{page.number(after)}{gain}"
            row.append(cell)
        rows.append([*row, str(len(race.runs[name]))])
    if not rows:
        return ""
    fewest = {
        link: min(
            row["rounds"]
            for row in plan.of(seconds, task=plan.TUNED_AS[race.task], ranks=race.ranks, link=link)
        )
        for link in links
    }
    columns = [
        f"{NAMES[link]}, {count} rounds: seconds, times as fast as DDP" for link, count in fewest.items()
    ]
    head = ["", *columns, "seeds"]
    return f"**{race.label[0].upper()}{race.label[1:]}.**\n\n{page.table(head, rows)}"


def gain_over(race: Race, other: str, after: float | None, times: Times) -> str:
    """Return how many times as fast as another method, as text; empty if either never reaches the target."""
    theirs = race.reached(other, times) if other in race.timed(times) else None
    return f", {theirs / after:.2f}x" if after and theirs else ""


def against_goals(race: Race, seconds: plan.Rows) -> str:
    """Return the table of the best of qcomp against the reference and the best peer, or nothing without times."""
    rows = []
    for link, goals in GOALS.items():
        over_reference, over_peer = goals if (race.task, race.ranks) == JUDGED else (None, None)
        times = times_of(seconds, race.task, race.ranks, link)
        best: dict[bool, tuple[float, str]] = {}
        for name in race.timed(times):
            after = race.reached(name, times)
            if after is not None:
                peer = METHODS[name].peer
                best[peer] = min(best.get(peer, (math.inf, "")), (after, name))
        if len(best) < 2:
            continue
        (ours, own), (theirs, other) = best[False], best[True]
        reference = race.reached(REFERENCE, times) if REFERENCE in race.timed(times) else None
        row = [NAMES[link], METHODS[own].label, f"{reference / ours:.2f}" if reference else "not measured"]
        row += [str(over_reference or ""), METHODS[other].label, f"{theirs / ours:.2f}", str(over_peer or "")]
        rows.append(row)
    if not rows:
        return ""
    head = ["", "best of qcomp", "times as fast as DDP, AdamW", "goal", "best of others"]
    head += ["times as fast as it", "goal"]
    return f"**{race.label[0].upper()}{race.label[1:]}.**\n\n{page.table(head, rows)}"


def checked(checks: plan.Rows, seconds: plan.Rows) -> str:
    """Return the table of short trainings by the clock, or nothing."""
    rows = []
    for row in checks:
        times = times_of(seconds, row["task"], row["ranks"], row["link"])
        if set(phases(row)) <= times.keys():
            product = clock(row, times)[-1]
            what = (
                f"{METHODS[row['method']].label}, {row['task']}, {row['steps']} steps, {NAMES[row['link']]}"
            )
            off = f"{product / row['seconds'] - 1:+.0%}"
            rows.append([what, f"{row['seconds']:.1f}", f"{product:.1f}", off])
    head = ["", "seconds by the clock", "steps x measured steps", "off by"]
    return page.table(head, rows) if rows else ""


def left_out(curves: plan.Rows, seconds: plan.Rows) -> str:
    """Return the table that shows which runs are still missing."""
    rows = []
    for task in TASKS:
        for ranks in (2, 4):
            cells = []
            for methods in (MAIN, [method for method in METHODS if method not in MAIN]):
                wanted = [c for c in plan.curves(curves, methods) if (c.task, c.ranks) == (task, ranks)]
                there = sum(bool(plan.of(curves, **curve.which)) for curve in wanted)
                cells.append(f"{there} of {len(wanted)}")
            race = Race(task, ranks, curves)
            arriving = {name for name in MAIN if not race.misses(name)}
            timed = [
                NAMES[link]
                for link in GOALS
                if arriving <= {name for name, _ in times_of(seconds, task, ranks, link)}
            ]
            rows.append([task, str(ranks), *cells, ", ".join(timed) or "none"])
    head = ["task", "ranks", f"trainings of the {len(MAIN)} main methods", "of the others"]
    return page.table([*head, "links on which all main methods that reach the target are timed"], rows)


def picture(races: Sequence[Race], seconds: plan.Rows, link: str | None) -> Figure | None:
    """Return the losses against seconds on a link, a panel a race, or against steps; None without any."""
    chosen = []
    for race in races:
        times = times_of(seconds, race.task, race.ranks, link) if link else None
        names = list(race.runs) if times is None else race.timed(times)
        if names:
            chosen.append((race, times, names))
    if not chosen:
        return None
    figure = Figure(figsize=(max(9.0, 7.0 * len(chosen)), 7.5), layout="constrained")
    for panel, (race, times, names) in zip(
        figure.subplots(1, len(chosen), squeeze=False)[0], chosen, strict=True
    ):
        colours = {name: f"C{number % 10}" for number, name in enumerate(METHODS)}
        lowest = race.target
        for name in names:
            after = clock(race.runs[name][0], times)
            points = [(after[step], loss) for step, loss in race.losses(name) if step]
            lowest = min([lowest, *(loss for _, loss in points)])
            style = ":" if METHODS[name].peer else ("-", "--")[list(METHODS).index(name) // 10 % 2]
            panel.plot(*zip(*points, strict=True), style, color=colours[name], label=label(name))
        panel.axhline(race.target, color="0.4", lw=1)
        panel.set(title=race.label, xlabel="seconds" if link else "steps", ylim=(lowest - 0.05, lowest + 1.5))
        if link:
            panel.set_xscale("log")
        panel.grid(alpha=0.3, which="both")
    figure.axes[0].set_ylabel("validation loss, nats")
    longest = max(figure.axes, key=lambda panel: len(panel.lines))
    figure.legend(
        *longest.get_legend_handles_labels(), loc="outside lower center", ncols=len(chosen) + 1, fontsize=8
    )
    return figure


def label(name: str) -> str:
    """Return a method's label, which says whether it is one of qcomp."""
    method = METHODS[name]
    return method.label if method.peer else f"qcomp: {method.label}"


def mean(values: Sequence[float], digits: int) -> str:
    """Return a mean as text, with the range if there are several values."""
    if not values:
        return "failed"
    spread = f" ({min(values):.{digits}f} to {max(values):.{digits}f})" if len(values) > 1 else ""
    return f"{sum(values) / len(values):.{digits}f}{spread}"
