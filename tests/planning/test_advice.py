"""The recommendation, and the warnings of optimizers."""

import warnings
from dataclasses import replace

import numpy as np
import pytest

import qcomp
from qcomp.comm import run_local
from qcomp.planning import (
    CPU,
    Cluster,
    Job,
    Link,
    Measured,
    Method,
    PowerSGDMethod,
    advise,
    break_even,
    methods_of,
    step_time,
    warn_if_slower,
)
from qcomp.planning.advice import WORTHWHILE
from qcomp.planning.numbers_with_units import show_bandwidth, show_seconds

JOB = Job(25_000_000, 0.3)
SLOW, FAST = Cluster(8, Link(12.5e6)), Cluster(8, Link(50e9, 5e-6))
SIGN = qcomp.ScaledSign()


@pytest.mark.exhaustive
def test_compresses_on_a_slow_link_and_not_on_a_fast_one():
    slow, fast = advise(JOB, SLOW), advise(JOB, FAST)
    assert slow.compress
    assert advise(JOB, SLOW, task=None, methods=methods_of(SLOW)).reason.startswith(
        f"Compress with {SIGN.spec}, two_phase: a run is"
    )
    assert not fast.compress
    assert fast.best.time.method.topology in ("ring", "tree")
    assert fast.reason.startswith("Do not compress: the fastest compressed method")


def test_all_methods_are_listed_fastest_first():
    rows = advise(JOB, Cluster(8, Link(1e9), ranks_per_node=2)).rows
    assert [r.time.seconds for r in rows] == sorted(r.time.seconds for r in rows)
    rows = tuple(r for r in rows if type(r.time.method) is Method)
    assert {r.time.method.topology for r in rows} == {
        "ring",
        "tree",
        "two_phase",
        "all_gather",
        "hierarchical",
    }
    assert len({r.time.method.label for r in rows}) == len(rows) == 4 + 4 * 4 + 2


@pytest.mark.exhaustive
def test_figures_agree_with_the_model():
    advice = advise(JOB, SLOW, warmup=0.2)
    plain = advice.plain
    assert plain.time.seconds == min(step_time(JOB, SLOW, CPU, Method(t)).seconds for t in ("ring", "tree"))
    for row in advice.rows:
        assert row.time == step_time(JOB, SLOW, CPU, row.time.method)
        assert row.speedup == plain.time.seconds / row.time.seconds
        if row.time.method.is_allreduce:
            assert (row.run_speedup, row.break_even) == (row.speedup, None)
        else:
            exact = 0.2 if type(row.time.method) is Method else 0.0
            assert 1 / row.run_speedup == pytest.approx(exact + (1 - exact) / row.speedup)
            assert row.loss_speedup == row.run_speedup / row.steps
            assert row.break_even == break_even(JOB, SLOW, CPU, row.time.method, plain.time.method)


def test_a_gain_within_the_error_of_the_model_is_not_recommended():
    """Between the break-even and a fifth faster, the advice is not to compress; just beyond it, to compress."""
    methods = [Method("ring"), Method("two_phase", SIGN)]

    def at(bandwidth):
        return advise(JOB, Cluster(8, Link(bandwidth, 0.0)), methods=methods, task=None)

    edge = at(1e9).rows[0].break_even or at(1e9).rows[1].break_even
    little, none = at(edge / 1.01), at(edge * 1.01)
    assert not little.compress
    assert f"less than {WORTHWHILE:g} may be the error" in little.reason
    assert not none.compress
    assert "as fast as ring" in none.reason
    low, high = edge / 100, edge
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if at(middle).compress else (low, middle)
    there = {r.time.method.topology: r.time.seconds for r in at(low).rows}
    assert there["ring"] / there["two_phase"] == pytest.approx(WORTHWHILE, rel=1e-6)


def test_a_method_that_pays_only_on_fast_links_is_not_said_to_pay_never():
    cluster = Cluster(4, Link(125e6, latency=0.05, per_message=0.0))
    gathered = Method("all_gather", qcomp.Identity())
    found = advise(Job(10_000, 0.0), cluster, methods=[Method("ring"), gathered])
    row, entry = found.rows[0], found.document["methods"][0]
    assert row.time.method is gathered
    assert (entry["pays_above"], entry["pays_below"]) == (row.pays_above, None)
    assert 0 < row.pays_above < cluster.link.bandwidth
    assert f"above {show_bandwidth(row.pays_above)}" in found.text
    assert "never" not in found.text


@pytest.mark.parametrize("warmup", [0.0, 0.5])
def test_an_exact_mean_needs_the_steps_of_exact_training(warmup):
    cluster = Cluster(16, Link(1.25e9), ranks_per_node=8)
    exact = Method("hierarchical", qcomp.Identity())
    other = PowerSGDMethod(averaging=qcomp.PowerSGD(rank=4))
    job = replace(JOB, shapes=((5000, 5000),))
    found = advise(job, cluster, methods=[Method("ring"), exact, other], warmup=warmup)
    rows = {row.time.method: row for row in found.rows}
    assert rows[exact].measured
    assert rows[exact].loss_speedup == rows[exact].run_speedup == rows[exact].speedup
    assert not rows[other].measured  # its factors are exact, its means are not


def test_compression_must_also_beat_uncompressed_sixteen_bits():
    """A method faster than float32 but slower than lossless float16 is not recommended."""
    only = [Method("ring"), Method("two_phase", qcomp.MinMaxUInt8())]
    cluster = Cluster(8, Link(0.4e9))
    assert advise(JOB, cluster, methods=only, warmup=0.5).compress
    half = Method("ring", half=True)
    assert not advise(JOB, cluster, methods=[*only, half], warmup=0.5).compress
    assert not advise(JOB, cluster, methods=[*only, half], warmup=0.5, task=None).compress


