"""The floor of a variance that divides compressed momenta."""

import math
from collections.abc import Sequence

from qcomp.core.numeric.arrays import Array, array_namespace
from qcomp.core.numeric.sums import total

__all__ = ["floored", "require_floor"]


def floored(variance: Sequence[Array], exact: Sequence[bool], floor: float) -> tuple[Array, ...]:
    """Return the variance with nonzero elements of compressed tensors raised to ``floor`` times the tensor's mean.

    An element of a compressed momentum is as large as its neighbours, however small it was. Divided by the root of a
    variance that is millions of times smaller than theirs, it would move its parameter by millions of learning rates.
    """
    return tuple(
        v if is_exact or not floor or not math.prod(v.shape) else _floored(v, floor)
        for v, is_exact in zip(variance, exact, strict=True)
    )


def _floored(v: Array, floor: float) -> Array:
    xp = array_namespace(v)
    share = floor / math.prod(v.shape)
    least = total(v) * share
    # The square of a gradient above 2^64 is infinite in float32: its element rests, as in Adam, and the others go on.
    of_finite = total(xp.where(xp.isfinite(v), v * share, xp.zeros_like(v)))
    least = xp.where(xp.isfinite(least), least, of_finite)
    return xp.where((v > 0) & (v < least), least, v)


def require_floor(floor: float) -> None:
    """Raise ValueError unless ``floor`` is a fraction from 0 to 1."""
    if not 0 <= floor <= 1:
        raise ValueError(f"variance_floor is {floor!r}; expected a fraction of the mean, from 0 to 1")
