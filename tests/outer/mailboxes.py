"""Worlds of ranks that share a mailbox in memory: a test decides which rank makes its next request, dies or joins.

After each request, everything that the loop promises is checked.
"""

import json
from typing import Any

import numpy as np

import qcomp
from qcomp.core.outer.mailbox import Contribution, Create, Delete, Names, Read, Sending
from qcomp.core.payload import Payload
from tests.outer.jobs import LARGE, SHAPES, SIGN, begun, moves

SGD = qcomp.SGD(learning_rate=0.5, momentum=0.5, nesterov=True)


def loop_of(kind: type = qcomp.outer.Asynchronous, every: int = 2, **changes: Any) -> Any:
    inner: dict[str, Any] = {
        name: changes.pop(name) for name in ("compressor", "averaging", "outer") if name in changes
    }
    settings: dict[str, Any] = {"every": every, "compressor": SIGN, "exact": LARGE, "outer": SGD, **inner}
    loop = qcomp.OuterLoop(**settings)
    return kind(**{"loop": loop, "quorum": 2, "grace": 3.0, "snapshot": 3, "pause": 0.0, **changes})


class Box:
    """A mailbox in memory. Contributions that a test hides are not yet listed, nor read."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.ever: dict[str, bytes] = {}
        self.hidden: set[str] = set()
        self.clock = 0.0
        self._rounds: list[list[Sending]] = []

    def now(self) -> float:
        return self.clock

    def names(self, folder: str) -> list[str]:
        return [
            name.partition("/")[2]
            for name in reversed(self.files)
            if name.startswith(f"{folder}/") and name not in self.hidden
        ]

    def read(self, name: str) -> bytes | None:
        return None if name in self.hidden else self.files.get(name)

    def create(self, name: str, data: bytes) -> bool:
        if name in self.files:
            return False
        self.files[name] = self.ever[name] = data
        return True

    def delete(self, name: str) -> None:
        self.files.pop(name, None)

    def answer(self, request: Any) -> Any:
        verbs: dict[type, Any] = {
            Names: self.names,
            Read: self.read,
            Create: self.create,
            Delete: self.delete,
        }
        return verbs[type(request)](*request)

    @property
    def rounds(self) -> list[list[Sending]]:
        """The contributions of each round that has closed."""
        while (data := self.ever.get(f"rounds/{len(self._rounds) + 1}")) is not None:
            self._rounds.append([Sending(*each) for each in json.loads(data)])
        return self._rounds


class Rank:
    """A rank of a world: its program, and what it has computed in the steps that it has completed."""

    def __init__(self, box: Box, loop: Any, number: int, weight: Any = None) -> None:
        self.box, self.loop, self.number, self.weight = box, loop, number, weight
        self.params: Any = None
        self.state: Any = None
        self.computed = [np.zeros(s) for s in SHAPES]
        self.steps = 0
        self.is_alive = True
        self._program = self._run()
        self._request = next(self._program)

    def _run(self, *, begins: bool = True) -> Any:
        if begins:
            requests = self.loop.begin_requests(begun(dtype=np.float64), self.box.clock, rank=self.number)
            self.params, self.state = yield from requests
        while True:
            yield None
            moved = moves(self.number, self.steps, dtype=np.float64)
            params = [p - m for p, m in zip(self.params, moved, strict=True)]
            weight = None if self.weight is None else self.weight(self.steps)
            found = yield from self.loop.step_requests(params, self.state, self.box.clock, weight=weight)
            self.params, self.state = found
            self.steps += 1
            self.computed = [c + m for c, m in zip(self.computed, moved, strict=True)]

    def go_on(self) -> None:
        """Go on from the state of the last step that has ended."""
        self._program = self._run(begins=False)
        self._request = next(self._program)

    def go(self) -> bool:
        """Answer one request of this rank; return whether a step has ended."""
        request = self._request
        self._request = self._program.send(None if request is None else self.box.answer(request))
        return self._request is None


class World:
    """Ranks and a mailbox, and what the ranks of each version hold."""

    def __init__(self, loop: Any, count: int = 3, weight: Any = None) -> None:
        self.loop, self.box, self.weight = loop, Box(), weight
        self.ranks: list[Rank] = []
        self.versions: dict[int, Any] = {}
        self.checked: dict[int, Any] = {}
        self.contributions: dict[Sending, Any] = {}
        self.exact: list[Any] = [(begun(dtype=np.float64), [np.zeros(s) for s in SHAPES])]
        for _ in range(count):
            self.join()

    @property
    def alive(self) -> list[Rank]:
        return [rank for rank in self.ranks if rank.is_alive]

    def join(self) -> Rank:
        self.ranks.append(Rank(self.box, self.loop, 10 + len(self.ranks), self.weight))
        return self.ranks[-1]

    def go(self, rank: Rank) -> bool:
        has_ended = rank.go()
        self.check(rank)
        return has_ended

    def run(self, steps: int, *ranks: Rank, seconds: float = 1.0) -> "World":
        """Let all ranks, or some, make steps in turn, each in so many seconds."""
        for _ in range(steps):
            for rank in ranks or self.alive:
                while not self.go(rank):
                    pass
            self.box.clock += seconds
        return self

    def contribution(self, name: Sending) -> tuple[float, list[np.ndarray]]:
        """Return the weight of a contribution and what it decompresses to."""
        if name not in self.contributions:
            found = Contribution.from_bytes(self.box.ever[name.path], np.zeros(1))
            values = [_decompressed(p, s) for p, s in zip(found.payloads, SHAPES, strict=True)]
            self.contributions[name] = found.weight, values
        return self.contributions[name]

    def check(self, rank: Rank) -> None:
        """Assert all promises, as far as the last request of a rank may have broken them."""
        rounds = self.box.rounds
        self._check_rounds(rounds)
        known, count = self.checked.get(rank.number, (None, 0))
        if rank.state is None or (known is rank.state and count == len(rounds)):
            return
        self.checked[rank.number] = rank.state, len(rounds)
        state, merged = rank.state, {name for names in rounds for name in names if name.rank == rank.number}
        held = [np.asarray(x) for x in (*state.shared.arrays["anchor"], *state.shared.momentum)]
        first = self.versions.setdefault(state.version, [x.tobytes() for x in held])
        assert first == [x.tobytes() for x in held], "ranks differ after the same round"
        for x, exact in zip(held, self.exact[state.version][0], strict=False):
            assert np.abs(x - exact).max() < 1e-9, "not the weighted mean"
        sent = state.sent
        total = [start - p for start, p in zip(state.start, rank.params, strict=True)]
        for i, e in enumerate(state.owed if sent is None else sent.owed):
            total[i] = total[i] + (e if e.size else 0)
        pending = set() if sent is None else {sent.name}
        if pending:
            self.box.ever.setdefault(sent.name.path, sent.data)
        for name in merged | pending:
            total = [t + c for t, c in zip(total, self.contribution(name)[1], strict=True)]
        for t, c in zip(total, rank.computed, strict=True):
            assert np.abs(t - c).max() < 1e-9, "inner steps are lost or counted twice"
        unmerged = [np.zeros(s) for s in SHAPES] if sent is None else sent.moved
        if not pending & merged:
            for p, x, u, start in zip(
                rank.params, state.shared.arrays["anchor"], unmerged, state.start, strict=True
            ):
                assert np.abs(x - u - (start - p) - p).max() < 1e-9, "not where its inner steps have led"

    def _check_rounds(self, rounds: list[list[Sending]]) -> None:
        for number in range(len(self.exact), len(rounds) + 1):
            names = rounds[number - 1]
            before = {name for other in rounds[: number - 1] for name in other}
            assert len({name.rank for name in names}) == len(names) >= self.loop.quorum
            assert not before.intersection(names), "counted twice"
            assert all(0 <= number - 1 - name.version <= self.loop.max_age for name in names)
            weights, values = zip(*map(self.contribution, names), strict=True)
            x, m = self.exact[-1]
            mean = [
                sum(w * c[i] for w, c in zip(weights, values, strict=True)) / sum(weights)
                for i in range(len(x))
            ]
            rate, beta = self.loop.loop.outer.learning_rate, self.loop.loop.outer.momentum
            m = [beta * old + d for old, d in zip(m, mean, strict=True)]
            x = [p - rate * (d + beta * new) for p, d, new in zip(x, mean, m, strict=True)]
            self.exact.append((x, m))


def _decompressed(payload: Payload, shape: tuple) -> np.ndarray:
    return qcomp.compressor(payload.compressor).decompress(payload, like=np.zeros(shape))
