"""The formulas for the time of a step, explained in docs/planning/README.md."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

from qcomp.core.compressor import Compressor
from qcomp.core.compressors.identity import Identity
from qcomp.core.mean.costs import Cost, Load, around
from qcomp.core.mean.topologies.registry import names, topology
from qcomp.planning.cluster import Cluster, Job, Link
from qcomp.planning.machine import Machine

ALLREDUCES = ("ring", "tree")
"""The plain methods of averaging."""

_SLOWEST, _FASTEST = 1.0, 1e18
"""Range of bandwidths in which a break-even is searched, in bytes per second."""


@dataclass(frozen=True)
class Method:
    """A method of averaging.

    Parameters
    ----------
    topology : str
        Without a compressor ``"ring"`` or ``"tree"``, the all-reduces of communication libraries. With a compressor, a
        topology of `CompressedMean`.
    compressor : Compressor, optional
        The compressor of the compressed mean; None for an all-reduce.
    half : bool
        Whether an all-reduce sends 16-bit values converted from 32-bit ones.
    """

    topology: str
    compressor: Compressor | None = None
    half: bool = False

    def __post_init__(self) -> None:
        known = dict.fromkeys((*ALLREDUCES, *names()))
        if self.topology not in known:
            raise ValueError(f"topology is {self.topology!r}; expected one of {', '.join(known)}")
        if self.topology not in names() and not self.is_allreduce:
            raise ValueError(f"compressor is {self.compressor!r}; expected none with {self.topology}")
        if self.topology not in ALLREDUCES and self.is_allreduce:
            raise ValueError(f"compressor is None; expected a qcomp.Compressor with {self.topology}")
        if self.half and not self.is_allreduce:
            raise ValueError("half is True; expected False with a compressor, which sets what is sent")

    @property
    def is_allreduce(self) -> bool:
        """Whether this is a plain all-reduce."""
        return self.compressor is None

    @property
    def label(self) -> str:
        """Its name in tables."""
        if self.compressor is None:
            return f"{self.topology} all-reduce{', 16-bit' if self.half else ''}"
        return f"{self.compressor.spec}, {self.topology}"

    @property
    def kind(self) -> str:
        """The kind of data sent. Methods of one kind differ only in topology, and have one colour in pictures."""
        if self.compressor is None:
            return "16-bit" if self.half else "plain"
        return self.compressor.spec

    @property
    def sends(self) -> tuple[Compressor, ...]:
        """The compressors whose speeds it needs."""
        return () if self.compressor is None else (self.compressor,)

    def predictable(self, machine: Machine) -> bool:
        """Return whether the machine has all figures that the method needs."""
        return all(map(machine.knows, self.sends))

    def step(self, job: Job, cluster: Cluster, machine: Machine) -> "StepTime":
        """Return the predicted time of a step; see `step_time`.

        Parameters
        ----------
        job : Job
        cluster : Cluster
            With at least two ranks.
        machine : Machine
        """
        overlaps = self.is_allreduce or job.overlap_compressed
        overlap, buckets = (job.overlap, job.buckets) if overlaps else (0.0, 1)
        size = -(-job.params // buckets)
        if self.compressor is not None:
            one = topology(self.topology).cost(load(size, job, self.compressor, machine), cluster)
        else:
            pattern = {"ring": _ring, "tree": _tree}[self.topology]
            one = pattern(size, job, cluster, machine, self)
        codec, wire, sent = (buckets * value for value in one)
        if self.compressor is not None:
            codec += job.tensors * machine.tensor
        # Pieces become ready at equal intervals. Either only the last piece is sent after the overlap or, if sending is
        # slower, all pieces follow the first without a pause.
        hidden = overlap * job.compute
        sending = max(hidden / buckets + wire, hidden + wire / buckets)
        return StepTime(self, job.compute - hidden + codec + sending, job.compute, codec, wire, sent)


class StepTime(NamedTuple):
    """The time of a step and its parts."""

    method: Method
    seconds: float
    """Seconds of the whole step."""
    compute: float
    """Seconds of computation without communication."""
    codec: float
    """Seconds of encoding, decoding and calls."""
    wire: float
    """Seconds of the exchanges, some of which may overlap with the computation."""
    sent: float
    """Bytes that a rank sends, with the longest payloads if lengths vary."""


def step_time(job: Job, cluster: Cluster, machine: Machine, method: Method) -> StepTime:
    """Return the predicted time of a step.

    Parameters
    ----------
    job : Job
    cluster : Cluster
    machine : Machine
        The speed of each rank.
    method : Method
        How to average.

    Examples
    --------
    >>> from qcomp.planning import CPU, Cluster, Job, Link
    >>> cluster = Cluster(ranks=2, link=Link(bandwidth=125e6, latency=0.0))
    >>> step_time(Job(params=25_000_000, compute=0.2), cluster, CPU, Method("ring")).seconds
    1.0
    """
    if cluster.ranks == 1:
        return StepTime(method, job.compute, job.compute, 0.0, 0.0, 0.0)
    return method.step(job, cluster, machine)


def load(size: int, job: Job, compressor: Compressor, machine: Machine) -> Load:
    """Return a rank's load in a part of a job: what it compresses, and what it sends exactly."""
    speed, exact = machine.speed(compressor), size * job.exact // job.params
    parts = ((compressor, size - exact), (Identity(), exact))
    payload = sum(c.payload_spec(elements).nbytes for c, elements in parts if elements)
    return Load(
        size,
        payload,
        compressor.variable_length,
        speed.encode,
        speed.decode,
        speed.add,
        machine.copy,
        exact,
        machine.call,
    )


