"""The outer loop inside `jax.shard_map` and `jax.jit`: devices along an axis of a mesh train alone between rounds."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from qcomp.core import primitives
from qcomp.core.compressors.identity import Identity
from qcomp.core.kernels import use_kernels
from qcomp.core.mean.averaging import PowerSGD
from qcomp.core.numeric.arrays import to_compute_dtype
from qcomp.core.optimizers.compression import Means
from qcomp.core.optimizers.sgd import SGD
from qcomp.core.outer.fragments import assign, due, stage_of
from qcomp.core.outer.loop import OuterLoop
from qcomp.core.outer.settings import ANCHOR, SENT, rounds_key
from qcomp.core.state import OptimizerState
from qcomp.jax.kernels import TracedKernels
from qcomp.jax.mesh import MeshMean, as_varying, weighted, zero_rows
from qcomp.jax.mesh_state import Residuals
from qcomp.jax.packing import Array
from qcomp.jax.trees import PyTree, Tree

__all__ = ["MeshOuterLoop", "MeshOuterState"]


class MeshOuterState(NamedTuple):
    """What a `MeshOuterLoop` keeps between two steps: arrays only."""

    step: Array
    """Inner steps, int32 of shape ()."""
    skipped: Array
    """Exchanges that were refused, because a value was not finite, int32 of shape ()."""
    anchor: dict[str, Array]
    """The shared parameters by their paths, in the dtype in which they are computed; the same on all devices."""
    momentum: dict[str, Array]
    """The momenta of the outer optimizer, the same on all devices; empty without momentum."""
    sent: Residuals
    """The outer gradients under way, ``sent.worker``; empty without ``delay``. Each device has its own."""
    residuals: tuple[Residuals, ...]
    """The residuals of each fragment."""


class _Moved(NamedTuple):
    """What the events of a step change."""

    params: dict[str, Array]
    anchor: dict[str, Array]
    momentum: dict[str, Array]
    sent: dict[str, Array]
    residuals: tuple[Residuals, ...]
    skipped: Array


@dataclass(frozen=True)
class MeshOuterLoop:
    """A `qcomp.OuterLoop` over an axis of a mesh, inside `jax.shard_map`; `jax.jit` compiles it with the inner steps.

    Every device along the axis has parameters of its own, and makes inner steps with them: with optax or by hand. Call
    the loop after each inner step; it exchanges only in the steps where an exchange is due.

    Parameters
    ----------
    loop : OuterLoop
        The settings, for instance ``qcomp.outer.diloco(100)``, with an `SGD` of constant learning rate as ``outer``,
        and without ``warmup``.
    axis_name : str
        The axis of the mesh whose devices are the ranks.

    Raises
    ------
    TypeError, ValueError
        If the loop has settings that a mesh lacks: another outer optimizer, a schedule, a warm-up, a topology other
        than "two_phase" and "all_gather", the divisor "senders", payloads that vary in length.

    Notes
    -----
    Rounds are those of `OuterLoop`. The tensors of a fragment are cut together, so servers draw other numbers than in
    the core. With compressors that draw nothing, the bits are the same, except where XLA rounds a product and a sum
    only once. If an outer gradient of any device is not finite, all devices continue from the shared parameters of the
    fragment, residuals stay as they are, and ``skipped`` counts the exchange.

    Examples
    --------
    >>> import jax, jax.numpy as jnp, qcomp
    >>> from jax.sharding import PartitionSpec
    >>> mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    >>> outer = qcomp.jax.MeshOuterLoop(qcomp.outer.local_sgd(2), "data")
    >>> params = {"w": jnp.ones(4), "b": jnp.zeros(())}
    >>> with jax.set_mesh(mesh):
    ...     state = outer.init(params)
    >>> def step(rows, state):
    ...     params = jax.tree.map(lambda p: p[0] - 0.25 * p[0], rows)  # an inner step
    ...     params, state = outer(params, state)
    ...     return jax.tree.map(lambda p: p[None], params), state
    >>> specs = PartitionSpec("data"), qcomp.jax.partition_specs(state, "data")
    >>> step = jax.jit(jax.shard_map(step, mesh=mesh, in_specs=specs, out_specs=specs))
    >>> rows = jax.tree.map(lambda p: p[None], params)  # a row for each device
    >>> for _ in range(2):
    ...     rows, state = step(rows, state)
    >>> rows["w"].tolist(), state.anchor["w"].tolist()
    ([[0.5625, 0.5625, 0.5625, 0.5625]], [0.5625, 0.5625, 0.5625, 0.5625])
    """

    loop: OuterLoop
    axis_name: str

    def __post_init__(self) -> None:
        if not isinstance(self.loop, OuterLoop):
            raise TypeError(f"loop is {self.loop!r}; expected a qcomp.OuterLoop")
        outer = self.loop.outer
        if type(outer) is not SGD or callable(outer.learning_rate) or outer.groups:
            raise TypeError(
                f"loop has outer={outer!r}; expected a qcomp.SGD with a number as learning_rate and without groups: a "
                "compiled program does not know the number of the round"
            )
        if self.loop.warmup:
            raise ValueError(
                f"loop has warmup={self.loop.warmup}; expected 0: make the warm-up steps with jax.lax.pmean of the "
                "gradients, in a program of their own, and init the loop with the parameters after them"
            )
        if self.loop.averaging.divisor != "ranks":
            raise ValueError(
                f"loop has the divisor {self.loop.averaging.divisor!r}; expected 'ranks' on a mesh, such as "
                "averaging=qcomp.Averaging(topology='all_gather')"
            )
        self._mean  # noqa: B018 - raises if compressor, averaging and policies do not go together

    @cached_property
    def _mean(self) -> MeshMean:
        """The mean over all tensors, so that its policies see all of them."""
        loop, averaging = self.loop, self.loop.averaging
        if self.loop.mean.lossless and loop.compressors is None:
            return self._exact_mean
        return MeshMean(
            loop.compressor,
            self.axis_name,
            averaging.topology,
            averaging.feedback,
            loop.exact,
            loop.compressors,
            loop.seed,
            averaging if isinstance(averaging, PowerSGD) else None,
        )

    @cached_property
    def _exact_mean(self) -> MeshMean:
        topology = self.loop.averaging.topology
        return MeshMean(Identity(), self.axis_name, topology, feedback=False, exact=None)

    def init(self, params: PyTree) -> MeshOuterState:
        """Return the state before the first step.

        Call it inside `jax.shard_map` or under `jax.set_mesh`, as `MeshMean.init`.

        Parameters
        ----------
        params : pytree of arrays
            The parameters from which all devices begin, without rows for devices.

        Raises
        ------
        ValueError
            If there are more fragments than tensors, or the size of the axis is not known.
        """
        taken = Tree.of(params, "params")
        if self.loop.fragments > len(taken.names):
            raise ValueError(
                f"fragments is {self.loop.fragments}; expected at most one for each of {len(taken.names)} tensors"
            )
        pairs = zip(taken.names, map(jnp.asarray, taken.leaves), strict=True)
        anchor = {name: jnp.array(to_compute_dtype(p)) for name, p in pairs}  # copies even arrays of JAX
        outer: Any = self.loop.outer
        momentum = jax.tree.map(jnp.zeros_like, anchor) if outer.momentum else {}
        sent = zero_rows(anchor, self.axis_name) if self.loop.delay else {}
        residuals = tuple(
            self._mean_of(members, taken).residuals({taken.names[i]: taken.leaves[i] for i in members})
            for members in self._fragments(taken)
        )
        return MeshOuterState(jnp.int32(0), jnp.int32(0), anchor, momentum, Residuals(sent, ()), residuals)

    def __call__(
        self, params: PyTree, state: MeshOuterState, *, weight: Array | None = None
    ) -> tuple[PyTree, MeshOuterState]:
        """Count an inner step; exchange a fragment or apply a result if one is due.

        Parameters
        ----------
        params : pytree of arrays
            This device's parameters after an inner step, without a row.
        state : MeshOuterState
            From `init` or the last step.
        weight : number or array of shape (), optional
            The weight of this device's outer gradients, used if a fragment departs in this step; see `MeshMean`.

        Returns
        -------
        params : pytree of arrays
            The parameters from which this device's next inner step begins.
        state : MeshOuterState
            For the next step.

        Raises
        ------
        ValueError
            If the parameters have other paths or shapes than ``init`` saw.
        """
        taken = Tree.of(params, "params")
        if set(taken.names) != set(state.anchor):
            raise ValueError(f"params has arrays at {taken.names}; state has {tuple(state.anchor)}")
        for name, p in zip(taken.names, taken.leaves, strict=True):
            if jnp.shape(p) != state.anchor[name].shape:
                raise ValueError(
                    f"the array of params at {name!r} has shape {jnp.shape(p)}; expected {state.anchor[name].shape}, "
                    "the shape of this device's parameters, without the axis of the devices"
                )
        loop, count = self.loop, state.step + 1
        departs, lands = self._turns
        now = _Moved(
            dict(zip(taken.names, (as_varying(p, self.axis_name) for p in taken.leaves), strict=True)),
            state.anchor,
            state.momentum,
            {name: row[0] for name, row in state.sent.worker.items()},
            state.residuals,
            state.skipped,
        )
        fragments = self._fragments(taken)

        def depart(members: Sequence[int], now: _Moved) -> _Moved:
            return now._replace(
                sent={**now.sent, **self._departed([taken.names[i] for i in members], now, weight)}
            )

        def land(members: Sequence[int], now: _Moved) -> _Moved:
            return self._landed(members, taken, now, count - loop.delay)

        def at_once(members: Sequence[int], now: _Moved) -> _Moved:
            return land(members, depart(members, now))._replace(sent=now.sent)

        def turn(numbers: Array, move: Callable[[Sequence[int], _Moved], _Moved], now: _Moved) -> _Moved:
            moves: list[Callable[[_Moved], _Moved]] = [
                lambda now: now,
                *(partial(move, members) for members in fragments),
            ]
            after: _Moved = jax.lax.switch(numbers, moves, now)
            return after

        place = count % loop.every
        with use_kernels(TracedKernels(count)):
            if loop.delay:
                now = turn(jnp.where(count > loop.delay, jnp.asarray(lands)[place], 0), land, now)
                now = turn(jnp.asarray(departs)[place], depart, now)
            else:
                now = turn(jnp.asarray(departs)[place], at_once, now)
        sent = Residuals({name: x[None] for name, x in now.sent.items()}, ())
        after = MeshOuterState(count, now.skipped, now.anchor, now.momentum, sent, now.residuals)
        return taken.whole([now.params[name] for name in taken.names]), after

    @cached_property
    def _turns(self) -> tuple[np.ndarray, np.ndarray]:
        """For each step modulo ``every``, 1 + the fragment that departs and 1 + the fragment that lands; 0 for none."""
        loop = self.loop
        departs, lands = np.zeros((2, loop.every), np.int32)
        for step in range(loop.every):
            fragment = due(step + (loop.delay if loop.turn == "apply" else 0), loop.every, loop.fragments)
            if fragment is not None:
                departs[step] = lands[(step + loop.delay) % loop.every] = fragment + 1
        return departs, lands

    def _fragments(self, tree: Tree) -> tuple[tuple[int, ...], ...]:
        return assign([math.prod(x.shape) for x in tree.leaves], self.loop.fragments)

    def _mean_of(self, members: Sequence[int], tree: Tree) -> MeshMean:
        """Return a fragment's mean; the policies' choices for it are those that they make given all tensors."""
        exact, compressors = self._mean.choices(tree.whole(tree.leaves))
        if all(exact[i] for i in members):
            return self._exact_mean
        kept = dict(zip(tree.names, exact, strict=True))
        others = [name for name in tree.names if not kept[name]]
        chosen = dict(zip(others, compressors, strict=bool(compressors)))
        return replace(
            self._mean,
            exact=lambda tensors: [kept[t.name] for t in tensors],
            compressors=(lambda tensors: [chosen.get(t.name) for t in tensors]) if compressors else None,
        )

    def _core(self, names: Sequence[str], now: _Moved) -> tuple[OuterLoop, OptimizerState]:
        """Return a loop of the core whose only fragment is under way, and its state without residuals."""
        of_each = {ANCHOR: now.anchor} | ({SENT: now.sent} if now.sent else {})
        state = OptimizerState.first(stage_of({0: 1}), tuple(names), 0, 1)._replace(
            step=1,
            exact=(True,) * len(names),
            momentum=tuple(now.momentum[name] for name in names if now.momentum),
            arrays={kind: tuple(arrays[name] for name in names) for kind, arrays in of_each.items()},
            numbers={rounds_key(0): 0.0},
        )
        return replace(self.loop, fragments=1), state

    def _departed(self, names: Sequence[str], now: _Moved, weight: Array | None) -> dict[str, Array]:
        """Return the outer gradients of these tensors."""
        loop, state = self._core(names, now._replace(sent={}))
        sent: Sequence[Any] = loop.depart(0, [now.params[name] for name in names], state, 1.0).arrays[SENT]
        if weight is not None:
            sent = weighted(sent, weight, self.axis_name)
        return dict(zip(names, sent, strict=True))

    def _landed(self, members: Sequence[int], tree: Tree, now: _Moved, sent: Array) -> _Moved:
        """Exchange the fragment that departed in an earlier step, and apply the result."""
        loop, names, mean = self.loop, [tree.names[i] for i in members], self._mean_of(members, tree)
        number = self._fragments(tree).index(tuple(members))
        values, owed = {name: now.sent[name] for name in names}, now.residuals[number]
        exact = dict(zip(sorted(names), mean.keeps_exact(values), strict=True))  # as JAX sorts a dict's keys
        if loop.scale != 1:
            values = {n: x if exact[n] else primitives.scale(x, loop.scale) for n, x in values.items()}
        decayed = owed
        if loop.decay != 1:
            server = owed.server if mean.averaging else jax.tree.map(self._decay, owed.server)
            decayed = Residuals(jax.tree.map(self._decay, owed.worker), server)
        means, residuals, accepted = mean.average(values, decayed, sent)
        core, state = self._core(names, now)
        before = [now.params[name] for name in names]
        averages = Means(tuple(means[name] for name in names), state.exchange)
        landed, after = core.land(0, averages, before, state)
        moved: list[Any] = list(landed)
        back: list[Any] = [
            jnp.asarray(now.anchor[name], p.dtype) for name, p in zip(names, before, strict=True)
        ]
        params = [
            as_varying(jnp.where(accepted, x, start), self.axis_name)
            for x, start in zip(moved, back, strict=True)
        ]

        def kept(new: object, old: object) -> Any:
            return jax.tree.map(lambda x, before: jnp.where(accepted, x, before), new, old)

        anchor = dict(zip(names, after.arrays[ANCHOR], strict=True))
        momentum = dict(zip(names, after.momentum, strict=bool(now.momentum)))
        each = list(now.residuals)
        each[number] = kept(residuals, owed)
        return now._replace(
            params={**now.params, **dict(zip(names, params, strict=True))},
            anchor={**now.anchor, **kept(anchor, {name: now.anchor[name] for name in names})},
            momentum={**now.momentum, **kept(momentum, {name: now.momentum[name] for name in momentum})},
            residuals=tuple(each),
            skipped=now.skipped + 1 - accepted.astype(jnp.int32),
        )

    def _decay(self, residual: Array) -> Array:
        decayed: Array = primitives.scale(residual, self.loop.decay)
        return decayed
