"""The watch on a frozen variance: what it measures, what it costs, and the re-warm that it may ask for."""

import io
import math
import warnings
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import qcomp
from qcomp import VarianceWatch
from qcomp.comm import LocalCommunicator, run_local
from qcomp.core.optimizers.frozen_adam import FrozenVarianceAdam

SHAPES = [(40,), (3, 11), (7,)]
FREEZE, REWARM, BETAS = 4, 3, (0.8, 0.75)
WINDOW = 4
SIGN = qcomp.ScaledSign(bucket_size=16)
QUIET = VarianceWatch(threshold=0.0)


def one_bit(**changes: Any) -> qcomp.OneBitAdam:
    settings = {"learning_rate": 0.01, "betas": BETAS, "freeze": FREEZE, "exact": None, "compressor": SIGN}
    return qcomp.OneBitAdam(**{**settings, "watch": QUIET, **changes})


KINDS = {
    "1-bit": one_bit(),
    "1-bit all-gather": one_bit(topology="all_gather"),
    "1-bit some exact": one_bit(exact=qcomp.ExactBelow(20)),
    "1-bit clipped and decayed": one_bit(clip_norm=3.0, weight_decay=0.1, decoupled_weight_decay=False),
    "qadam": qcomp.QAdam(
        learning_rate=0.01,
        betas=BETAS,
        freeze=FREEZE,
        exact=None,
        compressor=qcomp.MinMaxUInt8(16),
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
    @kinds
    @sizes
    @pytest.mark.parametrize("every", [1, 3])
    def test_the_average_of_the_squares_over_the_frozen_variance(self, job, grads, name, size, every):
        """Of all elements of compressed tensors, since the sample has room for them; in NumPy, another way."""
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

    @sizes
    def test_steady_gradients_keep_it_at_one(self, job, size):
        """And twice as large ones bring it to four, of which the window of the average decides how soon."""
        run = job(one_bit(exact=qcomp.ExactBelow(20)), [np.zeros((5, 8)), np.zeros(3)], size)
        for step in range(FREEZE + 40):
            g = 2.0 if step >= FREEZE + 10 else 1.0
            run.step([[np.full((5, 8), g * (rank + 1)), np.full(3, 1e9)] for rank in range(size)])
            if FREEZE + WINDOW <= run.state.step <= FREEZE + 10:
                assert ratio(run) == pytest.approx(1.0, rel=1e-12)
        left = BETAS[1] ** 30
        assert ratio(run) == pytest.approx(4.0, rel=left)

    def test_a_sample_in_equal_odd_steps(self):
        tensors = [np.arange(1000.0).reshape(10, 100), np.arange(50.0), np.arange(1000.0, 1501.0)]
        for room, stride in [(4096, 1), (1501, 1), (1500, 3), (500, 5), (151, 11), (7, 215), (1, 1501)]:
            sample = VarianceWatch(sample=room).take(tensors, (False, True, False))
            assert sample.tolist() == list(range(0, 1501, stride))
            assert len(sample) <= room

    def test_weights_of_the_sample(self):
        sample = VarianceWatch(sample=4).take([np.ones(5), np.ones(3)], (False, False), [2.0, 3.0])
        assert sample.tolist() == [2.0, 2.0, 3.0]

    @kinds
    def test_changes_nothing_else(self, job, grads, name):
        runs = [job(replace(KINDS[name], watch=w), grads(SHAPES, 99, 0), 2) for w in (None, QUIET)]
        for step in range(FREEZE + 8):
            for run in runs:
                run.step(of_ranks(grads, 2, step, dtype=np.float32))
            assert runs[0].fingerprint() == runs[1].fingerprint()
        assert runs[0].state.numbers == {}
        assert runs[0].state.arrays == {}

    @pytest.mark.parametrize("every", [1, 4])
    @pytest.mark.parametrize("size", [2, 4])
    def test_bytes(self, size, every):
        """Four an element of the sample, to and from the servers, in the messages that there are already."""
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

        more = sent_by(VarianceWatch(0.0, sample=1024, every=every)) - sent_by(None)
        # The sample has 4096 / 5 = 820 elements, in chunks for each rank; a verdict of 8 bytes is in each message.
        peers, longest = size - 1, -(-820 // size)
        assert (more[:, :FREEZE] == 0).all()
        assert (more[:, FREEZE::every] == more[:, FREEZE : FREEZE + 1]).all()
        for step in range(FREEZE, FREEZE + 8):
            assert more[:, step].sum() == pytest.approx(
                0 if step % every else 2 * peers * (820 * 4 + size * 8), abs=2 * size * peers * 8
            )
        assert more.max() <= 2 * peers * (4 * longest + 16)

    def test_nothing_to_watch(self, job, grads):
        with pytest.warns(UserWarning, match="compresses nothing"):
            run = job(one_bit(exact=qcomp.ExactBelow(10_000)), grads(SHAPES, 99, 0), 2)
        for step in range(FREEZE + 3):
            run.step(of_ranks(grads, 2, step, dtype=np.float32))
        assert math.isnan(ratio(run))

    def test_in_half_precision(self, libraries, lockstep):
        """Squares of what float16 cannot hold: they are float32, as the variance is."""
        x = libraries["numpy"].array(np.ones(16), np.float16)
        opt = one_bit()
        params, state = [x], opt.start([x], ("0",), rank=0, size=1)
        for _ in range(FREEZE + WINDOW):
            ((params, state),) = lockstep([opt.stages(params, [x * np.float16(1e-3)], state)])
        assert state.numbers["variance_ratio"] == pytest.approx(1.0, rel=1e-5)

    def test_in_every_library(self, library, lockstep, grads):
        """The same ratio to the last bit."""
        opt = one_bit(compressor=qcomp.Identity(), freeze=1, betas=(0.8, 0.5))
        start, steps = grads([(20,)], 99, 0), [grads([(20,)], 0, step) for step in range(3)]

        def train(convert):
            params = [convert(p) for p in start]
            state = opt.start(params, ("0",), rank=0, size=1)
            for g in steps:
                ((params, state),) = lockstep([opt.stages(params, [convert(x) for x in g], state)])
            return repr(state.numbers["variance_ratio"])

        assert train(library.array) == train(np.array) != repr(math.nan)


class TestWarns:
    @staticmethod
    def caught(job, factors: list[float], **changes: Any) -> list[str]:
        """Return the warnings of a run in which the frozen gradients of 1 change by these factors."""
        run = job(one_bit(betas=(0.8, 0.0), **changes), [np.zeros(8)], 2)
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            for factor in [1.0] * FREEZE + factors:
                run.step([[np.full(8, factor)]] * 2)
        return [str(w.message) for w in found]

    @pytest.mark.parametrize(("factor", "warned"), [(0.72, 0), (1.4, 0), (0.7, 1), (1.42, 1), (0.0, 1)])
    def test_in_either_direction(self, job, factor, warned):
        """The variance is the square: below half of it or above twice."""
        assert len(self.caught(job, [factor], watch=VarianceWatch())) == 2 * warned

    def test_once_on_each_rank(self, job):
        found = self.caught(job, [1.0, 3.0, 1.0, 3.0], watch=VarianceWatch())
        assert len(found) == 2
        for words in (
            "OneBitAdam is 9 times the frozen one at step 6",
            "expected at least 0.5",
            "VarianceWatch",
        ):
            assert words in found[0]

    @pytest.mark.parametrize(("overlap", "warned"), [(0.0, False), (0.11, False), (0.12, True)])
    def test_elements_that_change_places(self, job, *, overlap, warned):
        """The ratio sees nothing of it: of 1, 9 and 9, 1 the smaller ones are 2 and the larger ones 18."""
        opt = one_bit(betas=(0.8, 0.0), watch=VarianceWatch(overlap=overlap))
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
            assert "with an overlap of 0.111; expected" in str(found[0].message)

    def test_never_with_a_threshold_of_zero(self, job):
        assert self.caught(job, [0.0, 1e6], watch=QUIET) == []

    def test_variances_of_zero_are_alike(self, job):
        opt = one_bit(betas=(0.8, 0.0), watch=VarianceWatch())
        run = job(opt, [np.zeros(8)], 1)
        for _ in range(FREEZE + 2):
            run.step([[np.zeros(8)]])
        assert ratio(run) == 1.0
        with pytest.warns(UserWarning, match="inf times"):
            run.step([[np.ones(8)]])

    def test_where_the_user_made_the_step(self):
        opt, comm = one_bit(betas=(0.8, 0.0), watch=VarianceWatch()), LocalCommunicator.alone()
        x = np.ones(8)
        state = opt.init(x, comm)
        for _ in range(FREEZE):
            _, state = opt.step(x, x, state, comm)
        with pytest.warns(UserWarning, match="times the frozen one") as found:
            opt.step(x, x * 9, state, comm)
        assert [w.filename for w in found] == [__file__]


REWARMING = VarianceWatch(threshold=0.2, rewarm_steps=REWARM)
LARGER = 8.0
"""What the gradients grow by from step CHANGE on; the ratio sees that two steps after the window at the latest."""
CHANGE = FREEZE + 6


def train(run: Any, grads: Any, first: int, last: int, each: Any = None) -> list[str]:
    """Make steps, silently; return the stage before each of them."""
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
    """m' + E' = b1 m + (1 - b1) mean_i g_i + E in each step after the freeze, those of the re-warm too."""
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
    def test_so_many_exact_steps_of_adam_and_then_compressed_ones(self, job, grads, size):
        """Bit for bit: the variance goes on from the frozen one, and nothing is corrected twice."""
        run = job(one_bit(watch=REWARMING), grads(SHAPES, 99, 0, np.float64), size)
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

    @sizes
    @pytest.mark.parametrize("topology", ["two_phase", "all_gather"])
    def test_identity_of_every_step(self, job, grads, size, topology):
        check_identity(job, grads, one_bit(watch=REWARMING, topology=topology), size)

    def test_residuals_that_are_dropped_are_caught(self, job, grads, monkeypatch):
        rewarmed = FrozenVarianceAdam._rewarmed

        def forgetful(self, state):
            new = rewarmed(self, state)
            return self.enter(new, "compressed") if new.stage == "compressed" else new

        monkeypatch.setattr(FrozenVarianceAdam, "_rewarmed", forgetful)
        with pytest.raises(AssertionError):
            check_identity(job, grads, one_bit(watch=REWARMING), 2)

    def test_again_and_again(self, job):
        """Gradients that keep growing are followed; each time it is said."""
        opt = one_bit(betas=(0.8, 0.0), watch=VarianceWatch(rewarm_steps=2))
        run, stages = job(opt, [np.zeros(8)], 1), []
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            for factor in [1.0] * FREEZE + [1.0, 2.0, 2.0, 2.0, 2.0, 4.0, 4.0, 4.0, 4.0]:
                run.step([[np.full(8, factor)]])
                stages.append(run.state.stage)
        assert [s[0] for s in stages] == list("wwwccrrccrrcc")
        assert len(found) == 2
        assert "makes 2 exact steps and freezes it again" in str(found[0].message)
        assert run.state.variance[0].tolist() == [16.0] * 8

    @pytest.mark.parametrize("stop", [FREEZE + 2, CHANGE + 2, CHANGE + 3, CHANGE + 8])
    def test_a_checkpoint_on_the_way(self, grads, stop):
        """While the watch averages, in the re-warm and after it: on as if there had been no stop."""
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
    def test_a_step_that_is_left_out(self, job, grads, bad):
        """A value that is not finite, watched or in a re-warm: the watch remembers nothing of it."""
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

    @pytest.mark.parametrize("hosts", ["aab", "abab"])
    def test_over_nodes(self, grads, hosts):
        """The same measurements, and a re-warm after which every node still owes what it owed."""
        opts = [one_bit(watch=REWARMING, topology=topology) for topology in ("hierarchical", "two_phase")]

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
        state = opt.start([np.zeros(8)], ("0",), 0, 1)
        with pytest.raises(ValueError, match="stage is 'rewarm'; OneBitAdam has only 'warmup'"):
            opt.enter(state, "rewarm")


class TestArguments:
    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ({"threshold": 1.0}, "threshold is 1.0; expected from 0 to below 1"),
            ({"threshold": -0.1}, "threshold is -0.1"),
            ({"overlap": 1.5}, "overlap is 1.5; expected from 0 to below 1"),
            ({"rewarm_steps": -1}, "rewarm_steps is -1; expected an integer, at least 0"),
            ({"sample": 0}, "sample is 0; expected an integer, at least 1"),
            ({"every": 1.5}, "every is 1.5; expected an integer, at least 1"),
        ],
    )
    def test_out_of_range(self, arguments, message):
        with pytest.raises(ValueError, match=message):
            VarianceWatch(**arguments)

    def test_rarer_than_the_window(self):
        with pytest.raises(ValueError, match="watch measures in every 5 steps; expected at most the 4"):
            one_bit(watch=VarianceWatch(every=5))

    def test_the_ranks_must_agree(self):
        def rank_main(comm):
            with pytest.raises(qcomp.MismatchError, match=r"settings\.watch is"):
                one_bit(watch=[QUIET, None][comm.rank]).init(np.zeros(8), comm)

        run_local(2, rank_main, timeout=20)


class TestEarlyFreeze:
    """A variance of a few squares is by chance too small somewhere."""

    @pytest.mark.parametrize("make", [qcomp.OneBitAdam, qcomp.QAdam])
    @pytest.mark.parametrize(
        ("freeze", "beta2", "warned"),
        [(99, 0.999, True), (100, 0.999, False), (9, 0.99, True), (10, 0.99, False), (1, 0.9, False)],
    )
    def test_is_warned_of_at_init(self, *, make, freeze, beta2, warned):
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
