"""``qcomp plan``: predicts whether compression will pay off, from given or measured figures."""

import argparse
import errno
import json
import math
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qcomp.cli.output import UsageError, explained, import_named, say, set_aside, vector
from qcomp.core.compressor import Compressor
from qcomp.core.registry import compressor
from qcomp.planning import CPU, PURE, Cluster, Job, Link, Machine, Measured, Method, advise, gpu, measure
from qcomp.planning.advice import Advice, compressors_for, methods_of
from qcomp.planning.cluster import INSIDE
from qcomp.planning.evidence import TASKS
from qcomp.planning.network import agreed
from qcomp.planning.numbers_with_units import bandwidth, count, seconds, show_bandwidth, show_seconds
from qcomp.planning.picture import draw

if TYPE_CHECKING:
    from qcomp.comm import Communicator

EPILOG = """
examples:
  qcomp plan --params 350M --compute-ms 200 --ranks 16 --link 10gbit --machine gpu --warmup 0.15
  qcomp plan --params 350M --compute-ms 200 --ranks 16 --link 1gbit --compressor sign --compressor qsgd:levels=7
  mpirun -n 4 qcomp plan --measure --out cluster.json
  qcomp plan --params 350M --compute-ms 200 --measured cluster.json --json
"""

_MACHINES: dict[str, Callable[[], Machine]] = {"cpu": lambda: CPU, "pure": lambda: PURE, "gpu": gpu}
_LATENCY = 50e-6
_MOST_MATRICES = 1 << 17
"""The most matrices of a job. In the default shape they have 137 billion parameters, and comparing the methods takes
about a minute."""
_SECONDS = "none"
"""The value of --task with which only seconds are compared."""
_OPTIONS = {"compute": "compute_ms", "bandwidth": "link"}
"""The options whose names differ from the names of their settings."""


