"""Jobs with an outer loop: all ranks of a world in one thread, with simple inner steps."""

from collections.abc import Sequence
from typing import Any

import numpy as np

import qcomp
from qcomp.testing import lockstep

SHAPES = [(8, 5), (7, 5), (3,), ()]
"""Two tensors that are compressed, and two that stay exact."""
SIGN = qcomp.ScaledSign(bucket_size=16)
LARGE = qcomp.ExactBelow(10)


def loop_of(**changes: Any) -> qcomp.OuterLoop:
    return qcomp.OuterLoop(**{"every": 4, "compressor": SIGN, "exact": LARGE, **changes})


def begun(shapes: Sequence[tuple] = SHAPES, dtype: Any = np.float32) -> list[np.ndarray]:
    """Return the initial parameters, in sixteenths."""
    rng = np.random.default_rng(3)
    return [np.asarray(rng.integers(-32, 32, s) / 16, dtype) for s in shapes]


def moves(
    rank: int, step: int, shapes: Sequence[tuple] = SHAPES, dtype: Any = np.float32
) -> list[np.ndarray]:
    """Return what a rank's inner step subtracts: sixteenths again, so that sums and means are exact."""
    rng = np.random.default_rng([7, rank, step])
    return [np.asarray((rng.integers(-16, 16, s) + 4) / 16, dtype) for s in shapes]


class Job:
    """All ranks, and the state of each, after any number of inner steps."""

    def __init__(
        self,
        loop: qcomp.OuterLoop,
        size: int = 2,
        *,
        params: Sequence[Any] | None = None,
        hosts: Sequence[str] = ("a", "b", "b"),
        make: Any = np.array,
    ) -> None:
        self.loop, self.size, self.make = loop, size, make
        first = begun() if params is None else params
        self.params: list[Any] = [[make(p) for p in first] for _ in range(size)]
        self.states = lockstep(
            [
                loop.init_stages(p, rank=rank, size=size, host=hosts[rank])
                for rank, p in enumerate(self.params)
            ]
        )

    @property
    def shapes(self) -> list[tuple]:
        return [tuple(p.shape) for p in self.params[0]]

    def inner(self) -> None:
        """Take an inner step on every rank."""
        step = self.states[0].step
        for rank in range(self.size):
            of_rank = moves(rank, step, self.shapes)
            self.params[rank] = [p - self.make(m) for p, m in zip(self.params[rank], of_rank, strict=True)]
            if self.make is np.array:  # NumPy turns arrays of shape () into scalars when it computes
                self.params[rank] = [np.asarray(p) for p in self.params[rank]]

    def outer(self, **options: Any) -> Any:
        """Pass the inner step to the loop."""
        pairs = zip(self.params, self.states, strict=True)
        found = lockstep([self.loop.stages(p, s) for p, s in pairs], **options)
        if not isinstance(found[0], Exception):
            self.params, self.states = map(list, zip(*found, strict=True))
        return found

    def run(self, steps: int) -> "Job":
        for _ in range(steps):
            self.inner()
            self.outer()
        return self

    def anchor(self, rank: int = 0) -> list[np.ndarray]:
        """Return the shared parameters as a rank holds them."""
        return [np.asarray(x) for x in self.states[rank].arrays["anchor"]]

    def saved(self) -> list[dict[str, Any]]:
        return [self.loop.state_dict(p, s) for p, s in zip(self.params, self.states, strict=True)]

    def resumed(self, saved: Sequence[Any], size: int | None = None, **options: Any) -> "Job":
        """Return a job that resumes from saved dicts; each rank has its own dict, or all ranks have all dicts."""
        job = Job(self.loop, size or self.size, params=begun(self.shapes), make=self.make)
        found = lockstep(
            [
                self.loop.load_stages(
                    saved[rank] if size is None else saved,
                    p,
                    rank=rank,
                    size=job.size,
                    host=("a", "b", "b")[rank],
                    **options,
                )
                for rank, p in enumerate(job.params)
            ]
        )
        job.params, job.states = map(list, zip(*found, strict=True))
        return job

    def held(self) -> list[dict[str, bytes]]:
        """Return everything that each rank holds, as bytes."""
        return [
            {
                key: f"{np.asarray(v).dtype}{np.shape(v)}".encode() + np.asarray(v).tobytes()
                for key, v in d.items()
            }
            for d in self.saved()
        ]


class Group:
    """Some ranks of a communicator as one of their own; all groups of that communicator must make the same calls."""

    def __init__(self, comm, ranks):
        self.whole, self.ranks = comm, list(ranks)
        self.rank, self.size, self.host = self.ranks.index(comm.rank), len(self.ranks), comm.host

    def all_to_all(self, send, receive):
        empty = send[0][:0]
        sends, sizes = [empty] * self.whole.size, [0] * self.whole.size
        for rank, buffer, size in zip(self.ranks, send, receive, strict=True):
            sends[rank], sizes[rank] = buffer, size
        arrived = self.whole.all_to_all(sends, sizes)
        return [arrived[rank] for rank in self.ranks]

    def all_gather(self, send, receive):
        return self.all_to_all([send] * self.size, receive)
