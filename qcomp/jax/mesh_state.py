"""The state of means on a mesh between two steps, and how it is cut over the devices."""

from __future__ import annotations

from typing import NamedTuple

import jax
from jax.sharding import PartitionSpec

from qcomp.core.numeric.arrays import Array
from qcomp.jax.trees import PyTree

__all__ = ["Apart", "MeshState", "Residuals", "partition_specs"]


class Residuals(NamedTuple):
    """The residuals of error feedback on each device of an axis.

    The first axis of every array is the device: arrays of all N devices have N rows, and inside `jax.shard_map` one.
    """

    worker: dict[str, Array]
    """The worker residual of each compressed tensor by its path, of shape (N, elements); empty without feedback."""
    server: tuple[Array, ...]
    """The server residual of each device's chunk, of shape (N, elements of the largest chunk); empty without a server.
    With PowerSGD, the right factor of each compressed tensor, of shape (N, elements), the same on all devices."""


class Apart(NamedTuple):
    """What a device has alone between two synchronisations of `qcomp.jax.optax.zero_one_adam`.

    The first axis of every array is the device, as in `Residuals`. While the devices are in sync, these arrays are not
    used.
    """

    params: PyTree
    """The device's own parameters."""
    momentum: Array
    """Its momenta as one vector, of shape (N, elements of all parameters)."""
    pending: Array
    """Its sums of weighted momenta since the last synchronisation, in the same shape."""
    repeated: Array
    """Steps in which it has repeated its momentum, because a gradient was not finite, int32 of shape (N,)."""


class MeshState(NamedTuple):
    """What a `MeshMean` keeps between two calls: arrays only, for `jax.jit`, donation and any checkpoint."""

    step: Array
    """Completed calls, int32 of shape (); selects the random draws."""
    skipped: Array
    """Calls that were refused, because a value was not finite, int32 of shape ()."""
    residuals: Residuals


_REFUSED_AROUND = {
    "ApplyIfFiniteState": "optax.apply_if_finite decides on each device separately whether to exchange, so the "
    "devices would wait for each other; put it after the mean: optax.chain(compressed(...), "
    "optax.apply_if_finite(...))",
    "MultiStepsState": "optax.MultiSteps adds up the gradients of each device separately, in an array that no "
    "PartitionSpec describes; add up inside the step, or put it after the mean: optax.chain(compressed(...), "
    "optax.MultiSteps(...))",
    "ConditionallyTransformState": "optax.conditionally_transform does not average the gradients in some steps, in "
    "which they differ between devices; put it after the mean: optax.chain(compressed(...), "
    "optax.conditionally_transform(...))",
    "MaskedState": "optax.masked does not average the gradients of the other arrays, which differ between devices; "
    "keep arrays exact with exact=..., or give every array a mean: optax.partition({...: tx, ...: "
    "optax.set_to_zero()}, labels)",
}
"""Why the state of a mean must not be inside these states of optax, by their names."""


def partition_specs(state: PyTree, axis_name: str | tuple[str, ...]) -> PyTree:
    """Return the `PartitionSpec` of each array of a state: arrays with a row for each device are cut along an axis.

    Parameters
    ----------
    state : pytree
        A `MeshState` or a state of `qcomp.jax.optax`, or a state of optax that has one of these anywhere inside.
    axis_name : str or tuple of str
        The axis of the mean. If the averaged arrays are cut along further axes, a tuple of the mean's axis and these;
        in that case also call ``init`` inside `jax.shard_map`, with the returned specs as ``out_specs``.

    Returns
    -------
    pytree of PartitionSpec
        If moments are cut along further axes, replace their specs by their parameters' specs.

    Raises
    ------
    ValueError
        If the mean is inside `optax.apply_if_finite`, `optax.MultiSteps`, `optax.masked` or
        `optax.conditionally_transform`, which act on the gradients of one device; or if some transformations of an
        `optax.partition` have a mean, and one without a mean is not `optax.set_to_zero`; or if something such as
        `flax.nnx.state` has turned the state into dicts.

    Examples
    --------
    >>> import jax.numpy as jnp, qcomp
    >>> from jax.sharding import PartitionSpec
    >>> residuals = qcomp.jax.Residuals({"w": jnp.zeros((4, 9))}, ())
    >>> state = qcomp.jax.MeshState(jnp.zeros(()), jnp.zeros(()), residuals)
    >>> specs = qcomp.jax.partition_specs((state, {"trace": jnp.zeros(9)}), "data")
    >>> specs[0].residuals.worker["w"] == PartitionSpec("data"), specs[1]["trace"] == PartitionSpec()
    (True, True)
    """
    _require_all_averaged(state)
    _require_types(state)

    def specs_of(part: PyTree) -> PyTree:
        spec = PartitionSpec(axis_name) if _is_of_devices(part) else PartitionSpec()
        return jax.tree.map(lambda _: spec, part)

    return jax.tree.map(specs_of, state, is_leaf=_is_of_devices)


def _require_all_averaged(state: PyTree) -> None:
    """Raise ValueError if a transformation of optax withholds gradients from a mean inside it."""

    def is_looked_at(part: PyTree) -> bool:
        return type(part).__name__ in {*_REFUSED_AROUND, "PartitionState"}

    for part in jax.tree.leaves(state, is_leaf=is_looked_at):
        name = type(part).__name__
        if not is_looked_at(part) or not _has_mean(part):
            continue
        if name in _REFUSED_AROUND:
            raise ValueError(f"state has a compressed mean inside {name}: {_REFUSED_AROUND[name]}")
        for label, masked in part.inner_states.items():
            inner = masked.inner_state
            if not _has_mean(inner) and type(inner).__name__ != "EmptyState":
                raise ValueError(
                    "state has a PartitionState in which some transformations have a compressed mean, but not the one "
                    f"of {label!r}, whose gradients would differ between devices; expected a mean in each, or "
                    "optax.set_to_zero()"
                )
            _require_all_averaged(inner)


def _has_mean(state: PyTree) -> bool:
    return any(map(_is_residuals, jax.tree.leaves(state, is_leaf=_is_residuals)))


def _require_types(state: PyTree) -> None:
    """Raise ValueError if a state has residuals outside of qcomp's types, by which they are found."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(state, is_leaf=_is_residuals)
    for path, leaf in leaves:
        names = [str(getattr(key, "name", getattr(key, "key", None))) for key in path]
        if "residuals" in names and not _is_residuals(leaf):
            raise ValueError(
                f"state has at {jax.tree_util.keystr(path)} residuals that are no longer in a qcomp.jax.MeshState, as "
                "after flax.nnx.state or flax.serialization.to_state_dict; expected the state as init returned it, "
                "such as optimizer.opt_state"
            )


def _is_residuals(part: PyTree) -> bool:
    return isinstance(part, Residuals)


def _is_of_devices(part: PyTree) -> bool:
    return isinstance(part, Residuals | Apart)
