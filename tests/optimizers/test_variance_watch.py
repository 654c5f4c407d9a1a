"""The watch on a frozen variance: what it measures, what it costs, and the re-warm that it may request."""

import io
import itertools
import math
import warnings
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import qcomp
from qcomp import VarianceWatch
from qcomp.comm import LocalCommunicator, run_local
from qcomp.core.optimizers.onebit_adam import OneBitAdam

SHAPES = [(40,), (3, 11), (7,)]
FREEZE, REWARM, BETAS = 4, 3, (0.8, 0.75)
WINDOW = 4
SIGN = qcomp.ScaledSign(bucket_size=16)
ALL = VarianceWatch(sample=4096, every=1, largest=2.0, smallest=0.5)
"""A watch that sends all elements in every step."""
QUIET = replace(ALL, largest=math.inf, smallest=0.0, stuck=1.0)


def one_bit(**changes: Any) -> qcomp.OneBitAdam:
    settings = {"learning_rate": 0.01, "betas": BETAS, "freeze": FREEZE, "exact": None, "compressor": SIGN}
    return qcomp.OneBitAdam(**{**settings, "watch": QUIET, **changes})


KINDS = {
    "1-bit": one_bit(),
    "1-bit all-gather": one_bit(averaging=qcomp.Averaging(topology="all_gather")),
    "1-bit some exact": one_bit(exact=qcomp.ExactBelow(20)),
    "1-bit clipped and decayed": one_bit(clip_norm=3.0, weight_decay=0.1, decoupled_weight_decay=False),
    "qadam": qcomp.QAdam(
        learning_rate=0.01,
        betas=BETAS,
        freeze=FREEZE,
        exact=None,
        compressor=qcomp.MinMaxUInt8(16),
        variance_steps=None,
        watch=QUIET,
    ),
}
kinds = pytest.mark.parametrize("name", KINDS)
sizes = pytest.mark.parametrize("size", [1, 2, 3])


def of_ranks(grads, size: int, step: int, factor: float = 1.0, dtype: type = np.float64) -> list[list]:
    return [[dtype(factor) * g for g in grads(SHAPES, rank, step, dtype)] for rank in range(size)]


def ratio(run: Any) -> float:
    values = {repr(s.numbers) for s in run.states}
    assert len(values) == 1
    return float(run.state.numbers["variance_ratio"])


def bits(arrays: Any) -> list[bytes]:
    return [np.asarray(a).tobytes() for a in arrays]


