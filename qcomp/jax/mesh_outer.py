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
from qcomp.core.optimizers.lamb import Lamb
from qcomp.core.outer.fragments import assign, due, stage_of
from qcomp.core.outer.loop import OuterLoop
from qcomp.core.outer.settings import ANCHOR, SENT, rounds_key
from qcomp.core.state import OptimizerState
from qcomp.jax.kernels import TracedKernels
from qcomp.jax.mesh import MeshMean, as_varying, weighted, zero_rows
from qcomp.jax.mesh_state import Residuals
from qcomp.jax.moves import Array
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
    """The momenta of the outer optimizer, the same on all devices; empty if it has none."""
    sent: Residuals
    """The outer gradients under way, ``sent.worker``; empty without ``delay``. Each device has its own."""
    residuals: tuple[Residuals, ...]
    """The residuals of each fragment."""
    variance: dict[str, Array]
    """The second moments of an outer optimizer such as `Adam`, the same on all devices; empty if it has none."""
    rounds: Array
    """Completed rounds of each fragment, int32 of shape (fragments,)."""
    began: Array | tuple[()]
    """The step after which the first round began, int32 of shape (), and -1 before; empty without a warm-up."""


class _Moved(NamedTuple):
    """The arrays that a step may change: at the end of a warm-up, and when a fragment departs or lands."""

    params: dict[str, Array]
    anchor: dict[str, Array]
    momentum: dict[str, Array]
    variance: dict[str, Array]
    sent: dict[str, Array]
    residuals: tuple[Residuals, ...]
    rounds: Array
    skipped: Array


