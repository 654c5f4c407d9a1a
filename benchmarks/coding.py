"""The speed of coding and decoding vectors, in MB of their float32 elements per second, and the length of the codes.

    python benchmarks/coding.py

Runs on one thread, with levels of Gaussian vectors, rounded stochastically in buckets of 512. Writes coding.json and
the table of README.md.
"""

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import page
from cases import under
from timing import Candidate, interleaved, machine, rounded, timer

from qcomp.core import coding

BUCKET = 512
VECTORS = {
    "2-bit, max": (1, "max"),
    "4-bit, max": (7, "max"),
    "8-bit, max": (127, "max"),
    "s = sqrt(512), l2": (22, "l2"),
    "s = 1, l2": (1, "l2"),
}
"""The number of levels above zero, and the norm that the largest level represents."""
DEFAULT, PURE = 24, 14
"""The log2 of the number of elements; fewer for the pure version, which takes a microsecond for each."""
WHATS = ("encode", "decode")


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("docs/benchmarks"), help="(default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=11, help="(default: %(default)s)")
    parser.add_argument(
        "--largest", type=int, default=DEFAULT, help="log2 of the elements (default: %(default)s)"
    )
    parser.add_argument("--table", action="store_true", help="only write the table, from the JSON")
    options = parser.parse_args()
    path = options.out / "coding.json"
    if not options.table:
        options.out.mkdir(parents=True, exist_ok=True)
        document = {"machine": machine(), "rounds": options.rounds}
        document["results"] = measure(options.largest, options.rounds)
        path.write_text(json.dumps(document, indent=1) + "\n")
    page.rewrite(options.out, blocks(json.loads(path.read_text())))


def measure(largest: int, rounds: int) -> list[dict[str, Any]]:
    """Return a row for each vector, code, direction and kernels."""
    rows = []
    for kernels, exponent in (("numba", largest), ("pure", min(largest, PURE))):
        candidates = [
            candidate
            for subject in VECTORS
            for name in coding.CODINGS
            for candidate in calls(subject, name, kernels, 1 << exponent)
        ]
        for row in interleaved(candidates, rounds, f"{kernels}, 2^{exponent} elements"):
            row["megabytes_per_second"] = rate(row)
            print(*row.values(), flush=True)
            rows.append(row)
    return rows


def calls(subject: str, name: str, kernels: str, size: int) -> list[Candidate]:
    """Return both directions of a code."""
    levels, negative, largest = draw(subject, size)
    with under(kernels)():
        data = coding.encode(name, levels, negative, largest=largest)
    works: tuple[Callable[[], object], ...] = (
        lambda: coding.encode(name, levels, negative, largest=largest),
        lambda: coding.decode(name, data, size=size, largest=largest),
    )
    row = {"subject": subject, "code": name, "kernels": kernels, "elements": size}
    length = {"bits": rounded(8 * len(data) / size), "entropy": entropy(levels)}
    return [
        Candidate(row | {"what": what} | length, timer(work, under(kernels)))
        for what, work in zip(WHATS, works, strict=True)
    ]


def draw(subject: str, size: int) -> tuple[bytes, bytes, int]:
    """Return levels, signs and the largest level."""
    largest, norm = VECTORS[subject]
    rng = np.random.default_rng(0)
    x = rng.standard_normal((size // BUCKET, BUCKET), dtype=np.float32)
    scale = np.max(np.abs(x), axis=1) if norm == "max" else np.linalg.norm(x, axis=1)
    position = np.abs(x) / scale[:, None] * largest
    levels = np.minimum(np.floor(position + rng.random(x.shape, dtype=np.float32)), largest)
    return levels.astype("<u2").tobytes(), ((x < 0) & (levels > 0)).astype(np.uint8).tobytes(), largest


def entropy(levels: bytes) -> float:
    """Return the entropy of the levels in bits per element, plus a bit for each sign."""
    counts = np.bincount(np.frombuffer(levels, "<u2"))
    share = counts[counts > 0] / counts.sum()
    return rounded(float(-np.sum(share * np.log2(share)) + 1 - counts[0] / counts.sum()))


def rate(row: dict[str, Any]) -> dict[str, Any]:
    """Return the speed of a row, in MB of float32 per second."""
    low, high = row["seconds"]["quartiles"]
    median, least, most = (rounded(4e-6 * row["elements"] / s) for s in (row["seconds"]["median"], high, low))
    return {"median": median, "quartiles": [least, most]}


def blocks(document: dict[str, Any]) -> dict[str, str]:
    """Return the part of the page made from these results."""
    found = {(r["subject"], r["code"], r["kernels"], r["what"]): r for r in document["results"]}
    rows = []
    for subject, name in dict.fromkeys((r["subject"], r["code"]) for r in document["results"]):
        largest = found[subject, name, "numba", "encode"]
        rates = [
            page.cell(found[subject, name, kernels, what]["megabytes_per_second"])
            for kernels in ("numba", "pure")
            for what in WHATS
        ]
        rows.append([subject, name, page.number(largest["bits"]), page.number(largest["entropy"]), *rates])
    head = ["levels", "code", "bits", "entropy"]
    head += [f"{kernels}, {what}" for kernels in ("numba", "pure") for what in WHATS]
    sizes = {r["kernels"]: r["elements"] for r in document["results"]}
    text = (
        f"MB of float32 per second, {sizes['numba']:,} elements (pure: {sizes['pure']:,}), one thread; bits per "
        f"element. {page.made(document)}"
    )
    return {"coding": f"{text}\n\n{page.table(head, rows)}"}


if __name__ == "__main__":
    main()
