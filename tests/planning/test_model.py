"""The formulas: exact identities, cases that must agree, and cases that must differ."""

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import qcomp
from qcomp.planning import (
    CPU,
    Cluster,
    Job,
    Link,
    Machine,
    Method,
    Speed,
    break_even,
    gpu,
    run_speedup,
    step_time,
)
from qcomp.planning.machine import PURE
from qcomp.planning.model import pays_between

SIZE = 1 << 20
SIGN, QSGD4 = qcomp.ScaledSign(), qcomp.QSGD(levels=7)
COMPRESSORS = [SIGN, QSGD4, qcomp.MinMaxUInt8(), qcomp.Scaled(qcomp.QSGD(levels=1))]
INSTANT = Machine("nothing takes time", copy=0.0, speeds={c.spec: Speed(0.0, 0.0, 0.0) for c in COMPRESSORS})
BARE = Link(bandwidth=1e9, latency=0.0)


def cost(method, *, job=None, cluster=None, machine=INSTANT):
    return step_time(job or Job(SIZE, 0.0), cluster or Cluster(8, BARE), machine, method)


COUNTED = 1 << 16
ROUNDING = 32
"""Bytes of a message that are neither codes nor scales: statuses, lengths, padding."""


def counted(topology, hosts):
    """Return the bytes that a rank sends in a mean, averaged over ranks."""
    mean = qcomp.CompressedMean(SIGN, topology=topology)

    def rank_main(comm):
        x = np.ones(COUNTED, dtype=np.float32)
        state = mean.init(x, comm)
        before = comm.bytes_sent
        mean(x, state, comm)
        return comm.bytes_sent - before

    return sum(qcomp.comm.run_local(len(hosts), rank_main, hosts=hosts)) / len(hosts)


