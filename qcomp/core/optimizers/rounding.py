"""Stochastic rounding of new parameters in bfloat16, which keeps on average what rounding to nearest loses.

A float32 number becomes one of the two bfloat16 numbers around it: a draw of 16 bits is added to its bits, and the
lower half is dropped. So of the 2^16 draws, as many round away from 0 as its lower half says, and no value that
bfloat16 represents changes.

Sixteen elements share a draw, each shifted by another sixteenth of its range: every element's draw is uniform, and
random numbers cost a sixteenth. All ranks draw the same.
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

__all__ = ["rounded", "widened"]

_SHARE = 16
"""How many elements share a draw."""
_LANE = 8
"""The draws of one block of random numbers."""
_RUN = _SHARE * _LANE
_HOP = 0xFFFFFFFF
"""The hop in the keys of these draws, which no exchange reaches."""


def widened(params: Sequence[Array]) -> list[Array]:
    """Return the parameters, with those in bfloat16 converted to float32."""
    return [to_compute_dtype(p) if _is_rounded(p) else p for p in params]


def rounded(new: list[Array], like: Sequence[Array], key: Key, *, donate: bool = False) -> list[Array]:
    """Return new values of parameters in the dtypes of the old ones.

    Parameters
    ----------
    new : list of arrays
        The values that a step has computed from `widened` parameters. The list is emptied, so that each array is freed
        once it is rounded.
    like : sequence of arrays
        The parameters before they were widened.
    key : Key
        The key of the step.
    donate : bool
        Whether the results may take the memory of ``like``.
    """
    chosen = [i for i, p in enumerate(like) if _is_rounded(p)]
    runs = [-(-math.prod(like[i].shape) // _RUN) for i in chosen]
    values = list(new)
    new.clear()
    if not sum(runs):
        return values
    # All at once: a device takes as long to start a computation for a small tensor as for all.
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
    """Return float32 values in bfloat16, with the draws of each run of elements, float32 of shape (runs, _LANE)."""
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
