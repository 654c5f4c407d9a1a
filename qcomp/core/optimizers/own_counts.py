"""Counts of each tensor's own steps: a tensor does not count a step in which no rank has a gradient of it."""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from qcomp.core.checkpoint.format import NUMBER
from qcomp.core.checkpoint.schema import Number
from qcomp.core.numeric.arrays import Array
from qcomp.core.optimizers.tensors import zeros_like
from qcomp.core.state import OptimizerState

__all__ = [
    "EXACT_STEPS",
    "as_updates",
    "late_tensors",
    "limits_of_own",
    "of_tensors",
    "own_counts",
    "steps_of_parts",
    "with_late",
    "with_numbers_of",
    "with_own_counts",
    "without",
    "without_late",
]

_MISSED = "missed_"
"""Prefix of the numbers that say by how much a tensor's own count is lower; ``missed_steps.NAME`` for steps. Tensors
that have missed nothing have no such number."""

EXACT_STEPS = "exact_steps"
"""The name of the number of exact steps that each late tensor makes; ``exact_steps.NAME`` says which tensors are late,
and have fewer steps of their own so far. No state without late tensors has any of these numbers."""

_OF_SOME = (f"{_MISSED}steps", f"{_MISSED}updates", EXACT_STEPS)
"""The kinds of numbers that only some tensors have."""


def own_counts(state: OptimizerState, count: float, of: str = "steps") -> list[int]:
    """Return each tensor's own count: what all tensors together have counted, less what the tensor has missed.

    Parameters
    ----------
    state : OptimizerState
        The state of the last step.
    count : float
        The common count, such as ``state.step``, or ``state.step + 1`` for the next step.
    of : str
        What it counts: "steps", or another key of `Optimizer.counts`.
    """
    counts, prefix = [int(count)] * len(state.names), f"{_MISSED}{of}."
    for i, name in enumerate(state.names):
        if missed := state.numbers.get(prefix + name):
            counts[i] = max(0, counts[i] - int(missed))
    return counts


def with_own_counts(state: OptimizerState, counts: Sequence[int]) -> OptimizerState:
    """Return a state without steps as it is after steps, of which each tensor has counted some.

    Parameters
    ----------
    state : OptimizerState
        A first state.
    counts : sequence of int
        Each tensor's own count; the largest is that of all together.
    """
    step = max(counts, default=0)
    missed = {
        f"{_MISSED}steps.{name}": float(step - n)
        for name, n in zip(state.names, counts, strict=True)
        if n < step
    }
    return state._replace(step=step, numbers={**state.numbers, **missed})


def as_updates(state: OptimizerState) -> dict[str, float]:
    """Return what tensors have missed of the updates of their variance, if each of their steps was one."""
    steps, updates = f"{_MISSED}steps.", f"{_MISSED}updates."
    return {updates + k.removeprefix(steps): x for k, x in state.numbers.items() if k.startswith(steps)}


def late_tensors(state: OptimizerState) -> list[int]:
    """Return the tensors that make exact steps of their own, since they had too few before the freeze."""
    if EXACT_STEPS not in state.numbers:
        return []
    return [i for i, name in enumerate(state.names) if f"{EXACT_STEPS}.{name}" in state.numbers]


def with_late(tensors: Sequence[int], state: OptimizerState, steps: float) -> OptimizerState:
    """Return a state in which some more tensors are late, each of which makes so many exact steps."""
    if not tensors:
        return state
    late = {f"{EXACT_STEPS}.{state.names[i]}": steps for i in tensors}
    return state._replace(numbers={**state.numbers, EXACT_STEPS: steps, **late})


def without_late(tensors: Sequence[int], state: OptimizerState) -> OptimizerState:
    """Return a state in which some tensors are late no more."""
    if not tensors:
        return state
    others = set(late_tensors(state)).difference(tensors)
    gone = {f"{EXACT_STEPS}.{state.names[i]}" for i in tensors} | (set() if others else {EXACT_STEPS})
    return state._replace(numbers={key: x for key, x in state.numbers.items() if key not in gone})


