"""A compressed mean of pytrees over an axis of a mesh, inside `jax.shard_map` and `jax.jit`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from qcomp.core import primitives
from qcomp.core.compressor import Compressor
from qcomp.core.compressors.identity import Identity
from qcomp.core.kernels import Blend, use_kernels
from qcomp.core.mean.averaging import PowerSGD
from qcomp.core.mean.compressed_mean import CompressedMean, MeanState
from qcomp.core.numeric.arrays import compute_dtype_name, dtype_name, to_compute_dtype
from qcomp.core.numeric.random import Key
from qcomp.core.optimizers.agreement import stream_of
from qcomp.core.optimizers.compression import Compressing
from qcomp.core.optimizers.tensors import as_tensors
from qcomp.core.policies.by_name import CompressorPolicy
from qcomp.core.policies.exact_below import ExactBelow, ExactPolicy
from qcomp.core.state import OptimizerState
from qcomp.jax.kernels import TracedKernels
from qcomp.jax.mesh_state import MeshState, Residuals
from qcomp.jax.moves import Array
from qcomp.jax.spmd import SpmdMean, SpmdPowerSGDMean, drive
from qcomp.jax.trees import PyTree, Tree

__all__ = ["MeshMean", "as_varying", "everywhere", "weighted", "zero_rows"]


@dataclass(frozen=True)
class MeshMean:
    """The mean of a pytree over an axis of a mesh, with compressed messages, inside `jax.shard_map`.

    It runs the stages of `CompressedMean` with collectives of XLA in place of a communicator: each device sends the
    payloads that a rank would send, and all devices hold the same mean bit for bit.

    Parameters
    ----------
    compressor : Compressor
        Compresses on workers and servers; payloads must have a fixed length.
    axis_name : str
        The axis of the mesh whose devices are the ranks.
    topology : {"two_phase", "all_gather"}, default "two_phase"
        How the devices exchange payloads, see `CompressedMean`.
    feedback : bool, default True
        Whether workers and servers add what compression has lost to their next vector.
    exact : callable or None, default ExactBelow(10_000)
        Policy that selects the tensors that stay exact, see `ExactBelow`. None compresses everything.
    compressors : callable, optional
        Policy that returns a compressor for each tensor, used instead of ``compressor``, see `ByName`.
    seed : int, default 0
        Seed of the compressor's random draws. Several means of the same tree over one axis in one step need different
        seeds: with equal seeds they draw the same numbers, and results computed from several of them are biased. Means
        over different axes of a mesh draw different numbers; means over its first axis draw as `CompressedMean` does.
    averaging : PowerSGD, optional
        Average matrices by PowerSGD, which needs the default topology and feedback; the compressor then compresses the
        factors, see `PowerSGD`.
    divisor : {"ranks", "senders"}, default "ranks"
        What the sum over the devices is divided by, see `CompressedMean`; "senders" needs ``topology="all_gather"``.

    Notes
    -----
    ``exact`` and ``compressors`` see the paths of the arrays as names, such as ``"layers/0/w"``. Each device sends
    2 (N - 1) / N times the payload in two phases and N - 1 times in all-gather; a message is padded to the length of
    the longest message in its exchange. A program joins the buckets of all tensors that share a compressor into one
    array and compresses that, so each further tensor or device adds little to the program; docs/benchmarks/compiling
    shows how long compilation takes. Each distinct remainder of a tensor's size by the bucket size adds code for one
    more kind of bucket. With PowerSGD, the devices send as in `PowerSGDMean` with owners, even if there are only two.

    Values that are not finite cannot raise inside `jax.jit`. If any device has one, all devices get NaN for the whole
    tree, the residuals and ``step`` stay as they are, and ``skipped`` counts the call. This includes the devices along
    the mesh's other axes. In two phases, `jax.shard_map` must be over all axes of the mesh: if it leaves an axis to the
    compiler, the compiler may cut tensors along this axis, which a mean in two phases does not support. A mean has no
    derivative.

    Examples
    --------
    >>> import jax, jax.numpy as jnp, qcomp
    >>> mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    >>> average = qcomp.jax.MeshMean(qcomp.ScaledSign(bucket_size=8), "data", exact=None)
    >>> tree = {"w": jnp.full(16, 3.0)}
    >>> with jax.set_mesh(mesh):
    ...     state = average.init(tree)
    >>> specs = qcomp.jax.partition_specs(state, "data")
    >>> specs = jax.sharding.PartitionSpec(), specs
    >>> step = jax.shard_map(average, mesh=mesh, in_specs=specs, out_specs=specs, check_vma=False)
    >>> mean, state = jax.jit(step)(tree, state)
    >>> float(mean["w"][0]), int(state.step)
    (3.0, 1)
    """

    compressor: Compressor
    axis_name: str
    topology: str = "two_phase"
    feedback: bool = True
    exact: ExactPolicy | None = ExactBelow(10_000)
    compressors: CompressorPolicy | None = None
    seed: int = 0
    averaging: PowerSGD | None = None
    divisor: str = "ranks"

    def __post_init__(self) -> None:
        if not isinstance(self.axis_name, str):
            raise TypeError(f"axis_name is {self.axis_name!r}; expected the name of one axis of a mesh")
        if self.averaging is not None:
            self._require_low_rank(self.averaging)
        Key(seed=self.seed)
        self._compression  # noqa: B018 - raises if the settings do not go together

    def _require_low_rank(self, averaging: object) -> None:
        """Raise unless ``averaging`` is a PowerSGD, and the settings beside it fit."""
        if not isinstance(averaging, PowerSGD):
            raise TypeError(
                f"averaging is {averaging!r}; expected a qcomp.PowerSGD, or topology= and feedback= instead"
            )
        for name in ("topology", "feedback", "divisor"):
            given, only = getattr(self, name), getattr(averaging, name)
            if given != only:
                raise ValueError(f"{name} is {given!r} beside averaging={averaging!r}; expected {only!r}")

    @cached_property
    def _compression(self) -> Compressing:
        mean: CompressedMean = (
            SpmdMean(
                self.compressor, self.topology, self.feedback, divisor=self.divisor, axis_name=self.axis_name
            )
            if self.averaging is None
            else SpmdPowerSGDMean(
                self.compressor,
                rank=self.averaging.rank,
                min_compression=self.averaging.min_compression,
                axis_name=self.axis_name,
            )
        )
        plain = SpmdMean(Identity(), feedback=False, axis_name=self.axis_name)
        return Compressing(mean, self.exact, self.compressors, plain=plain)

    @cached_property
    def _chosen(self) -> dict[Any, OptimizerState]:
        """The choices of the policies, by the tensors' names and shapes and the number of ranks."""
        return {}

    def init(self, tree: PyTree) -> MeshState:
        """Return a state with residuals of zero.

        Inside `jax.shard_map` it returns the arrays of one device. Where `jax.set_mesh` gives the size of the axis, it
        returns the arrays of all devices, of which each device holds only its own row; `partition_specs` says how these
        are cut.

        Parameters
        ----------
        tree : pytree of arrays
            A tree with the structure, shapes and dtypes of the trees to average on each device.

        Raises
        ------
        ValueError
            If the size of the axis is not known.
        """
        return MeshState(jnp.int32(0), jnp.int32(0), self.residuals(tree))

    def residuals(self, tree: PyTree) -> Residuals:
        """Return residuals of zero; see `init`.

        Parameters
        ----------
        tree : pytree of arrays
            As for `init`.
        """
        size, _ = _size_of(self.axis_name)
        taken = Tree.of(tree, "tree")
        tensors = _tensors(taken)
        state = self._state(taken.names, tensors, size)
        zeros = jax.eval_shape(lambda: self._compression.zero_residuals(tensors, state)[2:4])
        worker, server = zero_rows(zeros, self.axis_name)
        return Residuals(dict(zip(_compressed(state), worker, strict=bool(worker))), tuple(server))

    def keeps_exact(self, tree: PyTree) -> tuple[bool, ...]:
        """Return whether each array of a tree stays exact.

        Parameters
        ----------
        tree : pytree of arrays
            As for `init`.
        """
        exact, _ = self.choices(tree)
        return exact

    def __call__(
        self, tree: PyTree, state: MeshState, *, weight: Array | None = None
    ) -> tuple[PyTree, MeshState]:
        """Average a pytree over the axis, inside `jax.shard_map`.

        Parameters
        ----------
        tree : pytree of arrays
            This device's values.
        state : MeshState
            From `init` or the last call.
        weight : number or array of shape (), optional
            How much this device's values count, such as its number of valid tokens: finite and >= 0. The mean is then
            the weighted one, see `qcomp.weighted`. With a weight of 0 values count as zeros, even if they are not
            finite. If any weight is out of range, or all are 0, the call is refused as for a value that is not finite.

        Returns
        -------
        mean : pytree of arrays
            With the dtypes of the tree; the same on all devices, and NaN if any had a value that is not finite.
        state : MeshState
            For the next call.

        Raises
        ------
        ValueError
            If the tree is not the one that `init` saw, or JAX knows that its values are the same on all devices.
        """
        means, residuals, accepted = self.average(tree, state.residuals, state.step, weight=weight)
        took = accepted.astype(jnp.int32)
        return means, MeshState(state.step + took, state.skipped + 1 - took, residuals)

    def average(
        self,
        tree: PyTree,
        residuals: Residuals,
        step: Array,
        *,
        momenta: PyTree = None,
        beta: float = 0.0,
        exactly: bool = False,
        weight: Array | None = None,
    ) -> tuple[PyTree, Residuals, Array]:
        """Average a pytree, or momenta blended with it, for optimizers that keep their own state.

        Parameters
        ----------
        tree : pytree of arrays
            This device's values.
        residuals : Residuals
            From `MeshMean.residuals` or the last call.
        step : array of int32, shape ()
            Selects the draws.
        momenta : pytree of arrays, optional
            Average ``beta * momenta + (1 - beta) * tree`` instead.
        beta : float
            The weight of the momenta.
        exactly : bool
            Whether to compress nothing; the residuals stay as they are.
        weight : number or array of shape (), optional
            As for a call; it weights the tree, not the momenta.

        Returns
        -------
        mean : pytree of arrays
        residuals : Residuals
        accepted : array of bool, shape ()
            Whether all values of all devices were finite; otherwise the mean is NaN and the residuals are the old ones.

        Raises
        ------
        ValueError
            If no `jax.shard_map` has the axis, the residuals do not belong to this tree, JAX knows that the values are
            the same on all devices, or the compiler may cut tensors along an axis other than this one.
        TypeError
            If the call is differentiated.
        """
        size, inside = _size_of(self.axis_name)
        if not inside:
            raise ValueError(
                f"axis_name is {self.axis_name!r}, which no jax.shard_map around this call has; expected a call inside "
                "jax.shard_map over a mesh with this axis"
            )
        taken = Tree.of(tree, "tree")
        tensors = _tensors(taken._replace(leaves=_without_derivative(taken.leaves)))
        residuals = _without_derivative(residuals)
        require_own_values(taken, self.axis_name)
        if weight is not None:
            tensors = weighted(tensors, _without_derivative(weight), self.axis_name)
        state = self._state(taken.names, tensors, size)
        exchange = self._exchange(state, tensors, residuals)
        state = state._replace(exchange=exchange)
        names = _compressed(state)
        if exactly:
            request = self._compression.exactly(tensors, state._replace(stage="warmup"))
        else:
            given = [] if momenta is None else _without_derivative(taken.like(momenta, "momenta"))
            blends = [Blend(m, beta, 1.0) for m in given]
            key = Key(seed=self.seed, step=step, tensor=state.stream ^ self._number_of_axis())
            request = self._compression.average(tensors, state, key, blends)
        with use_kernels(TracedKernels(step)):
            means = drive(request.stages(), self.axis_name)
        held: list[Any] = (
            [_of_all(mean, self.axis_name) for mean in means.values] if size == 1 else list(means.values)
        )
        # Nothing is sent for arrays without elements, so JAX would not know that these are equal on all devices.
        held = [x if x.size else jnp.zeros(x.shape, x.dtype) for x in held]
        own = _none_refused([[held[i] for i in part.tensors] for part in request.parts])
        accepted = everywhere(own, self.axis_name)
        if accepted is not own or len(request.parts) > 1:  # else the only part's means are NaN already
            held = [jnp.where(accepted, mean, jnp.asarray(jnp.nan, mean.dtype)) for mean in held]
        new = Residuals(
            dict(zip(names, map(_as_row, means.exchange.worker), strict=bool(residuals.worker))),
            tuple(map(_as_row, means.exchange.server)),
        )
        kept = jax.tree.map(lambda after, before: jnp.where(accepted, after, before), new, residuals)
        if weight is not None and momenta is None:  # weighting has turned half precision into float32
            held = [jnp.asarray(x, leaf.dtype) for x, leaf in zip(held, taken.leaves, strict=True)]
        return taken.whole(held), kept, accepted

    def _number_of_axis(self) -> int:
        """Return the axis's position in its mesh, so that a mean of means over another axis draws different numbers."""
        axes = jax.sharding.get_abstract_mesh().axis_names  # without the axes of jax.vmap
        return axes.index(self.axis_name) if self.axis_name in axes else 0

    def _state(self, names: tuple[str, ...], tensors: Sequence[Array], size: int) -> OptimizerState:
        """Return the policies' choices for these tensors, in a state without arrays."""
        asked = names, tuple(tuple(t.shape) for t in tensors), size
        known = self._chosen.get(asked)
        if known is None:
            first = OptimizerState.first("compressed", names, 0, size)
            first = first._replace(stream=stream_of(names, [tuple(x.shape) for x in tensors]))
            known = self._chosen[asked] = self._choose(first, tensors)
        return known

    def _exchange(self, state: OptimizerState, tensors: Sequence[Array], residuals: Residuals) -> MeanState:
        """Return the residuals of this device, as the core keeps them."""
        zeros = jax.eval_shape(lambda: self._compression.zero_residuals(tensors, state)[2:4])
        names = _compressed(state)
        wanted = dict(zip(names, zeros[0], strict=bool(zeros[0]))), tuple(zeros[1])
        expected = jax.tree.map(lambda e: ((1, *e.shape), e.dtype.name), wanted)
        given = jax.tree.map(lambda e: (tuple(e.shape), e.dtype.name), (residuals.worker, residuals.server))
        if given[0].keys() != expected[0].keys():
            there, here = (
                sorted(one[0].keys() - other[0].keys())[:3]
                for one, other in ((given, expected), (expected, given))
            )
            raise ValueError(
                f"state has residuals for arrays at {there}, which tree lacks, and none for arrays at {here}; "
                "expected a tree whose arrays have the paths and shapes that init saw"
            )
        if given != expected:
            raise ValueError(
                f"state has residuals {given}; expected {expected}, as init makes them for this tree on this mesh, "
                "cut as partition_specs says. After a change of the mesh, take the residuals from a new init"
            )
        # By name, since JAX sorts the keys of a dict.
        found: Any = [residuals.worker[name] for name in names if residuals.worker], residuals.server
        worker, server = (tuple(jnp.reshape(e, e.shape[1:]) for e in owed) for owed in found)
        shapes = tuple(tuple(t.shape) for t, exact in zip(tensors, state.exact, strict=True) if not exact)
        return MeanState(0, state.size, worker, server, shapes if worker or server else (), (), self.topology)

    def _choose(self, first: OptimizerState, tensors: Sequence[Array]) -> OptimizerState:
        return self._compression.choose(first, tensors, type(self).__name__)

    def choices(self, tree: PyTree) -> tuple[tuple[bool, ...], tuple[Compressor, ...]]:
        """Return whether each array of a tree stays exact, and the compressors that a policy chooses for the others.

        Parameters
        ----------
        tree : pytree of arrays
            As for `init`.
        """
        taken = Tree.of(tree, "tree")
        size, _ = _size_of(self.axis_name)
        state = self._state(taken.names, _tensors(taken), size)
        return state.exact, state.compressors


