"""Measurements find the settings of a simulated network and clock."""

import json
import math

import numpy as np
import pytest

import qcomp
from qcomp.comm import run_local
from qcomp.planning import (
    CPU,
    Cluster,
    Link,
    Measured,
    measure,
    probes,
)
from qcomp.planning.network import measure_network
from qcomp.planning.probes import measure_speed, measure_step

SIGN = qcomp.ScaledSign()
LIKE = np.ones(64, dtype=np.float32)
TRUE = {"latency": 2e-3, "bandwidth": 3e6, "per_message": 5e-4}


def probe(simulated, n, *, hosts=None, **settings):
    """Return what each rank measures; by default each rank has its own host."""

    def rank_main(comm):
        network = simulated(comm, **{**TRUE, **settings})
        return measure_network(network, like=LIKE, size=60_000, rounds=3, clock=network.clock)

    return run_local(n, rank_main, hosts=hosts or [str(rank) for rank in range(n)])


@pytest.mark.parametrize("n", [2, 3, 4])
def test_the_link_between_single_ranks_is_measured(simulated, n):
    found = probe(simulated, n)
    assert all(network == found[0] for network in found)
    cluster = found[0].cluster
    assert (cluster.ranks, cluster.ranks_per_node) == (n, 1)
    assert cluster.link.latency == pytest.approx(TRUE["latency"], rel=1e-9)
    assert cluster.link.bandwidth == pytest.approx(TRUE["bandwidth"], rel=1e-9)
    further = TRUE["latency"] if n == 2 else TRUE["per_message"]  # two ranks have no further messages
    assert cluster.link.per_message == pytest.approx(further, rel=1e-9)
    eight_bytes = 8 / TRUE["bandwidth"]
    assert found[0].spreads["latency"] == pytest.approx((TRUE["latency"] + eight_bytes,) * 2, rel=1e-9)


@pytest.mark.parametrize("streams", [1.0, 1.5, 2.0])
def test_links_of_nodes_with_several_ranks_are_measured(simulated, streams):
    hosts = list("abcabc")
    cluster = probe(simulated, 6, hosts=hosts, streams=streams, inside=(1e-4, 1e9))[0].cluster
    assert (cluster.ranks, cluster.ranks_per_node) == (6, 2)
    assert cluster.link.bandwidth == pytest.approx(TRUE["bandwidth"], rel=1e-9)
    assert cluster.link.latency == pytest.approx(TRUE["latency"], rel=1e-9)
    assert cluster.link.streams == pytest.approx(streams, rel=1e-9)
    assert cluster.inside.latency == pytest.approx(1e-4, rel=1e-6)
    assert cluster.inside.bandwidth == pytest.approx(1e9, rel=1e-6)


def test_ranks_of_one_node_share_one_link(simulated):
    cluster = probe(simulated, 3, hosts=list("aaa"))[0].cluster
    assert (cluster.ranks, cluster.ranks_per_node, cluster.nodes) == (3, 1, 3)
    assert cluster.link.bandwidth == pytest.approx(TRUE["bandwidth"], rel=1e-9)
    assert [probe(simulated, 2, hosts=list(hosts))[0].on_one_node for hosts in ("aa", "ab")] == [True, False]


def test_a_network_of_another_speed_is_distinguished(simulated):
    """The comparison above can fail."""
    slower = probe(simulated, 3, bandwidth=TRUE["bandwidth"] / 1.1)[0].cluster.link
    assert slower.bandwidth != pytest.approx(TRUE["bandwidth"], rel=0.05)


def test_nodes_of_unequal_sizes_are_an_error_on_every_rank(simulated):
    with pytest.raises(ValueError, match=r"the nodes have \[2, 1\] ranks"):
        probe(simulated, 3, hosts=list("aab"))


def test_one_rank_has_no_network():
    with pytest.raises(ValueError, match="comm has 1 rank; expected at least 2"):
        measure_network(qcomp.comm.LocalCommunicator.alone(), like=LIKE)


class Ticking:
    """A clock on which every look takes longer than the previous one."""

    def __init__(self):
        self.now, self.step = 0.0, 0.0

    def __call__(self):
        self.step += 1.0
        self.now += self.step
        return self.now


def test_speeds_are_medians_without_the_first_round(float64_library):
    like = float64_library.array(np.ones(64), dtype=np.float32)
    speed = measure_speed(qcomp.ScaledSign(bucket_size=8), like, rounds=3, clock=Ticking())
    # Four looks per round; the first look of the second round is number 5: encoding takes 6, 10, 14.
    assert (speed.encode, speed.decode, speed.add) == (10 / 64, 11 / 64, 12 / 64)


