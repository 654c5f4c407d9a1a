"""Warns of an optimizer that will be slower than plain training."""

import math
import warnings
from dataclasses import replace
from typing import Any

from qcomp.core.mean.stages import Transport
from qcomp.core.optimizers import Optimizer
from qcomp.core.optimizers.tensors import as_tensors
from qcomp.planning.cluster import Job
from qcomp.planning.measurement import Measured
from qcomp.planning.model import ALLREDUCES, Method, step_time
from qcomp.planning.units import show_bandwidth, show_seconds

__all__ = ["warn_if_slower"]


def warn_if_slower(optimizer: Optimizer, params: Any, comm: Transport, measured: Measured) -> None:
    """Warn if an optimizer will be slower than plain training, without an exchange; call it beside `Optimizer.init`.

    Parameters
    ----------
    optimizer : Optimizer
        An optimizer that compresses; nothing is said about others.
    params : array or sequence of arrays
        The parameters, as for `Optimizer.init`.
    comm : Communicator
        As for `Optimizer.init`. Predictions use its number of ranks, not the measured one.
    measured : Measured
        From `measure`, or from a file of ``qcomp plan --measure``. With one rank there is no warning.

    Warns
    -----
    UserWarning
        On rank 0, if averaging all tensors takes longer than the faster plain all-reduce of float32. For 0/1 Adam this
        refers to a step that sends. The computation of a step does not matter, since both have it; overlap in plain
        training is not counted.

    Examples
    --------
    >>> import numpy as np, qcomp
    >>> from qcomp.planning import CPU, Cluster, Link, Measured
    >>> measured = Measured(Cluster(ranks=2, link=Link(bandwidth=12.5e6)), CPU)
    >>> def rank_main(comm):
    ...     params = np.zeros(100_000, dtype=np.float32)
    ...     optimizer = qcomp.CompressedSGD(learning_rate=0.1, exact=None)
    ...     warn_if_slower(optimizer, params, comm, measured)
    ...     return optimizer.init(params, comm).stage
    >>> qcomp.comm.run_local(2, rank_main)  # on a link of 100 Mbit/s there is nothing to warn about
    ['compressed', 'compressed']
    """
    mean = optimizer.mean
    if measured.cluster is None or comm.size == 1 or comm.rank != 0 or mean.lossless or mean.low_rank:
        return  # the cost model knows no factors
    cluster = replace(measured.cluster, ranks=comm.size)
    (compressor,) = mean.compressors  # the optimizer's own; a policy may choose others for single tensors
    shapes = [tuple(p.shape) for p in as_tensors(params, "params")]
    job = Job(params=max(1, sum(map(math.prod, shapes))), compute=0.0)
    nodes = tuple(rank // cluster.ranks_per_node for rank in range(cluster.ranks))
    topology = mean.chosen(shapes, cluster.ranks, nodes).topology
    own = step_time(job, cluster, measured.machine, Method(topology, compressor))
    plain = min(
        (step_time(job, cluster, measured.machine, Method(kind)) for kind in ALLREDUCES),
        key=lambda time: time.seconds,
    )
    if own.seconds > plain.seconds:
        warnings.warn(
            f"{type(optimizer).__name__} will be slower than plain training: averaging {job.params} parameters by "
            f"{own.method.label} takes {show_seconds(own.seconds)}, of which {show_seconds(own.codec)} encoding and "
            f"decoding; a {plain.method.label} takes {show_seconds(plain.seconds)}, on {cluster.ranks} ranks and "
            f"a link of {show_bandwidth(cluster.link.bandwidth)} (see qcomp plan)",
            stacklevel=2,
        )
