"""Runs the compat mode on the gradients given to the original, and measures the distance of the results."""

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import qcomp
from qcomp.compat import deepspeed

collect_ignore = ["deepspeed_original.py"]  # imports its neighbour, which works only in a program

NAMES = ("weight", "embedding", "masked")
Found = dict[str, np.ndarray]


def load(name: str) -> ModuleType:
    """Import a module beside this one, under the name by which the scripts here import each other."""
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, Path(__file__).parent / f"{name}.py")
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return sys.modules[name]


def make(name: str, cases: ModuleType, **changes: Any) -> Any:
    """Return an optimizer of the compat mode with the options of the cases."""
    options = {**cases.COMMON, **cases.OPTIONS[name], **changes}
    return getattr(deepspeed, name)(
        cases.rate,
        exp_avg_mask={"masked": cases.MASK},
        groups=(qcomp.Group("masked", weight_decay=0.0),),
        **options,
    )


def held(state: Any) -> dict[str, np.ndarray]:
    """Return the contents of a state, under the original's names."""
    of = {"exp_avg": state.momentum, "exp_avg_sq": state.variance, **state.arrays}
    return {f"{kind}.{i}": np.asarray(x) for kind, arrays in of.items() for i, x in enumerate(arrays)}


@pytest.fixture(name="make")
def make_fixture() -> Callable[..., Any]:
    return make


@pytest.fixture
def golden() -> Callable[[int], Path]:
    """Return the file with the recording of a world."""
    return lambda world: Path(__file__).parent / "golden" / f"deepspeed_world{world}.npz"


@pytest.fixture
def cases() -> ModuleType:
    return load("deepspeed_cases")


@pytest.fixture
def original() -> ModuleType:
    load("deepspeed_cases")
    return load("deepspeed_original")


@pytest.fixture
def ours(lockstep: Callable, cases: ModuleType) -> Callable[..., list[Found]]:
    """Run an optimizer of the compat mode: ``ours(name, world, opt=None, convert=list)`` returns the trajectories."""

    def run(name: str, world: int, opt: Any = None, convert: Callable = list) -> list[Found]:
        opt = make(name, cases) if opt is None else opt
        params = [convert(cases.parameters(world)) for _ in range(world)]
        states = [opt.initial_state(params[0], NAMES, rank, world) for rank in range(world)]
        found: list[Found] = [{} for _ in range(world)]
        paths: list[list[np.ndarray]] = [[] for _ in range(world)]
        for step in range(1, cases.STEPS + 1):
            grads = [convert(cases.gradients(world, rank, step)) for rank in range(world)]
            results = lockstep([opt.stages(*each) for each in zip(params, grads, states, strict=True)])
            params, states = [p for p, _ in results], [s for _, s in results]
            for rank, (p, s) in enumerate(results):
                paths[rank].append(np.concatenate([np.asarray(x).ravel() for x in p]))
                if step in cases.SNAPSHOTS:
                    found[rank] |= {f"{name}/{step}/{key}": x for key, x in held(s).items()}
        for rank, path in enumerate(paths):
            found[rank][f"{name}/params"] = np.stack(path)
        return found

    return run


@pytest.fixture
def distance() -> Callable[[str, list[Found], list[Found]], dict[str, float]]:
    """Return the distance of two trajectories by kind: the largest difference over all steps, ranks and elements.

    It is absolute, or relative to the largest element of an array if that is above 1.

    Arrays that only the original keeps must be zero: a single rank's errors, and errors that it has already dropped.
    """

    def between(name: str, theirs: list[Found], ours: list[Found]) -> dict[str, float]:
        largest: dict[str, float] = {}
        for t, o in zip(theirs, ours, strict=True):
            for key in (key for key in t if key.startswith(f"{name}/")):
                kind = key.rpartition("/")[2].partition(".")[0]
                other = o.get(key)
                if other is None or other.size == 0:
                    assert not t[key].any(), key
                    continue
                assert other.shape == t[key].shape, key
                apart = np.abs(t[key].astype(np.float64) - other).max() / max(1.0, np.abs(t[key]).max())
                largest[kind] = max(largest.get(kind, 0.0), float(apart))
        return largest

    return between
