"""The base of the three optimizers: a first call that does no step, masks, and errors in the state."""

import math
from abc import abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from qcomp.compat.deepspeed.sign_mean import Errors, sign_mean
from qcomp.core.checkpoint.manifest import facts_of
from qcomp.core.errors import NonFiniteError
from qcomp.core.handshake import handshake_stages
from qcomp.core.mean.compressed_mean import MeanState
from qcomp.core.mean.stages import Stages, fuse
from qcomp.core.numeric.arrays import Array, array_namespace, device, sqrt, to_compute_dtype
from qcomp.core.optimizers.base import Optimizer
from qcomp.core.optimizers.compression import EXACT, Average, Means
from qcomp.core.optimizers.groups import require_betas
from qcomp.core.optimizers.nonfinite import name_gradients
from qcomp.core.optimizers.tensors import as_given, as_gradients, as_tensors, zeros_like
from qcomp.core.settings import require
from qcomp.core.state import OptimizerState

__all__ = ["DeepSpeedOptimizer"]

_WORKER, _SERVER = "worker_error", "server_error"


@dataclass(frozen=True, kw_only=True)
class DeepSpeedOptimizer(Optimizer):
    """Base of the optimizers that reproduce DeepSpeed's step by step.

    The first call is counted but changes nothing: DeepSpeed uses it to set up its buffers. No call corrects the bias.
    Weight decay is decoupled.

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

    Notes
    -----
    The exchange depends on parameters as well as gradients, so a step cannot be split into `prepare` and `apply`: drive
    `stages`.
    """

    learning_rate: float | Callable[[int], float] = field(default=1e-3, kw_only=False)
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    exp_avg_mask: Mapping[str, Array] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "betas", tuple(self.betas))  # JSON has lists
        require_betas(self.betas)
        require("eps", self.eps, self.eps > 0, "a number > 0")
        require("clip_norm", self.clip_norm, self.clip_norm is None, "None: clip before the step")

    def own_kinds(self, stage: str) -> tuple[str, ...]:  # noqa: ARG002
        """Return the errors, which differ between ranks."""
        return (_WORKER, _SERVER)

    def initial_state(
        self, params: Sequence[Array], names: tuple[str, ...], rank: int, size: int
    ) -> OptimizerState:
        """Return moments of zero, before the first call."""
        shapes = {name: tuple(p.shape) for name, p in zip(names, params, strict=True)}
        for name, mask in (self.exp_avg_mask or {}).items():
            if name not in shapes:
                raise ValueError(f"exp_avg_mask has {name!r}; expected one of {', '.join(shapes)}")
            if tuple(mask.shape) != shapes[name]:
                raise ValueError(
                    f"exp_avg_mask has shape {tuple(mask.shape)} for {name!r}; expected {shapes[name]}"
                )
        return OptimizerState.first("warmup", names, rank, size)._replace(
            exact=(False,) * len(params), momentum=zeros_like(params), variance=zeros_like(params)
        )

    def prepare(self, grads: Any, state: OptimizerState, *, scale: float = 1.0) -> Average:  # noqa: ARG002
        """Raise TypeError: see the notes."""
        raise TypeError(f"{type(self).__name__} has no prepare; drive stages(params, grads, state) instead")

    def apply(self, params: Any, means: Means, state: OptimizerState) -> tuple[Any, OptimizerState]:  # noqa: ARG002
        """Raise TypeError: see the notes."""
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
        values = [to_compute_dtype(p) for p in tensors]
        try:
            moved, new_state = yield from self._advance(
                values, [to_compute_dtype(g) for g in gradients], state
            )
        except NonFiniteError as error:
            if self.nonfinite == "raise":
                raise (yield from name_gradients(error, gradients, state.names, state)) from error
            return as_given(tensors, params), state._replace(skipped=state.skipped + 1)
        new_params = [
            array_namespace(p).astype(m, p.dtype, copy=False) for p, m in zip(tensors, moved, strict=True)
        ]
        return as_given(new_params, params), new_state._replace(step=state.step + 1)

    def load_stages(
        self,
        saved: Mapping[str, Any] | Sequence[Mapping[str, Any]],
        params: Any,
        *,
        rank: int,
        size: int,
        host: str | None = None,
        names: Sequence[str] | None = None,
        strict: bool = True,
        lost: Literal["raise", "drop"] = "raise",
        number: int = 0,
    ) -> Stages[OptimizerState]:
        """Return the state saved by `state_dict`, including errors; see `qcomp.Optimizer.load_state_dict`.

        DeepSpeed drops the errors on loading, which changes a resumed run; here a run continues as if it had never
        stopped. A state saved by a world of another size is refused, since padding and shards depend on the size.

        Raises
        ------
        ValueError
            As in `qcomp.Optimizer.load_state_dict`; for dicts from another number of ranks, and for ``lost="drop"``.
        """
        if lost != "raise":
            raise ValueError(
                f"lost is {lost!r}; expected 'raise': an error fits only the shard of its own rank"
            )
        if not isinstance(saved, Mapping):
            known = facts_of(
                saved, lambda _: None
            )  # a text if the dicts are damaged, which all ranks learn below
            others = isinstance(known, list) and any(of != size for _, of, _, _ in known)
            told = {"saved by another number of ranks": others}
            yield from handshake_stages(told, size=size, like=as_tensors(params, "params")[0])
            if others:
                raise ValueError(
                    f"saved comes from another number of ranks; expected {size}: the saved errors fit only the "
                    "shards of the old ranks"
                )
        stages = super().load_stages(
            saved, params, rank=rank, size=size, host=host, names=names, strict=strict, number=number
        )
        return (yield from stages)

    @abstractmethod
    def _advance(
        self, params: Sequence[Array], grads: Sequence[Array], state: OptimizerState
    ) -> Stages[tuple[list[Array], OptimizerState]]:
        """Return the parameters and the state, except its step, after any call except the first."""

    def _exact_mean(self, grads: Sequence[Array], state: OptimizerState) -> Stages[list[Array]]:
        means, _ = yield from EXACT.stages(list(grads), MeanState(state.rank, state.size, (), ()))
        return list(means)

    def _sign_means(
        self, values: Mapping[int, Array], state: OptimizerState
    ) -> Stages[tuple[dict[int, Array], OptimizerState]]:
        """Return the compressed means of some tensors, with one message per peer for all, and the new errors."""
        errors = [Errors(*pair) for pair in zip(state.arrays[_WORKER], state.arrays[_SERVER], strict=True)]
        results = yield from fuse([sign_mean(x, errors[i], state.size) for i, x in values.items()])
        means = {}
        for i, (mean, new) in zip(values, results, strict=True):
            means[i], errors[i] = mean, new
        return means, state._replace(arrays={**state.arrays, **_by_kind(errors)})

    def _errors(
        self, state: OptimizerState, counts: Iterable[int] | None = None
    ) -> dict[str, tuple[Array, ...]]:
        """Return zero errors for each tensor, of the tensors' sizes or of the given numbers of elements."""
        sizes = [math.prod(m.shape) for m in state.momentum] if counts is None else counts
        return _by_kind(
            [Errors.zeros(m, count, state.size) for m, count in zip(state.momentum, sizes, strict=True)]
        )

    def _masked(self, values: Sequence[Array], state: OptimizerState) -> list[Array]:
        """Return the values, multiplied by their masks if any."""
        masks = self.exp_avg_mask or {}
        return [
            x * array_namespace(x).asarray(masks[name], dtype=x.dtype, device=device(x))
            if name in masks
            else x
            for x, name in zip(values, state.names, strict=True)
        ]

    def _blended(self, momentum: Sequence[Array], grads: Sequence[Array]) -> list[Array]:
        beta1, _ = self.betas
        return [beta1 * m + (1 - beta1) * g for m, g in zip(momentum, grads, strict=True)]

    def _varied(self, variance: Sequence[Array], grads: Sequence[Array]) -> list[Array]:
        _, beta2 = self.betas
        return [beta2 * v + (1 - beta2) * (g * g) for v, g in zip(variance, grads, strict=True)]

    def _updates(
        self,
        params: Sequence[Array],
        momentum: Sequence[Array],
        variance: Sequence[Array],
        state: OptimizerState,
    ) -> list[Array]:
        """Return m / (sqrt(v) + eps) + weight_decay * p of every tensor."""
        found = []
        for p, m, v, decay in zip(params, momentum, variance, self.weight_decays(state), strict=True):
            update = m / (sqrt(v) + self.eps)
            found.append(update + decay * p if decay > 0 else update)
        return found


def _by_kind(errors: Sequence[Errors]) -> dict[str, tuple[Array, ...]]:
    return {_WORKER: tuple(e.worker for e in errors), _SERVER: tuple(e.server for e in errors)}
