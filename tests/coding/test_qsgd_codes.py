"""The sparse and the dense code: exact lengths, the paper's bounds, and mean lengths of random vectors."""

import math
from array import array

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qcomp.core import coding
from qcomp.core.coding import qsgd_codes
from qcomp.core.coding.elias import length, omega

LEVELS = st.lists(st.sampled_from([0] * 12 + [1, 1, 2, 3, 17, 255, 256, 32767]), max_size=80)


def bits_of(levels, negative, method):
    """The code after its first byte, as a string of bits, as the paper writes it."""
    if method == qsgd_codes.DENSE:
        return "".join(
            str(omega(k + 1)) + ("01"[sign] if k else "") for k, sign in zip(levels, negative, strict=True)
        )
    at = [i for i, k in enumerate(levels) if k]
    gaps = [i - last for last, i in zip([-1, *at], at, strict=False)]
    parts = [str(omega(len(at) + 1))]
    parts += [
        str(omega(gap)) + "01"[negative[i]] + str(omega(levels[i])) for gap, i in zip(gaps, at, strict=True)
    ]
    return "".join(parts)


def encoded(levels, negative, largest=32767):
    data = array("H", levels)
    return coding.encode("elias", data.tobytes(), bytes(negative), largest=largest)


@pytest.mark.slow
@settings(derandomize=True, deadline=None, max_examples=100)
@given(levels=LEVELS, data=st.data())
def test_the_code_is_the_shorter_one_bit_for_bit(levels, data):
    negative = [data.draw(st.integers(0, min(k, 1))) for k in levels]
    texts = [bits_of(levels, negative, method) for method in (qsgd_codes.DENSE, qsgd_codes.SPARSE)]
    assert qsgd_codes.dense_length(array("H", levels)) == len(texts[0])
    assert qsgd_codes.sparse_length(array("H", levels)) == len(texts[1])
    method = int(len(texts[1]) < len(texts[0]))
    text = f"{method:08b}" + texts[method]
    code = encoded(levels, negative)
    assert "".join(f"{byte:08b}" for byte in code) == text + "0" * (-len(text) % 8)
    assert len(code) <= 1 + 3 * len(levels)


def test_lengths_by_formula():
    """The paper's formula; it includes 32 bits for the scale, which is stored elsewhere, in place of the count."""
    n, levels = 1000, array("H", bytes(2000))
    for i, k in [(0, 1), (1, 3), (500, 32767), (999, 2)]:
        levels[i] = k
    omegas = [length(g) for g in (1, 1, 499, 499)] + [length(k) for k in (1, 3, 32767, 2)]
    assert qsgd_codes.sparse_length(levels) == length(5) + sum(omegas) + 4
    dense = n - 4 + sum(length(k + 1) + 1 for k in (1, 3, 32767, 2))
    assert qsgd_codes.dense_length(levels) == dense


def test_a_constant_vector_at_s_of_the_square_root_of_n():
    """All levels are 1: 4 bits per element, where unary levels would take 3; it does not reach the paper's 2.8."""
    levels = array("H", [1] * 1024)
    assert qsgd_codes.dense_length(levels) == 4 * 1024
    unary = sum(k + 1 + (k > 0) for k in levels)
    assert unary == 3 * 1024


def test_the_bound_of_the_dense_code():
    """|omega(k + 1)| <= 1 + 2k with equality at 0 and 1: with E mean k <= 1, at most 4 bits with the sign."""
    assert [length(k + 1) - 1 - 2 * k for k in (0, 1)] == [0, 0]
    assert all(length(k + 1) < 1 + 2 * k for k in range(2, 32768))


def test_a_fixed_geometric_model_takes_2_5432_bits():
    """With P(k) = (1-t)/(1+t) t^|k| and E mean |k| <= 1, which t = sqrt(2) - 1 fits best."""
    t = math.sqrt(2) - 1
    assert math.isclose(2 * t / (1 - t * t), 1)
    bits = math.log2((1 + t) / (1 - t)) + math.log2(1 / t)
    assert 2.5431 < bits < 2.5432


def expected_sparse_bits(n, p):
    """Return the mean length of the sparse code of n levels, each 1 with probability p, else 0; plus 32 bits before it.

    A gap g ends at an element that has an element g before it, or that is the first and has index g - 1.
    """
    gap = np.arange(1, min(n, math.ceil(40 / p)) + 1)  # longer gaps have a probability of e^-40
    lengths = np.asarray([length(int(g)) for g in gap])
    chance = p * (1 - p) ** (gap - 1)
    return 32 + float(np.sum(lengths * chance * ((n - gap) * p + 1))) + n * p * 2


def paper_bound(n, s):
    most = s * (s + math.sqrt(n))
    return (3 + 1.5 * math.log2(2 * (s * s + n) / most)) * most + 32


