"""Arrays for the checks of kernels: layouts, and a record of memory that must not change."""

from typing import Any

import numpy as np

from qcomp.testing.libraries import Namespace, Vector, library_name, to_library, to_numpy

LONG = (3000, 12_001, 150_001)
"""Sizes far from powers of two: two that fit into a cache, and one for which several threads may work."""


def around_powers_of_two(most: int) -> list[int]:
    """Return the sizes around every power of two."""
    return sorted(
        {0, 3, 5, 1000} | {(1 << k) + d for k in range(14) for d in (-1, 0, 1) if (1 << k) + d <= most}
    )


def laid_out(xp: Namespace, x: Vector, layout: str, dtype: str = "float32") -> tuple[Any, Any]:
    """Return an array with the elements of x in a layout, and the whole memory that it is part of."""
    if layout == "strided":
        memory = to_library(xp, np.repeat(x, 2), dtype)
        return memory[::2], memory
    if layout == "backwards" and library_name(xp) in ("numpy", "read_only_numpy"):
        memory = to_library(xp, x[::-1].copy(), dtype)
        return memory[::-1], memory
    if layout == "dense":
        memory = to_library(xp, x, dtype)
        return memory, memory
    memory = to_library(xp, np.pad(x, (5, 7), constant_values=3.0), dtype)
    return memory[5 : 5 + x.size], memory


class Untouched:
    """Arrays that must not change."""

    def __init__(self) -> None:
        self._kept: list[tuple[str, Any, bytes]] = []

    def keep(self, name: str, memory: Any) -> None:
        """Record the contents of an array."""
        self._kept.append((name, memory, to_numpy(memory).tobytes()))

    def check(self) -> None:
        """Check that all arrays are unchanged."""
        for name, memory, before in self._kept:
            assert to_numpy(memory).tobytes() == before, f"{name} was written to"
