"""Counts, for each tensor, the steps in which at least one rank has a gradient for the tensor."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from qcomp.core.checkpoint.format import NUMBER
from qcomp.core.checkpoint.schema import Number
from qcomp.core.numeric.arrays import Array, as_count
from qcomp.core.optimizers.tensors import zeros_like
from qcomp.core.state import OptimizerState
from qcomp.core.variance.late import EXACT_STEPS

_MISSED = "missed_"
"""Prefix of the numbers in a state that say how many steps or updates a tensor has missed, such as
``missed_steps.NAME``. A tensor that has missed nothing has no such number."""

_OF_SOME = (f"{_MISSED}steps", f"{_MISSED}updates", EXACT_STEPS)
"""The kinds of numbers that only some tensors have."""


def own_counts(state: OptimizerState, count: float, of: str = "steps") -> list[int]:
    """Return each tensor's own count: the common ``count``, minus what the tensor has missed.

    ``of`` says what is counted: "steps", or another key of `Optimizer.counts`.
    """
    counts, prefix = [as_count(count)] * len(state.names), f"{_MISSED}{of}."
    for i, name in enumerate(state.names):
        if missed := state.numbers.get(prefix + name):
            counts[i] = max(0, counts[i] - int(missed))
    return counts


def with_own_counts(state: OptimizerState, counts: Sequence[int]) -> OptimizerState:
    """Return a first state in which each tensor has made ``counts`` steps; its ``step`` is the largest count."""
    step = max(counts, default=0)
    missed = {
        f"{_MISSED}steps.{name}": float(step - n)
        for name, n in zip(state.names, counts, strict=True)
        if n < step
    }
    return state._replace(step=step, numbers={**state.numbers, **missed})


def as_updates(state: OptimizerState) -> dict[str, float]:
    """Return the numbers of missed variance updates: the missed steps, if every step updates the variance."""
    steps, updates = f"{_MISSED}steps.", f"{_MISSED}updates."
    return {updates + k.removeprefix(steps): x for k, x in state.numbers.items() if k.startswith(steps)}


def without(
    optimizer: Any, left_out: Collection[int], old: OptimizerState, new: OptimizerState
) -> OptimizerState:
    """Return the state after a step in which some tensors, of which no rank had a gradient, stay as they were.

    Their residuals and counts also stay. The arrays of ``old`` must not have been overwritten.
    """

    def kept(before: Sequence[Array], after: Sequence[Array]) -> tuple[Array, ...]:
        # If the momentum setting has become 0, or was 0, one of the two states holds no momenta.
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
    """Return a state with a 1 under each key of ``saved`` whose number only some tensors have."""
    keys = [EXACT_STEPS, *(f"{kind}.{name}" for kind in _OF_SOME for name in state.names)]
    return state._replace(numbers={**state.numbers, **{key: 1.0 for key in keys if NUMBER + key in saved}})


def limits_of_own(state: OptimizerState) -> dict[str, Number]:
    """Return the limits, from 1 to the steps so far, of the numbers in a state that only some tensors have."""
    until_now = Number(least=1, most=state.step, whole=True)
    return {key: until_now for key in state.numbers if key.partition(".")[0] in _OF_SOME}
