"""Makes steps in which parameters have no gradient on some or all ranks, and checks that ranks agree on settings."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from hashlib import blake2b
from typing import Any

from qcomp.core.errors import MismatchError
from qcomp.core.mean.stages import AllGather, Exchange, Owner, Stages, owned, pipeline
from qcomp.core.numeric.arrays import (
    Array,
    array_namespace,
    device,
    flushes_subnormals,
    from_host_bytes,
    host_bytes,
)
from qcomp.core.optimizers.base import Optimizer
from qcomp.core.optimizers.replica import owner_of
from qcomp.core.reporting import name_ranks, warn_caller
from qcomp.core.state import OptimizerState
from qcomp.core.variance.late import EXACT_STEPS, late_tensors, with_late, without_late

_DIGEST = 8
"""Bytes of a digest of settings."""


def stages_of_used(
    optimizer: Optimizer,
    params: Sequence[Array],
    grads: Sequence[Array | None],
    state: OptimizerState,
    *,
    settings: str = "",
    donate: bool = False,
) -> Stages[tuple[list[Array], OptimizerState]]:
    """Make one step as a generator of pure stages; a parameter for which no rank has a gradient stays as it is.

    Its moments and residuals also stay, and its bias corrections do not count the step. A rank without a gradient for a
    parameter that others use contributes zeros, as the mean over all ranks requires. While the ranks are apart (see
    `Optimizer.apart`), zeros stand for every missing gradient. If no rank has any gradient, nothing changes, and a
    warning says so.

    ``settings`` is the text of all settings that may have changed since the last step; if it differs between ranks, all
    ranks raise MismatchError before anything changes. ``donate`` is ignored on a rank that lacks a gradient.

    Every rank sends 8 bytes and a bit for each parameter to all others, alongside the first exchange of the step. While
    some tensors still make exact steps of their own (see `OneBitAdam`), these bytes are sent before that exchange.
    """
    used = [g is not None for g in grads]
    filled = [_zeros_like(p) if g is None else g for p, g in zip(params, grads, strict=True)]
    left_out: set[int] = set()

    def leave_out(anywhere: Sequence[bool]) -> None:
        if not optimizer.apart(state.stage):
            left_out.update(number for number, found in enumerate(anywhere) if not found)

    def agreed() -> Stages[None]:
        leave_out((yield from _agreed(used, settings, state, params[0])))

    owner, late = owner_of(optimizer, state), late_tensors(state)
    if state.size == 1:
        leave_out(used)
    elif late:
        # Late tensors that some rank uses make exact steps, so the ranks must know these tensors before they exchange.
        yield from owned(agreed(), owner)
    asleep = [number for number in late if number in left_out]
    begun = without_late(asleep, state)
    # If this rank uses all parameters, no parameter is left out, and the old state is not needed.
    step = optimizer.stages(params, filled, begun, donate=donate and all(used), left_out=left_out)
    if state.size > 1 and not late:
        step = _beside(agreed(), step, owner)
    new_params, new_state = yield from step
    if len(left_out) == len(params):
        warn_of_no_gradient("on any rank")
        return list(params), state
    return new_params, with_late(asleep, new_state, state.numbers.get(EXACT_STEPS, 0.0))


def warn_of_no_gradient(where: str) -> None:
    """Warn that a step has changed nothing, since no parameter had a gradient ``where``."""
    warn_caller(
        f"no parameter has a gradient {where}, so this optimizer step has changed nothing: call backward before step, "
        "and zero_grad after step. If the model's parameters have been replaced since the optimizer was made, as by "
        "model.load_state_dict(assign=True) or fully_shard(model), make another optimizer"
    )


def _beside(agreed: Stages[None], step: Stages[Any], owner: Owner) -> Stages[Any]:
    """Run a step, and run ``agreed`` beside the step's first exchange; ``agreed`` ends before the step continues.

    If the step sends nothing, because ranks make local steps, ``agreed`` does not run.
    """
    try:
        first = next(step)
    except StopIteration as stop:
        return stop.value
    _, result = yield from owned(pipeline([agreed, _continued(first, step)]), owner)
    return result


def _continued(first: Exchange, stages: Stages[Any]) -> Stages[Any]:
    """Return a computation whose first exchange is known already."""
    request = first
    while True:
        try:
            request = stages.send((yield request))
        except StopIteration as stop:
            return stop.value


def settings_since(settings: str, optimizer: Optimizer, state: OptimizerState) -> str:
    """Return the settings of the next step, and of all steps since the last exchange, as text.

    In a step that sends nothing, no rank can compare its settings with others. Until the next exchange, the numbers of
    the state contain such settings, for instance as the sum of the learning rates. The text also says if the processor
    flushes subnormals.
    """
    if flushes_subnormals():  # a mode that may change after the start
        settings += ", subnormal numbers flushed to 0"
    if not optimizer.apart(state.stage):
        return settings
    numbers = dict(sorted(state.numbers.items()))
    of_tensors = {key: numbers.pop(key) for key in list(numbers) if "." in key}  # too many for a message
    digest = blake2b(repr(of_tensors).encode(), digest_size=_DIGEST).hexdigest()
    return f"{settings}, and in the state {numbers}, of single tensors {digest}"


def same_settings(settings: str, state: OptimizerState, like: Array) -> Stages[None]:
    """Raise MismatchError on every rank if the settings of the next step differ; sends 8 bytes to all others."""
    yield from _agreed((), settings, state, like)


def used_anywhere(used: Sequence[bool], state: OptimizerState, like: Array) -> Stages[list[bool]]:
    """Return whether each parameter has a gradient on some rank; sends 8 bytes and a bit for each to all others."""
    found: list[bool] = yield from _agreed(used, "", state, like)
    return found


def _agreed(used: Sequence[bool], settings: str, state: OptimizerState, like: Array) -> Stages[Any]:
    """Return whether each parameter has a gradient on some rank; raise on all ranks if their settings differ."""
    own = blake2b(settings.encode(), digest_size=_DIGEST).digest()
    bits = sum(1 << number for number, is_used in enumerate(used) if is_used)
    message = own + bits.to_bytes((len(used) + 7) // 8, "little")
    arrived = yield AllGather(from_host_bytes(message, like), (len(message),) * state.size)
    found, ranks_of = 0, defaultdict[bytes, list[int]](list)
    for rank, received in enumerate(map(host_bytes, arrived)):
        found |= int.from_bytes(received[_DIGEST:], "little")
        ranks_of[bytes(received[:_DIGEST])].append(rank)
    if len(ranks_of) > 1:
        groups = ", and ".join(map(name_ranks, ranks_of.values()))
        raise MismatchError(
            f"the settings of step {state.step + 1} differ between {groups}: rank {state.rank} has {settings}. Code "
            "that changes settings, such as a scheduler, must see the same values on all ranks, for instance the mean "
            "of their losses"
        )
    return [bool(found >> number & 1) for number in range(len(used))]


def _zeros_like(x: Array) -> Array:
    return array_namespace(x).zeros(tuple(x.shape), dtype=x.dtype, device=device(x))
