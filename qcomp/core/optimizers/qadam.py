"""QAdam: Adam with a frozen variance and a quantized momentum."""

from dataclasses import InitVar, dataclass

from qcomp.core.compressor import Compressor
from qcomp.core.compressors.minmax import MinMaxUInt8
from qcomp.core.optimizers.freeze import FreezeAt, FreezeRule, VarianceStable
from qcomp.core.optimizers.frozen_adam import FrozenVarianceAdam

__all__ = ["QAdam"]


@dataclass(frozen=True, kw_only=True)
class QAdam(FrozenVarianceAdam):
    """QAdam: exact Adam for a warm-up, then a momentum of eight bits an element.

    Parameters
    ----------
    learning_rate, weight_decay, clip_norm, seed, nonfinite, groups
        See `Optimizer`.
    betas, eps, decoupled_weight_decay
        See `Adam`.
    compressor, feedback, topology, link, exact, compressors, rescale_feedback, tensorwise
        See `CompressingOptimizer`; ``feedback=False`` is what Bagua does.
    freeze : int or rule
        The last exact step, or a rule such as `VarianceStable`. The variance averages over 1 / (1 - b2) steps: one
        that is frozen much earlier is too small somewhere, and there rounding errors become large steps.
    warmup_steps : int, optional
        Another name for ``freeze`` as a number of steps; give one of the two.
    hierarchical : bool
        Another name for ``topology="hierarchical"``: the momentum is averaged exactly inside each node and compressed
        between nodes. The ranks of a node are those whose communicator has the same ``host``.
    watch : VarianceWatch or None
        Watches in the compressed stage whether the frozen variance still fits, and warns when it does not.

    Notes
    -----
    The same state machine as `OneBitAdam` with another compressor. In the compressed stage it sends 2 (N - 1) / N
    times 8 bits a parameter and 64 bits a bucket. If hierarchical, the ranks of a node send that together to the other
    nodes, with the number of nodes in place of N, and 32 bits a parameter stay inside the node; see `CompressedMean`.
    On one node nothing is compressed. The exact mean of the warm-up is the same either way. Source: Bagua's
    documentation; unlike there, the bias correction of the variance is frozen with it (it would make steps grow up to
    3.2 times) and weight decay is used.

    Examples
    --------
    >>> import qcomp
    >>> opt = qcomp.QAdam(learning_rate=1e-3, warmup_steps=100, hierarchical=True)
    >>> opt.freeze, opt.topology
    (FreezeAt(step=100), 'hierarchical')
    """

    compressor: Compressor = MinMaxUInt8()
    freeze: int | FreezeRule = VarianceStable()
    warmup_steps: InitVar[int | None] = None
    hierarchical: InitVar[bool] = False

    def __post_init__(self, warmup_steps: int | None, hierarchical: bool) -> None:
        if warmup_steps is not None:
            if self.freeze != VarianceStable():
                raise ValueError(
                    f"freeze is {self.freeze!r} and warmup_steps is {warmup_steps}; expected one of them"
                )
            object.__setattr__(self, "freeze", FreezeAt(warmup_steps))
        if hierarchical:
            if self.topology not in ("two_phase", "hierarchical"):
                raise ValueError(
                    f"topology is {self.topology!r} and hierarchical is True; expected one of them"
                )
            object.__setattr__(self, "topology", "hierarchical")
        super().__post_init__()
