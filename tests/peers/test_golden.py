"""DeepSpeed's steps in NumPy follow recordings of DeepSpeed, and qcomp's differ from them as the page says."""

from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

import qcomp

NAMES = ("onebit_adam", "zero_one_adam", "onebit_lamb")
TOLERANCE = 1e-6


@pytest.fixture
def apart(original: ModuleType, ours: Callable, distance: Callable, golden: Callable) -> Callable[..., float]:
    """Return the distance from the recording: ``apart(name, world, kind=None, **changes)``."""

    def measure(name: str, world: int, kind: type | None = None, **changes: object) -> float:
        theirs = original.read(golden(world), world)
        return max(distance(name, theirs, ours(name, world, kind, **changes)).values())

    return measure


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("name", NAMES)
def test_same_trajectory(apart, name, world):
    """Parameters after each of 40 steps; moments, errors of workers and servers at each change of stage."""
    assert apart(name, world) < TOLERANCE


@pytest.mark.parametrize("name", NAMES)
def test_the_recording_reaches_every_stage_and_every_rank(cases, original, golden, name):
    """Errors are nonzero and differ by rank, and so do 0/1 Adam's parameters in steps that do not synchronise."""
    theirs = original.read(golden(3), 3)
    for kind in ("worker_error", "server_error"):
        found = [own[f"{name}/40/{kind}.{0 if name == 'onebit_lamb' else 1}"] for own in theirs]
        assert len({x.tobytes() for x in found}) == 3
        assert all(x.any() for x in found)
    paths = [own[f"{name}/params"] for own in theirs]
    apart = [max(float(np.abs(p[step] - paths[0][step]).max()) for p in paths) for step in range(cases.STEPS)]
    differs = {step for step, distance in enumerate(apart, start=1) if distance > 1e-5}
    assert differs == ({25, 27, 29, 30, 31, 33, 34, 35, 37, 38, 39} if name == "zero_one_adam" else set())


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("onebit_adam", {"freeze_step": 11}),
        ("onebit_adam", {"weight_decay": [0.0] * 3}),
        ("onebit_adam", {"masks": [1] * 3}),
        ("onebit_adam", {"eps": 1e-4}),
        ("onebit_adam", {"bucket": 8}),
        ("zero_one_adam", {"var_freeze_step": 21}),
        ("zero_one_adam", {"var_update_scaler": 4}),
        ("zero_one_adam", {"local_step_scaler": 4}),
        ("zero_one_adam", {"local_step_clipper": 2}),
        ("zero_one_adam", {"masks": [1] * 3}),
        ("onebit_lamb", {"freeze_step": 9}),
        ("onebit_lamb", {"coeff_beta": 0.9}),
        ("onebit_lamb", {"factor_threshold": 0.1}),
        ("onebit_lamb", {"max_coeff": 10.0}),
        ("onebit_lamb", {"min_coeff": 0.01}),
        ("onebit_lamb", {"factor_max": 4.0}),
        ("onebit_lamb", {"factor_min": 0.5}),
        ("onebit_lamb", {"weight_decay": [0.02] * 3}),
    ],
)
def test_other_options_are_detected(apart, name, changes):
    assert apart(name, 2, **changes) > 1e-4


def test_a_first_call_that_counts_is_detected(apart, steps):
    class FirstCallCounts(steps.OneBitAdam):
        def start(self):
            self.calls = 1

    assert apart("onebit_adam", 2, FirstCallCounts) > 1e-4


def test_padding_that_is_zero_again_is_detected(apart, steps):
    class FreshPadding(steps.OneBitLamb):
        def frozen_step(self, grads, rate):
            self.padding = 0 * self.padding
            super().frozen_step(grads, rate)

    assert apart("onebit_lamb", 2, FreshPadding) > 1e-4


def test_errors_kept_at_the_freeze_are_detected(apart, steps):
    class KeptErrors(steps.ZeroOneAdam):
        def freeze(self):
            errors = self.errors
            super().freeze()
            self.errors = errors

    assert apart("zero_one_adam", 2, KeptErrors) > 1e-4


@pytest.mark.parametrize("name", NAMES)
def test_a_different_scale_is_detected(apart, steps, monkeypatch, name):
    """It uses the mean magnitude instead of the root mean square."""

    def signs(values, bucket):
        return np.where(values < 0, -1, 1) * np.abs(values).mean(axis=1, keepdims=True)

    monkeypatch.setattr(steps, "signs", signs)
    assert apart(name, 2) > 1e-4


