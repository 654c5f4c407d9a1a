"""The range coder: its distance from the entropy, its stable bytes, and its model."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qcomp.core import coding
from qcomp.core.coding import range_coder, rans
from qcomp.core.coding.bits import BitReader
from qcomp.core.coding.integer_classes import class_of, smallest, spare_bits
from qcomp.core.coding.model import FINEST, FLAT, UNITS_BITS, _coarser, finest, fit, flat, read
from qcomp.core.errors import PayloadError


def as_bytes(signed):
    """Split signed levels into levels and signs, as bytes."""
    signed = np.asarray(signed, dtype=np.int64)
    return np.abs(signed).astype("<u2").tobytes(), (signed < 0).astype(np.uint8).tobytes()


def rounded(x, levels, bucket_size, norm, rng):
    """Draw signed levels of whole buckets by stochastic rounding, in float64."""
    rows = x.reshape(-1, bucket_size)
    scale = np.max(np.abs(rows), axis=1) if norm == "max" else np.linalg.norm(rows, axis=1)
    position = np.abs(rows) / scale[:, None] * levels
    level = np.minimum(np.floor(position + rng.random(rows.shape)), levels)
    return (np.sign(rows) * level).astype(np.int64).ravel()


def entropy(signed):
    """Return the bits per element of the empirical distribution of magnitudes, with one bit for each sign."""
    _, counts = np.unique(np.abs(signed), return_counts=True)
    p = counts / counts.sum()
    return float(-np.sum(p * np.log2(p)) + np.mean(signed != 0))


DRAWS = {
    "gaussian": lambda rng, n: rng.standard_normal(n),
    "laplace": lambda rng, n: rng.laplace(size=n),
    "student": lambda rng, n: rng.standard_t(3, n),
    "rows": lambda rng, n: rng.standard_normal(n) * np.repeat(np.exp(rng.standard_normal(n // 64)), 64),
}


def coded_bytes(signed, largest):
    return len(coding.encode("range", *as_bytes(signed), largest=largest))


class TestLength:
    @pytest.mark.quick_cases(15)
    @pytest.mark.parametrize("family", DRAWS)
    @pytest.mark.parametrize("levels", [1, 3, 7, 15, 127])
    @pytest.mark.parametrize(
        ("size", "most"), [(4096, 1.02), pytest.param(1 << 18, 1.003, marks=pytest.mark.slow)]
    )
    def test_the_length_is_near_the_entropy(self, coders_for_size, family, levels, size, most):
        """Within 2% from 4096 elements on, 0.3% from 2^18 on; below half a bit per element, within 8 bytes."""
        rng = np.random.default_rng([levels, size])
        signed = rounded(DRAWS[family](rng, size), levels, 512, "max", rng)
        least = entropy(signed) * size / 8
        assert least < coded_bytes(signed, levels) <= max(most * least, least + 8)

    @pytest.mark.parametrize(("levels", "bucket_size"), [(1, 512), (7, 512), (22, 512), (1, 1 << 13)])
    @pytest.mark.parametrize(
        ("size", "beside"), [(1 << 13, 8), pytest.param(1 << 18, 32, marks=pytest.mark.slow)]
    )
    def test_sparse_levels(self, coders_for_size, levels, bucket_size, size, beside):
        """The model and the state add 8 bytes to a few dozen."""
        rng = np.random.default_rng(levels)
        signed = rounded(rng.standard_normal(size), levels, bucket_size, "l2", rng)
        least = entropy(signed) * size / 8
        assert least < coded_bytes(signed, levels) <= 1.01 * least + beside

    @pytest.mark.parametrize("largest", [255, 2047, 32767])
    @pytest.mark.parametrize("size", [4096, pytest.param(1 << 18, marks=pytest.mark.slow)])
    def test_many_levels(self, coders_for_size, largest, size):
        """Most values occur once, so the reference is the entropy of the quantized Gaussian, not of the vector."""
        rng = np.random.default_rng(largest)
        width = 6 / largest
        signed = np.rint(rng.standard_normal(size) / width).clip(-largest, largest)
        bits = math.log2(math.sqrt(2 * math.pi * math.e) / width)
        assert 0.99 * bits < 8 * coded_bytes(signed, largest) / size < 1.02 * bits

    @pytest.mark.slow
    @pytest.mark.parametrize(
        ("largest", "kept"), [(127, (127,)), (127, (0, 65, 66, 127)), (1000, (500, 1000)), (32767, (32767,))]
    )
    def test_few_of_many_levels(self, numba_coders, largest, kept):
        """Levels above 127 share classes, whose other bits are plain: this is what the model's page promises."""
        size = 1 << 16
        rng = np.random.default_rng(largest)
        signed = rng.choice(kept, size) * (2 * rng.integers(0, 2, size) - 1)
        excess = 8 * coded_bytes(signed, largest) / size - entropy(signed)
        plain = max(spare_bits(class_of(level, FINEST), FINEST) for level in kept)
        assert plain == max(0, largest.bit_length() - FINEST - 1)
        assert 0.9 * plain * (len(kept) < 2) <= excess <= plain + 0.02 * entropy(signed)

    @pytest.mark.slow
    def test_a_geometric_vector_is_as_short_as_with_its_exact_model(self, numba_coders):
        n, t = 1 << 18, math.sqrt(2) - 1
        rng = np.random.default_rng(0)
        signed = rng.geometric(1 - t, n) - rng.geometric(1 - t, n)  # two-sided, E |k| = 1
        assert abs(np.mean(np.abs(signed)) - 1) < 0.01
        assert 2.52 < 8 * coded_bytes(signed, 64) / n < 2.56

    def test_the_bound_can_fail(self):
        """Fixed width and Elias codes exceed it."""
        rng = np.random.default_rng(0)
        signed = rounded(rng.standard_normal(1 << 13), 7, 512, "max", rng)
        least = entropy(signed) * signed.size / 8
        assert 4 * signed.size / 8 > 1.2 * least
        assert len(coding.encode("elias", *as_bytes(signed), largest=7)) > 1.2 * least

    @pytest.mark.quick_cases(13)
    @pytest.mark.parametrize("largest", [1, 2, 7, 127, 128, 32767])
    @pytest.mark.parametrize("size", [0, 1, 2, 100, 4095, (1 << 14) - 1, 1 << 14, (1 << 14) + 3])
    def test_the_code_is_never_longer_than_fixed_width(self, coders_for_size, size, largest):
        """Uniform vectors are the hardest; a vector of one value takes little more than its signs."""
        rng = np.random.default_rng([size, largest])
        sign = 2 * rng.integers(0, 2, size) - 1
        most = size * (largest.bit_length() + 1) // 8 + 1 + 4 * range_coder.lanes(size)
        for levels in (rng.integers(0, largest + 1, size), rng.choice([0, largest // 2 + 1, largest], size)):
            assert coded_bytes(levels * sign, largest) <= most
        if largest <= 127:  # beyond that, a class has several levels
            assert coded_bytes(np.full(size, largest) * sign, largest) <= min(most, size // 8 + 40)
        assert coded_bytes(np.zeros(size), largest) <= min(most, 20)


GOLDEN = {
    (1, 0): ("00", "00"),
    (1, 1): ("0080", "0002000400"),
    (7, 12): ("0004c6d0a352e8", "000000010000002365870d"),
    (300, 12): ("006f2526d622bab6985b3b7862f52df44bff20", "000040000105402508690c96340a195181fb01"),
    (3, 40): ("01a454c841041061184611c0", "2ce2caf48a373397d119b6269b3cff"),
}
"""Hexadecimal codes of `golden_vector` by largest level and size: of "elias" and of "range"."""


def golden_vector(largest, size):
    return [(-1) ** i * (i * i * largest // max(size * size, 1) + (i == size - 1)) for i in range(size)]


@pytest.mark.parametrize(("largest", "size"), GOLDEN)
def test_golden_bytes(coders, largest, size):
    vector = as_bytes(np.asarray(golden_vector(largest, size)))
    for name, expected in zip(("elias", "range"), GOLDEN[largest, size], strict=True):
        assert coding.encode(name, *vector, largest=largest).hex() == expected


class TestClasses:
    @pytest.mark.parametrize("fine", range(7))
    def test_classes_partition_the_numbers(self, fine):
        last = -1
        for c in range(class_of(3000, fine) + 1):
            numbers = range(smallest(c, fine), smallest(c, fine) + (1 << spare_bits(c, fine)))
            assert numbers.start == last + 1
            assert all(class_of(k, fine) == c for k in numbers)
            assert len(numbers) == 1 or len(numbers) << fine <= numbers.start
            last = numbers[-1]

    @settings(derandomize=True, deadline=None, max_examples=100)
    @given(st.integers(0, 2**45), st.integers(0, 8))
    def test_a_number_lies_within_the_range_of_its_class(self, number, fine):
        c = class_of(number, fine)
        assert smallest(c, fine) <= number < smallest(c, fine) + (1 << spare_bits(c, fine))


class TestModel:
    @settings(derandomize=True, deadline=None, max_examples=100)
    @given(
        st.integers(1, 32767).flatmap(
            lambda s: st.tuples(
                st.just(s),
                st.lists(
                    st.sampled_from([0, 0, 1, 2, 50, 10**6]) | st.integers(0, 2**31),
                    max_size=class_of(s, finest(s)) + 1,
                ),
            )
        )
    )
    def test_the_decoder_reads_the_fitted_model(self, case):
        largest, counts = case
        model, data = fit(counts, largest)
        assert read(BitReader(data), sum(counts), largest) == model
        assert sum(model.units) == 1 << UNITS_BITS
        if model.method != FLAT:
            fine, finer = model.method - 1, finest(largest)
            # Exactly the classes that occur have a share.
            occur = {class_of(smallest(c, finer), fine) for c, count in enumerate(counts) if count}
            assert {c for c, units in enumerate(model.units) if units > 0} == occur

    @pytest.mark.parametrize("largest", [1, 2, 7, 100, 127, 1000, 32767])
    def test_coarser_classes_have_the_sums_of_the_finer_counts(self, largest):
        levels = np.random.default_rng(largest).integers(0, largest + 1, 5000).astype("<u2")
        counts = rans.count_classes(memoryview(levels.tobytes()), largest, finest(largest))
        for fine in range(finest(largest), 0, -1):
            counts = _coarser(counts, fine)
            assert counts == rans.count_classes(memoryview(levels.tobytes()), largest, fine - 1)

    def test_few_counts_are_enumerated(self):
        """All histograms of 6 elements in three classes."""
        for a in range(7):
            for b in range(7 - a):
                counts = [a, b, 6 - a - b]
                model, data = fit(counts, 2)
                assert read(BitReader(data), 6, 2) == model

    def test_a_model_that_costs_more_than_it_saves_is_left_out(self):
        assert fit([1, 1], 1) == (flat(1), b"\0")
        assert fit([0, 2000, 2000, 2000], 3)[0].method != FLAT  # flat: zero would have a quarter of the codes

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("100" + "1" * 13, "names the method 4; expected at most 3"),
            ("001" + "00111" + "11111111", "has 7 classes, too many for levels up to 7"),
            ("001" + "1" + "000000001111111111", "weight -"),
            ("001" + "1" + "0" * 9 + "1" + "0" * 9, "weight 260"),
            ("001" + "010" + "1" + "0001111", "weight -"),
            ("001" + "1" + "0001001", "has weight 0"),
            ("001" + "1" + "1" + "111", "padded with ones"),
            ("001" + "0" * 9, "middle of a codeword"),
        ],
    )
    def test_invalid_models_are_refused(self, text, message):
        text += "0" * (-len(text) % 8)
        data = int(text, 2).to_bytes(len(text) // 8, "big")
        with pytest.raises(PayloadError, match=message):
            read(BitReader(data), 4, 7)
