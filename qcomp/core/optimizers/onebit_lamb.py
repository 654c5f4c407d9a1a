"""`OneBitLamb`: 1-bit LAMB, which is LAMB with a frozen variance and a compressed momentum."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from qcomp.core import primitives
from qcomp.core.compressor import Compressor
from qcomp.core.compressors.sign import ScaledSign
from qcomp.core.kernels import Blend, FreshNumbers, StepNumbers
from qcomp.core.numeric.arrays import Array, array_namespace, concat, device, host_numbers, is_traced
from qcomp.core.numeric.numbers import Number, choose, clamp, mean_of_positive, root
from qcomp.core.optimizers.compression import Average, Means
from qcomp.core.optimizers.lamb import Lamb, require_bounds, trust_key
from qcomp.core.optimizers.onebit_adam import OneBitAdam
from qcomp.core.optimizers.tensors import copy
from qcomp.core.state import OptimizerState
from qcomp.core.variance.arithmetic import divided
from qcomp.core.variance.late import late_tensors
from qcomp.core.variance.rules import FreezeRule, VarianceStable


class FrozenChange(NamedTuple):
    """What a compressed step changes for a tensor."""

    step: StepNumbers
    """The numbers of the step; their rate contains the trust ratio."""
    trust: Number
    """The trust ratio: the average of the warm-up's trust ratios, times the factor."""
    factor: Number
    momentum: Array
    fresh: Array
    """The fresh variance, which is updated with the reconstructed gradients."""


