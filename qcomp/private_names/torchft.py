"""Undocumented names of torchft that qcomp uses; version 0.2 has them."""

from __future__ import annotations

from typing import Any

from qcomp.private_names import require


def asks_in_background(manager: Any) -> bool:
    """Return whether a ``torchft.Manager`` asks for quorums while gradients are computed."""
    return bool(
        require(
            manager,
            "_use_async_quorum",
            "refuse a manager that asks for quorums in the background",
            library="torchft",
            versions=">=0.2,<0.3",
        )
    )
