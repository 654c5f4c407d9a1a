"""The costs of each optimizer: memory per parameter, bits sent per parameter, and collectives per step.

    python benchmarks/costs.py

They are counted, not timed: from the arrays of a state, from the bytes that a communicator counts, and from the
exchanges that a step requests. Writes the table of docs/costs/README.md.
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
SHAPE = (256, 256)
"""Elements of the only tensor, which is compressed as a whole."""
SIZE = SHAPE[0] * SHAPE[1]


@dataclass(frozen=True)
class Case:
    """An optimizer, and the number of steps before the measured one, since the first step also compares gradients."""

    label: str
    optimizer: qcomp.Optimizer
    steps: int = 1
    hosts: tuple[str, ...] = ()
    """The node of each rank; by default each rank is a node of its own."""


@dataclass(frozen=True)
class Cost:
    """The cost of a step: the largest over all ranks."""

    memory: float
    """Bytes of the state per parameter."""
    bits: float
    """Bits sent per step and parameter, over 2 (N - 1) / N: the bits that a ring all-reduce sends for each bit."""
    exchanges: int
    """Collectives in a step, one after the other."""


def cases() -> list[Case]:
    """Return the rows of the table, in order."""
    plain: Mapping[str, Any] = {"learning_rate": 1e-3, "exact": None}
    frozen: Mapping[str, Any] = {**plain, "betas": (0.9, 0.9), "freeze": 1}
    eight_bits: Mapping[str, Any] = {**frozen, "variance_steps": None}  # counts a compressed step
    zero_one: Mapping[str, Any] = {**frozen, "sync_steps": qcomp.LocalSteps(1, 2)}
    return [
        Case("Adam", qcomp.Adam(learning_rate=1e-3)),
        Case("1-bit Adam", qcomp.OneBitAdam(**frozen), 1),
        Case("QAdam", qcomp.QAdam(**eight_bits), 1),
        Case(
            "QAdam without feedback", qcomp.QAdam(**eight_bits, averaging=qcomp.Averaging(feedback=False)), 1
        ),
        Case(
            "QAdam, two nodes of two ranks, inside them exact",
            qcomp.QAdam(**eight_bits, averaging=qcomp.Averaging(topology="hierarchical")),
            1,
            ("a", "a", "b", "b"),
        ),
        Case("0/1 Adam, a step that synchronises", qcomp.ZeroOneAdam(**zero_one), 3),
        Case("0/1 Adam, a step in between", qcomp.ZeroOneAdam(**zero_one), 4),
        Case("1-bit LAMB", qcomp.OneBitLamb(**frozen), 1),
        Case("SGD, 4-bit QSGD", qcomp.CompressedSGD(**plain)),
        Case("SGD, 4-bit QSGD, L2 norm, range coder", qcomp.CompressedSGD(**plain, **coded())),
        Case("SGD, 1-bit SGD", qcomp.CompressedSGD(**plain, compressor=qcomp.OneBitSGD())),
        Case("QSVRG, within an epoch", qcomp.QSVRG(**plain)),
    ]


def coded() -> Mapping[str, Any]:
    """Return settings with messages of variable length, which need an exchange of lengths before each."""
    return {
        "compressor": qcomp.QSGD(levels=7, norm="l2", coding="range"),
        "averaging": qcomp.Averaging(feedback=False),
    }


def measure(case: Case) -> Cost:
    """Return the cost of a step of the compressed stage."""

    def rank_main(comm: Communicator) -> tuple[int, int, int]:
        counting = _Counting(comm)
        params = np.ones(SHAPE, dtype=np.float32)
        gradient = np.random.default_rng(comm.rank).standard_normal(SHAPE, dtype=np.float32)
        state = case.optimizer.init(params, comm)
        grads: Any = gradient
        if isinstance(case.optimizer, qcomp.QSVRG):
            state = case.optimizer.begin_epoch(params, gradient, state, comm)
            grads = (gradient, gradient)
        for _ in range(case.steps):
            params, state = case.optimizer.step(params, grads, state, comm)
        before = comm.bytes_sent
        _, state = case.optimizer.step(params, grads, state, counting)
        return held(state), comm.bytes_sent - before, counting.calls

    hosts = case.hosts or tuple(map(str, range(RANKS)))
    results = run_local(RANKS, rank_main, hosts=hosts)
    memory, sent, calls = (max(values) for values in zip(*results, strict=True))
    ring = 2 * (RANKS - 1) / RANKS
    return Cost(memory / SIZE, 8 * sent / SIZE / ring, calls)


def held(state: OptimizerState) -> int:
    """Return the bytes of all arrays of a state."""
    groups = (state.momentum, state.variance, state.exchange.worker, state.exchange.server)
    return sum(np.asarray(array).nbytes for group in (*groups, *state.arrays.values()) for array in group)


class _Counting:
    """A communicator that counts its collectives."""

    compares_owners = True

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
