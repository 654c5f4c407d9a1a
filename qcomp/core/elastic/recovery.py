"""`Elastic`: steps that survive the loss of ranks, since remaining and new ranks resume from snapshots."""

import json
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from qcomp.core.broadcast import broadcast_stages
from qcomp.core.checkpoint.format import SERVER, WORKER, named_arrays
from qcomp.core.checkpoint.manifest import kind_of
from qcomp.core.elastic.meeting import Meeting, Report, Seat, meet
from qcomp.core.handshake import gather_texts, handshake_stages
from qcomp.core.mean.framing import join, joined_size, split
from qcomp.core.mean.stages import (
    AllToAll,
    Exchange,
    Stages,
    Transport,
    drive,
    place_in,
    require_rank,
    through,
)
from qcomp.core.numeric.arrays import (
    Array,
    array_namespace,
    bytes_of,
    device,
    dtype_name,
    flat,
    from_bytes_of,
    itemsize,
)
from qcomp.core.numeric.sums import sum_of_squares
from qcomp.core.optimizers.base import Optimizer
from qcomp.core.optimizers.replica import Place, names_of, resume
from qcomp.core.optimizers.tensors import as_given, as_tensors
from qcomp.core.outer.loop import OuterLoop
from qcomp.core.outer.settings import WARMUP, rounds_key
from qcomp.core.state import OptimizerState


class Snapshot(NamedTuple):
    """The parameters and the state of a rank after a computation."""

    label: int
    """The number of the computation; equal on all ranks that completed it."""
    params: Any
    state: OptimizerState
    left: OptimizerState | None = None
    """The state of the rank to the left, with copies of the arrays that only that rank has; None if there is no copy.

    With an `OuterLoop`, the state includes that rank's parameters; see `OuterLoop.whole`.
    """
    owed: tuple[Mapping[str, float], ...] = ()
    """For each rank, the norms of the arrays that only that rank has, by kind, as of the last exchange of norms."""


class ElasticState(NamedTuple):
    """The snapshots from which a rank can resume with other ranks.

    Parameters
    ----------
    since : int
        The label of the first snapshot that this rank ever had.
    history : tuple of Snapshot
        The last snapshot is the current one. The snapshot before it precedes the last computation that exchanged
        anything, since the ranks may have to go back to that snapshot. With ``lost="restore"``, the last snapshot with
        copies comes first.
    """

    since: int
    history: tuple[Snapshot, ...]

    @property
    def params(self) -> Any:
        """The current parameters."""
        return self.history[-1].params

    @property
    def state(self) -> OptimizerState:
        """The current state of the optimizer."""
        return self.history[-1].state

    def moved(self, params: Any) -> "ElasticState":
        """Return this state with new parameters, from an inner step of an outer loop.

        Parameters
        ----------
        params : array or sequence of arrays
            The new parameters; they must not be overwritten while a rank may go back to them.
        """
        return self._replace(history=(*self.history[:-1], self.history[-1]._replace(params=params)))


