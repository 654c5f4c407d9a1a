"""QSVRG: exact laws of its steps, linear convergence at the predicted rate, bytes, checkpoints, errors."""

import io
from typing import Any

import numpy as np
import pytest

import qcomp
from qcomp.comm import LocalCommunicator, run_local
from qcomp.core.numeric.arrays import host_bytes
from qcomp.core.optimizers.compression import Means
from qcomp.testing import replace_draws

SHAPES = [(40,), (3, 11), ()]
KINDS = ("snapshot", "gradient", "iterates")


def qsvrg(**changes) -> qcomp.QSVRG:
    return qcomp.QSVRG(
        **{
            "learning_rate": 0.05,
            "exact": None,
            "compressor": qcomp.QSGD(levels=7, bucket_size=16),
            **changes,
        }
    )


def held(arrays) -> bytes:
    return b"".join(host_bytes(a) for a in arrays)


def begin(lockstep, opt, params, full_grads, size: int) -> list:
    """Return the states of all ranks after an epoch has begun."""
    states = [
        opt.initial_state(params, tuple(map(str, range(len(params)))), rank, size) for rank in range(size)
    ]
    stages = [opt.epoch_stages(params, g, s) for g, s in zip(full_grads, states, strict=True)]
    return lockstep(stages)


def step(lockstep, opt, params, pairs, states) -> tuple[list, list]:
    """Take a step on all ranks, which then hold the same parameters and the same state."""
    results = lockstep([opt.stages(params, pair, s) for pair, s in zip(pairs, states, strict=True)])
    assert len({held(p) for p, _ in results}) == 1
    states = [s for _, s in results]
    for kind in KINDS:
        assert len({held(s.arrays[kind]) for s in states}) == 1
    return results[0][0], states


class Problem:
    """Random parameters and gradients of all ranks: full ones at y, and of a sample at x and y for each step."""

    def __init__(self, grads, size: int, *, dtype=np.float32, steps: int = 2, shapes=SHAPES) -> None:
        self.params = grads(shapes, 99, 0, dtype)
        self.full = [grads(shapes, rank, 100, dtype) for rank in range(size)]
        self.pairs = [
            [
                (grads(shapes, rank, 2 * t, dtype), grads(shapes, rank, 2 * t + 1, dtype))
                for rank in range(size)
            ]
            for t in range(steps)
        ]


