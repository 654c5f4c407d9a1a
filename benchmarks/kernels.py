"""Time of each primitive relative to a copy of its input, for the pure version and each kernel set for the CPU.

    python benchmarks/kernels.py

Runs in one process with one thread, except for the comparison of two threads with one. Writes kernels.json,
kernels.png, comparisons.png, and the tables of README.md.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import page
import pictures
import torch
from cases import COMPRESSORS, VECTORS, Vectors, calls_of, candidates, under
from comparisons import TASKS, comparisons
from timing import Candidate, Timer, interleaved, machine, timer

from qcomp.backends import numba_cpu

SMALLEST, STRIDE = 10, 3
DEFAULT, FULL = 25, 28
COMPARED = 25
"""The log2 of the most elements for the baselines, some of which need ten times the memory of their input."""


def main() -> None:
    """Measure, write, draw."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("docs/benchmarks"), help="(default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=11, help="(default: %(default)s)")
    size = parser.add_mutually_exclusive_group()
    size.add_argument(
        "--largest", type=int, default=DEFAULT, help="log2 of the most elements (default: %(default)s)"
    )
    size.add_argument(
        "--full", dest="largest", action="store_const", const=FULL, help="1 GiB; takes 8 GiB of memory"
    )
    parser.add_argument("--table", action="store_true", help="only draw and write the tables, from the JSON")
    options = parser.parse_args()
    path = options.out / "kernels.json"
    if not options.table:
        options.out.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(measure(options.largest, options.rounds), indent=1) + "\n")
    document = json.loads(path.read_text())
    pictures.ratios(document["results"], options.out / "kernels.png")
    pictures.bars(largest_only(document["comparisons"]), options.out / "comparisons.png")
    page.rewrite(options.out, blocks(document))


def measure(largest: int, rounds: int) -> dict[str, Any]:
    """Return all results for sizes up to 2**largest."""
    torch.set_num_threads(1)
    results, compared = [], []
    for exponent in range(SMALLEST, largest + 1, STRIDE):
        numba_cpu.set_num_threads(1)
        vectors, title = Vectors.draw(1 << exponent), f"2^{exponent} elements"
        results += printed(interleaved(candidates(vectors), rounds, title))
        if exponent <= COMPARED:
            compared += printed(interleaved(comparisons(vectors), rounds, f"{title}, comparisons"))
    pairs = printed(interleaved(one_thread_over_two(vectors), rounds, f"{title}, threads"))
    numba_cpu.set_num_threads(None)
    return {
        "machine": machine() | {"torch": torch.__version__},
        "rounds": rounds,
        "results": results,
        "comparisons": compared,
        "threads": pairs,
    }


def one_thread_over_two(vectors: Vectors) -> list[Candidate]:
    """Return the kernels that use threads as candidates with one thread, compared with two."""

    def with_threads(threads: int, timing: Timer) -> Timer:
        def run() -> float:
            numba_cpu.set_num_threads(threads)
            return timing()

        return run

    found = []
    for subject, compressor in [*COMPRESSORS.items(), (VECTORS, None)]:
        for what, call in calls_of(compressor, vectors).items():
            timing = timer(call, under("numba"))
            row = {"subject": subject, "what": what, "elements": vectors.x.size}
            over = {"over_two_threads": with_threads(2, timing)}
            found.append(Candidate(row, with_threads(1, timing), over))
    return found


def printed(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Print the rows, and return them."""
    for row in rows:
        names = [str(value) for value in row.values() if isinstance(value, str)]
        ratios = [f"{k} {page.cell(v)}" for k, v in row.items() if k.startswith("over_")]
        print(f"{row['elements']:>11,}  {', '.join(names):<66} {'  '.join(ratios)}", flush=True)
    return rows


def largest_only(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows of the largest size."""
    largest = max(row["elements"] for row in rows)
    return [row for row in rows if row["elements"] == largest]


def blocks(document: dict[str, Any]) -> dict[str, str]:
    """Return the parts of the page made from these results."""
    return {
        "kernels": ratio_table(document),
        "threads": threads_table(document["threads"]),
        "comparisons": comparison_table(document["comparisons"]),
    }


def ratio_table(document: dict[str, Any]) -> str:
    """Return the ratios at the largest size, and for the pure version at the largest size that was timed."""
    columns = {
        key: largest_only([r for r in document["results"] if (r["kernels"], r["arrays"]) == key])
        for key in [("numba", "numpy"), ("numba", "torch"), ("pure", "numpy")]
    }
    by_name = {key: {(r["subject"], r["what"]): r for r in rows} for key, rows in columns.items()}
    numba, on_torch, pure = by_name.values()
    rows = [
        [
            *name,
            page.cell(row["over_copy"]),
            page.cell(on_torch[name]["over_copy"]),
            page.cell(row.get("over_fresh_copy")),
            page.cell(pure[name]["over_copy"]) if name in pure else "",
        ]
        for name, row in numba.items()
    ]
    size, pure_size = (columns[key][0]["elements"] for key in [("numba", "numpy"), ("pure", "numpy")])
    head = ["", "", "numba", "numba, torch tensors", "numba, over `x.copy()`", "pure"]
    text = f"Time over a copy of the input, {size:,} elements (pure: {pure_size:,}). {page.made(document)}"
    return f"{text}\n\n{page.table(head, rows)}"


def threads_table(rows: list[dict[str, Any]]) -> str:
    """Return the speed-ups by a second thread."""
    cells = [[row["subject"], row["what"], page.cell(row["over_two_threads"])] for row in rows]
    head = ["", "", "ratio"]
    return f"Time with one thread over time with two, {rows[0]['elements']:,} elements.\n\n{page.table(head, cells)}"


def comparison_table(rows: list[dict[str, Any]]) -> str:
    """Return the comparisons, a column for each size."""
    sizes = sorted({row["elements"] for row in rows})
    found = {(row["task"], row["by"], row["elements"]): row["over_copy"] for row in rows}
    names = dict.fromkeys((task, row["by"]) for task in TASKS for row in rows if row["task"] == task)
    cells = [[*name, *(page.cell(found.get((*name, size))) for size in sizes)] for name in names]
    head = ["", "by", *(f"{size:,} elements" for size in sizes)]
    return f"Time over a copy of the input.\n\n{page.table(head, cells)}"


if __name__ == "__main__":
    main()