@dataclass(frozen=True, kw_only=True)
class OneBitLamb(OneBitAdam):
    """1-bit LAMB: exact LAMB until the variance is stable, then a momentum with one bit per element.

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
        True: weight_decay * x is added to the direction, before the trust ratio, as in LAMB. False: it is added to the
        mean gradient after clipping.
    trust_bounds : tuple of two floats, default (0.01, 10.0)
        Smallest and largest trust ratio, the first above 0.
    compressor : Compressor, default ScaledSign(scale="rms")
        Compresses the exchanges of the compressed stage, on workers and servers.
    averaging : Averaging, default Averaging()
        Topology and error feedback of the exchange, see `Averaging`.
    exact : callable or None, default ExactBelow(10_000)
        Policy that gets all tensors and selects the tensors that stay exact, see `ExactBelow`. None compresses
        everything.
    compressors : callable, optional
        Policy that replaces ``compressor``: it returns a compressor for each tensor, or None for a tensor that stays
        exact, see `ByName`. Tensors that ``exact`` selects stay exact in any case. None, the default, uses
        ``compressor`` for all.
    freeze : int or FreezeRule, default VarianceStable()
        When to freeze the variance: the number of exact steps, or a rule such as `VarianceStable`.
    variance_floor : float, default 0.03
        Smallest frozen variance of an element of a compressed tensor, as a fraction of the tensor's mean, from 0 to 1;
        elements that never had a gradient keep a variance of zero, and do not move. With 0, steps divide by the
        unchanged variance, as published, and units that are almost never active, such as dead ReLUs, can ruin a
        training run.
    variance_steps : None, default None
        Must be None: the average of the trust ratios fits only the frozen variance. The compressed means show how much
        the variance has changed since the freeze, see ``factor_bounds``. A re-warm by the ``watch`` measures the
        variance and the average of the trust ratios again.
    watch : VarianceWatch or None, default VarianceWatch()
        Checks in the compressed stage whether the frozen variance still fits the gradients, and warns if not. None
        disables the check.
    trust_decay : float, default 0.9
        Decay rate of the average of the trust ratios in the warm-up, from 0 to below 1.
    factor_bounds : tuple of two floats, default (0.5, 4.0)
        Smallest and largest factor by which the compressed stage multiplies the average of the trust ratios, the first
        above 0.
    factor_change : float, default 0.1
        Largest relative change of a factor per step, from 0 to below 1.

    Notes
    -----
    Warm-up: `Lamb`, and for each tensor an average of its trust ratios c that are not exactly 1: a' = trust_decay a +
    (1 - trust_decay) c, which starts with the first such c. Compressed stage: momentum as in `OneBitAdam`, but each
    compressed tensor is multiplied by a scale before compression, and divided by it afterwards. The scale is fixed at
    the freeze: the mean of |m|_2 / sqrt(size) over the compressed tensors, divided by the tensor's own |m|_2 /
    sqrt(size). The mean gradient is reconstructed from the new momentum, g = (m' - b1 m) / (1 - b1), and updates a
    second, fresh variance f' = b2 f + (1 - b2) g^2, which starts as the frozen v. The trust ratio is a times the factor
    max_j (sqrt(v_j) + eps) / (sqrt(f_j) + eps), clamped to ``factor_bounds`` and to a relative change of
    ``factor_change`` from the last factor, which starts as 1. ``state.numbers`` has ``trust.NAME``, ``average.NAME``
    and ``factor.NAME``. The direction divides by the frozen v. Sends as much as `OneBitAdam`. Source: Li et al., HiPC
    2022 (arXiv 2104.06069), algorithm 1.

    Examples
    --------
    >>> import numpy as np, qcomp
    >>> opt = qcomp.OneBitLamb(learning_rate=0.05, betas=(0.9, 0.9), freeze=20, exact=None)
    >>> def rank_main(comm):
    ...     params = np.ones(100, dtype=np.float32)
    ...     state = opt.init(params, comm)
    ...     for _ in range(60):
    ...         params, state = opt.step(params, params - 2 - comm.rank, state, comm)
    ...     return state.stage, float(abs(params - 2.5).max()) < 0.3
    >>> qcomp.comm.run_local(2, rank_main)
    [('compressed', True), ('compressed', True)]
    """

    compressor: Compressor = ScaledSign(scale="rms")
    freeze: int | FreezeRule = VarianceStable()
    trust_bounds: tuple[float, float] = (0.01, 10.0)
    trust_decay: float = 0.9
    factor_bounds: tuple[float, float] = (0.5, 4.0)
    factor_change: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.variance_steps is not None:
            raise ValueError(
                f"variance_steps is {self.variance_steps!r}; expected None: 1-bit LAMB measures its variance with the "
                "compressed means, see factor_bounds"
            )
        require_bounds("factor_bounds", self.factor_bounds)
        for name in ("trust_decay", "factor_change"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)!r}; expected from 0 to below 1")

    @cached_property
    def adam(self) -> Lamb:
        """Makes the exact steps."""
        return Lamb.within(self)

    def initial_state(
        self, params: Sequence[Array], names: tuple[str, ...], rank: int, size: int
    ) -> OptimizerState:
        """Return moments of zero, in the warm-up, without an average of trust ratios."""
        state = super().initial_state(params, names, rank, size)
        return state._replace(numbers={**state.numbers, **{f"average.{name}": 0.0 for name in names}})

    def enter(self, state: OptimizerState, stage: str) -> OptimizerState:
        """Return the state with which a stage begins; after the warm-up, with a fresh variance, factors and scales."""
        state = super().enter(state, stage)
        return state if stage == "warmup" else self._frozen(state)

    def advance(self, state: OptimizerState, before: OptimizerState) -> OptimizerState:
        """Return the state of `OneBitAdam`; after a freeze, the fresh variance begins as the frozen variance."""
        new = super().advance(state, before)
        if new is state or before.stage == "warmup":
            return new
        if state.stage != new.stage:
            return self._frozen(new)
        late, fresh = late_tensors(new), zip(new.variance, new.arrays["fresh"], strict=True)
        done = [i for i in late_tensors(state) if i not in late]
        chosen = tuple(copy(v) if i in done else f for i, (v, f) in enumerate(fresh))
        return new._replace(arrays={**new.arrays, "fresh": chosen})

    def _exact_step(
        self, params: Any, means: Means, state: OptimizerState
    ) -> tuple[list[Array], OptimizerState]:
        """Make a step of LAMB, and average its trust ratios."""
        new_params, new_state = super()._exact_step(params, means, state)
        return new_params, new_state._replace(numbers={**new_state.numbers, **self.averages(new_state)})

    def _frozen_step(
        self, params: Sequence[Array], means: Means, state: OptimizerState
    ) -> tuple[list[Array], OptimizerState]:
        """Make a step with the mean momentum, the frozen variance, and trust ratios that follow the fresh variance."""
        changes = self.frozen_changes(params, means, state)
        numbers = dict(state.numbers)
        for name, change in zip(state.names, changes, strict=True):
            numbers |= {f"factor.{name}": change.factor, trust_key(name): change.trust}
        moved = primitives.frozen_steps(
            params,
            [c.momentum for c in changes],
            state.variance,
            [c.step for c in changes],
            donate=means.donate,
        )
        new_params, momenta = zip(*moved, strict=True)
        return list(new_params), state._replace(
            step=state.step + 1,
            momentum=momenta,
            arrays={**state.arrays, "fresh": tuple([c.fresh for c in changes])},
            numbers=numbers,
        )

    def frozen_changes(
        self, params: Sequence[Array], means: Means, state: OptimizerState
    ) -> list[FrozenChange]:
        """Return what a compressed step changes for each tensor.

        Parameters
        ----------
        params : sequence of arrays
            The parameters.
        means : Means
            The means of the momenta, each multiplied by its tensor's scale.
        state : OptimizerState
            The state of the last step.
        """
        betas, steps = self.adam.betas_of(state), self.adam.numbers(state)
        values, divisors = means.values, self._scales(state)
        if not self.decoupled_weight_decay:
            values = self.adam.decayed(divided(values, divisors), params, state, of_momenta=True)
            divisors = [1.0] * len(values)
        of_each = zip(betas, steps, divisors, strict=True)
        found = primitives.fresh_variances(
            values,
            state.momentum,
            state.variance,
            state.arrays["fresh"],
            [FreshNumbers(own, step.eps, divisor) for own, step, divisor in of_each],
            donate=means.donate,
        )
        changes = []
        for name, step, p, (m, f, growth) in zip(state.names, steps, params, found, strict=True):
            last, average = state.numbers[f"factor.{name}"], state.numbers[f"average.{name}"]
            factor = self._factor(growth, last) if math.prod(p.shape) else last
            trust = choose(average != 0, average, 1.0) * factor
            changes.append(FrozenChange(step._replace(rate=step.rate * trust), trust, factor, m, f))
        return changes

    def _average(self, values: Sequence[Array], state: OptimizerState, blends: Sequence[Blend]) -> Average:
        """Ask for the mean of the momenta, each scaled so that all compressed tensors have about the same magnitude."""
        scaled = [b._replace(factor=s) for b, s in zip(blends, self._scales(state), strict=True)]
        return super()._average(values, state, scaled)

    def _frozen(self, state: OptimizerState) -> OptimizerState:
        """Return the state after a freeze, with a fresh variance, factors of 1, and the scales of the momenta."""
        return self.begun(state, self.lengths(state))

    def lengths(self, state: OptimizerState) -> list[Number]:
        """Return |m|_2 / sqrt(size) of each momentum, 0 for exact tensors.

        Parameters
        ----------
        state : OptimizerState
            The state of the last step.
        """
        sizes = [math.prod(m.shape) for m in state.momentum]
        squares = primitives.sums_of_squares(state.momentum)
        return [
            root(square / size) if size and not exact else 0.0
            for square, size, exact in zip(squares, sizes, state.exact, strict=True)
        ]

    def begun(self, state: OptimizerState, lengths: Sequence[Number]) -> OptimizerState:
        """Return the state after a freeze, with which the compressed stage begins.

        Parameters
        ----------
        state : OptimizerState
            The state of the last step, whose variance is frozen.
        lengths : sequence of numbers
            From `lengths`.
        """
        mean, scales = mean_of_positive(lengths), []
        for m, length, exact in zip(state.momentum, lengths, state.exact, strict=True):
            fits = length > 0
            values = [] if exact else [choose(fits, mean / choose(fits, length, 1.0), 1.0)]
            scales.append(array_namespace(m).asarray(values, dtype=m.dtype, device=device(m)))
        return state._replace(
            arrays={**state.arrays, "fresh": tuple(map(copy, state.variance)), "scale": tuple(scales)},
            numbers={**state.numbers, **{f"factor.{name}": 1.0 for name in state.names}},
        )

    def _scales(self, state: OptimizerState) -> list[Number]:
        """Return the scale of each tensor's momentum, 1 if the tensor is exact; read from the device all at once."""
        scales = state.arrays["scale"]
        if all(state.exact):
            return [1.0] * len(scales)
        joined = concat([s for s in scales if s.shape[0]])
        read = iter(joined if is_traced(joined) else host_numbers(joined))
        return [next(read) if s.shape[0] else 1.0 for s in scales]

    def averages(self, state: OptimizerState) -> dict[str, Number]:
        """Return the averages of the trust ratios, including the ratios of the last step.

        Parameters
        ----------
        state : OptimizerState
            The state of the last step.
        """
        averages = {}
        for name in state.names:
            trust, average = state.numbers[trust_key(name)], state.numbers[f"average.{name}"]
            new = choose(average != 0, self.trust_decay * average + (1 - self.trust_decay) * trust, trust)
            averages[f"average.{name}"] = choose(trust != 1, new, average)
        return averages

    def _factor(self, growth: Number, last: Number) -> Number:
        """Return the factor of the next trust ratio: ``growth``, limited by `factor_bounds` and by `factor_change`."""
        bounded = clamp(growth, *self.factor_bounds)
        return clamp(bounded, last * (1 - self.factor_change), last * (1 + self.factor_change))
