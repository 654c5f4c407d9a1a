"""Messages that say who is to blame for a refusal, for those who learn of it from others than its sender."""

from collections.abc import Collection

from qcomp.core.mean.stages import join, joined_size
from qcomp.core.numeric.arrays import Array, from_host_bytes, host_bytes

__all__ = ["seal", "sealed_size", "unseal"]


def seal(message: Array, blamed: Collection[int], ranks: int) -> Array:
    """Return a message together with the ranks that are to blame for it being a refusal, a byte for each rank."""
    flags = from_host_bytes(bytes(rank in blamed for rank in range(ranks)), message)
    return join([message, flags])


def sealed_size(size: int, ranks: int) -> int:
    """Return the bytes of a sealed message of so many bytes."""
    return joined_size([size, ranks])


def unseal(sealed: Array, ranks: int) -> tuple[Array, set[int]]:
    """Return a message, and who is to blame if it is a refusal: nobody, if that is for its sender to say."""
    end = sealed.shape[0] - joined_size([ranks])
    flags = host_bytes(sealed[end:])
    return sealed[:end], {rank for rank, flag in enumerate(flags) if flag}
