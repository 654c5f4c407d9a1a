"""0/1 Adam: schedules, the ranks between and after synchronisations, and a reference written from the formulas."""

import math
from dataclasses import replace

import numpy as np
import pytest

import qcomp
from qcomp import DoublingIntervals, LocalSteps, MismatchError, NonFiniteError
from qcomp.comm import LocalCommunicator, run_local
from qcomp.core.numeric.arrays import host_bytes
from qcomp.core.optimizers.zero_one_adam import Rounds
from qcomp.core.variance.rules import Observation

SHAPES = [(40,), (3, 11), (7,)]
SIGN, NOTHING_LOST = qcomp.ScaledSign(bucket_size=16), qcomp.Identity()


def every(step: int) -> bool:
    return True


def first(step: int) -> bool:
    return step == 1


def third(step: int) -> bool:
    return step % 3 == 0


def fourth(step: int) -> bool:
    return step % 4 == 0


def never(step: int) -> bool:
    return False


def sparse(step: int) -> bool:
    return step in (1, 2, 6, 11)


def falling(step: int) -> float:
    return 0.02 / (1 + step / 5)


def zero_one(**changes) -> qcomp.ZeroOneAdam:
    """Variance at steps 1, 2, 4, 6, 10, ...; after the freeze at step 4, every third step synchronises."""
    return qcomp.ZeroOneAdam(
        **{
            "learning_rate": falling,
            "betas": (0.8, 0.9),
            "compressor": SIGN,
            "exact": None,
            "variance_steps": DoublingIntervals(2),
            "sync_steps": third,
            "freeze": 4,
            **changes,
        }
    )


OPTIMIZERS = {
    "frozen": zero_one(),
    "never frozen": zero_one(freeze=None, variance_steps=sparse),
    "decay, clipping": zero_one(weight_decay=0.1, clip_norm=3.0),
    "all-gather": zero_one(
        averaging=qcomp.Averaging(topology="all_gather"), freeze=None, variance_steps=sparse
    ),
    "random, some exact": zero_one(compressor=qcomp.QSGD(7, 16), exact=qcomp.ExactBelow(20)),
    "no feedback": zero_one(averaging=qcomp.Averaging(feedback=False)),
    "a rule": zero_one(freeze=qcomp.VarianceStable(0.05), betas=(0.8, 0.5)),
}


def bits(arrays) -> tuple[bytes, ...]:
    return tuple(host_bytes(a) for a in arrays)


def of_ranks(grads, size, step, dtype=np.float32):
    return [grads(SHAPES, rank, step, dtype) for rank in range(size)]


class World:
    """All ranks of a job, which may differ after a step."""

    def __init__(self, opt, params, size, lockstep):
        self.opt, self.lockstep = opt, lockstep
        self.params = [list(params) for _ in range(size)]
        self.states = [
            opt.initial_state(params, tuple("abc"[: len(params)]), rank, size) for rank in range(size)
        ]

    def stages(self, grads):
        return [self.opt.stages(p, g, s) for p, g, s in zip(self.params, grads, self.states, strict=True)]

    def step(self, grads):
        results = self.lockstep(self.stages(grads))
        self.params = [params for params, _ in results]
        self.states = [state for _, state in results]
        assert len({(s.step, s.stage, s.history, tuple(s.numbers.items())) for s in self.states}) == 1
        assert len({bits(s.variance) for s in self.states}) == 1

    @property
    def state(self):
        return self.states[0]

    @property
    def together(self) -> bool:
        return len({bits(p) for p in self.params}) == len({bits(s.momentum) for s in self.states}) == 1

    def snapshot(self):
        """Return everything that the ranks hold."""
        return [
            (
                bits((*p, *s.momentum, *s.variance, *s.exchange.worker, *s.exchange.server)),
                {kind: bits(arrays) for kind, arrays in s.arrays.items()},
                (s.step, s.stage, s.history, dict(s.numbers)),
            )
            for p, s in zip(self.params, self.states, strict=True)
        ]


@pytest.fixture
def world(grads, lockstep):
    """Start a world: ``world(opt, size=3, dtype=float32)``."""

    def start(opt, size=3, dtype=np.float32):
        return World(opt, grads(SHAPES, 99, 0, dtype), size, lockstep)

    return start


