"""Where compression without the right feedback provably fails, with the growth that the theory predicts.

The counterexamples of sign descent without feedback are in tests/optimizers/test_convergence.py.
"""

from functools import partial
from typing import Any

import numpy as np
import pytest

import qcomp
from qcomp import CompressedMean, Key, RandK, TopK
from qcomp.core.feedback import compensated
from qcomp.testing import replace_draws


class TestThreeWorkersAndTopOne:
    """CE4 (Beznosikov et al.): f_i = <a_i, x>^2 + |x|^2 / 4. Each worker sends only the coordinate with the wrong sign.

    At (t, t, t) worker i sends -5.5 t on coordinate i, so without feedback x_T = (1 + 11 rate / 6)^T x_0 exactly, while
    the mean gradient is +7/6 t. The workers are buckets of one vector.
    """

    A = np.asarray([[-3.0, 2.0, 2.0], [2.0, -3.0, 2.0], [2.0, 2.0, -3.0]])

    def gradients(self, x):
        return np.stack([2 * (a @ x) * a + x / 2 for a in self.A])

    def run(self, *, feedback: bool, rate: float, steps: int) -> np.ndarray:
        c, x, residual = TopK(1, 8), np.ones(3), np.zeros((3, 8))
        for _ in range(steps):
            buckets = np.pad(self.gradients(x), ((0, 0), (0, 5)))
            payload, new = qcomp.feedback.compress(c, buckets, residual)
            residual = new if feedback else residual
            x = x - rate * c.decompress(payload, like=buckets)[:, :3].mean(axis=0)
        return x

    def test_the_mean_gradient_points_the_right_way(self):
        assert self.gradients(np.ones(3)).mean(axis=0) == pytest.approx(np.full(3, 7 / 6))

    def test_without_feedback_it_grows_as_predicted(self):
        x = self.run(feedback=False, rate=0.05, steps=200)
        assert x == pytest.approx(np.full(3, (1 + 11 * 0.05 / 6) ** 200), rel=1e-4)
        assert np.linalg.norm(x) == pytest.approx(7.187e7, rel=1e-3)

    @pytest.mark.slow
    def test_with_feedback_it_converges(self):
        assert np.linalg.norm(self.run(feedback=True, rate=0.01, steps=2000)) < 1e-8


class TestExplodingResidual:
    """CE5: feedback around an unscaled random-k, without any input: E |e'|^2 = omega |e|^2, here omega = 3.

    Exact over all draws of two steps: an element is in one of four places of its stratum, and the expectation of
    a sum of squares depends only on the probabilities of single elements.
    """

    C = RandK(4, 16)

    @staticmethod
    def draw(value: int, _key: Any, _block: Any) -> int:
        """Return the same value for all elements."""
        return value

    def expected_growth(self, c) -> list[float]:
        e0 = np.random.default_rng(0).standard_normal(16)
        squares: list[list[Any]] = [[], []]
        for first in range(4):
            for second in range(4):
                e = e0
                for step, number in enumerate((first, second)):
                    with replace_draws(partial(self.draw, number * 16384)):
                        _, e = compensated(c, np.zeros(16), e, key=Key())
                    squares[step].append(np.sum(e**2))
        return [float(np.mean(s) / np.sum(e0**2)) for s in squares]

    def test_unscaled_it_explodes(self):
        assert self.expected_growth(self.C) == pytest.approx([3.0, 9.0], rel=1e-5)
        with pytest.raises(ValueError, match="omega = 3 >= 1"):
            CompressedMean(self.C)

    def test_scaled_it_decays(self):
        """By a factor of 1 - delta = 3/4 per step."""
        assert self.expected_growth(qcomp.Scaled(self.C)) == pytest.approx([0.75, 0.75**2], rel=1e-5)


class TestResidualBound:
    """With |g| <= G and a contraction: |e| <= sqrt(1 - delta) / (1 - sqrt(1 - delta)) G, in the worst case."""

    @pytest.mark.slow
    @pytest.mark.parametrize(
        "c", [TopK(4, 16), TopK(1, 16), qcomp.ScaledSign(16), qcomp.OneBitSGD(column_size=16)], ids=str
    )
    def test_the_bound_holds_and_has_the_right_magnitude(self, c):
        root = np.sqrt(1 - c.traits.delta)
        bound = root / (1 - root)
        worst = {}
        rng = np.random.default_rng(0)
        constant = rng.standard_normal(16)
        for kind in ("constant", "random"):
            e, largest = np.zeros(16), 0.0
            for _ in range(300):
                g = constant if kind == "constant" else rng.standard_normal(16)
                _, e = qcomp.feedback.compress(c, g / np.linalg.norm(g), e)
                largest = max(largest, float(np.linalg.norm(e)))
            worst[kind] = largest
        assert max(worst.values()) <= bound
        assert max(worst.values()) > 0.05 * bound  # without feedback the residual would be far below

    def test_a_residual_without_the_carried_part_does_not_telescope(self):
        """The erratum: delta = g - Q(g + delta) instead of g + delta - Q(g + delta)."""
        rng = np.random.default_rng(1)
        c, right, wrong = TopK(2, 16), np.zeros(16), np.zeros(16)
        missing_right, missing_wrong = np.zeros(16), np.zeros(16)
        for _ in range(50):
            g = rng.standard_normal(16)
            payload, new = qcomp.feedback.compress(c, g, right)
            missing_right += g - c.decompress(payload, like=g)
            right = new
            sent = c.decompress(c.compress(g + wrong), like=g)
            missing_wrong += g - sent
            wrong = g - sent
        assert np.abs(missing_right - right).max() < 1e-12
        assert np.abs(missing_wrong - wrong).max() > 1
