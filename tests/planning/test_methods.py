"""PowerSGD, Muon and outer loops in the cost model: their bytes are those that communicators count."""

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import qcomp
from qcomp.comm import run_local
from qcomp.core.mean.owned import OwnedMean
from qcomp.core.numeric.orthogonal import ITERATIONS
from qcomp.planning import (
    CPU,
    Cluster,
    Job,
    Link,
    LowRankSpeed,
    Machine,
    Method,
    MuonMethod,
    OuterMethod,
    PowerSGDMethod,
    Speed,
    advise,
    gpu,
    methods_for,
    step_time,
)
from qcomp.planning.machine import PURE

SHAPES = ((96, 64), (64, 160), (64, 3, 3, 16), (50,), (8, 8))
PARAMS = sum(map(math.prod, SHAPES))
JOB = Job(PARAMS, 0.0, shapes=SHAPES)
BARE = Link(1e9, latency=0.0)
SIGN, FOUR = qcomp.ScaledSign(scale="rms"), qcomp.QSGD(levels=7, bucket_size=128)
NEAREST = qcomp.LloydMax(4)
INSTANT = Machine(
    "nothing takes time",
    copy=0.0,
    speeds={
        c.spec: Speed(0.0, 0.0, 0.0)
        for c in (SIGN, FOUR, NEAREST, qcomp.TopK(k=64, bucket_size=4096, value_bits=2))
    },
    low_rank=LowRankSpeed(0.0, 0.0),
    product=0.0,
)
SMALL = 64
"""Bytes of a message to a rank that are neither payload nor scales."""


def sent_by_ranks(n, rank_main):
    """Return the bytes that a rank sends, averaged over ranks."""
    return sum(run_local(n, rank_main)) / n


def params_of(rank=0):
    draws = np.random.default_rng(rank)
    return [draws.standard_normal(shape).astype(np.float32) for shape in SHAPES]


def predicted(method, n, machine=INSTANT, job=JOB):
    return step_time(job, Cluster(n, BARE), machine, method)


@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize("rank", [1, 3])
def test_powersgd_sends_what_is_counted(n, rank):
    averaging = qcomp.PowerSGD(rank=rank)

    def rank_main(comm):
        mean = averaging.mean(qcomp.Identity())
        state = mean.init(params_of(), comm)
        before = comm.bytes_sent
        mean(params_of(comm.rank), state, comm)
        return comm.bytes_sent - before

    found = predicted(PowerSGDMethod(averaging=averaging), n).sent
    assert abs(sent_by_ranks(n, rank_main) - found) <= 4 * n * SMALL


@pytest.mark.parametrize("compressor", [FOUR, NEAREST], ids=str)
@pytest.mark.parametrize("n", [2, 3])
def test_muon_sends_what_is_counted(n, compressor):
    opt = qcomp.Muon(learning_rate=0.02, compressor=compressor, update_compressor=SIGN)

    def rank_main(comm):
        params = params_of()
        state = opt.init(params, comm)
        before = comm.bytes_sent
        opt.step(params, params_of(comm.rank), state, comm)
        return comm.bytes_sent - before

    assert abs(sent_by_ranks(n, rank_main) - predicted(MuonMethod(optimizer=opt), n).sent) <= 2 * n * SMALL


@pytest.mark.parametrize("fragments", [1, 2])
@pytest.mark.parametrize(
    ("compressor", "averaging"),
    [
        (SIGN, qcomp.Averaging("two_phase")),
        (SIGN, qcomp.Averaging("all_gather")),
        (qcomp.Identity(), qcomp.PowerSGD(rank=2)),
        (qcomp.Cast("bfloat16"), qcomp.PowerSGD(rank=1)),
    ],
    ids=["two_phase", "all_gather", "low rank", "low rank in half"],
)
def test_an_outer_loop_sends_what_is_counted(fragments, compressor, averaging):
    loop = qcomp.OuterLoop(
        every=4, compressor=compressor, averaging=averaging, exact=None, fragments=fragments
    )

    def rank_main(comm):
        params = params_of()
        state = loop.init(params, comm)
        before = comm.bytes_sent
        for step in range(loop.every):
            params, state = loop.step([p + (1 + comm.rank) * step for p in params], state, comm)
        return (comm.bytes_sent - before) / loop.every

    found = predicted(OuterMethod(loop=loop), 3).sent
    # The model has one payload; the loop's payloads have other last buckets, and verdicts.
    assert abs(sent_by_ranks(3, rank_main) - found) <= 2 * 3 * len(SHAPES) * SMALL / loop.every


