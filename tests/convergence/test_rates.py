"""Rates and floors that theory gives exactly: over all draws where these are few, else within derived intervals.

Independent runs are the buckets of one vector: every bucket has its own scales and draws.
"""

import math
from itertools import product

import numpy as np
import pytest

import qcomp
from qcomp import QSGD, Key, RandK, TopK
from qcomp.testing import replace_draws

N, K = 16, 4
RAND = RandK(K, N)
OMEGA = N / K - 1


def quantized(c, x: np.ndarray, step: int) -> np.ndarray:
    """Return C(x) in the shape of x, with new draws for every step and bucket."""
    return c.decompress(c.compress(x, key=Key(seed=3, step=step)), like=x)


def within(values: np.ndarray, expected: float, errors: float = 5.0) -> bool:
    """Return whether the mean of independent values is within so many standard errors of the expected one."""
    return abs(values.mean() - expected) <= errors * values.std() / math.sqrt(values.size)


class TestIsotropic:
    """C1: f = |x|^2 / 2 with random-k. E |x_T|^2 = (1 - 2 rate + rate^2 (1 + omega))^T |x_0|^2, exactly."""

    @pytest.mark.parametrize("rate", [0.1, 0.25, 0.4, 0.5, 0.6])
    def test_two_steps_over_all_draws(self, rate):
        x0 = np.random.default_rng(0).standard_normal(N)
        squares = []
        for numbers in product(range(N // K), repeat=2):
            x = x0
            for number in numbers:
                with replace_draws(lambda _key, _block, number=number: number * 65536 * K // N):
                    x = x - rate * quantized(RAND, x, 0)
            squares.append(np.sum(x**2))
        factor = 1 - 2 * rate + rate**2 * (1 + OMEGA)
        assert np.mean(squares) / np.sum(x0**2) == pytest.approx(factor**2, rel=1e-5)

    @pytest.mark.parametrize(("rate", "value"), [(0.1, 0.1234), (0.25, 0.0317), (0.4, 0.1234)])
    def test_twelve_steps_of_many_runs(self, rate, value):
        assert (1 - 2 * rate + rate**2 * (1 + OMEGA)) ** 12 == pytest.approx(value, rel=2e-3)
        runs = 1 << 14
        x = np.tile(np.random.default_rng(1).standard_normal(N), (runs, 1))
        start = np.sum(x[0] ** 2)
        for step in range(12):
            x = x - rate * quantized(RAND, x, step)
        assert within((x**2).sum(axis=1) / start, (1 - 2 * rate + rate**2 * (1 + OMEGA)) ** 12)

    def test_at_twice_the_best_rate_nothing_moves_and_beyond_it_diverges(self):
        x0 = np.random.default_rng(2).standard_normal((64, N))
        still, away = x0, x0
        for step in range(12):
            still = still - 2 / (1 + OMEGA) * quantized(RAND, still, step)
            away = away - 0.6 * quantized(RAND, away, step)
        np.testing.assert_allclose(np.abs(still), np.abs(x0), rtol=1e-6)
        # The mean over runs is 13.2, with a heavy tail; the median is above 1 too.
        assert np.median((away**2).sum(axis=1) / (x0**2).sum(axis=1)) > 1


class TestConsistentLeastSquares:
    """C2: without noise at the solution QSGD needs 1 + omega / M times the steps, at rate 1 / ((1 + omega / M) L)."""

    RUNS = 6

    def steps(self, levels: int | None, workers: int = 1) -> float:
        """Return the mean number of steps to f / f_0 = 1e-6 over some runs on the same data."""
        rng = np.random.default_rng(0)
        a = rng.standard_normal((256, 64)) / 16
        hessian = a.T @ a
        largest = np.linalg.eigvalsh(hessian)[-1]
        omega = 0.0 if levels is None else min(64 / (4 * levels**2), 8 / levels)
        rate = 1 / ((1 + omega / workers) * largest)
        d = rng.standard_normal((self.RUNS, 64))  # x - x*
        goal = 1e-6 * np.einsum("ri,ij,rj->r", d, hessian, d)
        needed = np.zeros(self.RUNS)
        for step in range(1, 1000):
            g = d @ hessian
            if levels is not None:
                copies = np.repeat(g, workers, axis=0)
                c = QSGD(levels, 64, norm="l2")
                g = quantized(c, copies, step).reshape(self.RUNS, workers, 64).mean(axis=1)
            d = d - rate * g
            f = np.einsum("ri,ij,rj->r", d, hessian, d)
            needed[(needed == 0) & (f <= goal)] = step
            if needed.all():
                return float(needed.mean())
        raise AssertionError(f"did not converge in 1000 steps: {f / goal}")

    @pytest.mark.quick_cases(2)
    @pytest.mark.parametrize(
        ("levels", "workers", "factor"),
        [(1, 1, 9), (2, 1, 5), (4, 1, 2), (8, 1, 1.25), (16, 1, 1.0625), (1, 8, 2)],
    )
    def test_steps_are_proportional_to_one_plus_omega(self, levels, workers, factor):
        assert self.steps(levels, workers) == pytest.approx(factor * self.steps(None), rel=0.15)


class TestHeterogeneousWorkers:
    """C3: f_i = |x - b_i|^2 / 2. At the solution the workers' gradients do not vanish; only their mean does."""

    M = 8
    B = np.random.default_rng(5).standard_normal((M, N))
    V = float(((B - B.mean(axis=0)) ** 2).sum(axis=1).mean())

    @pytest.mark.parametrize(("rate", "steps"), [(0.1, 20), (0.3, 8)])
    def test_an_unbiased_compressor_has_the_predicted_floor(self, rate, steps):
        """From x*, E |x_t - x*|^2 = (1 - r^t) floor with r = 1 - 2 rate + rate^2 (1 + omega / M)."""
        runs, target = 1024, self.B.mean(axis=0)
        x = np.tile(target, (runs, 1))
        for step in range(steps):
            gradients = x[:, None, :] - self.B
            x = x - rate * quantized(RAND, gradients, step).mean(axis=1)
        floor = rate * OMEGA * self.V / self.M / (2 - rate * (1 + OMEGA / self.M))
        factor = 1 - 2 * rate + rate**2 * (1 + OMEGA / self.M)
        distances = ((x - target) ** 2).sum(axis=1)
        assert within(distances, (1 - factor**steps) * floor)
        assert not within(distances, 0.9 * (1 - factor**steps) * floor)

    def floor_of_feedback(self, rate: float) -> float:
        """Return the mean of |x - x*|^2 late in a run with top-k and plain error feedback, full gradients."""
        target, x, e = self.B.mean(axis=0), np.zeros(N), np.zeros((self.M, N))
        steps, found = round(16 / rate), []
        for step in range(steps):
            payload, e = qcomp.feedback.compress(TopK(K, N), x - self.B, e)
            x = x - rate * TopK(K, N).decompress(payload, like=e).mean(axis=0)
            if step > steps * 2 // 3:
                found.append(np.sum((x - target) ** 2))
        return float(np.mean(found))

    @pytest.mark.slow
    def test_feedback_has_a_floor_that_is_quadratic_in_the_rate(self):
        """Four times the rate, sixteen times the floor."""
        floors = [self.floor_of_feedback(rate) for rate in (0.2, 0.05, 0.0125)]
        assert 10 < floors[0] / floors[1] < 20
        assert 10 < floors[1] / floors[2] < 20

    def test_compressed_differences_have_none(self):
        """EF21 sends C(gradient - estimate so far): the compressed difference vanishes at the solution."""
        target, x, sent = self.B.mean(axis=0), np.zeros(N), np.zeros((self.M, N))
        for _ in range(500):
            x = x - 0.2 * sent.mean(axis=0)
            sent = sent + quantized(TopK(K, N), x - self.B - sent, 0)
        assert np.sum((x - target) ** 2) < 1e-26

    def test_learned_shifts_have_none(self):
        """DIANA, the same idea with an unbiased compressor: h_i tends to the gradient of worker i."""
        target, x, h = self.B.mean(axis=0), np.zeros(N), np.zeros((self.M, N))
        for step in range(400):
            m = quantized(RAND, x - self.B - h, step)
            x = x - 0.2 * (h + m).mean(axis=0)
            h = h + m / (1 + OMEGA)
        assert np.sum((x - target) ** 2) < 1e-18


class TestVarianceOfTheMean:
    """C4: (1/M)(sigma^2 + omega (sigma^2 + |grad|^2)), by the law of total variance; exact over noise and draws."""

    @pytest.mark.parametrize("workers", [1, 2])
    def test_over_all_noise_and_draws(self, workers):
        rng = np.random.default_rng(7)
        gradient = rng.standard_normal(N)
        noise = rng.standard_normal((3, N))
        noise -= noise.mean(axis=0)
        sigma2 = float((noise**2).sum(axis=1).mean())
        outcomes = []  # the equally likely outcomes of a single worker
        for z in noise:
            for number in range(N // K):
                with replace_draws(lambda _key, _block, number=number: number * 65536 * K // N):
                    outcomes.append(quantized(RAND, gradient + z, 0))
        means = [np.mean(each, axis=0) for each in product(outcomes, repeat=workers)]
        variance = np.mean([np.sum((m - gradient) ** 2) for m in means])
        expected = (sigma2 + OMEGA * (sigma2 + gradient @ gradient)) / workers
        assert variance == pytest.approx(expected, rel=1e-5)
