"""Measure the bits of sparse payloads, the error of rounding their values, and the error of a second compression.

    python benchmarks/sparse_payloads.py

Compresses Gaussian and Laplace vectors, and the gradients of a language model that `gradients.py` has saved; then
averages vectors with feedback over four ranks, by all-gather and in two phases. Nothing is timed. Writes sparse.json
and the tables of README.md.
"""

import argparse
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import page

import qcomp

Floats = npt.NDArray[np.float32]

K, BUCKET = 64, 4096
BITS = (1, 2, 3, 4, 32)
GAUSSIAN, LAPLACE, GRADIENTS = "Gaussian", "Laplace", "gradients"
BUCKETS = 256
RANKS, ROUNDS = 4, (1, 10, 100)
SHARED = 0.5
"""The part of each vector's variance that is the same in all rounds and on all ranks; the rest is drawn anew."""
GATHERED, TWICE, TWICE_WIDE = "all-gather", "two phases", "two phases, the server keeps 4 times as many"


def main() -> None:
    """Compress and write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--out", type=Path, default=Path("docs/benchmarks/sparse"), help="(default: %(default)s)"
    )
    parser.add_argument(
        "--sample",
        type=Path,
        default=Path("docs/benchmarks/gradients/sample.npz"),
        help="(default: %(default)s)",
    )
    parser.add_argument(
        "--buckets", type=int, default=BUCKETS, help="of drawn vectors (default: %(default)s)"
    )
    parser.add_argument("--table", action="store_true", help="only write the tables, from the JSON")
    options = parser.parse_args()
    path = options.out / "sparse.json"
    if not options.table:
        options.out.mkdir(parents=True, exist_ok=True)
        document = {
            "lengths": lengths(vectors(options.sample, options.buckets)),
            "means": means(max(1, options.buckets // 16)),
        }
        path.write_text(json.dumps(document, indent=1) + "\n")
    page.rewrite(options.out, blocks(json.loads(path.read_text())))


def vectors(sample: Path, buckets: int) -> dict[str, list[Floats]]:
    """Return vectors by kind: drawn ones, and the saved tensors with at least a bucket."""
    rng = np.random.default_rng(0)
    drawn = {GAUSSIAN: rng.standard_normal(buckets * BUCKET), LAPLACE: rng.laplace(size=buckets * BUCKET)}
    found = {name: [x.astype(np.float32)] for name, x in drawn.items()}
    tensors = [x.reshape(-1) for x in np.load(sample).values()]
    found[GRADIENTS] = [x for x in tensors if x.size >= BUCKET]
    return found


def lengths(kinds: dict[str, list[Floats]]) -> list[dict[str, Any]]:
    """Return the bits of each kept element, and the errors, for each kind and number of bits."""
    rows = []
    for kind, xs in kinds.items():
        for bits in BITS:
            c = qcomp.TopK(K, BUCKET, bits)
            nbytes = kept = 0
            lost, rounded, total = 0.0, 0.0, 0.0
            for x in xs:
                payload = c.compress(x)
                y = c.decompress(payload, like=x)
                nbytes, kept = nbytes + payload.nbytes, kept + int(np.count_nonzero(y))
                total += squares(x)
                lost += squares(x - y)
                rounded += squares((x - y)[y != 0])
            rows.append(
                {
                    "kind": kind,
                    "bits": bits,
                    "per_entry": 8 * nbytes / kept,
                    "error": lost / total,
                    "of_rounding": rounded / total,
                }
            )
            print(rows[-1], flush=True)
    return rows


def squares(x: Floats) -> float:
    """Return the sum of squares in float64."""
    return float(np.sum(np.square(x, dtype=np.float64)))


def means(buckets: int) -> list[dict[str, Any]]:
    """Return the relative squared error of the sum of all means, after some rounds with feedback."""
    worker = qcomp.TopK(K, BUCKET, 2)
    exchanges: dict[str, Callable[[Sequence[Floats], list[Floats], list[Floats]], Floats]] = {
        GATHERED: lambda x, owed, _: exchange(worker, None, x, owed, []),
        TWICE: lambda x, owed, server: exchange(worker, worker, x, owed, server),
        TWICE_WIDE: lambda x, owed, server: exchange(
            worker, qcomp.TopK(RANKS * K, BUCKET, 2), x, owed, server
        ),
    }
    rows = []
    for name, run in exchanges.items():
        rng = np.random.default_rng(1)
        size = buckets * BUCKET
        shared = rng.standard_normal(size)
        owed = [np.zeros(size, dtype=np.float32) for _ in range(RANKS)]
        server = [np.zeros(size, dtype=np.float32)]
        wanted, got = np.zeros(size), np.zeros(size)
        for turn in range(1, max(ROUNDS) + 1):
            x = [
                np.asarray(
                    math.sqrt(SHARED) * shared + math.sqrt(1 - SHARED) * rng.standard_normal(size),
                    dtype=np.float32,
                )
                for _ in range(RANKS)
            ]
            wanted += np.mean(x, axis=0, dtype=np.float64)
            got += run(x, owed, server)
            if turn in ROUNDS:
                error = float(np.sum((wanted - got) ** 2) / np.sum(wanted**2))
                rows.append({"exchange": name, "rounds": turn, "error": error})
                print(rows[-1], flush=True)
    return rows


def exchange(
    worker: qcomp.Compressor,
    server: qcomp.Compressor | None,
    x: Sequence[Floats],
    owed: list[Floats],
    server_owed: list[Floats],
) -> Floats:
    """Return the mean that all ranks receive, and update the residuals."""
    decoded = []
    for rank, own in enumerate(x):
        payload, left = qcomp.feedback.compress(worker, own, owed[rank])
        owed[rank] = np.asarray(left)
        decoded.append(worker.decompress(payload, like=own))
    mean: Floats = np.mean(decoded, axis=0, dtype=np.float32)
    if server is None:
        return mean
    payload, left = qcomp.feedback.compress(server, mean, server_owed[0])
    server_owed[0] = np.asarray(left)
    return np.asarray(server.decompress(payload, like=mean))


def blocks(document: dict[str, Any]) -> dict[str, str]:
    """Return the parts of the page made from these results."""
    floor = math.log2(math.comb(BUCKET, K)) / K
    head = ["", "bits of a value", "bits of an element", "squared error", "of which rounding"]
    rows = [
        [
            row["kind"],
            str(row["bits"]),
            f"{row['per_entry']:.2f}",
            f"{row['error']:.4f}",
            f"{row['of_rounding']:.4f}",
        ]
        for row in document["lengths"]
    ]
    text = (
        f"The positions need at least {floor:.2f} bits each if they are random. Errors are fractions of the squared "
        "norm."
    )
    of_means: dict[str, dict[int, str]] = {row["exchange"]: {} for row in document["means"]}
    for row in document["means"]:
        of_means[row["exchange"]][row["rounds"]] = f"{row['error']:.4f}"
    return {
        "lengths": f"{text}\n\n{page.table(head, rows)}",
        "means": page.table(
            ["", *(f"after {turns} rounds" for turns in ROUNDS)],
            [[name, *(by_rounds[turns] for turns in ROUNDS)] for name, by_rounds in of_means.items()],
        ),
    }


if __name__ == "__main__":
    main()
