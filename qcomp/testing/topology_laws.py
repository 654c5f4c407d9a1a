"""The laws of topologies, each a function that raises AssertionError if a topology breaks it in a world of ranks."""

import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property, partial
from itertools import pairwise
from typing import Any

import numpy as np

from qcomp.core.compressors import QSGD, Cast, Identity, MinMaxUInt8, ScaledSign
from qcomp.core.kernels import Blend
from qcomp.core.mean.compressed_mean import CompressedMean, MeanState
from qcomp.core.mean.costs import Cluster, Link, Load
from qcomp.core.mean.rounds import in_rounds, lay_out_rounds
from qcomp.core.mean.stages import AllGather, AllToAll, fuse, pipeline
from qcomp.core.mean.topologies.base import Averaged, Call
from qcomp.core.mean.topologies.registry import topology
from qcomp.core.numeric.arrays import Array
from qcomp.core.numeric.random import Key
from qcomp.testing.environments import in_another_process
from qcomp.testing.failure_laws import (
    damage_is_noticed,
    over_a_communicator,
    refusals_are_shared,
    servers_refuse_too,
)
from qcomp.testing.means import (
    SHAPES,
    SPECS,
    Peers,
    average,
    bits,
    draws_of,
    held_by,
    inputs,
    means_of,
    require_sum_identity,
)
from qcomp.testing.one_thread import bytes_to_others, lockstep, watched


def ranks_agree(world: Peers) -> None:
    """All ranks request the same exchanges and hold the same means, which have the shapes and dtypes of the values."""
    for spec in SPECS:
        mean = world.mean(spec)
        states = world.start(mean, inputs(0, 0))
        for step in range(3):
            values = world.values(step)
            means, states = average(mean, values, states, Key(step=step))
            wanted, found = ([(x.shape, x.dtype) for x in arrays] for arrays in (values[0], means))
            assert found == wanted, f"the means have shapes and dtypes {found}; the values {wanted}"


def exact_without_loss(world: Peers) -> None:
    """With a lossless compressor the result is the mean, up to the rounding of the additions, in its own memory."""
    for feedback, shapes in ((True, SHAPES), (False, SHAPES), (False, ((2**17 + 7,),))):
        mean = world.mean("identity", feedback=feedback)
        values = world.values(0, shapes=shapes)
        states = world.start(mean, values[0])
        assert not any((*s.worker, *s.server) for s in states), (
            "residuals are kept for a compressor that loses nothing"
        )
        means, _ = average(mean, values, states)
        for i, got in enumerate(means):
            exact = sum(v[i].astype(np.float64) for v in values) / world.size
            largest = sum(np.abs(v[i]) for v in values) / world.size
            assert (np.abs(got - exact) <= (world.size + 3) * 2.0**-24 * largest).all(), (
                f"tensor {i} is not averaged exactly by Identity"
            )
            shared = any(np.shares_memory(got, v[i]) for v in values if got.size)
            assert not shared, f"the mean of tensor {i} shares memory with a rank's values"


def fewer_buckets_than_ranks(world: Peers) -> None:
    """A topology can average one short tensor, and tensors without elements."""
    for shapes in ([(20,)], [(3,)], [(0,)], [(0,), (2, 0)]):
        for spec in SPECS[:2]:
            mean = world.mean(spec)
            values = world.values(0, shapes=shapes)
            states = world.start(mean, values[0])
            for step in range(2):
                means, states = average(mean, values, states, Key(step=step))
            found = [m.shape for m in means]
            assert found == shapes, f"the means of tensors of shapes {shapes} have shapes {found}"


