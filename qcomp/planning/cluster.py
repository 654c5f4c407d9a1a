"""What a step is computed on and sent over: the job, the link, the ranks."""

import math
from dataclasses import dataclass

from qcomp.core.mean.costs import INSIDE, Cluster, Link

__all__ = ["INSIDE", "Cluster", "Job", "Link"]


def _require(name: str, value: object, holds: bool, expected: str) -> None:
    if not holds:
        raise ValueError(f"{name} is {value!r}; expected {expected}")


@dataclass(frozen=True)
class Job:
    """What a step computes, and what it must average.

    Parameters
    ----------
    params : int
        Number of parameters that are averaged.
    compute : float
        Seconds of a step without any communication: forward, backward and update.
    gradient_bytes : {4, 2}
        Of an element as plain training sends it.
    overlap : float
        The share of `compute` during which gradients become ready one after the other and plain training sends
        already, as DistributedDataParallel does; 0 where sending starts when all are there. The backward pass is
        about 0.6 of a step.
    buckets : int
        How many pieces are sent one after the other where sending overlaps.
    overlap_compressed : bool
        Whether compressed messages overlap too. Not with the optimizers of this package, whose step starts when all
        gradients are there.
    exact : int
        How many of the parameters are in tensors that stay exact, small ones, norms and biases; they are sent with
        the compressed ones, as float32.
    tensors : int
        In how many tensors those are that are compressed. Where it was measured what each one takes whatever its size,
        that counts.
    """

    params: int
    compute: float
    gradient_bytes: int = 4
    overlap: float = 0.0
    buckets: int = 1
    overlap_compressed: bool = False
    exact: int = 0
    tensors: int = 1

    def __post_init__(self) -> None:
        _require("params", self.params, self.params >= 1, "at least 1")
        _require("compute", self.compute, 0 <= self.compute < math.inf, "seconds, at least 0")
        _require("gradient_bytes", self.gradient_bytes, self.gradient_bytes in (2, 4), "2 or 4")
        _require("exact", self.exact, 0 <= self.exact <= self.params, f"0 to {self.params}, all parameters")
        _require("overlap", self.overlap, 0 <= self.overlap <= 1, "a share from 0 to 1")
        _require("tensors", self.tensors, self.tensors >= 1, "at least 1")
        _require("buckets", self.buckets, self.buckets >= 1, "at least 1")