class TestOuter:
    LOOP = qcomp.OuterLoop(every=10, exact=None)

    def seconds(self, loop, *, compute=1.0, bandwidth=1e9):
        job = Job(10**9, compute)
        return step_time(
            job, Cluster(2, Link(bandwidth, latency=0.0)), INSTANT, OuterMethod(loop=loop)
        ).seconds

    def test_a_step_takes_its_share_of_an_exchange(self):
        assert self.seconds(self.LOOP) == pytest.approx(1 + 4 / 10)
        assert self.seconds(replace(self.LOOP, every=40)) == pytest.approx(1 + 4 / 40)

    def test_exchanging_in_every_step_costs_as_much_as_two_phases(self):
        job = Job(10**6, 1.0)
        cluster = Cluster(4, Link(1e8, 1e-3))
        each = step_time(
            job, cluster, CPU, OuterMethod(loop=qcomp.OuterLoop(every=1, compressor=SIGN, exact=None))
        )
        plain = step_time(job, cluster, CPU, Method("two_phase", SIGN))
        assert each.sent == plain.sent
        assert each.seconds == pytest.approx(plain.seconds + 5 * job.params * CPU.copy)

    def test_a_delay_hides_exchanges_behind_steps(self):
        assert self.seconds(replace(self.LOOP, delay=1)) == pytest.approx(1 + 3 / 10)
        assert self.seconds(replace(self.LOOP, delay=4)) == 1.0
        assert self.seconds(replace(self.LOOP, delay=1, fragments=4)) == 1.0

    def test_a_saturated_link_is_the_limit(self):
        loop = replace(self.LOOP, delay=9, fragments=10)
        assert self.seconds(loop, bandwidth=1e7) == pytest.approx(400 / 10)

    def test_a_round_with_powersgd_costs_one_step_of_powersgd(self):
        machine, averaging = replace(INSTANT, low_rank=LowRankSpeed(2.0, 0.5)), qcomp.PowerSGD(rank=2)
        one = predicted(PowerSGDMethod(averaging=averaging), 3, machine)
        whole = predicted(OuterMethod(loop=replace(self.LOOP, averaging=averaging)), 3, machine)
        assert (10 * whole.codec, 10 * whole.wire) == pytest.approx((one.codec, one.wire))
        assert whole.method.label == "every 10 steps: powersgd:rank=2, identity"
        parts = predicted(OuterMethod(loop=replace(self.LOOP, averaging=averaging, fragments=3)), 3, machine)
        assert 10 * parts.codec == pytest.approx(one.codec)
        with pytest.raises(ValueError, match="shapes is"):
            self.seconds(replace(self.LOOP, averaging=averaging))
        with pytest.raises(ValueError, match="fragments is 6; expected at most one for each of 5 tensors"):
            predicted(OuterMethod(loop=replace(self.LOOP, averaging=averaging, fragments=6)), 3, machine)

    def test_the_fastest_topology_is_chosen_for_auto(self):
        loops = [
            replace(self.LOOP, compressor=SIGN, averaging=qcomp.Averaging(t)) for t in ("auto", "all_gather")
        ]
        two = [predicted(OuterMethod(loop=loop), 8).seconds for loop in loops]
        assert two[0] < two[1]