def own_precision(world: Peers) -> None:
    """Each tensor keeps its dtype. Arithmetic and residuals are in float64 for float64 tensors, else in float32."""
    for dtype in ("float16", "float32", "float64"):
        mean = world.mean("minmax:bucket_size=16")
        x = [values[0] for values in world.values(0, dtype=dtype, shapes=[(37,)])]
        states = world.start(mean, [x[0]])
        computed = "float64" if dtype == "float64" else "float32"
        for _ in range(2):
            found = {str(r.dtype) for s in states for r in (*s.worker, *s.server)}
            assert found <= {computed}, f"residuals of {dtype} are kept in {found}; expected {computed}"
            got, states = average(mean, x, states)
        assert got.dtype == dtype, f"the mean of {dtype} is {got.dtype}"
        off = np.abs(got - sum(v.astype(np.float64) for v in x) / world.size).max()
        assert off < 0.02 * (world.size + 2), (
            f"the mean of {dtype} is off by {off:.3g}, with 8 bits per element"
        )
    values = [[np.full(5, 1 + rank, np.float32), np.full(7, 1 / 3 + rank)] for rank in world.ranks]
    for c in (Identity(), ScaledSign(bucket_size=8)):
        for order in (1, -1):
            mean, ordered = world.mean(c, feedback=False), [of_rank[::order] for of_rank in values]
            means, _ = average(mean, ordered, world.start(mean, ordered[0]))
            for i, got in enumerate(means):
                exact = sum(of_rank[i].astype(np.float64) for of_rank in ordered) / world.size
                assert got.dtype == ordered[0][i].dtype, "tensors of two dtypes do not keep their dtypes"
                assert np.allclose(got, exact, rtol=1e-6, atol=0), "tensors of two dtypes have a wrong mean"


def residuals_as_laid_out(world: Peers) -> None:
    """First residuals are zeros, in the layout's shapes. Every element has one server residual, or none has any."""
    mean = world.mean()
    served = [np.zeros(math.prod(shape), int) for shape in SHAPES]
    for state in world.start(mean, inputs(0, 0)):
        assert state.topology == world.topology
        if world.is_exact:
            assert state.worker == state.server == (), "an exact mean keeps residuals"
            continue
        worker, server = mean.layout(SHAPES, rank=state.rank, size=world.size, nodes=world.nodes).residuals
        for name, residuals, ranges in (("worker", state.worker, worker), ("server", state.server, server)):
            found, wanted = [r.shape for r in residuals], [(s.size,) for s in ranges]
            assert found == wanted, f"the {name} residuals have shapes {found}; the layout says {wanted}"
        assert not any(np.any(r) for r in (*state.worker, *state.server)), "first residuals are not zero"
        for part in server:
            served[part.tensor][part.start : part.stop] += 1
    counts = {int(count) for counts in served for count in counts}
    assert counts in ({0}, {1}), (
        f"elements have {sorted(counts)} server residuals; expected one each, or none at all"
    )


def nothing_owed_without_feedback(world: Peers) -> None:
    """Without feedback, states keep no residuals and do not change."""
    mean = world.mean("qsgd:bucket_size=16", feedback=False)
    states = world.start(mean, inputs(0, 0))
    _, after = average(mean, world.values(0), states, Key())
    assert after == states, "the state changes without feedback"
    assert all(s.worker == s.server == () for s in after), "residuals are kept without feedback"


def sum_identity(world: Peers) -> None:
    """The means add up to the exact means, minus what the residuals of all ranks hold, in float64 and float32."""
    uneven = [*SHAPES, (10_007,)]  # leaves a remainder in every division into blocks
    for spec in SPECS[:3:2]:
        require_sum_identity(world.mean(spec), world.nodes, shapes=uneven, dtype=np.float32)
    others = ("sign:bucket_size=16,scale=rms", "onebit_sgd", "scaled(qsgd:levels=1)")
    for spec in (*SPECS[:3], *others, "qsgd:levels=31,bucket_size=16,coding=elias"):
        require_sum_identity(world.mean(spec), world.nodes)


def only_results_are_new(world: Peers) -> None:
    """Values, old residuals and earlier means are not written to, so the same call gives the same result again."""
    for spec in SPECS[:2]:
        mean = world.mean(spec)
        earlier, states = average(mean, world.values(0), world.start(mean, inputs(0, 0)), Key())
        values, before, held = world.values(1), [held_by(state) for state in states], bits(earlier)
        first = average(mean, values, states, Key(step=1))
        assert [bits(x) for x in values] == [bits(x) for x in world.values(1)], "values were written to"
        assert [held_by(state) for state in states] == before, "old residuals were written to"
        again = average(mean, values, states, Key(step=1))
        same = bits(again.means) == bits(first.means) and _held(again.states) == _held(first.states)
        assert same, "the same call gives another result the second time"
        assert bits(earlier) == held, "a later call writes to the means of an earlier one"