class TestSchedules:
    @pytest.mark.parametrize("each", [1, 2, 3, 16])
    @pytest.mark.parametrize("longest", [None, 1, 8])
    def test_doubling_intervals_are_those_of_the_formula(self, each, longest):
        expected, step = set(), 1
        for j in range(200):
            expected.add(step)
            step += min(2 ** (j // each), longest or 2**60)
            if step > 3000:
                break
        schedule = DoublingIntervals(each, longest)
        last = max(expected)
        assert {s for s in range(1, last + 1) if schedule(s)} == expected

    def test_the_number_of_intervals(self):
        """Each * log2(T / each + 1), 201.8 for 100 000; between two blocks this curve is slightly above the number."""
        schedule = DoublingIntervals(16)
        assert sum(map(schedule, range(1, 100_001))) == 201
        count = 0
        for step in range(1, 3000):
            count += schedule(step)
            assert -1 < 16 * math.log2(step / 16 + 1) - count < 16 * 0.0861
        for power in range(8):  # exact where a block of intervals ends
            assert sum(map(schedule, range(1, 16 * (2**power - 1) + 1))) == 16 * power

    @pytest.mark.parametrize(("double_every", "longest"), [(1, 1), (4, 4), (5, 8), (1, 6), (7, 1), (3, 16)])
    def test_local_steps_double_and_are_never_longer(self, double_every, longest):
        schedule = LocalSteps(double_every, longest)
        ends = [0] + [step for step in range(1, 400) if schedule(step)]
        gaps = np.diff(ends)
        assert gaps.max() == longest
        assert (gaps[-5:] == longest).all()
        for end, gap in zip(ends[1:], gaps, strict=True):
            phase = min((end - 1) // double_every, math.ceil(math.log2(longest)))
            assert gap <= min(2**phase, longest)
            starts_short = end == (phase + 1) * double_every
            assert starts_short or gap == min(2**phase, longest)

    @pytest.mark.parametrize("bad", [0, -1, 1.5, True])
    def test_out_of_range(self, bad):
        with pytest.raises(ValueError, match=r"each is .*; expected an integer of at least 1"):
            DoublingIntervals(bad)
        with pytest.raises(ValueError, match="double_every is"):
            LocalSteps(bad)
        with pytest.raises(ValueError, match="longest is"):
            LocalSteps(1, bad)
        with pytest.raises(ValueError, match="longest is"):
            DoublingIntervals(1, bad)

    def test_a_longest_interval_between_two_powers(self):
        with pytest.raises(ValueError, match="longest is 6; expected a power of two"):
            DoublingIntervals(1, 6)

    def test_settings_out_of_range(self):
        with pytest.raises(ValueError, match="which excludes step 1; expected a schedule with step 1"):
            zero_one(variance_steps=third)
        with pytest.raises(ValueError, match="decoupled_weight_decay is False; expected True"):
            zero_one(decoupled_weight_decay=False)
        with pytest.raises(ValueError, match="freeze is 0"):
            zero_one(freeze=0)


def share_of_float32(rounds: Rounds, steps: int, bits_compressed: float = 1.0) -> float:
    """Return the bits that a run sends, over those of float32; without exact tensors and verdicts."""
    return (32 * rounds.exact + bits_compressed * rounds.compressed) / (32 * steps)


class TestVolume:
    def test_of_a_short_run(self):
        """1000 steps, kappa 4: 16 times less with one bit at every other step, and still less with local steps."""
        opt = qcomp.ZeroOneAdam(learning_rate=0.1, variance_steps=DoublingIntervals(4))
        with_scales = 1 + 32 / 4096
        every_step = opt.rounds(1000)
        assert every_step == (32, 968, 0)
        assert 1 / share_of_float32(every_step, 1000, with_scales) == pytest.approx(16.0, abs=0.1)
        local = replace(opt, sync_steps=LocalSteps(250, 4)).rounds(1000)
        assert local == (32, 476, 492)
        assert 1 / share_of_float32(local, 1000, with_scales) > 19

    @pytest.mark.slow
    def test_of_150_000_steps(self):
        """The length of BERT-Large's pre-training, with the defaults."""
        opt = qcomp.ZeroOneAdam(learning_rate=0.1)
        rounds = opt.rounds(150_000)
        assert rounds.exact == sum(map(DoublingIntervals(16), range(1, 150_001)))
        assert rounds.exact + rounds.compressed + rounds.silent >= 150_000  # a step may do both
        assert rounds == (211, 62_312, 87_488)
        share = share_of_float32(rounds, 150_000)
        assert 1 / share == pytest.approx(69.5, abs=0.05)
        # 1-bit Adam with 15% of exact steps, and 0/1 Adam without local steps.
        onebit = 0.15 + 0.85 / 32
        assert 1 - share / onebit > 0.87
        assert 1 / share_of_float32(replace(opt, sync_steps=every).rounds(150_000), 150_000) == pytest.approx(
            30.7, abs=0.1
        )
        # Rounds: fewer than half of the steps send anything.
        assert (150_000 - rounds.silent) / 150_000 < 0.42

    def test_counts_what_is_sent(self, world, grads):
        """For the same steps, the generators yield nothing, one mean, or both an exact and a compressed one."""
        opt, x = zero_one(freeze=None, variance_steps=sparse), np.ones(4096, dtype=np.float32)
        compressed, exact = 4096 // 8 + 4096 // 16 * 4 + 2 * 8, 4096 * 4 + 2 * 8

        def rank_main(comm):
            state, params, sent = opt.init(x, comm), x, []
            for _ in range(12):
                before = comm.bytes_sent
                params, state = opt.step(params, x * (comm.rank + 1), state, comm)
                sent.append(comm.bytes_sent - before)
            return sent

        expected = [
            exact + 4,  # the first step compares gradients
            exact + 8,  # the first local step compares what the ranks share
            compressed,
            0,
            0,
            exact,
            0,
            0,
            compressed,
            0,
            exact + compressed,
            compressed,
        ]
        # At step 6 the ranks differ: it sends both means, and so does step 11.
        expected[5] += compressed
        assert run_local(2, rank_main) == [expected] * 2
        assert opt.rounds(12) == (4, 5, 5)

    def test_volume_with_a_freeze_rule_is_an_error(self):
        with pytest.raises(
            ValueError, match=r"freeze is VarianceStable.*expected a number of steps, or None"
        ):
            OPTIMIZERS["a rule"].rounds(10)


class TestRanks:
    @pytest.mark.quick_cases(3)
    @pytest.mark.parametrize("name", OPTIMIZERS)
    @pytest.mark.parametrize("size", [1, 2, 3])
    def test_are_alike_after_every_synchronisation_and_differ_between(self, world, grads, name, size):
        run = world(OPTIMIZERS[name], size)
        seen = set()
        for step in range(20):
            run.step(of_ranks(grads, size, step))
            seen.add(run.state.stage)
            assert run.together == (run.state.stage != "local" or size == 1)
            assert sorted(run.state.arrays) == (["anchor", "pending"] if run.state.stage == "local" else [])
            if run.state.stage == "local":
                assert len({bits(s.arrays["anchor"]) for s in run.states}) == 1
        assert seen == {"warmup", "compressed", "local"}

    def test_in_every_library(self, library, lockstep, grads):
        opt, dtype = OPTIMIZERS["frozen"], np.float32
        shape = [(40,)]

        def to(arrays):
            return [library.array(a) for a in arrays]

        run = World(opt, to(grads(shape, 99, 0, dtype)), 2, lockstep)
        for step in range(11):
            run.step([to(grads(shape, rank, step, dtype)) for rank in range(2)])
            assert run.together == (run.state.stage != "local")
        assert run.state.stage == "local"
        plain = World(opt, grads(shape, 99, 0, dtype), 2, lockstep)
        for step in range(11):
            plain.step([grads(shape, rank, step, dtype) for rank in range(2)])
        for got, want in zip(run.params, plain.params, strict=True):
            assert library.numpy(got[0]) == pytest.approx(want[0], rel=1e-4, abs=1e-5)

    def test_neither_params_nor_state_are_written_to(self, libraries, lockstep, grads):
        """Read-only arrays show it; and writing into the parameters does not change the anchor."""
        library = libraries["readonly"]
        run = World(zero_one(), [library.array(a) for a in grads(SHAPES, 99, 0)], 2, lockstep)
        other = World(zero_one(), grads(SHAPES, 99, 0), 2, lockstep)
        for step in range(12):
            run.step([library.seal(g) for g in of_ranks(grads, 2, step)])
            other.step(of_ranks(grads, 2, step))
            for params, state in zip(run.params, run.states, strict=True):
                library.seal([*params, *state.momentum, *state.variance])
                library.seal([*state.exchange.worker, *state.exchange.server])
                library.seal(dict(state.arrays))
            anchors = [bits(s.arrays.get("anchor", ())) for s in other.states]
            kept = [[p.copy() for p in params] for params in other.params]
            for params in other.params:
                for p in params:
                    np.add(p, 1.0, out=p)
            assert [bits(s.arrays.get("anchor", ())) for s in other.states] == anchors
            other.params = kept
        assert [bits(p) for p in run.params] == [bits(p) for p in other.params]

    def test_half_precision(self, libraries, lockstep, grads):
        torch = pytest.importorskip("torch")
        shapes = [(40,)]

        def to(arrays):
            return [torch.from_numpy(a).to(torch.bfloat16) for a in arrays]

        run = World(zero_one(), to(grads(shapes, 99, 0)), 2, lockstep)
        for step in range(13):
            results = lockstep(run.stages([to(grads(shapes, rank, step)) for rank in range(2)]))
            run.params, run.states = [r[0] for r in results], [r[1] for r in results]
            assert all(p[0].dtype == torch.bfloat16 for p in run.params)
        assert run.state.stage == "compressed"
        assert torch.equal(run.params[0][0], run.params[1][0])


class Reference:
    """Algorithm 1 in float64, with loops over the ranks and an optionally compressed mean, on one flat vector."""

    def __init__(self, opt, x, size):
        self.opt, self.size = opt, size
        self.x = [x.copy() for _ in range(size)]
        self.m = [np.zeros_like(x) for _ in range(size)]
        self.u = [np.zeros_like(x) for _ in range(size)]
        self.e = [np.zeros_like(x) for _ in range(size)]
        self.server = np.zeros_like(x)
        self.v, self.anchor = np.zeros_like(x), x.copy()
        self.rates = self.weights = 0.0
        self.t = self.updates = self.start = 0

    def quantize(self, p):
        if isinstance(self.opt.compressor, qcomp.Identity):
            return p
        width = self.opt.compressor.bucket_size
        out = np.empty_like(p)
        for at in range(0, p.size, width):
            part = p[at : at + width]
            out[at : at + width] = np.where(part < 0, -1.0, 1.0) * np.float32(np.abs(part).mean())
        return out

    def mean(self):
        sent = []
        for i in range(self.size):
            p = self.u[i] + self.e[i]
            sent.append(self.quantize(p))
            self.e[i] = p - sent[i]
        q = sum(sent) / self.size + self.server
        answer = self.quantize(q)
        self.server = q - answer
        return answer

    def step(self, grads):
        (b1, b2), opt = self.opt.betas, self.opt
        rate = opt.learning_rate(self.t)
        self.t += 1
        weight = rate / (1 - b1**self.t)
        frozen = opt.freeze is not None and self.t > opt.freeze.step
        varies = not frozen and opt.variance_steps(self.t)
        apart = self.start != 0
        mean = sum(grads) / self.size
        if varies:
            self.v = b2 * self.v + (1 - b2) * mean**2
            self.updates += 1
        root = np.sqrt(self.v / (1 - b2**self.updates)) + opt.eps
        if varies and not apart:
            self.m = [b1 * self.m[0] + (1 - b1) * mean] * self.size
            x = self.x[0] - weight * self.m[0] / root - rate * opt.weight_decay * self.x[0]
            self.x = [x] * self.size
            self.anchor = x
            return
        for i, g in enumerate(grads):
            self.m[i] = b1 * self.m[i] + (1 - b1) * g
            self.u[i] = self.u[i] + weight * self.m[i]
            self.x[i] = self.x[i] - weight * self.m[i] / root - rate * opt.weight_decay * self.x[i]
        self.rates += rate
        self.weights += weight
        waiting = opt.freeze is not None and not frozen
        if varies or waiting or opt.sync_steps(self.t - (opt.freeze.step if frozen else 0)):
            s = self.mean()
            self.m = [s / self.weights] * self.size
            x = self.anchor - s / root - self.rates * opt.weight_decay * self.anchor
            self.x, self.anchor = [x] * self.size, x
            self.u = [np.zeros_like(s) for _ in range(self.size)]
            self.rates = self.weights = 0.0
            self.start = 0
        else:
            self.start = self.t


class Unreset(Reference):
    """Broken: u is kept after a synchronisation."""

    def step(self, grads):
        before = self.u
        super().step(grads)
        if all((u == 0).all() for u in self.u):
            self.u = before


class LastRate(Reference):
    """Broken: the momentum is divided by the last rate instead of the sum of the rates."""

    def step(self, grads):
        before = self.weights
        super().step(grads)
        if before and not self.weights:
            self.m = [m * 3 for m in self.m]


def greatest_difference(opt, reference, lockstep, *, size=3, steps=24) -> float:
    rng = np.random.default_rng(3)
    x = rng.standard_normal(40)
    run, model = World(opt, [x], size, lockstep), reference(opt, x, size)
    worst = 0.0
    for _ in range(steps):
        grads = list(rng.standard_normal((size, 40)) + 0.5)
        run.step([[g] for g in grads])
        model.step(grads)
        for i in range(size):
            worst = max(worst, np.abs(run.params[i][0] - model.x[i]).max())
            worst = max(worst, np.abs(run.states[i].momentum[0] - model.m[i]).max())
    return float(worst)


@pytest.mark.parametrize("compressor", [NOTHING_LOST, SIGN], ids=["identity", "sign"])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"freeze": None, "variance_steps": sparse},
        {"weight_decay": 0.1},
        {"sync_steps": every},
        {
            "freeze": None,
            "variance_steps": sparse,
            "sync_steps": every,
        },  # exact steps alone, after the warm-up
    ],
    ids=["frozen", "never frozen", "decay", "every step", "never frozen, every step"],
)
class TestReference:
    def test_step_by_step(self, lockstep, compressor, changes):
        opt = zero_one(compressor=compressor, **changes)
        # Scales are float32 in both, from means that differ in a float64's last bits: sometimes by an ulp.
        tolerance = 1e-12 if compressor is NOTHING_LOST else 2e-6
        assert greatest_difference(opt, Reference, lockstep) < tolerance

    @pytest.mark.quick_cases(8)
    @pytest.mark.parametrize("broken", [Unreset, LastRate])
    def test_broken_references_differ(self, lockstep, compressor, changes, broken):
        if changes.get("sync_steps") is every and broken is LastRate:
            broken = Unreset
        opt = zero_one(compressor=compressor, **changes)
        assert greatest_difference(opt, broken, lockstep) > 1e-3


