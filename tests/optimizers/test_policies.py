"""A compressor for each tensor, by name or shape: what is sent, what is fed back, and which checks apply."""

import math
import re
import warnings
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

import qcomp
from qcomp import QSGD, ByName, Key, MismatchError, Scaled, ScaledSign, Tensor, TopK, WholeFields
from qcomp.comm import LocalCommunicator, run_local
from qcomp.core.mean.chunks import cut

SHAPES = [(40,), (3, 11), (), (4, 2, 3, 3)]
NAMES = ["head.weight", "body.weight", "norm", "conv.weight"]
BY_NAME = ByName(
    {"head.*": QSGD(127, 16), "norm": None, "conv.*": WholeFields(QSGD(7, 32)), "*": ScaledSign(8)}
)
CHOSEN = (QSGD(127, 16), ScaledSign(8), WholeFields(QSGD(7, 32)))


def sgd(**changes) -> qcomp.CompressedSGD:
    settings = {"learning_rate": 0.1, "momentum": 0.0, "exact": None, "compressors": BY_NAME}
    return qcomp.CompressedSGD(**{**settings, **changes})


def tensors(*names: str) -> list[Tensor]:
    return [Tensor(name, (8, 8), 64) for name in names]


class TestByName:
    def test_the_first_pattern_counts(self):
        policy = ByName({"a.*": TopK(1, 8), "*.b": None, "*": QSGD(7, 16)})
        assert policy(tensors("a.b", "c.b", "c")) == (TopK(1, 8), None, QSGD(7, 16))

    def test_pairs_may_replace_a_mapping(self):
        pairs = [("a.*", TopK(1, 8)), ("*", None)]
        assert ByName(pairs) == ByName(dict(pairs))
        assert hash(ByName(pairs)) == hash(ByName(dict(pairs)))
        assert ByName(pairs) != ByName(dict(pairs[::-1]))

    def test_each_name_needs_a_pattern(self):
        with pytest.raises(ValueError, match="choices has no pattern that matches 'c'; end with"):
            ByName({"a": None})(tensors("a", "c"))

    def test_each_pattern_must_match_a_name(self):
        with pytest.raises(ValueError, match="choices has the pattern 'b', which matches no name"):
            ByName({"b": None, "*": None})(tensors("a"))

    @pytest.mark.parametrize(
        ("choices", "message"),
        [({1: None}, "the pattern 1; expected a str"), ({"a": "sign"}, "'sign' for 'a'")],
    )
    def test_types(self, choices, message):
        with pytest.raises(TypeError, match=message):
            ByName(choices)


