"""Results of the runs: summary.json, curves.json, two pictures and a table."""

import json
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter

from .recipes import RECIPES
from .train import Run

__all__ = ["report", "summary", "table"]

COLOURS = {"adam": "#4d4d4d", "onebit_adam": "#d1495b", "qadam": "#2e86ab", "qsgd": "#e0962b"}
MARKERS = {"adam": "o", "onebit_adam": "s", "qadam": "^", "qsgd": "D"}


def report(runs: Sequence[Run], folder: Path) -> None:
    """Write summary.json, curves.json, loss.png and diagnostics.png into a folder, and print the table."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "summary.json").write_text(json.dumps([summary(run) for run in runs], indent=2) + "\n")
    (folder / "curves.json").write_text(json.dumps([curves(run) for run in runs]) + "\n")
    picture(runs).savefig(folder / "loss.png", dpi=150)
    diagnostics_picture(runs).savefig(folder / "diagnostics.png", dpi=150)
    print(table(runs))
    print(f"\nwritten to {folder}: summary.json, curves.json, loss.png, diagnostics.png")


def ring_bytes(run: Run) -> float:
    """Bytes that a rank sends per step if a ring all-reduce averages all parameters as float32."""
    return 2 * (run.ranks - 1) / run.ranks * 4 * run.parameters


def ratio(uncompressed: float, sent: float) -> float | None:
    """Return the reduction in bytes sent; None if nothing was sent, as with a single rank."""
    return uncompressed / sent if sent else None


def summary(run: Run) -> dict[str, Any]:
    """Return the run's figures by name, ready for JSON."""
    steps = run.settings.steps
    sent = run.history.bytes_sent
    compressed = sent[run.history.warmup_steps :]
    warmup_fraction = run.history.warmup_steps / steps
    stage_ratio = ratio(ring_bytes(run) * len(compressed), sum(compressed))
    return {
        "optimizer": run.settings.optimizer,
        "steps": steps,
        "validation_loss": run.history.validation[-1][1],
        "bytes_sent_per_rank": sum(sent),
        "compression_ratio": ratio(ring_bytes(run) * steps, sum(sent)),
        "seconds": round(run.history.seconds, 1),
        "ranks": run.ranks,
        "seed": run.settings.seed,
        "batch_per_rank": run.settings.batch,
        "learning_rate": run.settings.learning_rate,
        "parameters": run.parameters,
        "exact_elements": run.exact_elements,
        "warmup_steps": run.history.warmup_steps,
        "warmup_fraction": warmup_fraction,
        "compressed_stage_bytes_per_step": sum(compressed) / len(compressed) if compressed else None,
        "compressed_stage_ratio": stage_ratio,
        "predicted_ratio": 1 / (warmup_fraction + (1 - warmup_fraction) / stage_ratio)
        if stage_ratio
        else None,
        "parameters_sha256": run.parameters_sha256,
    }


def curves(run: Run) -> dict[str, Any]:
    """Return the data of the pictures: losses, bytes sent so far and diagnostics, by number of completed steps."""
    sent = list(accumulate(run.history.bytes_sent))
    return {
        "optimizer": run.settings.optimizer,
        "training_loss": run.history.losses,
        "bytes_sent": sent,
        "validation": [
            {"step": step, "bytes_sent": sent[step - 1], "loss": loss}
            for step, loss in run.history.validation
        ],
        "diagnostics": [{"step": step, **report} for step, report in run.history.diagnostics],
    }


def table(runs: Sequence[Run]) -> str:
    """Return the most important figures as aligned text, with each loss compared to the first."""
    rows = [summary(run) for run in runs]
    reference = rows[0]["validation_loss"]
    columns = {
        "optimizer": [RECIPES[row["optimizer"]].label for row in rows],
        "steps": [f"{row['steps']}" for row in rows],
        "warm-up": [f"{row['warmup_steps']}" for row in rows],
        "validation loss": [f"{row['validation_loss']:.4f}" for row in rows],
        "against first": [f"{row['validation_loss'] / reference - 1:+.1%}" for row in rows],
        "MB sent/rank": [f"{row['bytes_sent_per_rank'] / 1e6:.1f}" for row in rows],
        "ratio": [times(row["compression_ratio"]) for row in rows],
        "ratio compressed": [times(row["compressed_stage_ratio"]) for row in rows],
        "seconds": [f"{row['seconds']:.0f}" for row in rows],
    }
    widths = [max(len(name), *map(len, cells)) for name, cells in columns.items()]
    lines = [list(columns), ["-" * width for width in widths], *zip(*columns.values(), strict=True)]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if index else cell.ljust(width)
            for index, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        for line in lines
    )