@dataclass(frozen=True)
class Elastic:
    """Makes the steps of an optimizer, and lets ranks die, leave and join between any two exchanges.

    The steps give the same results as the optimizer's own, bit for bit. After a failed exchange, a rank still has the
    `ElasticState` from before the exchange. The remaining ranks make a new communicator, perhaps with new ranks, and
    call `resume`: they go back to the last snapshot that all of them have, and convert its state to the new number of
    ranks. If `resume` fails too, they repeat this.

    Arrays that only one rank has are lost with it: residuals and, in some optimizers, momenta. With N ranks, worker
    residuals e_i and server residuals e_s, the ranks owe E = mean_i e_i + e_s. A dead rank d held a part D of E: e_d /
    N plus e_s of the chunk that it served. After `resume`, residuals add up to exactly E - D: sent values plus
    residuals are the same as before, minus D.

    Parameters
    ----------
    optimizer : Optimizer or OuterLoop
        The optimizer whose steps are made. For the steps of an `OuterLoop`, use `run`.
    lost : {"drop", "restore"}, default "drop"
        What happens to D. ``"drop"``: it is lost, and at most one step that exchanges is repeated. ``"restore"``:
        after every ``every`` steps, each rank sends the next rank a copy of the arrays that no other rank has. After a
        death, all ranks go back to the last copies that all have completed, and nothing is lost. If a rank dies
        together with the next one, or before the first copies, its arrays are lost as with ``"drop"``.
    every : int, default 100
        Number of steps (outer rounds for an `OuterLoop`) after which the ranks exchange the norms of the arrays that
        only one rank has. `resume` uses the norms to report what was dropped. With ``lost="restore"``, the ranks copy
        these arrays at the same time.

    Notes
    -----
    `resume` returns a report, equal on all ranks:

    - ``ranks``: the number of ranks; ``joined_ranks``: how many of them did not have the snapshot.
    - ``restored_ranks`` and ``dropped_ranks``: how many absent ranks left their arrays in a copy, and how many did not.
    - ``repeated_steps``: the number of steps that some rank had made and that all must make again.
    - ``dropped_KIND``, if the norms are known, for each kind of array that is dropped, such as
      ``dropped_worker_residual``: the norm of these arrays on the dropped ranks when the ranks last exchanged norms. A
      worker residual counts with 1 / N in the mean, a server residual in full.

    A rank that completes a step has received messages from all others in its last exchange. So all others have begun
    that step, and no rank is more than one exchanging step ahead: one snapshot from before that step is enough. This
    snapshot costs the memory of a second set of parameters and moments, since steps cannot overwrite their inputs.
    ``"restore"`` keeps a third set, and sends 32 bits per element of the arrays that only one rank has.

    Momenta and sums that differ between ranks by design, as in `ZeroOneAdam` between synchronisations, become the mean
    over the remaining ranks. In an outer round, the ranks' parameters and the outer gradients under way also become
    means over the remaining ranks. If an array that only the owner of a tensor has is dropped, as in `Muon`, the array
    begins again at zero. The caller is responsible for the state of inner optimizers.

    Examples
    --------
    >>> import numpy as np, qcomp, warnings
    >>> from qcomp.elastic import Elastic
    >>> elastic = Elastic(qcomp.CompressedSGD(learning_rate=0.1, exact=None), lost="restore", every=4)
    >>> def before(comm):
    ...     params = np.zeros(100)
    ...     held = elastic.begin(params, elastic.optimizer.init(params, comm))
    ...     for step in range(6):
    ...         held = elastic.step(held.params - comm.rank, held, comm)
    ...     return held
    >>> survivors = qcomp.comm.run_local(3, before)[:2]  # then the last rank dies
    >>> def after(comm):
    ...     return elastic.resume(survivors[comm.rank], comm)[1]
    >>> with warnings.catch_warnings():
    ...     warnings.simplefilter("ignore")
    ...     report, _ = qcomp.comm.run_local(2, after)
    >>> report["restored_ranks"], report["repeated_steps"]
    (1.0, 2.0)
    """

    optimizer: Optimizer | OuterLoop
    lost: Literal["drop", "restore"] = "drop"
    every: int = 100

    def __post_init__(self) -> None:
        if not isinstance(self.optimizer, Optimizer | OuterLoop):
            raise TypeError(
                f"optimizer is {self.optimizer!r}; expected a qcomp.Optimizer or a qcomp.OuterLoop"
            )
        if self.lost not in ("drop", "restore"):
            raise ValueError(f"lost is {self.lost!r}; expected 'drop' or 'restore'")
        if type(self.every) is not int or self.every < 1:
            raise ValueError(f"every is {self.every!r}; expected an integer of at least 1")

    def begin(self, params: Any, state: OptimizerState) -> ElasticState:
        """Return a rank's `ElasticState` before its first step.

        Parameters
        ----------
        params : array or sequence of arrays
            The parameters.
        state : OptimizerState
            From ``optimizer.init`` or ``load_state_dict``; all ranks must call the same of the two.
        """
        return ElasticState(0, (Snapshot(0, params, state),))

    def step(self, grads: Any, held: ElasticState, comm: Transport) -> ElasticState:
        """Make one step over a communicator, as `Optimizer.step` does.

        Parameters
        ----------
        grads : array or sequence of arrays
            This rank's gradients at ``held.params``.
        held : ElasticState
            From `begin`, `resume` or the last step.
        comm : Communicator
            A communicator with the rank and size of the state.

        Raises
        ------
        CommunicatorError
            If the exchange failed; ``held`` is still valid: see `resume`.
        """
        require_rank(held.state, comm)
        return drive(self.stages(grads, held), comm)

    def stages(self, grads: Any, held: ElasticState) -> Stages[ElasticState]:
        """Make one step as a generator of pure stages.

        Parameters
        ----------
        grads, held
            As for `step`.
        """
        optimizer = self.optimizer
        if isinstance(optimizer, OuterLoop):
            raise TypeError(
                "optimizer is an OuterLoop, whose steps take parameters and no gradients: call run instead of step"
            )
        return self.run_stages(lambda params, state: optimizer.stages(params, grads, state), held)

    def run(
        self,
        computation: Callable[[Any, OptimizerState], Stages[tuple[Any, OptimizerState]]],
        held: ElasticState,
        comm: Transport,
    ) -> ElasticState:
        """Run a computation instead of a step, such as ``QSVRG.epoch_stages`` or ``OuterLoop.stages``.

        Parameters
        ----------
        computation : callable
            Takes the current parameters and state, and returns stages that return new parameters and a new state. For
            an `OuterLoop`, it makes the inner step from these parameters; in the warm-up, it first averages the
            gradients.
        held, comm
            As for `step`.

        Raises
        ------
        CommunicatorError
            As for `step`.
        """
        require_rank(held.state, comm)
        return drive(self.run_stages(computation, held), comm)

    def run_stages(
        self,
        computation: Callable[[Any, OptimizerState], Stages[tuple[Any, OptimizerState]]],
        held: ElasticState,
    ) -> Stages[ElasticState]:
        """`run` as a generator of pure stages.

        Parameters
        ----------
        computation, held
            As for `run`.
        """
        last = held.history[-1]
        shared, owed = last, last.owed
        due = last.left is None and self._is_turn(last.state)
        if due:
            owed = yield from self._tell(last)
            shared = (yield from self._copy(last)) if self.lost == "restore" else last
        (params, state), exchanged = yield from _noted(computation(last.params, last.state))
        new = Snapshot(last.label + 1, params, state, owed=owed)
        history = self._followed(held.history, new, shared, exchanged=due or exchanged)
        return held._replace(history=history)

    def share(self, held: ElasticState, comm: Transport) -> ElasticState:
        """Send the next rank a copy of the arrays that no other rank has, so that nothing is lost if a rank leaves.

        All ranks call this, then some leave, and the others call `resume`. Of two neighbours only one may leave at a
        time; the last rank is a neighbour of the first.

        Parameters
        ----------
        held, comm
            As for `step`.
        """
        require_rank(held.state, comm)
        return drive(self.share_stages(held), comm)

    def share_stages(self, held: ElasticState) -> Stages[ElasticState]:
        """`share` as a generator of pure stages.

        Parameters
        ----------
        held : ElasticState
            As for `step`.
        """
        last = held.history[-1]
        shared = yield from self._copy(last)
        new = shared._replace(label=last.label + 1)  # a new label, since other ranks may not get this far
        return held._replace(history=self._followed(held.history, new, last, exchanged=True))

    def resume(
        self,
        held: ElasticState | None,
        comm: Transport,
        *,
        params: Any = None,
        names: Sequence[str] | None = None,
    ) -> tuple[ElasticState, Report]:
        """Continue with the ranks of another communicator.

        Parameters
        ----------
        held : ElasticState or None
            The last state of this rank; None for a rank that joins.
        comm : Communicator
            A new communicator, whose ranks may have any order. At least one of them must not be new.
        params : array or sequence of arrays, optional
            For a rank that joins: its parameters, with any values, since it receives the others' values.
        names : sequence of str, optional
            For a rank that joins: as for ``optimizer.init``.

        Returns
        -------
        held : ElasticState
        report : dict of str to float
            Equal on all ranks.

        Raises
        ------
        ValueError, MismatchError
            On every rank, if the ranks do not belong to the same job, or have no snapshot in common.
        CommunicatorError
            If an exchange failed; ``held`` is still valid, for another try.

        Warns
        -----
        UserWarning
            If the number of ranks changes, or something is lost.
        """
        return drive(self.resume_stages(held, **place_in(comm), params=params, names=names), comm)

    def resume_stages(
        self,
        held: ElasticState | None,
        *,
        rank: int,
        size: int,
        host: str | None = None,
        params: Any = None,
        names: Sequence[str] | None = None,
        number: int = 0,
    ) -> Stages[tuple[ElasticState, Report]]:
        """`resume` as a generator of pure stages.

        Parameters
        ----------
        held, params, names
            As for `resume`.
        rank, size : int
            This rank's new number, and the new number of ranks.
        host, number
            As for ``optimizer.init_stages``.
        """
        given = params if held is None else held.params
        tensors = as_tensors(given, "params")
        names = names_of(names, tensors) if held is None else held.state.names
        alike = {
            "names": list(names),
            "shapes": [list(p.shape) for p in tensors],
            "dtypes": [dtype_name(p.dtype) for p in tensors],
        }
        yield from handshake_stages(alike, size=size, like=tensors[0])
        texts = yield from gather_texts(json.dumps(_facts_of(held)), size, tensors[0])
        meeting = meet([json.loads(text) for text in texts], restoring=self.lost == "restore")

        here = None
        if held is not None and rank in meeting.members.values():
            here = next(s for s in held.history if s.label == meeting.label)
            given, tensors = here.params, as_tensors(here.params, "params")
        if len(meeting.members) < size:
            root = min(meeting.members.values())
            copies = yield from broadcast_stages(tensors, root=root, rank=rank, size=size)
            if here is None:
                given, tensors = as_given(copies, given), copies
        states = [] if here is None else self._states(here, meeting, rank)
        saved = list(map(self.optimizer.record, states))
        state = yield from resume(
            self.optimizer, saved, tensors, names, Place(rank, size, host, number), lost=meeting.lost
        )
        given, state = self.optimizer.parted(given, state)

        new = Snapshot(meeting.next_label, given, state)
        if here is None or held is None:
            return ElasticState(new.label, (new,)), meeting.report(size)
        kept = tuple(s for s in held.history if s.label <= meeting.label)
        history = self._followed(kept, new, kept[-1], exchanged=True)
        return ElasticState(held.since, history), meeting.report(size)

    def _states(self, here: Snapshot, meeting: Meeting, rank: int) -> list[OptimizerState]:
        """Return the states of the old world that this rank contributes: its own, and the states of dead ranks."""
        states = [self._whole(here)]
        if here.left is not None and rank in meeting.copies.values():
            states.append(here.left)
        if rank == min(meeting.members.values()):
            states += [self._without_own(here, dead) for dead in meeting.lost]
        return states

    def _whole(self, here: Snapshot) -> OptimizerState:
        """Return everything that this rank contributes to a new world, including its parameters in an outer loop."""
        return self.optimizer.whole(here.params, here.state)

    def _is_turn(self, state: OptimizerState) -> bool:
        """Return whether the ranks exchange norms, and copies if any, before the next step."""
        turn, loop = state.step, self.optimizer
        if isinstance(loop, OuterLoop) and state.stage != WARMUP:
            if not loop.exchanges(state):
                return False  # the ranks do not wait for each other in this step
            turn = int(state.numbers[rounds_key(0)])
        return turn % self.every == 0

    def _followed(
        self, history: Sequence[Snapshot], new: Snapshot, last: Snapshot, *, exchanged: bool
    ) -> tuple[Snapshot, ...]:
        """Return the snapshots to keep after a computation; ``last`` replaces the newest one in ``history``.

        If the computation exchanged anything, all ranks have completed the computation before it.
        """
        before = history[:-1]
        if not exchanged:
            return (*before, new) if before and last.left is None else (*history, new)
        copied = [s for s in before if s.left is not None][-1:]
        needed = self.lost == "restore" and history[-1].left is None
        return (*copied, last, new) if needed else (last, new)

    def _tell(self, last: Snapshot) -> Stages[tuple[Mapping[str, float], ...]]:
        """Exchange and return the norms, by kind, of the arrays that only one rank has."""
        squares: dict[str, list[float]] = defaultdict(list)
        for key, x in self._own(self._whole(last)):
            squares[kind_of(key)].append(sum_of_squares(flat(x)))
        norms = {kind: math.sqrt(math.fsum(found)) for kind, found in squares.items()}
        texts = yield from gather_texts(
            json.dumps(norms), last.state.size, as_tensors(last.params, "params")[0]
        )
        return tuple([json.loads(text) for text in texts])

    def _copy(self, last: Snapshot) -> Stages[Snapshot]:
        """Send the next rank the arrays that no other rank has; return the snapshot with the left rank's arrays."""
        state, like = self._whole(last), as_tensors(last.params, "params")[0]
        if state.size == 1:
            return last
        xp = array_namespace(like)
        left, right = (state.rank - 1) % state.size, (state.rank + 1) % state.size
        expected = [x for _, x in self._own(self._without_own(last, left))]
        sizes = [math.prod(x.shape) * itemsize(dtype_name(x.dtype)) for x in expected]
        nothing = xp.zeros((0,), dtype=xp.uint8, device=device(like))
        send = [nothing] * state.size
        send[right] = join(
            [bytes_of(x) if math.prod(x.shape) else nothing for _, x in self._own(state)] or [nothing]
        )
        receive = [0] * state.size
        receive[left] = joined_size(sizes)
        arrived = yield AllToAll(tuple(send), tuple(receive))
        copies = [
            xp.reshape(from_bytes_of(buffer, dtype_name(x.dtype)), x.shape) if math.prod(x.shape) else x
            for buffer, x in zip(split(arrived[left], sizes), expected, strict=True)
        ]
        return last._replace(left=self._with_own(self._without_own(last, left), iter(copies)))

    def _own_kinds(self, state: OptimizerState) -> set[str]:
        """Return the kinds of arrays that only one rank has."""
        owned = self.optimizer.mean_of(state).owned_kinds
        return {WORKER, SERVER, *owned, *self.optimizer.own_kinds(state.stage)}

    def _own(self, state: OptimizerState) -> list[tuple[str, Array]]:
        """Return the arrays that only the state's rank has, with their keys."""
        kinds = self._own_kinds(state)
        arrays = named_arrays(state, self.optimizer.mean_of(state))
        return [(key, x) for key, x in arrays if kind_of(key) in kinds]

    def _with_own(self, state: OptimizerState, arrays: Iterator[Array]) -> OptimizerState:
        """Return a state with ``arrays``, in the order of `_own`, as the arrays that only its rank has."""
        kinds, of_mean = self._own_kinds(state), self.optimizer.mean_of(state).kinds

        def taken(kind: str, group: Sequence[Array]) -> tuple[Array, ...]:
            return tuple([next(arrays) for _ in group]) if kind in kinds else tuple(group)

        momentum, variance = taken("momentum", state.momentum), taken("variance", state.variance)
        worker, server = taken(of_mean[0], state.exchange.worker), taken(of_mean[1], state.exchange.server)
        return state._replace(
            momentum=momentum,
            variance=variance,
            exchange=state.exchange._replace(worker=worker, server=server),
            arrays={kind: taken(kind, group) for kind, group in state.arrays.items()},
        )

    def _without_own(self, here: Snapshot, rank: int) -> OptimizerState:
        """Return the state of another rank, with residuals of zero."""
        state = self._whole(here)._replace(rank=rank)
        exchange = state.exchange._replace(rank=rank)
        if exchange.shapes:
            zeros = self.optimizer.compression.zero_residuals(as_tensors(here.params, "params"), state)
            is_own = self.optimizer.mean_of(state).kinds[1] in self._own_kinds(state)
            exchange = zeros if is_own else zeros._replace(server=exchange.server)
        return state._replace(exchange=exchange)


def _facts_of(held: ElasticState | None) -> Any:
    """Return the facts about its snapshots that a rank sends to the others."""
    if held is None:
        return None
    seats = [
        Seat(s.label, s.state.rank, s.state.size, s.state.step, s.left is not None, s.owed)
        for s in held.history
    ]
    return {"since": held.since, "seats": seats}


def _noted(stages: Stages[Any]) -> Stages[tuple[Any, bool]]:
    """Run stages; return their result, and whether they exchanged anything."""
    exchanged = False

    def ask(request: Exchange) -> Stages[Sequence[Array]]:
        nonlocal exchanged
        exchanged = True
        return (yield request)

    return (yield from through(stages, ask)), exchanged