class TestSteps:
    @pytest.mark.parametrize("topology", ["two_phase", "all_gather"])
    @pytest.mark.parametrize("size", [1, 3])
    def test_every_tensor_goes_through_its_compressor(self, job, grads, size, topology):
        """As if each were alone with it, except for bucket numbers, which name the draws: one rank without a server.

        With feedback: x = x_0 - rate (sum of exact means - E).
        """
        run = job(
            sgd(averaging=qcomp.Averaging(topology=topology)), grads(SHAPES, 99, 0, np.float64), size, NAMES
        )
        assert run.state.exact == (False, False, True, False)
        assert run.state.compressors == CHOSEN
        expected = [np.array(p) for p in run.params[0]]
        for step in range(3):
            of_ranks = [grads(SHAPES, rank, step, np.float64) for rank in range(size)]
            run.step(of_ranks)
            expected = [p - 0.1 * sum(g[i] for g in of_ranks) / size for i, p in enumerate(expected)]
        kept = [i for i, exact in enumerate(run.state.exact) if not exact]
        owed = [sum(s.exchange.worker[j] for s in run.states) / size for j in range(len(kept))]
        for s in run.states:
            mean = run.opt.mean_of(s)
            _, served = mean.layout(s.exchange.shapes, rank=s.rank, size=size).residuals
            for segment, residual in zip(served, s.exchange.server, strict=True):
                owed[segment.tensor][segment.start : segment.stop] += residual
        for i, e in zip(kept, owed, strict=True):
            assert np.abs(run.params[0][i] - (expected[i] + 0.1 * e.reshape(SHAPES[i]))).max() < 1e-12
            assert np.abs(e).max() > 1e-4
        assert np.abs(run.params[0][2] - expected[2]) < 1e-15

    def test_without_feedback_the_values_are_those_of_the_compressor(self, job, grads):
        opt = sgd(averaging=qcomp.Averaging(topology="all_gather", feedback=False), learning_rate=1.0)
        params = [np.zeros(shape) for shape in SHAPES]
        run, (g,) = job(opt, params, 1, NAMES), [grads(SHAPES, 0, 0, np.float64)]
        run.step([g])
        sizes = [math.prod(SHAPES[i]) for i in (0, 1, 3)]
        of_shapes = [c.for_shape(SHAPES[i]) for c, i in zip(CHOSEN, (0, 1, 3), strict=True)]
        (segments,) = cut(sizes, [c.traits.bucket_size for c in of_shapes], 1)
        for c, i, segment in zip(CHOSEN, (0, 1, 3), segments, strict=True):
            key = Key(seed=0, step=0, rank=0, bucket=segment.bucket)
            sent = c.decompress(c.compress(g[i], key=key), like=g[i])
            assert run.params[0][i].tobytes() == (0 - sent).tobytes()
            assert not np.array_equal(sent, g[i])

    def test_both_policies_keep_tensors_exact(self, job, grads):
        opt = sgd(exact=qcomp.ExactBelow(35))
        run = job(opt, grads(SHAPES, 99, 0), 2, NAMES)
        assert run.state.exact == (
            True,
            True,
            True,
            False,
        )  # vectors among others, small ones, and one by its name
        assert run.state.compressors == CHOSEN[2:]
        run.step([grads(SHAPES, rank, 0) for rank in range(2)])

    def test_a_function_of_shapes(self, job, grads):
        def by_shape(tensors):
            return [QSGD(127, 16) if len(t.shape) == 2 else None for t in tensors]

        run = job(sgd(compressors=by_shape), grads(SHAPES, 99, 0), 2, NAMES)
        assert run.state.exact == (True, False, True, True)
        assert run.state.compressors == (QSGD(127, 16),)

    def test_payloads_of_varying_length_among_others(self, job, grads):
        coded = QSGD(7, 16, coding="range")
        policy = ByName({"head.*": coded, "*": TopK(2, 8)})
        run = job(sgd(compressors=policy), grads(SHAPES, 99, 0), 2, NAMES)
        plain = job(
            sgd(compressors=ByName({"head.*": QSGD(7, 16), "*": TopK(2, 8)})), grads(SHAPES, 99, 0), 2, NAMES
        )
        for step in range(2):
            of_ranks = [grads(SHAPES, rank, step) for rank in range(2)]
            run.step(of_ranks)
            plain.step(of_ranks)
        assert run.fingerprint() == plain.fingerprint()

    @pytest.mark.parametrize("kind", [qcomp.OneBitAdam, qcomp.QAdam, qcomp.OneBitLamb])
    def test_frozen_adam(self, job, grads, kind):
        settings = {"betas": (0.9, 0.9), "freeze": 1, "exact": None, "variance_steps": None}
        opt = kind(learning_rate=0.1, compressors=BY_NAME, **settings)
        run = job(opt, grads(SHAPES, 99, 0), 2, NAMES)
        for step in range(3):
            run.step([grads(SHAPES, rank, step) for rank in range(2)])
        assert run.state.stage == "compressed"
        assert run.state.compressors == CHOSEN
        assert [r.shape[0] for r in run.state.exchange.worker] == [40, 33, 72]
        assert all(np.any(r) for r in run.state.exchange.worker)

    def test_hierarchical(self):
        """Two nodes of two ranks: all hold the same parameters, and residuals of each rank's own part."""
        opt = sgd(averaging=qcomp.Averaging(topology="hierarchical"))

        class Host:
            """A rank that reports its node."""

            def __init__(self, comm):
                self.comm, self.host = comm, f"node{comm.rank // 2}"

            def __getattr__(self, name):
                return getattr(self.comm, name)

        def rank_main(comm):
            params = [np.linspace(-1, 1, math.prod(s) or 1).reshape(s) for s in SHAPES]
            state = opt.init(params, Host(comm), NAMES)
            for _ in range(2):
                grads = [p * (1 + comm.rank) for p in params]
                params, state = opt.step(params, grads, state, Host(comm))
            saved = opt.state_dict(state)
            again = opt.load_state_dict(saved, params, Host(comm), NAMES)
            assert all(
                np.asarray(saved[k]).tobytes() == np.asarray(v).tobytes()
                for k, v in opt.state_dict(again).items()
            )
            return [p.tobytes() for p in params]

        results = run_local(4, rank_main, timeout=30)
        assert all(r == results[0] for r in results)


