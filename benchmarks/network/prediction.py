"""The cost model beside the measured steps, and what it recommends."""

from typing import NamedTuple

import qcomp
from network.methods import COMPUTE, METHODS
from network.results import Run
from network.timeline import overlap
from network.volume import volume
from qcomp.planning import Job, Measured, Method, advise, step_time

__all__ = ["Choice", "choice", "predicted"]

NEIGHBOURS = {"powersgd1": COMPUTE, "powersgd2": COMPUTE, "onebit_adam": "sign"}
"""What a method is like but for computation of its own, which the model does not know.

Steps in which every rank trains for itself show it.
"""
PLAIN = {"none": Method("ring"), "fp16": Method("ring", half=True)}
HOOKS = ("sign", "qsgd4", "minmax8")
"""With `PLAIN`, what the advisor chooses from."""


def predicted(method: str, run: Run, measured: Measured, *, overlapped: bool = False) -> float | None:
    """Return the seconds of a step by the cost model; None if something it needs was not measured.

    Parameters
    ----------
    method : str
    run : Run
        Its steps without messages and its shapes count, nothing else.
    measured : Measured
        Of the same ranks and link.
    overlapped : bool
        Whether what is sent while gradients are still computed takes no time of its own, as if nothing that sends
        needed the processor that computes. PowerSGD, in one bucket, never does that.
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
    """Return how a compressor averages the tensors of a model, which the hook chooses."""
    compressor = qcomp.compressor(spec)
    mean = qcomp.CompressedMean(compressor, "auto", feedback=False).chosen(run.shapes, run.ranks)
    return Method(mean.topology, compressor)


class Choice(NamedTuple):
    """What the advisor recommends for a run, beside what was measured."""

    method: str
    best: str
    """The fastest of the others."""
    ratio: float
    """The measured step of the recommended method over that of the best of the others."""


def choice(run: Run, measured: Measured) -> Choice:
    """Return what the advisor recommends, given compute alone, the link and the speeds."""
    assert measured.cluster is not None  # there are ranks
    size = volume("sign", run.shapes)
    job = Job(size.exact + size.compressed, run.compute, exact=size.exact, tensors=size.tensors)
    hooks = {name: _compressed(METHODS[name].compressor or "", run) for name in HOOKS}
    methods = {way: name for name, way in (PLAIN | hooks).items() if name in run.methods}
    advice = advise(job, measured.cluster, measured.machine, methods=list(methods))
    recommended = methods[advice.best.time.method]
    best = min((name for name in run.averaging if name != recommended), key=run.seconds)
    return Choice(recommended, best, run.seconds(recommended) / run.seconds(best))
