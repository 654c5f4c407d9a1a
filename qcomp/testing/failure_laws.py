"""The laws of topologies about failures: refusals are shared, damage is noticed, and no rank is left waiting."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from qcomp.comm.local import LocalCommunicator, run_local
from qcomp.core.compressors import QSGD
from qcomp.core.errors import NonFiniteError, PayloadError
from qcomp.core.mean.compressed_mean import CompressedMean, MeanState
from qcomp.core.numeric.random import Key
from qcomp.core.registry import compressor as from_spec
from qcomp.testing.means import SPECS, Peers, average, bits, held_by, inputs, refused
from qcomp.testing.one_thread import lockstep

CODED = QSGD(levels=7, bucket_size=32, norm="l2", coding="elias")
"""A compressor whose payloads vary in length."""
_SECONDS = 30.0
"""Seconds within which ranks in threads must end; a law takes a fraction of a second."""


def refusals_are_shared(world: Peers) -> None:
    """A non-finite value on any rank raises NonFiniteError on all ranks in the same stage, and changes nothing."""
    mean = world.mean()
    for bad in world.ranks:
        values = world.values(0, shapes=[(20,)])  # two buckets: some ranks have empty chunks
        values[bad][0][13] = np.nan
        refused(mean, values, world.start(mean, values[bad]))
    for spec in (*SPECS, CODED):
        for _ in refusals(world, spec):
            pass


def servers_refuse_too(world: Peers) -> None:
    """A server whose residual is not finite, so that it cannot compress the mean, stops all ranks in the same stage."""
    for spec in (SPECS[0], CODED):
        mean = world.mean(spec)
        _, states = average(mean, world.values(0), world.start(mean, inputs(0, 0)), Key())
        for rank, state in enumerate(states):
            if not any(len(r) for r in state.server):
                continue
            bad = tuple(np.full_like(r, np.nan) for r in state.server)
            broken = [s._replace(server=bad) if s is state else s for s in states]
            before = _held(broken)
            try:
                refused(mean, world.values(1), broken, key=Key(step=1))
            except AssertionError as error:
                raise AssertionError(f"the server on rank {rank} refuses a mean, and {error}") from error
            assert _held(broken) == before, "residuals were written to before all servers accepted"


def refusals(world: Peers, spec: str | QSGD) -> Iterator[tuple[int, list[Exception]]]:
    """Yield the bad rank and the error of each rank, for a bad value on each rank and in several chunks."""
    places = [(0, 0), (2, 0), (3, 37), (3, 161)]
    mean = world.mean(spec)
    _, states = average(mean, world.values(0), world.start(mean, inputs(0, 0)), Key())
    before = _held(states)
    expected = average(mean, world.values(1), states, Key(step=1))
    for bad in world.ranks:
        for number, (tensor, at) in enumerate(places):
            if world.size > 2 and spec != SPECS[0] and number != bad % 4:
                continue
            values = world.values(1)
            values[bad][tensor].flat[at] = (np.nan, np.inf, -np.inf)[(bad + number) % 3]
            passed = [bits(x) for x in values]
            errors = refused(mean, values, states, key=Key(step=1), overwrite=number % 2 == 1)
            assert [bits(x) for x in values] == passed, "values were written to before all ranks accepted"
            assert _held(states) == before, "residuals were written to before all ranks accepted"
            yield bad, errors
    again = average(mean, world.values(1), states, Key(step=1))
    assert bits(again.means) == bits(expected.means), "after a refusal, the next call gives another result"


def damage_is_noticed(world: Peers) -> None:
    """A message of another size raises PayloadError, which names its sender."""
    if world.is_exact:
        return
    for c in (from_spec(SPECS[0]), CODED):
        mean = world.mean(c)
        for sender in _senders_to_first(world, mean):
            text = ""
            try:
                _senders_to_first(world, mean, damaged=sender)
            except PayloadError as error:
                text = str(error)
            assert text, f"rank 0 accepts a message of rank {sender} that lacks 8 bytes"
            assert f"rank {sender}" in text, f"the error does not name rank {sender}: {text}"


def _senders_to_first(world: Peers, mean: CompressedMean, damaged: int | None = None) -> list[int]:
    """Return the ranks that send to rank 0 in the first exchange in which any other rank sends to it.

    With ``damaged``, that rank's message in this exchange lacks 8 bytes. Exchanges that announce lengths are skipped.
    """
    found: list[int] = []

    def looked_at(stages: Any) -> Any:
        arrived, count = None, 0
        while True:
            try:
                request = next(stages) if arrived is None else stages.send(arrived)
            except StopIteration as stop:
                return stop.value
            arrived = yield request
            senders = [rank for rank, b in enumerate(arrived) if rank and b.shape[0]]
            if senders and not found and (count % 2 or not mean.compressors[0].variable_length):
                found.extend(senders)
                arrived = [b[: b.shape[0] - 8 * (rank == damaged)] for rank, b in enumerate(arrived)]
            count += 1

    states = world.start(mean, inputs(0, 0))
    running = [mean.stages(inputs(rank, 0), states[rank], key=Key()) for rank in world.ranks]
    lockstep([looked_at(running[0]), *running[1:]])
    return found


def over_a_communicator(world: Peers) -> None:
    """Over a communicator a topology returns the same as its stages, and no rank waits for a rank that refuses."""
    mean = world.mean()
    found = average(mean, world.values(0), world.start(mean, inputs(0, 0)))

    def rank_main(comm: LocalCommunicator) -> tuple[bytes, bytes]:
        state = mean.init(inputs(0, 0), comm)
        x = inputs(comm.rank, 0)
        if comm.rank == world.size - 1:
            x[0][1, 1] = np.nan
        try:
            mean(x, state, comm)
        except NonFiniteError:
            means, state = mean(inputs(comm.rank, 0), state, comm)
            return bits(means), held_by(state)
        raise AssertionError("a mean of NaN raises nothing")

    for rank, held in enumerate(run_local(world.size, rank_main, timeout=_SECONDS, hosts=world.hosts)):
        expected = bits(found.means), held_by(found.states[rank])
        assert held == expected, f"over a communicator, rank {rank} gets another result than from its stages"


def _held(states: Sequence[MeanState]) -> bytes:
    return b"|".join(map(held_by, states))
