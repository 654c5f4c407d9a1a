"""Optimizers and means of the core for pytrees, over a communicator."""

from __future__ import annotations

import math
import sys
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Generic, Literal, NamedTuple

import jax

from qcomp.core.handshake import handshake
from qcomp.core.mean.compressed_mean import CompressedMean, MeanState
from qcomp.core.mean.stages import Transport
from qcomp.core.numeric.arrays import Array, is_traced
from qcomp.core.numeric.random import Key
from qcomp.core.optimizers.base import Optimizer
from qcomp.core.optimizers.replica import Loaded, Replica
from qcomp.core.state import OptimizerState

__all__ = ["OnTrees", "PyTree", "PytreeMean", "PytreeMeanState", "PytreeOptimizer", "Tree", "names_of"]

PyTree = Any


class Tree(NamedTuple):
    """A pytree of arrays, taken apart."""

    names: tuple[str, ...]
    """The path of each array, such as ``"layers/0/w"``."""
    leaves: list[Array]
    """The arrays."""
    structure: Any
    """The containers that held the arrays."""

    @classmethod
    def of(cls, tree: PyTree, argument: str) -> Tree:
        """Take a pytree apart.

        Parameters
        ----------
        tree : pytree of arrays
        argument : str
            Its name in errors.

        Raises
        ------
        ValueError
            If there is no array in it, or two have the same path.
        """
        leaves, structure = jax.tree_util.tree_flatten(tree)
        names = tuple(_names(tree))
        if not names:
            raise ValueError(f"{argument} is {tree!r}; expected a pytree with at least one array")
        doubled = sorted(name for name, count in Counter(names).items() if count > 1)
        if doubled:
            raise ValueError(
                f"{argument} has several arrays with the path {doubled[0]!r}; expected one of each"
            )
        return cls(names, leaves, structure)

    @classmethod
    def of_state(cls, tree: PyTree, argument: str, names: tuple[str, ...]) -> Tree:
        """Take apart a pytree whose arrays must have the paths in a state.

        Parameters
        ----------
        tree : pytree of arrays
        argument : str
            Its name in errors.
        names : tuple of str
            The paths in the state.

        Raises
        ------
        ValueError
            If an array has another path.
        """
        taken = cls.of(tree, argument)
        if taken.names != names:
            raise ValueError(f"{argument} has arrays at {taken.names}; state has {names}")
        return taken

    def like(self, tree: PyTree, argument: str) -> list[Array]:
        """Return the arrays of another pytree of the same structure, or with the same paths.

        Parameters
        ----------
        tree : pytree of arrays
        argument : str
            Its name in errors.

        Raises
        ------
        ValueError
            If the structures differ; the error names a path that only one of them has.
        """
        leaves, structure = jax.tree_util.tree_flatten(tree)
        if structure == self.structure or names_of(tree) == self.names:
            return leaves
        names = names_of(tree)
        different = [name for name in (*self.names, *names) if (name in names) != (name in self.names)]
        where = f", which differ in {different[0]!r}" if different else ""
        raise ValueError(f"{argument} has the structure {structure}; expected {self.structure}{where}")

    def whole(self, leaves: Sequence[Array]) -> PyTree:
        """Return a pytree of this structure with these arrays."""
        return jax.tree_util.tree_unflatten(self.structure, leaves)


def _names(tree: PyTree) -> Iterator[str]:
    """Yield the path of each array, without the key that flax.nnx adds for the value inside a variable.

    `flax.nnx.Optimizer` passes variables to ``init``, and their arrays to ``update``.
    """
    nnx: Any = sys.modules.get("flax.nnx")
    is_variable = None if nnx is None else lambda node: isinstance(node, nnx.Variable)
    for path, node in jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_variable)[0]:
        inner, _ = jax.tree_util.tree_flatten_with_path(node)
        for within, _ in inner:
            yield jax.tree_util.keystr((*path, *within[1:]), simple=True, separator="/")


def names_of(tree: PyTree) -> tuple[str, ...]:
    """Return the path of each array of a pytree: its name in policies, groups and checkpoints.

    Parameters
    ----------
    tree : pytree of arrays

    Examples
    --------
    >>> import jax.numpy as jnp, qcomp
    >>> qcomp.jax.names_of({"layers": [{"w": jnp.ones(2), "b": jnp.ones(1)}]})
    ('layers/0/b', 'layers/0/w')
    """
    return Tree.of(tree, "tree").names


