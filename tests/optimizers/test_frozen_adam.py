"""1-bit Adam and QAdam as state machines: the warm-up, the freeze, the compressed stage."""

import math
import warnings
from dataclasses import replace
from typing import ClassVar

import numpy as np
import pytest

import qcomp
from qcomp import FreezeAt, VarianceStable
from qcomp.comm import LocalCommunicator, run_local
from qcomp.core.optimizers.onebit_adam import OneBitAdam
from qcomp.core.variance.rules import Observation

SHAPES = [(40,), (3, 11), (7,)]
SIZES = [1, 2, 3]
SIGN, MINMAX = qcomp.ScaledSign(bucket_size=16), qcomp.MinMaxUInt8(bucket_size=16)
FREEZE = 4


def one_bit(**changes) -> qcomp.OneBitAdam:
    return qcomp.OneBitAdam(
        **{
            "learning_rate": 0.01,
            "betas": (0.8, 0.9),
            "freeze": FREEZE,
            "exact": None,
            "compressor": SIGN,
            "variance_floor": 0.0,
            **changes,
        }
    )


def qadam(**changes) -> qcomp.QAdam:
    return qcomp.QAdam(
        **{
            "learning_rate": 0.01,
            "betas": (0.8, 0.9),
            "freeze": FREEZE,
            "exact": None,
            "compressor": MINMAX,
            "variance_floor": 0.0,
            "variance_steps": None,
            **changes,
        }
    )


OPTIMIZERS = [
    one_bit(),
    one_bit(compressor=qcomp.ScaledSign(16, "rms"), weight_decay=0.1, clip_norm=3.0),
    one_bit(averaging=qcomp.Averaging(topology="all_gather")),
    qadam(),
    qadam(averaging=qcomp.Averaging(feedback=False)),
    qadam(compressor=qcomp.QSGD(7, 16), seed=5),
    one_bit(exact=qcomp.ExactBelow(20)),
    qadam(exact=qcomp.ExactBelow(20), averaging=qcomp.Averaging(topology="all_gather")),
]
optimizers = pytest.mark.parametrize(
    "opt",
    OPTIMIZERS,
    ids=lambda o: (
        f"{type(o).__name__}-{o.compressor.name}-{o.mean.topology}-{o.mean.feedback}-{bool(o.exact)}"
    ),
)


def adam_like(opt: OneBitAdam) -> qcomp.Adam:
    return qcomp.Adam(
        learning_rate=opt.learning_rate,
        betas=opt.betas,
        eps=opt.eps,
        weight_decay=opt.weight_decay,
        clip_norm=opt.clip_norm,
    )


def of_ranks(grads, size, step, dtype=np.float32):
    return [grads(SHAPES, rank, step, dtype) for rank in range(size)]


def bits(arrays) -> list[bytes]:
    return [np.asarray(a).tobytes() for a in arrays]


class TestWarmup:
    @pytest.mark.quick_cases(6)
    @optimizers
    @pytest.mark.parametrize("size", SIZES)
    def test_is_adam_bit_for_bit_and_the_next_step_is_compressed(self, job, grads, opt, size):
        params = grads(SHAPES, 99, 0)
        frozen, plain = job(opt, params, size), job(adam_like(opt), params, size)
        for step in range(FREEZE):
            assert frozen.state.stage == "warmup"
            frozen.step(of_ranks(grads, size, step))
            plain.step(of_ranks(grads, size, step))
            assert bits(frozen.params[0]) == bits(plain.params[0])
            assert bits(frozen.state.momentum) == bits(plain.state.momentum)
        assert frozen.state.stage == "compressed"
        assert frozen.state.step == FREEZE
        # The next step is no longer Adam's; Job.step has compared the ranks.
        frozen.step(of_ranks(grads, size, FREEZE))
        plain.step(of_ranks(grads, size, FREEZE))
        assert bits(frozen.state.momentum) != bits(plain.state.momentum)

    def test_bytes_show_which_steps_are_compressed(self):
        opt, x = one_bit(), np.ones(4096, dtype=np.float32)

        def rank_main(comm):
            state, params, sent = opt.init(x, comm), x, []
            for _ in range(6):
                before = comm.bytes_sent
                params, state = opt.step(params, x * (comm.rank + 1), state, comm)
                sent.append(comm.bytes_sent - before)
            return sent

        exact, compressed = 4096 * 4 + 2 * 8, 4096 // 8 + 4096 // 16 * 4 + 2 * 8
        # The first step also compares gradients, and the one that freezes the variance what the ranks share.
        warmup = [exact + 4] + [exact] * (FREEZE - 2) + [exact + 8]
        assert run_local(2, rank_main) == [warmup + [compressed] * 2] * 2

    def test_a_freeze_after_the_first_step(self, job, grads):
        run = job(one_bit(freeze=1, variance_floor=0.0), grads(SHAPES, 99, 0), 2)
        run.step(of_ranks(grads, 2, 0))
        assert run.state.stage == "compressed"
        expected = [((a + b) / np.float32(2)) ** 2 for a, b in zip(*of_ranks(grads, 2, 0), strict=True)]
        for got, want in zip(run.state.variance, expected, strict=True):
            assert got == pytest.approx(want, rel=1e-5)


