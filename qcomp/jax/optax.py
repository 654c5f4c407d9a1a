"""Compressed means and 1-bit Adam as gradient transformations of optax, inside `jax.shard_map` over a mesh.

    tx = optax.chain(qcomp.jax.optax.compressed(qcomp.MinMaxUInt8(), "data"), optax.adam(1e-3))
    tx = qcomp.jax.optax.onebit_adam(1e-3, freeze=1000, axis_name="data")

They are chained, scheduled, masked and saved like any other. They take the gradients of one device.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from qcomp.core import primitives
from qcomp.core.compressor import Compressor
from qcomp.core.compressors.sign import ScaledSign
from qcomp.core.kernels import AdamNumbers, StepNumbers, use_kernels
from qcomp.core.mean.averaging import PowerSGD
from qcomp.core.numeric.arrays import compute_dtype_name
from qcomp.core.optimizers.adam import Adam
from qcomp.core.optimizers.tensors import as_tensors
from qcomp.core.policies.by_name import CompressorPolicy
from qcomp.core.policies.exact_below import ExactBelow, ExactPolicy
from qcomp.core.variance.arithmetic import bias_corrections, divided, floored
from qcomp.core.variance.policy import VariancePolicy
from qcomp.core.variance.rules import FreezeAt
from qcomp.jax.kernels import TracedKernels
from qcomp.jax.mesh import MeshMean
from qcomp.jax.mesh_state import MeshState, Residuals
from qcomp.jax.packing import Array, cut
from qcomp.jax.trees import PyTree, Tree

__all__ = ["OneBitAdamState", "compressed", "onebit_adam", "scale_by_onebit_adam"]


_Moved = tuple[Array, Array, Array, Residuals, Array]
"""Directions, momenta and variances, each of all parameters as one vector; residuals; whether the step was accepted."""

_ALWAYS = 2**31 - 1
"""How many steps in a row may be skipped: any number."""


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
) -> optax.GradientTransformation:
    """Replace each device's gradients by their compressed mean over an axis of the mesh.

    Parameters
    ----------
    compressor, axis_name, topology, feedback, exact, compressors, seed, averaging
        See `MeshMean`, which computes the mean.

    Returns
    -------
    optax.GradientTransformation
        Its state is a `MeshState`; `partition_specs` says how `jax.shard_map` must cut it.

    Notes
    -----
    Transformations before it in a chain see the gradients of one device: `optax.clip_by_global_norm` clips each
    device's own. Transformations after it see the mean, the same on all devices. If a gradient on any device is not
    finite, the mean is NaN on all, and residuals stay as they are; put the later transformations into
    `optax.apply_if_finite` to skip such steps.

    Do not let Adam, RMSprop or others that divide by averages of squares follow a compressor of one bit, such as
    `ScaledSign`: in a bucket all gradients then have the same square, and training is far worse. A transformation does
    not see what follows it, so nothing warns. Take `onebit_adam`, or 8 bits, such as `MinMaxUInt8`; one bit suits
    `optax.sgd`.

    A compressor without ``traits.keeps_zero``, such as `ScaledSign`, returns other means than 0 for elements whose
    gradients are 0 on all devices. Leave tensors with padding or pruned weights exact, or multiply the mean by a mask.

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

    def update(updates: PyTree, state: MeshState, params: PyTree = None) -> tuple[PyTree, MeshState]:
        del params
        return mean(updates, state)

    return optax.GradientTransformation(mean.init, update)


class OneBitAdamState(NamedTuple):
    """The state of `scale_by_onebit_adam`: arrays only."""

    step: Array
    """Completed steps, int32 of shape ()."""
    skipped: Array
    """Steps that were refused, because a value was not finite, int32 of shape ()."""
    momentum: PyTree
    """Adam's first moment of each parameter, in the dtype in which it is computed."""
    variance: PyTree
    """Adam's second moment; after the warm-up, the constant and bias-corrected one from the freeze."""
    residuals: Residuals


