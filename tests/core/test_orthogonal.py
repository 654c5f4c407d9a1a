"""Newton-Schulz: singular vectors are kept, and singular values are mapped by the polynomial."""

import warnings

import numpy as np
import pytest

from qcomp.core.numeric import orthogonal
from qcomp.core.numeric.orthogonal import (
    COEFFICIENTS,
    EPS,
    ITERATIONS,
    multiplications,
    orthogonalize,
    require_library,
)

SHAPES = [(1, 1), (1, 7), (7, 1), (16, 16), (64, 24), (24, 64), (48, 49)]
SMALLEST = 0.0018
"""Singular values from this fraction of the norm on come near 1."""


def polynomial(s, iterations=ITERATIONS):
    a, b, c = COEFFICIENTS
    for _ in range(iterations):
        s = a * s + b * s**3 + c * s**5
    return s


def matrix(shape, kind):
    rng = np.random.default_rng([*shape, len(kind)])
    x = rng.standard_normal(shape)
    if kind == "random":
        return x
    u, s, vt = np.linalg.svd(x, full_matrices=False)
    if kind == "ill-conditioned":
        return (u * np.logspace(0, -6, len(s))) @ vt
    return (u * (np.arange(len(s)) < (len(s) + 1) // 2)) @ vt  # rank-deficient


@pytest.mark.parametrize("shape", [(24, 64), (64, 24)])
def test_every_library_gives_the_same_result(library, shape):
    x = matrix(shape, "random").astype(np.float32)
    found = library.numpy(orthogonalize(library.array(x)))
    assert (found.shape, found.dtype) == (shape, np.float32)
    np.testing.assert_allclose(found, orthogonalize(x.astype(np.float64)), rtol=0, atol=1e-5)


@pytest.mark.parametrize("shape", [(24, 64), (64, 24)])
def test_in_bfloat16_the_result_is_almost_the_same(library, shape):
    x = library.array(matrix(shape, "random").astype(np.float32))
    if library.name not in {"torch", "jax"}:
        with pytest.raises(ValueError, match="newton_schulz_dtype is 'bfloat16'"):
            require_library("bfloat16", x)
        return
    require_library("bfloat16", x)
    xp = library.xp
    rough = orthogonalize(x, dtype="bfloat16")
    assert rough.dtype == xp.bfloat16
    exact, found = (library.numpy(xp.astype(y, xp.float32)) for y in (orthogonalize(x), rough))
    # Roundings of 2^-9, times coefficients whose magnitudes add up to 10, in each of three products of two iterations.
    assert 0 < np.linalg.norm(exact - found, 2) < 6 * 10 * 2**-9 * 2


@pytest.mark.parametrize("kind", ["random", "ill-conditioned", "rank-deficient"])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_polynomial_maps_the_singular_values(shape, kind):
    x = matrix(shape, kind).astype(np.float32)
    u, s, vt = np.linalg.svd(x.astype(np.float64), full_matrices=False)
    s /= np.linalg.norm(s)
    expected = (u * polynomial(s)) @ vt
    found = orthogonalize(x)
    # A rounding of 2^-24 grows by the polynomial's slope at 0 in each iteration, times a few for the products.
    np.testing.assert_allclose(found, expected, rtol=0, atol=2**-24 * COEFFICIENTS[0] ** ITERATIONS)
    values = np.linalg.svd(found, compute_uv=False)
    assert values.max() <= 1.21
    assert (np.sort(values)[::-1][: (s >= SMALLEST).sum()] >= 0.68).all()


@pytest.mark.parametrize("iterations", [1, 2, 3, 4, 6, 7])
@pytest.mark.parametrize("shape", [(16, 16), (64, 24), (24, 37)])
def test_any_number_of_iterations(shape, iterations):
    """For shapes that are far from square they use the Gram matrix; the result is that on the matrix itself."""
    x = matrix(shape, "ill-conditioned")
    u, s, vt = np.linalg.svd(x, full_matrices=False)
    expected = (u * polynomial(s / np.linalg.norm(s), iterations)) @ vt
    found = orthogonalize(x, iterations=iterations)
    # As above, with a rounding of 2^-53.
    np.testing.assert_allclose(found, expected, rtol=0, atol=2**-53 * COEFFICIENTS[0] ** max(5, iterations))


@pytest.mark.parametrize("iterations", [1, 3, 5])
@pytest.mark.parametrize("shape", [(16, 16), (64, 24), (24, 64)])
def test_a_factor_multiplies_the_result(shape, iterations):
    x = matrix(shape, "random").astype(np.float32)
    whole, half = (orthogonalize(x, iterations=iterations, factor=factor) for factor in (1.0, 0.5))
    assert (whole / 2).tobytes() == half.tobytes()


@pytest.mark.parametrize("kind", ["random", "ill-conditioned", "rank-deficient"])
@pytest.mark.parametrize("shape", [(24, 200), (68, 408), (300, 24)])
@pytest.mark.parametrize("iterations", [3, 5])
def test_errors_of_a_gram_matrix_in_bfloat16_do_not_grow(shape, kind, iterations):
    """Rounding makes some of its smallest eigenvalues negative, and each iteration multiplies them by up to 12."""
    torch = pytest.importorskip("torch")
    x = matrix(shape, kind).astype(np.float32)
    found = orthogonalize(torch.from_numpy(x), iterations=iterations, dtype="bfloat16").float().numpy()
    assert np.linalg.svd(found, compute_uv=False).max() < 1.3


@pytest.mark.parametrize("shape", [(16, 16), (24, 8), (8, 12), (8, 13), (8, 100)])
def test_the_counted_multiplications_are_those_of_the_products(monkeypatch, shape):
    def matmul(a, b):
        nonlocal counted
        counted += a.shape[-2] * a.shape[-1] * b.shape[-1]
        return np.matmul(a, b)

    monkeypatch.setattr(orthogonal, "matmul", matmul)
    on_matrix = []
    for iterations in range(1, 8):
        counted = 0
        orthogonalize(matrix(shape, "random"), iterations=iterations)
        assert counted == multiplications(*shape, iterations)
        less, more = sorted(shape)
        on_matrix.append(iterations * less**2 * (2 * more + less))
        assert counted <= on_matrix[-1]
    assert (counted < on_matrix[-1]) == (max(shape) > 1.5 * min(shape))


def test_zero_stays_zero(library):
    assert not library.numpy(orthogonalize(library.array(np.zeros((24, 64), np.float32)))).any()


@pytest.mark.parametrize("signs", ["both", "positive", "negative"])
def test_any_scale_from_eps_on_gives_the_same(signs):
    """Powers of two change no rounding; the squares of these values would overflow or vanish."""
    x = matrix((24, 64), "random").astype(np.float32)
    x = {"both": x, "positive": np.abs(x), "negative": -np.abs(x)}[signs]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for power in (-18, 30, 70, 99):
            scaled = orthogonalize(x * np.float32(2.0**power))
            assert scaled.tobytes() == orthogonalize(x).tobytes()


@pytest.mark.parametrize("shape", [(24, 64), (24, 24)])
def test_any_scale_gives_the_same_in_bfloat16(shape):
    """Also for a matrix beside others of any scale; few of them are scaled."""
    torch = pytest.importorskip("torch")
    x = torch.asarray(matrix(shape, "random").astype(np.float32))
    expected = orthogonalize(x, dtype="bfloat16")
    for power in (-18, -12, 25, 40, 70, 99):
        scaled = x * 2.0**power
        assert torch.equal(orthogonalize(scaled, dtype="bfloat16"), expected), power
        several = torch.stack([x, scaled, torch.zeros_like(x)])
        found = orthogonalize(several, dtype="bfloat16")
        assert torch.equal(found, torch.stack([expected, expected, torch.zeros_like(expected)])), power
    small = orthogonalize(x * 2.0**-60, dtype="bfloat16")  # far below EPS, where the map is linear
    assert small.any()
    assert torch.equal(orthogonalize(x * 2.0**-70, dtype="bfloat16"), small * 2.0**-10)  # squares vanish


@pytest.mark.exhaustive
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_it_can_be_compiled_by_jax(dtype):
    jax = pytest.importorskip("jax")
    x = jax.numpy.asarray(np.stack([matrix((24, 64), "random") * 2.0**power for power in (0, 50)]), "float32")
    compiled = jax.jit(lambda x: orthogonalize(x, dtype=dtype))(x)
    found, expected = (np.asarray(y, np.float64) for y in (compiled, orthogonalize(x, dtype=dtype)))
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5 if dtype == "float32" else 0.02)


def test_noise_below_eps_is_not_scaled_up():
    x = matrix((24, 64), "random")
    x *= EPS / np.linalg.norm(x)
    for part in (1e-3, 1e-20):
        found = np.linalg.svd(orthogonalize(part * x), compute_uv=False)
        s = np.linalg.svd(x, compute_uv=False)
        np.testing.assert_allclose(found, polynomial(part * s / EPS), rtol=1e-9)


def test_several_matrices_at_once(library):
    x = np.stack([matrix((24, 8), kind) for kind in ("random", "rank-deficient")]).astype(np.float32)
    x[0] *= 1e6
    together = library.numpy(orthogonalize(library.array(x)))
    for one, found in zip(x, together, strict=True):
        alone = library.numpy(orthogonalize(library.array(one)))
        np.testing.assert_allclose(found, alone, rtol=0, atol=1e-5)
