"""Laws about keys: each key has its own draws, and draws of different keys are independent."""

import math
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import combinations

import numpy as np

from qcomp.core.numeric.random import SHARED_RANK, Key
from qcomp.testing.compressor_case import Case
from qcomp.testing.inputs import vector
from qcomp.testing.libraries import Vector, to_numpy

_PARTS = ("seed", "step", "tensor", "rank", "hop", "bucket")
_BITS = {"seed": 64, "step": 64, "tensor": 32, "rank": 32, "hop": 32}
"""For each part, the number of bits that must affect the draws."""
_BASE = Key(seed=1, step=2, tensor=3, rank=4)
_STRIDES = (10, 31, 37, 100, 101, 127, 255, 257, 1000, 1009, 10_000, 65_521, 10**6)
"""Factors, besides powers of two, by which faulty code might multiply one part to make room for another."""
_ODD = (100, 255, 257, 999, 1000, 1001, 10_000, 65_537, 10**6, 2**53 + 1, 2**63 - 1, 2**63 + 1)
"""Further values of a part, near the limits of narrower types."""
_MIXED = (
    ("seed", "step"),
    ("seed", "rank"),
    ("seed", "bucket"),
    ("step", "rank"),
    ("step", "tensor"),
    ("step", "bucket"),
    ("tensor", "bucket"),
    ("rank", "bucket"),
)
"""Pairs that faulty code might mix into one number: a multiple of the first plus the second."""
_NEVER = 1e-9
"""A probability so low that no test sees such an event."""
_SIZE = 512
_MOST_SEEDS = 50
"""The number of seeds under which keys with equal draws are compared again: too many for them to agree by chance."""
_MEETINGS = 4
"""The number of places in which two rows may both have large errors by chance."""


def key_names_the_draws(case: Case) -> None:
    """Each part of the key changes the draws of a random compressor; other compressors ignore the key."""
    random = case.compressor.traits.random
    # A few draws may agree by chance, such as two flips of a coin, but not under all seeds.
    seeds = range(_MOST_SEEDS if random else 3)
    for size in (_SIZE, 5000):
        x = vector("gaussian", size, 3)
        references = {seed: case.compress(x, key=_with_other_seed(_BASE, seed)).data for seed in range(3)}
        for part in _PARTS:
            for value in (64, 2**12):
                key = _BASE._replace(**{part: value})
                differs = False
                for seed in seeds:
                    if seed not in references:
                        references[seed] = case.compress(x, key=_with_other_seed(_BASE, seed)).data
                    if case.compress(x, key=_with_other_seed(key, seed)).data != references[seed]:
                        differs = True
                        break
                assert differs == random, (
                    f"another {part} in the key {'does not change' if random else 'changes'} the payload"
                )


def no_key_repeats(case: Case) -> None:
    """No two keys or buckets have the same draws: every bit of every part matters, and parts are not merely added."""
    if not case.compressor.traits.random:
        return
    plain = case.plain
    _check_buckets(plain)
    bucket = plain.compressor.traits.bucket_size
    length = max(_SIZE, 4 * bucket) if bucket <= _SIZE else _SIZE
    arrays = [plain.array(vector("gaussian", length + 8 * i, 12 + i)) for i in range(3)]

    def data(key: Key, number: int) -> bytes:
        """Return a payload. The number selects the vector if one vector shows which draws were made, else the seed."""
        own = key if vectors_tell else _with_other_seed(key, number)
        return to_numpy(plain.compressor.compress(arrays[number % 3], key=own).data).tobytes()

    vectors_tell = _buckets_tell(plain, length)
    alone, together = (1, 3) if vectors_tell else _seeds_that_tell(data)
    seen: dict[tuple[bytes, ...], Key] = {}
    for key in dict.fromkeys(_all_keys(bucket, thorough=alone < 4)):
        earlier = seen.setdefault(tuple(data(key, number) for number in range(alone)), key)
        if earlier == key:
            continue
        same = all(data(key, number) == data(earlier, number) for number in range(alone, together))
        assert not same, f"{key} and {earlier} have the same draws"


def _buckets_tell(case: Case, length: int) -> bool:
    """Return whether unrelated keys practically never agree in all buckets of a vector of this length."""
    bucket = case.compressor.traits.bucket_size
    count = length // bucket
    if not count:
        return False
    x = vector("gaussian", count * bucket, 12)
    keys = [Key(seed=2000 + number, step=number) for number in range(40)]
    rows = np.asarray([case.decoded(x, key).reshape(count, bucket) for key in keys])
    alike = [np.all(rows[one] == rows[other], axis=1).mean() for one, other in combinations(range(40), 2)]
    # Even if 1/260 of all pairs agree, these 780 may all differ by chance, so count at least 1/260.
    return bool(max(float(np.mean(alike)), 1 / 260) ** count < _NEVER)


