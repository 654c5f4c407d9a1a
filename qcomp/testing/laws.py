"""The laws of compressors, each a function that raises AssertionError if a `Case` breaks it.

A law that does not apply to the compressor's traits passes.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np

from qcomp.core import feedback
from qcomp.core.compressors.bucketed import BucketedCompressor
from qcomp.core.errors import NonFiniteError, PayloadError
from qcomp.core.numeric.bitplanes import unpack
from qcomp.core.numeric.buckets import blocks
from qcomp.core.numeric.random import Key
from qcomp.core.payload import Payload
from qcomp.testing.compressor_case import Case
from qcomp.testing.dtype_laws import (
    decoded_in_another_dtype,
    double_precision,
    half_precision,
    one_way,
    shapes_and_dtypes,
)
from qcomp.testing.form_laws import (
    fields_as_announced,
    identity_of_configuration,
    needs_key,
    round_trip_of_bytes,
    siblings,
    sound_traits,
)
from qcomp.testing.inputs import LONGEST_BUCKET, sizes, vector
from qcomp.testing.key_laws import draws_are_independent, key_names_the_draws, no_key_repeats
from qcomp.testing.libraries import Vector, has_dtype, to_numpy
from qcomp.testing.memory_laws import any_layout, nothing_is_shared, pure, results_into_buffers
from qcomp.testing.moment_laws import unbiased, unbiased_at_every_size, unbiased_to_the_last_draw
from qcomp.testing.payload_laws import damaged_payload_is_an_error, payload_size
from qcomp.testing.size_laws import large_vectors
from qcomp.testing.state_laws import (
    independent_of_calls,
    independent_of_the_environment,
    independent_of_threads,
    same_in_another_process,
)
from qcomp.testing.vector_laws import VECTOR_LAWS, extreme_draws
from qcomp.testing.worst_cases import contraction, variance_bound

__all__ = ["FORM_LAWS", "LAWS", "MEAN_LAWS", "STATE_LAWS", "VALUE_LAWS", "VECTOR_LAWS"]


_BESIDE_PADDING = 0.1
"""The loss allowed to a tail whose last element shares a code with padding; losing that element costs more."""


def _sizes(case: Case) -> tuple[int, ...]:
    return sizes(case.compressor.traits.bucket_size)


def same_when_flat(case: Case) -> None:
    """The compressor for a tensor gives the same result for the flattened tensor; means rely on this."""
    for shape in ((), (5,), (4, 3, 2), (0, 3), (3, 1), (1, 40), (16, 8, 3, 3), (64, 100), (2, 2, 1, 3, 2, 5)):
        own = case.compressor.for_shape(shape)
        flat = own.for_shape((math.prod(shape),))
        assert flat == own, (
            f"for_shape({shape}) is {own.spec}; for a vector of its size that becomes {flat.spec}"
        )
        if case.jit:
            continue
        x = vector("gaussian", math.prod(shape), 31)
        tensor, vector_of = case.array(x.reshape(shape)), case.array(x)
        data = [
            to_numpy(own.compress(array, key=Key(seed=1)).data).tobytes() for array in (tensor, vector_of)
        ]
        assert data[0] == data[1], (
            f"a tensor of shape {shape} gives another payload than the flattened tensor"
        )
        whole = case.compressor.compress(tensor, key=Key(seed=1))
        assert whole.compressor == own.spec, (
            f"a tensor of shape {shape} is compressed by {whole.compressor}, not {own.spec}"
        )


def cut_at_buckets(case: Case) -> None:
    """Cutting a vector at a multiple of the bucket size, with the key's bucket continued, changes no value."""
    bucket = case.compressor.traits.bucket_size
    if bucket > LONGEST_BUCKET:
        return
    sizes_and_cuts = {(_sizes(case)[-1], 1)}
    if bucket <= 4096:
        many = max(3, -(-4500 // bucket))
        sizes_and_cuts |= {
            (3 * bucket + 1, 1),
            (3 * bucket + 1, 2),
            (3 * bucket, 2),
            (many * bucket + 3, many // 2),
        }
    for size, cut in sorted(sizes_and_cuts):
        for dtype in case.dtypes:
            for first in (0, 5):
                _require_same_when_cut(case, size, cut, dtype=dtype, first=first)
    for size, *cuts in _more_cuts(bucket):
        _require_same_when_cut(case.plain.on_numpy, size, *cuts)


def _more_cuts(bucket: int) -> Iterator[tuple[int, ...]]:
    """Yield sizes and cuts for further tails, for as many buckets as code may process at once, and a large vector."""
    if bucket <= 4096:
        for tail in sorted({*range(1, 34), bucket // 4, bucket // 2 + 2}):
            if tail < bucket:
                yield bucket + tail, 1
        for count in sorted({8, 16, 32, bucket}):
            if count > 1 and count * bucket <= 1 << 18:
                yield count * bucket, 1
    large = 1 << 20
    size = large + 7 * bucket + bucket // 2 + 3
    yield size, large // (2 * bucket) + 1, size // bucket - 1  # the last piece is as short as in other laws


def _require_same_when_cut(case: Case, size: int, *cuts: int, dtype: str = "float32", first: int = 0) -> None:
    bucket = case.compressor.traits.bucket_size
    x = vector("gaussian", size, 5).astype(dtype)
    key = Key(seed=1, step=1, rank=1, bucket=first)
    whole = case.decoded(x, key)
    for start, stop in pairwise((0, *cuts, -(-size // bucket))):
        part = slice(start * bucket, stop * bucket)
        assert case.decoded(x[part], key.at(bucket=first + start)).tobytes() == whole[part].tobytes(), (
            f"cut after {' and '.join(map(str, cuts))} bucket(s), {size} elements of {dtype} decompress otherwise"
        )


def fields_by_bucket(case: Case) -> None:
    """If `fields_by_bucket` is True, each field of a payload joins the same fields of the payloads of the parts."""
    own = case.plain.on_numpy.compressor
    bucket = own.traits.bucket_size
    if not own.fields_by_bucket or bucket > LONGEST_BUCKET:
        return
    for size, cut in ((bucket + 1, 1), (3 * bucket + 3, 1), (3 * bucket + 3, 2), (4 * bucket, 2)):
        x = vector("gaussian", size, 5)
        pieces = (x, 0), (x[: cut * bucket], 0), (x[cut * bucket :], cut)
        whole, first, second = (own.encode(piece, Key(seed=1, bucket=number)) for piece, number in pieces)
        for name, field in whole.items():
            assert np.concatenate([first[name], second[name]]).tobytes() == np.asarray(field).tobytes(), (
                f"fields_by_bucket is True, but {name!r} of {size} elements does not join {name!r} of the first {cut} "
                f"bucket(s) and {name!r} of the others"
            )


def padding_never_leaks(case: Case) -> None:
    """Padding does not matter: a last bucket that is not full is compressed no worse than full buckets of such values.

    This is checked with equal values, and with positive values far from zero, whose errors grow if padding counts as
    elements.
    """
    for each in case.of_shapes:
        _require_padding_without_effect(each)


def _require_padding_without_effect(case: Case) -> None:
    bucket = case.compressor.traits.bucket_size
    if isinstance(case.plain.compressor, BucketedCompressor):
        for size in (3, min(bucket, 4096) + 1):
            _require_zero_codes(case.plain.compressor, size)
    if bucket < 2 or bucket > 4096:
        return
    case = case.plain
    for family in ("constant", "positive"):
        if not case.takes(vector(family, bucket, 32)):
            continue
        slack = 1e-3 if case.compressor.traits.unbiased else 1e-7  # another law checks the bias
        full = max(_loss(case, vector(family, bucket * copies, 32), calls=4) for copies in (1, 2, 3))
        for size in sorted({1, 3, 5, 7, 9, 12, 17, bucket // 2 + 1, bucket - 1}):
            if size < bucket:
                for before in (0, 2 * bucket):
                    _require_tail_as_good(case, family, size, before, full=full, limit=4 * full + slack)


def _require_tail_as_good(
    case: Case, family: str, size: int, before: int, *, full: float, limit: float
) -> None:
    """Check that a tail, the last bucket if it is not full, loses no more than full buckets do.

    The last elements may share a code with padding, so with them the tail may lose up to `_BESIDE_PADDING`.
    """
    values = vector(family, case.compressor.traits.bucket_size + size, 33)
    x = np.concatenate([*(values[: before // 2] for _ in range(2)), values[:size]])
    beside = min(7, size // 2)

    def losses(calls: int) -> tuple[float, float]:
        whole = _loss(case, x, calls=calls, last=size)
        return whole, _loss(case, x, calls=calls, last=size, but=beside) if whole > limit else 0.0

    lost, but_the_last = losses(4)
    if lost > limit:
        lost, but_the_last = losses(200)
    if lost <= limit or (but_the_last <= limit and lost <= _BESIDE_PADDING):
        return
    decoded = case.decoded(x, Key(seed=34))[x.size - size :]
    worst = int(np.argmax(np.abs(decoded - values[:size])))
    where = "the last ones" if but_the_last <= limit else "all elements"
    raise AssertionError(
        f"a tail of {size} {family} values loses {lost:.3g} of ||v||^2, full buckets of such values {full:.3g}: "
        f"{where} suffer, such as element {worst} of the tail, {values[worst]:.6g}, which becomes "
        f"{decoded[worst]:.6g}. Does padding enter a scale, or is an element lost?"
    )


def _require_zero_codes(compressor: BucketedCompressor, size: int) -> None:
    """Check that the codes behind the last element are zero."""
    bucket = compressor.traits.bucket_size
    codes = np.asarray(compressor.encode(np.ones(size, dtype=np.float32), Key(seed=1))["codes"])
    *_, last = blocks(size, bucket, compressor.length_of)
    packed = codes[-(last.rows * last.length * compressor.bits // 8) :].reshape(last.rows, -1)
    padding = unpack(packed, compressor.bits)[-1, last.filled :]
    assert not np.any(padding), (
        f"behind {size} elements, padding has the codes {np.unique(padding)}; expected 0"
    )


def _loss(case: Case, x: Vector, *, calls: int, last: int | None = None, but: int = 0) -> float:
    """Return the mean of ||C(v) - v||^2 / ||v||^2 over some draws, for all or only for the last elements.

    ``but`` is the number of elements to leave out at the end.
    """
    part = slice(0 if last is None else x.size - last, x.size - but)
    v = x.astype(np.float64)
    lost = []
    for step in range(calls if case.compressor.traits.random else 1):
        decoded = case.decoded(x, Key(seed=34, step=step))
        bad = np.flatnonzero(~np.isfinite(decoded))
        assert not bad.size, f"element {bad[0]} of {x.size}, {x[bad[0]]:.6g}, becomes {decoded[bad[0]]}"
        lost.append(np.sum((decoded - v)[part] ** 2))
    return float(np.mean(lost) / np.sum(v[part] ** 2))


def zero_gives_zero(case: Case) -> None:
    """Zeros of either sign, and magnitudes below 2^-126, decompress to zeros, in every dtype."""
    for size in (*_sizes(case), 5000):
        for dtype in case.dtypes:
            for zero in (0.0, -0.0):
                decoded = case.decoded(np.full(size, zero, dtype=dtype), Key(seed=1, step=size))
                assert not np.any(decoded), f"{size} zeros of {dtype} decompress to something else"
        if not case.compressor.traits.lossless:
            small = case.compress(vector("subnormal", size, 7).clip(-(2.0**-127), 2.0**-127)).decoded
            assert not np.any(small), f"{size} subnormals decompress to something else than zeros"


def huge_values(case: Case) -> None:
    """Huge finite values give a finite result or the documented error."""
    bucket = min(case.compressor.traits.bucket_size, 1 << 13)
    for scale in (
        2.0**62,
        2.0**64,
        2.0**99,
        float(np.nextafter(np.float32(2.0**100), np.float32(0))),
        2.0**126,
        3.4e38,
    ):
        for size in (1, 9, bucket, bucket + 1):
            index = np.arange(size)
            for dtype in case.dtypes:
                for pattern in (
                    np.where(index % 2, -1, 1),
                    np.ones(size),
                    np.where(index == size - 1, 1, 1e-3),
                ):
                    x = (pattern * scale).astype(dtype)
                    try:
                        decoded = case.decoded(x, Key(seed=1))
                    except NonFiniteError:
                        continue
                    if not case.jit:
                        assert np.all(np.isfinite(decoded)), (
                            f"{size} values of {scale:.3g} in {dtype} decompress to infinity or NaN"
                        )


def non_finite_is_an_error(case: Case) -> None:
    """One infinity or NaN anywhere, in every dtype, also in the residual, raises NonFiniteError."""
    if case.jit:
        return  # traced values cannot be checked
    bucket = min(case.compressor.traits.bucket_size, 5000)
    for dtype in ("float32", "float64", "float16", "bfloat16"):
        if not has_dtype(case.xp, dtype):
            continue
        for size in (1, 23, bucket + 9, 5003):
            positions = (
                range(size)
                if size < 24
                else np.unique([0, 1, 7, size // 2, *np.linspace(0, size - 1, 19)]).astype(int)
            )
            for number, position in enumerate(positions):
                bad = (np.nan, np.inf, -np.inf, -np.nan)[number % 4]
                _require_refused(case, dtype, size, int(position), bad)
        for bad in (np.nan, np.inf, -np.inf):
            _require_refused(case, dtype, bucket + 9, bucket + 3, bad)
        _require_refused(case, dtype, (1 << 17) + 11, (1 << 16) + 21, np.nan)  # no multiple of a stride


def _require_refused(case: Case, dtype: str, size: int, position: int, bad: float) -> None:
    x = vector("gaussian", size, 8)
    x[position] = bad
    array, compute = case.array(x, dtype), "float64" if dtype == "float64" else "float32"
    fine = case.array(vector("gaussian", size, 8), dtype)
    zeros = case.array(np.zeros(size, dtype=np.float32), compute)
    calls: dict[str, Callable[[], object]] = {
        "compressed": lambda: case.compressor.compress(array, key=Key(seed=1)),
        "compressed with feedback": lambda: feedback.compensated(
            case.compressor, array, zeros, key=Key(seed=1)
        ),
        "taken in a residual": lambda: feedback.compensated(
            case.compressor, fine, case.array(x, compute), key=Key(seed=1)
        ),
    }
    for what, call in calls.items():
        try:
            call()
        except NonFiniteError:
            continue
        raise AssertionError(f"{bad} at {position} of {size} elements of {dtype} was {what} without an error")


def foreign_payload_is_an_error(case: Case) -> None:
    """A payload of another size, configuration or compressor, or with other bytes, raises PayloadError."""
    bucket = min(case.compressor.traits.bucket_size, 5000)
    for size in (9, bucket + 3):
        x = case.array(vector("gaussian", size, 9))
        payload = case.payload(vector("gaussian", size, 9))
        for what, bad, like in _foreign(case, payload, x):
            for how, call in (
                ("decompressed", lambda p, a: case.compressor.decompress(p, like=a)),
                ("added", case.compressor.add),
            ):
                try:
                    call(bad, like)
                except PayloadError:
                    continue
                raise AssertionError(f"a payload {what} was {how} without an error")


def _foreign(case: Case, payload: Payload, x: Any) -> Iterator[tuple[str, Payload, Any]]:
    size = payload.size
    for other in (size - 1, size + 1, size + 7, 2 * size, 1):
        yield f"of {size} elements, for {other},", payload, case.array(vector("gaussian", other, 9))
    yield "of another compressor", replace(payload, compressor="other"), x
    for sibling in siblings(case.compressor):
        yield f"of {sibling.spec}", replace(payload, compressor=sibling.spec), x
    data = to_numpy(payload.data)
    spec = case.compressor.payload_spec(size)
    for count in (-8, -4, -1, 1, 2, 3, 4, 8, 16, spec.nbytes):
        length = len(data) + count
        if 0 <= length != len(data) and not spec.admits(length):
            yield (
                f"with {abs(count)} bytes {'more' if count > 0 else 'less'}",
                replace(payload, data=case.array(np.resize(data, length))),
                x,
            )


Law = Callable[[Case], None]

FORM_LAWS: tuple[Law, ...] = (
    sound_traits,
    fields_as_announced,
    payload_size,
    shapes_and_dtypes,
    needs_key,
    identity_of_configuration,
    round_trip_of_bytes,
)
"""Laws about what a compressor announces. All other laws rely on them, and run only if they hold."""

STATE_LAWS: tuple[Law, ...] = (
    independent_of_calls,
    independent_of_threads,
    independent_of_the_environment,
    pure,
    any_layout,
    nothing_is_shared,
    results_into_buffers,
    same_in_another_process,
)
"""Laws about dependencies of results and side effects of calls. Laws that compare results rely on these."""

VALUE_LAWS: tuple[Law, ...] = (
    one_way,
    decoded_in_another_dtype,
    double_precision,
    half_precision,
    same_when_flat,
    key_names_the_draws,
    cut_at_buckets,
    fields_by_bucket,
    padding_never_leaks,
    zero_gives_zero,
    extreme_draws,
    huge_values,
    non_finite_is_an_error,
    foreign_payload_is_an_error,
    damaged_payload_is_an_error,
)
"""Laws about values, keys and payloads."""

MEAN_LAWS: tuple[Law, ...] = (
    no_key_repeats,
    draws_are_independent,
    contraction,
    variance_bound,
    large_vectors,
    unbiased_to_the_last_draw,
    unbiased_at_every_size,
    unbiased,
)
"""Laws about averages over draws, and about the worst vectors. They rely on all other laws, and take longest."""

LAWS: tuple[Law, ...] = (*FORM_LAWS, *STATE_LAWS, *VALUE_LAWS, *MEAN_LAWS)
"""All laws about a compressor."""