class TestCompressedStage:
    @pytest.mark.quick_cases(2)
    @optimizers
    @pytest.mark.parametrize("size", SIZES)
    def test_the_corrected_variance_is_constant_for_ever(self, job, grads, opt, size):
        run = job(opt, grads(SHAPES, 99, 0), size)
        plain = job(adam_like(opt), grads(SHAPES, 99, 0), size)
        for step in range(FREEZE):
            run.step(of_ranks(grads, size, step))
            plain.step(of_ranks(grads, size, step))
        expected = [v / (1 - 0.9**FREEZE) for v in plain.state.variance]
        for step in range(FREEZE, FREEZE + 8):
            assert bits(run.state.variance) == bits(expected)
            run.step(of_ranks(grads, size, step))
            assert run.state.stage == "compressed"
        assert bits(run.state.variance) == bits(expected)

    def test_the_residuals_start_at_zero_at_the_freeze(self, job, grads):
        run = job(one_bit(), grads(SHAPES, 99, 0), 2)
        for step in range(FREEZE):
            assert run.state.exchange.worker == run.state.exchange.server == ()
            run.step(of_ranks(grads, 2, step))
        assert [r.shape for r in run.state.exchange.worker] == [(40,), (33,), (7,)]
        assert all((r == 0).all() for s in run.states for r in (*s.exchange.worker, *s.exchange.server))
        run.step(of_ranks(grads, 2, FREEZE))
        assert all((r != 0).any() for s in run.states for r in s.exchange.worker)
        assert any((r != 0).any() for s in run.states for r in s.exchange.server)

    @staticmethod
    def check_identity(job, grads, opt, size):
        """In every step m' + E' = b1 m + (1 - b1) mean_i g_i + E, with E = mean_i e_i + e_s; zero for exact tensors."""
        dtype = np.float64
        run = job(opt, grads(SHAPES, 99, 0, dtype), size)
        for step in range(FREEZE):
            run.step(of_ranks(grads, size, step, dtype))
        beta1 = opt.betas[0]

        def momentum_and_error():
            errors = iter(run.error())
            return [
                (m, 0.0 if exact else next(errors, np.zeros(m.size)).reshape(m.shape))
                for m, exact in zip(run.state.momentum, run.state.exact, strict=True)
            ]

        for step in range(FREEZE, FREEZE + 10):
            before = momentum_and_error()
            gradients = of_ranks(grads, size, step, dtype)
            run.step(gradients)
            for i, ((m, e), (new_m, new_e)) in enumerate(zip(before, momentum_and_error(), strict=True)):
                mean = sum(g[i] for g in gradients) / size
                expected = beta1 * m + (1 - beta1) * mean + e
                scale = max(np.abs(new_m).max(), np.abs(new_e).max(), np.abs(expected).max())
                assert np.abs(new_m + new_e - expected).max() <= 1e-12 * scale

    @pytest.mark.quick_cases(2)
    @pytest.mark.parametrize(
        "opt",
        [o for o in OPTIMIZERS if o.mean.feedback and o.clip_norm is None],
        ids=lambda o: f"{o.compressor}-{o.mean.topology}",
    )
    @pytest.mark.parametrize("size", SIZES)
    def test_identity_of_every_step(self, job, grads, opt, size):
        self.check_identity(job, grads, opt, size)

    def test_ranks_with_momenta_of_their_own_are_caught(self, job, grads, monkeypatch):
        """If a rank kept what it sent instead of what all received, the ranks would drift apart."""
        apply = OneBitAdam.apply

        def selfish(self, params, means, state):
            new_params, new = apply(self, params, means, state)
            own = tuple(m + state.rank * 1e-7 for m in new.momentum)
            return new_params, new._replace(momentum=own)

        monkeypatch.setattr(OneBitAdam, "apply", selfish)
        run = job(one_bit(), grads(SHAPES, 99, 0), 2)
        with pytest.raises(AssertionError):
            run.step(of_ranks(grads, 2, 0))

    def test_residuals_of_a_mean_without_feedback_break_the_identity(self, job, grads):
        with pytest.raises(AssertionError):
            self.check_identity(
                job, grads, replace(OPTIMIZERS[0], averaging=qcomp.Averaging(feedback=False)), 2
            )

    @pytest.mark.parametrize("decay", [0.0, 0.1])
    def test_a_world_of_one_without_compression_is_the_plain_optimizer(self, job, grads, decay):
        """Momentum over the root of the frozen variance, bit for bit."""
        opt = one_bit(compressor=qcomp.Identity(), weight_decay=decay)
        run = job(opt, grads(SHAPES, 99, 0), 1)
        for step in range(FREEZE):
            run.step(of_ranks(grads, 1, step))
        params, m, v = run.params[0], list(run.state.momentum), run.state.variance
        for step in range(FREEZE, FREEZE + 8):
            gradients = grads(SHAPES, 0, step)
            run.step([gradients])
            for i, g in enumerate(gradients):
                m[i] = 0.8 * m[i] + (1 - 0.8) * g
                direction = (m[i] / (1 - 0.8 ** (step + 1))) / (np.sqrt(v[i]) + opt.eps)
                if decay:
                    direction = direction + decay * params[i]
                params = [*params[:i], params[i] - 0.01 * direction, *params[i + 1 :]]
            assert bits(run.params[0]) == bits(params)
            assert bits(run.state.momentum) == bits(m)

    @pytest.mark.filterwarnings("ignore:all . ranks have the same gradients")
    def test_two_ranks_with_the_same_data_equal_one_rank(self, job, grads):
        """Exact for powers of two, if nothing is lost."""
        opt = one_bit(compressor=qcomp.Identity())
        one, two = (job(opt, grads(SHAPES, 99, 0), size) for size in (1, 2))
        for step in range(FREEZE + 4):
            one.step([grads(SHAPES, 0, step)])
            two.step([grads(SHAPES, 0, step)] * 2)
        assert bits(one.params[0]) == bits(two.params[0])

    @pytest.mark.parametrize("topology", ["two_phase", "all_gather"])
    def test_exact_tensors_stay_exact(self, job, grads, topology):
        """Their momentum is that of the exact mean, independent of other tensors; their variance is frozen too."""
        some = one_bit(exact=qcomp.ExactBelow(20), averaging=qcomp.Averaging(topology=topology))
        all_of_them = one_bit(compressor=qcomp.Identity(), averaging=qcomp.Averaging(topology=topology))
        runs = [job(opt, grads(SHAPES, 99, 0), 3) for opt in (some, all_of_them)]
        # A vector among other tensors is a norm or a bias: only the matrix is compressed.
        assert runs[0].state.exact == (True, False, True)
        for step in range(FREEZE + 6):
            for run in runs:
                run.step(of_ranks(grads, 3, step))
            for i in (0, 2):
                for name in ("momentum", "variance"):
                    assert bits([getattr(runs[0].state, name)[i]]) == bits([getattr(runs[1].state, name)[i]])
                assert bits([runs[0].params[0][i]]) == bits([runs[1].params[0][i]])
        assert bits([runs[0].params[0][1]]) != bits([runs[1].params[0][1]])
        assert len(runs[0].state.exchange.worker) == 1

    @pytest.mark.parametrize("make", [one_bit, qadam])
    @pytest.mark.parametrize("size", [1, 3])
    def test_elements_that_never_had_a_gradient_do_not_move(self, job, grads, make, size):
        """One bit cannot represent zero: unmasked, an unused row would drift by a scale over eps in every step."""
        used = np.asarray([0, 2, 3])

        def sparse(rank, step):
            g = grads([(5, 8)], rank, step)[0]
            g[[1, 4]] = 0
            return [g]

        start = grads([(5, 8)], 99, 0)
        run = job(make(), start, size)
        for step in range(FREEZE + 10):
            before = run.params[0][0]
            run.step([sparse(rank, step) for rank in range(size)])
            now = run.params[0][0]
            assert (now[used] != before[used]).all()
            assert now[[1, 4]].tobytes() == start[0][[1, 4]].tobytes()
            assert (run.state.momentum[0][[1, 4]] == 0).all()
            assert (run.state.momentum[0][used] != 0).all()

    def test_seed_and_step_determine_the_draws(self, job, grads):
        finals = []
        for seed in (0, 0, 1):
            run = job(
                qadam(compressor=qcomp.QSGD(1, 16), averaging=qcomp.Averaging(feedback=False), seed=seed),
                grads(SHAPES, 99, 0),
                2,
            )
            for step in range(FREEZE + 3):
                run.step(of_ranks(grads, 2, step))
            finals.append(run.fingerprint())
        assert finals[0] == finals[1] != finals[2]


