"""What a step must average, and how: the question that an optimizer puts, and the answer."""

from typing import NamedTuple

from qcomp.core.compressors.identity import Identity
from qcomp.core.kernels import Blend
from qcomp.core.mean.compressed_mean import CompressedMean, MeanState, Terms
from qcomp.core.mean.stages import Stages, fuse, pipeline
from qcomp.core.numeric.arrays import Array
from qcomp.core.numeric.random import Key

__all__ = ["EXACT", "Average", "Means", "Part"]

EXACT = CompressedMean(Identity(), feedback=False)
"""The exact mean, with the same interface as a compressed one."""


class Part(NamedTuple):
    """Tensors that are averaged in the same way."""

    mean: CompressedMean
    tensors: tuple[int, ...]
    """Their numbers among the parameters; numbers after those are of what is averaged besides."""
    values: tuple[Array, ...]
    """What is averaged, or is first blended into momenta. The optimizer's own, and used up by that, without blends."""
    state: MeanState
    key: Key
    blends: tuple[Blend, ...] = ()


class Means(NamedTuple):
    """The answer to an `Average`."""

    values: tuple[Array, ...]
    """The mean of each tensor, in the order of the parameters, then of what else there was; the same on all ranks."""
    exchange: MeanState
    """The residuals after the exchange."""
    own: tuple[Array, ...] = ()
    """What `Average` has as this rank's own values."""
    donate: bool = False
    """Whether `Optimizer.apply` may write over the parameters and the state that it is given."""


class Average(NamedTuple):
    """What a step must average over the ranks, and how: the exact tensors and the compressed ones."""

    parts: tuple[Part, ...]
    exchange: MeanState
    """The residuals, which the compressed part uses; they stay as they are if there is none."""
    own: tuple[Array, ...] = ()
    """This rank's own values, for `Optimizer.apply`; the parts do not use them up, and without parts they stand for the
    means, and nothing is sent."""
    overwrite: bool = False
    """Whether the means may take the place of the values, see `CompressedMean.stages`."""
    of_gradients: bool = False
    """Whether gradients are averaged: a caller may change their means, for instance clip them, before `apply`."""

    def stages(self) -> Stages[Means]:
        """Average all parts side by side; see `CompressedMean.stages`.

        One message a peer and phase. Of large parts one for each round, see `qcomp.core.mean.rounds`.
        """
        if not self.parts:
            return Means(self.own, self.exchange, self.own)
        begun = [
            p.mean.begin(
                p.values,
                p.state,
                Terms(p.key, not (p.blends or self.own or self.overwrite), p.blends, self.overwrite),
            )
            for p in self.parts
        ]
        rounds = [
            fuse([part.rounds[index] for part in begun if index < len(part.rounds)])
            for index in range(max(len(part.rounds) for part in begun))
        ]
        answers = list(map(iter, (yield from pipeline(rounds))))
        values: dict[int, Array] = {}
        exchange = self.exchange
        for part, computation in zip(self.parts, begun, strict=True):
            means, state = computation.finish(
                [next(of_round) for of_round in answers[: len(computation.rounds)]]
            )
            values.update(zip(part.tensors, means, strict=True))
            if part.state is self.exchange:
                exchange = state
        return Means(tuple(values[i] for i in range(len(values))), exchange, self.own)