def require_own_values(tree: Tree, axis_name: str) -> None:
    """Raise ValueError for values that JAX knows to be the same on all devices."""
    if not _varies(jax.lax.axis_index(axis_name), axis_name):
        return  # with check_vma=False JAX does not track this
    for name, leaf in zip(tree.names, tree.leaves, strict=True):
        if not _varies(leaf, axis_name):
            raise ValueError(
                f"the array of tree at {name!r} has the same values on all devices of {axis_name!r}, because "
                "jax.grad adds up the gradients of replicated parameters. Differentiate with respect to "
                f"jax.lax.pcast(params, {axis_name!r}, to='varying'), or pass check_vma=False to jax.shard_map"
            )


def weighted(tensors: Sequence[Array], weight: Array, axis_name: str) -> list[Array]:
    """Return `qcomp.weighted` of this device's tensors; NaN on all devices if a weight is invalid, or all are 0."""
    own = jnp.asarray(weight, jnp.float32)
    if own.shape:
        raise ValueError(f"weight has the shape {own.shape}; expected one number for each device")
    own = as_varying(jnp.where(jnp.isfinite(own) & (own >= 0), own, jnp.nan), axis_name)
    share = own / jax.lax.pmax(own, axis_name)
    factor = jax.lax.axis_size(axis_name) * share / jax.lax.psum(share, axis_name)
    wide: list[Any] = [to_compute_dtype(x) for x in tensors]
    factors: list[Any] = [jnp.asarray(factor, x.dtype) for x in wide]  # traced numbers
    scaled: list[Any] = [primitives.scale(x, traced) for x, traced in zip(wide, factors, strict=True)]
    return [jnp.where(factor == 0, jnp.zeros_like(x), x) for x in scaled]


