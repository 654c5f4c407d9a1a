"""The state of a rank in an asynchronous outer loop, and whether a round has merged its contribution."""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from qcomp.core.numeric.arrays import Array
from qcomp.core.outer.mailbox import Member, Sending
from qcomp.core.state import OptimizerState


class Outgoing(NamedTuple):
    """The contribution of this rank that no round has merged yet."""

    name: Sending
    data: bytes
    moved: tuple[Array, ...]
    """How far the inner steps in the contribution moved this rank's parameters."""
    owed: tuple[Array, ...]
    """The residuals that this rank keeps once a round has merged the contribution."""
    weight: float
    steps: int
    is_there: bool = False
    """Whether the contribution is in the mailbox."""


class AsynchronousState(NamedTuple):
    """The state of a rank of an `Asynchronous` loop between two inner steps.

    Parameters
    ----------
    rank : int
        The number of this rank.
    shared : OptimizerState
        The shared parameters and outer moments after round `version`, equal on all ranks that have applied this round.
    facts : mapping
        The facts that must be equal on all ranks.
    start : tuple of arrays
        Where this rank's parameters would be without its inner steps since its last contribution.
    owed : tuple of arrays
        The residual of each compressed tensor, and an empty array for each other tensor.
    sent : object or None
        The contribution that no round has merged yet.
    number : int
        How many contributions this rank has made.
    step, since : int
        Inner steps of this rank: in total, and since its last contribution.
    weight : float
        The sum of the weights of the inner steps since the last contribution.
    is_weighted : bool or None
        Whether the ranks give weights; None before the first step.
    counted : mapping of int to pair of int
        For each rank, the number of its last merged contribution, and the round that merged it.
    members : tuple of Member
        The contributions that the last round has merged, each with its rank, number, age in rounds and weight.
    quorum_since, progress, looked : float
        Seconds on the mailbox's clock when this rank first saw the present quorum (None without a quorum), when it last
        applied a round or sent a contribution, and when it last looked at the mailbox.
    """

    rank: int
    shared: OptimizerState
    facts: Mapping[str, Any]
    start: tuple[Array, ...]
    owed: tuple[Array, ...]
    sent: Outgoing | None = None
    number: int = 0
    step: int = 0
    since: int = 0
    weight: float = 0.0
    is_weighted: bool | None = None
    counted: Mapping[int, tuple[int, int]] = {}
    members: tuple[Member, ...] = ()
    quorum_since: float | None = None
    progress: float = 0.0
    looked: float = -math.inf

    @property
    def version(self) -> int:
        """The number of rounds that this rank has applied."""
        return self.shared.step


def settled(state: AsynchronousState, max_age: int) -> AsynchronousState:
    """Return the state without its contribution if a round has merged it, or if it is too old for any round.

    A contribution that is too old is taken back: the residual from before it stays, and its inner steps count as new.
    """
    sent = state.sent
    if sent is None:
        return state
    if is_merged(sent, state):
        return state._replace(sent=None, owed=sent.owed)
    if state.version - sent.name.version <= max_age:
        return state
    return state._replace(sent=None, since=state.since + sent.steps, weight=state.weight + sent.weight)


def is_merged(sent: Outgoing, state: AsynchronousState) -> bool:
    """Return whether a round has merged a contribution of this rank."""
    number, _ = state.counted.get(state.rank, (0, 0))
    return number >= sent.name.number
