"""Detects changes of gradients since the end of the backward pass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from qcomp.integrations.ddp.parameters import is_dense

__all__ = ["Witness"]

_SAMPLE = 64


class Witness:
    """Records gradients, to tell later which of them were changed.

    A gradient was changed if it is another tensor, or if torch has counted a write to it. Torch does not count writes
    through ``.data``; a sample of the elements, complete for a small gradient, detects these.

    Parameters
    ----------
    gradients : sequence of torch.Tensor or None
    """

    def __init__(self, gradients: Sequence[Any]) -> None:
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
            if now is not then or _version(now) != self._versions[number]
        }
        if self._values is not None and not torch.equal(torch.cat(self._views), self._values):
            parts = torch.split(self._values, [view.shape[0] for view in self._views])
            found |= {
                number
                for number, view, part in zip(self._sampled, self._views, parts, strict=True)
                if not torch.equal(view.to(part.dtype), part)
            }
        return sorted(found)


def _version(gradient: Any) -> int | None:
    return None if gradient is None else int(gradient._version)


def _sample(gradient: Any) -> Any:
    """Return a view of elements spread over a gradient, of all elements if they are few."""
    gradient = gradient.detach()
    count = gradient.numel()
    step = max(1, count // _SAMPLE)
    if not is_dense(gradient):
        return gradient.flatten()[::step]
    return gradient.as_strided((-(-count // step),), (step,), gradient.storage_offset())