class OnTrees(ABC, Generic[Loaded]):
    """Base of the classes that start and resume a replica of the core for a pytree."""

    @property
    @abstractmethod
    def _replica(self) -> Replica[Any]:
        """What is started."""

    def _of_tree(self, tree: Tree, loaded: Any) -> Loaded:  # noqa: ARG002
        """Return what the replica has loaded, with the parameters as a tree."""
        found: Loaded = loaded
        return found

    def init(self, params: PyTree, comm: Transport) -> OptimizerState:
        """Return the state before the first step; see `Optimizer.init` and `OuterLoop.init`.

        Parameters
        ----------
        params : pytree of arrays
            The parameters, equal on all ranks.
        comm : Communicator
            The ranks.
        """
        tree = Tree.of(params, "params")
        return self._replica.init(tree.leaves, comm, tree.names)

    def load_state_dict(
        self,
        saved: Mapping[str, Any] | Sequence[Mapping[str, Any]],
        params: PyTree,
        comm: Transport,
        *,
        strict: bool = True,
        lost: Literal["raise", "drop"] = "raise",
    ) -> Loaded:
        """Return the state saved by `state_dict`; an outer loop returns the parameters and the state.

        See `Optimizer.load_state_dict`.

        Parameters
        ----------
        saved : mapping of str to array or scalar, or sequence of them
            This rank's own dict, or the dicts of all ranks that saved.
        params, comm
            As for `init`; an outer loop ignores the values of the parameters.
        strict, lost
            As for `Optimizer.load_state_dict`.
        """
        tree = Tree.of(params, "params")
        loaded = self._replica.load_state_dict(saved, tree.leaves, comm, tree.names, strict=strict, lost=lost)
        return self._of_tree(tree, loaded)


@dataclass(frozen=True)
class PytreeOptimizer(OnTrees[OptimizerState]):
    """An optimizer of qcomp for a pytree of parameters, over a communicator.

    For steps inside `jax.jit`, see `qcomp.jax.optax`. Here each step calls several compiled kernels, and between these
    calls the communicator moves bytes.

    Parameters
    ----------
    optimizer : Optimizer
        Any optimizer of qcomp whose steps take one gradient.

    Raises
    ------
    TypeError
        If ``optimizer`` is not such an optimizer.

    Notes
    -----
    A state is the `OptimizerState` of the core, with the paths of the arrays as names. It is a pytree: its arrays are
    leaves, all else is static. So `jax.tree.map`, `jax.device_put` and `jax.block_until_ready` apply to it. A
    checkpoint also needs the static fields, so save the result of `state_dict`: with `numpy.savez`, pickle or
    ``flax.serialization.msgpack_serialize``, but not with Orbax, which takes neither texts nor empty arrays.

    Examples
    --------
    >>> import jax.numpy as jnp, qcomp
    >>> opt = qcomp.jax.PytreeOptimizer(qcomp.CompressedSGD(learning_rate=0.1, exact=None))
    >>> comm = qcomp.comm.LocalCommunicator.alone()
    >>> params = {"w": jnp.ones(4), "b": jnp.zeros(())}
    >>> state = opt.init(params, comm)
    >>> params, state = opt.step(params, params, state, comm)
    >>> state.names, round(float(params["w"][0]), 3)
    (('b', 'w'), 0.9)
    """

    optimizer: Optimizer

    def __post_init__(self) -> None:
        if not isinstance(self.optimizer, Optimizer):
            raise TypeError(
                f"optimizer is {self.optimizer!r}; expected an optimizer such as qcomp.OneBitAdam(...)"
            )
        if self.optimizer.two_gradients:
            raise TypeError(
                f"optimizer is a {type(self.optimizer).__name__}; expected one that steps with one gradient: "
                f"{self.optimizer.two_gradients}. Call the optimizer's own step with jax.tree.leaves(params)"
            )

    @property
    def _replica(self) -> Optimizer:
        return self.optimizer

    def step(
        self,
        params: PyTree,
        grads: PyTree,
        state: OptimizerState,
        comm: Transport,
        *,
        donate: bool = False,
        weight: float | None = None,
    ) -> tuple[PyTree, OptimizerState]:
        """Make one step; see `Optimizer.step`.

        Parameters
        ----------
        params, grads : pytree of arrays
            Parameters, the same on all ranks, and this rank's gradients of them, in the same structure.
        state : OptimizerState
            From `init` or the last step.
        comm : Communicator
            The communicator that `init` saw, or another with the same rank and size.
        donate : bool
            As for `Optimizer.step`.
        weight : float, optional
            As for `Optimizer.step`.

        Returns
        -------
        params : pytree of arrays
        state : OptimizerState

        Raises
        ------
        ValueError
            If the gradients have another structure than the parameters, or the state belongs to other parameters.
        NonFiniteError
            As for `Optimizer.step`.
        """
        tree = Tree.of_state(params, "params", state.names)
        if any(map(is_traced, (*tree.leaves, *jax.tree.leaves(grads)))):
            raise TypeError(
                "params or grads are traced by jax.jit; expected arrays with values, since a step over a communicator "
                "checks them and moves bytes: call step outside of jax.jit, or use qcomp.jax.optax inside"
            )
        leaves, new_state = self.optimizer.step(
            tree.leaves, tree.like(grads, "grads"), state, comm, donate=donate, weight=weight
        )
        return tree.whole(leaves), new_state

    def state_dict(self, state: OptimizerState) -> dict[str, Any]:
        """Return a state as a flat dict of named arrays and scalars; see `Optimizer.state_dict`.

        Parameters
        ----------
        state : OptimizerState
            The state to save.
        """
        return self.optimizer.state_dict(state)


