"""Time the figures of the cost model that the kernel benchmark lacks: sparse payloads, matrices and LloydMax.

    OMP_NUM_THREADS=1 python benchmarks/planning_rates.py

Writes docs/planning/rates.json. `qcomp.planning.CPU` and the pure version's machine use these figures. LloydMax is
timed next to a QSGD, in CPU seconds. Only their ratio counts: other work on the machine hardly changes it. `--ratios`
times only LloydMax, and keeps the other figures.
"""

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from cases import Vectors, calls_of, under
from timing import Candidate, interleaved, machine, timer

import qcomp
from qcomp.backends import numba_cpu
from qcomp.planning import measure

ELEMENTS = 1 << 22
ROUNDS, REPEATS = 7, 5
SPARSE = qcomp.TopK(k=64, bucket_size=4096, value_bits=2)
NEAREST = [qcomp.LloydMax(bits, size) for bits in (1, 2, 3, 4) for size in (128, 512)]
BASELINE = qcomp.QSGD(levels=7)
RATIO_ROUNDS = {"numba": 101, "pure": 15}
CALLS = {
    "encode": "encode, residual donated",
    "decode": "decode into a buffer",
    "add": "decode and add",
}
"""The fields of `qcomp.planning.Speed`, and the calls of `cases` that they describe."""


class Alone:
    """The communicator of a world of one rank, which sends nothing."""

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
    parser.add_argument("--ratios", action="store_true", help="time only LloydMax")
    options = parser.parse_args()
    path = options.out / "rates.json"
    document = json.loads(path.read_text()) if options.ratios else seconds(options.elements)
    document["lloyd_max"] = {
        "over": BASELINE.spec,
        "machine": machine(),
        "ratios": {kernels: ratios(options.elements, kernels) for kernels in RATIO_ROUNDS},
    }
    path.write_text(json.dumps(document, indent=1) + "\n")
    print(json.dumps(document, indent=1))


def seconds(elements: int) -> dict[str, Any]:
    """Return the seconds of sparse payloads and of matrices."""
    like = np.random.default_rng(0).standard_normal(elements, dtype=np.float32)
    found = [measure(Alone(), [SPARSE], like=like, rounds=ROUNDS).machine for _ in range(REPEATS)]
    speeds = [m.speeds[SPARSE.spec] for m in found]
    low_rank = [m.low_rank for m in found if m.low_rank is not None]
    # Other work on the machine only adds time.
    return {
        "elements": elements,
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


def ratios(elements: int, kernels: str) -> dict[str, dict[str, Any]]:
    """Return the time of each LloydMax over that of the QSGD, by spec and field of `qcomp.planning.Speed`."""
    numba_cpu.set_num_threads(1)
    vectors, found = Vectors.draw(elements), []
    base = calls_of(BASELINE, vectors)
    for compressor in NEAREST:
        own = calls_of(compressor, vectors)
        for field, what in CALLS.items():
            row = {"spec": compressor.spec, "field": field}
            one, other = (timer(calls[what], under(kernels), seconds=busy) for calls in (own, base))
            found.append(Candidate(row, one, {"over_qsgd": other}))
    rows = interleaved(found, RATIO_ROUNDS[kernels], f"{kernels}, LloydMax")
    numba_cpu.set_num_threads(None)
    return {
        c.spec: {row["field"]: row["over_qsgd"] for row in rows if row["spec"] == c.spec} for c in NEAREST
    }


def busy(call: Callable[[], object], repeats: int) -> float:
    """Return the CPU seconds of one call, averaged over repeats."""
    start = time.process_time()
    for _ in range(repeats):
        call()
    return (time.process_time() - start) / repeats


def rounded(seconds: float) -> float:
    """Return seconds with four digits."""
    return float(f"{seconds:.4g}")


if __name__ == "__main__":
    main()
