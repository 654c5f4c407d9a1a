"""Nearest rounding to Lloyd-Max levels: a projection, its bound, its levels, and its coder."""

import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings

import qcomp
from qcomp.core import coding
from qcomp.core.compressors.lloyd_max import LEVELS, THRESHOLDS
from qcomp.testing.inputs import adversarial, vector, vectors

BITS = [1, 2, 3, 4]


def decoded(c, x):
    return c.decompress(c.compress(x), like=x)


def relative_error(c, x):
    v = x.astype(np.float64)
    return float(np.sum((decoded(c, x) - v) ** 2) / np.sum(v**2))


def parts(c, x):
    return c.payload_spec(x.size).split(c.compress(x).data)


@pytest.mark.parametrize("bits", BITS)
@settings(deadline=None, derandomize=True, max_examples=40)
@given(x=vectors((8, 64)))
def test_the_error_is_that_of_a_projection(bits, x):
    """||C(v) - v||^2 = ||v||^2 - <v, C(v)>^2 / ||C(v)||^2, up to the 17 bits of the step."""
    v = np.where(np.abs(x) < 2.0**-100, 0, x).astype(np.float32)
    y = decoded(qcomp.LloydMax(bits, bucket_size=64), v).astype(np.float64)
    square, v = np.sum(v.astype(np.float64) ** 2), v.astype(np.float64)
    along = np.sum(v * y) ** 2 / np.sum(y**2) if np.any(y) else 0.0
    np.testing.assert_allclose(np.sum((y - v) ** 2), square - along, rtol=0, atol=2.0**-20 * square)
    np.testing.assert_allclose(np.sum(y**2), along, rtol=0, atol=2.0**-14 * square)


@pytest.mark.parametrize("size", [0, 1, 9, 64, 1000])
def test_one_bit_is_the_sign_with_the_mean_magnitude(size):
    x = vector("heavy", size, 1)
    for dtype in (np.float32, np.float64):
        one = qcomp.LloydMax(bits=1, bucket_size=64).compress(x.astype(dtype))
        assert one.data.tobytes() == qcomp.ScaledSign(bucket_size=64).compress(x.astype(dtype)).data.tobytes()


@pytest.mark.parametrize(("bits", "expected"), [(1, 0.3634), (2, 0.1175), (3, 0.03454), (4, 0.009497)])
def test_the_error_of_normal_values_is_that_of_max(bits, expected):
    """Max (1960), table 1; a bucket with many values is distributed like them."""
    x = np.random.default_rng(2).standard_normal(1 << 20).astype(np.float32)
    assert relative_error(qcomp.LloydMax(bits, bucket_size=1 << 14), x) == pytest.approx(expected, rel=0.01)


