"""1-bit Adam."""

from dataclasses import dataclass

from qcomp.core.compressor import Compressor
from qcomp.core.compressors.sign import ScaledSign
from qcomp.core.optimizers.freeze import FreezeRule, VarianceStable
from qcomp.core.optimizers.frozen_adam import FrozenVarianceAdam

__all__ = ["OneBitAdam"]


@dataclass(frozen=True, kw_only=True)
class OneBitAdam(FrozenVarianceAdam):
    """1-bit Adam: exact Adam until the variance is stable, then a momentum with one bit per element.

    Parameters
    ----------
    learning_rate : float or callable
        Step size: a finite number >= 0, or a schedule that returns it from the number of completed steps. Required.
    weight_decay : float, default 0
        Weight decay coefficient, >= 0.
    clip_norm : float, optional
        Largest global gradient norm sqrt(mean_i |g_i|^2) over the ranks i, above 0. Larger gradients are scaled down
        by the same factor on all ranks. Costs an exchange of 8 bytes per step. None, the default, never clips.
    seed : int, default 0
        Seed of the compressor's random draws, 0 to 2**64 - 1. Draws also depend on the names and shapes of the
        parameters. If two optimizers in one job have parameters with equal names and shapes, give them different
        seeds.
    nonfinite : {"raise", "skip"}, default "raise"
        What to do if a gradient on any rank is infinite or NaN. ``"raise"``: all ranks raise `NonFiniteError`.
        ``"skip"``: all ranks skip the step and count it in ``state.skipped``. Neither changes parameters or moments.
    groups : sequence of Group, default ()
        Learning-rate factors and weight decays for parameters selected by name, see `Group`.
    betas : tuple of two floats, default (0.9, 0.999)
        Decay rates b1 of the momentum and b2 of the variance, each from 0 to below 1.
    eps : float, default 1e-8
        Added to the square root of the variance, >= 0.
    decoupled_weight_decay : bool, default True
        True: each step subtracts rate * weight_decay * x from the parameters x, like ``torch.optim.AdamW``. False:
        weight_decay * x is added to the mean gradient after clipping, like ``torch.optim.Adam``.
    compressor : Compressor, default ScaledSign(scale="rms")
        Compresses what the ranks exchange in the compressed stage, on workers and servers.
    averaging : Averaging, default Averaging()
        Topology and error feedback of the exchange, see `Averaging`.
    exact : callable or None, default ExactBelow(10_000)
        Policy that selects the tensors that stay exact, a function of all tensors, see `ExactBelow`. None compresses
        everything.
    compressors : callable, optional
        Policy that returns a compressor for each tensor, used instead of ``compressor``, or None for a tensor that
        stays exact, see `ByName`. Tensors that ``exact`` selects stay exact in any case. None, the default, uses
        ``compressor`` for all.
    freeze : int or FreezeRule, default VarianceStable()
        When to freeze the variance: the number of exact steps, or a rule such as `VarianceStable`.
    variance_floor : float, default 1e-3
        Smallest frozen variance of an element of a compressed tensor, as a fraction of the tensor's mean, from 0 to 1;
        elements that never had a gradient keep a variance of zero, and do not move. 0 divides by the variance as it is,
        as published; then units that are almost never active, such as dead ReLUs, can ruin a training run.
    variance_steps : callable, optional
        Returns whether a step, counted from 1 after the freeze, averages the gradient exactly and measures the variance
        again, such as ``DoublingIntervals(4)``. None, the default, leaves it frozen, as published.
    watch : VarianceWatch or None, default VarianceWatch()
        Checks in the compressed stage whether the frozen variance still fits the gradients, and warns if not. None
        disables the check.

    Notes
    -----
    In the compressed stage with N ranks, worker i: p_i = b1 m + (1 - b1) g_i + e_i, sends C(p_i), e_i' = p_i - C(p_i);
    server: q = mean_i C(p_i) + e_s, sends m' = C(q), e_s' = q - m'; all: x' = x - rate m' / (sqrt(v) + eps). With E =
    mean_i e_i + e_s, every step m' + E' = b1 m + (1 - b1) mean_i g_i + E. Sends 2 (N - 1) / N times 1 bit per parameter
    and 32 bits per bucket. Source: Tang et al., ICML 2021, algorithm 1, with bias correction, which is frozen for the
    variance.

    Examples
    --------
    >>> import numpy as np, qcomp
    >>> opt = qcomp.OneBitAdam(learning_rate=0.1, betas=(0.9, 0.9), freeze=20, exact=None)
    >>> def rank_main(comm):
    ...     params = np.zeros(100, dtype=np.float32)
    ...     state = opt.init(params, comm)
    ...     for _ in range(60):
    ...         params, state = opt.step(params, params - 1 - comm.rank, state, comm)
    ...     return state.stage, float(abs(params - 1.5).max()) < 0.2
    >>> qcomp.comm.run_local(2, rank_main)
    [('compressed', True), ('compressed', True)]
    """

    compressor: Compressor = ScaledSign(scale="rms")
    freeze: int | FreezeRule = VarianceStable()
