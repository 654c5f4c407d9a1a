"""`check_topology` catches topologies with one fault each, and accepts one of another design."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import qcomp
from qcomp.core.mean.topologies import registry
from qcomp.extend import AllGather, AllToAll, Key, NonFiniteError
from qcomp.testing import ContractError, check_topology
from qcomp.testing.topologies import topology_contract
from qcomp.testing.topology_laws import TOPOLOGY_LAWS
from tests.core.tree import Tree

TwoPhase: Any = type(qcomp.topologies.topology("two_phase"))


@pytest.fixture(autouse=True)
def _registry_of_its_own(monkeypatch):
    monkeypatch.setattr(registry, "_registered", dict(registry._registered))


class Broken(TwoPhase):
    def change(self, call):
        return call

    def stages(self, call):
        return (yield from super().stages(self.change(call)))


class ForgetsWorkers(Broken):
    """Residuals are kept but never used."""

    def change(self, call):
        return call._replace(worker=tuple(0 * r for r in call.worker))


class WritesIntoValues(Broken):
    def change(self, call):
        for x in call.values:
            np.add(x, 1, out=x)
        return call


class OneStream(Key):
    __slots__ = ()

    def at(self, *, hop=None, bucket=None):
        return super().at(hop=0, bucket=bucket)


class WorkerAndServerDrawAlike(Broken):
    def change(self, call):
        return call._replace(key=OneStream(*call.key))


class IgnoresTheStep(Broken):
    def change(self, call):
        return call._replace(key=call.key._replace(step=0))


class IgnoresOverwrite(Broken):
    def change(self, call):
        return call._replace(overwrite=False)


class RemembersTheLastCall(Broken):
    """Hidden state: the second call gives another result."""

    calls = 0

    def change(self, call):
        self.calls += 1
        return call._replace(values=[x * (1 + self.calls) for x in call.values], into=type(call.into)())


class RefusesAlone(Broken):
    def stages(self, call):
        if not all(np.isfinite(x).all() for x in call.values):
            raise NonFiniteError("a value is not finite")
        return (yield from super().stages(call))


class RanksDiffer(Broken):
    def stages(self, call):
        found = yield from super().stages(call)
        return found._replace(means=[m + m.dtype.type(call.layout.rank) for m in found.means])


class DividesWrongly(Broken):
    def stages(self, call):
        found = yield from super().stages(call)
        for m in found.means:
            np.multiply(m, 1.001, out=m)
        return found


class TakesWhatIsShort(Broken):
    """Messages of the wrong size are made to fit."""

    def stages(self, call):
        stages, arrived = super().stages(call), None
        while True:
            try:
                request = next(stages) if arrived is None else stages.send(arrived)
            except StopIteration as stop:
                return stop.value
            arrived = yield request
            arrived = [np.resize(b, n) for b, n in zip(arrived, request.receive, strict=True)]


class SendsFloats(Broken):
    def stages(self, call):
        yield AllGather(np.zeros(2, np.float32), (2,) * call.layout.world)
        return (yield from super().stages(call))


class RankZeroGathers(Broken):
    """Rank 0 requests another kind of exchange than the other ranks."""

    def stages(self, call):
        world, nothing = call.layout.world, np.zeros(0, np.uint8)
        yield (
            AllGather(nothing, (0,) * world)
            if call.layout.rank
            else AllToAll((nothing,) * world, (0,) * world)
        )
        return (yield from super().stages(call))


class EverybodyServesAll(Broken):
    def lay_out(self, operands, chunks=None):
        found = super().lay_out(operands, chunks)
        return type(found)(found.operands, found.chunks, found.residuals._replace(server=operands.whole))


class CostsLessThanNothing(Broken):
    def cost(self, load, cluster):
        return super().cost(load, cluster)._replace(wire=-1.0)


class SendsInNoTime(Broken):
    def cost(self, load, cluster):
        return super().cost(load, cluster)._replace(wire=0.0)


class ComputesInSingle(Broken):
    def stages(self, call):
        found = yield from super().stages(call)
        return found._replace(means=[m.astype(np.float32).astype(m.dtype) for m in found.means])


class DecaysInSingle(Broken):
    """In float32 half of what workers owe is forgotten."""

    def stages(self, call):
        found = yield from super().stages(call)
        decayed = tuple(r * r.dtype.type(0.5 if r.dtype == np.float32 else 1) for r in found.worker)
        return found._replace(worker=decayed)


class ServersOweTheOppositeInSingle(Broken):
    def stages(self, call):
        found = yield from super().stages(call)
        return found._replace(server=tuple(-r if r.dtype == np.float32 else r for r in found.server))


class DoublesRankZeroOfFour(Broken):
    """A path for powers of two weighs a rank wrongly."""

    def change(self, call):
        if call.layout.world != 4 or call.layout.rank:
            return call
        return call._replace(values=[x * 2 for x in call.values], donate=False, into=type(call.into)())


class DropsTheRest(Broken):
    """What is left of a long tensor after whole blocks of 4096 elements is never averaged."""

    def stages(self, call):
        found = yield from super().stages(call)
        for m in found.means:
            m[m.size // 4096 * 4096 or m.size :] = 0
        return found


class RefusesAloneWhereEmpty(Broken):
    """A rank without a chunk raises before the exchange."""

    def stages(self, call):
        if not call.layout.own.chunk and not all(np.isfinite(x).all() for x in call.values):
            raise NonFiniteError("a value is not finite")
        return (yield from super().stages(call))


class ReusesTheBuffersOfMeans(Broken):
    buffers: dict[Any, Any] = {}

    def change(self, call):
        if call.overwrite or call.into.means:
            return call
        own = [
            self.buffers.setdefault((call.layout.rank, i, x.shape, x.dtype), np.empty_like(x))
            for i, x in enumerate(call.values)
        ]
        return call._replace(into=call.into._replace(means=own))


class CountsHalfOfItsBytes(Broken):
    def cost(self, load, cluster):
        found = super().cost(load, cluster)
        return found._replace(sent=found.sent / 2)


class CountsTheBytesOfAllRanks(Broken):
    def cost(self, load, cluster):
        found = super().cost(load, cluster)
        return found._replace(sent=found.sent * cluster.ranks)


class ForgetsThatServersCompress(Broken):
    def cost(self, load, cluster):
        found = super().cost(load, cluster)
        return found._replace(codec=found.codec - load.encode * load.packed / cluster.ranks)


class CountsAdditionsTwice(Broken):
    def cost(self, load, cluster):
        return super().cost(load._replace(add=2 * load.add), cluster)


class LeavesOutWhatFollowsWholeBlocks(Broken):
    """Of a tensor of more than 65,536 elements, what is left after whole blocks is not averaged."""

    def stages(self, call):
        found = yield from super().stages(call)
        for mean in found.means:
            mean[mean.size >> 16 << 16 or mean.size :] = 0
        return found


class RanksOfThreeBits(Broken):
    def change(self, call):
        return call._replace(key=call.key._replace(rank=call.key.rank % 8))


class IgnoresRefusalsOfServers(Broken):
    """A server's residual that is not finite counts as zero, on this rank alone."""

    def change(self, call):
        return call._replace(server=tuple(np.nan_to_num(r) for r in call.server))