class TestFreeze:
    @pytest.mark.parametrize(
        ("beta2", "expected"), [(0.97, 125), (0.99, 378), pytest.param(0.999, 3783, marks=pytest.mark.slow)]
    )
    def test_stationary_gradients_freeze_at_the_predicted_step(self, lockstep, beta2, expected):
        """The first t with (1 - b2^(t-d)) / (1 - b2^t) >= 0.96, d = round(1 / (1 - b2))."""
        delay = round(1 / (1 - beta2))
        predicted = next(
            t for t in range(delay + 1, 9999) if (1 - beta2 ** (t - delay)) / (1 - beta2**t) >= 0.96
        )
        assert predicted == expected
        opt = one_bit(betas=(0.9, beta2), freeze=VarianceStable(0.96), variance_floor=0)
        params, g = [np.zeros(8)], [np.linspace(-1, 2, 8)]
        state = opt.initial_state(params, ("0",), rank=0, size=1)
        while state.stage == "warmup":
            ((params, state),) = lockstep([opt.stages(params, g, state)])
            assert len(state.history) <= delay + 1
        assert state.step == expected
        assert state.history == ()
        assert state.variance[0] == pytest.approx(g[0] ** 2, rel=1e-9)

    def test_in_float32_over_several_tensors_and_ranks(self, job):
        """Every rank decides from the same bits, at the same step."""
        run = job(
            one_bit(betas=(0.9, 0.97), freeze=VarianceStable(0.96)),
            [np.zeros(s, np.float32) for s in SHAPES],
            2,
        )
        g = [[np.full(s, v, np.float32) for s in SHAPES] for v in (1.0, 3.0)]
        while run.state.stage == "warmup":
            run.step(g)
        assert run.state.step == 125

    @staticmethod
    def freezes_at(rule: VarianceStable, norms, beta2: float) -> int | None:
        history: tuple[float, ...] = ()
        for step, value in enumerate(norms, 1):
            verdict = rule.observe(step, lambda value=value: value, history, beta2)  # type: ignore[misc]  # a lambda's default
            history = verdict.history
            if verdict.frozen:
                return step
        return None

    def test_a_shrinking_variance_settles_like_a_growing_one(self):
        """A change of 3% in d steps counts as settled, one of 10% does not, in either direction."""
        rule, delay = VarianceStable(0.96), 10
        soonest = 37  # the first t with 1 - .9^(t-10) >= .96 (1 - .9^t)
        for factor, settled in [(0.97, True), (1 / 0.97, True), (0.9, False), (1 / 0.9, False), (1.0, True)]:
            norms = [factor ** (t / delay) for t in range(100)]
            assert self.freezes_at(rule, norms, 0.9) == (soonest if settled else None)
        # First it falls, to 1 after 50 steps. Settled ten steps later, and frozen after ten more.
        falling = [2.0 ** max(0.0, 5 - t / 10) for t in range(100)]
        crossing = next(t for t in range(10, 100) if falling[t] >= 0.96 * falling[t - 10])
        assert self.freezes_at(rule, falling, 0.9) == crossing + delay

    @staticmethod
    def crossing() -> list[float]:
        """Return norms that rise and fall, and for a few steps equal those of ten steps before."""
        return [math.exp(-(((t - 55) / 30) ** 2)) for t in range(111)]

    def test_norms_that_rise_and_fall_do_not_count(self):
        norms = self.crossing()
        ratios = [min(x, y) / max(x, y) for x, y in zip(norms, norms[10:], strict=False)]
        assert max(ratios) > 0.999
        assert self.freezes_at(VarianceStable(), norms, 0.9) is None

    def test_a_rule_that_compares_only_once_is_caught(self, monkeypatch):
        def hasty(self, step, norm, history, beta2):
            history = (*history, norm())[-11:]
            settled = len(history) > 10 and min(history[0], history[-1]) >= 0.96 * max(
                history[0], history[-1]
            )
            return Observation(settled, history)

        monkeypatch.setattr(VarianceStable, "observe", hasty)
        with pytest.raises(AssertionError):
            self.test_norms_that_rise_and_fall_do_not_count()

    COURSES: ClassVar = {
        "halves every 0.6 windows": lambda w: 2 ** (-w / 0.6),
        "halves every 2 windows": lambda w: 2 ** (-w / 2),
        "a bump": lambda w: 8 * math.exp(-(((w - 0.6) / 0.25) ** 2)) + 0.05,
        "1/sqrt(t)": lambda w: (1 + 20 * w) ** -0.5,
        "doubles every 2 windows": lambda w: 2 ** (w / 2),
        "zero at first": lambda w: float(w >= 2),
    }

    @pytest.mark.quick_cases(4)
    @pytest.mark.parametrize("name", COURSES)
    @pytest.mark.filterwarnings("ignore:nothing is compressed yet")
    def test_not_while_the_variance_changes(self, job, name):
        """After the two raw norms cross, after one to two windows, the variance falls threefold in the next window."""
        beta2, delay, course = 0.95, 20, self.COURSES[name]
        run = job(
            one_bit(betas=(0.9, beta2), freeze=VarianceStable(), exact=None, watch=None), [np.zeros(8)], 1
        )
        corrected, raw = [], 0.0
        for step in range(30 * delay):
            gradient = course(step / delay)
            raw = beta2 * raw + (1 - beta2) * gradient**2
            corrected.append(raw / (1 - beta2 ** (step + 1)))
            run.step([[np.full(8, gradient)]])
            if run.state.stage != "warmup":
                break
        if run.state.stage == "warmup":
            assert name.startswith(("halves", "doubles", "1/"))
            return
        last = corrected[-2 * delay :]
        pairs = zip(last[:delay], last[delay:], strict=True)
        assert all(min(pair) >= 0.96 * max(pair) > 0 for pair in pairs)
        assert run.state.variance[0] == pytest.approx(corrected[-1], rel=1e-9)

    @pytest.mark.parametrize("make", [qcomp.OneBitAdam, qcomp.QAdam, qcomp.OneBitLamb])
    @pytest.mark.filterwarnings("ignore:all . ranks have the same gradients")
    def test_not_while_the_learning_rate_rises(self, job, make):
        """Not before a window to compare with, and one without a change, after the last rising step."""
        delay, rise = 10, 60
        opt = make(
            learning_rate=lambda step: 0.001 * min(1.0, (step + 1) / rise), betas=(0.9, 0.9), exact=None
        )
        run = job(opt, [np.ones(8)], 2)
        while run.state.stage == "warmup":
            run.step([[np.ones(8)]] * 2)
            if run.state.step < rise:
                assert run.state.history == ()
        assert run.state.step == rise - 1 + 2 * delay

    @pytest.mark.parametrize("rise", [FREEZE, FREEZE + 5])
    def test_a_fixed_freeze_while_the_rate_rises_warns(self, job, rise):
        run = job(
            one_bit(learning_rate=lambda step: 0.001 * min(rise, step + 1), freeze=FREEZE), [np.ones(8)], 1
        )
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            for _ in range(FREEZE + 2):
                run.step([[np.ones(8)]])
        assert run.state.stage == "compressed"
        told = [str(w.message) for w in found if "while the learning rate still rises" in str(w.message)]
        assert len(told) == (rise > FREEZE)

    @pytest.mark.parametrize(
        ("rate", "factor", "words"),
        [
            (
                lambda step: 0.001 * (step + 1),
                1.0,
                "after 50 steps: VarianceStable(threshold=0.96, after=0) waits, because the learning rate still rises",
            ),
            (
                0.001,
                1.1,
                "after 50 steps: VarianceStable(threshold=0.96, after=0) waits, because the variance is not stable yet",
            ),
        ],
    )
    def test_a_rule_that_waits_for_long_warns(self, job, rate, factor, words):
        """Once, after ten windows; usually the other half of the warm-up is over by then."""
        run = job(one_bit(learning_rate=rate, betas=(0.9, 0.8), freeze=VarianceStable()), [np.ones(8)], 1)
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            for step in range(120):
                run.step([[np.full(8, factor**step)]])
        assert len(found) == 1
        assert words in str(found[0].message)

    def test_a_history_without_a_count_starts_anew(self):
        """It is of another rule, whose state was loaded."""
        old = tuple(float(x) for x in range(1, 12))
        rule = VarianceStable()
        assert rule.observe(400, lambda: 3.0, old, 0.9) == rule.observe(400, lambda: 3.0, (), 0.9)

    @pytest.mark.filterwarnings("ignore:nothing is compressed yet")
    def test_shrinking_gradients_in_an_optimizer(self, job):
        """After a large first gradient, v falls for long; it is frozen only once it is steady."""
        run = job(one_bit(betas=(0.9, 0.9), freeze=VarianceStable(0.96)), [np.zeros(8)], 1)
        step = 0
        while run.state.stage == "warmup":
            run.step([[np.full(8, 100.0 if step == 0 else 1.0)]])
            step += 1
        # v_t = 1 - .9^t + 9999 * .1 * .9^t up to a small error: it settles when 999 * .9^(t-10) is about .04; ten
        # steps later it has been settled for ten.
        assert 100 < step < 130
        assert run.state.variance[0] == pytest.approx(np.ones(8), rel=0.05)

    def test_zero_gradients_never_settle(self):
        assert self.freezes_at(VarianceStable(), [0.0] * 100, 0.9) is None

    def test_not_before_after(self):
        assert self.freezes_at(VarianceStable(after=50), [1.0] * 100, 0.9) == 51
        assert self.freezes_at(VarianceStable(after=0), [1.0] * 100, 0.9) == 37

    def test_a_custom_rule(self, job, grads):
        class Third:
            def observe(self, step, norm, history, beta2):
                return Observation(step == 3, (*history, norm()))

        run = job(one_bit(freeze=Third()), grads(SHAPES, 99, 0), 2)
        for step in range(3):
            assert run.state.stage == "warmup"
            assert len(run.state.history) == step
            run.step(of_ranks(grads, 2, step))
        assert run.state.stage == "compressed"

    @pytest.mark.parametrize("bad", [0, -1, 1.5])
    def test_a_step_below_one(self, bad):
        for make in (one_bit, qadam):
            with pytest.raises((ValueError, TypeError), match=f"freeze is {bad}"):
                make(freeze=bad)
        with pytest.raises(
            ValueError, match=f"freeze is {bad}; expected an integer of at least 1, or a rule"
        ):
            FreezeAt(bad)

    def test_a_threshold_out_of_range(self):
        for bad in (0.0, -1.0, 1.01):
            with pytest.raises(ValueError, match=f"threshold is {bad}; expected above 0 and at most 1"):
                VarianceStable(bad)


