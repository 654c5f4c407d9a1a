"""`Averaging` and `PowerSGD`: the settings of an optimizer's mean over ranks."""

from dataclasses import dataclass, field
from typing import Literal

from qcomp.core.compressor import Compressor
from qcomp.core.mean.compressed_mean import CompressedMean
from qcomp.core.mean.costs import Link
from qcomp.core.mean.powersgd import PowerSGDMean, require_rank
from qcomp.core.mean.tensorwise import TensorwiseMean
from qcomp.core.mean.topologies.choice import ETHERNET
from qcomp.core.mean.topologies.registry import require_divisor, require_name


@dataclass(frozen=True)
class Averaging:
    """How an optimizer averages its compressed tensors over the ranks.

    Parameters
    ----------
    topology : {"two_phase", "all_gather", "hierarchical", "ring", "auto"}, default "two_phase"
        How the ranks exchange payloads, see `CompressedMean`. ``"auto"`` lets `Optimizer.init` select the fastest by
        the cost model; the state and checkpoints keep the choice.
    feedback : bool, default True
        Whether error feedback adds what compression loses to the next exchange, on workers and servers.
    link : Link, default 10 Gbit/s and 50 us per message
        The link between nodes, used only to select a topology for ``"auto"``, see `qcomp.planning.Link`.
    tensorwise : bool, default False
        Whether the mean cuts each tensor into chunks separately. The step is the same, with more and smaller messages.
        Needed to exchange some tensors while others are still being computed, as ``qcomp.integrations.ddp`` does.
    divisor : {"ranks", "senders"}, default "ranks"
        What the sum over the ranks is divided by, see `CompressedMean`.

    Examples
    --------
    >>> import qcomp
    >>> ring = qcomp.Averaging(topology="ring", feedback=False)
    >>> opt = qcomp.QAdam(learning_rate=1e-3, averaging=ring)
    >>> opt.mean.topology, opt.mean.feedback
    ('ring', False)
    """

    topology: str = "two_phase"
    feedback: bool = True
    link: Link = ETHERNET
    tensorwise: bool = False
    divisor: str = "ranks"

    def __post_init__(self) -> None:
        require_name(self.topology)
        require_divisor(self.divisor, self.topology)

    def mean(self, compressor: Compressor) -> CompressedMean:
        """Return the mean of tensors that use this compressor.

        Parameters
        ----------
        compressor : Compressor
            Compresses what the ranks exchange, on workers and servers.
        """
        kind = TensorwiseMean if self.tensorwise else CompressedMean
        return kind(compressor, self.topology, self.feedback, self.link, self.divisor)


@dataclass(frozen=True)
class PowerSGD(Averaging):
    """Average matrices by PowerSGD: ranks send two thin factors of each instead of its elements, with error feedback.

    Used as the ``averaging`` of an optimizer, of an outer loop, or of the hook for DistributedDataParallel. The
    ``compressor`` beside it then compresses the factors, and must lose little: pass ``Identity()`` or
    ``Cast("bfloat16")``.

    Parameters
    ----------
    rank : int, default 1
        Columns of a factor, at least 1. 1, 2 and 4 are usual; the bytes sent grow in proportion.
    min_compression : float, default 2
        At least 0. A tensor that is an n x m matrix is averaged exactly unless
        ``rank * (n + m) * min_compression < n * m``. Vectors are always averaged exactly, and so are the tensors that
        the optimizer's policy ``exact`` selects.

    Notes
    -----
    See `PowerSGDMean` for the algorithm, what it sends, and its source. The topology is fixed.

    Examples
    --------
    >>> import qcomp
    >>> opt = qcomp.CompressedSGD(learning_rate=0.1, compressor=qcomp.Identity(), averaging=qcomp.PowerSGD(rank=2))
    >>> opt.mean.rank, opt.mean.keeps_exact((64, 32, 3, 3)), opt.mean.keeps_exact((64,))
    (2, False, True)
    """

    topology: Literal["two_phase"] = field(default="two_phase", init=False)
    feedback: bool = field(default=True, init=False)
    link: Link = field(default=ETHERNET, init=False)
    tensorwise: bool = field(default=True, init=False)
    divisor: Literal["ranks"] = field(default="ranks", init=False)
    rank: int = 1
    min_compression: float = 2.0

    def __post_init__(self) -> None:
        super().__post_init__()
        require_rank(self.rank, self.min_compression)

    def mean(self, compressor: Compressor) -> PowerSGDMean:
        """Return the mean of tensors whose factors use this compressor.

        Parameters
        ----------
        compressor : Compressor
            Compresses the factors, on workers and owners.
        """
        return PowerSGDMean(compressor, rank=self.rank, min_compression=self.min_compression)
