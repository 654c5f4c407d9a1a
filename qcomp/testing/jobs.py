"""Simulated jobs for the laws of optimizers: several ranks train in one thread."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from qcomp.core.mean.compressed_mean import CompressedMean
from qcomp.core.optimizers.base import Optimizer
from qcomp.core.state import OptimizerState
from qcomp.testing.libraries import Namespace, Vector, library_name, to_library, to_numpy
from qcomp.testing.means import owed
from qcomp.testing.one_thread import lockstep

__all__ = [
    "NAMES",
    "SHAPES",
    "STEPS",
    "OptimizerCase",
    "Ranks",
    "Vector",
    "bytes_of",
    "difference",
    "gradients",
    "require_same",
    "resumed",
]

SHAPES = ((110, 110), (40,), (7, 5), (), (0, 3))
"""A tensor that the default policy compresses, small tensors, a scalar, and a tensor without elements."""
NAMES = ("layer.weight", "layer.bias", "small", "scale", "empty")
STEPS = 12


def gradients(rank: int, step: int, dtype: str = "float32") -> list[Vector]:
    """Return gradients that grow slowly and share a direction, the same in every call for this rank and step."""
    rng = np.random.default_rng([11, rank, step])
    return [((1 + step / 4) * (np.asarray(rng.standard_normal(s)) + 0.5)).astype(dtype) for s in SHAPES]


@dataclass(frozen=True)
class OptimizerCase:
    """An optimizer and an array library."""

    optimizer: Optimizer
    xp: Namespace

    def __repr__(self) -> str:
        return f"{type(self.optimizer).__name__} on {library_name(self.xp)}"

    def arrays(self, values: Sequence[Vector]) -> list[Any]:
        """Return NumPy arrays in the library."""
        return [to_library(self.xp, x) for x in values]

    def start(self, size: int, dtype: str = "float32") -> "Ranks":
        """Return a job of ``size`` ranks before its first step."""
        first = [np.ones(shape, dtype) for shape in SHAPES]
        params = [self.arrays(first) for _ in range(size)]
        states = lockstep(
            [
                self.optimizer.init_stages(p, rank=rank, size=size, host="one", names=NAMES)
                for rank, p in enumerate(params)
            ]
        )
        return Ranks(self, params, states)

    def having(self, **settings: Any) -> "OptimizerCase | None":
        """Return the case with other settings; None if the optimizer refuses them by ValueError, which is allowed."""
        try:
            return OptimizerCase(replace(self.optimizer, **settings), self.xp)
        except ValueError:
            return None

    @cached_property
    def whole_run(self) -> "list[Ranks]":
        """A run on two ranks: copies of the job at the start and after each step."""
        jobs = [self.start(2)]
        for step in range(STEPS):
            jobs.append(jobs[-1].copy())
            jobs[-1].step(step)
        return jobs


@dataclass
class Ranks:
    """The parameters and states of all ranks of a job."""

    case: OptimizerCase
    params: list[list[Any]]
    states: list[OptimizerState]

    def copy(self) -> "Ranks":
        """Return a copy that can go on independently."""
        return Ranks(self.case, list(self.params), list(self.states))

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.states)

    def grads(self, step: int) -> list[list[Any]]:
        """Return the gradients of every rank."""
        dtype = str(to_numpy(self.params[0][0]).dtype)
        return [self.case.arrays(gradients(rank, step, dtype)) for rank in range(self.size)]

    def step(self, step: int, *, donate: bool = False) -> None:
        """Make a step on all ranks."""
        self.take(self.stages(self.grads(step), donate=donate))

    def stages(self, grads: Sequence[Any], *, donate: bool = False) -> list[Any]:
        """Return a step of every rank in stages."""
        optimizer, ranks = self.case.optimizer, zip(self.params, grads, self.states, strict=True)
        return [optimizer.stages(p, g, s, donate=donate) for p, g, s in ranks]

    def exchanges(self, grads: Sequence[Any]) -> bool:
        """Return whether the ranks exchange anything in a step with these gradients."""
        first, *_ = self.stages(grads)
        return next(first, None) is not None

    def take(self, stages: Sequence[Any]) -> None:
        """Run a step in stages, and keep its results."""
        results = lockstep(stages)
        self.params = [params for params, _ in results]
        self.states = [state for _, state in results]

    def owed(self) -> list[Vector]:
        """Return mean_i e_i + e_s of each compressed tensor; nothing if the mean has residuals of other kinds."""
        optimizer, state = self.case.optimizer, self.states[0]
        if optimizer.mean.kinds != CompressedMean.kinds:
            return []
        exact = state.exact or (True,) * len(NAMES)
        compressed = [p for p, is_exact in zip(self.params[0], exact, strict=True) if not is_exact]
        return owed(optimizer.mean_of(state), [s.exchange for s in self.states], compressed)

    def held(self) -> list[dict[str, bytes]]:
        """Return everything that each rank holds, by name."""
        return [self._held_by(p, s) for p, s in zip(self.params, self.states, strict=True)]

    def _held_by(self, params: Sequence[Any], state: OptimizerState) -> dict[str, bytes]:
        saved = self.case.optimizer.state_dict(state)
        entries = {f"parameter {name}": p for name, p in zip(NAMES, params, strict=True)} | saved
        return {key: bytes_of(value) for key, value in entries.items()}


def resumed(
    optimizer: Optimizer, saved: tuple[Sequence[Mapping[str, Any]], Sequence[Sequence[Vector]], int]
) -> list[dict[str, bytes]]:
    """Load the dicts of all ranks with their parameters on NumPy, make some steps, and return each rank's content."""
    dicts, params, steps = saved
    size = len(dicts)
    states = lockstep(
        [
            optimizer.load_stages(own, list(p), rank=rank, size=size, host="one", names=NAMES)
            for rank, (own, p) in enumerate(zip(dicts, params, strict=True))
        ]
    )
    job = Ranks(OptimizerCase(optimizer, np), [list(p) for p in params], states)
    for _ in range(steps):
        job.step(job.states[0].step)
    return job.held()


def bytes_of(value: Any) -> bytes:
    """Return the dtype, shape and values of an array or a scalar as bytes."""
    if hasattr(value, "dtype") and not isinstance(value, np.ndarray | np.generic):
        value = to_numpy(value)
    array = np.asarray(value)
    return f"{array.dtype} {array.shape} ".encode() + array.tobytes()


def difference(one: Mapping[str, bytes], other: Mapping[str, bytes]) -> str | None:
    """Return the key of the first entry in which two dicts differ; None if they are equal."""
    keys = [*one, *(key for key in other if key not in one)]
    return next((key for key in keys if one.get(key) != other.get(key)), None)


def require_same(found: Ranks, expected: Ranks, when: str) -> None:
    """Raise AssertionError, naming the first entry that differs, unless two jobs hold the same."""
    for rank, (one, other) in enumerate(zip(found.held(), expected.held(), strict=True)):
        key = difference(one, other)
        assert key is None, f"{when}, {key!r} of rank {rank} differs"