class TestSteps:
    @pytest.mark.parametrize("size", [1, 3])
    @pytest.mark.parametrize("decay", [0.0, 0.1])
    def test_without_loss_it_equals_svrg(self, lockstep, grads, size, decay):
        problem = Problem(grads, size, dtype=np.float64, steps=4)
        opt = qsvrg(compressor=qcomp.Identity(), weight_decay=decay)
        x, states = problem.params, begin(lockstep, opt, problem.params, problem.full, size)
        g = [sum(full[i] for full in problem.full) / size for i in range(len(SHAPES))]
        expected, sums = x, [np.zeros(shape) for shape in SHAPES]
        for pairs in problem.pairs:
            x, states = step(lockstep, opt, x, pairs, states)
            u = [sum(gx[i] - gy[i] + g[i] for gx, gy in pairs) / size for i in range(len(SHAPES))]
            expected = [p - 0.05 * (v + decay * p) for p, v in zip(expected, u, strict=True)]
            sums = [s + p for s, p in zip(sums, expected, strict=True)]
            for got, want in zip(x, expected, strict=True):
                np.testing.assert_allclose(got, want, rtol=0, atol=1e-13)
        for got, want in zip(opt.next_snapshot(x, states[0]), sums, strict=True):
            np.testing.assert_allclose(got, want / 4, rtol=0, atol=1e-13)
        assert states[0].step == 4

    def test_the_whole_corrected_vector_is_quantized_once(self, lockstep, grads):
        """By all-gather, u is the mean over the ranks of Q(grad_x - grad_y + g), each with its rank's key."""
        problem, opt = Problem(grads, 3, shapes=[(40,)]), qsvrg(seed=5)
        states = begin(lockstep, opt, problem.params, problem.full, 3)
        (g,) = states[0].arrays["gradient"]
        u = 0
        for rank, ((gx,), (gy,)) in enumerate(problem.pairs[0]):
            corrected = gx - gy + g
            payload = opt.compressor.compress(corrected, key=qcomp.Key(seed=5, step=0, rank=rank))
            u = u + opt.compressor.decompress(payload, like=corrected)
        x, _ = step(lockstep, opt, problem.params, problem.pairs[0], states)
        assert x[0].tobytes() == (problem.params[0] - 0.05 * (u / np.float32(3))).tobytes()

    def test_is_unbiased(self, lockstep, grads):
        """Exactly, over all draws: values are sixteenths of a level, so sixteen draws stand for all."""
        size, step_size = 2, 2.0**-4
        rng = np.random.default_rng(0)
        corrected = [rng.integers(-7 * 16, 7 * 16 + 1, 16) * (step_size / 16) for _ in range(size)]
        for each in corrected:
            each[3] = 7 * step_size  # the largest element, which sets the step
        opt = qsvrg(learning_rate=1.0)
        x0, zeros = [np.zeros(16)], [np.zeros(16)]
        states = begin(lockstep, opt, x0, [zeros] * size, size)
        finals = []
        for draw in range(16):
            with replace_draws(lambda key, block, draw=draw: draw * 4096.0):
                x, _ = step(lockstep, opt, x0, [([c], zeros) for c in corrected], states)
            finals.append(x[0])
        assert np.array_equal(np.mean(finals, axis=0), -sum(corrected) / size)
        assert len({f.tobytes() for f in finals}) > 10  # the mean is exact although single draws differ

    def test_exact_tensors(self, lockstep, grads):
        problem = Problem(grads, 2)
        opt = qsvrg(exact=qcomp.ExactBelow(20))  # the vector and the scalar stay exact
        states = begin(lockstep, opt, problem.params, problem.full, 2)
        x, _ = step(lockstep, opt, problem.params, problem.pairs[0], states)
        g, pairs = states[0].arrays["gradient"], problem.pairs[0]
        for i, exact in enumerate((True, False, True)):
            u = sum(gx[i] - gy[i] + g[i] for gx, gy in pairs) / np.float32(2)
            same = x[i].tobytes() == np.asarray(problem.params[i] - 0.05 * u, dtype=np.float32).tobytes()
            assert same == exact

    def test_clipping_applies_to_the_corrected_vectors(self, lockstep, grads):
        problem = Problem(grads, 2, dtype=np.float64)
        moves = {}
        for clip in (None, 0.5):
            opt = qsvrg(compressor=qcomp.Identity(), clip_norm=clip)
            states = begin(lockstep, opt, problem.params, problem.full, 2)
            x, _ = step(lockstep, opt, problem.params, problem.pairs[0], states)
            moves[clip] = [p - q for p, q in zip(problem.params, x, strict=True)]
        g, pairs = states[0].arrays["gradient"], problem.pairs[0]
        squares = sum(((gx[i] - gy[i] + g[i]) ** 2).sum() for gx, gy in pairs for i in range(len(SHAPES)))
        for clipped, free in zip(moves[0.5], moves[None], strict=True):
            np.testing.assert_allclose(clipped, free * 0.5 / np.sqrt(squares / 2), rtol=1e-9)

    @pytest.mark.slow
    @pytest.mark.parametrize("topology", ["two_phase", "hierarchical"])
    def test_other_topologies_are_unbiased_too(self, topology):
        """In every element, the mean of 120 independent steps is within five standard errors of the exact mean."""
        opt, steps = (
            qsvrg(learning_rate=1.0, averaging=qcomp.Averaging(topology=topology, feedback=False)),
            120,
        )
        corrected = [np.random.default_rng(rank).standard_normal(16) for rank in range(4)]

        def rank_main(comm):
            x = np.zeros(16)
            state = opt.begin_epoch(x, x, opt.init(x, comm), comm)
            moves = []
            for _ in range(steps):
                moved, state = opt.step(x, (corrected[comm.rank], x), state, comm)
                moves.append(-moved)
            return np.stack(moves)

        moves = run_local(4, rank_main, hosts=["a", "a", "b", "b"], timeout=30)[0]
        assert len({m.tobytes() for m in moves}) > steps / 2
        error = moves.std(axis=0) / np.sqrt(steps) + 1e-5  # the largest element hardly varies
        assert (np.abs(moves.mean(axis=0) - sum(corrected) / 4) <= 5 * error).all()

    def test_half_precision(self, lockstep, grads):
        problem = Problem(grads, 2, dtype=np.float16)
        opt = qsvrg()
        x, states = problem.params, begin(lockstep, opt, problem.params, problem.full, 2)
        for pairs in problem.pairs:
            x, states = step(lockstep, opt, x, pairs, states)
        assert (
            {p.dtype for p in x}
            == {p.dtype for p in opt.next_snapshot(x, states[0])}
            == {np.dtype("float16")}
        )
        assert {a.dtype for kind in KINDS for a in states[0].arrays[kind]} == {np.dtype("float32")}

    def test_every_library_gives_the_same(self, lockstep, grads, library):
        """No input is written to, as the read-only arrays show."""
        # JAX compiles every operation for every shape; the contract of compressors ensures that it quantizes alike.
        size, c = (1, qcomp.Identity()) if library.name == "jax" else (2, qcomp.QSGD(7, 16))
        problem, opt = Problem(grads, size, shapes=[(5, 8)]), qsvrg(compressor=c)

        def run(array, seal):
            x = [array(p) for p in problem.params]
            states = begin(lockstep, opt, x, [[array(g) for g in full] for full in problem.full], size)
            for pairs in problem.pairs:
                seal(states)
                converted = [tuple([array(g) for g in each] for each in pair) for pair in pairs]
                x, states = step(lockstep, opt, x, converted, states)
            return held(x) + held(opt.next_snapshot(x, states[0]))

        assert run(library.array, library.seal) == run(np.asarray, lambda value: value)