class TestMeasures:
    @pytest.mark.quick_cases(2)
    @kinds
    @sizes
    @pytest.mark.parametrize("every", [1, 3])
    def test_the_ratio_is_the_average_of_squares_over_the_frozen_variance(
        self, job, grads, name, size, every
    ):
        """For all elements of compressed tensors, since the sample has room for them; computed another way in NumPy."""
        opt = replace(KINDS[name], watch=replace(QUIET, every=every))
        run = job(opt, grads(SHAPES, 99, 0, np.float64), size)
        measured: list[np.ndarray] = []
        for step in range(FREEZE + 12):
            gradients = of_ranks(grads, size, step, 1.0 if step < FREEZE else 1.5)
            params, stage = run.params[0], run.state.stage
            run.step(gradients)
            if stage == "warmup":
                continue
            chosen = [i for i, exact in enumerate(run.state.exact) if not exact]
            if step % every == 0:
                norm = math.sqrt(sum(float((x**2).sum()) for g in gradients for x in g) / size)
                scale = min(1.0, (opt.clip_norm or math.inf) / norm)
                coupled = 0.0 if opt.decoupled_weight_decay else opt.weight_decay
                measured.append(
                    np.concatenate(
                        [
                            (scale * sum(g[i] for g in gradients) / size + coupled * params[i]).ravel()
                            for i in chosen
                        ]
                    )
                )
            if len(measured) * every < WINDOW:
                assert math.isnan(ratio(run))
                continue
            weights = (BETAS[1] ** every) ** np.arange(len(measured))[::-1]
            now = (weights[:, None] * np.square(measured)).sum(axis=0) / weights.sum()
            frozen = np.concatenate([run.state.variance[i].ravel() for i in chosen])
            assert ratio(run) == pytest.approx(now.sum() / frozen.sum(), rel=1e-12)
            expected = np.minimum(now, frozen).sum() / np.maximum(now, frozen).sum()
            assert run.state.numbers["variance_overlap"] == pytest.approx(expected, rel=1e-12)

    @pytest.mark.slow
    @sizes
    def test_steady_gradients_keep_the_ratio_at_one(self, job, size):
        """Gradients twice as large bring it to four; the window of the average decides how soon."""
        run = job(one_bit(exact=qcomp.ExactBelow(20)), [np.zeros((5, 8)), np.zeros(3)], size)
        for step in range(FREEZE + 40):
            g = 2.0 if step >= FREEZE + 10 else 1.0
            run.step([[np.full((5, 8), g * (rank + 1)), np.full(3, 1e9)] for rank in range(size)])
            if FREEZE + WINDOW <= run.state.step <= FREEZE + 10:
                assert ratio(run) == pytest.approx(1.0, rel=1e-12)
        left = BETAS[1] ** 30
        assert ratio(run) == pytest.approx(4.0, rel=left)

    @staticmethod
    def samples_of(watch: VarianceWatch, *sizes: int, exact: tuple[bool, ...] = ()) -> list[Any]:
        """Return the indices of the elements of each tensor that a watch samples."""
        opt = one_bit(watch=watch, exact=lambda tensors: exact or [False] * len(tensors))
        tensors = [np.arange(float(n)) for n in sizes]
        state = opt.enter(opt.initial_state(tensors, tuple(map(str, range(len(sizes)))), 0, 1), "compressed")
        return watch.take(tensors, state)

    def test_a_sample_has_equal_odd_strides(self):
        for room, stride in [(4096, 1), (1501, 1), (1500, 1), (500, 3), (140, 9), (7, 249), (1, 1)]:
            first, none, last = self.samples_of(
                VarianceWatch(sample=room), 1000, 50, 501, exact=(False, True, False)
            )
            assert len(none) == 0
            assert 1 <= len(first) <= 1000
            assert len(first) + len(last) <= max(2, room)
            for sample in (first, last):
                assert set(np.diff(sample)) <= {float(stride)}

    @pytest.mark.parametrize(
        ("sizes", "counts"),
        [
            ((10,), [10]),
            ((2000,), [64]),
            ((10_000,), [64]),
            ((1_000_000,), [2000]),
            ((10_000_000,), [4096]),
            ((1_000_000, 1000, 12), [1999, 16, 12]),
        ],
    )
    def test_the_automatic_sample(self, sizes, counts):
        """It has one element in 500 if it is sent in every eighth step: 0.8% of one bit per element."""
        assert [len(sample) for sample in self.samples_of(VarianceWatch(), *sizes)] == counts

    def test_a_sample_does_not_depend_on_the_other_tensors(self):
        """So that any tensors can be exchanged together: it follows from what the state keeps for that tensor."""
        opt = one_bit(watch=VarianceWatch(sample=30))
        tensors = [np.arange(100.0), np.arange(77.0)]
        state = opt.enter(opt.initial_state(tensors, ("a", "b"), 0, 1), "compressed")
        alone = state._replace(arrays={"watched_variance": state.arrays["watched_variance"][1:]})
        together = opt.watch.take(tensors, state)
        assert together[1].tolist() == opt.watch.take(tensors[1:], alone)[0].tolist()

    def test_weights_of_the_sample(self):
        opt = one_bit(watch=VarianceWatch(sample=4))
        tensors = [np.ones(5), np.ones(3)]
        state = opt.enter(opt.initial_state(tensors, ("a", "b"), 0, 1), "compressed")
        assert [x.tolist() for x in opt.watch.take(tensors, state, [2.0, 3.0])] == [[2.0, 2.0], [3.0]]

    @pytest.mark.quick_cases(3)
    @kinds
    def test_a_watch_changes_nothing_else(self, job, grads, name):
        runs = [job(replace(KINDS[name], watch=w), grads(SHAPES, 99, 0), 2) for w in (None, QUIET)]
        for step in range(FREEZE + 8):
            for run in runs:
                run.step(of_ranks(grads, 2, step, dtype=np.float32))
            assert runs[0].fingerprint() == runs[1].fingerprint()
        assert runs[0].state.numbers == {}
        assert runs[0].state.arrays == {}

    def test_is_on_by_default(self):
        for kind in (qcomp.OneBitAdam, qcomp.QAdam, qcomp.OneBitLamb):
            assert kind(learning_rate=0.1).watch == VarianceWatch()

    @pytest.mark.parametrize("every", [1, 4])
    @pytest.mark.parametrize("size", [2, 4])
    def test_bytes(self, size, every):
        """Four bytes per element of the sample, to and from the servers, in messages that are sent anyway."""
        x = np.ones(4096, dtype=np.float32)

        def sent_by(watch):
            opt = one_bit(watch=watch)

            def rank_main(comm):
                state, params, sent = opt.init(x, comm), x, []
                for _ in range(FREEZE + 8):
                    before = comm.bytes_sent
                    params, state = opt.step(params, x * (comm.rank + 1), state, comm)
                    sent.append(comm.bytes_sent - before)
                return sent

            return np.asarray(run_local(size, rank_main, timeout=30))

        more = sent_by(replace(QUIET, sample=1024, every=every)) - sent_by(None)
        # The sample's chunks for each rank; the messages have a verdict of 8 bytes anyway.
        peers, longest = size - 1, -(-1024 // size)
        assert (more[:, :FREEZE] == 0).all()
        assert (more[:, FREEZE::every] == more[:, FREEZE : FREEZE + 1]).all()
        for step in range(FREEZE, FREEZE + 8):
            assert more[:, step].sum() == pytest.approx(
                0 if step % every else 2 * peers * (1024 * 4 + size * 8), abs=2 * size * peers * 8
            )
        assert more.max() <= 2 * peers * (4 * longest + 16)

    def test_nothing_to_watch(self, job, grads):
        with pytest.warns(UserWarning, match="compresses nothing"):
            run = job(one_bit(exact=qcomp.ExactBelow(10_000)), grads(SHAPES, 99, 0), 2)
        for step in range(FREEZE + 3):
            run.step(of_ranks(grads, 2, step, dtype=np.float32))
        assert math.isnan(ratio(run))

    def test_in_half_precision(self, libraries, lockstep):
        """Squares may exceed the range of float16: they are float32, like the variance."""
        x = libraries["numpy"].array(np.ones(16), np.float16)
        opt = one_bit()
        params, state = [x], opt.initial_state([x], ("0",), rank=0, size=1)
        for _ in range(FREEZE + WINDOW):
            ((params, state),) = lockstep([opt.stages(params, [x * np.float16(1e-3)], state)])
        assert state.numbers["variance_ratio"] == pytest.approx(1.0, rel=1e-5)

    def test_in_every_library(self, library, lockstep, grads):
        """The same ratio to the last bit."""
        opt = one_bit(compressor=qcomp.Identity(), freeze=1, betas=(0.8, 0.5))
        start, steps = grads([(20,)], 99, 0), [grads([(20,)], 0, step) for step in range(3)]

        def train(convert):
            params = [convert(p) for p in start]
            state = opt.initial_state(params, ("0",), rank=0, size=1)
            for g in steps:
                ((params, state),) = lockstep([opt.stages(params, [convert(x) for x in g], state)])
            return repr(state.numbers["variance_ratio"])

        assert train(library.array) == train(np.array) != repr(math.nan)


class TestWarns:
    @staticmethod
    def caught(job, factors: list[float], **changes: Any) -> list[str]:
        """Return the warnings of a run whose gradients, 1 until the freeze, change by these factors."""
        run = job(one_bit(betas=(0.8, 0.0), **changes), [np.zeros(8)], 2)
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            warnings.filterwarnings("ignore", "all 2 ranks have the same gradients")
            for factor in [1.0] * FREEZE + factors:
                run.step([[np.full(8, factor)]] * 2)
        return [str(w.message) for w in found]

    @pytest.mark.parametrize(("factor", "warned"), [(0.72, 0), (1.4, 0), (0.7, 1), (1.42, 1), (0.0, 1)])
    def test_in_either_direction(self, job, factor, warned):
        """The variance is the square: the limits are half of it and twice."""
        assert len(self.caught(job, [factor], watch=ALL)) == 2 * warned

    def test_every_new_excursion_on_each_rank(self, job):
        found = self.caught(job, [1.0, 3.0, 1.0, 3.0], watch=ALL)
        assert len(found) == 4
        for step, message in zip((6, 6, 8, 8), found, strict=True):
            for words in (
                "variance of OneBitAdam no longer fits the gradients",
                f"at step {step}, the current variance is 9 times the frozen one",
                "pass watch=VarianceWatch(rewarm_steps=3)",
            ):
                assert words in message

    def test_both_directions(self, job):
        """First harmlessly down, then dangerously up, as in a jump after a slow decay."""
        assert [
            m.split("the current variance is ")[1].split(" times")[0]
            for m in self.caught(job, [0.5, 2.0], watch=ALL)
        ] == [
            *["0.25"] * 2,
            *["4"] * 2,
        ]

    def test_a_harmless_drift_causes_no_warning_by_default(self, job):
        assert self.caught(job, [0.7, 0.5, 0.2, 1.9], watch=replace(VarianceWatch(), every=1)) == []
        assert len(self.caught(job, [0.05], watch=replace(VarianceWatch(), every=1))) == 2

    def test_repeated_excursions_are_reported_less_often(self, lockstep):
        """It crosses its limit every 8 steps: reported at doubling intervals, and at once if much worse."""
        watch = replace(ALL, largest=2.0, smallest=0.0)
        opt = one_bit(betas=(0.8, 0.5), watch=watch, freeze=1)
        state = opt.enter(opt.initial_state([np.ones(8)], ("0",), 0, 1), "compressed")
        told = []
        for step in range(1000):
            ratio = 3.0 if step % 16 < 8 else 0.5
            finding = qcomp.core.variance.watch._Finding(ratio / 2, "")
            state, says = watch._news(state._replace(step=step), {"growth": finding}, 10)
            told += [step] if says else []
        assert told[0] == 0
        assert len(told) <= math.log2(1000 / 10) + 1
        for index, (before, now) in enumerate(itertools.pairwise(told)):
            assert 10 * 2**index <= now - before < 10 * 2**index + 16
        worse = qcomp.core.variance.watch._Finding(300.0, "")
        assert watch._news(state, {"growth": worse}, 10)[1] == [""]
        assert watch._news(state, {"growth": worse._replace(excess=30.0)}, 10)[1] == []

    def test_crossing_the_limit_slightly_is_one_excursion(self):
        watch = replace(ALL, largest=2.0)
        opt = one_bit(watch=watch, freeze=1)
        state = opt.enter(opt.initial_state([np.ones(8)], ("0",), 0, 1), "compressed")
        told = 0
        for step in range(1000):
            finding = qcomp.core.variance.watch._Finding(1.1 if step % 3 else 0.9, "")
            state, says = watch._news(state._replace(step=step), {"growth": finding}, 4)
            told += len(says)
        assert told == 1

    def test_names_the_tensors(self, job):
        """One of three, whose variance has grown 25-fold, although that is hardly 1% of the total."""
        opt = one_bit(betas=(0.8, 0.0), watch=replace(ALL, largest=1.5))
        names = ("a", "b", "c")
        comm = LocalCommunicator.alone()
        params = [np.zeros(40)] * 3
        state = opt.init(params, comm, names)
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            for step in range(FREEZE + 1):
                grads = [np.full(40, g) for g in (30.0, 1.0 if step < FREEZE else 5.0, 30.0)]
                params, state = opt.step(params, grads, state, comm)
        assert state.numbers["variance_ratio"] < 1.02
        (message,) = [str(w.message) for w in found]
        assert "for 'b' 25 times" in message

    @pytest.mark.parametrize(("overlap", "warned"), [(0.0, False), (0.11, False), (0.12, True)])
    def test_elements_that_swap_magnitudes(self, job, *, overlap, warned):
        """The ratio does not see this: of 1, 9 and 9, 1 the smaller ones add up to 2 and the larger ones to 18."""
        opt = one_bit(betas=(0.8, 0.0), watch=replace(QUIET, overlap=overlap))
        run = job(opt, [np.zeros(8)], 1)
        large = np.tile([1.0, 3.0], 4)
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            for g in [large] * FREEZE + [4 - large] * 2:
                run.step([[g]])
        assert ratio(run) == pytest.approx(1.0)
        assert run.state.numbers["variance_overlap"] == pytest.approx(1 / 9)
        assert len(found) == warned
        if warned:
            assert "the overlap of the frozen and the current variance is 0.111" in str(found[0].message)

    def test_never_with_a_threshold_of_zero(self, job):
        assert self.caught(job, [0.0, 1e6], watch=QUIET) == []

    @pytest.mark.filterwarnings("ignore:all gradients of .* were 0 in the first")
    def test_zero_over_zero_variance_counts_as_a_ratio_of_one(self, job):
        opt = one_bit(betas=(0.8, 0.0), watch=ALL)
        run = job(opt, [np.zeros(8)], 1)
        for _ in range(FREEZE + 2):
            run.step([[np.zeros(8)]])
        assert ratio(run) == 1.0
        with pytest.warns(UserWarning, match="inf times"):
            run.step([[np.ones(8)]])

    def test_elements_that_cannot_move(self, job):
        """Two of eight have their first gradient after the freeze; reported at once, not after a window."""
        opt = one_bit(betas=(0.8, 0.99), watch=replace(VarianceWatch(), every=1))
        run = job(opt, [np.zeros(8)], 1)
        late = np.asarray([1.0] * 6 + [0.0] * 2)
        for _ in range(FREEZE + 3):
            run.step([[late]])
        assert run.state.numbers["variance_stuck"] == 0
        with pytest.warns(UserWarning, match=r"0\.25 of the elements, of '0', cannot move"):
            run.step([[np.ones(8)]])
        assert run.state.numbers["variance_stuck"] == 0.25

    def test_elements_that_had_hardly_a_gradient(self, job):
        """They can move, and do: a hundred times too far in each step."""
        opt = one_bit(betas=(0.8, 0.99), watch=replace(VarianceWatch(), every=1), variance_floor=0.0)
        run = job(opt, [np.zeros(8)], 1)
        tiny = np.asarray([1.0] * 7 + [1e-3])
        for _ in range(FREEZE):
            run.step([[tiny]])
        run.step([[tiny * 99]])
        with pytest.warns(UserWarning, match=r"0\.12 of the elements, of '0', step a hundred times too far"):
            run.step([[np.ones(8)]])

    def test_the_warning_points_to_the_step_of_the_user(self):
        opt, comm = one_bit(betas=(0.8, 0.0), watch=ALL), LocalCommunicator.alone()
        x = np.ones(8)
        state = opt.init(x, comm)
        for _ in range(FREEZE):
            _, state = opt.step(x, x, state, comm)
        with pytest.warns(UserWarning, match="times the frozen one") as found:
            opt.step(x, x * 9, state, comm)
        assert [w.filename for w in found] == [__file__]


REWARMING = replace(ALL, largest=5.0, smallest=0.2, rewarm_steps=REWARM)
LARGER = 8.0
"""The factor by which gradients grow from step CHANGE on; the ratio shows it at most two steps after the window."""
CHANGE = FREEZE + 6


def train(run: Any, grads: Any, first: int, last: int, each: Any = None) -> list[str]:
    """Take steps silently; return the stage before each of them."""
    stages = []
    for step in range(first, last):
        gradients = of_ranks(grads, len(run.states), step, 1.0 if step < CHANGE else LARGER)
        before = (run.state, run.error(), run.params[0])
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "the variance of")
            run.step(gradients)
        stages.append(before[0].stage)
        if each is not None:
            each(before, gradients)
    return stages


