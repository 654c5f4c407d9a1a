"""How the tensors of a large mean are cut into groups, so that one is on its way while the next is compressed."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from qcomp.core.arrays import Array, compute_dtype_name, dtype_name, itemsize
from qcomp.core.chunks import Segment, keep
from qcomp.core.kernels import Blend
from qcomp.core.random import Key
from qcomp.core.transport import Stages

if TYPE_CHECKING:
    from qcomp.core.exchange import CompressedMean, MeanState

__all__ = ["GROUP_BYTES", "GroupedMean", "group"]

GROUP_BYTES = 16 << 20
"""The least bytes of values in a group: compressing so many takes much longer than starting an exchange."""

_CUT = ("two_phase", "all_gather")
"""The topologies in which tensors are averaged independently of each other."""

Chunk = tuple[Segment, ...]


def group(sizes: Sequence[int], positions: Sequence[int], least: int) -> list[tuple[int, ...]]:
    """Cut tensors into groups of at least so many bytes; a tensor is never cut, and each group is in order.

    Parameters
    ----------
    sizes : sequence of int
        The bytes of each tensor.
    positions : sequence of int
        Where each tensor comes within the chunk of the rank that serves it: groups then have a part of every chunk, so
        that all ranks send and serve in each.
    least : int
        Of less there is one group.

    Examples
    --------
    >>> group([4, 4, 4, 4, 1], [0, 4, 0, 4, 8], 8)
    [(0, 2), (1, 3, 4)]
    """
    groups: list[list[int]] = [[]]
    filled = 0
    for tensor in sorted(range(len(sizes)), key=positions.__getitem__):
        if filled >= least:
            groups.append([])
            filled = 0
        groups[-1].append(tensor)
        filled += sizes[tensor]
    if filled < least and len(groups) > 1:
        rest = groups.pop()
        groups[-1] += rest
    return [tuple(sorted(members)) for members in groups]


class _Share(NamedTuple):
    """Some of the tensors of a mean, with what belongs to them."""

    tensors: tuple[int, ...]
    served: tuple[int, ...]
    """Numbers of the server residuals."""
    chunks: tuple[Chunk, ...]
    """Their segments in the chunk of each rank, if that is of the whole mean."""


class GroupedMean:
    """A compressed mean as one computation, or as several of disjoint tensors.

    Segments, payloads, draws and residuals are those of the whole mean: only which payloads share a message differs.

    Parameters
    ----------
    mean : CompressedMean
    values : sequence of arrays
    state : MeanState
    key, donate, blends, overwrite
        See `CompressedMean.stages`.
    """

    def __init__(
        self,
        mean: "CompressedMean",
        values: Sequence[Array],
        state: "MeanState",
        *,
        key: Key | None,
        donate: bool,
        blends: Sequence[Blend] = (),
        overwrite: bool = False,
    ) -> None:
        self.mean = mean
        self.values = values
        self.state = state
        self.how: dict[str, Any] = {"key": key, "donate": donate, "overwrite": overwrite}
        self.blends = blends
        self.shares = self._cut()

    def computations(self) -> "list[Stages[tuple[list[Array], MeanState]]]":
        """Return the mean of each group, as stages."""
        if len(self.shares) == 1:
            return [self.mean.stages(self.values, self.state, blends=self.blends, **self.how)]
        return [self._part(share) for share in self.shares]

    def joined(self, results: "Sequence[tuple[list[Array], MeanState]]") -> "tuple[list[Array], MeanState]":
        """Return the means of all tensors and the new state, from what the computations returned."""
        if len(self.shares) == 1:
            return results[0]
        means: dict[int, Array] = {}
        worker, server = list(self.state.worker), list(self.state.server)
        for share, (of_group, state) in zip(self.shares, results, strict=True):
            means.update(zip(share.tensors, of_group, strict=True))
            for old, new, numbers in (
                (worker, state.worker, share.tensors),
                (server, state.server, share.served),
            ):
                for number, residual in zip(numbers, new, strict=False):  # none without feedback
                    old[number] = residual
        ordered = [means[tensor] for tensor in range(len(self.values))]
        return ordered, self.state._replace(worker=tuple(worker), server=tuple(server))

    def _part(self, share: _Share) -> "Stages[tuple[list[Array], MeanState]]":
        mean, state = self.mean, self.state
        if isinstance(mean.compressor, tuple):
            mean = replace(mean, compressor=_chosen(mean.compressor, share.tensors))
        state = state._replace(
            worker=_chosen(state.worker, share.tensors),
            server=_chosen(state.server, share.served),
            shapes=_chosen(state.shapes, share.tensors),
        )
        return mean.stages(
            _chosen(self.values, share.tensors),
            state,
            blends=_chosen(self.blends, share.tensors),
            chunks=share.chunks,
            **self.how,
        )

    def _cut(self) -> list[_Share]:
        """Return the groups; one, as for what does not fit together, which `CompressedMean.stages` refuses."""
        mean, state, whole = self.mean, self.state, [_Share((), (), ())]
        shapes = [tuple(x.shape) for x in self.values]
        dtypes = {compute_dtype_name(dtype_name(x.dtype)) for x in self.values}
        entries = (mean.compressor if isinstance(mean.compressor, tuple) else (), state.shapes, self.blends)
        if (
            not mean.grouped
            or mean.topology not in _CUT
            or len(dtypes) != 1
            or any(len(of_each) not in (0, len(shapes)) for of_each in entries)
        ):
            return whole
        width = itemsize(dtypes.pop())
        sizes = [width * math.prod(shape) for shape in shapes]
        if sum(sizes) < 2 * GROUP_BYTES:
            return whole
        if mean.lossless:  # nothing depends on where chunks begin: each group has its own
            return [_Share(tensors, (), ()) for tensors in group(sizes, range(len(sizes)), GROUP_BYTES)]
        count = state.size if mean.topology == "two_phase" else 1
        chunks = mean.segments_of_shapes(shapes, count)
        _, kept = mean.parts(shapes, rank=state.rank, size=state.size, nodes=state.nodes)
        shares = []
        for tensors in group(sizes, _positions(chunks, len(shapes)), GROUP_BYTES):
            served = tuple(number for number, part in enumerate(kept) if part.tensor in tensors)
            shares.append(_Share(tensors, served, keep(chunks, tensors)))
        return shares


def _positions(chunks: Sequence[Chunk], count: int) -> list[int]:
    """Return how many elements of its chunk come before each tensor; empty tensors come first."""
    positions = [0] * count
    for chunk in reversed(chunks):  # a tensor in several chunks has its place in the first
        before = 0
        for segment in chunk:
            positions[segment.tensor] = before
            before += segment.size
    return positions


def _chosen(items: Sequence[Any], numbers: Sequence[int]) -> tuple[Any, ...]:
    """Return some of the items; none of none."""
    return tuple(items[number] for number in numbers) if items else ()