class TestEpochs:
    def test_the_snapshot_is_a_copy(self, lockstep, grads):
        """A caller that trains in place overwrites the old parameters."""
        problem, opt = Problem(grads, 1, shapes=[(4,), (3, 2)]), qsvrg()
        params = [p.copy() for p in problem.params]
        (state,) = begin(lockstep, opt, params, problem.full, 1)
        for p in params:
            p[...] = 7
        assert held(state.arrays["snapshot"]) == held(problem.params)

    def test_a_new_epoch_forgets_the_last(self, lockstep, grads):
        problem, opt = Problem(grads, 2), qsvrg()
        states = begin(lockstep, opt, problem.params, problem.full, 2)
        x, states = step(lockstep, opt, problem.params, problem.pairs[0], states)
        states = lockstep([opt.epoch_stages(x, g, s) for g, s in zip(problem.full, states, strict=True)])
        assert (states[0].step, states[0].stage) == (1, "epoch")
        assert not any(a.any() for a in states[0].arrays["iterates"])
        x, states = step(lockstep, opt, x, problem.pairs[1], states)
        assert held(opt.next_snapshot(x, states[0])) == held(x)

    def test_an_array_instead_of_a_list(self):
        opt, comm, y = qsvrg(), LocalCommunicator.alone(), np.ones((3, 4), dtype=np.float32)
        state = opt.begin_epoch(y, y, opt.init(y, comm), comm)
        x, state = opt.step(y, (y, y), state, comm)
        assert x.shape == opt.next_snapshot(x, state).shape == (3, 4)

    def test_bytes(self):
        opt, y = qsvrg(compressor=qcomp.QSGD(7, 128)), np.ones(4096, dtype=np.float32)

        def rank_main(comm):
            state, sent = opt.init(y, comm), [comm.bytes_sent]
            state = opt.begin_epoch(y, y, state, comm)
            sent.append(comm.bytes_sent)
            opt.step(y, (y, y), state, comm)
            sent.append(comm.bytes_sent)
            return sent[1] - sent[0], sent[2] - sent[1]

        verdict = 8  # the verdict of a message
        payload = 4096 // 2 + 32 * 4
        exact = 2 * 2 * (4096 // 3 * 4)  # 4096 elements are cut into chunks of 1366, 1366 and 1364
        for begun, stepped in run_local(3, rank_main):
            assert abs(begun - exact - 2 * 2 * verdict) <= 4 * 8
            assert stepped == 2 * (payload + verdict)


class TestConvergence:
    """Ridge regression, 64 unknowns, 128 samples, 4 workers, L / mu = 29.6, rate .1 / L, 10 L / mu steps an epoch.

    The steps are unbiased, so the mean of x_t is y contracted t times by I - rate H: this predicts the gap after an
    epoch, except for the variance, which adds to it. All four workers are simulated in one vector, one bucket each.
    """

    N, SAMPLES, WORKERS, STEPS = 64, 128, 4, 296

    @pytest.fixture
    def ridge(self):
        rng = np.random.default_rng(0)
        a, b = rng.standard_normal((self.SAMPLES, self.N)) / 8, rng.standard_normal(self.SAMPLES)
        smooth, hessian = (a**2).sum(axis=1).max(), a.T @ a / self.SAMPLES
        decay = (smooth - 29.6 * np.linalg.eigvalsh(hessian)[0]) / 28.6
        return a, b, decay, hessian + decay * np.eye(self.N), 0.1 / (smooth + decay)

    def gaps(
        self, ridge, levels: int, epochs: int, *, start: float = 1.0, corrected: bool = True
    ) -> np.ndarray:
        """Return the ratio of the gaps f - f* after and before each epoch."""
        a, b, decay, hessian, rate = ridge
        solution = np.linalg.solve(hessian, a.T @ b / self.SAMPLES)
        opt = qsvrg(learning_rate=rate, compressor=qcomp.QSGD(levels, 64, norm="l2"))
        rng = np.random.default_rng(1)

        def gradients(x, j):
            return a[j] * (a[j] @ x - b[j])[:, None] + decay * x

        def mean(vectors, state):
            payload = opt.compressor.compress(vectors.reshape(-1), key=qcomp.Key(seed=1, step=state.step))
            decoded = opt.compressor.decompress(payload, like=vectors)
            return decoded.mean(axis=0)

        y, found = (1 - start) * solution, []
        alone = LocalCommunicator.alone()
        state = opt.init(y, alone)
        for _ in range(epochs + 1):
            found.append((y - solution) @ hessian @ (y - solution) / 2)
            x: Any = y
            state = opt.begin_epoch(y, hessian @ (y - solution), state, alone)
            for _ in range(self.STEPS if len(found) <= epochs else 0):
                j = rng.integers(self.SAMPLES, size=self.WORKERS)
                at_x = gradients(x, j)
                vectors = at_x
                if corrected:
                    vectors = at_x - gradients(y, j) + state.arrays["gradient"][0]
                (x,), state = opt.apply([x], Means((mean(vectors, state),), state.exchange), state)
            y = opt.next_snapshot(x, state) if len(found) <= epochs else y
        return np.asarray(found[1:]) / found[:-1]

    def predicted(self, ridge, epochs: int) -> np.ndarray:
        a, b, _, hessian, rate = ridge
        eigenvalues, vectors = np.linalg.eigh(hessian)
        start = vectors.T @ np.linalg.solve(hessian, a.T @ b / self.SAMPLES)
        powers = (1 - rate * eigenvalues) ** np.arange(1, self.STEPS + 1)[:, None]
        found = [(eigenvalues * powers.mean(axis=0) ** (2 * p) * start**2).sum() for p in range(epochs + 1)]
        return np.asarray(found[1:]) / found[:-1]

    @pytest.mark.slow
    @pytest.mark.parametrize(
        "levels", [pytest.param(8, marks=pytest.mark.slow), 1]
    )  # the root of 64, and the minimum
    def test_converges_linearly_at_the_predicted_rate(self, ridge, levels):
        ratios, predicted = self.gaps(ridge, levels, 2), self.predicted(ridge, 2)
        assert (ratios < 0.9).all()
        assert ratios == pytest.approx(predicted, rel=0.08)
        assert ((predicted > 0.28) & (predicted < 0.33)).all()

    @pytest.mark.slow
    def test_plain_sgd_does_not(self, ridge):
        """Close to the solution, the samples' noise moves the same steps without the correction away from it."""
        assert self.gaps(ridge, 8, 1, start=1e-3)[0] < 0.9
        assert self.gaps(ridge, 8, 1, start=1e-3, corrected=False)[0] > 1


def through_numpy(saved: dict) -> dict:
    file = io.BytesIO()
    np.savez(file, **saved)
    file.seek(0)
    return dict(np.load(file, allow_pickle=False))


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("stop", [0, 1, 2, 3, 4])
@pytest.mark.parametrize("topology", ["all_gather", "two_phase"])
def test_goes_on_bit_for_bit(grads, stop, topology):
    """Stopped before the first epoch, at its start, within it, at its end, and in the next one."""
    opt = qsvrg(averaging=qcomp.Averaging(topology=topology, feedback=False), exact=qcomp.ExactBelow(20))

    def rank_main(comm):
        def train(params, state, first, last):
            for t in range(first, last):
                if t % 3 == 0:
                    y = opt.next_snapshot(params, state) if t else params
                    params, state = y, opt.begin_epoch(y, grads(SHAPES, comm.rank, t), state, comm)
                else:
                    pair = grads(SHAPES, comm.rank, t), grads(SHAPES, comm.rank, 50 + t)
                    params, state = opt.step(params, pair, state, comm)
            return params, state

        def snapshot(params, state):
            arrays = b"".join(held(state.arrays[kind]) for kind in KINDS)
            return held(params) + arrays, state.numbers, state.step, state.stage, state.names

        params = grads(SHAPES, 99, 0)
        params, state = train(params, opt.init(params, comm), 0, stop)
        saved = through_numpy(opt.state_dict(state))
        loaded = opt.load_state_dict(saved, params, comm)
        assert snapshot(params, loaded) == snapshot(params, state)
        straight, resumed = (train(params, s, stop, 8) for s in (state, loaded))
        assert snapshot(*straight) == snapshot(*resumed)
        for kind in (
            ("gradient", "iterates") if stop == 2 else ()
        ):  # without either entry the run would continue differently
            forgetful = {k: np.zeros_like(v) if k.startswith(kind) else v for k, v in saved.items()}
            del forgetful["digests"]
            other = train(params, opt.load_state_dict(forgetful, params, comm), stop, 4)
            assert snapshot(*other) != snapshot(*train(params, state, stop, 4))
        return state.stage

    assert set(run_local(2, rank_main, timeout=30)) == {"epoch" if stop else "start"}


class TestErrors:
    Y = np.ones(20, dtype=np.float32)

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ({"compressor": qcomp.ScaledSign(16)}, "compressor is sign.*; expected an unbiased one"),
            ({"averaging": qcomp.Averaging()}, "feedback is True; expected False"),
            ({"learning_rate": -1.0}, "learning_rate is -1.0"),
        ],
    )
    def test_arguments(self, arguments, message):
        with pytest.raises(ValueError, match=message):
            qsvrg(**arguments)

    def test_a_step_before_the_first_epoch(self):
        opt, comm, y = qsvrg(), LocalCommunicator.alone(), self.Y
        with pytest.raises(
            ValueError, match="state is in the stage 'start'; expected 'epoch': call begin_epoch"
        ):
            opt.step(y, (y, y), opt.init(y, comm), comm)

    def test_gradients_must_be_a_pair(self):
        opt, comm, y = qsvrg(), LocalCommunicator.alone(), self.Y
        state = opt.begin_epoch(y, y, opt.init(y, comm), comm)
        for grads, kind in ((y, "ndarray"), ([y, y], "list"), ((y, y, y), "tuple")):
            with pytest.raises(TypeError, match=f"grads is a {kind}; expected the tuple"):
                opt.step(y, grads, state, comm)
        with pytest.raises(ValueError, match=r"grads\[1\] has shapes \[\(3,\)\]; params has \[\(20,\)\]"):
            opt.step(y, (y, y[:3]), state, comm)
        with pytest.raises(ValueError, match=r"full_grad has shapes \[\(3,\)\]"):
            opt.begin_epoch(y, y[:3], state, comm)

    def test_the_mean_of_no_steps_is_an_error(self):
        opt, comm, y = qsvrg(), LocalCommunicator.alone(), self.Y
        state = opt.begin_epoch(y, y, opt.init(y, comm), comm)
        with pytest.raises(ValueError, match="state has made no step since begin_epoch"):
            opt.next_snapshot(y, state)

    def test_the_mean_for_other_parameters_is_an_error(self):
        opt, comm, y = qsvrg(), LocalCommunicator.alone(), self.Y
        x, state = opt.step(y, (y, y), opt.begin_epoch(y, y, opt.init(y, comm), comm), comm)
        for other, message in ((x.reshape(4, 5), r"shape \(4, 5\); expected \(20,\)"), ([x, x], "2 arrays")):
            with pytest.raises(ValueError, match=message):
                opt.next_snapshot(other, state)

    def test_of_another_rank(self):
        opt, comm, y = qsvrg(), LocalCommunicator.alone(), self.Y
        state = opt.initial_state([y], ("0",), rank=1, size=2)
        with pytest.raises(ValueError, match="comm is rank 0 of 1; state belongs to rank 1 of 2"):
            opt.begin_epoch(y, y, state, comm)

    def test_a_stage_of_another_optimizer(self):
        opt = qsvrg()
        with pytest.raises(ValueError, match="stage is 'warmup'; QSVRG has 'start' and 'epoch'"):
            opt.enter(opt.initial_state([self.Y], ("0",), rank=0, size=1), "warmup")

    def test_non_finite_gradients(self, lockstep):
        """All ranks skip a step, or all raise; the start of an epoch always raises on all ranks."""
        y, bad = [self.Y], [np.full_like(self.Y, np.nan)]
        for nonfinite in ("raise", "skip"):
            opt = qsvrg(nonfinite=nonfinite)
            fresh = [opt.initial_state(y, ("0",), rank, 2) for rank in range(2)]
            stages = [opt.epoch_stages(y, g, s) for g, s in zip((y, bad), fresh, strict=True)]
            errors = lockstep(stages, catch=qcomp.NonFiniteError)
            assert [type(e) for e in errors] == [qcomp.NonFiniteError] * 2
            states = begin(lockstep, opt, y, [y, y], 2)
            stages = [opt.stages(y, (g, y), s) for g, s in zip((y, bad), states, strict=True)]
            results = lockstep(stages, catch=qcomp.NonFiniteError)
            if nonfinite == "raise":
                assert [type(e) for e in results] == [qcomp.NonFiniteError] * 2
            else:
                for (params, state), before in zip(results, states, strict=True):
                    assert [p is q for p, q in zip(params, y, strict=True)] == [True]
                    assert state == before._replace(skipped=1)
