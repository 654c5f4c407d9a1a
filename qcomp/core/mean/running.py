"""A mean that has been started: its rounds, and what puts their results into the shapes that were asked for."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from qcomp.core import primitives
from qcomp.core.compressor import Compressor
from qcomp.core.kernels import Blend
from qcomp.core.mean.assembly import cut_like, flattened, shaped_like
from qcomp.core.mean.chunks import Cutter, cut
from qcomp.core.mean.lengths import announce_lengths
from qcomp.core.mean.rounds import Kept, Plan, count_rounds, in_rounds
from qcomp.core.mean.stages import Stages
from qcomp.core.mean.topologies.choice import Topology
from qcomp.core.mean.topologies.plans import MeanState, Worker
from qcomp.core.numeric.arrays import Array, array_namespace, concat
from qcomp.core.numeric.random import Key

__all__ = ["Running", "Terms", "run"]


class Terms(NamedTuple):
    """On what terms values are averaged; see `qcomp.CompressedMean.stages`."""

    key: Key | None = None
    donate: bool = False
    blends: Sequence[Blend] = ()
    overwrite: bool = False
    at_once: bool = False
    """Whether there is only one round, for who groups tensors himself."""


class Running(NamedTuple):
    """A mean that has been started."""

    rounds: Sequence[Stages[Any]]
    """Computations in stages that do not depend on each other, see `pipeline`."""
    finish: Callable[[Sequence[Any]], tuple[Any, MeanState]]
    """Returns the means and the new state from the results of the rounds."""


def run(
    tensors: Sequence[Array],
    state: MeanState,
    terms: Terms,
    *,
    topology: Topology,
    compressors: Sequence[Compressor],
    cutter: Cutter,
    plan: Plan,
    kept: Kept,
) -> Running:
    """Start to average tensors.

    Parameters
    ----------
    tensors, state, terms
        What is averaged, which fits together.
    topology, plan
        How the ranks average.
    compressors : sequence of Compressor
        Of each tensor.
    cutter : callable
        Cuts the tensors into chunks.
    kept : callable
        Returns what the residuals of the state are of, see `CompressedMean.parts`.
    """
    lossless = all(c.traits.lossless for c in compressors)
    flat = flattened(tensors)
    # What was converted is a copy, and nobody else's.
    donate = terms.donate or all(t.dtype != f.dtype for t, f in zip(tensors, flat, strict=True))
    targets = [b.m for b in terms.blends] or tensors  # of half-precision gradients, the momenta are float32
    blends = [b._replace(m=array_namespace(b.m).reshape(b.m, (-1,))) for b in terms.blends]
    if blends and (lossless or topology in ("hierarchical", "ring")):
        flat = [primitives.momentum(b.m, g, b.beta1, b.scale) for g, b in zip(flat, blends, strict=True)]
        blends = []
    in_one = terms.at_once or terms.overwrite or topology not in ("two_phase", "all_gather")
    count = 1 if in_one else count_rounds(flat)
    joined = lossless and count == 1
    if joined:
        flat = [concat(flat)]  # nothing depends on the boundaries, and one vector is faster than many
        compressors, cutter = compressors[:1], cut
    key = (terms.key or Key())._replace(rank=state.rank)
    overwrite = terms.overwrite and not donate
    how = Worker(compressors, key, donate and not blends, blends, overwrite=overwrite, cut=cutter)
    servers = state.size if topology == "two_phase" else 1
    rounds, join_rounds = in_rounds(count, flat, state, how, plan=plan, servers=servers, kept=kept)
    if any(c.variable_length for c in compressors):
        rounds = [announce_lengths(stages, state.rank) for stages in rounds]

    def finish(results: Sequence[Any]) -> tuple[list[Array], MeanState]:
        means, new_state = join_rounds(results)
        return shaped_like(cut_like(means[0], tensors) if joined else means, targets), new_state

    return Running(rounds, finish)