def test_owners_share_the_work_of_muon():
    """Five products with an n x n matrix, in three multiplications of n^3 each; the bytes sent are not checked."""
    machine = replace(INSTANT, product=1.0)
    job = Job(8 * 16 * 16, 0.0, shapes=((16, 16),) * 8)
    opt = qcomp.Muon(learning_rate=0.02, compressor=FOUR, update_compressor=SIGN)
    one = ITERATIONS * 3 * 16**3
    assert predicted(MuonMethod(optimizer=opt, replicated=True), 4, machine, job).codec == 8 * one
    assert predicted(MuonMethod(optimizer=opt), 4, machine, job).codec == 2 * one
    assert predicted(MuonMethod(optimizer=opt), 3, machine, job).codec == 3 * one


def test_powersgd_computes_in_proportion_to_elements_and_columns():
    machine = replace(INSTANT, low_rank=LowRankSpeed(2.0, 0.5))
    job = Job(64 * 64 + 64, 0.0, shapes=((64, 64), (64,)))
    assert predicted(PowerSGDMethod(averaging=qcomp.PowerSGD(rank=3)), 2, machine, job).codec == 64 * 64 * 3.5


def test_all_ranks_wait_for_the_owner_of_a_single_large_matrix():
    """It receives a factor from all others while these are idle."""
    n, side = 8, 1024
    job = Job(side * side, 0.0, shapes=((side, side),))
    wire = predicted(PowerSGDMethod(), n, job=job).wire
    assert wire == pytest.approx(4 * (n - 1) * 4 * side / 1e9, rel=0.01)


@pytest.mark.parametrize(
    ("method", "unknown", "words"),
    [
        (PowerSGDMethod(), {"low_rank": None}, "no speed of PowerSGD is known"),
        (
            MuonMethod(optimizer=qcomp.Muon(learning_rate=0.1)),
            {"product": None},
            "no speed of matrix products",
        ),
    ],
)
def test_unknown_speeds_are_an_error(method, unknown, words):
    with pytest.raises(ValueError, match=words):
        predicted(method, 2, replace(INSTANT, **unknown))
    with pytest.raises(ValueError, match="expected the shapes of all parameters"):
        predicted(method, 2, job=Job(PARAMS, 0.0))


def test_the_figures_of_a_core_are_the_measured_ones():
    found = json.loads((Path(__file__).parents[2] / "docs" / "planning" / "rates.json").read_text())
    speed = CPU.speeds[found["sparse"]]
    assert (speed.encode, speed.decode, speed.add) == (found["encode"], found["decode"], found["add"])
    assert (CPU.low_rank.fixed, CPU.low_rank.column) == (found["low_rank_fixed"], found["low_rank_column"])
    assert CPU.product == found["product"]


@pytest.mark.parametrize(("kernels", "machine"), [("numba", CPU), ("pure", PURE)])
def test_the_figures_of_lloyd_max_are_measured_ratios_of_those_of_qsgd(kernels, machine):
    document = json.loads((Path(__file__).parents[2] / "docs" / "planning" / "rates.json").read_text())
    found = document["lloyd_max"]
    qsgd, ratios = machine.speed(qcomp.compressor(found["over"])), found["ratios"][kernels]
    assert set(ratios) == {spec for spec in machine.speeds if spec.startswith("lloyd_max")}
    for spec, fields in ratios.items():
        for field, ratio in fields.items():
            seconds = ratio["median"] * getattr(qsgd, field)
            assert getattr(machine.speeds[spec], field) == pytest.approx(seconds, rel=1e-3)


