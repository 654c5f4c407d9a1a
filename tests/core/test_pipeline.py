"""The order in which `pipeline` starts exchanges, what `drive` waits for, and what happens to errors in between."""

import contextlib
import random

import numpy as np
import pytest

import qcomp
from qcomp.comm.local import run_local
from qcomp.core.errors import CommunicatorError
from qcomp.core.mean.stages import AllGather, AllToAll, Arriving, drive, fuse, pipeline


class Started:
    """An exchange that was started but not waited for; over a thread it moves only when a rank waits."""

    def __init__(self, comm, number, request):
        self.comm, self.number, self.request = comm, number, request
        self.received = None

    def move(self):
        inner = self.comm.inner
        if isinstance(self.request, AllToAll):
            self.received = inner.all_to_all(self.request.send, self.request.receive)
        else:
            self.received = inner.all_gather(self.request.send, self.request.receive)

    def wait(self):
        self.comm.log.append(("wait", self.number))
        while self.comm.under_way and self.received is None:
            self.comm.under_way.pop(0).move()  # all ranks have the same order of starts
        return self.received


class Delayed:
    """A communicator whose exchanges move later, with a log."""

    def __init__(self, inner):
        self.inner = inner
        self.rank, self.size, self.host = inner.rank, inner.size, inner.host
        self.log, self.under_way, self.count = [], [], 0

    def start(self, request):
        pending = Started(self, self.count, request)
        self.log.append(("start", self.count, tuple(request.receive)))
        self.count += 1
        self.under_way.append(pending)
        return pending

    def all_to_all(self, send, receive):
        self.log.append(("verb", tuple(receive)))
        return self.inner.all_to_all(send, receive)

    def all_gather(self, send, receive):
        self.log.append(("verb", tuple(receive)))
        return self.inner.all_gather(send, receive)


def counting(comm, name, exchanges):
    """Make exchanges whose sizes identify computation and stage; return the sum of what arrived."""
    total = 0
    for stage in range(exchanges):
        size = 10 * name + stage + 1
        mine = np.full(size, comm.rank + stage, dtype=np.uint8)
        if stage % 2:
            arrived = yield AllToAll((mine,) * comm.size, (size,) * comm.size)
        else:
            arrived = yield AllGather(mine, (size,) * comm.size)
        total += sum(int(x[0]) for x in arrived)
    return name, total


LENGTHS = (2, 0, 1, 3)


@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.parametrize("delayed", [True, False], ids=["start", "verbs"])
def test_results_are_those_of_each_computation_alone(n, delayed):
    def rank_main(local):
        comm = Delayed(local) if delayed else local
        alone = [drive(counting(local, i, k), local) for i, k in enumerate(LENGTHS)]
        together = drive(pipeline([counting(comm, i, k) for i, k in enumerate(LENGTHS)]), comm)
        fused = drive(fuse([counting(comm, i, k) for i, k in enumerate(LENGTHS)]), comm)
        return alone == together == fused

    assert run_local(n, rank_main) == [True] * n


def test_all_computations_start_before_any_exchange_is_waited_for():
    def rank_main(local):
        comm = Delayed(local)
        drive(pipeline([counting(comm, i, 2) for i in (1, 2, 3)]), comm)
        return [entry[:2] for entry in comm.log]

    first, second = run_local(2, rank_main)
    assert first == second
    assert first[:3] == [("start", 0), ("start", 1), ("start", 2)]
    # Then in turns: the second exchange of each starts as soon as its first one has been waited for.
    assert first[3:9] == [("wait", 0), ("start", 3), ("wait", 1), ("start", 4), ("wait", 2), ("start", 5)]
    assert first[9:] == [("wait", 3), ("wait", 4), ("wait", 5)]


def test_a_single_computation_uses_blocking_exchanges():
    def rank_main(local):
        comm = Delayed(local)
        drive(pipeline([counting(comm, 1, 2)]), comm)
        return comm.log

    assert run_local(1, rank_main) == [[("verb", (11,)), ("verb", (12,))]]


def started(log):
    return [entry[2] for entry in log if entry[0] == "start"]


def in_order_of_completion(computations, comm):
    """The fault: the computation whose exchange happens to be complete continues first."""
    whims = random.Random(comm.rank)
    waiting = [(stages, comm.start(next(stages))) for stages in computations]
    while waiting:
        stages, pending = waiting.pop(whims.randrange(len(waiting)))
        with contextlib.suppress(StopIteration):
            waiting.append((stages, comm.start(stages.send(pending.wait()))))


