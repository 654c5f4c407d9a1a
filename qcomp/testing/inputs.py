"""The test vectors for compressors: ordinary vectors, and vectors that tend to break implementations."""

from collections.abc import Callable
from typing import Any

import numpy as np
from hypothesis import strategies as st

from qcomp.core.numeric.arrays import TINY

Floats = np.ndarray[Any, np.dtype[np.float32]]

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
    "negative",
    "uniform",
    "small",
    "large",
    "heavy",
    "signs",
)

LONGEST_BUCKET = 1 << 20
"""The longest bucket for which vectors of several buckets are tested."""

_SPECIAL = (0.0, -0.0, 1.0, -1.0, 2.0**-126, -(2.0**-126), 2.0**-149, 2.0**-130, 1.5, 1e-30, -1e29, 0.1)


def tested_bucket(bucket_size: int) -> int:
    """Return the bucket size from which to derive sizes: the given one, or 5000 if it exceeds `LONGEST_BUCKET`."""
    return bucket_size if bucket_size <= LONGEST_BUCKET else 5000


def sizes(bucket_size: int) -> tuple[int, ...]:
    """Return sizes that cover padding, tails and empty vectors."""
    b = max(tested_bucket(bucket_size), 8)
    return tuple(sorted({0, 1, 7, 8, 9, b - 1, b, b + 1, 2 * b + 5}))


def vector(family: str, size: int, seed: int) -> Floats:
    """Return a vector of a family; the same arguments give the same vector."""
    rng = np.random.default_rng([seed, size, FAMILIES.index(family)])
    normal = rng.standard_normal(size)
    if family in _FACTORS:
        values = normal * _FACTORS[family]
    elif family in _CHANGES:
        values = _CHANGES[family](normal, rng)
    else:
        values = normal
    return values.astype(np.float32)


_FACTORS = {"subnormal": 2.0**-127, "huge": 2.0**90, "tiny": 2.0**-100, "small": 1e-6, "large": 1e6}


def _one_hot(normal: np.ndarray[Any, Any], rng: np.random.Generator) -> np.ndarray[Any, Any]:
    values = np.zeros(normal.size)
    values[rng.integers(normal.size) if normal.size else slice(0)] = -3.0
    return values


_CHANGES: dict[str, Callable[[np.ndarray[Any, Any], np.random.Generator], np.ndarray[Any, Any]]] = {
    "wide": lambda normal, rng: normal * np.exp2(rng.uniform(-40, 40, normal.size)),
    "ties": lambda normal, rng: rng.integers(-7, 8, normal.size) / 2.0,
    "one_hot": _one_hot,
    "constant": lambda normal, _: np.full(normal.size, -0.7),
    "sparse": lambda normal, rng: normal * (rng.random(normal.size) < 0.1),
    "positive": lambda normal, _: 1000 + np.abs(normal),
    "negative": lambda normal, _: -0.1 - np.abs(normal),
    "uniform": lambda normal, rng: rng.uniform(-1, 1, normal.size),
    "heavy": lambda normal, rng: rng.standard_t(1.5, normal.size),
    "signs": lambda normal, _: np.where(normal < 0, -0.7, 0.7),
}
"""The families that are functions of normal values and a generator."""