def of_tensors(state: OptimizerState, tensors: Sequence[int]) -> OptimizerState:
    """Return a state with the names and arrays of some tensors only; exchange, numbers and compressors are the same."""

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
    """Make a step in which some tensors move in one way, and others in another.

    Parameters
    ----------
    parts : sequence of tuples
        For each part its tensors, what makes their step from parameters, means and the state, and the means of all
        tensors for it. Both moments must exist.
    params : sequence of arrays
        The parameters.
    means : Means
        The means, whose values are replaced.
    state : OptimizerState
        The state of the last step.
    """
    new = list(params)
    momentum, variance, step, numbers = (
        list(state.momentum),
        list(state.variance),
        state.step,
        dict(state.numbers),
    )
    arrays = {kind: list(xs) for kind, xs in state.arrays.items()}
    for tensors, make, values in parts:
        if not tensors:
            continue
        own = means._replace(values=tuple([values[i] for i in tensors]))
        moved, after = make([params[i] for i in tensors], own, of_tensors(state, tensors))
        for place, i in enumerate(tensors):
            new[i], momentum[i], variance[i] = moved[place], after.momentum[place], after.variance[place]
            for kind, xs in arrays.items():
                xs[i] = after.arrays[kind][place]
        numbers |= {key: x for key, x in after.numbers.items() if x != state.numbers.get(key)}
        step = after.step
    return new, state._replace(
        step=step,
        momentum=tuple(momentum),
        variance=tuple(variance),
        arrays={kind: tuple(xs) for kind, xs in arrays.items()},
        numbers=numbers,
    )


def without(
    optimizer: Any, left_out: Collection[int], old: OptimizerState, new: OptimizerState
) -> OptimizerState:
    """Return the state after a step, in which some tensors have moments, residuals and counts as before the step.

    Parameters
    ----------
    optimizer : Optimizer
        The optimizer that made the step.
    left_out : collection of int
        The tensors of which no rank had a gradient.
    old, new : OptimizerState
        The states before and after the step; the arrays of ``old`` are still as they were.
    """

    def kept(before: Sequence[Array], after: Sequence[Array]) -> tuple[Array, ...]:
        # A momentum of 0 that starts or stops leaves no momenta on one side.
        pairs = enumerate(zip(before or zeros_like(after), after, strict=True)) if after else ()
        return tuple(x if number in left_out else now for number, (x, now) in pairs)

    exchange = new.exchange
    if exchange.worker or exchange.server:
        mean = optimizer.mean_of(new)
        of_worker, of_server = mean.layout(
            exchange.shapes, rank=exchange.rank, size=exchange.size, nodes=exchange.nodes
        ).residuals
        compressed = [number for number, is_exact in enumerate(new.exact) if not is_exact]
        _, *of_servers = mean.kinds
        worker, server = (
            tuple(
                before if compressed[segment.tensor] in left_out else now
                for segment, before, now in zip(of_kind, residuals, after, strict=bool(after))
            )
            for of_kind, residuals, after in zip(
                (of_worker, of_server * len(of_servers)),
                (old.exchange.worker, old.exchange.server),
                (exchange.worker, exchange.server),
                strict=True,
            )
        )
        exchange = exchange._replace(worker=worker, server=server)
    own = {old.names[number] for number in left_out}
    numbers = {
        key: old.numbers.get(key, x) if key.partition(".")[2] in own else x for key, x in new.numbers.items()
    }
    before, after = optimizer.counts(old), optimizer.counts(new)
    for of in after:
        if missed := after[of] - before[of]:
            numbers |= {
                (key := f"{_MISSED}{of}.{name}"): numbers.get(key, 0.0) + missed for name in sorted(own)
            }
    return new._replace(
        numbers=numbers,
        momentum=kept(old.momentum, new.momentum),
        variance=kept(old.variance, new.variance),
        arrays={kind: kept(old.arrays[kind], after) for kind, after in new.arrays.items()},
        exchange=exchange,
    )


def with_numbers_of(saved: Mapping[str, Any], state: OptimizerState) -> OptimizerState:
    """Return a state that also has the numbers which only some tensors have, where a saved state has them."""
    keys = [EXACT_STEPS, *(f"{kind}.{name}" for kind in _OF_SOME for name in state.names)]
    return state._replace(numbers={**state.numbers, **{key: 1.0 for key in keys if NUMBER + key in saved}})


def limits_of_own(state: OptimizerState) -> dict[str, Number]:
    """Return the limits of the numbers that only some tensors have in a state: they count steps until now."""
    until_now = Number(least=1, most=state.step, whole=True)
    return {key: until_now for key in state.numbers if key.partition(".")[0] in _OF_SOME}
