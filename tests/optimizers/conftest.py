"""A data-parallel job whose ranks take turns in one thread."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from qcomp.core.numeric.arrays import host_bytes

Grads = Callable[[int, int], list[np.ndarray]]


def held(arrays: Sequence[Any]) -> bytes:
    return b"".join(host_bytes(a) for a in arrays)


@dataclass
class Job:
    """All ranks of a job: the state of each, and one step for all of them."""

    opt: Any
    lockstep: Callable
    params: list[Any]
    states: list[Any]

    def step(self, grads: Sequence[Any]) -> None:
        """Take a step with each rank's gradients; afterwards all ranks must hold the same, bit for bit."""
        stages = [self.opt.stages(p, g, s) for p, g, s in zip(self.params, grads, self.states, strict=True)]
        results = self.lockstep(stages)
        self.params = [params for params, _ in results]
        self.states = [state for _, state in results]
        assert len({held(p) for p in self.params}) == 1
        for name in ("momentum", "variance"):
            assert len({held(getattr(s, name)) for s in self.states}) == 1
        assert len({(s.step, s.stage, s.history, s.skipped) for s in self.states}) == 1

    @property
    def state(self) -> Any:
        """The state of rank 0."""
        return self.states[0]

    def fingerprint(self) -> bytes:
        """Return everything that all ranks hold, as bytes."""
        parts = [held(p) for p in self.params]
        for s in self.states:
            parts += [held(s.momentum), held(s.variance), held(s.exchange.worker), held(s.exchange.server)]
            parts.append(repr((s.step, s.stage, s.history)).encode())
        return b"|".join(parts)

    def error(self) -> list[np.ndarray]:
        """Return E = mean_i e_i + e_s of every compressed tensor, flat, from the residuals of all ranks."""
        size = len(self.states)
        worker: list[Any] = [
            sum(np.asarray(s.exchange.worker[i], dtype=np.float64) for s in self.states) / size
            for i in range(len(self.state.exchange.worker))
        ]
        shapes = [x.shape for x in worker]
        for rank, s in enumerate(self.states):
            served = self.opt.mean.layout(shapes, rank=rank, size=size).residuals.server
            for segment, residual in zip(served, s.exchange.server, strict=False):
                worker[segment.tensor][segment.start : segment.stop] += residual
        return worker


@pytest.fixture
def job(lockstep: Callable) -> Callable[..., Job]:
    """Start a job without the handshake: ``job(opt, params, size, names=None)``."""

    def start(opt: Any, params: Sequence[Any], size: int, names: Sequence[str] | None = None) -> Job:
        names = tuple(map(str, range(len(params)))) if names is None else tuple(names)
        states = [opt.initial_state(params, names, rank, size) for rank in range(size)]
        return Job(opt, lockstep, [list(params) for _ in range(size)], states)

    return start


@pytest.fixture
def grads() -> Callable[..., list[np.ndarray]]:
    """Draw one rank's gradients for a step: ``grads(shapes, rank, step, dtype)``."""

    def draw(shapes: Sequence[tuple], rank: int, step: int, dtype: type = np.float32) -> list[np.ndarray]:
        rng = np.random.default_rng([7, rank, step])
        return [(rng.standard_normal(shape) + 0.5).astype(dtype) for shape in shapes]

    return draw
