"""Laws about worst cases: neither known hard vectors nor vectors found by ascent break the bounds in the traits."""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from qcomp.core.numeric.random import Key
from qcomp.testing.compressor_case import Case
from qcomp.testing.inputs import LONGEST_BUCKET, adversarial, at_every_scale, flushed
from qcomp.testing.libraries import Vector

_BATCH = 1 << 16
"""Elements per call, if buckets are independent."""
_WIDEST = 1 << 13
"""Longest vector of whole buckets that is searched."""
_ROUNDS = 8
"""Generations of the ascent."""
_CALLS = (8, 64, 800)
"""The number of draws for a vector that ends in a tail; more are made if its error looks too large."""
_SIGMAS = 6.0
"""Deviation of a mean over draws that breaks the law, in standard errors."""
HITS = 18
"""The expected number of occurrences from which on a rare result cannot be missing by chance."""
_ROUNDING = 2.0**-22
"""Relative error that the rounding of scales and results to float32 can add."""
_ABSOLUTE = 2.0**-119
"""The further error of an element that `Traits` allows: up to 128 times a scale that is so small that it becomes
zero."""


class _Bound(NamedTuple):
    """A promise of the traits: E ||C(v) - v||^2 <= factor ||v||^2."""

    name: str
    factor: float


class _Found(NamedTuple):
    """The squared error of a vector relative to its squared norm."""

    ratio: float
    deviation: float
    """Standard error of the ratio; 0 without randomness."""
    draws: float
    """Number of draws; infinite without randomness."""
    what: str


def variance_bound(case: Case) -> None:
    """E ||C(v) - v||^2 is at most omega ||v||^2, for vectors of every kind and magnitude, full buckets and tails."""
    for each in case.of_shapes:
        omega = each.compressor.traits.omega
        if omega is not None:
            _check(each, _Bound("omega", omega))


def contraction(case: Case) -> None:
    """E ||C(v) - v||^2 is at most (1 - delta) ||v||^2, for the same vectors as in `variance_bound`."""
    for each in case.of_shapes:
        delta = each.compressor.traits.delta
        if delta is not None:
            _check(each, _Bound("1 - delta", 1 - delta), least_draws=HITS / delta)


def _check(case: Case, bound: _Bound, least_draws: float = 1) -> None:
    for found in _candidates(case.plain, bound.factor):
        limit = _rounded_up(bound.factor) + _SIGMAS * found.deviation
        # A rare result that is expected fewer than HITS times can be missing by chance, which makes the mean larger.
        unseen = HITS / found.draws if found.draws < least_draws else 0.0
        assert found.ratio * (1 - unseen) <= limit, (
            f"E ||C(v) - v||^2 is {found.ratio:.6g} ||v||^2, above ({bound.name}) ||v||^2 = {bound.factor:.6g} "
            f"||v||^2, for {found.what}"
        )


def _rounded_up(limit: float) -> float:
    return limit * (1 + 2.0**-20) + _ROUNDING


def _candidates(case: Case, limit: float) -> Iterator[_Found]:
    yield from _full_buckets(case)
    yield from _tails(case, limit)