CHANGES = {
    "a group stops": ([1.0, 1.0, 0.0, 0.0], [0.1] * 4),
    "a group starts": ([0.0, 0.0, 0.5, 1.0], [0.1] * 4),
    "starts, stops, starts": ([0.0, 0.7, 0.0, 0.2], [0.0, 0.1, 0.2, 0.3]),
    "its factor falls": ([1.0, 0.8, 0.6, 0.4], [0.0] * 4),
    "its decay rises": ([0.3] * 4, [0.0, 0.2, 0.4, 0.8]),
    "it never moves": ([0.0] * 4, [0.5] * 4),
}
"""The learning rate factor and the decay of a group in the four steps from one synchronisation to the next."""


class AtOnce(qcomp.ZeroOneAdam):
    """Broken: a synchronisation applies its own settings to all steps since the last one."""

    def _synchronised(self, params, means, state):
        numbers, (group,) = dict(state.numbers), self.groups
        numbers["factor.b"] = group.learning_rate_factor
        numbers["weight.b"] = numbers["weights"]
        numbers["decay.b"] = numbers["rates"] * group.learning_rate_factor * group.weight_decay
        return super()._synchronised(params, means, state._replace(numbers=numbers))


def distance_from_local_steps(make, changes, grads, lockstep) -> float:
    """Return how far a synchronisation lands from the mean of what local steps alone make of the ranks' parameters.

    The group has tensor "b".
    """
    factors, decays = CHANGES[changes]

    def with_settings(factor, decay, sync_steps):
        groups = (qcomp.Group("b", learning_rate_factor=factor, weight_decay=decay),)
        plain = zero_one(compressor=NOTHING_LOST, sync_steps=sync_steps, groups=groups, learning_rate=1e-3)
        return make(**{name: getattr(plain, name) for name in plain.__dataclass_fields__})

    run = World(with_settings(1.0, 0.0, fourth), grads(SHAPES, 99, 0, np.float64), 2, lockstep)
    for step in range(8):
        run.step(of_ranks(grads, 2, step, np.float64))
    assert run.together
    for number, (factor, decay) in enumerate(zip(factors, decays, strict=True)):
        run.opt, gradients = with_settings(factor, decay, fourth), of_ranks(grads, 2, 8 + number, np.float64)
        if number == 3:
            alone = World(with_settings(factor, decay, never), run.params[0], 2, lockstep)
            alone.params, alone.states = run.params, run.states
            alone.step(gradients)
        run.step(gradients)
    assert run.together
    assert not alone.together
    assert all(np.isfinite(m).all() for m in run.state.momentum)
    return max(
        float(np.abs(x - (a + b) / 2).max()) for x, a, b in zip(run.params[0], *alone.params, strict=True)
    )


