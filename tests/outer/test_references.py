"""Outer loops with published settings make the steps of their authors' code, and of torchft."""

from collections.abc import Sequence

import numpy as np
import pytest

import qcomp
from qcomp.testing import lockstep

SIZE, KEPT, BUCKET = 256, 8, 64
SPARSE = qcomp.TopK(k=KEPT, bucket_size=BUCKET)


def trained(loop: qcomp.OuterLoop, size: int, params: Sequence[np.ndarray], moves, steps: int) -> list:
    """Return the parameters of rank 0 before each inner step and after the last."""
    own = [[p.copy() for p in params] for _ in range(size)]
    names = [str(number) for number in range(len(params))]
    states = lockstep([loop.init_stages(p, rank=rank, size=size, names=names) for rank, p in enumerate(own)])
    trail = [own[0]]
    for step in range(steps):
        after = [[p - m for p, m in zip(own[rank], moves(rank, step), strict=True)] for rank in range(size)]
        found = lockstep([loop.stages(p, s) for p, s in zip(after, states, strict=True)])
        own, states = map(list, zip(*found, strict=True))
        trail.append(own[0])
    return trail


TORCHFT = [
    (0, 0.0, [1, -1, -3, -11, -13, -15, -17, -19, -21, -35, -37, -39, -41, -43, -45, -59]),
    (0, 0.0, [1, -1, -3, -5, -7, -9, -23, -25, -27, -29, -31, -33, -47, -49, -51, -53]),
    (0, 0.5, [1, -1, -3, -8, -10, -12, -14, -16, -18, -24.5, -26.5, -28.5, -30.5, -32.5, -34.5, -40.25]),
    (0, 0.5, [1, -1, -3, -5, -7, -9, -17, -19, -21, -23, -25, -27, -32, -34, -36, -38]),
    (0, 1.0, [1, -1, -3, -5, -7, -9, -11, -13, -15, -17, -19, -21, -23, -25, -27, -29]),
    (0, 1.0, [1, -1, -3, -5, -7, -9, -11, -13, -15, -17, -19, -21, -23, -25, -27, -29]),
    (1, 0.0, [1, -1, -3, -7, -9, -11, -13, -15, -17, -27, -29, -31, -33, -35, -37, -47]),
    (1, 0.0, [1, -1, -3, -5, -7, -9, -19, -21, -23, -25, -27, -29, -39, -41, -43, -45]),
    (1, 0.5, [1, -1, -3, -6, -8, -10, -12, -14, -16, -21.5, -23.5, -25.5, -27.5, -29.5, -31.5, -35.75]),
    (1, 0.5, [1, -1, -3, -5, -7, -9, -15, -17, -19, -21, -23, -25, -29, -31, -33, -35]),
    (1, 1.0, [1, -1, -3, -5, -7, -9, -11, -13, -15, -17, -19, -21, -23, -25, -27, -29]),
    (1, 1.0, [1, -1, -3, -5, -7, -9, -11, -13, -15, -17, -19, -21, -23, -25, -27, -29]),
]
"""Delay, mixing and the history of a parameter: torchft's test_diloco_mocked_updates, 0 to 5, each with two layers."""


@pytest.mark.parametrize("case", range(6))
def test_turns_that_apply_are_those_of_torchft(case):
    """Its regression test: two replicas, two fragments in 6 steps, inner steps of 2, an outer rate of 2."""
    delay, mixing, _ = TORCHFT[2 * case]
    outer = qcomp.SGD(learning_rate=2.0)
    loop = qcomp.OuterLoop(every=6, fragments=2, delay=delay, mixing=mixing, turn="apply", outer=outer)
    trail = trained(
        loop, 2, [np.ones(1, np.float32)] * 2, lambda *_: [np.full(1, 2, np.float32)] * 2, steps=15
    )
    for layer in range(2):
        assert [float(params[layer][0]) for params in trail] == TORCHFT[2 * case + layer][2]


def small(tensors) -> list[bool]:
    return [tensor.size < KEPT for tensor in tensors]


def kept(values: np.ndarray) -> np.ndarray:
    """Return the largest elements of each bucket, and zeros."""
    rows = values.reshape(-1, BUCKET).copy()
    for row in rows:
        row[np.argsort(-abs(row), kind="stable")[KEPT:]] = 0
    return rows.reshape(-1)