class TestSparseMeans:
    """A Gaussian element is 1 with probability s sqrt(2/pi)/sqrt(n), a constant one with s/sqrt(n)."""

    @pytest.mark.parametrize(
        ("n", "s", "bound", "measured"),
        [(10**4, 1, 1491, 1201), (10**6, 1, 19498, 14950), (10**5, 5, 21620, 17019)],
    )
    def test_gaussian(self, n, s, bound, measured):
        p = s * math.sqrt(2 / math.pi) / math.sqrt(n)
        expected = expected_sparse_bits(n, p)
        assert round(paper_bound(n, s)) == bound
        assert expected < bound
        # The length of one vector varies with its number of nonzero levels.
        deviation = expected / math.sqrt(n * p)
        assert abs(measured - expected) < deviation

    def test_constant(self):
        expected = expected_sparse_bits(10**4, 0.01)
        assert abs(1402 - expected) < expected / 10

    def test_the_mean_length_of_the_encoder_is_the_expected_one(self):
        n, p, vectors = 10**4, 0.01, 40
        rng = np.random.default_rng(0)
        found = []
        for _ in range(vectors):
            levels = array("H", (rng.random(n) < p).astype(np.uint16).tobytes())
            head = length(n - levels.count(0) + 1)
            found.append(32 + qsgd_codes.sparse_length(levels) - head)
        expected = expected_sparse_bits(n, p)
        error = np.std(found, ddof=1) / math.sqrt(vectors)
        assert abs(np.mean(found) - expected) < 4 * error
        # This would detect an encoder whose first gap is i, or one that codes each gap less 1.
        assert 4 * error < 100 < abs(expected_sparse_bits(n, 0.02) - expected)


# Width of a level in sigma; variance, P(0), entropy, omega codes with signs of levels > 0, rate bound.
GAUSSIAN = [
    (0.125, 0.0026, 0.0498, 5.049, 6.812, 0.0009),
    (0.25, 0.0104, 0.0992, 4.055, 5.408, 0.0036),
    (0.5, 0.0417, 0.1954, 3.077, 4.063, 0.0143),
    (1, 0.1667, 0.3687, 2.158, 2.942, 0.0528),
    (2, 0.6638, 0.6095, 1.415, 2.171, 0.164),
    (4, 2.192, 0.8005, 0.920, 1.598, 0.387),
    (8, 5.383, 0.9003, 0.568, 1.299, 0.835),
    (16, 11.77, 0.9501, 0.336, 1.150, 1.69),
]


def level_probabilities(width):
    """P(|k| = 0, 1, ...) for a standard Gaussian: second differences of E max(0, Z/width - t)."""

    def excess(t):
        x = t * width
        density = math.exp(-x * x / 2) / math.sqrt(2 * math.pi)
        return (density - x * math.erfc(x / math.sqrt(2)) / 2) / width

    count = math.ceil(9 / width) + 1
    values = [excess(t) for t in range(-1, count + 1)]
    one_side = [a - 2 * b + c for a, b, c in zip(values, values[1:], values[2:], strict=False)]
    return [one_side[0], *(2 * p for p in one_side[1:])]


@pytest.mark.parametrize("row", GAUSSIAN, ids=lambda row: f"{row[0]}")
def test_levels_of_a_gaussian(row):
    width, variance, zero, entropy, bits, bound = row
    p = level_probabilities(width)
    assert math.isclose(sum(p), 1, abs_tol=1e-12)
    signed = -sum(q * math.log2(q) for q in p if q > 0) + 1 - p[0]
    found = (
        width**2 * sum(q * k * k for k, q in enumerate(p)) - 1,
        p[0],
        signed,
        sum(q * (length(k + 1) + (k > 0)) for k, q in enumerate(p)),
        1 / (4**signed - 1),
    )
    for value, printed in zip(found, (variance, zero, entropy, bits, bound), strict=True):
        assert math.isclose(value, printed, rel_tol=5e-3, abs_tol=6e-5 if printed < 1 else 6e-4)


def test_the_dense_code_of_a_gaussian_has_the_expected_length():
    """2.942 bits at s = sqrt(n), with tolerance from the spread of a level's bits; the sparse code takes fewer."""
    n = 1 << 16
    rng = np.random.default_rng(1)
    levels = np.floor(np.abs(rng.standard_normal(n)) + rng.random(n)).astype(np.uint16)
    p = level_probabilities(1.0)
    bits = [length(k + 1) + (k > 0) for k in range(len(p))]
    mean = sum(q * b for q, b in zip(p, bits, strict=True))
    deviation = math.sqrt(sum(q * (b - mean) ** 2 for q, b in zip(p, bits, strict=True)) / n)
    found = qsgd_codes.dense_length(array("H", levels.tobytes())) / n
    assert abs(found - mean) < 4 * deviation < 0.05
    assert qsgd_codes.sparse_length(array("H", levels.tobytes())) / n < found