class TestIdentities:
    @pytest.mark.parametrize("compressor", COMPRESSORS, ids=str)
    def test_without_latency_and_computation_the_speedup_is_the_ratio_of_bytes(self, compressor):
        ring, compressed = cost(Method("ring")), cost(Method("two_phase", compressor))
        ratio = 4 * SIZE / compressor.payload_spec(SIZE).nbytes
        assert ring.seconds / compressed.seconds == pytest.approx(ratio, rel=1e-12)
        assert ring.sent / compressed.sent == pytest.approx(ratio, rel=1e-12)

    @pytest.mark.parametrize("n", [2, 3, 8, 1000])
    def test_time_is_bytes_over_bandwidth(self, n):
        cluster = Cluster(n, BARE)
        ring = cost(Method("ring"), cluster=cluster)
        assert ring.sent == 2 * (n - 1) / n * 4 * SIZE
        assert ring.seconds == pytest.approx(ring.sent / 1e9, rel=1e-12)
        gathered = cost(Method("all_gather", SIGN), cluster=cluster)
        assert gathered.sent == (n - 1) * SIGN.payload_spec(SIZE).nbytes
        assert gathered.seconds == pytest.approx(gathered.sent / 1e9, rel=1e-12)

    @pytest.mark.parametrize("n", [2, 3, 8])
    @pytest.mark.parametrize("topology", ["two_phase", "all_gather", "ring"])
    def test_the_predicted_bytes_are_those_that_a_communicator_counts(self, n, topology):
        model = cost(Method(topology, SIGN), job=Job(COUNTED, 0.0), cluster=Cluster(n, BARE)).sent
        assert 0 <= counted(topology, [str(rank) for rank in range(n)]) - model <= ROUNDING * 2 * n

    def test_the_predicted_bytes_of_hierarchical_are_counted_too(self):
        cluster = Cluster(6, BARE, ranks_per_node=2)
        model = cost(Method("hierarchical", SIGN), job=Job(COUNTED, 0.0), cluster=cluster).sent
        assert 0 <= counted("hierarchical", list("aabbcc")) - model <= ROUNDING * 4 * 6

    @pytest.mark.parametrize("topology", ["ring", "tree", "two_phase", "all_gather", "hierarchical"])
    def test_one_rank_sends_nothing(self, topology):
        method = Method(topology, None if topology in ("ring", "tree") else SIGN)
        time = cost(method, job=Job(SIZE, 0.25), cluster=Cluster(1, Link(1.0)), machine=CPU)
        assert (time.seconds, time.sent, time.wire, time.codec) == (0.25, 0, 0, 0)

    def test_ring_and_tree_differ_in_latency_only(self):
        slow = Cluster(64, Link(1e9, latency=1e-3))
        ring, tree = cost(Method("ring"), cluster=slow), cost(Method("tree"), cluster=slow)
        assert ring.seconds - tree.seconds == pytest.approx((2 * 63 - 2 * 6) * 1e-3, rel=1e-9)
        assert ring.sent == tree.sent

    def test_encoding_is_counted_for_worker_and_server(self):
        machine = Machine("made up", 0.0, {SIGN.spec: Speed(encode=4.0, decode=2.0, add=1.0)})
        cluster = Cluster(4, Link(math.inf, latency=0.0))
        job = Job(SIZE, 0.0)
        assert step_time(job, cluster, machine, Method("two_phase", SIGN)).codec == SIZE * (4 + 4 / 4 + 1 + 2)
        assert step_time(job, cluster, machine, Method("all_gather", SIGN)).codec == SIZE * (4 + 4 * 1)
        copying = replace(machine, copy=8.0)
        assert step_time(job, cluster, copying, Method("ring", SIGN)).codec == SIZE * (
            4 + 3 / 4 * (8 + 1) + 2
        )
        of_nodes = Cluster(8, Link(math.inf, latency=0.0), ranks_per_node=2)
        assert step_time(job, of_nodes, copying, Method("hierarchical", SIGN)).codec == SIZE * (
            2 * 8 + (4 + 4 / 4 + 1) / 2 + 2
        )

    @pytest.mark.parametrize(
        ("topology", "exchanges", "ranks_per_node"),
        [
            ("two_phase", 2, 2),
            ("all_gather", 1, 2),
            ("ring", 14, 2),
            ("hierarchical", 4, 2),
            ("hierarchical", 2, 8),
            ("hierarchical", 2, 1),
        ],
    )
    def test_calls_are_counted_for_each_exchange_of_each_piece(self, topology, exchanges, ranks_per_node):
        machine = Machine("made up", 0.0, {SIGN.spec: Speed(0.0, 0.0, 0.0)}, call=0.5, tensor=0.25)
        cluster = Cluster(8, Link(math.inf, latency=0.0), ranks_per_node=ranks_per_node)
        job = Job(SIZE, 0.0, overlap=0.5, buckets=3, overlap_compressed=True, tensors=7)
        found = step_time(job, cluster, machine, Method(topology, SIGN))
        assert found.codec == 3 * exchanges * 0.5 + 7 * 0.25
        assert step_time(job, cluster, machine, Method("ring")).codec == 0.0

    def test_directions_that_share_the_link_take_twice_as_long(self):
        both, shared = (
            cost(Method("ring"), cluster=Cluster(8, replace(BARE, duplex=d))) for d in (True, False)
        )
        assert shared.seconds == 2 * both.seconds

    def test_announcing_lengths_costs_two_more_exchanges(self):
        coded = qcomp.QSGD(levels=7, coding="range")
        machine = replace(INSTANT, speeds={coded.spec: Speed(0.0, 0.0, 0.0)})
        cluster = Cluster(4, Link(math.inf, latency=1e-3, per_message=0.0))
        assert cost(Method("two_phase", coded), cluster=cluster, machine=machine).wire == pytest.approx(4e-3)


class TestNodes:
    def test_ranks_of_a_node_share_its_bandwidth(self):
        """In two phases all ranks of a node send out of it; a ring leaves each node once."""
        inside = Link(math.inf, latency=0.0)
        one, shared, own = (
            Cluster(64, BARE),
            Cluster(64, BARE, ranks_per_node=4, inside=inside),
            Cluster(64, replace(BARE, streams=4), ranks_per_node=4, inside=inside),
        )
        method = Method("two_phase", SIGN)
        alone = cost(method, cluster=one).wire
        assert cost(method, cluster=shared).wire == pytest.approx(4 * alone * 60 / 63, rel=1e-12)
        assert cost(method, cluster=own).wire == pytest.approx(alone * 60 / 63, rel=1e-12)
        for compressor in (None, SIGN):
            ring = Method("ring", compressor)
            assert cost(ring, cluster=shared).wire == cost(ring, cluster=one).wire

    def test_hierarchical_sends_one_payload_per_node_and_phase(self):
        inside = Link(math.inf, latency=0.0)
        cluster = Cluster(12, BARE, ranks_per_node=4, inside=inside)
        payload = SIGN.payload_spec(SIZE).nbytes
        assert cost(Method("hierarchical", SIGN), cluster=cluster).wire == pytest.approx(
            2 * 2 / 3 * payload / 1e9
        )

    def test_hierarchical_with_one_rank_a_node_is_two_phase(self):
        assert (
            cost(Method("hierarchical", SIGN), machine=CPU)[1:]
            == cost(Method("two_phase", SIGN), machine=CPU)[1:]
        )

    def test_hierarchical_on_one_node_compresses_nothing(self):
        cluster = Cluster(4, BARE, ranks_per_node=4)
        assert cost(Method("hierarchical", SIGN), cluster=cluster).sent == 2 * 3 / 4 * 4 * SIZE


