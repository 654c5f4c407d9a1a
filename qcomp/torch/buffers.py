"""A model's buffers in an outer loop: how differing buffers become the same on all ranks."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from qcomp.core.broadcast import broadcast_stages
from qcomp.core.errors import MismatchError, NonFiniteError
from qcomp.core.handshake import gather_texts
from qcomp.core.mean.compressed_mean import MeanState
from qcomp.core.mean.stages import AllGather, Stages
from qcomp.core.numeric.arrays import bytes_of, cut_like, digest, dtype_name
from qcomp.core.optimizers.compression import EXACT
from qcomp.core.optimizers.nonfinite import name_gradients
from qcomp.core.reporting import name_ranks
from qcomp.core.state import OptimizerState
from qcomp.integrations.ddp.parameters import plain_name

WITH_A_MEAN = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_OF_FIRST, _MEAN, _VARIANCE, _LEAST, _GREATEST = "that of rank 0", "mean", "variance", "least", "greatest"
_Combine = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
_EXTREMES: dict[str, _Combine] = {_LEAST: torch.minimum, _GREATEST: torch.maximum}


class Buffer(NamedTuple):
    """A buffer of a model, and how the ranks' versions of it become one."""

    value: torch.Tensor
    """This rank's part, in the model's memory."""
    rule: str
    mean: Any = ""
    """The name of the running mean beside a running variance."""


def own_part(x: Any) -> Any:
    """Return this rank's part of a tensor, in the same memory: the whole tensor, or the shard of a DTensor."""
    own = x.detach()
    return own.to_local() if hasattr(own, "to_local") else own


def buffers_of(model: torch.nn.Module, params: Iterable[torch.Tensor]) -> dict[str, Buffer]:
    """Return, by name, the dense buffers that all ranks share after an outer round; each buffer once.

    A buffer in the memory of a trained parameter, one of ``params``, is left out: it moves with the parameter.
    """
    taken = {p.untyped_storage().data_ptr() for p in params if p.numel()}
    names: dict[int, str] = {}
    found: dict[str, Buffer] = {}
    for module_name, module in model.named_modules():
        own = dict(module.named_buffers(recurse=False))
        for leaf, buffer in own.items():
            if id(buffer) in names or not is_plain(buffer):
                continue
            value = own_part(buffer)
            if value.untyped_storage().data_ptr() in taken:
                continue
            name = names[id(buffer)] = plain_name(f"{module_name}.{leaf}" if module_name else leaf)
            rule = _rule(leaf, own)
            found[name] = Buffer(value, rule, own["running_mean"] if rule == _VARIANCE else None)
    return {name: b._replace(mean=names.get(id(b.mean), "")) for name, b in found.items()}


def frozen_of(model: torch.nn.Module) -> dict[str, Buffer]:
    """Return the parameters that nobody trains, as buffers that rank 0 gives to all ranks."""
    frozen = {plain_name(name): own_part(p) for name, p in model.named_parameters() if not p.requires_grad}
    return {name: Buffer(x, _OF_FIRST) for name, x in frozen.items() if is_plain(x)}


def is_plain(x: torch.Tensor) -> bool:
    """Return whether a tensor is dense, and has bits to send."""
    return x.layout is torch.strided and not x.is_quantized and not x.is_meta


def _rule(leaf: str, beside: Mapping[str, torch.Tensor]) -> str:
    """Return how all ranks' versions of a buffer become one, judged by its name and the other buffers of its module."""
    buffer, pair = beside[leaf], [beside.get(name) for name in ("running_mean", "running_var")]
    if buffer.dtype not in WITH_A_MEAN:
        return _OF_FIRST
    if all(x is not None and x.shape == buffer.shape for x in pair):  # BatchNorm, InstanceNorm
        return {"running_mean": _MEAN, "running_var": _VARIANCE}.get(leaf, _OF_FIRST)
    if {"min_val", "max_val"} <= beside.keys() and "histogram" not in beside:  # observers of quantisation
        return {"min_val": _LEAST, "max_val": _GREATEST}.get(leaf, _OF_FIRST)
    return _GREATEST if "amax" in leaf else _OF_FIRST  # largest magnitudes of 8-bit floats


def of_first_stages(buffers: Mapping[str, Buffer], state: OptimizerState, like: Any) -> Stages[None]:
    """Give all ranks the buffers of rank 0; see `combine_stages`."""
    return combine_stages({name: b._replace(rule=_OF_FIRST) for name, b in buffers.items()}, state, like)


