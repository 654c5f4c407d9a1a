"""The moments of QSGD, exact over all 65536 draws of every element: identities first, then the bounds on them.

Identities for real-valued draws hold here up to the resolution of 16 bits: p is off by 2^-17 at most, and the step is
the norm over the levels, rounded up by a factor of at most 1 + 2^-16.
"""

from typing import Any, NamedTuple

import numpy as np
import pytest

import qcomp
from qcomp.testing import replace_draws
from qcomp.testing.inputs import vector

DRAWS = 1 << 16
N = 16
NORMS = ["max", "l2"]
FAMILIES = ["gaussian", "one_hot", "constant", "sparse", "wide", "worst"]


class Moments(NamedTuple):
    step: float
    p: np.ndarray
    """The fraction of |v_i| / step."""
    mean: np.ndarray
    error: float
    """E |Q - v|^2."""
    square: float
    """E |Q|^2."""
    nonzeros: float
    """E |Q|_0."""


def values(family: str) -> np.ndarray:
    if family != "worst":
        return vector(family, N, 21)
    # One large element, all others 1 / (1 + sqrt(n)): this vector has the largest |v|_1 |v|_inf / |v|_2^2 of all.
    x = np.full(N, 1 / (1 + np.sqrt(N)), dtype=np.float32)
    x[3] = -1
    return x


def enumerate_draws(c: qcomp.QSGD, x: np.ndarray) -> Moments:
    """Compress 65536 buckets of these values; all elements of bucket d have the draw d."""

    def source(_key, block):
        return (block.first_bucket + np.arange(block.rows, dtype=np.float32))[:, None]

    with replace_draws(source):
        payload = c.compress(np.tile(x, DRAWS), key=qcomp.Key())
        q = c.decompress(payload, like=np.tile(x, DRAWS)).reshape(DRAWS, N).astype(np.float64)
    plain = payload.data if c.coder is None else c.coder.restore(payload.data, payload.size)
    (step,) = {float(s) for s in qcomp.QSGD.payload_spec(plain_of(c), payload.size).split(plain)["step"]}
    v = x.astype(np.float64)
    position = np.abs(v) / step
    return Moments(
        step,
        position - np.floor(position),
        q.mean(axis=0),
        np.sum(np.mean((q - v) ** 2, axis=0)),
        np.sum(np.mean(q**2, axis=0)),
        np.sum(np.mean(q != 0, axis=0)),
    )


def plain_of(c: Any) -> qcomp.QSGD:
    return c if c.coder is None else c.coder.plain


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("levels", [1, 3, 7])
def test_mean_and_variance(levels, norm, family):
    """E Q = v; E |Q - v|^2 = step^2 sum p (1 - p); and the bounds, for this v and for all v."""
    x = values(family)
    found = enumerate_draws(qcomp.QSGD(levels=levels, bucket_size=N, norm=norm), x)
    v, step = x.astype(np.float64), found.step
    np.testing.assert_allclose(found.mean, v, rtol=2.0**-23, atol=2.0**-17 * step)
    slack = N * step**2 * (2.0**-17 + levels * 2.0**-24)
    assert abs(found.error - step**2 * np.sum(found.p * (1 - found.p))) <= slack
    assert abs(found.square - np.sum(v**2) - found.error) <= 2 * np.sum(np.abs(v)) * 2.0**-17 * step * 1.001
    one, two, largest = np.sum(np.abs(v)), np.sqrt(np.sum(v**2)), np.max(np.abs(v))
    scale = two if norm == "l2" else largest
    assert scale / levels <= step <= scale / levels * (1 + 2.0**-15)
    up = 1 + 2.0**-14  # for rounding up the square of the step
    assert found.error <= min(N / 4 * (scale / levels) ** 2, one * scale / levels) * up + slack
    if norm == "max":
        assert (
            found.error
            <= min((N - 1) / (4 * levels**2), (1 + np.sqrt(N)) / (2 * levels)) * two**2 * up + slack
        )
    else:
        assert found.error <= min(N / (4 * levels**2), one / (levels * two)) * two**2 * up + slack
        assert found.error <= min(N / levels**2, np.sqrt(N) / levels) * two**2


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("norm", NORMS)
def test_second_moment_with_one_level(norm, family):
    """E |Q|^2 = |v|_1 |v|_2 with the L2 norm, and |v|_1 max |v| with the largest magnitude."""
    x = values(family)
    found = enumerate_draws(qcomp.QSGD(levels=1, bucket_size=N, norm=norm), x)
    v = x.astype(np.float64)
    scale = np.sqrt(np.sum(v**2)) if norm == "l2" else np.max(np.abs(v))
    expected = np.sum(np.abs(v)) * scale
    assert abs(found.square - expected) <= 2.0**-15 * expected + N * found.step**2 * 2.0**-17
    other = np.max(np.abs(v)) if norm == "l2" else np.sqrt(np.sum(v**2))
    if family == "gaussian":  # and it differs from that of the other norm
        assert abs(found.square - np.sum(np.abs(v)) * other) > 0.1 * expected


