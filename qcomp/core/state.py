"""`OptimizerState`: the explicit state of an optimizer between two steps."""

from collections.abc import Mapping
from typing import NamedTuple

from qcomp.core.compressor import Compressor
from qcomp.core.mean.compressed_mean import MeanState
from qcomp.core.numeric.arrays import Array


class OptimizerState(NamedTuple):
    """The state of an optimizer between two steps, equal on all ranks except for each rank's own arrays.

    Parameters
    ----------
    step : int
        Completed steps.
    stage : str
        The stage of the optimizer's state machine, such as "warmup" or "compressed".
    rank, size : int
        This rank, and the number of ranks.
    names : tuple of str
        The names of the parameters.
    exact : tuple of bool
        Which tensors stay exact in the compressed stage.
    momentum : tuple of arrays
        The momentum of each parameter; empty if the optimizer keeps none.
    variance : tuple of arrays
        Adam's second moment of each parameter; in the compressed stage, the bias-corrected moment as it was frozen.
    exchange : MeanState
        The residuals of the compressed tensors.
    history : tuple of float
        The history of the freeze rule.
    skipped : int
        Steps skipped because a value was not finite.
    arrays : mapping of str to tuple of arrays
        Further arrays by kind, with one array for each parameter; it has size 0 if there is nothing to keep.
    numbers : mapping of str to float
        Further numbers by name, the same on all ranks.
    compressors : tuple of Compressor
        The policy's compressor for each tensor that is not exact; empty if all use the optimizer's compressor.
    stream : int
        ``Key.tensor`` of this optimizer's keys, so that two optimizers have different random draws.
    number : int
        The number of this optimizer among all optimizers and means that started over the same communicator; it is not
        saved.
    """

    step: int
    stage: str
    rank: int
    size: int
    names: tuple[str, ...]
    exact: tuple[bool, ...]
    momentum: tuple[Array, ...]
    variance: tuple[Array, ...]
    exchange: MeanState
    history: tuple[float, ...]
    skipped: int
    arrays: Mapping[str, tuple[Array, ...]] = {}
    numbers: Mapping[str, float] = {}
    compressors: tuple[Compressor, ...] = ()
    stream: int = 0
    number: int = 0

    @classmethod
    def first(cls, stage: str, names: tuple[str, ...], rank: int, size: int) -> "OptimizerState":
        """Return the state before the first step, without arrays.

        Parameters
        ----------
        stage : str
            The first stage.
        names : tuple of str
            The names of the parameters.
        rank, size : int
            This rank, and the number of ranks.
        """
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
