"""Compare the method that Autotune chooses with each method chosen by hand, on links between network namespaces.

    sudo python benchmarks/autotune_times.py          # writes docs/benchmarks/autotune/
    python benchmarks/autotune_times.py --page        # only writes the table, from the files

Needs root and iproute2. Skips runs whose files exist, so it can be stopped and restarted.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import page
from network.autotune import STOCK, TUNED
from network.launch import launch
from network.models import MODELS
from network.program import measure_and_write

ROUNDS = {"100mbit": 7, "1gbit": 21, "10gbit": 41}
START = """# Autotune

This page compares steps of DistributedDataParallel with AdamW: with each method chosen by hand, and with the method
that `qcomp.planning.Autotune` chooses on the same link. Each rank is a
[network node](../network/README.md#what-is-measured) whose bandwidth is limited in each direction; all ranks share two
cores.

    sudo python benchmarks/autotune_times.py

<!-- autotune -->
<!-- end of autotune -->
"""
"""The initial page, with an empty table."""


def main() -> int:
    """Run what is missing, then write the page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--out", type=Path, default=Path("docs/benchmarks/autotune"), help="(default: %(default)s)")
    add("--rounds", type=int, help="of every measurement (default: depends on the link)")
    add("--models", nargs="+", choices=list(MODELS), default=list(MODELS), metavar="MODEL")
    add("--links", nargs="+", choices=list(ROUNDS), default=list(ROUNDS), metavar="LINK")
    add("--ranks", nargs="+", type=int, default=[2], help="(default: %(default)s)")
    add("--page", action="store_true", help="only write the table, from the files")
    return measure_and_write(parser.parse_args(), measure, write)


def measure(options: argparse.Namespace) -> None:
    """Start the runs whose files do not exist yet."""
    for path, (model, ranks, link) in runs(options).items():
        if not path.exists():
            program = ["-W", "ignore", "-m", "network.autotune", "--model", model, "--link", link]
            rounds = ["--rounds", str(options.rounds or ROUNDS[link]), "--out", str(path.resolve())]
            launch("gloo", ranks, [*program, *rounds])


def runs(options: argparse.Namespace) -> dict[Path, tuple[str, int, str]]:
    """Return the file of each run."""
    return {
        options.out / f"{model}-{ranks}-{link}.json": (model, ranks, link)
        for model in options.models
        for ranks in options.ranks
        for link in options.links
    }


def write(options: argparse.Namespace) -> None:
    """Write the table into the page."""
    rows = [row(json.loads(path.read_text())) for path in runs(options) if path.exists()]
    head = [
        "",
        "chosen",
        "s",
        "fastest by hand",
        "s",
        "chosen over fastest",
        "chosen over no hook",
        "iterations",
    ]
    block = page.table(head, rows)
    if not (options.out / page.PAGE).exists():
        (options.out / page.PAGE).write_text(START)
    page.rewrite(options.out, {"autotune": block})
    print(block)


def row(run: dict[str, Any]) -> list[str]:
    """Return the choice of a run beside the fastest choice by hand."""
    steps = run["steps"]
    tuned = steps[TUNED]["seconds"]
    medians = {name: found["seconds"]["median"] for name, found in steps.items() if name != TUNED}
    best = min(medians, key=lambda name: medians[name])
    return [
        f"{run['model']}, {run['ranks']} ranks, {run['link']}",
        str(steps[TUNED]["chosen"]),
        page.cell(tuned),
        best,
        page.cell(steps[best]["seconds"]),
        f"{tuned['median'] / medians[best]:.2f}",
        f"{tuned['median'] / medians[STOCK]:.2f}",
        str(steps[TUNED]["iterations"]),
    ]


if __name__ == "__main__":
    sys.exit(main())
