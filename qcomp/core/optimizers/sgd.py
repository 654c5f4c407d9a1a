"""`SGD` and `CompressedSGD`: SGD with momentum on the exact or the compressed mean gradient."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from qcomp.core import primitives
from qcomp.core.compressor import Compressor
from qcomp.core.compressors.qsgd import QSGD
from qcomp.core.mean.averaging import Averaging
from qcomp.core.numeric.arrays import Array, to_compute_dtype
from qcomp.core.numeric.cache_blocks import in_blocks
from qcomp.core.optimizers.base import Optimizer
from qcomp.core.optimizers.compression import Average, Means
from qcomp.core.optimizers.tensors import as_tensors, each_in_blocks, update, zeros_like
from qcomp.core.policies.by_name import CompressorPolicy
from qcomp.core.policies.exact_below import ExactBelow, ExactPolicy
from qcomp.core.state import OptimizerState


@dataclass(frozen=True, kw_only=True)
class SGD(Optimizer):
    """Exact SGD with momentum, Nesterov momentum and weight decay: a baseline, and an outer optimizer for `OuterLoop`.

    Parameters
    ----------
    learning_rate : float or callable
        Step size: a finite number >= 0, or a schedule that returns it from the number of completed steps. Required.
    weight_decay : float, default 0
        Weight decay coefficient, >= 0; weight_decay * x is added to the mean gradient, as usual for SGD.
    clip_norm : float, optional
        Largest global gradient norm sqrt(mean_i |g_i|^2) over the ranks i, above 0. If the norm is larger, every rank
        multiplies its gradients by the same factor. Costs an exchange of 8 bytes per step. None, the default, never
        clips.
    seed : int, default 0
        Seed of random draws, 0 to 2**64 - 1. Exact averaging draws nothing, so only stochastic rounding uses the seed.
    nonfinite : {"raise", "skip"}, default "raise"
        What to do if a gradient on any rank is infinite or NaN. ``"raise"``: all ranks raise `NonFiniteError`.
        ``"skip"``: all ranks skip the step and count it in ``state.skipped``. Neither changes parameters or moments.
    groups : sequence of Group, default ()
        Learning-rate factors and weight decays for parameters selected by name, see `Group`.
    rounding : {"nearest", "stochastic"}, default "nearest"
        How new bfloat16 parameters are rounded: ``"nearest"`` loses steps below half of a parameter's last bit;
        ``"stochastic"`` keeps them on average, see `Optimizer`.
    momentum : float, default 0
        Decay rate of the momentum, from 0 to below 1.
    nesterov : bool, default False
        Whether to use Nesterov momentum; needs ``momentum`` above 0.

    Notes
    -----
    d = mean(g) + weight_decay x, m' = momentum m + d, x' = x - rate (d + momentum m' with Nesterov, else m'). Sends 2
    (N - 1) / N * 32 bits per element. `CompressedSGD` compresses the mean; `OuterLoop` takes `SGD` as ``outer``.
    Source: Sutskever et al., ICML 2013, in the form of torch.

    Examples
    --------
    >>> import numpy as np, qcomp
    >>> opt = qcomp.SGD(learning_rate=0.5)
    >>> def rank_main(comm):
    ...     params = np.ones(2)
    ...     state = opt.init(params, comm)
    ...     params, state = opt.step(params, np.full(2, float(comm.rank)), state, comm)
    ...     return params.tolist()
    >>> qcomp.comm.run_local(2, rank_main)
    [[0.75, 0.75], [0.75, 0.75]]
    """

    momentum: float = 0.0
    nesterov: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.momentum < 1:
            raise ValueError(f"momentum is {self.momentum!r}; expected a number from 0 to below 1")
        if self.nesterov and not self.momentum:
            raise ValueError("nesterov is True and momentum is 0; expected a momentum above 0")

    def initial_state(
        self, params: Sequence[Array], names: tuple[str, ...], rank: int, size: int
    ) -> OptimizerState:
        """Return a momentum of zero."""
        return OptimizerState.first("warmup", names, rank, size)._replace(
            exact=(True,) * len(params), momentum=zeros_like(params) if self.momentum else ()
        )

    def prepare(self, grads: Any, state: OptimizerState, *, scale: float = 1.0) -> Average:
        """Ask for the exact mean of the gradients."""
        scaled = each_in_blocks(lambda g: g * scale, [*map(to_compute_dtype, as_tensors(grads, "grads"))])
        return self.compression.exactly(scaled, state)._replace(of_gradients=True)

    def apply(self, params: Any, means: Means, state: OptimizerState) -> tuple[list[Array], OptimizerState]:
        """Update the momentum with the mean gradient, and the parameters with the momentum."""
        tensors = as_tensors(params, "params")
        moved, momentum = [], []
        # A schedule may begin with a momentum setting of 0; states made with 0 hold no momenta.
        momenta = [state.momentum or zeros_like(tensors)] if self.momentum else []
        arrays = zip(tensors, means.values, *momenta, strict=True)
        for of_tensor, decay, rate in zip(arrays, self.weight_decays(state), self.rates(state), strict=True):
            p, d, *m = of_tensor
            if not m:
                out = p if means.donate else primitives.empty_like(p)
                moved.append(primitives.descend(p, d, rate, decay, out=out))
                continue
            outs = [p, *m] if means.donate else [*map(primitives.empty_like, (p, *m))]
            p, *m = in_blocks(partial(self._moved, decay, rate), of_tensor, outs)
            moved.append(p)
            momentum.extend(m)
        return moved, state._replace(step=state.step + 1, momentum=tuple(momentum), exchange=means.exchange)

    def _moved(self, decay: float, rate: float, p: Array, d: Array, m: Array) -> tuple[Array, Array]:
        """Return the parameters after a step, and their momentum."""
        if decay:
            d = d + primitives.rounded(decay * to_compute_dtype(p))
        new = primitives.rounded(self.momentum * m) + d
        change = rate * (d + primitives.rounded(self.momentum * new) if self.nesterov else new)
        return update(p, primitives.rounded(change)), new


@dataclass(frozen=True, kw_only=True)
class CompressedSGD(SGD):
    """SGD with momentum, Nesterov momentum and weight decay, for any compressor.

    Parameters
    ----------
    learning_rate : float or callable
        Step size: a finite number >= 0, or a schedule that returns it from the number of completed steps. Required.
    weight_decay : float, default 0
        Weight decay coefficient, >= 0; weight_decay * x is added to the mean gradient, as usual for SGD.
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
    compressor : Compressor, default QSGD(levels=7, bucket_size=128)
        Compresses the gradients, on workers and servers.
    averaging : Averaging, default Averaging()
        Topology and error feedback of the exchange, see `Averaging`.
    exact : callable or None, default ExactBelow(10_000)
        Policy that gets all tensors and selects the tensors that stay exact, see `ExactBelow`. None compresses
        everything.
    compressors : callable, optional
        Policy that replaces ``compressor``: it returns a compressor for each tensor, or None for a tensor that stays
        exact, see `ByName`. Tensors that ``exact`` selects stay exact in any case. None, the default, uses
        ``compressor`` for all.
    momentum : float, default 0.9
        Decay rate of the momentum, from 0 to below 1.
    nesterov : bool, default False
        Whether to use Nesterov momentum; needs ``momentum`` above 0.

    Notes
    -----
    d = mean(g) + weight_decay x, m' = momentum m + d, x' = x - rate (d + momentum m' with Nesterov, else m'), where
    mean is a `CompressedMean`. Momentum acts on the decompressed mean, which is equal on all ranks. Sends 2 (N - 1) / N
    times the payload. Source: Alistarh et al., NeurIPS 2017 (QSGD); Karimireddy et al., ICML 2019 (feedback).

    Examples
    --------
    >>> import numpy as np, qcomp
    >>> opt = qcomp.CompressedSGD(learning_rate=0.1, exact=None)
    >>> comm = qcomp.comm.LocalCommunicator.alone()
    >>> params = np.ones(4, dtype=np.float32)
    >>> state = opt.init(params, comm)
    >>> params, state = opt.step(params, params, state, comm)
    >>> params.round(3)
    array([0.9, 0.9, 0.9, 0.9], dtype=float32)
    """

    compressor: Compressor = QSGD(levels=7, bucket_size=128)
    averaging: Averaging = Averaging()
    exact: ExactPolicy | None = ExactBelow(10_000)
    compressors: CompressorPolicy | None = None
    momentum: float = 0.9

    def initial_state(
        self, params: Sequence[Array], names: tuple[str, ...], rank: int, size: int
    ) -> OptimizerState:
        """Return a momentum and residuals of zero; there is no warm-up."""
        state = OptimizerState.first("compressed", names, rank, size)._replace(
            momentum=zeros_like(params) if self.momentum else ()
        )
        return self.compression.begin(state, params, type(self).__name__)

    def prepare(self, grads: Any, state: OptimizerState, *, scale: float = 1.0) -> Average:
        """Ask for the compressed mean of the gradients."""
        scaled = each_in_blocks(lambda g: g * scale, [*map(to_compute_dtype, as_tensors(grads, "grads"))])
        return self.compression.average(scaled, state, self.key(state))._replace(of_gradients=True)
