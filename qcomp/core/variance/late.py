"""Late tensors: they made too few steps before the freeze, and so they still make exact steps after it."""

from collections.abc import Callable, Sequence
from typing import Any

from qcomp.core.numeric.arrays import Array
from qcomp.core.state import OptimizerState

EXACT_STEPS = "exact_steps"
"""The key of the number of exact steps that each tensor must make. A tensor that has made fewer is late, and has the
key ``exact_steps.NAME``. States without late tensors have none of these keys."""


def late_tensors(state: OptimizerState) -> list[int]:
    """Return the numbers of the late tensors, which still make exact steps."""
    if EXACT_STEPS not in state.numbers:
        return []
    return [i for i, name in enumerate(state.names) if f"{EXACT_STEPS}.{name}" in state.numbers]


def with_late(tensors: Sequence[int], state: OptimizerState, steps: float) -> OptimizerState:
    """Return a state in which more tensors are late, and make exact steps until they have made ``steps``."""
    if not tensors:
        return state
    late = {f"{EXACT_STEPS}.{state.names[i]}": steps for i in tensors}
    return state._replace(numbers={**state.numbers, EXACT_STEPS: steps, **late})


def without_late(tensors: Sequence[int], state: OptimizerState) -> OptimizerState:
    """Return a state in which some tensors are no longer late."""
    if not tensors:
        return state
    others = set(late_tensors(state)).difference(tensors)
    gone = {f"{EXACT_STEPS}.{state.names[i]}" for i in tensors} | (set() if others else {EXACT_STEPS})
    return state._replace(numbers={key: x for key, x in state.numbers.items() if key not in gone})


def of_tensors(state: OptimizerState, tensors: Sequence[int]) -> OptimizerState:
    """Return a state with the names and arrays of only some tensors; exchange, numbers and compressors stay."""

    def of(arrays: Sequence[Any]) -> tuple[Any, ...]:
        return tuple([arrays[i] for i in tensors]) if arrays else ()

    return state._replace(
        names=of(state.names),
        exact=of(state.exact),
        momentum=of(state.momentum),
        variance=of(state.variance),
        arrays={kind: of(arrays) for kind, arrays in state.arrays.items()},
    )


def steps_of_parts(
    parts: Sequence[tuple[Sequence[int], Callable[..., Any], Sequence[Array]]],
    params: Sequence[Array],
    means: Any,
    state: OptimizerState,
) -> tuple[list[Array], OptimizerState]:
    """Make a step in which different functions move different tensors.

    Each part holds the numbers of its tensors, a function, and the means of all tensors for this function. The function
    makes a step from parameters, `Means` and a state. The state must hold both moments.
    """
    new, after = list(params), state
    for tensors, make, values in parts:
        if not tensors:
            continue
        own = means._replace(values=tuple([values[i] for i in tensors]))
        moved, part = make([params[i] for i in tensors], own, of_tensors(state, tensors))

        def put(
            into: Sequence[Array], these: Sequence[Array], tensors: Sequence[int] = tensors
        ) -> tuple[Array, ...]:
            by_number = dict(zip(tensors, these, strict=True))
            return tuple([by_number.get(i, x) for i, x in enumerate(into)])

        new = [*put(new, moved)]
        changed = {key: x for key, x in part.numbers.items() if x != state.numbers.get(key)}
        after = after._replace(
            step=part.step,
            momentum=put(after.momentum, part.momentum),
            variance=put(after.variance, part.variance),
            arrays={kind: put(xs, part.arrays[kind]) for kind, xs in after.arrays.items()},
            numbers={**after.numbers, **changed},
        )
    return new, after
