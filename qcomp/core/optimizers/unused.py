"""Steps in which some parameters have no gradient, on this rank or on all."""

from collections.abc import Sequence
from typing import Any

from qcomp.core.mean.stages import AllGather, Stages, pipeline
from qcomp.core.numeric.arrays import Array, array_namespace, device, from_host_bytes, host_bytes
from qcomp.core.optimizers.base import Optimizer
from qcomp.core.state import OptimizerState

__all__ = ["stages_of_used"]


def stages_of_used(
    optimizer: Optimizer,
    params: Sequence[Array],
    grads: Sequence[Array | None],
    state: OptimizerState,
    *,
    donate: bool = False,
) -> Stages[tuple[list[Array], OptimizerState]]:
    """Make one step as a generator of pure stages; a parameter without a gradient on any rank stays as it is.

    So do its moments and residuals. A rank that has no gradient of a parameter that others use contributes zeros, as
    the mean over all ranks demands. While the ranks are apart (see `Optimizer.apart`), zeros stand for every missing
    gradient.

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
    donate : bool
        As for `Optimizer.step`; ignored on a rank that lacks a gradient.

    Notes
    -----
    Every rank sends a bit for each parameter to all others, beside the first exchange of the step.
    """
    used = [g is not None for g in grads]
    filled = [_zeros_like(p) if g is None else g for p, g in zip(params, grads, strict=True)]
    if optimizer.apart(state.stage):
        return (yield from optimizer.stages(params, filled, state, donate=donate))
    # What no rank uses this rank does not use either: else nothing of the old state is needed.
    step = optimizer.stages(params, filled, state, donate=donate and all(used))
    anywhere, (new_params, new_state) = yield from pipeline(
        [_used_anywhere(used, state.size, params[0]), step]
    )
    left_out = {number for number, found in enumerate(anywhere) if not found}
    if not left_out:
        return new_params, new_state
    kept = [p if i in left_out else new for i, (p, new) in enumerate(zip(params, new_params, strict=True))]
    return kept, _without(optimizer, left_out, state, new_state)


def _used_anywhere(used: Sequence[bool], size: int, like: Array) -> Stages[Any]:
    """Return whether each parameter has a gradient on some rank, the same on all ranks."""
    bits = sum(1 << number for number, is_used in enumerate(used) if is_used)
    nbytes = (len(used) + 7) // 8
    arrived = yield AllGather(from_host_bytes(bits.to_bytes(nbytes, "little"), like), (nbytes,) * size)
    found = 0
    for message in arrived:
        found |= int.from_bytes(host_bytes(message), "little")
    return [bool(found >> number & 1) for number in range(len(used))]


def _without(
    optimizer: Optimizer, left_out: set[int], state: OptimizerState, new: OptimizerState
) -> OptimizerState:
    """Return the state after a step, with the moments and residuals of some tensors as they were before.

    A step that enters another stage has changed what the moments mean, and residuals are zero then: nothing of it is
    taken back, and the moments of these tensors are those after a gradient of zero.
    """
    if new.stage != state.stage or new.step == state.step:
        return new

    def kept(old: Sequence[Array], after: Sequence[Array]) -> tuple[Array, ...]:
        pairs = enumerate(zip(old, after, strict=True))
        return tuple(before if number in left_out else now for number, (before, now) in pairs)

    exchange = new.exchange
    if exchange.worker or exchange.server:
        layout = optimizer.mean_of(new).layout(
            exchange.shapes, rank=exchange.rank, size=exchange.size, nodes=exchange.nodes
        )
        compressed = [number for number, is_exact in enumerate(new.exact) if not is_exact]
        ranges = layout.residuals
        worker, server = (
            tuple(
                before if compressed[segment.tensor] in left_out else now
                for segment, before, now in zip(of_kind, old, after, strict=bool(after))
            )
            for of_kind, old, after in zip(
                ranges,
                (state.exchange.worker, state.exchange.server),
                (exchange.worker, exchange.server),
                strict=True,
            )
        )
        exchange = exchange._replace(worker=worker, server=server)
    own = tuple(f".{state.names[number]}" for number in left_out)
    return new._replace(
        numbers={key: state.numbers[key] if key.endswith(own) else x for key, x in new.numbers.items()},
        momentum=kept(state.momentum, new.momentum),
        variance=kept(state.variance, new.variance),
        arrays={kind: kept(state.arrays[kind], after) for kind, after in new.arrays.items()},
        exchange=exchange,
    )


def _zeros_like(x: Array) -> Array:
    return array_namespace(x).zeros(tuple(x.shape), dtype=x.dtype, device=device(x))
