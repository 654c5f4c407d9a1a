"""Payloads whose length depends on the values: layout, messages, means, optimizers, and announcing lengths."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pytest

import qcomp
from qcomp import CompressedMean, Key, NonFiniteError, PayloadError, PayloadSpec
from qcomp.comm import run_local
from qcomp.core.mean.chunks import Segment
from qcomp.core.mean.codec import Codec, Verdicts
from qcomp.core.mean.framing import Frame, join_lengths, most_bytes, split_lengths
from qcomp.core.mean.stages import AllGather, AllToAll, announce_lengths
from qcomp.core.numeric.arrays import bytes_of, flush, from_bytes_of
from qcomp.core.payload import Field
from qcomp.testing import check_compressor

SHAPES = [(300,), (), (0,), (9, 5)]
CODED = qcomp.QSGD(levels=7, bucket_size=32, norm="l2", coding="range")


@qcomp.register
@dataclass(frozen=True)
class Nonzeros(qcomp.Compressor):
    """A third-party compressor without a coder: it sends the positions of nonzero elements, and these as float32."""

    name: ClassVar[str] = "test_nonzeros"

    @property
    def traits(self):
        return qcomp.Traits(1, delta=1 - 2.0**-40, keeps_zero=True)

    def payload_spec(self, size, dtype="float32"):
        fields = Field("mask", "uint8", size), Field("values", "uint8", 4 * size)
        return PayloadSpec(fields, variable_length=True)

    def encode(self, x, key):
        x = flush(x.astype(np.float32))
        return {"mask": (x != 0).astype(np.uint8), "values": bytes_of(x[x != 0])}

    def decode(self, parts, size, dtype):
        x, mask = np.zeros(size, dtype=dtype), parts["mask"] != 0
        if parts["values"].size != 4 * np.count_nonzero(mask):
            raise PayloadError(
                f"{parts['values'].size} bytes of values; expected {4 * np.count_nonzero(mask)}"
            )
        x[mask] = from_bytes_of(parts["values"], "float32")
        return x


def inputs(rank: int, step: int, shapes: Sequence[tuple] = SHAPES) -> list[np.ndarray]:
    """Return mostly zeros and small values, so that coding shortens them."""
    rng = np.random.default_rng([rank, step])
    values = [rng.standard_normal(s) * (rng.random(s) < 0.2) for s in shapes]
    return [np.asarray(v, dtype=np.float32) for v in values]


class TestLayout:
    SPEC = PayloadSpec((Field("step", "float32", 1), Field("codes", "uint8", 5)), variable_length=True)

    def test_the_last_field_may_be_shorter(self):
        assert (self.SPEC.shortest, self.SPEC.nbytes) == (4, 9)
        step = np.asarray([2.5], dtype=np.float32)
        for length in range(6):
            codes = np.arange(length, dtype=np.uint8)
            data = self.SPEC.join({"step": step, "codes": codes})
            assert data.shape == (4 + length,)
            parts = self.SPEC.split(data)
            assert parts["step"].tolist() == [2.5]
            assert parts["codes"].tolist() == codes.tolist()

    @pytest.mark.parametrize("length", [0, 3, 10])
    def test_no_other_field_may_be_shorter(self, length):
        with pytest.raises(PayloadError, match=r"has shape \(\d+,\); expected \(4,\) to \(9,\)"):
            self.SPEC.split(np.zeros(length, dtype=np.uint8))
        with pytest.raises(PayloadError, match="has shape"):
            self.SPEC.check(np.zeros((1, 5), dtype=np.uint8))

    @pytest.mark.parametrize("fields", [(), (Field("codes", "uint8", 5), Field("step", "float32", 1))])
    def test_the_shorter_field_must_hold_bytes(self, fields):
        with pytest.raises(ValueError, match="expected dtype uint8 for the last"):
            PayloadSpec(fields, variable_length=True)

    def test_a_shorter_payload_in_a_file(self):
        x = inputs(0, 0)[0]
        payload = CODED.compress(x, key=Key())
        blob = payload.to_bytes()
        back = qcomp.Payload.from_bytes(blob, like=x)
        assert back.data.tobytes() == payload.data.tobytes()
        most = CODED.payload_spec(300).nbytes
        longer = qcomp.Payload(CODED.spec, 300, "float32", np.zeros(most + 1, dtype=np.uint8)).to_bytes()
        with pytest.raises(
            PayloadError, match=f"has {most + 1} bytes of data; .* makes at most {most} from 300"
        ):
            qcomp.Payload.from_bytes(longer, like=x)

    @pytest.mark.exhaustive
    def test_a_third_party_compressor_keeps_the_contract(self):
        check_compressor(Nonzeros(), max_examples=10)


class TestMessage:
    SIZES = (0, 1, 7, 8, 9)
    BOUNDS = ((0, 3), (1, 8), (7, 7), (0, 20), (9, 10))

    def message(self, lib) -> Any:
        return join_lengths([lib.array(np.arange(1, n + 1, dtype=np.uint8)) for n in self.SIZES])

    def test_there_and_back(self, float64_library):
        lib = float64_library
        message = lib.seal(self.message(lib))
        assert message.shape[0] == 8 * 5 + 0 + 8 + 8 + 8 + 16
        assert most_bytes(self.BOUNDS) == 8 * 5 + 8 + 8 + 8 + 24 + 16
        back = split_lengths(message, self.BOUNDS)
        assert [lib.numpy(b).tolist() for b in back] == [list(range(1, n + 1)) for n in self.SIZES]

    def test_every_other_length_is_an_error(self, libraries):
        good = self.message(libraries["numpy"])
        for n in range(good.size):
            with pytest.raises(PayloadError, match=f"has {n} bytes; expected"):
                split_lengths(good[:n], self.BOUNDS)
        with pytest.raises(PayloadError, match="has 96 bytes; expected 80"):
            split_lengths(np.concatenate([good, good[:16]]), self.BOUNDS)

    @pytest.mark.parametrize(("index", "length"), [(0, 4), (1, 0), (2, 8), (3, 2**63), (4, 2**64 - 1)])
    def test_a_length_out_of_bounds_is_an_error(self, libraries, index, length):
        bad = self.message(libraries["numpy"]).copy()
        bad[8 * index : 8 * index + 8] = np.frombuffer(length.to_bytes(8, "little"), np.uint8)
        with pytest.raises(PayloadError, match=f"announces a buffer of {length} bytes; expected"):
            split_lengths(bad, self.BOUNDS)


class TestAnnouncing:
    @staticmethod
    def stages(rank: int, lengths: Sequence[Sequence[int]], most: int):
        """Make one exchange of each kind with messages of these lengths."""
        send = tuple(np.full(n, 10 * rank + r, np.uint8) for r, n in enumerate(lengths[rank]))
        to_each = yield AllToAll(send, (most,) * len(lengths))
        to_all = yield AllGather(send[0], (most,) * len(lengths))
        return [[b.tolist() for b in buffers] for buffers in (to_each, to_all)]

    def test_messages_arrive_with_their_announced_lengths(self, lockstep):
        lengths = [[3, 0, 9], [1, 2, 3], [9, 9, 0]]
        got = lockstep([announce_lengths(self.stages(r, lengths, 9), r) for r in range(3)])
        for rank in range(3):
            to_each, to_all = got[rank]
            assert to_each == [[10 * s + rank] * lengths[s][rank] for s in range(3)]
            assert to_all == [[10 * s] * lengths[s][0] for s in range(3)]

    def test_the_stages(self):
        running = announce_lengths(self.stages(0, [[3, 4], [0, 0]], 9), 0)
        request = next(running)
        assert isinstance(request, AllGather)
        assert request.receive == (32, 32)
        assert np.frombuffer(bytes(request.send), "<u8").tolist() == [3, 4, 9, 9]
        request = running.send([request.send, np.asarray([1, 2, 9, 9], "<u8").view(np.uint8)])
        assert isinstance(request, AllToAll)
        assert request.receive == (3, 1)

    @pytest.mark.parametrize(("source", "target"), [(0, 0), (1, 2), (2, 1)])
    def test_a_message_that_is_too_long_is_an_error_on_every_rank(self, lockstep, source, target):
        """In the same stage, as `lockstep` checks: no rank blocks, and no rank allocates memory for the message."""
        lengths = [[1] * 3 for _ in range(3)]
        lengths[source][target] = 10
        running = [announce_lengths(self.stages(r, lengths, 9), r) for r in range(3)]
        errors = lockstep(running, catch=PayloadError)
        text = f"rank {source} has a message of 10 bytes for rank {target}; expected at most 9"
        assert [str(error) for error in errors] == [text] * 3

    def test_if_only_the_receiver_checked_the_others_would_wait(self, lockstep):
        """This is why all ranks learn the lengths of all messages."""
        lengths = [[1, 10, 1], [1, 1, 1], [1, 1, 1]]

        def looks_for_itself(rank):
            running = self.stages(rank, lengths, 9)
            request = next(running)
            mine = request._replace(receive=tuple(lengths[s][rank] for s in range(3)))
            if max(mine.receive) > 9:
                raise PayloadError("too long for me")
            return running.send((yield mine))

        with pytest.raises(
            AssertionError, match=r"ranks \[1\] have ended, but ranks \[0, 2\] want an exchange"
        ):
            lockstep([looks_for_itself(rank) for rank in range(3)], catch=PayloadError)


class TestMean:
    @pytest.mark.parametrize("topology", ["two_phase", "all_gather"])
    def test_without_a_coder(self, lockstep, topology):
        """Exact values in a compressor of variable length give the exact mean, for values and for zeros."""
        mean = CompressedMean(Nonzeros(), topology=topology)
        values = [inputs(rank, 0) for rank in range(2)]
        states = [mean.zeros(values[0], rank=rank, size=2) for rank in range(2)]
        results = lockstep([mean.stages(v, s) for v, s in zip(values, states, strict=True)])
        for got, a, b in zip(results[0][0], *values, strict=True):
            assert np.array_equal(got, (a + b) / np.float32(2))

    @pytest.mark.slow
    @pytest.mark.parametrize("topology", ["two_phase", "all_gather"])
    def test_sends_no_more_than_the_payloads_need(self, topology):
        """Plus 16 bytes per rank and stage to each other rank, for table, padding and verdict."""
        n, size = 12288, 3
        c = qcomp.QSGD(levels=7, bucket_size=512, norm="l2", coding="range")
        mean = CompressedMean(c, topology=topology, feedback=False)
        plain = CompressedMean(c.coder.plain, topology=topology, feedback=False)
        x = [inputs(rank, 0, [(n,)])[0] for rank in range(size)]

        def sent(mean):
            def rank_main(comm):
                state = mean.init(x[comm.rank], comm)
                before = comm.bytes_sent
                mean(x[comm.rank], state, comm, key=Key())
                return comm.bytes_sent - before

            return run_local(size, rank_main)

        got, fixed = sent(mean), sent(plain)
        if topology == "all_gather":
            for rank in range(size):
                payload = c.compress(x[rank], key=Key(rank=rank))
                message = 16 + -(-payload.nbytes // 8) * 8 + 8
                assert got[rank] == (size - 1) * (16 * size + message)
        assert all(g < 0.5 * f for g, f in zip(got, fixed, strict=True))

    @pytest.mark.exhaustive
    def test_a_mixed_world(self, libraries):
        """A NumPy, a torch and a JAX rank over a communicator get the mean that fixed width gives in NumPy."""
        ranks = [libraries[name] for name in ("numpy", "torch", "jax")]

        def world(mean, libs):
            def rank_main(comm):
                lib = libs[comm.rank]
                state = mean.init(lib.array(np.zeros(96, np.float32)), comm)
                held = []
                for step in range(2):
                    x = lib.array(inputs(comm.rank, step, [(96,)])[0])
                    got, state = mean(x, state, comm, key=Key(step=step))
                    assert type(got) is type(x)
                    held.append(lib.numpy(got).tobytes())
                return held

            return run_local(3, rank_main)

        got = world(CompressedMean(CODED), ranks)
        expected = world(CompressedMean(CODED.coder.plain), [libraries["numpy"]] * 3)
        assert got == expected
        assert got[0] == got[1] == got[2]


class TestTrouble:
    def test_over_a_communicator_no_rank_blocks(self):
        mean = CompressedMean(CODED)

        def rank_main(comm):
            x = inputs(comm.rank, 0)
            state = mean.init(x, comm)
            if comm.rank == 1:
                x[3][0, 0] = np.nan
            with pytest.raises(NonFiniteError, match="a value on rank 1 is not finite"):
                mean(x, state, comm, key=Key())
            means, _ = mean(inputs(comm.rank, 1), state, comm, key=Key())  # and the state is still usable
            return b"".join(m.tobytes() for m in means)

        assert len(set(run_local(3, rank_main))) == 1

    def test_a_compressor_that_outgrows_its_bound_is_an_error_on_every_rank(self, monkeypatch):
        """Also on its own rank, before any rank allocates memory for the message."""
        monkeypatch.setattr(
            Nonzeros,
            "payload_spec",
            lambda _self, size, _dtype="float32": PayloadSpec(
                (Field("mask", "uint8", size), Field("values", "uint8", 4 * size // 10)), variable_length=True
            ),
        )
        mean = CompressedMean(Nonzeros(), topology="all_gather", feedback=False)

        def rank_main(comm):
            x = np.full(500, comm.rank == 1, dtype=np.float32)
            with pytest.raises(PayloadError, match="rank 1 has a message of 2528 bytes for rank 0; expected"):
                mean(x, mean.init(x, comm), comm)

        run_local(3, rank_main)

    def test_a_damaged_message_names_its_rank(self):
        codec, verdicts = Codec([np.zeros(300, np.float32)]), Verdicts(at_once=True)
        frame = Frame((Segment(0, 0, 300, 0),), (CODED,), ("float32",), variable_length=True)
        good = codec.encode([frame], [inputs(0, 0)[0]], (), Key(), donate=False).messages[0]
        assert codec.open([good], [frame], verdicts, None)[0].payloads[0].size == 300
        with pytest.raises(PayloadError, match="the message from rank 1 has 3 bytes; expected 16 for"):
            codec.open([good, good[:3]], [frame] * 2, verdicts, None)
        with pytest.raises(PayloadError, match=r"the message from rank 1 has \d+ bytes; expected"):
            codec.open([good, good[:-8]], [frame] * 2, verdicts, None)


def small(tensors: Sequence[Any]) -> list[bool]:
    """A policy that keeps the scalar, the empty tensor and the matrix exact."""
    return [t.size < 100 for t in tensors]


def sgd(compressor: qcomp.Compressor, **options) -> qcomp.CompressedSGD:
    return qcomp.CompressedSGD(learning_rate=0.1, compressor=compressor, exact=small, **options)


def train(opt, comm, *, steps: int = 3, poison: int | None = None, array: Callable = np.asarray) -> tuple:
    params = [array(p) for p in inputs(9, 9)]
    state = opt.init(params, comm)
    for step in range(steps):
        grads = inputs(comm.rank, step)
        if step == poison and comm.rank == 0:
            grads[0][5] = np.nan
        params, state = opt.step(params, [array(g) for g in grads], state, comm)
    return [np.asarray(p).tobytes() for p in params], state.skipped


class TestOptimizer:
    """Exact tensors travel beside coded ones, in stages of different kinds and numbers."""

    @pytest.mark.quick_cases(2)
    @pytest.mark.parametrize("size", [1, 2, 3])
    @pytest.mark.parametrize("topology", ["two_phase", "all_gather"])
    @pytest.mark.parametrize("clip_norm", [None, 0.5])
    def test_trains_as_with_fixed_width(self, size, topology, clip_norm):
        results = []
        for c in (CODED, CODED.coder.plain):
            opt = sgd(c, averaging=qcomp.Averaging(topology=topology), clip_norm=clip_norm)
            results.append(run_local(size, lambda comm, opt=opt: train(opt, comm)))
        assert results[0] == results[1]
        assert all(held == results[0][0] for held in results[0])

    def test_skips_on_every_rank(self):
        results = []
        for c in (CODED, CODED.coder.plain):
            opt = sgd(c, nonfinite="skip")
            results.append(run_local(3, lambda comm, opt=opt: train(opt, comm, poison=1)))
        assert results[0] == results[1]
        assert [skipped for _, skipped in results[0]] == [1] * 3

    def test_with_a_momentum_that_the_mean_blends(self):
        results = []
        for c in (CODED, CODED.coder.plain):
            opt = qcomp.OneBitAdam(learning_rate=0.1, compressor=c, freeze=1, exact=small)
            results.append(run_local(2, lambda comm, opt=opt: train(opt, comm)))
        assert results[0] == results[1]

    def test_ranks_with_different_codings_are_an_error(self):
        def rank_main(comm):
            opt = sgd(CODED if comm.rank else CODED.coder.plain)
            with pytest.raises(qcomp.MismatchError, match="coding=range"):
                train(opt, comm)

        run_local(2, rank_main)


@pytest.mark.exhaustive
@pytest.mark.mpi
def test_over_mpi(mpirun):
    """Processes with two libraries end where NumPy threads with fixed width end."""
    code = """
import sys, hashlib
sys.path[:0] = [sys.argv[1]]
import qcomp, numpy as np
from test_variable_length import CODED, sgd, train
comm = qcomp.comm.world()
if comm.rank == 1:
    import torch
held, skipped = train(sgd(CODED), comm, array=torch.tensor if comm.rank == 1 else np.asarray)
print(hashlib.sha256(b"".join(held)).hexdigest(), flush=True)
"""
    import hashlib
    from pathlib import Path

    got = mpirun(3, ["-c", code, Path(__file__).parent]).stdout.split()
    expected = run_local(3, lambda comm: train(sgd(CODED.coder.plain), comm))
    digests = {hashlib.sha256(b"".join(held)).hexdigest() for held, _ in expected}
    assert len(got) == 3
    assert set(got) == digests
