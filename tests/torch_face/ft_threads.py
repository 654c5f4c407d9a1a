"""Replicas under a manager like torchft's, as threads; one of them dies in an exchange that the test chooses.

Nothing depends on time. A replica that waits in an exchange for a replica that has gone raises `CommunicatorError`; a
quorum forms when all living replicas have asked for it.
"""

import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import qcomp
import qcomp.torch.ft

__all__ = ["Lighthouse", "Strike"]

TIMEOUT = 60


class Killed(BaseException):
    """Ends the thread of a replica."""


class Strike(NamedTuple):
    """The exchange in which a replica dies, counted from its first one, and the others that still get its bytes."""

    replica: int
    exchange: int
    reached: frozenset[int]


class Lighthouse:
    """Runs replicas; a new replica may follow one that dies.

    Parameters
    ----------
    main : callable
        What a replica does, given its number, a manager and a group.
    strike : Strike, optional
    follows : bool
        Whether a new replica starts when one has died.
    """

    def __init__(self, main: Callable[[int, Any, Any], Any], strike: Strike | None, *, follows: bool) -> None:
        self.changed = threading.Condition()
        self.results: dict[int, Any] = {}
        self.struck = False
        self._main, self._strike, self._follows = main, strike, follows
        self._live: set[int] = set()
        self._asking: set[int] = set()
        self._rounds = 0
        self._members: tuple[int, ...] = ()
        self._is_broken = True
        self._back: tuple[int, int] | None = None
        self.quorum = -1
        self.board = _Board(self)
        self._threads: list[threading.Thread] = []

    def run(self, count: int) -> dict[int, Any]:
        """Return the results of the replicas that ended normally."""
        with self.changed:
            for _ in range(count):
                self._start()
        for thread in self._threads:  # the list grows if a new replica follows
            thread.join(TIMEOUT)
            assert not thread.is_alive()
        return self.results

    def _start(self) -> None:
        replica = len(self._threads)
        self._live.add(replica)
        thread = threading.Thread(target=self._life, args=(replica,), daemon=True)
        self._threads.append(thread)
        thread.start()

    def _life(self, replica: int) -> None:
        result: Any = None
        try:
            result = self._main(replica, Manager(self, replica, group := Group()), group)
        except Killed:
            pass
        except Exception as error:
            result = error
        with self.changed:
            if result is not None:
                self.results[replica] = result
            self._live.discard(replica)
            self.board.gone.add(replica)
            if result is None:
                self.struck = True
                if self._follows:
                    self._start()
            self._try_quorum()
            self.changed.notify_all()

    def sleep(self, replica: int, rounds: int) -> None:
        """Let the calling replica miss so many quorums, as if its process were stopped."""
        with self.changed:
            self._live.discard(replica)
            self.board.gone.add(replica)
            self._back = self._rounds + rounds, replica
            self._try_quorum()
            self.changed.notify_all()
            assert self.changed.wait_for(lambda: replica in self._live, TIMEOUT)

    def ask(self, replica: int, *, failed: bool) -> tuple[int, tuple[int, ...], "_Board"]:
        """Wait for the next quorum; return its number, its members, and their board."""
        with self.changed:
            mine = self._rounds
            self._asking.add(replica)
            self._is_broken |= failed
            self._try_quorum()
            assert self.changed.wait_for(lambda: self._rounds > mine, TIMEOUT)
            return self.quorum, self._members, self.board

    def _try_quorum(self) -> None:
        if self._back is not None and self._rounds >= self._back[0]:
            self._live.add(self._back[1])
            self._back = None
            self.changed.notify_all()
        if not self._live or self._asking < self._live:
            return
        members = tuple(sorted(self._live))
        if self._is_broken or members != self._members:
            self.quorum += 1
            self._members, self.board, self._is_broken = members, _Board(self), False
        self._asking.clear()
        self._rounds += 1
        self.changed.notify_all()

    def strikes(self, replica: int, exchange: int) -> frozenset[int] | None:
        """Return the replicas that are reached if a replica dies in this exchange; None if it does not."""
        strike = self._strike
        return strike.reached if strike is not None and (replica, exchange) == strike[:2] else None


