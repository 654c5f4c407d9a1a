"""Sums in the order of the halving tree, and norms computed from them."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qcomp.core.numeric.sums import mean_abs, norm2, rms, sum_of_squares, total, tree_sum


def reference_tree(values: list) -> float:
    """Add the upper half to the lower half until one element is left, element by element."""
    while len(values) > 1:
        half = len(values) // 2
        values = [values[i] + values[i + half] for i in range(half)]
    return values[0]


def reference_total(values: list) -> float:
    """The same for any length: an odd length is halved upwards, and missing elements count as zero."""
    while len(values) > 1:
        half = (len(values) + 1) // 2
        high = [*values[half:], values[0] * 0][:half]
        values = [a + b for a, b in zip(values[:half], high, strict=True)]
    return values[0]


def wide(rows: int, length: int, dtype: type = np.float32) -> np.ndarray:
    """Return values over so wide a range that every order of addition gives another sum."""
    rng = np.random.default_rng(rows * length)
    return (rng.standard_normal((rows, length)) * np.exp2(rng.integers(-20, 20, (rows, length)))).astype(
        dtype
    )


def bits(x: np.ndarray) -> list[int]:
    x = np.asarray(x)
    return x.view({4: np.uint32, 8: np.uint64}[x.dtype.itemsize]).tolist()


class TestTree:
    def test_is_the_halving_tree_bit_for_bit(self, library):
        rows = wide(3, 64)
        expected = np.array([reference_tree(list(row)) for row in rows])
        assert bits(library.numpy(tree_sum(library.array(rows)))) == bits(expected)

    def test_is_the_halving_tree_in_float64(self, float64_library):
        rows = wide(2, 128, np.float64)
        expected = np.array([reference_tree(list(row)) for row in rows])
        assert bits(float64_library.numpy(tree_sum(float64_library.array(rows)))) == bits(expected)

    @pytest.mark.parametrize("length", [1, 2, 8, 4096])
    def test_lengths(self, length):
        rows = wide(2, length)
        assert bits(tree_sum(rows)) == bits(np.array([reference_tree(list(row)) for row in rows]))

    def test_other_orders_are_caught(self):
        rows = wide(3, 64)
        expected = bits(tree_sum(rows))
        assert bits(np.array([sum(row[1:], row[0]) for row in rows])) != expected
        assert bits(tree_sum(rows.reshape(3, 32, 2).transpose(0, 2, 1).reshape(3, 64))) != expected

    def test_mean_abs_divides_by_the_count_without_padding(self, library):
        rows = wide(2, 16)
        rows[:, 11:] = 0
        expected = [reference_tree(list(abs(row))) / np.float32(11) for row in rows]
        assert bits(library.numpy(mean_abs(library.array(rows), 11))) == bits(np.array(expected))


class TestTotal:
    @pytest.mark.parametrize("size", [1, 2, 3, 5, 7, 8, 9, 31, 100, 1000])
    @pytest.mark.parametrize("dtype", [np.float32, np.float64])
    def test_the_order_is_fixed_for_any_size(self, size, dtype):
        values = wide(1, size, dtype)[0]
        assert bits(total(values)) == bits(np.array(reference_total(list(values))))

    def test_any_shape_in_every_library(self, library):
        values = wide(5, 7)
        got = library.numpy(total(library.array(values)))
        assert got.shape == ()
        assert bits(got) == bits(np.array(reference_total(list(values.ravel()))))

    def test_the_sum_of_no_elements_is_zero(self, float64_library):
        got = float64_library.numpy(total(float64_library.array(np.zeros((0, 3), dtype=np.float32))))
        assert got.shape == ()
        assert got == 0


class TestSumOfSquares:
    """Of gradients, for clipping: as a number, for any size."""

    @pytest.mark.parametrize("scale", [1.0, 1e30, 1e-30, 3e38])
    def test_is_exact_within_rounding(self, library, scale):
        x = (np.linspace(-1, 1, 35) * scale).astype(np.float32).reshape(5, 7)
        exact = math.fsum(float(v) ** 2 for v in x.ravel())
        assert sum_of_squares(library.array(x)) == pytest.approx(exact, rel=2**-20)

    def test_of_nothing_and_of_zeros(self, float64_library):
        assert sum_of_squares(float64_library.array(np.zeros((0, 3)))) == 0.0
        assert sum_of_squares(float64_library.array(np.zeros((2, 3)))) == 0.0

    def test_of_values_that_are_not_finite(self, library):
        for bad in (np.nan, np.inf, -np.inf):
            assert sum_of_squares(library.array(np.asarray([1.0, bad, 2.0], dtype=np.float32))) == math.inf


def exact_norm(row: np.ndarray) -> float:
    """Return the norm of a float32 vector in wider arithmetic."""
    return math.sqrt(math.fsum(float(v) ** 2 for v in row))


EXTREME = {
    "ordinary": wide(1, 64)[0],
    "one-hot": np.eye(1, 64, 5, dtype=np.float32)[0],
    "constant": np.full(64, 0.1, dtype=np.float32),
    "huge": np.full(64, 2.0e37, dtype=np.float32),
    "huge one-hot": np.eye(1, 64, 63, dtype=np.float32)[0] * np.float32(3.4e38),
    "tiny": np.full(64, 3e-38, dtype=np.float32),
    "tiny and mixed": wide(1, 64)[0] * np.float32(2.0**-100),
    "huge and mixed": wide(1, 64)[0] * np.float32(2.0**100),
    "huge and tiny": np.array([1e38, *[2e-38] * 7] * 8, dtype=np.float32),
}


class TestNorms:
    """2^-20 covers the cleared last bit of the squares (2^-23) and six or twelve additions of 2^-24 each."""

    def test_within_rounding_of_the_exact_norm(self, library):
        rows = np.stack(list(EXTREME.values()))
        exact = np.array([exact_norm(row) for row in rows])
        for got, expected in [
            (norm2(library.array(rows)), exact),
            (rms(library.array(rows), 64), exact / 8),
        ]:
            error = np.abs(library.numpy(got).astype(np.float64) / expected - 1)
            assert dict(zip(EXTREME, error.tolist(), strict=True)) == pytest.approx(
                dict.fromkeys(EXTREME, 0.0), abs=2**-20
            )

    def test_are_the_same_bits_in_every_library(self, library):
        rows = np.stack(list(EXTREME.values()))
        assert bits(library.numpy(norm2(library.array(rows)))) == bits(norm2(rows))
        assert bits(library.numpy(rms(library.array(rows), 37))) == bits(rms(rows, 37))

    def test_naive_squares_are_caught(self):
        with np.errstate(over="ignore", under="ignore"):
            for name in ("huge", "tiny"):
                row = EXTREME[name]
                assert abs(np.sqrt((row * row).sum()) / exact_norm(row) - 1) > 2**-20

    def test_the_same_bits_under_jit(self):
        """Under jit XLA contracts a * a + b * b unless this is prevented."""
        jax = pytest.importorskip("jax")
        rows = np.random.default_rng(0).standard_normal((256, 64)).astype(np.float32)
        assert bits(np.array(jax.jit(norm2)(rows))) == bits(norm2(rows))
        assert bits(np.array(jax.jit(lambda x: rms(x, 61))(rows))) == bits(rms(rows, 61))
        assert bits(np.array(jax.jit(lambda x: mean_abs(x, 61))(rows))) == bits(mean_abs(rows, 61))

    def test_zero(self, library):
        rows = library.array(np.zeros((1, 64), dtype=np.float32))
        assert library.numpy(norm2(rows)).tolist() == [0.0]
        assert library.numpy(rms(rows, 64)).tolist() == [0.0]

    @pytest.mark.slow
    @settings(derandomize=True, deadline=None, max_examples=100)
    @given(
        st.lists(st.floats(-1, 1, width=32), min_size=1, max_size=16),
        st.integers(-126, 123),
        st.sampled_from([np.float32, np.float64]),
    )
    def test_any_scale(self, values, exponent, dtype):
        row = np.zeros(16, dtype=dtype)
        row[: len(values)] = np.ldexp(np.array(values, dtype=dtype), exponent)
        exact = exact_norm(row)
        # Subnormals, which count as zero elsewhere, are lost; compare absolute values.
        assert float(norm2(row[None])[0]) == pytest.approx(exact, rel=2**-20, abs=4 * 2**-126)
        if exact >= 2**-120:
            assert float(rms(row[None], 16)[0]) == pytest.approx(exact / 4, rel=2**-20)

    def test_in_float64(self, float64_library):
        rows = np.stack([np.full(8, 1e200), np.full(8, 1e-200), wide(1, 8, np.float64)[0]])
        expected = [math.sqrt(8) * 1e200, math.sqrt(8) * 1e-200, float(np.linalg.norm(rows[2]))]
        got = float64_library.numpy(norm2(float64_library.array(rows)))
        assert got.tolist() == pytest.approx(expected, rel=2**-49)