def _ring(size: int, job: Job, cluster: Cluster, machine: Machine, method: Method) -> Cost:
    sent = 2 * (cluster.ranks - 1) / cluster.ranks * _exact_bytes(size, job, method)
    return Cost(_conversion(size, job, machine, method), around(sent, cluster), sent)


def _tree(size: int, job: Job, cluster: Cluster, machine: Machine, method: Method) -> Cost:
    exact, lanes, nodes = _exact_bytes(size, job, method), cluster.ranks_per_node, cluster.nodes
    inside, between = 2 * (lanes - 1) / lanes * exact, 2 * (nodes - 1) / nodes * exact / lanes
    wire = _halving(inside, lanes, cluster.inside, lanes) + _halving(between, nodes, cluster.link, lanes)
    return Cost(_conversion(size, job, machine, method), wire, inside + between)


def _halving(sent: float, peers: int, link: Link, ranks: int) -> float:
    """Return the seconds that recursive halving and doubling takes."""
    return 2 * math.ceil(math.log2(peers)) * link.latency + link.transfer(sent, ranks=ranks)


def _exact_bytes(size: int, job: Job, method: Method) -> int:
    return size * (2 if method.half else job.gradient_bytes)


def _conversion(size: int, job: Job, machine: Machine, method: Method) -> float:
    """Return the seconds to convert 32-bit values to 16 bits and back."""
    return 2 * size * machine.copy if method.half and job.gradient_bytes == 4 else 0.0


def break_even(job: Job, cluster: Cluster, machine: Machine, method: Method, plain: Method) -> float:
    """Return the bandwidth between nodes, in bytes per second, below which a method is faster than a plain one.

    It is 0.0 if the method is faster on no link, infinity if it is faster on every link or on every link above some
    bandwidth.

    Examples
    --------
    >>> import qcomp
    >>> from qcomp.planning import CPU, Cluster, Job, Link, Method
    >>> cluster = Cluster(ranks=8, link=Link(bandwidth=125e6))
    >>> job = Job(params=25_000_000, compute=0.2)
    >>> sign = Method("two_phase", qcomp.ScaledSign())
    >>> edge = break_even(job, cluster, CPU, sign, Method("ring"))
    >>> f"{8 * edge / 1e9:.1f} Gbit/s"
    '38.2 Gbit/s'
    """
    return pays_between(job, cluster, machine, method, plain)[1]


def pays_between(
    job: Job, cluster: Cluster, machine: Machine, method: Method, plain: Method
) -> tuple[float, float]:
    """Return the range of bandwidths between nodes, in bytes per second, where a method is faster than a plain one.

    A method that sends fewer bytes is faster below some bandwidth, so its range starts at 0.0. A method that sends more
    bytes in fewer messages is faster above some bandwidth, so its range ends at infinity. If the method is faster on
    the cluster's own link, this link is in the range; if it is not faster on any link, the range is 0.0 to 0.0.
    """

    def gain(bandwidth: float) -> float:
        there = replace(cluster, link=replace(cluster.link, bandwidth=bandwidth))
        return step_time(job, there, machine, plain).seconds - step_time(job, there, machine, method).seconds

    own = min(max(cluster.link.bandwidth, _SLOWEST), _FASTEST)
    on_slowest, on_own, on_fastest = (gain(bandwidth) > 0 for bandwidth in (_SLOWEST, own, _FASTEST))
    if on_own:
        above = 0.0 if on_slowest else _edge(gain, own, _SLOWEST)
        return above, math.inf if on_fastest else _edge(gain, own, _FASTEST)
    if on_slowest:
        return 0.0, _edge(gain, _SLOWEST, own)
    return (_edge(gain, _FASTEST, own), math.inf) if on_fastest else (0.0, 0.0)


def _edge(gain: Callable[[float], float], inside: float, outside: float) -> float:
    """Return the bandwidth where the gain ends. It lies between ``inside``, with a gain, and ``outside``, without."""
    while (middle := math.sqrt(inside * outside)) not in (inside, outside):
        inside, outside = (middle, outside) if gain(middle) > 0 else (inside, middle)
        if abs(outside - inside) <= inside * 1e-15:
            break
    return inside


def require_share(warmup: float) -> None:
    """Raise ValueError unless the warm-up is a share of a run."""
    if not 0 <= warmup <= 1:
        raise ValueError(f"warmup is {warmup!r}; expected a share from 0 to 1")


def run_speedup(plain: float, compressed: float, warmup: float, exact: float | None = None) -> float:
    """Return the speed-up of a whole run whose first steps are exact.

    Parameters
    ----------
    plain, compressed : float
        Seconds of a step.
    warmup : float
        The share of steps that are exact.
    exact : float, optional
        Seconds of an exact step, if it differs from ``plain``.

    Examples
    --------
    >>> round(run_speedup(6.6, 1.0, warmup=0.15), 2)
    3.59
    """
    require_share(warmup)
    return plain / (warmup * (plain if exact is None else exact) + (1 - warmup) * compressed)
