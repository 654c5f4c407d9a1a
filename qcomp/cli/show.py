"""``qcomp show``: training runs as a table and a picture, in text or as a file."""

import argparse
import math
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from qcomp.cli.output import Style, UsageError, guess, print_json, say, style_for, table
from qcomp.cli.runs import Run, read_runs

__all__ = ["EPILOG", "add_arguments", "run", "text_picture"]

EPILOG = """
A log has one JSON dict of numbers per line, one line for each step, such as the reports of qcomp.Diagnostics. An
incomplete last line, as in the log of a running job, is ignored. To write such a line:
  file.write(json.dumps({"step": state.step, "loss": loss, **report}) + "\\n")
It also reads the folders and files that examples/train_lm.py writes, and runs of the convergence study.

examples:
  qcomp show run.jsonl
  qcomp show adam.jsonl onebit.jsonl --metric loss --metric worker_residual
  qcomp show runs/demo --out curves.png
  qcomp show docs/demo --metric bits_per_element --json
"""

_WIDTH, _HEIGHT = 64, 14
_FIRST = ("validation_loss", "loss", "training_loss")
_COLOURS = (31, 34, 32, 35, 36, 33)
_SEVERAL = "*"
"""The mark where points of several runs meet."""
_MARKS = "abcdefghijklmnopqrstuvwxyz"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``qcomp show``."""
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="logs, or folders of them")
    parser.add_argument(
        "--metric",
        action="append",
        metavar="NAME",
        help="series to draw; repeatable (default: the loss, or the first series)",
    )
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="draw a picture into this file instead; needs qcomp[plot]"
    )


def run(options: argparse.Namespace) -> int:
    """Print a table, and draw."""
    try:
        runs = [found for path in options.files for found in read_runs(path)]
    except (OSError, ValueError) as error:
        raise UsageError(str(error)) from error
    if not any(each.series for each in runs):
        raise UsageError(
            f"{', '.join(map(str, options.files))} has figures, but no series over steps to draw"
        )
    _name_apart(runs)
    metrics = _metrics(runs, options.metric)
    if options.out is not None:
        _draw(runs, metrics, options.out)
    if options.json:
        print_json([_document(each, metrics) for each in runs])
        return 0
    say("\n".join(table(_rows(runs, metrics), right=True)))
    if options.out is not None:
        say(f"\nwritten to {options.out}")
        return 0
    for metric in metrics:
        say("\n" + "\n".join(text_picture(runs, metric, style_for(sys.stdout))))
    return 0


def _name_apart(runs: Sequence[Run]) -> None:
    """Append a number to the names of runs that share one."""
    seen: dict[str, int] = {}
    for each in runs:
        seen[each.name] = seen.get(each.name, 0) + 1
        if seen[each.name] > 1:
            each.name = f"{each.name} ({seen[each.name]})"


def _metrics(runs: Sequence[Run], wanted: Sequence[str] | None) -> list[str]:
    known = list(dict.fromkeys(name for each in runs for name in each.series))
    for name in wanted or ():
        if name not in known:
            raise UsageError(f"--metric is {name!r}{guess(name, known)}; expected one of {', '.join(known)}")
    return list(dict.fromkeys(wanted or [next((name for name in _FIRST if name in known), known[0])]))


def _finite(each: Run, metric: str) -> list[tuple[float, float]]:
    return [(x, y) for x, y in each.series.get(metric, ()) if math.isfinite(y)]


def _document(each: Run, metrics: Sequence[str]) -> dict[str, Any]:
    points = {m: [[x, y if math.isfinite(y) else None] for x, y in each.series.get(m, ())] for m in metrics}
    figures = {
        key: None if isinstance(value, float) and not math.isfinite(value) else value
        for key, value in each.figures.items()
    }
    return {"name": each.name, "figures": figures, "metrics": sorted(each.series), "series": points}


def _rows(runs: Sequence[Run], metrics: Sequence[str]) -> list[list[str]]:
    """Return a row for each run: steps, bytes, and the first, least, largest and last value of each metric."""
    head = ["", "run", "steps", "sent"]
    for metric in metrics:
        head += [f"{metric}: first", "least", "largest", "last"]
    rows = [head]
    for mark, each in zip(_marks(len(runs)), runs, strict=True):
        steps = _number(each, "steps") or max((x for s in each.series.values() for x, _ in s), default=0)
        sent = _number(each, "bytes_sent_per_rank") or _number(each, "bytes_sent")
        row = [mark, each.name, f"{steps:g}", "-" if sent is None else f"{sent / 1e6:.1f} MB"]
        for metric in metrics:
            values = [y for _, y in each.series.get(metric, ())]
            finite = [y for y in values if math.isfinite(y)]
            row += (
                [f"{y:.4g}" for y in (values[0], min(finite), max(finite), values[-1])]
                if finite
                else ["-"] * 4
            )
        rows.append(row)
    return rows


def _number(each: Run, name: str) -> float | None:
    """Return a figure, or None if the run has no such number."""
    value = each.figures.get(name)
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None


def _place(value: float, first: float, last: float, cells: int) -> int:
    """Return a value's cell on an axis from ``first`` to ``last``; halves both, since differences may overflow."""
    return round((value / 2 - first / 2) / (last / 2 - first / 2) * (cells - 1))


