"""The base of the optimizers with a compressed stage: how they compress, and which tensors stay exact."""

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
        Compresses what the ranks exchange in the compressed stage, on workers and servers.
    feedback : bool, default True
        Whether error feedback adds what compression loses to the next exchange, on workers and servers.
    topology : {"two_phase", "all_gather", "hierarchical", "ring", "auto"}, default "two_phase"
        How the ranks exchange payloads, see `CompressedMean`. ``"auto"`` lets `init` select the fastest by the cost
        model; the state and checkpoints keep the choice.
    link : Link, default 10 Gbit/s and 50 us per message
        The link between nodes, used only to select a topology for ``"auto"``, see `qcomp.planning.Link`.
    exact : callable or None, default ExactBelow(10_000)
        Policy that selects the tensors that stay exact, a function of all tensors, see `ExactBelow`. None compresses
        everything.
    compressors : callable, optional
        Policy that returns a compressor for each tensor, used instead of ``compressor``, or None for a tensor that
        stays exact, see `ByName`. Tensors that ``exact`` selects stay exact in any case. None, the default, uses
        ``compressor`` for all.
    rescale_feedback : bool, default False
        Whether a change of the learning rate multiplies the residuals by old rate / new rate, so that a residual is
        applied with the rate of its own step. Then x - rate (mean_i e_i + e_s) follows SGD without momentum and
        without compression under any schedule; otherwise only under a constant rate. Steps of rate 0 leave the
        residuals unchanged. Each change of the rate costs a pass over the residuals. Off by default because residuals
        grow when the rate falls: on quadratics with falling schedules it helped top-k without momentum, did not help
        signs, and signs with momentum diverged when the rate rose and fell tenfold.
    tensorwise : bool, default False
        Whether the mean cuts each tensor into chunks separately. The step is the same, with more and smaller messages.
        Needed to exchange some tensors while others are still being computed, as ``qcomp.integrations.ddp`` does.
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
        """The compressed mean of this optimizer, if all tensors use its compressor."""
        kind = TensorwiseMean if self.tensorwise else CompressedMean
        return kind(self.compressor, self.topology, self.feedback, self.link)

    def mean_of(self, state: OptimizerState) -> CompressedMean:
        """Return the mean of the compressed stage, with the choices of the policies and of topology "auto"."""
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