@pytest.mark.parametrize("machine", [CPU, gpu()], ids=["cpu", "gpu"])
def test_muon_with_lloyd_max_is_compared_by_time_to_a_loss(machine):
    """With 4 + 1 bits, which was studied; the coding time comes from the machine's figures."""
    opt = qcomp.Muon(learning_rate=0.02, compressor=NEAREST, update_compressor=SIGN)
    muon, cluster = MuonMethod(optimizer=opt), Cluster(8, Link(1e7))
    found = advise(JOB, cluster, machine, methods=[Method("ring"), muon])
    row = next(row for row in found.rows if row.time.method is muon)
    assert (row.known.method, row.measured) == ("Muon, 4 + 1 bits", True)
    assert f"muon, {NEAREST.spec} and {SIGN.spec}" in found.text
    free = {NEAREST.spec: Speed(0.0, 0.0, 0.0), SIGN.spec: machine.speed(SIGN)}
    instant = step_time(JOB, cluster, replace(machine, speeds=free), muon)
    one, matrices = machine.speed(NEAREST), PARAMS - 50
    assert row.time.codec - instant.codec == pytest.approx(matrices * (one.encode + one.add), rel=1e-9)


def test_shapes_of_another_number_of_elements_are_an_error():
    with pytest.raises(ValueError, match="shapes is 'of 64 elements'; expected 65, as params"):
        Job(65, 0.0, shapes=((8, 8),))


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    "machine",
    [
        CPU,
        gpu(),
        Machine("little", copy=1e-9, speeds=CPU.speeds),
        replace(CPU, speeds={qcomp.ScaledSign().spec: CPU.speed(SIGN)}),
    ],
    ids=["cpu", "gpu", "old", "one compressor"],
)
@pytest.mark.parametrize(
    "cluster",
    [Cluster(1, BARE), Cluster(8, BARE), Cluster(64, BARE, ranks_per_node=8)],
    ids=["one", "eight", "nodes"],
)
def test_every_compared_method_has_a_time(machine, cluster):
    methods = methods_for(JOB, cluster, machine)
    labels = [m.label for m in methods]
    assert len(labels) == len(set(labels))
    for method in methods:
        found = step_time(JOB, cluster, machine, method)
        assert 0 <= found.seconds < math.inf
    assert advise(JOB, cluster, machine).text


@pytest.mark.parametrize(
    ("kind", "method"),
    [
        (qcomp.PowerSGDMean, PowerSGDMethod(averaging=qcomp.PowerSGD(rank=2))),
        (OwnedMean, MuonMethod(optimizer=qcomp.Muon(learning_rate=0.02))),
    ],
    ids=["powersgd", "muon"],
)
def test_messages_are_laid_out_once_for_all_links(kind, method, monkeypatch):
    sizes, asked = kind.message_sizes, []
    monkeypatch.setattr(kind, "message_sizes", lambda *given: asked.append(1) or sizes(*given))
    shapes = (*SHAPES, (len(method.label), 2))  # of no other test
    advise(
        Job(sum(map(math.prod, shapes)), 0.1, shapes=shapes),
        Cluster(5, BARE),
        methods=[Method("ring"), method],
    )
    assert len(asked) == 1


class TestLinks:
    """From 1 Mbit/s to 400 Gbit/s the advice changes from an outer loop to compression to no compression."""

    JOB = Job(64 * 2**20, 0.3, shapes=((1024, 1024),) * 64)

    def at(self, bits, **options):
        return advise(self.JOB, Cluster(8, Link(bits / 8, 5e-6)), gpu(), **options)

    @pytest.mark.exhaustive
    def test_the_slowest_and_the_fastest(self):
        slow, fast = self.at(1e6), self.at(400e9)
        assert isinstance(slow.best.time.method, OuterMethod)
        assert slow.reason.startswith("Try every ")
        assert "not measured" in slow.reason
        assert not fast.compress

    @pytest.mark.exhaustive
    def test_a_faster_link_never_needs_rarer_exchanges(self):
        def kind(advice):
            method = advice.best.time.method
            return 2 if isinstance(method, OuterMethod) else 0 if method.is_allreduce else 1

        kinds = [kind(self.at(10 ** (6 + 0.8 * i))) for i in range(8)]
        assert kinds == sorted(kinds, reverse=True)
        assert set(kinds) == {0, 1, 2}
