"""`CompressedMean`: the compressed mean over ranks, as users call it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from operator import attrgetter, eq, itemgetter
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple, Self

from qcomp.core import feedback, primitives
from qcomp.core.compressor import Compressor, require_compressor
from qcomp.core.compressors.identity import Identity
from qcomp.core.handshake import handshake_stages
from qcomp.core.kernels import Blend
from qcomp.core.mean.chunks import Cutter, cut
from qcomp.core.mean.codec import unless_refused
from qcomp.core.mean.costs import Link
from qcomp.core.mean.layout import Layout, Operands
from qcomp.core.mean.nodes import Nodes, node_stages, require_rank_in
from qcomp.core.mean.rounds import count_rounds, in_rounds, lay_out_rounds
from qcomp.core.mean.single_rank import SMALL, alone
from qcomp.core.mean.stages import (
    Owner,
    Stages,
    Transport,
    announce_lengths,
    drive,
    owned,
    pipeline,
    place_in,
    require_rank,
)
from qcomp.core.mean.state import (
    MeanState,
    require_no_residuals,
    require_own_residuals,
    require_tensors,
    zeros_for,
)
from qcomp.core.mean.topologies.base import Averaged, Call, Topology
from qcomp.core.mean.topologies.choice import ETHERNET, choose_topology
from qcomp.core.mean.topologies.registry import AUTO, require_divisor, require_name, topology
from qcomp.core.numeric.arrays import (
    Array,
    as_list,
    compute_dtype_name,
    concat,
    cut_like,
    detached,
    dtype_name,
    flat,
    require_apart,
    shaped_like,
    vectors_of,
)
from qcomp.core.numeric.random import Key, require_key
from qcomp.core.primitives.rehearsal import rehearse

__all__ = [
    "EXACT",
    "CompressedMean",
    "Computation",
    "MeanState",
    "Terms",
]


_DTYPE, _SHAPE = attrgetter("dtype"), attrgetter("shape")

_MOST_LAYOUTS = 256
"""How many layouts a mean remembers, so that it does not fill the memory if shapes change in every step."""


class Terms(NamedTuple):
    """The options of one call; see `CompressedMean.stages`."""

    key: Key | None = None
    donate: bool = False
    blends: Sequence[Blend] = ()
    overwrite: bool = False
    at_once: bool = False
    """Whether there is only one round; callers set it if they group tensors themselves."""
    whiteners: Sequence[Array] = ()
    """The whitener of each array of x, or empty. Only an `OwnedMean` takes whiteners."""


class Computation(NamedTuple):
    """One call of a mean, ready to run."""

    rounds: Sequence[Stages[Averaged]]
    """Independent computations in stages; see `pipeline`."""
    finish: Callable[[Sequence[Averaged]], tuple[Any, MeanState]]
    """Returns the means and the new state from the results of the rounds."""


@dataclass(frozen=True)
class CompressedMean:
    """The mean over all ranks, with compressed messages.

    Parameters
    ----------
    compressor : Compressor or sequence of Compressor
        One compressor for all tensors, or one for each. Each tensor uses ``compressor.for_shape(shape)``, on workers
        and on servers.
    topology : str, default "two_phase"
        ``"two_phase"``: the vector is cut into a chunk for every rank. Each rank is the server of its chunk: it
        receives that part of every rank's payload, averages, compresses the average again and sends it to all.
        ``"all_gather"``: every rank sends its payload to every other. Values are compressed only once, but each rank
        sends N / 2 times the bytes of two phases.
        ``"hierarchical"``: exact sums inside each node, two phases between nodes; then the result is sent to all ranks
        of the node. On a single node the mean is exact.
        ``"ring"``: the sum of each chunk grows from rank to rank, and each rank compresses it anew for the next. Each
        rank sends to only one neighbour, and compression rounds a value up to N times.
        ``"auto"``: `init` selects the topology that is fastest by the cost model, once; the state records the choice.
        See `qcomp.core.mean.topologies.choice.choose_topology`.
        Or the name of a topology that was registered with `qcomp.topologies.register`.
    feedback : bool, default True
        Whether workers and servers add what compression has lost to their next vector.
    link : Link
        The link between nodes, for ``"auto"``; by default 10 Gbit/s and 50 microseconds per message. See
        `qcomp.planning.Link`.
    divisor : {"ranks", "senders"}, default "ranks"
        What the sum over the ranks is divided by at each element: the number of ranks, or with ``"senders"`` the number
        of ranks whose payload is not 0 there. Both are the same for compressors that drop no elements. With
        ``"senders"`` and a compressor that drops some elements, such as `TopK`, the mean of an element that only one
        rank sends is its full value, and the sum identity does not hold. ``"senders"`` needs the topology
        ``"all_gather"``.

    Notes
    -----
    If b is the bytes of the payload of the whole vector, each of N ranks sends 2 (N - 1) / N * b bytes in two phases
    and (N - 1) * b by all-gather, plus a few bytes of verdict and padding. For the other topologies see
    `qcomp.core.mean.topologies.hierarchical` and `qcomp.core.mean.topologies.ring`. If payload lengths vary, an extra
    exchange before each exchange announces the lengths, with 16 N bytes to every rank. All ranks decode the same bytes,
    so they hold the same mean bit for bit. Values are added in rank order, or in the order of the ring. Sum identity:
    the means of T steps add up to the sum of the exact means minus (mean_i e_i + e_s), where e_i are the workers' and
    e_s the servers' residuals after the last step. Source: Tang et al. (DoubleSqueeze), ICML 2019.

    With all-gather, compression rounds a value once. Two phases round it twice. The hierarchical mean rounds it twice
    between nodes, and never inside a node. A ring rounds sums N - 1 times and their mean once. With an unbiased
    compressor the mean is unbiased in every topology, and the variances of the roundings add up.

    Elements that are 0 on all ranks stay 0 if the compressor has ``traits.keeps_zero``. `ScaledSign` and `LloydMax` do
    not keep zeros, and a `CompressedMean` gives no warning.

    Examples
    --------
    >>> import numpy as np, qcomp
    >>> allreduce = qcomp.CompressedMean(qcomp.ScaledSign(bucket_size=8))
    >>> def rank_main(comm):
    ...     x = np.full(16, float(comm.rank), dtype=np.float32)
    ...     state = allreduce.init(x, comm)
    ...     mean, state = allreduce(x, state, comm)
    ...     return float(mean[0])
    >>> qcomp.comm.run_local(2, rank_main)
    [0.5, 0.5]
    """

    kinds: ClassVar[tuple[str, ...]] = ("worker_residual", "server_residual")
    """The kinds of the arrays in ``MeanState.worker`` and ``MeanState.server``, as checkpoints name them."""

    owned_kinds: ClassVar[tuple[str, ...]] = ()
    """The kinds of which only the owner of a tensor has an array for that tensor."""
    tracked_kinds: ClassVar[Mapping[str, str]] = MappingProxyType({})
    """Maps a kind to the kind that is its mean over the ranks, of which every rank holds all arrays in full."""
    part_kinds: ClassVar[tuple[str, ...]] = ()
    """Kinds of arrays of which each rank holds a part for each tensor; see `starts`."""
    low_rank: ClassVar[bool] = False
    """Whether matrices are approximated by factors."""
    in_one: ClassVar[bool] = False
    """Whether even a large mean has only one round."""

    compressor: Compressor | Sequence[Compressor]
    topology: str = "two_phase"
    feedback: bool = True
    link: Link = ETHERNET
    divisor: str = "ranks"

    def __post_init__(self) -> None:
        if isinstance(self.compressor, list):
            object.__setattr__(self, "compressor", tuple(self.compressor))
        if not self.compressors:
            raise TypeError("compressor is (); expected a qcomp.Compressor, or a sequence of them")
        for compressor in self.compressors:
            require_compressor("compressor", compressor)
        require_name(self.topology)
        require_divisor(self.divisor, self.topology)
        if self.feedback:
            for compressor in self.compressors:
                feedback.require_contraction(compressor)

    @cached_property
    def compressors(self) -> tuple[Compressor, ...]:
        """A tuple of the one compressor of all tensors, or of one compressor for each tensor."""
        return self.compressor if isinstance(self.compressor, tuple) else (self.compressor,)

    @property
    def sends(self) -> tuple[Compressor, ...]:
        """The compressors of all payloads that are sent."""
        return self.compressors

    @cached_property
    def lossless(self) -> bool:
        """Whether the mean is exact."""
        return all(c.traits.lossless for c in self.compressors)

    @cached_property
    def keeps_residuals(self) -> bool:
        """Whether a state holds residuals."""
        return self.feedback and not self.lossless

    def keeps_exact(self, shape: tuple[int, ...]) -> bool:  # noqa: ARG002 - for means that depend on it
        """Return whether a tensor of this shape is averaged exactly, whatever the compressor is."""
        return False

    def compressors_of(self, shapes: Sequence[tuple[int, ...]]) -> list[Compressor]:
        """Return the compressor of each tensor, given the shapes."""
        chosen = self.compressor if isinstance(self.compressor, tuple) else self.compressors * len(shapes)
        if len(chosen) != len(shapes):
            raise ValueError(f"x has {len(shapes)} arrays; compressor has {len(chosen)} entries")
        return [c.for_shape(shape) for c, shape in zip(chosen, shapes, strict=True)]

    def init(self, x: Array | Sequence[Array], comm: Transport) -> MeanState:
        """Check that all ranks were started alike, and return a state with residuals of zero.

        Parameters
        ----------
        x : array or sequence of arrays
            Arrays with the shapes and dtypes of what will be averaged.
        comm : Communicator
            The communicator. The state keeps the rank and size and, if the topology depends on nodes, which ranks share
            a ``host``.

        Raises
        ------
        MismatchError
            On every rank, if the ranks differ in version, compressor, topology or shapes.
        TypeError
            On every rank, if the mean may be hierarchical and the communicator of any rank has no ``host``.
        """
        place = place_in(comm)
        number = place.pop("number")
        owner = Owner("mean", number, (), 0, "init")  # the handshake compares the kinds
        return drive(owned(self.init_stages(x, **place), owner), comm)._replace(number=number)

    def init_stages(
        self, x: Array | Sequence[Array], *, rank: int, size: int, host: str | None = None
    ) -> Stages[MeanState]:
        """`init` as a generator of pure stages, for callers that move the buffers themselves.

        Parameters
        ----------
        x : array or sequence of arrays
            As for `init`.
        rank, size : int
            This rank, and the number of ranks.
        host : str, optional
            Name of this rank's machine, which a topology may depend on.

        Raises
        ------
        MismatchError, TypeError
            As for `init`.
        """
        require_rank_in(rank, size)
        tensors = as_list(x)
        yield from handshake_stages(self.facts(tensors), size=size, like=tensors[0])
        rehearse(self.sends, tensors[0], steps=False, low_rank=self.low_rank)
        nodes = yield from self.node_stages(host, size=size, like=tensors[0])
        return self.zeros(tensors, rank=rank, size=size, nodes=nodes)

    def facts(self, tensors: Sequence[Array]) -> dict[str, Any]:
        """Return what the ranks must agree on before they average tensors like these."""
        return {
            "compressor": [c.spec for c in self.sends],
            "topology": self.topology,
            "link": str(self.link),
            "feedback": self.feedback,
            "divisor": self.divisor,
            "shapes": [list(t.shape) for t in tensors],
            "dtypes": [compute_dtype_name(dtype_name(t.dtype)) for t in tensors],
        }

    def node_stages(self, host: str | None, *, size: int, like: Array) -> Stages[tuple[int, ...]]:
        """Return the node of each rank, equal on all ranks; empty, without an exchange, if nodes do not matter."""
        if self.topology != AUTO and not self.resolved.wants_nodes:
            return ()
        return (yield from node_stages(host, size=size, like=like, topology=self.topology))

    @cached_property
    def resolved(self) -> Topology:
        """The object of this mean's topology."""
        return topology(self.topology)

    def chosen(
        self, shapes: Sequence[tuple[int, ...]], size: int, nodes: tuple[int, ...] = ()
    ) -> CompressedMean:
        """Return the mean with the topology that it uses for tensors of these shapes on ``size`` ranks."""
        if self.topology != AUTO:
            return self
        compressors, sizes = self.compressors_of(shapes), list(map(math.prod, shapes))
        return self.within(choose_topology(compressors, sizes, Nodes.of(size, nodes), self.link))

    def within(self, topology: str) -> CompressedMean:
        """Return this mean with a given topology: the same object for the same name, so that layouts are kept."""
        return self if topology == self.topology else self._like(topology, topology=topology)

    def around(self, compressors: tuple[Compressor, ...]) -> CompressedMean:
        """Return this mean with one compressor for each tensor: the same object for the same tuple."""
        return self._like(id(compressors), compressor=compressors)  # the mean keeps the tuple, and so its id

    def _like(self, key: object, **changes: Any) -> Self:
        """Return this mean with some fields changed: the same object for the same key."""
        known = self._others  # shared by ranks in threads of one process
        mean = known.get(key)
        if mean is None:
            if len(known) >= _MOST_LAYOUTS:
                known.clear()
            mean = known.setdefault(key, replace(self, **changes))
        return mean

    @cached_property
    def _others(self) -> dict[Any, Self]:
        return {}

    def zeros(
        self, tensors: Sequence[Array], *, rank: int, size: int, nodes: tuple[int, ...] = ()
    ) -> MeanState:
        """Return a rank's state with residuals of zero, without an exchange; ``nodes`` is as in `layout`."""
        shapes = tuple(tuple(t.shape) for t in tensors)
        mean = self.chosen(shapes, size, nodes)
        if not self.keeps_residuals or mean.resolved.is_exact_on(Nodes.of(size, nodes)):
            return MeanState(rank, size, (), (), nodes=nodes, topology=mean.topology)
        worker, server = (
            tuple(zeros_for(tensors[s.tensor], s.size) for s in ranges)
            for ranges in mean.layout(shapes, rank=rank, size=size, nodes=nodes).residuals
        )
        return MeanState(rank, size, worker, server, shapes, nodes, mean.topology)

    def starts(self, rank: int) -> tuple[str, ...]:  # noqa: ARG002 - for means of shards
        """Return where a rank's part of each parameter starts; empty if every rank has whole parameters."""
        return ()

    def rescaled(self, state: MeanState, factor: float) -> MeanState:
        """Return the state with all residuals multiplied by a factor."""
        worker, server = (
            tuple([primitives.scale(e, factor) for e in owed]) for owed in (state.worker, state.server)
        )
        return state._replace(worker=worker, server=server)

    def layout(
        self,
        shapes: Sequence[tuple[int, ...]],
        *,
        rank: int,
        size: int,
        nodes: tuple[int, ...] = (),
        dtypes: tuple[str, ...] = (),
    ) -> Layout:
        """Return the layout of the mean of tensors of these shapes: chunks, messages and residual ranges.

        Parameters
        ----------
        shapes : sequence of tuple of int
            The shape of each tensor.
        rank, size : int
            Number of this rank, and number of ranks.
        nodes : tuple of int
            The node of each rank; by default each rank is a node of its own.
        dtypes : tuple of str
            The name of the dtype in which each tensor is computed; by default ``"float32"``.
        """
        shapes = tuple(shapes)
        asked = (shapes, rank, size, nodes, dtypes)
        known = self._layouts  # shared by ranks in threads of one process
        layout = known.get(asked)
        if layout is None:
            operands = Operands(
                tuple(self.compressors_of(shapes)),
                tuple(map(math.prod, shapes)),
                dtypes or ("float32",) * len(shapes),
                rank,
                Nodes.of(size, nodes),
                self.cutter(shapes),
                shapes,
            )
            layout = self.chosen(shapes, size, nodes).resolved.lay_out(operands)
            if len(known) >= _MOST_LAYOUTS:
                known.clear()
            known[asked] = layout
        return layout

    @cached_property
    def _layouts(self) -> dict[Any, Layout]:
        return {}

    def cutter(self, shapes: Sequence[tuple[int, ...]]) -> Cutter:  # noqa: ARG002 - for means that depend on them
        """Return the function that cuts tensors of these shapes into chunks."""
        return cut

    def __call__(
        self,
        x: Any,
        state: MeanState,
        comm: Transport,
        *,
        key: Key | None = None,
        donate: bool = False,
        weight: float | None = None,
    ) -> tuple[Any, MeanState]:
        """Average x over the ranks of a communicator; see `stages`.

        If all ranks pass a ``weight``, each rank's x counts by its own weight; see `weighted`.
        """
        require_rank(state, comm)
        if weight is not None:
            from qcomp.core.mean.weights import weighted  # noqa: PLC0415 - few scripts weigh

            products = weighted(x, weight, comm)
            mean, new_state = self(products, state, comm, key=key, donate=True)
            means = shaped_like(as_list(mean), as_list(x))
            return means if isinstance(x, list | tuple) else means[0], new_state
        stages = self.stages(x, state, key=key, donate=donate)
        return drive(owned(stages, Owner(type(self).__name__, state.number, (), 0, "a mean")), comm)

    def stages(
        self,
        x: Any,
        state: MeanState,
        *,
        key: Key | None = None,
        donate: bool = False,
        blends: Sequence[Blend] = (),
        overwrite: bool = False,
    ) -> Stages[tuple[Any, MeanState]]:
        """Average x over the ranks, as a generator of pure stages.

        Parameters
        ----------
        x : array or sequence of arrays
            This rank's values. A bucket never crosses from one array to the next.
        state : MeanState
            From `init` or from the last call.
        key : Key, optional
            Required by compressors that draw at random: a key with seed, step and tensor. The mean adds the rank and
            hop.
        donate : bool, default False
            Whether the new residuals may take the buffers of x, whose values are then lost even if this raises. In
            addition to the mean and the new residuals, a mean then needs memory for the payloads and for the float32
            values of one chunk. A ring and a hierarchical mean do not write to x. A hierarchical mean needs memory for
            a copy of x, for what its node sends, and for the sum.
        blends : sequence of Blend
            One for each array of x. The arrays are blended into momenta, and the momenta are averaged.
        overwrite : bool, default False
            Whether the means may take the buffers of x, which saves memory and time. The buffers are written only when
            no rank can refuse any more.

        Yields
        ------
        AllToAll or AllGather
            What to exchange; send back the list of the buffers that arrived. From 32 MiB on, two phases and all-gather
            run in several rounds: see `qcomp.core.mean.rounds`.

        Returns
        -------
        mean : array or list of arrays
            With the shapes and dtypes of x, or of the momenta; the same on all ranks.
        state : MeanState

        Raises
        ------
        NonFiniteError
            On every rank, if a value on any rank is not finite or too large. The state passed in stays valid. Under
            `jax.jit` nothing can be raised: all means are NaN on every rank, and the caller must keep the old state.
        """
        if donate or overwrite:
            require_apart(x, "x")
        computation = self.begin(detached(as_list(x)), state, Terms(key, donate, blends, overwrite))
        means, state = computation.finish((yield from pipeline(computation.rounds)))
        return means if isinstance(x, list | tuple) else means[0], state

    def begin(self, tensors: Sequence[Array], state: MeanState, terms: Terms) -> Computation:
        """Return the computation of one call, for callers that interleave means; tensors must be dense and detached."""
        mean = self if self.topology != AUTO else self.within(state.topology)
        self._require_terms(terms, len(tensors))
        resolved = mean.resolved
        if resolved.wants_nodes and resolved.is_exact_on(Nodes.of(state.size, state.nodes)):
            mean, resolved, terms = EXACT, EXACT.resolved, terms._replace(overwrite=False)
        elif mean.keeps_residuals:
            require_tensors(state, tensors, mean.topology)
        if not mean.keeps_residuals:
            require_no_residuals(state)
        return mean._computation(tensors, state, terms, resolved)

    def _computation(
        self, tensors: Sequence[Array], state: MeanState, terms: Terms, resolved: Topology
    ) -> Computation:
        """Return the computation for tensors that match the state and the terms."""
        vectors = vectors_of(tensors)
        # Converted tensors are copies, so they may be used up.
        donate = terms.donate or not any(map(eq, map(_DTYPE, tensors), map(_DTYPE, vectors)))
        # The momenta of half-precision gradients are float32.
        targets = next(zip(*terms.blends, strict=True), tensors)
        blends = [b if b.m.ndim == 1 else b._replace(m=flat(b.m)) for b in terms.blends]
        if blends and (self.lossless or not resolved.blends):
            vectors, blends = self._momenta(vectors, blends), []
        shapes = tuple(map(tuple, map(_SHAPE, tensors)))
        dtypes = tuple(map(dtype_name, map(_DTYPE, vectors)))
        sizes = tuple(map(math.prod, shapes))
        sends_nothing = self.lossless and state.size == 1
        in_one = (
            sends_nothing or terms.at_once or terms.overwrite or self.in_one or not resolved.allows_rounds
        )
        count = 1 if in_one else count_rounds(dtypes, sizes)
        joined = self.lossless and count == 1 and len(set(dtypes)) == 1 and not sends_nothing
        mean: CompressedMean = self
        if joined:  # the result does not depend on the boundaries, and one vector is faster than many
            vectors, shapes = [concat(vectors)], ((sum(sizes),),)
            dtypes = (dtype_name(vectors[0].dtype),)
            mean = self._of_one_vector
        layout = mean.layout(shapes, rank=state.rank, size=state.size, nodes=state.nodes, dtypes=dtypes)
        if self.keeps_residuals:
            require_own_residuals(state, layout, vectors)
        key = terms.key or Key()
        call = Call(
            layout,
            vectors,
            state.worker,
            state.server,
            key if key.rank is state.rank else key._replace(rank=state.rank),
            donate=donate and not blends,
            blends=blends,
            overwrite=terms.overwrite and not donate,
            whiteners=terms.whiteners,
            divisor=self.divisor,
        )
        join: Callable[[Sequence[Averaged]], Averaged] = itemgetter(0)  # the result of the only round
        if sends_nothing:
            rounds = [alone(vectors, self.compressors[0].spec)]
        elif count == 1:
            rounds = [resolved.stages(call)]
        else:
            rounds, join = in_rounds(resolved, call, lay_out_rounds(resolved, layout, count))
        if self._varies:
            rounds = [announce_lengths(stages, state.rank) for stages in rounds]

        def finish(results: Sequence[Averaged]) -> tuple[list[Array], MeanState]:
            average = join(results)
            means = unless_refused(average.means, average.verdicts)
            values = self.cut(means[0], sizes) if joined else means
            new_state = state._replace(worker=average.worker, server=average.server)
            return shaped_like(values, targets), new_state

        return Computation(rounds, finish)

    def _momenta(self, vectors: Sequence[Array], blends: Sequence[Blend]) -> list[Array]:
        """Return the momenta into which vectors are blended; many small vectors are blended in one call."""
        momenta, numbers = [b.m for b in blends], [b[1:] for b in blends]
        sizes = [m.shape[0] for m in momenta]
        dtypes = {x.dtype for x in (*vectors, *momenta)}
        alike = len(dtypes) == 1 and numbers.count(numbers[0]) == len(numbers)
        if alike and self.lossless and sum(sizes) < SMALL * len(sizes):
            joined = blends[0]._replace(m=concat(momenta))
            return self.cut(primitives.blended(joined, concat([*vectors])), sizes)
        return [primitives.blended(b, g) for b, g in zip(blends, vectors, strict=True)]

    @cached_property
    def _varies(self) -> bool:
        """Whether the length of any message depends on the values."""
        return any(c.variable_length for c in self.sends)

    def cut(self, joined: Array, sizes: Sequence[int]) -> list[Array]:
        """Return the parts of a flat vector that consists of tensors of these sizes."""
        return cut_like(joined, sizes)

    @cached_property
    def _of_one_vector(self) -> CompressedMean:
        """The mean of all tensors joined into one vector, for lossless compressors."""
        return CompressedMean(self.compressors[0], self.topology, self.feedback, self.link)

    def _require_terms(self, terms: Terms, count: int) -> None:
        """Raise ValueError unless the terms fit each other and the number of tensors."""
        for compressor in self.compressors:
            if compressor.traits.random:
                require_key(terms.key, compressor.spec)
        if terms.overwrite and (terms.donate or terms.blends):
            raise ValueError(
                "overwrite is True; expected False with donate or blends, which use the memory of x too"
            )
        if terms.blends and len(terms.blends) != count:
            raise ValueError(f"blends has {len(terms.blends)} entries; x has {count} arrays")


EXACT = CompressedMean(Identity(), feedback=False)
"""The exact mean, with the same interface as a compressed one."""
