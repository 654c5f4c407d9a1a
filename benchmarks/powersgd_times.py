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
from network.shaped import NetworkError, require_rights

RANKS = 2
ROUNDS = {"100mbit": 7, "1gbit": 15}
STEPS = 120
START = """# PowerSGD

Steps of DistributedDataParallel with AdamW and two ranks, with torch's PowerSGD hook and with
`averaging=qcomp.PowerSGD(rank)`. Each rank has one core of the same machine, and a network of its own with a limit in
each direction. torch's hook has one bucket, since over gloo it aborts with several; qcomp's has buckets of 25 MB. MB
are what a rank sends in a step, as its interface counts it.

    sudo python benchmarks/powersgd_times.py

## Steps
<!-- steps -->
<!-- end of steps -->

## Losses
Each model learns ten batches by heart, on two ranks; all variants start alike, with two exact steps.

<!-- losses -->
<!-- end of losses -->
"""
"""The page before it has tables."""


def main() -> int:
    """Run what is missing, then write the page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--out", type=Path, default=Path("docs/benchmarks/powersgd"), help="(default: %(default)s)")
    add("--rounds", type=int, help="of every measurement (default: what each needs)")
    add("--steps", type=int, default=STEPS, help="of the curves (default: %(default)s)")
    add("--models", nargs="+", choices=list(MODELS), default=list(MODELS), metavar="MODEL")
    add("--links", nargs="+", choices=list(ROUNDS), default=list(ROUNDS), metavar="LINK")
    add("--page", action="store_true", help="only write the tables, from the files")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    if not options.page:
        try:
            require_rights()
            measure(options)
        except NetworkError as error:
            print(f"powersgd_times.py: error: {error}", file=sys.stderr)
            return 2
    write(options)
    return 0


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
    folder = options.out
    runs = [
        json.loads((folder / f"{model}-{link}.json").read_text())
        for model in options.models
        for link in options.links
    ]
    curves = [json.loads((folder / f"{model}-curves.json").read_text()) for model in options.models]
    blocks = {"steps": "\n\n".join(map(steps, runs)), "losses": "\n\n".join(map(ends, curves))}
    if not (folder / page.PAGE).exists():
        (folder / page.PAGE).write_text(START)
    page.rewrite(folder, blocks)
    for text in blocks.values():
        print(f"\n{text}")


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
