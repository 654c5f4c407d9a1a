"""The laws of every topology: whoever registers one is held to them in worlds of every kind.

What is special to a topology, such as the order of its sums, its exchanges and its bytes, is in a module of its own.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

import qcomp
from qcomp import CompressedMean, Key
from qcomp.comm import run_local
from qcomp.core.kernels import Blend
from qcomp.core.mean.stages import fuse
from qcomp.core.mean.topologies.registry import names, topology
from qcomp.core.numeric.random import replace_draws
from tests.core import worlds
from tests.core.tree import Tree
from tests.core.worlds import (
    NODES,
    SPECS,
    average,
    bits,
    check_sum_identity,
    draws_of,
    forget_residuals,
    held_by,
    refused,
    start,
)

pytestmark = pytest.mark.usefixtures("tree")

SHAPES = [(3, 11), (0,), (), (170,), (2, 0, 4)]
"""More buckets of 16 than there are ranks: 3, 0, 1, 11 and 0."""
OWN = names()
TOPOLOGIES = [*OWN, Tree.name]
CODED = qcomp.QSGD(levels=7, bucket_size=32, norm="l2", coding="elias")


@dataclass(frozen=True)
class World:
    """A topology, and the node of each rank."""

    topology: str
    nodes: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.topology} {''.join(map(str, self.nodes))}"

    @property
    def size(self) -> int:
        return len(self.nodes)

    @property
    def ranks(self) -> range:
        return range(self.size)

    @property
    def hosts(self) -> list[str]:
        return [str(node) for node in self.nodes]

    def mean(self, c: str | qcomp.Compressor = SPECS[0], **options: Any) -> CompressedMean:
        return CompressedMean(qcomp.compressor(c) if isinstance(c, str) else c, self.topology, **options)

    @property
    def is_exact(self) -> bool:
        return self.topology == "hierarchical" and len(set(self.nodes)) == 1


def worlds_of(name: str) -> list[World]:
    """From one rank to five; and with shared nodes, where these matter."""
    shared = NODES.values() if name in OWN and topology(name).wants_nodes else ()
    return [World(name, nodes) for nodes in (*(tuple(range(n)) for n in range(1, 6)), *shared)]


WORLDS = [world for name in TOPOLOGIES for world in worlds_of(name)]


def _over(worlds: Sequence[World]) -> pytest.MarkDecorator:
    """Up to three ranks, and nodes of three and two; `make test-all` has the larger worlds."""
    marks = [[] if len(w.nodes) < 4 or w.nodes == (0, 0, 0, 1, 1) else [pytest.mark.slow] for w in worlds]
    params = [pytest.param(w, marks=m, id=str(w)) for w, m in zip(worlds, marks, strict=True)]
    return pytest.mark.parametrize("world", params)


every_world = _over(WORLDS)
compressing_world = _over([w for w in WORLDS if not w.is_exact])
THREE = [World(name, (0, 0, 1) if name == "hierarchical" else (0, 1, 2)) for name in TOPOLOGIES]
one_world = pytest.mark.parametrize("world", THREE, ids=str)
"""Three ranks in every topology."""


def inputs(rank: int, step: int, dtype: Any = np.float32, shapes: Any = SHAPES) -> list[np.ndarray]:
    return worlds.inputs(rank, step, dtype, shapes)


def of_ranks(world: World, step: int, **options: Any) -> list[list[np.ndarray]]:
    return [inputs(rank, step, **options) for rank in world.ranks]


# --- the mean --------------------------------------------------------------------------------------------------------


@every_world
@pytest.mark.parametrize("spec", SPECS)
def test_all_ranks_hold_the_same(lockstep, world, spec):
    mean = world.mean(spec)
    states = start(mean, inputs(0, 0), world.nodes)
    for step in range(3):
        values = of_ranks(world, step)
        means, states = average(lockstep, mean, values, states, Key(step=step))
        assert [(m.shape, m.dtype) for m in means] == [(v.shape, v.dtype) for v in values[0]]


@every_world
@pytest.mark.parametrize("feedback", [True, False])
def test_without_loss_it_is_the_mean(lockstep, world, feedback):
    """Up to the rounding of so many additions; and what is returned is not what was passed in."""
    mean = world.mean("identity", feedback=feedback)
    values = of_ranks(world, 0)
    states = start(mean, values[0], world.nodes)
    assert states[0].worker == states[0].server == ()
    means, _ = average(lockstep, mean, values, states)
    for i, got in enumerate(means):
        exact = sum(v[i].astype(np.float64) for v in values) / world.size
        largest = sum(np.abs(v[i]) for v in values) / world.size
        assert (np.abs(got - exact) <= (world.size + 3) * 2.0**-24 * largest).all()
        assert not any(np.shares_memory(got, v[i]) for v in values if got.size)


@every_world
@pytest.mark.parametrize("shapes", [[(20,)], [(3,)], [(0,)], [(0,), (2, 0)]], ids=str)
@pytest.mark.parametrize("spec", SPECS[:2])
def test_more_ranks_than_buckets(lockstep, world, shapes, spec):
    mean = world.mean(spec)
    values = of_ranks(world, 0, shapes=shapes)
    states = start(mean, values[0], world.nodes)
    for step in range(2):
        means, states = average(lockstep, mean, values, states, Key(step=step))
    assert [m.shape for m in means] == shapes


def steps_with(kernels: str, lockstep: Any, mean: CompressedMean, world: World, shapes: Any) -> list[bytes]:
    """The means of two steps, and the residuals of every rank after them."""
    states = start(mean, inputs(0, 0, shapes=shapes), world.nodes)
    found = []
    with qcomp.backends.use(kernels):
        for step in range(2):
            values = of_ranks(world, step, shapes=shapes)
            means, states = average(lockstep, mean, values, states, Key(step=step))
            found.append(bits(means))
    return found + [held_by(state) for state in states]


@every_world
@pytest.mark.parametrize("spec", ["sign:bucket_size=64", "qsgd:levels=7,bucket_size=64"])
def test_kernels_change_nothing(lockstep, world, spec):
    """Also where a rank has chunks without elements, because there are fewer buckets than ranks."""
    for shapes in ([(900,), (0,), (3, 70), ()], [(70,), (0,)], [(0,)]):
        mean = world.mean(spec)
        pure, numba = (steps_with(kernels, lockstep, mean, world, shapes) for kernels in ("pure", "numba"))
        assert numba == pure, f"tensors of shapes {shapes}"


@one_world
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_dtypes(lockstep, world, dtype):
    mean = world.mean("minmax:bucket_size=16")
    x = [of_rank[0] for of_rank in of_ranks(world, 0, dtype=dtype, shapes=[(37,)])]
    states = start(mean, [x[0]], world.nodes)
    computed = "float64" if dtype == "float64" else "float32"
    for _ in range(2):
        assert {r.dtype for s in states for r in (*s.worker, *s.server)} == {np.dtype(computed)}
        got, states = average(lockstep, mean, x, states)
    assert got.dtype == dtype
    assert np.abs(got - sum(v.astype(np.float64) for v in x) / 3).max() < 0.05


@pytest.mark.parametrize("name", TOPOLOGIES)
@pytest.mark.parametrize("order", [1, -1])
def test_tensors_of_two_precisions(name, order):
    """Each keeps its own: a lossless mean of both is exact, and signs of one magnitude lose nothing."""
    values = [[np.full(5, 1 + rank, np.float32), np.full(7, 1 / 3 + rank)][::order] for rank in range(2)]
    for c in (qcomp.Identity(), qcomp.ScaledSign(bucket_size=8)):
        mean = CompressedMean(c, name, feedback=False)
        found = run_local(
            2, lambda comm, mean=mean: mean(values[comm.rank], mean.init(values[0], comm), comm)[0]
        )
        for means in found:
            for got, a, b in zip(means, *values, strict=True):
                assert got.dtype == a.dtype
                np.testing.assert_allclose(got, (a + b) / 2, rtol=1e-6)


@pytest.mark.parametrize("world", [w for w in THREE if w.topology in OWN], ids=str)
def test_every_library_alike(lockstep, float64_library, world):
    """The reference is NumPy; the read-only detector also proves that nothing passed in is written to."""
    lib, shapes = float64_library, [(40,), (5,), ()]
    drawn = [of_ranks(world, step, shapes=shapes) for step in range(2)]
    for of_step in drawn:
        of_step[1][0][:20] *= np.float32(2.0**-130)  # subnormal, which some devices flush
    for spec in SPECS[:2]:
        mean, held = world.mean(spec), {}
        for name, array, seal in (("numpy", np.asarray, lambda x: x), (lib.name, lib.array, lib.seal)):
            values = [[[array(t) for t in x] for x in of_step] for of_step in drawn]
            states, record = seal(start(mean, values[0][0], world.nodes)), b""
            for step in range(2):
                means, states = average(lockstep, mean, values[step], states, Key(step=step))
                seal(states)
                record += bits([lib.numpy(m) for m in means]) + b"".join(map(held_by, states))
            held[name] = record
        assert len(set(held.values())) == 1


@every_world
@pytest.mark.parametrize("coding", ["elias", "range"])
def test_coded_payloads_change_nothing(lockstep, world, coding):
    """Messages of varying length, also those that are passed on, with few levels and with many."""
    for levels in (7, 700):
        coded = qcomp.QSGD(levels=levels, bucket_size=32, norm="l2", coding=coding)
        held = []
        for c in (coded, coded.coder.plain):
            mean = world.mean(c)
            states, record = start(mean, inputs(0, 0), world.nodes), b""
            for step in range(2 if levels == 7 else 1):
                values = of_ranks(world, step)
                means, states = average(lockstep, mean, values, states, Key(step=step))
                record += bits(means) + b"".join(map(held_by, states))
            held.append(record)
        assert held[0] == held[1]


@one_world
@pytest.mark.parametrize("donate", [False, True])
def test_blends_and_donation_change_nothing(lockstep, world, donate):
    for momenta_of in (world, World(world.topology, (0,))):
        mean = world.mean()
        momenta, values = inputs(77, 0), of_ranks(momenta_of, 1)
        blends = [Blend(m, 0.9, 0.5) for m in momenta]
        mixed = [[0.9 * m + ((1 - 0.9) * 0.5) * g for m, g in zip(momenta, v, strict=True)] for v in values]
        states = start(mean, momenta, momenta_of.nodes)
        expected = average(lockstep, mean, mixed, states)
        got = average(lockstep, mean, values, states, donate=donate, blends=blends)
        assert bits(got.means) == bits(expected.means)
        assert [held_by(s) for s in got.states] == [held_by(s) for s in expected.states]
        assert bits(momenta) == bits(inputs(77, 0))
        given = average(lockstep, mean, of_ranks(momenta_of, 1), states, donate=True)
        plain = average(lockstep, mean, of_ranks(momenta_of, 1), states)
        assert bits(given.means) == bits(plain.means)
        assert [held_by(s) for s in given.states] == [held_by(s) for s in plain.states]


@every_world
@pytest.mark.parametrize("spec", [*SPECS[:2], "identity"])
def test_the_means_may_take_the_place_of_the_values(lockstep, world, spec):
    mean = world.mean(spec)
    plain = over = start(mean, inputs(0, 0), world.nodes)
    for step in range(2):
        values = of_ranks(world, step)
        expected, plain = average(lockstep, mean, values, plain, Key(step=step))
        running = [
            mean.stages(x, s, key=Key(step=step), overwrite=True) for x, s in zip(values, over, strict=True)
        ]
        results = lockstep(running)
        over = [state for _, state in results]
        assert {bits(means) for means, _ in results} == {bits(expected)}
        assert [held_by(s) for s in over] == [held_by(s) for s in plain]
        if spec != "identity" and not world.is_exact:  # several tensors are one vector there
            for own, (means, _) in zip(values, results, strict=True):
                assert all(np.shares_memory(m, x) for m, x in zip(means, own, strict=True) if x.size)


@one_world
def test_side_by_side_with_other_means(lockstep, world):
    """With one of as many exchanges, and with one of another number."""
    other = "all_gather" if world.topology != "all_gather" else "ring"
    means = [
        world.mean(),
        world.mean("identity", feedback=False),
        CompressedMean(qcomp.ScaledSign(16), other),
    ]
    values = [[inputs(rank, i) for i in range(3)] for rank in world.ranks]
    states = [start(mean, values[0][0], world.nodes) for mean in means]
    fused = lockstep(
        [fuse([m.stages(values[r][i], states[i][r]) for i, m in enumerate(means)]) for r in world.ranks]
    )
    for i, mean in enumerate(means):
        expected, _ = average(lockstep, mean, [v[i] for v in values], states[i])
        assert {bits(fused[rank][i][0]) for rank in world.ranks} == {bits(expected)}


@every_world
def test_over_a_communicator_it_is_what_the_stages_return(lockstep, world):
    mean = world.mean()
    found = average(lockstep, mean, of_ranks(world, 0), start(mean, inputs(0, 0), world.nodes))

    def rank_main(comm):
        state = mean.init(inputs(0, 0), comm)
        return mean(inputs(comm.rank, 0), state, comm)

    for rank, (means, state) in enumerate(run_local(world.size, rank_main, hosts=world.hosts)):
        assert bits(means) == bits(found.means)
        assert held_by(state) == held_by(found.states[rank])


# --- what is owed ----------------------------------------------------------------------------------------------------


@every_world
@pytest.mark.parametrize(
    "spec",
    [
        *SPECS[:3],
        "sign:bucket_size=16,scale=rms",
        "onebit_sgd",
        "scaled(qsgd:levels=1)",
        "qsgd:levels=31,bucket_size=16,coding=elias",
    ],
)
def test_the_sum_identity_holds(lockstep, world, spec):
    check_sum_identity(lockstep, world.mean(spec), world.nodes, shapes=SHAPES)


@one_world
def test_residuals_that_are_dropped_anywhere_are_caught(lockstep, monkeypatch, world):
    with monkeypatch.context() as patched:
        hops = forget_residuals(patched, lambda _: False)
        check_sum_identity(lockstep, world.mean(), world.nodes, shapes=SHAPES)
    assert hops
    for hop in hops:
        with monkeypatch.context() as patched:
            forget_residuals(patched, lambda key, hop=hop: key.hop == hop)
            with pytest.raises(AssertionError):
                check_sum_identity(lockstep, world.mean(), world.nodes, shapes=SHAPES)


@every_world
def test_residuals_are_zeros_of_the_ranges_of_the_layout(world):
    mean = world.mean()
    served = [np.zeros(int(np.prod(shape)), int) for shape in SHAPES]
    for state in start(mean, inputs(0, 0), world.nodes):
        assert state.topology == world.topology
        if world.is_exact:
            assert state.worker == state.server == ()
            continue
        worker, server = mean.layout(SHAPES, rank=state.rank, size=world.size, nodes=world.nodes).residuals
        assert [r.shape for r in state.worker] == [(s.size,) for s in worker]
        assert [r.shape for r in state.server] == [(s.size,) for s in server]
        assert not any(r.any() for r in (*state.worker, *state.server))
        for part in server:
            served[part.tensor][part.start : part.stop] += 1
    assert len({int(count) for counts in served for count in counts}) <= 1  # no element has two servers
    assert max(counts.max(initial=0) for counts in served) <= 1


@every_world
def test_without_feedback_nothing_is_owed(lockstep, world):
    mean = world.mean("qsgd:bucket_size=16", feedback=False)
    states = start(mean, inputs(0, 0), world.nodes)
    _, after = average(lockstep, mean, of_ranks(world, 0), states, Key())
    assert after == states
    assert all(s.worker == s.server == () for s in after)


@pytest.mark.parametrize("name", TOPOLOGIES)
@pytest.mark.parametrize("other", TOPOLOGIES)
def test_a_state_of_another_topology_is_an_error(name, other):
    if name == other or "hierarchical" in (name, other):  # of one rank it is exact
        return
    x, c = np.ones(40, dtype=np.float32), qcomp.ScaledSign(16)
    state = CompressedMean(c, other).zeros([x], rank=0, size=1)
    with pytest.raises(ValueError, match=f"state is of topology '{other}'; this mean is '{name}'"):
        CompressedMean(c, name)(x, state, qcomp.comm.LocalCommunicator.alone())


@pytest.mark.parametrize("name", TOPOLOGIES)
def test_ranks_of_other_topologies_are_told(name):
    other = TOPOLOGIES[TOPOLOGIES.index(name) - 1]

    def rank_main(comm):
        chosen = name if comm.rank else other
        with pytest.raises(qcomp.MismatchError, match=f"'{other}' on rank 0, but '{name}' on rank 1"):
            CompressedMean(qcomp.ScaledSign(), chosen).init(np.zeros(4), comm)
        return True

    assert run_local(2, rank_main, timeout=20) == [True] * 2


# --- refusals --------------------------------------------------------------------------------------------------------


def names_ranks(error: Exception, ranks: list[int], name: str) -> bool:
    """Whether an error names exactly these ranks; one of a stranger's topology may name none."""
    found = re.fullmatch(
        r"a value on ranks? ([\d, and]+) is not finite, or too large to compress", str(error)
    )
    if name not in OWN:
        return "is not finite" in str(error)
    return found is not None and [int(rank) for rank in re.findall(r"\d+", found[1])] == ranks


