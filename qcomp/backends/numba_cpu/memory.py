"""Large buffers that are used again: a page that the system hands out costs more than writing to it.

Half of the time of a decoder is such pages, and a step of training needs the same buffers as the step before. So what
nobody refers to any more is kept for the next one who asks for as much, up to as many bytes as are in use, and
256 MiB in any case. It is what torch does with the memory of a GPU.
"""

from __future__ import annotations

import math
import os
from collections import deque
from threading import Lock
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["empty", "release_memory"]

_LARGE = 1 << 20
"""Bytes from which on buffers are used again; for less the allocator of the C library does."""
_KEPT = 256 << 20
"""Bytes that may lie idle even if nothing is in use."""

Block = NDArray[np.uint8]


class _Lease:
    """Owns a block for the arrays on it; the last of them to go hands it back."""

    __slots__ = ("_block", "_returned")

    def __init__(self, block: Block, returned: deque[Block]) -> None:
        self._block = block
        self._returned = returned

    @property
    def __array_interface__(self) -> dict[str, Any]:
        return self._block.__array_interface__

    def __del__(self) -> None:
        # Whatever thread this is in, and whatever lock it holds: appending to a deque is atomic.
        self._returned.append(self._block)


class _Stock:
    """The blocks that are idle, those that were handed back last at the end."""

    def __init__(self) -> None:
        self.renew()

    def renew(self) -> None:
        """Start with nothing, also in a forked child, where another thread may have held the lock."""
        self._lock = Lock()
        self._returned: deque[Block] = deque()
        self._idle: list[Block] = []
        self._in_use = 0

    def take(self, nbytes: int) -> Block:
        """Return a block of so many bytes, with anything in it."""
        with self._lock:
            self._collect()
            self._in_use += nbytes
            fitting = [i for i, block in enumerate(self._idle) if block.nbytes == nbytes]
            block = self._idle.pop(fitting[-1]) if fitting else None
            self._shrink(max(_KEPT, self._in_use))
        if block is None:
            block = np.empty(nbytes, dtype=np.uint8)
        return np.asarray(_Lease(block, self._returned))

    def release(self) -> None:
        """Give all that is idle back to the system."""
        with self._lock:
            self._collect()
            self._shrink(0)

    def _collect(self) -> None:
        while self._returned:
            block = self._returned.popleft()
            self._in_use -= block.nbytes
            self._idle.append(block)

    def _shrink(self, limit: int) -> None:
        idle = sum(block.nbytes for block in self._idle)
        while idle > limit:
            idle -= self._idle.pop(0).nbytes


_stock = _Stock()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_stock.renew)


def empty(shape: tuple[int, ...]) -> NDArray[np.float32]:
    """Return an array of float32 of this shape with anything in it, on memory that was used before if there is some."""
    nbytes = 4 * math.prod(shape)
    if nbytes < _LARGE:
        return np.empty(shape, dtype=np.float32)
    return _stock.take(nbytes).view(np.float32).reshape(shape)


def release_memory() -> None:
    """Give the memory that is kept for the next call back to the system."""
    _stock.release()
