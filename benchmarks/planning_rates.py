"""Time what the cost model's figures of one core do not have from the kernel benchmark: sparse payloads and matrices.

    OMP_NUM_THREADS=1 python benchmarks/planning_rates.py

Writes docs/planning/rates.json. `qcomp.planning.CPU` has these figures.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
from timing import machine

import qcomp
from qcomp.planning import measure

ELEMENTS = 1 << 22
ROUNDS, REPEATS = 7, 5
SPARSE = qcomp.TopK(k=64, bucket_size=4096, value_bits=2)


class Alone:
    """The only rank: there is nothing to send."""

    rank, size = 0, 1

    def all_gather(self, send: Any, receive: Any) -> list[Any]:  # noqa: ARG002
        """Return what this rank sends to itself."""
        return [send]

    all_to_all: Any = None


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("docs/planning"), help="(default: %(default)s)")
    parser.add_argument("--elements", type=int, default=ELEMENTS, help="(default: %(default)s)")
    options = parser.parse_args()
    like = np.random.default_rng(0).standard_normal(options.elements, dtype=np.float32)
    found = [measure(Alone(), [SPARSE], like=like, rounds=ROUNDS).machine for _ in range(REPEATS)]
    speeds = [m.speeds[SPARSE.spec] for m in found]
    low_rank = [m.low_rank for m in found if m.low_rank is not None]
    # Other work on the machine only adds time.
    document = {
        "elements": options.elements,
        "repeats": f"the smallest of {REPEATS} medians of {ROUNDS} rounds",
        "machine": machine(),
        "sparse": SPARSE.spec,
        "encode": rounded(min(s.encode for s in speeds)),
        "decode": rounded(min(s.decode for s in speeds)),
        "add": rounded(min(s.add for s in speeds)),
        "low_rank_fixed": rounded(min(s.fixed for s in low_rank)),
        "low_rank_column": rounded(min(s.column for s in low_rank)),
        "product": rounded(min(m.product for m in found if m.product is not None)),
    }
    (options.out / "rates.json").write_text(json.dumps(document, indent=1) + "\n")
    print(json.dumps(document, indent=1))


def rounded(seconds: float) -> float:
    """Return seconds with four digits."""
    return float(f"{seconds:.4g}")


if __name__ == "__main__":
    main()