def _seeds_that_tell(data: Callable[[Key, int], bytes]) -> tuple[int, int]:
    """Return two numbers of seeds: with one, two of a thousand keys rarely agree by chance; with the other, never."""
    results = Counter(data(Key(seed=1000 + number, step=number), 0) for number in range(64))
    alike = sum(count * (count - 1) for count in results.values()) / (64 * 63)
    bits = min(-math.log2(alike), 12.0) if 0 < alike < 1 else 12.0 if not alike else 1.0
    return max(1, round(24 / bits) - 1), max(3, round(_MOST_SEEDS / bits))


def _with_other_seed(key: Key, number: int) -> Key:
    """Return a key with a seed for each number; 0 returns the key itself."""
    return key._replace(seed=(key.seed + (number << 40)) % 2**64)


def _all_keys(bucket_size: int, *, thorough: bool) -> Iterator[Key]:
    """Yield keys that differ from one key in a field, or have small numbers in two fields.

    A field gets each power of two, small numbers, and numbers near its limits.
    """
    room = max(0, 32 - (bucket_size // 8).bit_length())  # lanes are counted in 32 bits
    for part in _PARTS:
        bits = _BITS.get(part, min(room, 24))
        for bit in range(bits):
            yield _BASE._replace(**{part: 1 << bit})
        count = {"step": 80, "rank": 40, "bucket": 40}.get(part, 10)
        for number in (*range(count), *_ODD):
            if number < 1 << bits:
                yield _BASE._replace(**{part: number})
    for part, bits in _BITS.items():
        # Parts that are packed into one number must not carry into each other.
        for more in [*_STRIDES, *(1 << bit for bit in range(min(bits, 25)))]:
            yield _BASE._replace(**{part: getattr(_BASE, part) + more})
        for number in (
            1,
            2,
            5,
            2**24 + 1,
        ):  # a signed number must not lose its sign, nor its last bits as a float
            yield _BASE._replace(**{part: (1 << bits) - number})
            yield _BASE._replace(**{part: (1 << bits - 1) + number})
    for first, second in combinations(_PARTS, 2):
        for a in range(3):
            for b in range(3):
                yield Key(**{first: a, second: b})
    yield _BASE._replace(rank=SHARED_RANK)
    if thorough:
        yield from _more_keys()


def _more_keys() -> Iterator[Key]:
    """Yield keys that coincide if two parts are mixed into one number, or one is reduced to a digest of 16 bits."""
    for first, second in _MIXED:
        # If the first part is multiplied by any number up to 60 * 60, some (1, i) and (0, 60 j) coincide.
        for number in range(61):
            yield Key(**{"seed": 7, first: 1, second: number})
            yield Key(**{"seed": 7, first: 0, second: 60 * number})
    rng = np.random.default_rng(18)
    for part in ("seed", "step"):
        for number in rng.integers(0, 2**64, 500, dtype=np.uint64):
            yield _BASE._replace(**{part: int(number)})


def _check_buckets(case: Case) -> None:
    """Check that buckets of equal values under one key are rounded differently."""
    bucket = case.compressor.traits.bucket_size
    if bucket < 8 or bucket > 4096:
        return
    copies = min(1024, (1 << 18) // bucket)
    row = vector("gaussian", bucket, 15)
    decoded = case.decoded(np.tile(row, copies), Key(seed=3)).reshape(copies, bucket)
    again = case.decoded(np.tile(row, copies), Key(seed=4)).reshape(copies, bucket)
    # Short buckets may agree by chance, as often as the buckets of two unrelated keys.
    first, others = ([row.tobytes() for row in rows] for rows in (decoded, again))
    known = Counter(others)
    expected = sum(known[row] for row in first) / 2
    repeated = sum(count * (count - 1) / 2 for count in Counter(first).values())
    assert repeated <= 10 + 4 * expected, (
        f"{repeated:.0f} pairs of {copies} buckets of one key have the same draws; by chance {expected:.0f} would"
    )


def draws_are_independent(case: Case) -> None:
    """Errors under different keys are uncorrelated: the variance of the mean of R ranks is 1/R of one rank's variance.

    This is checked for ranks, steps, hops, tensors, seeds, and the buckets of one vector. Draws of neighbouring keys
    are not shifted copies of each other, and neighbouring buckets are uncorrelated.
    """
    for each in case.of_shapes:
        if each.compressor.traits.random:
            _require_independent(each.plain)


def _require_independent(plain: Case) -> None:
    """Raise AssertionError if draws of different keys or buckets are not independent."""
    _check_neighbours(plain)
    size = max(8192, min(plain.compressor.traits.bucket_size, 16_384))
    rng = np.random.default_rng(16)
    x = rng.standard_normal(size).astype(np.float32)
    mixed = [
        Key(seed=int(a), step=int(b), tensor=int(c), rank=int(d))
        for a, b, c, d in rng.integers(0, 2**31, size=(88, 4))
    ]
    needed = 24 if plain.compressor.traits.unbiased else None
    results = np.asarray([plain.decoded(x, key) for key in mixed[:needed]])
    centre = x if plain.compressor.traits.unbiased else results[24:].mean(axis=0)
    # The usual correlation of errors under unrelated keys, due to chance and to the shared centre.
    usual = _correlations(results[:24] - centre)[np.triu_indices(24, 1)]
    if not np.any(usual):
        return
    mean, deviation = float(usual.mean()), float(usual.std())
    by_chance_after_shifts = _largest_after_shifts(results[:24] - centre, x)
    for part in _PARTS:
        values = [*range(12), 64, 128, 1000, 1001] if part != "bucket" else list(range(0, 16 * 4096, 4096))
        errors = np.asarray([plain.decoded(x, _BASE._replace(**{part: v})) for v in values]) - centre
        _check_shifts(errors, x, part, by_chance_after_shifts)
        found = _correlations(errors)
        pairs = found - mean
        pairs[np.tril_indices(len(values))] = 0.0
        a, b = np.unravel_index(int(np.argmax(np.abs(pairs))), pairs.shape)
        # If large errors are few, as with sparse compressors, some coincide by chance.
        by_chance = 8 * deviation + 0.02 + _MEETINGS / max(1.0, float(_width(errors).min()))
        assert abs(pairs[a, b]) < by_chance, (
            f"the errors of {part} {values[a]} and {part} {values[b]} are alike, with correlation {found[a, b]:.2g}: "
            "they share draws"
        )
        count = len(values)
        gain = 1 + (count - 1) * float(pairs.sum() / (count * (count - 1) / 2))
        assert abs(gain - 1) < 12 * deviation + 0.05, (
            f"the variance of the mean over {count} {part}s is {gain / count:.3g} of the variance of one; expected "
            f"{1 / count:.3g}"
        )


def _check_shifts(errors: Vector, x: Vector, part: str, by_chance: float) -> None:
    """Check that no row of errors is correlated with the next one after a shift by any number of elements.

    The bound follows from the deviation over all shifts and from the largest correlation under unrelated keys, since a
    few draws can agree by chance in all elements. Vectors with few large errors also correlate by chance, so they pass.
    """
    for found, shift in _after_shifts(errors, x):
        most = max(0.3, 1.5 * by_chance, 8 * float(found.std()))
        assert abs(found[shift]) < most, (
            f"the errors of {part}s that follow each other are alike after a shift by {shift} elements, with "
            f"correlation {found[shift]:.2g}: they share draws"
        )


def _largest_after_shifts(errors: Vector, x: Vector) -> float:
    return max((float(abs(found[shift])) for found, shift in _after_shifts(errors, x)), default=0.0)


def _after_shifts(errors: Vector, x: Vector) -> Iterator[tuple[Vector, int]]:
    """Yield the correlations of each row with the next one after every shift, and the shift with the largest."""
    of_magnitudes = errors * np.sign(x)  # the sign of an error may depend on the sign of its element
    for signed in (errors, of_magnitudes):
        wide = _width(signed) >= 200
        spectra = np.fft.rfft(signed)
        norms = np.sqrt(np.sum(signed**2, axis=1))
        for row in np.flatnonzero(wide[:-1] & wide[1:]):
            products = np.fft.irfft(spectra[row] * np.conj(spectra[row + 1]), x.size)
            found = products / (norms[row] * norms[row + 1])
            yield found, int(np.argmax(np.abs(found)))


def _check_neighbours(case: Case) -> None:
    """Check that the errors of equal buckets at small distances are uncorrelated.

    The products of independent errors are uncorrelated too, so their spread gives the deviation of their mean by
    chance.
    """
    bucket = case.compressor.traits.bucket_size
    if bucket < 8 or bucket > 4096:
        return
    copies = max(128, (1 << 15) // bucket)
    decoded = case.decoded(np.tile(vector("gaussian", bucket, 15), copies), Key(seed=3))
    errors = decoded.reshape(copies, bucket)
    errors = errors - errors.mean(axis=0)
    energy = float(np.mean(np.sum(errors**2, axis=1)))
    if energy == 0:
        return
    for distance in (1, 2, 3):
        products = np.sum(errors[:-distance] * errors[distance:], axis=1) / energy
        chance = float(products.std()) / np.sqrt(len(products))
        assert abs(products.mean()) < 8 * chance + 0.02, (
            f"the errors of equal buckets at distance {distance} are alike, with correlation {products.mean():.2g}: "
            "they share draws"
        )


def _width(errors: Vector) -> Vector:
    """Return the effective number of errors of each row, in which small errors hardly count: (sum e^2)^2 / sum e^4."""
    fourth: Vector = np.maximum(np.sum(errors**4, axis=1), 1e-300)
    found: Vector = np.sum(errors**2, axis=1) ** 2 / fourth
    return found


def _correlations(errors: Vector) -> Vector:
    """Return the correlations of all pairs of rows of errors."""
    norms = np.sqrt(np.maximum(np.sum(errors**2, axis=1), 1e-300))
    correlations: Vector = errors @ errors.T / np.outer(norms, norms)
    return correlations
