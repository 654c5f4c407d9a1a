"""Checks whether the first compressed step moves elements whose gradients are 0 on all ranks."""

import math
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

from qcomp.core.mean.compressed_mean import CompressedMean
from qcomp.core.mean.stages import AllGather, Stages
from qcomp.core.numeric.arrays import (
    Array,
    array_namespace,
    bytes_of,
    concat,
    flat,
    from_host_bytes,
    host_bytes,
)
from qcomp.core.reporting import warn_caller
from qcomp.core.state import OptimizerState

_SAMPLE = 4096
"""About how many elements of each tensor are checked, besides all slices along the first and the last axis."""
_SLICE = 8
"""The fewest elements of a slice that is checked: shorter slices are often 0 by chance in a small batch."""
_SHARE = 1 / 8
"""Up to this share of a sample, gradients may be 0 by chance; above it, they may belong to pruned weights."""
_DIGITS = bytes.maketrans(b"\0\1", b"01")


class Looked(NamedTuple):
    """One bit each for slices along the first axis, slices along the last axis, and sampled elements: 1 if not 0."""

    counts: tuple[int, int, int]
    bits: int


def keeps_zeros(mean: CompressedMean) -> bool:
    """Return whether all compressors of a mean promise that an element stays 0 if it is 0 on all ranks."""
    return all(c.traits.keeps_zero for c in mean.sends)


def look_at(tensors: Sequence[Array], exact: Sequence[bool], *, sample: bool) -> list[Looked]:
    """Return what is not 0 in each compressed tensor: slices and, with ``sample``, some of the elements."""
    return [_look_at(x, sample=sample) for x, is_exact in zip(tensors, exact, strict=False) if not is_exact]


def _look_at(x: Array, *, sample: bool) -> Looked:
    xp, size, axes = array_namespace(x), math.prod(x.shape), range(len(x.shape))
    is_nonzero = x != 0
    parts = [
        xp.any(is_nonzero, axis=tuple(a for a in axes if a != axis))
        if len(axes) > 1 and size >= _SLICE * x.shape[axis]
        else flat(is_nonzero)[:0]
        for axis in (0, len(axes) - 1)
    ]
    # An odd stride, so that the sample does not stay in one column.
    parts.append(flat(is_nonzero)[:: size // _SAMPLE | 1] if sample else flat(is_nonzero)[:0])
    flags = host_bytes(bytes_of(xp.astype(concat(parts), xp.uint8)))
    first, last, of_sample = (math.prod(part.shape) for part in parts)
    return Looked((first, last, of_sample), int(flags.translate(_DIGITS) or b"0", 2))


def moved_zeros(
    gradients: Sequence[Looked], means: Sequence[Looked], state: OptimizerState, like: Array
) -> Stages[list[str]]:
    """Return texts about tensors that moved in places where all ranks' gradients are 0; each rank sends its bits."""
    moved, total = 0, 0
    for gradient, mean in zip(gradients, means, strict=True):
        moved = moved << sum(mean.counts) | mean.bits & ~gradient.bits
        total += sum(mean.counts)
    if state.size > 1 and total:
        length = (total + 7) // 8
        message = from_host_bytes(moved.to_bytes(length, "little"), like)
        for arrived in (yield AllGather(message, (length,) * state.size)):
            moved &= int.from_bytes(host_bytes(arrived), "little")
    digits = format(moved, f"0{total}b")
    names = [name for name, is_exact in zip(state.names, state.exact, strict=True) if not is_exact]
    found, start = [], 0
    for name, mean in zip(names, means, strict=True):
        ends = [start + n for n in accumulate(mean.counts)]
        pairs = zip((start, *ends), ends, strict=False)
        first, last, of_sample = (digits.count("1", begin, end) for begin, end in pairs)
        start = ends[-1]
        whole = [
            f"{n} of {count} slices along the {axis} axis"
            for n, count, axis in zip((first, last), mean.counts, ("first", "last"), strict=False)
            if n
        ]
        if whole or of_sample > _SHARE * mean.counts[2]:
            share = [f"about {of_sample / mean.counts[2]:.0%} of its elements"] if of_sample else []
            found.append(f"{name!r} ({', '.join(whole + share)})")
    return found


def warn_of_moved_zeros(found: Sequence[str], mean: CompressedMean) -> None:
    """Warn of what `moved_zeros` has found, if anything."""
    if found:
        specs = sorted({c.spec for c in mean.sends if not c.traits.keeps_zero})
        more = f" and {len(found) - 3} more" if len(found) > 3 else ""
        warn_caller(
            f"elements whose gradients are 0 on all ranks still move, because {' and '.join(specs)} cannot "
            f"encode 0: {'; '.join(found[:3])}{more}. If they are padding or pruned, use a compressor that keeps "
            "zeros, such as qcomp.QSGD(), or exclude these tensors from compression by exact=, in Muon by others="
        )