def check_identity(job, grads, opt, size):
    """m' + E' = b1 m + (1 - b1) mean_i g_i + E in each step after the freeze, also during the re-warm."""
    run = job(opt, grads(SHAPES, 99, 0, np.float64), size)
    b1, seen = BETAS[0], set()

    def each(before, gradients):
        state, errors, _ = before
        if state.stage == "warmup":
            return
        seen.add(state.stage)
        for i, now in enumerate(run.error()):
            mean = sum(g[i] for g in gradients) / size
            expected = b1 * state.momentum[i] + (1 - b1) * mean + errors[i].reshape(mean.shape)
            got = run.state.momentum[i] + now.reshape(mean.shape)
            assert np.abs(got - expected).max() <= 1e-12 * max(1.0, np.abs(expected).max())

    train(run, grads, 0, CHANGE + 12, each)
    assert seen == {"compressed", "rewarm"}


class TestRewarm:
    @sizes
    def test_a_re_warm_makes_exact_steps_of_adam_and_then_compressed_ones(self, job, grads, size):
        """Bit for bit: the variance continues from the frozen one, and nothing is corrected twice."""
        run = job(one_bit(watch=REWARMING, variance_floor=0.0), grads(SHAPES, 99, 0, np.float64), size)
        (b1, b2), exact = BETAS, []

        def each(before, gradients):
            state, _, params = before
            if state.stage != "rewarm":
                return
            exact.append(state.step)
            for i in range(len(SHAPES)):
                mean = sum([g[i] for g in gradients][1:], gradients[0][i]) / np.float64(size)
                m = b1 * state.momentum[i] + (1 - b1) * mean
                v = b2 * state.variance[i] + (1 - b2) * (mean * mean)
                x = params[i] - 0.01 * ((m / (1 - b1 ** (state.step + 1))) / (np.sqrt(v) + 1e-8))
                assert bits([run.state.momentum[i], run.state.variance[i], run.params[0][i]]) == bits(
                    [m, v, x]
                )

        stages = train(run, grads, 0, CHANGE + 14, each)
        begin = stages.index("rewarm")
        assert CHANGE < begin <= CHANGE + 2
        assert exact == list(range(begin, begin + REWARM))
        assert stages == (
            ["warmup"] * FREEZE
            + ["compressed"] * (begin - FREEZE)
            + ["rewarm"] * REWARM
            + ["compressed"] * (len(stages) - begin - REWARM)
        )
        assert 0.2 < ratio(run) < 5

    @pytest.mark.quick_cases(4)
    @sizes
    @pytest.mark.parametrize("topology", ["two_phase", "all_gather"])
    def test_identity_of_every_step(self, job, grads, size, topology):
        check_identity(
            job, grads, one_bit(watch=REWARMING, averaging=qcomp.Averaging(topology=topology)), size
        )

    def test_residuals_that_are_dropped_are_caught(self, job, grads, monkeypatch):
        advance = OneBitAdam.advance

        def forgetful(self, state, before):
            new = advance(self, state, before)
            return (
                self.enter(new, "compressed")
                if state.stage == "rewarm" and new.stage == "compressed"
                else new
            )

        monkeypatch.setattr(OneBitAdam, "advance", forgetful)
        with pytest.raises(AssertionError):
            check_identity(job, grads, one_bit(watch=REWARMING), 2)

    def test_re_warms_may_repeat(self, job):
        """Gradients that keep growing are followed; each re-warm is reported."""
        opt = one_bit(betas=(0.8, 0.0), watch=replace(ALL, rewarm_steps=2))
        run, stages = job(opt, [np.zeros(8)], 1), []
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            for factor in [1.0] * FREEZE + [1.0, 2.0, 2.0, 2.0, 2.0, 4.0, 4.0, 4.0, 4.0]:
                run.step([[np.full(8, factor)]])
                stages.append(run.state.stage)
        assert [s[0] for s in stages] == list("wwwccrrccrrcc")
        assert len(found) == 2
        assert "makes 2 exact steps and freezes the variance again" in str(found[0].message)
        assert run.state.variance[0].tolist() == [16.0] * 8

    @pytest.mark.quick_cases(2)
    @pytest.mark.parametrize("stop", [FREEZE + 2, CHANGE + 2, CHANGE + 3, CHANGE + 8])
    def test_checkpoints_around_a_re_warm(self, grads, stop):
        """While the watch averages, in the re-warm and after it: the job continues as if it had not stopped."""
        opt = one_bit(watch=REWARMING, exact=qcomp.ExactBelow(20))

        def rank_main(comm):
            def go(params, state, first, last):
                for step in range(first, last):
                    g = of_ranks(grads, comm.size, step, 1.0 if step < CHANGE else LARGER)[comm.rank]
                    params, state = opt.step(params, g, state, comm)
                return params, state

            params = grads(SHAPES, 99, 0, np.float64)
            params, state = go(params, opt.init(params, comm), 0, stop)
            file = io.BytesIO()
            np.savez(file, **opt.state_dict(state))
            file.seek(0)
            loaded = opt.load_state_dict(np.load(file, allow_pickle=False), params, comm)
            ends = [go(params, s, stop, stop + 8) for s in (state, loaded)]
            assert len({repr((s.stage, s.numbers)) for _, s in ends}) == 1
            assert len({repr([bits(p), *map(bits, (s.momentum, s.variance))]) for p, s in ends}) == 1
            kept = [
                bits((*s.exchange.worker, *s.exchange.server, *s.arrays["watched_variance"])) for _, s in ends
            ]
            assert kept[0] == kept[1]
            return state.stage

        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "the variance of")
            stages = run_local(2, rank_main, timeout=30)
        assert set(stages) == {"rewarm" if CHANGE + 2 <= stop <= CHANGE + 3 else "compressed"}

    @pytest.mark.parametrize("bad", [FREEZE + 1, CHANGE + 3])
    def test_a_skipped_step(self, job, grads, bad):
        """With a value that is not finite, under the watch or in a re-warm: the watch keeps nothing of the step."""
        opt = one_bit(watch=REWARMING, nonfinite="skip")
        run, other = (job(opt, grads(SHAPES, 99, 0, np.float64), 2) for _ in range(2))
        for each in (run, other):
            train(each, grads, 0, bad)
        gradients = of_ranks(grads, 2, bad)
        gradients[1][0][0] = np.nan
        run.step(gradients)
        assert [s.skipped for s in run.states] == [1, 1]
        for each in (run, other):
            train(each, grads, bad, CHANGE + 9)
        assert run.fingerprint() == other.fingerprint()
        assert repr(run.state.numbers) == repr(other.state.numbers)

    @pytest.mark.slow
    @pytest.mark.parametrize("hosts", ["aab", "abab"])
    def test_a_re_warm_over_nodes(self, grads, hosts):
        """The same measurements, and a re-warm after which every node still owes what it owed."""
        opts = [
            one_bit(watch=REWARMING, averaging=qcomp.Averaging(topology=topology))
            for topology in ("hierarchical", "two_phase")
        ]

        def rank_main(comm):
            logs = []
            for opt in opts:
                params = grads(SHAPES, 99, 0, np.float64)
                state, log = opt.init(params, comm), []
                for step in range(CHANGE + 8):
                    g = of_ranks(grads, comm.size, step, 1.0 if step < CHANGE else LARGER)[comm.rank]
                    before = state
                    params, state = opt.step(params, g, state, comm)
                    log.append((state.stage, state.numbers.get("variance_ratio", math.nan)))
                    if before.stage == "rewarm":
                        for kind in ("worker", "server"):
                            held = [bits(getattr(s.exchange, kind)) for s in (before, state)]
                            assert held[0] == held[1]
                        loaded = opt.load_state_dict(opt.state_dict(state), params, comm)
                        assert (loaded.stage, repr(loaded.numbers)) == (state.stage, repr(state.numbers))
                logs.append(log)
            assert [stage for stage, _ in logs[0]] == [stage for stage, _ in logs[1]]
            assert "rewarm" in dict(logs[0])
            ratios = [[value for _, value in log] for log in logs]
            assert ratios[0] == pytest.approx(ratios[1], rel=1e-12, nan_ok=True)
            return bits(params)

        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "the variance of")
            first, *others = run_local(len(hosts), rank_main, hosts=hosts, timeout=60)
        assert all(other == first for other in others)

    def test_only_with_a_watch(self):
        opt = one_bit(watch=None)
        state = opt.initial_state([np.zeros(8)], ("0",), 0, 1)
        with pytest.raises(ValueError, match="stage is 'rewarm'; OneBitAdam has only 'warmup'"):
            opt.enter(state, "rewarm")


