"""LAMB and 1-bit LAMB: references written from the formulas, the freeze, and the factors of the trust ratios."""

import math
from dataclasses import replace

import numpy as np
import pytest

import qcomp
from qcomp import MismatchError, NonFiniteError
from qcomp.comm import run_local

SHAPES = [(40,), (3, 11), (7,)]
NAMES = ("a", "b", "c")
SIGN, NOTHING_LOST = qcomp.ScaledSign(bucket_size=16), qcomp.Identity()
FREEZE = 4


def one_bit(**changes) -> qcomp.OneBitLamb:
    return qcomp.OneBitLamb(
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


def lamb_like(opt: qcomp.OneBitLamb) -> qcomp.Lamb:
    return qcomp.Lamb(
        learning_rate=opt.learning_rate,
        betas=opt.betas,
        eps=opt.eps,
        weight_decay=opt.weight_decay,
        clip_norm=opt.clip_norm,
        trust_bounds=opt.trust_bounds,
    )


OPTIMIZERS = {
    "plain": one_bit(),
    "decay, clipping": one_bit(weight_decay=0.1, clip_norm=3.0),
    "coupled decay": one_bit(weight_decay=0.1, decoupled_weight_decay=False),
    "all-gather, rms": one_bit(
        averaging=qcomp.Averaging(topology="all_gather"), compressor=qcomp.ScaledSign(16, "rms")
    ),
    "random, some exact": one_bit(compressor=qcomp.QSGD(7, 16), exact=qcomp.ExactBelow(20)),
    "watched": one_bit(
        watch=qcomp.VarianceWatch(largest=1.1, smallest=0.9, rewarm_steps=3, sample=20, every=1)
    ),
}


def of_ranks(grads, size, step, dtype=np.float32):
    return [grads(SHAPES, rank, step, dtype) for rank in range(size)]


def bits(arrays) -> list[bytes]:
    return [np.asarray(a).tobytes() for a in arrays]


class Reference:
    """LAMB and 1-bit LAMB in float64, with loops over ranks and tensors; each tensor has buckets of its own."""

    def __init__(self, opt, params, size):
        self.opt, self.size = opt, size
        self.x = [p.copy() for p in params]
        self.m, self.v = ([np.zeros_like(p) for p in params] for _ in range(2))
        self.e = [[np.zeros(p.size) for p in params] for _ in range(size)]
        self.server = [np.zeros(p.size) for p in params]
        self.average = [0.0 for _ in params]
        self.factor = [1.0 for _ in params]
        self.t = 0

    def quantize(self, p):
        if isinstance(self.opt.compressor, qcomp.Identity):
            return p
        out = np.empty_like(p)
        for at in range(0, p.size, 16):
            part = p[at : at + 16]
            out[at : at + 16] = np.where(part < 0, -1.0, 1.0) * np.float32(np.abs(part).mean())
        return out

    def mean(self, values, tensor):
        sent = []
        for i, value in enumerate(values):
            p = value.reshape(-1) + self.e[i][tensor]
            sent.append(self.quantize(p))
            self.e[i][tensor] = p - sent[i]
        q = sum(sent) / self.size + self.server[tensor]
        answer = self.quantize(q)
        self.server[tensor] = q - answer
        return answer.reshape(values[0].shape)

    def direction(self, tensor):
        m = self.m[tensor] / (1 - self.opt.betas[0] ** self.t)
        v = self.v[tensor] / ((1 - self.opt.betas[1] ** self.t) if self.t <= FREEZE else 1)
        return m / (np.sqrt(v) + self.opt.eps) + self.opt.weight_decay * self.x[tensor]

    def step(self, grads):
        (b1, b2), opt = self.opt.betas, self.opt
        self.t += 1
        compressed = self.t > FREEZE
        if self.t == FREEZE + 1:
            self.v = [v / (1 - b2**FREEZE) for v in self.v]
            self.fresh = [v.copy() for v in self.v]
            rms = [math.sqrt((m**2).mean()) for m in self.m]
            self.scale = [sum(rms) / len(rms) / r for r in rms]
        for j in range(len(self.x)):
            if compressed:
                s, old = self.scale[j], self.m[j]
                self.m[j] = self.mean([s * (b1 * old + (1 - b1) * g[j]) for g in grads], j) / s
                self.reconstruct(j, old)
                d = self.direction(j)
                c = self.average[j] * self.factor[j]
            else:
                g = sum(g[j] for g in grads) / self.size
                self.m[j] = b1 * self.m[j] + (1 - b1) * g
                self.v[j] = b2 * self.v[j] + (1 - b2) * g**2
                d = self.direction(j)
                c = np.linalg.norm(self.x[j]) / np.linalg.norm(d)
                c = min(max(c, opt.trust_bounds[0]), opt.trust_bounds[1])
                self.average[j] = (
                    opt.trust_decay * self.average[j] + (1 - opt.trust_decay) * c if self.t > 1 else c
                )
            self.x[j] = self.x[j] - opt.learning_rate * c * d

    def reconstruct(self, j, old):
        (b1, b2), opt = self.opt.betas, self.opt
        g = (self.m[j] - b1 * old) / (1 - b1)
        self.fresh[j] = b2 * self.fresh[j] + (1 - b2) * g**2
        ratio = ((np.sqrt(self.v[j]) + opt.eps) / (np.sqrt(self.fresh[j]) + opt.eps)).max()
        ratio = min(max(ratio, 0.5), 4.0)
        self.factor[j] = min(max(ratio, 0.9 * self.factor[j]), 1.1 * self.factor[j])


class NoFactor(Reference):
    """Broken: the trust ratios stay at their values at the freeze."""

    def reconstruct(self, j, old):
        pass


class Unlimited(Reference):
    """Broken: the factor may jump."""

    def reconstruct(self, j, old):
        self.factor[j] = 1e6 if self.factor[j] < 1 else 1e-6
        super().reconstruct(j, old)
        self.factor[j] = min(max(self.factor[j], 0.5), 4.0)


class Unscaled(Reference):
    """Not broken if every tensor has its own scales, because the scaling cancels."""

    @property
    def scale(self):
        return [1.0 for _ in self.x]

    @scale.setter
    def scale(self, values):
        pass


def greatest_difference(opt, reference, job, *, size=3, steps=24) -> float:
    rng = np.random.default_rng(3)
    params = [rng.standard_normal(shape) * k for k, shape in enumerate(SHAPES, 1)]
    run, model = job(opt, params, size, NAMES), reference(opt, params, size)
    worst = 0.0
    for step in range(steps):
        # Shrinking gradients, so that the fresh variance moves away from the frozen one.
        grads = [
            [rng.standard_normal(s) * 10.0**-k * 0.9**step + 0.01 for k, s in enumerate(SHAPES)]
            for _ in range(size)
        ]
        run.step(grads)
        model.step(grads)
        worst = max(worst, *(float(np.abs(p - x).max()) for p, x in zip(run.params[0], model.x, strict=True)))
    factors = [run.state.numbers[f"factor.{name}"] for name in NAMES]
    if reference is Reference:
        assert factors == pytest.approx(model.factor, rel=1e-3)
        assert all(factor != 1 for factor in factors)
    return worst


@pytest.mark.parametrize("compressor", [NOTHING_LOST, SIGN], ids=["identity", "sign"])
class TestReference:
    @pytest.mark.parametrize("reference", [Reference, Unscaled])
    @pytest.mark.parametrize("weight_decay", [0.0, 0.1])
    def test_step_by_step(self, job, compressor, weight_decay, reference):
        opt = one_bit(compressor=compressor, weight_decay=weight_decay)
        tolerance = 1e-12 if compressor is NOTHING_LOST else 1e-5
        assert greatest_difference(opt, reference, job) < tolerance

    @pytest.mark.parametrize("broken", [NoFactor, Unlimited])
    def test_broken_references_differ(self, job, compressor, broken):
        assert greatest_difference(one_bit(compressor=compressor), broken, job) > 1e-3


class TestLamb:
    def test_trust_ratios(self, job, grads):
        """1 for a tensor of zeros, and the bounds for a tiny and a huge one."""
        opt = qcomp.Lamb(learning_rate=0.1, betas=(0.8, 0.9))
        params = [np.zeros(40), np.full((3, 11), 1e-6), np.full(7, 1e6)]
        run = job(opt, params, 2, NAMES)
        run.step(of_ranks(grads, 2, 0, np.float64))
        assert {n: run.state.numbers[f"trust.{n}"] for n in NAMES} == {"a": 1.0, "b": 0.01, "c": 10.0}

    @pytest.mark.parametrize("factor", [1e-3, 1.0, 100.0])
    def test_steps_are_proportional_to_the_norm_of_the_parameters(self, job, grads, factor):
        """Within the bounds, |x' - x| = rate |x|, however large the gradients are."""
        opt = qcomp.Lamb(learning_rate=0.01, betas=(0.8, 0.9), trust_bounds=(1e-6, 1e6), weight_decay=0.1)
        params = grads(SHAPES, 99, 0, np.float64)
        run = job(opt, params, 2, NAMES)
        for step in range(3):
            before = run.params[0]
            run.step([[g * factor for g in of] for of in of_ranks(grads, 2, step, np.float64)])
            for old, new in zip(before, run.params[0], strict=True):
                assert np.linalg.norm(new - old) == pytest.approx(0.01 * np.linalg.norm(old), rel=1e-9)

    def test_bounds_of_one_are_adam(self, job, grads):
        lamb = qcomp.Lamb(learning_rate=0.01, betas=(0.8, 0.9), trust_bounds=(1.0, 1.0), weight_decay=0.1)
        adam = qcomp.Adam(learning_rate=0.01, betas=(0.8, 0.9), weight_decay=0.1)
        one, other = (job(opt, grads(SHAPES, 99, 0), 2) for opt in (lamb, adam))
        for step in range(4):
            one.step(of_ranks(grads, 2, step))
            other.step(of_ranks(grads, 2, step))
        assert bits(one.params[0]) == bits(other.params[0])

    @pytest.mark.parametrize("bad", [(0.0, 1.0), (2.0, 1.0), (1.0,)])
    def test_bounds_out_of_range(self, bad):
        with pytest.raises(ValueError, match=r"trust_bounds is .*; expected two numbers above 0"):
            qcomp.Lamb(learning_rate=0.1, trust_bounds=bad)
        with pytest.raises(ValueError, match="factor_bounds is"):
            one_bit(factor_bounds=bad)

    def test_other_settings_out_of_range(self):
        with pytest.raises(ValueError, match="trust_decay is 1; expected from 0 to below 1"):
            one_bit(trust_decay=1)
        with pytest.raises(ValueError, match="factor_change is -1"):
            one_bit(factor_change=-1)


class TestStages:
    @pytest.mark.quick_cases(1)
    @pytest.mark.parametrize("name", OPTIMIZERS)
    @pytest.mark.parametrize("size", [1, 2, 3])
    @pytest.mark.filterwarnings("ignore:the variance of OneBitLamb")
    def test_all_ranks_hold_the_same(self, job, grads, name, size):
        """Job.step compares the ranks bit for bit after every step."""
        run, stages = job(OPTIMIZERS[name], grads(SHAPES, 99, 0), size), []
        for step in range(22):
            scale = 1.0 if step < FREEZE else 0.3
            run.step([[g * np.float32(scale) for g in of] for of in of_ranks(grads, size, step)])
            assert len({tuple(s.numbers.items()) for s in run.states}) == 1
            assert len({tuple(bits(s.arrays.get("fresh", ()))) for s in run.states}) == 1
            stages.append(run.state.stage)
        assert stages[: FREEZE - 1] == ["warmup"] * (FREEZE - 1)
        assert stages[FREEZE - 1] == "compressed"
        assert ("rewarm" in stages) == (name == "watched")

    @pytest.mark.parametrize("name", ["plain", "decay, clipping", "random, some exact"])
    def test_the_warmup_is_lamb_bit_for_bit(self, job, grads, name):
        opt = OPTIMIZERS[name]
        one, other = (job(o, grads(SHAPES, 99, 0), 3) for o in (opt, lamb_like(opt)))
        for step in range(FREEZE):
            one.step(of_ranks(grads, 3, step))
            other.step(of_ranks(grads, 3, step))
            assert bits(one.params[0]) == bits(other.params[0])
        one.step(of_ranks(grads, 3, FREEZE))
        other.step(of_ranks(grads, 3, FREEZE))
        assert bits(one.params[0]) != bits(other.params[0])

    def test_averages_ignore_ratios_of_one(self, job, grads):
        run = job(
            one_bit(trust_bounds=(0.1, 10.0)), [np.zeros(40), *grads(SHAPES, 99, 0, float)[1:]], 1, NAMES
        )
        seen = []
        for step in range(FREEZE):
            run.step(of_ranks(grads, 1, step, float))
            seen.append([run.state.numbers[f"trust.{n}"] for n in NAMES])
        for j, name in enumerate(NAMES):
            ratios = [row[j] for row in seen if row[j] != 1]
            average = ratios[0]
            for ratio in ratios[1:]:
                average = 0.9 * average + 0.1 * ratio
            assert run.state.numbers[f"average.{name}"] == pytest.approx(average, rel=1e-12)
        assert seen[0][0] == 1

    def test_factors_are_bounded_and_change_slowly(self, job, grads):
        """Vanishing gradients lengthen the steps by at most 10% per step and at most fourfold."""
        run = job(one_bit(betas=(0.8, 0.5), watch=None), grads(SHAPES, 99, 0), 2, NAMES)
        factors = [1.0]
        for step in range(60):
            scale = 1.0 if step < FREEZE else 1e-4
            run.step([[g * np.float32(scale) for g in of] for of in of_ranks(grads, 2, step)])
            if step >= FREEZE:
                factors.append(run.state.numbers["factor.a"])
                assert run.state.numbers["trust.a"] == pytest.approx(
                    run.state.numbers["average.a"] * factors[-1]
                )
        changes = np.asarray(factors[1:]) / np.asarray(factors[:-1])
        assert max(factors) == 4.0
        assert min(factors) >= 0.5
        assert changes.max() <= 1.1 + 1e-12
        assert changes.min() >= 0.9 - 1e-12
        assert changes.max() == pytest.approx(1.1)

    def test_scales_bring_tensors_to_similar_magnitudes(self, job, grads):
        run = job(one_bit(exact=qcomp.ExactBelow(8)), [g.reshape(g.size, 1) for g in grads(SHAPES, 99, 0)], 2)
        for step in range(FREEZE):
            run.step(
                [
                    [(g * 10.0**-k).reshape(-1, 1).astype(np.float32) for k, g in enumerate(of)]
                    for of in of_ranks(grads, 2, step)
                ]
            )
        scales = run.state.arrays["scale"]
        assert [s.shape for s in scales] == [(1,), (1,), (0,)]
        rms = [float(np.sqrt((m**2).mean())) for m in run.state.momentum[:2]]
        products = [float(s[0]) * r for s, r in zip(scales, rms, strict=False)]
        assert products == pytest.approx([sum(rms) / 2] * 2, rel=1e-5)

    def test_elements_without_a_variance_do_not_move(self, job, grads):
        run = job(one_bit(watch=None), grads(SHAPES, 99, 0), 2)
        start = run.params[0][0].copy()
        for step in range(9):
            gradients = of_ranks(grads, 2, step)
            for g in gradients:
                g[0][:5] = 0 if step < FREEZE else 1
            run.step(gradients)
        assert (run.params[0][0][:5] == start[:5]).all()
        assert (run.params[0][0][5:] != start[5:]).all()

    def test_in_every_library(self, library, job, grads):
        def to(arrays):
            return [library.seal(library.array(a)) for a in arrays]

        shape = [(40,)]
        run, plain = (job(one_bit(), convert(grads(shape, 99, 0)), 2) for convert in (to, list))
        for step in range(7):
            run.step([to(grads(shape, rank, step)) for rank in range(2)])
            plain.step([grads(shape, rank, step) for rank in range(2)])
        assert library.numpy(run.params[0][0]) == pytest.approx(plain.params[0][0], rel=1e-4, abs=1e-5)

    @pytest.mark.parametrize("steps", [1, 6])
    def test_a_value_that_is_not_finite(self, job, grads, steps):
        run = job(one_bit(), grads(SHAPES, 99, 0), 3)
        for step in range(steps):
            run.step(of_ranks(grads, 3, step))
        before = run.fingerprint()
        bad = of_ranks(grads, 3, steps)
        bad[1][2][0] = np.nan
        stages = [run.opt.stages(p, g, s) for p, g, s in zip(run.params, bad, run.states, strict=True)]
        assert [type(e) for e in run.lockstep(stages, catch=NonFiniteError)] == [NonFiniteError] * 3
        assert run.fingerprint() == before


class TestCheckpoint:
    @pytest.mark.quick_cases(2)
    @pytest.mark.parametrize("name", OPTIMIZERS)
    @pytest.mark.parametrize("stop", [0, 2, 4, 6])
    @pytest.mark.filterwarnings("ignore:the variance of OneBitLamb")
    def test_goes_on_bit_for_bit(self, grads, name, stop):
        opt = OPTIMIZERS[name]

        def rank_main(comm):
            def train(params, state, last):
                while state.step < last:
                    params, state = opt.step(params, grads(SHAPES, comm.rank, state.step), state, comm)
                return params, state

            params = grads(SHAPES, 99, 0)
            params, state = train(params, opt.init(params, comm, NAMES), stop)
            saved = {key: np.array(value) for key, value in opt.state_dict(state).items()}
            loaded = opt.load_state_dict(saved, params, comm, NAMES)
            for one, other in (
                ((params, state), (params, loaded)),
                (train(params, state, stop + 5), train(params, loaded, stop + 5)),
            ):
                assert bits(one[0]) == bits(other[0])
                assert repr(dict(one[1].numbers)) == repr(dict(other[1].numbers))  # NaN is NaN
                assert one[1].arrays.keys() == other[1].arrays.keys()
                for kind, arrays in one[1].arrays.items():
                    assert bits(arrays) == bits(other[1].arrays[kind])

        run_local(2, rank_main, timeout=20)

    def test_ranks_must_have_the_same_settings(self):
        def rank_main(comm):
            opt = replace(one_bit(), factor_change=0.1 + 0.1 * comm.rank)
            with pytest.raises(MismatchError, match=r"settings.factor_change is '0.1' on rank 0, but '0.2'"):
                opt.init(np.zeros(40, dtype=np.float32), comm)

        run_local(2, rank_main, timeout=20)


class TestVolume:
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

    def test_the_published_reduction(self):
        """4.6 times less than float16 in the paper, with a sixth of the steps in the warm-up."""
        warmup = 1 / 6
        assert 1 / (warmup + (1 - warmup) / 16) == pytest.approx(4.6, abs=0.05)
        assert 1 / (warmup + (1 - warmup) / 32) == pytest.approx(5.2, abs=0.05)  # against float32


class TestConvergence:
    @pytest.mark.slow
    def test_ends_where_lamb_does(self, job):
        """The same problem for both: f = .5 sum h (x - 1)^2 with noise, two ranks."""
        curvature = np.random.default_rng(0).permutation(np.logspace(-2, 0, 64))

        def final(opt):
            rng = np.random.default_rng(1)
            run = job(opt, [np.full(64, 0.1)], 2)
            for _ in range(600):
                noise = 0.1 * rng.standard_normal((2, 64))
                run.step([[curvature * (p[0] - 1 + n)] for p, n in zip(run.params, noise, strict=True)])
            return float((0.5 * curvature * (run.params[0][0] - 1) ** 2).sum())

        settings = {"learning_rate": lambda step: 0.02 * (1 - step / 600), "betas": (0.9, 0.99)}
        exact = final(qcomp.Lamb(**settings))
        compressed = final(
            qcomp.OneBitLamb(**settings, freeze=150, exact=None, compressor=qcomp.ScaledSign(64, "rms"))
        )
        assert compressed < 3 * exact
