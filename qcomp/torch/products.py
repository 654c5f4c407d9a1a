"""Matrix products in the dtype of their operands, even if autocast surrounds a step."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["plain_products"]


def plain_products(like: torch.Tensor) -> Any:
    """Return a context in which autocast does not lower the precision of products, on the device of ``like``."""
    return torch.autocast(like.device.type, enabled=False)