@dataclass(frozen=True)
class MeshOuterLoop:
    """A `qcomp.OuterLoop` over an axis of a mesh, inside `jax.shard_map`; `jax.jit` compiles it with the inner steps.

    Every device along the axis has parameters of its own, and makes inner steps with them: with optax or by hand. Call
    the loop after each inner step; it exchanges only in the steps where an exchange is due.

    Parameters
    ----------
    loop : OuterLoop
        The settings, for instance ``qcomp.outer.diloco(100)``. A schedule of the outer learning rate must be one that
        `jax.jit` can trace, such as optax's; it sees the number of the fragment's completed rounds.
    axis_name : str
        The axis of the mesh whose devices are the ranks.

    Raises
    ------
    TypeError, ValueError
        If the loop has settings that are not supported on a mesh: a topology other than "two_phase" and "all_gather",
        or payloads that vary in length.

    Notes
    -----
    Rounds are those of `OuterLoop`. The tensors of a fragment are cut together, so servers draw other numbers than in
    the core. With compressors that draw nothing, the bits are the same. If an outer gradient of any device is not
    finite, all devices continue from the shared parameters of the fragment, residuals stay as they are, and ``skipped``
    counts the exchange.

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
        rate = self.loop.outer.learning_rate
        if callable(rate):
            try:
                jax.eval_shape(rate, jax.ShapeDtypeStruct((), jnp.int32))
            except jax.errors.JAXTypeError as error:
                raise TypeError(
                    f"loop has an outer optimizer with learning_rate={rate!r}, which cannot be traced by jax.jit; "
                    "expected a number, or a schedule without branches on the number of rounds, such as optax's"
                ) from error
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
            averaging.divisor,
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
            The parameters from which all devices begin, without an axis of the devices.

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
        momentum, variance = self._moments(anchor)
        sent = zero_rows(anchor, self.axis_name) if self.loop.delay else {}
        residuals = tuple(
            self._mean_of(members, taken).residuals({taken.names[i]: taken.leaves[i] for i in members})
            for members in self._fragments(taken)
        )
        rounds = jnp.zeros(self.loop.fragments, jnp.int32)
        began = jnp.int32(-1) if self.loop.warmup else ()
        return MeshOuterState(
            jnp.int32(0),
            jnp.int32(0),
            anchor,
            momentum,
            Residuals(sent, ()),
            residuals,
            variance,
            rounds,
            began,
        )

    def _moments(self, anchor: dict[str, Array]) -> list[dict[str, Array]]:
        """Return the momenta and variances with which the outer optimizer begins, by the paths of tensors."""
        first = self.loop.outer.initial_state(list(anchor.values()), tuple(anchor), 0, 1)
        return [dict(zip(anchor, xs, strict=bool(xs))) for xs in (first.momentum, first.variance)]

    def _require_own(self, taken: Tree, state: MeshOuterState) -> None:
        """Raise ValueError unless a state belongs to these parameters, this loop and this mesh."""
        if set(taken.names) != set(state.anchor):
            raise ValueError(f"params has arrays at {taken.names}; state has {tuple(state.anchor)}")
        for name, p in zip(taken.names, taken.leaves, strict=True):
            if jnp.shape(p) != state.anchor[name].shape:
                raise ValueError(
                    f"the array of params at {name!r} has shape {jnp.shape(p)}; expected {state.anchor[name].shape}, "
                    "the shape of this device's parameters, without the axis of the devices"
                )
        for name, row in state.sent.worker.items():
            if jnp.shape(row)[0] != 1:
                raise ValueError(
                    f"state has for {name!r} the outer gradients of {jnp.shape(row)[0]} devices on each device; "
                    "expected one, as init makes them on this mesh, cut as partition_specs says. After a change of the "
                    "mesh, begin with init from the shared parameters"
                )
        found = [bool(state.momentum), bool(state.variance), bool(state.sent.worker), state.rounds.shape[0]]
        moments = map(bool, jax.eval_shape(self._moments, state.anchor))
        expected = [*moments, bool(self.loop.delay), self.loop.fragments]
        if found != expected:
            kinds = "outer momenta", "outer second moments", "outer gradients under way", "fragments"
            raise ValueError(
                f"state has {dict(zip(kinds, found, strict=True))}; expected "
                f"{dict(zip(kinds, expected, strict=True))}, as init makes them: it was made by a loop with other "
                "settings. Begin with init from its shared parameters, state.anchor"
            )

    def average(self, grads: PyTree, state: MeshOuterState) -> PyTree:
        """Return the exact mean of the gradients over the axis in the warm-up, and the given gradients afterwards.

        Call it before each inner step, if there is a warm-up. The inner optimizers of all devices then make the same
        steps, so their parameters and states are equal when the first outer round begins.

        Parameters
        ----------
        grads : pytree of arrays
            This device's gradients.
        state : MeshOuterState
            From `init` or the last step.

        Returns
        -------
        pytree of arrays
            If a gradient of any device is not finite, the mean is NaN on all devices: with the inner optimizer in
            `optax.apply_if_finite`, all of them skip the step.

        Raises
        ------
        ValueError
            If JAX has added up the gradients already, see `MeshMean`.
        """
        if isinstance(state.began, tuple):
            return grads
        taken = Tree.of(grads, "grads")

        def mean(leaves: list[Array]) -> list[Array]:
            wide = taken.whole([to_compute_dtype(g) for g in leaves])
            averaged, _, _ = self._exact_mean.average(wide, Residuals({}, ()), state.step)
            means = zip(taken.like(averaged, "means"), leaves, strict=True)
            return [as_varying(jnp.asarray(x, g.dtype), self.axis_name) for x, g in means]

        leaves = list(map(jnp.asarray, taken.leaves))
        return taken.whole(jax.lax.cond(state.began < 0, mean, lambda leaves: leaves, leaves))

    def __call__(
        self, params: PyTree, state: MeshOuterState, *, weight: Array | None = None
    ) -> tuple[PyTree, MeshOuterState]:
        """Count an inner step; exchange a fragment or apply a result if one is due.

        Parameters
        ----------
        params : pytree of arrays
            This device's parameters after an inner step, without the axis of the devices.
        state : MeshOuterState
            From `init` or the last step.
        weight : number or array of shape (), optional
            The weight of this device's outer gradients, used if a fragment departs in this step; see `MeshMean`.

        Returns
        -------
        params : pytree of arrays
            The parameters from which this device's next inner step begins. At the end of a warm-up they must be the
            same on all devices; if they are not, for instance without `average`, they become NaN on all.
        state : MeshOuterState
            For the next step.

        Raises
        ------
        ValueError
            If the parameters have other paths or shapes than ``init`` saw, or the state belongs to another mesh, or to
            a loop with other fragments, ``delay`` or outer moments.
        """
        taken = Tree.of(params, "params")
        self._require_own(taken, state)
        loop, count = self.loop, state.step + 1
        departs, lands = self._turns
        now = _Moved(
            dict(zip(taken.names, (as_varying(p, self.axis_name) for p in taken.leaves), strict=True)),
            state.anchor,
            state.momentum,
            state.variance,
            {name: row[0] for name, row in state.sent.worker.items()},
            state.residuals,
            state.rounds,
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

        # A state knows whether its warm-up has ended, so a job may resume with another ``warmup``.
        began: Any = state.began
        warm = not isinstance(began, tuple)
        local = jnp.where(began < 0, 0, count - began) if warm else count
        place = local % loop.every
        departing = jnp.where(local > 0, jnp.asarray(departs)[place], 0)
        with use_kernels(TracedKernels(count)):
            if warm:
                ends = (began < 0) & (count >= loop.warmup)
                now = jax.lax.cond(ends, self._begun, lambda now: now, now)
                began = jnp.where(ends, count, began)
            if loop.delay:
                now = turn(jnp.where(local > loop.delay, jnp.asarray(lands)[place], 0), land, now)
                now = turn(departing, depart, now)
            else:
                now = turn(departing, at_once, now)
        sent = Residuals({name: x[None] for name, x in now.sent.items()}, ())
        after = MeshOuterState(
            count, now.skipped, now.anchor, now.momentum, sent, now.residuals, now.variance, now.rounds, began
        )
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
        """Return a fragment's mean, with the choices that the policies make for its tensors when given all tensors."""
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

    def _begun(self, now: _Moved) -> _Moved:
        """Make the parameters after the warm-up the shared parameters; NaN on all devices if any bit differs."""
        axis, shared, alike = self.axis_name, {}, jnp.int32(1)
        for name, p in now.params.items():
            bits = jax.lax.bitcast_convert_type(p, f"uint{8 * p.dtype.itemsize}")
            first = jax.lax.psum(jnp.where(jax.lax.axis_index(axis) == 0, bits, jnp.zeros_like(bits)), axis)
            shared[name] = jax.lax.bitcast_convert_type(first, p.dtype)
            alike &= jax.lax.pmin(jnp.all(bits == first).astype(jnp.int32), axis)
        shared = {name: jnp.where(alike > 0, p, jnp.asarray(jnp.nan, p.dtype)) for name, p in shared.items()}
        return now._replace(
            params={name: as_varying(p, axis) for name, p in shared.items()},
            anchor={name: to_compute_dtype(p) for name, p in shared.items()},
        )

    def _core(self, number: int, names: Sequence[str], now: _Moved) -> tuple[OuterLoop, OptimizerState]:
        """Return a loop of the core whose only fragment is under way, and its state without residuals."""
        of_each = {ANCHOR: now.anchor} | ({SENT: now.sent} if now.sent else {})
        state = OptimizerState.first(stage_of({0: 1}), tuple(names), 0, 1)._replace(
            step=1,
            exact=(True,) * len(names),
            momentum=tuple(now.momentum[name] for name in names if now.momentum),
            variance=tuple(now.variance[name] for name in names if now.variance),
            arrays={kind: tuple(arrays[name] for name in names) for kind, arrays in of_each.items()},
            numbers={rounds_key(0): now.rounds[number]},
        )
        return replace(self.loop, fragments=1), state

    def _departed(self, names: Sequence[str], now: _Moved, weight: Array | None) -> dict[str, Array]:
        """Return the outer gradients of these tensors."""
        loop, state = self._core(0, names, now._replace(sent={}))
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
        core, state = self._core(number, names, now)
        before = [now.params[name] for name in names]
        averages = Means(tuple(means[name] for name in names), state.exchange)
        with jax.enable_x64(isinstance(loop.outer, Lamb)):  # its trust ratios are float64
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

        def of_members(new: dict[str, Any], old: dict[str, Any]) -> dict[str, Any]:
            return {**old, **kept(new, {name: old[name] for name in new})}

        anchor = dict(zip(names, after.arrays[ANCHOR], strict=True))
        momentum = dict(zip(names, after.momentum, strict=bool(now.momentum)))
        variance = dict(zip(names, after.variance, strict=bool(now.variance)))
        each = list(now.residuals)
        each[number] = kept(residuals, owed)
        return now._replace(
            params={**now.params, **dict(zip(names, params, strict=True))},
            anchor=of_members(anchor, now.anchor),
            momentum=of_members(momentum, now.momentum),
            variance=of_members(variance, now.variance),
            rounds=now.rounds.at[number].add(accepted.astype(jnp.int32)),
            residuals=tuple(each),
            skipped=now.skipped + 1 - accepted.astype(jnp.int32),
        )

    def _decay(self, residual: Array) -> Array:
        decayed: Array = primitives.scale(residual, self.loop.decay)
        return decayed
