"""Warns of an optimizer that will be slower than plain training."""

import math
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from qcomp.core.mean.averaging import PowerSGD
from qcomp.core.mean.powersgd import PowerSGDMean
from qcomp.core.mean.stages import Transport
from qcomp.core.optimizers import Muon, Optimizer
from qcomp.core.optimizers.tensors import as_tensors
from qcomp.planning.cluster import Cluster, Job
from qcomp.planning.measurement import Measured
from qcomp.planning.methods import MuonMethod, PowerSGDMethod
from qcomp.planning.model import ALLREDUCES, Method, step_time
from qcomp.planning.numbers_with_units import show_bandwidth, show_seconds


def warn_if_slower(optimizer: Optimizer, params: Any, comm: Transport, measured: Measured) -> None:
    """Warn if an optimizer will be slower than plain training. Call this beside `Optimizer.init`; it exchanges nothing.

    Parameters
    ----------
    optimizer : Optimizer
        An optimizer that compresses; others get no warning.
    params : array or sequence of arrays
        The parameters, as for `Optimizer.init`.
    comm : Communicator
        As for `Optimizer.init`. Predictions use its number of ranks, not the measured number. They assume nodes of
        equal size, as large as possible, but not larger than the measured nodes.
    measured : Measured
        From `measure`, or from a file of ``qcomp plan --measure``. There is no warning with one rank, or if the
        measurements do not suffice: the optimizer's compressors or computations were not measured, or the measured
        ranks shared a node and ``comm`` has more ranks.

    Warns
    -----
    UserWarning
        On rank 0, if averaging all tensors takes longer than the faster plain all-reduce of float32. For 0/1 Adam this
        refers to a step that sends; Muon is compared with Muon on all-reduced gradients. The computation of a step does
        not matter, since it is the same for both; overlap in plain training is ignored.

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
    if measured.cluster is None or comm.size == 1 or comm.rank != 0 or optimizer.mean.lossless:
        return
    if measured.on_one_node and comm.size > measured.cluster.ranks:
        return
    cluster, machine = _resized(measured.cluster, comm.size), measured.machine
    shapes = tuple(tuple(p.shape) for p in as_tensors(params, "params"))
    if not sum(map(math.prod, shapes)):
        return
    job = Job(params=sum(map(math.prod, shapes)), compute=0.0, shapes=shapes)
    method = _method(optimizer, shapes, cluster)
    if not method.predictable(machine):
        return
    others: Iterable[Method] = map(Method, ALLREDUCES)
    if isinstance(method, MuonMethod):
        others = [replace(method, replicated=True)]
    own = step_time(job, cluster, machine, method)
    plain = min((step_time(job, cluster, machine, other) for other in others), key=lambda t: t.seconds)
    if own.seconds > plain.seconds:
        warnings.warn(
            f"{type(optimizer).__name__} will be slower than plain training: averaging {job.params} parameters by "
            f"{own.method.label} takes {show_seconds(own.seconds)}, including {show_seconds(own.codec)} for encoding "
            f"and decoding, but a {plain.method.label} takes {show_seconds(plain.seconds)}, on {cluster.ranks} ranks "
            f"and a link of {show_bandwidth(cluster.link.bandwidth)} (see qcomp plan)",
            stacklevel=2,
        )


def _resized(cluster: Cluster, ranks: int) -> Cluster:
    """Return the cluster with this number of ranks, on nodes of equal size, no larger than the cluster's nodes."""
    fitting = max(each for each in range(1, cluster.ranks_per_node + 1) if ranks % each == 0)
    return replace(cluster, ranks=ranks, ranks_per_node=fitting)


def _method(optimizer: Optimizer, shapes: Sequence[tuple[int, ...]], cluster: Cluster) -> Method:
    """Return an optimizer's method of averaging."""
    mean = optimizer.mean
    if isinstance(optimizer, Muon):
        return MuonMethod(optimizer=optimizer)
    (compressor,) = mean.compressors  # the optimizer's own; a policy may choose others for single tensors
    if isinstance(mean, PowerSGDMean):
        averaging = PowerSGD(rank=mean.rank, min_compression=mean.min_compression)
        return PowerSGDMethod(averaging=averaging, compressor=compressor)
    nodes = tuple(rank // cluster.ranks_per_node for rank in range(cluster.ranks))
    return Method(mean.chosen(shapes, cluster.ranks, nodes).topology, compressor)
