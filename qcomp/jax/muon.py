"""Muon as a gradient transformation of optax, inside `jax.shard_map` over a mesh."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from qcomp.core import primitives
from qcomp.core.compressors.identity import Identity
from qcomp.core.kernels import AdamNumbers, StepNumbers, use_kernels
from qcomp.core.numeric.arrays import to_compute_dtype
from qcomp.core.optimizers.compression import Compressing
from qcomp.core.optimizers.muon import Muon
from qcomp.core.state import OptimizerState
from qcomp.jax.kernels import TracedKernels
from qcomp.jax.mesh import MeshMean
from qcomp.jax.mesh_state import Residuals
from qcomp.jax.moves import Array
from qcomp.jax.spmd import SpmdMean, SpmdOwnedMean
from qcomp.jax.transforms import rate_of, require_params, require_settings, zero_moments
from qcomp.jax.trees import PyTree, Tree
from qcomp.jax.vectors import correction, cut_like, joined

__all__ = ["MuonState", "muon"]


class MuonState(NamedTuple):
    """The state of `muon` without a learning rate: arrays only."""

    step: Array
    """Completed steps, int32 of shape ()."""
    skipped: Array
    """Steps that were refused, because a value was not finite, int32 of shape ()."""
    momentum: dict[str, Array]
    """AdamW's first moment of each tensor that AdamW moves, by the tensor's path."""
    variance: dict[str, Array]
    """AdamW's second moment of each of these tensors."""
    residuals: Residuals
    """``worker`` has the residual of each matrix. ``server`` has, for each device, the momenta of the matrices that it
    owns as one vector, and then the residuals of their updates as another. These vectors are as long as the device with
    the most elements needs."""


def muon(
    optimizer: Muon, axis_name: str, *, learning_rate: optax.ScalarOrSchedule | None = None
) -> optax.GradientTransformationExtraArgs:
    """Make steps of Muon over an axis of the mesh; AdamW moves the tensors that are not matrices.

    Parameters
    ----------
    optimizer : Muon
        The settings. ``nonfinite`` must be "skip", and ``whiten_steps``, ``clip_norm`` and ``groups`` must have their
        defaults.
    axis_name : str
        The axis of the mesh whose devices are the ranks.
    learning_rate : float, array or schedule of optax, optional
        Replaces the optimizer's learning rate, for instance for `optax.inject_hyperparams`.

    Returns
    -------
    optax.GradientTransformationExtraArgs
        `tx.update` needs the parameters if there is weight decay, and also takes ``weight``, see `MeshMean`. If a
        gradient on any device is not finite, the step is skipped on all: nothing changes but the counts of skipped
        steps.

    Raises
    ------
    TypeError, ValueError
        If the optimizer is not a Muon, or has settings that a compiled program does not support.

    Notes
    -----
    The steps are those of `qcomp.Muon`: the device that owns a matrix orthogonalises it, in a branch that the other
    devices skip, and all devices decode the same updates. XLA computes the matrix products, so their last bits differ
    from those of other libraries. The compressors draw as in the core.

    Weights of Flax and Haiku have their outputs on the last axis: ``qcomp.Muon(output_axis=-1, ...)``.

    Examples
    --------
    >>> import jax, jax.numpy as jnp, optax, qcomp, qcomp.jax.optax
    >>> mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    >>> tx = qcomp.jax.optax.muon(qcomp.Muon(learning_rate=0.1, output_axis=-1, nonfinite="skip"), "data")
    >>> params = {"bias": jnp.ones(8), "kernel": jnp.ones((4, 8))}
    >>> with jax.set_mesh(mesh):
    ...     state = tx.init(params)
    >>> everywhere, specs = jax.sharding.PartitionSpec(), qcomp.jax.partition_specs(state, "data")
    >>> update = jax.jit(
    ...     jax.shard_map(
    ...         tx.update, mesh=mesh, in_specs=(everywhere, specs), out_specs=(everywhere, specs), check_vma=False
    ...     )
    ... )
    >>> updates, state = update(params, state)
    >>> round(float(updates["bias"][0]), 3), updates["kernel"].shape
    (-0.01, (4, 8))
    """
    require_settings(optimizer, Muon, whiten_steps=None)
    rate: Any = optimizer.learning_rate if learning_rate is None else learning_rate
    if callable(rate):
        rate = rate_of(optimizer, rate)
    steps = _Steps(_MuonMean(optimizer.compressor, axis_name, seed=optimizer.seed, muon=optimizer))
    direction = optax.GradientTransformationExtraArgs(steps.init, steps.update)
    return optax.chain(direction, optax.apply_if_finite(optax.scale_by_learning_rate(rate), 2**31 - 1))


