"""0/1 Adam as a gradient transformation of optax, inside `jax.shard_map` over a mesh."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from qcomp.core import primitives
from qcomp.core.kernels import StepNumbers, use_kernels
from qcomp.core.numeric.arrays import LIMIT, all_below, divide, to_compute_dtype
from qcomp.core.optimizers.zero_one_adam import ZeroOneAdam
from qcomp.core.variance.arithmetic import bias_corrections, divided
from qcomp.core.variance.rules import FreezeAt
from qcomp.jax.kernels import TracedKernels
from qcomp.jax.mesh import MeshMean, as_varying, everywhere, zero_rows
from qcomp.jax.mesh_state import Apart, Residuals
from qcomp.jax.moves import Array
from qcomp.jax.transforms import (
    WHY,
    Given,
    mean_of,
    rate_of,
    require_params,
    require_settings,
    selected,
    zero_moments,
)
from qcomp.jax.trees import PyTree, Tree
from qcomp.jax.vectors import as_pairs, cut_like, floored_like, from_pairs, joined, update_of

__all__ = ["ZeroOneAdamState", "local_params", "zero_one_adam"]

_WARM_UP, _TOGETHER, _APART = range(3)
"""The stages of a state. The core calls them "warmup", "compressed" and "local"."""


class ZeroOneAdamState(NamedTuple):
    """The state of `zero_one_adam`: arrays only."""

    step: Array
    """Completed steps, int32 of shape ()."""
    skipped: Array
    """Steps that all devices refused, because a value was not finite, int32 of shape ()."""
    stage: Array
    """0 in the warm-up, 1 if the devices are in sync, 2 after steps of each device alone; int32 of shape ()."""
    momentum: PyTree
    """The common momentum of each parameter, in the dtype in which it is computed."""
    variance: PyTree
    """The second moment; bias-corrected once it is frozen."""
    residuals: Residuals
    updates: Array
    """Updates of the variance, int32 of shape ()."""
    frozen: Array
    """The step after which the variance was frozen, int32 of shape (); 0 before."""
    sums: Array
    """The sums of learning rates and of weights since the last synchronisation, in 48 bits: each is the sum of two
    rows, float32 of shape (2, 2)."""
    apart: Apart


def local_params(params: PyTree, state: PyTree) -> PyTree:
    """Return the parameters at which a device computes its next gradient for `zero_one_adam`.

    Call it inside `jax.shard_map`.

    Parameters
    ----------
    params : pytree of arrays
        The common parameters.
    state : pytree
        A `ZeroOneAdamState`, or a state of optax that has one inside.

    Returns
    -------
    pytree of arrays
        The device's own parameters after steps that sent nothing, and the common ones if the devices are in sync.

    Raises
    ------
    ValueError
        If the state has no ZeroOneAdamState inside, or several, as in an `optax.partition` with several labels; or if
        it lacks some of these parameters, or has the rows of several devices.

    Examples
    --------
    See `zero_one_adam`.
    """

    def is_looked_for(part: PyTree) -> bool:
        return isinstance(part, ZeroOneAdamState)

    found = [part for part in jax.tree.leaves(state, is_leaf=is_looked_for) if is_looked_for(part)]
    if len(found) != 1:
        raise ValueError(f"state has {len(found)} states of zero_one_adam; expected one")
    taken, (own,) = Tree.of(params, "params"), found
    rows: list[Any] = taken.like(own.apart.params, "state.apart.params")
    for name, p, row in zip(taken.names, taken.leaves, rows, strict=True):
        if row.shape != (1, *jnp.shape(p)):
            raise ValueError(
                f"state.apart.params has at {name!r} the shape {row.shape}; expected {(1, *jnp.shape(p))}, this "
                "device's row, as inside jax.shard_map with the specs of partition_specs"
            )
    leaves: list[Any] = list(taken.leaves)
    is_apart = own.stage == _APART
    return taken.whole([jnp.where(is_apart, row[0], p) for p, row in zip(leaves, rows, strict=True)])


def zero_one_adam(
    optimizer: ZeroOneAdam, axis_name: str, *, learning_rate: optax.ScalarOrSchedule | None = None
) -> optax.GradientTransformationExtraArgs:
    """Make steps of 0/1 Adam over an axis of the mesh: each step sends one bit per element, all bits, or nothing.

    Parameters
    ----------
    optimizer : ZeroOneAdam
        The settings. ``freeze`` must be a number of steps or None, and ``nonfinite`` "skip"; ``clip_norm``, ``groups``
        and ``rounding`` must have their defaults, and ``averaging`` must not be a PowerSGD. `jax.jit` must be able to
        trace ``variance_steps`` and ``sync_steps``.
    axis_name : str
        The axis of the mesh whose devices are the ranks.
    learning_rate : float, array or schedule of optax, optional
        Replaces the optimizer's learning rate, for instance for `optax.inject_hyperparams`.

    Returns
    -------
    optax.GradientTransformationExtraArgs
        `tx.update` needs the common parameters, and ``local``, the parameters at which this device has computed its
        gradient, from `local_params`. It also takes ``weight``, see `MeshMean`. Updates have the dtype in which they
        are computed, and are 0 in a step that sends nothing.

    Raises
    ------
    TypeError, ValueError
        If the optimizer is not a ZeroOneAdam, or has settings that a compiled program does not support.

    Notes
    -----
    The steps are those of `qcomp.ZeroOneAdam`, for any learning rate, with the same bits for parameters up to float32.
    The caller holds the common parameters, which all devices had after the last synchronisation; evaluate and save
    these. What differs between devices is in ``state.apart``: their parameters, momenta and sums of momenta. These take
    12 bytes per float32 parameter on each device at all times, 4 more than in the core, as the common momentum has its
    own array: JAX would not know that the device's own momenta are equal after a synchronisation. Messages are the
    core's.

    If a gradient of any device is not finite in a step that sends, all devices skip the step: nothing changes but
    ``state.skipped``. In a step that sends nothing, a device with such a gradient repeats its momentum and counts it in
    ``state.apart.repeated``. A gradient counts as not finite if ``local`` is not what `local_params` returns.

    Apply the updates to the common parameters only. No later transformation in a chain may change the updates, since it
    does not act on a device's own parameters. A state that is loaded on another mesh goes on from the last
    synchronisation, see the page on JAX.

    Examples
    --------
    >>> import jax, jax.numpy as jnp, optax, qcomp, qcomp.jax.optax
    >>> mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    >>> settings = qcomp.ZeroOneAdam(
    ...     learning_rate=0.1, freeze=20, sync_steps=qcomp.LocalSteps(8, 4), exact=None, nonfinite="skip"
    ... )
    >>> tx = qcomp.jax.optax.zero_one_adam(settings, "data")
    >>> params = {"w": jnp.ones(8)}
    >>> with jax.set_mesh(mesh):
    ...     state = tx.init(params)
    >>> def step(params, state):
    ...     local = qcomp.jax.optax.local_params(params, state)
    ...     updates, state = tx.update({"w": local["w"] - 2}, state, params, local=local)
    ...     return optax.apply_updates(params, updates), state
    >>> specs = jax.sharding.PartitionSpec(), qcomp.jax.partition_specs(state, "data")
    >>> step = jax.jit(jax.shard_map(step, mesh=mesh, in_specs=specs, out_specs=specs, check_vma=False))
    >>> for _ in range(60):
    ...     params, state = step(params, state)
    >>> int(state.step), bool(abs(params["w"] - 2).max() < 0.3)
    (60, True)
    """
    require_settings(optimizer, ZeroOneAdam, rounding="nearest")
    rule = optimizer.freeze
    if not isinstance(rule, FreezeAt | None):
        raise ValueError(
            f"optimizer has freeze={rule!r}; expected a number of steps or None on a mesh: {WHY}"
        )
    steps = _ZeroOneSteps(mean_of(optimizer, axis_name), optimizer, rate_of(optimizer, learning_rate))
    for name in ("variance_steps", "sync_steps"):
        jax.eval_shape(lambda step, name=name: steps.selects(name, step), jnp.int32(1))
    return optax.GradientTransformationExtraArgs(steps.init, steps.update)


class _TracedPlan(NamedTuple):
    """What a step does, and the numbers that it needs; see `ZeroOneAdam.prepare`."""

    exact: Array
    """Whether the step averages the gradients exactly, and so measures the variance."""
    compressed: Array
    """Whether the step averages the sums of momenta."""
    alone: Array
    """Whether each device makes the step alone. If none of these three is true, the rate is 0."""
    freezes: Array
    """Whether the variance is frozen after the step, if the step is accepted."""
    ends: Array
    """Whether the step is the last of the warm-up, if the step is accepted."""
    of_step: StepNumbers
    of_sum: StepNumbers
    """The numbers of a step that applies the mean of the sums."""
    weight: Array
    """The weight of this step's momentum in the sum."""
    sums: Array
    """The sums of rates and weights with this step, float32 pairs."""
    weights: Array
    """The sum of weights with this step."""
    correction: Array
    """The bias correction of the variance, including the update by this step; 1 if it is frozen."""


