"""Gradients that change after the freeze: a warning comes before anything diverges, and a re-warm measures again."""

import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest

import qcomp
from qcomp import VarianceWatch

SIZE, RANKS = 400, 2
BETAS, WINDOW, FREEZE, CHANGE, STEPS = (0.9, 0.98), 50, 100, 150, 600
AGAIN = VarianceWatch(rewarm_steps=3 * WINDOW)
TARGET = np.random.default_rng(9).standard_normal(SIZE)
LATE = np.arange(SIZE) % 10 == 0
LOST = 10.0
"""The loss counts as lost when an element is this many times further from its target than at the start."""

pytestmark = pytest.mark.filterwarnings("ignore:overflow|invalid value")


class End(NamedTuple):
    """The outcome of a run."""

    error: float
    warned: int | None
    """The first step with a warning from the watch."""
    lost: int | None
    """The first step where the loss is lost."""
    exact: int
    moved: int


def jump(step: int) -> Any:
    return 100.0 if step >= CHANGE else 1.0


def late(step: int) -> Any:
    return 1.0 if step >= CHANGE else np.where(LATE, 0.0, 1.0)


def growing(step: int) -> Any:
    return 100.0 ** min(1.0, max(0.0, (step - FREEZE) / 200))


def constant(_: int) -> float:
    return 0.02


def rising(step: int) -> float:
    return 0.02 * min(1.0, (step + 1) / (3 * FREEZE))


CASES: dict[str, tuple[Callable[[int], Any], Callable[[int], float]]] = {
    "curvature times 100": (jump, constant),
    "late first gradients": (late, constant),
    "the rate rises past the freeze, and the curvature with it": (growing, rising),
}


def train(job: Any, opt: Any, change: Callable[[int], Any], *, after_warning: int = STEPS) -> End:
    """Minimise |x - target|^2 times a changing curvature, with noise on each rank."""
    run, draws = job(opt, [np.zeros(SIZE)], RANKS), np.random.default_rng(0)
    warned = lost = None
    exact = 0
    for step in range(STEPS):
        exact += run.state.stage != "compressed"
        x = run.params[0][0]
        gradients = [[change(step) * (x - TARGET + 0.1 * draws.standard_normal(SIZE))] for _ in range(RANKS)]
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            run.step(gradients)
        told = [w for w in found if "no longer fits the gradients" in str(w.message)]
        warned = step if told and warned is None else warned
        if warned is not None and step >= warned + after_warning:
            break
        if lost is None and not np.abs(run.params[0][0] - TARGET).max() < LOST * np.abs(TARGET).max():
            lost = step
            break
    x = run.params[0][0]
    return End(float(np.sqrt(np.mean((x - TARGET) ** 2))), warned, lost, exact, int((x[LATE] != 0).sum()))


def settings(name: str) -> dict[str, Any]:
    return {"learning_rate": CASES[name][1], "betas": BETAS, "freeze": FREEZE, "exact": None}


def check_warned(job: Any, make: Any, name: str, **changes: Any) -> None:
    """By default the watch warns before the loss is lost, and within a window after the change."""
    end = train(job, make(**settings(name), **changes), CASES[name][0], after_warning=6)
    assert end.warned is not None
    assert end.lost is None or end.warned < end.lost - 5
    if name.startswith(("curvature", "late")):
        assert CHANGE <= end.warned <= CHANGE + 20


class TestWarned:
    @pytest.mark.quick_cases(1)
    @pytest.mark.parametrize("make", [qcomp.OneBitAdam, qcomp.QAdam, qcomp.OneBitLamb])
    @pytest.mark.parametrize("name", CASES)
    def test_before_the_loss_is_lost(self, job, make, name):
        check_warned(job, make, name, variance_steps=None)

    def test_without_a_watch_it_diverges_in_silence(self, job):
        """This shows that the cases in these tests are dangerous."""
        end = train(job, qcomp.OneBitAdam(**settings("curvature times 100"), watch=None), jump)
        assert end.warned is None
        assert end.lost is not None

    @pytest.mark.quick_cases(1)
    @pytest.mark.parametrize("name", CASES)
    def test_a_watch_that_sees_nothing_is_caught(self, job, monkeypatch, name):
        monkeypatch.setattr(VarianceWatch, "observe", lambda self, state, *_: (state, []))
        with pytest.raises(AssertionError):
            check_warned(job, qcomp.OneBitAdam, name)

    def test_a_watch_that_ignores_the_momentum_warns_later(self, job, monkeypatch):
        """The jump falls between two measurements of the gradient, which may be far apart."""
        nothing = qcomp.core.variance.watch._Finding(0.0, "")
        steps = []
        for feels in (True, False):
            if not feels:
                monkeypatch.setattr(VarianceWatch, "_felt", lambda self, state: (state, nothing))
            opt = qcomp.OneBitAdam(**settings("curvature times 100"), watch=VarianceWatch(every=40))
            steps.append(train(job, opt, jump).warned)
        assert steps[0] < CHANGE + 8
        assert steps[0] < steps[1]

    @pytest.mark.slow
    @pytest.mark.parametrize("make", [qcomp.OneBitAdam, pytest.param(qcomp.QAdam, marks=pytest.mark.slow)])
    @pytest.mark.parametrize(
        "compressor",
        [None, qcomp.ScaledSign(64, "l1"), pytest.param(qcomp.QSGD(7, 64), marks=pytest.mark.slow)],
    )
    def test_no_warning_while_nothing_changes(self, job, make, compressor):
        """Noisy gradients around a constant mean, with magnitudes that differ widely between elements."""
        given = {} if compressor is None else {"compressor": compressor}
        opt = make(learning_rate=0.001, betas=BETAS, freeze=FREEZE, exact=None, **given)
        draws = np.random.default_rng(3)
        scale = np.logspace(-4, 0, SIZE)
        run = job(opt, [np.zeros(SIZE)], RANKS)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for _ in range(FREEZE + 3 * WINDOW):
                run.step([[scale * (0.3 + draws.standard_normal(SIZE))] for _ in range(RANKS)])
        assert run.state.stage == "compressed"


class TestCured:
    @pytest.mark.exhaustive
    @pytest.mark.parametrize(
        "make", [qcomp.OneBitAdam, pytest.param(qcomp.QAdam, marks=pytest.mark.exhaustive)]
    )
    @pytest.mark.parametrize("name", CASES)
    def test_ends_within_twice_the_error_of_adam(self, job, make, name):
        change, rate = CASES[name]
        adam = train(job, qcomp.Adam(learning_rate=rate, betas=BETAS), change)
        end = train(job, make(**settings(name), watch=AGAIN), change)
        assert end.lost is None
        assert end.error <= 2 * adam.error
        assert end.moved == LATE.sum()
        assert end.exact <= FREEZE + 2 * AGAIN.rewarm_steps

    @pytest.mark.slow
    def test_a_warning_without_a_re_warm_does_not_help(self, job):
        adam = train(job, qcomp.Adam(learning_rate=constant, betas=BETAS), late)
        end = train(job, qcomp.OneBitAdam(**settings("late first gradients")), late)
        assert end.error > 2 * adam.error
        assert end.moved == 0