class TestOverlap:
    def test_without_overlap_times_add_up(self):
        time = cost(Method("ring"), job=Job(SIZE, 0.5, overlap=0.0, buckets=7))
        assert time.seconds == pytest.approx(0.5 + time.wire, rel=1e-12)

    def test_one_piece_hides_nothing(self):
        time = cost(Method("ring"), job=Job(SIZE, 0.5, overlap=0.6, buckets=1))
        assert time.seconds == pytest.approx(0.5 + time.wire, rel=1e-12)

    @pytest.mark.parametrize("compute", [0.001, 0.005, 0.02, 0.1])
    @pytest.mark.parametrize("buckets", [2, 5])
    def test_overlap_equals_a_simulation_of_the_pieces(self, compute, buckets):
        job = Job(SIZE - SIZE % buckets, compute, overlap=0.6, buckets=buckets)
        time = cost(Method("ring"), job=job)
        free = 0.0
        for piece in range(1, buckets + 1):
            ready = compute * (0.4 + 0.6 * piece / buckets)
            free = max(free, ready) + time.wire / buckets
        assert time.seconds == pytest.approx(free, rel=1e-12)

    def test_compressed_messages_overlap_only_on_request(self):
        job = Job(SIZE, 0.5, overlap=0.6, buckets=4)
        method = Method("two_phase", SIGN)
        serial = cost(method, job=job, machine=CPU)
        hidden = cost(method, job=replace(job, overlap_compressed=True), machine=CPU)
        assert serial.seconds == pytest.approx(0.5 + serial.codec + serial.wire, rel=1e-12)
        assert 0.5 + hidden.codec < hidden.seconds < serial.seconds  # encoding is not hidden


class TestBreakEven:
    CLUSTER = Cluster(8, Link(1e9, latency=0.0))
    JOB = Job(25_000_000, 0.2)

    @pytest.mark.quick_cases(7)
    @pytest.mark.parametrize("compressor", COMPRESSORS, ids=str)
    @pytest.mark.parametrize("job", [JOB, replace(JOB, overlap=0.6, buckets=5)], ids=["serial", "overlap"])
    @pytest.mark.parametrize("lanes", [1, 4])
    def test_both_times_are_equal_at_the_break_even(self, compressor, job, lanes):
        cluster = replace(self.CLUSTER, ranks_per_node=lanes)
        method, plain = Method("two_phase", compressor), Method("ring")
        edge = break_even(job, cluster, CPU, method, plain)

        def gain(bandwidth):
            there = replace(cluster, link=replace(cluster.link, bandwidth=bandwidth))
            return step_time(job, there, CPU, plain).seconds - step_time(job, there, CPU, method).seconds

        assert gain(edge) == pytest.approx(0, abs=1e-9)
        assert gain(edge / 1.01) > 0 > gain(edge * 1.01)

    def test_closed_form(self):
        method = Method("two_phase", SIGN)
        codec = step_time(self.JOB, self.CLUSTER, CPU, method).codec
        saved = 2 * 7 / 8 * (4 * self.JOB.params - SIGN.payload_spec(self.JOB.params).nbytes)
        assert break_even(self.JOB, self.CLUSTER, CPU, method, Method("ring")) == pytest.approx(saved / codec)

    def test_never_if_more_is_sent_and_always_if_coding_takes_no_time(self):
        gathered = Method("all_gather", qcomp.MinMaxUInt8())
        assert break_even(self.JOB, Cluster(64, BARE), CPU, gathered, Method("ring")) == 0.0
        assert (
            break_even(self.JOB, Cluster(8, BARE), INSTANT, Method("two_phase", SIGN), Method("ring"))
            == math.inf
        )

    def test_fewer_messages_with_more_bytes_pay_above_a_bandwidth(self):
        """Gathering takes one latency, a ring 14, but exact gathering sends four times the bytes."""
        job, cluster = Job(10_000, 0.0), Cluster(8, Link(1e9, latency=1e-3, per_message=0.0))
        machine = replace(CPU, copy=0.0)
        gathered = Method("all_gather", qcomp.Identity())
        saved, more = 13e-3, (7 - 2 * 7 / 8) * 4 * job.params
        for bandwidth in (1e5, more / saved, 1e9):  # the range is the same from every link
            there = replace(cluster, link=replace(cluster.link, bandwidth=bandwidth))
            above, below = pays_between(job, there, machine, gathered, Method("ring"))
            assert (above, below) == (pytest.approx(more / saved), math.inf)

    @pytest.mark.parametrize("codec", [0.0, 12.9e-3, 14e-3])
    @pytest.mark.parametrize("exponent", range(2, 12, 3))
    def test_a_method_that_is_faster_on_the_given_link_pays_there(self, codec, exponent):
        machine = replace(CPU, copy=codec / 90_000)
        cluster = Cluster(8, Link(10.0**exponent, latency=1e-3, per_message=0.0))
        job = Job(10_000, 0.0)
        for method in (Method("all_gather", qcomp.Identity()), Method("two_phase", SIGN)):
            ring, own = (step_time(job, cluster, machine, m).seconds for m in (Method("ring"), method))
            above, below = pays_between(job, cluster, machine, method, Method("ring"))
            assert (above <= cluster.link.bandwidth <= below) == (own < ring)


