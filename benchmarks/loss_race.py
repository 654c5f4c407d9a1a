"""Race to a loss: methods with AdamW and with Muon, of torch, torchft and qcomp, on links of 10 Mbit/s to 10 Gbit/s.

    python benchmarks/loss_race.py --parts curves --hours 8     # trains; needs no root
    sudo python benchmarks/loss_race.py --parts seconds checks  # times steps; needs root and iproute2
    python benchmarks/loss_race.py --page                       # only draws and writes the tables, from the files

Appends a row to a file in docs/benchmarks/loss as soon as a run is done, and skips runs that have a row, so it can be
stopped and restarted at any time. The most useful runs come first.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from network.launch import RankError, launch, launch_here
from network.shaped import NetworkError, require_rights
from race import plan
from race.methods import METHODS, REFERENCE
from race.standings import write
from race.tasks import TASKS

PARTS = ("curves", "seconds", "checks")
ROUNDS = {"10mbit": 2, "100mbit": 5, "1gbit": 9, "10gbit": 15}
AT_ONCE = 6
"""Methods that take turns in one process of a rank; more models need more memory."""
CHECKED = (REFERENCE, "muon_4_1", "torchft_muon", "sparse_often_blocks")
CHECK_LINK, CHECK_STEPS, CHECK_RATE = "1gbit", 60, 1e-3
LIMIT = 6 * 3600
"""Seconds after which a run counts as hung."""


def main() -> int:
    """Run what is missing, then write the page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add, default = parser.add_argument, "(default: %(default)s)"
    add("--out", type=Path, default=Path("docs/benchmarks/loss"), help=default)
    add("--parts", nargs="+", choices=PARTS, default=list(PARTS), metavar="PART", help=default)
    add("--tasks", nargs="+", choices=list(TASKS), default=list(TASKS), metavar="TASK", help=default)
    add("--methods", nargs="+", choices=list(METHODS), default=list(METHODS), metavar="METHOD")
    add("--ranks", nargs="+", type=int, choices=(2, 4), default=[2, 4], help=default)
    add("--links", nargs="+", choices=list(ROUNDS), default=list(ROUNDS), metavar="LINK", help=default)
    add("--rates", nargs="+", type=float, metavar="RATE", help="only these (default: all that are missing)")
    add("--seeds", nargs="+", type=int, choices=range(plan.SEEDS), default=range(plan.SEEDS), metavar="SEED")
    add("--rounds", type=int, help="of every measurement, at least 2 (default: what each link needs)")
    add("--steps", type=int, help="of every training, for a trial (default: those of the task)")
    add("--hours", type=float, default=float("inf"), help="begin no run that ends later (default: no limit)")
    add("--page", action="store_true", help="only draw and write the tables, from the files")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    options.until = time.monotonic() + 3600 * options.hours
    failed = False
    if not options.page:
        try:
            if set(options.parts) - {"curves"}:
                require_rights()
            for part in options.parts:
                failed |= DO[part](options)
        except NetworkError as error:
            print(f"loss_race.py: error: {error}", file=sys.stderr)
            return 2
        except KeyboardInterrupt:
            print("loss_race.py: stopped; start it again to go on", file=sys.stderr)
            return 130
    write(options.out)
    return 1 if failed else 0


def run(
    options: argparse.Namespace, part: str, ranks: int, program: Sequence[str], *, link: str | None
) -> bool:
    """Run a program on every rank, and append its rows; return whether it failed."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "rows"
        whole = ["-W", "ignore", "-m", "race.rank", *program, "--out", str(out)]
        start = time.monotonic()
        try:
            if link is None:
                launch_here(ranks, whole, limit_seconds=LIMIT)
            else:
                launch("gloo", ranks, whole, limit_seconds=LIMIT)
        except RankError as error:
            print(f"{' '.join(program)}: error: {error}", flush=True)
            return True
        wall = round(time.monotonic() - start, 1)
        rows = out.read_text().replace("}\n", f', "wall": {wall}}}\n')
        plan.append(options.out / f"{part}.jsonl", rows)
    return False


def train(options: argparse.Namespace) -> bool:
    """Train the curves that are missing; return whether any failed."""
    path = options.out / "curves.jsonl"
    failed: set[plan.Curve] = set()
    while True:
        rows = plan.whole(plan.read(path), options.steps)
        left = [
            curve
            for curve in plan.missing(rows, options.methods)
            if curve.task in options.tasks
            and curve.ranks in options.ranks
            and curve.seed in options.seeds
            and curve not in failed
            and (curve.rate is None or not options.rates or curve.rate in options.rates)
        ]
        ready = [curve for curve in left if curve.rate is not None]
        if not ready:
            return bool(failed)
        curve, seconds = ready[0], [plan.seconds_of(one, rows) or 0 for one in left]
        print(f"{len(left)} trainings, {sum(seconds) / 3600:.1f} hours left; now {curve}", flush=True)
        if time.monotonic() + (plan.seconds_of(curve, rows) or 0) > options.until:
            return bool(failed)
        program = ["--task", curve.task, "--methods", curve.method]
        program += ["--rate", str(curve.rate), "--seed", str(curve.seed)]
        program += ["--steps", str(options.steps)] if options.steps else []
        if run(options, "curves", curve.ranks, program, link=None):
            failed.add(curve)


def measure(options: argparse.Namespace) -> bool:
    """Time the steps that are not timed yet; return whether any failed."""
    failed = False
    for task in options.tasks:
        if task == "long":  # its steps are those of the demo
            continue
        for ranks in options.ranks:
            for link in options.links:
                there = plan.of(plan.read(options.out / "seconds.jsonl"), task=task, ranks=ranks, link=link)
                rounds = options.rounds or ROUNDS[link]
                done = {row["method"] for row in there if row["rounds"] >= rounds}
                wanted = [name for name in options.methods if name not in done and not METHODS[name].varies]
                for first in range(0, len(wanted), AT_ONCE):
                    if time.monotonic() > options.until:
                        return failed
                    methods = wanted[first : first + AT_ONCE]
                    print(f"{task}, {ranks} ranks, {link}: {', '.join(methods)}", flush=True)
                    program = ["--task", task, "--link", link, "--rounds", str(rounds), "--methods", *methods]
                    failed |= run(options, "seconds", ranks, program, link=link)
    return failed


def check(options: argparse.Namespace) -> bool:
    """Time a few training steps on a link, to check that a training takes its steps times the seconds of a step."""
    failed = False
    for task in options.tasks:
        for method in CHECKED if task != "long" else ():
            which = {"task": task, "ranks": 2, "method": method, "link": CHECK_LINK}
            if plan.of(plan.read(options.out / "checks.jsonl"), **which) or method not in options.methods:
                continue
            if time.monotonic() > options.until:
                return failed
            steps = str(options.steps or CHECK_STEPS)
            program = ["--task", task, "--methods", method, "--rate", str(CHECK_RATE), "--steps", steps]
            failed |= run(options, "checks", 2, [*program, "--link", CHECK_LINK], link=CHECK_LINK)
    return failed


DO: dict[str, Any] = {"curves": train, "seconds": measure, "checks": check}

if __name__ == "__main__":
    sys.exit(main())
