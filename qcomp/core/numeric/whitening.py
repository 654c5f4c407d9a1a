"""Whiteners: before rounding, a matrix is multiplied by its whitener, which makes its singular values about equal."""

import math

from qcomp.core.numeric.arrays import (
    LIMIT,
    Array,
    all_below,
    array_namespace,
    dtype_name,
    flat,
    is_on_host,
    is_traced,
    matmul,
)

NEW = 0.4
"""A whitener is the inverse root of an average over steps; this is the weight of the newest matrix in it."""
LEAST = 0.02
"""Smaller singular values count as this fraction of the root mean square of all singular values. Otherwise, rounding
would spoil a whitener."""


def whitener(x: Array, before: Array) -> Array:
    """Return a square matrix whose product with a matrix like x has singular values near each other.

    Parameters
    ----------
    x : array of float32 or float64, shape (rows, columns)
        Finite.
    before : array of the dtype of x, shape (n, n) for the shorter side n of x
        The whitener that the last call returned, or the identity.

    Returns
    -------
    array of the dtype of x, shape (n, n)
        Symmetric: the inverse root of C / c, where C = 0.6 C0 + 0.4 y y^T / |y|^2, and c is the mean eigenvalue of C.
        Here y is x with the shorter side as its rows, and C0 is the C of ``before``, scaled to trace 1. Eigenvalues of
        C below .0004 c count as .0004 c.
    """
    xp = array_namespace(x)
    y = x if x.shape[0] <= x.shape[1] else xp.matrix_transpose(x)
    # Scaled so that squares neither overflow nor vanish.
    y = y / xp.maximum(xp.max(xp.abs(y)), xp.asarray(2.0**-100, dtype=y.dtype))
    root = xp.linalg.inv(before)
    average = (1 - NEW) * _of_trace_1(matmul(root, xp.matrix_transpose(root)))
    average = average + NEW * _of_trace_1(matmul(y, xp.matrix_transpose(y)))
    values, vectors = xp.linalg.eigh((average + xp.matrix_transpose(average)) / 2)
    mean = xp.mean(values)
    scales = xp.sqrt(xp.maximum(values / mean, xp.asarray(LEAST**2, dtype=values.dtype)))
    return matmul(vectors / scales, xp.matrix_transpose(vectors))


def _of_trace_1(gram: Array) -> Array:
    """Return a Gram matrix divided by its trace; zeros stay zeros."""
    xp = array_namespace(gram)
    trace = xp.sum(xp.linalg.diagonal(gram))
    return gram / xp.where(trace > 0, trace, xp.ones_like(trace))


def whitened(x: Array, by: Array, shape: tuple[int, int]) -> Array:
    """Multiply a flat matrix of this shape by a whitener on its shorter side; return the flat product.

    All elements are NaN if x holds a value that compressors refuse: an infinity, a NaN or a magnitude of 2^100 or more.
    """
    xp = array_namespace(x)
    fits = all_below(x, LIMIT)
    if is_traced(x) or not is_on_host(x):  # there is no value, or reading it would wait for the device
        y = _product(by, xp.where(fits, x, xp.zeros_like(x)), shape)
        return xp.where(fits, y, xp.full_like(y, math.nan))
    return _product(by, x, shape) if fits else xp.full_like(x, math.nan)


def unwhitened(y: Array, by: Array, shape: tuple[int, int]) -> Array:
    """Return the flat matrix from which `whitened` made y, up to rounding."""
    return _product(array_namespace(by).linalg.inv(by), y, shape)


def _product(by: Array, x: Array, shape: tuple[int, int]) -> Array:
    """Multiply a flat matrix of this shape by a square matrix on its shorter side; return the flat product."""
    xp = array_namespace(x)
    matrix = xp.reshape(x, shape)
    product = matmul(by, matrix) if shape[0] <= shape[1] else matmul(matrix, by)
    if product.dtype != x.dtype:
        raise TypeError(
            f"a matrix product of {dtype_name(x.dtype)} gave {dtype_name(product.dtype)}, too coarse to whiten "
            "gradients; expected the same dtype: call step outside torch.autocast"
        )
    return flat(product)


def half_of(symmetric: Array) -> Array:
    """Return the lower triangle of an n x n matrix as a rectangle of n / 2 rows and n + 1 columns.

    Row j has row n / 2 + j of the triangle, followed by row n / 2 - 1 - j in reverse. If n is odd, a row and a column
    of zeros are added first.
    """
    xp = array_namespace(symmetric)
    rows = symmetric.shape[0]
    triangle = xp.tril(_padded(symmetric, rows % 2))
    half = triangle.shape[0] // 2
    column = xp.zeros_like(triangle[:half, :1])
    bottom = xp.concat([triangle[half:, :], column], axis=1)
    return bottom + xp.concat([column, xp.flip(triangle[:half, :])], axis=1)


def whole_of(half: Array, rows: int) -> Array:
    """Return the symmetric matrix with ``rows`` rows from which `half_of` made a rectangle."""
    xp = array_namespace(half)
    top, bottom = xp.flip(xp.triu(half[:, 1:], k=half.shape[0])), xp.tril(half[:, :-1], k=half.shape[0])
    triangle = xp.concat([top, bottom])[:rows, :rows]
    return triangle + xp.matrix_transpose(xp.tril(triangle, k=-1))


def _padded(matrix: Array, more: int) -> Array:
    """Return a square matrix with more rows and columns of zeros."""
    if not more:
        return matrix
    xp = array_namespace(matrix)
    wide = xp.concat([matrix, xp.zeros_like(matrix[:, :more])], axis=1)
    return xp.concat([wide, xp.zeros_like(wide[:more, :])])
