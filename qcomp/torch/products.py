"""Matrix products in the dtype of their factors, whatever surrounds a step."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["plain_products"]


def plain_products(like: torch.Tensor) -> Any:
    """Return a context in which autocast does not make products coarser, for tensors on the device of this one."""
    return torch.autocast(like.device.type, enabled=False)
