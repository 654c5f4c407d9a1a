"""Makes optimizers warn if they will be slower than plain training."""

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol

from qcomp.core.mean.stages import Transport
from qcomp.core.numeric.arrays import Array
from qcomp.core.optimizers import Optimizer
from qcomp.planning.cluster import Cluster, Job
from qcomp.planning.machine import Machine
from qcomp.planning.measurement import Measured
from qcomp.planning.model import ALLREDUCES, Method, step_time
from qcomp.planning.units import show_bandwidth, show_seconds

__all__ = ["watch"]


class _Watchable(Transport, Protocol):
    """A communicator with an ``on_init``, as in `qcomp.comm`."""

    on_init: Callable[[Any, Sequence[Array]], None] | None


def watch(comm: _Watchable, measured: Measured) -> None:
    """Make optimizers that start on this communicator warn if they will be slower than plain training.

    Parameters
    ----------
    comm : Communicator
        This sets its ``on_init``, which `Optimizer.init` calls, without an exchange. Predictions use its number of
        ranks, not the measured one.
    measured : Measured
        From `measure`, or from a file of ``qcomp plan --measure``. With one rank there is no warning.

    Warns
    -----
    UserWarning
        From `Optimizer.init` on rank 0, once for each optimizer, if averaging all its tensors takes longer than the
        faster plain all-reduce of float32. For 0/1 Adam this refers to a step that sends. The computation of a step
        does not matter, since both have it; overlap in plain training is not counted.

    Examples
    --------
    >>> import numpy as np, qcomp
    >>> from qcomp.planning import CPU, Cluster, Link, Measured
    >>> measured = Measured(Cluster(ranks=2, link=Link(bandwidth=12.5e6)), CPU)
    >>> def rank_main(comm):
    ...     watch(comm, measured)
    ...     optimizer = qcomp.CompressedSGD(learning_rate=0.1, exact=None)
    ...     return optimizer.init(np.zeros(100_000, dtype=np.float32), comm).stage
    >>> qcomp.comm.run_local(2, rank_main)  # on a link of 100 Mbit/s there is nothing to warn about
    ['compressed', 'compressed']
    """
    cluster = measured.cluster
    if cluster is not None and comm.size > 1:
        watch_here = _Watch(replace(cluster, ranks=comm.size), measured.machine, comm.rank)
        comm.on_init = watch_here


class _Watch:
    """The callback of `Optimizer.init`."""

    def __init__(self, cluster: Cluster, machine: Machine, rank: int) -> None:
        self.cluster, self.machine, self.rank = cluster, machine, rank
        self._warned: list[Optimizer] = []

    def __call__(self, optimizer: Optimizer, params: Sequence[Array]) -> None:
        """Warn if this optimizer will be slower than plain training."""
        mean = optimizer.mean
        (compressor,) = mean.compressors  # the optimizer's own; a policy may choose others for single tensors
        warned = any(optimizer is earlier for earlier in self._warned)  # settings may have no hash
        if self.rank != 0 or warned or compressor.traits.lossless:
            return
        job = Job(params=max(1, sum(math.prod(p.shape) for p in params)), compute=0.0)
        nodes = tuple(rank // self.cluster.ranks_per_node for rank in range(self.cluster.ranks))
        topology = mean.chosen([tuple(p.shape) for p in params], self.cluster.ranks, nodes).topology
        own = step_time(job, self.cluster, self.machine, Method(topology, compressor))
        plain = min(
            (step_time(job, self.cluster, self.machine, Method(kind)) for kind in ALLREDUCES),
            key=lambda time: time.seconds,
        )
        if own.seconds <= plain.seconds:
            return
        self._warned.append(optimizer)
        warnings.warn(
            f"{type(optimizer).__name__} will be slower than plain training: averaging {job.params} parameters by "
            f"{own.method.label} takes {show_seconds(own.seconds)}, of which {show_seconds(own.codec)} encoding and "
            f"decoding; a {plain.method.label} takes {show_seconds(plain.seconds)}, on {self.cluster.ranks} ranks and "
            f"a link of {show_bandwidth(self.cluster.link.bandwidth)} (see qcomp plan)",
            stacklevel=4,
        )
