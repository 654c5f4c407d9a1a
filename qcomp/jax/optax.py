"""Compressed means and 1-bit Adam as gradient transformations of optax, inside `jax.shard_map` over a mesh.

    tx = optax.chain(qcomp.jax.optax.compressed(qcomp.MinMaxUInt8(), "data"), optax.adam(1e-3))
    tx = qcomp.jax.optax.onebit_adam(1e-3, freeze=1000, axis_name="data")

They take the gradients of one device, and are chained, scheduled and saved like all transformations of optax.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from qcomp.core import primitives
from qcomp.core.compressor import Compressor
from qcomp.core.compressors.sign import ScaledSign
from qcomp.core.kernels import AdamNumbers, StepNumbers, use_kernels
from qcomp.core.mean.averaging import PowerSGD
from qcomp.core.optimizers.adam import Adam
from qcomp.core.policies.by_name import CompressorPolicy
from qcomp.core.policies.exact_below import ExactBelow, ExactPolicy
from qcomp.core.variance.arithmetic import (
    bias_corrections,
    divided,
    kept_after,
    measured,
    step_on_codes,
)
from qcomp.core.variance.policy import VariancePolicy
from qcomp.core.variance.rules import FreezeAt
from qcomp.core.variance.schedules import Schedule
from qcomp.jax.kernels import FromTable, TracedKernels
from qcomp.jax.lamb import OneBitLambState, onebit_lamb
from qcomp.jax.mesh import MeshMean
from qcomp.jax.mesh_state import MeshState, Residuals
from qcomp.jax.moves import Array
from qcomp.jax.muon import MuonState, muon
from qcomp.jax.transforms import Given, selected, zero_moments
from qcomp.jax.trees import PyTree
from qcomp.jax.vectors import correction, cut_like, floored_like, joined
from qcomp.jax.zero_one import ZeroOneAdamState, local_params, zero_one_adam

__all__ = [
    "MuonState",
    "OneBitAdamState",
    "OneBitLambState",
    "ZeroOneAdamState",
    "compressed",
    "local_params",
    "muon",
    "onebit_adam",
    "onebit_lamb",
    "scale_by_onebit_adam",
    "zero_one_adam",
]


_Moved = tuple[Array, Array, Array, Residuals, Array]
"""Directions, momenta and variances, each of all parameters as one vector; residuals; whether the step was accepted."""

_ALWAYS = 2**31 - 1
"""A number of steps that no run reaches, for `optax.apply_if_finite`."""


def compressed(
    compressor: Compressor,
    axis_name: str,
    *,
    topology: str = "two_phase",
    feedback: bool = True,
    exact: ExactPolicy | None = ExactBelow(10_000),
    compressors: CompressorPolicy | None = None,
    seed: int = 0,
    averaging: PowerSGD | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Replace each device's gradients by their compressed mean over an axis of the mesh.

    Parameters
    ----------
    compressor, axis_name, topology, feedback, exact, compressors, seed, averaging
        See `MeshMean`, which computes the mean.

    Returns
    -------
    optax.GradientTransformationExtraArgs
        Its state is a `MeshState`; `partition_specs` says how `jax.shard_map` must cut it.

    Notes
    -----
    In a chain, earlier transformations see the gradients of one device: `optax.clip_by_global_norm` clips each device's
    gradients separately. Later transformations see the mean, the same on all devices. If a gradient on any device is
    not finite, the mean is NaN on all, and residuals stay as they are; put the later transformations into
    `optax.apply_if_finite` to skip such steps.

    `tx.update` also takes ``weight``, how much this device's gradients count, see `MeshMean`. So does a chain:
    ``tx.update(gradients, state, params, weight=tokens)``.

    Do not let Adam, RMSprop or others that divide by averages of squares follow a compressor with one bit, such as
    `ScaledSign`: it gives all gradients in a bucket the same square, and training is far worse. A transformation does
    not see what follows it, so nothing warns. Take `onebit_adam`, or 8 bits, such as `MinMaxUInt8`; one bit suits
    `optax.sgd`.

    With a compressor without ``traits.keeps_zero``, such as `ScaledSign`, elements whose gradients are 0 on all devices
    may get a mean other than 0. Leave tensors with padding or pruned weights exact, or multiply the mean by a mask.

    Examples
    --------
    >>> import jax, jax.numpy as jnp, optax, qcomp, qcomp.jax.optax
    >>> mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    >>> tx = optax.chain(qcomp.jax.optax.compressed(qcomp.ScaledSign(), "data", exact=None), optax.sgd(0.5))
    >>> params = {"w": jnp.ones(8)}
    >>> with jax.set_mesh(mesh):
    ...     state = tx.init(params)
    >>> def step(params, state, target):
    ...     grads = jax.grad(lambda p: jnp.sum((p["w"] - target) ** 2) / 2)(params)
    ...     updates, state = tx.update(grads, state, params)
    ...     return optax.apply_updates(params, updates), state
    >>> everywhere, specs = jax.sharding.PartitionSpec(), qcomp.jax.partition_specs(state, "data")
    >>> step = jax.shard_map(
    ...     step,
    ...     mesh=mesh,
    ...     in_specs=(everywhere, specs, everywhere),
    ...     out_specs=(everywhere, specs),
    ...     check_vma=False,
    ... )
    >>> params, state = jax.jit(step, donate_argnums=(0, 1))(params, state, 3.0)
    >>> float(params["w"][0])
    2.0
    """
    mean = MeshMean(compressor, axis_name, topology, feedback, exact, compressors, seed, averaging)

    def update(
        updates: PyTree,
        state: MeshState,
        params: PyTree = None,
        *,
        weight: jax.Array | float | None = None,
        **others: object,
    ) -> tuple[PyTree, MeshState]:
        del params, others
        return mean(updates, state, weight=weight)

    return optax.GradientTransformationExtraArgs(mean.init, update)