BUCKET, RANKS, STEPS, FREEZE = 4096, 2, 30, 8


def gradient(rank: int, step: int) -> np.ndarray:
    rng = np.random.default_rng([29, rank, step])
    drawn = rng.standard_normal(RANKS * BUCKET) * rng.uniform(0.1, 2.0) + 0.3
    return drawn.astype(np.float32)


def rate(step: int) -> float:
    return 0.01 * (1 + step % 3)


def test_onebit_adam_differs_from_deepspeeds_as_the_page_says_and_not_otherwise(steps):
    """It loses no first call, corrects the bias, which is frozen with the variance, and has a scale for each bucket."""

    class Corrected(steps.OneBitAdam):
        def start(self):
            self.calls = 1

        def directions(self):
            count = self.calls - 1
            beta1, beta2 = self.betas
            first = 1 - beta1**count
            second = 1 - beta2 ** min(count, self.freeze_step - 1)
            moments = zip(self.m, self.v, self.x, strict=True)
            decay = self.weight_decay[0]
            return [m / first / (np.sqrt(v / second) + self.eps) + decay * x for m, v, x in moments]

    start = gradient(99, 0)
    shared = {"betas": (0.9, 0.95), "eps": 1e-8}
    opt = qcomp.OneBitAdam(
        learning_rate=rate,
        weight_decay=0.02,
        freeze=FREEZE,
        exact=None,
        variance_floor=0.0,
        watch=None,
        **shared,
    )

    def rank_main(comm):
        params, path = start, []
        state = opt.init(params, comm)
        for step in range(STEPS):
            params, state = opt.step(params, gradient(comm.rank, step), state, comm)
            path.append(params)
        return path

    (path, *_) = qcomp.comm.run_local(RANKS, rank_main)

    def apart(kind, bucket):
        options = {"weight_decay": [0.02], "masks": [1], "bucket": bucket, "freeze_step": FREEZE + 1}
        theirs, worst = kind([start], RANKS, **options, **shared), 0.0
        for step, x in enumerate(path):
            theirs.step([np.stack([gradient(rank, step) for rank in range(RANKS)])], rate(step))
            worst = max(worst, float(np.abs(theirs.x[0][0] - x).max()))
        return worst

    assert apart(Corrected, BUCKET) < 2e-6
    assert apart(steps.OneBitAdam, BUCKET) > 0.01
    assert apart(Corrected, 0) > 1e-4


def test_a_checkpoint_of_deepspeed_goes_on_in_onebit_adam(steps):
    """As the page puts it into a state: the next steps are DeepSpeed's, which forgets its errors too."""
    shared = {"betas": (0.9, 0.95), "eps": 1e-8}
    options = {"weight_decay": [0.02], "masks": [1], "bucket": BUCKET, "freeze_step": 150}
    theirs = steps.OneBitAdam([gradient(99, 0)], RANKS, **options, **shared)

    def go_on(first, last):
        for step in range(first, last):
            theirs.step([np.stack([gradient(rank, step) for rank in range(RANKS)])], 0.01)

    go_on(0, 200)
    saved = [x[0][0].copy() for x in (theirs.x, theirs.m, theirs.v)]
    theirs.errors = [{}]
    go_on(200, 205)
    opt = qcomp.OneBitAdam(
        learning_rate=0.01, weight_decay=0.02, freeze=150, exact=None, watch=None, **shared
    )

    def rank_main(comm, stage):
        params, momentum, variance = saved
        state = opt.init(params, comm)
        state = opt.enter(state._replace(step=199, momentum=(momentum,), variance=(variance,)), stage)
        for step in range(200, 205):
            params, state = opt.step(params, gradient(comm.rank, step), state, comm)
        return float(np.abs(params - theirs.x[0][0]).max())

    assert max(qcomp.comm.run_local(RANKS, lambda comm: rank_main(comm, "compressed"))) < 1e-6
    assert min(qcomp.comm.run_local(RANKS, lambda comm: rank_main(comm, "warmup"))) > 1e-3


def test_the_page_on_migration_names_every_setting(cases):
    page = (Path(__file__).parents[2] / "docs" / "migrate" / "deepspeed.md").read_text()
    for name in {"lr", "exp_avg_mask", *cases.COMMON}.union(*cases.OPTIONS.values()):
        assert f"`{name}" in page, name
