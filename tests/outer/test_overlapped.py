"""Exchanges that run beside inner steps: the same results, whenever the communicator makes progress."""

import numpy as np
import pytest

import qcomp
from qcomp.comm import run_local
from qcomp.outer import Overlapped
from tests.outer.jobs import LARGE, SIGN, begun, loop_of, moves

LOOPS = {
    "one": loop_of(every=3, delay=1, mixing=0.5),
    "long": loop_of(every=6, delay=5, decay=0.5, fragments=3, outer=qcomp.Adam(learning_rate=0.1)),
    "ring": loop_of(every=4, delay=3, averaging=qcomp.Averaging(topology="ring"), fragments=2),
    "coded": loop_of(every=4, delay=3, compressor=qcomp.QSGD(7, 16, coding="range"), fragments=2),
    "early": loop_of(every=6, delay=2, turn="apply", fragments=2, scale=0.5),
    "exact": qcomp.OuterLoop(every=4, delay=2, fragments=2),
    "low rank": loop_of(
        every=4, delay=3, averaging=qcomp.PowerSGD(rank=1), compressor=qcomp.Identity(), fragments=2
    ),
}


class Slow:
    """A communicator that makes an exchange only when it is waited for, and counts the exchanges under way."""

    def __init__(self, comm):
        self.inside, self.rank, self.size, self.host = comm, comm.rank, comm.size, comm.host
        self.all_to_all, self.all_gather = comm.all_to_all, comm.all_gather
        self.waiting, self.most = [], 0

    def start(self, request):
        pending = Late(self, request)
        self.waiting.append(pending)
        self.most = max(self.most, len(self.waiting))
        return pending


class Late:
    def __init__(self, comm, request):
        self.comm, self.request, self.received = comm, request, None

    def wait(self):
        while self.received is None:  # in the order of the starts, as bytes would arrive
            first = self.comm.waiting.pop(0)
            first.received = self.comm.inside.start(first.request).wait()
        return self.received


def run(loop, comm, steps, make=None, reload=None):
    params = begun()
    state = loop.init(params, comm)
    running = make(loop, comm) if make else None
    trail = []
    for step in range(steps):
        params = [np.asarray(p - m) for p, m in zip(params, moves(comm.rank, step), strict=True)]
        if running is None:
            params, state = loop.step(params, state, comm)
        else:
            params, state = running.step(params, state)
        if step == reload:
            params, state = loop.load_state_dict(loop.state_dict(params, state), params, comm)
        trail.append(
            (state.stage, [p.tobytes() for p in params], [x.tobytes() for x in state.exchange.worker])
        )
    return trail


@pytest.mark.quick_cases(1)
@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", LOOPS)
@pytest.mark.parametrize("slow", [False, True])
def test_results_are_those_of_the_plain_loop(name, slow):
    loop, most = LOOPS[name], []

    def overlapped(loop, comm):
        running = Overlapped(loop, Slow(comm) if slow else comm)
        most.append(running.comm)
        return running

    expected = run_local(3, lambda comm: run(loop, comm, 15), timeout=20)
    assert run_local(3, lambda comm: run(loop, comm, 15, overlapped), timeout=20) == expected
    if slow:
        assert max(comm.most for comm in most) >= 2  # the check of the step, and the first message beside it


@pytest.mark.parametrize("reload", range(3, 7))
def test_a_loaded_state_repeats_its_exchange(reload):
    loop = LOOPS["long"]
    expected = run_local(2, lambda comm: run(loop, comm, 15), timeout=20)
    found = run_local(
        2, lambda comm: run(loop, comm, 15, lambda *a: Overlapped(a[0], Slow(a[1])), reload), timeout=20
    )
    assert found == expected


def test_going_back_to_an_earlier_state_discards_exchanges_under_way():
    loop = loop_of(every=3, delay=2)

    def rank_main(comm):
        running = Overlapped(loop, comm)
        first = begun()
        state = loop.init(first, comm)
        trails = []
        for shift in (0.0, 1.0):
            params, now = [p + shift * (comm.rank + 1) for p in first], state
            for _ in range(4):  # at the end, the exchange of step 3 is under way
                params, now = running.step(params, now)
            trails.append((params, now))
        params, now = trails[0]
        params, now = running.step(params, now)
        expected, _ = loop.step(*trails[0], comm)
        return [p.tobytes() for p in params] == [p.tobytes() for p in expected]

    assert run_local(2, rank_main, timeout=20) == [True, True]


def test_a_refusal_leaves_communicator_and_state_usable():
    loop = loop_of(every=4, delay=2, fragments=2)

    def rank_main(comm):
        running = Overlapped(loop, comm)
        params = begun()
        state = loop.init(params, comm)
        members = loop.members(state, 0)
        errors, kept = 0, None
        for step in range(4):
            if step == 1:
                kept = params, state
                params = [p + np.nan if i in members and comm.rank else p for i, p in enumerate(params)]
            try:
                params, state = running.step(params, state)
            except qcomp.NonFiniteError as error:
                errors += "on rank 1" in str(error)
                params, state = kept
        assert errors == 1
        for _ in range(8):
            params, state = running.step(params, state)
        return [p.tobytes() for p in params]

    one, other = run_local(2, rank_main, timeout=20)
    assert one == other


class Losing(Slow):
    """Loses the other ranks in an exchange, counted from 0."""

    def __init__(self, comm, at):
        super().__init__(comm)
        self.left = at

    def start(self, request):
        self.left -= 1
        if self.left < 0:
            raise qcomp.CommunicatorError("lost")
        return super().start(request)


@pytest.mark.parametrize("at", [3, 4, 5])
def test_a_lost_rank_is_an_error_of_the_step_that_needs_it(at):
    """A rank that has made its last step sends no more, and the others may be behind."""
    loop = qcomp.OuterLoop(every=4, delay=3, compressor=SIGN, exact=LARGE)
    running = Overlapped(loop, Losing(qcomp.comm.LocalCommunicator.alone(), at))
    params = begun()
    state = loop.init(params, running.comm)
    for _ in range(10):  # an exchange has three messages; the second is under way
        params, state = running.step(params, state)
    assert running.comm.left == -1
    with pytest.raises(qcomp.CommunicatorError, match="lost"):
        running.step(params, state)
    assert state.step == 10


def test_closing_waits_for_what_was_started():
    loop = qcomp.OuterLoop(every=4, delay=3, compressor=SIGN, exact=LARGE)

    def rank_main(comm):
        running = Overlapped(loop, Slow(comm))
        params = begun()
        state = loop.init(params, comm)
        for _ in range(4):
            params, state = running.step(params, state)
        before = len(running.comm.waiting)
        running.close()
        return before, len(running.comm.waiting)

    assert run_local(2, rank_main, timeout=20) == [(2, 0)] * 2


def test_the_order_of_messages_depends_only_on_steps():
    """Two fragments are under way at once; each step moves each of them on by one message."""
    loop = qcomp.OuterLoop(every=4, delay=3, fragments=2, compressor=SIGN, exact=LARGE)
    orders = []

    class Noting(Slow):
        def start(self, request):
            notes.append((type(request).__name__, sum(request.receive)))
            return super().start(request)

    for _ in range(2):
        notes = []
        run_local(1, lambda comm: run(loop, comm, 9, lambda *a: Overlapped(a[0], Noting(a[1]))), timeout=20)
        orders.append(notes)
    assert orders[0] == orders[1]
    assert len(orders[0]) > 8
