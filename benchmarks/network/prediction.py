"""Comparison of the cost model and its recommendations with the measured steps."""

from typing import NamedTuple

import qcomp
from network.methods import COMPUTE, METHODS
from network.results import Run
from network.timeline import overlap
from network.volume import volume
from qcomp.planning import Job, Measured, Method, advise, step_time

__all__ = ["Choice", "choice", "predicted"]

NEIGHBOURS = {"powersgd1": COMPUTE, "powersgd2": COMPUTE, "onebit_adam": "sign"}
"""For each method, one that differs from it only by computation that the cost model does not know.

Steps in which every rank trains alone measure that computation.
"""
PLAIN = {"none": Method("ring"), "fp16": Method("ring", half=True)}
HOOKS = ("sign", "qsgd4", "minmax8")
"""The methods that the advisor compares with each other and with `PLAIN`."""


def predicted(method: str, run: Run, measured: Measured, *, overlapped: bool = False) -> float | None:
    """Return the predicted seconds of a step; None if an input of the cost model was not measured.

    Parameters
    ----------
    method : str
    run : Run
        Only its steps without messages and its shapes are used.
    measured : Measured
        Measured with the same ranks and link.
    overlapped : bool
        Whether sending overlaps with the computation of gradients for free, as if it did not need the processor.
        PowerSGD, with one bucket, never overlaps.
    """
    assert measured.cluster is not None  # there are ranks
    own = 0.0
    if method in NEIGHBOURS:
        neighbour = NEIGHBOURS[method]
        if not {method, neighbour} <= run.alone.keys() | {COMPUTE}:
            return None
        own = run.seconds(method, alone=True) - run.seconds(neighbour, alone=True)
    size, chosen = volume(method, run.shapes), METHODS[method]
    share, pieces = 0.0, size.exchanges
    if chosen.rank is None and run.ready:
        share, pieces = overlap(run.ready)
    if not overlapped:
        share = 0.0
    elif not run.ready and chosen.rank is None:
        return None
    job = Job(
        params=size.exact + size.compressed,
        compute=max(0.0, run.compute + own),
        overlap=share,
        buckets=pieces,
        overlap_compressed=True,
        exact=size.exact,
        tensors=max(1, size.tensors),
    )
    way = PLAIN["none"] if chosen.compressor is None else _compressed(chosen.compressor, run)
    return step_time(job, measured.cluster, measured.machine, PLAIN.get(method, way)).seconds


def _compressed(spec: str, run: Run) -> Method:
    """Return the planner's method for a compressor, with the topology that the hook selects for a model."""
    compressor = qcomp.compressor(spec)
    mean = qcomp.CompressedMean(compressor, "auto", feedback=False).chosen(run.shapes, run.ranks)
    return Method(mean.topology, compressor)


class Choice(NamedTuple):
    """The advisor's recommendation for a run, and the measured times."""

    method: str
    best: str
    """The fastest other method."""
    ratio: float
    """The measured step of the recommended method relative to that of the fastest other method."""


def choice(run: Run, measured: Measured) -> Choice:
    """Return the advisor's recommendation by seconds a step, given computation time, link and speeds."""
    assert measured.cluster is not None  # there are ranks
    size = volume("sign", run.shapes)
    job = Job(size.exact + size.compressed, run.compute, exact=size.exact, tensors=size.tensors)
    hooks = {name: _compressed(METHODS[name].compressor or "", run) for name in HOOKS}
    methods = {way: name for name, way in (PLAIN | hooks).items() if name in run.methods}
    advice = advise(job, measured.cluster, measured.machine, methods=list(methods), task=None)
    recommended = methods[advice.best.time.method]
    best = min((name for name in run.averaging if name != recommended), key=run.seconds)
    return Choice(recommended, best, run.seconds(recommended) / run.seconds(best))
