"""Whiteners bring singular values together, and can be inverted."""

import numpy as np
import pytest

from qcomp.core.numeric.whitening import half_of, unwhitened, whitened, whitener, whole_of


def spread(rows, columns, smallest, seed=0):
    """Return a matrix whose singular values fall from 1 to the smallest, each by the same factor."""
    rng = np.random.default_rng(seed)
    count = min(rows, columns)
    u, _, v = np.linalg.svd(rng.standard_normal((rows, columns)), full_matrices=False)
    return (u * np.geomspace(1, smallest, count)) @ v


@pytest.mark.parametrize("shape", [(12, 40), (40, 12), (16, 16), (1, 9), (9, 1)])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_singular_values_come_together(shape, dtype):
    x = (1e3 * spread(*shape, 1e-2)).astype(dtype)
    w = np.eye(min(shape), dtype=dtype)
    ratios = []
    for _ in range(30):
        w = whitener(x, w)
        values = np.linalg.svd(whitened(x.ravel(), w, shape).reshape(shape), compute_uv=False)
        ratios.append(float(values.max() / values.min()))
    assert (w.shape, w.dtype) == ((min(shape), min(shape)), dtype)
    np.testing.assert_allclose(w, w.T, rtol=0, atol=1e-3)
    assert ratios[0] > 2 * ratios[10] or min(shape) == 1
    assert ratios[-1] < 1.01


@pytest.mark.parametrize("scale", [1e-38, 1.0, 1e29])
def test_the_size_of_a_whitener_is_bounded(scale):
    """Also if x has fewer dimensions than rows, or is huge or tiny."""
    w = np.eye(6, dtype=np.float32)
    x = np.zeros((6, 9), np.float32)
    x[0] = scale
    for _ in range(50):
        w = whitener(x, w)
    found = np.linalg.svd(w, compute_uv=False)
    assert found.max() == pytest.approx(50, rel=1e-3)
    assert found.min() == pytest.approx(6**-0.5, rel=1e-3)


def test_zeros_change_nothing():
    before = whitener(spread(3, 5, 0.1), np.eye(3))
    after = whitener(np.zeros((3, 5)), before)
    np.testing.assert_allclose(after / after[0, 0], before / before[0, 0], rtol=1e-9)


def test_the_whitener_follows_the_average():
    """Six tenths of the previous average plus four tenths of the new matrix, each with trace 1."""
    first, second = spread(4, 7, 0.1), spread(4, 7, 0.1, seed=1)
    of_trace_1 = lambda x: x @ x.T / np.trace(x @ x.T)  # noqa: E731
    before = 0.6 * np.eye(4) / 4 + 0.4 * of_trace_1(first)
    after = 0.6 * before + 0.4 * of_trace_1(second)
    w = whitener(50 * second, whitener(first, np.eye(4)))
    np.testing.assert_allclose(w @ after @ w.T, np.eye(4) / 4, rtol=0, atol=1e-9)


@pytest.mark.parametrize("rows", [1, 2, 3, 6, 9])
@pytest.mark.parametrize("library", ["numpy", "torch", "strict"])
def test_a_symmetric_matrix_is_restored_from_its_half(libraries, library, rows):
    lib = libraries[library]
    x = np.random.default_rng(rows).standard_normal((rows, rows)).astype(np.float32)
    x += x.T
    half = half_of(lib.array(x))
    assert tuple(half.shape) == (-(-rows // 2), 2 * -(-rows // 2) + 1)
    assert lib.numpy(whole_of(half, rows)).tobytes() == x.tobytes()


@pytest.mark.parametrize(
    "library", ["numpy", "torch", "strict", pytest.param("jax", marks=pytest.mark.exhaustive)]
)
@pytest.mark.parametrize("shape", [(6, 20), (20, 6), (8, 8)])
def test_whitening_can_be_inverted(libraries, library, shape):
    lib = libraries[library]
    x = spread(*shape, 1e-3).astype(np.float32)
    symmetric = whitener(x, np.eye(min(shape), dtype=np.float32))
    w = lib.array(symmetric @ np.diag(np.linspace(1, 2, min(shape), dtype=np.float32)))
    y = whitened(lib.array(x.ravel()), w, shape)
    product = lib.numpy(w) @ x if shape[0] <= shape[1] else x @ lib.numpy(w)
    np.testing.assert_allclose(lib.numpy(y), product.ravel(), rtol=0, atol=1e-5)
    np.testing.assert_allclose(lib.numpy(unwhitened(y, w, shape)), x.ravel(), rtol=0, atol=1e-5)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -(2.0**100)])
def test_a_value_too_large_for_products_makes_everything_nan(bad):
    x = np.ones(12, np.float32)
    x[5] = bad
    assert np.isnan(whitened(x, np.eye(3, dtype=np.float32), (3, 4))).all()


@pytest.mark.exhaustive
def test_a_compiled_whitener_is_the_same():
    jax = pytest.importorskip("jax")
    compiled = jax.jit(lambda x, w: whitened(x, w, (3, 4)))
    x, w = np.arange(12, dtype=np.float32), np.arange(9, dtype=np.float32).reshape(3, 3)
    np.testing.assert_allclose(compiled(x, w), whitened(x, w, (3, 4)), rtol=1e-6)
    x[5] = np.inf
    assert np.isnan(compiled(x, w)).all()


def test_products_with_reduced_precision_are_refused():
    torch = pytest.importorskip("torch")
    x, w = torch.ones(12), torch.eye(3)
    with (
        torch.autocast("cpu", dtype=torch.bfloat16),
        pytest.raises(TypeError, match=r"outside torch\.autocast"),
    ):
        whitened(x, w, (3, 4))
