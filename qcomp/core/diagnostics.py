"""Measures a run with compression: residuals, bytes, angles between compressed and exact means, unequal replicas."""

import copy
import json
import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from qcomp.core import primitives
from qcomp.core.checkpoint.format import some
from qcomp.core.handshake import gather_texts
from qcomp.core.mean.chunks import Segment
from qcomp.core.mean.compressed_mean import MeanState
from qcomp.core.mean.stages import (
    AllGather,
    AllToAll,
    Exchange,
    Stages,
    Transport,
    drive,
    owned,
    require_rank,
    through,
)
from qcomp.core.numeric.arrays import Array, array_namespace, from_host_bytes, host_bytes, to_compute_dtype
from qcomp.core.numeric.sums import sum_of_squares, total
from qcomp.core.optimizers.agreement import digests, shared_by_ranks
from qcomp.core.optimizers.base import Optimizer
from qcomp.core.optimizers.compression import EXACT, Average, AveragePart, Means
from qcomp.core.optimizers.replica import owner_of
from qcomp.core.optimizers.tensors import as_given, as_tensors
from qcomp.core.reporting import name_ranks, warn_caller
from qcomp.core.state import OptimizerState


class Facts(NamedTuple):
    """Measurements of one rank in a step; NaN where nothing was measured."""

    worker: float
    server: float
    cosine: float
    direction: float
    bytes_sent: float


class _LastSteps(NamedTuple):
    """The samples of a rank's last steps."""

    step: int
    """The last of these steps."""
    means: tuple[Array, ...]
    exact: tuple[Array, ...]

    def and_then(self, step: int, mean: Array, exact: Array, most: int) -> "_LastSteps":
        """Add the samples of a step, and return the last ``most`` steps; a gap between steps drops the old samples."""
        if step != self.step + 1 or mean.shape != self.means[-1].shape:
            return _LastSteps(step, (mean,), (exact,))
        return _LastSteps(step, (*self.means, mean)[-most:], (*self.exact, exact)[-most:])

    def direction(self) -> float:
        """Return the cosine between the summed compressed means and the summed exact means."""
        return _cosine(sum(self.means[1:], self.means[0]), sum(self.exact[1:], self.exact[0]))


