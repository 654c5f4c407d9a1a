"""`Asynchronous`: an outer loop in which no rank waits: a round closes with the contributions that have arrived."""

import json
import math
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

from qcomp.core import primitives
from qcomp.core.checkpoint.schema import from_json, shown
from qcomp.core.errors import CommunicatorError, MismatchError
from qcomp.core.mean.averaging import PowerSGD
from qcomp.core.mean.compressed_mean import MeanState
from qcomp.core.numeric.arrays import Array, array_namespace, to_compute_dtype
from qcomp.core.numeric.random import SHARED_RANK
from qcomp.core.optimizers.agreement import choices, stream_of
from qcomp.core.optimizers.compression import Means
from qcomp.core.optimizers.groups import patterns_of
from qcomp.core.optimizers.replica import facts_of, names_of
from qcomp.core.optimizers.tensors import as_given, as_tensors, copy, zeros_like
from qcomp.core.outer.asynchronous_state import AsynchronousState, Outgoing, is_merged, settled
from qcomp.core.outer.contributions import compressed, means_of
from qcomp.core.outer.loop import OuterLoop
from qcomp.core.outer.mailbox import (
    RANKS,
    ROUNDS,
    SENT,
    SHARED,
    Contribution,
    Create,
    Delete,
    Mailbox,
    Member,
    Names,
    Read,
    Requests,
    Sending,
    SharedSnapshot,
    answer,
    numbers_of,
    require_alike,
)
from qcomp.core.outer.requirements import fitting
from qcomp.core.outer.settings import ANCHOR, rounds_key
from qcomp.core.policies.patterns import require_matches
from qcomp.core.reporting import name_ranks
from qcomp.core.settings import plain_numbers
from qcomp.core.state import OptimizerState


