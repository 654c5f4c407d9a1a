"""Gathers the states of all ranks on one rank, and warns if only some ranks save although states differ."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Mapping
from typing import Any, NamedTuple

from qcomp.core.checkpoint.gathering import gather_dicts, of_rank
from qcomp.core.checkpoint.manifest import own_kinds_in, phrase
from qcomp.core.mean.stages import drive, owned
from qcomp.core.optimizers.replica import Replica, owner_of
from qcomp.core.reporting import warn_caller
from qcomp.core.state import OptimizerState
from qcomp.private_names.frameworks import saves_one_rank


class Saves:
    """The saves of one optimizer, hook or outer loop.

    `gather` sends the states of all ranks to one rank. `note` warns once if only some ranks save although each has its
    own arrays. Until `forget`, ``gathered`` has the states of all ranks, under the keys that `of_rank` returns.
    """

    def __init__(self) -> None:
        self.gathered: dict[str, dict[str, Any]] = {}
        self._is_gathered = False
        self._counted: _Save | None = None
        self._unchecked: _Save | None = None
        self._has_warned = False

    def gather(
        self,
        own: Mapping[str, Any],
        replica: Replica[Any],
        state: OptimizerState,
        comm: Any,
        *,
        like: Any,
        root: int,
    ) -> None:
        """Send each rank's saved dict ``own`` to the rank ``root``, which keeps them all in host memory.

        All ranks must call this. ``like`` gives the device of the buffers.
        """
        owner = owner_of(replica, state)._replace(doing=f"gather_states() after step {state.step}")
        stages = gather_dicts(own, rank=state.rank, size=state.size, like=like, root=root)
        self.gathered = {
            of_rank(one["rank"], one["size"]): {
                key: x.cpu() if hasattr(x, "cpu") else x for key, x in one.items()
            }
            for one in drive(owned(stages, owner), comm)
        }
        self._is_gathered = True

    @property
    def of_all(self) -> dict[str, tuple[dict[str, Any]]]:
        """The gathered dicts, each in a tuple, which torch.distributed.checkpoint reads whole; see `states_in`."""
        return {key: (one,) for key, one in self.gathered.items()}

    def forget(self) -> None:
        """Drop what was gathered, because the state has changed."""
        self.gathered = {}
        self._is_gathered = False

    def note(
        self,
        replica: Replica[Any],
        state: OptimizerState,
        saved: Mapping[str, Any],
        comm: Any,
        *,
        within: int = 0,
    ) -> None:
        """Take note that this rank saves a state, and warn if only some ranks do.

        A rank cannot ask the others, since it may be the only one that saves. So it counts its saves in the counter
        that all ranks share, if its communicator has ``count``. When it saves again after a later exchange of all
        ranks, the count of the earlier save is complete. A framework that saves only one rank's state is recognised at
        once. ``within`` is the number of steps that an exchange may span.
        """
        if state.size == 1 or self._is_gathered or self._has_warned:
            return
        kinds = own_kinds_in(replica, saved)
        framework = saves_one_rank()
        if framework is not None:
            if kinds:
                self._warn(f"{framework} saves the state of only one rank", kinds)
            return
        now = _Save.of(state, comm, kinds)
        if now is None:
            return
        before = None if self._unchecked is None or self._unchecked.comm is not now.comm else self._unchecked
        with contextlib.suppress(RuntimeError):  # the store of the counts may have ended
            if before and now.step - before.step > within and now.bytes_sent > before.bytes_sent:
                savers = comm.count(before.key, 0)
                if savers < state.size and (kinds or before.kinds):
                    text = f"{savers} of {state.size} ranks called state_dict after step {before.step}"
                    self._warn(text, kinds or before.kinds)
                before = None
            if self._counted is None or (self._counted.comm, self._counted.key) != (now.comm, now.key):
                comm.count(now.key, 1)
                self._counted = now
        self._unchecked = before or now

    def _warn(self, what: str, kinds: tuple[str, ...]) -> None:
        self._has_warned = True
        warn_caller(
            f"{what}, but each rank keeps its own {phrase(kinds)}, and a run cannot resume without them: call "
            "gather_states() on all ranks before one rank saves for all, or let every rank save its own state"
        )


class _Save(NamedTuple):
    """A save of this rank."""

    key: str
    """The name of the counter in which the ranks count this save."""
    step: int
    comm: Any
    """A weak reference, which lets the communicator end."""
    bytes_sent: int
    """The bytes that this rank had sent over the communicator; once it has sent more, another exchange has begun."""
    kinds: tuple[str, ...]
    """The kinds of arrays that differ between ranks."""

    @classmethod
    def of(cls, state: OptimizerState, comm: Any, kinds: tuple[str, ...]) -> _Save | None:
        """Return the record of saving a state now; None if the ranks cannot count saves."""
        if not hasattr(comm, "count"):
            return None
        key = f"save of {state.number}, {state.stream} after {state.step}, {state.skipped}"
        return cls(key, state.step, weakref.ref(comm), comm.bytes_sent, kinds)
