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
"""What a method is like but for computation of its own, which the model does not know and a run without links shows."""
ADVISED = {"none": Method("ring"), "fp16": Method("ring", half=True)} | {
    name: Method("two_phase", qcomp.compressor(METHODS[name].compressor or ""))
    for name in ("sign", "qsgd4", "minmax8")
}
"""What the advisor chooses from."""


def predicted(
    method: str, run: Run, measured: Measured, solo: Run | None, *, overlapped: bool = False
) -> float | None:
    """Return the seconds of a step by the cost model; None if something it needs was not measured.

    Parameters
    ----------
    method : str
    run : Run
        Its compute alone and its shapes count, nothing else.
    measured : Measured
        Of the same ranks and link.
    solo : Run or None
        The same model and ranks, every rank training for itself.
    overlapped : bool
        Whether what is sent while gradients are still computed takes no time of its own, as if nothing that sends
        needed the processor that computes. PowerSGD, in one bucket, never does that.
    """
    assert measured.cluster is not None  # there are ranks
    own = 0.0
    if method in NEIGHBOURS:
        if solo is None or not {method, NEIGHBOURS[method]} <= solo.methods.keys():
            return None
        own = solo.seconds(method) - solo.seconds(NEIGHBOURS[method])
    size, chosen = volume(method, run.shapes), METHODS[method]
    share, pieces = 0.0, size.exchanges
    if overlapped and chosen.rank is None:
        if solo is None:
            return None
        share, pieces = overlap(solo.ready)
    job = Job(
        params=size.exact + size.compressed,
        compute=max(0.0, run.compute + own),
        overlap=share,
        buckets=pieces,
        overlap_compressed=True,
        exact=size.exact,
    )
    way = Method("ring", half=method == "fp16")
    if chosen.compressor is not None:
        way = Method("two_phase", qcomp.compressor(chosen.compressor))
    return step_time(job, measured.cluster, measured.machine, way).seconds


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
    job = Job(size.exact + size.compressed, run.compute, exact=size.exact)
    methods = {ADVISED[name]: name for name in ADVISED if name in run.methods}
    advice = advise(job, measured.cluster, measured.machine, methods=list(methods))
    recommended = methods[advice.best.time.method]
    best = min((name for name in run.averaging if name != recommended), key=run.seconds)
    return Choice(recommended, best, run.seconds(recommended) / run.seconds(best))
