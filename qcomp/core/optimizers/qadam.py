"""`QAdam`: Adam with a frozen variance and a quantized momentum."""

from dataclasses import InitVar, dataclass

from qcomp.core.compressor import Compressor
from qcomp.core.compressors.minmax import MinMaxUInt8
from qcomp.core.optimizers.onebit_adam import OneBitAdam
from qcomp.core.variance.rules import FreezeAt, FreezeRule, VarianceStable
from qcomp.core.variance.schedules import DoublingIntervals, Schedule


@dataclass(frozen=True, kw_only=True)
class QAdam(OneBitAdam):
    """QAdam: exact Adam in a warm-up, then a momentum with eight bits per element.

    Parameters
    ----------
    learning_rate : float or callable
        Step size: a finite number >= 0, or a schedule that returns it from the number of completed steps. Required.
    weight_decay : float, default 0
        Weight decay coefficient, >= 0.
    clip_norm : float, optional
        Largest global gradient norm sqrt(mean_i |g_i|^2) over the ranks i, above 0. If the norm is larger, every rank
        multiplies its gradients by the same factor. Costs an exchange of 8 bytes per step. None, the default, never
        clips.
    seed : int, default 0
        Seed of the random draws of compressors and of stochastic rounding, 0 to 2**64 - 1. Draws also depend on the
        names and shapes of the parameters. If two optimizers in one job have parameters with equal names and shapes,
        give them different seeds.
    nonfinite : {"raise", "skip"}, default "raise"
        What to do if a gradient on any rank is infinite or NaN. ``"raise"``: all ranks raise `NonFiniteError`.
        ``"skip"``: all ranks skip the step and count it in ``state.skipped``. Neither changes parameters or moments.
    groups : sequence of Group, default ()
        Learning-rate factors and weight decays for parameters selected by name, see `Group`.
    rounding : {"nearest", "stochastic"}, default "nearest"
        How new bfloat16 parameters are rounded: ``"nearest"`` loses steps below half of a parameter's last bit;
        ``"stochastic"`` keeps them on average, see `Optimizer`.
    betas : tuple of two floats, default (0.9, 0.999)
        Decay rates b1 of the momentum and b2 of the variance, each from 0 to below 1.
    eps : float, default 1e-8
        Added to the square root of the variance, >= 0.
    decoupled_weight_decay : bool, default True
        True: each step subtracts rate * weight_decay * x from the parameters x, like ``torch.optim.AdamW``. False:
        weight_decay * x is added to the mean gradient after clipping, like ``torch.optim.Adam``.
    compressor : Compressor, default MinMaxUInt8()
        Compresses the exchanges of the compressed stage, on workers and servers.
    averaging : Averaging, default Averaging()
        Topology and error feedback of the exchange, see `Averaging`. ``topology="hierarchical"`` averages exactly
        inside each node and compresses between nodes; ``feedback=False`` matches Bagua.
    exact : callable or None, default ExactBelow(10_000)
        Policy that gets all tensors and selects the tensors that stay exact, see `ExactBelow`. None compresses
        everything.
    compressors : callable, optional
        Policy that replaces ``compressor``: it returns a compressor for each tensor, or None for a tensor that stays
        exact, see `ByName`. Tensors that ``exact`` selects stay exact in any case. None, the default, uses
        ``compressor`` for all.
    freeze : int or FreezeRule, default VarianceStable()
        When to freeze the variance: the number of exact steps, or a rule such as `VarianceStable`. The variance
        averages over 1 / (1 - b2) steps. If it is frozen much earlier, it is too small for some elements, and their
        rounding errors become large steps.
    warmup_steps : int, optional
        Alias of ``freeze`` for a number of steps; give only one of the two.
    variance_floor : float, default 0.03
        Smallest frozen variance of an element of a compressed tensor, as a fraction of the tensor's mean, from 0 to 1;
        elements that never had a gradient keep a variance of zero, and do not move. With 0, steps divide by the
        unchanged variance, as published, and units that are almost never active, such as dead ReLUs, can ruin a
        training run.
    variance_steps : callable or None, default DoublingIntervals(4)
        A function that returns whether a step, counted from 1 after the freeze, averages the gradient exactly and
        measures the variance again. The default selects about 4 log2(T / 4 + 1) of T steps. None leaves the variance
        frozen, as published, but then steps stay too short while gradients shrink.
    watch : VarianceWatch or None, default VarianceWatch()
        Checks in the compressed stage whether the frozen variance still fits the gradients, and warns if not. None
        disables the check.

    Notes
    -----
    QAdam is `OneBitAdam` with its own defaults for ``compressor`` and ``variance_steps``. In the compressed stage a
    rank sends 2 (N - 1) / N times 8 bits per parameter and 64 bits per bucket. In the topology "hierarchical", N is the
    number of nodes, and the ranks of a node together send this amount to the other nodes. Inside the node they send 32
    bits per parameter; see `CompressedMean`. If there is only one node, nothing is compressed. The exact mean of the
    warm-up is the same in every topology. Source: Bagua's documentation. Unlike Bagua, QAdam freezes the bias
    correction with the variance (otherwise steps grow up to 3.2 times) and applies weight decay in all stages.

    Examples
    --------
    >>> import qcomp
    >>> between_nodes = qcomp.Averaging(topology="hierarchical")
    >>> opt = qcomp.QAdam(learning_rate=1e-3, warmup_steps=100, averaging=between_nodes)
    >>> opt.freeze, opt.mean.topology
    (FreezeAt(step=100), 'hierarchical')
    """

    compressor: Compressor = MinMaxUInt8()
    freeze: int | FreezeRule = VarianceStable()
    variance_steps: Schedule | None = DoublingIntervals(4)
    warmup_steps: InitVar[int | None] = None

    def __post_init__(self, warmup_steps: int | None) -> None:
        if warmup_steps is not None:
            if self.freeze != VarianceStable():
                raise ValueError(
                    f"freeze is {self.freeze!r} and warmup_steps is {warmup_steps}; expected only one of them"
                )
            object.__setattr__(self, "freeze", FreezeAt(warmup_steps))
        super().__post_init__()
