"""Runs DeepSpeed's steps in NumPy on the gradients given to the original, and measures the distance of the results."""

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

collect_ignore = ["deepspeed_original.py"]  # imports its neighbour, which works only in a program

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


@pytest.fixture
def golden() -> Callable[[int], Path]:
    """Return the file with the recording of a world."""
    return lambda world: Path(__file__).parent / "golden" / f"deepspeed_world{world}.npz"


@pytest.fixture
def cases() -> ModuleType:
    return load("deepspeed_cases")


@pytest.fixture
def steps() -> ModuleType:
    return load("deepspeed_steps")


@pytest.fixture
def original() -> ModuleType:
    load("deepspeed_cases")
    return load("deepspeed_original")


@pytest.fixture
def ours(cases: ModuleType, steps: ModuleType) -> Callable[..., list[Found]]:
    """Return the trajectories of all ranks: ``ours(name, world, kind=None, **changes)``, of the options."""

    def run(name: str, world: int, kind: type | None = None, **changes: object) -> list[Found]:
        kind = (
            kind
            or {
                "onebit_adam": steps.OneBitAdam,
                "zero_one_adam": steps.ZeroOneAdam,
                "onebit_lamb": steps.OneBitLamb,
            }[name]
        )
        decay = cases.COMMON["weight_decay"]
        options = {**cases.COMMON, **cases.OPTIONS[name], "weight_decay": [decay, decay, 0.0]}
        opt = kind(cases.parameters(world), world, **{**options, "masks": [1, 1, cases.MASK], **changes})
        found: list[Found] = [{} for _ in range(world)]
        paths: list[list[np.ndarray]] = [[] for _ in range(world)]
        for step in range(1, cases.STEPS + 1):
            of_ranks = [cases.gradients(world, rank, step) for rank in range(world)]
            opt.step([np.stack(of_tensor) for of_tensor in zip(*of_ranks, strict=True)], cases.rate(step - 1))
            for rank, path in enumerate(paths):
                path.append(np.concatenate([x[rank].ravel() for x in opt.x]))
                if step in cases.SNAPSHOTS:
                    found[rank] |= {f"{name}/{step}/{key}": x for key, x in opt.held(rank).items()}
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
                other = np.zeros_like(t[key]) if other is None else other
                assert other.shape == t[key].shape, key
                apart = np.abs(t[key].astype(np.float64) - other).max() / max(1.0, np.abs(t[key]).max())
                largest[kind] = max(largest.get(kind, 0.0), float(apart))
        return largest

    return between
