"""The cost of a call besides its arithmetic, and the cost of the first call.

    python benchmarks/overhead.py

Calls use arrays that stay in the cache, and one thread. The time of a call is modelled as overhead + n * arithmetic.
The arithmetic per element is the time difference between 65 536 and 16 384 elements over the difference in elements.
So the overhead of small arrays is the time that does not grow with the array. Writes overhead.json and overhead.png,
and the tables of README.md.
"""

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import page
import startup
from cases import COMPRESSORS, under
from matplotlib.figure import Figure
from timing import Timer, machine, spread, timer
from tqdm import tqdm

import qcomp
from qcomp.backends import numba_cpu

SIZES = [100, 1000, 10_000, 100_000]
ANCHORS = (1 << 14, 1 << 16)
"""Sizes whose difference gives the arithmetic of an element; multiples of every bucket size."""
LEAST_SECONDS = 5e-3

COLOURS = {"compress, residual donated": "#d1495b", "decompress into a buffer": "#2e86ab"}


def main() -> None:
    """Measure, write, draw."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("docs/benchmarks"), help="(default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=21, help="(default: %(default)s)")
    parser.add_argument(
        "--starts", type=int, default=5, help="processes started cold and warm (default: %(default)s)"
    )
    parser.add_argument("--table", action="store_true", help="only draw and write the tables, from the JSON")
    options = parser.parse_args()
    path = options.out / "overhead.json"
    if not options.table:
        options.out.mkdir(parents=True, exist_ok=True)
        document = {
            "machine": machine(),
            "rounds": options.rounds,
            "results": measure(options.rounds),
            "starts": options.starts,
            "startup": startup.measure(options.starts),
        }
        path.write_text(json.dumps(document, indent=1) + "\n")
    document = json.loads(path.read_text())
    draw(document["results"], options.out / "overhead.png")
    page.rewrite(options.out, blocks(document))


def measure(rounds: int) -> list[dict[str, Any]]:
    """Return the overhead of calls in microseconds, for all compressors and sizes."""
    numba_cpu.set_num_threads(1)
    timers = {
        (subject, what, size): timer(call, under("numba"), least=LEAST_SECONDS)
        for subject, compressor in COMPRESSORS.items()
        for size in [*SIZES, *ANCHORS]
        for what, call in calls_of(compressor, size).items()
    }
    samples = sampled(timers, rounds)
    numba_cpu.set_num_threads(None)
    return [result(samples, key) for key in timers if key[2] in SIZES]


def calls_of(compressor: qcomp.Compressor, size: int) -> dict[str, Callable[[], object]]:
    """Return the two calls of a step, as an optimizer makes them."""
    key = qcomp.Key()
    x = np.random.default_rng(0).standard_normal(size, dtype=np.float32)
    residual, out = np.zeros_like(x), np.empty_like(x)
    payload = compressor.compress(x, key=key)
    calls: list[Callable[[], object]] = [
        lambda: qcomp.feedback.compress(compressor, x, residual, key=key, donate=True),
        lambda: compressor.decompress(payload, like=x, out=out),
    ]
    return dict(zip(COLOURS, calls, strict=True))


def sampled(
    timers: dict[tuple[str, str, int], Timer], rounds: int
) -> dict[tuple[str, str, int], list[float]]:
    """Return the seconds of all timers in all rounds, after a call that compiles."""
    for each in timers.values():
        each()
    samples: dict[tuple[str, str, int], list[float]] = {key: [] for key in timers}
    for _ in tqdm(range(rounds), desc="overhead", unit="round"):
        for key, each in timers.items():
            samples[key].append(each())
    return samples


def result(samples: dict[tuple[str, str, int], list[float]], key: tuple[str, str, int]) -> dict[str, Any]:
    """Return the row of one call and size; the arithmetic is measured in the same round."""
    subject, what, size = key
    small, large = ANCHORS
    pairs = zip(samples[subject, what, small], samples[subject, what, large], strict=True)
    arithmetic = [(after - before) / (large - small) for before, after in pairs]
    overhead = [t - size * a for t, a in zip(samples[key], arithmetic, strict=True)]
    return {
        "subject": subject,
        "what": what,
        "elements": size,
        "call_us": spread([1e6 * t for t in samples[key]]),
        "overhead_us": spread([1e6 * t for t in overhead]),
    }


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Draw the overhead at each size, a panel for each size."""
    figure = Figure(figsize=(15, 4.5), layout="constrained")
    panels = figure.subplots(1, len(SIZES), sharey=True)
    subjects = list(dict.fromkeys(row["subject"] for row in rows))
    for panel, size in zip(panels, SIZES, strict=True):
        for offset, (what, colour) in zip((-0.2, 0.2), COLOURS.items(), strict=True):
            spreads = {
                r["subject"]: r["overhead_us"] for r in rows if (r["what"], r["elements"]) == (what, size)
            }
            medians = [spreads[subject]["median"] for subject in subjects]
            quartiles = np.asarray([spreads[subject]["quartiles"] for subject in subjects])
            errors = np.abs(quartiles.T - np.asarray(medians))
            at = np.arange(len(subjects)) + offset
            panel.bar(at, medians, 0.4, yerr=errors, color=colour, label=what, error_kw={"lw": 1})
        panel.set_xticks(range(len(subjects)), subjects, rotation=45, ha="right")
        panel.set_title(f"{size:,} elements")
        panel.grid(axis="y", alpha=0.3)
    panels[0].set_ylabel("microseconds besides the arithmetic")
    panels[0].legend(fontsize=8)
    figure.savefig(path, dpi=100)


def blocks(document: dict[str, Any]) -> dict[str, str]:
    """Return the parts of the page made from these results."""
    found = {(r["subject"], r["what"], r["elements"]): r["overhead_us"] for r in document["results"]}
    names = dict.fromkeys(key[:2] for key in found)
    rows = [[*name, *(page.cell(found[*name, size]) for size in SIZES)] for name in names]
    head = ["", "", *(f"{size:,} elements" for size in SIZES)]
    text = f"Overhead of a call in microseconds. {page.made(document)}"
    starts = [[name, page.cell(cold_or_warm)] for name, cold_or_warm in document["startup"].items()]
    return {
        "overhead": f"{text}\n\n{page.table(head, rows)}",
        "startup": f"{document['starts']} processes each.\n\n{page.table(['', 'seconds'], starts)}",
    }


if __name__ == "__main__":
    main()