class OneBitAdamState(NamedTuple):
    """The state of `scale_by_onebit_adam`: arrays only."""

    step: Array
    """Completed steps, int32 of shape ()."""
    skipped: Array
    """Steps that were refused, because a value was not finite, int32 of shape ()."""
    momentum: PyTree
    """Adam's first moment of each parameter, in the dtype in which it is computed."""
    variance: PyTree
    """Adam's second moment; after the warm-up, the frozen variance, which is constant and bias-corrected."""
    residuals: Residuals
    frozen: Array
    """The step after which the variance was frozen, int32 of shape (); 0 in the warm-up."""
    measured: Array | tuple[()] = ()
    """The step that last measured the variance, int32 of shape (); empty without ``variance_steps``."""


def scale_by_onebit_adam(
    freeze: int,
    axis_name: str,
    *,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    variance_floor: float = 0.03,
    variance_steps: Schedule | None = None,
    compressor: Compressor = ScaledSign(scale="rms"),
    topology: str = "two_phase",
    feedback: bool = True,
    exact: ExactPolicy | None = ExactBelow(10_000),
    compressors: CompressorPolicy | None = None,
    seed: int = 0,
) -> optax.GradientTransformationExtraArgs:
    """Rescale gradients as `qcomp.OneBitAdam` does, without a learning rate: see `onebit_adam`.

    Parameters
    ----------
    freeze, axis_name, b1, b2, eps, variance_floor, variance_steps, compressor
        See `onebit_adam`.
    topology, feedback, exact, compressors, seed
        See `MeshMean`.

    Returns
    -------
    optax.GradientTransformationExtraArgs
        Its state is a `OneBitAdamState`. If a value on any device is not finite, the result is NaN on all devices, and
        moments and residuals stay as they are.
    """
    _require_no_arrays(freeze=freeze, b1=b1, b2=b2, eps=eps, variance_floor=variance_floor)
    if type(freeze) is not int or freeze < 1:
        raise ValueError(f"freeze is {freeze!r}; expected the number of exact steps, an int of at least 1")
    adam = Adam(learning_rate=0.0, betas=(b1, b2), eps=eps)  # checks these
    VariancePolicy(FreezeAt(freeze), variance_floor, variance_steps)  # checks these
    mean = MeshMean(compressor, axis_name, topology, feedback, exact, compressors, seed)
    steps = _OneBitAdam(mean, adam, freeze, variance_floor, variance_steps)
    return optax.GradientTransformationExtraArgs(steps.init, steps.update)


class _Begun(NamedTuple):
    """A step's inputs. All moments are one vector, since each operation on each array takes compile time."""

    given: Given
    momentum: Array
    variance: Array
    state: OneBitAdamState
    numbers: StepNumbers


