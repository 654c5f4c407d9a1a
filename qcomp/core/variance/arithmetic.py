"""The arithmetic of a variance: its bias correction, its floor, and how new gradients change a frozen variance.

These are functions of arrays and numbers, including arrays that JAX traces.
"""

import math
from collections import defaultdict
from collections.abc import Sequence
from functools import lru_cache, partial
from typing import Any

from qcomp.core import primitives
from qcomp.core.kernels import StepNumbers
from qcomp.core.numeric.arrays import Array, array_namespace, divide, is_traced
from qcomp.core.numeric.cache_blocks import in_blocks
from qcomp.core.numeric.numbers import Number
from qcomp.core.numeric.sums import total, totals

LARGEST_WEIGHT = 0.25
"""The largest weight of one measurement: with it, the average is as steady as the mean of seven squares. A single
square is often near zero; an element that is divided by its root would make long steps."""


def bias_corrections(
    betas: Sequence[tuple[float, float]], which: int, counts: Sequence[Number]
) -> list[Number]:
    """Return the bias corrections 1 - b^count of some tensors; a count of 0 counts as 1.

    ``which`` is 0 for the momentum and 1 for the variance; ``counts`` says how often each was updated.
    """
    pairs = zip(betas, counts, strict=True)
    if not counts or not is_traced(counts[0]):
        return [1 - pair[which] ** max(1, count) for pair, count in pairs]
    found = {(pair[which], id(count)): (pair[which], count) for pair, count in pairs}
    # The correction of a momentum is exact to the last bit of float64: 0/1 Adam divides weights by it and adds them up.
    bits = 25 if which else 54
    entries = {key: _entry(_corrections(beta, bits), count) for key, (beta, count) in found.items()}
    return [entries[pair[which], id(count)] for pair, count in zip(betas, counts, strict=True)]


@lru_cache(64)
def _corrections(beta: float, bits: int) -> list[float]:
    """Return the bias corrections by count, up to the count from which they are 1 with this number of bits."""
    steps = 1 + math.ceil(bits * math.log(2) / -math.log(beta)) if beta else 1
    return bias_corrections([(beta, beta)] * (1 + steps), 0, range(1 + steps))


def _entry(table: Sequence[float], index: float) -> float:
    """Return an entry of a table, chosen by a traced index; beyond the end, the last one."""
    traced: Any = index
    xp: Any = array_namespace(traced)
    found: float = xp.asarray(table)[xp.minimum(traced, len(table) - 1)]
    return found


def divided(variance: Sequence[Array], corrections: Sequence[float]) -> tuple[Array, ...]:
    """Return the variance of each tensor divided by its bias correction."""
    pairs = zip(variance, corrections, strict=True)
    return tuple([in_blocks(partial(_over, by), [v], [primitives.empty_like(v)])[0] for v, by in pairs])


def _over(correction: float, v: Array) -> tuple[Array]:
    return (divide(v, correction),)


def corrected_sum(variance: Sequence[Array], corrections: Sequence[float]) -> float:
    """Return the sum of all elements of the variance after bias correction, the same on all ranks bit for bit."""
    sums: dict[float, float] = defaultdict(float)
    for of_tensor, correction in zip(totals(variance), corrections, strict=True):  # in a fixed order
        sums[correction] += of_tensor
    return math.fsum(x / correction for correction, x in sums.items())


def frozen(
    variance: Sequence[Array], corrections: Sequence[float], exact: Sequence[bool], floor: float
) -> tuple[Array, ...]:
    """Return the variance as it is after a freeze: bias-corrected for good, and `floored`."""
    return floored(divided(variance, corrections), exact, floor)


def floored(variance: Sequence[Array], exact: Sequence[bool], floor: float) -> tuple[Array, ...]:
    """Return the variance with nonzero elements of compressed tensors raised to ``floor`` times the tensor's mean.

    An element of a compressed momentum becomes as large as its neighbours, however small it was. Divided by the root of
    a variance that is a million times smaller than its neighbours', it would move its parameter by a thousand learning
    rates.
    """
    return tuple(
        v if is_exact or not floor or not math.prod(v.shape) else _floored(v, floor)
        for v, is_exact in zip(variance, exact, strict=True)
    )


def _floored(v: Array, floor: float) -> Array:
    xp = array_namespace(v)
    share = floor / math.prod(v.shape)
    least = total(v) * share
    # The square of a gradient above 2^64 is infinite in float32: its element stays, as in Adam, and others still move.
    of_finite = total(xp.where(xp.isfinite(v), v * share, xp.zeros_like(v)))
    least = xp.where(xp.isfinite(least), least, of_finite)
    return xp.where((v > 0) & (v < least), least, v)


def kept_after(beta2: float, steps: int) -> float:
    """Return the weight of the old variance when it is measured again: b2^steps, but at least min(b2, 3/4).

    ``steps`` is the number of steps since the last measurement.

    Examples
    --------
    >>> kept_after(0.99, 1), kept_after(0.99, 1000), kept_after(0.5, 1)
    (0.99, 0.75, 0.5)
    """
    return max(beta2**steps, min(beta2, 1 - LARGEST_WEIGHT))


def measured(
    variance: Sequence[Array],
    gradients: Sequence[Array],
    exact: Sequence[bool],
    *,
    kept: Sequence[float],
    floor: float,
) -> tuple[Array, ...]:
    """Return the variance updated with the squares of exact mean gradients, and `floored`.

    ``kept`` holds the weight of the old variance, for each tensor.
    """
    of_each = zip(variance, gradients, kept, strict=True)
    return floored([primitives.momentum(v, g * g, weight, 1.0) for v, g, weight in of_each], exact, floor)


def step_on_codes(
    params: Sequence[Array],
    gradients: Sequence[Array],
    momenta: Sequence[Array],
    variance: Sequence[Array],
    numbers: Sequence[StepNumbers],
    *,
    betas: Sequence[tuple[float, float]],
    donate: bool,
) -> tuple[list[Array], tuple[Array, ...]]:
    """Return the parameters and momenta after a step with exact mean gradients, if the momentum has compressed values.

    The step divides by the variance in the same way as a compressed step. Compressed values in the momentum are as
    large for elements with a tiny variance as for all others, until exact gradients have replaced them.
    """
    of_each = zip(momenta, gradients, betas, strict=True)
    blended = [primitives.momentum(m, g, beta1, 1.0) for m, g, (beta1, _) in of_each]
    moved = primitives.frozen_steps(params, blended, variance, numbers, donate=donate)
    return [p for p, _ in moved], tuple(m for _, m in moved)
