"""Time steps of Muon over a slow link, which exchange after the backward pass or during it, on two network namespaces.

    sudo python benchmarks/muon_times.py             # writes docs/benchmarks/muon_times.json, and its tables
    python benchmarks/muon_times.py --page           # only writes the tables, from the file

Needs root and iproute2.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import page
from network.launch import RATES, launch
from network.muon import COMPUTED, PHASES
from network.program import measure_and_write

RANKS = 2
FILE = "muon_times.json"


def main() -> int:
    """Measure, then write the page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--out", type=Path, default=Path("docs/benchmarks"), help="(default: %(default)s)")
    add("--link", choices=list(RATES), default="1gbit", help="(default: %(default)s)")
    add("--rounds", type=int, default=15, help="(default: %(default)s)")
    add("--page", action="store_true", help="only write the tables, from the file")
    return measure_and_write(parser.parse_args(), measure, write)


def measure(options: argparse.Namespace) -> None:
    """Time all variants."""
    program = ["-W", "ignore", "-m", "network.muon", "--link", options.link, "--rounds", str(options.rounds)]
    launch("gloo", RANKS, [*program, "--out", str((options.out / FILE).resolve())])


def write(options: argparse.Namespace) -> None:
    """Write the tables into the page."""
    document = json.loads((options.out / FILE).read_text())
    page.rewrite(options.out, blocks(document))


def blocks(document: dict[str, Any]) -> dict[str, str]:
    """Return the tables of the page: of the steps, and of what a step does after the backward pass."""
    results = document["results"]
    ratios = ("over computed", "over computed and orthogonalised")
    rows = [
        [name, page.cell(found["seconds"]), *(page.cell(found.get(ratio)) for ratio in ratios)]
        for name, found in results.items()
    ]
    steps = page.table(["", "s", f"over the {COMPUTED}", "over that and the orthogonalisation"], rows)
    rows = [
        [name, *(page.number(1000 * found["phases"][phase]) for phase in PHASES)]
        for name, found in results.items()
        if "phases" in found
    ]
    phases = page.table(["ms", *PHASES], rows)
    return {"muon_times": f"{document['link']}. {page.made(document)}\n\n{steps}\n\n{phases}"}


if __name__ == "__main__":
    sys.exit(main())
