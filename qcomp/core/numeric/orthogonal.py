"""`orthogonalize`: a fast approximation of the nearest matrix with orthonormal rows or columns, by Newton-Schulz."""

from typing import Any

from qcomp.core.numeric.arrays import (
    Array,
    array_namespace,
    device,
    is_on_host,
    is_traced,
    kind_of_array,
    matmul,
)
from qcomp.core.numeric.sums import power_of_two_below

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""(a, b, c) of p(s) = a s + b s^3 + c s^5; an iteration maps each singular value s to p(s)."""
ITERATIONS = 5
MOST_ON_GRAM = 3
"""The most iterations on one Gram matrix: in each, rounding errors of its smallest eigenvalues grow 12-fold."""
EPS = 1e-7
"""A matrix with a smaller norm is not scaled up to norm 1, so that rounding errors do not become updates."""


def require_library(dtype: str, x: Array) -> None:
    """Raise unless the library of an array has linear algebra, and the dtype of the matrix products."""
    xp = array_namespace(x)
    if not hasattr(xp, "linalg"):
        raise TypeError(
            f"params has a {kind_of_array(x)}, whose library lacks the extension linalg of the array API standard, "
            "which Muon needs; expected arrays of another library, such as NumPy"
        )
    if not hasattr(xp, dtype):
        raise ValueError(
            f"newton_schulz_dtype is {dtype!r}, which the arrays' library lacks; expected 'float32', or arrays of "
            "torch or JAX"
        )


def multiplications(rows: int, columns: int, iterations: int = ITERATIONS) -> int:
    """Return the number of multiplications of `orthogonalize` for a matrix."""
    less, more = sorted((rows, columns))
    if not _on_gram(less, more):
        return iterations * less * less * (2 * more + less)
    parts = _parts(iterations)
    return less * less * sum(2 * more + (4 * part - 3) * less for part in parts)


def orthogonalize(
    x: Array, *, iterations: int = ITERATIONS, dtype: str = "float32", factor: float = 1.0
) -> Array:
    """Return matrices with the singular vectors of x, and singular values near ``factor``.

    Parameters
    ----------
    x : array of float32 or float64, shape (..., rows, columns)
        Matrices with at least one element each, of magnitudes below 2^127.
    iterations : int
        Newton-Schulz iterations, at least 1.
    dtype : {"float32", "bfloat16"}
        The dtype of the matrix products; "float32" stands for the dtype of ``x``. In "bfloat16", products are several
        times as fast on GPUs and on CPUs that support it, and singular values are off by about a tenth.
    factor : float
        Multiplies the result.

    Returns
    -------
    array of the dtype of the matrix products, shape (..., rows, columns)
        factor * U p(...p(S / max(|x|_F, eps))) V^T, where x = U S V^T, and p, as in `COEFFICIENTS`, is applied
        ``iterations`` times. After five iterations, singular values from .0018 |x|_F on lie between .68 and 1.21 times
        the factor. Smaller singular values end below this range, and zero stays zero.

    Notes
    -----
    The roundings of matrix products differ between libraries, so a result that all ranks must share is computed on one
    rank. If the longer side is more than 1.5 times the shorter, iterations run on the Gram matrix of the shorter side,
    which takes fewer multiplications. After at most `MOST_ON_GRAM` iterations, the Gram matrix is computed anew.
    Source: Jordan et al., Muon, 2024.

    Examples
    --------
    >>> import numpy as np
    >>> orthogonalize(np.asarray([[3.0, 0.0], [0.0, 0.5]])).round(2)
    array([[0.71, 0.  ],
           [0.  , 1.04]])
    """
    xp = array_namespace(x)
    tall = x.shape[-2] > x.shape[-1]
    y = xp.matrix_transpose(x) if tall else x
    squares = power = None
    if dtype != "float32":
        y = xp.astype(y, getattr(xp, dtype))
        if is_on_host(x) and not is_traced(x):  # few matrices need scaling, and values are at hand
            gram, squares = _squared(y, x.dtype)
            if not xp.all(xp.isfinite(squares)):
                squares = None  # squares overflow; only squares of elements far below EPS vanish
    if squares is None:
        # Scaled by a power of two first, since squares of float32 overflow from 2^64 on.
        axes = (-2, -1)
        largest = xp.maximum(xp.max(x, axis=axes, keepdims=True), -xp.min(x, axis=axes, keepdims=True))
        power = power_of_two_below(largest)
        y = y / xp.astype(power, y.dtype, copy=False)
        gram, squares = _squared(y, x.dtype)
    least = xp.full_like(squares, EPS) if power is None else EPS / power
    norm = xp.astype(xp.maximum(xp.sqrt(squares), least), y.dtype, copy=False)
    iterate = _iterate_on_gram if _on_gram(*y.shape[-2:]) else _iterate
    y = iterate(y, norm, gram / norm / norm, iterations, factor)
    return xp.matrix_transpose(y) if tall else y


def _squared(y: Array, dtype: Any) -> tuple[Array, Array]:
    """Return Gram matrices, and the squares of the norms in a dtype, of shape (..., 1, 1)."""
    xp = array_namespace(y)
    gram = matmul(y, xp.matrix_transpose(y))
    diagonal = xp.astype(xp.linalg.diagonal(gram), dtype, copy=False)
    return gram, xp.sum(diagonal, axis=-1)[..., None, None]


def _iterate(y: Array, norm: Array, gram: Array, iterations: int, factor: float) -> Array:
    """Iterate on y / norm itself, whose Gram matrix is ``gram``, and return the result times a factor."""
    xp = array_namespace(y)
    a, b, c = COEFFICIENTS
    y = y / norm
    for number in range(iterations):
        if number:
            gram = matmul(y, xp.matrix_transpose(y))
        y = a * y + matmul(b * gram + c * matmul(gram, gram), y)
    return y * factor


def _iterate_on_gram(y: Array, norm: Array, gram: Array, iterations: int, factor: float) -> Array:
    """Return what `_iterate` returns, up to rounding: an iteration turns y into P y, and G = y y^T into P G P."""
    xp = array_namespace(y)
    identity = xp.eye(y.shape[-2], dtype=y.dtype, device=device(y))
    parts = _parts(iterations)
    for number, part in enumerate(parts):
        if number:
            gram = matmul(y, xp.matrix_transpose(y))
        product = _product(identity, gram, part)
        if number == 0:
            product = product / norm
        if number == len(parts) - 1:
            product = product * factor
        y = matmul(product, y)
    return y


def _product(identity: Array, gram: Array, iterations: int) -> Array:
    """Return the product of the matrices P of some iterations."""
    a, b, c = COEFFICIENTS
    first, second = a * identity, b * identity
    product = identity
    for number in range(iterations):
        step = first + matmul(gram, second + c * gram)
        product = matmul(step, product) if number else step
        if number < iterations - 1:
            gram = matmul(step, matmul(gram, step))
    return product


def _on_gram(less: int, more: int) -> bool:
    """Return whether iterations on the Gram matrix take fewer multiplications."""
    return 2 * more > 3 * less


def _parts(iterations: int) -> list[int]:
    """Return how many iterations run on each Gram matrix."""
    rest = iterations % MOST_ON_GRAM
    return [rest] * (rest > 0) + [MOST_ON_GRAM] * (iterations // MOST_ON_GRAM)