def zero_rows(like: PyTree, axis_name: str) -> PyTree:
    """Return zeros like each array, a row for each device of an axis; inside `jax.shard_map`, only its own row."""
    size, inside = _size_of(axis_name)
    if not inside:
        return jax.tree.map(lambda e: _rows(size, e, axis_name), like)
    zeros = jax.tree.map(lambda e: jnp.zeros((1, *e.shape), e.dtype), like)
    return jax.tree.map(lambda e: as_varying(e, axis_name), zeros)


def as_varying(x: Array, axis_name: str) -> Array:
    """Return an array that may differ between the devices of an axis, for the types of `jax.shard_map`."""
    is_typed = _varies(jax.lax.axis_index(axis_name), axis_name)
    return jax.lax.pcast(x, axis_name, to="varying") if is_typed and not _varies(x, axis_name) else x


def everywhere(accepted: Array, axis_name: str) -> Array:
    """Return whether the devices along all other axes have accepted too, so that all do the same."""
    axes = [axis for axis in jax.sharding.get_abstract_mesh().manual_axes if axis != axis_name]
    if _varies(jax.lax.axis_index(axis_name), axis_name):
        axes = [
            axis for axis in axes if _varies(accepted, axis)
        ]  # along the others, JAX knows that devices agree
    return jax.lax.pmin(accepted.astype(jnp.int32), tuple(axes)) > 0 if axes else accepted


