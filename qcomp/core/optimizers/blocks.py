"""Elementwise computations on the arrays of several tensors, see `qcomp.core.numeric.cache_blocks`."""

from collections.abc import Callable, Sequence

from qcomp.core.numeric.arrays import Array
from qcomp.core.numeric.cache_blocks import in_blocks
from qcomp.core.primitives import empty_like

__all__ = ["each_in_blocks"]


def each_in_blocks(function: Callable[..., Array], *tensors: Sequence[Array]) -> list[Array]:
    """Return ``function(*arrays)`` for the arrays of each of several tensors; see `in_blocks`.

    Parameters
    ----------
    function : callable
        Its result has the dtype of its first argument.
    *tensors : sequences of arrays
        The arrays of all tensors that are the first argument, those that are the second, and so on.
    """

    def results(*parts: Array) -> tuple[Array, ...]:
        return (function(*parts),)

    return [in_blocks(results, arrays, [empty_like(arrays[0])])[0] for arrays in zip(*tensors, strict=True)]