@dataclass(frozen=True, kw_only=True)
class Asynchronous:
    """An outer loop in which no rank waits: a round closes with the outer gradients that have arrived.

    Ranks need no connections to each other, and no list of participants. After ``every`` inner steps, each rank leaves
    its compressed outer gradient in a mailbox, and goes on. Once ``quorum`` ranks have done so and ``grace`` seconds
    have passed, the first rank that looks at the mailbox closes the round: it writes a file that names the round's
    contributions. Each rank applies the closed rounds in order when it next looks, so after the same round all ranks
    hold the same shared parameters, bit for bit. A contribution that comes too late for a round counts in the next one.
    A rank that dies delays each of the next ``max_age + 1`` rounds by at most ``grace``; a rank that joins begins with
    the current shared parameters.

    Parameters
    ----------
    loop : OuterLoop
        The settings of a round: ``every``, the outer optimizer, compressor, feedback, exact tensors, and the divisor.
        ``every`` may differ between ranks. Each rank reads all payloads, whatever the topology of ``averaging``.
        Required.
    quorum : int
        How many ranks must contribute before a round closes, at least 1. Required.
    grace : float, default 10
        Seconds from a quorum to the closing of the round, in which further contributions may arrive; training goes on
        meanwhile. If all ranks of the last rounds have contributed, the round closes at once.
    max_age : int, default 2
        The most rounds that may close after a contribution is sent and before it is merged. After more rounds, the
        contribution is void, and its rank sends the same inner steps again, in the next contribution.
    snapshot : int, default 10
        Number of rounds after which the shared parameters are written to the mailbox again, for ranks that join, and
        for ranks that have not looked for as many rounds.
    pause : float, default 1
        Seconds between a rank's looks at the mailbox. A look reads a file and lists a folder.
    timeout : float, default 3600
        Seconds after which a step raises if no round has merged this rank's contribution, for instance because fewer
        ranks than the quorum are alive. It must exceed the time that the ``quorum`` fastest ranks need for ``every``
        steps.

    Raises
    ------
    ValueError
        If a setting is out of range, or ``loop`` has ``fragments``, ``delay``, ``mixing``, ``warmup``, `PowerSGD` or a
        topology with several hops: these need exchanges at the same steps on all ranks.

    Notes
    -----
    Let x be the shared parameters after round v, u a rank's last contribution, and w its inner steps since then. The
    rank's parameters are x - u - w before a round merges u, and x - w afterwards. So every round that a rank applies
    moves its parameters, and no inner step is lost or counted twice: on each rank the inner steps add up to w, plus the
    residual, plus the payload in the mailbox, plus the payloads that rounds have merged (with decay and scale 1, and up
    to the rounding of the parameters). A round with payloads C_i and weights t_i computes D = sum_i t_i C_i / sum_i t_i
    and x' = outer(x, D). Late payloads keep their weight up to ``max_age``.

    For each tensor, a contribution holds an uncompressed head of about 100 bytes, and the payload. Every rank reads the
    contributions of all others: N - 1 in a round. The rank that closes every ``snapshot``-th round writes the shared
    parameters and outer moments, 4 bytes per element each. A state holds the shared parameters, outer moments and
    residuals, and one more copy of the parameters; while a contribution is under way, two more. If a rank dies, its
    steps since its last contribution are lost, and so is its residual. Source: Decoupled DiLoCo (arXiv 2604.21428) for
    the quorum, the grace window and merging by tokens; there, a central syncer replaces the mailbox.

    Examples
    --------
    >>> import numpy as np, qcomp, tempfile
    >>> loop = qcomp.outer.Asynchronous(loop=qcomp.outer.local_sgd(4), quorum=1, grace=0, pause=0)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     mailbox = qcomp.comm.FolderMailbox(folder)
    ...     params, state = loop.begin(np.zeros(2), mailbox)
    ...     while state.version < 3:
    ...         params, state = loop.step(params + 1, state, mailbox)  # an inner step
    >>> state.version, state.step, loop.shared(params, state).tolist()
    (3, 13, [12.0, 12.0])
    """

    loop: OuterLoop
    quorum: int
    grace: float = 10.0
    max_age: int = 2
    snapshot: int = 10
    pause: float = 1.0
    timeout: float = 3600.0

    def __post_init__(self) -> None:
        plain_numbers(self)
        if not isinstance(self.loop, OuterLoop):
            raise TypeError(
                f"loop is {self.loop!r}; expected a qcomp.OuterLoop, such as qcomp.outer.diloco(100)"
            )
        for name, alone in (("fragments", 1), ("delay", 0), ("mixing", 0.0), ("warmup", 0)):
            if (value := getattr(self.loop, name)) != alone:
                raise ValueError(
                    f"loop has {name}={value!r}; expected {alone!r}, since no ranks exchange at the same step"
                )
        averaging = self.loop.averaging
        if isinstance(averaging, PowerSGD) or averaging.topology not in ("two_phase", "all_gather"):
            raise ValueError(
                f"loop has averaging={averaging!r}; expected an Averaging with its default topology or 'all_gather': "
                "every rank reads the payloads of all"
            )
        for name, least in (("quorum", 1), ("max_age", 0), ("snapshot", 1)):
            value = getattr(self, name)
            if type(value) is not int or value < least:
                raise ValueError(f"{name} is {value!r}; expected an integer >= {least}")
        for name in ("grace", "pause", "timeout"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(
                    f"{name} is {getattr(self, name)!r}; expected a finite number of seconds >= 0"
                )

    @property
    def every(self) -> int:
        """Inner steps between two contributions of this rank."""
        return self.loop.every

    def begin(
        self, params: Any, mailbox: Mailbox, names: Sequence[str] | None = None, *, rank: int | None = None
    ) -> tuple[Any, AsynchronousState]:
        """Return the parameters and the state from which this rank begins, or joins, without waiting for other ranks.

        Parameters
        ----------
        params : array or sequence of arrays
            This rank's parameters. The first rank of a mailbox gives them to all; others get the shared parameters.
        mailbox : Mailbox
            A place that no other job uses, such as a `qcomp.comm.FolderMailbox`. The run goes on from the files that
            are already there.
        names : sequence of str, optional
            Names of the parameters, by default their numbers.
        rank : int, optional
            A number below 2**32 - 1 that no rank of the job has ever had; by default a random one. A restarted process
            is a new rank.

        Returns
        -------
        params : array or list of arrays
        state : AsynchronousState

        Raises
        ------
        MismatchError
            If the job of the mailbox has other settings, names, shapes or dtypes.
        CommunicatorError
            If the mailbox cannot be used.
        """
        if not hasattr(mailbox, "create"):
            raise TypeError(f"mailbox is {mailbox!r}; expected a qcomp.comm.FolderMailbox")
        return answer(self.begin_requests(params, mailbox.now(), names, rank=rank), mailbox)

    def begin_requests(
        self, params: Any, now: float, names: Sequence[str] | None = None, *, rank: int | None = None
    ) -> Requests[tuple[Any, AsynchronousState]]:
        """`begin` as a generator of requests to a mailbox.

        Parameters
        ----------
        params, names, rank
            As for `begin`.
        now : float
            Seconds on the mailbox's clock.
        """
        rank = secrets.randbelow(SHARED_RANK) if rank is None else rank
        if type(rank) is not int or not 0 <= rank < SHARED_RANK:
            raise ValueError(f"rank is {rank!r}; expected an integer from 0 to 2**32 - 2")
        tensors = as_tensors(params, "params")
        fresh = self._initial(tensors, names_of(names, tensors))
        facts = self._facts(fresh, tensors)
        if not numbers_of((yield Names(SHARED))):
            first = SharedSnapshot(facts, None, {}, fresh)
            yield Create(f"{SHARED}/0", first.to_bytes())
        snapshot = yield from self._newest(fresh, facts, above=-1)
        if snapshot is None:
            raise CommunicatorError(
                f"begin: the newest file in the folder {SHARED!r} of the mailbox cannot be read: use an empty mailbox"
            )
        if not (yield Create(f"{RANKS}/{rank}", b"")):
            raise ValueError(
                f"rank is {rank}, which another process of this job uses or has used; expected a number that no "
                "process has used, even after a restart: leave rank out to get a random number"
            )
        residuals = zip(zeros_like(tensors), fresh.exact, strict=True)
        state = AsynchronousState(
            rank,
            snapshot.shared,
            facts,
            snapshot.shared.arrays[ANCHOR],
            tuple(x[:0] if exact and x.shape else x for x, exact in residuals),
            is_weighted=snapshot.is_weighted,
            counted=snapshot.counted,
            progress=now,
        )
        state = yield from self._catch_up(state, now)
        return self._placed(tensors, params, state, zeros_like(tensors))

    def step(
        self, params: Any, state: AsynchronousState, mailbox: Mailbox, *, weight: float | None = None
    ) -> tuple[Any, AsynchronousState]:
        """Count an inner step; send what is due, apply the rounds that have closed, and close one if it is time.

        Parameters
        ----------
        params : array or sequence of arrays
            This rank's parameters after an inner step. They are not written to.
        state : AsynchronousState
            From `begin` or the last step.
        mailbox : Mailbox
            As for `begin`.
        weight : float, optional
            How much this step counts in the mean, such as its number of tokens: finite and >= 0. Either all ranks pass
            a weight in every step, or no rank ever does; then each step counts 1.

        Returns
        -------
        params : array or list of arrays
            The parameters from which the next inner step begins, in new arrays.
        state : AsynchronousState
            If a contribution is due, the next call of `step` or `exchange` puts it into the mailbox.

        Raises
        ------
        NonFiniteError
            Only on this rank, if its outer gradient is not finite. Nothing is sent then.
        CommunicatorError
            If the mailbox cannot be used, or no round merges this rank's contribution within ``timeout``. Whatever is
            raised, the parameters and the state passed in are still valid.
        MismatchError
            If only some ranks give weights.
        """
        return answer(self.step_requests(params, state, mailbox.now(), weight=weight), mailbox)

    def step_requests(
        self, params: Any, state: AsynchronousState, now: float, *, weight: float | None = None
    ) -> Requests[tuple[Any, AsynchronousState]]:
        """`step` as a generator of requests to a mailbox.

        Parameters
        ----------
        params, state, weight
            As for `step`.
        now : float
            Seconds on the mailbox's clock.
        """
        given: Any = weight
        if weight is not None and not (isinstance(given, Real) and 0 <= float(given) < math.inf):
            raise ValueError(f"weight is {weight!r}; expected a finite number >= 0")
        if state.is_weighted not in (None, weight is not None):
            raise MismatchError(
                f"weight is {weight!r}, but the ranks of this job pass {'one' if state.is_weighted else 'none'}: pass "
                "a weight in every step on all ranks, or in none"
            )
        state = state._replace(
            step=state.step + 1,
            since=state.since + 1,
            weight=state.weight + (1.0 if weight is None else float(weight)),
            is_weighted=weight is not None,
        )
        new, state = yield from self.exchange_requests(params, state, now)
        if self.departs(state):
            state = self._departed(as_tensors(new, "params"), state)
        return new, state

    def exchange(
        self, params: Any, state: AsynchronousState, mailbox: Mailbox
    ) -> tuple[Any, AsynchronousState]:
        """Do what `step` does, but count no inner step. Call it to send at once, or after the last step.

        Parameters
        ----------
        params, state, mailbox
            As for `step`.
        """
        return answer(self.exchange_requests(params, state, mailbox.now()), mailbox)

    def exchange_requests(
        self, params: Any, state: AsynchronousState, now: float
    ) -> Requests[tuple[Any, AsynchronousState]]:
        """`exchange` as a generator of requests to a mailbox.

        Parameters
        ----------
        params, state
            As for `step`.
        now : float
            Seconds on the mailbox's clock.
        """
        tensors, before = fitting(params, state.shared), state
        if state.sent is not None and not state.sent.is_there:
            state = yield from self._send(state, state.sent, now)
        elif now - state.looked < self.pause:
            return params, state
        state = (yield from self._catch_up(state, now))._replace(looked=now)
        if state.version == before.version:
            state = yield from self._close(state, now)
        if state.version == before.version:
            yield from self._require_progress(state, now)
            return params, state
        sent = before.sent
        unmerged = () if sent is None or is_merged(sent, state) else sent.moved
        return self._placed(tensors, params, state, self._moved(tensors, before), unmerged)

    def departs(self, state: AsynchronousState) -> bool:
        """Return whether a contribution is due: after enough inner steps, once the last contribution is merged.

        Parameters
        ----------
        state : AsynchronousState
            The state of the last step.
        """
        return state.sent is None and state.since >= self.every and state.weight > 0

    def shared(self, params: Any, state: AsynchronousState) -> Any:
        """Return the shared parameters after round ``state.version``, to evaluate or publish.

        Parameters
        ----------
        params : array or sequence of arrays
            This rank's parameters, which give the dtypes.
        state : AsynchronousState
            The state of the last step.

        Returns
        -------
        array or list of arrays
            New arrays.
        """
        return self.loop.shared(params, state.shared)

    def _initial(self, tensors: Sequence[Array], names: tuple[str, ...]) -> OptimizerState:
        """Return the state, made from the parameters, that ranks share before the first round."""
        state = self.loop.initial_state(tensors, names, 0, 1)
        require_matches("groups", patterns_of(self.loop.moves()[0]), names)
        return state._replace(
            exchange=MeanState(0, 1, (), ()),
            numbers={key: value for key, value in state.numbers.items() if key != rounds_key(0)},
            stream=stream_of(names, [tuple(x.shape) for x in tensors]),
        )

    def _facts(self, fresh: OptimizerState, tensors: Sequence[Array]) -> dict[str, Any]:
        """Return the facts that must be equal on all ranks."""
        facts = facts_of(self.loop, fresh.names, tensors)
        settings = {
            name: text for name, text in facts.pop("settings").items() if name not in ("every", "topology")
        }
        own = {name: getattr(self, name) for name in ("quorum", "max_age", "snapshot")}
        return {"format": 1, **own, **settings, **facts, "compressed": choices(fresh)}

    def _newest(
        self, like: OptimizerState, facts: Mapping[str, Any] | None, above: int
    ) -> Requests[SharedSnapshot | None]:
        """Return the newest snapshot, if it is from after round ``above`` and can be read yet; else None."""
        last = above
        while True:
            number = max(numbers_of((yield Names(SHARED))), default=above)
            if number <= last:  # no newer snapshot has replaced the last one
                return None
            last = number
            data = yield Read(f"{SHARED}/{number}")
            if data is None:
                continue
            if facts is not None:
                require_alike(facts, SharedSnapshot.facts_in(data))
            return SharedSnapshot.from_bytes(data, like, self.loop.outer)

    def _send(self, state: AsynchronousState, sent: Outgoing, now: float) -> Requests[AsynchronousState]:
        """Put a contribution into the mailbox, where an interrupted step may already have put it."""
        if not (yield Create(sent.name.path, sent.data)):
            found = yield Read(sent.name.path)
            if found not in (None, sent.data):
                raise CommunicatorError(
                    f"step: rank {state.rank} has already sent another contribution {sent.name.number}: a state was "
                    "used twice; go on from the last state that step has returned, or call begin"
                )
        return state._replace(sent=sent._replace(is_there=True), progress=now)

    def _catch_up(self, state: AsynchronousState, now: float) -> Requests[AsynchronousState]:
        """Apply all rounds that have closed."""
        while (after := (yield from self._next(state))) is not None:
            state = after._replace(progress=now, quorum_since=None)
        return state

    def _next(self, state: AsynchronousState) -> Requests[AsynchronousState | None]:
        """Return the state after the next round, or after the round of a snapshot; None if neither can be read yet."""
        data = yield Read(f"{ROUNDS}/{state.version + 1}")
        if data is None:
            return None
        names = self._accepted(data, state)
        contributions = []
        for name in names:
            found = yield Read(name.path)
            if found is None:  # not complete yet, or deleted if this rank has not looked for many rounds
                snapshot = yield from self._newest(state.shared, None, above=state.version)
                return None if snapshot is None else self._jumped(state, snapshot)
            contributions.append(Contribution.from_bytes(found, state.shared.arrays[ANCHOR][0]))
        return self._applied(state, names, contributions)

    def _accepted(self, data: bytes, state: AsynchronousState) -> list[Sending]:
        """Return the contributions that a closed round names; raise CommunicatorError if it may not merge these."""
        try:
            names = [Sending(*map(int, each)) for each in from_json(data)]
        except (TypeError, ValueError):
            names = []
        if len(names) < self.quorum or names != self._open(names, state):
            raise CommunicatorError(
                f"step: round {state.version + 1} is {shown(data.decode(errors='replace'))}; expected at least "
                f"{self.quorum} contributions of different ranks, none merged before, and at most {self.max_age} "
                "rounds old: does another job use this mailbox?"
            )
        return names

    def _open(self, names: Sequence[Sending], state: AsynchronousState) -> list[Sending]:
        """Return the contributions that the next round may merge: one from each rank, in the order of the ranks."""
        found: dict[int, Sending] = {}
        for name in sorted(names, key=lambda name: (name.rank, name.number)):
            last, _ = state.counted.get(name.rank, (0, 0))
            if name.number > last and 0 <= state.version - name.version <= self.max_age:
                found.setdefault(name.rank, name)
        return list(found.values())

    def _close(self, state: AsynchronousState, now: float) -> Requests[AsynchronousState]:
        """Close the next round if it is time, and apply it; the first rank to close it chooses its contributions."""
        listed = map(Sending.named, (yield Names(SENT)))
        names = self._open([name for name in listed if name is not None], state)
        if len(names) < self.quorum:
            return state._replace(quorum_since=None)
        since = now if state.quorum_since is None else state.quorum_since
        known = {rank for rank, (_, last) in state.counted.items() if last >= state.version - self.max_age}
        if now - since < self.grace and not (known and known <= {name.rank for name in names}):
            return state._replace(quorum_since=since)
        number = state.version + 1
        is_mine = yield Create(f"{ROUNDS}/{number}", json.dumps(names).encode())
        state = yield from self._catch_up(state._replace(quorum_since=since), now)
        if is_mine and state.version == number and not number % self.snapshot:
            yield from self._save(state)
        return state

    def _save(self, state: AsynchronousState) -> Requests[None]:
        """Write a snapshot, and delete files that only ranks more than ``snapshot`` rounds behind could need."""
        content = SharedSnapshot(state.facts, state.is_weighted, state.counted, state.shared).to_bytes()
        yield Create(f"{SHARED}/{state.version}", content)
        oldest = state.version - self.snapshot
        for number in numbers_of((yield Names(SHARED))):
            if number < oldest:
                yield Delete(f"{SHARED}/{number}")
        for name in map(Sending.named, (yield Names(SENT))):
            if name is not None and name.version + self.max_age < oldest:
                yield Delete(name.path)

    def _require_progress(self, state: AsynchronousState, now: float) -> Requests[None]:
        """Raise CommunicatorError if no round has merged this rank's contribution for too long."""
        if state.sent is None or now - state.progress <= self.timeout:
            return
        listed = map(Sending.named, (yield Names(SENT)))
        here = [name.rank for name in self._open([name for name in listed if name is not None], state)]
        is_closed = (yield Read(f"{ROUNDS}/{state.version + 1}")) is not None
        raise CommunicatorError(
            f"step: no round could be applied for {now - state.progress:.0f} s after round {state.version}: "
            + (
                "the next round has closed, but one of its contributions cannot be read"
                if is_closed
                else f"the quorum is {self.quorum}, and {name_ranks(here) if here else 'no rank'} contributed (this is "
                f"rank {state.rank}): other ranks have died, are slower than timeout allows, or use another "
                "mailbox"
            )
        )

    def _applied(
        self, state: AsynchronousState, names: Sequence[Sending], contributions: Sequence[Contribution]
    ) -> AsynchronousState:
        """Return the state after a round that merges these contributions."""
        shared, number = state.shared, state.version + 1
        if {each.is_weighted for each in contributions} != {contributions[0].is_weighted} or (
            state.is_weighted not in (None, contributions[0].is_weighted)
        ):
            given = [name.rank for name, each in zip(names, contributions, strict=True) if each.is_weighted]
            raise MismatchError(
                f"step: {name_ranks(name.rank for name in names)} contributed to round {number}, and "
                f"{name_ranks(given) if given else 'no rank'} gave a weight; expected a weight from all of these and "
                "this rank, or from none: pass a weight in every step on all ranks, or in none"
            )
        means = self._means(shared, contributions)
        anchor, moved = self.loop.outer.apply(
            list(shared.arrays[ANCHOR]), Means(means, shared.exchange), shared
        )
        members = [
            Member(name.rank, name.number, state.version - name.version, each.weight)
            for name, each in zip(names, contributions, strict=True)
        ]
        return settled(
            state._replace(
                shared=moved._replace(step=number, arrays={**moved.arrays, ANCHOR: tuple(anchor)}),
                counted={**state.counted, **{m.rank: (m.number, number) for m in members}},
                members=tuple(members),
                is_weighted=contributions[0].is_weighted,
            ),
            self.max_age,
        )

    def _jumped(self, state: AsynchronousState, snapshot: SharedSnapshot) -> AsynchronousState:
        """Return the state after the round in which a snapshot was written."""
        after = state._replace(
            shared=snapshot.shared, counted=snapshot.counted, members=(), is_weighted=snapshot.is_weighted
        )
        return settled(after, self.max_age)

    def _means(self, shared: OptimizerState, contributions: Sequence[Contribution]) -> tuple[Array, ...]:
        """Return the weighted mean of some contributions, which are added in the given order."""
        return means_of(self.loop, shared, contributions)

    def _departed(self, tensors: Sequence[Array], state: AsynchronousState) -> AsynchronousState:
        """Return the state with a contribution to send: this rank's inner steps, and its residual."""
        moved = self._moved(tensors, state)
        payloads, owed = compressed(self.loop, moved, state)
        number = state.number + 1
        content = Contribution(state.weight, bool(state.is_weighted), payloads)
        sent = Outgoing(
            Sending(state.version, state.rank, number),
            content.to_bytes(),
            tuple(moved),
            owed,
            state.weight,
            state.since,
        )
        start = tuple(copy(to_compute_dtype(p)) for p in tensors)
        return state._replace(start=start, sent=sent, number=number, since=0, weight=0.0)

    @staticmethod
    def _moved(tensors: Sequence[Array], state: AsynchronousState) -> list[Array]:
        """Return how far inner steps have moved the parameters since the last contribution."""
        pairs = zip(state.start, tensors, strict=True)
        return [primitives.descend(start, to_compute_dtype(p), 1.0, 0.0) for start, p in pairs]

    @staticmethod
    def _placed(
        tensors: Sequence[Array],
        params: Any,
        state: AsynchronousState,
        moved: Sequence[Array],
        unmerged: Sequence[Array] = (),
    ) -> tuple[Any, AsynchronousState]:
        """Return this rank's parameters: the shared parameters, minus its inner steps that no round has merged.

        Half precision rounds these parameters. `start` is adjusted, so that rounding does not count as an inner step.
        """
        new, start = [], []
        for i, (p, x, w) in enumerate(zip(tensors, state.shared.arrays[ANCHOR], moved, strict=True)):
            place = x - unmerged[i] - w if unmerged else x - w
            new.append(array_namespace(p).astype(place, p.dtype, copy=False))
            begun = to_compute_dtype(new[i]) + w
            start.append(begun + unmerged[i] if unmerged and state.sent is None else begun)
        return as_given(new, params), state._replace(start=tuple(start))