def matrix(text: str) -> tuple[int, int]:
    """Return rows and columns from ``"1024x4096"``."""
    found = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", text)
    if found is None:
        raise ValueError(f"{text!r} is not understood; expected rows and columns such as 1024x4096")
    return int(found[1]), int(found[2])


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``qcomp plan``."""
    job = parser.add_argument_group("what is trained")
    job.add_argument("--params", type=explained(count), help="number of parameters, such as 350M")
    job.add_argument("--compute-ms", type=float, help="milliseconds of a step without communication")
    job.add_argument(
        "--gradient-bytes",
        type=int,
        choices=(2, 4),
        default=4,
        help="bytes per gradient element in plain training",
    )
    job.add_argument(
        "--overlap",
        type=float,
        default=0.0,
        help="share of the computation that overlaps with sending in plain training",
    )
    job.add_argument("--buckets", type=int, default=1, help="number of pieces that --overlap sends")
    job.add_argument(
        "--exact", type=explained(count), default=0, help="parameters in exact tensors (default: 0)"
    )
    job.add_argument(
        "--tensors", type=explained(count), default=1, help="number of compressed tensors (default: 1)"
    )
    job.add_argument("--overlap-compressed", action="store_true", help="compressed messages overlap too")
    job.add_argument(
        "--warmup",
        type=float,
        default=0.0,
        help="share of exact steps in a run of 1-bit Adam or QAdam, such as 0.15",
    )
    job.add_argument(
        "--matrix",
        type=explained(matrix),
        default=(1024, 1024),
        metavar="ROWSxCOLUMNS",
        help="assumed shape of all matrices, for PowerSGD and Muon (default: 1024x1024)",
    )
    ranks = parser.add_argument_group("ranks and links")
    ranks.add_argument("--ranks", type=int)
    ranks.add_argument("--ranks-per-node", type=int)
    ranks.add_argument(
        "--link", type=explained(bandwidth), help="bandwidth between nodes, each way, such as 10gbit"
    )
    ranks.add_argument(
        "--latency", type=explained(seconds), help="latency of a message, such as 25us (default: 50us)"
    )
    ranks.add_argument(
        "--streams", type=float, help="ranks of a node that each get --link's bandwidth at once (default: 1)"
    )
    ranks.add_argument(
        "--inside", type=explained(bandwidth), help="bandwidth between the ranks of a node (default: 80gbit)"
    )
    ranks.add_argument("--machine", choices=_MACHINES, help="how fast ranks encode (default: cpu, one core)")
    ranks.add_argument("--measured", metavar="FILE", help="output of --measure, for all options not given")
    how = parser.add_argument_group("comparison and output")
    how.add_argument(
        "--compressor",
        type=explained(compressor),
        action="append",
        metavar="SPEC",
        help="compressor spec, such as qsgd:levels=7; repeatable",
    )
    how.add_argument(
        "--task",
        choices=(*TASKS, _SECONDS),
        default=TASKS[0],
        help="task whose studies tell how many steps each method needs to reach a loss; 'none': compare seconds only "
        "(default: %(default)s)",
    )
    how.add_argument("--picture", metavar="FILE", help="plot of step time over bandwidth; needs qcomp[plot]")
    probing = parser.add_argument_group("measuring, under mpirun or torchrun")
    probing.add_argument("--measure", action="store_true", help="measure links, compressors and --step")
    probing.add_argument(
        "--step", metavar="MODULE:FUNCTION", help="training step without communication, to time"
    )
    probing.add_argument(
        "--arrays", choices=("numpy", "torch", "torch-cuda"), default="numpy", help="(default: %(default)s)"
    )
    probing.add_argument(
        "--elements", type=explained(count), default=1 << 22, help="elements of the encoded vectors"
    )
    probing.add_argument(
        "--rounds", type=int, default=7, help="rounds of each measurement (default: %(default)s)"
    )
    probing.add_argument("--out", metavar="FILE", help="file for the measurements")


def run(options: argparse.Namespace) -> int:
    """Print the output, on the first rank."""
    try:
        with set_aside(options.json):
            text = plan(options)
    except (ValueError, ImportError, OSError) as error:
        raise UsageError(str(error)) from error
    if text:
        say(text)
    return 0


def plan(options: argparse.Namespace) -> str:
    """Return the output of ``qcomp plan`` on this rank.

    Raises ValueError if options are missing or incompatible, and ImportError if matplotlib, the step or a library is
    missing.
    """
    if not options.measure:
        for name in ("step", "out"):
            if getattr(options, name) is not None:
                raise ValueError(
                    f"--{name} is {getattr(options, name)!r}, but --measure is not given; expected both"
                )
        with _naming(options, "measured", OSError):
            measured = None if options.measured is None else Measured.load(options.measured)
        advice = _advice(options, measured)
        return json.dumps(advice.document, indent=1) if options.json else advice.text
    if options.measured is not None:
        raise ValueError("--measure and --measured are both given; expected one")
    if options.params is not None:
        _job(options, 0.0)  # wrong options should raise now, not after minutes of measuring
    rank, measured = _measure(options)
    if rank != 0:
        return ""
    if options.out is not None:
        measured.save(options.out)
    advised = None if options.params is None else _advice(options, measured)
    if options.json:
        document = {"measured": measured.document, "advice": None if advised is None else advised.document}
        return json.dumps(document, indent=1)
    text = _found(measured)
    return text if advised is None else f"{text}\n\n{advised.text}"


def _advice(options: argparse.Namespace, measured: Measured | None) -> Advice:
    compute = None if options.compute_ms is None else options.compute_ms / 1e3
    if compute is not None and not 0 <= compute < math.inf:
        raise UsageError(f"--compute-ms is {options.compute_ms:g}; expected milliseconds, at least 0")
    if compute is None and measured is not None:
        compute = measured.compute
    if options.params is None or compute is None:
        missing = "--params" if options.params is None else "--compute-ms"
        raise ValueError(f"{missing} is not given; pass it, unless you only want --measure")
    job = _job(options, compute)
    cluster = _cluster(options, None if measured is None else measured.cluster)
    if measured is not None and measured.on_one_node and options.link is None and options.ranks is not None:
        _require_inside(options.ranks, measured)
    machine = CPU if measured is None else measured.machine
    if options.machine is not None:
        machine = _MACHINES[options.machine]()
    task = None if options.task == _SECONDS else options.task
    with _naming(options):
        methods = _methods(options, cluster, machine)
        advice = advise(job, cluster, machine, methods=methods, warmup=options.warmup, task=task)
    if options.picture is not None:
        if not options.picture or Path(options.picture).is_dir():
            raise UsageError(
                f"--picture is {options.picture!r}; expected the name of a file, such as plan.png"
            )
        with _naming(options, "picture", (ValueError, OSError)):
            draw(advice, options.picture)
    return advice


def _job(options: argparse.Namespace, compute: float) -> Job:
    with _naming(options):
        return Job(
            options.params,
            compute,
            options.gradient_bytes,
            options.overlap,
            options.buckets,
            options.overlap_compressed,
            options.exact,
            options.tensors,
            () if options.compressor else _shapes(options),
        )


def _shapes(options: argparse.Namespace) -> tuple[tuple[int, ...], ...]:
    """Return shapes for all parameters: equal matrices, a last one with fewer rows, and a vector for the remainder."""
    height, width = options.matrix
    number, left = divmod(max(0, options.params - options.exact), height * width)
    if number > _MOST_MATRICES:
        raise UsageError(
            f"--matrix is {height}x{width}, so --params {options.params} would make {number} matrices; expected at "
            f"most {_MOST_MATRICES}: pass the shape of larger matrices, or a --compressor"
        )
    rows, left = divmod(left, width)
    left += options.exact
    rest = [(rows, width)] * (rows > 0) + [(left,)] * (left > 0)
    return (*[(height, width)] * number, *rest)


@contextmanager
def _naming(
    options: argparse.Namespace,
    name: str | None = None,
    errors: type[Exception] | tuple[type[Exception], ...] = ValueError,
) -> Iterator[None]:
    """Make errors name the option at fault: the given option, or that of the setting that begins the error's text."""
    try:
        yield
    except errors as error:
        text = str(error)
        found = None if name is not None else re.match(r"(\w+) is .*?; ", text)
        option = name if found is None else _OPTIONS.get(found[1], found[1])
        if option is None or getattr(options, option, None) is None:
            raise
        written = f"--{option.replace('_', '-')}"
        told = text[found.end() :] if found is not None else text
        raise UsageError(f"{written} is {getattr(options, option)!r}; {told}") from error


