"""Time steps of PowerSGD, torch's hook and qcomp's, between network namespaces, and follow the losses.

    sudo python benchmarks/powersgd_times.py          # writes docs/benchmarks/powersgd/
    python benchmarks/powersgd_times.py --page        # only writes the tables, from the files

Needs root and iproute2. Skips runs whose files exist, so it can be stopped and restarted.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import page
from network.launch import launch
from network.models import MODELS
from network.powersgd import EXACT, VARIANTS
from network.program import measure_and_write
from network.tables import NOTHING

RANKS = 2
ROUNDS = {"100mbit": 7, "1gbit": 15}
STEPS = 120


def main() -> int:
    """Run what is missing, then write the page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--out", type=Path, default=Path("docs/benchmarks/powersgd"), help="(default: %(default)s)")
    add("--rounds", type=int, help="of every measurement (default: depends on the link)")
    add("--steps", type=int, default=STEPS, help="of the curves (default: %(default)s)")
    add("--models", nargs="+", choices=list(MODELS), default=list(MODELS), metavar="MODEL")
    add("--links", nargs="+", choices=list(ROUNDS), default=list(ROUNDS), metavar="LINK")
    add("--page", action="store_true", help="only write the tables, from the files")
    return measure_and_write(parser.parse_args(), measure, write)


def measure(options: argparse.Namespace) -> None:
    """Start the runs whose files do not exist yet."""
    for model in options.models:
        program = ["-W", "ignore", "-m", "network.powersgd", "--model", model]
        for link in options.links:
            path = options.out.resolve() / f"{model}-{link}.json"
            if not path.exists():
                rounds = ["--rounds", str(options.rounds or ROUNDS[link])]
                launch("gloo", RANKS, [*program, "--link", link, *rounds, "--out", str(path)])
        path = options.out.resolve() / f"{model}-curves.json"
        if not path.exists():
            curves = ["--steps", str(options.steps), "--out", str(path)]
            launch("gloo", RANKS, [*program, *curves], link="loopback")


def write(options: argparse.Namespace) -> None:
    """Write the tables into the page."""
    runs = [
        found for m in options.models for link in options.links if (found := read(options, f"{m}-{link}"))
    ]
    curves = [found for model in options.models if (found := read(options, f"{model}-curves"))]
    blocks = {
        "steps": "\n\n".join(map(steps, runs)) or NOTHING,
        "losses": "\n\n".join(map(ends, curves)) or NOTHING,
    }
    page.rewrite(options.out, blocks)
    for text in blocks.values():
        print(f"\n{text}")


def read(options: argparse.Namespace, name: str) -> dict[str, Any] | None:
    """Return the contents of a file of the folder; None if it is missing."""
    path = options.out / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else None


def steps(run: dict[str, Any]) -> str:
    """Return the table of the steps of a model on a link."""
    found = run["steps"]
    rows = []
    for variant in found:
        kind, rank = VARIANTS[variant]
        stock = found[EXACT if kind == EXACT else f"torch, rank {rank}"]["seconds"]["median"]
        own = found[variant]["seconds"]
        sent = f"{found[variant]['bytes'] / 1e6:.2f}"
        rows.append([variant, page.cell(own), sent, f"{stock / own['median']:.2f}"])
    head = ["", "s", "MB", "times as fast as torch's"]
    return f"{MODELS[run['model']].label}, {run['link']}. {page.made(run)}\n\n{page.table(head, rows)}"


def ends(run: dict[str, Any]) -> str:
    """Return the table of the last losses of a model."""
    rows = [[name, f"{sum(curve[-20:]) / 20:.4g}"] for name, curve in run["curves"].items()]
    return f"{MODELS[run['model']].label}.\n\n{page.table(['', 'loss, mean of the last 20 steps'], rows)}"


if __name__ == "__main__":
    sys.exit(main())
