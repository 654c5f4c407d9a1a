"""DeepSpeed's 1-bit LAMB."""

import math
from dataclasses import dataclass

from qcomp.compat.deepspeed.base import Arrays, DeepSpeedOptimizer, Moved
from qcomp.compat.deepspeed.sign_mean import norm
from qcomp.core.mean.state import zeros_for
from qcomp.core.numeric.arrays import (
    array_namespace,
    concat,
    cut_like,
    divide,
    flat,
    shaped_like,
    sqrt,
)
from qcomp.core.optimizers.lamb import direction
from qcomp.core.optimizers.tensors import zeros_like
from qcomp.core.settings import require
from qcomp.core.state import OptimizerState

__all__ = ["OnebitLamb", "onebit_lamb"]

_FRESH, _PADDING = "exp_avg_sq_fresh", "exp_avg_padding"
_COEFF, _FACTOR, _SCALING = "lamb_coeff_freeze", "last_factor", "scaling_coeff"


@dataclass(frozen=True, kw_only=True)
class OnebitLamb(DeepSpeedOptimizer):
    """DeepSpeed's ``OneBitLamb``, with its parameters' names and defaults.

    Parameters
    ----------
    learning_rate, betas, eps, weight_decay, exp_avg_mask, groups, nonfinite
        See `DeepSpeedOptimizer`; the first is DeepSpeed's ``lr``.
    freeze_step : int
        The last call with an exact mean gradient; values below 2 mean 2.
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

    At the freeze the stage "compressed" begins: f = v, and s of a tensor is the mean of ||m|| / sqrt(size) over all
    tensors, divided by the tensor's own ||m|| / sqrt(size). From then on one `sign_mean` averages all s (b1 m + (1 -
    b1) g_i) together, followed by the padding of the last mean. The results, divided by s and times the mask, are the
    new momenta m'. Then g = (m' - b1 m) / (1 - b1), f = b2 f + (1 - b2) g^2, and factor = max (sqrt(v) + eps) /
    (sqrt(f) + eps), clipped to its bounds. With weight decay the factor is first drawn towards 1 by the share of the
    update that does not come from the momentum. The step is x = x - rate a factor d with the frozen v.

    Sends 2 (N - 1) / N bits per element and step, including padding. Source: DeepSpeed 0.19.6, which it reproduces step
    by step; Li et al., 2021 (arXiv 2104.06069).
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
        for name in ("coeff_beta", "factor_threshold"):
            value = getattr(self, name)
            require(name, value, 0 <= value < 1, "a number from 0 to below 1")
        for low, high in (("min_coeff", "max_coeff"), ("factor_min", "factor_max")):
            least, most = getattr(self, low), getattr(self, high)
            if not 0 <= least <= most:
                raise ValueError(f"{low} is {least!r} and {high} is {most!r}; expected 0 <= {low} <= {high}")

    def initial_state(self, params: Arrays, names: tuple[str, ...], rank: int, size: int) -> OptimizerState:
        """Return moments of zero, before the first call."""
        state = super().initial_state(params, names, rank, size)
        first = {_COEFF: 0.0, _FACTOR: 1.0, _SCALING: 1.0}
        return state._replace(numbers={f"{kind}.{name}": x for kind, x in first.items() for name in names})

    def enter(self, state: OptimizerState, stage: str) -> OptimizerState:
        """Return the state of the warm-up, or of the compressed stage with zero errors."""
        state = super().enter(state, stage)
        if stage == "warmup":
            return state
        # All tensors share one buffer, whose errors and padding are stored with the first tensor.
        first, *others = state.momentum
        count = sum(math.prod(m.shape) for m in state.momentum)
        errors = self._zero_errors(state, [count] + [0] * len(others))
        padding = max(0, errors["worker_error"][0].shape[0] - count)
        # In another call, which happens with freeze_step < 2, it begins at zero.
        fresh = state.variance if state.step + 1 == self.freeze_step else zeros_like(state.variance)
        paddings = zeros_for(first, padding), *(zeros_for(x, 0) for x in others)
        return state._replace(arrays={**errors, _FRESH: fresh, _PADDING: paddings})

    def _warmup_step(self, params: Arrays, grads: Arrays, state: OptimizerState) -> Moved:
        state = yield from self._with_moments(grads, state)
        numbers, moved = dict(state.numbers), []
        tensors = zip(params, state.momentum, state.variance, self._numbers(state), strict=True)
        for name, (p, m, v, n) in zip(state.names, tensors, strict=True):
            update, coeff, key = direction(p, m, v, n), 1.0, f"{_COEFF}.{name}"
            own, length = norm(p), norm(update)
            if float(own) and float(length):
                coeff = min(max(float(own / length), self.min_coeff), self.max_coeff)
            if coeff != 1.0:
                numbers[key] = self.coeff_beta * numbers[key] + (1 - self.coeff_beta) * coeff
            moved.append(p - (n.rate * coeff) * update)
        state = state._replace(numbers=numbers)
        return moved, self._frozen(state) if state.step + 1 >= self.freeze_step else state

    def _frozen(self, state: OptimizerState) -> OptimizerState:
        """Return the first state of the compressed stage: the scales of the tensors, and a second variance."""
        call = state.step + 1
        filled = {name: m for name, m in zip(state.names, state.momentum, strict=True) if math.prod(m.shape)}
        scales = {name: float(norm(m)) / math.sqrt(math.prod(m.shape)) for name, m in filled.items()}
        for name, scale in scales.items():
            if scale == 0:
                raise ValueError(
                    f"the momentum of {name!r} is zero at the freeze, in call {call}; expected a tensor that has had "
                    "a gradient, since the step divides by the momentum's norm"
                )
        united = sum(scales.values()) / max(1, len(scales))
        scaling = {f"{_SCALING}.{name}": united / scale for name, scale in scales.items()}
        return self.enter(state._replace(numbers={**state.numbers, **scaling}), "compressed")

    def _last_step(self, params: Arrays, grads: Arrays, state: OptimizerState) -> Moved:
        numbers, last = dict(state.numbers), state.momentum
        scaling = [numbers[f"{_SCALING}.{name}"] for name in state.names]
        vectors = [flat(m * s) for m, s in zip(self._blended(state, grads), scaling, strict=True)]
        vectors.append(state.arrays[_PADDING][0])
        (mean,), state = yield from self._sign_means([concat(vectors)], state)
        *parts, padding = cut_like(mean, [x.shape[0] for x in vectors])
        means = [divide(x, s) for x, s in zip(parts, scaling, strict=True)]
        momentum = self._masked(shaped_like(means, last), state)
        beta1, _ = self.betas
        rebuilt = [divide(new - old * beta1, 1 - beta1) for new, old in zip(momentum, last, strict=True)]
        fresh, moved = self._varied(state.arrays[_FRESH], rebuilt), []
        tensors = zip(params, momentum, state.variance, fresh, self._numbers(state), strict=True)
        for name, (p, m, v, f, n) in zip(state.names, tensors, strict=True):
            if math.prod(p.shape) == 0:
                moved.append(p)
                continue
            divisor, key = sqrt(v) + self.eps, f"{_FACTOR}.{name}"
            update = direction(p, m, v, n)
            factor = float(array_namespace(p).max(divisor / (sqrt(f) + self.eps)))
            if n.weight_decay:
                ratio = min(1.0, float(norm(m / divisor) / norm(update)))
                factor = factor * ratio + (1 - ratio)
            factor = min(max(factor, self.factor_min), self.factor_max)
            factor = min(factor, numbers[key] * (1 + self.factor_threshold))
            numbers[key] = max(factor, numbers[key] * (1 - self.factor_threshold))
            moved.append(p - (n.rate * numbers[f"{_COEFF}.{name}"] * numbers[key]) * update)
        arrays = {**state.arrays, _FRESH: fresh, _PADDING: (padding, *state.arrays[_PADDING][1:])}
        return moved, state._replace(momentum=momentum, arrays=arrays, numbers=numbers)


onebit_lamb = OnebitLamb
