"""`Overlapped`: runs the exchanges of an outer loop while the next inner steps run."""

from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Protocol

from qcomp.core.errors import CommunicatorError
from qcomp.core.mean.stages import Arriving, Exchange, Stages, Transport, begun, drive, require_rank
from qcomp.core.numeric.arrays import Array
from qcomp.core.optimizers.compression import Means
from qcomp.core.outer.fragments import under_way
from qcomp.core.outer.loop import OuterLoop
from qcomp.core.state import OptimizerState


class _Starts(Transport, Protocol):
    """A communicator with ``start``, see `qcomp.comm.Communicator`."""

    def start(self, request: Exchange) -> Any:
        """Start an exchange."""
        ...


class Overlapped:
    """Makes the steps of an `OuterLoop` with ``delay``, and exchanges while the inner steps run.

    The results equal `OuterLoop.step`, bit for bit. A fragment's exchange starts in the step that sends it. Each later
    step moves it on by one message, and the step that applies its result waits for the remaining messages. So the order
    of messages depends only on steps, and no thread is needed. With `qcomp.comm.MPICommunicator` and
    `qcomp.comm.TorchCommunicator` bytes travel during the inner steps. Other communicators complete an exchange when it
    starts.

    Parameters
    ----------
    loop : OuterLoop
        A loop with a ``delay`` of at least 1. With a longer delay, each phase of the topology overlaps with an inner
        step of its own.
    comm : Communicator
        A communicator with ``start``, of the same class on all ranks. Other exchanges may run over it between the
        steps, if all ranks start them in the same order.

    Notes
    -----
    A state holds the outer gradients under way, so it can be saved at any step. After a state is loaded, and after an
    error, the exchange runs anew when its result is due. Either all ranks use this class, or all call `OuterLoop.step`.
    A lost rank causes an error only in the step that applies a result: until then it cannot be told from a rank that
    has made its last step, which also sends nothing.

    Examples
    --------
    >>> import numpy as np, qcomp
    >>> loop = qcomp.OuterLoop(every=4, delay=2, mixing=0.5)
    >>> def rank_main(comm):
    ...     params = np.zeros(2)
    ...     running = qcomp.outer.Overlapped(loop, comm)
    ...     state = loop.init(params, comm)
    ...     for _ in range(8):
    ...         params = params + comm.rank  # an inner step
    ...         params, state = running.step(params, state)
    ...     return params.tolist(), state.stage
    >>> qcomp.comm.run_local(2, rank_main)
    [([1.0, 1.0], 'under way 0@8'), ([6.0, 6.0], 'under way 0@8')]
    """

    def __init__(self, loop: OuterLoop, comm: Transport) -> None:
        if not loop.delay:
            raise ValueError("loop has delay=0; expected at least 1; without a delay, call loop.step")
        if not hasattr(comm, "start"):
            raise TypeError(
                f"comm is {comm!r}; expected a communicator with a method start, such as any of qcomp.comm"
            )
        self.loop = loop
        self.comm: Any = comm
        self._flights: dict[int, _Flight] = {}

    def step(
        self, params: Any, state: OptimizerState, *, shares: bool = False, weight: float | None = None
    ) -> tuple[Any, OptimizerState]:
        """Make a step as `OuterLoop.step` does.

        Parameters
        ----------
        params : array or sequence of arrays
            This rank's parameters after an inner step.
        state : OptimizerState
            From ``loop.init`` or the last step.
        shares : bool, default False
            As for `OuterLoop.step`.
        weight : float, optional
            As for `OuterLoop.step`.
        """
        require_rank(state, self.comm)
        self._discard(state)
        try:
            landing = self.loop.landing(state)
            landed = {}
            for fragment in list(self._flights):
                if fragment in landing:
                    landed[fragment] = self._flights[fragment].finish()
                else:
                    self._flights[fragment].advance()
            result, after = drive(
                self.loop.stages(params, state, landed, shares=shares, compares=True, weight=weight),
                self.comm,
            )
        except Exception:
            self._discard(None)
            raise
        for fragment in landed:
            del self._flights[fragment]
        for fragment in under_way(after.stage):
            if fragment not in under_way(state.stage):
                self._flights[fragment] = _Flight(self.loop, after, fragment, self.comm)
        return result, after

    def close(self) -> None:
        """Drop the exchanges under way once their messages have arrived, so that the communicator stays usable."""
        self._discard(None)

    def _discard(self, state: OptimizerState | None) -> None:
        """Drop the exchanges that do not belong to a state (all, if it is None), and wait until they are over."""
        for fragment, flight in list(self._flights.items()):
            if state is None or not flight.is_of(state):
                del self._flights[fragment]
                flight.give_up()


class _Flight:
    """The exchange of one fragment, from its start to its result."""

    def __init__(self, loop: OuterLoop, state: OptimizerState, fragment: int, comm: _Starts) -> None:
        self._fragment = fragment
        self._sent = under_way(state.stage)[fragment]
        self._members = loop.members(state, fragment)
        self._arrays = state.arrays["sent"]
        self._comm = comm
        self._stages: Stages[Means] = loop.exchange(state, fragment)
        self._begun: list[Arriving] = []
        self._arrived: Sequence[Array] | None = None
        self._result: Means | None = None
        self._failure: CommunicatorError | None = None
        self.advance()

    def is_of(self, state: OptimizerState) -> bool:
        """Return whether a state has this fragment under way, with the same outer gradients."""
        if under_way(state.stage).get(self._fragment) != self._sent:
            return False
        sent = state.arrays["sent"]
        return all(self._arrays[i] is sent[i] for i in self._members)

    def advance(self) -> None:
        """Wait for the message under way, and start the next; `finish` raises if a rank is lost."""
        if self._result is None and self._failure is None:
            try:
                self._go_on()
            except CommunicatorError as error:
                self._failure = error

    def finish(self) -> Means:
        """Wait for the remaining messages, and return the result."""
        if self._failure is not None:
            raise self._failure
        while self._result is None:
            self._go_on()
        return self._result

    def give_up(self) -> None:
        """Wait for the message that was started, so that the communicator stays usable."""
        for arriving in self._begun:
            with suppress(CommunicatorError):
                arriving.wait()

    def _go_on(self) -> None:
        """Start the next message that the computation waits for."""
        while True:
            try:
                arrived = self._arrived
                request = next(self._stages) if arrived is None else self._stages.send(arrived)
            except StopIteration as stop:
                self._result = stop.value
                return
            arriving = begun(request, self._comm)
            self._begun = [one for one in self._begun if not one.is_over] + [arriving]
            self._arrived = arriving
            if not request.later:
                return
