"""What each optimizer costs: memory for each parameter, bits sent for each, and collectives in a step.

    python benchmarks/costs.py

Counted, not timed: from the arrays of a state, from the bytes that a communicator counts, and from the exchanges that a
step asks for. Writes the table of docs/costs.md.
"""

import argparse
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import page

import qcomp
from qcomp.comm import Communicator, run_local
from qcomp.core.state import OptimizerState

RANKS = 4
SIZE = 1 << 16
"""Parameters, in one tensor of which all is compressed."""


@dataclass(frozen=True)
class Case:
    """An optimizer, and the steps after which its compressed stage is looked at."""

    label: str
    optimizer: qcomp.Optimizer
    steps: int = 0


@dataclass(frozen=True)
class Cost:
    """What a step of a rank costs; the largest of all ranks."""

    memory: float
    """Bytes that the state holds for each parameter."""
    bits: float
    """Sent in a step for each parameter, over the 2 (N - 1) / N that a ring all-reduce sends of a bit."""
    exchanges: int
    """Collectives in a step, one after the other."""


def cases() -> list[Case]:
    """Return what the table has, in its order."""
    frozen: Mapping[str, Any] = {"learning_rate": 1e-3, "exact": None, "freeze": 1}
    plain: Mapping[str, Any] = {"learning_rate": 1e-3, "exact": None}
    return [
        Case("Adam", qcomp.Adam(learning_rate=1e-3)),
        Case("1-bit Adam", qcomp.OneBitAdam(**frozen), 1),
        Case("QAdam", qcomp.QAdam(**frozen), 1),
        Case("QAdam without feedback", qcomp.QAdam(**frozen, feedback=False), 1),
        Case("SGD, 4-bit QSGD", qcomp.CompressedSGD(**plain)),
        Case("SGD, signs", qcomp.CompressedSGD(**plain, compressor=qcomp.ScaledSign())),
    ]


def measure(case: Case) -> Cost:
    """Return what a step of the compressed stage costs."""

    def rank_main(comm: Communicator) -> tuple[int, int, int]:
        counting = _Counting(comm)
        params = np.ones(SIZE, dtype=np.float32)
        gradient = np.random.default_rng(comm.rank).standard_normal(SIZE, dtype=np.float32)
        state = case.optimizer.init(params, comm)
        for _ in range(case.steps):
            params, state = case.optimizer.step(params, gradient, state, comm)
        before = comm.bytes_sent
        _, state = case.optimizer.step(params, gradient, state, counting)
        return held(state), comm.bytes_sent - before, counting.calls

    memory, sent, calls = (max(values) for values in zip(*run_local(RANKS, rank_main), strict=True))
    ring = 2 * (RANKS - 1) / RANKS
    return Cost(memory / SIZE, 8 * sent / SIZE / ring, calls)


def held(state: OptimizerState) -> int:
    """Return the bytes of all arrays of a state."""
    groups = (state.momentum, state.variance, state.exchange.worker, state.exchange.server)
    return sum(array.nbytes for group in (*groups, *state.arrays.values()) for array in group)


class _Counting:
    """A communicator that counts its collectives."""

    def __init__(self, comm: Communicator) -> None:
        self.rank, self.size, self.comm = comm.rank, comm.size, comm
        self.calls = 0

    def all_to_all(self, send: Any, receive: Any) -> list[Any]:
        """Count, and exchange."""
        self.calls += 1
        return self.comm.all_to_all(send, receive)

    def all_gather(self, send: Any, receive: Any) -> list[Any]:
        """Count, and exchange."""
        self.calls += 1
        return self.comm.all_gather(send, receive)


def table() -> str:
    """Return the table, in Markdown."""
    rows = []
    for case in cases():
        cost = measure(case)
        rows.append([case.label, f"{cost.memory:.2f}", f"{cost.bits:.3f}", str(cost.exchanges)])
    return page.table(
        ["optimizer", "state, bytes a parameter", "bits sent, of a ring's 32", "collectives a step"], rows
    )


def main() -> None:
    """Count and write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("docs/costs"), help="(default: %(default)s)")
    options = parser.parse_args()
    text = table()
    page.rewrite(options.out, {"costs": text})
    print(text)


if __name__ == "__main__":
    main()
