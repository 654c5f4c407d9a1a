"""The outer loop for pytrees over a communicator, run between inner steps that `jax.jit` compiles."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from qcomp.core.mean.stages import Transport
from qcomp.core.outer.loop import OuterLoop
from qcomp.core.state import OptimizerState
from qcomp.jax.trees import OnTrees, PyTree, Tree

__all__ = ["PytreeOuterLoop"]


@dataclass(frozen=True)
class PytreeOuterLoop(OnTrees[tuple[PyTree, OptimizerState]]):
    """A `qcomp.OuterLoop` for a pytree of parameters, over a communicator.

    The caller makes the inner steps, compiled, with optax or by hand, and calls the loop after each.

    Parameters
    ----------
    loop : OuterLoop
        The settings, for instance ``qcomp.outer.diloco(100)``.

    Notes
    -----
    A state is the `OptimizerState` of the core, with the paths of the arrays as names. It is a pytree. For a ``delay``
    that hides exchanges, see `qcomp.outer.Overlapped`, which takes ``jax.tree.leaves(params)``.

    Examples
    --------
    >>> import jax, jax.numpy as jnp, qcomp
    >>> outer = qcomp.jax.PytreeOuterLoop(qcomp.outer.local_sgd(2))
    >>> inner = jax.jit(lambda params: jax.tree.map(lambda p: p - 0.25 * p, params))
    >>> comm = qcomp.comm.LocalCommunicator.alone()
    >>> params = {"w": jnp.ones(4), "b": jnp.zeros(())}
    >>> state = outer.init(params, comm)
    >>> for _ in range(2):
    ...     params, state = outer.step(inner(params), state, comm)
    >>> params["w"].tolist(), state.numbers
    ([0.5625, 0.5625, 0.5625, 0.5625], {'rounds.0': 1.0})
    """

    loop: OuterLoop

    def __post_init__(self) -> None:
        if not isinstance(self.loop, OuterLoop):
            raise TypeError(f"loop is {self.loop!r}; expected a qcomp.OuterLoop")

    @property
    def _replica(self) -> OuterLoop:
        return self.loop

    def _of_tree(self, tree: Tree, loaded: Any) -> tuple[PyTree, OptimizerState]:
        leaves, state = loaded
        return tree.whole(leaves), state

    def average(self, grads: PyTree, state: OptimizerState, comm: Transport) -> PyTree:
        """Return the exact mean of the gradients in the warm-up, later the given gradients; see `OuterLoop.average`.

        Parameters
        ----------
        grads : pytree of arrays
            This rank's gradients, in the structure of the parameters.
        state : OptimizerState
            From `init` or the last step.
        comm : Communicator
            As for `step`.
        """
        tree = Tree.of_state(grads, "grads", state.names)
        return tree.whole(self.loop.average(tree.leaves, state, comm))

    def step(
        self, params: PyTree, state: OptimizerState, comm: Transport, *, weight: float | None = None
    ) -> tuple[PyTree, OptimizerState]:
        """Count an inner step, and exchange if that is due; see `OuterLoop.step`.

        Parameters
        ----------
        params : pytree of arrays
            This rank's parameters after an inner step.
        state : OptimizerState
            From `init` or the last step.
        comm : Communicator
            The communicator that `init` saw, or another with the same rank and size.
        weight : float, optional
            As for `OuterLoop.step`.
        """
        tree = Tree.of_state(params, "params", state.names)
        leaves, new_state = self.loop.step(tree.leaves, state, comm, weight=weight)
        return tree.whole(leaves), new_state

    def shared(self, params: PyTree, state: OptimizerState) -> PyTree:
        """Return the shared parameters; see `OuterLoop.shared`.

        Parameters
        ----------
        params : pytree of arrays
            This rank's parameters.
        state : OptimizerState
            The state of the last step.
        """
        tree = Tree.of_state(params, "params", state.names)
        return tree.whole(self.loop.shared(tree.leaves, state))

    def state_dict(self, params: PyTree, state: OptimizerState) -> dict[str, Any]:
        """Return parameters and state as a flat dict; see `OuterLoop.state_dict`.

        Parameters
        ----------
        params : pytree of arrays
            This rank's parameters.
        state : OptimizerState
            The state to save.
        """
        return self.loop.state_dict(Tree.of_state(params, "params", state.names).leaves, state)
