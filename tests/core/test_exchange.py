"""The compressed mean in two phases and by all-gather: order of sums, bytes, draws, errors, and its transport."""

import json
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

import qcomp
from qcomp import CompressedMean, Key, MismatchError, NonFiniteError
from qcomp.comm import run_local
from qcomp.core import primitives
from qcomp.core.feedback import compensated
from qcomp.core.kernels import Blend
from qcomp.core.mean import stages as transport
from qcomp.core.mean.compressed_mean import EXACT, MeanState, Terms
from qcomp.core.mean.framing import join, joined_size, split
from qcomp.core.mean.stages import AllGather, AllToAll, drive, fuse
from qcomp.core.mean.topologies import two_phase
from qcomp.core.mean.topologies.registry import names
from qcomp.core.numeric.random import replace_draws
from qcomp.core.primitives import steps
from qcomp.version import version_and_sources
from tests.core.worlds import SHAPES, average, draws_of, inputs, start

TOPOLOGIES = ["two_phase", "all_gather"]


class TestSameOnAllRanks:
    @pytest.mark.parametrize("topology", TOPOLOGIES)
    def test_an_array_a_tuple_and_a_list(self, topology):
        mean = CompressedMean(qcomp.ScaledSign(bucket_size=16), topology=topology)
        x = [inputs(rank, 0, shapes=[(5, 7)])[0] for rank in range(2)]
        alone, _ = average(mean, x, start(mean, [x[0]], 2), None)
        in_list, _ = average(mean, [[v] for v in x], start(mean, [x[0]], 2), None)
        in_tuple, _ = average(mean, [(v,) for v in x], start(mean, [x[0]], 2), None)
        assert alone.shape == (5, 7)
        assert alone.tobytes() == in_list[0].tobytes() == in_tuple[0].tobytes()

    @pytest.mark.exhaustive
    @pytest.mark.parametrize(
        "c",
        [
            pytest.param(qcomp.ScaledSign(), id="sign"),
            pytest.param(qcomp.QSGD(levels=7, bucket_size=128), id="qsgd", marks=pytest.mark.exhaustive),
        ],
    )
    def test_a_mixed_world(self, libraries, c):
        """A NumPy, a torch, a JAX and a strict rank; three steps with feedback give the same bytes."""
        mean = CompressedMean(c)
        ranks = [libraries[name] for name in ("numpy", "torch", "jax", "strict")]

        def rank_main(comm):
            lib = ranks[comm.rank]
            state = mean.init(lib.array(np.zeros(512, dtype=np.float32)), comm)
            held = []
            for step in range(3):
                x = np.random.default_rng([comm.rank, step]).standard_normal(512).astype(np.float32)
                got, state = mean(lib.array(x), state, comm, key=Key(seed=1, step=step))
                assert type(got) is type(lib.array(x))
                held.append(lib.numpy(got).tobytes())
            return held

        results = run_local(4, rank_main)
        for step in range(3):
            assert len({held[step] for held in results}) == 1
        assert len(set(results[0])) == 3

    def test_means_of_chunks_do_not_depend_on_their_servers(self):
        """With one bucket per chunk and values on the grid of the compressor, 2 and 4 ranks agree on the mean."""
        mean = CompressedMean(qcomp.ScaledSign(bucket_size=16))
        x = np.sign(inputs(0, 0, shapes=[(64,)])[0])  # on the grid of the compressor, so nothing is lost
        two, _ = average(mean, [x] * 2, start(mean, [x], 2), None)
        four, _ = average(mean, [x] * 4, start(mean, [x], 4), None)
        assert two.tobytes() == four.tobytes() == x.tobytes()