class PytreeMeanState(NamedTuple):
    """What a `PytreeMean` keeps between two calls. It is a pytree whose leaves are the arrays of ``mean``."""

    names: tuple[str, ...]
    """The path of each array that is averaged."""
    mean: MeanState


@dataclass(frozen=True)
class PytreeMean:
    """A compressed mean of pytrees, over a communicator.

    Parameters
    ----------
    mean : CompressedMean
        Any mean of qcomp.

    Examples
    --------
    >>> import jax.numpy as jnp, qcomp
    >>> allreduce = qcomp.jax.PytreeMean(qcomp.CompressedMean(qcomp.ScaledSign(bucket_size=8)))
    >>> comm = qcomp.comm.LocalCommunicator.alone()
    >>> tree = {"w": jnp.full(8, 3.0), "b": [jnp.full(8, -1.0)]}
    >>> state = allreduce.init(tree, comm)
    >>> mean, state = allreduce(tree, state, comm)
    >>> mean["b"][0].tolist()
    [-1.0, -1.0, -1.0, -1.0, -1.0, -1.0, -1.0, -1.0]
    """

    mean: CompressedMean

    def init(self, tree: PyTree, comm: Transport) -> PytreeMeanState:
        """Return a state with residuals of zero; see `CompressedMean.init`.

        Parameters
        ----------
        tree : pytree of arrays
            A tree with the structure, shapes and dtypes of the trees to average.
        comm : Communicator
            The ranks.

        Raises
        ------
        MismatchError
            On every rank, if the paths of the arrays, or their order, differ between ranks.
        """
        taken = Tree.of(tree, "tree")
        handshake(comm, {"names": list(taken.names)}, like=taken.leaves[0])
        return PytreeMeanState(taken.names, self.mean.init(taken.leaves, comm))

    def __call__(
        self,
        tree: PyTree,
        state: PytreeMeanState,
        comm: Transport,
        *,
        key: Key | None = None,
        weight: float | None = None,
    ) -> tuple[PyTree, PytreeMeanState]:
        """Average a pytree over the ranks; see `CompressedMean.stages`.

        Parameters
        ----------
        tree : pytree of arrays
            This rank's values.
        state : PytreeMeanState
            From `init` or from the last call.
        comm : Communicator
            The ranks.
        key : Key, optional
            Required by compressors that draw.
        weight : float, optional
            As for `CompressedMean`.

        Raises
        ------
        ValueError
            If the arrays have other paths than `init` saw.
        """
        taken = Tree.of_state(tree, "tree", state.names)
        leaves, mean = self.mean(taken.leaves, state.mean, comm, key=key, weight=weight)
        return taken.whole(leaves), PytreeMeanState(taken.names, mean)


_ARRAYS_OF_OPTIMIZER = ("momentum", "variance", "exchange", "arrays")
_ARRAYS_OF_MEAN = ("worker", "server")
_ARRAYS_OF_TREE = ("mean",)


def _register(kind: Any, arrays: tuple[str, ...]) -> None:
    """Make a class of states a pytree whose leaves are in these fields; the other fields are static."""
    static = tuple(name for name in kind._fields if name not in arrays)

    def flatten(state: Any) -> tuple[list[tuple[Any, Any]], Any]:
        children = [(jax.tree_util.GetAttrKey(name), getattr(state, name)) for name in arrays]
        return children, tuple(_hashable(getattr(state, name)) for name in static)

    def unflatten(fixed: Any, children: Iterable[Any]) -> Any:
        named = {**dict(zip(arrays, children, strict=True)), **dict(zip(static, fixed, strict=True))}
        if "numbers" in named:
            named["numbers"] = dict(named["numbers"])
        return kind(**named)

    with suppress(ValueError):  # the class is registered already if this module is executed twice
        jax.tree_util.register_pytree_with_keys(kind, flatten, unflatten)


def _hashable(value: Any) -> Any:
    """Return a hashable value of a static field; equal states give equal values."""
    if not isinstance(value, Mapping):
        return value
    # NaN objects are unequal unless identical, so the NaN of a loaded state would make jax.jit compile again.
    return tuple(sorted((name, math.nan if math.isnan(number) else number) for name, number in value.items()))


_register(MeanState, _ARRAYS_OF_MEAN)
_register(OptimizerState, _ARRAYS_OF_OPTIMIZER)
_register(PytreeMeanState, _ARRAYS_OF_TREE)
