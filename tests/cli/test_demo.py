"""``qcomp demo``: four optimizers in one process, with NumPy alone."""

import json

import numpy as np
import pytest

from qcomp.cli import demo
from qcomp.cli.main import main

pytestmark = pytest.mark.filterwarnings(
    "ignore:the variance of OneBitAdam no longer fits"
)  # with tiny batches

NAMES = ["Adam, exact", "1-bit Adam", "QAdam, 8-bit", "SGD, 4-bit QSGD"]


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(demo, "_BATCH", 64)
    monkeypatch.setattr(demo, "_VALIDATION_WINDOWS", 256)


@pytest.mark.slow
def test_it_compares_losses_and_bytes(small, capsys):
    assert main(["demo", "--steps", "50", "--json"]) == 0
    runs = json.loads(capsys.readouterr().out)
    assert [run["optimizer"] for run in runs] == NAMES
    exact, onebit, qadam, qsgd = runs
    size = exact["parameters"]
    assert exact["bytes_sent_per_rank"] == pytest.approx(50 * 4 * size, rel=0.01)
    assert exact["compression_ratio"] == pytest.approx(1, rel=0.01)
    small_tensors = (256 * 16 + 256 + 256) / size  # which stay exact
    for run, bits, warmup in ((onebit, 1, 10), (qadam, 8, 10), (qsgd, 4, 0)):
        share = warmup / 50 + (1 - warmup / 50) * (small_tensors + (1 - small_tensors) * bits / 32)
        assert 1 / run["compression_ratio"] == pytest.approx(share, rel=0.05)
    for run in runs:
        losses = [point["loss"] for point in run["validation"]]
        assert losses[-1] == run["validation_loss"] < losses[0]


def test_the_table_compares_with_adam(small, capsys):
    assert main(["demo", "--steps", "50", "--ranks", "1"]) == 0
    out = capsys.readouterr().out
    head, *rows = out[out.index("optimizer") :].splitlines()[:5]
    assert head.split("  ")[0] == "optimizer"
    for row, name in zip(rows, NAMES, strict=True):
        assert row.startswith(name)
        assert " 0.0 " in row  # one rank sends nothing
    assert "+0.0%" in rows[0]


@pytest.mark.parametrize(("option", "least"), [("--ranks", 1), ("--steps", 50), ("--seed", 0)])
def test_numbers_that_are_too_small_are_refused(capsys, option, least):
    with pytest.raises(SystemExit):
        main(["demo", option, str(least - 1)])
    assert f"{option} is {least - 1}; expected at least {least}" in capsys.readouterr().err


def test_gradients_are_those_of_the_loss():
    params = [p.astype(np.float64) for p in demo._initial(0)]
    windows = np.random.default_rng(1).integers(0, 256, (5, 9))
    _, grads = demo._loss_and_gradients(params, windows)
    direction = [np.random.default_rng(2).standard_normal(p.shape) for p in params]
    for index, (grad, change) in enumerate(zip(grads, direction, strict=True)):
        losses = []
        for sign in (1, -1):
            moved = params.copy()
            moved[index] = params[index] + 1e-5 * sign * change
            losses.append(demo._loss_and_gradients(moved, windows)[0])
        assert np.sum(grad * change) == pytest.approx((losses[0] - losses[1]) / 2e-5, rel=1e-6, abs=1e-9)
