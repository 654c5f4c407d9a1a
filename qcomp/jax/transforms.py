"""What the gradient transformations for optax share: checks of settings, and the arrays that a step is given."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from qcomp.core.mean.averaging import PowerSGD
from qcomp.core.numeric.arrays import to_compute_dtype
from qcomp.core.optimizers.base import Optimizer
from qcomp.core.optimizers.onebit_lamb import OneBitLamb
from qcomp.core.optimizers.tensors import as_tensors
from qcomp.core.optimizers.zero_one_adam import ZeroOneAdam
from qcomp.core.variance.schedules import Schedule
from qcomp.jax.mesh import MeshMean, require_own_values, weighted
from qcomp.jax.moves import Array
from qcomp.jax.trees import PyTree, Tree
from qcomp.jax.vectors import zeros_like

__all__ = [
    "WHY",
    "Given",
    "mean_of",
    "rate_of",
    "require_params",
    "require_settings",
    "selected",
    "zero_moments",
]

WHY = "a compiled program neither raises nor reads values on the host"


def require_settings(optimizer: object, kind: type, **expected: object) -> None:
    """Raise unless an optimizer is of a kind and has these settings, and those that every program needs."""
    if not isinstance(optimizer, kind):
        raise TypeError(f"optimizer is {optimizer!r}; expected a qcomp.{kind.__name__}")
    for name, value in ({"nonfinite": "skip", "clip_norm": None, "groups": ()} | expected).items():
        found = getattr(optimizer, name)
        if found != value:
            raise ValueError(f"optimizer has {name}={found!r}; expected {value!r} on a mesh: {WHY}")


def mean_of(optimizer: OneBitLamb | ZeroOneAdam, axis_name: str) -> MeshMean:
    """Return the compressed mean that an optimizer's settings describe."""
    averaging = optimizer.averaging
    if isinstance(averaging, PowerSGD):
        raise ValueError(f"optimizer has averaging={averaging!r}; expected a qcomp.Averaging on a mesh")
    return MeshMean(
        optimizer.compressor,
        axis_name,
        averaging.topology,
        averaging.feedback,
        optimizer.exact,
        optimizer.compressors,
        optimizer.seed,
        divisor=averaging.divisor,
    )


def rate_of(optimizer: Optimizer, learning_rate: optax.ScalarOrSchedule | None) -> Callable[[Array], Any]:
    """Return the schedule of the learning rate; a given ``learning_rate`` replaces the optimizer's."""
    rate: Any = optimizer.learning_rate if learning_rate is None else learning_rate
    if not callable(rate):
        return lambda _: rate
    try:
        jax.eval_shape(rate, jax.ShapeDtypeStruct((), jnp.int32))
    except jax.errors.JAXTypeError as error:
        raise TypeError(
            f"learning_rate is {rate!r}, which cannot be traced by jax.jit; expected a number, or a schedule without "
            "branches on the number of steps, such as optax's"
        ) from error
    schedule: Callable[[Array], Any] = rate
    return schedule


def zero_moments(params: PyTree, number: int) -> list[PyTree]:
    """Return trees of zeros like the parameters, in the dtypes in which these are computed."""
    taken = Tree.of(params, "params")
    tensors = as_tensors(list(map(jnp.asarray, taken.leaves)), "params")
    return [taken.whole(list(map(zeros_like, tensors))) for _ in range(number)]


class Given(NamedTuple):
    """The arrays that a step is given, in the order of the gradients."""

    tree: Tree
    """The gradients, as they were given."""
    gradients: list[Array]
    """The gradients in the dtype in which they are computed, multiplied by the device's weight, if it has one."""
    params: list[Array]
    """The parameters; empty if there are none."""
    momentum: list[Array]
    """The momenta in the state."""

    @classmethod
    def of(
        cls,
        updates: PyTree,
        params: PyTree,
        momentum: PyTree,
        weight: jax.Array | float | None,
        axis_name: str,
    ) -> Given:
        """Take apart what a step was given, and check that all of it belongs together."""
        tree = Tree.of(updates, "updates")
        require_own_values(tree, axis_name)  # before weights, which differ between devices
        gradients = list(map(jnp.asarray, tree.leaves))
        tensors = [] if params is None else list(map(jnp.asarray, tree.like(params, "params")))
        moments = tree.like(momentum, "momentum")
        for kind, arrays in (("updates", gradients), ("params", tensors)):
            for name, x, m in zip(tree.names, arrays, moments, strict=False):
                if x.shape != m.shape:
                    raise ValueError(
                        f"the array of {kind} at {name!r} has shape {x.shape}; state has {m.shape}"
                    )
        if weight is not None:
            gradients = weighted(gradients, weight, axis_name)
        return cls(tree, [to_compute_dtype(g) for g in gradients], tensors, moments)


def require_params(params: PyTree, why: str = "") -> None:
    """Raise ValueError if there are no parameters."""
    if params is None:
        raise ValueError(f"params is None{why}; expected the parameters: pass them to tx.update")


def selected(argument: str, schedule: Schedule, step: Array) -> Array:
    """Return 1 if a schedule selects a traced step, else 0."""
    try:
        return jnp.asarray(schedule(step), jnp.int32)
    except jax.errors.JAXTypeError as error:
        raise TypeError(
            f"{argument} is {schedule!r}, which cannot be traced by jax.jit; expected a schedule that consists of "
            "arithmetic and comparisons without branches, such as qcomp.DoublingIntervals(4)"
        ) from error
