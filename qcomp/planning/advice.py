"""The comparison of all methods, and a recommendation whether and how to compress."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from qcomp.core.compressor import Compressor
from qcomp.core.compressors import QSGD, MinMaxUInt8, Scaled, ScaledSign
from qcomp.core.mean.topologies.registry import names, topology
from qcomp.planning.cluster import Cluster, Job
from qcomp.planning.machine import CPU, Machine
from qcomp.planning.model import Method, StepTime, break_even, run_speedup, step_time
from qcomp.planning.units import finite, show_bandwidth, show_bytes, show_seconds

__all__ = ["WORTHWHILE", "Advice", "Row", "advise", "methods_of"]

WORTHWHILE = 1.2
"""The smallest recommended speed-up, since the model is within a fifth of measured steps."""


class Row(NamedTuple):
    """A method and its predicted performance."""

    time: StepTime
    speedup: float
    """Speed-up of a step over the faster all-reduce at full precision."""
    run_speedup: float
    """Speed-up of a run, whose first steps are exact if the method compresses."""
    break_even: float | None
    """Bandwidth between nodes below which the method is faster than that all-reduce, None for an all-reduce."""


@dataclass(frozen=True)
class Advice:
    """The result of `advise`.

    Parameters
    ----------
    job, cluster, machine
        The inputs of `advise`.
    warmup : float
        The share of exact steps in a run that compresses.
    rows : tuple of Row
        All methods, the fastest first.
    plain : Row
        The faster all-reduce of full precision.
    best : Row
        The recommended method.
    reason : str
        A sentence that explains the recommendation.
    """

    job: Job
    cluster: Cluster
    machine: Machine
    warmup: float
    rows: tuple[Row, ...]
    plain: Row
    best: Row
    reason: str

    @property
    def compress(self) -> bool:
        """Whether to compress."""
        return not self.best.time.method.is_allreduce

    @property
    def text(self) -> str:
        """The output of `qcomp plan`."""
        return "\n".join([*self._question(), "", *self._table(), "", self.reason])

    @property
    def document(self) -> dict[str, Any]:
        """The output of `qcomp plan --json`: seconds, bytes, bytes per second, and None for infinity.

        ``pays_below`` is the bandwidth between nodes below which a method is faster: 0 for no link, None for any.
        All-reduces do not have it.
        """
        methods = []
        for row in self.rows:
            time, method = row.time, row.time.method
            entry = {
                "method": method.label,
                "topology": method.topology,
                "compressor": None if method.compressor is None else method.compressor.spec,
                "step": time.seconds,
                "encode_decode": time.codec,
                "sending": time.wire,
                "sent": time.sent,
                "speedup": row.speedup,
                "run_speedup": row.run_speedup,
            }
            methods.append(
                finite(entry if row.break_even is None else {**entry, "pays_below": row.break_even})
            )
        return {
            "job": asdict(self.job),
            "cluster": finite(asdict(self.cluster)),
            "machine": self.machine.source,
            "warmup": self.warmup,
            "methods": methods,
            "compress": self.compress,
            "recommended": self.best.time.method.label,
            "reason": self.reason,
        }

    def _question(self) -> Iterator[str]:
        job, cluster = self.job, self.cluster
        nodes = f" on {cluster.nodes} nodes" if cluster.ranks_per_node > 1 else ""
        overlap = f", {job.overlap:.0%} of it overlapped in {job.buckets} buckets" if job.overlap else ""
        yield f"{job.params / 1e6:,.4g}M parameters, {show_seconds(job.compute)} of computation a step{overlap}"
        ranks = "1 rank" if cluster.ranks == 1 else f"{cluster.ranks} ranks"
        link = cluster.link
        yield f"{ranks}{nodes}, {show_bandwidth(link.bandwidth)} each way, latency {show_seconds(link.latency)}"
        yield f"speed of the compressors: {self.machine.source}"

    def _table(self) -> Iterator[str]:
        head = ["method", "step", "encode+decode", "sending", "sent a rank", "speed-up", "pays below"]
        if self.warmup:
            head.insert(6, "of a run")
        cells = [head, *map(self._cells, self.rows)]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        for first, *others in cells:
            aligned = [text.rjust(width) for text, width in zip(others, widths[1:], strict=True)]
            yield "  ".join([first.ljust(widths[0]), *aligned])

    def _cells(self, row: Row) -> list[str]:
        time = row.time
        cells = [time.method.label, *map(show_seconds, (time.seconds, time.codec, time.wire))]
        cells += [show_bytes(time.sent), f"{row.speedup:.2f}x", _show_edge(row.break_even)]
        if self.warmup:
            cells.insert(6, f"{row.run_speedup:.2f}x")
        return cells


def _show_edge(edge: float | None) -> str:
    if edge is None:
        return ""
    return {0.0: "never", float("inf"): "any link"}.get(edge) or show_bandwidth(edge)


def methods_of(
    cluster: Cluster, gradient_bytes: int = 4, compressors: Sequence[Compressor] | None = None
) -> tuple[Method, ...]:
    """Return the methods compared by default.

    These are the plain all-reduces, also in 16 bits if gradients have 32, and each compressor in each topology that
    suits the cluster. Without compressors, one of each kind is used.
    """
    plain = [Method("ring"), Method("tree")]
    if gradient_bytes == 4:
        plain += [Method("ring", half=True), Method("tree", half=True)]
    if compressors is None:
        compressors = [ScaledSign(), Scaled(QSGD(levels=1)), QSGD(levels=7), MinMaxUInt8()]
    suiting = [name for name in names() if topology(name).suits(cluster.nodes, cluster.ranks_per_node)]
    return (*plain, *(Method(name, compressor) for name in suiting for compressor in compressors))


def advise(
    job: Job,
    cluster: Cluster,
    machine: Machine = CPU,
    *,
    methods: Sequence[Method] | None = None,
    warmup: float = 0.0,
) -> Advice:
    """Compare methods of averaging, and recommend one.

    Parameters
    ----------
    job : Job
        What a step computes and averages.
    cluster : Cluster
        The ranks and their links.
    machine : Machine
        How fast a rank encodes and decodes; by default the measured figures of one core.
    methods : sequence of Method, optional
        The methods to compare, with at least one all-reduce at full precision; see `methods_of`.
    warmup : float
        The share of steps that are exact in a run that compresses, as in 1-bit Adam.

    Returns
    -------
    Advice
        It recommends compression if a run is at least `WORTHWHILE` times as fast as with every all-reduce, and a
        compressed ring only if it is also that much faster than every other compressed method.

    Examples
    --------
    >>> from qcomp.planning import Cluster, Job, Link
    >>> slow = Cluster(ranks=64, link=Link(bandwidth=1.25e9))
    >>> advise(Job(params=350_000_000, compute=0.3), slow, warmup=0.15).best.time.method.label
    'sign:bucket_size=4096,scale=l1, two_phase'
    >>> fast = Cluster(ranks=8, link=Link(bandwidth=50e9, latency=5e-6))
    >>> print(advise(Job(params=25_000_000, compute=0.3), fast).reason)
    Do not compress: the fastest compressed method, sign:bucket_size=4096,scale=l1, two_phase, would make a run \
