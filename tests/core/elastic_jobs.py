"""Jobs whose ranks die, leave and join, in one thread; shared by all tests of `qcomp.elastic`."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np

import qcomp
from qcomp.core.mean.compressed_mean import CompressedMean
from qcomp.elastic import Elastic, ElasticState
from qcomp.testing import Death, lockstep, until_death
from qcomp.testing.means import owed
from tests.optimizers.every import EVERY, SHAPES, SIGN, growing

LOOPS = {
    "outer loop": qcomp.OuterLoop(every=3, decay=0.9, compressor=SIGN, exact=qcomp.ExactBelow(10)),
    "streaming": qcomp.OuterLoop(
        every=4,
        fragments=2,
        delay=2,
        mixing=0.5,
        warmup=2,
        outer=qcomp.SGD(learning_rate=0.7, momentum=0.9, nesterov=True),
        compressor=SIGN,
        exact=qcomp.ExactBelow(10),
    ),
}
"""Outer loops: one whose residuals decay, and one with all other features."""
TOPOLOGIES = qcomp.topologies.names()
JOBS: dict[str, tuple[str, str | None]] = {name: (name, None) for name in (*EVERY, *LOOPS)} | {
    f"{name}, {topology}": (name, topology) for name in ("1-bit", "0/1", "SGD") for topology in TOPOLOGIES[1:]
}
"""Every optimizer and outer loop as it is, and three optimizers in each topology."""


@dataclass(frozen=True)
class World:
    """An optimizer, and the host of each rank."""

    elastic: Elastic
    hosts: str

    @property
    def size(self) -> int:
        return len(self.hosts)

    @property
    def opt(self) -> Any:
        return self.elastic.optimizer

    def begin(self) -> list[ElasticState]:
        """Return the state of each rank before the first step."""
        params = [np.ones(s, np.float32) for s in SHAPES]
        stages = [
            self.opt.init_stages(params, rank=rank, size=self.size, host=host)
            for rank, host in enumerate(self.hosts)
        ]
        return [self.elastic.begin(params, state) for state in lockstep(stages)]

    def steps(self, helds: Sequence[ElasticState]) -> list[Any]:
        """Return the next step of each rank, in stages."""
        return [self._step(held) for held in helds]

    def _step(self, held: ElasticState) -> Any:
        rank, step, opt = held.state.rank, held.state.step, self.opt
        if isinstance(opt, qcomp.OuterLoop):

            def with_inner_step(params: Any, state: Any) -> Any:
                means = yield from opt.average_stages(growing(rank, step), state)
                moved = [p - np.float32(0.1) * mean for p, mean in zip(params, means, strict=True)]
                return (yield from opt.stages(moved, state))

            return self.elastic.run_stages(with_inner_step, held)
        if not isinstance(opt, qcomp.QSVRG):
            return self.elastic.stages(growing(rank, step), held)

        def with_epoch(params: Any, state: Any) -> Any:
            if step % 4 == 0:
                params = opt.next_snapshot(params, state) if step else params
                state = yield from opt.epoch_stages(params, growing(rank, 100 + step), state)
            return (yield from opt.stages(params, (growing(rank, step), growing(rank, 200 + step)), state))

        return self.elastic.run_stages(with_epoch, held)

    def resumes(self, helds: Sequence[ElasticState | None], hosts: str | None = None) -> list[Any]:
        """Return the resume of each new rank, in stages."""
        given = [np.zeros(s, np.float32) for s in SHAPES]
        return [
            self.elastic.resume_stages(held, rank=rank, size=len(helds), host=host, params=given)
            for rank, (held, host) in enumerate(zip(helds, hosts or self.hosts, strict=False))
        ]

    def resume(
        self, helds: Sequence[ElasticState | None], hosts: str | None = None
    ) -> tuple[list[ElasticState], dict[str, float]]:
        """Resume on all ranks, and check that they agree."""
        results = lockstep(self.resumes(helds, hosts))
        reports = [report for _, report in results]
        assert all(report == reports[0] for report in reports)
        resumed = [held for held, _ in results]
        self.require_alike(resumed)
        return resumed, reports[0]

    def require_alike(self, helds: Sequence[ElasticState]) -> None:
        """Check that everything except a rank's own arrays is the same on all ranks, bit for bit."""
        first = helds[0].state
        own = {"rank", "skipped", "digests", *self.opt.mean.kinds[:2], *self.opt.mean.owned_kinds}
        own |= set(self.opt.own_kinds(first.stage))
        own -= {"right_factor", "mean_estimate"}
        shared = []
        for rank, held in enumerate(helds):
            assert (held.state.rank, held.state.size) == (rank, len(helds))
            entries = {} if self.opt.apart(first.stage) else {str(i): p for i, p in enumerate(held.params)}
            saved = self.saved(held)
            entries |= {key: value for key, value in saved.items() if key.partition(".")[0] not in own}
            shared.append({key: np.asarray(value).tobytes() for key, value in entries.items()})
        for found in shared[1:]:
            assert found == shared[0]

    def saved(self, held: ElasticState) -> dict[str, Any]:
        """Return the dict that a rank would save."""
        whole = [held.params] if isinstance(self.opt, qcomp.OuterLoop) else []
        return self.opt.state_dict(*whole, held.state)

    def go_on(self, helds: Sequence[ElasticState], steps: int = 2) -> list[ElasticState]:
        """Take some steps; the ranks must stay alike."""
        for _ in range(steps):
            helds = lockstep(self.steps(helds))
            self.require_alike(helds)
        return list(helds)