def scale_by_onebit_adam(
    freeze: int,
    axis_name: str,
    *,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    variance_floor: float = 0.03,
    compressor: Compressor = ScaledSign(scale="rms"),
    topology: str = "two_phase",
    feedback: bool = True,
    exact: ExactPolicy | None = ExactBelow(10_000),
    compressors: CompressorPolicy | None = None,
    seed: int = 0,
) -> optax.GradientTransformation:
    """Rescale gradients as `qcomp.OneBitAdam` does, without a learning rate: see `onebit_adam`.

    Parameters
    ----------
    freeze, axis_name, b1, b2, eps, variance_floor, compressor, topology, feedback, exact, compressors, seed
        See `onebit_adam`.

    Returns
    -------
    optax.GradientTransformation
        Its state is a `OneBitAdamState`. In a step with a value that is not finite the result is NaN, on all devices,
        and the moments and residuals stay as they are.
    """
    _require_no_arrays(freeze=freeze, b1=b1, b2=b2, eps=eps, variance_floor=variance_floor)
    if type(freeze) is not int or freeze < 1:
        raise ValueError(f"freeze is {freeze!r}; expected the number of exact steps, an int of at least 1")
    adam = Adam(learning_rate=0.0, betas=(b1, b2), eps=eps)  # checks these
    VariancePolicy(FreezeAt(freeze), variance_floor)  # checks this
    # After so many steps 1 - b1^step is 1 in float32.
    until_one = 1 + math.ceil(25 * math.log(2) / -math.log(b1)) if b1 else 1
    of_momentum, of_variance = (
        np.asarray(bias_corrections([adam.betas] * steps, which, range(1, steps + 1)))
        for which, steps in enumerate((until_one, freeze))
    )
    mean = MeshMean(compressor, axis_name, topology, feedback, exact, compressors, seed)

    def init(params: PyTree) -> OneBitAdamState:
        taken = Tree.of(params, "params")
        tensors = taken.whole(as_tensors(list(map(jnp.asarray, taken.leaves)), "params"))
        momentum, variance = (jax.tree.map(_zeros_like, tensors) for _ in range(2))
        return OneBitAdamState(jnp.int32(0), jnp.int32(0), momentum, variance, mean.residuals(params))

    def update(
        updates: PyTree, state: OneBitAdamState, params: PyTree = None
    ) -> tuple[PyTree, OneBitAdamState]:
        del params
        taken = Tree.of(updates, "updates")
        moments = taken.like(state.momentum, "momentum")
        for name, g, m in zip(taken.names, taken.leaves, moments, strict=True):
            if jnp.shape(g) != m.shape:
                raise ValueError(f"updates has at {name!r} the shape {jnp.shape(g)}; state has {m.shape}")
        # As one vector, since a compiler takes time for every operation on every array.
        old_momentum, old_variance = _joined(moments), _joined(taken.like(state.variance, "variance"))
        zeros = jnp.zeros_like(old_momentum)
        count = state.step + 1
        # A step from zero with the rate -1 is the direction of the step.
        numbers = StepNumbers(-1.0, _at(of_momentum, count), eps, 0.0)

        def warm_up() -> _Moved:
            # Before the mean, as in the core: a mean in half precision would lose bits that the moments have.
            wide = [jnp.asarray(g, m.dtype) for g, m in zip(taken.leaves, moments, strict=True)]
            means, residuals, accepted = mean.average(
                taken.whole(wide), state.residuals, state.step, exactly=True
            )
            gradient = _joined(taken.like(means, "means"))
            of_adam = AdamNumbers(adam.betas, _at(of_variance, count), 0.0, numbers)
            ((direction, momentum, variance),) = primitives.adam_steps(
                [zeros], [old_momentum], [old_variance], [gradient], [of_adam]
            )
            exact = mean.keeps_exact(updates)

            def freeze_it(variance: Array) -> Array:
                return _frozen(variance, float(of_variance[-1]), moments, exact, variance_floor)

            variance = jax.lax.cond(count == freeze, freeze_it, lambda variance: variance, variance)
            return direction, momentum, variance, residuals, accepted

        def compress() -> _Moved:
            means, residuals, accepted = mean.average(
                updates, state.residuals, state.step, momenta=state.momentum, beta=b1
            )
            averaged = _joined(taken.like(means, "means"))
            ((direction, momentum),) = primitives.frozen_steps([zeros], [averaged], [old_variance], [numbers])
            return direction, momentum, old_variance, residuals, accepted

        with use_kernels(TracedKernels(state.step)):
            moved = jax.lax.cond(state.step < freeze, warm_up, compress)
            direction, momentum, variance, residuals, accepted = moved
            took = accepted.astype(jnp.int32)
            new = OneBitAdamState(
                state.step + took,
                state.skipped + 1 - took,
                _cut(jnp.where(accepted, momentum, old_momentum), state.momentum),
                _cut(jnp.where(accepted, variance, old_variance), state.variance),
                residuals,
            )
            return _cut(jnp.where(accepted, direction, jnp.nan), updates), new

    return optax.GradientTransformation(init, update)


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
    compressor: Compressor = ScaledSign(scale="rms"),
    topology: str = "two_phase",
    feedback: bool = True,
    exact: ExactPolicy | None = ExactBelow(10_000),
    compressors: CompressorPolicy | None = None,
    seed: int = 0,
) -> optax.GradientTransformation:
    """Make steps of 1-bit Adam over an axis of the mesh: exact ones, then with a frozen variance and one bit.

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
        Smallest frozen variance of an element, as a fraction of the mean of its array; see `qcomp.OneBitAdam`.
    compressor : Compressor
        Compresses the momentum, on workers and servers.
    topology, feedback, exact, compressors, seed
        See `MeshMean`. The warm-up averages in two phases.

    Returns
    -------
    optax.GradientTransformation
        If a gradient on any device is not finite, the step is skipped on all: nothing changes but the counts of skipped
        steps.

    Notes
    -----
    The steps equal `qcomp.OneBitAdam` with an int for ``freeze`` and no watch: a rule or a watch would have to
    read values on the host in every step.

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


def _require_no_arrays(**settings: Any) -> None:
    """Raise TypeError for settings that are arrays, as `optax.inject_hyperparams` makes them of all numbers."""
    for name, value in settings.items():
        if isinstance(value, jax.Array):
            raise TypeError(
                f"{name} is {value!r}, an array; expected a number of Python: it cannot be injected. Inject the "
                "learning rate only: optax.inject_hyperparams(lambda learning_rate: onebit_adam(learning_rate, "
                "...))(learning_rate)"
            )


def _at(corrections: np.ndarray, count: Array) -> Array:
    """Return the correction of a step, the last one for all later steps."""
    return jnp.asarray(corrections)[jnp.minimum(count, len(corrections)) - 1]


def _joined(arrays: Sequence[Array]) -> Array:
    """Return the elements of arrays as one vector."""
    return jax.lax.concatenate([jnp.ravel(x) for x in arrays], 0)


def _cut(joined: Array, like: PyTree) -> PyTree:
    """Return a vector as a pytree like another, in its dtypes; the inverse of `_joined`."""
    leaves, structure = jax.tree.flatten(like)
    parts = zip(cut(joined, [jnp.size(x) for x in leaves]), leaves, strict=True)
    return jax.tree.unflatten(
        structure, [jnp.reshape(part, jnp.shape(x)).astype(x.dtype) for part, x in parts]
    )


def _frozen(
    variance: Array, correction: float, like: Sequence[Array], exact: Sequence[bool], floor: float
) -> Array:
    """Return `frozen` of joined variances of arrays like these; variances of one size are floored together."""
    parts = cut(divided([variance], [correction])[0], [x.size for x in like])
    of_size = defaultdict(list)
    for index, (part, is_exact) in enumerate(zip(parts, exact, strict=True)):
        if not is_exact and part.size:
            of_size[part.size].append(index)
    for size, indexes in of_size.items():
        rows = jnp.stack([parts[i] for i in indexes])
        raised: Any = jax.vmap(lambda v: floored([v], [False], floor)[0])(rows)
        for index, part in zip(indexes, cut(jnp.ravel(raised), [size] * len(indexes)), strict=True):
            parts[index] = part
    return jax.lax.concatenate(parts, 0)


def _zeros_like(x: Array) -> Array:
    """Return zeros in the dtype in which an array is computed, wherever JAX places them."""
    return jnp.zeros(x.shape, compute_dtype_name(x.dtype.name))
