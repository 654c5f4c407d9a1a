import copy
import pickle
import re
import signal
import threading

import array_api_strict
import numpy as np
import pytest

from qcomp.comm.base import Communicator
from qcomp.comm.local import LocalCommunicator, run_local
from qcomp.core.errors import CommunicatorError
from qcomp.testing import check_communicator

LIBRARIES = ["numpy", "torch", "jax", "array_api_strict"]
LONG = 30.0  # far beyond what a working exchange takes; a test that waits so long has failed


def library(name):
    if name == "array_api_strict":
        return array_api_strict
    return pytest.importorskip(
        {"numpy": "numpy", "torch": "array_api_compat.torch", "jax": "jax.numpy"}[name]
    )


def share(sender, receiver, n):
    """Return the message from one rank to another: n bytes that identify both."""
    return np.resize(np.array([sender, receiver, 0, 255, 17], dtype=np.uint8), n)


def zeros(n):
    return np.zeros(n, dtype=np.uint8)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("n", [1, 2, 3, 4])
@pytest.mark.parametrize("name", LIBRARIES)
def test_it_keeps_the_laws_of_communicators(n, name):
    xp = library(name)
    run_local(n, lambda comm: check_communicator(comm, xp, failures=True), timeout=LONG)


def test_ranks_of_different_libraries_exchange_and_each_gets_its_own_arrays():
    namespaces = [library(name) for name in LIBRARIES]

    def exchange(comm):
        xp = namespaces[comm.rank]
        received = comm.all_gather(xp.asarray(share(comm.rank, 0, 4)), [4] * 4)
        assert {type(x) for x in received} == {type(xp.asarray(zeros(1)))}
        return [np.asarray(x).tolist() for x in received]

    assert run_local(4, exchange, timeout=LONG) == [[share(r, 0, 4).tolist() for r in range(4)]] * 4


def test_a_world_of_one_needs_no_other_rank():
    comm = LocalCommunicator.alone()
    assert isinstance(comm, Communicator)
    assert (comm.rank, comm.size) == (0, 1)
    assert [x.tolist() for x in comm.all_to_all([share(0, 0, 3)], [3])] == [share(0, 0, 3).tolist()]
    assert comm.bytes_sent == 0


def test_an_error_of_a_rank_is_raised_with_its_number():
    def fail(comm):
        if comm.rank == 1:
            raise ZeroDivisionError("boom")
        comm.all_gather(zeros(1), [1] * 3)

    with pytest.raises(ZeroDivisionError, match="boom") as caught:
        run_local(3, fail, timeout=LONG)
    assert caught.value.__notes__ == ["(raised on rank 1 of 3)"]


@pytest.mark.parametrize("before", [True, False], ids=["waiting before", "calling after"])
def test_a_failing_rank_frees_the_others_and_says_why(before):
    seen = {}
    told = threading.Event()

    def fail(comm):
        if comm.rank == 1:
            if not before:
                raise ZeroDivisionError("boom")
            # A complete first exchange, so that the others are on their way into the second.
            comm.all_gather(zeros(1), [1] * 3)
            raise ZeroDivisionError("boom")
        try:
            if before:
                comm.all_gather(zeros(1), [1] * 3)
            comm.all_gather(zeros(1), [1] * 3)
        except CommunicatorError as error:
            seen[comm.rank] = str(error)
            told.set()
            raise

    with pytest.raises(ZeroDivisionError):
        run_local(3, fail, timeout=LONG)
    assert seen.keys() == {0, 2}
    for text in seen.values():
        assert "rank 1 failed with ZeroDivisionError: boom" in text


def test_the_first_failure_wins_over_those_that_follow_from_it():
    def fail(comm):
        if comm.rank == 0:
            raise ZeroDivisionError("first")
        try:
            comm.all_gather(zeros(1), [1] * 3)
        except CommunicatorError as error:
            raise KeyError("second") from error

    with pytest.raises(ZeroDivisionError, match="first"):
        run_local(3, fail, timeout=LONG)


@pytest.mark.slow
def test_an_absent_rank_is_named_after_the_timeout():
    done = threading.Event()
    seen = {}

    def wait(comm):
        if comm.rank == 1:
            assert done.wait(LONG)
            return
        try:
            comm.all_to_all([zeros(1)] * 3, [1] * 3)
        except CommunicatorError as error:
            seen[comm.rank] = str(error)
            if len(seen) == 2:
                done.set()
            raise

    with pytest.raises(CommunicatorError, match=r"all_to_all: waited 1 s for rank 1"):
        run_local(3, wait, timeout=1)  # the other two arrive within it
    assert seen.keys() == {0, 2}


def test_run_local_does_not_wait_for_a_rank_that_never_ends():
    done = threading.Event()
    ended = []

    def wait(comm):
        if comm.rank == 1:
            done.wait(LONG)
            ended.append(comm.rank)
        else:
            comm.all_gather(zeros(1), [1, 1])

    with pytest.raises(CommunicatorError, match="for rank 1"):
        run_local(2, wait, timeout=0.05)
    assert not ended
    done.set()