class TestChecks:
    def test_compressors_are_checked_one_by_one(self):
        comm, params = LocalCommunicator.alone(), [np.ones(40), np.ones(40)]
        explodes = ByName({"0": TopK(2, 8), "1": QSGD(1, 128)})
        with pytest.raises(ValueError, match=r"feedback=True around qsgd:levels=1"):
            sgd(compressors=explodes).init(params, comm)
        biased = qcomp.QSVRG(
            learning_rate=0.1, exact=None, compressors=ByName({"0": QSGD(), "1": TopK(2, 8)})
        )
        with pytest.raises(ValueError, match=r"compressor is topk.*; expected an unbiased one"):
            biased.init(params, comm)
        with pytest.raises(ValueError, match="promises no contraction"):
            qcomp.EF21SGD(learning_rate=0.1, exact=None, compressors=ByName({"*": QSGD(1, 128)})).init(
                params, comm
            )

    @pytest.mark.parametrize("chosen", [[None], [QSGD(), "sign"]])
    def test_a_policy_must_choose_compressors_or_none(self, chosen):
        with pytest.raises(TypeError, match=r"expected a qcomp.Compressor or None for each of 2 tensors"):
            sgd(compressors=lambda tensors: chosen).init([np.ones(4), np.ones(4)], LocalCommunicator.alone())

    @pytest.mark.parametrize(
        "given", [[True], None, True, ["False", "False"], {"0": False, "1": False}, [0.5, 0.5]]
    )
    def test_an_exact_policy_must_choose_for_each_tensor(self, given):
        """A dict or strings are true, and kept everything exact."""
        opt = qcomp.CompressedSGD(learning_rate=0.1, exact=lambda tensors: given)
        with pytest.raises(TypeError, match=r"exact chose .*; expected True or False for each of 2 tensors"):
            opt.init([np.ones(16), np.ones(16)], qcomp.comm.LocalCommunicator.alone())

    @pytest.mark.parametrize("given", [None, qcomp.ScaledSign(), {"0": None, "1": None}])
    def test_compressors_are_chosen_in_a_sequence(self, given):
        opt = qcomp.CompressedSGD(learning_rate=0.1, compressors=lambda tensors: given)
        with pytest.raises(
            TypeError, match=r"compressors chose .*; expected a qcomp\.Compressor or None for each"
        ):
            opt.init([np.ones(16), np.ones(16)], qcomp.comm.LocalCommunicator.alone())

    def test_nothing_compressed_warns_once(self):
        with pytest.warns(
            UserWarning, match="CompressedSGD compresses nothing: .*compressors=ByName"
        ) as caught:
            sgd(compressors=ByName({"*": None})).init(np.ones(4), LocalCommunicator.alone())
        assert len(caught) == 1
        assert caught[0].filename == __file__

    @pytest.mark.parametrize(
        ("exact", "words"),
        [
            (None, "stay exact by PowerSGD (the largest has 64 elements); give PowerSGD a smaller rank"),
            (
                qcomp.ExactBelow(2),
                "stay exact by exact=ExactBelow(size=2, names=()) and PowerSGD (the largest has 64 elements); pass "
                "exact=None to compress all; give PowerSGD",
            ),
        ],
    )
    def test_nothing_compressed_by_powersgd(self, exact, words):
        tall = sgd(
            compressor=qcomp.Identity(), averaging=qcomp.PowerSGD(rank=4), compressors=None, exact=exact
        )
        with pytest.warns(UserWarning, match=re.escape(words)):
            tall.init(np.ones((8, 8)), LocalCommunicator.alone())

    def start(self, make) -> list[str]:
        def rank_main(comm):
            with pytest.raises(MismatchError) as caught:
                make(comm.rank).init([np.ones(40), np.ones(40)], comm, ["a", "b"])
            return str(caught.value)

        return run_local(3, rank_main, timeout=20)

    def test_settings_that_differ_are_named_on_every_rank(self):
        found = self.start(lambda rank: sgd(compressors=ByName({"*": QSGD(7 if rank else 15, 16)})))
        assert len(set(found)) == 1
        assert "compressed[0] is 'qsgd:levels=15,bucket_size=16,norm=max' on rank 0, but" in found[0]
        assert "settings.compressors is" in found[0]

    def test_functions_with_different_choices_are_an_error(self):
        """They have the same name; their choices are compared."""

        def make(rank: int):
            def policy(tensors):
                return [QSGD(7, 16), QSGD(15 if rank == 2 else 7, 16)]

            return sgd(compressors=policy)

        found = self.start(make)
        assert "compressed[1] is 'qsgd:levels=7,bucket_size=16,norm=max' on ranks 0 and 1, but" in found[0]
        assert "settings" not in found[0]

    def test_a_policy_that_raises_on_one_rank_blocks_no_rank(self):
        def make(rank: int):
            def policy(tensors):
                if rank == 1:
                    raise KeyError("b")
                return [QSGD(7, 16)] * len(tensors)

            return sgd(compressors=policy)

        assert len(set(found := self.start(make))) == 1
        assert "KeyError: 'b'" in found[0]

    def test_a_policy_that_raises_on_all_ranks_keeps_its_error(self):
        def rank_main(comm):
            with pytest.raises(ValueError, match="no pattern that matches 'b'"):
                sgd(compressors=ByName({"a": QSGD()})).init([np.ones(40), np.ones(40)], comm, ["a", "b"])

        run_local(2, rank_main, timeout=20)


