"""`Average`, the means that a step requests, and `Compressing`, which says what these compress, and how."""

import math
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import lru_cache
from itertools import zip_longest
from typing import Any, NamedTuple

from qcomp.core.checkpoint.schema import shown
from qcomp.core.compressor import Compressor
from qcomp.core.kernels import Blend
from qcomp.core.mean.compressed_mean import EXACT, CompressedMean, MeanState, Terms
from qcomp.core.mean.stages import Stages, fuse, pipeline
from qcomp.core.mean.topologies.base import Averaged
from qcomp.core.mean.topologies.registry import AUTO
from qcomp.core.mean.topologies.registry import names as topology_names
from qcomp.core.numeric.arrays import Array
from qcomp.core.numeric.random import Key
from qcomp.core.policies.by_name import CompressorPolicy
from qcomp.core.policies.exact_below import ExactPolicy, Tensor
from qcomp.core.reporting import warn_caller
from qcomp.core.state import OptimizerState

__all__ = ["EXACT", "Average", "AveragePart", "Compressing", "Means"]


class AveragePart(NamedTuple):
    """Tensors that are averaged in the same way."""

    mean: CompressedMean
    tensors: Sequence[int]
    """The tensors' indices among the parameters. Indices beyond the parameters belong to further values that are
    averaged."""
    values: Sequence[Array]
    """The values to average, perhaps blended into momenta first. Without blends, the exchange may overwrite the values,
    unless `Average.own` is set."""
    state: MeanState
    terms: Terms = Terms()
    """The key, the blends and the whiteners; `Average` sets the other options."""


class Means(NamedTuple):
    """The answer to an `Average`."""

    values: tuple[Array, ...]
    """The means, equal on all ranks: first of the tensors, in the order of the parameters, then of any further
    values."""
    exchange: MeanState
    """The residuals after the exchange."""
    own: tuple[Array, ...] = ()
    """This rank's own values, from `Average.own`."""
    donate: bool = False
    """Whether `Optimizer.apply` may overwrite the parameters and the state that it gets."""
    left_out: frozenset[int] = frozenset()
    """The tensors of which no rank has a gradient; `Optimizer.finish` leaves them as they are."""


class Average(NamedTuple):
    """The averages over the ranks that a step needs, exact or compressed, and how to make them."""

    parts: tuple[AveragePart, ...]
    exchange: MeanState
    """The residuals, which the compressed part changes; without a compressed part they stay as they are."""
    own: tuple[Array, ...] = ()
    """This rank's own values, for `Optimizer.apply`; the parts do not overwrite them. Without parts, nothing is sent,
    and these values are the means."""
    overwrite: bool = False
    """Whether the means may overwrite the values, see `CompressedMean.stages`."""
    of_gradients: bool = False
    """Whether the values are gradients: then a caller may change the means, for instance clip them, before `apply`."""
    at_once: bool = False
    """Whether large parts have only one round, see `Terms`."""

    def stages(self) -> Stages[Means]:
        """Average all parts side by side; see `CompressedMean.stages`.

        Sends each peer one message in each phase. Large parts send one in each round, see `qcomp.core.mean.rounds`.
        """
        if not self.parts:
            return Means(self.own, self.exchange, self.own)
        begun = []
        for p in self.parts:
            donate = not (p.terms.blends or self.own or self.overwrite)
            terms = p.terms._replace(donate=donate, overwrite=self.overwrite, at_once=self.at_once)
            begun.append(p.mean.begin(p.values, p.state, terms))
        if len(begun) == 1:
            results = [(yield from pipeline(begun[0].rounds))]
        else:
            results = yield from _side_by_side([computation.rounds for computation in begun])
        values: dict[int, Array] = {}
        exchange = self.exchange
        for part, computation, of_rounds in zip(self.parts, begun, results, strict=True):
            means, state = computation.finish(of_rounds)
            values.update(zip(part.tensors, means, strict=True))
            if part.state is self.exchange:
                exchange = state
        return Means(tuple(map(values.__getitem__, range(len(values)))), exchange, self.own)


def _side_by_side(rounds: Sequence[Sequence[Stages[Averaged]]]) -> Stages[list[list[Averaged]]]:
    """Run the rounds of several means: the first rounds share messages, then the second ones, and so on."""
    fused = [fuse([each for each in of_index if each]) for of_index in zip_longest(*rounds)]
    answers = list(map(iter, (yield from pipeline(fused))))
    return [[next(of_round) for of_round in answers[: len(of_mean)]] for of_mean in rounds]


