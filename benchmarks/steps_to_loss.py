"""Collect the steps to a loss from the committed studies: one record for each method and task.

    python benchmarks/steps_to_loss.py

Reads the files of docs/benchmarks, trains nothing, and writes qcomp/planning/steps_to_loss.json, which `qcomp plan`
shows, and the table of docs/planning/README.md.
"""

import argparse
import json
from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from itertools import pairwise, product
from pathlib import Path
from statistics import fmean
from typing import Any

import page
from race import plan
from race.methods import METHODS, OFTEN
from race.tasks import TASKS as RACED
from race.tasks import Text

Curve = Sequence[tuple[int, float]]

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
EXACT = {
    "ddp_adamw": "AdamW",
    "ddp_muon": "Muon",
    "ddp_muon3": "Muon of 3 iterations",
    "muon_exact_blocks": "Muon in blocks",
}
"""The exact trainings of the race, and their optimizers."""
RACE: dict[str, tuple[str, ...]] = {
    "onebit_adam": ("onebit_adam", "ddp_adamw"),
    "ddp_muon": ("Muon, exact", "ddp_adamw"),
    "powersgd1_adamw": ("PowerSGD rank 1", "ddp_adamw"),
    "powersgd1_muon": ("PowerSGD rank 1", "ddp_muon"),
    "powersgd2_adamw": ("PowerSGD rank 2", "ddp_adamw"),
    "powersgd2_muon": ("PowerSGD rank 2", "ddp_muon"),
    "lowrank2_adamw": ("PowerSGD rank 2", "ddp_adamw"),
    "lowrank2_muon": ("PowerSGD rank 2", "ddp_muon"),
    "muon_4_1": ("Muon, 4 + 1 bits", "ddp_muon"),
    "muon_2_1": ("Muon, 2 + 1 bits", "ddp_muon"),
    "muon_4_1_blocks": ("Muon in blocks, 4 + 1 bits", "muon_exact_blocks"),
    "local_adamw": ("LocalSGD every {every} steps", "ddp_adamw"),
    "diloco_adamw": ("DiLoCo every {every} steps", "ddp_adamw"),
    "muloco": ("MuLoCo every {every} steps", "ddp_muon"),
    "sparse_adamw": ("SparseLoCo every {every} steps", "ddp_adamw"),
    "sparse_muon": ("SparseLoCo every {every} steps", "ddp_muon"),
    "sparse_often_muon3": (f"SparseLoCo every {OFTEN} steps", "ddp_muon3"),
    "sparse_often_blocks": (f"SparseLoCo every {OFTEN} steps", "muon_exact_blocks", "ddp_muon"),
}
"""Methods of the race: the names of their records, the exact training by the same optimizer, and what counts with 4
ranks without it."""


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
    return [*_convergence(studies), *_network(studies), *_muon(studies), *_race(studies)]


def ratio(method: Curve, exact: Curve) -> float | None:
    """Return the steps of a method for each step of exact training, to the lowest loss that both reach.

    Between two points a curve is straight. None if one of them begins at or below that loss.
    """
    reached = max(min(loss for _, loss in method), min(loss for _, loss in exact))
    own, other = _first(method, reached), _first(exact, reached)
    return None if own is None or other is None else round(own / other, 3)


def _first(curve: Curve, loss: float) -> float | None:
    """Return the step after which a curve is first at a loss or below; None if it begins there."""
    for (step, above), (after, below) in pairwise(curve):
        if below <= loss < above:
            return step + (above - loss) / (above - below) * (after - step)
    return None


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
        curves, exact = ([each[s]["curve"] for s in seeds] for each in (own, runs[task, "adam"]))
        found.append(
            _record(task, method, own[seeds[0]])
            | _compared(curves, exact)
            | {"source": "docs/benchmarks/convergence"}
        )
    return found


def _network(studies: Path) -> list[dict[str, Any]]:
    folder = studies / "network" / "loss"
    exact = json.loads((folder / "adam.json").read_text())
    found = []
    for method in ("sign_hook", "qsgd4_hook"):
        run = json.loads((folder / f"{method}.json").read_text())
        found.append(
            _record("language_model", method, run)
            | _compared([run["losses"]], [exact["losses"]])
            | {"source": "docs/benchmarks/network"}
        )
    return found