class TestExactMean:
    @pytest.mark.parametrize("topology", TOPOLOGIES)
    @pytest.mark.parametrize("feedback", [True, False])
    @pytest.mark.parametrize("size", [1, 2, 3, 4])
    def test_identity_is_the_mean_in_rank_order(self, topology, feedback, size):
        mean = CompressedMean(qcomp.Identity(), topology=topology, feedback=feedback)
        values = [inputs(rank, 0) for rank in range(size)]
        states = start(mean, values[0], size)
        assert states[0].worker == states[0].server == ()
        means, _ = average(mean, values, states, None)
        for i, got in enumerate(means):
            total = values[0][i]
            for other in values[1:]:
                total = total + other[i]
            assert got.tobytes() == (total / np.float32(size)).tobytes()

    def test_the_order_of_ranks_matters_in_the_last_bit(self):
        """Otherwise the test above could not distinguish rank order from another order."""
        mean = CompressedMean(qcomp.Identity())
        values = [inputs(rank, 0, shapes=[(500,)]) for rank in range(3)]
        there, _ = average(mean, values, start(mean, values[0], 3), None)
        back, _ = average(mean, values[::-1], start(mean, values[0], 3), None)
        assert there[0].tobytes() != back[0].tobytes()

    @pytest.mark.parametrize(("factors", "calls"), [((0.9, 0.9), 1), ((0.9, 0.5), len(SHAPES))])
    def test_many_small_momenta_are_made_in_one_call(self, lockstep, factors, calls, monkeypatch):
        momenta, gradients = inputs(0, 0), inputs(0, 1)
        blends = [Blend(m, factors[i % 2], 0.7) for i, m in enumerate(momenta)]
        expected = [
            primitives.momentum(b.m, g, b.beta1, b.scale) for b, g in zip(blends, gradients, strict=True)
        ]
        made, one_by_one = [], steps.momentum
        monkeypatch.setattr(steps, "momentum", lambda *args: made.append(args) or one_by_one(*args))
        ((means, _),) = lockstep([EXACT.stages(gradients, MeanState(0, 1, (), ()), blends=blends)])
        assert len(made) == calls
        assert [m.tobytes() for m in means] == [m.tobytes() for m in expected]


