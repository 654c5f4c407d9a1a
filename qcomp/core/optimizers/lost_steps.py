"""Warns of parameters in half precision whose steps are too small to change them."""

from collections.abc import Mapping, Sequence

from qcomp.core.checkpoint.format import some
from qcomp.core.numeric.arrays import Array, array_namespace, dtype_name, flat
from qcomp.core.optimizers.tensors import copy
from qcomp.core.reporting import warn_caller
from qcomp.core.state import OptimizerState

_SAMPLE = 4096
"""About how many elements of each tensor are checked."""
_BITS = {"bfloat16": 8, "float16": 11}
"""The significant bits of the dtypes in half precision."""


def samples(params: Sequence[Array], *, stochastic: bool = False) -> dict[int, Array]:
    """Return copies of some elements of each parameter in half precision, by the parameter's number.

    With ``stochastic``, parameters in bfloat16 are rounded stochastically: they lose nothing on average, and are left
    out.
    """
    dtypes = _BITS.keys() - {"bfloat16"} if stochastic else _BITS.keys()
    return {i: copy(_sample(p)) for i, p in enumerate(params) if dtype_name(p.dtype) in dtypes}


def warn_of_lost_steps(
    before: Mapping[int, Array], params: Sequence[Array], means: Sequence[Array], state: OptimizerState
) -> None:
    """Warn of each parameter of which a step changed less than half of the elements with a nonzero mean gradient.

    ``before`` is what `samples` returned before the step. A parameter is left out if its mean has a different shape.
    """
    lost = []
    for i, old in before.items():
        if means[i].shape != params[i].shape:
            continue
        xp = array_namespace(old)
        due = _sample(means[i]) != 0
        rests = due & (_sample(params[i]) == old)
        if 2 * int(xp.count_nonzero(rests)) > int(xp.count_nonzero(due)):
            lost.append(i)
    if lost:
        name = dtype_name(params[lost[0]].dtype)
        cure = "pass rounding='stochastic', or keep" if name == "bfloat16" else "keep"
        warn_caller(
            f"most elements of {some(state.names[i] for i in lost)} did not move in step {state.step + 1}, although "
            f"their mean gradients are not 0: {name} rounds away steps below 1/{2 << _BITS[name]} of a value: {cure} "
            "the parameters in float32, and compute under autocast or in copies, or raise the learning rate"
        )


def _sample(x: Array) -> Array:
    return flat(x)[:: max(1, flat(x).shape[0] // _SAMPLE) | 1]