@every_world
@pytest.mark.parametrize("spec", [*SPECS, CODED], ids=str)
def test_a_refusal_is_everybodys_and_changes_nothing(lockstep, world, spec):
    """Whichever rank has the value, in whichever chunk: in the same stage, in the same words."""
    places = [(0, 0), (2, 0), (3, 37), (3, 161)]
    mean = world.mean(spec)
    _, states = average(lockstep, mean, of_ranks(world, 0), start(mean, inputs(0, 0), world.nodes), Key())
    before = [held_by(state) for state in states]
    expected = average(lockstep, mean, of_ranks(world, 1), states, Key(step=1))
    for bad in world.ranks:
        for number, (tensor, at) in enumerate(places):
            if world.size > 2 and spec != SPECS[0] and number != bad % 4:
                continue
            values = of_ranks(world, 1)
            values[bad][tensor].flat[at] = (np.nan, np.inf, -np.inf)[(bad + number) % 3]
            passed = [bits(x) for x in values]
            errors = refused(lockstep, mean, values, states, key=Key(step=1), overwrite=number % 2 == 1)
            assert all(names_ranks(error, [bad], world.topology) for error in errors)
            # The rank itself also says why.
            assert [error.__cause__ is not None for error in errors] == [rank == bad for rank in world.ranks]
            assert [bits(x) for x in values] == passed
            assert [held_by(state) for state in states] == before
    again = average(lockstep, mean, of_ranks(world, 1), states, Key(step=1))
    assert bits(again.means) == bits(expected.means)


