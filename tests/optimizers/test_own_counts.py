"""Tensors that are left out of some steps: each counts its own steps, and has a warm-up of its own after the freeze."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import qcomp
from qcomp.core.mean.stages import drive
from qcomp.core.numeric.arrays import host_bytes
from qcomp.core.optimizers.unused import stages_of_used

SHAPES = {"a": (24, 16), "b": (16, 24)}
FREEZE = 8
COMMON: dict[str, Any] = {
    "learning_rate": 0.05,
    "betas": (0.8, 0.9),
    "weight_decay": 0.1,
    "exact": None,
    "compressor": qcomp.Identity(),
}
FROZEN: dict[str, Any] = COMMON | {"freeze": FREEZE, "watch": None}
OPTIMIZERS = {
    "Adam": qcomp.Adam(learning_rate=0.05, betas=(0.8, 0.9), weight_decay=0.1),
    "Adam, coupled decay": qcomp.Adam(learning_rate=0.05, weight_decay=0.1, decoupled_weight_decay=False),
    "Lamb": qcomp.Lamb(learning_rate=0.05, betas=(0.8, 0.9), weight_decay=0.1),
    "OneBitAdam": qcomp.OneBitAdam(**FROZEN),
    "OneBitAdam, coupled decay": qcomp.OneBitAdam(**FROZEN, decoupled_weight_decay=False),
    "QAdam": qcomp.QAdam(**FROZEN, variance_steps=None),
    "OneBitLamb": qcomp.OneBitLamb(**FROZEN),
    "Muon": qcomp.Muon(
        learning_rate=0.05,
        weight_decay=0.1,
        others=("*",),
        compressor=qcomp.Identity(),
        update_compressor=qcomp.Identity(),
    ),
    "CompressedSGD": qcomp.CompressedSGD(
        learning_rate=0.05, weight_decay=0.1, exact=None, compressor=qcomp.Identity()
    ),
    "Lion": qcomp.Lion(learning_rate=0.05, weight_decay=0.1),
}
ALONE = (
    "ignore:(AdamW moves all|\\w+ compresses nothing|Muon orthogonalises nothing|all . ranks have the same)"
)


def gradients(step, rank, names=tuple(SHAPES)):
    return {
        name: np.random.default_rng([step, rank, len(name), ord(name)]).standard_normal(
            SHAPES[name], np.float32
        )
        for name in names
    }


class World:
    """The ranks of a job that trains some of the tensors, in lockstep."""

    def __init__(self, opt, lockstep, names, size):
        self.opt, self.lockstep, self.names = opt, lockstep, names
        params = [np.full(SHAPES[name], 0.5, np.float32) for name in names]
        self.ranks = [(params, opt.initial_state(params, names, rank, size)) for rank in range(size)]

    def step(self, grads):
        """Step with the gradients of each rank by name; a missing one is None."""
        self.ranks = self.lockstep(
            [
                stages_of_used(self.opt, params, [of_rank.get(name) for name in self.names], state)
                for (params, state), of_rank in zip(self.ranks, grads, strict=True)
            ]
        )

    def of(self, name):
        """Return what rank 0 has of a tensor in every stage: parameter, moments and trust ratios."""
        params, state = self.ranks[0]
        i = self.names.index(name)
        ratios = [state.numbers.get(f"{kind}.{name}") for kind in ("trust", "average")]
        return [host_bytes(xs[i]) for xs in (params, state.momentum, state.variance) if xs], ratios

    @property
    def state(self):
        return self.ranks[0][1]


def used_by(pattern, step, size):
    """Return the ranks that use the tensor "b" in a step."""
    if pattern == "frozen for an epoch":
        return range(size) if step >= 5 else ()
    if pattern == "thawed after the freeze":
        return range(size) if step >= FREEZE + 3 else ()
    return [size - 1] if step % 3 == 1 else ()  # a rare expert on one rank


@pytest.mark.quick_cases(12)
@pytest.mark.filterwarnings(ALONE)
@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("pattern", ["frozen for an epoch", "thawed after the freeze", "a rare expert"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_tensor_moves_as_in_an_optimizer_of_its_own(lockstep, name, pattern, size):
    """That optimizer makes a step whenever a rank has a gradient, and freezes its variance after as many steps."""
    opt = OPTIMIZERS[name]
    both, own, rest = (World(opt, lockstep, names, size) for names in (("a", "b"), ("b",), ("a",)))
    made = 0
    for step in range(4 * FREEZE):
        users, grads = used_by(pattern, step, size), [gradients(step, rank) for rank in range(size)]
        rest.step(grads)
        of_b = [{"b": g["b"] if rank in users else 0 * g["b"]} for rank, g in enumerate(grads)]
        both.step([g if rank in users else {"a": g["a"]} for rank, g in enumerate(grads)])
        assert name == "OneBitLamb" or both.of("a") == rest.of(
            "a"
        )  # 1-bit LAMB scales by the mean of all tensors
        if users:
            made += 1
            own.step(of_b)
        if name != "OneBitLamb" or own.state.stage == "warmup":
            assert both.of("b") == own.of("b")
    assert made > FREEZE


@pytest.mark.filterwarnings(ALONE)
def test_only_tensors_that_miss_steps_have_a_count(lockstep):
    """States of all others are as they were, and so are messages, except for those of tensors that begin late."""
    opt = OPTIMIZERS["OneBitAdam"]
    world = World(opt, lockstep, ("a", "b"), 2)
    for step in range(FREEZE + 4):
        grads = [gradients(step, rank) for rank in range(2)]
        if step < FREEZE + 2:
            for of_rank in grads:
                del of_rank["b"]
        world.step(grads)
    missed = float(FREEZE + 2)
    assert {key: x for key, x in world.state.numbers.items() if "." in key} == {
        "missed_steps.b": missed,
        "exact_steps.b": float(FREEZE),
    }
    saved = opt.state_dict(world.state)
    assert saved["number.missed_steps.b"] == missed
    assert not any("missed" in key and "a" in key.partition("steps.")[2] for key in saved)


def test_the_rule_of_torch_for_a_rate_of_one():
    """A tensor whose first gradient comes at step 300 moves by the rate, and not by 2.9 times as much."""
    opt, comm = qcomp.Adam(learning_rate=1.0), qcomp.comm.LocalCommunicator.alone()
    params = [np.zeros(4), np.zeros(4)]
    state = opt.init(params, comm, ["a", "b"])
    for step in range(301):
        grads = [np.ones(4), np.ones(4) if step == 300 else None]
        params, state = drive(stages_of_used(opt, params, grads, state), comm)
    np.testing.assert_allclose(params[1], -1.0, rtol=1e-7)


@pytest.mark.filterwarnings(ALONE)
@pytest.mark.parametrize("steps", [6, FREEZE + 5])
@pytest.mark.parametrize("size", [2, 3])
def test_counts_are_saved_and_move_to_other_ranks(lockstep, steps, size):
    opt = replace(OPTIMIZERS["OneBitAdam"], watch=qcomp.VarianceWatch(rewarm_steps=2))
    world = World(opt, lockstep, ("a", "b"), 2)
    for step in range(steps):
        grads = [gradients(step, rank) for rank in range(2)]
        if step < steps - 2:
            del grads[0]["b"], grads[1]["b"]
        world.step(grads)
    assert world.state.numbers["missed_steps.b"] == steps - 2
    saved = [opt.state_dict(state) for _, state in world.ranks]
    params = world.ranks[0][0]
    given = saved if size != 2 else None

    def load(rank):
        own = saved[rank] if given is None else given
        return opt.load_stages(own, params, rank=rank, size=size, names=("a", "b"))

    for state in lockstep([load(rank) for rank in range(size)]):
        assert repr(sorted(state.numbers.items())) == repr(sorted(world.state.numbers.items()))  # with NaN


@pytest.mark.parametrize("value", [0.0, 2.5, -1.0, 1e9, float("nan")])
def test_a_count_that_no_optimizer_saves_is_refused(value):
    opt, comm = qcomp.Adam(learning_rate=0.1), qcomp.comm.LocalCommunicator.alone()
    params = [np.zeros(4, np.float32)] * 2
    state = opt.init(params, comm, ["a", "b"])
    for grads in ([params[0], params[0]], [params[0], None]):
        params, state = drive(stages_of_used(opt, params, grads, state), comm)
    saved = opt.state_dict(state)
    assert opt.load_state_dict(saved, params, comm, ["a", "b"]).numbers == {"missed_steps.b": 1.0}
    del saved["digests"]
    with pytest.raises(
        ValueError, match=r"missed_steps\.b=.*; expected a whole number, at least 1, at most 2"
    ):
        opt.load_state_dict(saved | {"number.missed_steps.b": value}, params, comm, ["a", "b"])
    with pytest.raises(
        ValueError, match=r"it has 'number.missed_steps.c', which this optimizer does not keep"
    ):
        opt.load_state_dict(saved | {"number.missed_steps.c": 1.0}, params, comm, ["a", "b"])


class TestAfterTheFreeze:
    """A tensor without gradients until then has a frozen variance of 0, by which nothing can be divided."""

    @pytest.mark.filterwarnings(ALONE)
    @pytest.mark.parametrize("watch", [None, qcomp.VarianceWatch()])
    @pytest.mark.parametrize("exact", [None, qcomp.ExactBelow(10_000)])
    @pytest.mark.parametrize(
        "opt",
        [
            qcomp.OneBitAdam(**FROZEN | {"compressor": qcomp.ScaledSign(scale="rms")}),
            qcomp.QAdam(
                **FROZEN | {"compressor": qcomp.MinMaxUInt8()}, variance_steps=lambda step: step in (4, 7)
            ),
            qcomp.OneBitLamb(**FROZEN | {"compressor": qcomp.ScaledSign(scale="rms")}),
        ],
        ids=lambda opt: type(opt).__name__,
    )
    def test_it_moves_like_adam_from_its_first_step(self, lockstep, opt, exact, watch):
        """Its own exact steps are those of an optimizer of its own, bit for bit, whatever compresses the others."""
        averaging = qcomp.Averaging(tensorwise=True)
        opt = replace(opt, exact=exact, watch=watch, averaging=averaging)
        both, own = World(opt, lockstep, ("a", "b"), 2), World(opt, lockstep, ("b",), 2)
        for step in range(3 * FREEZE + 2):
            grads = [gradients(step, rank) for rank in range(2)]
            if step < FREEZE + 2:
                del grads[0]["b"], grads[1]["b"]
            both.step(grads)
            if step >= FREEZE + 2:
                own.step([{"b": g["b"]} for g in grads])
                if own.state.stage == "warmup":
                    assert both.of("b")[0] == own.of("b")[0]
        assert own.state.stage == both.state.stage == "compressed"
        assert not any(key.startswith("exact_steps") for key in both.state.numbers)
        i = both.names.index("b")
        if opt.variance_steps is None:
            assert host_bytes(both.state.variance[i]) == host_bytes(own.state.variance[0])
        moved = np.abs(both.ranks[0][0][i] - 0.5)
        assert 0 < moved.max() < 40 * opt.learning_rate

    def test_it_sends_exact_gradients_only_when_a_rank_has_some(self, lockstep):
        """And one small exchange more in each step, in which the ranks learn who has some."""
        opt = qcomp.OneBitAdam(**FROZEN | {"compressor": qcomp.ScaledSign(bucket_size=64)})
        names, params = ("a", "b"), [np.full(shape, 0.5, np.float32) for shape in SHAPES.values()]
        states = [opt.initial_state(params, names, rank, 2) for rank in range(2)]
        worlds, sizes = [(params, state) for state in states], []

        def counted(stages):
            """Yield what stages yield, and note what they send."""
            arrived = None
            while True:
                try:
                    request = next(stages) if arrived is None else stages.send(arrived)
                except StopIteration as stop:
                    return stop.value
                send = request.send if isinstance(request.send, tuple) else (request.send,)
                sizes[-1].append(sum(x.nbytes for x in send))
                arrived = yield request

        for step in range(FREEZE + 4):
            of_ranks = [gradients(step, rank) for rank in range(2)]
            grads = [
                [g["a"], g["b"] if step == FREEZE + 2 and rank else None] for rank, g in enumerate(of_ranks)
            ]
            sizes.append([])
            runs = [stages_of_used(opt, p, g, s) for (p, s), g in zip(worlds, grads, strict=True)]
            worlds = lockstep([counted(runs[0]), runs[1]])
        before, warm, compressed = sizes[1], sizes[FREEZE - 1], sizes[FREEZE + 1]
        used, after = sizes[FREEZE + 2], sizes[FREEZE + 3]
        assert len(compressed) == len(before) == len(used)
        assert sum(after) == sum(compressed) < sum(warm) / 4
        assert sum(used) - sum(compressed) >= 4 * 16 * 24

    @pytest.mark.filterwarnings(ALONE, "ignore:the variance of OneBitAdam no longer fits")
    def test_a_re_warm_corrects_its_bias(self, lockstep):
        watch = qcomp.VarianceWatch(largest=1.5, smallest=0, rewarm_steps=4, every=1)
        opt = replace(OPTIMIZERS["OneBitAdam"], watch=watch)
        both, own = World(opt, lockstep, ("a", "b"), 1), World(opt, lockstep, ("b",), 1)
        stages, begin = [], FREEZE + 6
        for step in range(begin + FREEZE - 1):
            grads = gradients(step, 0)
            grads["a"] = np.full_like(grads["a"], 1.0 if step < FREEZE else 4.0)
            both.step([grads if step >= begin else {"a": grads["a"]}])
            stages.append(both.state.stage)
            if step >= begin:
                own.step([{"b": grads["b"]}])
                assert both.of("b")[0] == own.of("b")[0]
        assert set(stages[begin:]) == {"compressed", "rewarm"}

    def test_gradients_of_zero_until_the_freeze_are_warned_of(self):
        """They are gradients, so the tensor has made its steps; but it cannot move."""
        opt, comm = qcomp.OneBitAdam(**FROZEN), qcomp.comm.LocalCommunicator.alone()
        params = [np.zeros(4, np.float32), np.zeros(0, np.float32), np.zeros(4, np.float32)]
        state = opt.init(params, comm, ["a", "empty", "b"])
        zeros = [np.ones_like(params[0]), params[1], np.zeros_like(params[0])]
        for _ in range(FREEZE - 1):
            params, state = opt.step(params, zeros, state, comm)
        with pytest.warns(
            UserWarning,
            match=r"all gradients of 'b' were 0 in the first 8 steps.*from now on, since the variance is frozen",
        ):
            params, state = opt.step(params, zeros, state, comm)

    @pytest.mark.filterwarnings(ALONE)
    def test_zero_one_adam_says_that_it_does_not_move(self, lockstep):
        opt = qcomp.ZeroOneAdam(
            **COMMON | {"weight_decay": 0.0}, variance_steps=lambda step: step < 4 or step == 8
        )
        world = World(opt, lockstep, ("a", "b"), 2)
        for step in range(7):
            grads = [gradients(step, rank) for rank in range(2)]
            if step < 5:
                del grads[0]["b"], grads[1]["b"]
            if step == 2:
                with pytest.warns(
                    UserWarning, match=r"of 'b' were 0 in the first 3 steps.*until one of variance_steps"
                ):
                    world.step(grads)
            else:
                world.step(grads)
        assert (world.ranks[0][0][1] == np.float32(0.5)).all()
        for step in range(
            7, 27
        ):  # the first of them measures the variance, which has one square of each element
            world.step([gradients(step, rank) for rank in range(2)])
            moved = np.abs(world.ranks[0][0][1] - 0.5).max() / opt.learning_rate
            assert 0 < moved < 1.5 * (step - 6)  # with its own count, and no square near 0


@pytest.mark.filterwarnings(ALONE)
def test_zero_one_adam_counts_its_own_updates(lockstep):
    """In its exact steps it is Adam; later the variance of a tensor is corrected by its own number of updates."""
    opt = qcomp.ZeroOneAdam(**COMMON, variance_steps=lambda step: step <= 12)
    both, own = World(opt, lockstep, ("a", "b"), 2), World(opt, lockstep, ("b",), 2)
    for step in range(12):
        grads = [gradients(step, rank) for rank in range(2)]
        if step < 5:
            del grads[0]["b"], grads[1]["b"]
        else:
            own.step([{"b": g["b"]} for g in grads])
        both.step(grads)
    assert both.state.numbers["missed_updates.b"] == both.state.numbers["missed_steps.b"] == 5
    for theirs, ours in zip(own.of("b")[0][:2], both.of("b")[0][:2], strict=True):
        assert theirs == ours