def moves(rank: int, step: int) -> list[np.ndarray]:
    rng = np.random.default_rng([rank, step])
    return [np.asarray(rng.standard_normal(n) / 10 + 0.05, np.float32) for n in (SIZE, 3)]


def test_muloco_moves_compressed_tensors_by_the_square_of_its_rate():
    """As MuLoCo's QuantizedOuterSGD, of which this is the formula: it left 5e-7 after 12 rounds of this test."""
    rate, momentum, decay, size = 0.8, 0.9, 0.9, 2
    params = [np.linspace(-1, 1, SIZE, dtype=np.float32), np.ones(3, np.float32)]
    loop = qcomp.outer.muloco(
        1,
        compressor=SPARSE,
        averaging=qcomp.Averaging(topology="all_gather"),
        exact=small,
    )
    found = trained(loop, size, params, moves, steps=12)[-1]
    theta = [p.astype(np.float64) for p in params]
    owed, buffers = np.zeros((size, SIZE)), [np.zeros_like(p) for p in theta]
    for step in range(12):
        sent = []
        for rank in range(size):
            compensated = decay * owed[rank] + rate * moves(rank, step)[0]
            sent.append(kept(compensated))
            owed[rank] = compensated - sent[-1]
        exact = np.mean([moves(rank, step)[1] for rank in range(size)], axis=0)
        for i, mean in enumerate((np.mean(sent, axis=0), exact)):
            buffers[i] = momentum * buffers[i] + mean
            theta[i] = theta[i] - rate * (mean + momentum * buffers[i])
    for p, expected in zip(found, theta, strict=True):
        assert np.allclose(p, expected, atol=2e-6)
    once = trained(
        qcomp.outer.muloco(1, compressor=SPARSE, averaging=loop.averaging, exact=loop.exact, scale=1),
        size,
        params,
        moves,
        steps=1,
    )
    first = trained(loop, size, params, moves, steps=1)
    assert np.allclose((first[1][0] - params[0]) / rate, once[1][0] - params[0], atol=1e-6)
    assert np.array_equal(first[1][1], once[1][1])


@pytest.mark.parametrize("size", [2, 4])
def test_sparse_loco_divides_by_the_ranks_that_sent_an_element(size):
    """As templar and DeMo: the mean over those that sent an element, and nothing where none did."""
    params = [np.zeros(SIZE, np.float32), np.zeros(3, np.float32)]
    loop = qcomp.outer.sparse_loco(1, compressor=SPARSE, exact=small)
    found = trained(loop, size, params, moves, steps=10)[-1]
    theta, owed = np.zeros(SIZE), np.zeros((size, SIZE))
    for step in range(10):
        sent = []
        for rank in range(size):
            compensated = 0.95 * owed[rank] + moves(rank, step)[0]
            sent.append(kept(compensated))
            owed[rank] = compensated - sent[-1]
        for i in range(SIZE):
            of_senders = [values[i] for values in sent if values[i] != 0]
            theta[i] -= sum(of_senders) / len(of_senders) if of_senders else 0
    assert np.allclose(found[0], theta, atol=2e-6)
    average = [np.mean([moves(rank, step)[1] for rank in range(size)], axis=0) for step in range(10)]
    assert np.allclose(found[1], -np.sum(average, axis=0), atol=2e-6)
    by_all = trained(
        qcomp.outer.sparse_loco(
            1, compressor=SPARSE, exact=loop.exact, averaging=qcomp.Averaging(topology="all_gather")
        ),
        size,
        params,
        moves,
        steps=10,
    )[-1]
    assert 0.5 / size < np.linalg.norm(by_all[0]) / np.linalg.norm(found[0]) < 1.5 / size


def test_published_settings():
    """What the functions promise in docs/outer_loop.md."""
    muloco, sparse = qcomp.outer.muloco(), qcomp.outer.sparse_loco()
    assert (muloco.outer.learning_rate, muloco.outer.momentum, muloco.scale, muloco.decay) == (
        0.8,
        0.9,
        0.8,
        0.9,
    )
    assert (sparse.averaging.divisor, sparse.averaging.topology, sparse.decay) == (
        "senders",
        "all_gather",
        0.95,
    )
    assert qcomp.outer.streaming_diloco().turn == "send"
