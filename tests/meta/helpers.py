"""A module beside a compressor's own, with a fault that it inherits."""

from typing import Any

import numpy as np

_shared: dict[Any, Any] = {}


def copied(x):
    """Return a copy of x, by way of memory that all vectors of its size share."""
    shared = _shared.setdefault((x.size, x.dtype), np.empty_like(x))
    shared[...] = x
    return shared.copy()