def _marks(count: int) -> list[str]:
    return [_MARKS[i % len(_MARKS)] for i in range(count)]


def text_picture(runs: Sequence[Run], metric: str, style: Style) -> list[str]:
    """Draw a metric over steps in characters, a letter for each run."""
    points = [_finite(each, metric) for each in runs]
    every = [point for of_run in points for point in of_run]
    if not every:
        return [f"{metric}: no finite values"]
    left, right = min(x for x, _ in every), max(x for x, _ in every)
    low, high = min(y for _, y in every), max(y for _, y in every)
    grid = [[" "] * _WIDTH for _ in range(_HEIGHT)]
    for number, (mark, of_run) in enumerate(zip(_marks(len(runs)), points, strict=True)):
        for x, y in of_run:
            column = _place(x, left, right, _WIDTH) if right > left else 0
            row = _place(y, high, low, _HEIGHT) if high > low else _HEIGHT // 2
            drawn = style.number(mark, _COLOURS[number % len(_COLOURS)])
            grid[row][column] = drawn if grid[row][column] in (" ", drawn) else _SEVERAL
    labels = {0: f"{high:.4g}", _HEIGHT - 1: f"{low:.4g}"}
    width = max(map(len, labels.values()))
    lines = [style.strong(metric)]
    lines += [f"{labels.get(i, ''):>{width}} |{''.join(row).rstrip()}" for i, row in enumerate(grid)]
    ends = f"{left:g}", f"{right:g} steps"
    lines.append(" " * width + " +" + "-" * _WIDTH)
    lines.append(" " * (width + 2) + ends[0] + ends[1].rjust(_WIDTH - len(ends[0])))
    return lines


def _draw(runs: Sequence[Run], metrics: Sequence[str], path: Path) -> None:
    """Draw the metrics over steps into a file; its suffix selects the format."""
    try:
        figures: Any = import_module("matplotlib.figure")
    except ImportError as error:
        raise UsageError(f"--out needs matplotlib: pip install 'qcomp[plot]' ({error})") from error
    figure = figures.Figure(figsize=(7, 3.5 * len(metrics)), layout="constrained")
    for axes, metric in zip(figure.subplots(len(metrics), 1, squeeze=False).flat, metrics, strict=True):
        for each in runs:
            if metric in each.series:
                steps, values = zip(*each.series[metric], strict=True)
                axes.plot(steps, values, label=each.name, marker="." if len(steps) < 50 else "")
        axes.set_ylabel(metric)
        axes.set_xlabel("steps")
        axes.grid(color="#e5e5e5", linewidth=0.8)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False)
    try:
        figure.savefig(path, dpi=150)
    except (OSError, ValueError) as error:
        raise UsageError(f"--out is {str(path)!r}: {error}") from error
