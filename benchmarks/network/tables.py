"""Makes the tables of docs/benchmarks/network/README.md from the files of the runs."""

from collections.abc import Sequence
from itertools import groupby
from typing import Any

import page

from network.launch import RATES
from network.methods import COMPUTE, METHODS
from network.models import MODELS
from network.prediction import choice, predicted
from network.results import Results, Run

__all__ = ["NAMES", "blocks"]

NAMES = {
    "10mbit": "10 Mbit/s",
    "100mbit": "100 Mbit/s",
    "1gbit": "1 Gbit/s",
    "10gbit": "10 Gbit/s",
    "loopback": "loopback",
}
JUDGED = ("100mbit", "1gbit")
"""The links for which the model's error is shown; the others are limited by the processor."""
TOLERANCE = 0.20
PAYLOAD = 0.957
"""The share of a rate that carries TCP payload: about 1448 bytes of each 1514."""
NOTHING = "Not measured yet."


def blocks(results: Results) -> dict[str, str]:
    """Return every table by the name of its block; tables without files say so."""
    runs = results.runs()
    made = {
        "steps": steps(runs),
        "speedups": speedups(runs),
        "bytes": sent(runs),
        "exchange": exchanges(results.exchanges()),
        "model": model(results, runs),
        "advice": advice(results, runs),
    }
    return {name: text or NOTHING for name, text in made.items()}


def steps(runs: Sequence[Run]) -> str:
    """Return a table for each model and number of ranks: milliseconds, and the ratio to computation alone."""
    parts = []
    for (ranks, name), of_both in groupby(runs, key=lambda run: (run.ranks, run.model)):
        columns = list(of_both)
        methods = [m for m in METHODS if any(m in run.methods for run in columns)]
        rows = [[METHODS[m].label, *(_step(run, m) for run in columns)] for m in methods]
        head = ["ms a step (quartiles), times compute alone", *(NAMES[run.link] for run in columns)]
        counts = ", ".join(f"{run.rounds} on {NAMES[run.link]}" for run in columns)
        machine = ", ".join(f"{key} {value}" for key, value in columns[0].machine.items())
        failures = "".join(
            f"\n\n**{METHODS[m].label} failed on {NAMES[run.link]}**: {run.failures[m]}"
            for run in columns
            for m in METHODS
            if m in run.failures
        )
        title = f"**{MODELS[name].label}, {ranks} ranks.** Steps: {counts}; {machine}."
        parts.append(f"{title}\n\n{page.table(head, rows)}{failures}")
    return "\n\n".join(parts)


def _step(run: Run, method: str) -> str:
    if method not in run.methods:
        return "failed" if method in run.failures else ""
    milliseconds = {
        "median": 1e3 * run.seconds(method),
        "quartiles": [1e3 * s for s in run.methods[method]["seconds"]["quartiles"]],
    }
    times = "" if method == COMPUTE else f", {run.seconds(method) / run.compute:.2f}x"
    return page.cell(milliseconds) + times


def speedups(runs: Sequence[Run]) -> str:
    """Return the speed-up of each method over stock DDP."""
    compared = [run for run in runs if "none" in run.methods]
    if not compared:
        return ""
    methods = [m for m in METHODS if m != "none" and any(m in run.methods for run in compared)]
    rows = []
    for run in compared:
        plain = run.seconds("none")
        gains = [f"{plain / run.seconds(m):.2f}" if m in run.methods else "" for m in methods]
        rows.append([f"{run.model}, {run.ranks} ranks, {NAMES[run.link]}", *gains])
    return page.table(["", *(METHODS[m].label for m in methods)], rows)


def sent(runs: Sequence[Run]) -> str:
    """Return the bytes on the interface, and those predicted from the payloads."""
    rows = [
        [
            f"{run.model}, {run.ranks} ranks, {NAMES[run.link]}",
            METHODS[method].label,
            f"{found['bytes'] / 1e6:.3f}",
            f"{found['predicted_bytes'] / 1e6:.3f}",
            f"{found['bytes'] / found['predicted_bytes'] - 1:+.1%}",
        ]
        for run in runs
        for method, found in run.methods.items()
        if found["predicted_bytes"]
    ]
    head = ["", "method", "MB a step on the interface", "predicted", "more"]
    return page.table(head, rows) if rows else ""