def test_the_bound_with_one_level_and_the_largest_magnitude_is_attained():
    """Omega = (sqrt(n) - 1) / 2, at the worst vector."""
    x = values("worst")
    found = enumerate_draws(qcomp.QSGD(levels=1, bucket_size=N), x)
    omega = found.error / np.sum(x.astype(np.float64) ** 2)
    assert abs(omega - (np.sqrt(N) - 1) / 2) <= 2.0**-12


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("levels", [1, 3, 7])
def test_number_of_nonzeros(levels, family):
    """With the L2 norm E |Q|_0 = sum min(1, |v_i| / step) <= s |v|_1 / |v|_2 <= s sqrt(n)."""
    x = values(family)
    found = enumerate_draws(qcomp.QSGD(levels=levels, bucket_size=N, norm="l2"), x)
    v = np.abs(x.astype(np.float64))
    assert abs(found.nonzeros - np.sum(np.minimum(1, v / found.step))) <= N * 2.0**-17
    tight = levels * np.sum(v) / np.sqrt(np.sum(v**2))
    assert found.nonzeros <= tight + N * 2.0**-17
    assert tight <= levels * np.sqrt(N) * (1 + 1e-12) <= levels * (levels + np.sqrt(N))


def test_the_largest_magnitude_has_no_bound_on_nonzeros():
    """All n elements, where s (s + sqrt(n)) would allow five."""
    found = enumerate_draws(qcomp.QSGD(levels=1, bucket_size=N), values("constant"))
    assert found.nonzeros >= N * (1 - 2.0**-15) > 1 * (1 + np.sqrt(N))


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("draw", [0, 9_000, 40_000, 65_535])
def test_with_one_level_it_is_terngrad(library, norm, draw):
    """S sgn(g) Bernoulli(|g| / S), from the same draws in every library; with the L2 norm S is that norm."""
    c, g = qcomp.QSGD(levels=1, bucket_size=N, norm=norm), vector("gaussian", N, 22)
    with replace_draws(lambda _key, _block: draw):
        payload = c.compress(library.array(g), key=qcomp.Key())
    got = library.numpy(c.decompress(payload, like=library.array(g)))
    scale = library.numpy(c.payload_spec(N).split(payload.data)["step"])[0]
    exact = np.max(np.abs(g)) if norm == "max" else np.sqrt(np.sum(g.astype(np.float64) ** 2))
    assert exact * (1 - 2.0**-22) <= scale <= exact * (1 + 2.0**-15)
    taken = draw < np.round(np.abs(g) / scale * np.float32(65536))
    assert np.array_equal(got, np.where(taken, np.copysign(scale, g), 0))
    assert not np.any(np.signbit(got[got == 0]))


def test_a_coder_does_not_change_the_moments():
    x = values("gaussian")
    fixed = qcomp.QSGD(levels=1, bucket_size=N, norm="l2")
    coded = qcomp.QSGD(levels=1, bucket_size=N, norm="l2", coding="range")
    with qcomp.backends.use("auto"):  # for speed: a million elements
        found = enumerate_draws(coded, x)
    for a, b in zip(found, enumerate_draws(fixed, x), strict=True):
        assert np.array_equal(a, b)


def test_rounding_to_nearest_is_caught():
    """Its errors are no larger, but it is not unbiased: E |Q|^2 reveals that."""
    x = values("gaussian")
    c = qcomp.QSGD(levels=1, bucket_size=N, norm="l2")
    with replace_draws(lambda _key, _block: 32768):
        q = c.decompress(c.compress(x, key=qcomp.Key()), like=x)
    v = x.astype(np.float64)
    expected = np.sum(np.abs(v)) * np.sqrt(np.sum(v**2))
    assert abs(np.sum(q.astype(np.float64) ** 2) - expected) > 0.5 * expected
