"""What the optimizers with a compressed stage share: how they compress, and which tensors they leave exact."""

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from qcomp.core import primitives
from qcomp.core.arrays import Array
from qcomp.core.compressor import Compressor
from qcomp.core.exchange import CompressedMean, MeanState
from qcomp.core.kernels import Blend
from qcomp.core.optimizers.base import Average, Optimizer, Part
from qcomp.core.packing import ExactBelow, ExactPolicy, Tensor
from qcomp.core.state import OptimizerState

__all__ = ["CompressingOptimizer"]


@dataclass(frozen=True, kw_only=True)
class CompressingOptimizer(Optimizer):
    """Base of the optimizers that compress.

    Parameters
    ----------
    compressor : Compressor
        Of what is exchanged in the compressed stage.
    feedback : bool
        Whether what compression loses is fed back, on workers and servers.
    topology : {"two_phase", "all_gather", "hierarchical"}
        See `CompressedMean`.
    exact : callable or None
        Which tensors stay exact, see `ExactBelow`; None compresses everything.
    """

    compressor: Compressor
    feedback: bool = True
    topology: Literal["two_phase", "all_gather", "hierarchical"] = "two_phase"
    exact: ExactPolicy | None = ExactBelow(10_000)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.mean  # noqa: B018 - raises if compressor, feedback and topology do not go together

    @property
    def mean(self) -> CompressedMean:
        """The compressed mean of this optimizer."""
        return CompressedMean(self.compressor, topology=self.topology, feedback=self.feedback)

    def _choose_exact(self, params: Sequence[Array], names: Sequence[str]) -> tuple[bool, ...]:
        """Return which tensors stay exact, and warn if all of them do."""
        if self.exact is None:
            return (False,) * len(params)
        tensors = [
            Tensor(name, tuple(p.shape), math.prod(p.shape)) for name, p in zip(names, params, strict=True)
        ]
        chosen = tuple(self.exact(tensors))
        if all(chosen):
            warnings.warn(
                f"{type(self).__name__} compresses nothing: exact={self.exact!r} keeps all {len(tensors)} tensors "
                f"exact (the largest has {max(t.size for t in tensors)} elements); pass exact=None to compress all",
                stacklevel=4,
            )
        return chosen

    def _no_residuals(
        self,
        params: Sequence[Array],
        exact: Sequence[bool],
        rank: int,
        size: int,
        nodes: tuple[int, ...] = (),
    ) -> MeanState:
        """Return residuals of zero for the tensors that are compressed."""
        compressed = [p for p, is_exact in zip(params, exact, strict=True) if not is_exact]
        return self.mean.zeros(compressed, rank=rank, size=size, nodes=nodes)

    def _average(
        self, values: Sequence[Array], state: OptimizerState, blends: Sequence[Blend] = ()
    ) -> Average:
        """Ask for the mean of some values, or of the momenta that they are blended into.

        Exact for the exact tensors and compressed for the others.
        """
        exact = [i for i, is_exact in enumerate(state.exact) if is_exact]
        compressed = [i for i, is_exact in enumerate(state.exact) if not is_exact]
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
                Part(self.mean, tuple(compressed), chosen, state.exchange, self._key(state), chosen_blends)
            )
        return Average(tuple(parts), state.exchange)
