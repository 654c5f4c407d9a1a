"""`OwnedMean`: each tensor has an owner, which averages it over the ranks and sends all ranks an update."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from operator import attrgetter
from typing import ClassVar, Literal, NamedTuple, Protocol, Self

from qcomp.core import feedback, primitives
from qcomp.core.compressor import Compressor, require_compressor
from qcomp.core.errors import NonFiniteError
from qcomp.core.mean.chunks import Chunks, Segment, deal
from qcomp.core.mean.codec import Codec, Compressed, Verdicts
from qcomp.core.mean.compressed_mean import MeanState
from qcomp.core.mean.costs import Link
from qcomp.core.mean.framing import Frame, Opened
from qcomp.core.mean.layout import Layout, Operands, Residuals
from qcomp.core.mean.single_rank import alone
from qcomp.core.mean.stages import Stages
from qcomp.core.mean.tensorwise import SeparableMean
from qcomp.core.mean.topologies.base import Averaged, Call
from qcomp.core.mean.topologies.choice import ETHERNET
from qcomp.core.mean.topologies.two_phase import SERVER, TwoPhase
from qcomp.core.numeric.arrays import Array, array_namespace
from qcomp.core.numeric.random import Key
from qcomp.core.numeric.whitening import unwhitened, whitened

Shape = tuple[int, ...]


class Rule(Protocol):
    """How an owner turns means into updates. Rules that compare equal must do the same."""

    def cost(self, tensor: int, shape: Shape) -> int:
        """Return the cost of the work on a tensor, in any unit; all ranks get tensors of about equal total cost."""
        ...

    def sides(self, tensor: int, shape: Shape) -> tuple[int, int]:
        """Return the rows and columns of the matrix in which a tensor is stored."""
        ...

    def updates(
        self,
        means: Sequence[Array],
        momenta: Sequence[Array],
        tensors: Sequence[int],
        shapes: Sequence[Shape],
    ) -> tuple[list[Array], list[Array]]:
        """Return the updates and the new momenta of tensors from their means and momenta, all flat.

        ``tensors`` gives the number of each tensor among all averaged tensors.
        """
        ...


class Dealt(NamedTuple):
    """The facts about a tensor's exchange that depend on the other tensors of the model."""

    owner: int
    """The rank that owns the tensor."""
    first: int
    """The number of the tensor's first bucket in the workers' random draws."""
    answer: int
    """The number of the update's first bucket in the owners' random draws."""