class TestSettingsBetweenSynchronisations:
    @pytest.mark.parametrize("changes", CHANGES)
    def test_each_step_counts_with_its_own(self, grads, lockstep, changes):
        # Decay of 1e-3 a step acts on parameters that have moved by less than 0.01 since.
        assert distance_from_local_steps(qcomp.ZeroOneAdam, changes, grads, lockstep) < 1e-5

    @pytest.mark.parametrize("changes", list(CHANGES)[:-1])
    def test_a_broken_version_differs(self, grads, lockstep, changes):
        assert distance_from_local_steps(AtOnce, changes, grads, lockstep) > 1e-4


class TestIdentities:
    def test_before_the_freeze_it_equals_adam_bit_for_bit(self, world, grads, lockstep):
        opt = zero_one(variance_steps=every, freeze=None, weight_decay=0.1)
        adam = qcomp.Adam(learning_rate=falling, betas=opt.betas, weight_decay=0.1)
        one, other = world(opt), world(adam)
        for step in range(8):
            one.step(of_ranks(grads, 3, step))
            other.step(of_ranks(grads, 3, step))
            assert [bits(p) for p in one.params] == [bits(p) for p in other.params]
        assert one.state.stage == "warmup"

    def test_the_freeze_rule_gets_the_corrected_norm(self, world, grads):
        """Of constant gradients it is the same after every step: the sum of their squares."""
        norms = []

        class Rule:
            def observe(self, step, norm, history, beta2):
                norms.append(norm())
                return Observation(False, history)

        run = world(zero_one(freeze=Rule(), variance_steps=every), size=1)
        gradients = of_ranks(grads, 1, 0)
        for _ in range(5):
            run.step(gradients)
        total = sum(float((g.astype(np.float64) ** 2).sum()) for g in gradients[0])
        assert norms == pytest.approx([total] * 5, rel=1e-5)

    def test_without_momentum_it_equals_preconditioned_sgd(self, world, grads):
        """b1 = 0, v fixed, nothing lost: whatever the synchronisations, the mean moves by the mean gradient."""
        opt = zero_one(betas=(0.0, 0.9), compressor=NOTHING_LOST, freeze=1, variance_steps=every)
        run = world(opt, dtype=np.float64)
        run.step(of_ranks(grads, 3, 0, np.float64))
        x, v = [np.asarray(p) for p in run.params[0]], run.state.variance
        for step in range(1, 13):
            gradients = of_ranks(grads, 3, step, np.float64)
            run.step(gradients)
            x = [
                p - falling(step) * sum(g) / 3 / (np.sqrt(d) + opt.eps)
                for p, d, *g in zip(x, v, *gradients, strict=True)
            ]
            means = [sum(of_tensor) / 3 for of_tensor in zip(*run.params, strict=True)]
            for got, want in zip(means, x, strict=True):
                assert got == pytest.approx(want, rel=1e-12, abs=1e-12)

    def test_the_sums_of_updates_telescope(self, world, grads):
        """The updates of all synchronisations, plus what feedback holds, are the mean of what the ranks had."""
        opt = zero_one(freeze=1, variance_steps=every, compressor=qcomp.ScaledSign(16, "rms"))
        run = world(opt, dtype=np.float64)
        run.step(of_ranks(grads, 3, 0, np.float64))
        x, root = run.params[0][1], np.sqrt(run.state.variance[1]) + opt.eps
        owed = np.zeros_like(x)
        for step in range(1, 13):
            m = [s.momentum[1] for s in run.states]
            gradients = of_ranks(grads, 3, step, np.float64)
            own = [0.8 * a + (1 - 0.8) * g[1] for a, g in zip(m, gradients, strict=True)]
            owed += falling(step) / (1 - 0.8 ** (step + 1)) * sum(own) / 3
            run.step(gradients)
            if run.state.stage == "local":
                continue
            error = sum(s.exchange.worker[1] for s in run.states) / 3
            chunks = opt.mean.layout([x.shape for x in run.state.exchange.worker], rank=0, size=3).chunks
            for s, chunk in zip(run.states, chunks, strict=True):
                for segment, residual in zip(chunk, s.exchange.server, strict=True):
                    if segment.tensor == 1:
                        error[segment.start : segment.stop] += residual
            applied = (x - run.params[0][1]) * root
            assert applied + error.reshape(x.shape) == pytest.approx(owed, rel=1e-10, abs=1e-10)

    def test_elements_without_a_variance_do_not_move(self, world, grads):
        run = world(zero_one())
        start = run.params[0][0].copy()
        for step in range(12):
            gradients = of_ranks(grads, 3, step)
            for g in gradients:
                g[0][:5] = 0 if step < 4 else 1
            run.step(gradients)
            for params in run.params:
                assert (params[0][:5] == start[:5]).all()
                assert np.abs(params[0][5:] - start[5:]).max() < 1

    def test_groups(self, world, grads):
        """Half the rate for one tensor and none for another, compared with a run without groups."""
        groups = (qcomp.Group("a", learning_rate_factor=0.5), qcomp.Group("b", learning_rate_factor=0.0))
        one = world(zero_one(groups=groups, freeze=2, variance_steps=every))
        other = world(zero_one(freeze=2, variance_steps=every))
        start = [p.copy() for p in one.params[0]]
        for step in range(9):
            for run in (one, other):
                run.step(of_ranks(grads, 3, step))
            for got, full in zip(one.params, other.params, strict=True):
                assert got[0] - start[0] == pytest.approx(0.5 * (full[0] - start[0]), rel=1e-4, abs=1e-6)
                assert (got[1] == start[1]).all()
                assert (got[2] == full[2]).all()

    def test_a_rate_of_zero(self, world, grads):
        """Ranks that agree do not change; ranks that differ still come together."""
        run = world(zero_one(learning_rate=lambda step: 0.0 if step in (0, 7, 9) else 0.01))
        for step in range(12):
            before = run.snapshot() if step == 7 else None
            run.step(of_ranks(grads, 3, step))
            if before:
                assert run.state.stage == "compressed"
                assert [s[0] for s in run.snapshot()] == [s[0] for s in before]
            assert all(np.isfinite(p).all() for params in run.params for p in params)
            assert run.together == (run.state.stage != "local")