def _cluster(options: argparse.Namespace, measured: Cluster | None) -> Cluster:
    if measured is None:
        for name in ("ranks", "link"):
            if getattr(options, name) is None:
                raise ValueError(
                    f"--{name} is not given; pass it, or pass --measured FILE with the output of --measure"
                )
        with _naming(options):
            measured = Cluster(1, Link(options.link, _LATENCY))
    link = {"bandwidth": options.link, "latency": options.latency, "streams": options.streams}
    given = {name: value for name, value in link.items() if value is not None}
    if "latency" in given:
        given["per_message"] = None  # the measured value is only valid with the measured latency
    with _naming(options, "inside", ValueError):
        inside = measured.inside if options.inside is None else replace(INSIDE, bandwidth=options.inside)
    with _naming(options):
        return Cluster(
            ranks=measured.ranks if options.ranks is None else options.ranks,
            link=replace(measured.link, **given),
            ranks_per_node=measured.ranks_per_node
            if options.ranks_per_node is None
            else options.ranks_per_node,
            inside=inside,
        )


def _require_inside(ranks: int, measured: Measured) -> None:
    """Raise UsageError if there are more ranks than were measured, all on one node: no link between nodes is known."""
    on_node = 0 if measured.cluster is None else measured.cluster.ranks
    if ranks > on_node:
        raise UsageError(
            f"--ranks is {ranks}, but the {on_node} measured ranks share a node, and no link between nodes was "
            "measured; expected --link, the bandwidth between nodes"
        )