@pytest.mark.parametrize("compressor", [qcomp.QSGD(levels=7), qcomp.TopK(2, 16)], ids=str)
def test_any_compressor_can_be_measured(compressor):
    speed = measure_speed(compressor, LIKE, rounds=1)
    assert min(speed.encode, speed.decode, speed.add) > 0


def test_a_step_is_timed_without_its_first_call():
    calls = []
    assert measure_step(lambda: calls.append(1), rounds=3, clock=Ticking()) == 4.0  # looks 2, 4, 6
    assert len(calls) == 4


@pytest.mark.parametrize("n", [1, 2, 3])
def test_the_time_of_small_means_beyond_their_messages_counts_as_calls(simulated, monkeypatch, n):
    """On rank 0 each of two exchanges takes 7 ms, and a tensor takes 2 ms."""

    class Mean:
        def __init__(self, compressor, *, feedback):
            assert feedback == (compressor.name == "sign")

        def init(self, x, comm):
            return None

        def __call__(self, x, state, comm, *, key):
            wire = 2 * (TRUE["latency"] + (n - 2) * TRUE["per_message"])
            comm.now += wire + (2 * 0.007 + 0.002 * len(x)) / (1 + comm.rank)
            return x, state

    monkeypatch.setattr(probes, "CompressedMean", Mean)

    def rank_main(comm):
        network = simulated(comm, **TRUE)
        return measure(network, [SIGN], like=LIKE, size=60_000, rounds=3, clock=network.clock).machine

    machines = run_local(n, rank_main, hosts=list("abc")[:n])
    assert all(machine == machines[0] for machine in machines)
    expected = (0.007, 0.002) if n > 1 else (0.0, 0.0)
    assert (machines[0].call, machines[0].tensor) == pytest.approx(expected, rel=1e-6)


def test_real_means_have_a_measurable_time_per_tensor(simulated):
    def rank_main(comm):
        return measure(comm, [SIGN], like=LIKE, size=1000, rounds=2).machine

    for machine in run_local(2, rank_main, hosts=["a", "b"]):
        assert machine.tensor > 0


def test_all_ranks_agree_on_the_slowest(simulated, tmp_path):
    def rank_main(comm):
        network = simulated(comm, **TRUE)

        def step():
            network.now += 0.1 * (1 + comm.rank)

        return measure(
            network, [qcomp.ScaledSign()], like=LIKE, step=step, size=60_000, rounds=3, clock=network.clock
        )

    found = run_local(3, rank_main, hosts=list("abc"))
    assert found[0] == found[1] == found[2]
    assert found[0].compute == pytest.approx(0.3)
    assert list(found[0].machine.speeds) == [qcomp.ScaledSign().spec]
    assert found[0].cluster.ranks == 3


def test_one_rank_measures_all_but_the_link():
    found = measure(qcomp.comm.LocalCommunicator.alone(), [qcomp.ScaledSign()], like=LIKE, rounds=1)
    assert (found.cluster, found.compute) == (None, None)


class TestFile:
    MEASURED = Measured(
        Cluster(4, Link(1e8, 1e-4, streams=2.0), ranks_per_node=2), CPU, 0.25, {"latency": (1e-4, 2e-4)}, True
    )

    @pytest.mark.parametrize("measured", [MEASURED, Measured(None, CPU)], ids=["all", "little"])
    def test_is_read_back_as_it_was(self, measured, tmp_path):
        path = tmp_path / "measured.json"
        measured.save(path)
        assert Measured.load(path) == measured
        assert "Infinity" not in path.read_text()
        assert self.MEASURED.cluster.inside.streams == math.inf

    @pytest.mark.parametrize(
        "damage",
        [
            lambda d: d.pop("machine"),
            lambda d: d.update(format="other"),
            lambda d: d["cluster"].update(ranks=3),
            lambda d: d["cluster"].update(ranks=4.0),
            lambda d: d.update(compute=-1.0),
            lambda d: d.update(compute="0.25"),
            lambda d: d["cluster"]["link"].update(bandwidth=-1),
            lambda d: d["cluster"]["link"].update(colour="red"),
            lambda d: d["machine"]["speeds"].update(sign=3),
        ],
    )
    def test_damaged_is_an_error_that_names_the_file(self, damage, tmp_path):
        path = tmp_path / "measured.json"
        self.MEASURED.save(path)
        document = json.loads(path.read_text())
        damage(document)
        path.write_text(json.dumps(document))
        with pytest.raises(ValueError, match=r"measured\.json is not what qcomp plan --measure writes"):
            Measured.load(path)

    @pytest.mark.parametrize("text", ["", "[]", "3", "not JSON"])
    def test_another_file_is_an_error_too(self, text, tmp_path):
        (tmp_path / "other").write_text(text)
        with pytest.raises(ValueError, match="other is not what"):
            Measured.load(tmp_path / "other")
