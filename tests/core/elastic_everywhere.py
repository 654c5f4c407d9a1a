"""``python -m tests.core.elastic_everywhere``: ranks die, leave and join with every optimizer, in every topology.

Also with outer loops. Each death is tried in every exchange of each of twelve steps and of the resumes after them.
Takes a quarter of an hour; updates the jobs that it ran in docs/reliability/elastic.json and keeps all others.
"""

import argparse
import json
import multiprocessing
import sys
import traceback
import warnings
from pathlib import Path
from typing import Any

import qcomp
from tests.core import elastic_jobs
from tests.core.elastic_jobs import LOOPS, TOPOLOGIES, world
from tests.core.elastic_scenarios import die_in_resumes, die_in_steps, join, leave
from tests.optimizers.every import EVERY

STEPS = 12
SCENARIOS = {
    "deaths in a step": ("aab", die_in_steps),
    "ranks that leave": ("aab", leave),
    "ranks that join, and deaths meanwhile": ("aab", join),
    "deaths while others resume": ("abcd", die_in_resumes),
}


def every_topology() -> dict[str, tuple[str, str | None]]:
    """Return a job for every optimizer and outer loop as it is, and for each other topology if it has a choice."""
    settings: dict[str, Any] = {name: entry.opt for name, entry in EVERY.items()} | LOOPS
    found: dict[str, tuple[str, str | None]] = {name: (name, None) for name in settings}
    for name, opt in settings.items():
        averaging = getattr(opt, "averaging", None)
        if isinstance(averaging, qcomp.Averaging):
            found |= {f"{name}, {t}": (name, t) for t in TOPOLOGIES if t != averaging.topology}
    return found


def try_job(name: str) -> tuple[str, dict[str, Any]]:
    """Return, by scenario, how many times a rank died, left or joined, or the traceback of what went wrong."""
    warnings.simplefilter("ignore")
    elastic_jobs.JOBS |= every_topology()
    results: dict[str, Any] = {}
    for label, (hosts, scenario) in SCENARIOS.items():
        try:
            results[label] = scenario(world(name, hosts), STEPS, range(STEPS))
        except Exception:
            results[label] = traceback.format_exc()
    return name, results


def main() -> int:
    """Run all jobs and write the results; return 1 if anything went wrong."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("docs/reliability"), help="default: %(default)s")
    parser.add_argument("--jobs", nargs="+", default=list(every_topology()), help="default: all")
    options = parser.parse_args()
    path = options.out / "elastic.json"
    results = json.loads(path.read_text())["jobs"] if path.exists() else {}
    with multiprocessing.get_context("spawn").Pool(multiprocessing.cpu_count()) as pool:
        for name, counts in pool.imap(try_job, options.jobs):
            sys.stdout.write(f"{name}: {counts}\n")
            sys.stdout.flush()
            results[name] = counts
    path.write_text(json.dumps({"steps": STEPS, "jobs": results}, indent=1) + "\n")
    return int(any(isinstance(x, str) for counts in results.values() for x in counts.values()))


if __name__ == "__main__":
    sys.exit(main())