def row_length(bucket_size: int) -> int:
    """Return the length, in whole buckets, of vectors that can be concatenated in one call."""
    return bucket_size * max(1, 8 // bucket_size)


def _full_buckets(case: Case) -> Iterator[_Found]:
    length = row_length(case.compressor.traits.bucket_size)
    if length > LONGEST_BUCKET:
        return
    scaled = _in_range(case, at_every_scale(length, 1 << 17))
    ratios = _expected(case, scaled, draws=12)
    for index in np.argsort(ratios)[-2:]:
        yield _measure(case, scaled[index], _describe(scaled[index]))
    if length > _WIDEST:
        for row in (np.eye(1, length, length // 2)[0], np.full(length, -0.7)):
            yield _measure(case, row.astype(np.float32), f"{_describe(row)} of {length} elements")
        return
    for dtype in case.dtypes:
        rows = _in_range(case, adversarial(length).astype(dtype))
        ratios = _expected(case, rows, draws=12)
        order = np.argsort(ratios)[::-1]
        for index in order[:3]:
            yield _measure(case, rows[index], f"{_describe(rows[index])} in {dtype}")
        if dtype == "float32" and not case.compressor.traits.random:
            worst = _worst_of_two_values(case, length)
            yield _measure(case, worst, _describe(worst))
        if dtype == "float32":
            worst = _ascend(case, rows[order], ratios[order])
            yield _measure(case, worst, f"{_describe(worst)}, found by ascent")


def _in_range(case: Case, rows: Vector) -> Vector:
    """Return the rows whose values the compressor accepts."""
    if case.takes(rows.reshape(-1)):
        return rows
    return rows[[case.takes(row) for row in rows]]


def _expected(case: Case, rows: Vector, *, draws: int) -> Vector:
    """Return the relative error of each row; for a random compressor, the mean over some draws."""
    repeats = draws if case.compressor.traits.random else 1
    m, length = rows.shape
    step = max(1, _BATCH // (repeats * length))
    ratios = np.empty(m)
    for start in range(0, m, step):
        some = rows[start : start + step]
        decoded = case.decoded(np.tile(some, (repeats, 1)).reshape(-1), Key(seed=21, step=start))
        ratios[start : start + step] = _ratios(decoded.reshape(repeats, *some.shape), some).mean(axis=0)
    return ratios


def _ratios(decoded: Vector, rows: Vector) -> Vector:
    """Return the squared error of each row, less what `_ABSOLUTE` allows, relative to its squared norm."""
    v = flushed(rows).astype(np.float64)
    size = np.abs(v).max(axis=-1, keepdims=True)
    scale = np.where(size > 0, size, 1.0)
    lost = np.sum(((decoded - v) / scale) ** 2, axis=-1)
    allowed = np.sqrt(v.shape[-1]) * _ABSOLUTE / scale[..., 0]
    lost = np.maximum(np.sqrt(lost) - allowed, 0.0) ** 2
    energy = np.sum((v / scale) ** 2, axis=-1)
    ratios: Vector = np.where(energy > 0, lost / np.where(energy > 0, energy, 1.0), lost)
    return ratios


def _measure(case: Case, row: Vector, what: str) -> _Found:
    """Return the relative error of one row; for a random compressor, the mean over at least 1024 draws."""
    if not case.compressor.traits.random:
        return _Found(float(_ratios(case.decoded(row, Key(seed=1)), row)), 0.0, np.inf, what)
    repeats = max(1, min(4 * _BATCH // row.size, 4096))
    calls = -(-1024 // repeats)
    found = [
        _ratios(case.decoded(np.tile(row, repeats), Key(seed=22, step=step)).reshape(repeats, row.size), row)
        for step in range(calls)
    ]
    ratios = np.concatenate(found)
    return _Found(float(ratios.mean()), float(ratios.std() / np.sqrt(ratios.size)), ratios.size, what)


def _ascend(case: Case, rows: Vector, ratios: Vector) -> Vector:
    """Return the worst row of a search: each generation varies the current worst rows, and keeps the worst of all."""
    rng = np.random.default_rng(23)
    length = rows.shape[1]
    keep = max(2, min(8, _BATCH // (16 * length)))
    best, best_ratios = rows[:keep], ratios[:keep]
    for _ in range(_ROUNDS * (8 if case.thorough else 1)):
        children = np.concatenate([_changed(row, rng) for row in best])
        found = _expected(case, children, draws=8)
        every, every_ratios = np.concatenate([best, children]), np.concatenate([best_ratios, found])
        order = np.argsort(every_ratios)[::-1][:keep]
        best, best_ratios = every[order], every_ratios[order]
        if case.compressor.traits.random:
            best_ratios = _expected(case, best, draws=32)  # new draws, so that lucky rows do not stay
    worst: Vector = best[int(np.argmax(best_ratios))]
    return worst


def _worst_of_two_values(case: Case, length: int) -> Vector:
    """Return the worst vector (1, p, ..., p); the worst p is often halfway between two possible decompressed values.

    The second search is between the neighbours of the first one's result.
    """
    count = int(np.clip((1 << 18) // length, 48, 256))
    values = np.geomspace(1e-4, 1.0, count)
    for _ in range(2):
        rows = np.repeat(values[:, None], length, axis=1).astype(np.float32)
        rows[:, 0] = 1.0
        worst = int(np.argmax(_expected(case, rows, draws=1)))
        values = np.linspace(values[max(0, worst - 1)], values[min(count - 1, worst + 1)], count)
    found: Vector = rows[worst]
    return found


def _changed(row: Vector, rng: np.random.Generator) -> Vector:
    """Return neighbours of a row: some elements are scaled, replaced by another element's value, or shifted."""
    changed = np.tile(row, (8, 1)).astype(np.float64)
    for index, child in enumerate(changed):
        chosen = rng.random(row.size) < (1 / row.size if index % 2 else rng.random())
        chosen[rng.integers(row.size)] = True
        kind = index % 4
        if kind < 2:
            child[chosen] *= np.exp2(rng.normal() * 0.3)
        elif kind == 2:
            child[chosen] = rng.choice(row) * (1 + 0.1 * rng.normal())
        else:
            child[chosen] = child[chosen] + 0.05 * rng.normal() * np.abs(row).max()
    most = float(np.abs(row).max())  # no larger, since it may be the largest accepted value
    return changed.clip(-most, most).astype(row.dtype)


def _tails(case: Case, limit: float) -> Iterator[_Found]:
    """Yield the errors of vectors that end in a tail, over a few calls each."""
    traits = case.compressor.traits
    bucket = min(traits.bucket_size, _WIDEST)
    for size in sorted({1, 2, 3, 5, 7, 9, 12, bucket // 2 + 1, max(1, bucket - 1)}):
        if size > traits.bucket_size:
            continue
        rows = _in_range(case, adversarial(size))
        if traits.random:
            rows = rows[:: max(1, len(rows) // 10)]
        elif size in (2, 5, 9, 12):
            rows = rows[::3]
        for row in rows:
            found = _tail(case, row, _CALLS[0])
            for calls in _CALLS[1:]:
                if traits.random and found.ratio > _rounded_up(limit) + 1.5 * found.deviation:
                    found = _tail(case, row, calls)
            yield found


def _tail(case: Case, row: Vector, calls: int) -> _Found:
    random = case.compressor.traits.random
    count = calls if random else 1
    ratios = np.asarray([_ratios(case.decoded(row, Key(seed=24, step=step)), row) for step in range(count)])
    deviation = float(ratios.std() / np.sqrt(count)) if count > 1 else 0.0
    draws = count if random else np.inf
    return _Found(float(ratios.mean()), deviation, draws, f"{_describe(row)} of {row.size} elements")


def _describe(row: Vector) -> str:
    """Describe a vector in a few words."""
    values, counts = np.unique(np.abs(row), return_counts=True)
    if len(values) > 3:
        return f"a vector with magnitudes from {values[0]:.3g} to {values[-1]:.3g}"
    return " and ".join(f"{count} times {value:.6g}" for value, count in zip(values, counts, strict=True))
