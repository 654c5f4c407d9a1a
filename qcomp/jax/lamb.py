"""1-bit LAMB as a gradient transformation of optax, inside `jax.shard_map` over a mesh."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from qcomp.core import primitives
from qcomp.core.kernels import use_kernels
from qcomp.core.optimizers.compression import Means
from qcomp.core.optimizers.lamb import trust_key
from qcomp.core.optimizers.onebit_lamb import OneBitLamb
from qcomp.core.state import OptimizerState
from qcomp.core.variance.arithmetic import bias_corrections, frozen
from qcomp.core.variance.rules import FreezeAt
from qcomp.jax.kernels import TracedKernels
from qcomp.jax.mesh import MeshMean
from qcomp.jax.mesh_state import Residuals
from qcomp.jax.moves import Array
from qcomp.jax.transforms import (
    WHY,
    Given,
    mean_of,
    rate_of,
    require_params,
    require_settings,
    zero_moments,
)
from qcomp.jax.trees import PyTree
from qcomp.jax.vectors import as_pairs, from_pairs, update_of

__all__ = ["OneBitLambState", "onebit_lamb"]


class OneBitLambState(NamedTuple):
    """The state of `onebit_lamb`: arrays only."""

    step: Array
    """Completed steps, int32 of shape ()."""
    skipped: Array
    """Steps that were refused, because a value was not finite, int32 of shape ()."""
    momentum: PyTree
    """The momentum of each parameter, in the dtype in which it is computed."""
    variance: PyTree
    """The second moment; after the warm-up, the frozen variance, which is constant and bias-corrected."""
    fresh: PyTree
    """The second variance of the compressed stage, which follows the gradients."""
    scale: Array
    """The scale of each tensor's momentum in the compressed stage, of shape (tensors,)."""
    average: Array
    """The average of each tensor's trust ratios, in 48 bits: the sum of two rows, float32 of shape (2, tensors)."""
    factor: Array
    """The last factor that multiplied each tensor's average; two rows, as in ``average``."""
    residuals: Residuals
    frozen: Array
    """The step after which the variance was frozen, int32 of shape (); 0 in the warm-up."""


def onebit_lamb(
    optimizer: OneBitLamb, axis_name: str, *, learning_rate: optax.ScalarOrSchedule | None = None
) -> optax.GradientTransformationExtraArgs:
    """Make steps of 1-bit LAMB over an axis of the mesh: exact steps, then compressed steps with a frozen variance.

    Parameters
    ----------
    optimizer : OneBitLamb
        The settings. ``freeze`` must be a number of steps, ``nonfinite`` "skip" and ``watch`` None; ``clip_norm``,
        ``groups`` and ``rounding`` must have their defaults, and ``averaging`` must not be a PowerSGD.
    axis_name : str
        The axis of the mesh whose devices are the ranks.
    learning_rate : float, array or schedule of optax, optional
        Replaces the optimizer's learning rate, for instance for `optax.inject_hyperparams`.

    Returns
    -------
    optax.GradientTransformationExtraArgs
        `tx.update` needs the parameters, returns updates in the dtype in which they are computed, and also takes
        ``weight``, see `MeshMean`. If a gradient on any device is not finite, the step is skipped on all: nothing
        changes but the count of skipped steps.

    Raises
    ------
    TypeError, ValueError
        If the optimizer is not a OneBitLamb, or has settings that a compiled program does not support.

    Notes
    -----
    The steps are those of `qcomp.OneBitLamb`, with the same bits, for any learning rate. Trust ratios are computed in
    float64, as in the core: a few numbers for each tensor. Tensors of one shape are computed together; each further
    shape adds its own sums for norms to the program, in the fixed order of the core.

    No later transformation in a chain should scale the updates, since these already contain the trust ratios.

    Examples
    --------
    >>> import jax, jax.numpy as jnp, optax, qcomp, qcomp.jax.optax
    >>> mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    >>> settings = qcomp.OneBitLamb(
    ...     learning_rate=0.05, betas=(0.9, 0.9), freeze=20, exact=None, watch=None, nonfinite="skip"
    ... )
    >>> tx = qcomp.jax.optax.onebit_lamb(settings, "data")
    >>> params = {"w": jnp.ones(8)}
    >>> with jax.set_mesh(mesh):
    ...     state = tx.init(params)
    >>> everywhere, specs = jax.sharding.PartitionSpec(), qcomp.jax.partition_specs(state, "data")
    >>> def step(params, state):
    ...     updates, state = tx.update({"w": params["w"] - 2}, state, params)
    ...     return optax.apply_updates(params, updates), state
    >>> specs = everywhere, specs
    >>> step = jax.jit(jax.shard_map(step, mesh=mesh, in_specs=specs, out_specs=specs, check_vma=False))
    >>> for _ in range(60):
    ...     params, state = step(params, state)
    >>> int(state.step), bool(abs(params["w"] - 2).max() < 0.3)
    (60, True)
    """
    require_settings(optimizer, OneBitLamb, watch=None, rounding="nearest")
    rule = optimizer.freeze
    if not isinstance(rule, FreezeAt):
        raise ValueError(f"optimizer has freeze={rule!r}; expected a number of steps on a mesh: {WHY}")
    mean, rate = mean_of(optimizer, axis_name), rate_of(optimizer, learning_rate)
    steps = _LambSteps(mean, optimizer, rule.step, rate)
    return optax.GradientTransformationExtraArgs(steps.init, steps.update)


