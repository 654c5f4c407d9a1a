"""The compressed mean over ranks as pure stages, in each of the topologies of `qcomp.core.mean.topologies.plans`."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

from qcomp.core import feedback
from qcomp.core.compressor import Compressor
from qcomp.core.compressors.identity import Identity
from qcomp.core.handshake import handshake
from qcomp.core.kernels import Blend
from qcomp.core.mean.assembly import as_list, zeros_for
from qcomp.core.mean.chunks import Chunks, Cutter, Segment, cut
from qcomp.core.mean.costs import Link
from qcomp.core.mean.nodes import learn_nodes
from qcomp.core.mean.running import Running, Terms, run
from qcomp.core.mean.stages import Stages, Transport, drive, pipeline
from qcomp.core.mean.topologies.choice import ETHERNET, TOPOLOGIES, Topology, choose_topology
from qcomp.core.mean.topologies.plans import PLANS, MeanState, Worker, kept_in, nodes_of
from qcomp.core.numeric.arrays import Array, compute_dtype_name, detached, dtype_name
from qcomp.core.numeric.random import Key

__all__ = ["CompressedMean", "MeanState", "Worker"]


@dataclass(frozen=True)
class CompressedMean:
    """The mean over all ranks, with compressed messages.

    Parameters
    ----------
    compressor : Compressor or sequence of Compressor
        Of the workers and of the servers: of all tensors, or one for each; a tensor has what this is `for_shape` of it.
    topology : {"two_phase", "all_gather", "hierarchical", "ring", "auto"}
        ``"two_phase"``: the vector is cut into a chunk for every rank; each rank is the server of its chunk,
        receives that part of every rank's payload, averages, compresses the average again and sends it to all.
        ``"all_gather"``: every rank sends its payload to every other; one compression, N times the bytes.
        ``"hierarchical"``: exact sums inside each node, two phases between nodes, and what arrives is passed on inside
        the node. On one node nothing is compressed: it is the exact mean.
        ``"ring"``: sums of a chunk grow from rank to rank and are compressed anew for each next one; see
        `qcomp.core.mean.topologies.ring`. Each rank has one neighbour to send to, and the vector is rounded N times.
        ``"auto"``: what `init` takes for the fastest of these, by
        `qcomp.core.mean.topologies.choice.choose_topology`. It is chosen once; the state knows it.
    feedback : bool
        Whether what compression loses is kept and added to the next vector, on workers and servers.
    link : Link
        Between nodes, for ``"auto"``; by default 10 Gbit/s and 50 microseconds a message. See `qcomp.planning.Link`.

    Notes
    -----
    With b bytes in the payload of the whole vector, a rank of N sends 2 (N - 1) / N * b bytes in two phases and (N -
    1) * b by all-gather, and a few bytes of status and padding; for the others see
    `qcomp.core.mean.topologies.hierarchical` and `qcomp.core.mean.topologies.ring`. If the length of payloads varies,
    an exchange of 16 N bytes to every rank, which tells the lengths, comes before each. All ranks decode the same
    bytes, so they hold the same mean bit for bit; it is added up in rank order, or in that of the ring. Sum identity:
    the means of T steps add up to the sum of the exact means, minus mean_i e_i + e_s after the last. Source: Tang et
    al. (DoubleSqueeze), ICML 2019.

    A value is rounded once by all-gather, twice in two phases and between nodes, never within a node; around a ring the
    sums are rounded N - 1 times, and their mean once. Of compressors that are unbiased, so is the mean, in every
    topology, and the variances of the roundings add up.

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

    kinds: ClassVar[tuple[str, str]] = ("worker_residual", "server_residual")
    """How checkpoints call what a state holds as ``worker`` and as ``server``."""

    compressor: Compressor | Sequence[Compressor]
    topology: Topology = "two_phase"
    feedback: bool = True
    link: Link = ETHERNET

    def __post_init__(self) -> None:
        if isinstance(self.compressor, list):
            object.__setattr__(self, "compressor", tuple(self.compressor))
        if not self.compressors or not all(isinstance(c, Compressor) for c in self.compressors):
            raise TypeError(
                f"compressor is {self.compressor!r}; expected a qcomp.Compressor, or a sequence of them"
            )
        if self.topology not in TOPOLOGIES:
            raise ValueError(f"topology is {self.topology!r}; expected one of {', '.join(TOPOLOGIES)}")
        if self.feedback:
            for compressor in self.compressors:
                feedback.require_contraction(compressor)

    @property
    def compressors(self) -> tuple[Compressor, ...]:
        """The one compressor of all tensors, or the compressor of each."""
        return self.compressor if isinstance(self.compressor, tuple) else (self.compressor,)

    @property
    def lossless(self) -> bool:
        """Whether the mean is exact."""
        return all(c.traits.lossless for c in self.compressors)

    def compressors_of(self, shapes: Sequence[tuple[int, ...]]) -> list[Compressor]:
        """Return the compressor of each of the tensors of these shapes."""
        chosen = self.compressors
        if not isinstance(self.compressor, tuple):
            chosen *= len(shapes)
        if len(chosen) != len(shapes):
            raise ValueError(f"x has {len(shapes)} arrays; compressor has {len(chosen)} entries")
        return [c.for_shape(shape) for c, shape in zip(chosen, shapes, strict=True)]

    def init(self, x: Array | Sequence[Array], comm: Transport) -> MeanState:
        """Return the first state, with residuals of zero, after all ranks agreed that they were started alike.

        Parameters
        ----------
        x : array or sequence of arrays
            Anything of the shapes and dtypes that will be averaged.
        comm : Communicator
            Only its rank and size are kept, and if the topology asks for it which ranks have the same ``host``.

        Raises
        ------
        MismatchError
            On every rank, if the ranks differ in version, compressor, topology or shapes.
        TypeError
            On every rank, if the mean may be hierarchical and the communicator of any rank has no ``host``.
        """
        tensors = as_list(x)
        handshake(
            comm,
            {
                "compressor": [c.spec for c in self.compressors],
                "topology": self.topology,
                "link": str(self.link),
                "feedback": self.feedback,
                "shapes": [list(t.shape) for t in tensors],
                "dtypes": [compute_dtype_name(dtype_name(t.dtype)) for t in tensors],
            },
            like=tensors[0],
        )
        nodes = self.learn_nodes(comm, like=tensors[0])
        return self.zeros(tensors, rank=comm.rank, size=comm.size, nodes=nodes)

    def learn_nodes(self, comm: Transport, *, like: Array) -> tuple[int, ...]:
        """Return the node of each rank, the same on all ranks; empty, without an exchange, if nothing depends on it."""
        if self.topology not in ("hierarchical", "auto"):
            return ()
        return learn_nodes(comm, like=like, topology=self.topology)

    def chosen(
        self, shapes: Sequence[tuple[int, ...]], size: int, nodes: tuple[int, ...] = ()
    ) -> "CompressedMean":
        """Return the mean with the topology that it takes for tensors of these shapes on so many ranks."""
        if self.topology != "auto":
            return self
        compressors, sizes = self.compressors_of(shapes), list(map(math.prod, shapes))
        topology = choose_topology(compressors, sizes, nodes_of(size, nodes), self.link)
        return replace(self, topology=topology)

    def zeros(
        self, tensors: Sequence[Array], *, rank: int, size: int, nodes: tuple[int, ...] = ()
    ) -> MeanState:
        """Return the first state of a rank, without an exchange.

        ``nodes`` has the node of each rank, as `learn_nodes` returns it; by default each rank is a node of its own.
        """
        shapes = tuple(tuple(t.shape) for t in tensors)
        mean = self.chosen(shapes, size, nodes)
        if not self._keeps_residuals or mean._is_one_node(size, nodes):
            return MeanState(rank, size, (), (), nodes=nodes, topology=mean.topology)
        worker, server = (
            tuple(zeros_for(tensors[s.tensor], s.size) for s in parts)
            for parts in mean.parts(shapes, rank=rank, size=size, nodes=nodes)
        )
        return MeanState(rank, size, worker, server, shapes, nodes, mean.topology)

    def parts(
        self, shapes: Sequence[tuple[int, ...]], *, rank: int, size: int, nodes: tuple[int, ...] = ()
    ) -> tuple[tuple[Segment, ...], tuple[Segment, ...]]:
        """Return what a rank's residuals are of: parts of each tensor as worker, and what it is the server of."""
        topology, sizes = self.chosen(shapes, size, nodes).topology, list(map(math.prod, shapes))
        compressors, cutter = self.compressors_of(shapes), self.cutter(shapes)
        return kept_in(topology, compressors, sizes, rank=rank, nodes=nodes_of(size, nodes), cut=cutter)

    def _is_one_node(self, size: int, nodes: tuple[int, ...]) -> bool:
        return self.topology == "hierarchical" and nodes_of(size, nodes).count == 1

    def segments(self, tensors: Sequence[Array], size: int) -> Chunks:
        """Return the segments of each rank's chunk."""
        return self.segments_of_shapes([tuple(t.shape) for t in tensors], size)

    def segments_of_shapes(self, shapes: Sequence[tuple[int, ...]], size: int) -> Chunks:
        """Return the segments of each rank's chunk of tensors of these shapes."""
        lengths = [c.traits.bucket_size for c in self.compressors_of(shapes)]
        return self.cutter(shapes)(list(map(math.prod, shapes)), lengths, size)

    def cutter(self, shapes: Sequence[tuple[int, ...]]) -> Cutter:  # noqa: ARG002 - for who needs to know them
        """Return what cuts tensors of these shapes into chunks."""
        return cut

    def __call__(
        self, x: Any, state: MeanState, comm: Transport, *, key: Key | None = None, donate: bool = False
    ) -> tuple[Any, MeanState]:
        """Average x over the ranks of a communicator; see `stages`."""
        if (comm.rank, comm.size) != (state.rank, state.size):
            raise ValueError(
                f"comm is rank {comm.rank} of {comm.size}; state is of rank {state.rank} of {state.size}"
            )
        return drive(self.stages(x, state, key=key, donate=donate), comm)

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
            For compressors that draw: seed, step and tensor; rank and hop are put in here.
        donate : bool
            Whether x is yours to give away: new residuals then take its buffers, and its values are lost, also if this
            raises. Besides the mean and the new residuals, a mean needs memory for the payloads and for the float32
            values of one chunk; a ring leaves x as it is, and so does a hierarchical mean, which needs memory for a
            copy of x, what its node sends, and the sum.
        blends : sequence of Blend
            One for each array of x, to average the momenta that the arrays are blended into, on the way.
        overwrite : bool
            Whether the means may take the place of x, which saves memory and time; they do where that is possible. x is
            only written to when all has arrived.

        Yields
        ------
        AllToAll or AllGather
            What to exchange; send back the list of the buffers that arrived. Of 32 MiB and more, in two phases or by
            all-gather, those of several rounds: see `qcomp.core.mean.rounds`.

        Returns
        -------
        mean : array or list of arrays
            Of the shapes and dtypes of x, or of the momenta; the same on all ranks.
        state : MeanState

        Raises
        ------
        NonFiniteError
            On every rank, if a value on any rank is not finite; the state passed in is still the valid one.
        """
        running = self.start(x, state, Terms(key, donate, blends, overwrite))
        return running.finish((yield from pipeline(running.rounds)))

    def start(self, x: Any, state: MeanState, terms: Terms) -> Running:
        """Return the rounds of a mean, each of them in stages, for who runs them with those of others.

        See `stages` for the rest.
        """
        if self.topology == "auto":
            return replace(self, topology=state.topology).start(x, state, terms)
        tensors = [detached(t) for t in as_list(x)]
        drawing = [c.spec for c in self.compressors if c.traits.random]
        if drawing and terms.key is None:
            raise ValueError(f"key is None; {drawing[0]} draws random numbers and needs a qcomp.Key")
        if self._is_one_node(state.size, state.nodes):
            exact = replace(self, compressor=Identity(), topology="two_phase", feedback=False)
            return exact.start(x, state, terms._replace(overwrite=False))
        if self._keeps_residuals:
            self._require_own(state, tensors)
        if terms.overwrite and (terms.donate or terms.blends):
            raise ValueError(
                "overwrite is True; expected False with donate or blends: x is used up for another purpose"
            )
        if terms.blends and len(terms.blends) != len(tensors):
            raise ValueError(f"blends has {len(terms.blends)} entries; x has {len(tensors)} arrays")
        shapes = [tuple(t.shape) for t in tensors]
        running = run(
            tensors,
            state,
            terms,
            topology=self.topology,
            compressors=self.compressors_of(shapes),
            cutter=self.cutter(shapes),
            plan=self._plan,
            kept=partial(self.parts, state.shapes, rank=state.rank, size=state.size),
        )
        return running if isinstance(x, list | tuple) else _single(running)

    @property
    def _keeps_residuals(self) -> bool:
        return self.feedback and not self.lossless

    def _require_own(self, state: MeanState, tensors: Sequence[Array]) -> None:
        """Raise ValueError unless a state has the residuals of this mean for these tensors."""
        if state.topology != self.topology:
            raise ValueError(f"state is of topology {state.topology!r}; this mean is {self.topology!r}")
        expected, found = [math.prod(s) for s in state.shapes], [math.prod(t.shape) for t in tensors]
        if found != expected:
            raise ValueError(f"x has arrays of {found} elements; state is for {expected}")

    def _plan(
        self, flat: list[Array], state: MeanState, how: Worker
    ) -> Stages[tuple[list[Array], MeanState]]:
        """Average flat tensors over the ranks."""
        return PLANS[self.topology](flat, state, how)


def _single(running: Running) -> Running:
    """Return the mean of one tensor that was not in a list."""

    def finish(results: Sequence[Any]) -> tuple[Any, MeanState]:
        (mean,), state = running.finish(results)
        return mean, state

    return running._replace(finish=finish)
