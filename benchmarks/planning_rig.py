"""Check the cost model with 2 to 16 ranks on links between network namespaces; ranks sleep instead of computing.

    sudo python benchmarks/planning_rig.py          # writes docs/benchmarks/scale/
    python benchmarks/planning_rig.py --page        # only writes the table, from the files

Needs root and iproute2. Skips runs whose files exist, so it can be stopped and restarted.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import page
from network.launch import RATES, launch
from network.program import measure_and_write
from network.scale import METHODS

START = """# The cost model with 2 to 16 ranks

Every rank has a network of its own with a limit in each direction; all share two cores. So ranks do not compute
gradients, but sleep for as long. Encoding and decoding are real, and were measured on all ranks at once, as
`qcomp plan --measure` does. Predictions use these measurements alone; nothing is fitted.

    sudo python benchmarks/planning_rig.py

<!-- scale -->
<!-- end of scale -->
"""
"""The initial page, with an empty table."""


def main() -> int:
    """Run what is missing, then write the page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--out", type=Path, default=Path("docs/benchmarks/scale"), help="(default: %(default)s)")
    add("--rounds", type=int, default=7, help="of every measurement (default: %(default)s)")
    add("--links", nargs="+", choices=list(RATES), default=["100mbit"], metavar="LINK")
    add("--ranks", nargs="+", type=int, default=[2, 4, 8, 16], help="(default: %(default)s)")
    add("--page", action="store_true", help="only write the table, from the files")
    return measure_and_write(parser.parse_args(), measure, write)


def measure(options: argparse.Namespace) -> None:
    """Start the runs whose files do not exist yet."""
    for path, (ranks, link) in runs(options).items():
        if not path.exists():
            program = ["-W", "ignore", "-m", "network.scale", "--link", link]
            rounds = ["--rounds", str(options.rounds), "--out", str(path.resolve())]
            launch("gloo", ranks, [*program, *rounds])


def runs(options: argparse.Namespace) -> dict[Path, tuple[int, str]]:
    """Return the file of each run."""
    return {options.out / f"{n}-{link}.json": (n, link) for link in options.links for n in options.ranks}


def write(options: argparse.Namespace) -> None:
    """Write the table into the page."""
    block = table([json.loads(path.read_text()) for path in runs(options) if path.exists()])
    if not (options.out / page.PAGE).exists():
        (options.out / page.PAGE).write_text(START)
    page.rewrite(options.out, {"scale": block})
    print(block)


def table(runs: list[dict[str, Any]]) -> str:
    """Return measured and predicted steps, in Markdown."""
    rows = [
        [
            f"{run['ranks']} ranks, {run['link']}",
            name,
            f"{1e3 * found['seconds']['median']:.0f}",
            f"{1e3 * found['predicted']:.0f}",
            f"{found['predicted'] / found['seconds']['median'] - 1:+.0%}",
        ]
        for run in runs
        for name, found in run["steps"].items()
        if name in METHODS
    ]
    return page.table(["", "method", "measured, ms a step", "predicted", "off by"], rows)


if __name__ == "__main__":
    sys.exit(main())
