"""Time steps of FSDP2 over 1 Gbit/s between network namespaces, and follow the losses.

    sudo python benchmarks/sharded_times.py          # writes docs/benchmarks/sharded/
    python benchmarks/sharded_times.py --page        # only draws and writes the tables, from the files

Needs root and iproute2. Skips runs whose files exist, so it can be stopped and restarted.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import page
from network.launch import launch
from network.models import MODELS
from network.program import measure_and_write

RANKS = 2
ROUNDS = {"1gbit": 7}
STOCK = "bfloat16"
"""The variant that others are compared with, the best one of torch."""
CURVES = (
    "float32",
    "bfloat16",
    "4-bit gradients",
    "4-bit gradients, 8-bit weights",
    "4-bit gradients and changes",
)
STEPS = 120


def main() -> int:
    """Run what is missing, then write the page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--out", type=Path, default=Path("docs/benchmarks/sharded"), help="(default: %(default)s)")
    add("--rounds", type=int, help="of every measurement (default: depends on the link)")
    add("--steps", type=int, default=STEPS, help="of the curves (default: %(default)s)")
    add("--page", action="store_true", help="only draw and write the tables, from the files")
    return measure_and_write(parser.parse_args(), measure, write)


def measure(options: argparse.Namespace) -> None:
    """Start the runs whose files do not exist yet."""
    program = ["-W", "ignore", "-m", "network.sharded"]
    for model in MODELS:
        for link, usual in ROUNDS.items():
            path = options.out.resolve() / f"{model}-{link}.json"
            if not path.exists():
                rounds = ["--rounds", str(options.rounds or usual)]
                launch(
                    "gloo", RANKS, [*program, "--model", model, "--link", link, *rounds, "--out", str(path)]
                )
    path = options.out.resolve() / "curves.json"
    if not path.exists():
        curves = ["--variants", *CURVES, "--steps", str(options.steps)]
        launch(
            "gloo", RANKS, [*program, "--model", "transformer", *curves, "--out", str(path)], link="loopback"
        )


def write(options: argparse.Namespace) -> None:
    """Draw the losses, and write the tables into the page."""
    folder = options.out
    runs = [json.loads((folder / f"{model}-{link}.json").read_text()) for model in MODELS for link in ROUNDS]
    losses = json.loads((folder / "curves.json").read_text())
    draw(losses["curves"], folder / "losses.png")
    blocks = {"steps": "\n\n".join(map(steps, runs)), "losses": ends(losses)}
    page.rewrite(folder, blocks)
    for text in blocks.values():
        print(f"\n{text}")


def steps(run: dict[str, Any]) -> str:
    """Return the table of the steps of a model on a link."""
    head = ["", "weights freed: s", "MB", f"over {STOCK}", "weights kept: s", "MB", f"over {STOCK}"]
    rows = []
    for variant in run["steps"]["freed"]:
        row = [variant]
        for found in run["steps"].values():
            ratio = found[STOCK]["seconds"]["median"] / found[variant]["seconds"]["median"]
            row += [
                page.cell(found[variant]["seconds"]),
                f"{found[variant]['bytes'] / 1e6:.1f}",
                f"{ratio:.2f}",
            ]
        rows.append(row)
    title = f"{MODELS[run['model']].label}, {run['link']}. {page.made(run)}"
    return f"{title}\n\n{page.table(head, rows)}"


def ends(run: dict[str, Any]) -> str:
    """Return the table of the last losses."""
    rows = [[name, f"{sum(curve[-20:]) / 20:.3f}"] for name, curve in run["curves"].items()]
    return page.table(["", "loss, mean of the last 20 steps"], rows)


def draw(curves: dict[str, list[float]], path: Path) -> None:
    """Draw the losses, each a mean over ten steps."""
    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    for name, curve in curves.items():
        blocks = [sum(curve[i : i + 10]) / 10 for i in range(0, len(curve) - 9, 10)]
        axes.plot([10 * i + 5 for i in range(len(blocks))], blocks, label=name)
    axes.set(xlabel="step", ylabel="loss", title="FSDP2 with and without compression, two ranks")
    axes.legend(frameon=False)
    figure.savefig(path, dpi=100)


if __name__ == "__main__":
    sys.exit(main())
