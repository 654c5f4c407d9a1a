"""DeepSpeed's 1-bit LAMB."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from qcomp.compat.deepspeed.base import DeepSpeedOptimizer
from qcomp.compat.deepspeed.onebit_adam import require_step
from qcomp.compat.deepspeed.sign_mean import norm, padded_size
from qcomp.core.mean.stages import Stages
from qcomp.core.numeric.arrays import Array, array_namespace, device, divide, sqrt
from qcomp.core.state import OptimizerState

__all__ = ["OnebitLamb", "onebit_lamb"]

_FRESH, _PADDING = "exp_avg_sq_fresh", "exp_avg_padding"
_COEFF, _FACTOR, _SCALING = "lamb_coeff_freeze", "last_factor", "scaling_coeff"


@dataclass(frozen=True, kw_only=True)
class OnebitLamb(DeepSpeedOptimizer):
    """DeepSpeed's ``OneBitLamb``, with its parameters' names and defaults.

    - Stage "warmup": LAMB with the exact mean gradient; it keeps a running average of each tensor's coefficient.
    - Stage "compressed", after call number max(2, ``freeze_step``): all momenta are exchanged as one vector, and the
      average of the coefficient, times a factor, replaces the coefficient.

    Parameters
    ----------
    learning_rate : float or callable
        DeepSpeed's ``lr``. A schedule receives the number of completed calls.
    freeze_step : int
        The last call with an exact mean gradient; values below 2 mean 2.
    betas, eps, weight_decay, exp_avg_mask, groups, nonfinite
        See `DeepSpeedOptimizer`.
    max_coeff, min_coeff : float
        Bounds of LAMB's coefficient.
    coeff_beta : float
        Decay of the running average of the coefficient, from 0 to below 1.
    factor_max, factor_min : float
        Bounds of the factor of that average in the compressed stage.
    factor_threshold : float
        Largest relative change of the factor per step.

    Raises
    ------
    ValueError
        On every rank, if a tensor has a momentum of zero at the freeze; DeepSpeed then divides by zero.

    Notes
    -----
    Calls are counted from 1. Call 1 changes nothing. Up to call ``freeze_step``, for every tensor: m and v are Adam's
    moments of the exact mean gradient; d = m / (sqrt(v) + eps) + weight_decay x; c = ||x|| / ||d||, clipped to its
    bounds, or 1 if one of the norms is zero; x = x - rate c d. Unless c = 1, the average a = coeff_beta a + (1 -
    coeff_beta) c is updated; it starts at zero and its bias is not corrected.

    At the freeze f = v, and s of a tensor is the mean of ||m|| / sqrt(size) over all tensors, divided by the tensor's
    own ||m|| / sqrt(size). From then on one `sign_mean` averages all s (b1 m + (1 - b1) g_i) together, followed by the
    padding of the last mean. The results, divided by s and times the mask, are the new momenta m'. Then g = (m' - b1 m)
    / (1 - b1), f = b2 f + (1 - b2) g^2, and factor = max (sqrt(v) + eps) / (sqrt(f) + eps), clipped to its bounds.
    With weight decay the factor is first drawn towards 1 by the share of the update that does not come from the
    momentum. The step is x = x - rate a factor d with the frozen v.

    Sends 2 (N - 1) / N bits per element and step, including padding. Source: DeepSpeed 0.19.6, which it reproduces step
    by step; Li et al., 2021 (arXiv 2104.06069).

    Examples
    --------
    >>> import numpy as np, qcomp
    >>> opt = qcomp.compat.deepspeed.onebit_lamb(learning_rate=0.02, freeze_step=40, betas=(0.9, 0.95))
    >>> def rank_main(comm):
    ...     params = np.full(100, 4.0, dtype=np.float32)
    ...     state = opt.init(params, comm)
    ...     for _ in range(120):
    ...         params, state = opt.step(params, params - 1 - comm.rank, state, comm)
    ...     return state.stage, float(abs(params - 1.5).max()) < 0.2
    >>> qcomp.comm.run_local(2, rank_main)
    [('compressed', True), ('compressed', True)]
    """

    freeze_step: int = 100_000
    max_coeff: float = 10.0
    min_coeff: float = 0.01
    coeff_beta: float = 0.9
    factor_max: float = 4.0
    factor_min: float = 0.5
    factor_threshold: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        require_step("freeze_step", self.freeze_step)
        if not 0 <= self.coeff_beta < 1:
            raise ValueError(f"coeff_beta is {self.coeff_beta!r}; expected a number from 0 to below 1")
        if not 0 <= self.factor_threshold < 1:
            raise ValueError(
                f"factor_threshold is {self.factor_threshold!r}; expected a number from 0 to below 1"
            )
        for low, high in (("min_coeff", "max_coeff"), ("factor_min", "factor_max")):
            least, most = getattr(self, low), getattr(self, high)
            if not 0 <= least <= most:
                raise ValueError(f"{low} is {least!r} and {high} is {most!r}; expected 0 <= {low} <= {high}")

    def initial_state(
        self, params: Sequence[Array], names: tuple[str, ...], rank: int, size: int
    ) -> OptimizerState:
        """Return moments of zero, before the first call."""
        state = super().initial_state(params, names, rank, size)
        first = {_COEFF: 0.0, _FACTOR: 1.0, _SCALING: 1.0}
        return state._replace(numbers={f"{kind}.{name}": x for kind, x in first.items() for name in names})

    def enter(self, state: OptimizerState, stage: str) -> OptimizerState:
        """Return the state of the warm-up, or of the compressed stage with zero errors."""
        if stage != "compressed":
            return super().enter(state, stage)
        count = sum(math.prod(m.shape) for m in state.momentum)
        first = state.momentum[0]
        xp = array_namespace(first)

        def zeros(size: int) -> Array:
            return xp.zeros((size,), dtype=first.dtype, device=device(first))

        others = len(state.momentum) - 1
        padding = padded_size(count, state.size) - count if state.size > 1 else 0
        arrays = {
            # All tensors share one buffer, so there is one error. It is stored with the first tensor.
            **self._errors(state, (count, *(0 for _ in range(others)))),
            _FRESH: tuple(xp.zeros_like(v) for v in state.variance),
            _PADDING: (zeros(padding), *(zeros(0) for _ in range(others))),
        }
        return state._replace(stage=stage, arrays=arrays)

    def _advance(
        self, params: Sequence[Array], grads: Sequence[Array], state: OptimizerState
    ) -> Stages[tuple[list[Array], OptimizerState]]:
        steps = self._warmup_step if state.stage == "warmup" else self._compressed_step
        return (yield from steps(params, grads, state))

    def _warmup_step(
        self, params: Sequence[Array], grads: Sequence[Array], state: OptimizerState
    ) -> Stages[tuple[list[Array], OptimizerState]]:
        call, numbers = state.step + 1, dict(state.numbers)
        means = yield from self._exact_mean(grads, state)
        momentum = self._blended(state.momentum, means)
        variance = self._varied(state.variance, means)
        updates = self._updates(params, momentum, variance, state)
        moved = []
        for name, p, update, rate in zip(state.names, params, updates, self.rates(state), strict=True):
            coeff = 1.0
            of_p, of_update = norm(p), norm(update)
            if float(of_p) and float(of_update):
                coeff = min(max(float(of_p / of_update), self.min_coeff), self.max_coeff)
            if coeff != 1.0:
                key = f"{_COEFF}.{name}"
                numbers[key] = self.coeff_beta * numbers[key] + (1 - self.coeff_beta) * coeff
            moved.append(p - (rate * coeff) * update)
        new_state = state._replace(momentum=tuple(momentum), variance=tuple(variance), numbers=numbers)
        if call < self.freeze_step:
            return moved, new_state
        return moved, self._frozen(new_state, call)

    def _frozen(self, state: OptimizerState, call: int) -> OptimizerState:
        """Return the first state of the compressed stage: the scales of the tensors, and a second variance."""
        filled = [
            (name, m) for name, m in zip(state.names, state.momentum, strict=True) if math.prod(m.shape)
        ]
        scales = {name: float(norm(m)) / math.sqrt(math.prod(m.shape)) for name, m in filled}
        for name, scale in scales.items():
            if scale == 0:
                raise ValueError(
                    f"the momentum of {name!r} is zero at the freeze, in call {call}; expected a tensor that has had "
                    "a gradient, since the step divides by the momentum's norm"
                )
        united = sum(scales.values()) / max(1, len(scales))
        scaling = {f"{_SCALING}.{name}": united / scale for name, scale in scales.items()}
        new_state = self.enter(state._replace(numbers={**state.numbers, **scaling}), "compressed")
        if call == self.freeze_step:  # not in a later call, which happens with freeze_step < 2
            new_state = new_state._replace(arrays={**new_state.arrays, _FRESH: state.variance})
        return new_state

    def _compressed_step(
        self, params: Sequence[Array], grads: Sequence[Array], state: OptimizerState
    ) -> Stages[tuple[list[Array], OptimizerState]]:
        numbers = dict(state.numbers)
        scaling = [numbers[f"{_SCALING}.{name}"] for name in state.names]
        blended = [m * s for m, s in zip(self._blended(state.momentum, grads), scaling, strict=True)]
        xp = array_namespace(blended[0])
        (padding, *rest) = state.arrays[_PADDING]
        joined = xp.concat([*(xp.reshape(m, (-1,)) for m in blended), padding])
        means, new_state = yield from self._sign_means({0: joined}, state)
        parts, start = [], 0
        for m, scale in zip(blended, scaling, strict=True):
            stop = start + math.prod(m.shape)
            parts.append(divide(xp.reshape(means[0][start:stop], m.shape), scale))
            start = stop
        momentum = self._masked(parts, state)
        fresh = self._varied(state.arrays[_FRESH], self._reconstructed(momentum, state.momentum))
        moved = []
        settings = zip(self.rates(state), self.weight_decays(state), strict=True)
        tensors = zip(state.names, params, momentum, state.variance, fresh, strict=True)
        for (rate, decay), (name, p, m, v, f) in zip(settings, tensors, strict=True):
            if math.prod(p.shape) == 0:
                moved.append(p)
                continue
            divisor = sqrt(v) + self.eps
            update = plain = m / divisor
            factor = float(xp.max(divisor / (sqrt(f) + self.eps)))
            if decay > 0:
                update = plain + decay * p
                ratio = min(1.0, float(norm(plain) / norm(update)))
                factor = factor * ratio + (1 - ratio)
            key = f"{_FACTOR}.{name}"
            factor = min(max(factor, self.factor_min), self.factor_max)
            factor = min(factor, numbers[key] * (1 + self.factor_threshold))
            factor = max(factor, numbers[key] * (1 - self.factor_threshold))
            numbers[key] = factor
            moved.append(p - (rate * numbers[f"{_COEFF}.{name}"] * factor) * update)
        arrays = {**new_state.arrays, _FRESH: tuple(fresh), _PADDING: (means[0][start:], *rest)}
        return moved, new_state._replace(momentum=tuple(momentum), arrays=arrays, numbers=numbers)

    def _reconstructed(self, new: Sequence[Array], old: Sequence[Array]) -> list[Array]:
        """Return the gradients that turn the old momentum into the new one."""
        beta1, _ = self.betas
        return [divide(n - o * beta1, 1 - beta1) for n, o in zip(new, old, strict=True)]


onebit_lamb = OnebitLamb
