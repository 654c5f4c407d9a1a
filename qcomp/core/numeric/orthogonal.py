"""The nearest matrix with orthonormal rows or columns, roughly and fast: Newton-Schulz iterations."""

from qcomp.core.numeric.arrays import Array, array_namespace

__all__ = ["COEFFICIENTS", "EPS", "ITERATIONS", "orthogonalize", "require_dtype"]

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""(a, b, c) of p(s) = a s + b s^3 + c s^5, the map of each singular value in an iteration."""
ITERATIONS = 5
EPS = 1e-7
"""The norm below which a matrix is not scaled up to norm 1, so that rounding errors do not become updates."""


def require_dtype(dtype: str, x: Array) -> None:
    """Raise unless the library of an array has the dtype of the matrix products."""
    xp = array_namespace(x)
    if not hasattr(xp, dtype):
        raise ValueError(
            f"newton_schulz_dtype is {dtype!r}, which the arrays' library lacks; expected 'float32', or arrays of "
            "torch or JAX"
        )


def orthogonalize(x: Array, *, dtype: str = "float32") -> Array:
    """Return matrices with the singular vectors of x, and singular values near 1.

    Parameters
    ----------
    x : array of float32 or float64, shape (..., rows, columns)
        Any finite matrices with at least one element each.
    dtype : {"float32", "bfloat16"}
        Of the matrix products; "float32" is the dtype of ``x``. In "bfloat16" they are several times
        as fast on GPUs and on CPUs that have it, and singular values are off by about a tenth.

    Returns
    -------
    array, shape (..., rows, columns)
        U p(p(p(p(p(S / max(|x|_F, eps)))))) V^T for x = U S V^T, with p as in `COEFFICIENTS`. Singular values from
        .0018 |x|_F on come to lie between .68 and 1.21, smaller ones below; zero stays zero.

    Notes
    -----
    Made of matrix products, whose roundings differ between libraries: what all ranks must hold alike is computed on one
    rank. The smaller side of the matrix determines the costs. Source: Jordan et al., Muon, 2024.

    Examples
    --------
    >>> import numpy as np
    >>> orthogonalize(np.asarray([[3.0, 0.0], [0.0, 0.5]])).round(2)
    array([[0.71, 0.  ],
           [0.  , 1.04]])
    """
    a, b, c = COEFFICIENTS
    xp = array_namespace(x)
    tall = x.shape[-2] > x.shape[-1]
    y = xp.matrix_transpose(x) if tall else x
    # Scaled by the largest element first, since squares of float32 overflow from 2^64 on.
    largest = xp.max(xp.abs(y), axis=(-2, -1), keepdims=True)
    y = y / xp.where(largest > 0, largest, xp.ones_like(largest))
    norm = xp.sqrt(xp.sum(y * y, axis=(-2, -1), keepdims=True))
    least = EPS / xp.where(largest > 0, largest, xp.ones_like(largest))
    y = y / xp.where(norm > least, norm, least)
    if dtype != "float32":
        y = xp.astype(y, getattr(xp, dtype))
    for _ in range(ITERATIONS):
        gram = xp.matmul(y, xp.matrix_transpose(y))
        y = a * y + xp.matmul(b * gram + c * xp.matmul(gram, gram), y)
    y = xp.astype(y, x.dtype, copy=False)
    return xp.matrix_transpose(y) if tall else y