class TestCheckpoint:
    def run(self, opt, grads, *, stop: int | None = None):
        def rank_main(comm):
            params = grads(SHAPES, 99, 0)
            state = opt.init(params, comm, NAMES)
            for step in range(4):
                if step == stop:
                    state = opt.load_state_dict(opt.state_dict(state), params, comm, NAMES)
                params, state = opt.step(params, grads(SHAPES, comm.rank, step), state, comm)
            return [p.tobytes() for p in params], opt.state_dict(state)

        return run_local(2, rank_main, timeout=30)

    def test_resuming_is_as_if_there_had_been_no_stop(self, grads):
        whole, stopped = self.run(sgd(), grads), self.run(sgd(), grads, stop=2)
        for (p, s), (q, t) in zip(whole, stopped, strict=True):
            assert p == q
            assert s.keys() == t.keys()
        keys = {key for _, s in whole for key in s if "residual" in key}
        assert {f"worker_residual.{name}" for name in NAMES if name != "norm"} <= keys
        assert not any("norm" in key for key in keys)

    def test_goes_on_with_other_compressors_and_ranks(self, grads):
        """Entries are keyed by the names of tensors: what is owed does not depend on the compressor that lost it."""
        saved = [s for _, s in self.run(sgd(), grads)]
        other = sgd(compressors=ByName({"norm": None, "*": TopK(2, 8)}))

        def rank_main(comm):
            return other.load_state_dict(saved, grads(SHAPES, 99, 0), comm, NAMES, strict=False)

        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            states = run_local(3, rank_main, timeout=20)
        expected = sum(s["worker_residual.conv.weight"] for s in saved) / 2
        for s in saved:
            for key, value in s.items():
                if key.startswith("server_residual.conv.weight@"):
                    start = int(key.rpartition("@")[2])
                    expected[start : start + len(value)] += value
        for state in states:
            np.testing.assert_allclose(state.exchange.worker[2], expected, rtol=1e-5, atol=1e-6)


