"""The mean of a model's buffers over the ranks of an outer loop, which first compare what they have."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch

from qcomp.core.errors import MismatchError, NonFiniteError
from qcomp.core.handshake import gather_texts
from qcomp.core.mean.compressed_mean import MeanState
from qcomp.core.mean.stages import Stages
from qcomp.core.numeric.arrays import digest, dtype_name
from qcomp.core.optimizers.compression import EXACT
from qcomp.core.optimizers.nonfinite import name_gradients
from qcomp.core.reporting import name_ranks
from qcomp.core.state import OptimizerState

__all__ = ["average_stages"]

_AVERAGED = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def average_stages(buffers: Mapping[str, torch.Tensor], state: OptimizerState, like: Any) -> Stages[None]:
    """Replace buffers by their exact means over all ranks, except those that have the same bits on all ranks.

    Call it under ``torch.no_grad()``.

    Parameters
    ----------
    buffers : mapping of str to Tensor
        The floating-point buffers by name, in any order.
    state : OptimizerState
        The state before the step, which gives the rank, the number of ranks and the step.
    like : Tensor
        Gives the device of the messages.

    Raises
    ------
    MismatchError
        On every rank, if the ranks have other buffers, or buffers of other shapes or dtypes.
    TypeError
        On every rank, if a buffer that differs between ranks has a dtype that has no mean, such as those of 8 bits.
    NonFiniteError
        On every rank, if a buffer that differs between ranks is not finite on one of them.

    Notes
    -----
    Sends the name, shape, dtype and digest of each buffer to all other ranks, and then what has a mean.
    """
    own = {
        name: (f"{dtype_name(b.dtype)} of shape {tuple(b.shape)}", digest(b)) for name, b in buffers.items()
    }
    texts = yield from gather_texts(json.dumps(own), state.size, like)
    differing = _differing([json.loads(text) for text in texts])
    if not differing:
        return
    for name in differing:
        if buffers[name].dtype not in _AVERAGED:
            raise TypeError(
                f"the buffer {name!r} differs between the ranks, and has dtype {dtype_name(buffers[name].dtype)}, "
                "which has no mean; expected the same values on all ranks, or 16 bits or more, or buffers=False"
            )
    averaged = [buffers[name] for name in differing]
    nothing = MeanState(state.rank, state.size, (), ())
    try:
        means, _ = yield from EXACT.stages(averaged, nothing)
    except NonFiniteError as error:
        raise (yield from name_gradients(error, averaged, differing, state, what="buffer value")) from error
    for buffer, mean in zip(averaged, means, strict=True):
        _write(buffer, mean)


def _differing(held: list[dict[str, list[str]]]) -> list[str]:
    """Return the names of the buffers that have other bits on some ranks, from what each rank has."""
    names = sorted(set().union(*held))
    for name in names:
        ranks_of = defaultdict(list)
        for rank, of_rank in enumerate(held):
            ranks_of[of_rank.get(name, ["absent"])[0]].append(rank)
        if len(ranks_of) > 1:
            kinds = [f"{kind} on {name_ranks(ranks)}" for kind, ranks in ranks_of.items()]
            raise MismatchError(
                f"the buffer {name!r} is {', but '.join(kinds)}: all ranks need the same buffers, since they are "
                "averaged. Register it alike on all ranks and before the loop is made, as a cache for the longest "
                "sequence, or pass buffers=False, which averages none"
            )
    return [name for name in names if len({of_rank[name][1] for of_rank in held}) > 1]


def _write(buffer: torch.Tensor, mean: torch.Tensor) -> None:
    """Write a mean to a buffer, once to elements that it repeats in memory, as expand does."""
    for axis, step in enumerate(buffer.stride()):
        if not step:
            buffer, mean = buffer.narrow(axis, 0, 1), mean.narrow(axis, 0, 1)
    buffer.copy_(mean)
