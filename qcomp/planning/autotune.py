"""Chooses the fastest of several methods of averaging, by timing them during the first steps."""

import math
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from qcomp.core.handshake import handshake
from qcomp.core.mean.compressed_mean import CompressedMean, MeanState
from qcomp.core.mean.owed import owed, require_residuals
from qcomp.core.mean.stages import Transport
from qcomp.core.numeric.arrays import Array, array_namespace, as_list, flat, shaped_like, to_compute_dtype
from qcomp.core.numeric.random import Key
from qcomp.core.settings import plain_numbers
from qcomp.planning.network import Clock, agreed

_CLOSE = 0.5
"""Methods that take longer than the fastest by at most this fraction are timed again."""


class Tuning(NamedTuple):
    """The progress of the choice, on this rank."""

    times: tuple[float, ...] = ()
    """The seconds of each step of this round so far: first all steps of one method, then all of the next."""
    seconds: tuple[float, ...] = ()
    """Seconds of a step of each method, the same on all ranks; empty before the end of the first round."""
    chosen: int | None = None
    """The number of the chosen method, the same on all ranks."""
    again: tuple[int, ...] = ()
    """The numbers of the methods in the second round, in order; empty before it, and if there is no second round."""


class TunedState(NamedTuple):
    """A rank's state between two means of an `Autotune`."""

    tuning: Tuning
    mean: MeanState
    """The state of the next step's method."""
    nodes: tuple[tuple[int, ...], ...]
    """The node of each rank, for each method; empty for methods that do not depend on nodes."""
    owed: tuple[Array, ...] = ()
    """What the previous method still owes; the next step adds it to this rank's tensors."""


