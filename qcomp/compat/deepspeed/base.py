"""The base of the three optimizers: a first call without a step, two stages, masks, and errors in the state."""

import math
from abc import abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from qcomp.compat.deepspeed.sign_mean import Errors, sign_mean
from qcomp.core.errors import NonFiniteError
from qcomp.core.kernels import StepNumbers
from qcomp.core.mean.stages import Stages, fuse
from qcomp.core.numeric.arrays import Array, array_namespace, device, shaped_like, to_compute_dtype
from qcomp.core.optimizers.base import Optimizer
from qcomp.core.optimizers.compression import EXACT, Average, Means
from qcomp.core.optimizers.groups import require_betas
from qcomp.core.optimizers.nonfinite import name_gradients
from qcomp.core.optimizers.tensors import as_given, as_gradients, as_tensors, zeros_like
from qcomp.core.primitives import adam_step, momentum
from qcomp.core.settings import require
from qcomp.core.state import OptimizerState

__all__ = ["Arrays", "DeepSpeedOptimizer", "Moved"]

Arrays = Sequence[Array]
Moved = Stages[tuple[list[Array], OptimizerState]]
"""A call, which returns the parameters and the state, whose step is counted later."""

_KINDS = ("worker_error", "server_error")


@dataclass(frozen=True, kw_only=True)
class DeepSpeedOptimizer(Optimizer):
    """Base of the optimizers that reproduce DeepSpeed's step by step.

    The first call is counted but changes nothing: DeepSpeed uses it to set up its buffers. No call corrects the bias.
    Weight decay is decoupled. A saved state includes the errors, which DeepSpeed drops, and resumes only on as many
    ranks as saved it, since padding and shards depend on their number.

    Parameters
    ----------
    learning_rate, weight_decay, nonfinite, groups
        See `qcomp.Optimizer`. A schedule receives the number of completed calls, including the first call.
    betas : tuple of two floats
        Decay rates of momentum and variance, each from 0 to below 1.
    eps : float
        Added to the square root of the variance, above 0.
    exp_avg_mask : mapping of str to array, optional
        Factors for exchanged momenta, by parameter name, each of the parameter's shape. One bit cannot represent zero,
        so elements that never have a gradient need a 0 here.
    clip_norm, seed
        ``clip_norm`` must be None: clip gradients before the step. ``seed`` has no effect, since nothing is drawn.
    """

    resizes = False
    last_stage = "compressed"
    """The stage with a constant variance, which follows the stage "warmup"."""

    learning_rate: float | Callable[[int], float] = field(default=1e-3, kw_only=False)
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    exp_avg_mask: Mapping[str, Array] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        require_betas(self.betas)
        require("eps", self.eps, self.eps > 0, "a number > 0")
        require("clip_norm", self.clip_norm, self.clip_norm is None, "None: clip before the step")
        for name in [f.name for f in fields(self) if f.type is int and f.name != "seed"]:
            value, least = getattr(self, name), int(not name.endswith("freeze_step"))
            require(name, value, type(value) is int and value >= least, f"an integer, at least {least}")

    def own_kinds(self, stage: str) -> tuple[str, ...]:  # noqa: ARG002
        """Return the errors, which differ between ranks."""
        return _KINDS

    def initial_state(self, params: Arrays, names: tuple[str, ...], rank: int, size: int) -> OptimizerState:
        """Return moments of zero, before the first call."""
        shapes = {name: tuple(p.shape) for name, p in zip(names, params, strict=True)}
        for name, mask in (self.exp_avg_mask or {}).items():
            require("a name in exp_avg_mask", name, name in shapes, f"one of {', '.join(shapes)}")
            shape = tuple(mask.shape)
            require(f"the shape of exp_avg_mask[{name!r}]", shape, shape == shapes[name], f"{shapes[name]}")
        return OptimizerState.first("warmup", names, rank, size)._replace(
            exact=(False,) * len(params), momentum=zeros_like(params), variance=zeros_like(params)
        )

    def enter(self, state: OptimizerState, stage: str) -> OptimizerState:
        """Return the state of the warm-up, or of the last stage with zero errors."""
        if stage != self.last_stage:
            return super().enter(state, stage)
        return state._replace(stage=stage, arrays=self._zero_errors(state))

    def prepare(self, grads: Any, state: OptimizerState, *, scale: float = 1.0) -> Average:  # noqa: ARG002
        """Raise TypeError: what is exchanged depends on the parameters too, so drive `stages`."""
        raise TypeError(f"{type(self).__name__} has no prepare; drive stages(params, grads, state) instead")

    def apply(self, params: Any, means: Means, state: OptimizerState) -> tuple[Any, OptimizerState]:  # noqa: ARG002
        """Raise TypeError, like `prepare`."""
        raise TypeError(f"{type(self).__name__} has no apply; drive stages(params, grads, state) instead")

    def _stages(
        self,
        params: Any,
        grads: Any,
        state: OptimizerState,
        *,
        donate: bool,  # noqa: ARG002 - these steps make new arrays
        left_out: Collection[int],  # noqa: ARG002 - DeepSpeed moves all
    ) -> Stages[tuple[Any, OptimizerState]]:
        tensors = as_tensors(params, "params")
        gradients = as_gradients(grads, tensors, state.names)
        if state.step == 0:
            return as_given(tensors, params), state._replace(step=1)
        step = self._warmup_step if state.stage == "warmup" else self._last_step
        values, computed = (list(map(to_compute_dtype, each)) for each in (tensors, gradients))
        try:
            moved, new_state = yield from step(values, computed, state)
        except NonFiniteError as error:
            if self.nonfinite == "raise":
                raise (yield from name_gradients(error, gradients, state.names, state)) from error
            return as_given(tensors, params), state._replace(skipped=state.skipped + 1)
        return as_given(shaped_like(moved, tensors), params), new_state._replace(step=state.step + 1)

    @abstractmethod
    def _warmup_step(self, params: Arrays, grads: Arrays, state: OptimizerState) -> Moved: ...

    @abstractmethod
    def _last_step(self, params: Arrays, grads: Arrays, state: OptimizerState) -> Moved: ...

    def _zero_errors(self, state: OptimizerState, counts: Sequence[int] = ()) -> dict[str, tuple[Array, ...]]:
        """Return zero errors for each tensor, of its size or of the given number of elements."""
        sizes = counts or [math.prod(m.shape) for m in state.momentum]
        return _by_kind([Errors.zeros(m, n, state.size) for m, n in zip(state.momentum, sizes, strict=True)])

    def _sign_means(
        self, values: Arrays, state: OptimizerState
    ) -> Stages[tuple[list[Array], OptimizerState]]:
        """Return the compressed means of the first tensors, with one message per peer for all, and the new errors."""
        errors = list(map(Errors, *(state.arrays[kind] for kind in _KINDS)))
        pairs = zip(values, errors, strict=False)
        results = yield from fuse([sign_mean(x, error, state.size) for x, error in pairs])
        errors[: len(values)] = [error for _, error in results]
        return [mean for mean, _ in results], state._replace(arrays={**state.arrays, **_by_kind(errors)})

    def _masked(self, values: Arrays, state: OptimizerState) -> tuple[Array, ...]:
        """Return the values, multiplied by their masks if any."""
        masks = self.exp_avg_mask or {}
        return tuple(
            x * array_namespace(x).asarray(masks[name], dtype=x.dtype, device=device(x))
            if name in masks
            else x
            for x, name in zip(values, state.names, strict=True)
        )

    def _blended(self, state: OptimizerState, grads: Arrays) -> tuple[Array, ...]:
        """Return b1 m + (1 - b1) g of every tensor."""
        pairs = zip(state.momentum, grads, strict=True)
        return tuple(momentum(m, g, self.betas[0], 1.0) for m, g in pairs)

    def _varied(self, variance: Arrays, grads: Arrays) -> tuple[Array, ...]:
        """Return b2 v + (1 - b2) g^2 of every tensor."""
        pairs = zip(variance, grads, strict=True)
        return tuple(momentum(v, g * g, self.betas[1], 1.0) for v, g in pairs)

    def _with_moments(self, grads: Arrays, state: OptimizerState) -> Stages[OptimizerState]:
        """Return the state with Adam's moments of the exact mean gradient."""
        means, _ = yield from EXACT.stages(list(grads), state.exchange)
        moments = self._blended(state, means), self._varied(state.variance, means)
        return state._replace(momentum=moments[0], variance=moments[1])

    def _numbers(self, state: OptimizerState) -> list[StepNumbers]:
        """Return the numbers of each tensor for the next step, which corrects no bias."""
        pairs = zip(self.rates(state), self.weight_decays(state), strict=True)
        return [StepNumbers(rate, 1.0, self.eps, decay) for rate, decay in pairs]

    def _moved(self, params: Arrays, state: OptimizerState) -> list[Array]:
        """Return x - rate (m / (sqrt(v) + eps) + weight_decay x) of every tensor."""
        arrays = zip(params, state.momentum, state.variance, self._numbers(state), strict=True)
        return [adam_step(*of_tensor) for of_tensor in arrays]


def _by_kind(errors: Sequence[Errors]) -> dict[str, tuple[Array, ...]]:
    return dict(zip(_KINDS, zip(*errors, strict=True), strict=True))