def adversarial(size: int) -> Floats:
    """Return vectors that are hard to compress, as an array of shape (count, size)."""
    rng = np.random.default_rng([size, 77])
    rows = [vector(family, size, 5).astype(np.float64) for family in FAMILIES if family != "subnormal"]
    index, root = np.arange(size), float(np.sqrt(size))
    grid = (0.5, 1 / 3, 0.25, 1 / 7, 1 / 9, 0.1, 1 / 15, 1 / 16, 1 / 31, 1 / 63, 0.01, 1 / 255, 1e-3, 1e-4)
    for p in (*grid, 1 / (1 + root), 1 / root, 1 / (2 * root), 0.75, 0.9, 1 - 2.0**-18, 1.0):
        rows.append(np.where(index == 0, 1.0, p))  # one large element, the others equal
        rows.append(np.where(index == size - 1, 1.0, p * (-1.0) ** index))
        rows.append(np.where(index % 2 == 0, 1.0, p))  # two levels
    for levels in (1, 2, 3, 5, 7, 15, 31, 63, 127, 255):
        rows.append(np.where(index == 0, 1.0, (rng.integers(0, levels, size) + 0.5) / levels))  # half steps
        rows.append(np.where(index == 0, 1.0, 0.5 / levels))
        rows.append(np.where(index == 0, 1.0, np.where(index == 1, -1.0, 0.5 / levels)))
    rows.extend(ratio ** index.astype(np.float64) for ratio in (0.5, 0.9, 0.99))
    for count in (1, 2, 3, size // 8, size // 4, size // 2):
        rows.append(np.where(index < count, 1.0, 0.0))
        rows.append(np.where(index < count, rng.standard_normal(size), 0.0))
    for magnitude in (4 / 3, 1.5, 1.25, 1.1, 1.9, 2.0**0.5):
        rows.append(np.where(index == size // 2, magnitude, 0.0))  # a single nonzero element
        rows.append(np.full(size, magnitude))
    rows.append(rng.standard_cauchy(size))
    rows.append(rng.laplace(size=size))
    found = np.asarray(rows, dtype=np.float64).clip(-(2.0**96), 2.0**96).astype(np.float32)
    return found[np.any(flushed(found) != 0, axis=1)]


def at_every_scale(size: int, most: int) -> Floats:
    """Return normal values times powers of two up to the largest accepted magnitude, at most ``most`` elements.

    The shape is (count, size).
    """
    row = vector("gaussian", size, 6).astype(np.float64)
    row /= np.abs(row).max()
    exponents = np.arange(-125, 101, max(1, -(-226 * size // most)))
    rows = row * np.exp2(exponents)[:, None]
    return flushed(rows.clip(-(2.0**99.9), 2.0**99.9).astype(np.float32))


def doubles(x: Floats, seed: int) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Return x in float64 with random values in the bits that float32 lacks."""
    rng = np.random.default_rng([seed, x.size, 78])
    return x.astype(np.float64) * (1 + rng.random(x.shape) * 2.0**-23)


def flushed(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return x with magnitudes below 2^-126 replaced by +0, as in the core."""
    return np.where(np.abs(x) < TINY, np.zeros_like(x), x)


def rounded(x: Floats, dtype: str) -> Floats:
    """Return x rounded to the nearest float16 or bfloat16, ties to even, in float32."""
    if dtype == "float16":
        return x.astype(np.float16).astype(np.float32)
    bits = np.ravel(x).view(np.uint32).astype(np.uint64)
    half = ((bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000).astype(np.uint32)
    return half.view(np.float32).reshape(x.shape)


def drawn(of_sizes: tuple[int, ...], count: int) -> list[Floats]:
    """Return vectors of these sizes, the same in every call: each of a family, with a few elements replaced."""
    found = []
    for number in range(count):
        rng = np.random.default_rng([number, 79])
        size = of_sizes[number % len(of_sizes)]
        x = vector(FAMILIES[int(rng.integers(len(FAMILIES)))], size, number)
        for index in rng.integers(0, size, int(rng.integers(5))) if size else ():
            arbitrary = float(rng.uniform(-1, 1) * 2.0 ** rng.integers(-148, 99))
            x[index] = arbitrary if rng.random() < 0.5 else _SPECIAL[int(rng.integers(len(_SPECIAL)))]
        found.append(x)
    return found


@st.composite
def vectors(draw: st.DrawFn, of_sizes: tuple[int, ...]) -> Floats:
    """Draw a vector of one of the sizes: from a family, with a few elements replaced by special or arbitrary values."""
    size = draw(st.sampled_from(of_sizes))
    x = vector(draw(st.sampled_from(FAMILIES)), size, draw(st.integers(0, 2**16)))
    if size:
        number = st.floats(-(2.0**98), 2.0**98, width=32) | st.sampled_from(_SPECIAL)
        for index, value in draw(st.lists(st.tuples(st.integers(0, size - 1), number), max_size=4)):
            x[index] = value
    return x
