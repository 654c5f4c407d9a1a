"""`Topology`, the base of topologies: who sends what to whom, as pure stages, and what that costs."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from types import NoneType
from typing import Any, ClassVar, NamedTuple

from qcomp.core.kernels import Blend
from qcomp.core.mean.chunks import Chunks
from qcomp.core.mean.codec import Codec, assemble
from qcomp.core.mean.costs import Cluster, Cost, Load
from qcomp.core.mean.framing import Opened
from qcomp.core.mean.layout import Layout, Operands
from qcomp.core.mean.nodes import Nodes
from qcomp.core.mean.stages import Stages
from qcomp.core.numeric.arrays import Array, is_mutable
from qcomp.core.numeric.random import Key
from qcomp.core.primitives import empty_likes

__all__ = ["Averaged", "Call", "Into", "Topology", "assemble", "decode_means"]


class Into(NamedTuple):
    """Buffers for the results, or empty if the topology makes its own; entries are None if arrays are immutable."""

    worker: Sequence[Array | None] = ()
    """For the worker residual of each tensor."""
    server: Sequence[Array | None] = ()
    """For the server residual of each segment of this rank's chunk."""
    means: Sequence[Array | None] = ()
    """For the mean of each tensor."""


class Call(NamedTuple):
    """The arguments of one call of a mean."""

    layout: Layout
    values: Sequence[Array]
    """This rank's tensors, flat, in their compute dtypes."""
    worker: Sequence[Array]
    """The residuals of ``layout.residuals.worker``, flat; empty without feedback. They must not be written to."""
    server: Sequence[Array]
    """The residuals of ``layout.residuals.server``; as for ``worker``."""
    key: Key
    """This rank's key. Each compression on the way draws with its own hop."""
    donate: bool = False
    """Whether the new worker residuals may overwrite ``values``."""
    blends: Sequence[Blend] = ()
    """For each tensor, the momentum into which it is blended before compression; empty if there are none."""
    overwrite: bool = False
    """Whether the means may take the buffers of ``values`` once no rank can refuse any more."""
    into: Into = Into()
    whiteners: Sequence[Array] = ()
    """The whiteners by which workers of an `OwnedMean` multiply the tensors; empty without whitening."""
    divisor: str = "ranks"
    """The divisor of sums over the ranks; see `CompressedMean`."""

    @property
    def places(self) -> list[Array] | None:
        """A buffer for the mean of each tensor; None if arrays are immutable."""
        if self.into.means:
            places = list(self.into.means)
        elif self.overwrite and all(map(is_mutable, self.values)):
            places = list(self.values)
        else:
            places = empty_likes(self.values)
        found: Any = places
        return None if NoneType in map(type, found) else found


class Averaged(NamedTuple):
    """What a topology returns."""

    means: list[Array]
    """The mean of each tensor, flat; the same on all ranks bit for bit."""
    worker: tuple[Array, ...]
    """The new worker residuals; empty without feedback."""
    server: tuple[Array, ...]
    """The new server residuals; empty without feedback."""
    verdicts: tuple[Array, ...] = ()
    """The verdicts, as bytes, if a tracing compiler kept them from being read; a byte above 0 is a refusal."""


class Topology(ABC):
    """How the ranks average: a stateless object, known by its name once it is registered.

    A subclass lays tensors out, averages them in stages, and says what that costs. It knows nothing of communicators,
    array libraries or optimizers. Once it is registered by `qcomp.topologies.register`, its name is a valid
    ``topology`` in `qcomp.CompressedMean`, every optimizer, checkpoints and `qcomp.planning`.

    Notes
    -----
    A subclass must keep the promises of `qcomp.CompressedMean`: all ranks decode the same bytes, the old residuals are
    never overwritten, no rank is left waiting, and if any rank refuses, all raise `NonFiniteError` in the same stage.
    `Codec` compresses, averages and decodes the chunks of a layout, and `Verdicts` collects refusals.
    """

    name: ClassVar[str]
    """The name that users write."""
    allows_rounds: ClassVar[bool] = False
    """Whether a large mean may be cut into rounds; `lay_out` must then take the chunks of a round."""
    blends: ClassVar[bool] = False
    """Whether `stages` blends as ``Call.blends`` says; otherwise the caller blends, and passes momenta as values."""
    wants_nodes: ClassVar[bool] = False
    """Whether it matters which ranks share a machine; if so, ranks tell each other in `qcomp.CompressedMean.init`."""
    roundings: ClassVar[int | None] = 2
    """How often compression rounds a value on its way into a mean; None if that grows with the number of ranks."""

    @abstractmethod
    def lay_out(self, operands: Operands, chunks: Chunks | None = None) -> Layout:
        """Return the layout of a mean of these tensors.

        Parameters
        ----------
        operands : Operands
        chunks : tuple of chunks, optional
            The chunks of one round, given only if `allows_rounds`. By default the tensors are cut into chunks here.
        """

    def codec(self, tensors: Sequence[Array]) -> Codec:
        """Return the codec that compresses and decompresses chunks of tensors like these.

        Parameters
        ----------
        tensors : sequence of arrays
            The flat tensors, with the sizes and dtypes of the values of a call.
        """
        return Codec(tensors)

    @abstractmethod
    def stages(self, call: Call) -> Stages[Averaged]:
        """Average over the ranks, as a generator of pure stages.

        Raises
        ------
        NonFiniteError
            On every rank, if any rank refuses.
        PayloadError
            If a message is not what the layout says.
        """

    @abstractmethod
    def cost(self, load: Load, cluster: Cluster) -> Cost:
        """Return by a formula what a mean costs each rank."""

    def is_exact_on(self, nodes: Nodes) -> bool:  # noqa: ARG002
        """Return whether nothing is compressed on these nodes; called only if `wants_nodes`."""
        return False

    def suits(self, nodes: int, ranks_per_node: int) -> bool:  # noqa: ARG002
        """Return whether this topology is worth considering on this many nodes, each with this many ranks."""
        return True


def decode_means(codec: Codec, opened: Sequence[Opened], call: Call) -> list[Array]:
    """Return each tensor's mean from the messages of all chunks, written into ``call.places`` if there are any."""
    places = call.places
    if places is None:
        return codec.decode_tensors(opened)
    codec.decode_into(places, opened)
    return places
