"""What a step must average, and how: the question that an optimizer puts, and the answer."""

from typing import NamedTuple

from qcomp.core.arrays import Array
from qcomp.core.compressors.identity import Identity
from qcomp.core.exchange import CompressedMean, MeanState
from qcomp.core.kernels import Blend
from qcomp.core.random import Key
from qcomp.core.transport import Stages, fuse

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

    def stages(self) -> Stages[Means]:
        """Average all parts side by side, one message a peer and phase; see `CompressedMean.stages`."""
        if not self.parts:
            return Means(self.own, self.exchange, self.own)
        results = yield from fuse(
            [
                p.mean.stages(
                    p.values, p.state, key=p.key, donate=not (p.blends or self.own), blends=p.blends
                )
                for p in self.parts
            ]
        )
        values: dict[int, Array] = {}
        exchange = self.exchange
        for part, (means, state) in zip(self.parts, results, strict=True):
            values.update(zip(part.tensors, means, strict=True))
            if part.state is self.exchange:
                exchange = state
        return Means(tuple(values[i] for i in range(len(values))), exchange, self.own)
