"""Weight decay in both forms, against Adam and AdamW of torch, and bit for bit against NumPy."""

import math
from typing import Any

import numpy as np
import pytest

import qcomp
from qcomp.comm import run_local
from qcomp.core.optimizers.adam import Adam
from qcomp.testing.libraries import to_numpy

SHAPES = [(3, 5), (), (17,)]
DECAY, RATE, BETAS = 0.3, 0.01, (0.8, 0.9)
SIGN = qcomp.ScaledSign(bucket_size=16)


def one_bit(**changes: Any) -> qcomp.OneBitAdam:
    settings = {"learning_rate": RATE, "betas": BETAS, "weight_decay": DECAY, "freeze": 4, "exact": None}
    return qcomp.OneBitAdam(**{**settings, "compressor": qcomp.Identity(), **changes})


def reference(params: list, steps: list[list], *, freeze: int, coupled: bool, scales: list[float]) -> list:
    """Adam whose variance is frozen after some steps, given the mean gradient and clipping factor of each step."""
    (b1, b2), eps = BETAS, 1e-8
    m, v = ([p * 0 for p in params] for _ in range(2))
    frozen: list = []
    for t, (means, scale) in enumerate(zip(steps, scales, strict=True), 1):
        for i, g in enumerate(means):
            decay = DECAY * params[i]
            if t <= freeze:
                whole = g + decay if coupled else g
                m[i] = b1 * m[i] + (1 - b1) * whole
                v[i] = b2 * v[i] + (1 - b2) * (whole * whole)
                root = np.sqrt(v[i] / (1 - b2**t))
            else:
                m[i] = b1 * m[i] + ((1 - b1) * scale) * g
                m[i] = m[i] + ((1 - b1) * DECAY) * params[i] if coupled else m[i]
                root = np.sqrt(frozen[i])
            direction = (m[i] / (1 - b1**t)) / (root + eps)
            direction = direction if coupled else direction + decay
            params = [*params[:i], params[i] - RATE * direction, *params[i + 1 :]]
        if t == freeze:
            frozen = [x / (1 - b2**t) for x in v]
    return [*params, *m]


def bits(arrays: Any) -> list[bytes]:
    return [np.asarray(a).tobytes() for a in arrays]


def means_of(of_ranks: list[list]) -> list:
    size = len(of_ranks)
    return [sum(g[1:], g[0]) / g[0].dtype.type(size) for g in zip(*of_ranks, strict=True)]


class TestReference:
    @pytest.mark.parametrize("coupled", [False, True])
    @pytest.mark.parametrize("freeze", [4, 99])
    @pytest.mark.parametrize(("size", "dtype"), [(1, np.float32), (1, np.float64), (2, np.float64)])
    @pytest.mark.filterwarnings("ignore:all . ranks have the same gradients")
    def test_bit_equal(self, job, grads, *, coupled, freeze, size, dtype):
        """With two ranks the gradients are equal, so that averaging momenta rounds like averaging gradients."""
        params = grads(SHAPES, 99, 0, dtype)
        run = job(one_bit(freeze=freeze, decoupled_weight_decay=not coupled), params, size)
        steps = [grads(SHAPES, 0, step, dtype) for step in range(9)]
        for g in steps:
            run.step([g] * size)
        expected = reference(params, steps, freeze=freeze, coupled=coupled, scales=[1.0] * 9)
        assert bits([*run.params[0], *run.state.momentum]) == bits(expected)

    @pytest.mark.parametrize("size", [2, 3])
    def test_ranks_with_different_gradients(self, job, grads, size):
        """The decay of the common parameters is added once, whatever the number of ranks."""
        params = grads(SHAPES, 99, 0, np.float64)
        run = job(one_bit(decoupled_weight_decay=False), params, size)
        steps = []
        for step in range(9):
            of_ranks = [grads(SHAPES, rank, step, np.float64) for rank in range(size)]
            run.step(of_ranks)
            steps.append(means_of(of_ranks))
        expected = reference(params, steps, freeze=4, coupled=True, scales=[1.0] * 9)
        for got, want in zip([*run.params[0], *run.state.momentum], expected, strict=True):
            assert np.abs(got - want).max() < 9 * 20 * 2.0**-52 * max(1.0, np.abs(want).max())

    @pytest.mark.parametrize("break_it", ["coupled without 1 - b1", "not at all"])
    def test_another_decay_is_caught(self, job, grads, monkeypatch, break_it):
        decayed = Adam.decayed

        def broken(self, values, params, state, *, of_momenta=False):
            if break_it == "not at all" and state.stage == "compressed":
                return tuple(values)
            return decayed(self, values, params, state)

        monkeypatch.setattr(Adam, "decayed", broken)
        with pytest.raises(AssertionError):
            self.test_bit_equal(job, grads, coupled=True, freeze=4, size=1, dtype=np.float64)

    def test_only_the_gradient_is_clipped(self, job, grads):
        """As with ``clip_grad_norm_`` before a step of torch's Adam."""
        clip, params = 0.5, grads(SHAPES, 99, 0, np.float64)
        run = job(one_bit(decoupled_weight_decay=False, clip_norm=clip), params, 1)
        steps, scales = [], []
        for step in range(9):
            g = grads(SHAPES, 0, step, np.float64)
            run.step([g])
            scale = clip / math.sqrt(sum(float((x**2).sum()) for x in g))
            assert scale < 1
            steps.append([scale * x for x in g] if step < 4 else g)
            scales.append(scale)
        expected = reference(params, steps, freeze=4, coupled=True, scales=scales)
        for got, want in zip(run.params[0], expected, strict=False):
            assert got == pytest.approx(want, rel=1e-12, abs=1e-12)