def ideal(sent_bytes: float, link: str) -> float:
    """Return the seconds in which a link carries this many bytes of payload."""
    return sent_bytes / (RATES[link] * PAYLOAD)


def exchanges(documents: Sequence[dict[str, Any]]) -> str:
    """Return the times of exchanges of 1-bit payloads, and their ratio to the least time on the wire."""
    rows = []
    for document in documents:
        for link, found in document["links"].items():
            wire = ideal(found["exchange"]["sent"], link)
            raw = found["exchange"]["sent"] / RATES[link]
            rows.append(
                [
                    f"{document['transport']}, {document['ranks']} ranks, {NAMES[link]}",
                    f"{found['exchange']['sent'] / 1e6:.3f}",
                    f"{1e3 * wire:.1f}",
                    *(
                        f"{1e3 * found[kind]['seconds']['median']:.1f} "
                        f"({1e3 * found[kind]['seconds']['quartiles'][0]:.1f} to "
                        f"{1e3 * found[kind]['seconds']['quartiles'][1]:.1f}), "
                        f"{found[kind]['seconds']['median'] / wire:.2f}x, "
                        f"{found[kind]['seconds']['median'] / raw:.2f}x"
                        for kind in ("exchange", "mean")
                    ),
                ]
            )
    head = [
        "",
        "MB a rank sends",
        "ideal, ms",
        "exchange, ms (quartiles), over ideal, over the nominal rate",
        "with encoding and decoding",
    ]
    return page.table(head, rows) if rows else ""


def model(results: Results, runs: Sequence[Run]) -> str:
    """Return the measured steps, and the predicted ones without and with overlap."""
    rows: list[list[str]] = []
    errors: dict[bool, list[float]] = {False: [], True: []}
    for run in runs:
        measured = results.measured(run)
        if measured is None or run.link not in JUDGED:
            continue
        for method in run.averaging:
            row = [
                f"{run.model}, {run.ranks} ranks, {NAMES[run.link]}",
                METHODS[method].label,
                f"{1e3 * run.seconds(method):.0f}",
            ]
            for overlapped, found in errors.items():
                guess = predicted(method, run, measured, overlapped=overlapped)
                if guess is None:
                    row += ["", ""]
                    continue
                error = guess / run.seconds(method) - 1
                found.append(error)
                row += [
                    f"{1e3 * guess:.0f}",
                    f"{error:+.0%}" if abs(error) <= TOLERANCE else f"**{error:+.0%}**",
                ]
            rows.append(row)
    if not rows:
        return ""
    counts = [
        f"{sum(abs(error) > TOLERANCE for error in found)} of {len(found)} {how}"
        for how, found in zip(("without overlap", "with it"), errors.values(), strict=True)
    ]
    head = ["", "method", "measured, ms", "predicted, ms", "off by", "with overlap, ms", "off by"]
    return f"Off by more than {TOLERANCE:.0%}, in bold: {', '.join(counts)}.\n\n{page.table(head, rows)}"


def advice(results: Results, runs: Sequence[Run]) -> str:
    """Return the advisor's recommendations, and the fastest methods."""
    rows = []
    for run in runs:
        measured = results.measured(run)
        if measured is None or not {"none", COMPUTE} <= run.methods.keys():
            continue
        chosen = choice(run, measured)
        ratio = f"{chosen.ratio:.2f}"
        rows.append(
            [
                f"{run.model}, {run.ranks} ranks, {NAMES[run.link]}",
                METHODS[chosen.method].label,
                METHODS[chosen.best].label,
                ratio if chosen.ratio <= 1 + TOLERANCE else f"**{ratio}**",
            ]
        )
    head = ["", "recommended", "fastest of the others", "step of the recommended over that"]
    return page.table(head, rows) if rows else ""
