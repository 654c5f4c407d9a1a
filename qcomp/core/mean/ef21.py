"""EF21: ranks send how their vectors have changed, and add up what was sent."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from qcomp.core import primitives
from qcomp.core.mean.chunks import Segment
from qcomp.core.mean.codec import SegmentCodec
from qcomp.core.mean.compressed_mean import CompressedMean, MeanState, Worker
from qcomp.core.mean.costs import Link
from qcomp.core.mean.stages import AllGather, Stages
from qcomp.core.mean.topologies.choice import ETHERNET
from qcomp.core.numeric.arrays import Array, empty_like, flush, write_into

__all__ = ["EF21Mean"]


@dataclass(frozen=True)
class EF21Mean(CompressedMean):
    """The mean over all ranks, tracked by EF21: used like `CompressedMean`, for vectors that change slowly.

    Every rank has an estimate g_i of its own vector x_i, and all know the mean g of the estimates. In a step rank i
    sends c_i = C(x_i - g_i), then g_i' = g_i + c_i and g' = g + mean_i c_i, which is the answer. Of vectors that
    converge, nothing remains to be sent in the end, and g is exact: feedback would go on to stir up what it owes.

    Parameters
    ----------
    compressor : Compressor or sequence of Compressor
        Of all tensors, or one for each; a contraction, such as `TopK`, `ScaledSign` with scale "l1", or `Scaled`.

    Notes
    -----
    Estimates are 0 at first, so that the first ones are C(x_i). With a contraction of delta, vectors that stay are
    found: |x_i - g_i'|^2 <= (1 - delta) |x_i - g_i|^2, with top-k of d elements in ceil(d / k) steps. All ranks decode
    the same bytes and add in rank order, so they hold the same g bit for bit. Each addition is rounded, and g
    and the estimates each for themselves: after T steps g is off their mean by up to about T roundings of the largest
    values, in float32 6e-8 of these each, and that stays. Where it matters, use float64, or start again.

    Every rank sends its payload to every other, (N - 1) * b bytes; a server that compresses again would
    keep all ranks from knowing the same g. A state holds g_i as ``worker`` and g as ``server``. Source: Richtarik,
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

    topology: Literal["all_gather"] = field(default="all_gather", init=False)
    feedback: bool = field(default=False, init=False)
    link: Link = field(default=ETHERNET, init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        for compressor in self.compressors:
            traits = compressor.traits
            below_one = traits.omega is not None and traits.omega < 1
            if not (traits.lossless or traits.delta is not None or below_one):
                raise ValueError(
                    f"compressor is {compressor.spec}, which promises no contraction; expected one that does, such as "
                    "qcomp.TopK, or qcomp.Scaled(...) around an unbiased one"
                )

    def parts(
        self,
        shapes: Sequence[tuple[int, ...]],
        *,
        rank: int,
        size: int,
        nodes: tuple[int, ...] = (),
    ) -> tuple[tuple[Segment, ...], tuple[Segment, ...]]:
        """Return what the estimates and their means are of: whole tensors."""
        whole, _ = super().parts(shapes, rank=rank, size=size, nodes=nodes)
        return whole, whole

    @property
    def _keeps_residuals(self) -> bool:
        return not self.lossless

    def _plan(
        self, flat: list[Array], state: MeanState, how: Worker
    ) -> Stages[tuple[list[Array], MeanState]]:
        if self.lossless:
            return (yield from super()._plan(flat, state, how))
        if how.blends:
            pairs = zip(flat, how.blends, strict=True)
            flat = [primitives.momentum(b.m, g, b.beta1, b.scale) for g, b in pairs]
        changes = [flush(flush(x) - g) for x, g in zip(flat, state.worker, strict=True)]
        codec = SegmentCodec(how.compressors, changes)
        (whole,) = how.cut_up(flat, 1)
        sent = codec.encode([whole], changes, (), how.key.at(hop=0), donate=False)
        arrived = yield AllGather(sent.messages[0], (codec.message_size(whole),) * state.size)
        payloads = codec.open(arrived, [whole] * state.size, sent.error)
        own = codec.decode(payloads[state.rank], whole, [None] * len(whole))
        worker, server = list(state.worker), list(state.server)
        for segment, change, mean in zip(whole, own, codec.average(payloads, whole), strict=True):
            worker[segment.tensor] = flush(worker[segment.tensor] + change)
            server[segment.tensor] = flush(server[segment.tensor] + mean)
        into = how.into
        new_state = state._replace(worker=_put(worker, into.worker), server=_put(server, into.server))
        # Copies: what the caller does with the answer is no matter of the state.
        copies = into.means or [empty_like(g) for g in server]
        return list(_put(server, copies)), new_state


def _put(values: Sequence[Array], places: Sequence[Array | None]) -> tuple[Array, ...]:
    """Return values in the places that there are for them."""
    pairs = zip(values, places or [None] * len(values), strict=True)
    return tuple(x if place is None else write_into(place, x) for x, place in pairs)
