"""The gain from averaging: the stationary error of SGD on noisy, quantized gradients against the number of ranks.

    python benchmarks/noise_floor.py

f(x) = |x|^2 / 2; every rank's gradient is x plus normal noise, quantized by QSGD without feedback. The stationary error
E |x|^2 is proportional to 1 / N if every rank sends its message to all ranks, since their errors are independent. In
two phases each server also quantizes the average. That error is proportional to the average, so it also decreases with
more ranks, but from two ranks on the floor is higher.
"""

import argparse
import json
from pathlib import Path
from statistics import mean, stdev
from typing import Any, Literal, get_args

import numpy as np
import page
from matplotlib.figure import Figure
from tqdm import tqdm

import qcomp
from qcomp.comm import Communicator, run_local

RANKS = (1, 2, 4, 8)
SIZE = 512
RATE = 0.1
COMPRESSOR = qcomp.QSGD(levels=1, bucket_size=64)
SETTLED = 100
"""Steps until the initial value no longer matters: (1 - rate)^100 is 3e-5."""
Topology = Literal["all_gather", "two_phase"]
TOPOLOGIES: tuple[Topology, ...] = get_args(Topology)
STYLES = {"all_gather": ("o", "#d1495b"), "two_phase": ("s", "#2e86ab")}


def main() -> None:
    """Measure, write, draw."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--out", type=Path, default=Path("docs/benchmarks/convergence"), help="(default: %(default)s)"
    )
    parser.add_argument("--steps", type=int, default=1000, help="of every run (default: %(default)s)")
    parser.add_argument("--seeds", type=int, default=5, help="(default: %(default)s)")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    results = measure(options.steps, options.seeds)
    (options.out / "noise_floor.json").write_text(json.dumps(results, indent=1) + "\n")
    picture(results).savefig(options.out / "noise_floor.png", dpi=120)
    text = table(results)
    page.rewrite(options.out, {"noise floor": text})
    print(text)


def measure(steps: int, seeds: int) -> list[dict[str, Any]]:
    """Return the error of each topology and number of ranks, over seeds."""
    results = []
    for topology, ranks in tqdm([(t, n) for t in TOPOLOGIES for n in RANKS], desc="noise floor", unit="case"):
        floors = [floor(topology, ranks, steps, seed) for seed in range(seeds)]
        results.append({"topology": topology, "ranks": ranks, "steps": steps, "floors": floors})
    return results


def floor(topology: Topology, ranks: int, steps: int, seed: int) -> float:
    """Return the mean of |x|^2 over the steps after the first `SETTLED` ones."""
    optimizer = qcomp.CompressedSGD(
        learning_rate=RATE,
        momentum=0.0,
        compressor=COMPRESSOR,
        averaging=qcomp.Averaging(feedback=False, topology=topology),
        exact=None,
        seed=seed,
    )

    def rank_main(comm: Communicator) -> float:
        x = np.zeros(SIZE, dtype=np.float32)
        state = optimizer.init(x, comm)
        noise = np.random.default_rng((seed, comm.rank))
        squares = []
        for _ in range(steps):
            gradient = x + noise.standard_normal(SIZE, dtype=np.float32)
            x, state = optimizer.step(x, gradient, state, comm)
            squares.append(float(x @ x))
        return mean(squares[min(SETTLED, steps // 2) :])

    return run_local(ranks, rank_main)[0]


def table(results: list[dict[str, Any]]) -> str:
    """Return the errors as a table in Markdown, also multiplied by the ranks and relative to one rank."""
    rows = []
    for topology in TOPOLOGIES:
        of_topology = [row for row in results if row["topology"] == topology]
        alone = mean(of_topology[0]["floors"])
        for row in of_topology:
            average = mean(row["floors"])
            spread = stdev(row["floors"]) if len(row["floors"]) > 1 else 0.0
            rows.append(
                [
                    topology,
                    str(row["ranks"]),
                    f"{average:.3f} ± {spread:.3f}",
                    f"{average * row['ranks'] / alone:.3f}",
                ]
            )
    return page.table(["topology", "ranks", "E &#124;x&#124;^2", "times ranks, over one rank's"], rows)


def picture(results: list[dict[str, Any]]) -> Figure:
    """Return a plot of the errors against the ranks, with the line of 1 / N."""
    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    for topology, (marker, colour) in STYLES.items():
        of_topology = [row for row in results if row["topology"] == topology]
        ranks = [row["ranks"] for row in of_topology]
        averages = [mean(row["floors"]) for row in of_topology]
        axes.plot(ranks, averages, marker=marker, color=colour, label=topology.replace("_", "-"))
        if topology == "all_gather":
            line = [averages[0] / n for n in ranks]
            axes.plot(ranks, line, color="black", linestyle=":", label="1 / ranks")
    axes.set(
        xscale="log", yscale="log", xlabel="ranks", ylabel="E |x|^2", title="The noise floor of SGD with QSGD"
    )
    axes.set_xticks(RANKS, [str(n) for n in RANKS])
    axes.minorticks_off()
    axes.grid(visible=True, alpha=0.2)
    axes.legend()
    return figure


if __name__ == "__main__":
    main()
