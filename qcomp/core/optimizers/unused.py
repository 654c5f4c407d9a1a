"""Steps whose settings may change, and in which some parameters have no gradient, on this rank or on all."""

from collections import defaultdict
from collections.abc import Sequence
from hashlib import blake2b
from typing import Any

from qcomp.core.errors import MismatchError
from qcomp.core.mean.stages import AllGather, Exchange, Stages, owned, pipeline
from qcomp.core.numeric.arrays import (
    Array,
    array_namespace,
    device,
    flushes_subnormals,
    from_host_bytes,
    host_bytes,
)
from qcomp.core.optimizers.base import Optimizer
from qcomp.core.optimizers.starting import owner_of
from qcomp.core.optimizers.tensors import zeros_like
from qcomp.core.reporting import name_ranks, warn_caller
from qcomp.core.state import OptimizerState

__all__ = ["same_settings", "settings_since", "stages_of_used", "used_anywhere", "warn_of_no_gradient"]

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
    """Make one step as a generator of pure stages; a parameter without a gradient on any rank stays as it is.

    So do its moments and residuals. A rank without a gradient of a parameter that others use contributes zeros, as the
    mean over all ranks requires. While the ranks are apart (see `Optimizer.apart`), zeros stand for every missing
    gradient. If no rank has any gradient, nothing changes, and a warning says so.

    Parameters
    ----------
    optimizer : Optimizer
        Any but `QSVRG`.
    params : sequence of arrays
        The parameters.
    grads : sequence of arrays or None
        This rank's gradients; None where there is none.
    state : OptimizerState
        From `Optimizer.init` or the last step.
    settings : str
        The settings that may have changed since the last step, as text; equal settings give equal text.
    donate : bool
        As for `Optimizer.step`; ignored on a rank that lacks a gradient.

    Raises
    ------
    MismatchError
        On every rank, if the settings differ. Nothing has changed then.

    Notes
    -----
    Alongside the first exchange of the step, every rank sends 8 bytes and a bit for each parameter to all others.
    """
    used = [g is not None for g in grads]
    filled = [_zeros_like(p) if g is None else g for p, g in zip(params, grads, strict=True)]
    # If this rank uses all parameters, none is left out, and the old state is not needed.
    step = optimizer.stages(params, filled, state, donate=donate and all(used))
    anywhere: Sequence[bool] = used
    try:
        first = next(step)
    except StopIteration as stop:  # it sends nothing
        new_params, new_state = stop.value
        if state.size > 1:  # the ranks are apart, or go apart
            return new_params, new_state
    else:
        exchanges = pipeline([_agreed(used, settings, state, params[0]), _continued(first, step)])
        anywhere, (new_params, new_state) = yield from owned(exchanges, owner_of(optimizer, state))
    left_out = {number for number, found in enumerate(anywhere) if not found}
    if not left_out or optimizer.apart(state.stage):
        return new_params, new_state
    if len(left_out) == len(params):  # so there was no step
        warn_of_no_gradient("on any rank")
        return list(params), state
    kept = [p if i in left_out else new for i, (p, new) in enumerate(zip(params, new_params, strict=True))]
    return kept, _without(optimizer, left_out, state, new_state)


def warn_of_no_gradient(where: str) -> None:
    """Warn that a step has changed nothing, since no parameter had a gradient ``where``."""
    warn_caller(
        f"no parameter has a gradient {where}, so this optimizer step has changed nothing: call backward before "
        "step, and zero_grad after it. Or the model has other parameters now than the optimizer, as after "
        "model.load_state_dict(assign=True): make another optimizer"
    )


def _continued(first: Exchange, stages: Stages[Any]) -> Stages[Any]:
    """Return a computation whose first exchange is known already."""
    request = first
    while True:
        try:
            request = stages.send((yield request))
        except StopIteration as stop:
            return stop.value


def settings_since(settings: str, optimizer: Optimizer, state: OptimizerState) -> str:
    """Return the settings of the next step as text, and those of the steps since the last exchange.

    In a step that sends nothing, no rank can compare its settings with others. They are in the numbers of the state,
    such as the sum of the learning rates, until the ranks meet. The text also says if the processor flushes subnormals.
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
    """Raise MismatchError on every rank if the settings of the next step differ; sends 8 bytes to all others.

    Parameters
    ----------
    settings : str
        The settings, as text; equal settings give equal text.
    state : OptimizerState
        Gives the rank, the number of ranks and the step.
    like : array
        Gives the library and the device of the buffers.
    """
    yield from _agreed((), settings, state, like)


def used_anywhere(used: Sequence[bool], state: OptimizerState, like: Array) -> Stages[list[bool]]:
    """Return whether each parameter has a gradient on some rank; sends 8 bytes and a bit for each to all others.

    Parameters
    ----------
    used : sequence of bool
        Whether each parameter has a gradient on this rank.
    state : OptimizerState
        Gives the number of ranks.
    like : array
        Gives the library and the device of the buffers.
    """
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
            f"the settings of step {state.step + 1} differ between {groups}: rank {state.rank} has {settings}. What "
            "changes them, such as a scheduler, must see the same values on all ranks, for instance the mean of "
            "their losses"
        )
    return [bool(found >> number & 1) for number in range(len(used))]


def _without(
    optimizer: Optimizer, left_out: set[int], state: OptimizerState, new: OptimizerState
) -> OptimizerState:
    """Return the state after a step, with the moments and residuals of some tensors as they were before.

    A step that enters another stage has changed what the moments mean, and has set the residuals to zero. Then nothing
    is restored, and the moments of these tensors are those after a gradient of zero.
    """
    if new.stage != state.stage or new.step == state.step:
        return new

    def kept(old: Sequence[Array], after: Sequence[Array]) -> tuple[Array, ...]:
        # A momentum of 0 that starts or stops leaves no momenta on one side.
        pairs = enumerate(zip(old or zeros_like(after), after, strict=True)) if after else ()
        return tuple(before if number in left_out else now for number, (before, now) in pairs)

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
                for segment, before, now in zip(of_kind, old, after, strict=bool(after))
            )
            for of_kind, old, after in zip(
                (of_worker, of_server * len(of_servers)),
                (state.exchange.worker, state.exchange.server),
                (exchange.worker, exchange.server),
                strict=True,
            )
        )
        exchange = exchange._replace(worker=worker, server=server)
    own = {state.names[number] for number in left_out}
    return new._replace(
        numbers={
            key: state.numbers[key] if key.partition(".")[2] in own else x for key, x in new.numbers.items()
        },
        momentum=kept(state.momentum, new.momentum),
        variance=kept(state.variance, new.variance),
        arrays={kind: kept(state.arrays[kind], after) for kind, after in new.arrays.items()},
        exchange=exchange,
    )


def _zeros_like(x: Array) -> Array:
    return array_namespace(x).zeros(tuple(x.shape), dtype=x.dtype, device=device(x))