class TestWholeFields:
    @pytest.mark.slow
    @pytest.mark.parametrize("field", [(3, 3), (5, 5), (7,), (1, 7), (5, 5, 5)])
    @pytest.mark.parametrize("bucket_size", [32, pytest.param(512, marks=pytest.mark.slow)])
    def test_no_field_lies_in_two_buckets(self, field, bucket_size):
        c, shape = WholeFields(QSGD(127, bucket_size)), (24, 7, *field)
        size, length = math.prod(field), c.for_shape(shape).traits.bucket_size
        if size > bucket_size:
            assert c.for_shape(shape) == QSGD(127, bucket_size)
            return
        assert length % size == 0
        assert bucket_size - size < length <= bucket_size
        assert self.cut_fields(c, shape) == 0

    def test_plain_buckets_do_cut_fields(self):
        assert self.cut_fields(QSGD(127, 32), (24, 7, 3, 3)) > 10

    @staticmethod
    def cut_fields(c, shape: tuple[int, ...]) -> int:
        """Count fields that lie in two buckets: a large value makes only the step of its own bucket coarse."""
        size = math.prod(shape[2:])
        x = np.random.default_rng(0).uniform(0.5, 1, math.prod(shape)).astype(np.float32)

        def through(values: np.ndarray) -> np.ndarray:
            values = values.reshape(shape)
            return c.decompress(c.compress(values, key=Key()), like=values).ravel()

        plain, count = through(x), 0
        for start in range(0, x.size, size):
            y = x.copy()
            y[start] = 1e5  # all others of its bucket become 0 or a level of 787
            changed = np.abs(through(y) - plain) > 0.1
            count += not changed[start : start + size].all()
        return count

    @pytest.mark.parametrize("shape", [(100,), (10, 10), (), (4, 4, 2, 2), (4, 4, 1, 1), (2, 2, 20, 20)])
    def test_shapes_for_which_it_is_the_inner_compressor(self, shape):
        inner = TopK(3, 64)
        assert WholeFields(inner).for_shape(shape) == inner

    def test_equals_the_inner_compressor_on_padded_buckets(self, float64_library):
        library, inner, shape = float64_library, QSGD(7, 32), (5, 4, 3, 3)
        x = np.random.default_rng(1).standard_normal(shape).astype(np.float32)
        like, key = library.array(x), Key(seed=3, bucket=5)
        c = WholeFields(inner)
        rows = np.pad(
            np.pad(x.ravel(), (0, 9)).reshape(-1, 27), ((0, 0), (0, 5))
        )  # 7 buckets, the last of 18 elements
        padded = rows.ravel()[: 6 * 32 + 18]
        expected = inner.decompress(inner.compress(padded, key=key), like=padded)
        expected = np.pad(expected, (0, 14)).reshape(-1, 32)[:, :27].ravel()[: x.size]
        payload = c.compress(like, key=key)
        assert library.numpy(c.decompress(payload, like=like)).ravel().tobytes() == expected.tobytes()
        assert payload.nbytes == inner.payload_spec(padded.size).nbytes
        assert qcomp.compressor(payload.compressor).decompress(payload, like=like).shape == shape

    def test_tensors_of_a_mean_do_not_share_draws(self):
        """A filled bucket draws for a power of two elements; numbering by its elements would reuse the last draws."""
        sizes, lengths, drawn = [2700, 320, 5000, 64], [27, 32, 50, 16], [32, 32, 64, 16]
        (segments,) = cut(sizes, lengths, 1)
        numbers, elements = [], 0
        for size, length in zip(sizes, lengths, strict=True):
            numbers.append(-(-elements // length))
            elements = (numbers[-1] + -(-size // length)) * length

        def apart(firsts: list[int]) -> bool:
            counts = [-(-size // length) for size, length in zip(sizes, lengths, strict=True)]
            ranges = [(f * d, (f + n) * d) for f, n, d in zip(firsts, counts, drawn, strict=True)]
            return all(end <= start for (_, end), (start, _) in pairwise(ranges))

        assert apart([s.bucket for s in segments])
        assert not apart(numbers)

    @pytest.mark.parametrize("size", [1, 2, 3])
    def test_a_chunk_holds_whole_buckets(self, job, grads, size):
        opt = sgd(compressors=None, compressor=WholeFields(qcomp.Scaled(QSGD(7, 32))))
        run = job(opt, grads(SHAPES, 99, 0), size, NAMES)
        for step in range(2):
            run.step([grads(SHAPES, rank, step) for rank in range(size)])
        chunks = opt.mean_of(run.state).layout(SHAPES, rank=0, size=size).chunks
        assert all(s.start % 27 == 0 for chunk in chunks for s in chunk if s.tensor == 3)

    @pytest.mark.parametrize(
        ("make", "message"),
        [
            (lambda: WholeFields(ScaledSign()), "compressor is sign.*; expected one that keeps zeros"),
            (lambda: WholeFields(QSGD(coding="range")), "expected one whose payloads have a fixed length"),
            (lambda: WholeFields(QSGD(7, 16), field=17), "field is 17; expected an integer from 1 to 16"),
            (lambda: WholeFields(QSGD(7, 16), field=0), "field is 0"),
        ],
    )
    def test_arguments(self, make, message):
        with pytest.raises(ValueError, match=message):
            make()

    def test_spec(self):
        c = WholeFields(QSGD(7, 16), field=9)
        assert c.spec == "whole_fields(qsgd:levels=7,bucket_size=16,norm=max):field=9"
        assert qcomp.compressor(c.spec) == c
        assert qcomp.compressor("whole_fields(qsgd)") == WholeFields(QSGD())


class TestMeans:
    def test_a_compressor_for_each_array(self):
        mean = qcomp.CompressedMean([QSGD(127, 16), ScaledSign(8)])
        comm, x = LocalCommunicator.alone(), [np.arange(8.0), np.asarray([3.0, -3.0])]
        state = mean.init(x, comm)
        (first, second), _ = mean(x, state, comm, key=Key())
        assert np.abs(first - x[0]).max() < 7 / 127
        assert np.array_equal(second, x[1])
        assert replace(mean, topology="all_gather").compressors == mean.compressors
        with pytest.raises(ValueError, match="x has 3 arrays; compressor has 2 entries"):
            mean.init([*x, x[0]], comm)

    def test_an_empty_sequence_is_refused(self):
        with pytest.raises(
            TypeError, match=r"compressor is \(\); expected a qcomp.Compressor, or a sequence"
        ):
            qcomp.CompressedMean([])

    @pytest.mark.parametrize(
        "make",
        [
            qcomp.CompressedMean,
            lambda c: qcomp.CompressedMean([QSGD(), c]),
            Scaled,
            lambda c: qcomp.Muon(learning_rate=0.1, compressor=c),
        ],
    )
    def test_a_spec_string_is_refused(self, make):
        with pytest.raises(
            TypeError,
            match=r"compressor is 'sign'; expected a qcomp.Compressor; qcomp.compressor\('sign'\) makes",
        ):
            make("sign")
