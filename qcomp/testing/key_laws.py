"""Laws about keys: each key has its own draws, and draws of different keys are independent."""

from collections import Counter
from collections.abc import Iterator
from itertools import combinations
from typing import Any

import numpy as np

from qcomp.core.numeric.random import SHARED_RANK, Key
from qcomp.testing.case import Case
from qcomp.testing.inputs import vector
from qcomp.testing.libraries import to_numpy

__all__ = ["draws_are_independent", "key_names_the_draws", "no_key_repeats"]

Array = np.ndarray[Any, Any]

_PARTS = ("seed", "step", "tensor", "rank", "hop", "bucket")
_BITS = {"seed": 64, "step": 64, "tensor": 32, "rank": 32, "hop": 32}
"""The number of bits of each part that must affect the draws."""
_BASE = Key(seed=1, step=2, tensor=3, rank=4)
_SIZE = 512


def key_names_the_draws(case: Case) -> None:
    """Each part of the key changes the draws of a random compressor; other compressors ignore the key."""
    random = case.compressor.traits.random
    for size in (_SIZE, 5000):
        x = vector("gaussian", size, 3)
        reference = case.compress(x, key=_BASE).data
        for part in _PARTS:
            for value in (64, 2**12):
                differs = case.compress(x, key=_BASE._replace(**{part: value})).data != reference
                assert differs == random, (
                    f"another {part} in the key {'does not change' if random else 'changes'} the payload"
                )


def no_key_repeats(case: Case) -> None:
    """No two keys or buckets have the same draws: every bit of every part matters, and parts are not merely added."""
    if not case.compressor.traits.random:
        return
    plain = case.plain
    vectors = [vector("gaussian", _SIZE + 8 * i, 12 + i) for i in range(3)]
    arrays = [plain.array(x) for x in vectors]

    def data(key: Key, index: int) -> bytes:
        return to_numpy(plain.compressor.compress(arrays[index], key=key).data).tobytes()

    seen: dict[bytes, Key] = {}
    for key in _keys(plain.compressor.traits.bucket_size):
        found = data(key, 0)
        earlier = seen.setdefault(found, key)
        if earlier == key:
            continue
        same = all(data(key, index) == data(earlier, index) for index in (1, 2))
        assert not same, f"{key} and {earlier} have the same draws"
    _check_buckets(plain)


def _keys(bucket_size: int) -> Iterator[Key]:
    """Yield distinct keys: every bit of each part, the first numbers of each, and grids over pairs of parts."""
    made: set[Key] = set()
    for key in _all_keys(bucket_size):
        if key not in made:
            made.add(key)
            yield key


def _all_keys(bucket_size: int) -> Iterator[Key]:
    room = 32 - (bucket_size // 8).bit_length()  # lanes are counted in 32 bits
    for part in _PARTS:
        for bit in range(_BITS.get(part, min(room, 24))):
            yield _BASE._replace(**{part: 1 << bit})
        count = {"step": 80, "rank": 40, "bucket": 40}.get(part, 10)
        for number in range(count):
            yield _BASE._replace(**{part: number})
        for number in (100, 255, 257, 999, 1000, 1001, 10_000, 65_537, 10**6):
            if part == "bucket" and number >= 1 << room:
                continue
            yield _BASE._replace(**{part: number})
    for first, second in combinations(_PARTS, 2):
        for a in range(3):
            for b in range(3):
                yield Key(**{first: a, second: b})
    yield _BASE._replace(rank=SHARED_RANK)
    yield _BASE._replace(seed=2**64 - 1)


def _check_buckets(case: Case) -> None:
    """Check that buckets of equal values under one key are rounded differently."""
    bucket = case.compressor.traits.bucket_size
    if bucket < 8 or bucket > 4096:
        return
    copies = min(1024, (1 << 18) // bucket)
    row = vector("gaussian", bucket, 15)
    decoded = case.decoded(np.tile(row, copies), Key(seed=3)).reshape(copies, bucket)
    again = case.decoded(np.tile(row, copies), Key(seed=4)).reshape(copies, bucket)
    # Short buckets may repeat by chance, as often as between two unrelated keys.
    first, others = ([row.tobytes() for row in rows] for rows in (decoded, again))
    known = Counter(others)
    expected = sum(known[row] for row in first) / 2
    repeated = sum(count * (count - 1) / 2 for count in Counter(first).values())
    assert repeated <= 10 + 4 * expected, (
        f"{repeated:.0f} pairs of {copies} buckets of one key have the same draws; by chance {expected:.0f} would"
    )


def draws_are_independent(case: Case) -> None:
    """Errors under different keys are uncorrelated: the variance of the mean of R ranks is 1/R of one rank's variance.

    This is checked for ranks, steps, hops, tensors, seeds, and the buckets of one vector.
    """
    if not case.compressor.traits.random:
        return
    plain = case.plain
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
    # Correlation of errors under unrelated keys, by chance and by the shared centre.
    usual = _correlations(results[:24] - centre)[np.triu_indices(24, 1)]
    if not np.any(usual):
        return
    mean, deviation = float(usual.mean()), float(usual.std())
    for part in _PARTS:
        values = [*range(12), 64, 128, 1000, 1001] if part != "bucket" else list(range(0, 16 * 4096, 4096))
        found = _correlations(
            np.asarray([plain.decoded(x, _BASE._replace(**{part: v})) for v in values]) - centre
        )
        pairs = found - mean
        pairs[np.tril_indices(len(values))] = 0.0
        a, b = np.unravel_index(int(np.argmax(np.abs(pairs))), pairs.shape)
        assert abs(pairs[a, b]) < 8 * deviation + 0.02, (
            f"the errors of {part} {values[a]} and {part} {values[b]} are alike, with correlation {found[a, b]:.2g}: "
            "they share draws"
        )
        count = len(values)
        gain = 1 + (count - 1) * float(pairs.sum() / (count * (count - 1) / 2))
        assert abs(gain - 1) < 12 * deviation + 0.05, (
            f"the variance of the mean over {count} {part}s is {gain / count:.3g} of that of one; expected "
            f"{1 / count:.3g}"
        )


def _correlations(errors: Array) -> Array:
    """Return the correlations of all pairs of rows of errors."""
    norms = np.sqrt(np.maximum(np.sum(errors**2, axis=1), 1e-300))
    correlations: Array = errors @ errors.T / np.outer(norms, norms)
    return correlations
