"""Comparison of the cost model with published and measured step times.

    python benchmarks/planning.py

Step times are computed from the hardware that a publication names, not timed. Writes the tables and the picture of
docs/planning/README.md.
"""

import argparse
from dataclasses import dataclass
from pathlib import Path

import page

import qcomp
from qcomp.planning import Cluster, Job, Link, Machine, Method, advise, gpu, run_speedup, step_time
from qcomp.planning.picture import draw

MS = 1e-3
BERT_LARGE = 340_000_000
EFFECTIVE = 4.1e9 / 8
"""Bytes per second that one TCP connection reached on the publication's 40 Gbit Ethernet."""
WARMUP = 0.15
RING = Method("ring")
SIGNS = Method("two_phase", qcomp.ScaledSign())


@dataclass(frozen=True)
class Profile:
    """A line of table 1 of Tang et al.: 4 V100 on each node, 40 Gbit Ethernet, half-precision gradients."""

    nodes: int
    samples: str
    compute: float
    """Seconds of forward pass, backward pass and update."""
    allreduce: float
    """Seconds."""


PROFILES = [
    Profile(16, "1", (36.65 + 33.63 + 74.96) * MS, 2205.86 * MS),
    Profile(16, "16", (35.71 + 60.81 + 75.59) * MS, 2275.43 * MS),
    Profile(16, "16, 4 times", (137.80 + 243.72 + 74.92) * MS, 2259.36 * MS),
    Profile(8, "16", (37.91 + 60.71 + 75.63) * MS, 2173.35 * MS),
    Profile(4, "16", (36.94 + 62.82 + 76.85) * MS, 2133.24 * MS),
    Profile(2, "16", (34.95 + 61.23 + 75.26) * MS, 1897.21 * MS),
]


def ethernet(nodes: int, *, streams: float = 40 / 4.1) -> Cluster:
    """Return the cluster: one connection reaches 4.1 Gbit/s of a node's 40 Gbit/s."""
    return Cluster(4 * nodes, Link(EFFECTIVE, streams=streams), ranks_per_node=4)


@dataclass(frozen=True)
class Stage:
    """The predictions for a profile."""

    allreduce: float
    """Seconds of the ring all-reduce."""
    speedup: float
    """Speed-up of the compressed stage over the predicted plain step."""
    over_measured: float
    """Speed-up of the compressed stage over the measured plain step."""
    run: float
    """Speed-up of a run, including the warm-up, over the predicted plain step."""


def stage(profile: Profile, *, streams: float = 40 / 4.1) -> Stage:
    """Return the predictions for a profile."""
    job = Job(BERT_LARGE, profile.compute, gradient_bytes=2)
    cluster = ethernet(profile.nodes, streams=streams)
    plain, signs = (step_time(job, cluster, gpu(), method) for method in (RING, SIGNS))
    measured = profile.compute + profile.allreduce
    return Stage(
        plain.wire,
        plain.seconds / signs.seconds,
        measured / signs.seconds,
        run_speedup(plain.seconds, signs.seconds, WARMUP),
    )


def needed_share(speedup: float, compressor: qcomp.Compressor, size: int) -> float:
    """Return the share of a plain step that sending must have taken, if only sending became faster."""
    ratio = 4 * size / compressor.payload_spec(size).nbytes
    return (1 - 1 / speedup) / (1 - 1 / ratio)


@dataclass(frozen=True)
class Measured:
    """A step time of stock DistributedDataParallel over gloo, on rate-limited links."""

    model: str
    ranks: int
    link: str
    half: bool
    compute: float
    """Seconds of a step without communication, the middle of the measured range."""
    seconds: float
    """The mean of the runs."""


MLP, TRANSFORMER = 10_512_394, 10_300_000
PAYLOAD = {"100 Mbit/s": 0.096e9 / 8, "1 Gbit/s": 0.957e9 / 8}
"""Bytes of TCP payload per second at each rate."""
STEPS = [
    Measured("MLP", 2, "100 Mbit/s", False, 0.1045, 3.658),
    Measured("MLP", 2, "100 Mbit/s", True, 0.1045, 1.858),
    Measured("MLP", 2, "1 Gbit/s", False, 0.091, 0.4715),
    Measured("MLP", 2, "1 Gbit/s", True, 0.091, 0.293),
    Measured("transformer", 2, "1 Gbit/s", False, 0.149, 0.509),
    Measured("transformer", 2, "1 Gbit/s", True, 0.149, 0.332),
    Measured("MLP", 4, "1 Gbit/s", False, 0.207, 0.797),
    Measured("MLP", 4, "1 Gbit/s", True, 0.207, 0.538),
]


def predicted(step: Measured, machine: Machine) -> float:
    """Return the prediction for a measured step."""
    size = MLP if step.model == "MLP" else TRANSFORMER
    cluster = Cluster(step.ranks, Link(PAYLOAD[step.link], latency=0.2e-3))
    return step_time(Job(size, step.compute), cluster, machine, Method("ring", half=step.half)).seconds


def published_table() -> str:
    """Return the table of 1-bit Adam's profiles, in Markdown."""
    rows = []
    for profile in PROFILES:
        found = stage(profile)
        rows.append(
            [
                str(4 * profile.nodes),
                profile.samples,
                f"{profile.allreduce / MS:.0f}",
                f"{found.allreduce / MS:.0f}",
                f"{found.over_measured:.1f}",
                f"{found.speedup:.1f}",
                f"{found.run:.1f}",
            ]
        )
    return page.table(
        [
            "GPUs",
            "samples a GPU",
            "all-reduce, ms, published",
            "predicted",
            "compressed stage, over the published step",
            "over the predicted step",
            f"run, {WARMUP:.0%} warm-up",
        ],
        rows,
    )


def measured_table() -> str:
    """Return the table of measured steps, in Markdown."""
    rows = []
    for step in STEPS:
        guess = predicted(step, qcomp.planning.CPU)
        rows.append(
            [
                f"{step.model}, {'fp16 hook' if step.half else 'no hook'}",
                str(step.ranks),
                step.link,
                f"{step.seconds / MS:.0f}",
                f"{guess / MS:.0f}",
                f"{guess / step.seconds - 1:+.0%}",
            ]
        )
    return page.table(["model", "ranks", "link", "measured, ms", "predicted, ms", "off by"], rows)


def example() -> qcomp.planning.Advice:
    """Return the advice of the example on the page, as the command on the page gives it."""
    params, (rows, columns) = 350_000_000, (1024, 1024)
    count, rest = divmod(params, rows * columns)
    shapes = (*[(rows, columns)] * count, (rest // columns, columns), (rest % columns,))
    return advise(Job(params, 0.3, shapes=shapes), Cluster(64, Link(1.25e9)), gpu(), warmup=WARMUP)


def main() -> None:
    """Compute and write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("docs/planning"), help="(default: %(default)s)")
    options = parser.parse_args()
    advice = example()
    blocks = {
        "published": published_table(),
        "measured": measured_table(),
        "example": f"```text\n{advice.text}\n```",
    }
    page.rewrite(options.out, blocks)
    draw(advice, options.out / "plan.png")
    print("\n\n".join(blocks.values()))


if __name__ == "__main__":
    main()
