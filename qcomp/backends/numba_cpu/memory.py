"""Reuses large buffers, since getting a new page from the system costs more than writing to it.

New pages take half of a decoder's time, and a training step needs the same buffers as the step before. So unused
buffers are kept for the next request of the same size: in total at most 256 MiB, or as many bytes as are in use if
these are more.
torch does the same with GPU memory.
"""

from __future__ import annotations

import math
import os
from collections import deque
from collections.abc import Iterable
from threading import Lock
from typing import Any

import numpy as np
from numpy.typing import NDArray

_LARGE = 1 << 20
"""Bytes of the smallest buffers that are reused; smaller ones are left to the allocator of the C library."""
_KEPT = 256 << 20
"""Bytes that may be idle even if nothing is in use."""

Block = NDArray[np.uint8]


class _Lease:
    """Owns a block while arrays use it; returns the block when the last of these arrays is freed."""

    __slots__ = ("_block", "_returned")

    def __init__(self, block: Block, returned: deque[Block]) -> None:
        self._block = block
        self._returned = returned

    @property
    def __array_interface__(self) -> dict[str, Any]:
        return self._block.__array_interface__

    def __del__(self) -> None:
        # This may run in any thread that holds any lock, but appending to a deque is atomic.
        self._returned.append(self._block)


class _Stock:
    """The idle blocks, in the order of their return."""

    def __init__(self) -> None:
        self.renew()

    def renew(self) -> None:
        """Forget all blocks, and make a new lock. A forked child calls this too, since the old lock may be held."""
        self._lock = Lock()
        self._returned: deque[Block] = deque()
        self._idle: list[Block] = []
        self._in_use = 0

    def take(self, nbytes: int) -> Block:
        """Return an uninitialised block of this many bytes."""
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
        """Return all idle blocks to the system."""
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


def empty(shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
    """Return an uninitialised array of this shape and dtype, in reused memory if available."""
    return empties([shape], dtype)[0]


def empties(shapes: Iterable[tuple[int, ...]], dtype: np.dtype[Any]) -> list[NDArray[Any]]:
    """Apply `empty` to each of several shapes."""
    found = []
    for shape in shapes:
        nbytes = dtype.itemsize * math.prod(shape)
        is_large = nbytes >= _LARGE
        found.append(_stock.take(nbytes).view(dtype).reshape(shape) if is_large else np.empty(shape, dtype))
    return found


def message(nbytes: int, gaps: NDArray[np.int64]) -> Block:
    """Return a buffer for a message, with zeros in its gaps, otherwise uninitialised, in reused memory if available."""
    if nbytes < _LARGE:
        return np.zeros(nbytes, dtype=np.uint8)
    found = _stock.take(nbytes)
    found[gaps] = 0
    return found


def release_memory() -> None:
    """Give the memory that is kept for later calls back to the system."""
    _stock.release()