def times(value: float | None) -> str:
    """Return a ratio as text for the table."""
    return "-" if value is None else f"{value:.2f}x"


def picture(runs: Sequence[Run]) -> Figure:
    """Draw the validation loss against steps and against bytes sent."""
    figure = Figure(figsize=(12, 5), layout="constrained")
    by_step, by_bytes = figure.subplots(1, 2, sharey=True)
    for run in runs:
        name = run.settings.optimizer
        sent = list(accumulate(run.history.bytes_sent))
        steps, losses = zip(*run.history.validation, strict=True)
        style: dict[str, Any] = {
            "label": RECIPES[name].label,
            "color": COLOURS[name],
            "marker": MARKERS[name],
            "markersize": 5,
            "linewidth": 1.8,
        }
        by_step.plot(steps, losses, **style)
        by_bytes.plot([sent[step - 1] / 1e6 for step in steps], losses, **style)
    first = runs[0]
    frame(by_step, "Loss against steps", "training steps")
    for freeze in {run.history.warmup_steps for run in runs} - {0, first.settings.steps}:
        by_step.axvline(freeze, label="variance frozen", color="#888888", linestyle=":", linewidth=1.2)
    by_step.set_ylabel("validation loss (nats per byte)")
    by_step.legend(frameon=False)
    frame(by_bytes, "Loss against bytes", "megabytes sent by each rank")
    if first.ranks > 1:  # a single rank sends nothing
        by_bytes.set_xscale("log")
        by_bytes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        by_bytes.xaxis.set_major_formatter("{x:g}")
        by_bytes.xaxis.set_minor_formatter(NullFormatter())
    figure.suptitle(
        f"Byte-level transformer, {first.parameters / 1e6:.2f} M parameters, "
        f"{first.ranks} ranks with {first.settings.batch} windows a step each"
    )
    return figure


PANELS = {
    "worker_residual": ("What workers owe", "residual over signal, mean of the ranks"),
    "server_residual": ("What servers owe", "residual over mean signal, mean of the ranks"),
    "direction": (
        "Direction of ten compressed means together\n"
        "(of a single one it says little: what it loses, the next ones pay back)",
        "cosine of their sum to the exact one",
    ),
    "bits_per_element": ("Bits sent", "bits an element, mean of the ranks"),
}
"""The title and label of each value that `qcomp.Diagnostics` reports."""


def diagnostics_picture(runs: Sequence[Run]) -> Figure:
    """Plot the diagnostics of each run against steps."""
    figure = Figure(figsize=(12, 8), layout="constrained")
    panels = figure.subplots(2, 2).flat
    for axes, (key, (title, vertical)) in zip(panels, PANELS.items(), strict=True):
        for run in runs:
            found = [(step, report[key]) for step, report in run.history.diagnostics if key in report]
            if not found:
                continue
            name = run.settings.optimizer
            steps, values = zip(*found, strict=True)
            axes.plot(
                steps,
                values,
                label=RECIPES[name].label,
                color=COLOURS[name],
                marker=MARKERS[name],
                markersize=3,
                linewidth=1.4,
            )
            if key != "direction" and min(values) > 0:
                axes.set_yscale("log")
        frame(axes, title, "training steps")
        axes.set_xlim(0, runs[0].settings.steps)
        axes.set_ylabel(vertical)
        if axes.lines:
            axes.legend(frameon=False)
    drifted = sum(report.get("drifted_ranks", 0) for run in runs for _, report in run.history.diagnostics)
    figure.suptitle(
        "Ranks whose parameters drifted from the others': " + (f"{drifted:.0f}" if drifted else "none")
    )
    return figure


def frame(axes: Axes, title: str, horizontal: str) -> None:
    """Set a plot's title and label, and draw a light grid."""
    axes.set_title(title, fontsize=11)
    axes.set_xlabel(horizontal)
    axes.grid(color="#e5e5e5", linewidth=0.8)
    axes.spines[["top", "right"]].set_visible(False)
