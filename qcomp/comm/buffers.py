"""Conversion of buffers of any array library and device to host memory and back."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import array_api_compat

from qcomp.core.numeric.arrays import Array, array_namespace, device, dtype_name, in_numpy

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    HostBuffer = npt.NDArray[np.uint8]


def check_buffer(x: Any, *, name: str = "x") -> None:
    """Raise unless `x` is a one-dimensional uint8 array of any Array API library.

    Examples
    --------
    >>> import numpy as np
    >>> check_buffer(np.zeros(3), name="send")
    Traceback (most recent call last):
    TypeError: send must have dtype uint8, got float64
    """
    if not array_api_compat.is_array_api_obj(x):
        raise TypeError(f"{name} must be an array, got {type(x).__name__}")
    if dtype_name(x.dtype) != "uint8":
        raise TypeError(f"{name} must have dtype uint8, got {x.dtype}")
    if x.ndim != 1:
        raise ValueError(f"{name} must be one-dimensional, got shape {tuple(x.shape)}")


def to_host(x: Any, *, name: str = "x") -> HostBuffer:
    """Return a buffer's bytes as a NumPy array in host memory.

    Parameters
    ----------
    x : array, shape (n,), dtype uint8
        A buffer of any Array API library, on any device.
    name : str, optional
        The name of `x` in error messages.

    Returns
    -------
    numpy.ndarray, shape (n,), dtype uint8
        C-contiguous. If `x` is contiguous in host memory, the result shares its memory and may be read-only; otherwise
        the result is a copy.

    Raises
    ------
    TypeError
        If `x` is not an array, or not of dtype uint8.
    ValueError
        If `x` is not one-dimensional.

    Examples
    --------
    >>> import numpy as np
    >>> to_host(np.arange(6, dtype=np.uint8)[::2])
    array([0, 2, 4], dtype=uint8)
    """
    import numpy as np  # noqa: PLC0415  (`import qcomp.comm` loads no array library)

    check_buffer(x, name=name)
    # Copies from a GPU into page-locked memory are faster, and both libraries pool such memory.
    if array_api_compat.is_torch_array(x):
        x = x.new_empty(x.shape, device="cpu", pin_memory=True).copy_(x) if x.is_cuda else x.cpu()
    elif array_api_compat.is_cupy_array(x):
        import cupyx  # noqa: PLC0415  (CuPy is imported already)

        x = x.get(out=cupyx.empty_pinned(x.shape, dtype=np.uint8))
    return np.ascontiguousarray(in_numpy(x))


def from_host(x: HostBuffer, like: Array) -> Array:
    """Return host bytes as an array in the library and on the device of ``like``.

    Parameters
    ----------
    x : numpy.ndarray, shape (n,), dtype uint8
        The result may share its memory, so the caller must not use it afterwards.
    like : array
        Only its library and device matter.

    Returns
    -------
    array, shape (n,), dtype uint8

    Examples
    --------
    >>> import numpy as np
    >>> from_host(np.zeros(2, dtype=np.uint8), like=np.ones(7))
    array([0, 0], dtype=uint8)
    """
    return (
        x if array_api_compat.is_numpy_array(like) else array_namespace(like).asarray(x, device=device(like))
    )


def stage_exchange(
    send: Sequence[Array],
    receive: Sequence[int],
    *,
    rank: int,
    size: int,
    stage: Callable[..., Any] = to_host,
) -> tuple[list[Any], list[int]]:
    """Check one rank's arguments of an exchange; return the staged buffers to send and the sizes to receive.

    ``stage(x, name=...)`` checks a buffer and copies it to the memory that it is sent from, by default host memory.

    Raises
    ------
    TypeError
        If a buffer is not a uint8 array, or a size not an integer.
    ValueError
        If ``send`` or ``receive`` does not have one item per rank, a buffer is not one-dimensional, a size is negative,
        or the announced size of the rank's own share is wrong.
    """
    if len(send) != size:
        raise ValueError(f"send must hold one buffer for each of {size} ranks, got {len(send)}")
    if len(receive) != size:
        raise ValueError(f"receive must hold one size for each of {size} ranks, got {len(receive)}")
    sizes = list(map(operator.index, receive))
    if min(sizes) < 0:
        raise ValueError(f"receive must hold sizes of at least 0 bytes, got {min(sizes)}")
    if len(set(map(id, send))) == 1:
        # An all-gather sends one buffer everywhere: one copy from the device is enough.
        buffers = [stage(send[0], name="send")] * size
    else:
        buffers = [stage(buffer, name=f"send[{peer}]") for peer, buffer in enumerate(send)]
    own = buffers[rank].shape[0]
    if own != sizes[rank]:
        raise ValueError(
            f"receive[{rank}] is {sizes[rank]}, but rank {rank} sends itself {own} bytes; expected equal numbers"
        )
    return buffers, sizes