@dataclass(frozen=True)
class Compressing:
    """What an optimizer compresses, and how; makes the `Average` of a step.

    ``mean`` averages the compressed tensors, and ``plain`` the exact tensors. The policy ``exact`` selects the tensors
    that stay exact; None compresses all. The policy ``compressors`` returns a compressor for each tensor, or None for a
    tensor that stays exact; without this policy, all tensors use the compressor of ``mean``. If ``unbiased`` is set,
    all compressors must be unbiased.
    """

    mean: CompressedMean
    exact: ExactPolicy | None = None
    compressors: CompressorPolicy | None = None
    unbiased: bool = False
    plain: CompressedMean = EXACT

    def __post_init__(self) -> None:
        self._require_suitable(self.mean.compressors)
        for name in ("exact", "compressors"):
            policy = getattr(self, name)
            if policy is not None and not callable(policy):
                raise TypeError(
                    f"{name} is {policy!r}; expected a policy, which is a function of the tensors, or None"
                )

    def mean_of(self, state: OptimizerState) -> CompressedMean:
        """Return the mean of the compressed tensors, with the compressors and the topology chosen for a state."""
        mean = self.mean
        if mean.topology == AUTO:
            mean = mean.within(state.exchange.topology)
        return mean.around(state.compressors) if state.compressors else mean

    def choose(self, state: OptimizerState, params: Sequence[Array], optimizer: str) -> OptimizerState:
        """Return a first state with the policies' choice of exact tensors and compressors; warn if all are exact."""
        tensors = [
            Tensor(name, tuple(p.shape), math.prod(p.shape))
            for name, p in zip(state.names, params, strict=True)
        ]
        exact = (False,) * len(tensors) if self.exact is None else _flags(self.exact, tensors)
        compressors: tuple[Compressor, ...] = ()
        chosen: tuple[Compressor | None, ...] = ()
        if self.compressors is not None:
            chosen = _listed(self.compressors(tensors))
            if len(chosen) != len(tensors) or not all(c is None or isinstance(c, Compressor) for c in chosen):
                raise TypeError(
                    f"compressors chose {chosen!r}; expected a qcomp.Compressor or None for each of "
                    f"{len(tensors)} tensors"
                )
            exact = tuple(is_exact or c is None for is_exact, c in zip(exact, chosen, strict=True))
        policy_keeps_all = all(exact)
        exact = tuple(e or self.mean.keeps_exact(t.shape) for e, t in zip(exact, tensors, strict=True))
        if chosen:
            compressors = tuple(c for is_exact, c in zip(exact, chosen, strict=True) if c and not is_exact)
            self._require_suitable(compressors)
        if all(exact):
            policies = [
                f"{name}={policy!r}"
                for name in ("exact", "compressors")
                if (policy := getattr(self, name)) is not None
            ]
            cures = ["pass exact=None to compress all"] if self.exact is not None else []
            if not policy_keeps_all:
                policies.append("PowerSGD")
                cures.append("give PowerSGD a smaller rank or min_compression")
            warn_caller(
                f"{optimizer} compresses nothing: all {len(params)} tensors stay exact by {' and '.join(policies)} "
                f"(the largest has {max(t.size for t in tensors)} elements)"
                + "".join(f"; {cure}" for cure in cures)
            )
        return state._replace(exact=exact, compressors=compressors)

    def begin(self, state: OptimizerState, params: Sequence[Array], optimizer: str) -> OptimizerState:
        """Return a first state with residuals of zero, without a warm-up; see `choose`."""
        state = self.choose(state, params, optimizer)
        return state._replace(exchange=self.zero_residuals(params, state))

    def zero_residuals(self, params: Sequence[Array], state: OptimizerState) -> MeanState:
        """Return residuals of zero for the tensors that are compressed."""
        compressed = [p for p, is_exact in zip(params, state.exact, strict=True) if not is_exact]
        return self.mean_of(state).zeros(
            compressed, rank=state.rank, size=state.size, nodes=state.exchange.nodes
        )

    def on_nodes(
        self, state: OptimizerState, params: Sequence[Array], nodes: tuple[int, ...]
    ) -> OptimizerState:
        """Return a first state with the node of each rank, and the topology that is best for these nodes."""
        on_nodes = state._replace(exchange=state.exchange._replace(nodes=nodes, topology=AUTO))
        compressed = [tuple(p.shape) for p, exact in zip(params, state.exact, strict=False) if not exact]
        topology = self.mean_of(on_nodes).chosen(compressed, state.size, nodes).topology
        return self.in_topology(topology, on_nodes, params)

    def in_topology(self, topology: str, state: OptimizerState, params: Sequence[Array]) -> OptimizerState:
        """Return a first state in a topology, with the residuals that a rank keeps in this topology."""
        if topology not in topology_names():
            raise ValueError(
                f"the state has topology {shown(topology)}; expected one that this release knows"
            )
        state = state._replace(exchange=state.exchange._replace(topology=topology))
        if state.exchange.nodes and state.exchange.worker:
            state = state._replace(exchange=self.zero_residuals(params, state))
        return state

    def average(
        self,
        values: Sequence[Array],
        state: OptimizerState,
        key: Key,
        blends: Sequence[Blend] = (),
        whiteners: tuple[Array, ...] = (),
    ) -> Average:
        """Ask for the mean of some values, or of the momenta into which they are blended.

        Exact tensors are averaged exactly, and the others compressed. Each compressed tensor may have a whitener.
        """
        exact, compressed = _numbers_of(state.exact)
        parts = []
        if exact:
            chosen = [values[i] for i in exact]
            parts.append(self._exact_part(exact, chosen, state, [blends[i] for i in exact] if blends else ()))
        if compressed:
            terms = Terms(key, blends=[blends[i] for i in compressed] if blends else (), whiteners=whiteners)
            chosen = [values[i] for i in compressed]
            parts.append(AveragePart(self.mean_of(state), compressed, chosen, state.exchange, terms))
        return Average(tuple(parts), state.exchange)

    def exactly(self, values: Sequence[Array], state: OptimizerState) -> Average:
        """Ask for the exact mean of all values."""
        return self.beside(Average((), state.exchange), values, state)

    def beside(self, average: Average, exact: Sequence[Array], state: OptimizerState) -> Average:
        """Return an average with further values, whose exact means follow the other means."""
        first = sum(len(part.tensors) for part in average.parts)
        part = self._exact_part(range(first, first + len(exact)), exact, state)
        return average._replace(parts=(*average.parts, part))

    def _exact_part(
        self,
        tensors: Sequence[int],
        values: Sequence[Array],
        state: OptimizerState,
        blends: Sequence[Blend] = (),
    ) -> AveragePart:
        """Return a part that averages tensors exactly; after the warm-up, in the compressed mean's topology."""
        nothing = MeanState(state.rank, state.size, (), (), nodes=state.exchange.nodes)
        topology = self.plain.topology if state.stage == "warmup" else self.mean_of(state).topology
        return AveragePart(self.plain.within(topology), tensors, values, nothing, Terms(blends=blends))

    def _require_suitable(self, compressors: Sequence[Compressor]) -> None:
        """Raise ValueError if compressors must be unbiased, and one is not."""
        for compressor in compressors:
            if self.unbiased and not compressor.traits.unbiased:
                raise ValueError(f"compressor is {compressor.spec}; expected an unbiased one")


@lru_cache(256)
def _numbers_of(exact: tuple[bool, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the numbers of the exact tensors, and the numbers of the compressed tensors."""
    numbers = range(len(exact))
    return tuple(i for i in numbers if exact[i]), tuple(i for i in numbers if not exact[i])


def _listed(given: Any) -> tuple[Any, ...]:
    """Return a policy's choices as a tuple, which is empty if they have no order."""
    return tuple(given) if isinstance(given, Iterable) and not isinstance(given, Mapping | Set) else ()


def _flags(exact: ExactPolicy, tensors: Sequence[Tensor]) -> tuple[bool, ...]:
    """Return the choices of a policy; raise TypeError unless they are one truth value for each tensor."""
    given = exact(tensors)
    flags = _listed(given)
    if len(flags) != len(tensors) or any(type(f).__name__ not in ("bool", "bool_", "int") for f in flags):
        raise TypeError(f"exact chose {given!r}; expected True or False for each of {len(tensors)} tensors")
    return tuple(map(bool, flags))