@dataclass(frozen=True)
class _MuonMean(MeshMean):
    """The updates of matrices and the exact means of all other tensors, over an axis of a mesh."""

    muon: Muon | None = None

    @cached_property
    def _compression(self) -> Compressing:
        assert self.muon is not None
        found = self.muon.compression
        own: Any = found.mean
        mean = SpmdOwnedMean(
            own.compressor, updates=own.updates, rule=own.rule, repaid=own.repaid, axis_name=self.axis_name
        )
        plain = SpmdMean(Identity(), feedback=False, axis_name=self.axis_name)
        return replace(found, mean=mean, plain=plain)

    def _choose(self, first: OptimizerState, tensors: Sequence[Array]) -> OptimizerState:
        assert self.muon is not None
        return first._replace(exact=self.muon.of_adam(tensors, first.names))


@dataclass(frozen=True)
class _Steps:
    """The steps of Muon with a learning rate of 1."""

    mean: _MuonMean

    @cached_property
    def muon(self) -> Muon:
        """The settings, with a learning rate of 1."""
        assert self.mean.muon is not None
        return replace(self.mean.muon, learning_rate=1.0)

    def init(self, params: PyTree) -> MuonState:
        """Return moments and residuals of zero."""
        taken = Tree.of(params, "params")
        exact = dict(zip(taken.names, self.mean.keeps_exact(params), strict=True))
        of_adam = {name: x for name, x in zip(taken.names, taken.leaves, strict=True) if exact[name]}
        momentum, variance = zero_moments(of_adam, 2) if of_adam else ({}, {})
        return MuonState(jnp.int32(0), jnp.int32(0), momentum, variance, self.mean.residuals(params))

    def update(
        self,
        updates: PyTree,
        state: MuonState,
        params: PyTree = None,
        *,
        weight: jax.Array | float | None = None,
        **others: object,  # noqa: ARG002 - of other transformations in a chain
    ) -> tuple[PyTree, MuonState]:
        """Return the direction of the step, and the state after it."""
        if self.muon.weight_decay:
            require_params(params, f" beside weight_decay={self.muon.weight_decay}")
        taken = Tree.of(updates, "updates")
        wide = [to_compute_dtype(jnp.asarray(g)) for g in taken.leaves]
        means, residuals, accepted = self.mean.average(
            taken.whole(wide), state.residuals, state.step, weight=weight
        )
        directions = dict(zip(taken.names, taken.like(means, "means"), strict=True))
        momentum, variance = state.momentum, state.variance
        with use_kernels(TracedKernels(state.step)):
            if momentum:
                names = sorted(momentum)  # as JAX sorts a dict's keys
                m, v = (joined([of[name] for name in names]) for of in (momentum, variance))
                gradient = joined([directions[name] for name in names])
                b1, b2 = self.muon.betas
                # A step from zero with the rate -1 is the direction of the step.
                step = StepNumbers(-1.0, correction(b1, state.step + 1), self.muon.eps, 0.0)
                numbers = AdamNumbers((b1, b2), correction(b2, state.step + 1), 0.0, step)
                moved: Any = primitives.adam_steps([jnp.zeros_like(m)], [m], [v], [gradient], [numbers])
                ((direction, *moments),) = moved
                kept = (jnp.where(accepted, new, old) for new, old in zip(moments, (m, v), strict=True))
                directions |= cut_like(direction, {name: directions[name] for name in names})
                momentum, variance = (cut_like(x, momentum) for x in kept)
        exact = tuple(name in state.momentum for name in taken.names)
        factors = self.muon.rates(OptimizerState.first("compressed", taken.names, 0, 1)._replace(exact=exact))
        given: list[Any] = [None] * len(wide) if params is None else taken.like(params, "params")
        found = []
        for name, factor, p, g in zip(taken.names, factors, given, taken.leaves, strict=True):
            way: Any = directions[name]
            if self.muon.weight_decay:
                way = way + self.muon.weight_decay * to_compute_dtype(jnp.asarray(p))
            found.append(jnp.where(accepted, factor * way, jnp.nan).astype(jnp.asarray(g).dtype))
        took = accepted.astype(jnp.int32)
        new = MuonState(state.step + took, state.skipped + 1 - took, momentum, variance, residuals)
        return taken.whole(found), new
