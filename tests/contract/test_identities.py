"""Exact identities of single compressors, beyond the laws for every compressor."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import qcomp
from qcomp.testing import replace_draws
from qcomp.testing.inputs import vector, vectors

KEY = qcomp.Key(seed=3, step=1)


def decoded(compressor, x, key=KEY):
    return compressor.decompress(compressor.compress(x, key=key), like=x)


def qsgd_parts(compressor, x, key=KEY):
    payload = compressor.compress(x, key=key)
    return compressor.payload_spec(x.size).split(payload.data)


@settings(deadline=None, derandomize=True, max_examples=60)
@given(vectors((8, 64)))
def test_sign_with_l1_scale_loses_exactly_what_the_identity_says(x):
    # ||C(v) - v||^2 = (1 - ||v||_1^2 / (n ||v||_2^2)) ||v||^2; float32 rounds the scale by 2^-23 relative.
    v = np.where(np.abs(x) < 2.0**-100, 0, x).astype(np.float32)
    lost = np.sum((decoded(qcomp.ScaledSign(bucket_size=64), v).astype(np.float64) - v) ** 2)
    norm1, square = np.sum(np.abs(v.astype(np.float64))), np.sum(v.astype(np.float64) ** 2)
    np.testing.assert_allclose(lost, square - norm1**2 / v.size, rtol=0, atol=2.0**-20 * square)


@pytest.mark.parametrize("n", [8, 100, 512])
def test_sign_with_rms_scale_keeps_the_norm_and_has_relative_error_2_minus_2_rho(n):
    x = vector("gaussian", n, 1)
    v = x.astype(np.float64)
    y = decoded(qcomp.ScaledSign(bucket_size=512, scale="rms"), x).astype(np.float64)
    rho = np.sum(np.abs(v)) / np.sqrt(n * np.sum(v**2))
    np.testing.assert_allclose(np.sum(y**2), np.sum(v**2), rtol=2.0**-20)
    np.testing.assert_allclose(np.sum((y - v) ** 2) / np.sum(v**2), 2 * (1 - rho), rtol=2.0**-18)


def test_sign_with_rms_scale_expands_one_hot():
    x = np.zeros(100, dtype=np.float32)
    x[7] = 1
    y = decoded(qcomp.ScaledSign(bucket_size=128, scale="rms"), x)
    assert np.sum((y - x) ** 2) == pytest.approx(1.8, rel=1e-5)


def test_sign_of_zero_is_plus():
    x = np.asarray([0.0, -0.0, 1.0, -1.0], dtype=np.float32)
    assert decoded(qcomp.ScaledSign(bucket_size=8), x).tolist() == [0.5, 0.5, 0.5, -0.5]


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("norm", ["max", "l2"])
@pytest.mark.parametrize(("levels", "n"), [(1, 9), (3, 64), (7, 513), (127, 40)])
def test_qsgd_variance_is_exactly_step_squared_times_p_one_minus_p(norm, levels, n):
    # Over all draws, for each element: a fraction T / 65536 of the draws rounds up, T = rint(65536 p).
    c = qcomp.QSGD(levels=levels, bucket_size=1024, norm=norm)
    x = vector("gaussian", n, 2)
    step = float(qsgd_parts(c, x)["step"][0])
    position = np.minimum(np.abs(x) / np.float32(step), levels)
    low = np.floor(position)
    threshold = np.round((position - low) * np.float32(65536)).astype(np.int64)
    results = {}
    for draw in (*np.unique(threshold), *(np.unique(threshold) - 1), 0, 65535):
        if 0 <= draw <= 65535:
            with replace_draws(lambda _key, _block, draw=draw: draw):
                results[int(draw)] = decoded(c, x)
    for i in range(n):
        t = int(threshold[i])
        down = np.copysign(low[i] * step, x[i])
        up = np.copysign((low[i] + 1) * step, x[i])
        if t > 0:
            assert results[t - 1][i] == up
        if t < 65536:
            assert results[t if t in results else 65535][i] == down
    p = threshold / 65536
    mean = np.copysign(low + p, x) * step
    np.testing.assert_allclose(mean, x, rtol=2.0**-23, atol=2.0**-17 * step)
    bound = c.traits.omega * np.sum(x.astype(np.float64) ** 2)
    assert np.sum(step**2 * p * (1 - p)) <= bound


@pytest.mark.parametrize("norm", ["max", "l2"])
def test_qsgd_commutes_with_powers_of_two_and_with_the_sign(norm):
    c = qcomp.QSGD(levels=7, bucket_size=64, norm=norm)
    x = vector("gaussian", 200, 3)
    y = decoded(c, x)
    assert np.array_equal(decoded(c, x * 2**10), y * 2**10)
    assert np.array_equal(decoded(c, -x), -y)


def test_qsgd_permutes_with_whole_buckets():
    c = qcomp.QSGD(levels=7, bucket_size=64)
    x = vector("gaussian", 4 * 64, 4)
    order = [2, 0, 3, 1]
    with replace_draws(lambda _key, _block: 30000):
        y, permuted = decoded(c, x), decoded(c, x.reshape(4, 64)[order].ravel())
    assert np.array_equal(permuted, y.reshape(4, 64)[order].ravel())


@pytest.mark.parametrize("levels", [1, 3, 7, 127])
def test_vectors_on_the_grid_are_fixed_points(levels):
    c = qcomp.QSGD(levels=levels, bucket_size=64)
    x = (np.arange(-levels, levels + 1)[:64] * np.float32(0.375)).astype(np.float32)
    x[0] = -levels * np.float32(0.375)
    for seed in range(4):
        assert np.array_equal(decoded(c, x, qcomp.Key(seed=seed)), x)


def test_qsgd_with_one_level_and_max_norm_is_terngrad():
    # S = max|g|; Q = S sgn(g) Bernoulli(|g| / S).
    c = qcomp.QSGD(levels=1, bucket_size=32)
    x = vector("gaussian", 32, 5)
    largest = np.max(np.abs(x))
    for draw in (0, 10_000, 40_000, 65_535):
        with replace_draws(lambda _key, _block, draw=draw: draw):
            y = decoded(c, x)
        step = np.max(np.abs(y))
        assert largest <= step <= largest * (1 + 2.0**-15)
        expected = np.where(draw < np.round(np.abs(x) / step * np.float32(65536)), np.copysign(step, x), 0)
        assert np.array_equal(y, expected)


@pytest.mark.parametrize(
    ("n", "levels", "norm", "omega"),
    [
        (512, 7, "max", 0.035),
        (512, 7, "l2", 1.58),
        (512, 16, "max", 0.0070),
        (512, 16, "l2", 0.336),
        (128, 1, "max", 1.27),
        (128, 1, "l2", 8.05),
        (64, 1, "max", 1.077),  # = E ||v||_1 max|v| / ||v||^2 - 1, the identity for one level
        (64, 1, "l2", 5.37),
        (8192, 7, "max", 0.053),
        (8192, 7, "l2", 9.3),
    ],
)
def test_variance_of_gaussian_buckets_is_that_of_the_specification(n, levels, norm, omega):
    c = qcomp.QSGD(levels=levels, bucket_size=n, norm=norm)
    rows = max(8, 200_000 // n)
    x = np.random.default_rng(6).standard_normal((rows, n)).astype(np.float32)
    step = qsgd_parts(c, x.ravel())["step"].reshape(-1)[:, None].astype(np.float64)
    p = np.mod(np.abs(x) / step, 1)
    each = np.sum(step**2 * p * (1 - p), axis=1) / np.sum(x.astype(np.float64) ** 2, axis=1)
    # The figures have two or three digits; the mean over rows has its own standard error.
    slack = 0.02 * omega + 4 * np.std(each) / np.sqrt(rows)
    assert abs(np.mean(each) - omega) <= slack


@settings(deadline=None, derandomize=True, max_examples=60)
@given(vectors((7, 64, 65)))
def test_minmax_error_is_at_most_half_a_step_and_zero_stays_zero(x):
    c = qcomp.MinMaxUInt8(bucket_size=64)
    y = decoded(c, x).astype(np.float64)
    for start in (0, 64):
        v, w = x[start : start + 64].astype(np.float64), y[start : start + 64]
        if v.size:
            v = np.where(np.abs(v) < 2.0**-126, 0, v)
            step = max((v.max() - v.min()) / 255 * (1 + 2.0**-14), 2.0**-126)
            assert np.all(np.abs(w - v) <= step / 2 + 2.0**-23 * np.abs(v) + 2.0**-125)
            if v.min() <= 0 <= v.max():
                assert np.all(w[v == 0] == 0)


@pytest.mark.parametrize("value", [0.7, -3.0, 1e30, -1e-30])
def test_minmax_keeps_a_constant_bucket(value):
    x = np.full(70, value, dtype=np.float32)
    assert np.array_equal(decoded(qcomp.MinMaxUInt8(bucket_size=64), x), x)


def test_minmax_resolves_a_range_of_tiny_gradients():
    x = vector("gaussian", 64, 7) * np.float32(2.0**-60)
    y = decoded(qcomp.MinMaxUInt8(bucket_size=64), x)
    assert np.max(np.abs(y - x)) <= (x.max() - x.min()) / 500


@settings(deadline=None, derandomize=True, max_examples=100)
@given(st.lists(st.floats(-65504, 65504, width=32), min_size=1, max_size=40))
def test_cast_to_float16_is_numpys(values):
    x = np.asarray(values, dtype=np.float32)
    x = np.where(np.abs(x) < 2.0**-126, 0, x).astype(np.float32)
    assert np.array_equal(decoded(qcomp.Cast("float16"), x), x.astype(np.float16).astype(np.float32))


def test_cast_to_float16_is_numpys_for_all_codes_and_the_ties_between_them():
    codes = np.arange(0x7C00, dtype=np.uint16).view(np.float16).astype(np.float32)
    ties = (codes[1:] + codes[:-1]) / 2
    x = np.concatenate([codes, ties, np.nextafter(ties, np.float32(0)), -codes[1:]])
    assert np.array_equal(decoded(qcomp.Cast("float16"), x), x.astype(np.float16).astype(np.float32))


def test_cast_to_bfloat16_is_that_of_torch():
    import torch

    x = np.concatenate(
        [vector("wide", 5000, 8), vector("ties", 100, 8), np.float32([1 + 2.0**-8, 1 + 3 * 2.0**-8])]
    )
    expected = torch.asarray(x).to(torch.bfloat16).to(torch.float32).numpy()
    assert np.array_equal(decoded(qcomp.Cast("bfloat16"), x), expected)


def test_cast_sends_little_endian_halves():
    x = vector("ties", 33, 9)
    data = qcomp.Cast("float16").compress(x).data
    assert data.tobytes() == x.astype("<f2").tobytes()


def test_scaled_is_the_inner_result_over_one_plus_omega():
    inner = qcomp.QSGD(levels=3, bucket_size=32)
    x = vector("gaussian", 100, 10)
    expected = decoded(inner, x) / (1 + inner.traits.omega)
    np.testing.assert_allclose(decoded(qcomp.Scaled(inner), x), expected, rtol=2.0**-22)


@pytest.mark.parametrize("compressor", [qcomp.ScaledSign(), qcomp.MinMaxUInt8(), qcomp.Identity()], ids=str)
def test_scaled_needs_an_unbiased_compressor(compressor):
    if compressor.traits.unbiased:
        qcomp.Scaled(compressor)
    else:
        with pytest.raises(ValueError, match="expected an unbiased compressor"):
            qcomp.Scaled(compressor)


@pytest.mark.parametrize(
    ("compressor", "bits_per_element"),
    [
        (qcomp.ScaledSign(bucket_size=4096), 1 + 32 / 4096),
        (qcomp.QSGD(levels=1, bucket_size=128), 2.25),
        (qcomp.QSGD(levels=7, bucket_size=512), 4.0625),
        (qcomp.QSGD(levels=127, bucket_size=512), 8.0625),
        (qcomp.QSGD(levels=3, bucket_size=512), 3.0625),
        (qcomp.MinMaxUInt8(bucket_size=2048), 8 + 64 / 2048),
        (qcomp.Cast(), 16),
        (qcomp.Identity(), 32),
    ],
    ids=str,
)
def test_bits_per_element(compressor, bits_per_element):
    assert compressor.payload_spec(1 << 16).nbytes * 8 == bits_per_element * (1 << 16)


@pytest.mark.parametrize(
    ("kind", "settings", "message"),
    [
        (qcomp.ScaledSign, {"bucket_size": 12}, "bucket_size is 12; expected a power of two"),
        (qcomp.ScaledSign, {"scale": "l3"}, "scale is 'l3'; expected"),
        (qcomp.QSGD, {"levels": 0}, "levels is 0; expected an integer from 1 to 127"),
        (qcomp.QSGD, {"levels": 128}, "levels is 128"),
        (qcomp.QSGD, {"norm": "l1"}, "norm is 'l1'"),
        (qcomp.MinMaxUInt8, {"bucket_size": 1 << 17}, "expected at most 65536"),
        (qcomp.Cast, {"dtype": "float8"}, "dtype is 'float8'"),
    ],
)
def test_bad_parameters_are_named(kind, settings, message):
    with pytest.raises(ValueError, match=message):
        kind(**settings)


def test_out_receives_the_result_and_is_checked():
    c, x = qcomp.ScaledSign(bucket_size=8), vector("gaussian", 20, 11)
    out = np.empty_like(x)
    assert c.decompress(c.compress(x), like=x, out=out) is out
    assert np.array_equal(out, decoded(c, x))
    with pytest.raises(ValueError, match="out has shape"):
        c.decompress(c.compress(x), like=x, out=np.empty(3, dtype=np.float32))


def test_donate_reuses_the_buffer_and_changes_no_value():
    c, x = qcomp.ScaledSign(bucket_size=8), vector("gaussian", 20, 12)
    residual = vector("gaussian", 20, 13)
    expected, kept = qcomp.feedback.compress(c, x, residual.copy())
    payload, donated = qcomp.feedback.compress(c, x, residual, donate=True)
    assert donated is residual
    assert donated.tobytes() == kept.tobytes()
    assert payload.data.tobytes() == expected.data.tobytes()


def test_donate_touches_nothing_when_the_input_is_not_finite():
    x, residual = np.full(9, np.nan, dtype=np.float32), vector("gaussian", 9, 14)
    before = residual.tobytes()
    with pytest.raises(qcomp.NonFiniteError):
        qcomp.feedback.compress(qcomp.ScaledSign(), x, residual, donate=True)
    assert residual.tobytes() == before


@settings(deadline=None, derandomize=True, max_examples=30)
@given(st.integers(0, 2**20))
def test_feedback_loses_nothing(seed):
    # Over T steps the decompressed vectors and the last residual add up to the sum of the inputs, in float64.
    rng = np.random.default_rng(seed)
    c = qcomp.ScaledSign(bucket_size=16, scale="rms")
    residual, sent, total = np.zeros(37), np.zeros(37), np.zeros(37)
    for _ in range(50):
        x = rng.standard_normal(37)
        payload, residual = qcomp.feedback.compress(c, x, residual)
        sent += c.decompress(payload, like=x)
        total += x
    np.testing.assert_allclose(sent + residual, total, rtol=0, atol=1e-12)
