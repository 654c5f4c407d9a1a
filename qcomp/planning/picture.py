"""A picture of an `Advice`: the step time of every method over the bandwidth of the link."""

from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

from qcomp.core.mean.topologies.registry import names
from qcomp.planning.advice import Advice, Row
from qcomp.planning.model import ALLREDUCES, Method, step_time

_POINTS = 61
_MOST_CURVES = 8
_DECADES = 2.0
"""Decades of bandwidth on each side of the given link."""
_STYLES = ("-", (0, (1, 1, 4, 1)), ":", "-.", "--")
"""Line styles of topologies, in the order of their names. Styles repeat if there are more topologies than styles."""
_PLAIN_STYLES = dict(zip(ALLREDUCES, ("-", "--"), strict=True))
_PLAIN = {"plain": "black", "16-bit": "0.5"}
"""Colours of uncompressed methods."""


def draw(advice: Advice, path: str | Path) -> None:
    """Write a picture of the step time over the bandwidth between nodes; the suffix names the format.

    It shows at most eight methods. If methods differ only in their topology, it shows only the fastest of them on the
    given link. Raises ImportError if matplotlib is missing, and ValueError if it does not support the format.
    """
    try:
        figure: Any = import_module("matplotlib.figure").Figure(figsize=(9, 5), layout="constrained")
    except ImportError as error:
        raise ImportError("matplotlib is missing: pip install 'qcomp[plot]'") from error
    axes = figure.subplots()
    link = advice.cluster.link
    around = [link.bandwidth * 10 ** (_DECADES * (2 * i / (_POINTS - 1) - 1)) for i in range(_POINTS)]
    curves = [
        (row, [_seconds(advice, row.time.method, bandwidth) for bandwidth in around])
        for row in _shown(advice)
    ]
    colours: dict[str, str] = {}
    for row, times in sorted(curves, key=lambda curve: -curve[1][0]):  # the legend in the order of the curves
        method = row.time.method
        colour = _PLAIN.get(method.kind) or colours.setdefault(method.kind, f"C{len(colours)}")
        axes.plot(
            [8 * b / 1e9 for b in around],
            times,
            linestyle=_style(method),
            color=colour,
            linewidth=2.8 if row is advice.best else 1.2,
            label=method.label,
        )
    axes.axvline(8 * link.bandwidth / 1e9, color="0.5", linewidth=1)
    axes.axhline(advice.job.compute, color="0.8", linewidth=1)
    axes.set(xscale="log", yscale="log", xlabel="link, Gbit/s each way", ylabel="seconds a step")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter("{x:g}")
    axes.set_title(f"{advice.job.params / 1e6:,.4g}M parameters, {advice.cluster.ranks} ranks")
    axes.legend(fontsize="x-small", loc="upper right")
    figure.savefig(path, dpi=120)


def _shown(advice: Advice) -> list[Row]:
    """Return the fastest method of each kind that is shown: all plain kinds, and the fastest of the other kinds."""
    fastest = {advice.best.time.method.kind: advice.best}
    for row in advice.rows:  # fastest first
        fastest.setdefault(row.time.method.kind, row)
    plain = [row for kind, row in fastest.items() if kind in _PLAIN]
    compressed = [row for kind, row in fastest.items() if kind not in _PLAIN]
    return plain + compressed[: _MOST_CURVES - len(plain)]


def _style(method: Method) -> Any:
    """Return how the line of a method is drawn."""
    if method.is_allreduce:
        return _PLAIN_STYLES[method.topology]
    return _STYLES[names().index(method.topology) % len(_STYLES)]


def _seconds(advice: Advice, method: Method, bandwidth: float) -> float:
    there = replace(advice.cluster, link=replace(advice.cluster.link, bandwidth=bandwidth))
    return step_time(advice.job, there, advice.machine, method).seconds