@pytest.mark.parametrize("bits", BITS)
def test_thresholds_lie_halfway_between_levels(bits):
    """As Max's condition requires, in units where the best scale for a normal distribution is 1."""
    edges = [0.0, *THRESHOLDS[bits], math.inf]
    shares = [math.erf(b / math.sqrt(2)) - math.erf(a / math.sqrt(2)) for a, b in pairwise(edges)]
    density = [math.sqrt(2 / math.pi) * math.exp(-t * t / 2) for t in edges]
    means = [density[i] - density[i + 1] for i in range(len(shares))]
    levels = LEVELS[bits]
    scale = sum(k * m for k, m in zip(levels, means, strict=True)) / sum(
        k * k * p for k, p in zip(levels, shares, strict=True)
    )
    halfway = [scale * (a + b) / 2 for a, b in pairwise(levels)]
    np.testing.assert_allclose(THRESHOLDS[bits], halfway, atol=0.012)
    np.testing.assert_allclose(
        [m / p for m, p in zip(means, shares, strict=True)], np.multiply(levels, scale), atol=0.012
    )


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("n", [8, 128, 4096])
def test_the_bound_holds_and_no_bound_could_be_much_better(bits, n):
    c = qcomp.LloydMax(bits, bucket_size=n)
    worst = max(relative_error(c, row) for row in adversarial(n))
    assert 1 - c.traits.delta >= worst
    one_hot = np.zeros(n, dtype=np.float32)
    one_hot[n // 2] = 5
    top, low = LEVELS[bits][-1], LEVELS[bits][0]
    found = 1 - relative_error(c, one_hot)
    assert found == pytest.approx(top**2 / (top**2 + (n - 1) * low**2), rel=1e-4)
    assert c.traits.delta > found / 6


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_multiples_of_the_levels_are_fixed_points(bits):
    """For the proportions of a normal distribution, for which the thresholds separate the levels."""
    shares = np.diff([math.erf(t / math.sqrt(2)) for t in (0, *THRESHOLDS[bits], 9)])
    counts = np.round(shares * 250).astype(int)
    x = np.repeat(LEVELS[bits], counts) * np.float32(0.375)
    x[::2] *= -1
    x = np.random.default_rng(3).permutation(x).astype(np.float32)
    c = qcomp.LloydMax(bits, bucket_size=256)
    assert np.array_equal(decoded(c, x), x)
    assert parts(c, x)["step"].tolist() == [0.375]


@pytest.mark.parametrize("bits", BITS)
def test_powers_of_two_and_the_sign_commute_and_buckets_are_independent(bits):
    c, x = qcomp.LloydMax(bits, bucket_size=64), vector("gaussian", 200, 3)
    y = decoded(c, x)
    assert np.array_equal(decoded(c, x * 2**10), y * 2**10)
    assert np.array_equal(decoded(c, -x), -y)
    assert np.array_equal(decoded(c, x[64:128]), y[64:128])
    order = np.random.default_rng(0).permutation(64)
    assert np.array_equal(np.sign(decoded(c, x[:64][order])), np.sign(y[:64][order]))


@pytest.mark.parametrize("bits", BITS)
def test_a_bucket_of_zeros_stays_zero_and_other_zeros_get_the_lowest_level(bits):
    c = qcomp.LloydMax(bits, bucket_size=8)
    x = np.zeros(16, dtype=np.float32)
    x[[9, 10]] = -0.0, 2.0**-130
    assert decoded(c, x).tobytes() == bytes(64)
    x[0] = 8
    y = decoded(c, x)
    assert np.all(y[1:8] > 0)
    assert len(set(y[1:8].tolist())) == 1
    assert not np.any(y[8:])


def test_the_largest_accepted_values_do_not_overflow():
    largest = np.nextafter(np.float32(2.0**100), np.float32(0))
    for bits in BITS:
        x = np.full(1 << 12, largest, dtype=np.float32)
        with np.errstate(all="raise"):
            y = decoded(qcomp.LloydMax(bits, bucket_size=1 << 12), x)
        np.testing.assert_allclose(y, x, rtol=2.0**-15)


@pytest.mark.parametrize("bits", [2, 3, 4])
@pytest.mark.parametrize("size", [0, 1, 7, 100, 3000])
def test_a_coder_changes_no_value(bits, size):
    x = vector("gaussian", size, 4)
    plain, c = qcomp.LloydMax(bits, 64), qcomp.LloydMax(bits, 64, coding="range")
    assert decoded(c, x).tobytes() == decoded(plain, x).tobytes()
    assert c.compress(x).nbytes <= plain.compress(x).nbytes + 1


@pytest.mark.parametrize(("bits", "entropy"), [(2, 1.911), (3, 2.825), (4, 3.765)])
def test_a_coder_comes_close_to_the_entropy(bits, entropy):
    x = np.random.default_rng(5).standard_normal(1 << 16).astype(np.float32)
    c = qcomp.LloydMax(bits, bucket_size=1 << 12, coding="range")
    sent = 8 * (c.compress(x).nbytes - 4 * 16) / x.size
    assert entropy - 0.01 < sent < entropy + 0.03


def test_a_code_with_a_level_that_does_not_exist_is_refused():
    c = qcomp.LloydMax(2, bucket_size=64, coding="range")
    x = vector("heavy", 64, 1)
    good = c.compress(x)
    levels = np.ones(64, dtype=np.uint16)
    levels[5] = 0
    code = coding.encode("range", levels.tobytes(), bytes(64), largest=2)
    data = np.frombuffer(good.data[:4].tobytes() + b"\1" + code, dtype=np.uint8)
    with pytest.raises(qcomp.PayloadError, match="the codes have a level 0; expected levels from 1 on"):
        c.decompress(qcomp.Payload(good.compressor, 64, "float32", data), like=x)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bits": 0}, "bits is 0; expected an integer from 1 to 4"),
        ({"bits": 5}, "bits is 5; expected an integer from 1 to 4"),
        ({"bits": 2.0}, "bits is 2.0; expected an integer"),
        ({"bits": True}, "bits is True; expected an integer"),
        ({"bucket_size": 100}, "bucket_size is 100; expected a power of two"),
        ({"coding": "elias"}, "coding is 'elias'; expected 'fixed' or 'range'"),
        ({"bits": 1, "coding": "range"}, "signs alone cannot be shortened; expected 'fixed', or more bits"),
    ],
)
def test_bad_parameters_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        qcomp.LloydMax(**options)