class FirstCompressorForAll(Broken):
    def lay_out(self, operands, chunks=None):
        first = operands.compressors[0]
        same = replace(operands, compressors=(first,) * len(operands.compressors))
        return super().lay_out(same, chunks)


class ErrsFromTheSixthRank(Broken):
    def stages(self, call):
        found = yield from super().stages(call)
        if call.layout.rank < 5:
            return found
        return found._replace(worker=tuple(r * r.dtype.type(0.5) for r in found.worker))


class ErrsOnSixRanksOrMore(Broken):
    def stages(self, call):
        found = yield from super().stages(call)
        if call.layout.world > 5:
            for m in found.means:
                np.multiply(m, m.dtype.type(1.5), out=m)
        return found


class AveragesAnArrayOnce(Broken):
    """Arrays are known as objects, and one that comes again has no mean."""

    def stages(self, call):
        found = yield from super().stages(call)
        places = [x.__array_interface__["data"] for x in call.values]
        for i, (place, m) in enumerate(zip(places, found.means, strict=True)):
            if m.size and place in places[:i]:
                m[...] = 0
        return found


SALT = hash("salt") % 2**20


class SaltedSteps(Broken):
    """The keys of a process depend on its hash seed."""

    name = "broken_salted_steps"

    def change(self, call):
        return call._replace(key=call.key._replace(seed=call.key.seed ^ SALT))