class TestTorch:
    @pytest.mark.parametrize("decoupled", [False, True])
    def test_step_by_step(self, job, grads, *, decoupled):
        """torch has one form in Adam and the other in AdamW; our order of operations differs in the last bits."""
        torch = pytest.importorskip("torch")
        start = grads(SHAPES, 99, 0, np.float64)
        leaves = [torch.tensor(p).requires_grad_() for p in start]
        make = torch.optim.AdamW if decoupled else torch.optim.Adam
        theirs = make(leaves, lr=RATE, betas=BETAS, eps=1e-8, weight_decay=DECAY)
        ours = job(one_bit(freeze=99, decoupled_weight_decay=decoupled), start, 2)
        for step in range(20):
            of_ranks = [grads(SHAPES, rank, step, np.float64) for rank in range(2)]
            for leaf, g in zip(leaves, means_of(of_ranks), strict=True):
                leaf.grad = torch.tensor(g)
            theirs.step()
            ours.step(of_ranks)
            for leaf, p in zip(leaves, ours.params[0], strict=True):
                # A step moves by about the rate; its direction has some ten roundings; earlier steps' add up.
                assert np.abs(leaf.detach().numpy() - p).max() < (step + 1) * 20 * 2.0**-52
        assert not np.allclose(start[0], ours.params[0][0])

    def test_the_two_forms_differ(self, job, grads):
        finals = []
        for decoupled in (False, True):
            run = job(one_bit(decoupled_weight_decay=decoupled), grads(SHAPES, 99, 0, np.float64), 1)
            run.step([grads(SHAPES, 0, 0, np.float64)])
            finals.append(run.params[0][0])
        assert np.abs(finals[0] - finals[1]).max() > 1e-4


@pytest.mark.parametrize("size", [1, 2, 3])
def test_identity_of_every_compressed_step(job, grads, size):
    """m' + E' = b1 m + (1 - b1) (mean_i g_i + decay x) + E: the decay is not compressed, so it is never owed."""
    run = job(one_bit(decoupled_weight_decay=False, compressor=SIGN), grads(SHAPES, 99, 0, np.float64), size)
    b1 = BETAS[0]
    for step in range(14):
        of_ranks = [grads(SHAPES, rank, step, np.float64) for rank in range(size)]
        if step < 4:
            run.step(of_ranks)
            continue
        x, m, e = run.params[0], run.state.momentum, run.error()
        run.step(of_ranks)
        for i, g in enumerate(means_of(of_ranks)):
            expected = b1 * m[i] + (1 - b1) * (g + DECAY * x[i]) + e[i].reshape(g.shape)
            got = run.state.momentum[i] + run.error()[i].reshape(g.shape)
            assert np.abs(got - expected).max() <= 1e-13 * max(1.0, np.abs(expected).max())


def test_in_every_library(library, lockstep, grads):
    """The same bytes as in NumPy, and no input is written to."""
    opt = one_bit(decoupled_weight_decay=False, freeze=1)
    start, steps = grads([(20,)], 99, 0), [grads([(20,)], 0, step) for step in range(3)]

    def train(convert: Any) -> list:
        params = [convert(p) for p in start]
        state = opt.initial_state(params, ("0",), rank=0, size=1)
        for g in steps:
            ((params, state),) = lockstep([opt.stages(params, [convert(x) for x in g], state)])
        return [to_numpy(a) for a in (*params, *state.momentum)]

    assert bits(train(library.array)) == bits(train(np.array))


class TestArguments:
    def test_the_ranks_must_agree(self):
        def rank_main(comm):
            with pytest.raises(qcomp.MismatchError, match=r"settings\.decoupled_weight_decay is"):
                one_bit(decoupled_weight_decay=comm.rank == 0).init(np.zeros(8), comm)

        run_local(2, rank_main, timeout=20)

    def test_a_setting_that_is_not_a_bool_is_refused(self):
        with pytest.raises(TypeError, match=r"decoupled_weight_decay is 0\.1; expected True or False"):
            one_bit(decoupled_weight_decay=0.1)