def _size_of(axis_name: str) -> tuple[int, bool]:
    """Return the number of devices on an axis, and whether this runs inside `jax.shard_map`."""
    try:
        return int(jax.lax.axis_size(axis_name)), True
    except NameError:
        shape = dict(jax.sharding.get_abstract_mesh().shape)
    if axis_name not in shape:
        raise ValueError(
            f"axis_name is {axis_name!r}, which no jax.shard_map and no jax.set_mesh around this call has "
            f"(their axes: {', '.join(shape) or 'none'}); expected a call inside one of them"
        )
    return shape[axis_name], False


def _compressed(state: OptimizerState) -> list[str]:
    """Return the names of the compressed tensors."""
    return [name for name, exact in zip(state.names, state.exact, strict=True) if not exact]


def _rows(size: int, like: Array, axis_name: str) -> Array:
    """Return rows of zeros; each device of the current mesh makes its own row, so that none holds all rows."""
    shape, dtype = (size, *like.shape), like.dtype
    mesh = jax.sharding.get_abstract_mesh()
    rows = NamedSharding(mesh, PartitionSpec(axis_name))
    if dict(zip(mesh.axis_names, mesh.axis_types, strict=True))[axis_name] == AxisType.Explicit:
        return jnp.zeros(shape, dtype, device=rows)
    return jax.jit(lambda: jax.lax.with_sharding_constraint(jnp.zeros(shape, dtype), rows))()