@dataclass(frozen=True)
class _OneBitAdam:
    """The steps of 1-bit Adam on a mesh."""

    mean: MeshMean
    adam: Adam
    freeze: int
    floor: float
    schedule: Schedule | None

    def init(self, params: PyTree) -> OneBitAdamState:
        """Return moments and residuals of zero."""
        momentum, variance = zero_moments(params, 2)
        last = () if self.schedule is None else jnp.int32(0)
        residuals = self.mean.residuals(params)
        return OneBitAdamState(jnp.int32(0), jnp.int32(0), momentum, variance, residuals, jnp.int32(0), last)

    def update(
        self,
        updates: PyTree,
        state: OneBitAdamState,
        params: PyTree = None,  # noqa: ARG002 - as optax calls it
        *,
        weight: jax.Array | float | None = None,
        **others: object,  # noqa: ARG002 - of other transformations in a chain
    ) -> tuple[PyTree, OneBitAdamState]:
        """Return the direction of the step, and the state after it."""
        given = Given.of(updates, None, state.momentum, weight, self.mean.axis_name)
        count = state.step + 1
        # A step from zero with the rate -1 is the direction of the step.
        numbers = StepNumbers(-1.0, correction(self.adam.betas[0], count), self.adam.eps, 0.0)
        both = joined(given.momentum), joined(given.tree.like(state.variance, "variance"))
        begun = _Begun(given, *both, state, numbers)
        steps, which = [self._warm_up, self._compress], jnp.asarray(state.frozen > 0, jnp.int32)
        if self.schedule is not None:
            if isinstance(state.measured, tuple):
                raise ValueError(
                    "state was made without variance_steps; expected a state of this transformation: give it "
                    "measured=state.frozen"
                )
            steps.append(self._measure)
            which += which * selected("variance_steps", self.schedule, count - state.frozen)
        with use_kernels(TracedKernels(state.step)):
            moved = jax.lax.switch(which, [partial(step, begun) for step in steps])
            direction, momentum, variance, residuals, accepted = moved
            took = accepted.astype(jnp.int32)
            last: Any = state.measured
            freezes = accepted & (which == 0) & (count >= self.freeze)
            if self.schedule is not None:
                last = jnp.where(freezes | (accepted & (which == steps.index(self._measure))), count, last)
            new = OneBitAdamState(
                state.step + took,
                state.skipped + 1 - took,
                cut_like(jnp.where(accepted, momentum, begun.momentum), state.momentum),
                cut_like(jnp.where(accepted, variance, begun.variance), state.variance),
                residuals,
                jnp.where(freezes, count, state.frozen),
                last,
            )
            return cut_like(jnp.where(accepted, direction, jnp.nan), updates), new

    def _warm_up(self, begun: _Begun) -> _Moved:
        """Make a step of Adam; the last step of the warm-up freezes the variance."""
        gradient, residuals, accepted = self._exact_mean(begun)
        count = begun.state.step + 1
        of_adam = AdamNumbers(self.adam.betas, correction(self.adam.betas[1], count), 0.0, begun.numbers)
        ((direction, momentum, variance),) = primitives.adam_steps(
            [jnp.zeros_like(gradient)], [begun.momentum], [begun.variance], [gradient], [of_adam]
        )

        def frozen(variance: Array) -> Array:
            (corrected,) = divided([variance], bias_corrections([self.adam.betas], 1, [count]))
            return self._floored(corrected, begun)

        variance = jax.lax.cond(count >= self.freeze, frozen, lambda variance: variance, variance)
        return direction, momentum, variance, residuals, accepted

    def _compress(self, begun: _Begun) -> _Moved:
        """Make a step with the compressed mean of the momentum."""
        state, (b1, _) = begun.state, self.adam.betas
        means, residuals, accepted = self.mean.average(
            begun.given.tree.whole(begun.given.gradients),
            state.residuals,
            state.step,
            momenta=state.momentum,
            beta=b1,
        )
        averaged = joined(begun.given.tree.like(means, "means"))
        ((direction, momentum),) = primitives.frozen_steps(
            [jnp.zeros_like(averaged)], [averaged], [begun.variance], [begun.numbers]
        )
        return direction, momentum, begun.variance, residuals, accepted

    def _measure(self, begun: _Begun) -> _Moved:
        """Make a step with the exact mean of the gradients, which also measures the variance again."""
        gradient, residuals, accepted = self._exact_mean(begun)
        kept: Any = FromTable(_kept(self.adam.betas[1]), begun.state.step + 1 - begun.state.measured)
        (variance,) = measured([begun.variance], [gradient], [False], kept=[kept], floor=0.0)
        variance = self._floored(variance, begun)
        (direction,), (momentum,) = step_on_codes(
            [jnp.zeros_like(gradient)],
            [gradient],
            [begun.momentum],
            [variance],
            [begun.numbers],
            betas=[self.adam.betas],
            donate=False,
        )
        return direction, momentum, variance, residuals, accepted

    def _exact_mean(self, begun: _Begun) -> tuple[Array, Residuals, Array]:
        """Return the exact mean of the gradients as one vector, the residuals, and whether it was accepted."""
        tree, state = begun.given.tree, begun.state
        means, residuals, accepted = self.mean.average(
            tree.whole(begun.given.gradients), state.residuals, state.step, exactly=True
        )
        return joined(tree.like(means, "means")), residuals, accepted

    def _floored(self, variance: Array, begun: _Begun) -> Array:
        exact = self.mean.keeps_exact(begun.given.tree.whole(begun.given.gradients))
        return floored_like(variance, begun.given.momentum, exact, self.floor)