class TestScale:
    @pytest.mark.parametrize(
        "method", [Method("ring"), Method("tree"), Method("two_phase", SIGN)], ids=lambda m: m.label
    )
    def test_a_faster_link_is_never_slower(self, method):
        times = [
            cost(method, cluster=Cluster(64, Link(10.0**e, 25e-6)), machine=CPU).seconds for e in range(3, 15)
        ]
        assert times == sorted(times, reverse=True)
        assert len(set(times)) == len(times)

    @pytest.mark.parametrize("ranks", [4096, 1_000_000])
    @pytest.mark.parametrize("topology", ["ring", "tree", "two_phase", "all_gather", "hierarchical"])
    def test_thousands_of_ranks_and_a_trillion_parameters(self, ranks, topology):
        method = Method(topology, None if topology in ("ring", "tree") else SIGN)
        cluster = Cluster(ranks, Link(1.25e9, 5e-6), ranks_per_node=8)
        time = step_time(Job(10**12, 1.0), cluster, gpu(), method)
        assert 1.0 < time.seconds < math.inf
        assert break_even(Job(10**12, 1.0), cluster, gpu(), Method("two_phase", SIGN), Method("ring")) > 0


class TestRun:
    def test_the_warm_up_has_no_speedup(self):
        assert run_speedup(6.6, 1.0, warmup=0.0) == 6.6
        assert run_speedup(6.6, 1.0, warmup=1.0) == 1.0
        assert run_speedup(16.0, 1.0, warmup=0.15) == pytest.approx(1 / (0.15 + 0.85 / 16))

    def test_warm_up_steps_may_take_longer_than_plain_ones(self):
        assert run_speedup(2.0, 1.0, warmup=0.5, exact=3.0) == 1.0


