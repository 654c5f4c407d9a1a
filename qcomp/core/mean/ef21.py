"""`EF21Mean`: ranks send compressed changes of their vectors, and add up all changes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import MappingProxyType
from typing import ClassVar, Literal

from qcomp.core.mean.chunks import Chunks
from qcomp.core.mean.codec import Codec, Verdicts
from qcomp.core.mean.compressed_mean import CompressedMean
from qcomp.core.mean.costs import Link
from qcomp.core.mean.layout import Layout, Operands, Residuals
from qcomp.core.mean.stages import AllGather, Stages
from qcomp.core.mean.topologies.all_gather import GatherAll
from qcomp.core.mean.topologies.base import Averaged, Call, Topology
from qcomp.core.mean.topologies.choice import ETHERNET
from qcomp.core.numeric.arrays import Array, flush, write_into
from qcomp.core.primitives import empty_like


@dataclass(frozen=True)
class EF21Mean(CompressedMean):
    """The mean over all ranks, tracked by EF21: used like `CompressedMean`, for vectors that change slowly.

    Every rank has an estimate g_i of its own vector x_i, and all know the mean g of the estimates. In each step rank i
    sends c_i = C(x_i - g_i) and updates g_i' = g_i + c_i; all ranks return g' = g + mean_i c_i. If the vectors
    converge, the changes vanish and g becomes exact, whereas the residuals of error feedback would keep fluctuating.

    Parameters
    ----------
    compressor : Compressor or sequence of Compressor
        One compressor for all tensors, or one for each. Each must be a contraction, such as `TopK`, `ScaledSign` with
        scale "l1", or `Scaled`.

    Notes
    -----
    Estimates start at 0, so after one step they are C(x_i). For a contraction with delta and constant vectors,
    |x_i - g_i'|^2 <= (1 - delta) |x_i - g_i|^2; top-k of d elements is exact after ceil(d / k) steps. All ranks decode
    the same bytes and add in rank order, so they hold the same g bit for bit. The additions to g and to the estimates
    are rounded separately: after T steps g differs from the mean of the estimates by up to about T roundings of the
    largest values (each 6e-8 of the value in float32). This error stays. If it matters, use float64, or make a new
    state.

    Every rank sends its payload to every other, (N - 1) * b bytes. There is no server, because ranks would not know
    what a server's compression had lost. A state holds g_i as ``worker`` and g as ``server``. Source: Richtarik,
    Sokolov and Fatkhullin, NeurIPS 2021, algorithm 2.

    Examples
    --------
    >>> import numpy as np, qcomp
    >>> mean = qcomp.EF21Mean(qcomp.TopK(k=1, bucket_size=8))
    >>> def rank_main(comm):
    ...     x = np.asarray([1.0, 4.0, 2.0 + comm.rank])
    ...     state = mean.init(x, comm)
    ...     for _ in range(3):
    ...         g, state = mean(x, state, comm)
    ...     return g.tolist()
    >>> qcomp.comm.run_local(2, rank_main)
    [[1.0, 4.0, 2.5], [1.0, 4.0, 2.5]]
    """

    kinds: ClassVar[tuple[str, str]] = ("estimate", "mean_estimate")
    tracked_kinds: ClassVar[Mapping[str, str]] = MappingProxyType({kinds[0]: kinds[1]})

    topology: Literal["all_gather"] = field(default="all_gather", init=False)
    feedback: bool = field(default=False, init=False)
    link: Link = field(default=ETHERNET, init=False)
    divisor: Literal["ranks"] = field(default="ranks", init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        for compressor in self.compressors:
            traits = compressor.traits
            below_one = traits.omega is not None and traits.omega < 1
            if not (traits.lossless or traits.delta is not None or below_one):
                raise ValueError(
                    f"compressor is {compressor.spec}, which promises no contraction; expected a compressor that "
                    "promises one, such as qcomp.TopK, or qcomp.Scaled(...) around an unbiased compressor"
                )

    @cached_property
    def keeps_residuals(self) -> bool:
        """Whether the state holds estimates: False if the compressor is exact."""
        return not self.lossless

    @cached_property
    def resolved(self) -> Topology:
        """The topology: all-gather of changes."""
        return super().resolved if self.lossless else _TRACKING


class _Tracking(GatherAll):
    """All-gather of changes: ``worker`` holds this rank's estimates, ``server`` the mean of all estimates."""

    blends = False

    def lay_out(self, operands: Operands, chunks: Chunks | None = None) -> Layout:
        """Lay out all tensors as one chunk, and estimates of both kinds as whole tensors."""
        layout = super().lay_out(operands, chunks)
        return replace(layout, residuals=Residuals(operands.whole, operands.whole))

    def stages(self, call: Call) -> Stages[Averaged]:
        """Send this rank's changes to all ranks, and add all changes to the estimates."""
        layout = call.layout
        changes = [flush(flush(x) - g) for x, g in zip(call.values, call.worker, strict=True)]
        codec, verdicts = Codec(changes), Verdicts(at_once=layout.operands.variable_length)
        (whole,) = layout.frames
        sent = codec.encode(layout.frames, changes, (), call.key.at(hop=0), donate=False)
        arrived = yield AllGather(sent.messages[0], (whole.nbytes,) * layout.world)
        opened = codec.open(arrived, (whole,) * layout.world, verdicts, sent.error)
        unread = verdicts.require_accepted(sent.error)
        own = codec.decode(opened[layout.rank])
        worker, server = list(call.worker), list(call.server)
        for segment, change, mean in zip(whole.chunk, own, codec.average(opened), strict=True):
            worker[segment.tensor] = flush(worker[segment.tensor] + change)
            server[segment.tensor] = flush(server[segment.tensor] + mean)
        new_server = _put(server, call.into.server)
        # Copies, so that callers may modify the result.
        copies = call.into.means or [empty_like(g) for g in server]
        return Averaged(list(_put(server, copies)), _put(worker, call.into.worker), new_server, unread)


_TRACKING = _Tracking()


def _put(values: Sequence[Array], places: Sequence[Array | None]) -> tuple[Array, ...]:
    """Return values, each written into its place unless that is None."""
    pairs = zip(values, places or [None] * len(values), strict=True)
    return tuple(x if place is None else write_into(place, x) for x, place in pairs)
