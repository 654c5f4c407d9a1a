"""The automatic choice of a topology: by formulas, once, the same on all ranks, and kept in states and checkpoints."""

import warnings
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import qcomp
from qcomp import CompressedMean, Key
from qcomp.comm import run_local
from qcomp.core.mean.costs import INSIDE, Cluster, Link
from qcomp.core.mean.nodes import Nodes
from qcomp.core.mean.topologies import choice
from qcomp.core.mean.topologies.choice import ETHERNET, choose_topology
from qcomp.core.mean.topologies.registry import names, topology
from qcomp.planning import CPU, Machine, Measured, Method, Speed, step_time, warn_if_slower

SIGN, QSGD = qcomp.ScaledSign(), qcomp.QSGD(levels=7)
ALONE = Nodes(tuple(range(4)))
PAIRS = Nodes((0, 0, 1, 1))


def chosen(elements: int, nodes: Nodes, compressor: qcomp.Compressor = SIGN, **options: Any) -> str:
    return choose_topology([compressor], [elements], nodes, **options)


class TestChoice:
    def test_two_ranks_gather(self):
        """The same bytes as in two phases, half as many messages, and only one rounding."""
        for size in (10, 10**9):
            assert chosen(size, Nodes((0, 1))) == "all_gather"

    def test_small_vectors_of_few_ranks_are_gathered_and_large_ones_take_two_phases(self):
        for c in (SIGN, QSGD):
            assert chosen(1000, ALONE, c) == "all_gather"
            assert chosen(10**8, ALONE, c) == "two_phase"
        assert chosen(10**6, Nodes(tuple(range(64)))) == "two_phase"

    @pytest.mark.parametrize(
        ("ranks", "nodes", "elements", "expected"),
        [
            (4, 4, 100_000, "all_gather"),
            (4, 4, 1_000_000, "two_phase"),
            (64, 64, 100_000, "all_gather"),
            (64, 64, 1_000_000, "two_phase"),
            (32, 4, 10, "hierarchical"),
            (32, 4, 10**9, "hierarchical"),
        ],
    )
    def test_the_table_of_the_page(self, ranks, nodes, elements, expected):
        assert chosen(elements, Nodes(tuple(rank * nodes // ranks for rank in range(ranks)))) == expected

    def test_nodes_of_several_ranks_share_a_link_hierarchically(self):
        assert chosen(10**8, PAIRS, QSGD, link=Link(1.25e8)) == "hierarchical"
        assert chosen(10**8, Nodes((0,) * 8 + (1,) * 8 + (2,) * 7)) == "hierarchical"

    @pytest.mark.parametrize("nodes", [(0, 0, 0, 0), (0, 1, 2, 3), (0,)])
    def test_one_node_and_one_rank_a_node_are_never_hierarchical(self, nodes):
        """On one node it would be the exact mean, which was not requested."""
        for exponent in range(10):
            assert chosen(10**exponent, Nodes(nodes)) in ("all_gather", "two_phase")

    def test_a_ring_if_each_further_message_costs_more_than_the_first(self):
        """As on a network that slows down when all send to all; never with the default link."""
        congested = Link(1.25e9, latency=5e-6, per_message=200e-6)
        assert chosen(10**6, Nodes(tuple(range(8))), link=congested) == "ring"
        assert chosen(10**6, Nodes(tuple(range(8))), link=replace(congested, per_message=None)) != "ring"
        for size in (10, 10**5, 10**7, 10**9):
            for ranks in (1, 2, 3, 8, 64):
                for a_node in (1, 2, 8):
                    nodes = Nodes(tuple(node for node in range(ranks) for _ in range(a_node)))
                    assert chosen(size, nodes) != "ring"

    def test_a_ring_must_be_clearly_faster(self):
        """By the tenth that allows for errors of the formulas, since a ring rounds N times."""
        nodes, fastest = Nodes(tuple(range(8))), []
        for per_message in np.linspace(20e-6, 200e-6, 50):
            link = Link(1.25e9, latency=20e-6, per_message=float(per_message))
            cluster = Cluster(8, link)
            load = choice._NOTHING._replace(size=10**6, payload=SIGN.payload_spec(10**6).nbytes)
            ring, *others = (
                topology(t).cost(load, cluster).seconds for t in ("ring", "two_phase", "all_gather")
            )
            fastest.append(min(others) / ring)
            assert (chosen(10**6, nodes, link=link) == "ring") == (fastest[-1] >= 1.1)
        assert min(fastest) < 1 < max(fastest)
        assert any(1 < ratio < 1.1 for ratio in fastest)  # in some cases it is faster, but not clearly

    def test_is_a_function_of_sizes_and_compressors_only(self):
        """Many tensors count as their sum; names, values and dtypes have no influence."""
        assert choose_topology([SIGN] * 4, [10**7] * 4, ALONE) == chosen(4 * 10**7, ALONE)
        assert choose_topology([], [], ALONE) in names()

    def test_announcing_lengths_is_part_of_the_cost(self):
        """Each exchange needs another one before it, which favours fewer exchanges."""
        coded = qcomp.QSGD(levels=7, coding="elias")
        cluster = Cluster(4, Link(1.25e9))
        plain = choice._NOTHING._replace(size=1000, payload=500)
        for name, exchanges in (("all_gather", 1), ("two_phase", 2), ("ring", 6)):
            more = topology(name).cost(plain._replace(variable_length=True), cluster).wire
            announced = 3 * 50e-6 + 3 * 64 / 1.25e9
            assert more - topology(name).cost(plain, cluster).wire == pytest.approx(exchanges * announced)
        assert chosen(1000, ALONE, coded) == "all_gather"

    @pytest.mark.parametrize(
        ("name", "a_node", "between", "inside"),
        [
            ("all_gather", 1, (7, 7 * 80_000), (0, 0)),
            ("two_phase", 1, (14, 14 * 10_000), (0, 0)),
            ("ring", 1, (14, 14 * 10_000), (0, 0)),
            ("hierarchical", 1, (14, 14 * 10_000), (0, 0)),
            # Four ranks of a node share its link; float32 parts are added up, and compressed ones spread, inside it.
            ("hierarchical", 4, (2, 80_000), (6, 3 * (1_000_000 + 20_000))),
        ],
    )
    def test_messages_and_bytes_take_their_time(self, name, a_node, between, inside):
        """Of each link: messages follow each other, and each byte is sent once."""
        load = choice._NOTHING._replace(size=1_000_000, payload=80_000)
        slow, late, free = (Link(1e6, latency=0.0), Link(np.inf, latency=1e-3), Link(np.inf, latency=0.0))
        own = replace(slow, streams=np.inf)  # each rank has its own way to the others of its node

        def wire(link: Link, inside: Link) -> float:
            return topology(name).cost(load, Cluster(8, link, a_node, inside)).wire

        assert wire(late, free) * 1e3 == pytest.approx(between[0])
        assert wire(slow, free) * 1e6 == pytest.approx(between[1])
        assert wire(free, late) * 1e3 == pytest.approx(inside[0])
        assert wire(free, own) * 1e6 == pytest.approx(inside[1])

    @pytest.mark.parametrize(
        ("name", "a_node", "exchanges", "copied"),
        [
            ("all_gather", 1, 1, 0),
            ("two_phase", 1, 2, 0),
            ("ring", 1, 14, 7 / 8),  # a rank's own part of all chunks but the first of its sums
            ("hierarchical", 1, 2, 0),
            ("hierarchical", 4, 4, 2),  # packed, and added up over the node
        ],
    )
    def test_exchanges_and_copies_take_their_time(self, name, a_node, exchanges, copied):
        load = choice._NOTHING._replace(size=1000, payload=80, encode=0.0, decode=0.0, add=0.0, copy=0.0)

        def codec(**seconds: float) -> float:
            return topology(name).cost(load._replace(**seconds), Cluster(8, ETHERNET, a_node)).codec

        assert codec(call=1.0) - codec(call=0.0) == exchanges
        assert codec(copy=1.0) - codec(copy=0.0) == pytest.approx(copied * 1000)

    def test_is_what_the_planner_predicts(self):
        """Both use the same formulas: with the same link and speeds they choose the same, except for the ring."""
        known = choice._NOTHING
        speed = Speed(encode=known.encode, decode=known.decode, add=known.add)
        machine = Machine("made up", known.copy, {c.spec: speed for c in (SIGN, QSGD)})
        for c in (SIGN, QSGD):
            for size in (10**4, 10**6, 10**8):
                for nodes in (ALONE, PAIRS, Nodes(tuple(range(16))), Nodes((0, 0, 0, 0, 1, 1, 1, 1))):
                    ranks = len(nodes.of_rank)
                    cluster = Cluster(ranks, ETHERNET, ranks // nodes.count, INSIDE)
                    known = [t for t in names() if t != "hierarchical" or ranks > nodes.count]
                    job = qcomp.planning.Job(size, 0.0)
                    times = {t: step_time(job, cluster, machine, Method(t, c)).seconds for t in known}
                    if times.pop("ring") * 1.1 > min(times.values()):
                        assert min(times, key=times.__getitem__) == chosen(size, nodes, c)


HOSTS = {"all_gather": ["a", "b"], "two_phase": list("abcd"), "hierarchical": list("aabb")}
"""Hosts on which a vector of a million signs takes each topology, on a link of 1 Gbit/s."""
GIGABIT = Link(0.125e9)


class TestMean:
    @pytest.mark.quick_cases(1)
    @pytest.mark.parametrize("topology", HOSTS)
    def test_is_that_of_the_chosen_topology_bit_for_bit(self, topology):
        values = np.random.default_rng(0).standard_normal((4, 1 << 20)).astype(np.float32)

        def rank_main(comm):
            held = []
            for mean in (CompressedMean(SIGN, "auto", link=GIGABIT), CompressedMean(SIGN, topology)):
                state = mean.init(values[0], comm)
                assert state.topology == topology
                got, state = mean(values[comm.rank], state, comm, key=Key())
                held.append(got.tobytes() + b"".join(r.tobytes() for r in (*state.worker, *state.server)))
                parts = mean.layout(
                    state.shapes, rank=state.rank, size=state.size, nodes=state.nodes
                ).residuals
                assert [[s.size for s in p] for p in parts] == [
                    [r.shape[0] for r in residuals] for residuals in (state.worker, state.server)
                ]
            return held[0] == held[1]

        hosts = HOSTS[topology]
        assert run_local(len(hosts), rank_main, hosts=hosts) == [True] * len(hosts)

    def test_ranks_with_different_links_are_an_error(self):
        def rank_main(comm):
            mean = CompressedMean(SIGN, "auto", link=Link(1e9 + comm.rank))
            with pytest.raises(qcomp.MismatchError, match=r"link is .*bandwidth=1000000000.* on rank 0"):
                mean.init(np.zeros(4), comm)
            return True

        assert run_local(2, rank_main, timeout=20) == [True] * 2

    def test_a_communicator_without_a_host_is_an_error(self):
        class Hostless:
            rank, size = 0, 1

            def all_gather(self, send, receive):
                return [send]

        with pytest.raises(TypeError, match="expected the name of the machine, as an attribute of comm"):
            CompressedMean(SIGN, "auto").init(np.zeros(4), Hostless())


def optimizer(topology: str = "auto", compressor: Any = None, **options: Any) -> qcomp.CompressedSGD:
    settings: dict[str, Any] = {
        "compressor": compressor or qcomp.ScaledSign(8),
        "averaging": qcomp.Averaging(topology, **options),
    }
    return qcomp.CompressedSGD(learning_rate=0.1, exact=None, **settings)


def trained(opt: Any, comm: Any, steps: int = 3) -> tuple[np.ndarray, Any]:
    params = np.zeros(40, dtype=np.float32)
    state = opt.init(params, comm)
    for step in range(steps):
        grads = np.random.default_rng([comm.rank, step]).standard_normal(40).astype(np.float32)
        params, state = opt.step(params, grads, state, comm)
    return params, state


class TestOptimizer:
    @pytest.mark.parametrize("hosts", HOSTS.values(), ids=HOSTS)
    def test_has_the_residuals_of_the_chosen_topology(self, hosts):
        def rank_main(comm):
            params, state = trained(optimizer(), comm)
            topology = state.exchange.topology
            expected, other = trained(optimizer(topology=topology), comm)
            assert params.tobytes() == expected.tobytes()
            for kind in ("worker", "server"):
                pairs = zip(getattr(state.exchange, kind), getattr(other.exchange, kind), strict=True)
                assert all(a.tobytes() == b.tobytes() for a, b in pairs)
            return topology

        assert len(set(run_local(len(hosts), rank_main, hosts=hosts))) == 1

    def test_a_checkpoint_keeps_the_chosen_topology(self):
        """Even if formulas or a link would now choose another topology, a rank continues with its own."""
        slow, fast = optimizer(link=Link(1.0)), optimizer()

        def rank_main(comm):
            _, state = trained(slow, comm)
            saved = slow.state_dict(state)
            again = fast.load_state_dict(saved, np.zeros(40, dtype=np.float32), comm)
            assert fast.init(np.zeros(40, dtype=np.float32), comm).exchange.topology == "all_gather"
            assert all(
                a.tobytes() == b.tobytes()
                for a, b in zip(state.exchange.worker, again.exchange.worker, strict=True)
            )
            converted = qcomp.checkpoint.to_arrays(saved, like=np.zeros(1))
            from_arrays = fast.load_state_dict(converted, np.zeros(40, dtype=np.float32), comm)
            return saved["topology"], again.exchange.topology, from_arrays.exchange.topology

        assert run_local(4, rank_main, hosts=list("abcd")) == [("two_phase",) * 3] * 4

    def test_a_list_of_dicts_resumes_in_the_topology_chosen_for_the_new_world(self):
        saved = run_local(
            4,
            lambda comm: optimizer(link=Link(1.0)).state_dict(trained(optimizer(link=Link(1.0)), comm)[1]),
            hosts=list("abcd"),
        )

        def rank_main(comm):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)
                state = optimizer().load_state_dict(saved, np.zeros(40, dtype=np.float32), comm)
            return state.exchange.topology

        assert {each["topology"] for each in saved} == {"two_phase"}
        assert run_local(2, rank_main, hosts=["a", "b"]) == ["all_gather"] * 2

    def test_checkpoints_of_a_fixed_topology_do_not_name_it(self):
        comm = qcomp.comm.LocalCommunicator.alone()
        opt = optimizer(topology="two_phase")
        assert "topology" not in opt.state_dict(opt.init(np.zeros(40, dtype=np.float32), comm))

    def test_a_checkpoint_of_an_unknown_choice_is_an_error_on_all_ranks(self):
        def rank_main(comm):
            opt, x = optimizer(), np.zeros(40, dtype=np.float32)
            saved = opt.state_dict(opt.init(x, comm))
            if comm.rank == 1:
                saved["topology"] = "no_topology"
            with pytest.raises((ValueError, qcomp.MismatchError), match=r"no_topology|refused"):
                opt.load_state_dict(saved, x, comm)
            return True

        assert run_local(2, rank_main, timeout=20) == [True] * 2

    def test_the_warning_of_a_measured_network_uses_the_topology_that_will_be_chosen(self):
        measured = Measured(Cluster(ranks=4, link=Link(1e11, latency=0.0)), CPU)

        def rank_main(comm):
            opt, params = optimizer(compressor=SIGN), np.zeros(100_000, dtype=np.float32)
            warn_if_slower(opt, params, comm, measured)
            return opt.init(params, comm).exchange.topology

        with pytest.warns(UserWarning, match="all_gather takes"):
            assert run_local(4, rank_main, hosts=list("abcd")) == ["all_gather"] * 4