class _LambTensors(NamedTuple):
    """The arrays that a step changes, by tensor."""

    momentum: tuple[Array, ...]
    variance: tuple[Array, ...]
    fresh: tuple[Array, ...]
    scale: Array
    average: Array
    factor: Array


class _LambInputs(NamedTuple):
    """A step's inputs."""

    optimizer: OneBitLamb
    given: Given
    exact: tuple[bool, ...]
    old: _LambTensors
    state: OneBitLambState

    @property
    def numbers(self) -> dict[str, list[Array]]:
        """The average and the factor of each tensor, float64."""
        pairs = {"average": self.old.average, "factor": self.old.factor}
        return {kind: list(from_pairs(pair)) for kind, pair in pairs.items()}

    @property
    def scales(self) -> list[Array]:
        """The scale of each tensor, as the core keeps it."""
        return [
            self.old.scale[i : i if exact else i + 1].astype(m.dtype)
            for i, (m, exact) in enumerate(zip(self.old.momentum, self.exact, strict=True))
        ]

    def each(self, function: Callable[..., Any], *columns: Sequence[Array]) -> list[Any]:
        """Call a function for each tensor, and return the results.

        The function is given whether the tensor is exact, and its entry of each column. Tensors of one shape are
        computed together, so that each further tensor adds little to the program.
        """
        alike = defaultdict(list)
        for i, (exact, m) in enumerate(zip(self.exact, self.old.momentum, strict=True)):
            alike[exact, m.shape, m.dtype].append(i)
        found: list[Any] = [None] * len(self.exact)
        for (exact, *_), numbers in alike.items():
            stacked = [jnp.stack([column[i] for i in numbers]) for column in columns]
            results = jax.vmap(partial(function, exact))(*stacked)
            for place, i in enumerate(numbers):
                found[i] = jax.tree.map(lambda x, place=place: x[place], results)
        return found

    def core(self, exact: bool, **given: Any) -> OptimizerState:
        """Return the state of one tensor, as the core keeps it: moments, further arrays, and numbers."""
        numbers = {f"{kind}.{_NAME}": x for kind, x in given.items() if kind in ("average", "factor")}
        arrays = {kind: (x,) for kind, x in given.items() if kind in ("fresh", "scale")}
        moments: dict[str, Any] = {k: (x,) for k, x in given.items() if k in ("momentum", "variance")}
        first = OptimizerState.first("compressed", (_NAME,), 0, 1)
        return first._replace(step=self.state.step, exact=(exact,), arrays=arrays, numbers=numbers, **moments)


_NAME = "tensor"
"""The name of a tensor whose step is computed alone."""

_Moved = tuple[list[Array], _LambTensors, Residuals, Array]
"""Updates, what the step changes, residuals, and whether the step was accepted."""


