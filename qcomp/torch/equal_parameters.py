"""Makes the parameters equal on all ranks at the start, and compares them in some later steps."""

from collections.abc import Sequence
from typing import Any

from qcomp.comm.base import Communicator
from qcomp.core.broadcast import first_values
from qcomp.core.errors import MismatchError
from qcomp.core.mean.stages import Stages, drive
from qcomp.core.optimizers.agreement import difference_in_values
from qcomp.core.optimizers.tensors import as_tensors
from qcomp.core.state import OptimizerState

COMPARED = frozenset([0, *(10**power for power in range(1, 8))])
"""The numbers of completed steps after which the ranks compare their parameters."""


def of_first_rank(
    names: Sequence[str], values: Sequence[Any], comm: Communicator, bits: Sequence[Any] = ()
) -> list[Any]:
    """Return the parameters and the bits of frozen ones, with rank 0's where they differ between ranks; collective.

    Under DistributedDataParallel, too, all ranks start with rank 0's values. If the ranks differ in names, shapes or
    dtypes, each gets its own values back.
    """
    as_tensors(values, "params")
    every = [*values, *bits]
    if comm.size == 1 or any(hasattr(x, "device_mesh") for x in values):
        return every
    of_all = (*names, *(f"frozen {number}" for number in range(len(bits))))
    found = drive(first_values(every, of_all, rank=comm.rank, size=comm.size), comm)
    return [found.get(number, x) for number, x in enumerate(every)]


def compare_parameters(values: Sequence[Any], state: OptimizerState) -> Stages[None]:
    """Raise MismatchError on every rank if the parameters differ between ranks when a step begins."""
    error = yield from difference_in_values(state.names, values, state.size)
    if error is not None:
        raise MismatchError(
            f"something other than this optimizer has changed parameters on some ranks before step {state.step + 1}: "
            "load weights on every rank, or before the optimizer is made, which copies them from rank 0 to all ranks. "
            "An Embedding with max_norm renormalises the rows that its rank reads: leave max_norm out, and "
            f"renormalise after the step; {error}"
        ) from error