def onebit_adam(
    learning_rate: optax.ScalarOrSchedule,
    freeze: int,
    axis_name: str,
    *,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    variance_floor: float = 0.03,
    variance_steps: Schedule | None = None,
    compressor: Compressor = ScaledSign(scale="rms"),
    topology: str = "two_phase",
    feedback: bool = True,
    exact: ExactPolicy | None = ExactBelow(10_000),
    compressors: CompressorPolicy | None = None,
    seed: int = 0,
) -> optax.GradientTransformationExtraArgs:
    """Make steps of 1-bit Adam over an axis of the mesh: exact steps, then compressed steps with a frozen variance.

    Parameters
    ----------
    learning_rate : float or schedule of optax
        Step size.
    freeze : int
        The number of exact steps, at least 1. The variance is constant afterwards.
    axis_name : str
        The axis of the mesh whose devices are the ranks.
    b1, b2 : float
        Decay rates of the momentum and the variance, from 0 to below 1.
    eps : float
        Added to the square root of the variance, >= 0.
    weight_decay : float
        Decoupled weight decay; `tx.update` then needs the parameters.
    variance_floor : float
        Smallest frozen variance of an element, as a fraction of the mean variance of its array; see `qcomp.OneBitAdam`.
    variance_steps : callable, optional
        Returns whether a step, counted from 1 after the freeze, averages the gradient exactly and measures the variance
        again, such as ``qcomp.DoublingIntervals(4)``. The step is a traced value. None leaves the variance frozen.
    compressor : Compressor
        Compresses the momentum, on workers and servers.
    topology, feedback, exact, compressors, seed
        See `MeshMean`. The warm-up averages in two phases.

    Returns
    -------
    optax.GradientTransformationExtraArgs
        If a gradient on any device is not finite, the step is skipped on all: nothing changes but the counts of skipped
        steps.

    Notes
    -----
    The steps equal `qcomp.OneBitAdam` with an int for ``freeze`` and no watch: a rule or a watch would have to
    read values on the host in every step. `qcomp.QAdam` has the same steps with other settings:
    ``compressor=qcomp.MinMaxUInt8(), variance_steps=qcomp.DoublingIntervals(4)``.

    `tx.update` also takes ``weight``, see `MeshMean`.

    Examples
    --------
    >>> import jax, jax.numpy as jnp, qcomp, qcomp.jax.optax
    >>> mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    >>> tx = qcomp.jax.optax.onebit_adam(0.1, freeze=10, axis_name="data", b2=0.9, exact=None)
    >>> params = {"w": jnp.ones(8)}
    >>> with jax.set_mesh(mesh):
    ...     state = tx.init(params)
    >>> everywhere, specs = jax.sharding.PartitionSpec(), qcomp.jax.partition_specs(state, "data")
    >>> update = jax.jit(
    ...     jax.shard_map(
    ...         tx.update, mesh=mesh, in_specs=(everywhere, specs), out_specs=(everywhere, specs), check_vma=False
    ...     )
    ... )
    >>> for _ in range(40):
    ...     updates, state = update(params, state)
    ...     params = optax.apply_updates(params, updates)
    >>> bool(abs(params["w"]).max() < 0.5)
    True
    """
    _require_no_arrays(weight_decay=weight_decay)
    direction = scale_by_onebit_adam(
        freeze,
        axis_name,
        b1=b1,
        b2=b2,
        eps=eps,
        variance_floor=variance_floor,
        variance_steps=variance_steps,
        compressor=compressor,
        topology=topology,
        feedback=feedback,
        exact=exact,
        compressors=compressors,
        seed=seed,
    )
    rest = optax.scale_by_learning_rate(learning_rate)
    if weight_decay:
        rest = optax.chain(optax.add_decayed_weights(weight_decay), rest)
    return optax.chain(direction, optax.apply_if_finite(rest, _ALWAYS))


def _require_no_arrays(**settings: object) -> None:
    """Raise TypeError for settings that are arrays; `optax.inject_hyperparams` turns every number into one."""
    for name, value in settings.items():
        if isinstance(value, jax.Array):
            raise TypeError(
                f"{name} is {value!r}, an array; expected a number of Python: it cannot be injected. Inject the "
                "learning rate only: optax.inject_hyperparams(lambda learning_rate: onebit_adam(learning_rate, "
                "...))(learning_rate)"
            )


def _kept(beta2: float) -> list[float]:
    """Return the share of a variance that a measurement keeps 0, 1, 2, ... steps after the last, down to the least."""
    kept = [1.0]
    while kept[-1] > kept_after(beta2, _ALWAYS):
        kept.append(kept_after(beta2, len(kept)))
    return kept