@dataclass(frozen=True)
class Diagnostics:
    """Makes the steps of an optimizer, and measures them.

    The step gives the same results as the optimizer's own, bit for bit. The report is a dict of floats, equal on all
    ranks. It contains the following entries, as far as they apply to the step:

    - ``bytes_sent``: bytes sent by the rank that sent most, without the bytes of the report; ``bits_per_element``: bits
      sent per parameter element, the mean over the ranks.
    - ``direction``: the cosine between the sum of the last ``direction_steps`` compressed means and the sum of the
      exact means, once that many consecutive steps have been measured. Feedback adds to each step what the last one
      lost, so the sums show where training goes. In a healthy run, ``direction`` is near 1.
    - ``cosine``: the cosine between this step's compressed mean and its exact mean. With few bits it is far below 1
      even in a healthy run, and for 1-bit Adam it may be below 0: where momenta are small within their bucket, one bit
      makes them as large as the others, and their sign changes in every step.
    - ``worker_residual``: |e_i| / |p_i|, the norm of a rank's residual over the norm of its vector before feedback, as
      the mean over the ranks; ``worker_residual_worst``: the maximum. Bounded in a healthy run: see `Traits`.
    - ``server_residual`` and ``server_residual_worst``: |e_s| / |mean p| over the chunk that a rank serves; mean and
      maximum over the servers.
    - ``variance_ratio``: from a `VarianceWatch`, once it has measured.
    - ``drifted_ranks``: in a step that compares replicas, the number of ranks whose parameters, moments, variances or
      counters differ in any bit from the most frequent ones. If there are any, all ranks warn, and name the ranks
      and the values that differ. Residuals belong to one rank, and are not compared.

    Parameters
    ----------
    optimizer : Optimizer
        The optimizer whose steps are measured.
    sample : int
        The largest number of elements to sample from the compressed tensors, equally spaced. The spacing is odd, so
        that the samples are not confined to a few columns of a matrix.
    replicas_every : int, optional
        Number of steps between comparisons of parameters and states across ranks; None never compares. Ranks are not
        compared while an optimizer lets them make local steps.
    direction_steps : int
        Number of steps that ``direction`` sums. Best is 1 / (1 - b1), the averaging length of the momentum.
        ``direction`` is reported once these diagnostics have made that many consecutive steps.

    Notes
    -----
    A step that compresses sends 2 (N - 1) / N * 4 * sample bytes more, and every step 40 bytes to every rank. A
    comparison reads all parameters and shared arrays of the state on the host, and sends about 100 bytes for each of
    them to every rank. In a hierarchical mean p_i is the rank's own contribution to its node's sum.

    Examples
    --------
    >>> import numpy as np, qcomp
    >>> watched = qcomp.Diagnostics(qcomp.CompressedSGD(learning_rate=0.1, exact=None), replicas_every=2)
    >>> def rank_main(comm):
    ...     params = np.linspace(-1, 1, 100)
    ...     state = watched.optimizer.init(params, comm)
    ...     for _ in range(3):
    ...         params, state, report = watched.step(params, params + comm.rank, state, comm)
    ...     return report
    >>> first, second = qcomp.comm.run_local(2, rank_main)
    >>> first == second, first["cosine"] > 0.9, first["drifted_ranks"]
    (True, True, 0.0)
    """

    optimizer: Optimizer
    sample: int = 4096
    replicas_every: int | None = 100
    direction_steps: int = 10
    _seen: dict[int, "_LastSteps"] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not isinstance(self.optimizer, Optimizer):
            raise TypeError(f"optimizer is {self.optimizer!r}; expected a qcomp.Optimizer")
        for name in ("sample", "replicas_every", "direction_steps"):
            value = getattr(self, name)
            if value is None and name == "replicas_every":
                continue
            if type(value) is not int or value < 1:
                raise ValueError(f"{name} is {value!r}; expected an integer of at least 1")

    def step(
        self, params: Any, grads: Any, state: OptimizerState, comm: Transport
    ) -> tuple[Any, OptimizerState, dict[str, float]]:
        """Make one step over a communicator, as `Optimizer.step` does, and also return the report.

        Parameters
        ----------
        params, grads : array or sequence of arrays
            As for `Optimizer.step`.
        state : OptimizerState
            From ``optimizer.init`` or the last step.
        comm : Communicator
            As for `Optimizer.step`.
        """
        require_rank(state, comm)
        return drive(owned(self.stages(params, grads, state), owner_of(self.optimizer, state)), comm)

    def stages(
        self, params: Any, grads: Any, state: OptimizerState
    ) -> Stages[tuple[Any, OptimizerState, dict[str, float]]]:
        """Make one step as a generator of pure stages, and also return the report.

        Parameters
        ----------
        params, grads : array or sequence of arrays
            As for `Optimizer.step`.
        state : OptimizerState
            From ``optimizer.init`` or the last step.
        """
        tensors = as_tensors(params, "params")
        drifted: dict[str, float] = {}
        if self._compares(state):
            drifted = yield from _compare(self.optimizer, tensors, state)
        notes = Notes(self.sample)
        (new_params, new_state), sent = yield from counted(
            _watched(self.optimizer, notes).stages(tensors, grads, state), state.rank
        )
        facts = yield from notes.facts(state, sent)
        facts = facts._replace(direction=self._direction(notes, state))
        arrived = yield AllGather(message_of(facts, tensors[0]), (8 * len(facts),) * state.size)
        by_rank = [Facts(*struct.unpack(f"<{len(facts)}d", host_bytes(part))) for part in arrived]
        report = report_of(by_rank, sum(math.prod(t.shape) for t in tensors)) | drifted
        ratio = new_state.numbers.get("variance_ratio", math.nan)
        if not math.isnan(ratio):
            report["variance_ratio"] = ratio
        return as_given(new_params, params), new_state, report

    def _direction(self, notes: "Notes", state: OptimizerState) -> float:
        """Return the direction of the last steps; NaN before there are enough."""
        if notes.means is None or notes.exact is None:
            return math.nan
        before = self._seen.get(state.rank, _LastSteps(-1, (notes.means[:0],), ()))
        seen = before.and_then(state.step, notes.means, notes.exact, self.direction_steps)
        self._seen[state.rank] = seen
        return seen.direction() if len(seen.means) == self.direction_steps else math.nan

    def _compares(self, state: OptimizerState) -> bool:
        """Return whether replicas are compared before this step, the same on all ranks."""
        if self.replicas_every is None or "momentum" in self.optimizer.own_kinds(state.stage):
            return False
        return state.step % self.replicas_every == 0


