"""The hierarchical mean: exact within a node, compressed between nodes, for any number of nodes and ranks."""

import math
from functools import partial
from typing import Any

import numpy as np
import pytest

import qcomp
from qcomp import CompressedMean, Key, NonFiniteError
from qcomp.comm import run_local
from qcomp.core import primitives
from qcomp.core.kernels import Blend, use_kernels
from qcomp.core.mean.chunks import cut
from qcomp.core.mean.nodes import Nodes
from qcomp.core.mean.stages import AllToAll
from qcomp.core.mean.topologies import hierarchical as hierarchy
from qcomp.core.mean.topologies.hierarchical import Lanes
from qcomp.core.numeric.random import replace_draws
from tests.core import worlds
from tests.core.worlds import (
    NODES,
    SPECS,
    average,
    bits,
    draws_of,
    held_by,
    require_sum_identity,
    start,
)

SHAPES = [(3, 11), (0,), (), (170,), (2, 0, 4)]
"""Odd sizes, a scalar, and empty tensors: 3, 0, 1, 11 and 0 buckets of 16."""
inputs = partial(worlds.inputs, shapes=SHAPES)

WORLDS = NODES | {"one each": (0, 1, 2)}
every_world = pytest.mark.parametrize("nodes", WORLDS.values(), ids=WORLDS)
SEVERAL = [nodes for nodes in WORLDS.values() if len(set(nodes)) > 1]


def hierarchical(c: qcomp.Compressor, **options: Any) -> CompressedMean:
    return CompressedMean(c, topology="hierarchical", **options)


SIGN = hierarchical(qcomp.ScaledSign(bucket_size=16))


