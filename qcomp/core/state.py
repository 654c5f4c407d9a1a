"""The explicit state of an optimizer."""

from collections.abc import Mapping
from typing import NamedTuple

from qcomp.core.compressor import Compressor
from qcomp.core.mean.compressed_mean import MeanState
from qcomp.core.numeric.arrays import Array

__all__ = ["OptimizerState"]


class OptimizerState(NamedTuple):
    """All that an optimizer remembers between two steps, the same on all ranks but for the residuals."""

    step: int
    """Completed steps."""
    stage: str
    """Of the optimizer's state machine, such as "warmup" or "compressed"."""
    rank: int
    size: int
    names: tuple[str, ...]
    exact: tuple[bool, ...]
    """Which tensors stay exact in the compressed stage."""
    momentum: tuple[Array, ...]
    variance: tuple[Array, ...]
    """Adam's second moment; in the compressed stage the bias-corrected one of the freeze, constant."""
    exchange: MeanState
    """The residuals of the compressed tensors."""
    history: tuple[float, ...]
    """What the freeze rule remembers."""
    skipped: int
    """Steps that were left out because a value was not finite."""
    arrays: Mapping[str, tuple[Array, ...]] = {}
    """What else an optimizer keeps, by kind: an array for each parameter, of size 0 where there is nothing to keep."""
    numbers: Mapping[str, float] = {}
    """Further numbers by name, the same on all ranks."""
    compressors: tuple[Compressor, ...] = ()
    """What a policy has chosen for each tensor that is not exact; empty if all have the optimizer's compressor."""
    stream: int = 0
    """Which random draws are this optimizer's: ``Key.tensor`` of its keys."""

    @classmethod
    def first(cls, stage: str, names: tuple[str, ...], rank: int, size: int) -> "OptimizerState":
        """Return the state before the first step of an optimizer that keeps nothing."""
        return cls(
            step=0,
            stage=stage,
            rank=rank,
            size=size,
            names=names,
            exact=(),
            momentum=(),
            variance=(),
            exchange=MeanState(rank, size, (), ()),
            history=(),
            skipped=0,
        )