class TestQAdam:
    def test_warmup_steps_are_the_freeze(self, job, grads):
        runs = []
        for opt in (
            qadam(freeze=3),
            qcomp.QAdam(**settings_of(qadam()), warmup_steps=3),
            qadam(freeze=FreezeAt(3)),
        ):
            run = job(opt, grads(SHAPES, 99, 0), 2)
            for step in range(7):
                assert run.state.stage == ("warmup" if step < 3 else "compressed")
                run.step(of_ranks(grads, 2, step))
            runs.append(run.fingerprint())
        assert len(set(runs)) == 1

    def test_freeze_and_warmup_steps_are_equivalent_in_the_handshake(self):
        x = np.ones(8)

        def rank_main(comm):
            arguments = [{"freeze": 3}, {"freeze": FreezeAt(3)}, {"warmup_steps": 3}][comm.rank]
            return qcomp.QAdam(learning_rate=0.1, exact=None, **arguments).init(x, comm).stage

        assert run_local(3, rank_main) == ["warmup"] * 3

    def test_freeze_together_with_warmup_steps_is_an_error(self):
        with pytest.raises(ValueError, match="freeze is 5 and warmup_steps is 3; expected only one of them"):
            qcomp.QAdam(learning_rate=0.1, freeze=5, warmup_steps=3)
        with pytest.raises(ValueError, match="expected an integer of at least 1"):
            qcomp.QAdam(learning_rate=0.1, warmup_steps=0)

    def test_can_be_replaced(self):
        opt = qcomp.QAdam(learning_rate=0.1, warmup_steps=3)
        assert replace(opt, seed=4).freeze == opt.freeze
        assert replace(opt, seed=4).seed == 4

    def test_the_default_is_eight_bits_with_feedback(self):
        opt = qcomp.QAdam(learning_rate=0.1)
        assert opt.compressor == qcomp.MinMaxUInt8()
        assert opt.mean.feedback
        assert opt.variance_steps == qcomp.DoublingIntervals(4)


