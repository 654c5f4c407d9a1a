"""Laws of unbiasedness, E C(v) = v: for all sizes, magnitudes, keys and dtypes; exactly if draws can be enumerated."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from qcomp.core.numeric.buckets import Block
from qcomp.core.numeric.random import Key
from qcomp.testing.compressor_case import Case
from qcomp.testing.inputs import LONGEST_BUCKET, flushed, vector
from qcomp.testing.libraries import Vector
from qcomp.testing.worst_cases import HITS, row_length

_SUSPICIOUS, _CERTAIN = 4.2, 6.0
"""Deviations, in standard errors: at the first more samples are drawn, at the second the law counts as broken."""
_MORE = (6, 30)
"""Factors for the number of samples with other keys, in the first and in the second repetition."""
_DRAWS = 1 << 16
_SPREAD = 128
"""Number of equally spaced draws; a mean over them is off by at most 0.625 / _SPREAD."""
_KINDS = 8
"""Number of different values in a vector whose draws are enumerated."""

_KEYS = {
    "rank 0": Key(seed=31),
    "rank 1": Key(seed=31, rank=1),
    "rank 300": Key(seed=31, step=5, tensor=2, rank=300),
    "hop 1": Key(seed=31, hop=1),
    "hop 5": Key(seed=31, rank=2, hop=5),
    "a late step": Key(seed=31, step=10**6),
    "step 2^33": Key(seed=31, step=2**33, rank=3),
    "seed 2^40": Key(seed=2**40 + 7, step=1, tensor=1),
    "tensor 70000": Key(seed=31, tensor=70_000),
    "bucket 4097": Key(seed=31, step=1, bucket=4097),
}
"""Keys that occur in real jobs."""

_FAMILIES = (
    "gaussian",
    "positive",
    "constant",
    "sparse",
    "tiny",
    "huge",
    "wide",
    "ties",
    "uniform",
    "negative",
    "small",
    "large",
    "heavy",
    "signs",
    "close",
)


@dataclass(frozen=True)
class _Situation:
    """A vector and the keys under which it is compressed repeatedly."""

    x: Vector
    key: Key
    calls: int
    what: str
    unit: int
    """The number of elements whose draws may depend on each other: of a bucket, or of the whole vector."""


def unbiased(case: Case) -> None:
    """E C(v) = v in every situation: the mean over draws deviates only by chance."""
    for each in case.of_shapes:
        traits = each.compressor.traits
        if traits.unbiased and not traits.random:
            _require_equal(each)
        elif traits.unbiased:
            _require_unbiased(each.plain)


def _require_unbiased(case: Case) -> None:
    """Raise AssertionError if the mean over draws deviates more than by chance."""
    for situation in _situations(case):
        if not case.takes(situation.x):
            continue
        first, _ = _deviations(case, situation, 0.1)
        suspects = np.abs(first) > _SUSPICIOUS
        for times in _MORE:
            if not np.any(suspects):
                break
            key = situation.key._replace(step=situation.key.step + 10_000 * times)
            again = replace(situation, key=key, calls=times * max(2, situation.calls))
            found, relative = _deviations(case, again, 0.8)
            # More draws make a real deviation more significant.
            suspects &= (first * found > 0) & (
                np.abs(found) > (_SUSPICIOUS if times != _MORE[-1] else _CERTAIN)
            )
        for index in np.flatnonzero(suspects):
            raise AssertionError(
                f"E C(v) is not v: off by {relative[index]:.3g} of v, {abs(found[index]):.0f} standard errors, "
                f"{_DIRECTIONS[index]}, for {situation.what}"
            )


def _require_equal(case: Case) -> None:
    """Check that an unbiased compressor without randomness returns v."""
    for dtype in case.dtypes:
        for family in _FAMILIES:
            for size in (1, 9, 1000, 5000):
                x = flushed(_values(family, size, 1)).astype(dtype)
                if not case.takes(x):
                    continue
                lost = np.abs(case.decoded(x, Key(seed=1)) - x)
                worst = int(np.argmax(lost - 2.0**-22 * np.abs(x)))
                assert lost[worst] <= 2.0**-22 * abs(x[worst]), (
                    f"C(v) is not v, and nothing is random: {x[worst]:.9g} becomes {x[worst] + lost[worst]:.9g} or "
                    f"{x[worst] - lost[worst]:.9g} ({family}, {size} elements of {dtype})"
                )


def _values(family: str, size: int, seed: int) -> Vector:
    if family != "close":
        return vector(family, size, seed)
    x = vector("gaussian", size, seed)  # just below the largest, where a probability may be rounded up to 1
    return (np.sign(x) * (1 - np.abs(x) * 2.0**-18)).astype(np.float32)


def _situations(case: Case) -> Iterator[_Situation]:
    bucket = case.compressor.traits.bucket_size
    length = row_length(bucket)
    if length <= 1 << 13:
        copies = max(8, (1 << 14) // length)
        for number, family in enumerate(_FAMILIES):
            for index, (name, key) in enumerate(_KEYS.items()):
                if family in ("gaussian", "positive"):  # with every key, in one dtype each
                    dtypes: tuple[str, ...] = (case.dtypes[(index + number) % len(case.dtypes)],)
                else:
                    dtypes = case.dtypes if number % len(_KEYS) == index else ()
                for dtype in dtypes:
                    x = np.tile(_values(family, length, 2), copies).astype(dtype)
                    yield _Situation(
                        x, key, 2, f"{copies} full buckets of {family} values, {dtype}, {name}", length
                    )
    else:
        for number, family in enumerate(_FAMILIES):
            dtype = case.dtypes[number % len(case.dtypes)]
            x = _values(family, 2500, 2).astype(dtype)
            yield _Situation(x, _KEYS["rank 0"], 30, f"2500 {family} values, {dtype}, rank 0", 2500)
    edges = {k * bucket + d for k, d in ((1, -1), (1, 1), (2, 5), (3, 0)) if 0 < k * bucket + d <= 5000}
    sizes = {1, 2, 3, 5, 7, 8, 9, 15, 17, 33, 100, 250, 1000, 2500} | edges
    names = list(_KEYS)
    for number, size in enumerate(sorted(sizes)):
        calls = int(np.clip(30_000 // size, 8, 60))
        families = ("gaussian", "positive") if number % 2 else ("gaussian",)
        for family in families:
            dtype = case.dtypes[number // 2 % len(case.dtypes)] if family == "positive" else "float32"
            name = names[number % len(names)] if family == "positive" else names[0]
            yield _Situation(
                _values(family, size, 3).astype(dtype),
                _KEYS[name],
                calls,
                f"{size} {family} values, {dtype}, {name}",
                min(size, bucket),
            )
    for size in (5003, 20_011, 100_003):
        for dtype in case.dtypes:
            x = _values("gaussian", size, 4).astype(dtype)
            yield _Situation(
                x, _KEYS["rank 1"], 1, f"{size} gaussian values, {dtype}, rank 1", min(bucket, size)
            )


_DIRECTIONS = tuple(
    f"{where}, {how}"
    for how in ("in magnitude", "in sum", "along v")
    for where in (
        "in all elements",
        "in even elements",
        "in odd elements",
        "in the first element of a bucket",
        "in the last element of a bucket",
        "in the larger half",
        "in the smaller half",
        "in positive elements",
        "in negative elements",
        "in the tail",
    )
)


def _directions(v: Vector, unit: int) -> Vector:
    """Return the directions in which the mean is tested, of shape (count, n)."""
    index = np.arange(v.size)
    magnitude, start = np.abs(v), index % unit
    last = v.size - v.size % unit if v.size % unit else v.size - unit
    masks = [
        index >= 0,
        index % 2 == 0,
        index % 2 == 1,
        start == 0,
        (start == unit - 1) | (index == v.size - 1),
        magnitude > np.median(magnitude),
        magnitude <= np.median(magnitude),
        v > 0,
        v < 0,
        index >= last,
    ]
    where = np.asarray(masks, dtype=np.float64)
    return np.concatenate([where * np.sign(v), where, where * v])


def _deviations(case: Case, situation: _Situation, unseen: float) -> tuple[Vector, Vector]:
    """Return the deviation of the mean in each direction, in standard errors and as a fraction of v.

    ``unseen`` is the largest error, relative to the largest magnitude, that only draws too rare to be sampled cause.
    """
    x, unit = situation.x, situation.unit
    exact = flushed(x).astype(np.float64)
    scale = float(np.abs(exact).max()) or 1.0
    v = exact / scale
    directions = _directions(v, unit)
    starts = np.arange(0, v.size, unit)
    total = np.zeros(len(directions))
    squares = np.zeros(len(directions))
    jump = np.zeros(len(directions))
    level = 0.0
    for call in range(situation.calls):
        key = situation.key._replace(step=situation.key.step + call)
        error = (case.decoded(x, key) - exact) / scale
        each = np.add.reduceat(directions * error, starts, axis=1)
        total += each.sum(axis=1)
        squares += (each**2).sum(axis=1)
        jump = np.maximum(jump, np.abs(each).max(axis=1))
        level = max(level, float(np.abs(error).max()))
    # Allow for rare errors that were not sampled, as if a few more of the largest had occurred, and for 16-bit draws.
    rare = np.maximum(jump, unseen * np.abs(directions).max(axis=1))
    omega = case.compressor.traits.omega or 0.0
    if len(starts) * situation.calls < HITS * (1 + omega):
        # If an element is kept in one of 1 + omega draws, its error in that draw is omega times its value.
        rare = np.maximum(rare, omega * np.abs(directions * v).max(axis=1))
    chance = np.sqrt(squares + 9 * rare**2)
    level = max(level, float(np.sqrt(np.add.reduceat(v**2, starts).max())))
    resolution = 2.0**-16 * level * np.abs(directions).sum(axis=1) * situation.calls
    off = np.sign(total) * np.maximum(0.0, np.abs(total) - resolution)
    energy = np.abs(directions * v).sum(axis=1) * situation.calls
    return off / np.where(chance > 0, chance, 1e-30), total / np.where(energy > 0, energy, 1.0)


def unbiased_to_the_last_draw(case: Case) -> None:
    """E C(v) = v over all 65536 draws of an element, up to 2^-17 of a level, which is the resolution of 16-bit draws.

    It applies if each draw of `qcomp.core.numeric.random.draws16` affects only its own element. Other compressors can
    only be tested with many draws.
    """
    traits = case.compressor.traits
    if not traits.unbiased or not traits.random or not _draws_decide_about_their_element(case):
        return
    for values, results in _enumerate(case):
        spread = float(np.max(results.max(axis=0) - results.min(axis=0)))
        slack = 2.0**-17 * spread + 2.0**-23 * np.abs(values)
        mean = results.mean(axis=0)
        off = np.abs(mean - values)
        worst = int(np.argmax(off - slack))
        assert off[worst] <= slack[worst], (
            f"E C(v) is {mean[worst]:.9g} for v = {values[worst]:.9g}, off by more than {slack[worst]:.3g}"
        )


def unbiased_at_every_size(case: Case) -> None:
    """E C(v) = v in every element of short vectors and tails, up to the resolution of `_SPREAD` equally spaced draws.

    It applies to the same compressors as `unbiased_to_the_last_draw`.
    """
    traits = case.compressor.traits
    if not traits.unbiased or not traits.random or not _draws_decide_about_their_element(case):
        return
    case, bucket = case.plain, traits.bucket_size
    edges = {k * bucket + d for k in (1, 2, 3) for d in (-1, 0, 1, 3, bucket // 2)}
    sizes = sorted(
        {1, 2, 3, 4, 5, 6, 7, 8, 9, 13, 16, 17, 37, 1003, 5003} | {n for n in edges if 0 < n < 5003}
    )
    names = list(_KEYS)
    for number, size in enumerate(sizes):
        name = names[number % len(names)]
        dtype = case.dtypes[number % len(case.dtypes)]
        x = flushed(_values(("gaussian", "positive")[number % 2], size, 5)).astype(dtype)
        ends, *results = (
            case.compress(x, key=_KEYS[name], source=partial(_always, draw)).decoded.astype(np.float64)
            for draw in (0, *_spread_draws(), _DRAWS - 1)
        )
        ends = np.abs(results.pop() - ends)
        if np.any(np.count_nonzero(np.diff(results, axis=0), axis=0) > 1):
            return  # not monotonic in the draw, so spaced draws do not cover the results
        mean = np.mean(results, axis=0)
        slack = 0.625 / _SPREAD * ends + 2.0**-16 * (ends + np.abs(x).max())
        off = np.abs(mean - x)
        worst = int(np.argmax(off - slack))
        assert off[worst] <= slack[worst], (
            f"E C(v) is {mean[worst]:.9g} for v = {x[worst]:.9g}, off by more than {slack[worst]:.3g}, in element "
            f"{worst} of {size} of {dtype}, {name}"
        )


def _spread_draws() -> list[int]:
    """Return equally spaced draws, each shifted by at most an eighth of the spacing to vary the low bits."""
    distance, bits = _DRAWS // _SPREAD, _SPREAD.bit_length() - 1
    reversed_numbers = [int(f"{index:0{bits}b}"[::-1], 2) for index in range(_SPREAD)]
    return [
        distance * index + distance // 2 + (number - _SPREAD // 2) * distance // (4 * _SPREAD)
        for index, number in enumerate(reversed_numbers)
    ]


def _always(draw: int, _key: Key, _block: Block) -> int:
    return draw


def _draws_decide_about_their_element(case: Case) -> bool:
    """Return whether a change of one element's draw changes only that element's result."""
    case = case.plain
    bucket = case.compressor.traits.bucket_size
    if bucket > LONGEST_BUCKET:
        return False
    x = vector("gaussian", 2 * row_length(bucket), 6)
    asked: list[tuple[Key, Block]] = []

    def decoded(chosen: int | None) -> Vector:
        def source(key: Key, block: Block) -> Vector:
            asked.append((key, block))
            elements = block.start + np.arange(block.rows * block.filled).reshape(block.rows, -1)
            draws = np.full((block.rows, block.length), 30_000.0, dtype=np.float32)
            draws[:, : block.filled] = np.where(elements == chosen, 0.0, draws[:, : block.filled])
            return draws

        return case.compress(x, source=source).decoded

    reference = decoded(None)
    if not asked or any(block.filled > bucket for _, block in asked) or _is_asked_twice(asked, x.size):
        return False
    changes = 0
    for chosen in (0, 1, 5, x.size // 2 + 1, x.size // 2 + 2, x.size - 1):
        changed = np.flatnonzero(decoded(chosen) != reference)
        if changed.size > 1 or (changed.size and changed[0] != chosen):
            return False
        changes += changed.size
    everything_lower = case.compress(x, source=lambda _key, _block: 0).decoded
    return changes > 0 and float(np.mean(everything_lower != reference)) > 0.2


def _is_asked_twice(asked: list[tuple[Key, Block]], size: int) -> bool:
    """Return whether elements get more than one draw each, under different keys or blocks.

    `qcomp.core.numeric.random.draws16_again` takes no key, so it asks with the default key.
    """
    named = {(key, block) for key, block in asked if key != Key()}
    again = [block for key, block in asked if key == Key()]
    count = max(sum(b.rows * b.filled for _, b in named), sum(b.rows * b.filled for b in again))
    return count > size


def _enumerate(case: Case) -> Iterator[tuple[Vector, Vector]]:
    """Yield sets of eight values, each with the results for every draw.

    The eight values repeat through the vector, so that every bucket has the same scales; copy c of a value
    takes draw c.
    """
    case = case.plain
    bucket = case.compressor.traits.bucket_size

    def source(_: Key, block: Block) -> Vector:
        # Numbered per bucket, since a compressor may pad its buckets.
        buckets = block.first_bucket + np.arange(block.rows)[:, None]
        elements = buckets * bucket + np.arange(block.length)
        return (elements // _KINDS % _DRAWS).astype(np.float32)

    copies = max(_DRAWS, bucket // _KINDS)
    for numbers in (
        [1.0, -0.5, 0.0, 0.1, -0.93, 1 / 3, 2.0**-20, -1e-3],
        [3.0, 2.99999, -2.99998, 2.9999, 0.0, 0.0, 0.0, -0.004],
        vector("gaussian", _KINDS, 10),
    ):
        values = np.asarray(numbers, dtype=np.float32)
        decoded = case.compress(np.tile(values, copies), source=source).decoded
        yield values, decoded.reshape(copies, _KINDS).astype(np.float64)