def _methods(options: argparse.Namespace, cluster: Cluster, machine: Machine) -> tuple[Method, ...] | None:
    """Return the plain methods and those of the requested compressors; without a request None, for all methods."""
    if options.compressor is None:
        return None
    for chosen in options.compressor:
        try:
            machine.speed(chosen)
        except ValueError as error:
            raise UsageError(f"--compressor is {chosen.spec}; {error}") from error
    return methods_of(cluster, options.gradient_bytes, options.compressor)


def _measure(options: argparse.Namespace) -> tuple[int, Measured]:
    from qcomp.comm import world  # noqa: PLC0415 - may start MPI

    for name in ("elements", "rounds"):
        if getattr(options, name) < 1:
            raise ValueError(f"--{name} is {getattr(options, name)}; expected at least 1")
    step = None if options.step is None else _import(options.step)
    like = vector(options.arrays, options.elements)
    comm = world()
    _require_writable(options.out, comm, like)
    compressors: Sequence[Compressor] = options.compressor or compressors_for()
    return comm.rank, measure(comm, compressors, like=like, step=step, rounds=options.rounds)


def _require_writable(out: str | None, comm: "Communicator", like: Any) -> None:
    """Raise on every rank, before minutes of measuring, if the first rank cannot write to the file."""
    problem = 0
    if out is not None and comm.rank == 0:
        path, existed = Path(out), Path(out).exists()
        try:
            path.open("a").close()
            if not existed:
                path.unlink()
        except OSError as error:
            problem = error.errno or errno.EIO
    found = max(int(value) for (value,) in agreed(comm, [problem], like))
    if found:
        raise UsageError(f"--out is {out!r}; the first rank cannot write there: {os.strerror(found)}")


def _import(name: str) -> Callable[[], object]:
    step = import_named(name, "--step")
    if not callable(step):
        module, _, function = name.partition(":")
        raise ValueError(f"--step is {name!r}; {module} has no function {function!r}")
    found: Callable[[], object] = step
    return found


def _found(measured: Measured) -> str:
    lines = []
    if measured.cluster is None:
        lines.append("one rank: no link to measure")
    else:
        cluster, spreads = measured.cluster, measured.spreads
        low, high = map(show_seconds, spreads["latency"])
        if measured.on_one_node:
            lines.append(f"{cluster.ranks} ranks, all on one node: the link is the one inside it")
        else:
            lines.append(f"{cluster.ranks} ranks, {cluster.ranks_per_node} on a node")
        lines.append(
            f"link: {show_bandwidth(cluster.link.bandwidth)} in each direction at once, "
            f"latency {show_seconds(cluster.link.latency)} ({low} to {high})"
        )
        if cluster.ranks_per_node > 1:
            lines.append(
                f"{cluster.link.streams:.2g} ranks of a node each get that bandwidth at the same time; inside a node: "
                f"{show_bandwidth(cluster.inside.bandwidth)}"
            )
        lines.append(
            f"overhead of calls: {show_seconds(measured.machine.call)} for each exchange, "
            f"{show_seconds(measured.machine.tensor)} for each tensor"
        )
    for spec, speed in measured.machine.speeds.items():
        of_each = {"encode": speed.encode, "decode": speed.decode, "decode and add": speed.add}
        rates = ", ".join(f"{name} {4e-9 / value:.3g} GB/s" for name, value in of_each.items())
        lines.append(f"{spec}: {rates}")
    if measured.machine.low_rank is not None and measured.machine.product is not None:
        one = measured.machine.low_rank.fixed + measured.machine.low_rank.column
        lines.append(f"powersgd:rank=1: {4e-9 / one:.3g} GB/s")
        lines.append(
            f"products of matrices: {1e-9 / measured.machine.product:.3g} billion multiplications a second"
        )
    if measured.compute is not None:
        lines.append(f"step: {show_seconds(measured.compute)}")
    return "\n".join(lines)