@dataclass(frozen=True)
class _LambSteps:
    """The steps of 1-bit LAMB on a mesh."""

    mean: MeshMean
    optimizer: OneBitLamb
    freeze: int
    rate: Callable[[Array], Any]

    def init(self, params: PyTree) -> OneBitLambState:
        """Return moments and residuals of zero."""
        m, v, fresh = zero_moments(params, 3)
        count = len(jax.tree.leaves(m))
        scale = jnp.ones(count, jnp.result_type(*jax.tree.leaves(m)))
        average, factor = (jnp.zeros((2, count), jnp.float32).at[0].set(first) for first in (0, 1))
        residuals = self.mean.residuals(params)
        # Three arrays instead of one, so that each may be donated.
        step, skipped, frozen_at = jnp.int32(0), jnp.int32(0), jnp.int32(0)
        return OneBitLambState(step, skipped, m, v, fresh, scale, average, factor, residuals, frozen_at)

    def update(
        self,
        updates: PyTree,
        state: OneBitLambState,
        params: PyTree = None,
        *,
        weight: jax.Array | float | None = None,
        **others: object,  # noqa: ARG002 - of other transformations in a chain
    ) -> tuple[PyTree, OneBitLambState]:
        """Return the updates of the step, and the state after it."""
        require_params(params)
        given = Given.of(updates, params, state.momentum, weight, self.mean.axis_name)
        taken = given.tree
        m, v, fresh = (tuple(taken.like(getattr(state, kind), kind)) for kind in _LambTensors._fields[:3])
        old = _LambTensors(m, v, fresh, state.scale, state.average, state.factor)
        rate = self.rate(state.step)
        optimizer = replace(self.optimizer, learning_rate=lambda _: rate)
        exact = self.mean.keeps_exact(updates)
        begun = _LambInputs(optimizer, given, exact, old, state)
        with use_kernels(TracedKernels(state.step)):
            steps = partial(self._warm_up, begun), partial(self._compress, begun)
            moved, new, residuals, accepted = jax.lax.cond(state.frozen == 0, *steps)
        moved = [jnp.where(accepted, u, jnp.zeros_like(u)) for u in moved]
        kept = jax.tree.map(lambda after, before: jnp.where(accepted, after, before), new, old)
        m, v, fresh = (taken.whole(list(arrays)) for arrays in kept[:3])
        took = accepted.astype(jnp.int32)
        count = state.step + took
        freezes = accepted & (state.frozen == 0) & (count >= self.freeze)
        frozen = jnp.where(freezes, count, state.frozen)
        skipped = state.skipped + 1 - took
        numbers = kept.scale, kept.average, kept.factor
        after = OneBitLambState(count, skipped, m, v, fresh, *numbers, residuals, frozen)
        return taken.whole(moved), after

    def _warm_up(self, begun: _LambInputs) -> _Moved:
        """Make an exact step of LAMB; the last step of the warm-up freezes the variance."""
        optimizer, given, state, old = begun.optimizer, begun.given, begun.state, begun.old
        taken, betas = given.tree, [optimizer.betas]
        wide = taken.whole(given.gradients)
        means, residuals, accepted = self.mean.average(wide, state.residuals, state.step, exactly=True)

        def step(exact: bool, p: Array, mean: Array, *given: Array) -> Any:
            kinds = "momentum", "variance", "average"
            core = begun.core(exact, **dict(zip(kinds, given, strict=True)))
            corrections = bias_corrections(betas, 1, [state.step + 1])
            averaged = Means((mean,), core.exchange)
            (change,) = optimizer.adam.changes([p], averaged, core, corrections=corrections)
            core = core._replace(numbers={**core.numbers, trust_key(_NAME): change.trust})
            (average,) = optimizer.averages(core).values()
            return update_of(change.direction, change.rate), change.momentum, change.variance, average

        def frozen_one(exact: bool, m: Array, v: Array) -> Any:
            core = begun.core(exact, momentum=m, variance=v)
            corrections = bias_corrections(betas, 1, [state.step + 1])
            (variance,) = frozen([v], corrections, [exact], optimizer.variance_floor)
            (length,) = optimizer.lengths(core)
            return variance, jnp.asarray(length)

        with jax.enable_x64(True):
            columns = given.params, taken.like(means, "means"), old.momentum, old.variance
            found = begun.each(step, *columns, begun.numbers["average"])
            moved, momentum, variance, averages = map(tuple, zip(*found, strict=True))
            new = old._replace(momentum=momentum, variance=variance, average=as_pairs(jnp.stack(averages)))

            def freeze() -> _LambTensors:
                variance, lengths = map(
                    tuple, zip(*begun.each(frozen_one, momentum, new.variance), strict=True)
                )
                core = OptimizerState.first("compressed", taken.names, 0, 1)
                core = core._replace(exact=begun.exact, momentum=momentum, variance=variance)
                scales = optimizer.begun(core, lengths).arrays["scale"]
                joined = [*map(partial(_or_one, dtype=old.scale.dtype), scales)]
                return new._replace(variance=variance, fresh=variance, scale=jnp.stack(joined))

            new = jax.lax.cond(state.step + 1 >= self.freeze, freeze, lambda: new)
        return list(moved), new, residuals, accepted

    def _compress(self, begun: _LambInputs) -> _Moved:
        """Make a step with the compressed mean of the scaled momenta."""
        optimizer, given, state, old = begun.optimizer, begun.given, begun.state, begun.old
        taken, (beta1, _) = given.tree, optimizer.betas
        values, momenta = (
            [s[0] * x if s.size else x for x, s in zip(xs, begun.scales, strict=True)]
            for xs in (given.gradients, old.momentum)
        )
        means, residuals, accepted = self.mean.average(
            taken.whole(values), state.residuals, state.step, momenta=taken.whole(momenta), beta=beta1
        )

        kinds = "momentum", "fresh", "scale", "average", "factor"

        def step(exact: bool, p: Array, mean: Array, v: Array, *given: Array) -> Any:
            core = begun.core(exact, variance=v, **dict(zip(kinds, given, strict=True)))
            (change,) = optimizer.frozen_changes([p], Means((mean,), core.exchange), core)
            moved = update_of(primitives.direction(p, change.momentum, v, change.step), change.step.rate)
            return moved, change.momentum, change.fresh, change.factor

        with jax.enable_x64(True):
            columns = given.params, taken.like(means, "means"), old.variance, old.momentum, old.fresh
            found = begun.each(step, *columns, begun.scales, *begun.numbers.values())
            moved, momentum, fresh, factors = map(tuple, zip(*found, strict=True))
            new = old._replace(momentum=momentum, fresh=fresh, factor=as_pairs(jnp.stack(factors)))
        return list(moved), new, residuals, accepted


def _or_one(scale: Array, dtype: Any) -> Array:
    """Return the scale of a tensor, 1 if it is exact."""
    return scale[0].astype(dtype) if scale.size else jnp.ones((), dtype)