@pytest.mark.exhaustive
def test_a_long_warm_up_takes_the_gain_away():
    cluster = Cluster(8, Link(2.5e9))
    short, long = (advise(JOB, cluster, warmup=w, methods=methods_of(cluster)).rows[0] for w in (0.0, 0.9))
    assert short.run_speedup > long.run_speedup
    assert not advise(JOB, SLOW, warmup=1.0, methods=methods_of(SLOW)).compress


def test_advice_for_one_rank_says_so():
    advice = advise(JOB, Cluster(1, Link(1e9)))
    assert not advice.compress
    assert "there is one rank" in advice.text


def test_without_computation_or_ranks_there_is_no_division_by_zero():
    assert advise(Job(1, 0.0), Cluster(1, Link(1e9))).rows[0].speedup == 1.0


def test_an_impossible_warm_up_is_an_error_even_if_no_step_has_one():
    for cluster, methods in ((Cluster(1, Link(1e9)), None), (SLOW, [Method("ring")])):
        with pytest.raises(ValueError, match=r"warmup is 5; expected a share from 0 to 1"):
            advise(Job(1, 0.0), cluster, methods=methods, warmup=5)


def test_an_uncompressed_method_is_needed():
    with pytest.raises(ValueError, match="no ring or tree"):
        advise(JOB, SLOW, methods=[Method("two_phase", SIGN), Method("ring", half=True)])


class TestWarning:
    def warned(self, cluster, optimizer, n=2, *, size=100_000, machine=CPU, on_one_node=False):
        """Return the warnings of all ranks with this measurement."""

        def rank_main(comm):
            params = np.zeros(size, dtype=np.float32)
            warn_if_slower(optimizer, params, comm, Measured(cluster, machine, on_one_node=on_one_node))

        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            run_local(n, rank_main)
        return [str(w.message) for w in caught if "slower than plain" in str(w.message)]

    FAST, SLOW = Cluster(2, Link(50e9, 1e-6)), Cluster(2, Link(12.5e6))
    SGD = qcomp.CompressedSGD(learning_rate=0.1, exact=None)

    def test_warns_on_one_rank_if_compression_is_slower(self):
        (message,) = self.warned(self.FAST, self.SGD)
        assert message.startswith(
            "CompressedSGD will be slower than plain training: averaging 100000 parameters"
        )
        assert "2 ranks and a link of 400 Gbit/s" in message

    def test_is_silent_if_compression_is_faster(self):
        assert self.warned(self.SLOW, self.SGD) == []

    def test_is_silent_about_an_exact_optimizer(self):
        assert self.warned(self.FAST, qcomp.Adam(learning_rate=0.1)) == []

    def test_is_silent_alone_and_without_a_measured_network(self):
        assert self.warned(self.FAST, self.SGD, n=1) == []
        assert self.warned(None, self.SGD) == []

    def test_uses_the_number_of_ranks_of_the_job(self):
        (message,) = self.warned(self.FAST, self.SGD, n=3)
        assert "on 3 ranks" in message

    def test_is_silent_if_the_link_between_nodes_was_not_measured(self):
        found = [self.warned(self.FAST, self.SGD, n=n, on_one_node=True) for n in (2, 3)]
        assert [len(messages) for messages in found] == [1, 0]

    def test_knows_factors_and_owners(self):
        """The only matrix of Muon has one owner, which needs as long as all ranks would; and it is sent twice."""
        factors = qcomp.CompressedSGD(
            learning_rate=0.1, compressor=qcomp.Identity(), averaging=qcomp.PowerSGD(rank=4), exact=None
        )
        muon = qcomp.Muon(learning_rate=0.1)
        for optimizer, words in (
            (factors, "powersgd:rank=4, identity takes"),
            (muon, "a muon, all-reduce takes"),
        ):
            (message,) = self.warned(self.FAST, optimizer, size=(512, 512))
            assert words in message
            assert self.warned(self.SLOW, optimizer, size=(512, 512)) == []

    @pytest.mark.parametrize(("n", "nodes"), [(2, 1), (5, 5), (6, 2), (8, 2)])
    def test_ranks_that_do_not_fill_the_measured_nodes_share_smaller_ones(self, n, nodes):
        """Four ranks of a node were measured; the messages between nodes tell how many nodes are assumed."""
        optimizer = qcomp.CompressedSGD(learning_rate=0.1, averaging=qcomp.Averaging("all_gather"))
        measured = Cluster(8, Link(50e9, 20e-6), ranks_per_node=4)
        (message,) = self.warned(measured, optimizer, n=n)
        method = Method("all_gather", optimizer.compressor)
        expected = step_time(
            Job(100_000, 0.0), replace(measured, ranks=n, ranks_per_node=n // nodes), CPU, method
        )
        assert f"takes {show_seconds(expected.seconds)}, including" in message

    def test_is_silent_if_speeds_were_not_measured(self):
        old = replace(CPU, low_rank=None, product=None)
        one = replace(CPU, speeds={SIGN.spec: CPU.speed(SIGN)})
        factors = qcomp.CompressedSGD(
            learning_rate=0.1, compressor=qcomp.Identity(), averaging=qcomp.PowerSGD(rank=4), exact=None
        )
        halves = qcomp.CompressedSGD(learning_rate=0.1, compressor=qcomp.Cast("bfloat16"))
        muon = qcomp.Muon(learning_rate=0.1)
        for optimizer, machine in ((factors, old), (muon, old), (muon, one), (halves, CPU)):
            assert self.warned(self.FAST, optimizer, size=(512, 512), machine=machine) == []