class TestSynchronize:
    @pytest.mark.parametrize("name", ["frozen", "random, some exact", "all-gather"])
    def test_brings_the_ranks_together(self, grads, name):
        opt = OPTIMIZERS[name]

        def rank_main(comm):
            params = grads(SHAPES, 99, 0)
            state = opt.init(params, comm)
            while state.stage != "local":
                params, state = opt.step(params, grads(SHAPES, comm.rank, state.step), state, comm)
            before = bits([*state.arrays["pending"], *state.arrays["anchor"]])
            own = bits(params)
            params, together = opt.synchronize(params, state, comm)
            assert bits([*state.arrays["pending"], *state.arrays["anchor"]]) == before
            assert (together.step, together.stage) == (state.step, "compressed")
            sent = comm.bytes_sent
            again, same = opt.synchronize(params, together, comm)
            assert comm.bytes_sent == sent
            assert same is together
            assert bits(again) == bits(params)
            for _ in range(5):
                params, together = opt.step(params, grads(SHAPES, comm.rank, together.step), together, comm)
            return own, bits(opt.synchronize(params, together, comm)[0])

        (own, one), (others, other) = run_local(2, rank_main, timeout=20)
        assert own != others
        assert one == other

    def test_one_array(self):
        opt, comm, x = zero_one(), LocalCommunicator.alone(), np.ones(20, dtype=np.float32)
        state = opt.init(x, comm)
        for _ in range(5):
            x, state = opt.step(x, x, state, comm)
        assert state.stage == "local"
        assert opt.synchronize(x, state, comm)[0].shape == (20,)


