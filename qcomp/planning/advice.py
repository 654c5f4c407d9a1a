"""Compares all methods, and recommends whether and how to compress."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

from qcomp.core.compressor import Compressor
from qcomp.core.compressors import QSGD, MinMaxUInt8, Scaled, ScaledSign, TopK
from qcomp.core.mean.averaging import PowerSGD
from qcomp.core.mean.topologies.registry import names, topology
from qcomp.core.optimizers.muon import Muon
from qcomp.core.outer.presets import diloco, streaming_diloco
from qcomp.planning.cluster import Cluster, Job, Link
from qcomp.planning.evidence import STUDIED, TASKS, UNMEASURED, Evidence, evidence_of
from qcomp.planning.machine import CPU, Machine
from qcomp.planning.methods import MuonMethod, OuterMethod, PowerSGDMethod
from qcomp.planning.model import Method, StepTime, pays_between, require_share, run_speedup, step_time
from qcomp.planning.numbers_with_units import finite, show_bandwidth, show_bytes, show_seconds

WORTHWHILE = 1.2
"""The smallest speed-up that is recommended, since predictions are within a fifth of measured steps."""


class Row(NamedTuple):
    """A method and its predicted performance."""

    time: StepTime
    speedup: float
    """Speed-up of a step over the faster all-reduce at full precision."""
    run_speedup: float
    """Speed-up of a run, whose first steps are exact if the method compresses."""
    break_even: float | None
    """Bandwidth between nodes below which the method is faster than the faster all-reduce. It is 0 if the method is
    faster on no link, and infinity if it is faster on every link above `pays_above`. None for an all-reduce."""
    known: Evidence | None
    """Evidence of the method's steps to a loss. None if there is none, and for exact means (an all-reduce, or a
    lossless compressor), which need as many steps as exact training."""
    loss_speedup: float
    """Speed-up of a run to the same loss over the faster all-reduce. If the method's steps to a loss are not known, it
    is charged `UNMEASURED` steps for each exact one."""
    pays_above: float = 0.0
    """Bandwidth between nodes above which the method is faster than the faster all-reduce; above 0 for a method that
    saves messages but sends more bytes."""

    @property
    def measured(self) -> bool:
        """Whether the method's steps to a loss are known."""
        return _is_exact(self.time.method) or (self.known is not None and self.known.ratio is not None)

    @property
    def steps(self) -> float:
        """The number of the method's steps that the comparison counts for each step of exact training."""
        if _is_exact(self.time.method):
            return 1.0
        return UNMEASURED if self.known is None else self.known.counted