@pytest.mark.parametrize("world", [world for world in WORLDS if world.size > 3], ids=str)
@pytest.mark.parametrize("at", [(0, 5), (5, 5), (169, 169)])
def test_all_ranks_to_blame_are_named(lockstep, world, at):
    """In chunks of their own, and in the same one."""
    values = of_ranks(world, 0)
    values[1][3][at[0]], values[3][3][at[1]] = np.nan, -np.inf
    mean = world.mean()
    for error in refused(lockstep, mean, values, start(mean, values[0], world.nodes)):
        assert names_ranks(error, [1, 3], world.topology)


@every_world
def test_over_a_communicator_nobody_waits_for_who_refuses(world):
    mean = world.mean()

    def rank_main(comm):
        x = inputs(comm.rank, 0)
        state = mean.init(x, comm)
        if comm.rank == world.size - 1:
            x[0][1, 1] = np.nan
        with pytest.raises(qcomp.NonFiniteError):
            mean(x, state, comm)
        mean(inputs(comm.rank, 0), state, comm)
        return True

    assert run_local(world.size, rank_main, timeout=20, hosts=world.hosts) == [True] * world.size


@compressing_world
@pytest.mark.parametrize("c", [SPECS[0], CODED], ids=str)
def test_a_message_of_another_size_is_an_error(lockstep, world, c):
    """In the first exchange in which rank 0 gets any, from each of the others; not in what announces the lengths."""
    mean, found = world.mean(c), []

    def damaged(stages, sender):
        """Rank 0, to which 8 bytes less come from one rank."""
        arrived, count = None, 0
        while True:
            try:
                request = next(stages) if arrived is None else stages.send(arrived)
            except StopIteration as stop:
                return stop.value
            arrived = yield request
            senders = [rank for rank, b in enumerate(arrived) if rank and b.shape[0]]
            if senders and not found and (count % 2 or not mean.compressor.variable_length):
                found.extend(senders)
                arrived = [b[: b.shape[0] - 8 * (rank == sender)] for rank, b in enumerate(arrived)]
            count += 1

    def run(sender):
        found.clear()
        states = start(mean, inputs(0, 0), world.nodes)
        running = [mean.stages(inputs(rank, 0), states[rank], key=Key()) for rank in world.ranks]
        lockstep([damaged(running[0], sender), *running[1:]])

    run(None)
    senders = list(found)
    assert bool(senders) == (world.size > 1)
    for sender in senders:
        with pytest.raises(qcomp.PayloadError, match=f"the message from rank {sender} has"):
            run(sender)


