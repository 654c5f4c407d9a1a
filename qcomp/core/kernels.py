"""The hook for kernels: faster ways to compress and decompress, which return the same bytes.

The core has no kernel of its own. Whatever a set of kernels has none for, by compressor, dtype or library, is
done by the pure version, which is the definition.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from qcomp.core.arrays import Array
    from qcomp.core.compressor import Compressor
    from qcomp.core.random import Key

__all__ = ["KernelSet", "chosen", "use_kernels"]


class KernelSet(Protocol):
    """A set of kernels for some compressors and some arrays."""

    name: str

    def encode(
        self, compressor: Compressor, x: Array, residual: Array | None, key: Key | None, *, donate: bool
    ) -> tuple[Array, Array | None] | None:
        """Return the data of the payload of x, plus the residual if there is one, and the new residual.

        None if there is no kernel for this, or a value is out of range: the pure version then says so. With
        ``donate`` the new residual may be in the buffer of the old one.
        """
        ...

    def decode(self, compressor: Compressor, data: Array, out: Array, *, accumulate: bool) -> bool:
        """Write what a payload decompresses to into a buffer, or add it; return whether there is a kernel for that."""
        ...


_chosen: ContextVar[KernelSet | None] = ContextVar("qcomp_kernels", default=None)


def chosen() -> KernelSet | None:
    """Return the set of kernels in use, None for the pure version."""
    return _chosen.get()


@contextmanager
def use_kernels(kernels: KernelSet | None) -> Iterator[None]:
    """Use a set of kernels, or with None the pure version, inside the context."""
    token = _chosen.set(kernels)
    try:
        yield
    finally:
        _chosen.reset(token)