def world(job: str, hosts: str = "aab", **options: Any) -> World:
    """Return the world of an entry of `JOBS`."""
    name, topology = JOBS[job]
    opt: Any = LOOPS[name] if name in LOOPS else EVERY[name].opt
    if topology is not None:
        opt = replace(opt, averaging=replace(opt.averaging, topology=topology))
    if topology == "hierarchical":
        hosts = "aabb"  # so that two machines are left
    return World(Elastic(opt, **options), hosts)


@cache
def whole_run(job: World, steps: int) -> list[list[ElasticState]]:
    """Return the state of each rank after each step if nobody dies."""
    run = [job.begin()]
    for _ in range(steps):
        run.append(lockstep(job.steps(run[-1])))
    return run


def kills(
    begin: Callable[[], list[Any]], size: int, *, first: int = 0, all_reaches: bool = False
) -> Iterator[tuple[Death, list[Any]]]:
    """Yield deaths in each exchange of some computations, and the results that the ranks are left with.

    The victim's last exchange reaches nobody, one of the others, or all: in turn, or all three in every exchange. The
    victim changes from death to death, beginning with ``first``.
    """
    exchange, number = 0, first
    while True:
        for reach in ("nobody", "one", "all") if all_reaches else [("nobody", "one", "all")[number % 3]]:
            victim = (number + number // 3) % size
            others = [rank for rank in range(size) if rank != victim]
            reached = {"nobody": [], "one": [others[number % len(others)]], "all": others}[reach]
            death = Death(victim, exchange, reached)
            results = until_death(begin(), death)
            if results[victim] is not None:
                return
            yield death, results
            number += 1
        exchange += 1


def left_with(helds: Sequence[Any], results: Sequence[Any], dead: int) -> list[Any]:
    """Return what the survivors hold: their result, or what they held before if they have none."""
    found = []
    for rank, (before, after) in enumerate(zip(helds, results, strict=True)):
        if rank == dead:
            continue
        if isinstance(after, Exception):
            assert isinstance(after, qcomp.CommunicatorError)
            found.append(before)
        else:
            found.append(after if isinstance(after, ElasticState) else after[0])
    return found


def without(items: Sequence[Any], dead: int) -> Any:
    """All but one."""
    kept = [item for rank, item in enumerate(items) if rank != dead]
    return "".join(kept) if isinstance(items, str) else kept


def is_owed(job: World) -> bool:
    """Return whether the residuals count as owed."""
    return job.opt.mean.kinds == CompressedMean.kinds


def owed_by(job: World, states: Sequence[Any], lost: Sequence[int] = ()) -> tuple[list[Any], list[Any]]:
    """Return mean_i e_i + e_s of each compressed tensor, without some ranks' residuals; and the same of magnitudes."""
    mean = job.opt.mean_of(states[0])
    shapes = [
        np.zeros(s)
        for s, exact in zip(SHAPES, states[0].exact or [True] * len(SHAPES), strict=True)
        if not exact
    ]
    changed = []
    for change in (lambda x: x.astype(np.float64), lambda x: np.abs(x).astype(np.float64)):
        kept = []
        for state in states:
            factor = 0.0 if state.rank in lost else 1.0
            exchange = state.exchange
            kept.append(
                exchange._replace(
                    worker=tuple(factor * change(x) for x in exchange.worker),
                    server=tuple(factor * change(x) for x in exchange.server),
                )
            )
        changed.append(owed(mean, kept, shapes))
    return changed[0], changed[1]


def require_owed(job: World, old: Sequence[Any], new: Sequence[Any], lost: Sequence[int]) -> None:
    """Check that what is owed now is what was owed before, minus what the lost ranks owed, up to final roundings."""
    if not is_owed(job):
        return
    after, _ = owed_by(job, new)
    before, magnitude = owed_by(job, old, lost)
    for found, expected, most in zip(after, before, magnitude, strict=True):
        # Sums over the ranks in any order, and three scalings.
        assert (np.abs(found - expected) <= (len(old) + len(new) + 6) * 2.0**-24 * most).all()
