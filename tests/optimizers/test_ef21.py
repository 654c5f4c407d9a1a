"""EF21: the laws of its estimates, convergence where feedback has a floor, and SGD with EF21."""

import io
import warnings
from fractions import Fraction

import numpy as np
import pytest

import qcomp
from qcomp import EF21Mean, TopK
from qcomp.comm import LocalCommunicator, run_local
from qcomp.core.mean import ef21 as ef21_of_core
from qcomp.core.numeric.arrays import host_bytes
from qcomp.testing.libraries import to_numpy

SHAPES = [(40,), (3, 11), ()]


def ef21(**changes) -> qcomp.EF21SGD:
    return qcomp.EF21SGD(**{"learning_rate": 0.1, "exact": None, "compressor": TopK(2, 8), **changes})


def track(lockstep, mean, vectors, states, *, step: int = 0) -> tuple[list, list]:
    """Take one step on all ranks, which then hold the same mean, bit for bit."""
    key = qcomp.Key(seed=1, step=step)
    results = lockstep([mean.stages(x, s, key=key) for x, s in zip(vectors, states, strict=True)])
    answers = [b"".join(host_bytes(g) for g in answer) for answer, _ in results]
    assert len(set(answers)) == 1
    return results[0][0], [state for _, state in results]


def zeros(mean, vectors, size: int) -> list:
    return [mean.zeros(vectors, rank=rank, size=size) for rank in range(size)]


def estimates(states, tensor: int = 0) -> np.ndarray:
    return np.stack([to_numpy(s.worker[tensor]) for s in states])