def donation_changes_nothing(world: Peers) -> None:
    """Values that may be overwritten give the same result, also if they are blended into momenta."""
    mean = world.mean()
    momenta = inputs(77, 0)
    blends = [Blend(m, 0.9, 0.5) for m in momenta]
    states = world.start(mean, momenta)
    mixed = [
        [0.9 * m + ((1 - 0.9) * 0.5) * g for m, g in zip(momenta, v, strict=True)] for v in world.values(1)
    ]
    blended, plain = average(mean, mixed, states), average(mean, world.values(1), states)
    for what, expected, options in (
        ("blended into momenta", blended, {"blends": blends}),
        ("blended into momenta and donated", blended, {"blends": blends, "donate": True}),
        ("donated", plain, {"donate": True}),
    ):
        got = average(mean, world.values(1), states, **options)
        same = bits(got.means) == bits(expected.means) and _held(got.states) == _held(expected.states)
        assert same, f"values that are {what} give another result"
    assert bits(momenta) == bits(inputs(77, 0)), "momenta were written to"


def overwriting_changes_nothing(world: Peers) -> None:
    """With permission to overwrite the buffers of the values, means are the same, and use these buffers."""
    for spec in (*SPECS[:2], "identity"):
        mean = world.mean(spec)
        plain = over = world.start(mean, inputs(0, 0))
        for step in range(2):
            values = world.values(step)
            expected, plain = average(mean, values, plain, Key(step=step))
            pairs = zip(values, over, strict=True)
            results = lockstep([mean.stages(x, s, key=Key(step=step), overwrite=True) for x, s in pairs])
            over = [state for _, state in results]
            same = {bits(means) for means, _ in results} == {bits(expected)} and _held(over) == _held(plain)
            assert same, f"with overwrite, {spec} gives another result"
            if spec == "identity" or world.is_exact:  # an exact mean joins several tensors into one vector
                continue
            for own, (means, _) in zip(values, results, strict=True):
                taken = all(np.shares_memory(m, x) for m, x in zip(means, own, strict=True) if x.size)
                assert taken, "with overwrite, the means take new buffers: see Call.places and decode_means"


def side_by_side(world: Peers) -> None:
    """A mean that is fused or pipelined with others gives the same result."""
    other = "all_gather" if world.topology != "all_gather" else "ring"
    means = [
        world.mean(),
        world.mean("identity", feedback=False),
        CompressedMean(ScaledSign(16), other),
    ]
    values = [[inputs(rank, i) for i in range(3)] for rank in world.ranks]
    states = [world.start(mean, values[0][0]) for mean in means]
    alone = [average(m, [v[i] for v in values], states[i]).means for i, m in enumerate(means)]
    for how in (fuse, pipeline):
        together = lockstep(
            [how([m.stages(values[r][i], states[i][r]) for i, m in enumerate(means)]) for r in world.ranks]
        )
        for i, expected in enumerate(alone):
            same = {bits(together[rank][i][0]) for rank in world.ranks} == {bits(expected)}
            assert same, f"beside other means, with {how.__name__}, the mean gives another result"


def rounds_change_nothing(world: Peers) -> None:
    """If the topology allows rounds, several rounds give the same means and residuals as one round."""
    resolved = topology(world.topology)
    if not resolved.allows_rounds or world.is_exact:
        return
    for spec in SPECS[:3]:
        mean = world.mean(spec)
        states, values = world.start(mean, inputs(0, 0)), world.values(0)
        whole = average(mean, values, states, Key(step=3))

        def of_rank(rank: int, mean: CompressedMean = mean, states: list[MeanState] = states) -> Any:
            state, flat = states[rank], [x.reshape(-1) for x in world.values(0)[rank]]
            layout = mean.layout(
                SHAPES, rank=rank, size=world.size, nodes=world.nodes, dtypes=("float32",) * len(SHAPES)
            )
            call = Call(layout, flat, state.worker, state.server, Key(step=3, rank=rank))
            computations, join = in_rounds(resolved, call, lay_out_rounds(resolved, layout, 3))
            results = yield from pipeline(computations)
            return join(results)

        joined: list[Averaged] = lockstep([of_rank(rank) for rank in world.ranks])
        for rank, result in enumerate(joined):
            same = bits(list(result.means)) == bits(whole.means)
            assert same, f"with {spec}, a mean in rounds differs from one in a single round"
            kept = whole.states[rank]._replace(worker=result.worker, server=result.server)
            same = held_by(kept) == held_by(whole.states[rank])
            assert same, f"with {spec}, a mean in rounds leaves other residuals on rank {rank}"