class TestNonFinite:
    def test_all_raise_at_the_next_synchronisation_and_name_the_steps(self, world, grads):
        run = world(zero_one())
        for step in range(7):
            run.step(of_ranks(grads, 3, step))
        anchor = run.params[0]
        assert run.state.stage == "compressed"
        bad = of_ranks(grads, 3, 7)
        bad[1][2][3] = np.inf
        run.step(bad)
        run.step(of_ranks(grads, 3, 8))
        before = run.snapshot()
        errors = run.lockstep(run.stages(of_ranks(grads, 3, 9)), catch=NonFiniteError)
        assert [str(e) for e in errors] == [
            "a value on rank 1 is not finite, or too large to compress, in one of the steps 8 to 10"
        ] * 3
        assert run.snapshot() == before
        assert all(bits(s.arrays["anchor"]) == bits(anchor) for s in run.states)

    def test_synchronize_raises_too(self, grads):
        def rank_main(comm):
            opt, params = zero_one(), grads(SHAPES, 99, 0)
            state = opt.init(params, comm)
            for step in range(5):
                gradients = grads(SHAPES, comm.rank, step)
                if step == 4 and comm.rank == 0:
                    gradients[0][0] = np.nan
                params, state = opt.step(params, gradients, state, comm)
            with pytest.raises(NonFiniteError, match=r"rank 0 is not finite.*, in step 5"):
                opt.synchronize(params, state, comm)

        run_local(2, rank_main, timeout=20)

    @pytest.mark.quick_cases(2)
    @pytest.mark.parametrize("name", OPTIMIZERS)
    @pytest.mark.parametrize("step", range(12))
    def test_skipping_never_blocks_or_spreads_nan(self, world, grads, name, step):
        run = world(replace(OPTIMIZERS[name], nonfinite="skip"))
        for number in range(step):
            run.step(of_ranks(grads, 3, number))
        bad = of_ranks(grads, 3, step)
        bad[1][0][3] = np.nan
        run.step(bad)
        alone = run.state.step > step
        assert [s.skipped for s in run.states] == ([0, 1, 0] if alone else [1, 1, 1])
        for number in range(step, step + 5):
            run.step(of_ranks(grads, 3, number))
            assert all(np.isfinite(p).all() for params in run.params for p in params)
            assert run.together == (run.state.stage != "local")

    def test_a_skipped_local_step_repeats_the_momentum(self, world, grads):
        one, other = (world(zero_one(nonfinite="skip")) for _ in range(2))
        for step in range(7):
            for run in (one, other):
                run.step(of_ranks(grads, 3, step))
        gradients = of_ranks(grads, 3, 7)
        gradients[2] = [np.full_like(g, np.nan) for g in gradients[2]]
        momentum = [m.copy() for m in one.states[2].momentum]
        one.step(gradients)
        gradients[2] = momentum
        other.step(gradients)
        for got, want in zip(one.params[2], other.params[2], strict=True):
            assert got == pytest.approx(want, rel=1e-6)
        assert bits(one.states[2].momentum) == bits(momentum)

    @pytest.mark.parametrize(("limit", "size"), [(1.0, 1.0), (1e-3, 1e-2)])
    def test_clipping_in_local_steps_uses_the_norm_of_the_rank(self, world, grads, limit, size):
        """Also if the norm is below 1."""
        clipped, plain = world(zero_one(clip_norm=limit)), world(zero_one())
        for step in range(7):
            clipped.step(of_ranks(grads, 3, step))
        plain.params, plain.states = clipped.params, clipped.states
        gradients = [[np.float32(size) * g for g in of] for of in of_ranks(grads, 3, 7)]
        clipped.step(gradients)
        norms = [math.sqrt(sum(float((g.astype(np.float64) ** 2).sum()) for g in of)) for of in gradients]
        assert all(limit < norm for norm in norms)
        plain.step([[g * (limit / norm) for g in of] for of, norm in zip(gradients, norms, strict=True)])
        for got, want in zip(clipped.params, plain.params, strict=True):
            for a, b in zip(got, want, strict=True):
                assert a == pytest.approx(b, rel=1e-5, abs=1e-6)


