"""The whiteners of Muon's matrices: owners make them and send them to all ranks, which convert their residuals."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

from qcomp.core.compressors.cast import Cast
from qcomp.core.mean.compressed_mean import Computation, MeanState, Terms
from qcomp.core.mean.framing import join, joined_size, split
from qcomp.core.mean.owned import Dealt, OwnedMean, Shape
from qcomp.core.mean.stages import AllGather, Stages
from qcomp.core.mean.tensorwise import SeparableMean
from qcomp.core.mean.topologies.base import Averaged
from qcomp.core.numeric.arrays import (
    Array,
    array_namespace,
    bytes_of,
    compute_dtype_name,
    device,
    dtype_name,
    flat,
)
from qcomp.core.numeric.whitening import half_of, unwhitened, whitened, whitener, whole_of
from qcomp.core.optimizers.compression import AveragePart
from qcomp.core.state import OptimizerState

WHITENER = "whitener"
"""The kind of the whiteners in ``state.arrays``: one array per tensor, which is empty if the tensor is no matrix."""

_SENT = Cast("bfloat16")
"""Its rounding changes a whitener slightly, but causes no error, since all ranks hold the same rounded whitener."""


def first_whiteners(params: Sequence[Array], exact: Sequence[bool], mean: OwnedMean) -> tuple[Array, ...]:
    """Return the first whiteners: the identity for each matrix, and an empty array for each other tensor."""
    found = []
    number = itertools.count()
    for p, is_exact in zip(params, exact, strict=True):
        xp = array_namespace(p)
        rows = 0 if is_exact else min(mean.rule.sides(next(number), tuple(p.shape)))
        dtype = getattr(xp, compute_dtype_name(dtype_name(p.dtype)))
        found.append(xp.eye(rows, dtype=dtype, device=device(p)))
    return tuple(found)


def of_matrices(state: OptimizerState) -> tuple[Array, ...]:
    """Return the whiteners of the matrices; empty if the state has none."""
    kept = state.arrays.get(WHITENER, ())
    return tuple([w for w, is_exact in zip(kept, state.exact, strict=False) if not is_exact])


def new_whiteners(state: OptimizerState, mean: OwnedMean) -> AveragePart:
    """Ask for new whiteners: the owner of a matrix makes one from the momentum, and sends it to all ranks.

    In `Means.values`, the new whiteners of all tensors follow the means of the tensors.
    """
    count = len(state.names)
    momenta = state.exchange._replace(worker=())
    return AveragePart(
        _FromOwners(of=mean, exact=state.exact), range(count, 2 * count), state.arrays[WHITENER], momenta
    )


def followed(exchange: MeanState, old: Sequence[Array], new: Sequence[Array], mean: OwnedMean) -> MeanState:
    """Return the state with worker residuals converted from the old whiteners to the new whiteners."""
    shapes = itertools.starmap(mean.rule.sides, enumerate(exchange.shapes))
    worker = [
        whitened(unwhitened(owed, before, shape), after, shape)
        for owed, before, after, shape in zip(exchange.worker, old, new, shapes, strict=True)
    ]
    return exchange._replace(worker=tuple(worker))


@dataclass(frozen=True, kw_only=True)
class _FromOwners(SeparableMean):
    """Instead of a mean, returns new whiteners, which the owners of the matrices send to all ranks."""

    compressor: Cast = _SENT
    feedback: bool = False
    of: OwnedMean
    """The mean of the matrices."""
    exact: tuple[bool, ...]
    """Which tensors have no whitener."""

    def places(self, shapes: Sequence[Shape], size: int) -> tuple[Dealt, ...]:
        """Return the places of the matrices; see `SeparableMean.places`."""
        return self.of.places(shapes, size)

    def numbered(self, places: tuple[Dealt, ...]) -> Self:
        """Return this mean for matrices at these places; see `SeparableMean.numbered`."""
        return replace(self, of=self.of.numbered(places))

    def begin(self, tensors: Sequence[Array], state: MeanState, terms: Terms) -> Computation:  # noqa: ARG002
        """Return the one round of a call; see `CompressedMean.begin`."""

        def finish(results: Sequence[Averaged]) -> tuple[Any, MeanState]:
            (sent,) = results
            return sent.means, state

        return Computation([self._stages(tensors, state)], finish)

    def _stages(self, before: Sequence[Array], state: MeanState) -> Stages[Averaged]:
        """Make the whiteners of the matrices that this rank owns, and send them to all ranks in one message."""
        after, matrices = list(before), [i for i, is_exact in enumerate(self.exact) if not is_exact]
        if not matrices:
            return Averaged(after, (), ())
        layout = self.of.layout(state.shapes, rank=state.rank, size=state.size)
        numbers = [[matrices[segment.tensor] for segment in chunk] for chunk in layout.chunks]
        halves = {i: half_of(before[i]) for i in matrices}
        sizes = [[self._nbytes(halves[i]) for i in of_rank] for of_rank in numbers]
        own = []
        for segment, momentum in zip(layout.residuals.server, state.server, strict=False):
            shape = self.of.rule.sides(segment.tensor, state.shapes[segment.tensor])
            matrix = array_namespace(momentum).reshape(momentum, shape)
            made = whitener(matrix, before[matrices[segment.tensor]])
            own.append(self.compressor.compress(half_of(made)).data)
        message = join(own) if own else bytes_of(flat(before[matrices[0]]))[:0]
        arrived = yield AllGather(message, tuple(map(joined_size, sizes)))
        for of_rank, buffer, lengths in zip(numbers, arrived, sizes, strict=True):
            for i, data in zip(of_rank, split(buffer, lengths), strict=True):
                payload = self.compressor.payload(halves[i], data)
                half = self.compressor.decompress(payload, like=halves[i])
                after[i] = whole_of(half, before[i].shape[0])
        return Averaged(after, (), ())

    def _nbytes(self, x: Array) -> int:
        return self.compressor.payload_spec(math.prod(x.shape)).nbytes
