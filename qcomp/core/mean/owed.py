"""`owed`: what a rank must add to its next values when it changes to a new mean, so that no residual is lost."""

import math
from collections.abc import Sequence

from qcomp.core.mean.chunks import Chunk
from qcomp.core.mean.compressed_mean import CompressedMean, MeanState
from qcomp.core.mean.layout import Residuals
from qcomp.core.mean.state import zeros_for
from qcomp.core.mean.topologies.registry import AUTO
from qcomp.core.numeric.arrays import Array, concat

_WORKER, _SERVER = "worker_residual", "server_residual"


def require_residuals(mean: CompressedMean) -> None:
    """Raise ValueError unless states of this mean hold residuals, from which `owed` is computed."""
    if mean.kinds[0] != _WORKER or mean.owned_kinds:
        raise ValueError(
            f"a method is {mean!r}, whose state holds no residuals; expected a qcomp.CompressedMean or PowerSGDMean"
        )


def owed(mean: CompressedMean, state: MeanState) -> list[Array]:
    """Return for each tensor, flat, what this rank must add to its next values so that no residual is lost.

    Let e_i be the residuals of workers, and e_s those of servers. By the sum identity of `CompressedMean`, the sum of
    all means so far is too small by (mean_i e_i + e_s). So with N ranks the result is e_i, plus N e_s where this rank
    is the server; with residuals of K nodes instead of ranks, N / K e_i replaces e_i. The list is empty if there are no
    residuals.
    """
    if not state.worker and not state.server:
        return []
    mean = mean.within(state.topology) if mean.topology == AUTO else mean
    ranges = _ranges(mean, state, state.rank)
    sizes = [math.prod(shape) for shape in state.shapes]
    like = (state.worker or state.server)[0]
    totals = [like[:0]] * len(sizes)
    weight = state.size / _workers(mean, state, ranges, sizes)
    kinds = [(ranges.worker, state.worker, weight)]
    if mean.kinds[1] == _SERVER:
        kinds.append((ranges.server, state.server, float(state.size)))
    for segments, residuals, factor in kinds:
        for segment, residual in zip(segments, residuals, strict=True):
            if not residual.shape[0]:
                continue
            number, size = segment.tensor, sizes[segment.tensor]
            before = zeros_for(residual, segment.start)
            after = zeros_for(residual, size - segment.start - residual.shape[0])
            share = concat([before, residual if factor == 1 else factor * residual, after])
            totals[number] = totals[number] + share if totals[number].shape[0] else share
    return [
        total if total.shape[0] else zeros_for(like, size) for total, size in zip(totals, sizes, strict=True)
    ]


def _ranges(mean: CompressedMean, state: MeanState, rank: int) -> Residuals:
    return mean.layout(state.shapes, rank=rank, size=state.size, nodes=state.nodes).residuals


def _workers(mean: CompressedMean, state: MeanState, own: Residuals, sizes: Sequence[int]) -> int:
    """Return how many ranks keep a residual for an element, including servers that are not workers for the element."""
    all_are_workers = _covered(own.worker) == sum(sizes) and not mean.resolved.wants_nodes
    if mean.kinds[1] != _SERVER or all_are_workers:
        return state.size  # the layouts of the other ranks are not needed
    ranges = [own if rank == state.rank else _ranges(mean, state, rank) for rank in range(state.size)]
    served = sum(_covered(each.server) - _overlap(each.server, each.worker) for each in ranges)
    lossy = {segment.tensor for each in ranges for kind in each for segment in kind if segment.size}
    elements = sum(sizes[number] for number in lossy)
    return (
        round((sum(_covered(each.worker) for each in ranges) + served) / elements) if elements else state.size
    )


def _covered(chunk: Chunk) -> int:
    return sum(segment.size for segment in chunk)


def _overlap(chunk: Chunk, others: Chunk) -> int:
    """Return the number of elements that are in both chunks."""
    return sum(
        max(0, min(a.stop, b.stop) - max(a.start, b.start))
        for a in chunk
        for b in others
        if a.tensor == b.tensor
    )
