"""The law about vectors of more than 2^16 and 2^20 elements, for buckets that are too long for other laws."""

from collections.abc import Iterator

import numpy as np

from qcomp.core.numeric.random import Key
from qcomp.testing.compressor_case import Case
from qcomp.testing.inputs import vector
from qcomp.testing.libraries import Vector

_SIZES = (70_001, (1 << 20) + 4099)
"""Sizes above 2^16 and above 2^20."""
_CALLS = {70_001: 24, (1 << 20) + 4099: 6}
_WIDEST = 1 << 13
"""The longest bucket for which other laws cut large vectors into pieces and check every value."""


def large_vectors(case: Case) -> None:
    """The promises hold for large vectors too, and no place of a vector is treated worse than another."""
    plain = case.plain
    traits = plain.compressor.traits
    if traits.bucket_size <= _WIDEST:
        return
    for size in _SIZES:
        calls = _CALLS[size] if traits.random else 1
        near, far = _spikes(size)
        if not traits.random:
            lost_near, lost = (_losses(plain, x, 1)[0] for x in (near, far))
            assert lost <= 4 * lost_near + 1e-3, (
                f"of {size} elements, few large ones lose {lost:.3g} of ||v||^2 if they are far from each other, and "
                f"{lost_near:.3g} if they are the first ones"
            )
            _require_bounds(plain, far, f"{size} elements, few of them large", calls)
        # A few draws may keep none of the few large elements.
        _require_bounds(plain, vector("gaussian", size, 22), f"{size} gaussian values", calls)


def _spikes(size: int) -> Iterator[Vector]:
    """Yield two sparse vectors with the same nonzero values: at the beginning, and spread over the whole vector."""
    values = np.asarray([3.0, -2.0, 2.5, -2.75, 2.25, -3.25], dtype=np.float32)
    places = [5, 65_541, 66_000, size // 2 + 65_537 if size > 1 << 20 else 69_000, size - 300, size - 1]
    for where in (np.arange(len(values)), np.asarray(places)):
        x = np.zeros(size, dtype=np.float32)
        x[where] = values
        yield x


def _losses(case: Case, x: Vector, calls: int) -> tuple[float, float, float, float]:
    """Return the mean of ||C(v) - v||^2 / ||v||^2 and its deviation, then both for <C(v), v> / ||v||^2."""
    v = x.astype(np.float64)
    energy = float(v @ v)
    lost, along = np.empty(calls), np.empty(calls)
    for call in range(calls):
        decoded = case.decoded(x, Key(seed=25, step=call))
        lost[call], along[call] = np.sum((decoded - v) ** 2) / energy, decoded @ v / energy
    return float(lost.mean()), float(lost.std()), float(along.mean()), float(along.std())


def _require_bounds(case: Case, x: Vector, what: str, calls: int) -> None:
    traits = case.compressor.traits
    lost, deviation, along, spread = _losses(case, x, calls)
    lost_before, *_ = _losses(case, x[:5000], 1)
    assert traits.random or lost <= 1.1 or lost_before > 0.9, (
        f"{what} lose {lost:.3g} of ||v||^2, more than if nothing were sent; the first 5000 lose {lost_before:.3g}"
    )
    if traits.random:  # all of a few results may be alike by chance
        _, deviation_of_more, _, spread_of_more = _losses(case, x[:5000], 24)
        deviation, spread = max(deviation, deviation_of_more), max(spread, spread_of_more)
    chance = 6 / np.sqrt(calls)
    for name, bound in (
        ("omega", traits.omega),
        ("1 - delta", None if traits.delta is None else 1 - traits.delta),
    ):
        assert bound is None or lost <= bound * (1 + 2.0**-18) + 2.0**-22 + chance * deviation, (
            f"E ||C(v) - v||^2 is {lost:.6g} ||v||^2, above ({name}) ||v||^2 = {bound:.6g} ||v||^2, for {what}"
        )
    assert not traits.unbiased or abs(along - 1) <= 0.02 + 1.5 * chance * spread, (
        f"E C(v) is not v: {along:.3g} v, for {what}"
    )