@dataclass(frozen=True)
class Autotune:
    """Tries each of several means for a few steps, then keeps the fastest: used like a `CompressedMean`.

    No step is wasted: each returns a mean of its inputs. When a method is left, each rank adds its part of what that
    method still owes to its values in the next step. For DistributedDataParallel, pass the `Autotune` to
    `qcomp.integrations.ddp.autotune`, which times whole steps, including overlap.

    Parameters
    ----------
    methods : mapping of str to CompressedMean
        The methods that may be chosen, by name, in order of preference: first those that lose the least, such as
        ``CompressedMean(Identity())``. The state of each must hold residuals of what it has lost, or nothing.
    steps : int, default 5
        Timed steps of each method in a round, at least 1, after one that does not count. The median counts.
    margin : float, default 0.05
        A later method is chosen only if every earlier one takes longer than the fastest by more than this fraction,
        >= 0.
    clock : callable, default time.perf_counter
        Returns the time in seconds on this rank.

    Raises
    ------
    ValueError
        If there are no methods, a method's state holds estimates instead of residuals, or a number is out of range.

    Notes
    -----
    A method's time is the largest of the ranks' medians, that is, the time of the slowest rank. Methods that take at
    most 1.5 times as long as the fastest are timed in a second round, in reverse order. The lower of the two times
    counts, since other work on the machine can only make steps slower. All ranks compute the choice from the same
    numbers: once a round, every rank sends 8 bytes per method to each other rank. The choice is the first method whose
    time is at most (1 + margin) times the fastest time. It is final.

    Sum identity: after any step, the means add up to the sum of the exact means, minus what the current method and
    ``TunedState.owed`` still owe, up to rounding.

    Examples
    --------
    >>> import numpy as np, qcomp
    >>> exact, sign = qcomp.CompressedMean(qcomp.Identity()), qcomp.CompressedMean(qcomp.ScaledSign())
    >>> tuner = qcomp.planning.Autotune({"exact": exact, "1 bit": sign}, steps=1)
    >>> def rank_main(comm):
    ...     x = np.full(64, float(comm.rank), dtype=np.float32)
    ...     state = tuner.init(x, comm)
    ...     for step in range(8):
    ...         mean, state = tuner(x, state, comm)
    ...     return tuner.chosen(state.tuning) in tuner.methods
    >>> qcomp.comm.run_local(2, rank_main)
    [True, True]
    """

    methods: Mapping[str, CompressedMean]
    steps: int = 5
    margin: float = 0.05
    clock: Clock = time.perf_counter

    def __post_init__(self) -> None:
        plain_numbers(self)
        if not isinstance(self.methods, Mapping) or not self.methods:
            raise ValueError(f"methods is {self.methods!r}; expected a qcomp.CompressedMean for each name")
        for name, mean in self.methods.items():
            if not isinstance(name, str) or not isinstance(mean, CompressedMean):
                raise TypeError(
                    f"methods has {name!r}: {mean!r}; expected a qcomp.CompressedMean for each name"
                )
            require_residuals(mean)
        if type(self.steps) is not int or self.steps < 1:
            raise ValueError(f"steps is {self.steps!r}; expected an integer, at least 1")
        if not 0 <= self.margin < math.inf:
            raise ValueError(f"margin is {self.margin!r}; expected a finite number >= 0")

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the methods, in order."""
        return tuple(self.methods)

    def turn(self, tuning: Tuning) -> int:
        """Return the number of the method of the next step.

        Parameters
        ----------
        tuning : Tuning
            After the last step.
        """
        if tuning.chosen is not None:
            return tuning.chosen
        number = len(tuning.times) // (self.steps + 1)
        return tuning.again[number] if tuning.again else number

    def chosen(self, tuning: Tuning) -> str | None:
        """Return the name of the chosen method; None before the choice.

        Parameters
        ----------
        tuning : Tuning
            After the last step.
        """
        return None if tuning.chosen is None else self.names[tuning.chosen]

    def noted(self, tuning: Tuning, seconds: float, comm: Transport, like: Array) -> Tuning:
        """Return the tuning after one more step; collective after the last step of a round.

        Parameters
        ----------
        tuning : Tuning
            Before the choice.
        seconds : float
            The time that the step took on this rank.
        comm : Communicator
        like : array
            Gives the library and device of what is sent.

        Raises
        ------
        ValueError
            On every rank, if a rank measured negative seconds, because its clock went back.
        """
        times, each = (*tuning.times, seconds), self.steps + 1
        if len(times) < each * (len(tuning.again) or len(self.methods)):
            return tuning._replace(times=times)
        medians = [statistics.median(times[start + 1 : start + each]) for start in range(0, len(times), each)]
        of_each = agreed(comm, medians, like)
        for rank, of_rank in enumerate(of_each):
            if not all(0 <= one < math.inf for one in of_rank):
                raise ValueError(
                    f"clock is {self.clock!r}, by which the steps of rank {rank} take {list(of_rank)} seconds; "
                    "expected at least 0: pass a clock that never goes back, such as time.perf_counter"
                )
        found = [max(of_ranks) for of_ranks in zip(*of_each, strict=True)]
        if tuning.again:
            lowest = list(tuning.seconds)
            for number, again in zip(tuning.again, found, strict=True):
                lowest[number] = min(lowest[number], again)
            return tuning._replace(times=times, seconds=tuple(lowest), chosen=self._first_within(lowest))
        close = [i for i, one in enumerate(found) if one <= (1 + _CLOSE) * min(found)]
        if len(close) > 1:
            return Tuning((), tuple(found), again=tuple(reversed(close)))
        return Tuning(times, tuple(found), self._first_within(found))

    def _first_within(self, seconds: Sequence[float]) -> int:
        """Return the number of the first method whose time is within the margin of the fastest."""
        most = (1 + self.margin) * min(seconds)
        return next(i for i, one in enumerate(seconds) if one <= most)

    def agree(self, comm: Transport, like: Array, **others: object) -> None:
        """Raise MismatchError on every rank unless all have the same methods and settings.

        Parameters
        ----------
        comm : Communicator
        like : array
            Gives the library and device of what is sent.
        **others
            Further settings, by name.
        """
        facts = {
            "autotune": list(self.names),
            "methods": {name: repr(mean) for name, mean in self.methods.items()},
            "steps": self.steps,
            "margin": self.margin,
            **others,
        }
        handshake(comm, facts, like=like)

    def init(self, x: Any, comm: Transport) -> TunedState:
        """Check that all ranks were started alike, and return the state before the first step.

        Parameters
        ----------
        x : array or sequence of arrays
            Arrays with the shapes and dtypes of what will be averaged.
        comm : Communicator

        Raises
        ------
        MismatchError
            On every rank, if the ranks differ in the methods, in settings or in shapes.
        """
        self.agree(comm, as_list(x)[0])
        states = [mean.init(x, comm)._replace(worker=(), server=()) for mean in self.methods.values()]
        nodes = tuple(state.nodes for state in states)
        return TunedState(Tuning(), self._begin(0, x, states[0], nodes), nodes)

    def __call__(
        self, x: Any, state: TunedState, comm: Transport, *, key: Key | None = None
    ) -> tuple[Any, TunedState]:
        """Average x over the ranks with the method whose turn it is.

        Parameters
        ----------
        x : array or sequence of arrays
            This rank's values.
        state : TunedState
            From `init` or the last call.
        comm : Communicator
            As for `init`.
        key : Key, optional
            See `CompressedMean.stages`.

        Returns
        -------
        mean : array or list of arrays
            With the shapes and dtypes of x, the same on all ranks.
        state : TunedState

        Raises
        ------
        NonFiniteError
            On every rank, if a value on any rank is not finite. The state passed in stays valid.
        """
        if key is None and state.tuning.chosen is None:
            self._require_no_draws()
        number = self.turn(state.tuning)
        mean = self.methods[self.names[number]]
        values = _plus(x, state.owed) if state.owed else x
        start = self.clock()
        means, kept = mean(values, state.mean, comm, key=key)
        if state.owed:
            means = _like(means, x)
        if state.tuning.chosen is not None:
            return means, TunedState(state.tuning, kept, state.nodes)
        first = as_list(means)[0]
        _wait_for(first)
        tuning = self.noted(state.tuning, self.clock() - start, comm, first)
        if self.turn(tuning) == number:
            return means, TunedState(tuning, kept, state.nodes)
        begun = self._begin(self.turn(tuning), x, kept, state.nodes)
        return means, TunedState(tuning, begun, state.nodes, tuple(owed(mean, kept)))

    def _require_no_draws(self) -> None:
        """Raise ValueError if any method draws random numbers, even before its turn."""
        for name, mean in self.methods.items():
            if any(compressor.traits.random for compressor in mean.sends):
                raise ValueError(f"key is None; {name!r} draws random numbers and needs a qcomp.Key")

    def _begin(self, number: int, x: Any, before: MeanState, nodes: Sequence[tuple[int, ...]]) -> MeanState:
        """Return the initial state of a method, with residuals of zero."""
        mean = self.methods[self.names[number]]
        return mean.zeros(as_list(x), rank=before.rank, size=before.size, nodes=nodes[number])


def _plus(x: Any, owed: Sequence[Array]) -> Any:
    """Return arrays plus what is owed, in the dtype in which they are computed."""
    tensors = as_list(x)
    found, expected = [math.prod(t.shape) for t in tensors], [e.shape[0] for e in owed]
    if found != expected:
        raise ValueError(f"x has arrays of {found} elements; state is for {expected}")
    sums = [
        array_namespace(t).reshape(flat(to_compute_dtype(t)) + e, t.shape)
        for t, e in zip(tensors, owed, strict=True)
    ]
    return sums if isinstance(x, list | tuple) else sums[0]


def _like(means: Any, x: Any) -> Any:
    """Return means in the shapes and dtypes of arrays."""
    found = shaped_like([flat(mean) for mean in as_list(means)], as_list(x))
    return found if isinstance(x, list | tuple) else found[0]


def _wait_for(x: Array) -> None:
    """Wait until x is computed, by reading a value."""
    values = flat(x)
    if values.shape[0]:
        float(values[0])
