"""`rounded`: rounds new parameters to bfloat16 at random, which keeps on average what rounding to nearest loses.

A float32 number becomes one of the two bfloat16 numbers around it: a draw of 16 bits is added to its bits, and the
lower half of the sum is dropped. If the lower half of the number is k, then k of the 2^16 possible draws round away
from 0. So values that bfloat16 represents do not change.

Sixteen elements share a draw. For each of them, the draw is shifted by a different number of sixteenths of its range.
So every element's draw is uniform, and random numbers cost a sixteenth. All ranks draw the same random numbers.
"""

import math
from collections.abc import Sequence

from qcomp.core.numeric.arrays import (
    Array,
    array_namespace,
    bitcast,
    device,
    dtype_name,
    flat,
    is_mutable,
    to_compute_dtype,
    write_into,
)
from qcomp.core.numeric.buckets import Block
from qcomp.core.numeric.random import SHARED_RANK, Key, draws16

_SHARE = 16
"""How many elements share a draw."""
_LANE = 8
"""The number of draws in one block of random numbers."""
_RUN = _SHARE * _LANE
_HOP = 0xFFFFFFFF
"""The hop in the keys of these draws; no exchange has so many hops."""


def widened(params: Sequence[Array]) -> list[Array]:
    """Return the parameters, converted to float32 if they are in bfloat16."""
    return [to_compute_dtype(p) if _is_rounded(p) else p for p in params]


def rounded(new: list[Array], like: Sequence[Array], key: Key, *, donate: bool = False) -> list[Array]:
    """Return new values of parameters, rounded to the dtypes of the old values.

    Empties the list ``new``, which a step has computed from `widened` parameters, so that each array is freed once it
    is rounded. With ``donate`` the results may take the memory of the old parameters.
    """
    chosen = [i for i, p in enumerate(like) if _is_rounded(p)]
    runs = [-(-math.prod(like[i].shape) // _RUN) for i in chosen]
    values = list(new)
    new.clear()
    if not sum(runs):
        return values
    # All tensors at once: a device takes as long to start a computation for one small tensor as for all.
    draws = draws16(
        key._replace(rank=SHARED_RANK, hop=_HOP),
        Block(0, sum(runs), _LANE, _LANE, 0),
        bucket_size=_LANE,
        like=values[chosen[0]],
    )
    start = 0
    for i, count in zip(chosen, runs, strict=True):
        values[i] = _rounded(values[i], like[i], draws[start : start + count, :])
        start += count
        if donate and is_mutable(like[i]):
            values[i] = write_into(like[i], values[i])
    return values


def _rounded(x: Array, like: Array, draws: Array) -> Array:
    """Round float32 values to bfloat16 by the draws of each run of elements, float32 of shape (runs, _LANE)."""
    xp, values = array_namespace(x), flat(x)
    shifts = xp.arange(_SHARE, dtype=xp.int32, device=device(x)) * ((1 << 16) // _SHARE)
    first = xp.reshape(xp.astype(draws, xp.int32), (-1, 1, _LANE))
    each = xp.reshape((first + xp.reshape(shifts, (1, _SHARE, 1))) & 0xFFFF, (-1,))[: values.shape[0]]
    bits = bitcast(values, xp.int32)
    # A draw plus the bits of NaN may be the bits of a number, and so may the upper half of the bits of NaN.
    quiet = xp.bitwise_or(bits, xp.asarray(0x400000, dtype=xp.int32, device=device(x)))
    upper = xp.where(xp.isnan(values), quiet, bits + each) >> 16
    return xp.reshape(bitcast(xp.astype(upper, xp.int16), like.dtype), like.shape)


def _is_rounded(x: Array) -> bool:
    return dtype_name(x.dtype) == "bfloat16"
