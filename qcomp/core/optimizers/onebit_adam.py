"""1-bit Adam."""

from dataclasses import dataclass

from qcomp.core.compressor import Compressor
from qcomp.core.compressors.sign import ScaledSign
from qcomp.core.optimizers.freeze import FreezeRule, VarianceStable
from qcomp.core.optimizers.frozen_adam import FrozenVarianceAdam

__all__ = ["OneBitAdam"]


@dataclass(frozen=True, kw_only=True)
class OneBitAdam(FrozenVarianceAdam):
    """1-bit Adam: exact Adam until the variance has settled, then one bit an element of the momentum.

    Parameters
    ----------
    learning_rate, weight_decay, clip_norm, seed, nonfinite, groups
        See `Optimizer`.
    betas, eps, decoupled_weight_decay
        See `Adam`.
    compressor, feedback, topology, link, exact, compressors, rescale_feedback, tensorwise
        See `CompressingOptimizer`.
    freeze : int or rule
        The last exact step, or a rule such as `VarianceStable`.
    watch : VarianceWatch or None
        Watches in the compressed stage whether the frozen variance still fits, and warns when it does not.

    Notes
    -----
    In the compressed stage with N ranks, worker i: p_i = b1 m + (1 - b1) g_i + e_i, sends C(p_i), e_i' = p_i - C(p_i);
    server: q = mean_i C(p_i) + e_s, sends m' = C(q), e_s' = q - m'; all: x' = x - rate m' / (sqrt(v) + eps). With
    E = mean_i e_i + e_s, every step m' + E' = b1 m + (1 - b1) mean_i g_i + E. Sends 2 (N - 1) / N bits a parameter, and
    32 bits a bucket. Source: Tang et al., ICML 2021, algorithm 1, with bias correction, frozen for the variance.

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
