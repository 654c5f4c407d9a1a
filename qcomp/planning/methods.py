"""Methods that are more than a compressor in a topology: PowerSGD, Muon and outer loops.

The numbers of bytes come from the messages and payloads of the implementations themselves.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import NamedTuple

from qcomp.core.compressor import Compressor
from qcomp.core.compressors.identity import Identity
from qcomp.core.mean.averaging import PowerSGD
from qcomp.core.mean.costs import Cluster, Cost, to_all
from qcomp.core.mean.owned import OwnedMean
from qcomp.core.mean.powersgd import PowerSGDMean
from qcomp.core.mean.topologies.registry import AUTO, names, topology
from qcomp.core.optimizers.muon import Muon
from qcomp.core.outer.fragments import assign
from qcomp.core.outer.loop import OuterLoop
from qcomp.planning.cluster import Job
from qcomp.planning.machine import Machine
from qcomp.planning.model import ALLREDUCES, Method, StepTime, load

_Shapes = tuple[tuple[int, ...], ...]
_Messages = tuple[Sequence[int], Sequence[int]]

_KEPT = 16
"""The number of layouts to cache, since a comparison predicts each method for many links with the same messages."""
_EXACT_BYTES = 4
"""Bytes of an exact element."""
_OUTER_COPIES = 5
"""The cost of an outer round per element, in copies: outer gradient, momentum and update are read and written."""


@dataclass(frozen=True)
class PowerSGDMethod(Method):
    """PowerSGD, which sends two thin factors of each matrix. Needs ``Job.shapes`` and ``Machine.low_rank``.

    Parameters
    ----------
    averaging : PowerSGD
    compressor : Compressor
        Compresses the factors.
    """

    topology: str = field(default="two_phase", init=False)
    compressor: Compressor = Identity()
    half: bool = field(default=False, init=False)
    averaging: PowerSGD = field(default_factory=PowerSGD)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._mean  # noqa: B018 - raises if the compressor loses too much

    @cached_property
    def _mean(self) -> PowerSGDMean:
        return self.averaging.mean(self.compressor)

    @property
    def label(self) -> str:
        """Its name in tables."""
        return f"powersgd:rank={self.averaging.rank}, {self.compressor.spec}"

    @property
    def kind(self) -> str:
        """What it sends."""
        return self.label

    def predictable(self, machine: Machine) -> bool:
        """Return whether the machine has all figures that the method needs; see `Method.predictable`."""
        return machine.low_rank is not None

    def step(self, job: Job, cluster: Cluster, machine: Machine) -> StepTime:
        """Return the predicted time of a step; see `step_time`."""
        if machine.low_rank is None:
            raise ValueError("no speed of PowerSGD is known; measure it, or pass a Machine that has low_rank")
        matrices, elements, messages = _factors(self._mean, _shapes(job, self.label), cluster.ranks)
        exact = _EXACT_BYTES * (job.params - elements)
        exchanges = 2 if len(messages[0]) > 1 else 1  # with two ranks, factors have no owners
        wire, sent = _by_owners(messages, exact, cluster, exchanges=exchanges)
        speed = machine.low_rank
        codec = elements * (speed.fixed + self.averaging.rank * speed.column)
        codec += matrices * machine.tensor + 2 * exchanges * machine.call
        return StepTime(self, job.compute + codec + wire, job.compute, codec, wire, sent)


@dataclass(frozen=True)
class MuonMethod(Method):
    """Muon, computed by one owner for each matrix, or by every rank. Needs ``Job.shapes`` and ``Machine.product``.

    Unlike for other methods, the time includes the computation of the update, by Newton-Schulz iterations. All matrices
    of the job count as Muon's; all other tensors are averaged exactly.

    Parameters
    ----------
    optimizer : Muon
    replicated : bool
        Whether the exact gradients are all-reduced, and every rank orthogonalises all matrices.
    """

    topology: str = field(default="two_phase", init=False)
    compressor: Compressor = field(default=Identity(), init=False)
    half: bool = field(default=False, init=False)
    optimizer: Muon
    replicated: bool = False

    def __post_init__(self) -> None:
        if not self.replicated:
            object.__setattr__(self, "compressor", self.optimizer.compressor)
        super().__post_init__()

    @cached_property
    def _mean(self) -> OwnedMean:
        mean = self.optimizer.mean
        assert isinstance(mean, OwnedMean)
        return mean

    @property
    def label(self) -> str:
        """Its name in tables."""
        if self.replicated:
            return "muon, all-reduce"
        return f"muon, {self.optimizer.compressor.spec} and {self.optimizer.update_compressor.spec}"

    @property
    def kind(self) -> str:
        """What it sends."""
        return self.label

    @property
    def sends(self) -> tuple[Compressor, ...]:
        """The compressors whose speeds it needs."""
        return () if self.replicated else (self.optimizer.compressor, self.optimizer.update_compressor)

    def predictable(self, machine: Machine) -> bool:
        """Return whether the machine has all figures that the method needs; see `Method.predictable`."""
        return machine.product is not None and super().predictable(machine)

    def step(self, job: Job, cluster: Cluster, machine: Machine) -> StepTime:
        """Return the predicted time of a step; see `step_time`."""
        if machine.product is None:
            raise ValueError(
                "no speed of matrix products is known; measure it, or pass a Machine that has product"
            )
        owned = _owned(self._mean, _shapes(job, self.label), cluster.ranks)
        if self.replicated:
            plain = min(
                (Method(kind).step(job, cluster, machine) for kind in ALLREDUCES), key=lambda t: t.seconds
            )
            codec = owned.work * machine.product
            return plain._replace(method=self, seconds=plain.seconds + codec, codec=codec)
        exact = _EXACT_BYTES * (job.params - owned.elements)
        wire, sent = _by_owners(owned.messages, exact, cluster, exchanges=1)
        one, other = map(machine.speed, self.sends)
        codec = owned.elements * (one.encode + one.add + other.encode / cluster.ranks + other.decode)
        codec += owned.largest_work * machine.product + owned.matrices * machine.tensor + 2 * machine.call
        return StepTime(self, job.compute + codec + wire, job.compute, codec, wire, sent)


@dataclass(frozen=True)
class OuterMethod(Method):
    """An outer loop: ``every`` inner steps, then an exchange of their result; times and bytes are means per step.

    Parameters
    ----------
    loop : OuterLoop
        The loop. Its warm-up and its policies do not count. Exchanges overlap with ``delay`` steps, as in
        `qcomp.outer.Overlapped` and `qcomp.torch.OuterLoop`. Topology ``"auto"`` means the fastest one on this cluster.
    """

    topology: str = field(default="two_phase", init=False)
    compressor: Compressor = field(default=Identity(), init=False)
    half: bool = field(default=False, init=False)
    loop: OuterLoop

    def __post_init__(self) -> None:
        object.__setattr__(self, "compressor", self.loop.compressor)
        if self.loop.averaging.topology != AUTO:
            object.__setattr__(self, "topology", self.loop.averaging.topology)
        super().__post_init__()

    @property
    def label(self) -> str:
        """Its name in tables."""
        loop, low_rank = self.loop, self._low_rank
        sent = low_rank.label if low_rank else f"{loop.compressor.spec}, {loop.averaging.topology}"
        sent += ", divided by senders" if loop.averaging.divisor == "senders" else ""
        parts = f", {loop.fragments} fragments" if loop.fragments > 1 else ""
        delay = f", delay {loop.delay}" if loop.delay else ""
        return f"every {loop.every} steps: {sent}{parts}{delay}"

    @property
    def kind(self) -> str:
        """What it sends."""
        return self.label

    def predictable(self, machine: Machine) -> bool:
        """Return whether the machine has all figures that the method needs; see `Method.predictable`."""
        return self._low_rank.predictable(machine) if self._low_rank else super().predictable(machine)

    def step(self, job: Job, cluster: Cluster, machine: Machine) -> StepTime:
        """Return the predicted time of a step; see `step_time`."""
        loop = self.loop
        fragments = self._fragments(job, cluster, machine)
        codec = sum(cost.codec for cost in fragments) + job.tensors * machine.tensor
        codec += _OUTER_COPIES * job.params * machine.copy
        wire, sent = sum(cost.wire for cost in fragments), sum(cost.sent for cost in fragments)
        # A fragment travels during the steps of its delay; only one fragment uses the link at a time.
        waiting = sum(max(0.0, cost.wire - loop.delay * job.compute) for cost in fragments)
        codec, wire, sent, waiting = (total / loop.every for total in (codec, wire, sent, waiting))
        seconds = max(job.compute + codec + waiting, wire)
        return StepTime(self, seconds, job.compute, codec, wire, sent)

    @property
    def _low_rank(self) -> PowerSGDMethod | None:
        """The method of the outer exchange if it uses PowerSGD, else None."""
        averaging = self.loop.averaging
        if isinstance(averaging, PowerSGD):
            return PowerSGDMethod(compressor=self.loop.compressor, averaging=averaging)
        return None

    def _fragments(self, job: Job, cluster: Cluster, machine: Machine) -> Sequence[Cost | StepTime]:
        """Return the cost of each fragment's exchange."""
        pieces, asked, low_rank = self.loop.fragments, self.loop.averaging.topology, self._low_rank
        if low_rank:
            shapes = _shapes(job, self.label)
            if pieces > len(shapes):
                raise ValueError(
                    f"fragments is {pieces}; expected at most one for each of {len(shapes)} tensors"
                )
            of_each = [
                tuple(shapes[i] for i in members)
                for members in assign([math.prod(shape) for shape in shapes], pieces)
            ]
            jobs = [Job(sum(map(math.prod, own)), job.compute, shapes=own) for own in of_each]
            return [low_rank.step(one, cluster, machine) for one in jobs]
        part = load(-(-job.params // pieces), job, self.loop.compressor, machine)
        suiting = [name for name in names() if topology(name).suits(cluster.nodes, cluster.ranks_per_node)]
        tried = suiting if asked == AUTO else [asked]
        costs = [topology(name).cost(part, cluster) for name in tried]
        return [min(costs, key=lambda cost: cost.seconds)] * pieces


def _shapes(job: Job, label: str) -> _Shapes:
    if not job.shapes:
        raise ValueError(
            f"shapes is {job.shapes!r}; expected the shapes of all parameters, since {label} depends on them"
        )
    return job.shapes


@lru_cache(_KEPT)
def _factors(mean: PowerSGDMean, shapes: _Shapes, ranks: int) -> tuple[int, int, _Messages]:
    """Return the number of matrices that PowerSGD approximates, their elements, and the bytes of its messages."""
    matrices = [shape for shape in shapes if not mean.keeps_exact(shape)]
    return len(matrices), sum(map(math.prod, matrices)), mean.message_sizes(shapes, ranks)


class _Owned(NamedTuple):
    """The matrices that ranks own."""

    matrices: int
    elements: int
    messages: _Messages
    work: int
    """The cost of the work on all matrices."""
    largest_work: int
    """The cost of the work of the owner that has the most work."""


@lru_cache(_KEPT)
def _owned(mean: OwnedMean, shapes: _Shapes, ranks: int) -> _Owned:
    """Return the facts that depend only on the shapes and the number of ranks."""
    matrices = [shape for shape in shapes if len(shape) > 1 and math.prod(shape) > 0]
    work = mean.work(matrices, ranks)
    elements, messages = sum(map(math.prod, matrices)), mean.message_sizes(matrices, ranks)
    return _Owned(len(matrices), elements, messages, sum(work), max(work, default=0))


def _by_owners(messages: _Messages, exact: int, cluster: Cluster, *, exchanges: int) -> tuple[float, float]:
    """Return the seconds of the exchanges to and from owners, and the bytes per rank.

    ``messages`` has the bytes of each owner's message, for two kinds of messages; without owners, each kind is one
    message to all ranks. ``exact`` is the bytes of exact tensors, which travel in the first two exchanges. There are
    one or two ``exchanges`` of each kind.
    """
    ranks = cluster.ranks
    beside = (ranks - 1) / ranks * exact
    wire, sent = 0.0, 2 * beside
    for number, sizes in enumerate(messages):
        total, largest, least = sum(sizes), max(sizes), min(sizes)
        own = (ranks - 1) / len(sizes) * total
        # The link of the largest owner carries its part from or to all other ranks; the link of the smallest owner
        # carries all other parts.
        worst = max((ranks - 1) * largest, total - least)
        for exchange in range(exchanges):
            more = beside if number * exchanges + exchange < 2 else 0.0
            wire += to_all((worst + more) / (ranks - 1), cluster)
            sent += own
    return wire, sent
