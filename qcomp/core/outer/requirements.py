"""Checks of an outer loop: parameters fit the state, are equal after a warm-up, and are exchanged at the same step."""

import struct
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, TypeVar

from qcomp.core.errors import MismatchError
from qcomp.core.mean.stages import AllGather, Stages
from qcomp.core.numeric.arrays import Array, compute_dtype_name, dtype_name, from_host_bytes, host_bytes
from qcomp.core.optimizers.agreement import difference_in_values
from qcomp.core.optimizers.tensors import as_tensors
from qcomp.core.outer.settings import ANCHOR
from qcomp.core.reporting import name_ranks
from qcomp.core.state import OptimizerState

Result = TypeVar("Result")


def fitting(params: Any, state: OptimizerState) -> list[Array]:
    """Return parameters as a list; raise unless they fit the shapes and dtypes of the state."""
    tensors, anchor = as_tensors(params, "params"), state.arrays[ANCHOR]
    if len(tensors) != len(anchor):
        raise ValueError(f"params has {len(tensors)} arrays; state has {len(anchor)}")
    for index, (p, x) in enumerate(zip(tensors, anchor, strict=True)):
        if tuple(p.shape) != tuple(x.shape):
            raise ValueError(
                f"params[{index}], the parameter {state.names[index]!r}, has shape {tuple(p.shape)}; expected "
                f"{tuple(x.shape)}"
            )
        if compute_dtype_name(dtype_name(p.dtype)) != dtype_name(x.dtype):
            raise TypeError(
                f"params[{index}], the parameter {state.names[index]!r}, has dtype {dtype_name(p.dtype)}; expected "
                f"one that is computed in {dtype_name(x.dtype)}, as when the loop began"
            )
    return list(tensors)


def require_equal(tensors: Sequence[Array], state: OptimizerState, warmup: int) -> Stages[None]:
    """Raise MismatchError on every rank unless the warm-up has left equal parameters on all ranks."""
    error = yield from difference_in_values(state.names, tensors, state.size)
    if error is not None:
        raise MismatchError(
            f"the warm-up of {warmup} steps ends with different parameters on the ranks: inner steps must use the "
            "gradients that OuterLoop.average returns, as the optimizers of a qcomp.torch.OuterLoop do, and nothing "
            f"else may change parameters, such as another optimizer or a forward pass that renormalises; {error}"
        ) from error


def same_step(step: int, state: OptimizerState, like: Array) -> Stages[None]:
    """Raise MismatchError on every rank if the ranks exchange after different steps; sends 8 bytes to all others."""
    arrived = yield AllGather(from_host_bytes(struct.pack("<Q", step), like), (8,) * state.size)
    steps = [struct.unpack("<Q", host_bytes(part))[0] for part in arrived]
    if len(set(steps)) > 1:
        held = [
            f"{name_ranks([rank for rank, other in enumerate(steps) if other == found])} after step {found}"
            for found in sorted(set(steps))
        ]
        raise MismatchError(
            f"the ranks exchange after different inner steps: {', '.join(held)}: every rank must call OuterLoop.step "
            "after each of its steps, and all must resume from checkpoints of the same step"
        )


def beside(check: Stages[None], work: "Stages[Result]") -> "Stages[Result]":
    """Run ``work``, whose first exchange starts while the single exchange of ``check`` is under way.

    Examples
    --------
    >>> import numpy as np, qcomp
    >>> from qcomp.core.mean.stages import drive
    >>> def sum_of(x, comm):
    ...     arrived = yield AllGather(np.asarray([x], dtype=np.uint8), (1,) * comm.size)
    ...     return sum(int(part[0]) for part in arrived)
    >>> comm = qcomp.comm.LocalCommunicator.alone()
    >>> drive(beside(sum_of(1, comm), sum_of(2, comm)), comm)
    2
    """
    verdicts = yield next(check)._replace(later=True)
    is_checked, arrived = False, None
    while True:
        try:
            request = next(work) if arrived is None else work.send(arrived)
        except StopIteration as stop:
            result: Result = stop.value
            break
        arrived = yield request
        if not is_checked:
            _finish(check, verdicts)
            is_checked = True
    if not is_checked:  # the computation has no exchange, as around a ring of one rank
        _finish(check, verdicts)
    return result


def _finish(check: Stages[None], verdicts: Sequence[Array]) -> None:
    with suppress(StopIteration):
        check.send(verdicts)