def coding_changes_nothing(world: Peers) -> None:
    """Payloads whose length depends on the values give the same means and residuals as plain payloads."""
    for coding in ("elias", "range"):
        for levels in (7, 700):
            coded = QSGD(levels=levels, bucket_size=32, norm="l2", coding=coding)
            assert coded.coder is not None
            plain = coded.coder.plain
            assert isinstance(plain, QSGD)
            held = []
            for c in (coded, plain):
                mean = world.mean(c)
                states, record = world.start(mean, inputs(0, 0)), b""
                for step in range(2 if levels == 7 else 1):
                    means, states = average(mean, world.values(step), states, Key(step=step))
                    record += bits(means) + _held(states)
                held.append(record)
            assert held[0] == held[1], f"payloads of variable length ({coded}) give another result"


def stays_unbiased(world: Peers) -> None:
    """Without feedback, the mean that a topology computes with an unbiased compressor is unbiased."""
    distance = distance_of_an_unbiased_mean(world)
    assert distance < 6, f"the mean of an unbiased compressor is off by {distance:.1f} standard deviations"


def distance_of_an_unbiased_mean(world: Peers) -> float:
    """Return a lower bound of the deviation of the mean of many equal values, in standard deviations."""
    bucket, n = 1 << 10, 1 << 14
    values = [np.full(n, (1 + 3 * rank) / 16, dtype=np.float32) for rank in world.ranks]
    for x in values:
        x[::bucket] = 1 + 3 * world.size / 16  # the bucket's step, equal on all ranks
    largest = float(values[0][0])
    mean = world.mean(QSGD(levels=1, bucket_size=bucket), feedback=False)
    got, _ = average(mean, values, world.start(mean, values[:1]), Key(seed=3))
    exact = sum(Fraction(1 + 3 * rank, 16) for rank in world.ranks) / world.size
    rest = np.delete(got.astype(np.float64), np.s_[::bucket])
    # The mean rounds a value at most N + 1 times, with steps of at most the largest value.
    return float(abs(rest.mean() - float(exact)) / largest / np.sqrt((world.size + 1) / 4 / rest.size))


def draws_have_keys_of_their_own(world: Peers) -> None:
    """No two buckets are rounded with the same draws, whatever their ranks and hops."""
    mean, values = world.mean(SPECS[1]), world.values(0)
    for step in (4, 2**33 + 4):
        seen = draws_of(mean, values, world.start(mean, values[0]), step)
        if world.is_exact:
            return
        assert seen, "nothing draws"
        twice = [key for key in seen if seen.count(key) > 1]
        assert not twice, (
            f"two buckets are rounded with the draws of {Key(*twice[0])}; give each hop its own: key.at(hop=...)"
        )
        keys = {(key.seed, key.step, key.tensor) for key in seen}
        assert keys == {(9, step, 2)}, "draws ignore the key of the call"
        assert {key.bucket for key in seen} == set(range(15)), "draws ignore the numbers of the buckets"
        assert {key.rank for key in seen} <= set(world.ranks), "draws have keys of ranks that do not exist"


def sends_what_fits(world: Peers) -> None:
    """Each exchange has a one-dimensional uint8 buffer and a size for each rank."""
    mean = world.mean()
    states = world.start(mean, inputs(0, 0))

    def require_fitting(request: Any) -> None:
        assert isinstance(request, AllToAll | AllGather), f"the stages yield {request!r}"
        buffers = request.send if isinstance(request, AllToAll) else (request.send,) * world.size
        assert len(buffers) == len(request.receive) == world.size, (
            f"an exchange has {len(buffers)} buffers and {len(request.receive)} sizes for {world.size} ranks"
        )
        found = {(str(b.dtype), b.ndim) for b in buffers}
        assert found == {("uint8", 1)}, f"buffers have dtypes and axes {found}; expected uint8 and one axis"

    lockstep([watched(mean.stages(inputs(r, 0), states[r]), require_fitting) for r in world.ranks])