# --- unbiased --------------------------------------------------------------------------------------------------------


def off(lockstep: Any, world: World) -> float:
    """How far, in standard deviations at most, an unbiased compressor's mean of many equal values is from theirs."""
    bucket, n = 1 << 10, 1 << 14
    values = [np.full(n, (1 + 3 * rank) / 16, dtype=np.float32) for rank in world.ranks]
    for x in values:
        x[::bucket] = 1  # the step, on every rank
    mean = world.mean(qcomp.QSGD(levels=1, bucket_size=bucket), feedback=False)
    got, _ = average(lockstep, mean, values, start(mean, values[:1], world.nodes), Key(seed=3))
    exact = sum(Fraction(1 + 3 * rank, 16) for rank in world.ranks) / world.size
    rest = np.delete(got.astype(np.float64), np.s_[::bucket])
    # A value is rounded N + 1 times at most, in steps that are at most 1 in the mean.
    return abs(rest.mean() - float(exact)) / np.sqrt((world.size + 1) / 4 / rest.size)


@every_world
def test_an_unbiased_compressor_has_an_unbiased_mean(lockstep, world):
    assert off(lockstep, world) < 6


@compressing_world
def test_and_one_that_always_rounds_up_shows(lockstep, world):
    with replace_draws(lambda key, block: 0):
        assert off(lockstep, world) > 12


@compressing_world
def test_every_draw_has_a_key_of_its_own(lockstep, world):
    """No two buckets are rounded with the same draws, on no two ranks and in no two hops."""
    mean, values = world.mean(SPECS[1]), of_ranks(world, 0)
    seen = draws_of(lockstep, mean, values, start(mean, values[0], world.nodes))
    assert len(seen) == len(set(seen)) > 0
    assert {(key.seed, key.step, key.tensor) for key in seen} == {(9, 4, 2)}
    assert {key.bucket for key in seen} == set(range(15))
    assert {key.rank for key in seen} <= set(world.ranks)
