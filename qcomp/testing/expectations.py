"""The laws of expectations, exact by enumeration of all 65536 draws of an element."""

from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from qcomp.core.buckets import Block
from qcomp.core.random import Key
from qcomp.testing.case import Case
from qcomp.testing.inputs import vector

__all__ = ["unbiased", "variance_bound"]

Vector = np.ndarray[Any, Any]

_DRAWS = 1 << 16
_KINDS = 8
"""Different values in a vector whose draws are enumerated."""


class Enumerated(NamedTuple):
    """The exact moments of C(v) for a few values v, over all draws."""

    values: Vector
    mean: Vector
    error: Vector
    """E (C(v) - v)^2 of each value."""
    spread: float
    """The largest distance between two results of one value: the width of a level."""


@lru_cache(maxsize=4)
def _enumerate(case: Case) -> tuple[Enumerated, ...]:
    """Compress, for each of some sets of eight values, a vector in which each value meets each draw once.

    The eight values repeat through the vector, so that every bucket has the same scales; copy c of a value
    takes draw c. What a coder does to a payload is no matter, by a law of its own.
    """
    coder = case.compressor.coder
    if coder is not None:
        case = Case(coder.plain, case.xp, jit=case.jit)

    def source(_: Key, block: Block) -> Vector:
        # By its bucket: a compressor may fill its buckets up with what is no element of the vector.
        buckets = block.first_bucket + np.arange(block.rows)[:, None]
        elements = buckets * case.compressor.traits.bucket_size + np.arange(block.length)
        return (elements // _KINDS % _DRAWS).astype(np.float32)

    copies = max(_DRAWS, case.compressor.traits.bucket_size // _KINDS)
    sets = (
        [1.0, -0.5, 0.0, 0.1, -0.93, 1 / 3, 2.0**-20, -1e-3],
        [3.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, -0.004],
        list(vector("gaussian", _KINDS, 10)),
    )
    found = []
    for numbers in sets:
        values = np.asarray(numbers, dtype=np.float32)
        decoded = case.compress(np.tile(values, copies), source=source).decoded
        results = decoded.reshape(copies, _KINDS).astype(np.float64)
        spread = float(np.max(results.max(axis=0) - results.min(axis=0)))
        error = ((results - values) ** 2).mean(axis=0)
        found.append(Enumerated(values, results.mean(axis=0), error, spread))
    return tuple(found)


def unbiased(case: Case) -> None:
    """E C(v) = v: over all draws, up to the 2^-17 of a level that 16 bits leave."""
    traits = case.compressor.traits
    if not traits.unbiased or not traits.random:
        return
    for moments in _enumerate(case):
        slack = 2.0**-17 * moments.spread + 2.0**-23 * np.abs(moments.values)
        off = np.abs(moments.mean - moments.values)
        worst = int(np.argmax(off - slack))
        mean, value = moments.mean[worst], moments.values[worst]
        assert off[worst] <= slack[worst], (
            f"E C(v) is {mean:.9g} for v = {value:.9g}, off by more than {slack[worst]:.3g}"
        )


def variance_bound(case: Case) -> None:
    """E ||C(v) - v||^2 is within omega ||v||^2, or (1 - delta) ||v||^2, exactly over all draws."""
    traits = case.compressor.traits
    if not traits.random:
        return
    for moments in _enumerate(case):
        error, norm = np.sum(moments.error), np.sum(moments.values.astype(np.float64) ** 2)
        for name, factor in (("omega", traits.omega), ("1 - delta", 1 - (traits.delta or 0))):
            if factor is not None and (name == "omega" or traits.delta is not None):
                assert error <= factor * norm * (1 + 2.0**-40), (
                    f"E ||C(v) - v||^2 is {error:.6g}, above ({name}) ||v||^2 = {factor * norm:.6g}"
                )