class TestCheckpoint:
    @pytest.mark.quick_cases(3)
    @pytest.mark.parametrize("name", OPTIMIZERS)
    @pytest.mark.parametrize(
        "stop", [0, 2, 5, 7, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 4, 6, 8, 10))]
    )
    def test_goes_on_bit_for_bit(self, world, grads, lockstep, name, stop):
        opt = OPTIMIZERS[name]
        run = world(opt)
        for step in range(stop):
            run.step(of_ranks(grads, 3, step))
        saved = [{k: np.array(v) for k, v in opt.state_dict(s).items()} for s in run.states]
        resumed = world(opt)
        resumed.params = [[p.copy() for p in params] for params in run.params]
        loaded = []
        for rank, fresh in enumerate(resumed.states):
            from qcomp.core.checkpoint.format import from_state_dict, read_arrays, read_scalars

            def begin(step, stage, fresh=fresh):
                return opt.enter(fresh._replace(step=step), stage)

            one = read_scalars(saved[rank]) | read_arrays(saved[rank])
            loaded.append(from_state_dict(one, begin, opt.mean, opt.limits))
        resumed.states = loaded
        assert resumed.snapshot() == run.snapshot()
        for step in range(stop, stop + 7):
            run.step(of_ranks(grads, 3, step))
            resumed.step(of_ranks(grads, 3, step))
        assert resumed.snapshot() == run.snapshot()

    def test_through_load_state_dict(self, grads):
        opt = zero_one()

        def rank_main(comm):
            params = grads(SHAPES, 99, 0)
            state = opt.init(params, comm)
            for step in range(6):
                params, state = opt.step(params, grads(SHAPES, comm.rank, step), state, comm)
            assert state.stage == "local"
            saved = opt.state_dict(state)
            assert {"anchor.0", "pending.0", "number.weights"} <= saved.keys()
            loaded = opt.load_state_dict(saved, params, comm)
            finals = [opt.step(params, grads(SHAPES, comm.rank, 6), s, comm)[0] for s in (state, loaded)]
            assert bits(finals[0]) == bits(finals[1])
            with pytest.raises(ValueError, match="lacks"):
                opt.load_state_dict({k: v for k, v in saved.items() if k != "pending.1"}, params, comm)
            with pytest.raises(ValueError, match="stage"):
                opt.load_state_dict({**saved, "stage": "rewarm"}, params, comm)

        run_local(2, rank_main, timeout=20)

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"sync_steps": LocalSteps(4, 4)}, "settings.sync_steps is"),
            ({"variance_steps": DoublingIntervals(3)}, "settings.variance_steps is"),
            ({"freeze": None}, "settings.freeze is"),
        ],
    )
    def test_ranks_must_have_the_same_schedules(self, change, message):
        def rank_main(comm):
            opt = zero_one(**change) if comm.rank else zero_one()
            with pytest.raises(MismatchError, match=message):
                opt.init(np.zeros(40, dtype=np.float32), comm)

        run_local(2, rank_main, timeout=20)