class TestState:
    def test_residuals_have_the_shapes_of_tensors_and_segments(self):
        mean = CompressedMean(qcomp.ScaledSign(bucket_size=16))
        tensors = inputs(0, 0)
        states = start(mean, tensors, 3)
        # Buckets: 3 of the first tensor, 1 of the scalar, 5 of the fourth; three per chunk.
        assert [[r.shape for r in s.worker] for s in states] == [[(33,), (0,), (1,), (70,), (0,)]] * 3
        assert [[r.shape for r in s.server] for s in states] == [[(33,)], [(1,), (32,)], [(38,)]]
        assert all((r == 0).all() for s in states for r in (*s.worker, *s.server))

    def test_all_gather_keeps_no_server_residual(self):
        mean = CompressedMean(qcomp.ScaledSign(bucket_size=16), topology="all_gather")
        assert start(mean, inputs(0, 0), 2)[0].server == ()

    def test_init_is_zeros(self):
        mean = CompressedMean(qcomp.ScaledSign(bucket_size=16))
        x = np.ones(40, dtype=np.float32)
        for state, expected in zip(
            run_local(2, lambda comm: mean.init(x, comm)), start(mean, [x], 2), strict=True
        ):
            assert state[:2] == expected[:2]
            assert [r.tolist() for r in state.worker + state.server] == [
                r.tolist() for r in expected.worker + expected.server
            ]

    def test_of_other_sizes_is_an_error(self):
        mean = CompressedMean(qcomp.ScaledSign(bucket_size=16))
        (state,) = start(mean, [np.zeros(10)], 1)
        comm = qcomp.comm.LocalCommunicator.alone()
        with pytest.raises(ValueError, match=r"x has arrays of \[11\] elements; state is for \[10\]"):
            mean(np.zeros(11), state, comm)
        with pytest.raises(ValueError, match="x is empty"):
            mean([], state, comm)

    @pytest.mark.parametrize(("before", "after"), [("float32", "float64"), ("float64", "float32")])
    def test_of_another_precision_is_an_error(self, before, after):
        mean = CompressedMean(qcomp.ScaledSign(bucket_size=16))
        (state,) = start(mean, [np.zeros(10, before)], 1)
        comm = qcomp.comm.LocalCommunicator.alone()
        said = f"x is computed in {after}, but its worker residual in state has dtype {before}"
        with pytest.raises(ValueError, match=said):
            mean(np.zeros(10, after), state, comm)

    @pytest.mark.parametrize("topology", TOPOLOGIES)
    def test_of_another_mean_is_an_error(self, topology):
        """Its residuals were averaged, in other units or at other places."""
        signs = CompressedMean(qcomp.ScaledSign(bucket_size=16), topology=topology)
        x = [np.ones(100, np.float32), np.ones((4, 5))]
        _, state = start(signs, x, 2)
        for other in (
            CompressedMean(qcomp.Identity(), topology=topology),
            CompressedMean(qcomp.QSGD(levels=7), topology=topology, feedback=False),
        ):
            with pytest.raises(
                ValueError, match="state has residuals, but this mean keeps none: make it with"
            ):
                other.begin(x, state, Terms(qcomp.Key()))
        swapped = [np.ones(100), np.ones((4, 5), np.float32)]
        with pytest.raises(
            ValueError, match=r"x is computed in float64, but its worker residual in state has dtype float32"
        ):
            signs.begin(swapped, state, Terms())
        longer = state._replace(worker=tuple(np.append(e, e[:1]) for e in state.worker))
        with pytest.raises(
            ValueError, match=r"worker residuals of the shapes \[\(101,\), \(21,\)\]; expected \[\(100,\), "
        ):
            signs.begin(x, longer, Terms())

    def test_of_other_servers_is_an_error(self):
        """Other buckets give other chunks."""
        x = [np.ones(100, np.float32)]
        *_, state = start(CompressedMean(qcomp.ScaledSign(bucket_size=8)), x, 3)
        other = CompressedMean(qcomp.ScaledSign(bucket_size=32))
        with pytest.raises(
            ValueError,
            match=r"server residuals of the shapes \[\(20,\)\]; expected \[\]. The state belongs to",
        ):
            other.begin(x, state, Terms())

    def test_a_state_for_half_precision_serves_float32(self):
        mean = CompressedMean(qcomp.ScaledSign(bucket_size=16))
        (state,) = start(mean, [np.zeros(10, np.float16)], 1)
        mean(np.ones(10, np.float32), state, qcomp.comm.LocalCommunicator.alone())

    def test_of_another_rank_is_an_error(self):
        mean = CompressedMean(qcomp.ScaledSign(bucket_size=16))
        _, state = start(mean, [np.zeros(10)], 2)
        with pytest.raises(ValueError, match="comm is rank 0 of 1; state belongs to rank 1 of 2"):
            mean(np.zeros(10), state, qcomp.comm.LocalCommunicator.alone())


