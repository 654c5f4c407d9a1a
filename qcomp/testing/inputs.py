"""The vectors on which a compressor is checked: ordinary ones, and those that break implementations."""

from typing import Any

import numpy as np
from hypothesis import strategies as st

from qcomp.core.arrays import TINY

__all__ = ["FAMILIES", "flushed", "rounded", "sizes", "vector", "vectors"]

Vector = np.ndarray[Any, np.dtype[np.float32]]

FAMILIES = (
    "gaussian",
    "wide",
    "ties",
    "one_hot",
    "constant",
    "sparse",
    "subnormal",
    "huge",
    "tiny",
    "positive",
)

_SPECIAL = (0.0, -0.0, 1.0, -1.0, 2.0**-126, -(2.0**-126), 2.0**-149, 2.0**-130, 1.5, 1e-30, -1e29, 0.1)


def sizes(bucket_size: int) -> tuple[int, ...]:
    """Return the sizes at which padding, tails and emptiness show."""
    b = max(bucket_size, 8)
    return tuple(sorted({0, 1, 7, 8, 9, b - 1, b, b + 1, 2 * b + 5}))


def vector(family: str, size: int, seed: int) -> Vector:
    """Return a vector of a family; the same arguments give the same vector."""
    rng = np.random.default_rng([seed, size, FAMILIES.index(family)])
    normal = rng.standard_normal(size)
    if family == "wide":
        normal = normal * np.exp2(rng.uniform(-40, 40, size))
    elif family == "ties":
        normal = rng.integers(-7, 8, size) / 2.0
    elif family == "one_hot":
        normal = np.zeros(size)
        normal[rng.integers(size) if size else slice(0)] = -3.0
    elif family == "constant":
        normal = np.full(size, -0.7)
    elif family == "sparse":
        normal = normal * (rng.random(size) < 0.1)
    elif family == "subnormal":
        normal = normal * 2.0**-127
    elif family == "huge":
        normal = normal * 2.0**90
    elif family == "tiny":
        normal = normal * 2.0**-100
    elif family == "positive":
        normal = 1000 + np.abs(normal)
    return normal.astype(np.float32)


def flushed(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return x with +0 for what is below 2^-126, as the core does it."""
    return np.where(np.abs(x) < TINY, np.zeros_like(x), x)


def rounded(x: Vector, dtype: str) -> Vector:
    """Return x rounded to the nearest float16 or bfloat16, ties to even, in float32."""
    if dtype == "float16":
        return x.astype(np.float16).astype(np.float32)
    bits = np.ravel(x).view(np.uint32).astype(np.uint64)
    half = ((bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000).astype(np.uint32)
    return half.view(np.float32).reshape(x.shape)


@st.composite
def vectors(draw: st.DrawFn, of_sizes: tuple[int, ...]) -> Vector:
    """Draw a vector of one of the sizes: a family, and a few elements replaced by special or arbitrary values."""
    size = draw(st.sampled_from(of_sizes))
    x = vector(draw(st.sampled_from(FAMILIES)), size, draw(st.integers(0, 2**16)))
    if size:
        number = st.floats(-(2.0**98), 2.0**98, width=32) | st.sampled_from(_SPECIAL)
        for index, value in draw(st.lists(st.tuples(st.integers(0, size - 1), number), max_size=4)):
            x[index] = value
    return x
