"""Logistic regression on several ranks that send one bit per element: NumPy, with a hand-written gradient.

Start it with ``mpirun -n 3 python -m mpi4py examples/mpi_numpy.py``, or without mpirun for a single rank.
"""

import hashlib
from typing import Any

import numpy as np

import qcomp

xp: Any = np  # or cupy
FEATURES, SAMPLES, BATCH, STEPS, WARMUP = 1_000, 8_000, 200, 300, 100


def generate_data() -> tuple[Any, Any]:
    """Return all rows (samples, features) and their labels, -1 or 1: noisy votes on a hidden direction."""
    rng = np.random.default_rng(0)
    rows = rng.standard_normal((SAMPLES, FEATURES)) / np.sqrt(FEATURES)
    votes = rows @ rng.normal(scale=3.0, size=FEATURES)
    labels = np.where(votes + rng.logistic(size=SAMPLES) > 0, 1.0, -1.0)
    return xp.asarray(rows, dtype=xp.float32), xp.asarray(labels, dtype=xp.float32)


def loss(weights: Any, rows: Any, labels: Any) -> Any:
    """Return the mean logistic loss."""
    return xp.mean(xp.logaddexp(0.0, -labels * (rows @ weights)))


def gradient(weights: Any, rows: Any, labels: Any) -> Any:
    """Return the gradient of the loss with respect to the weights."""
    wrong = 1 / (1 + xp.exp(labels * (rows @ weights)))
    return -(labels * wrong) @ rows / len(labels)


def check_identical(weights: Any, comm: qcomp.comm.Communicator) -> None:
    """End with an error unless all ranks hold the same bytes."""
    digest = hashlib.sha256(np.asarray(weights).tobytes()).digest()
    others = comm.all_gather(np.frombuffer(digest, np.uint8), [len(digest)] * comm.size)
    if any(np.asarray(other).tobytes() != digest for other in others):
        raise SystemExit(f"rank {comm.rank}: the ranks hold different parameters")
    if comm.rank == 0:
        print(f"all {comm.size} ranks hold identical parameters: sha256 {digest.hex()[:16]}...")


def train(rows: Any, labels: Any, comm: qcomp.comm.Communicator) -> Any:
    """Train, each rank on its own share of the rows, and return the weights."""
    own_rows, own_labels = rows[comm.rank :: comm.size], labels[comm.rank :: comm.size]
    # The problem is small: without exact=None the default policy would leave all of it uncompressed.
    opt = qcomp.OneBitAdam(learning_rate=0.05, betas=(0.9, 0.97), freeze=WARMUP, exact=None)
    weights = xp.asarray(np.random.default_rng(comm.rank).normal(scale=0.01, size=FEATURES), dtype=xp.float32)
    weights = qcomp.comm.broadcast(weights, comm)  # all ranks start with the weights of rank 0
    state = opt.init(weights, comm)
    for step in range(STEPS):
        batch = np.random.default_rng((comm.rank, step)).integers(len(own_labels), size=BATCH)
        grads = gradient(weights, own_rows[batch], own_labels[batch])
        weights, state = opt.step(weights, grads, state, comm)
        if comm.rank == 0 and (step + 1) % 50 == 0:
            sent = f"{comm.bytes_sent:9,} bytes sent"
            print(f"step {step + 1:3}  loss {float(loss(weights, rows, labels)):.4f}  {sent}", flush=True)
    return weights


def main() -> None:
    """Train on all ranks."""
    comm = qcomp.comm.world()
    check_identical(train(*generate_data(), comm), comm)


if __name__ == "__main__":
    main()