class TestBytes:
    @pytest.mark.quick_cases(6)
    @pytest.mark.parametrize("topology", TOPOLOGIES)
    @pytest.mark.parametrize("size", [1, 2, 3, 4])
    @pytest.mark.parametrize(
        "spec", ["sign:bucket_size=16", "qsgd:levels=20,bucket_size=16", "cast", "identity"]
    )
    def test_bytes_sent_are_those_that_the_layout_predicts(self, topology, size, spec):
        c = qcomp.compressor(spec)
        mean = CompressedMean(c, topology=topology)
        tensors = inputs(0, 0)

        def rank_main(comm):
            state = mean.init(tensors, comm)
            before = comm.bytes_sent
            for step in range(2):
                _, state = mean(inputs(comm.rank, step), state, comm, key=Key(step=step))
            return comm.bytes_sent - before

        # A message is the payload of each segment, each padded to 8 bytes, and 8 for the verdict. The lossless
        # compressor takes all tensors as one.
        sizes = [sum(math.prod(s) for s in SHAPES)] if spec == "identity" else [math.prod(s) for s in SHAPES]
        bucket = c.traits.bucket_size
        buckets = [(i, min(bucket, n - at)) for i, n in enumerate(sizes) for at in range(0, n, bucket)]

        def message(part):
            runs = {i: sum(n for j, n in part if i == j) for i, _ in part}
            return sum(-(-c.payload_spec(n).nbytes // 8) * 8 for n in runs.values()) + 8

        if topology == "all_gather":
            expected = [(size - 1) * message(buckets)] * size
        else:
            share = -(-len(buckets) // size)
            messages = [message(buckets[r * share : (r + 1) * share]) for r in range(size)]
            expected = [sum(messages) - own + (size - 1) * own for own in messages]
        assert run_local(size, rank_main) == [2 * n for n in expected]

    def test_one_bit_an_element_each_way(self):
        """2 (N - 1) / N bits per element: 32 times less than ring all-reduce, except for scales, padding, verdict."""
        n, size = 1 << 16, 4
        mean = CompressedMean(qcomp.ScaledSign(bucket_size=4096))
        x = np.ones(n, dtype=np.float32)

        def rank_main(comm):
            state = mean.init(x, comm)
            before = comm.bytes_sent
            mean(x, state, comm)
            return comm.bytes_sent - before

        ideal = 2 * (size - 1) / size * (n / 8 + 4 * n / 4096)
        assert run_local(size, rank_main) == [ideal + 2 * (size - 1) * 8] * size


class TestNonFinite:
    @pytest.mark.parametrize(
        "spec",
        ["sign:bucket_size=16", "qsgd:bucket_size=16,norm=l2", "minmax:bucket_size=16", "cast:dtype=float16"],
    )
    def test_values_too_large_to_compress(self, lockstep, spec):
        """They are finite, but the scale of their bucket is not."""
        mean = CompressedMean(qcomp.compressor(spec), feedback=False)
        values = [inputs(rank, 0, shapes=[(40,)])[0] for rank in range(2)]
        values[1] = np.where(np.arange(40) % 2, 3e38, -3e38).astype(np.float32)
        errors = lockstep(
            [mean.stages(x, s, key=Key()) for x, s in zip(values, start(mean, values[:1], 2), strict=True)],
            catch=NonFiniteError,
        )
        expected = "a value on rank 1 is not finite, or too large to compress"
        assert [str(error) for error in errors] == [expected] * 2

    def test_a_server_that_cannot_compress(self, lockstep):
        """All workers' payloads are accepted, but one server cannot compress its mean: all raise in phase two."""
        mean = CompressedMean(qcomp.Cast("float16"))
        x = np.full(40, 65504.0, dtype=np.float32)
        states = start(mean, [x], 3)
        average(mean, [x] * 3, states, None)
        states[1] = states[1]._replace(server=tuple(r + 100 for r in states[1].server))
        errors = lockstep([mean.stages(x, s) for s in states], catch=NonFiniteError)
        expected = "a value on rank 1 is not finite, or too large to compress"
        assert [str(error) for error in errors] == [expected] * 3


class Recorder:
    """A rank of a communicator that records the messages it sends by all-gather."""

    def __init__(self, comm: Any) -> None:
        self.comm, self.rank, self.size = comm, comm.rank, comm.size
        self.sent = b""

    def all_gather(self, send, receive):
        self.sent += bytes(np.asarray(send))
        return self.comm.all_gather(send, receive)

    def all_to_all(self, send, receive):
        return self.comm.all_to_all(send, receive)


class TestHandshake:
    BASE = (CompressedMean(qcomp.ScaledSign(bucket_size=16)), [np.zeros((4, 5), dtype=np.float32)])

    @pytest.mark.parametrize("odd", [0, 1, 2])
    @pytest.mark.parametrize(
        ("other", "tensors", "words"),
        [
            (
                CompressedMean(qcomp.ScaledSign(bucket_size=32)),
                None,
                ["compressor", "bucket_size=16", "bucket_size=32"],
            ),
            (CompressedMean(qcomp.Identity()), None, ["compressor", "identity"]),
            (CompressedMean(qcomp.ScaledSign(bucket_size=16), topology="all_gather"), None, ["topology"]),
            (CompressedMean(qcomp.ScaledSign(bucket_size=16), feedback=False), None, ["feedback"]),
            (None, [np.zeros((4, 6), dtype=np.float32)], ["shapes[0][1] is", "5 on", "6 on"]),
            (None, [np.zeros(20, dtype=np.float32)], ["shapes[0]"]),
            (None, [np.zeros((4, 5), dtype=np.float32)] * 2, ["shapes[1]"]),
            (None, [np.zeros((4, 5))], ["dtypes[0]", "float32", "float64"]),
        ],
    )
    def test_differences_are_named_on_every_rank(self, odd, other, tensors, words):
        base, x = self.BASE

        def rank_main(comm):
            mean = other if other is not None and comm.rank == odd else base
            with pytest.raises(MismatchError) as caught:
                mean.init(tensors if tensors is not None and comm.rank == odd else x, comm)
            return str(caught.value)

        messages = run_local(3, rank_main, timeout=20)
        assert len(set(messages)) == 1
        ranks = [str(rank) for rank in range(3) if rank != odd]
        for word in (*words, f"rank {odd}", f"ranks {' and '.join(ranks)}"):
            assert word in messages[0]

    def test_different_versions_are_an_error(self):
        mean, x = self.BASE

        def rank_main(comm):
            recorder = Recorder(comm)
            mean.init(x, recorder)
            return recorder.sent

        for sent in run_local(2, rank_main):
            assert json.dumps(version_and_sources()).encode() in sent

    def test_half_precision_is_float32_on_the_wire(self):
        mean, _ = self.BASE

        def rank_main(comm):
            return mean.init(np.zeros(4, dtype=[np.float16, np.float32][comm.rank]), comm)

        assert len(run_local(2, rank_main)) == 2


class TestArguments:
    @pytest.mark.parametrize(
        "spec", ["qsgd:levels=1,bucket_size=128", "qsgd:levels=7,bucket_size=512,norm=l2"]
    )
    def test_feedback_around_an_expansion_names_scaled(self, spec):
        c = qcomp.compressor(spec)
        assert c.traits.omega >= 1
        with pytest.raises(
            ValueError, match=rf"feedback=True around {spec}.*omega = .*qcomp\.Scaled\(\.\.\.\)"
        ):
            CompressedMean(c)
        with pytest.raises(ValueError, match=rf"feedback=True around {spec}"):
            qcomp.feedback.compress(c, np.ones(8), np.zeros(8), key=Key())
        CompressedMean(c, feedback=False)
        CompressedMean(qcomp.Scaled(c))

    def test_feedback_is_taken_where_the_largest_error_shrinks(self):
        """Whatever the variance: a step of QSGD is a part of the largest magnitude."""
        c = qcomp.QSGD(levels=7)
        assert c.traits.omega > 1 > c.traits.peak
        CompressedMean(c)
        rng = np.random.default_rng(0)
        residual, largest = np.zeros(5000), 0.0
        for step in range(300):
            x = rng.standard_normal(5000) * (rng.random(5000) < 0.01)  # nearly all of a bucket is 0
            largest = max(largest, np.abs(x).max())
            _, residual = qcomp.feedback.compress(c, x, residual, key=Key(step=step))
            assert np.abs(residual).max() <= c.traits.peak / (1 - c.traits.peak) * largest

    def test_the_residual_would_really_explode(self):
        """The reason: without new input, E |e'|^2 = omega |e|^2 (here about 8, for s = 1 and the L2 norm)."""
        c = qcomp.QSGD(levels=1, bucket_size=64, norm="l2")
        x = np.random.default_rng(0).standard_normal(64)
        plain, scaled = np.zeros(64), np.zeros(64)
        for step in range(40):
            new = x if step == 0 else 0 * x
            _, plain = compensated(c, new, plain, key=Key(step=step))
            _, scaled = qcomp.feedback.compress(qcomp.Scaled(c), new, scaled, key=Key(step=step))
        assert np.linalg.norm(plain) > 1e3 * np.linalg.norm(x)
        assert np.linalg.norm(scaled) < np.linalg.norm(x)

    def test_other_wrong_arguments(self):
        with pytest.raises(TypeError, match=r"compressor is 'sign'; expected a qcomp\.Compressor"):
            CompressedMean("sign")
        words = f"topology is 'no_topology'; expected one of {', '.join(names())}, auto"
        with pytest.raises(ValueError, match=words):
            CompressedMean(qcomp.Identity(), topology="no_topology")

    def test_a_compressor_that_draws_needs_a_key(self, lockstep):
        mean = CompressedMean(qcomp.QSGD(bucket_size=16))
        x = np.zeros(4)
        with pytest.raises(ValueError, match=r"key is None; qsgd.* draws random numbers"):
            lockstep([mean.stages(x, s) for s in start(mean, [x], 1)])


def bernoulli_world(source: Callable, p: Sequence[float], levels: int) -> np.ndarray:
    """Average at two ranks, in one bucket, 4096 copies of a value p[rank] of a level, one for each triple of draws.

    The first element is the largest level on both ranks, on the grid, so the step is exactly 1 on workers and server.
    Draws are sixteenths, as are p and the values that the server rounds: each triple has the same weight.
    """
    mean = CompressedMean(qcomp.QSGD(levels=levels, bucket_size=8192), feedback=False)
    values = [np.concatenate([[levels], np.full(4096, value)]).astype(np.float32) for value in p]
    with replace_draws(source):
        got, _ = average(mean, values, start(mean, values[:1], 2), Key())
    assert got[0] == levels
    return got[1:]


SIXTEENTHS = (
    np.concatenate([[[0, 0, 0]], np.stack(np.meshgrid(*[np.arange(16)] * 3), -1).reshape(-1, 3)]) * 4096
)
"""The draws of worker 0, worker 1 and the server for each of the 4096 copies; the first element is no copy."""


class TestUnbiased:
    """Two-phase QSGD at two ranks, with the exact probability of every outcome."""

    CASES = ([0.25, 0.25], [0.0625, 0.75], [0.9375, 0.5], [0.0, 0.1875], [1.0, 0.4375])

    @staticmethod
    def independent(key, block):
        column = {(0, 0): 0, (1, 0): 1, (0, 1): 2}[key.rank, key.hop]  # rank 0 serves the only bucket
        return np.pad(SIXTEENTHS[:, column], (0, block.length - 4097))

    @pytest.mark.parametrize("p", CASES)
    @pytest.mark.parametrize("levels", [1, 7])
    def test_the_mean_over_all_outcomes_is_the_mean(self, p, levels):
        got = bernoulli_world(self.independent, p, levels)
        assert set(got.tolist()) <= {0.0, 1.0}
        assert got.mean(dtype=np.float64) == np.mean(p)

    @pytest.mark.parametrize(
        ("p", "biased"), [(0.25, 0.3125), (0.75, 0.6875), (0.0625, 0.0625 + 0.4375 / 16)]
    )
    def test_a_server_with_the_stream_of_its_worker_is_biased(self, p, biased):
        def same(key, block):
            return np.pad(SIXTEENTHS[:, key.rank], (0, block.length - 4097))

        assert bernoulli_world(same, [p, p], 1).mean(dtype=np.float64) == biased

    @staticmethod
    def real_mean(p: float) -> float:
        """Return the mean of 2^16 equal elements in one bucket with Philox's draws."""
        n = 1 << 16
        x = np.full(n, p, dtype=np.float32)
        x[0] = 1
        mean = CompressedMean(qcomp.QSGD(levels=1, bucket_size=n), feedback=False)
        got, _ = average(mean, [x, x], start(mean, [x], 2), Key(seed=3))
        return float(got[1:].mean(dtype=np.float64))

    SIX_SIGMA = 6 * 0.5 / 2**8

    @pytest.mark.parametrize("p", [0.25, 0.1])
    def test_the_mean_with_real_draws_is_unbiased(self, p):
        assert abs(self.real_mean(p) - p) < self.SIX_SIGMA

    def test_a_server_without_a_hop_of_its_own_shows_the_bias(self, monkeypatch):
        monkeypatch.setattr(two_phase, "SERVER", two_phase._WORKER)
        assert abs(self.real_mean(0.25) - 0.3125) < self.SIX_SIGMA
        assert self.real_mean(0.1) - 0.1 > self.SIX_SIGMA

    def test_every_draw_has_a_key_of_its_own(self):
        """In a world of three with several tensors, no two buckets are rounded with the same draws."""
        mean = CompressedMean(qcomp.QSGD(levels=7, bucket_size=16))
        values = [inputs(rank, 0) for rank in range(3)]
        seen = draws_of(mean, values, start(mean, values[0], 3))
        # 9 buckets on each of 3 workers, and once more on their servers.
        assert len(seen) == len(set(seen)) == 36
        assert {(key.rank, key.hop) for key in seen} == {(r, hop) for r in range(3) for hop in range(2)}
        assert {key.bucket for key in seen if key.hop == 1} == set(range(9))

    def test_draws_do_not_depend_on_the_number_of_ranks(self):
        """Bucket numbers are global: a worker rounds with the same draws in every world."""
        for size in (1, 2, 3):
            seen = set()

            def source(key, block, seen=seen):
                if (key.rank, key.hop) == (0, 0):
                    seen.update(
                        (key.bucket + block.first_bucket + i, block.length) for i in range(block.rows)
                    )
                return 0

            mean = CompressedMean(qcomp.QSGD(levels=7, bucket_size=16))
            values = [inputs(rank, 0) for rank in range(size)]
            with replace_draws(source):
                average(mean, values, start(mean, values[0], size), Key())
            # 33, 1 and 70 elements: full buckets, and tails of 1, 1 and 6.
            lengths = [16, 16, 8, 8, 16, 16, 16, 16, 8]
            assert seen == set(enumerate(lengths))


class TestStagesByHand:
    @pytest.mark.parametrize(
        ("topology", "kinds"), [("two_phase", [AllToAll, AllGather]), ("all_gather", [AllGather])]
    )
    def test_the_kinds_of_exchanges(self, lockstep, topology, kinds):
        mean, found = CompressedMean(qcomp.ScaledSign(bucket_size=16), topology=topology), []

        def noted(stages):
            arrived = None
            while True:
                try:
                    request = next(stages) if arrived is None else stages.send(arrived)
                except StopIteration:
                    return
                found.append(type(request))
                arrived = yield request

        lockstep([noted(mean.stages(inputs(0, 0), state)) for state in start(mean, inputs(0, 0), 1)])
        assert found == kinds

    def test_a_message_of_another_size_is_an_error(self):
        mean = CompressedMean(qcomp.ScaledSign(bucket_size=16))
        x = np.zeros(50, dtype=np.float32)
        stages = mean.stages(x, mean.zeros([x], rank=0, size=2))
        request = next(stages)
        good = np.zeros(request.receive[0], dtype=np.uint8)
        with pytest.raises(qcomp.PayloadError, match=r"the message from rank 1 has shape \(\d+,\); expected"):
            stages.send([good, good[1:]])


class TestTransport:
    SIZES = (0, 1, 7, 8, 9, 16)

    def test_join_and_split(self, float64_library):
        lib = float64_library
        buffers = [np.arange(1, n + 1, dtype=np.uint8) for n in self.SIZES]
        message = join([lib.array(b) for b in buffers])
        assert message.shape == (joined_size(self.SIZES),)
        assert lib.numpy(message).tobytes() == b"".join(b.tobytes() + bytes(-len(b) % 8) for b in buffers)
        back = split(lib.seal(message), self.SIZES)
        assert [lib.numpy(b).tobytes() for b in back] == [b.tobytes() for b in buffers]

    @staticmethod
    def echo(rank: int, name: str, sizes: Sequence[int], kinds: Sequence[type]):
        """A computation that sends texts of different lengths to the ranks in every stage, and returns what arrived."""
        heard = []
        for stage, kind in enumerate(kinds):

            def text(source, target, stage=stage):
                return f"{name}{stage}:{source}>{target}".encode() * (sizes[source] + 1)

            ranks = range(len(sizes))
            if kind is AllToAll:
                each = tuple(np.frombuffer(text(rank, t), dtype=np.uint8) for t in ranks)
                arrived = yield AllToAll(each, tuple(len(text(s, rank)) for s in ranks))
            else:
                send = np.frombuffer(text(rank, 0), dtype=np.uint8)
                arrived = yield AllGather(send, tuple(len(text(s, 0)) for s in ranks))
            heard.append([bytes(buffer).decode() for buffer in arrived])
        return heard

    @pytest.mark.parametrize("counts", [[2, 2, 2], [1, 3, 2], [0, 2], [0, 0], [3]])
    def test_fuse_gives_what_the_computations_give_alone(self, lockstep, counts):
        kinds, sizes = [AllToAll, AllGather, AllToAll], [3, 0, 1]

        def computations(rank):
            return [self.echo(rank, "abc"[i], sizes, kinds[:count]) for i, count in enumerate(counts)]

        fused = lockstep([fuse(computations(rank)) for rank in range(3)])
        alone = [lockstep(list(group)) for group in zip(*map(computations, range(3)), strict=True)]
        assert fused == [[result[rank] for result in alone] for rank in range(3)]

    @pytest.mark.parametrize("others", [[AllGather, AllToAll], [AllToAll, AllToAll, AllGather], []])
    def test_fuse_joins_different_kinds(self, lockstep, others):
        """An all-gather is sent to each rank separately where the other computation has different messages."""
        kinds, sizes = [[AllToAll, AllGather], others], [3, 0, 1]

        def computations(rank):
            return [self.echo(rank, name, sizes, k) for name, k in zip("ab", kinds, strict=True)]

        fused = lockstep([fuse(computations(rank)) for rank in range(3)])
        alone = [lockstep(list(group)) for group in zip(*map(computations, range(3)), strict=True)]
        assert fused == [[result[rank] for result in alone] for rank in range(3)]

    def test_fuse_sends_one_message_for_all(self):
        stages = fuse([self.echo(0, name, [0, 0], [AllGather]) for name in "ab"])
        request = next(stages)
        assert isinstance(request, AllGather)
        assert request.receive == (16, 16)
        assert bytes(request.send) == b"a0:0>0\0\0b0:0>0\0\0"

    def test_fused_means_equal_single_ones(self, lockstep):
        means = [CompressedMean(qcomp.ScaledSign(bucket_size=16)), CompressedMean(qcomp.Identity())]
        values = [[inputs(rank, i) for i in range(2)] for rank in range(3)]
        fused = lockstep(
            [
                fuse([m.stages(values[r][i], start(m, values[r][i], 3)[r]) for i, m in enumerate(means)])
                for r in range(3)
            ]
        )
        for i, mean in enumerate(means):
            expected, _ = average(mean, [v[i] for v in values], start(mean, values[0][i], 3), None)
            for rank in range(3):
                got = fused[rank][i][0]
                assert [m.tobytes() for m in got] == [m.tobytes() for m in expected]

    def test_drive_returns_the_result_of_stages_without_exchange(self):
        def nothing():
            return 7
            yield

        assert drive(nothing(), qcomp.comm.LocalCommunicator.alone()) == 7

    def test_exchanges_have_the_fields_that_communicators_expect(self):
        fields = {"send", "receive", "later", "owner"}
        assert set(transport.AllToAll._fields) == set(transport.AllGather._fields) == fields


class TestOverwrite:
    def test_overwrite_allows_values_that_must_be_converted(self, lockstep):
        mean = CompressedMean(qcomp.ScaledSign(bucket_size=16))
        states = start(mean, inputs(0, 0, np.float16), 2)
        values = [inputs(rank, 0, np.float16) for rank in range(2)]
        expected = lockstep([mean.stages(x, s) for x, s in zip(values, states, strict=True)])
        runs = [mean.stages(x, s, overwrite=True) for x, s in zip(values, states, strict=True)]
        for (means, _), (wanted, _) in zip(lockstep(runs), expected, strict=True):
            assert all(np.array_equal(m, w) for m, w in zip(means, wanted, strict=True))

    def test_overwrite_cannot_be_combined_with_donate(self, lockstep):
        mean = CompressedMean(qcomp.ScaledSign(bucket_size=16))
        (state,) = start(mean, inputs(0, 0), 1)
        with pytest.raises(ValueError, match="overwrite is True; expected False with donate"):
            lockstep([mean.stages(inputs(0, 0), state, donate=True, overwrite=True)])