def settings_of(opt: qcomp.QAdam) -> dict:
    names = ("learning_rate", "betas", "exact", "compressor", "variance_steps")
    return {name: getattr(opt, name) for name in names}


class TestNothingCompressed:
    """A job that compresses nothing warns once."""

    def test_warns_once(self):
        x = np.zeros(100)
        opt = one_bit(exact=qcomp.ExactBelow(10_000), freeze=2)
        comm = LocalCommunicator.alone()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            state = opt.init(x, comm)
            for _ in range(4):
                x, state = opt.step(x, x + 1, state, comm)
        assert len(caught) == 1
        message = str(caught[0].message)
        for word in ("OneBitAdam compresses nothing", "exact=None", "100 elements"):
            assert word in message
        assert caught[0].filename == __file__

    def test_also_sgd(self):
        with pytest.warns(UserWarning, match="CompressedSGD compresses nothing") as caught:
            qcomp.CompressedSGD(learning_rate=0.1).init(np.zeros(100), LocalCommunicator.alone())
        assert len(caught) == 1
        assert caught[0].filename == __file__

    def test_no_warning_if_something_is_compressed(self):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            comm = LocalCommunicator.alone()
            one_bit(exact=None).init(np.zeros(100), comm)
            one_bit(exact=qcomp.ExactBelow(100)).init([np.zeros((10, 10)), np.zeros(5)], comm)
            qcomp.Adam(learning_rate=0.1).init(np.zeros(100), comm)


