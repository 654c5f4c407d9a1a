"""What a step must average, and how: the question that an optimizer puts, and the answer."""

from typing import NamedTuple

from qcomp.core.arrays import Array
from qcomp.core.compressors.identity import Identity
from qcomp.core.exchange import CompressedMean, MeanState
from qcomp.core.grouping import GroupedMean
from qcomp.core.kernels import Blend
from qcomp.core.random import Key
from qcomp.core.transport import Stages, fuse, pipeline

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

    def stages(self) -> Stages[Means]:
        """Average all parts side by side; see `CompressedMean.stages`.

        One message a peer and phase. Of large parts one for each group of tensors, see `GroupedMean`.
        """
        if not self.parts:
            return Means(self.own, self.exchange, self.own)
        grouped = [
            GroupedMean(
                p.mean,
                p.values,
                p.state,
                key=p.key,
                donate=not (p.blends or self.own or self.overwrite),
                blends=p.blends,
                overwrite=self.overwrite,
            )
            for p in self.parts
        ]
        computations = [means.computations() for means in grouped]
        rounds = [
            fuse([of_part[index] for of_part in computations if index < len(of_part)])
            for index in range(max(map(len, computations)))
        ]
        answers = list(map(iter, (yield from pipeline(rounds))))
        values: dict[int, Array] = {}
        exchange = self.exchange
        for part, means_of, of_part in zip(self.parts, grouped, computations, strict=True):
            means, state = means_of.joined([next(of_round) for of_round in answers[: len(of_part)]])
            values.update(zip(part.tensors, means, strict=True))
            if part.state is self.exchange:
                exchange = state
        return Means(tuple(values[i] for i in range(len(values))), exchange, self.own)