class TestMean:
    @every_world
    def test_without_loss_it_is_the_mean_of_all_ranks(self, nodes):
        """To the last bit: the sums within nodes, in rank order and scaled, are added in the order of the nodes."""
        mean = hierarchical(qcomp.Identity())
        values = [inputs(rank, 0) for rank in range(len(nodes))]
        means, _ = average(mean, values, start(mean, values[0], nodes))
        count = len(set(nodes))
        common = math.gcd(count, len(nodes))
        factor, divisor = np.float32(count // common), np.float32(len(nodes) // common)
        for i, got in enumerate(means):
            shares = []
            for node in range(count):
                total = sum((values[r][i] for r in range(len(nodes)) if nodes[r] == node), np.float32(0))
                shares.append(total * factor / divisor)
            expected = sum(shares, np.float32(0)) / np.float32(count)
            if count == 1:
                expected = sum((v[i] for v in values), np.float32(0)) / np.float32(len(nodes))
            assert got.tobytes() == expected.tobytes()
            exact = sum(v[i].astype(np.float64) for v in values) / len(nodes)
            largest = sum(np.abs(v[i]) for v in values) / len(nodes)
            assert (np.abs(got - exact) <= (len(nodes) + 3) * 2.0**-24 * largest).all()

    def test_leaders_without_weights_are_caught(self, monkeypatch):
        """The mean of the nodes' means is the mean over all ranks only if all nodes have the same size."""

        def unweighted(self, exact, messages, lane):
            sums = add(self, exact, messages, lane)
            weight = self.layout.world / (len(self.layout.members) * self.nodes.count)
            return sums._replace(values=[v * np.float32(weight) for v in sums.values])

        add = hierarchy._NodeShare._add
        monkeypatch.setattr(hierarchy._NodeShare, "_add", unweighted)
        self.test_without_loss_it_is_the_mean_of_all_ranks(WORLDS["pairs"])
        for name in ("3 and 2", "3 and 1", "scattered"):
            with pytest.raises(AssertionError):
                self.test_without_loss_it_is_the_mean_of_all_ranks(WORLDS[name])

    @pytest.mark.parametrize("spec", SPECS[:4])
    def test_on_one_node_it_is_exact(self, spec):
        """Bit for bit the exact mean, without residuals."""
        mean, exact = hierarchical(qcomp.compressor(spec)), CompressedMean(qcomp.Identity())
        values = [inputs(rank, 0) for rank in range(3)]
        states = start(mean, values[0], (0, 0, 0))
        assert [(s.worker, s.server) for s in states] == [((), ())] * 3
        means, after = average(mean, values, states, Key())
        expected, _ = average(exact, values, start(exact, values[0], (0, 1, 2)))
        assert bits(means) == bits(expected)
        assert after == states

    @pytest.mark.quick_cases(3)
    @pytest.mark.parametrize("spec", SPECS)
    @pytest.mark.parametrize("feedback", [True, False])
    @pytest.mark.parametrize("size", [2, 4])
    def test_on_nodes_of_one_rank_it_is_two_phases(self, lockstep, spec, feedback, size):
        """Bit for bit, including residuals and draws, also with momenta to blend into."""
        held = []
        for topology in ("hierarchical", "two_phase"):
            mean = CompressedMean(qcomp.compressor(spec), topology=topology, feedback=feedback)
            states, record = start(mean, inputs(0, 0), tuple(range(size))), b""
            for step in range(3):
                blends = [Blend(m, 0.9, 0.5) for m in inputs(77, step)] if step == 2 else ()
                results = lockstep(
                    [
                        mean.stages(inputs(rank, step), states[rank], key=Key(step=step), blends=blends)
                        for rank in range(size)
                    ]
                )
                states = [state for _, state in results]
                record += b"".join(bits(means) + held_by(state) for means, state in results)
            held.append(record)
        assert held[0] == held[1]

    def test_without_nodes_it_is_two_phases(self):
        """A state made without `init` and without nodes has one node per rank."""
        x = [inputs(rank, 0) for rank in range(3)]
        named = average(SIGN, x, start(SIGN, x[0], (0, 1, 2)))
        unnamed = average(SIGN, x, [SIGN.zeros(x[0], rank=r, size=3) for r in range(3)])
        assert bits(named.means) == bits(unnamed.means)

    @pytest.mark.exhaustive
    def test_a_mixed_world(self, libraries):
        """A NumPy, a torch, a JAX and a strict rank on two nodes; two steps with feedback give the same bytes."""
        ranks = [libraries[name] for name in ("numpy", "torch", "jax", "strict")]

        def rank_main(comm):
            lib, held = ranks[comm.rank], []
            state = SIGN.init(lib.array(np.zeros(64, dtype=np.float32)), comm)
            for step in range(2):
                x = inputs(comm.rank, step, shapes=[(64,)])[0]
                got, state = SIGN(lib.array(x), state, comm)
                assert type(got) is type(lib.array(x))
                held.append(lib.numpy(got).tobytes())
            return held

        results = run_local(4, rank_main, hosts=["a", "b", "b", "a"])
        assert [held for held in results if held != results[0]] == []

    @pytest.mark.parametrize(
        "c", [qcomp.ScaledSign(bucket_size=16), qcomp.QSGD(levels=7, bucket_size=16)], ids=str
    )
    def test_more_ranks_than_buckets(self, c):
        mean, nodes = hierarchical(c), (0, 0, 1, 1, 2, 2, 3, 3)
        for shapes in ([(20,)], [(3,)], [(0,)], [(0,), (2, 0)]):
            values = [inputs(rank, 0, shapes=shapes) for rank in range(8)]
            states = start(mean, values[0], nodes)
            for _ in range(2):
                means, states = average(mean, values, states, Key())
            assert [m.shape for m in means] == shapes


class TestSumIdentity:
    def test_leaders_without_weights_are_caught(self, monkeypatch):
        monkeypatch.setattr(hierarchy.math, "gcd", lambda count, ranks: count)
        with pytest.raises(AssertionError):
            require_sum_identity(SIGN, NODES["3 and 2"], shapes=SHAPES)


class TestState:
    def test_every_element_has_a_worker_in_each_node_and_one_server(self):
        for nodes in SEVERAL:
            sizes = [math.prod(shape) for shape in SHAPES]
            workers = [np.zeros((len(set(nodes)), n), dtype=int) for n in sizes]
            servers = [np.zeros(n, dtype=int) for n in sizes]
            for rank, state in enumerate(start(SIGN, inputs(0, 0), nodes)):
                worker, server = SIGN.layout(SHAPES, rank=rank, size=len(nodes), nodes=nodes).residuals
                assert [s.tensor for s in worker] == list(range(len(SHAPES)))
                assert [r.shape for r in state.worker] == [(s.size,) for s in worker]
                assert [r.shape for r in state.server] == [(s.size,) for s in server]
                assert all((r == 0).all() for r in (*state.worker, *state.server))
                for s in worker:
                    workers[s.tensor][nodes[rank], s.start : s.stop] += 1
                for s in server:
                    servers[s.tensor][s.start : s.stop] += 1
            assert all((w == 1).all() for w in workers)
            assert all((s == 1).all() for s in servers)

    def test_a_rank_without_a_partner_in_the_smallest_node_keeps_no_residuals(self):
        states = start(SIGN, inputs(0, 0), WORLDS["3 and 2"])
        assert [r.shape for r in states[2].worker] == [(0,)] * 5
        assert states[2].server == ()
        # 15 buckets in lanes of 8 and 7, in chunks of 4.
        assert [[r.shape[0] for r in s.worker] for s in states[:2]] == [[33, 0, 1, 64, 0], [0, 0, 0, 106, 0]]
        assert [[r.shape[0] for r in s.server] for s in (states[0], states[3])] == [[33, 1], [64]]

    def test_chunks_keep_the_numbers_of_their_buckets(self):
        nodes = Nodes((0, 0, 1, 1, 1))
        for bucket_sizes in ((16,) * 5, (11, 16, 16, 16, 16)):
            lanes = Lanes(nodes, tuple(math.prod(shape) for shape in SHAPES), bucket_sizes)
            (whole,) = cut(lanes.sizes, bucket_sizes, 1)
            numbers = {segment.tensor: segment.bucket for segment in whole}
            for lane in range(2):
                for chunk in lanes.chunks(lane):
                    for s in chunk:
                        assert s.start % bucket_sizes[s.tensor] == 0
                        assert s.bucket == numbers[s.tensor] + s.start // bucket_sizes[s.tensor]

    def test_of_other_sizes_is_an_error(self):
        state = start(SIGN, [np.zeros(40)], (0, 0, 1))[2]
        with pytest.raises(ValueError, match=r"x has arrays of \[41\] elements; state is for \[40\]"):
            next(SIGN.stages(np.zeros(41), state))

    def test_nodes_that_do_not_fit(self):
        for nodes in ((0, 2, 2), (1, 1, 1)):
            with pytest.raises(
                ValueError, match=r"nodes is .*; expected a node for each rank, numbered from 0"
            ):
                SIGN.zeros([np.zeros(4)], rank=0, size=3, nodes=nodes)
        with pytest.raises(ValueError, match=r"nodes is \(0, 1\); expected the node of each of 3 ranks"):
            SIGN.zeros([np.zeros(4)], rank=0, size=3, nodes=(0, 1))


class TestDamage:
    @pytest.mark.parametrize(("stage", "sender"), [(0, 1), (1, 2), (3, 1)])
    @pytest.mark.parametrize("spec", ["sign:bucket_size=16", "qsgd:levels=31,bucket_size=16,coding=elias"])
    def test_a_message_of_another_size_is_named(self, lockstep, stage, sender, spec):
        """In every exchange whose messages a rank opens: from its own node, or from its partner's node."""
        mean, size = hierarchical(qcomp.compressor(spec)), 4
        states = start(mean, inputs(0, 0), (0, 0, 1, 1))
        exchanges = 0

        def short(stages):
            """Run rank 0 so that in one of these exchanges the message of one rank arrives 8 bytes too short."""
            nonlocal exchanges
            arrived = None
            while True:
                request = next(stages) if arrived is None else stages.send(arrived)
                arrived = yield request
                if isinstance(request, AllToAll):
                    if exchanges == stage:
                        arrived = [b[: b.shape[0] - 8 * (r == sender)] for r, b in enumerate(arrived)]
                    exchanges += 1

        running = [mean.stages(inputs(rank, 0), states[rank], key=Key()) for rank in range(size)]
        running[0] = short(running[0])
        with pytest.raises(qcomp.PayloadError, match=f"the message from rank {sender} has"):
            lockstep(running)
        assert exchanges == stage + 1


class TestBytes:
    @pytest.mark.quick_cases(2)
    @pytest.mark.parametrize("nodes", SEVERAL)
    @pytest.mark.parametrize("spec", SPECS[:4])
    def test_bytes_sent_are_those_that_the_layout_predicts(self, nodes, spec):
        c = qcomp.compressor(spec)
        mean, size, count = hierarchical(c), len(nodes), len(set(nodes))
        tensors = inputs(0, 0)

        def rank_main(comm):
            state = mean.init(tensors, comm)
            before = comm.bytes_sent
            for step in range(2):
                _, state = mean(inputs(comm.rank, step), state, comm, key=Key(step=step))
            return comm.bytes_sent - before

        def padded(n):
            return -(-n // 8) * 8

        def runs(part):
            """Return the number of elements of each tensor in some buckets."""
            return [n for i in range(len(SHAPES)) if (n := sum(m for j, m in part if i == j))]

        members = [[r for r in range(size) if nodes[r] == node] for node in range(count)]
        lane_count = min(map(len, members))
        bucket = c.traits.bucket_size
        buckets = [
            (i, min(bucket, math.prod(shape) - at))
            for i, shape in enumerate(SHAPES)
            for at in range(0, math.prod(shape), bucket)
        ]
        share = -(-len(buckets) // lane_count)
        lanes = [buckets[lane * share : (lane + 1) * share] for lane in range(lane_count)]
        exact = [sum(padded(4 * n) for n in runs(lane)) + 8 for lane in lanes]
        chunks = [
            [lane[k * -(-len(lane) // count) : (k + 1) * -(-len(lane) // count)] for k in range(count)]
            for lane in lanes
        ]
        message = [
            [sum(padded(c.payload_spec(n).nbytes) for n in runs(chunk)) + 8 + padded(size) for chunk in lane]
            for lane in chunks
        ]
        expected = []
        for rank in range(size):
            own = members[nodes[rank]]
            number = own.index(rank)
            sent = sum(n for lane, n in enumerate(exact) if lane != number)
            if number < lane_count:
                mine = message[number][nodes[rank]]
                sent += sum(message[number]) - mine + (count - 1) * mine
                sent += (len(own) - 1) * (sum(message[number]) + 8 * count)
            expected.append(sent)
        assert run_local(size, rank_main, hosts=[str(node) for node in nodes]) == [2 * n for n in expected]

    def test_nodes_send_each_other_as_much_as_ranks_in_two_phases(self):
        """A vector of 2^16 on 2 nodes of 4 ranks: between nodes 1 bit per element each way, shared by 4 ranks."""
        n, nodes = 1 << 16, (0, 0, 0, 0, 1, 1, 1, 1)
        mean = hierarchical(qcomp.ScaledSign(bucket_size=4096))
        crossed, within = [0] * 8, [0] * 8

        class Counter:
            def __init__(self, comm):
                self.comm, self.rank, self.size, self.host = comm, comm.rank, comm.size, comm.host

            def all_gather(self, send, receive):
                return self.comm.all_gather(send, receive)

            def all_to_all(self, send, receive):
                for peer, buffer in enumerate(send):
                    if peer != self.rank:
                        where = within if nodes[peer] == nodes[self.rank] else crossed
                        where[self.rank] += buffer.shape[0]
                return self.comm.all_to_all(send, receive)

        def rank_main(comm):
            counter, x = Counter(comm), np.ones(n, dtype=np.float32)
            mean(x, mean.init(x, counter), counter)

        run_local(8, rank_main, hosts=[str(node) for node in nodes])
        payload = n / 8 + 4 * n / 4096
        owners = 4 * 8  # in each of 4 exchanges, since this communicator compares no owners
        assert crossed == [2 * payload / 2 / 4 + 2 * (8 + 8) + 4 * owners] * 8
        assert within == [3 * n + 3 * 8 + 3 * payload / 4 + 3 * 2 * (8 + 8 + 8) + 3 * owners] * 8


class TestNonFinite:
    def test_several_bad_ranks_are_all_named(self, lockstep):
        values = [inputs(rank, 0) for rank in range(6)]
        values[0][0][0, 0] = values[3][3][160] = values[5][3][0] = np.nan
        states = start(SIGN, values[0], WORLDS["1, 2 and 3"])
        errors = lockstep(
            [SIGN.stages(x, s) for x, s in zip(values, states, strict=True)], catch=NonFiniteError
        )
        expected = "a value on ranks 0, 3 and 5 is not finite, or too large to compress"
        assert [str(error) for error in errors] == [expected] * 6

    def test_a_sum_that_is_too_large(self, lockstep):
        """The values of all ranks can be compressed; the sum of one node cannot, for one of its two ranks."""
        mean = hierarchical(qcomp.Cast("float16"))
        values = [np.full(40, 60000.0, dtype=np.float32) for _ in range(4)]
        states = start(mean, values[:1], (0, 0, 1, 1))
        average(mean, values, states)
        states[3] = states[3]._replace(worker=tuple(r + 9000 for r in states[3].worker))
        errors = lockstep(
            [mean.stages(x, s) for x, s in zip(values, states, strict=True)], catch=NonFiniteError
        )
        assert [str(e) for e in errors] == ["a value on rank 3 is not finite, or too large to compress"] * 4
        assert [error.__cause__ is not None for error in errors] == [False, False, False, True]

    def test_a_server_that_cannot_compress(self, lockstep):
        """Every node's payloads are accepted, but one server cannot compress its mean."""
        mean = hierarchical(qcomp.Cast("float16"))
        x = np.full(40, 65504.0, dtype=np.float32)
        states = start(mean, [x], WORLDS["pairs"])
        average(mean, [x] * 4, states)
        states[1] = states[1]._replace(server=tuple(r + 100 for r in states[1].server))
        errors = lockstep([mean.stages(x, s) for s in states], catch=NonFiniteError)
        assert [str(e) for e in errors] == ["a value on rank 1 is not finite, or too large to compress"] * 4

    @pytest.mark.parametrize("bad", range(5))
    def test_a_refusal_that_a_device_reports_later(self, lockstep, bad):
        """Its kernels do not raise: they set a flag, and the payload is meaningless."""

        class Flags:
            name = "flags"

            def takes(self, x):
                return True

            def encode(self, compressor, x, residual, key, *, out, blend):
                fine = bool(np.isfinite(x).all())
                with use_kernels(None):
                    clean = x if fine else np.zeros_like(x)
                    encoded = primitives.encode(compressor, clean, residual, key)
                lost = None if residual is None else encoded.residual + (0 if fine else np.nan)
                return encoded._replace(residual=lost, refused=np.asarray([not fine], dtype=np.uint8))

        values = [inputs(rank, 0) for rank in range(5)]
        expected, states = average(SIGN, values, start(SIGN, values[0], WORLDS["3 and 2"]))
        before = [held_by(state) for state in states]
        broken = [inputs(rank, 0) for rank in range(5)]
        broken[bad][3][161] = np.nan
        with use_kernels(Flags()):
            fine, _ = average(SIGN, values, start(SIGN, values[0], WORLDS["3 and 2"]))
            errors = lockstep(
                [SIGN.stages(x, s) for x, s in zip(broken, states, strict=True)], catch=NonFiniteError
            )
        assert bits(fine) == bits(expected)
        assert {str(e) for e in errors} == {f"a value on rank {bad} is not finite, or too large to compress"}
        assert [held_by(state) for state in states] == before


class TestNodes:
    def test_ranks_with_the_same_host_share_one(self):
        for hosts, expected in (
            (["a", "b", "a", "c", "b"], (0, 1, 0, 2, 1)),
            (["", "a", ""], (0, 1, 0)),
            (["x" * 1000, "x" * 1001], (0, 1)),
        ):
            states = run_local(len(hosts), lambda comm: SIGN.init(np.zeros(40), comm), hosts=hosts)
            assert {state.nodes for state in states} == {expected}

    def test_other_topologies_need_no_hosts(self):
        mean = CompressedMean(qcomp.ScaledSign())

        class Hostless:
            rank, size = 0, 1

            def all_gather(self, send, receive):
                return [send]

        assert mean.init(np.zeros(4), Hostless()).nodes == ()
        with pytest.raises(TypeError, match=r"host is None on rank 0; expected the name of the machine"):
            SIGN.init(np.zeros(4), Hostless())

    def test_a_rank_without_a_host_is_an_error_on_all(self):
        def rank_main(comm):
            if comm.rank == 1:
                del comm.host
            with pytest.raises(TypeError, match="host is None on rank 1"):
                SIGN.init(np.zeros(4), comm)
            return True

        assert run_local(3, rank_main, timeout=20) == [True] * 3

    def test_the_environment_names_the_host(self, monkeypatch):
        x = np.zeros(4)
        monkeypatch.setenv("QCOMP_HOST", "here")
        assert run_local(1, lambda comm: comm.host) == ["here"]
        assert run_local(2, lambda comm: comm.host, hosts=["a", "b"]) == ["a", "b"]
        monkeypatch.delenv("QCOMP_HOST")
        assert run_local(2, lambda comm: SIGN.init(x, comm).nodes) == [(0, 0)] * 2

    def test_hosts_for_other_ranks_are_an_error(self):
        with pytest.raises(ValueError, match="hosts must hold a name for each of 2 ranks, got 3"):
            run_local(2, lambda comm: comm, hosts=["a", "b", "c"])


SIXTEENTHS = np.stack(np.meshgrid(*[np.arange(16)] * 3), -1).reshape(-1, 3) * 4096
"""The draws of the two workers and of the server for each of 4096 elements."""


class TestUnbiased:
    """Two nodes of two ranks, with the exact probability of every outcome of the draws."""

    @staticmethod
    def independent(key, block):
        column = {(0, 0): 0, (2, 0): 1, (0, 1): 2}[
            key.rank, key.hop
        ]  # rank 0 serves the first lane's only bucket
        draws = np.concatenate([[0], SIXTEENTHS[:, column]])
        return np.pad(draws, (0, block.length - 4097))

    @staticmethod
    def same(key, block):
        return np.pad(np.concatenate([[0], SIXTEENTHS[:, key.rank // 2]]), (0, block.length - 4097))

    def outcome(self, source, p) -> float:
        """Return the mean over all outcomes; p has the value of each of the four ranks."""
        mean = hierarchical(qcomp.QSGD(levels=1, bucket_size=8192), feedback=False)
        values = [np.concatenate([[1], np.full(4096, value)]).astype(np.float32) for value in p]
        with replace_draws(source):
            got, _ = average(mean, values, start(mean, values[:1], (0, 0, 1, 1)), Key())
        assert set(got.tolist()) <= {0.0, 1.0}
        return float(got[1:].mean(dtype=np.float64))

    @pytest.mark.parametrize("p", [[0.25] * 4, [0.0, 0.125, 1.0, 0.5], [0.875, 1.0, 0.125, 0.0]])
    def test_the_mean_over_all_outcomes_is_the_mean(self, p):
        assert self.outcome(self.independent, p) == np.mean(p)

    def test_a_server_with_the_stream_of_its_worker_is_biased(self):
        assert self.outcome(self.same, [0.25] * 4) == 0.3125

    @pytest.mark.parametrize("nodes", SEVERAL)
    def test_every_draw_has_a_key_of_its_own(self, nodes):
        mean = hierarchical(qcomp.QSGD(levels=7, bucket_size=16))
        values = [inputs(rank, 0) for rank in range(len(nodes))]
        seen = draws_of(mean, values, start(mean, values[0], nodes))
        # 15 buckets in each node, and once more on their servers.
        assert len(seen) == len(set(seen)) == 15 * (len(set(nodes)) + 1)
        for hop, copies in ((0, len(set(nodes))), (1, 1)):
            assert sorted(key.bucket for key in seen if key.hop == hop) == sorted(list(range(15)) * copies)


MPI_SCRIPT = """
import os, sys
import numpy as np
rank = int(os.environ["PMI_RANK"])
if "{hosts}":
    os.environ["QCOMP_HOST"] = "{hosts}".split()[rank]
import qcomp
comm = qcomp.comm.world(timeout=60)
mean = qcomp.CompressedMean(qcomp.QSGD(levels=7, bucket_size=16), topology="hierarchical")
state, held = mean.init(np.zeros(300, dtype=np.float32), comm), b""
assert comm.rank == rank
for step in range(3):
    x = np.random.default_rng([rank, step]).standard_normal(300).astype(np.float32)
    got, state = mean(x, state, comm, key=qcomp.Key(step=step))
    held += got.tobytes()
import zlib
os.write(1, f"{{rank}} {{state.nodes}} {{zlib.crc32(held)}}\\n".encode())
"""


@pytest.mark.mpi
class TestMPI:
    """In processes with hosts from the environment variable: the same bytes as from ranks that are threads."""

    @pytest.mark.exhaustive
    @pytest.mark.parametrize("hosts", ["a b a", pytest.param("", marks=pytest.mark.exhaustive)])
    def test_processes_agree_with_threads(self, mpirun, hosts):
        import zlib

        size = len(hosts.split()) or 2
        said = sorted(mpirun(size, ["-c", MPI_SCRIPT.format(hosts=hosts)]).stdout.splitlines())

        def rank_main(comm):
            mean = hierarchical(qcomp.QSGD(levels=7, bucket_size=16))
            state, held = mean.init(np.zeros(300, dtype=np.float32), comm), b""
            for step in range(3):
                x = inputs(comm.rank, step, shapes=[(300,)])[0]
                got, state = mean(x, state, comm, key=Key(step=step))
                held += got.tobytes()
            return f"{comm.rank} {state.nodes} {zlib.crc32(held)}"

        assert said == run_local(size, rank_main, hosts=hosts.split() or None)