def _is_exact(method: Method) -> bool:
    """Return whether every step of a method uses the exact mean of all gradients, as exact training does."""
    return type(method) is Method and all(compressor.traits.lossless for compressor in method.sends)


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
        The faster all-reduce at full precision.
    best : Row
        The recommended method.
    reason : str
        Sentences that explain the recommendation.
    task : str or None
        The task whose studies tell how many steps a method needs to a loss; None if only seconds were compared.
    """

    job: Job
    cluster: Cluster
    machine: Machine
    warmup: float
    rows: tuple[Row, ...]
    plain: Row
    best: Row
    reason: str
    task: str | None = TASKS[0]

    @property
    def compress(self) -> bool:
        """Whether to compress."""
        return not self.best.time.method.is_allreduce

    @property
    def text(self) -> str:
        """The output of `qcomp plan`."""
        known = self._known()
        told = [*self._question(), "", *self._table(), "", *known, *([""] if known else []), self.reason]
        return "\n".join(told)

    @property
    def document(self) -> dict[str, Any]:
        """The output of `qcomp plan --json`: seconds, bytes, bytes per second, and None for infinity.

        A method is faster between the bandwidths ``pays_above`` and ``pays_below``, which the table shows as a range or
        as "above". ``pays_above`` is 0 without a lower limit, ``pays_below`` is None without an upper limit, and both
        are 0 if the method is faster on no link. All-reduces have neither.
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
                "loss_speedup": row.loss_speedup,
                "steps_to_loss": None if row.known is None else asdict(row.known),
            }
            if row.break_even is not None:
                entry.update(pays_above=row.pays_above, pays_below=row.break_even)
            methods.append(finite(entry))
        return {
            "job": asdict(self.job),
            "cluster": finite(asdict(self.cluster)),
            "machine": self.machine.source,
            "warmup": self.warmup,
            "methods": methods,
            "task": self.task,
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
        if self.task is not None:
            head += ["steps to a loss", "to a loss"]
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
        cells += [show_bytes(time.sent), f"{row.speedup:.2f}x", _show_range(row)]
        if self.warmup:
            cells.insert(6, f"{row.run_speedup:.2f}x")
        if self.task is not None:
            ratio = 1.0 if row.known is None else row.known.ratio
            cells += [f"{ratio:.2f}", f"{row.loss_speedup:.2f}x"] if row.measured and ratio else ["?", "?"]
        return cells

    def _known(self) -> list[str]:
        """Return a line for each record of steps to a loss, and lines about how the comparison counts these steps."""
        if self.task is None:
            return []
        told = {f"{row.time.method.kind}: {row.known.text}." for row in self.rows if row.known is not None}
        counted = []
        if not all(row.measured for row in self.rows):
            counted.append(
                f"?: the steps to a loss are not measured; the comparison assumes {UNMEASURED:g} steps for each step "
                "of exact training."
            )
        if any(row.known.ratio < 1 for row in self.rows if row.known is not None and row.known.ratio):
            counted.append("A ratio below 1 counts as 1, so what Muon gains over AdamW does not count.")
        compressors = [row.time.method.compressor for row in self.rows if type(row.time.method) is Method]
        if not self.warmup and {"sign", "minmax"} & {c.name for c in compressors if c is not None}:
            counted.append(
                "1-bit Adam and QAdam begin with exact steps: without --warmup, such as 0.15, they are not compared."
            )
        return sorted(told) + counted


def _show_range(row: Row) -> str:
    """Return the range of bandwidths in which a method pays; empty for an all-reduce."""
    above, below = row.pays_above, row.break_even
    if below is None:
        return ""
    if not above:
        return {0.0: "never", math.inf: "any link"}.get(below) or show_bandwidth(below)
    lowest = show_bandwidth(above)
    return f"above {lowest}" if below == math.inf else f"{lowest} to {show_bandwidth(below)}"


def methods_of(
    cluster: Cluster, gradient_bytes: int = 4, compressors: Sequence[Compressor] | None = None
) -> tuple[Method, ...]:
    """Return the methods compared by default.

    These are the plain all-reduces, also in 16 bits if gradients have 32, and each compressor in each topology that
    suits the cluster. The default compressors send about 1, 2, 4 and 8 bits per element.
    """
    plain = [Method("ring"), Method("tree")]
    if gradient_bytes == 4:
        plain += [Method("ring", half=True), Method("tree", half=True)]
    if compressors is None:
        compressors = [ScaledSign(), Scaled(QSGD(levels=1)), QSGD(levels=7), MinMaxUInt8()]
    suiting = [name for name in names() if topology(name).suits(cluster.nodes, cluster.ranks_per_node)]
    return (*plain, *(Method(name, compressor) for name in suiting for compressor in compressors))


def methods_for(job: Job, cluster: Cluster, machine: Machine) -> tuple[Method, ...]:
    """Return methods of every kind for which the machine has figures; PowerSGD and Muon only if the job has shapes.

    These are the methods of `methods_of`; a sparse compressor; outer loops with published settings and with short
    rounds, hierarchical if ranks share a node's link; PowerSGD of rank 1, 2 and 4; and Muon, with and without an owner
    for each matrix.
    """
    return tuple(method for method in _all_methods(job, cluster) if method.predictable(machine))


def compressors_for() -> tuple[Compressor, ...]:
    """Return the compressors whose speeds a machine needs for all methods of `methods_for`."""
    found = _all_methods(Job(1, 0.0, shapes=((1, 1),)), Cluster(1, Link(1.0)))
    of_spec = {c.spec: c for method in found for c in method.sends if not c.traits.lossless}
    return tuple(of_spec.values())


def _all_methods(job: Job, cluster: Cluster) -> tuple[Method, ...]:
    """Return methods of every kind; PowerSGD and Muon only if the job has shapes."""
    found = methods_of(cluster, job.gradient_bytes)
    sparse = TopK(k=64, bucket_size=4096, value_bits=2)
    found += tuple(Method(name, sparse) for name in ("two_phase", "all_gather"))
    loops = [diloco(), streaming_diloco(), STUDIED["SparseLoCo"](), STUDIED["SparseLoCo"](every=5)]
    if topology("hierarchical").suits(cluster.nodes, cluster.ranks_per_node):
        loops = [
            replace(loop, averaging=replace(loop.averaging, topology="hierarchical"))
            if loop.averaging.topology == "two_phase"
            else loop
            for loop in loops
        ]
    found += tuple(OuterMethod(loop=loop) for loop in loops)
    if any(len(shape) > 1 for shape in job.shapes):
        found += tuple(PowerSGDMethod(averaging=PowerSGD(rank=rank)) for rank in (1, 2, 4))
        muon = Muon(learning_rate=0.0)
        found += (MuonMethod(optimizer=muon), MuonMethod(optimizer=muon, replicated=True))
    return found


def advise(
    job: Job,
    cluster: Cluster,
    machine: Machine = CPU,
    *,
    methods: Sequence[Method] | None = None,
    warmup: float = 0.0,
    task: str | None = TASKS[0],
) -> Advice:
    """Compare methods of averaging, and recommend one.

    Parameters
    ----------
    job : Job
        The computation and the parameters of a step.
    cluster : Cluster
        The ranks and their links.
    machine : Machine
        How fast a rank encodes and decodes; by default the measured figures of one core.
    methods : sequence of Method, optional
        The methods to compare, with at least one all-reduce at full precision; by default those of `methods_for`.
    warmup : float
        The share of steps that are exact in a run that compresses, as in 1-bit Adam. PowerSGD, Muon, outer loops and
        lossless compressors have none.
    task : {"language model", "residual network", "adversarial network"} or None
        The task whose studies tell how many steps a method needs to a loss. None compares only seconds per step.

    Returns
    -------
    Advice
        The comparison, with a recommendation: the method whose run reaches a loss first, if this run is at least
        `WORTHWHILE` times as fast as with every all-reduce. A compressed ring must also be that much faster than every
        other compressed method. A method whose steps to a loss were not measured is charged `UNMEASURED` steps for each
        exact one.

    Examples
    --------
    >>> from qcomp.planning import Cluster, Job, Link, gpu
    >>> slow = Cluster(ranks=64, link=Link(bandwidth=1.25e9))
    >>> advise(Job(params=350_000_000, compute=0.3), slow, gpu(), warmup=0.15).best.time.method.label
    'sign:bucket_size=4096,scale=l1, two_phase'
    >>> fast = Cluster(ranks=8, link=Link(bandwidth=50e9, latency=5e-6))
    >>> advise(Job(params=25_000_000, compute=0.3), fast).compress
    False
    >>> across_the_world = Cluster(ranks=8, link=Link(bandwidth=125e3, latency=0.1))
    >>> advise(Job(params=350_000_000, compute=0.3), across_the_world).best.time.method.label[:14]
    'every 30 steps'
    """
    require_share(warmup)
    chosen = methods_for(job, cluster, machine) if methods is None else tuple(methods)
    times = [step_time(job, cluster, machine, method) for method in chosen]
    full = [t for t in times if t.method.is_allreduce and not t.method.half]
    if not full:
        raise ValueError(
            "methods has no ring or tree of full precision; expected at least one, to compare the other methods with"
        )
    plain = min(full, key=lambda t: t.seconds)

    def row(time: StepTime) -> Row:
        speedup = _ratio(plain.seconds, time.seconds)
        if time.method.is_allreduce:
            return Row(time, speedup, speedup, None, None, speedup)
        above, below = 0.0, 0.0
        if cluster.ranks > 1:
            above, below = pays_between(job, cluster, machine, time.method, plain.method)
        exact_steps = warmup if type(time.method) is Method and not _is_exact(time.method) else 0.0
        run = run_speedup(plain.seconds, time.seconds, exact_steps) if time.seconds else 1.0
        known = (
            None if task is None else evidence_of(time.method, warmup=warmup, task=task, ranks=cluster.ranks)
        )
        found = Row(time, speedup, run, below, known, run, above)
        return found if task is None else found._replace(loss_speedup=run / found.steps)

    rows = tuple(sorted(map(row, times), key=lambda r: (r.time.seconds, not r.time.method.is_allreduce)))
    best, reason = _recommend(rows, cluster, task)
    own = next(r for r in rows if r.time is plain)
    return Advice(job, cluster, machine, warmup, rows, own, best, reason, task)


def _ratio(plain: float, seconds: float) -> float:
    return plain / seconds if seconds else 1.0


def _merit(row: Row) -> float:
    """Return the score of a compressed method; methods that round in every hop must be clearly faster to win."""
    rounds_in_every_hop = topology(row.time.method.topology).roundings is None
    return row.loss_speedup / (WORTHWHILE if rounds_in_every_hop else 1.0)


def _recommend(rows: Sequence[Row], cluster: Cluster, task: str | None) -> tuple[Row, str]:
    exact = max((r for r in rows if r.time.method.is_allreduce), key=lambda r: r.run_speedup)
    compressed = [r for r in rows if not r.time.method.is_allreduce]
    if cluster.ranks == 1:
        return exact, "Do not compress: there is one rank, and nothing is sent."
    if not compressed:
        return exact, f"Nothing that compresses was compared; {exact.time.method.label} is the fastest."
    best = max(compressed, key=_merit)
    if best.loss_speedup < WORTHWHILE * exact.loss_speedup:  # if so, name a method whose steps are known
        best = max((row for row in compressed if row.measured), key=_merit, default=best)
    gain = best.loss_speedup / exact.loss_speedup
    name, other = best.time.method.label, exact.time.method.label
    run = "a run" if task is None else "a run to the same loss"
    charged = (
        "" if task is None or best.measured else f", if it needs {UNMEASURED:g} steps for each exact step, "
    )
    if gain >= WORTHWHILE:
        verb = "Exchange" if isinstance(best.time.method, OuterMethod) else "Compress with"
        shorter = f"a step {best.speedup / exact.speedup:.2f} times"
        if task is None or best.measured:
            return (
                best,
                f"{verb} {name}: {run} is {gain:.2f} times as fast as with {other}, {shorter}.",
            )
        return best, (
            f"Try {name}: {shorter} as fast as with {other}. How many steps it needs to reach the same loss is not "
            f"measured; if it needs {UNMEASURED:g} for each exact step, {run} is {gain:.2f} times as fast. "
            + _safe(compressed, exact)
        )
    if gain > 1:
        return exact, (
            f"Do not compress: {name}{charged or ' '}would make {run} {gain:.2f} times as fast as {other}; less than "
            f"{WORTHWHILE:g} may be the error of this prediction."
        )
    return exact, (
        f"Do not compress: the fastest compressed method, {name}, {charged[2:]}would make {run} {gain:.2f} times as "
        f"fast as {other}."
    )


def _safe(compressed: Sequence[Row], exact: Row) -> str:
    """Return a sentence about the fastest method whose steps to a loss are known."""
    known = [row for row in compressed if row.measured]
    best = max(known, key=_merit, default=None)
    if best is None or best.loss_speedup <= exact.loss_speedup:
        return f"Of those that were measured, {exact.time.method.label} is the fastest."
    gain = best.loss_speedup / exact.loss_speedup
    return f"Of those that were measured, {best.time.method.label} is the fastest, {gain:.2f} times."