@dataclass(frozen=True)
class OwnedMean(SeparableMean):
    """Updates of tensors that each have one owner, in two phases; used like `CompressedMean`.

    Every rank sends its compressed tensors to their owners. An owner averages each of its tensors, makes an update from
    the mean and from a momentum that only the owner has, compresses the update and sends it to all. All ranks decode
    the same bytes, so they hold the same updates bit for bit, whatever the owners compute.

    ``compressor`` compresses the tensors that workers send, ``updates`` the updates that owners send to all, and
    ``rule`` makes the updates from the means. ``repaid`` is the fraction of its residual that a worker adds to its next
    tensors, above 0 and at most 1. ``dealt`` has the place of each tensor; by default, its place in a model of only
    these tensors. See `SeparableMean`.

    Feedback works in both directions: over T steps, the means add up to the sum of the exact means minus mean_i e_i,
    and the decoded updates add up to the sum of the rule's updates minus e_s. A worker keeps r_i = repaid * e_i, and
    sends q_i = C(x_i + r_i); then e_i' = e_i + x_i - q_i, so r_i' = (1 - repaid) r_i + repaid (x_i + r_i - q_i).

    With a whitener W for each tensor (`Terms`), a worker sends q_i = C(W x_i + r_i), and the owner makes its update
    from W^-1 mean_i q_i. If the singular values of x_i differ, this makes the errors of q_i smaller in the directions
    of small singular values; see `qcomp.core.numeric.whitening`. All of the above then holds with W x_i instead of x_i,
    so r_i is a residual of W x_i.

    With b bytes in the payload of all tensors, c bytes in the payload of all updates, and tensors shared equally, each
    of N ranks sends (N - 1) / N * (b + c) bytes. Source: Gruntkowska et al. (EF21-Muon), arXiv:2510.00643, for
    compression in both directions; Gao, Islamov and Stich (EControl), arXiv:2311.05645, for feedback of a fraction;
    owners as in ZeRO, Rajbhandari et al., SC 2020.
    """

    kinds: ClassVar[tuple[str, ...]] = ("worker_residual", "owner_momentum", "owner_residual")
    owned_kinds: ClassVar[tuple[str, ...]] = kinds[1:]

    topology: Literal["two_phase"] = field(default="two_phase", init=False)
    feedback: bool = field(default=True, init=False)
    link: Link = field(default=ETHERNET, init=False)
    divisor: Literal["ranks"] = field(default="ranks", init=False)
    updates: Compressor = field(kw_only=True)
    rule: Rule = field(kw_only=True)
    repaid: float = field(default=1.0, kw_only=True)
    dealt: Sequence[Dealt] = field(default=(), kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        require_compressor("updates", self.updates)
        feedback.require_contraction(self.updates)
        if not 0 < self.repaid <= 1:
            raise ValueError(f"repaid is {self.repaid!r}; expected a number above 0 and at most 1")

    @property
    def sends(self) -> tuple[Compressor, ...]:
        """The compressors of both directions."""
        return (*self.compressors, self.updates)

    @cached_property
    def lossless(self) -> bool:
        """False, since an update is not a mean."""
        return False

    @cached_property
    def resolved(self) -> "Owners":
        """The topology: two phases, with the rule between them."""
        return Owners(self.updates, self.rule, self.repaid, self.dealt)

    def places(self, shapes: Sequence[Shape], size: int) -> tuple[Dealt, ...]:
        """Return the place of each tensor; see `SeparableMean.places`. The places of empty tensors have no effect."""
        layout = self.layout(shapes, rank=0, size=size)
        answers = {s.tensor: s.bucket for chunk in self.resolved.answers(layout).chunks for s in chunk}
        found = {
            s.tensor: Dealt(owner, s.bucket, answers[s.tensor])
            for owner, chunk in enumerate(layout.chunks)
            for s in chunk
        }
        return tuple(found.get(tensor, Dealt(0, 0, 0)) for tensor in range(len(shapes)))

    def numbered(self, places: tuple[Dealt, ...]) -> Self:
        """Return this mean for tensors that have these places; see `SeparableMean.numbered`."""
        return self._like(places, dealt=places)

    @staticmethod
    def join(states: Sequence[MeanState]) -> MeanState:
        """Return the joint state of several tensors, each of which has a momentum and a residual on its owner."""
        owned = [state.server for state in states if state.server]
        momenta, residuals = ([each[kind] for each in owned] for kind in (0, 1))
        return SeparableMean.join(states)._replace(server=(*momenta, *residuals))

    def message_sizes(self, shapes: Sequence[Shape], size: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the bytes of the message to each owner, and of the message from each owner, for float32 tensors."""
        layout = self.layout(shapes, rank=0, size=size)
        return layout.message_sizes, self.resolved.answers(layout).message_sizes

    def work(self, shapes: Sequence[Shape], size: int) -> list[int]:
        """Return the cost of each owner's work, in the unit of the rule."""
        chunks = self.layout(shapes, rank=0, size=size).chunks
        return [sum(self.rule.cost(s.tensor, shapes[s.tensor]) for s in chunk) for chunk in chunks]

    def zeros(
        self, tensors: Sequence[Array], *, rank: int, size: int, nodes: tuple[int, ...] = ()
    ) -> MeanState:
        """Return a rank's state with residuals and momenta of zero, without an exchange; see `CompressedMean.zeros`."""
        state = super().zeros(tensors, rank=rank, size=size, nodes=nodes)
        residuals = tuple(array_namespace(m).zeros_like(m) for m in state.server)
        return state._replace(server=(*state.server, *residuals))


@dataclass(frozen=True, eq=False)
class OwnedLayout(Layout):
    """The layout of the workers' messages, with the layout of the updates."""

    updates: Layout

    @cached_property
    def answers(self) -> tuple[Frame, ...]:
        """The frame of this rank's message with updates. Its segments number only the tensors that this rank owns."""
        return (self.updates.own.as_tensors,)

    @cached_property
    def residual_shapes(self) -> tuple[tuple[list[tuple[int]], list[int]], ...]:
        """As in `Layout`, but a server keeps a momentum and a residual for each tensor."""
        worker, (shapes, tensors) = super().residual_shapes
        return worker, (2 * shapes, 2 * tensors)


class Owners(TwoPhase):
    """Two phases in which a chunk holds whole tensors, and servers send updates instead of means; see `OwnedMean`.

    ``server`` holds the momentum of each tensor that this rank owns, then the residual of each tensor's update.
    """

    allows_rounds = False
    blends = False
    shortens = True
    """Whether a single rank skips exchanges if compression loses nothing."""

    def __init__(self, updates: Compressor, rule: Rule, repaid: float, dealt: Sequence[Dealt] = ()) -> None:
        self._compressor = updates
        self._rule = rule
        self._repaid = repaid
        self._dealt = dealt

    def stages(self, call: Call) -> Stages[Averaged]:
        """Send each tensor to its owner, and its update to all; a worker keeps residuals as in `OwnedMean`."""
        ways = (*call.layout.operands.compressors, *self.answers(call.layout).operands.compressors)
        alone = self.shortens and call.layout.world == 1
        if alone and call.layout.own.chunk and all(c.traits.lossless for c in ways):
            return (yield from self._alone(call))
        if call.whiteners:
            sides = itertools.starmap(self._rule.sides, enumerate(call.layout.operands.shapes))
            values = [whitened(*each) for each in zip(call.values, call.whiteners, sides, strict=True)]
            call = call._replace(values=values, donate=True, overwrite=False)
        averaged = yield from self.exchange(call)
        if self._repaid == 1:
            return averaged
        kept = [
            primitives.momentum(old, lost, 1 - self._repaid, 1.0)
            for old, lost in zip(call.worker, averaged.worker, strict=True)
        ]
        return averaged._replace(worker=tuple(kept))

    def exchange(self, call: Call) -> Stages[Averaged]:
        """Send tensors and updates as `stages` does, but return the workers' errors as their residuals."""
        return super().stages(call)

    def _alone(self, call: Call) -> Stages[Averaged]:
        """Return the result on a single rank without exchanges, if compression loses nothing."""
        operands, owned = call.layout.operands, [segment.tensor for segment in call.layout.own.chunk]
        momenta, owed = call.server[: len(owned)], call.server[len(owned) :]
        of_rank = yield from alone(call.values, operands.compressors[0].spec, shares=True)
        means, shapes = [of_rank.means[i] for i in owned], [operands.shapes[i] for i in owned]
        updates, momenta = self._rule.updates(means, momenta, owned, shapes)
        sent = yield from alone(updates, self._compressor.spec, donate=True)
        decoded = dict(zip(owned, sent.means, strict=True))
        values = [decoded.get(i, x) for i, x in enumerate(of_rank.means)]  # empty tensors have no owner
        return Averaged(values, (), (*momenta, *owed), (*of_rank.verdicts, *sent.verdicts))

    def lay_out(self, operands: Operands, chunks: Chunks | None = None) -> Layout:  # noqa: ARG002 - without rounds
        """Give every tensor to an owner. Workers keep no residuals if their compressors lose nothing."""
        compressors = tuple(self._compressor.for_shape(shape) for shape in operands.shapes)
        sent = replace(operands, compressors=compressors)
        if self._dealt:
            found, answers = (
                _chunks(operands.sizes, [(p.owner, number(p)) for p in self._dealt], operands.world)
                for number in (attrgetter("first"), attrgetter("answer"))
            )
        else:
            costs = list(itertools.starmap(self._rule.cost, enumerate(operands.shapes)))
            found, answers = (
                deal(each.sizes, each.bucket_sizes, each.world, costs=costs) for each in (operands, sent)
            )
        exact = all(c.traits.lossless for c in operands.compressors)
        residuals = Residuals(() if exact else operands.whole, found[operands.rank])
        return OwnedLayout(operands, found, residuals, Layout(sent, answers, Residuals((), ())))

    def answers(self, layout: Layout) -> Layout:
        """Return the layout of the updates."""
        assert isinstance(layout, OwnedLayout)
        return layout.updates

    def serve(
        self,
        codec: Codec,
        call: Call,
        arrived: Sequence[Array],
        verdicts: Verdicts,
        error: NonFiniteError | None,
    ) -> Compressed:
        """Average over the ranks the tensors that this rank owns, and compress their updates for all ranks."""
        layout = call.layout
        assert isinstance(layout, OwnedLayout)
        opened = codec.open(arrived, layout.arriving, verdicts, error)
        owned = [segment.tensor for segment in layout.chunks[layout.rank]]
        shapes = [layout.operands.shapes[i] for i in owned]
        momenta, owed = call.server[: len(shapes)], call.server[len(shapes) :]
        means = self.means(codec, layout, opened, momenta)
        if call.whiteners:
            whiteners = [call.whiteners[i] for i in owned]
            means = list(map(unwhitened, means, whiteners, map(self._rule.sides, owned, shapes)))
        updates, momenta = self._rule.updates(means, momenta, owned, shapes)
        sent = self.answered(type(codec)(updates, codec.like), layout, updates, owed, call.key.at(hop=SERVER))
        return sent._replace(residuals=(*momenta, *sent.residuals))

    def means(
        self,
        codec: Codec,
        layout: OwnedLayout,  # noqa: ARG002 - for shards
        opened: Sequence[Opened],
        momenta: Sequence[Array],  # noqa: ARG002
    ) -> Sequence[Array]:
        """Return the mean of each tensor that this rank owns. Subclasses also use the layout and momenta."""
        return codec.average(opened)

    def answered(
        self, codec: Codec, layout: OwnedLayout, updates: Sequence[Array], owed: Sequence[Array], key: Key
    ) -> Compressed:
        """Compress the updates of the tensors that this rank owns, for all ranks."""
        return codec.encode(layout.answers, updates, owed, key, donate=False)


def _chunks(sizes: Sequence[int], places: Sequence[tuple[int, int]], count: int) -> Chunks:
    """Return the chunks of tensors, given the owner and the first bucket of each."""
    chunks: list[list[Segment]] = [[] for _ in range(count)]
    for tensor, (size, (owner, first)) in enumerate(zip(sizes, places, strict=True)):
        if size:
            chunks[owner].append(Segment(tensor, 0, size, first))
    return tuple(map(tuple, chunks))
