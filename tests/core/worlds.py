"""Helpers for tests of compressed means: `qcomp.testing.means`, and a way to break feedback."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from qcomp import Key
from qcomp.core.mean.codec import Codec
from qcomp.testing import means
from qcomp.testing.means import (
    NODES,
    SPECS,
    Peers,
    average,
    bits,
    draws_of,
    held_by,
    owed,
    refused,
    require_sum_identity,
    start,
)

__all__ = [
    "NODES",
    "SHAPES",
    "SPECS",
    "Peers",
    "average",
    "bits",
    "draws_of",
    "forget_residuals",
    "held_by",
    "inputs",
    "owed",
    "refused",
    "require_sum_identity",
    "start",
]


SHAPES = [(3, 11), (0,), (), (70,), (2, 0, 4)]
"""Odd sizes, a scalar, and empty tensors: 3, 0, 1, 5 and 0 buckets of 16."""


def inputs(
    rank: int, step: int, dtype: Any = np.float32, shapes: Sequence[tuple] = SHAPES
) -> list[np.ndarray]:
    return means.inputs(rank, step, dtype, shapes)


def forget_residuals(monkeypatch: Any, forgets: Callable[[Key], bool] = lambda _: True) -> set[int]:
    """Break feedback: drop residuals where a key matches. Return the hops that had residuals, as they occur."""
    hops: set[int] = set()

    def broken(encode):
        def forgetful(self, *arguments, **options):
            *values, residuals, key = arguments
            if len(residuals):
                hops.add(key.hop)
            if forgets(key):
                residuals = tuple(0 * r for r in residuals)
            return encode(self, *values, residuals, key, **options)

        return forgetful

    for name in ("encode", "encode_average"):
        monkeypatch.setattr(Codec, name, broken(getattr(Codec, name)))
    return hops
