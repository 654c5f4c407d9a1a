"""Matrix products of bfloat16 on processors that compute them slowly."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from timing import machine
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["InFloat32", "are_slow"]

PRODUCTS: frozenset[Any] = frozenset(
    {torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.bmm.default}
)
BFLOAT16 = {"avx512_bf16", "amx_bf16"}
"""Extensions of processors that multiply matrices of bfloat16."""


def are_slow() -> bool:
    """Return whether this machine multiplies matrices of bfloat16 slowly."""
    return BFLOAT16.isdisjoint(machine()["extensions"])


class InFloat32(TorchDispatchMode):
    """Compute matrix products of bfloat16 in float32, and round the result.

    Processors with instructions for bfloat16 do the same: they multiply exactly, add in float32 and round at the end.
    Without these instructions torch takes some fifty times as long.
    """

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """Compute one operation of torch."""
        named = kwargs or {}
        if func in PRODUCTS and args[-1].dtype == torch.bfloat16:
            return func(*[each.float() for each in args], **named).bfloat16()
        return func(*args, **named)
