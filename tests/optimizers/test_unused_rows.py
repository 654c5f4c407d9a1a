"""Rows of an embedding that some or all ranks never use, or no longer use."""

from collections.abc import Callable

import numpy as np
import pytest

import qcomp
from qcomp.core import primitives
from qcomp.core.primitives import steps

ROWS, WIDTH, FREEZE, STEPS = 6, 11, 5, 200
NEVER, ONE_RANK, NO_LONGER, USED = 1, 2, 4, [0, 3, 5]
BETA1, RATE = 0.9, 0.01


def one_bit(**changes) -> qcomp.OneBitAdam:
    settings = {"betas": (BETA1, 0.9), "freeze": FREEZE, "exact": None, "compressor": qcomp.ScaledSign(16)}
    return qcomp.OneBitAdam(**{"learning_rate": RATE, **settings, **changes})


OPTIMIZERS = {
    "1-bit": one_bit(),
    "1-bit rms": one_bit(compressor=qcomp.ScaledSign(16, "rms")),
    "1-bit all-gather": one_bit(averaging=qcomp.Averaging(topology="all_gather")),
    "qadam": qcomp.QAdam(
        learning_rate=RATE,
        betas=(BETA1, 0.9),
        freeze=FREEZE,
        exact=None,
        compressor=qcomp.MinMaxUInt8(16),
        variance_steps=None,
    ),
}


@pytest.fixture
def embedding(job: Callable, grads: Callable) -> Callable:
    """Train an embedding: ``embedding(opt, size, each, steps)`` with a call after every compressed step."""

    def run_it(opt, size: int, each: Callable, steps: int = STEPS):
        start = grads([(ROWS, WIDTH)], 99, 0, np.float64)
        run = job(opt, start, size)
        for step in range(FREEZE + steps):
            gradients = [grads([(ROWS, WIDTH)], rank, step, np.float64)[0] - 0.5 for rank in range(size)]
            for rank, g in enumerate(gradients):
                g[NEVER] = 0
                g[ONE_RANK] = 0 if rank else g[ONE_RANK]
                g[NO_LONGER] = g[NO_LONGER] if step < FREEZE else 0
            before = (run.state.momentum[0], owed(run), run.params[0][0])
            run.step([[g] for g in gradients])
            if step >= FREEZE:
                each(run, before, sum(gradients) / size)
        return run, start[0]

    return run_it


def owed(run) -> np.ndarray:
    """Return E = mean_i e_i + e_s, zero without feedback."""
    return (run.error() or [np.zeros(ROWS * WIDTH)])[0].reshape(ROWS, WIDTH)


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize(
    ("name", "size"), [(name, 2) for name in OPTIMIZERS] + [("1-bit", 1), ("1-bit", 3), ("qadam", 1)]
)
def test_never_used_by_any_rank(embedding, name, size):
    """Not a bit changes in 40 compressed steps, in a bucket that has used rows too."""

    def each(run, before, _):
        assert not run.state.momentum[0][NEVER].any()
        assert (run.params[0][0][USED] != before[2][USED]).any(axis=1).all()

    run, start = embedding(OPTIMIZERS[name], size, each, steps=40)
    assert run.params[0][0][NEVER].tobytes() == start[NEVER].tobytes()


def test_a_row_without_the_mask_is_caught(embedding, monkeypatch):
    monkeypatch.setattr(
        steps, "frozen_step", lambda p, m, v, numbers: (primitives.adam_step(p, m, v, numbers), m)
    )
    with pytest.raises(AssertionError):
        test_never_used_by_any_rank(embedding, "1-bit", 2)


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("size", [2, 3])
def test_used_by_one_rank_only(embedding, name, size):
    """It learns like other rows, by the identity of every step: m' + E' = b1 m + (1 - b1) mean_i g_i + E."""

    def each(run, before, mean):
        for row in (ONE_RANK, *USED):
            expected = BETA1 * before[0][row] + (1 - BETA1) * mean[row] + before[1][row]
            assert run.state.momentum[0][row] + owed(run)[row] == pytest.approx(expected, abs=1e-12)

    embedding(OPTIMIZERS[name], size, each, steps=20)


def check_no_longer_used(embedding, opt, size):
    """Check the sum of the row's momenta, (b1 (m_0 - m_T) - E_T) / (1 - b1): E is 0 at the freeze and stays bounded."""
    first, sums, furthest = [], np.zeros(WIDTH), [0.0]

    def each(run, before, _):
        first.append(before[0][NO_LONGER])
        m = run.state.momentum[0][NO_LONGER]
        sums[:] += m
        assert sums == pytest.approx((BETA1 * (first[0] - m) - owed(run)[NO_LONGER]) / (1 - BETA1), abs=1e-9)
        furthest[0] = max(furthest[0], np.abs(sums).max())

    embedding(opt, size, each)
    return furthest[0]


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("1-bit", 3),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in (("1-bit", 1), ("1-bit rms", 2))),
        ("1-bit all-gather", 2),
    ],
)
def test_no_longer_used(embedding, name, size):
    """It moves by the rest of its momentum; then it oscillates with what is owed and does not drift.

    Measured: at most 2.1 to 3.2 momenta away, in a bucket with a scale of about 0.2; a drift would be some 40.
    """
    assert check_no_longer_used(embedding, OPTIMIZERS[name], size) < 6


def test_a_drift_without_feedback_is_caught(embedding):
    """Without feedback, one bit repeats the last sign for ever, with the scale of the neighbouring rows."""
    with pytest.raises(AssertionError):
        check_no_longer_used(embedding, one_bit(averaging=qcomp.Averaging(feedback=False)), 2)