class _ZeroOneInputs(NamedTuple):
    """A step's inputs; the elements of all parameters are one vector, since each operation takes compile time."""

    given: Given
    state: ZeroOneAdamState
    plan: _TracedPlan
    gradient: Array
    params: Array
    momentum: Array
    variance: Array
    own_params: Array
    own_momentum: Array

    def pending(self, momentum: Array) -> Array:
        """Return this device's sum of weighted momenta, including this momentum."""
        added: Any = primitives.rounded(self.plan.weight * momentum)
        return jnp.where(self.state.stage == _APART, self.state.apart.pending[0] + added, added)


@dataclass(frozen=True)
class _ZeroOneSteps:
    """The steps of 0/1 Adam on a mesh."""

    mean: MeshMean
    optimizer: ZeroOneAdam
    rate: Callable[[Array], Any]

    def init(self, params: PyTree) -> ZeroOneAdamState:
        """Return moments, residuals and rows of zero."""
        momentum, variance = zero_moments(params, 2)
        vector: Any = jax.eval_shape(lambda: joined(jax.tree.leaves(momentum)))
        rows = Apart(jax.tree.map(jnp.asarray, params), vector, vector, jnp.int32(0))
        step, skipped, stage, updates, frozen = (jnp.int32(0) for _ in range(5))  # each may be donated
        residuals, apart = self.mean.residuals(params), zero_rows(rows, self.mean.axis_name)
        sums = jnp.zeros((2, 2), jnp.float32)
        return ZeroOneAdamState(
            step, skipped, stage, momentum, variance, residuals, updates, frozen, sums, apart
        )

    def update(
        self,
        updates: PyTree,
        state: ZeroOneAdamState,
        params: PyTree = None,
        *,
        local: PyTree = None,
        weight: jax.Array | float | None = None,
        **others: object,  # noqa: ARG002 - of other transformations in a chain
    ) -> tuple[PyTree, ZeroOneAdamState]:
        """Return the updates of the common parameters, and the state after the step."""
        require_params(params)
        if local is None:
            raise ValueError(
                "local is None; expected the parameters at which the gradients were computed: compute them at "
                "local = qcomp.jax.optax.local_params(params, state), and pass local=local to tx.update"
            )
        given = Given.of(updates, params, state.momentum, weight, self.mean.axis_name)
        with use_kernels(TracedKernels(state.step)):
            begun = self._begun(given, state, local)
            plan = begun.plan
            gradient, accepted = jax.lax.cond(
                plan.exact,
                lambda: self._exact_mean(begun),
                lambda: (jnp.zeros_like(begun.momentum), jnp.bool_(True)),
            )
            sums, residuals, accepted = jax.lax.cond(
                plan.compressed,
                lambda: self._mean_of_sums(begun, accepted),
                lambda: (jnp.zeros_like(begun.momentum), state.residuals, accepted),
            )
            sends = plan.exact | plan.compressed
            moved = jax.lax.cond(
                sends & accepted,
                lambda: self._together(begun, gradient, sums),
                lambda: (jnp.zeros_like(begun.momentum), begun.momentum, begun.variance),
            )
            apart = jax.lax.cond(plan.alone, lambda: self._alone(begun), lambda: state.apart)
            took, together = accepted.astype(jnp.int32), sends & accepted
            stage = jnp.where(together & ((state.stage != _WARM_UP) | plan.ends), _TOGETHER, state.stage)
            new = ZeroOneAdamState(
                state.step + took,
                state.skipped + 1 - took,
                jnp.where(plan.alone, _APART, stage),
                cut_like(moved[1], state.momentum),
                cut_like(moved[2], state.variance),
                residuals,
                state.updates + (plan.exact & accepted),
                jnp.where(plan.freezes & accepted, state.step + 1, state.frozen),
                jnp.where(plan.alone, plan.sums, jnp.where(together, 0, state.sums)),
                apart,
            )
            return cut_like(moved[0], given.tree.whole(given.momentum)), new

    def selects(self, name: str, step: Array) -> Array:
        """Return whether a schedule of the settings selects a traced step."""
        return selected(name, getattr(self.optimizer, name), step) > 0

    def _plan(self, state: ZeroOneAdamState, dtype: Any) -> _TracedPlan:
        """Return the plan of the next step; see `ZeroOneAdam._plan_of`."""
        optimizer, rule = self.optimizer, self.optimizer.freeze
        count, rate = state.step + 1, self.rate(state.step)
        warm, apart, unfrozen = state.stage == _WARM_UP, state.stage == _APART, state.frozen == 0
        exact = warm | (unfrozen & self.selects("variance_steps", count))
        moves = (jnp.asarray(rate) != 0) | apart
        due = self.selects("sync_steps", count - state.frozen)
        freezes = jnp.bool_(False)
        if isinstance(rule, FreezeAt):
            due |= unfrozen
            freezes = unfrozen & (count >= rule.step)
        compressed = jnp.where(exact, apart, moves & due)
        freezes &= exact | compressed
        ends = warm & (freezes | ~unfrozen | ~self.selects("variance_steps", count + 1))
        (of_variance,) = bias_corrections([optimizer.betas], 1, [state.updates + exact])
        with jax.enable_x64(True):
            wide = jnp.asarray(rate, jnp.float64)
            (of_momentum,) = bias_corrections([optimizer.betas], 0, [count])
            weight = wide / of_momentum
            rates, weights = sums = from_pairs(state.sums) + jnp.stack([wide, weight])
            pairs: list[Any] = [wide, jnp.asarray(of_momentum), rates, rates / weights]
            one, correction, both, of_both = [x.astype(dtype) for x in pairs]
            kept, weight, weights = as_pairs(sums), weight.astype(dtype), weights.astype(dtype)
        of_step = StepNumbers(one, correction, optimizer.eps, optimizer.weight_decay)
        of_sum = of_step._replace(rate=both, correction=of_both)
        correction = jnp.where(unfrozen, of_variance, 1)
        alone = ~exact & ~compressed & moves
        return _TracedPlan(
            exact, compressed, alone, freezes, ends, of_step, of_sum, weight, kept, weights, correction
        )

    def _begun(self, given: Given, state: ZeroOneAdamState, local: PyTree) -> _ZeroOneInputs:
        """Return the inputs of a step; gradients at other parameters than the device's own become NaN."""
        tree, axis, apart = given.tree, self.mean.axis_name, state.stage == _APART
        own = [row[0] for row in tree.like(state.apart.params, "state.apart.params")]
        own_momentum: Any = state.apart.momentum[0]
        params, own_params, at = (
            joined([to_compute_dtype(jnp.asarray(x)) for x in leaves])
            for leaves in (given.params, own, tree.like(local, "local"))
        )
        momentum, variance = joined(given.momentum), joined(tree.like(state.variance, "variance"))
        own_params = jnp.where(apart, own_params, as_varying(params, axis))
        own_momentum = jnp.where(apart, own_momentum, as_varying(momentum, axis))
        gradient = jnp.where(jnp.all(at == own_params), joined(given.gradients), jnp.nan)
        plan = self._plan(state, momentum.dtype)
        return _ZeroOneInputs(
            given, state, plan, gradient, params, momentum, variance, own_params, own_momentum
        )

    def _exact_mean(self, begun: _ZeroOneInputs) -> tuple[Array, Array]:
        """Return the exact mean of the gradients, and whether it was accepted."""
        state, tree = begun.state, begun.given.tree
        gradients = cut_like(begun.gradient, tree.whole(begun.given.momentum))
        means, _, accepted = self.mean.average(gradients, state.residuals, state.step, exactly=True)
        return joined(tree.like(means, "means")), accepted

    def _mean_of_sums(self, begun: _ZeroOneInputs, accepted: Array) -> tuple[Array, Residuals, Array]:
        """Return the mean of the sums of momenta, the residuals, and whether all means were accepted."""
        state, tree = begun.state, begun.given.tree
        momentum: Any = primitives.momentum(begun.own_momentum, begun.gradient, self.optimizer.betas[0], 1.0)
        # If the mean of the gradients was refused, so is this one, and the residuals stay as they are.
        sums = jnp.where(accepted, begun.pending(momentum), jnp.nan)
        means, residuals, accepted = self.mean.average(
            cut_like(sums, tree.whole(begun.given.momentum)), state.residuals, state.step
        )
        return joined(tree.like(means, "means")), residuals, accepted

    def _together(self, begun: _ZeroOneInputs, gradient: Array, sums: Array) -> tuple[Array, Array, Array]:
        """Return updates, momenta and variances after a step with these means; see `ZeroOneAdam.apply`."""
        plan, (beta1, beta2), warm = begun.plan, self.optimizer.betas, begun.state.stage == _WARM_UP
        of_sums: Any = primitives.rounded(divide(sums, plan.weights))
        of_mean: Any = primitives.momentum(begun.momentum, gradient, beta1, 1.0)
        momentum = jnp.where(plan.compressed, of_sums, of_mean)
        measured: Any = primitives.momentum(begun.variance, gradient * gradient, beta2, 1.0)
        raw = jnp.where(plan.exact, measured, begun.variance)
        # The last step of the warm-up still divides by the variance without a floor; later steps use the floor.
        corrected: Any
        divisor: Any
        (corrected,) = divided([raw], [plan.correction])
        variance = jnp.where(warm & plan.freezes, corrected, raw)
        exact = self.mean.keeps_exact(begun.given.tree.whole(begun.given.gradients))
        variance = jax.lax.cond(
            plan.ends | (plan.exact & ~warm),
            lambda: floored_like(variance, begun.given.momentum, exact, self.optimizer.variance_floor),
            lambda: variance,
        )
        (divisor,) = divided([jnp.where(warm, raw, variance)], [plan.correction])
        of_step, of_sum = plan.of_step, plan.of_sum
        chosen: list[Any] = [
            jnp.where(plan.compressed, x, y) for x, y in zip(of_sum[:2], of_step[:2], strict=True)
        ]
        numbers: Any = of_step._replace(rate=chosen[0], correction=chosen[1])
        momentum = jnp.where(warm | (divisor > 0), momentum, 0)
        direction = primitives.direction(begun.params, momentum, divisor, numbers)
        variance = jnp.where(plan.freezes & ~warm, divisor, variance)
        return update_of(direction, numbers.rate), momentum, variance

    def _alone(self, begun: _ZeroOneInputs) -> Apart:
        """Return what this device has after a step of its own; see `ZeroOneAdam._local_step`."""
        state, plan = begun.state, begun.plan
        momentum: Any = primitives.momentum(begun.own_momentum, begun.gradient, self.optimizer.betas[0], 1.0)
        fits = everywhere(all_below(momentum, LIMIT), self.mean.axis_name)
        momentum = jnp.where(fits, momentum, begun.own_momentum)
        (divisor,) = divided([begun.variance], [plan.correction])
        moved = primitives.frozen_steps([begun.own_params], [momentum], [divisor], [plan.of_step])
        ((params, masked),) = moved
        return Apart(
            cut_like(params, state.apart.params),
            masked[None],
            begun.pending(momentum)[None],
            state.apart.repeated + 1 - fits.astype(jnp.int32),
        )