class _Board:
    """The messages that the replicas of a quorum leave for each other."""

    def __init__(self, lighthouse: Lighthouse) -> None:
        self.gone: set[int] = set()
        self._changed = lighthouse.changed
        self._left: dict[tuple[int, int, int], Any] = {}

    def exchange(self, number: int, own: int, send: dict[int, Any]) -> dict[int, Any]:
        """Leave messages for others, and return theirs, by replica."""
        with self._changed:
            for other, data in send.items():
                self._left[number, own, other] = data
            self._changed.notify_all()

            def is_over() -> bool:
                return all((number, other, own) in self._left or other in self.gone for other in send)

            assert self._changed.wait_for(is_over, TIMEOUT)
            missing = [other for other in send if (number, other, own) not in self._left]
            if missing or own in self.gone:
                self.gone.add(own)
                self._changed.notify_all()
                raise qcomp.CommunicatorError(f"replicas {missing} have gone")
            return {other: self._left.pop((number, other, own)) for other in send}


class Communicator:
    """The communicator of one replica in a quorum."""

    def __init__(
        self, lighthouse: Lighthouse, manager: "Manager", members: Sequence[int], board: _Board
    ) -> None:
        self.rank, self.size = members.index(manager.replica), len(members)
        self._members, self._board = members, board
        self._lighthouse, self._manager = lighthouse, manager
        self._number = 0

    def all_to_all(self, send: Sequence[Any], receive: Sequence[int]) -> list[Any]:
        """Exchange messages, or die."""
        replica = self._manager.replica
        parts = {other: part.clone() for other, part in zip(self._members, send, strict=True)}
        reached = self._lighthouse.strikes(replica, self._manager.exchanges)
        self._manager.exchanges += 1
        self._number += 1
        if reached is not None:
            with self._lighthouse.changed:
                for other in reached & parts.keys():
                    self._board._left[self._number, replica, other] = parts[other]
                self._board.gone.add(replica)
                self._lighthouse.changed.notify_all()
            raise Killed
        arrived = self._board.exchange(self._number, replica, parts)
        found = [arrived[other] for other in self._members]
        assert [len(x) for x in found] == list(receive)
        return found

    def all_gather(self, send: Any, receive: Sequence[int]) -> list[Any]:
        """Send the same message to all."""
        return self.all_to_all([send] * self.size, receive)

    def close(self) -> None:
        """Mark this replica as gone, so that no replica waits for it."""
        with self._lighthouse.changed:
            self._board.gone.add(self._manager.replica)
            self._lighthouse.changed.notify_all()


class Group(qcomp.torch.ft.ProcessGroup):
    """A group that a `Manager` configures without a store."""

    def __init__(self) -> None:
        self.comm: Any = None
        self.quorum = -1


class Manager:
    """The part of torchft's manager that `qcomp.torch.ft` uses."""

    _use_async_quorum = False

    def __init__(self, lighthouse: Lighthouse, replica: int, group: Group) -> None:
        self.replica, self.exchanges, self.step = replica, 0, 0
        self._lighthouse, self._group = lighthouse, group
        self._error: Exception | None = None
        self._has_failed = False

    def register_state_dict_fn(self, *_: Any) -> None:
        """Do nothing: no other state heals."""

    def sleep(self, rounds: int) -> None:
        """Miss so many quorums."""
        self._lighthouse.sleep(self.replica, rounds)

    def start_quorum(self) -> None:
        """Ask for a quorum, and connect if it is new."""
        number, members, board = self._lighthouse.ask(self.replica, failed=self._has_failed)
        self._error, self._has_failed = None, False
        if number != self._group.quorum:
            self._group.abort()
            self._group.quorum = number
            self._group.comm = Communicator(self._lighthouse, self, members, board)

    def wait_quorum(self) -> None:
        """Return at once: the quorum is there already."""

    def errored(self) -> Exception | None:
        """Return the error reported since the quorum."""
        return self._error

    def report_error(self, error: Exception) -> None:
        """Store an error."""
        self._error = error

    def should_commit(self) -> bool:
        """Return whether no error was reported and there is a connection."""
        self._has_failed = self._error is not None or self._group.comm is None
        self.step += not self._has_failed
        return not self._has_failed

    def current_step(self) -> int:
        """Return the number of steps: the last one set, plus commits since."""
        return self.step

    def batches_committed(self) -> int:
        """Return a number that nothing depends on."""
        return 0

    def load_state_dict(self, counts: dict[str, int]) -> None:
        """Set the number of steps."""
        self.step = counts["step"]