def test_all_ranks_start_in_one_order_and_an_order_by_time_is_noticed():
    def good(local):
        comm = Delayed(local)
        drive(pipeline([counting(comm, i, 3) for i in range(4)]), comm)
        return started(comm.log)

    def bad(local):
        in_order_of_completion([counting(local, i, 3) for i in range(4)], Delayed(local))

    logs = run_local(3, good)
    assert logs[0] == logs[1] == logs[2]
    assert len(logs[0]) == 12
    with pytest.raises(CommunicatorError, match="which expected"):
        run_local(3, bad)


class RefusalError(Exception):
    pass


def refusing(comm, stages):
    """Raise on all ranks after an exchange, because of the value of one rank."""
    arrived = yield AllGather(np.full(1, comm.rank == 1, dtype=np.uint8), (1,) * comm.size)
    if any(int(x[0]) for x in arrived):
        raise RefusalError
    return (yield from stages)


def test_if_a_computation_raises_no_exchange_is_left_under_way():
    def rank_main(local):
        comm = Delayed(local)
        work = [counting(comm, 1, 2), refusing(comm, counting(comm, 2, 1)), counting(comm, 3, 2)]
        with pytest.raises(RefusalError):
            drive(pipeline(work), comm)
        waited = {entry[1] for entry in comm.log if entry[0] == "wait"}
        after = drive(counting(comm, 4, 2), comm)
        return waited == set(range(comm.count)), comm.under_way, after

    assert run_local(2, rank_main) == [(True, [], (4, 4))] * 2


def test_a_driver_that_leaves_exchanges_under_way_is_noticed():
    def careless(stages, comm):
        request = next(stages)
        while True:
            request = stages.send(Arriving(comm.start(request)))

    def rank_main(local):
        comm = Delayed(local)
        with pytest.raises(RefusalError):
            careless(pipeline([refusing(comm, counting(comm, 2, 1)), counting(comm, 1, 2)]), comm)
        return len(comm.under_way)

    assert 0 not in run_local(2, rank_main)


def test_a_result_that_is_never_read_is_waited_for():
    def blind(comm):
        yield AllGather(np.zeros(3, dtype=np.uint8), (3,) * comm.size)
        return "done"

    def rank_main(local):
        comm = Delayed(local)
        result = drive(pipeline([blind(comm), blind(comm)]), comm)
        return result, comm.under_way

    assert run_local(2, rank_main) == [(["done", "done"], [])] * 2


def test_an_error_of_the_communicator_is_passed_on():
    def rank_main(local):
        comm = Delayed(local)
        with pytest.raises(CommunicatorError, match="which expected"):
            drive(pipeline([counting(comm, 1 + local.rank, 1), counting(comm, 3, 1)]), comm)
        with pytest.raises(CommunicatorError, match="is closed"):
            local.all_gather(np.zeros(1, dtype=np.uint8), (1, 1))
        return True

    assert run_local(2, rank_main) == [True, True]


def test_an_error_of_one_rank_is_raised_and_the_others_do_not_hang():
    def failing(comm):
        arrived = yield AllGather(np.zeros(3, dtype=np.uint8), (3,) * comm.size)
        if comm.rank == 1:
            raise ZeroDivisionError
        arrived = yield AllGather(arrived[0], (3,) * comm.size)
        return len(arrived)

    def rank_main(local):
        comm = Delayed(local)
        drive(pipeline([counting(comm, 1, 1), failing(comm), counting(comm, 3, 2)]), comm)

    with pytest.raises(ZeroDivisionError):
        run_local(2, rank_main, timeout=10)


def test_received_messages_form_an_ordinary_sequence():
    def looking(comm):
        arrived = yield AllGather(np.full(2, comm.rank, dtype=np.uint8), (2,) * comm.size)
        return len(arrived), int(arrived[-1][0]), [int(x[0]) for x in arrived], len(arrived[:1])

    def rank_main(local):
        comm = Delayed(local)
        return drive(pipeline([looking(comm), looking(comm)]), comm)

    assert run_local(2, rank_main) == [[(2, 1, [0, 1], 1)] * 2] * 2


def test_local_ranks_have_start_and_give_the_same():
    def rank_main(comm):
        return drive(pipeline([counting(comm, i, 2) for i in (1, 2)]), comm)

    assert qcomp.comm.run_local(2, rank_main) == [[(1, 4), (2, 4)]] * 2
