"""What the committed studies say of steps to a loss: one record for each method and task.

    python benchmarks/steps_to_loss.py

Reads the files of docs/benchmarks, trains nothing, and writes qcomp/planning/steps_to_loss.json, which `qcomp plan`
shows, and the table of docs/planning/README.md.
"""

import argparse
import json
from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

import page

Curve = list[tuple[float, float]]

STUDIES = Path("docs/benchmarks")
TASKS = {
    "language_model": "language model",
    "residual_network": "residual network",
    "adversarial_network": "adversarial network",
}
WARMUPS = {"onebit_adam": 0.15, "qadam_measured": 0.15, "qadam": 0.15, "qadam_longer": 0.3, "qadam_half": 0.5}
"""The share of exact steps of methods that have some."""
LABELS = {
    "onebit_adam": "1-bit Adam",
    "zero_one_adam": "0/1 Adam",
    "qadam_measured": "QAdam, 8 bits",
    "qadam": "QAdam, 8 bits, variance frozen",
    "qadam_longer": "QAdam, 8 bits, variance frozen",
    "qadam_half": "QAdam, 8 bits, variance frozen",
    "sign_hook": "gradients of 1 bit, Adam",
    "qsgd4_hook": "gradients of 4 bits, Adam",
}


def main() -> None:
    """Compute and write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--studies", type=Path, default=STUDIES, help="(default: %(default)s)")
    parser.add_argument("--data", type=Path, default=Path("qcomp/planning"), help="(default: %(default)s)")
    parser.add_argument("--out", type=Path, default=Path("docs/planning"), help="(default: %(default)s)")
    options = parser.parse_args()
    found = records(options.studies)
    (options.data / "steps_to_loss.json").write_text(json.dumps(found, indent=1) + "\n")
    block = table(found)
    page.rewrite(options.out, {"steps to a loss": block})
    print(block)


def records(studies: Path) -> list[dict[str, Any]]:
    """Return all records."""
    return [*_convergence(studies), *_network(studies), *_muon(studies)]


def ratio(method: Curve, adam: Curve) -> float | None:
    """Return the steps of a method for each step of Adam, to the lower of the losses that both reach.

    Between two points a curve is straight. None if one of them begins below what the other reaches.
    """
    reached = max(min(loss for _, loss in method), min(loss for _, loss in adam))
    own, other = _first(method, reached), _first(adam, reached)
    return None if own is None or other is None else round(own / other, 3)


def _first(curve: Curve, loss: float) -> float | None:
    """Return the step after which a curve is first at a loss or below; None if it begins there."""
    for (step, above), (after, below) in pairwise(curve):
        if below <= loss < above:
            return step + (above - loss) / (above - below) * (after - step)
    return None


def mean(curves: Sequence[Curve]) -> Curve:
    """Return the mean of curves with the same steps."""
    return [(points[0][0], fmean(loss for _, loss in points)) for points in zip(*curves, strict=True)]


def _convergence(studies: Path) -> list[dict[str, Any]]:
    runs: dict[tuple[str, str], dict[int, Any]] = defaultdict(dict)
    for path in sorted((studies / "convergence" / "runs").glob("*.json")):
        run = json.loads(path.read_text())
        runs[run["task"], run["method"]][run["seed"]] = run
    found = []
    for (task, method), own in sorted(runs.items()):
        if method not in LABELS or task not in TASKS:
            continue
        seeds = sorted(own.keys() & runs[task, "adam"].keys())
        curves, exact = (mean([each[s]["curve"] for s in seeds]) for each in (own, runs[task, "adam"]))
        one = own[seeds[0]]
        found.append(
            _record(task, method, one)
            | {
                "ratio": ratio(curves, exact),
                "gap": round(curves[-1][1] - exact[-1][1], 4),
                "seeds": len(seeds),
            }
            | {"source": "docs/benchmarks/convergence"}
        )
    return found


def _network(studies: Path) -> list[dict[str, Any]]:
    folder = studies / "network" / "loss"
    exact = json.loads((folder / "adam.json").read_text())
    found = []
    for method in ("sign_hook", "qsgd4_hook"):
        run = json.loads((folder / f"{method}.json").read_text())
        gap = run["losses"][-1][1] - exact["losses"][-1][1]
        found.append(
            _record("language_model", method, run)
            | {"ratio": ratio(run["losses"], exact["losses"]), "gap": round(gap, 4), "seeds": 1}
            | {"source": "docs/benchmarks/network"}
        )
    return found


def _muon(studies: Path) -> list[dict[str, Any]]:
    """Return what is known of Muon: final losses, without curves."""
    document = json.loads((studies / "muon.json").read_text())
    losses: dict[str, dict[int, Any]] = defaultdict(dict)
    for run in document["runs"]:
        losses[run["method"]][run["seed"]] = run
    exact, found = losses["AdamW, exact"], []
    for method in ("Muon, exact", "Muon, 4 + 1 bits"):
        seeds = sorted(losses[method].keys() & exact.keys())
        gap = fmean(losses[method][s]["loss"] - exact[s]["loss"] for s in seeds)
        one = losses[method][seeds[0]]
        run = {"steps": one["steps"], "parameters": one["elements"], "ranks": document["ranks"]}
        found.append(
            _record("language_model", method, run)
            | {"ratio": None, "gap": round(gap, 4), "seeds": len(seeds)}
            | {"source": "docs/benchmarks/muon.json"}
        )
    return found


def _record(task: str, method: str, run: dict[str, Any]) -> dict[str, Any]:
    return {
        "task": TASKS[task],
        "method": method,
        "label": LABELS.get(method, method),
        "warmup": WARMUPS.get(method, 0.0),
        "steps": run["steps"],
        "ranks": run["ranks"],
        "parameters": run["parameters"],
    }


def table(found: Sequence[dict[str, Any]]) -> str:
    """Return the table of the page, in Markdown."""
    rows = [
        [
            record["label"] + (f", {record['warmup']:.0%} exact steps" if record["warmup"] else ""),
            record["task"],
            "not measured" if record["ratio"] is None else f"{record['ratio']:.2f}",
            f"{record['gap']:+.3f}",
            str(record["seeds"]),
            f"{record['parameters'] / 1e6:.2g}M, {record['steps']} steps, {record['ranks']} ranks",
            record["source"],
        ]
        for record in found
    ]
    head = ["method", "task", "steps to the same loss, Adam's = 1", "loss at the end, minus Adam's", "seeds"]
    return page.table([*head, "model", "from"], rows)


if __name__ == "__main__":
    main()
