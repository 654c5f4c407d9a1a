"""`MeanState`, the state of a rank between two compressed means, and the checks that a mean can use it."""

import math
from collections.abc import Sequence
from operator import attrgetter
from typing import NamedTuple

from qcomp.core.mean.layout import Layout
from qcomp.core.mean.topologies.registry import AUTO
from qcomp.core.numeric.arrays import Array, array_namespace, compute_dtype_name, device, dtype_name

_CURE = "make it with this mean's init"
_SHAPE = attrgetter("shape")


class MeanState(NamedTuple):
    """The state of a rank between two compressed means."""

    rank: int
    size: int
    worker: tuple[Array, ...]
    """The residual of each range of ``CompressedMean.layout(...).residuals.worker``, flat; empty without feedback."""
    server: tuple[Array, ...]
    """The residual of each range of ``residuals.server``, flat; empty without feedback or server."""
    shapes: tuple[tuple[int, ...], ...] = ()
    """The shape of each tensor; empty without feedback."""
    nodes: tuple[int, ...] = ()
    """The node of each rank, if the topology depends on it; empty if each rank is a node of its own."""
    topology: str = AUTO
    """The topology to which the residuals belong; never "auto" after `CompressedMean.init`."""
    number: int = 0
    """The number of this mean among all means and optimizers that started over the same communicator."""


def require_tensors(state: MeanState, tensors: Sequence[Array], topology: str) -> None:
    """Raise ValueError unless a state is for this topology, and for tensors of these sizes."""
    if state.topology != topology:
        raise ValueError(f"state has topology {state.topology!r}; this mean has {topology!r}")
    shapes = list(map(_SHAPE, tensors))
    if shapes == [*state.shapes]:
        return
    expected, found = list(map(math.prod, state.shapes)), list(map(math.prod, shapes))
    if found != expected:
        raise ValueError(f"x has arrays of {found} elements; state is for {expected}")


def require_no_residuals(state: MeanState) -> None:
    """Raise ValueError if a state has residuals; called for means that keep none."""
    if state.worker or state.server:
        raise ValueError(f"state has residuals, but this mean keeps none: {_CURE}")


def require_own_residuals(state: MeanState, layout: Layout, vectors: Sequence[Array]) -> None:
    """Raise ValueError unless the residuals have the shapes and dtypes that `CompressedMean.init` gives them.

    The layout gives the shape and the tensor of each residual; ``vectors`` are the tensors in their compute dtypes.
    """
    kinds = ("worker", state.worker), ("server", state.server)
    for (kind, residuals), (expected, tensors) in zip(kinds, layout.residual_shapes, strict=True):
        shapes = list(map(_SHAPE, residuals))
        if shapes != expected:
            raise ValueError(
                f"state has {kind} residuals of the shapes {list(map(tuple, shapes))}; expected {expected}. The state "
                f"belongs to another mean, or to arrays of other shapes: {_CURE}"
            )
        for e, tensor in zip(residuals, tensors, strict=True):
            computed = vectors[tensor].dtype
            if e.dtype != computed and dtype_name(e.dtype) != dtype_name(computed):
                raise ValueError(
                    f"x is computed in {dtype_name(computed)}, but its {kind} residual in state has dtype "
                    f"{dtype_name(e.dtype)}: convert x before init, or make a new state"
                )


def zeros_for(tensor: Array, size: int) -> Array:
    """Return ``size`` zeros in the compute dtype of a tensor, on its device."""
    xp = array_namespace(tensor)
    dtype = getattr(xp, compute_dtype_name(dtype_name(tensor.dtype)))
    return xp.zeros((size,), dtype=dtype, device=device(tensor))
