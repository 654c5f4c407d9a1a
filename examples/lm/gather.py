"""Gathers small values from all ranks, outside of training steps: losses, flags, counts, digests."""

from typing import Any

import numpy as np
import numpy.typing as npt

from qcomp.comm import Communicator

__all__ = ["gather"]


def gather(comm: Communicator, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return the arrays of all ranks, stacked in rank order.

    All ranks must call it, with arrays of the same shape and dtype.
    """
    sent = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
    received = comm.all_gather(sent, [sent.size] * comm.size)
    return np.stack([np.asarray(part).view(values.dtype).reshape(values.shape) for part in received])