def collect_errors(n, fn, *, ranks):
    """Return the texts of the CommunicatorErrors of the given ranks of n; none of these ranks leaves early."""
    seen = {}
    all_told = threading.Barrier(len(ranks))

    def collect(comm):
        try:
            fn(comm)
        except CommunicatorError as error:
            seen[comm.rank] = str(error)
            all_told.wait(LONG)

    run_local(n, collect, timeout=LONG)
    assert seen.keys() == ranks
    return list(seen.values())


def test_another_verb_is_named_on_every_rank():
    def disagree(comm):
        if comm.rank == 1:
            comm.all_gather(zeros(1), [1] * 3)
        else:
            comm.all_to_all([zeros(1)] * 3, [1] * 3)

    for text in collect_errors(3, disagree, ranks={0, 1, 2}):
        assert re.search(
            "rank 0 called all_to_all where rank 1 called all_gather"
            "|rank 1 called all_gather where rank 2 called all_to_all",
            text,
        )


@pytest.mark.parametrize(("sender", "receiver"), [(1, 2), (2, 1)])
@pytest.mark.parametrize(("sent", "announced"), [(4, 5), (5, 4), (0, 1), (1, 0)])
def test_another_size_is_named_on_every_rank(sent, announced, sender, receiver):
    def disagree(comm):
        send, receive = [zeros(2) for _ in range(3)], [2] * 3
        if comm.rank == sender:
            send[receiver] = zeros(sent)
        if comm.rank == receiver:
            receive[sender] = announced
        comm.all_to_all(send, receive)

    for text in collect_errors(3, disagree, ranks={0, 1, 2}):
        assert f"rank {sender} sent {sent} bytes to rank {receiver}, which expected {announced} bytes" in text


def test_a_rank_that_has_finished_is_named_at_once():
    def leave(comm):
        comm.all_gather(zeros(1), [1] * 3)
        if comm.rank != 1:
            comm.all_gather(zeros(1), [1] * 3)

    for text in collect_errors(3, leave, ranks={0, 2}):  # waiting for the timeout would take LONG
        assert "rank 1 finished without calling it" in text


def test_a_complete_exchange_counts_though_a_rank_fails_right_after_it():
    for _ in range(50):
        received = {}

        def fail(comm, received=received):
            received[comm.rank] = comm.all_gather(zeros(1), [1, 1])
            raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            run_local(2, fail, timeout=LONG)
        assert received.keys() == {0, 1}


def test_a_closed_communicator_stays_closed_and_reports_the_first_reason():
    seen = []

    def fail(comm):
        if comm.rank == 1:
            raise ZeroDivisionError("boom")
        if comm.rank == 0:
            comm.all_gather(zeros(1), [1] * 3)
        for thread in threading.enumerate():
            if thread.name in ("rank 0 of 3", "rank 1 of 3"):
                thread.join(LONG)
        for _ in range(2):
            try:
                comm.all_to_all([zeros(1)] * 3, [1] * 3)
            except CommunicatorError as error:
                seen.append(str(error))

    with pytest.raises(ZeroDivisionError):
        run_local(3, fail, timeout=LONG)
    assert seen == ["all_to_all: this communicator is closed: rank 1 failed with ZeroDivisionError: boom"] * 2


def test_wrong_arguments_are_the_callers_error():
    def call(comm):
        comm.all_gather(zeros(3), [3 + (comm.rank == 1), 3 + (comm.rank == 1)])

    with pytest.raises(ValueError, match=r"receive\[1\] is 4, but rank 1 sends itself 3 bytes"):
        run_local(2, call, timeout=LONG)


def test_an_interrupt_frees_every_rank():
    started = {rank: threading.Event() for rank in (1, 2)}
    freed = {rank: threading.Event() for rank in (1, 2)}

    def wait(comm):
        if comm.rank == 0:
            assert all(event.wait(LONG) for event in started.values())
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
            freed[1].wait(LONG)
            freed[2].wait(LONG)
            return
        started[comm.rank].set()
        with pytest.raises(CommunicatorError, match="run_local was interrupted by KeyboardInterrupt"):
            comm.all_gather(zeros(1), [1] * 3)
        freed[comm.rank].set()

    with pytest.raises(KeyboardInterrupt):
        run_local(3, wait, timeout=LONG)
    assert all(event.wait(LONG / 3) for event in freed.values())


def test_run_local_rejects_nonsense():
    with pytest.raises(ValueError, match="n must be at least 1 rank, got 0"):
        run_local(0, lambda comm: None)
    with pytest.raises(ValueError, match="timeout must be a positive number of seconds, got 0"):
        run_local(1, lambda comm: None, timeout=0)


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_communicator_stays_in_its_process(copied):
    """It cannot be sent to a data loader's worker by accident, as part of a data set."""
    with pytest.raises(TypeError, match=r"LocalCommunicator\(rank=0, size=1\) cannot be copied or pickled"):
        copied({"comm": LocalCommunicator.alone()}["comm"])