class TestEstimates:
    @pytest.mark.parametrize("size", [1, 2, 3])
    def test_top_k_shrinks_the_distance_to_a_fixed_target_to_zero(self, lockstep, size):
        """For a fixed target of equal magnitudes, |x - g|^2 shrinks by k/d of its first value in each step, exactly."""
        mean, count = EF21Mean(TopK(3, 16)), -(-16 // 3)
        signs = np.random.default_rng(0).integers(0, 2, (size, 16)) * 2.0 - 1
        vectors = [[x] for x in signs]
        states = zeros(mean, vectors[0], size)
        for step in range(count + 2):
            left = 16 - 3 * step
            assert np.sum((signs - estimates(states)) ** 2, axis=1).tolist() == [max(0, left)] * size
            answer, states = track(lockstep, mean, vectors, states)
        assert estimates(states).tobytes() == signs.tobytes()
        assert np.array_equal(answer[0], signs.sum(axis=0) / size)

    def test_top_k_reaches_any_fixed_target(self, lockstep):
        """Exactly 1 - delta, with this vector's delta, its tail energy over its energy; d / k steps from 0."""
        x = (
            np.random.default_rng(1).standard_normal((2, 14)).astype(np.float32).astype(np.float64)
        )  # rounded to float32, as values are sent
        mean = EF21Mean(TopK(4, 16))
        states = zeros(mean, [x[0]], 2)
        for step in range(4):
            tail = np.sort(np.abs(x), axis=1)[:, : max(0, 14 - 4 * step)]
            error = np.sum((x - estimates(states)) ** 2, axis=1)
            np.testing.assert_allclose(error, np.sum(tail**2, axis=1), rtol=1e-12)
            _, states = track(lockstep, mean, [[row] for row in x], states)
            assert np.array_equal(estimates(states), x) == (step == 3)

    @pytest.mark.parametrize(
        "c", [qcomp.ScaledSign(16), qcomp.OneBitSGD(column_size=16), qcomp.Scaled(qcomp.QSGD(7, 16))], ids=str
    )
    def test_contractions_find_a_fixed_target(self, lockstep, c):
        x = np.random.default_rng(2).standard_normal((2, 16))
        mean = EF21Mean(c)
        states, errors = zeros(mean, [x[0]], 2), []
        for step in range(40):
            errors.append(np.sum((x - estimates(states)) ** 2, axis=1))
            _, states = track(lockstep, mean, [[row] for row in x], states, step=step)
        errors = np.asarray(errors)
        if not c.traits.random:
            assert (errors[1:] <= (1 - c.traits.delta) * errors[:-1] * (1 + 1e-6)).all()
        assert (errors[-1] < 1e-3 * errors[0]).all()

    @pytest.mark.parametrize("size", [1, 2, 3])
    def test_the_common_estimate_is_the_mean_of_the_estimates(self, lockstep, library, size):
        """Bit for bit if nothing is rounded, for multiples of the number of ranks; at any step."""
        rng = np.random.default_rng(3)
        mean = EF21Mean(TopK(2, 8))
        vectors = [[library.array(np.zeros(20, np.float32))] for _ in range(size)]
        states = zeros(mean, vectors[0], size)
        for _ in range(6):
            values = rng.integers(-50, 50, (size, 20)).astype(np.float32) * size
            answer, states = track(lockstep, mean, [[library.array(v)] for v in values], states)
            got = library.numpy(answer[0])
            assert got.tobytes() == np.asarray(estimates(states).sum(axis=0) / size, np.float32).tobytes()
            assert got.tobytes() == library.numpy(states[0].server[0]).tobytes()

    @pytest.mark.parametrize("size", [1, 2, 3])
    def test_the_common_estimate_is_off_only_by_roundings(self, lockstep, size):
        """In float32 a step rounds the sums over ranks (N - 1), the division, g, and each estimate, once each."""
        rng, steps, mean = np.random.default_rng(4), 30, EF21Mean(qcomp.ScaledSign(8))
        states = zeros(mean, [np.zeros(20, np.float32)], size)
        largest = 0.0
        for _ in range(steps):
            x = rng.standard_normal((size, 20)).astype(np.float32)
            answer, states = track(lockstep, mean, [[row] for row in x], states)
            largest = max(largest, 2 * np.abs(estimates(states)).max(), 2 * np.abs(x).max())
        exact = [sum(map(Fraction, map(float, column)), Fraction(0)) / size for column in estimates(states).T]
        off = max(abs(float(Fraction(float(g)) - e)) for g, e in zip(answer[0], exact, strict=True))
        assert off <= steps * (size + 2) * 2.0**-24 * largest
        if size == 1:  # both add the same numbers to the same number
            assert off == 0

    @pytest.mark.slow
    def test_is_the_same_in_every_library(self, lockstep, libraries):
        x = np.random.default_rng(5).standard_normal((2, 16)).astype(np.float32)
        held = set()
        for library in libraries.values():
            mean = EF21Mean(qcomp.ScaledSign(8))
            vectors = [[library.array(row)] for row in x]
            states = zeros(mean, vectors[0], 2)
            for step in range(2):
                answer, states = track(lockstep, mean, vectors, states, step=step)
            held.add((library.numpy(answer[0]).tobytes(), estimates(states).tobytes()))
        assert len(held) == 1

    @pytest.mark.parametrize("broken", [False, True])
    def test_a_compiled_mean_is_nan_if_a_value_is_not_finite(self, lockstep, libraries, broken, monkeypatch):
        import jax

        mean, x = EF21Mean(TopK(2, 8)), libraries["jax"].array([np.nan, 1, 2, 3], np.float32)
        (state,) = zeros(mean, [x], 1)
        if broken:  # forgets what it cannot read while it is traced
            monkeypatch.setattr(ef21_of_core.Verdicts, "require_accepted", lambda *_: ())
        found = jax.jit(lambda x: lockstep([mean.stages(x, state)])[0][0])(x)
        assert np.isnan(found).all() != broken

    def test_the_returned_mean_shares_no_memory_with_the_state(self, lockstep):
        mean, x = EF21Mean(TopK(8, 8)), np.ones(8)
        answer, states = track(lockstep, mean, [[x]], zeros(mean, [x], 1))
        answer[0][:] = 7
        assert np.array_equal(states[0].server[0], x)
        assert np.array_equal(states[0].worker[0], x)

    def test_several_tensors_blends_half_precision_and_empty_ones(self, lockstep):
        x = [
            np.arange(6, dtype=np.float16).reshape(2, 3),
            np.zeros((0,), np.float16),
            np.asarray(3, np.float16),
        ]
        mean = EF21Mean(TopK(8, 8))
        answer, states = track(lockstep, mean, [x, x], zeros(mean, x, 2))
        assert [a.dtype for a in answer] == [np.float16] * 3
        assert all(np.array_equal(a, b) for a, b in zip(answer, x, strict=True))
        assert [s.dtype for s in states[0].server] == [np.float32] * 3

    def test_exact_compressors_give_the_exact_mean(self, lockstep):
        x = np.random.default_rng(6).standard_normal((2, 5))
        mean = EF21Mean(qcomp.Identity())
        answer, states = track(lockstep, mean, [[row] for row in x], zeros(mean, [x[0]], 2))
        assert np.array_equal(answer[0], (x[0] + x[1]) / 2)
        assert states[0].worker == ()

    def test_over_a_communicator_with_bytes(self):
        mean = EF21Mean(TopK(2, 64))

        def rank_main(comm):
            x = np.full(128, 1.0 + comm.rank, dtype=np.float32)
            state = mean.init(x, comm)
            before = comm.bytes_sent
            g, state = mean(x, state, comm)
            return comm.bytes_sent - before, float(g.sum())

        payload = TopK(2, 64).payload_spec(128).nbytes
        assert run_local(3, rank_main) == [(2 * (-(-payload // 8) * 8 + 8), 8.0)] * 3

    @pytest.mark.parametrize("bad", [np.inf, np.nan])
    def test_non_finite(self, lockstep, bad):
        mean = EF21Mean(TopK(2, 8))
        x, y = np.ones(8), np.ones(8)
        y[3] = bad
        states = zeros(mean, [x], 2)
        found = lockstep(
            [mean.stages([v], s) for v, s in zip((x, y), states, strict=True)], catch=qcomp.NonFiniteError
        )
        assert {str(error) for error in found} == {
            "a value on rank 1 is not finite, or too large to compress"
        }
        assert not estimates(states).any()

    @pytest.mark.parametrize(
        "c",
        [qcomp.QSGD(1, 128), qcomp.RandK(1, 16), qcomp.RandK(8, 16), qcomp.ScaledSign(8, scale="rms")],
        ids=str,
    )
    def test_needs_a_contraction(self, c):
        with pytest.raises(ValueError, match=r"promises no contraction; expected .*qcomp\.Scaled"):
            EF21Mean(c)


class TestConvergence:
    @pytest.mark.slow
    def test_three_workers_and_top_one(self, job):
        """CE4: without feedback x grows by 1 + 11 rate / 6 a step, exactly; EF21 converges at a smaller rate."""
        a = np.asarray([[-3.0, 2.0, 2.0], [2.0, -3.0, 2.0], [2.0, 2.0, -3.0]])

        def run(opt, steps: int) -> np.ndarray:
            ranks = job(opt, [np.ones(3)], 3)
            for _ in range(steps):
                x = ranks.params[0][0]
                ranks.step([[2 * (row @ x) * row + x / 2] for row in a])
            return ranks.params[0][0]

        top1 = TopK(1, 8)
        plain = qcomp.CompressedSGD(
            learning_rate=0.05,
            momentum=0.0,
            exact=None,
            compressor=top1,
            averaging=qcomp.Averaging(feedback=False, topology="all_gather"),
        )
        assert run(plain, 50) == pytest.approx(np.full(3, (1 + 11 * 0.05 / 6) ** 50), rel=1e-5)
        early, late = (np.linalg.norm(run(ef21(learning_rate=0.01, compressor=top1), n)) for n in (200, 600))
        assert late < 0.01
        assert late < 0.05 * early

    @pytest.mark.slow
    def test_no_floor_where_the_ranks_differ(self, job):
        """C3: f_i = |x - b_i|^2 / 2. Feedback ends at about eta^2 of this, EF21 at machine precision."""
        b = np.random.default_rng(0).standard_normal((4, 16))

        def floor(opt, steps: int) -> float:
            ranks, found = job(opt, [np.zeros(16)], 4), []
            for step in range(steps):
                ranks.step([[ranks.params[0][0] - target] for target in b])
                if step >= 0.8 * steps:
                    found.append(np.sum((ranks.params[0][0] - b.mean(axis=0)) ** 2))
            return float(np.mean(found))

        assert floor(ef21(learning_rate=0.2, compressor=TopK(4, 16)), 200) < 1e-20

        def with_feedback(rate: float) -> qcomp.CompressedSGD:
            return qcomp.CompressedSGD(
                learning_rate=rate,
                momentum=0.0,
                exact=None,
                compressor=TopK(4, 16),
                averaging=qcomp.Averaging(topology="all_gather"),
            )

        coarse, fine = floor(with_feedback(0.2), 60), floor(with_feedback(0.05), 160)
        assert 10 < coarse / fine < 20
        assert coarse > 0.01

    @pytest.mark.slow
    def test_moving_averages_help_against_noise(self, job):
        """EF21-SGDM: with the noise of small batches, a small eta ends closer to the solution than EF21."""
        rng = np.random.default_rng(1)
        noise = rng.standard_normal((400, 2, 16)) * 3

        def error(eta: float) -> float:
            ranks, found = (
                job(ef21(learning_rate=0.05, compressor=TopK(2, 16), eta=eta), [np.ones(16)], 2),
                [],
            )
            for step in range(400):
                ranks.step([[ranks.params[0][0] + n] for n in noise[step]])
                if step >= 200:
                    found.append(np.sum(ranks.params[0][0] ** 2))
            return float(np.mean(found))

        assert error(0.1) < 0.6 * error(1.0)


class TestSGD:
    @pytest.mark.parametrize("size", [1, 3])
    @pytest.mark.parametrize("eta", [1.0, 0.25])
    def test_without_loss_it_is_sgd_on_moving_averages(self, job, grads, size, eta):
        run = job(
            ef21(compressor=qcomp.Identity(), eta=eta, weight_decay=0.5),
            grads(SHAPES, 99, 0, np.float64),
            size,
        )
        expected, v = [np.array(p) for p in run.params[0]], None
        for step in range(5):
            of_ranks = [grads(SHAPES, rank, step, np.float64) for rank in range(size)]
            g = [sum(each[i] for each in of_ranks) / size for i in range(len(SHAPES))]
            v = g if v is None else [(1 - eta) * old + eta * new for old, new in zip(v, g, strict=True)]
            expected = [p - 0.1 * (d + 0.5 * p) for p, d in zip(expected, v, strict=True)]
            run.step(of_ranks)
        for got, want in zip(run.params[0], expected, strict=True):
            np.testing.assert_allclose(got, want, rtol=0, atol=1e-13)

    @pytest.mark.parametrize("eta", [1.0, 0.25])
    def test_ranks_send_the_change_of_their_average(self, job, grads, eta):
        """Against the algorithm as the paper gives it; a version without g_i in the message differs."""
        c, run = TopK(2, 8), job(ef21(eta=eta), grads([(20,)], 99, 0, np.float64), 2)
        x, v, own, g = np.array(run.params[0][0]), None, np.zeros((2, 20)), np.zeros(20)
        wrong = 0.0
        for step in range(6):
            of_ranks = [grads([(20,)], rank, step, np.float64) for rank in range(2)]
            new = np.stack([each[0] for each in of_ranks])
            v = new if v is None else (1 - eta) * v + eta * new
            sent = np.stack([c.decompress(c.compress(d), like=d) for d in v - own])
            own, g = own + sent, g + sent.sum(axis=0) / 2
            wrong = np.stack([c.decompress(c.compress(d), like=d) for d in v]).mean(axis=0)
            x = x - 0.1 * g
            run.step(of_ranks)
            np.testing.assert_allclose(run.params[0][0], x, rtol=0, atol=1e-14)
            for rank, state in enumerate(run.states):
                np.testing.assert_allclose(state.exchange.worker[0], own[rank], rtol=0, atol=1e-14)
        assert np.abs(wrong - g).max() > 0.1

    def test_libraries_and_exact_tensors(self, job, grads, library):
        opt = ef21(exact=qcomp.ExactBelow(20), eta=0.5)
        params = grads(SHAPES, 99, 0)
        run = job(opt, [library.array(p) for p in params], 2)
        reference = job(opt, params, 2)
        assert run.state.exact == (True, False, True)
        for step in range(2):
            of_ranks = [grads(SHAPES, rank, step) for rank in range(2)]
            reference.step(of_ranks)
            run.step([[library.array(g) for g in gs] for gs in of_ranks])
        for got, want in zip(run.params[0], reference.params[0], strict=True):
            np.testing.assert_allclose(library.numpy(got), want, rtol=1e-5, atol=1e-6)
        assert len(run.state.exchange.worker) == 1
        assert [v.shape for v in run.state.arrays["smoothed"]] == SHAPES

    def test_a_skipped_step_changes_nothing(self, job, grads):
        run = job(ef21(nonfinite="skip", eta=0.5), grads(SHAPES, 99, 0), 2)
        bad = grads(SHAPES, 1, 0)
        bad[0][3] = np.nan
        before = run.fingerprint()
        run.step([grads(SHAPES, 0, 0), bad])
        assert run.state.skipped == 1
        assert run.fingerprint() == before
        run.step([grads(SHAPES, rank, 1) for rank in range(2)])
        first = grads(SHAPES, 0, 1)  # still the first gradient, with which the average starts
        assert all(np.array_equal(v, g) for v, g in zip(run.states[0].arrays["smoothed"], first, strict=True))

    def test_clipping_applies_to_the_gradients(self, job):
        run = job(ef21(compressor=TopK(8, 8), clip_norm=1.0, eta=0.5, learning_rate=1.0), [np.zeros(8)], 1)
        run.step([[np.full(8, 100.0)]])
        assert np.linalg.norm(run.params[0][0]) == pytest.approx(1.0)
        assert np.linalg.norm(run.state.arrays["smoothed"][0]) == pytest.approx(1.0)

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ({"eta": 0.0}, "eta is 0.0; expected a number above 0, at most 1"),
            ({"eta": 1.5}, "eta is 1.5"),
            ({"compressor": qcomp.QSGD(1, 128)}, "promises no contraction"),
        ],
    )
    def test_arguments(self, arguments, message):
        with pytest.raises(ValueError, match=message):
            ef21(**arguments)


class TestCheckpoint:
    NAMES = ("a", "b", "c")

    def run(self, grads, size: int, *, steps: int, stop: int | None = None, opt=None):
        opt = opt or ef21(eta=0.5, exact=qcomp.ExactBelow(3))

        def rank_main(comm):
            params = grads(SHAPES, 99, 0, np.float64)
            state = opt.init(params, comm, self.NAMES)
            for step in range(steps):
                if step == stop:
                    file = io.BytesIO()
                    np.savez(file, **qcomp.checkpoint.to_arrays(opt.state_dict(state), like=params[0]))
                    file.seek(0)
                    state = opt.load_state_dict(dict(np.load(file)), params, comm, self.NAMES)
                params, state = opt.step(params, grads(SHAPES, comm.rank, step, np.float64), state, comm)
            return params, opt.state_dict(state)

        return run_local(size, rank_main, timeout=30)

    @pytest.mark.parametrize("size", [1, 3])
    def test_resuming_is_as_if_there_had_been_no_stop(self, grads, size):
        for (p, s), (q, t) in zip(
            self.run(grads, size, steps=5), self.run(grads, size, steps=5, stop=3), strict=True
        ):
            assert [x.tobytes() for x in p] == [x.tobytes() for x in q]
            assert s.keys() == t.keys()
            assert all(np.asarray(s[k]).tobytes() == np.asarray(t[k]).tobytes() for k in s)
        assert {"estimate.b", "mean_estimate.b", "smoothed.a", "smoothed.c"} <= {
            k.partition("@")[0] for k in s
        }
        assert not any("residual" in key for key in s)

    @pytest.mark.parametrize(("old", "new"), [(3, 2), (1, 3), (4, 1)])
    def test_another_number_of_ranks_keeps_the_means(self, grads, old, new):
        opt = ef21(eta=0.5)
        results = self.run(grads, old, steps=4, opt=opt)
        saved = [s for _, s in results]

        def rank_main(comm):
            return opt.load_state_dict(saved, results[0][0], comm, self.NAMES)

        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            states = run_local(new, rank_main, timeout=30)
        for i, name in enumerate(self.NAMES):
            for state in states:
                own = np.mean([s[f"estimate.{name}"] for s in saved], axis=0)
                np.testing.assert_allclose(state.exchange.worker[i], own, rtol=0, atol=1e-14)
                np.testing.assert_allclose(state.exchange.server[i], own, rtol=0, atol=1e-14)
                assert state.exchange.server[i].tobytes() == saved[0][f"mean_estimate.{name}@0"].tobytes()
                smoothed = np.mean([s[f"smoothed.{name}"] for s in saved], axis=0)
                np.testing.assert_allclose(state.arrays["smoothed"][i], smoothed, rtol=0, atol=1e-14)

    def test_diagnostics_report_no_residuals_for_ef21(self):
        watched = qcomp.Diagnostics(ef21(eta=0.5))
        comm = LocalCommunicator.alone()
        x = np.linspace(-1, 1, 64)
        state = watched.optimizer.init(x, comm)
        _, _, report = watched.step(x, x, state, comm)
        assert 0 < report["cosine"] < 1
        assert "worker_residual" not in report