def final_value(opt, steps: int, lockstep) -> float:
    """Return the final f = .5 sum h (x - 1)^2 of problem (b) of test_convergence.py, smaller, two noisy ranks."""
    curvature = np.random.default_rng(0).permutation(np.logspace(-2, 0, 64))
    rng = np.random.default_rng(1)
    run = World(opt, [np.zeros(64)], 2, lockstep)
    for _ in range(steps):
        noise = 0.1 * rng.standard_normal((2, 64))
        run.step([[curvature * (p[0] - 1 + n)] for p, n in zip(run.params, noise, strict=True)])
    return float(np.mean([(0.5 * curvature * (p[0] - 1) ** 2).sum() for p in run.params]))


class TestConvergence:
    STEPS = 1000

    def settings(self, **changes):
        return {
            "learning_rate": lambda step: 0.02 * (1 - step / self.STEPS),
            "betas": (0.9, 0.99),
            **changes,
        }

    def value(self, lockstep, steps=STEPS, **changes) -> float:
        opt = qcomp.ZeroOneAdam(
            **self.settings(exact=None, compressor=qcomp.ScaledSign(64, "rms"), **changes)
        )
        return final_value(opt, steps, lockstep)

    @pytest.mark.exhaustive
    @pytest.mark.parametrize(
        ("sync_steps", "factor"),
        [pytest.param(every, 1.5, marks=pytest.mark.exhaustive), (LocalSteps(250, 4), 3)],
        ids=["one bit at every step", "local steps"],
    )
    def test_ends_where_adam_does(self, lockstep, sync_steps, factor):
        """Without a variance to divide by, it does not.

        Measured: Adam 3.2e-4, 1-bit Adam 3.5e-4, 0/1 Adam 2.3e-4, with local steps 5.7e-4.
        """
        adam = final_value(qcomp.Adam(**self.settings()), self.STEPS, lockstep)
        flat = self.value(lockstep, 300, variance_steps=first, sync_steps=every, eps=1.0)
        assert adam / 4 < self.value(lockstep, sync_steps=sync_steps) < factor * adam
        assert flat > 20 * adam