def _muon(studies: Path) -> list[dict[str, Any]]:
    """Return the records of Muon, which have final losses but no curves."""
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
            | {"reference": "AdamW", "source": "docs/benchmarks/muon.json"}
        )
    return found


def _best_of_first_rates(rows: plan.Rows, task: str, method: str) -> float | None:
    losses = plan.tuned(rows, task, method)
    return min(losses.keys() & set(plan.RATES), key=losses.__getitem__, default=None)


def _race(studies: Path) -> list[dict[str, Any]]:
    """Compare methods with exact training by the same optimizer, both at the rate that is best for the latter.

    It is the best of the first three rates, with which every method was tried.

    With 4 ranks methods were trained only at the rate that is best for themselves with 2 ranks, and this counts.
    """
    rows = plan.whole(plan.read(studies / "loss" / "curves.jsonl"))
    runs: dict[tuple[int, str, str], dict[float | None, dict[int, Any]]] = defaultdict(
        lambda: defaultdict(dict)
    )
    for row in rows:
        if plan.final(row) < float("inf"):
            runs[row["ranks"], row["task"], row["method"]][row["rate"]][row["seed"]] = row
    found = []
    texts = [task for task, raced in RACED.items() if isinstance(raced, Text)]
    for ranks, task, (method, (name, *exacts)) in product((2, 4), texts, RACE.items()):
        exact, best = exacts[0 if ranks == 2 else -1], partial(_best_of_first_rates, rows, task)
        rate = best(exact)
        tuned = rate if ranks == 2 else best(method)
        own, other = runs[ranks, task, method].get(tuned, {}), runs[ranks, task, exact].get(rate, {})
        seeds = sorted(own.keys() & other.keys())
        if not seeds:
            continue
        what = name.format(every=RACED[task].every)
        names_its_optimizer = what in LABELS or what.startswith("Muon")
        parts = [LABELS.get(what, what), *(["torch's hook"] if "hook" in METHODS[method].label else [])]
        parts += [] if names_its_optimizer else [EXACT[exacts[0]]]
        size = sum(weight.numel() for weight in RACED[task].model(0).parameters())
        found.append(
            _record("language_model", what, {**own[seeds[0]], "parameters": size})
            | {"label": ", ".join(parts), "reference": EXACT[exact]}
            | _compared([own[s]["losses"] for s in seeds], [other[s]["losses"] for s in seeds])
            | {"source": "docs/benchmarks/loss"}
        )
    return found


def _compared(curves: Sequence[Curve], exact: Sequence[Curve]) -> dict[str, Any]:
    """Return the entries of a record that compare curves, one for each seed."""
    own, other = plan.mean(curves), plan.mean(exact)
    return {"ratio": ratio(own, other), "gap": round(own[-1][1] - other[-1][1], 4), "seeds": len(curves)}


def _record(task: str, method: str, run: dict[str, Any]) -> dict[str, Any]:
    return {
        "task": TASKS[task],
        "method": method,
        "label": LABELS.get(method, method),
        "warmup": WARMUPS.get(method, 0.0),
        "steps": run["steps"],
        "ranks": run["ranks"],
        "parameters": run["parameters"],
        "reference": "Adam",
    }


def table(found: Sequence[dict[str, Any]]) -> str:
    """Return the table of the page, in Markdown."""
    rows = [
        [
            record["label"] + (f", {record['warmup']:.0%} exact steps" if record["warmup"] else ""),
            record["task"],
            record["reference"],
            "not measured" if record["ratio"] is None else f"{record['ratio']:.2f}",
            f"{record['gap']:+.3f}",
            str(record["seeds"]),
            f"{record['parameters'] / 1e6:.2g}M, {record['steps']} steps, {record['ranks']} ranks",
            record["source"],
        ]
        for record in found
    ]
    head = [
        "method",
        "task",
        "exact training by",
        "steps to the same loss, divided by its",
        "loss at the end, minus its",
    ]
    return page.table([*head, "seeds", "model", "from"], rows)


if __name__ == "__main__":
    main()