def combine_stages(buffers: Mapping[str, Buffer], state: OptimizerState, like: Any) -> Stages[None]:
    """Make buffers the same on all ranks; buffers that have the same bits on all ranks stay as they are.

    Call it under ``torch.no_grad()``. Nothing is written before everything has arrived.

    Raises MismatchError on every rank, if the ranks' buffers differ in name, shape or dtype; NonFiniteError, if a
    running mean or variance differs between ranks and is not finite on some rank.

    Running means and variances become the moments of the mixture of all ranks' data, in equal parts: the mean of the
    means, and the mean of the variances plus the variance of the means. Ranges of observers become the smallest range
    that contains the ranges of all ranks, and histories of largest magnitudes become their maximum. All other buffers
    are copied from rank 0, bit for bit.

    A rank of N sends the name, shape, dtype and digest of each buffer to all other ranks. If buffers differ, it also
    sends 2 (N - 1) / N times the bytes of their running means and variances (variances count twice), (N - 1) times the
    bytes of their ranges, and at most about twice the bytes of all others.
    """
    own = {
        # Digest a copy: torch cannot resize memory that NumPy has seen, and the first forward pass of an observer
        # resizes its buffers.
        name: (f"{dtype_name(b.value.dtype)} of shape {tuple(b.value.shape)}", digest(b.value.clone()))
        for name, b in buffers.items()
    }
    texts = yield from gather_texts(json.dumps(own), state.size, like)
    differing = _differing([json.loads(text) for text in texts])
    chosen = {name: b for name, b in sorted(buffers.items()) if name in differing or b.mean in differing}
    if not chosen:
        return
    here = {name: b.value.to(like.device) for name, b in chosen.items()}
    of_rule = defaultdict(list)
    for name, b in chosen.items():
        of_rule[b.rule].append(name)
    new = yield from _mixture(here, of_rule, chosen, state)
    for rule, combine in _EXTREMES.items():
        new |= yield from _extremes({name: here[name] for name in of_rule[rule]}, combine, state.size)
    firsts = of_rule[_OF_FIRST]
    raw = [bytes_of(here[name]) for name in firsts]
    copies: list[Any] = yield from broadcast_stages(raw, root=0, rank=state.rank, size=state.size)
    # Viewing in another dtype needs aligned memory, which a clone has.
    new |= {name: x.clone().view(here[name].dtype) for name, x in zip(firsts, copies, strict=True)}
    for name, value in new.items():
        _write(chosen[name].value, value.reshape(chosen[name].value.shape))


def _mixture(
    here: Mapping[str, torch.Tensor],
    of_rule: Mapping[str, Sequence[str]],
    buffers: Mapping[str, Buffer],
    state: OptimizerState,
) -> Stages[dict[str, torch.Tensor]]:
    """Return the running means and variances of the mixture of all ranks' data."""
    names = [*of_rule.get(_MEAN, ()), *of_rule.get(_VARIANCE, ())]
    means = yield from _means({name: here[name] for name in names}, state)
    apart = {
        name: (here[mean].to(means[mean].dtype) - means[mean]).square()
        for name in of_rule.get(_VARIANCE, ())
        if (mean := buffers[name].mean) in means
    }
    between = yield from _means(apart, state)
    return means | {name: means[name] + x for name, x in between.items()}


def _means(values: Mapping[str, torch.Tensor], state: OptimizerState) -> Stages[dict[str, torch.Tensor]]:
    """Return the exact means over all ranks, in at least single precision."""
    if not values:
        return {}
    is_double = any(x.dtype == torch.float64 for x in values.values())
    wide = [x.double() if is_double else x.float() for x in values.values()]
    try:
        means, _ = yield from EXACT.stages(wide, MeanState(state.rank, state.size, (), ()))
    except NonFiniteError as error:
        raise (yield from name_gradients(error, wide, list(values), state, what="buffer value")) from error
    return dict(zip(values, means, strict=True))


def _extremes(
    values: Mapping[str, torch.Tensor], combine: _Combine, size: int
) -> Stages[dict[str, torch.Tensor]]:
    """Return the elementwise minima or maxima over all ranks."""
    if not values:
        return {}
    raw: list[Any] = [bytes_of(x) for x in values.values()]
    lengths = [len(x) for x in raw]
    arrived = yield AllGather(torch.cat(raw), (sum(lengths),) * size)
    found: dict[str, torch.Tensor] = {}
    part: Any
    for of_rank in arrived:
        for (name, like), part in zip(values.items(), cut_like(of_rank, lengths), strict=True):
            value = part.clone().view(like.dtype)
            found[name] = combine(found[name], value) if name in found else value
    return found


def _differing(held: list[dict[str, list[str]]]) -> set[str]:
    """Return the names of the buffers whose bits differ between ranks, from the digests of all ranks."""
    names = sorted(set().union(*held))
    for name in names:
        ranks_of = defaultdict(list)
        for rank, of_rank in enumerate(held):
            ranks_of[of_rank.get(name, ["absent"])[0]].append(rank)
        if len(ranks_of) > 1:
            kinds = [f"{kind} on {name_ranks(ranks)}" for kind, ranks in ranks_of.items()]
            raise MismatchError(
                f"the buffer {name!r} is {', but '.join(kinds)}: all ranks need the same buffers, since the loop "
                "makes their values equal. Register the buffer alike on all ranks before the loop is made, such as a "
                "cache with the size of the longest sequence; or pass buffers=False, which leaves all buffers as they "
                "are"
            )
    return {name for name in names if len({of_rank[name][1] for of_rank in held}) > 1}


def _write(buffer: torch.Tensor, value: torch.Tensor) -> None:
    """Write a value to a buffer; elements that share memory, as after ``expand``, are written once."""
    for axis, step in enumerate(buffer.stride()):
        if not step:
            buffer, value = buffer.narrow(axis, 0, 1), value.narrow(axis, 0, 1)
    buffer.copy_(value)