def _varies(x: Array, axis_name: str) -> bool:
    """Return whether JAX tracks that an array differs between the devices of an axis."""
    return axis_name in jax.typeof(x).mat.varying


def _of_all(x: Array, axis_name: str) -> Array:
    """Mark the value of an axis's only device as equal on all; JAX cannot see that, as nothing is sent."""
    return jax.lax.all_gather(x, axis_name, to="invarying")[0] if _varies(x, axis_name) else x


@jax.custom_jvp
def _without_derivative(tree: object) -> Any:
    """Return a pytree, and refuse `jax.grad`, since the derivative through the bits of a message would be zero."""
    return tree


@_without_derivative.defjvp
def _refuse_derivative(primals: object, tangents: object) -> Any:
    del primals, tangents
    raise TypeError(
        "tree, momenta or residuals are differentiated; expected values that are not differentiated, since a "
        "compressed mean has no derivative: average outside of jax.grad, or pass jax.lax.stop_gradient of the values"
    )


def _as_row(residual: Array) -> Array:
    return jnp.reshape(residual, (1, *residual.shape))


def _none_refused(parts: Sequence[Sequence[Array]]) -> Array:
    """Return whether every part was accepted; the means of a refused part are all NaN."""
    first = [next((mean for mean in means if mean.size), None) for means in parts]
    refused = [jnp.isnan(jnp.ravel(mean)[0]) for mean in first if mean is not None]
    return ~jnp.any(jnp.stack(refused)) if refused else jnp.bool_(True)


def _tensors(tree: Tree) -> list[Array]:
    """Return the arrays of a tree, with NumPy's arrays converted."""
    arrays = [jnp.asarray(leaf) for leaf in tree.leaves]
    for name, x in zip(tree.names, arrays, strict=True):
        compute_dtype_name(dtype_name(x.dtype), argument=f"the array at {name!r}")  # raises for integers
    return as_tensors(arrays, "tree")