class DrawsAlikeInLateSteps(Broken):
    """A counter of steps has 32 bits, and what is above takes the bits of hops."""

    def change(self, call):
        return call._replace(key=OneStream(*call.key)) if call.key.step >= 2**32 else call


BROKEN = {
    IgnoresRefusalsOfServers: {"servers_refuse_too"},
    FirstCompressorForAll: {"each_tensor_has_its_compressor"},
    ErrsFromTheSixthRank: {"many_ranks_owe_what_is_lost"},
    ErrsOnSixRanksOrMore: {"exact_without_loss"},
    AveragesAnArrayOnce: {"the_same_array_twice"},
    DecaysInSingle: {"sum_identity"},
    ServersOweTheOppositeInSingle: {"sum_identity"},
    DoublesRankZeroOfFour: {"exact_without_loss"},
    DropsTheRest: {"sum_identity"},
    RefusesAloneWhereEmpty: {"refusals_are_shared"},
    ReusesTheBuffersOfMeans: {"only_results_are_new"},
    CountsHalfOfItsBytes: {"costs_count_what_happens"},
    CountsTheBytesOfAllRanks: {"costs_count_what_happens"},
    ForgetsThatServersCompress: {"costs_count_what_happens"},
    CountsAdditionsTwice: {"costs_count_what_happens"},
    DrawsAlikeInLateSteps: {"draws_have_keys_of_their_own"},
    RanksOfThreeBits: {"draws_have_keys_of_their_own"},
    LeavesOutWhatFollowsWholeBlocks: {"exact_without_loss"},
    ForgetsWorkers: {"sum_identity", "residuals_are_used"},
    WritesIntoValues: {"only_results_are_new"},
    WorkerAndServerDrawAlike: {"draws_have_keys_of_their_own"},
    IgnoresTheStep: {"draws_have_keys_of_their_own"},
    IgnoresOverwrite: {"overwriting_changes_nothing"},
    RemembersTheLastCall: {"ranks_agree", "only_results_are_new"},
    RefusesAlone: {"refusals_are_shared", "over_a_communicator"},
    RanksDiffer: {"ranks_agree"},
    DividesWrongly: {"exact_without_loss"},
    TakesWhatIsShort: {"damage_is_noticed"},
    SendsFloats: {"sends_what_fits"},
    RankZeroGathers: {"ranks_agree"},
    EverybodyServesAll: {"residuals_as_laid_out"},
    CostsLessThanNothing: {"costs_make_sense"},
    SendsInNoTime: {"costs_make_sense"},
    ComputesInSingle: {"sum_identity"},
}


@pytest.mark.quick_cases(9)
@pytest.mark.parametrize("kind", BROKEN, ids=lambda kind: kind.__name__)
def test_broken_topology_is_caught_by_its_law(kind):
    topology = type(kind.__name__, (kind,), {"name": f"broken_{kind.__name__.lower()}"})()
    contract = topology_contract(topology)
    for law in sorted(BROKEN[kind])[:1]:
        assert [name for name, _ in contract.broken(only=law)] == [law]


def test_a_topology_that_depends_on_the_process_is_caught():
    broken = list(topology_contract(SaltedSteps()).broken(only="same_in_another_process"))
    assert [text.split(",")[0] for _, text in broken] == ["in another process"]


@pytest.mark.slow
def test_the_error_names_the_law_and_the_world():
    topology = type("Negative", (CostsLessThanNothing,), {"name": "broken_negative"})()
    with pytest.raises(
        ContractError, match=r"- costs_make_sense: cost of .* \(1 ranks on nodes \(0,\)\)"
    ) as caught:
        check_topology(topology)
    assert "the topology 'broken_negative' on numpy breaks 1 promise(s)" in str(caught.value)


@pytest.mark.exhaustive
def test_a_topology_of_another_design_passes():
    check_topology(Tree())


def test_an_object_that_is_not_a_topology_is_refused():
    with pytest.raises(TypeError, match=r"topology is .*Tree.*; expected an instance of"):
        check_topology(Tree)
    with pytest.raises(ValueError, match="topology has the name 'ring', which is taken"):
        check_topology(type("Mine", (Tree,), {"name": "ring"})())


def test_the_laws_have_names():
    names = [law.__name__ for group in TOPOLOGY_LAWS for law in group]
    assert len(names) == len(set(names))
    assert set().union(*BROKEN.values()) <= set(names)