class TestPolicy:
    def test_small_tensors_and_vectors_among_others(self):
        policy = qcomp.ExactBelow(100)

        def chosen(*shapes):
            return policy([qcomp.Tensor(str(i), s, int(np.prod(s))) for i, s in enumerate(shapes)])

        assert chosen((10, 10), (9, 11), (1000,), ()) == (False, True, True, True)
        assert chosen((1000,)) == (False,)
        assert chosen((99,)) == (True,)

    def test_a_policy_receives_the_names(self):
        seen = []

        def policy(tensors):
            seen.extend(tensors)
            return [t.name == "w" for t in tensors]

        opt = one_bit(exact=policy)
        state = opt.init([np.zeros((2, 3)), np.zeros(5)], LocalCommunicator.alone(), names=["w", "b"])
        assert seen == [("w", (2, 3), 6), ("b", (5,), 5)]
        assert state.exact == (True, False)

    @pytest.mark.parametrize("bad", [-1, 1.5, "10"])
    def test_size_out_of_range(self, bad):
        with pytest.raises(ValueError, match=r"size is .*; expected an integer, at least 0"):
            qcomp.ExactBelow(bad)


def test_a_state_that_was_frozen_without_measurements_is_refused():
    comm = LocalCommunicator.alone()
    params = np.ones(8, np.float32)
    settings = {"learning_rate": 0.1, "betas": (0.5, 0.5), "freeze": 6, "exact": None, "watch": None}
    before = qcomp.QAdam(**settings, variance_steps=None)
    state = before.init(params, comm)
    for _ in range(7):
        params, state = before.step(params, params, state, comm)
    after = replace(before, variance_steps=qcomp.DoublingIntervals(4))
    with pytest.raises(ValueError, match="variance_steps is DoublingIntervals"):
        after.step(params, params, state, comm)
    with pytest.warns(UserWarning, match="was saved by QAdam with variance_steps=None"):
        state = after.load_state_dict(before.state_dict(state), params, comm)
    after.step(params, params, state, comm)
