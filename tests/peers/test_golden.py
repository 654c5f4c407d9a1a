"""The compat mode reproduces trajectories of the original, recorded in this folder."""

import importlib
from collections.abc import Callable
from dataclasses import replace
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from qcomp.compat.deepspeed import OnebitAdam, OnebitLamb, ZeroOneAdam

NAMES = ("onebit_adam", "zero_one_adam", "onebit_lamb")
TOLERANCE = 1e-6


@pytest.fixture
def apart(original: ModuleType, ours: Callable, distance: Callable, golden: Callable) -> Callable[..., float]:
    """Return the distance of a run of the compat mode from the recording."""

    def measure(name: str, world: int, opt: Any = None, convert: Callable = list) -> float:
        theirs = original.read(golden(world), world)
        return max(distance(name, theirs, ours(name, world, opt, convert)).values())

    return measure


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("name", NAMES)
def test_same_trajectory(apart, name, world):
    """Parameters after each of 40 steps; moments, errors of workers and servers at each change of stage."""
    assert apart(name, world) < TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_same_trajectory_in_torch(apart, name):
    torch = pytest.importorskip("torch")
    assert apart(name, 2, convert=lambda arrays: [torch.from_numpy(a) for a in arrays]) < TOLERANCE


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


class FirstCallCounts(OnebitAdam):
    def initial_state(self, *args):
        return super().initial_state(*args)._replace(step=1)


class FreshPadding(OnebitLamb):
    def _last_step(self, params, grads, state):
        if "exp_avg_padding" in state.arrays:
            padding = tuple(np.zeros_like(p) for p in state.arrays["exp_avg_padding"])
            state = state._replace(arrays={**state.arrays, "exp_avg_padding": padding})
        return (yield from super()._last_step(params, grads, state))


class KeptErrors(ZeroOneAdam):
    def enter(self, state, stage):
        entered = super().enter(state, stage)
        return entered._replace(arrays={**entered.arrays, **state.arrays})


def of_kind(kind: type, opt: Any) -> Any:
    """Return an optimizer of another class with the same options."""
    return kind(**{field: getattr(opt, field) for field in opt.__dataclass_fields__})


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("onebit_adam", {"freeze_step": 11}),
        ("onebit_adam", {"weight_decay": 0.0}),
        ("onebit_adam", {"exp_avg_mask": None}),
        ("onebit_adam", {"eps": 1e-4}),
        ("zero_one_adam", {"var_freeze_step": 21}),
        ("zero_one_adam", {"var_update_scaler": 4}),
        ("zero_one_adam", {"local_step_scaler": 4}),
        ("zero_one_adam", {"local_step_clipper": 2}),
        ("zero_one_adam", {"exp_avg_mask": None}),
        ("onebit_lamb", {"freeze_step": 9}),
        ("onebit_lamb", {"coeff_beta": 0.9}),
        ("onebit_lamb", {"factor_threshold": 0.1}),
        ("onebit_lamb", {"max_coeff": 10.0}),
        ("onebit_lamb", {"min_coeff": 0.01}),
        ("onebit_lamb", {"factor_max": 4.0}),
        ("onebit_lamb", {"factor_min": 0.5}),
        ("onebit_lamb", {"groups": ()}),
        ("onebit_adam", FirstCallCounts),
        ("onebit_lamb", FreshPadding),
        ("zero_one_adam", KeptErrors),
    ],
)
def test_a_different_optimizer_is_detected(cases, apart, make, name, changes):
    opt = make(name, cases)
    opt = replace(opt, **changes) if isinstance(changes, dict) else of_kind(changes, opt)
    assert apart(name, 2, opt) > 1e-4


@pytest.mark.parametrize("name", NAMES)
def test_a_different_scale_is_detected(apart, monkeypatch, name):
    """It uses the mean magnitude instead of the root mean square."""
    module = importlib.import_module("qcomp.compat.deepspeed.sign_mean")
    monkeypatch.setattr(module, "norm", lambda x: np.abs(x).mean() * np.float32(np.sqrt(x.size)))
    assert apart(name, 2) > 1e-4