class TestArguments:
    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ({"largest": 1.0}, "largest is 1.0; expected a number above 1"),
            ({"largest": math.nan}, "largest is nan; expected a number above 1"),
            ({"smallest": 1.0}, "smallest is 1.0; expected from 0 to below 1"),
            ({"smallest": -0.1}, "smallest is -0.1"),
            ({"stuck": 0.0}, "stuck is 0.0; expected above 0 and at most 1"),
            ({"overlap": 1.5}, "overlap is 1.5; expected from 0 to below 1"),
            ({"rewarm_steps": -1}, "rewarm_steps is -1; expected an integer, at least 0"),
            ({"sample": 0}, "sample is 0; expected an integer, at least 1"),
            ({"every": 1.5}, "every is 1.5; expected an integer, at least 1"),
        ],
    )
    def test_out_of_range(self, arguments, message):
        with pytest.raises(ValueError, match=message):
            VarianceWatch(**arguments)

    def test_the_ranks_must_agree(self):
        def rank_main(comm):
            with pytest.raises(qcomp.MismatchError, match=r"settings\.watch is"):
                one_bit(watch=[QUIET, None][comm.rank]).init(np.zeros(8), comm)

        run_local(2, rank_main, timeout=20)


class TestEarlyFreeze:
    """A variance from a few squares is too small somewhere, by chance."""

    @pytest.mark.parametrize("make", [qcomp.OneBitAdam, qcomp.QAdam])
    @pytest.mark.parametrize(
        ("freeze", "beta2", "warned"),
        [(99, 0.999, True), (100, 0.999, False), (9, 0.99, True), (10, 0.99, False), (1, 0.9, False)],
    )
    def test_an_early_freeze_warns_at_init(self, *, make, freeze, beta2, warned):
        opt = make(learning_rate=0.1, betas=(0.9, beta2), freeze=freeze, exact=None)
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            opt.init(np.zeros(8), LocalCommunicator.alone())
        assert len(found) == warned
        if warned:
            window = round(1 / (1 - beta2))
            assert f"frozen after {freeze} steps, but averages over 1 / (1 - b2) = {window}" in str(
                found[0].message
            )
            assert make.__name__ in str(found[0].message)
            assert found[0].filename == __file__

    def test_rules_are_trusted(self):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            qcomp.OneBitAdam(learning_rate=0.1, exact=None).init(np.zeros(8), LocalCommunicator.alone())


