"""Detects changes of gradients since the end of the backward pass, on any rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from qcomp.core.handshake import gather_texts
from qcomp.core.mean.stages import AllGather, Stages
from qcomp.core.numeric.arrays import from_host_bytes, host_bytes
from qcomp.integrations.ddp.parameters import is_dense
from qcomp.private_names.torch import writes_to

_SAMPLE = 64
_UNTOUCHED, _WRITTEN_TO, _REFUSED = b"\0", b"\1", b"\2"


class GradientRecord:
    """Records gradients, to tell later which of them were changed.

    A gradient was changed if it is another tensor, or if torch has counted a write to it. Torch does not count writes
    through ``.data``; a sample of the elements, complete for a small gradient, detects these. With ``sums``, a write
    that leaves a gradient's sum of bits unchanged is ignored, such as a multiplication by 1 in ``clip_grad_norm_(...,
    inf)``. That costs one pass over all gradients.
    """

    def __init__(self, gradients: Sequence[Any], *, sums: bool = False) -> None:
        self._sums = [_sum_of_bits(g) for g in gradients] if sums else []
        self._gradients = list(gradients)
        self._versions = [_version(g) for g in gradients]
        self._views = [_sample(g) for g in gradients if g is not None]
        self._sampled = [number for number, g in enumerate(gradients) if g is not None]
        self._values = torch.cat(self._views) if self._views else None

    def changed(self, gradients: Sequence[Any]) -> list[int]:
        """Return the numbers of the changed gradients."""
        found = {
            number
            for number, (now, then) in enumerate(zip(gradients, self._gradients, strict=True))
            if now is not then
            or (_version(now) != self._versions[number] and not self._same_sum(number, now))
        }
        if self._values is not None and not torch.equal(torch.cat(self._views), self._values):
            parts = torch.split(self._values, [view.shape[0] for view in self._views])
            found |= {
                number
                for number, view, part in zip(self._sampled, self._views, parts, strict=True)
                if not torch.equal(view.to(part.dtype), part)
            }
        return sorted(found)

    def _same_sum(self, number: int, now: Any) -> bool:
        return bool(self._sums) and _sum_of_bits(now) == self._sums[number]

    def written_to(self, gradients: Sequence[Any]) -> bool:
        """Return whether torch has counted a write to any gradient."""
        return any(_version(g) != version for g, version in zip(gradients, self._versions, strict=True))


def shared_verdict(
    problem: RuntimeError | None, is_written_to: bool, size: int, like: Any
) -> Stages[tuple[bool, RuntimeError | None]]:
    """Return whether any rank has written to gradients, and an error if any rank has one.

    A write need not change the gradients. Sends a byte to all other ranks, and the text of this rank's error if any
    rank has one.
    """
    own = _REFUSED if problem else _WRITTEN_TO if is_written_to else _UNTOUCHED
    arrived = yield AllGather(from_host_bytes(own, like), (1,) * size)
    found = {bytes(host_bytes(one)) for one in arrived}
    if _REFUSED in found:
        texts = yield from gather_texts(str(problem or ""), size, like)
        told = [f"on rank {rank}, {text}" for rank, text in enumerate(texts) if text]
        problem = problem or RuntimeError(told[0])
    return found != {_UNTOUCHED}, problem


_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def _sum_of_bits(gradient: Any) -> int:
    """Return the sum of the elements, read as integers."""
    if gradient is None:
        return 0
    detached = gradient.detach()
    return int(detached.view(_BITS[detached.element_size()]).sum(dtype=torch.int64))


def _version(gradient: Any) -> int | None:
    return None if gradient is None else writes_to(gradient)


def _sample(gradient: Any) -> Any:
    """Return a view of elements spread over a gradient, of all elements if they are few."""
    gradient = gradient.detach()
    count = gradient.numel()
    step = max(1, count // _SAMPLE)
    if not is_dense(gradient):
        return gradient.flatten()[::step]
    return gradient.as_strided((-(-count // step),), (step,), gradient.storage_offset())
