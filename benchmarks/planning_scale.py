"""Predicted steps on 16 to 4,096 ranks: the cost model, plus waiting for the slowest rank.

    python benchmarks/planning_scale.py

Nothing is timed. Writes the table of docs/planning/README.md.
"""

import argparse
from functools import lru_cache
from pathlib import Path

import numpy as np
import page

import qcomp
from qcomp.planning import Cluster, Job, Link, Method, OuterMethod, PowerSGDMethod, gpu, step_time

RANKS = (16, 64, 256, 1024, 4096)
LANES = 8
COMPUTE = 0.3
MATRICES = 334
JOB = Job(MATRICES << 20, COMPUTE, shapes=((1024, 1024),) * MATRICES)
LINK = Link(1.25e9, latency=25e-6, per_message=5e-6)
OWN, EACH = 0.03, 0.1
"""Standard deviations of the logarithm of a rank's own speed, and of each of its steps."""
ROUNDS = 20
"""Number of outer rounds drawn for a mean; for steps without an outer loop, 50 times as many are drawn."""
METHODS = {
    "tree all-reduce, 16-bit": Method("tree", half=True),
    "QSGD, 4 bits, two_phase": Method("two_phase", qcomp.QSGD(levels=7)),
    "QSGD, 4 bits, hierarchical": Method("hierarchical", qcomp.QSGD(levels=7)),
    "PowerSGD, rank 4": PowerSGDMethod(averaging=qcomp.PowerSGD(rank=4)),
    "DiLoCo, 500 steps": OuterMethod(loop=qcomp.outer.diloco(500)),
    "streaming DiLoCo, 100 steps": OuterMethod(loop=qcomp.outer.streaming_diloco(100)),
}


def cluster(ranks: int) -> Cluster:
    """Return nodes of eight ranks that share the 10 Gbit/s of their node."""
    return Cluster(ranks, LINK, ranks_per_node=LANES)


@lru_cache
def slowest(ranks: int, every: int) -> float:
    """Return the mean over rounds of the slowest rank's compute in ``every`` steps, over that of a rank without noise.

    A rank's step takes exp(OWN a + EACH b) times as long, with a drawn once for each rank and b for each of its steps
    from standard normal distributions.
    """
    draws = np.random.default_rng([ranks, every])
    rounds = ROUNDS if every > 1 else 50 * ROUNDS
    found = []
    for _ in range(rounds):
        own = np.exp(OWN * draws.standard_normal(ranks))
        steps = sum(
            np.exp(EACH * draws.standard_normal((min(50, every - i), ranks))).sum(0)
            for i in range(0, every, 50)
        )
        found.append(float(np.max(own * steps)) / every)
    return float(np.mean(found))


def seconds(method: Method, ranks: int) -> tuple[float, float]:
    """Return the seconds of a step, and how many of them a rank waits for the slowest one."""
    every = method.loop.every // method.loop.fragments if isinstance(method, OuterMethod) else 1
    waiting = COMPUTE * (slowest(ranks, every) - 1)
    return step_time(JOB, cluster(ranks), gpu(), method).seconds + waiting, waiting


def table() -> str:
    """Return the table of the page, in Markdown."""
    rows = []
    for name, method in METHODS.items():
        cells = [name]
        for ranks in RANKS:
            whole, waiting = seconds(method, ranks)
            cells.append(f"{whole * 1e3:.0f} ({waiting * 1e3:.0f})")
        rows.append(cells)
    return page.table(["ms a step (of which waiting)", *(f"{ranks:,} ranks" for ranks in RANKS)], rows)


def main() -> None:
    """Compute and write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("docs/planning"), help="(default: %(default)s)")
    options = parser.parse_args()
    block = table()
    page.rewrite(options.out, {"scale": block})
    print(block)


if __name__ == "__main__":
    main()