class TestMachine:
    def test_figures_are_those_of_the_committed_benchmark(self):
        document = json.loads((Path(__file__).parents[2] / "docs/benchmarks/kernels.json").read_text())
        subjects = {
            "sign l1": SIGN,
            "sign rms": qcomp.ScaledSign(scale="rms"),
            "QSGD 2-bit": qcomp.QSGD(levels=1),
            "QSGD 4-bit": QSGD4,
            "QSGD 8-bit": qcomp.QSGD(levels=127),
            "min-max 8-bit": qcomp.MinMaxUInt8(),
        }
        fields = {
            "encode": "encode, residual donated",
            "decode": "decode into a buffer",
            "add": "decode and add",
        }
        for kernels, machine in (("numba", CPU), ("pure", PURE)):
            of_these = [r for r in document["results"] if (r["kernels"], r["arrays"]) == (kernels, "numpy")]
            largest = max(r["elements"] for r in of_these)
            found = {(r["subject"], r["what"]): r for r in of_these if r["elements"] == largest}
            for subject, compressor in subjects.items():
                for field, what in fields.items():
                    seconds = found[subject, what]["seconds"]["median"] / largest
                    assert getattr(machine.speed(compressor), field) == pytest.approx(seconds, rel=0.01)

    def test_an_unlisted_compressor_has_the_speed_of_the_most_similar_one(self):
        assert CPU.speed(qcomp.QSGD(levels=15)) == CPU.speed(QSGD4)
        assert CPU.speed(qcomp.Scaled(qcomp.QSGD(levels=1))) == CPU.speed(qcomp.QSGD(levels=1))
        assert CPU.speed(qcomp.LloydMax(2, 256)) == CPU.speed(qcomp.LloydMax(2, 512))
        assert CPU.speed(qcomp.LloydMax(3, 64)) == CPU.speed(qcomp.LloydMax(3))
        assert CPU.speed(qcomp.Identity()) == Speed(CPU.copy, CPU.copy, CPU.copy)

    @pytest.mark.parametrize(
        "compressor",
        [qcomp.TopK(8, 512), qcomp.QSGD(levels=7, coding="range"), qcomp.LloydMax(4, coding="range")],
        ids=str,
    )
    def test_no_similar_compressor_is_an_error(self, compressor):
        with pytest.raises(ValueError, match=r"no speed of .* is known; known: sign"):
            CPU.speed(compressor)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Link(0.0), "bandwidth is 0.0"),
        (lambda: Link(1.0, latency=-1.0), "latency is -1.0"),
        (lambda: Link(float("nan")), "bandwidth is nan"),
        (lambda: Link(1.0, streams=0.5), "streams is 0.5"),
        (lambda: Link(1.0, per_message=-1.0), "per_message is -1.0"),
        (lambda: Cluster(0, BARE), "ranks is 0"),
        (lambda: Cluster(6, BARE, ranks_per_node=4), "ranks_per_node is 4; expected a divisor of 6 ranks"),
        (lambda: Job(0, 1.0), "params is 0"),
        (lambda: Job(1, -1.0), "compute is -1.0"),
        (lambda: Job(1, 1.0, gradient_bytes=3), "gradient_bytes is 3"),
        (lambda: Job(1, 1.0, overlap=1.5), "overlap is 1.5"),
        (lambda: Job(1, 1.0, buckets=0), "buckets is 0"),
        (lambda: Job(1, 1.0, tensors=0), "tensors is 0"),
        (lambda: Machine("", 1.0, call=-1.0), "call is -1.0; expected seconds, at least 0"),
        (lambda: Machine("", 1.0, tensor=float("nan")), "tensor is nan"),
        (lambda: Method("tree", SIGN), "expected none with tree"),
        (lambda: Method("two_phase"), "expected a qcomp.Compressor with two_phase"),
        (lambda: Method("no_topology"), "topology is 'no_topology'"),
        (lambda: Method("two_phase", SIGN, half=True), "half is True"),
        (lambda: Speed(-1.0, 0.0, 0.0), "encode is -1.0"),
        (lambda: Machine("none", -1.0), "copy is -1.0"),
        (lambda: gpu(0.0), "memory_bandwidth is 0.0"),
        (lambda: run_speedup(1.0, 1.0, 1.5), "warmup is 1.5"),
    ],
)
def test_impossible_values_are_errors_that_name_them(make, message):
    with pytest.raises(ValueError, match=message):
        make()


class TestExactTensors:
    @pytest.mark.parametrize("topology", ["two_phase", "all_gather"])
    def test_a_rank_sends_exact_elements_and_payloads(self, topology):
        exact = 1 << 15
        job = Job(SIZE, 0.0, exact=exact)
        payload = SIGN.payload_spec(SIZE - exact).nbytes + 4 * exact
        shares = {"two_phase": 2 * 7 / 8, "all_gather": 7}
        assert cost(Method(topology, SIGN), job=job).sent == shares[topology] * payload

    def test_nothing_compressed_is_an_all_reduce(self):
        everything = cost(Method("two_phase", SIGN), job=Job(SIZE, 0.0, exact=SIZE), machine=CPU)
        ring = cost(Method("ring"))
        assert (everything.sent, everything.wire, everything.codec) == (ring.sent, ring.wire, 0.0)

    def test_only_compressed_elements_take_encoding_time(self):
        whole, half = (
            cost(Method("two_phase", SIGN), job=Job(SIZE, 0.0, exact=exact), machine=CPU).codec
            for exact in (0, SIZE // 2)
        )
        assert half == pytest.approx(whole / 2)

    @pytest.mark.parametrize("exact", [-1, SIZE + 1])
    def test_more_exact_elements_than_parameters_are_an_error(self, exact):
        with pytest.raises(ValueError, match=f"exact is {exact}; expected 0 to {SIZE}, all parameters"):
            Job(SIZE, 0.0, exact=exact)