WATCHES = {"none": None, "all": ALL, "few": replace(ALL, sample=20), "default": VarianceWatch()}
NEXT = dict(zip(WATCHES, [*list(WATCHES)[1:], "none"], strict=True))
PAIRS = [
    pytest.param(
        WATCHES[first],
        WATCHES[second],
        id=f"{first}-{second}",
        marks=[] if second == NEXT[first] else [pytest.mark.slow],
    )
    for first in WATCHES
    for second in WATCHES
]
"""A watch before a stop and one after it; in the quick run each watch occurs once before and once after."""


class TestOtherCheckpoints:
    """What a watch keeps is not part of the algorithm: a state resumes with another watch, or with none."""

    @pytest.mark.quick_cases(1)
    @pytest.mark.parametrize("size", [*(pytest.param(n, marks=pytest.mark.exhaustive) for n in (1, 2)), 3])
    @pytest.mark.parametrize("stop", [pytest.param(FREEZE, marks=pytest.mark.exhaustive), FREEZE + 3])
    @pytest.mark.parametrize(("first", "second"), PAIRS)
    def test_with_another_watch_the_steps_are_the_same(self, grads, first, second, stop, size):
        opts = [
            replace(one_bit(), watch=watch and replace(watch, largest=math.inf)) for watch in (first, second)
        ]

        def rank_main(comm):
            params = grads(SHAPES, 99, 0, np.float64)
            state = opts[0].init(params, comm)
            for step in range(stop):
                params, state = opts[0].step(params, of_ranks(grads, size, step)[comm.rank], state, comm)
            saved = opts[0].state_dict(state)
            dicts = [saved, [saved]]
            ends = []
            for each in [None, *dicts]:
                opt, p, s = opts[0], params, state
                if each is not None:
                    opt = opts[1]
                    s = opt.load_state_dict(each, params, comm, strict=False)
                for step in range(stop, stop + 12):
                    p, s = opt.step(p, of_ranks(grads, size, step)[comm.rank], s, comm)
                if each is not None and second is not None:
                    assert not math.isnan(s.numbers["variance_ratio"])
                ends.append(bits([*p, *s.momentum, *s.exchange.worker]))
            return all(end == ends[0] for end in ends)

        assert run_local(size, rank_main, timeout=30) == [True] * size

    def test_a_saved_watch_continues(self, grads):
        """It does not start anew; the test above would not notice that."""
        opt, comm = one_bit(watch=ALL), LocalCommunicator.alone()
        params = grads(SHAPES, 99, 0, np.float64)
        state = opt.init(params, comm)
        for step in range(FREEZE + 2):
            params, state = opt.step(params, of_ranks(grads, 1, step)[0], state, comm)
        loaded = opt.load_state_dict(opt.state_dict(state), params, comm)
        assert loaded.numbers["watch_measured"] == 2
        assert bits(loaded.arrays["watched_variance"]) == bits(state.arrays["watched_variance"])