class _Sample:
    """Equally spaced elements of some tensors, seen as one vector."""

    def __init__(self, sizes: Sequence[int], most: int) -> None:
        self.offsets = [sum(sizes[:index]) for index in range(len(sizes))]
        self.stride = -(-sum(sizes) // most)
        self.stride += self.stride % 2 == 0

    def of(self, x: Array, tensor: int, start: int = 0) -> Array:
        """Return the sampled elements of a tensor, or of its part from ``start`` on."""
        flat = array_namespace(x).reshape(x, (-1,))
        first = -(self.offsets[tensor] + start) % self.stride
        return flat[min(first, flat.shape[0]) :: self.stride]

    def within(self, part: Segment) -> slice:
        """Return the elements of the whole sample that lie in a part of one tensor."""
        offset = self.offsets[part.tensor]
        return slice(-(-(offset + part.start) // self.stride), -(-(offset + part.stop) // self.stride))


class Notes:
    """What a step records about its compressed part."""

    def __init__(self, most: int, *, exact: bool = False) -> None:
        self.most = most
        self.of_exact = exact
        """Whether to record an exact part if nothing is compressed."""
        self.part: AveragePart | None = None
        self.means: Array | None = None
        self.exact: Array | None = None
        self.exchange: MeanState | None = None

    def before(self, average: Average) -> None:
        """Record the values before compression, which may overwrite their buffers."""
        compressed = [p for p in average.parts if p.values and p.state is average.exchange]
        chosen = [p for p in compressed if not (p.mean.lossless or p.mean.owned_kinds)]
        if self.of_exact:
            chosen = chosen or list(average.parts)
        if not chosen:
            return
        self.part = part = chosen[0]
        self.sample = _Sample([math.prod(v.shape) for v in part.values], self.most)
        pieces = [to_compute_dtype(self.sample.of(v, i)) for i, v in enumerate(part.values)]
        if part.terms.blends:
            olds = [self.sample.of(b.m, i) for i, b in enumerate(part.terms.blends)]
            pieces = [
                primitives.blended(b._replace(m=m), g) if g.shape[0] else m
                for m, g, b in zip(olds, pieces, part.terms.blends, strict=True)
            ]
        self.signal = array_namespace(pieces[0]).concat(pieces)

    def after(self, means: Means) -> None:
        """Record the compressed mean and its residuals."""
        if self.part is not None:
            pieces = [self.sample.of(means.values[t], i) for i, t in enumerate(self.part.tensors)]
            self.means = array_namespace(pieces[0]).concat(pieces)
            self.exchange = means.exchange

    def facts(self, state: OptimizerState, sent: int) -> Stages[Facts]:
        """Exchange the exact mean of the sample, and return this rank's measurements."""
        if self.part is None or self.means is None or self.exchange is None or not self.means.shape[0]:
            return Facts(math.nan, math.nan, math.nan, math.nan, sent)
        nothing = MeanState(state.rank, state.size, (), ())
        exact, _ = yield from EXACT.stages(self.signal, nothing)
        self.exact = exact
        worker = server = math.nan
        kept = self.exchange
        if kept.worker and self.part.mean.feedback:
            own, served = self.part.mean.layout(
                kept.shapes, rank=kept.rank, size=kept.size, nodes=kept.nodes
            ).residuals
            worker = self._ratio(kept.worker, own, self.signal)
            if not self.part.mean.low_rank:  # its server keeps factors instead of residuals
                server = self._ratio(kept.server, served, exact)
        return Facts(worker, server, _cosine(self.means, exact), math.nan, sent)

    def _ratio(self, residuals: Sequence[Array], parts: Sequence[Segment], signal: Array) -> float:
        """Return the norm of residuals over the norm of the signal at the same elements; NaN without elements."""
        pairs = [(r, p) for r, p in zip(residuals, parts, strict=True) if p.size]
        if not pairs:
            return math.nan
        owed = math.fsum(sum_of_squares(self.sample.of(r, p.tensor, p.start)) for r, p in pairs)
        whole = math.fsum(sum_of_squares(signal[self.sample.within(p)]) for _, p in pairs)
        return math.sqrt(owed / whole) if whole else math.inf if owed else 0.0


def _watched(optimizer: Optimizer, notes: Notes) -> Optimizer:
    """Return an optimizer that makes the same steps, and records the values before and after each exchange."""
    twin = copy.copy(optimizer)

    def prepare(grads: Any, state: OptimizerState, *, scale: float = 1.0) -> Average:
        average = optimizer.prepare(grads, state, scale=scale)
        notes.before(average)
        return average

    def apply(params: Any, means: Means, state: OptimizerState) -> tuple[Any, OptimizerState]:
        notes.after(means)
        return optimizer.apply(params, means, state)

    object.__setattr__(twin, "prepare", prepare)  # the rest of `stages` stays unchanged
    object.__setattr__(twin, "apply", apply)
    return twin


def counted(stages: "Stages[Any]", rank: int) -> "Stages[tuple[Any, int]]":
    """Run stages and return their result, and the number of bytes sent to other ranks."""
    sent = 0

    def ask(request: Exchange) -> Stages[Sequence[Array]]:
        nonlocal sent
        if isinstance(request, AllToAll):
            sent += sum(int(m.shape[0]) for peer, m in enumerate(request.send) if peer != rank)
        else:
            sent += int(request.send.shape[0]) * (len(request.receive) - 1)
        return (yield request)

    return (yield from through(stages, ask)), sent


def _compare(
    optimizer: Optimizer, params: Sequence[Array], state: OptimizerState
) -> Stages[dict[str, float]]:
    """Return how many ranks differ from the most frequent values where all must be equal, and warn if any do."""
    own = json.dumps([*digests(state.names, params), *sorted(shared_by_ranks(optimizer, state).items())])
    held = yield from gather_texts(own, state.size, params[0])
    usual = max(held, key=held.count)
    drifted = [rank for rank, found in enumerate(held) if found != usual]
    if drifted:
        entries = [[tuple(entry) for entry in json.loads(found)] for found in held]
        common = set(entries[0]).intersection(*entries)
        differing = dict.fromkeys(
            name for found in entries for name, value in found if (name, value) not in common
        )
        same = [rank for rank in range(state.size) if rank not in drifted]
        warn_caller(
            f"replicas have drifted apart: after step {state.step}, {name_ranks(drifted)} and {name_ranks(same)} "
            f"have different values of {some(list(differing))}"
        )
    return {"drifted_ranks": float(len(drifted))}


def report_of(by_rank: Sequence[Facts], elements: int) -> dict[str, float]:
    """Return the report over all ranks."""
    sent = [facts.bytes_sent for facts in by_rank]
    report = {
        "bytes_sent": max(sent),
        "bits_per_element": 8 * math.fsum(sent) / len(sent) / max(1, elements),
    }
    for name in (
        "cosine",
        "direction",
    ):  # from one rank, since the ranks' libraries may differ in a bit
        value = getattr(by_rank[0], name)
        if not math.isnan(value):
            report[name] = value
    for name in ("worker", "server"):
        found = [value for value in (getattr(facts, name) for facts in by_rank) if not math.isnan(value)]
        if found:
            report[f"{name}_residual"] = math.fsum(found) / len(found)
            report[f"{name}_residual_worst"] = max(found)
    return report


def _cosine(x: Array, y: Array) -> float:
    """Return the cosine of two vectors; 1 if both are zero, 0 if only one is."""
    norms = [math.sqrt(sum_of_squares(v)) for v in (x, y)]
    if not all(norms):
        return float(norms[0] == norms[1])
    cosine = float(total((x / norms[0]) * (y / norms[1])))
    return min(1.0, max(-1.0, cosine))


def message_of(facts: Sequence[float], like: Array) -> Array:
    """Return numbers as a buffer."""
    return from_host_bytes(struct.pack(f"<{len(facts)}d", *facts), like)
