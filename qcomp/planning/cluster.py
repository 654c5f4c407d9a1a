"""The inputs of a prediction: the job, the ranks and their links."""

import math
from dataclasses import dataclass

from qcomp.core.mean.costs import INSIDE, Cluster, Link
from qcomp.core.settings import require

__all__ = ["INSIDE", "Cluster", "Job", "Link"]


@dataclass(frozen=True)
class Job:
    """The computation of a step, and what it averages.

    Parameters
    ----------
    params : int
        Number of averaged parameters.
    compute : float
        Seconds of a step without communication: forward, backward and update.
    gradient_bytes : {4, 2}
        Bytes per gradient element in plain training.
    overlap : float
        The share of `compute` in which plain training already sends gradients as they become ready, as
        DistributedDataParallel does; 0 if sending starts when all are ready. The backward pass is about 0.6 of a step.
    buckets : int
        Number of pieces that gradients are cut into if sending overlaps; the pieces are sent one by one.
    overlap_compressed : bool
        Whether sending compressed messages also overlaps with the computation. False for the optimizers of this
        package, whose steps start when all gradients are ready.
    exact : int
        Number of parameters in exact tensors (small ones, norms and biases), which travel as float32 beside the
        compressed ones.
    tensors : int
        Number of compressed tensors. It matters only if the fixed time per tensor was measured.
    shapes : tuple of shapes
        The shapes of all parameters, with ``params`` elements in total, for methods that depend on shapes (PowerSGD and
        Muon); empty if not known.
    """

    params: int
    compute: float
    gradient_bytes: int = 4
    overlap: float = 0.0
    buckets: int = 1
    overlap_compressed: bool = False
    exact: int = 0
    tensors: int = 1
    shapes: tuple[tuple[int, ...], ...] = ()

    def __post_init__(self) -> None:
        require("params", self.params, self.params >= 1, "at least 1")
        require("compute", self.compute, 0 <= self.compute < math.inf, "seconds, at least 0")
        require("gradient_bytes", self.gradient_bytes, self.gradient_bytes in (2, 4), "2 or 4")
        require("exact", self.exact, 0 <= self.exact <= self.params, f"0 to {self.params}, all parameters")
        require("overlap", self.overlap, 0 <= self.overlap <= 1, "a share from 0 to 1")
        require("tensors", self.tensors, self.tensors >= 1, "at least 1")
        require("buckets", self.buckets, self.buckets >= 1, "at least 1")
        if self.shapes:
            elements = sum(map(math.prod, self.shapes))
            require("shapes", f"of {elements} elements", elements == self.params, f"{self.params}, as params")
