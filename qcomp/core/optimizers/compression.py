"""What the optimizers with a compressed stage share: how they compress, and which tensors they leave exact."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from qcomp.core import primitives
from qcomp.core.compressor import Compressor
from qcomp.core.kernels import Blend
from qcomp.core.mean.compressed_mean import CompressedMean, MeanState
from qcomp.core.mean.costs import Link
from qcomp.core.mean.tensorwise import TensorwiseMean
from qcomp.core.mean.topologies.choice import ETHERNET
from qcomp.core.mean.topologies.registry import AUTO
from qcomp.core.numeric.arrays import Array
from qcomp.core.optimizers.average import Average, Means, Part
from qcomp.core.optimizers.base import Optimizer
from qcomp.core.policies.by_name import CompressorPolicy
from qcomp.core.policies.exact_below import ExactBelow, ExactPolicy, Tensor
from qcomp.core.reporting import warn_caller
from qcomp.core.state import OptimizerState

__all__ = ["CompressingOptimizer"]

_RATE = "feedback_rate"


@dataclass(frozen=True, kw_only=True)
class CompressingOptimizer(Optimizer):
    """Base of the optimizers that compress.

    Parameters
    ----------
    compressor : Compressor
        Of what is exchanged in the compressed stage.
    feedback : bool
        Whether what compression loses is fed back, on workers and servers.
    topology : {"two_phase", "all_gather", "hierarchical", "ring", "auto"}
        See `CompressedMean`. What ``"auto"`` chooses is in the state, and in checkpoints.
    link : Link
        Between nodes, for ``"auto"``; see `CompressedMean`.
    exact : callable or None
        Which tensors stay exact, see `ExactBelow`; None compresses everything.
    compressors : callable, optional
        A compressor for each tensor in place of ``compressor``, or None for tensors that stay exact, which those of
        ``exact`` do in any case; see `ByName`.
    rescale_feedback : bool
        Whether residuals are multiplied with the ratio of the old rate to the new one when the learning rate changes,
        so that what is owed of an old step is paid with the rate of that step. Then x - rate (mean_i e_i + e_s) is
        what SGD without momentum has without compression, for any schedule; without it, only while the rate stays. A
        step of rate 0 leaves the residuals as they are. Takes a pass over them whenever the rate changes. Not the
        default, since residuals grow when the rate falls: on quadratics with schedules that fall it was better for
        top-k without momentum, no better for signs, and with momentum and a rate that goes up and down by ten signs
        diverged.
    tensorwise : bool
        Whether the mean cuts every tensor into chunks for the ranks by itself, see `TensorwiseMean`. The step is the
        same, in more and smaller messages; who exchanges tensors while others are still computed needs it.
    """

    compressor: Compressor
    feedback: bool = True
    topology: str = "two_phase"
    exact: ExactPolicy | None = ExactBelow(10_000)
    compressors: CompressorPolicy | None = None
    rescale_feedback: bool = False
    tensorwise: bool = False
    link: Link = ETHERNET

    def __post_init__(self) -> None:
        super().__post_init__()
        self.mean  # noqa: B018 - raises if compressor, feedback and topology do not go together
        self._require_suitable(self.compressor)
        for name in ("exact", "compressors"):
            policy = getattr(self, name)
            if policy is not None and not callable(policy):
                raise TypeError(
                    f"{name} is {policy!r}; expected a policy, which is a function of the tensors, or None"
                )
        if self.rescale_feedback and not self.feedback:
            raise ValueError(
                "rescale_feedback is True and feedback is False; expected feedback that can be rescaled"
            )

    @cached_property
    def mean(self) -> CompressedMean:
        """The compressed mean of this optimizer, if all tensors have its compressor."""
        kind = TensorwiseMean if self.tensorwise else CompressedMean
        return kind(self.compressor, self.topology, self.feedback, self.link)

    def mean_of(self, state: OptimizerState) -> CompressedMean:
        """Return how the compressed stage averages: with what policies, and the topology "auto", have chosen."""
        mean = self.mean
        if mean.topology == AUTO:
            mean = mean.within(state.exchange.topology)
        return mean.around(state.compressors) if state.compressors else mean

    def _require_suitable(self, compressor: Compressor) -> None:
        """Raise ValueError if this optimizer cannot work with a compressor."""

    def _choices(
        self, params: Sequence[Array], names: Sequence[str]
    ) -> tuple[tuple[bool, ...], tuple[Compressor, ...]]:
        """Return which tensors stay exact, and what a policy has chosen for each of the others."""
        tensors = [
            Tensor(name, tuple(p.shape), math.prod(p.shape)) for name, p in zip(names, params, strict=True)
        ]
        exact = (False,) * len(tensors) if self.exact is None else tuple(self.exact(tensors))
        if self.compressors is None:
            return exact, ()
        chosen = tuple(self.compressors(tensors))
        if len(chosen) != len(tensors) or not all(c is None or isinstance(c, Compressor) for c in chosen):
            raise TypeError(
                f"compressors chose {chosen!r}; expected a qcomp.Compressor or None for each of {len(tensors)} tensors"
            )
        exact = tuple(is_exact or c is None for is_exact, c in zip(exact, chosen, strict=True))
        compressors = tuple(c for is_exact, c in zip(exact, chosen, strict=True) if c and not is_exact)
        for compressor in compressors:
            self._require_suitable(compressor)
        return exact, compressors

    def _chosen(self, state: OptimizerState, params: Sequence[Array]) -> OptimizerState:
        """Return a first state that knows what is compressed and how; warn if nothing is."""
        exact, compressors = self._choices(params, state.names)
        if all(exact):
            policies = f"exact={self.exact!r}" + (
                f", compressors={self.compressors!r}" if self.compressors else ""
            )
            warn_caller(
                f"{type(self).__name__} compresses nothing: {policies} keeps all {len(params)} tensors "
                f"exact (the largest has {max(math.prod(p.shape) for p in params)} elements); "
                "pass exact=None to compress all"
            )
        numbers = {**state.numbers, _RATE: 0.0} if self.rescale_feedback else state.numbers
        return state._replace(exact=exact, compressors=compressors, numbers=numbers)

    def _no_residuals(self, params: Sequence[Array], state: OptimizerState) -> MeanState:
        """Return residuals of zero for the tensors that are compressed."""
        compressed = [p for p, is_exact in zip(params, state.exact, strict=True) if not is_exact]
        return self.mean_of(state).zeros(
            compressed, rank=state.rank, size=state.size, nodes=state.exchange.nodes
        )

    def _average(
        self, values: Sequence[Array], state: OptimizerState, blends: Sequence[Blend] = ()
    ) -> Average:
        """Ask for the mean of some values, or of the momenta that they are blended into.

        Exact for the exact tensors and compressed for the others.
        """
        exact = [i for i, is_exact in enumerate(state.exact) if is_exact]
        compressed = [i for i, is_exact in enumerate(state.exact) if not is_exact]
        exchange = self._owed(state)
        parts = []
        if exact:
            plain = [values[i] for i in exact]
            if blends:
                plain = [
                    primitives.momentum(blends[i].m, values[i], blends[i].beta1, blends[i].scale)
                    for i in exact
                ]
            parts.append(self._exact_part(exact, plain, state))
        if compressed:
            chosen = tuple(values[i] for i in compressed)
            chosen_blends = tuple(blends[i] for i in compressed) if blends else ()
            parts.append(
                Part(
                    self.mean_of(state), tuple(compressed), chosen, exchange, self._key(state), chosen_blends
                )
            )
        return Average(tuple(parts), exchange)

    def _owed(self, state: OptimizerState) -> MeanState:
        """Return the residuals, in units of the rate of the next step if they are rescaled."""
        if not self.rescale_feedback:
            return state.exchange
        last, rate = state.numbers[_RATE], self.rate(state)
        if last == rate or not last or not rate:
            return state.exchange
        return state.exchange.rescaled(last / rate)

    def _paid(self, state: OptimizerState, means: Means) -> OptimizerState:
        """Return the state with the residuals that an exchange has left, and the rate that they are of."""
        if not self.rescale_feedback:
            return state._replace(exchange=means.exchange)
        rate = self.rate(state)
        if not rate:  # nothing of it moves a parameter: what was owed still is
            return state
        return state._replace(exchange=means.exchange, numbers={**state.numbers, _RATE: float(rate)})