def costs_make_sense(world: Peers) -> None:
    """The topology's cost is finite and not negative, and does not fall as vectors grow or links become slower.

    If each node has one rank, the seconds on the wire suffice for the bytes that a rank sends.
    """
    resolved = topology(world.topology)
    per_node = world.size // len(set(world.nodes)) if world.size % len(set(world.nodes)) == 0 else 1

    def cost(elements: int, bandwidth: float, latency: float) -> tuple[float, float, float]:
        load = Load(elements, elements // 8 + 8, False, encode=1e-9, decode=2e-10, add=2e-10, copy=4e-10)
        found = resolved.cost(load, Cluster(world.size, Link(bandwidth, latency), per_node))
        numbers = found.codec, found.wire, found.sent
        assert all(math.isfinite(x) and x >= 0 for x in numbers), f"cost of {elements} elements is {found}"
        assert per_node > 1 or found.wire >= found.sent / bandwidth, (
            f"cost of {elements} elements is {found}; {bandwidth:.0f} bytes per second take longer on the wire"
        )
        return found.codec, found.wire, found.sent

    sizes = [cost(elements, 1e9, 1e-5) for elements in (1, 1000, 10**6, 10**8)]
    links = [cost(10**6, 1e9 / slow, 1e-5 * slow) for slow in (1, 10, 100)]
    for what, costs in (("larger vectors", sizes), ("slower links", links)):
        for less, more in pairwise(costs):
            assert all(a <= b for a, b in zip(less, more, strict=True)), (
                f"{what} cost less: {less} before, {more} after"
            )


@dataclass(frozen=True, eq=False)  # each rank has its own counts; equal objects would share layouts
class _Counting(ScaledSign):
    """Counts the elements that it compresses and decompresses."""

    @cached_property
    def counts(self) -> Counter[str]:
        """The numbers of elements compressed and decompressed, and of bytes that its rank sent."""
        return Counter()

    def encode(self, x: Array, key: Key | None) -> Mapping[str, Array]:
        self.counts["compressed"] += x.shape[0]
        return super().encode(x, key)

    def decode(self, parts: Mapping[str, Array], size: int, dtype: Any) -> Array:
        self.counts["decompressed"] += size
        return super().decode(parts, size, dtype)


def costs_count_what_happens(world: Peers) -> None:
    """The bytes and elements in the cost lie between the ranks' average and maximum, up to a tenth for rounding."""
    per_node, *others = {world.nodes.count(node) for node in world.nodes}
    if world.size == 1 or others:
        return  # a cluster has the same number of ranks on every node
    size, compressors = 1 << 16, [_Counting(bucket_size=64) for _ in world.ranks]

    def count(rank: int, request: Any) -> None:
        compressors[rank].counts["sent"] += bytes_to_others(request, rank)

    x, running = np.ones(size, np.float32), []
    for rank, c in enumerate(compressors):
        mean = world.mean(c, feedback=False)
        running.append(watched(mean.stages(x, world.start(mean, [x])[rank]), partial(count, rank)))
    lockstep(running)
    resolved, cluster = topology(world.topology), Cluster(world.size, Link(1e9), per_node)
    load = Load(
        size, compressors[0].payload_spec(size).nbytes, False, encode=0.0, decode=0.0, add=0.0, copy=0.0
    )
    found = {
        "sent": resolved.cost(load, cluster).sent,
        "compressed": resolved.cost(load._replace(encode=1.0), cluster).codec,
        "decompressed": resolved.cost(load._replace(decode=1.0, add=1.0), cluster).codec,
    }
    for what, counted in found.items():
        of_ranks = [c.counts[what] for c in compressors]
        unit = "bytes" if what == "sent" else "elements"
        if world.is_exact and what != "sent":
            continue  # it only copies and adds
        assert 0.9 * sum(of_ranks) / world.size <= counted <= 1.1 * max(of_ranks), (
            f"the topology's cost counts {counted:.0f} {unit} {what} by a rank; the ranks counted {of_ranks}"
        )


def each_tensor_has_its_compressor(world: Peers) -> None:
    """With a compressor for each tensor, each tensor is averaged exactly, or with the loss of its own compressor."""
    shapes = ((33,), (170,), (50,), (4, 10))
    chosen = (ScaledSign(bucket_size=16), Identity(), MinMaxUInt8(bucket_size=16), Cast())
    for order in (1, -1):
        mean = CompressedMean(chosen[::order], world.topology, feedback=False)
        values = world.values(0, shapes=shapes)
        means, _ = average(mean, values, world.start(mean, values[0]), Key(step=1))
        for i, (c, got) in enumerate(zip(chosen[::order], means, strict=True)):
            off = float(np.abs(got - sum(v[i].astype(np.float64) for v in values) / world.size).max())
            most = _MOST_OFF.get(type(c))
            assert most is None or off <= most * (world.size + 2), (
                f"tensor {i}, which is compressed by {c.spec}, is off by {off:.3g} beside tensors with other "
                "compressors"
            )
            assert most is not None or off > 0.05 or world.is_exact, (
                f"tensor {i} should be compressed by {c.spec}, but is off by only {off:.3g}"
            )


_MOST_OFF: dict[type, float] = {Identity: 1e-6, MinMaxUInt8: 0.02, Cast: 0.02}
"""The largest deviation of one compression from the exact mean of normal values."""


def many_ranks_owe_what_is_lost(world: Peers) -> None:
    """The sum identity also holds on more than five ranks, whatever their number."""
    if world.size > 5:
        require_sum_identity(world.mean(), world.nodes, shapes=[(170,), (3, 11)])


def the_same_array_twice(world: Peers) -> None:
    """An array that is given as two tensors is averaged as two arrays with its values."""
    for spec in (SPECS[0], "identity"):
        mean = world.mean(spec, feedback=False)
        values = [[x, x] for (x,) in world.values(0, shapes=((170,),))]
        states = world.start(mean, values[0])
        found, _ = average(mean, values, states)
        expected, _ = average(mean, [[x, x.copy()] for x, _ in values], states)
        assert bits(found) == bits(expected), (
            f"with {spec}, an array that is given as two tensors has another mean"
        )


def same_in_another_process(world: Peers) -> None:
    """A fresh process with another hash seed, date, host, number of processors and environment gets the same means."""
    if world.size != 3:
        return
    inputs_of = [(spec, step) for spec in SPECS[:2] for step in (2, 1)]
    found = in_another_process(
        topology(world.topology), "qcomp.testing.means:of_registered", (world, inputs_of)
    )
    if found is not None:
        assert found == means_of(world, inputs_of[::-1])[::-1], "in another process, means differ"


def residuals_are_used(world: Peers) -> None:
    """Every residual that a state keeps enters a later mean: dropping any breaks the sum identity."""
    if world.is_exact:
        return
    mean = world.mean()
    _, states = average(mean, world.values(0), world.start(mean, inputs(0, 0)), Key())
    expected = average(mean, world.values(1), states, Key(step=1))
    for rank, state in enumerate(states):
        for kind in ("worker", "server"):
            if not any(np.any(r) for r in getattr(state, kind)):
                continue
            zeros: dict[str, Any] = {kind: tuple(0 * r for r in getattr(state, kind))}
            dropped = [state._replace(**zeros) if i == rank else s for i, s in enumerate(states)]
            other = average(mean, world.values(1), dropped, Key(step=1))
            same = bits(other.means) == bits(expected.means) and _held(other.states) == _held(expected.states)
            assert not same, f"the {kind} residuals of rank {rank} are kept, but never used"


def _held(states: list[MeanState]) -> bytes:
    return b"|".join(map(held_by, states))


TopologyLaw = Callable[[Peers], None]

TOPOLOGY_LAWS: tuple[tuple[TopologyLaw, ...], ...] = (
    (sends_what_fits, ranks_agree, residuals_as_laid_out, costs_make_sense),
    (
        exact_without_loss,
        fewer_buckets_than_ranks,
        own_precision,
        only_results_are_new,
        nothing_owed_without_feedback,
        sum_identity,
        residuals_are_used,
        each_tensor_has_its_compressor,
        the_same_array_twice,
        many_ranks_owe_what_is_lost,
        same_in_another_process,
        costs_count_what_happens,
        donation_changes_nothing,
        overwriting_changes_nothing,
        side_by_side,
        rounds_change_nothing,
        coding_changes_nothing,
        refusals_are_shared,
        servers_refuse_too,
        damage_is_noticed,
        stays_unbiased,
        draws_have_keys_of_their_own,
        over_a_communicator,
    ),
)
"""The laws about a topology, in groups; later groups rely on earlier groups."""

OF_MANY_RANKS: tuple[TopologyLaw, ...] = (
    exact_without_loss,
    draws_have_keys_of_their_own,
    many_ranks_owe_what_is_lost,
)
"""The laws that are also checked with 7 and 17 ranks."""