0.90 times as fast as tree all-reduce.
    """
    chosen = methods_of(cluster, job.gradient_bytes) if methods is None else tuple(methods)
    times = [step_time(job, cluster, machine, method) for method in chosen]
    full = [t for t in times if t.method.is_allreduce and not t.method.half]
    if not full:
        raise ValueError("methods has no ring or tree of full precision; expected one to compare with")
    plain = min(full, key=lambda t: t.seconds)

    def row(time: StepTime) -> Row:
        if time.method.is_allreduce:
            gain = _ratio(plain.seconds, time.seconds)
            return Row(time, gain, gain, None)
        edge = break_even(job, cluster, machine, time.method, plain.method) if cluster.ranks > 1 else 0.0
        run = run_speedup(plain.seconds, time.seconds, warmup) if time.seconds else 1.0
        return Row(time, _ratio(plain.seconds, time.seconds), run, edge)

    rows = tuple(sorted(map(row, times), key=lambda r: (r.time.seconds, not r.time.method.is_allreduce)))
    best, reason = _recommend(rows, cluster)
    own = next(r for r in rows if r.time is plain)
    return Advice(job, cluster, machine, warmup, rows, own, best, reason)


def _ratio(plain: float, seconds: float) -> float:
    return plain / seconds if seconds else 1.0


def _merit(row: Row) -> float:
    """Return the figure of merit of a compressed method: one that rounds in every hop must be clearly faster."""
    rounds_in_every_hop = topology(row.time.method.topology).roundings is None
    return row.run_speedup / (WORTHWHILE if rounds_in_every_hop else 1.0)


def _recommend(rows: Sequence[Row], cluster: Cluster) -> tuple[Row, str]:
    exact = max((r for r in rows if r.time.method.is_allreduce), key=lambda r: r.run_speedup)
    compressed = [r for r in rows if not r.time.method.is_allreduce]
    if cluster.ranks == 1:
        return exact, "Do not compress: there is one rank, and nothing is sent."
    if not compressed:
        return exact, f"Nothing that compresses was compared; {exact.time.method.label} is the fastest."
    best = max(compressed, key=_merit)
    gain = best.run_speedup / exact.run_speedup
    name, other = best.time.method.label, exact.time.method.label
    if gain >= WORTHWHILE:
        return best, (
            f"Compress with {name}: a run is {gain:.2f} times as fast as with {other}, "
            f"a step {best.speedup / exact.speedup:.2f} times."
        )
    if gain > 1:
        return exact, (
            f"Do not compress: {name} would make a run {gain:.2f} times as fast as {other}; less than "
            f"{WORTHWHILE:g} may be the error of this prediction."
        )
    return exact, (
        f"Do not compress: the fastest compressed method, {name}, would make a run {gain:.2f} times as fast as "
        f"{other}."
    )
