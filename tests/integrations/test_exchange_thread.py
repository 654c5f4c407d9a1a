"""The order in which an exchange thread makes exchanges: the same on all ranks, however long each takes."""

import contextlib
import subprocess
import sys
import threading

import numpy as np
import pytest

from qcomp.core.errors import CommunicatorError, NonFiniteError
from qcomp.core.mean.stages import AllGather
from qcomp.integrations.ddp.exchange_thread import ExchangeThread, ThreadJob, require_unoccupied

PATIENCE = 60


class Communicator:
    """Answers every exchange with its name when it is waited for."""

    def __init__(self):
        self.events = []

    def start(self, request):
        self.events.append(f"start {request}")
        return Pending(self, request)


class Pending:
    def __init__(self, comm, request):
        self.comm = comm
        self.request = request

    def wait(self):
        self.comm.events.append(f"wait {self.request}")
        return self.request


@pytest.fixture
def carry():
    """Return a function that runs batches of jobs (name, number of exchanges) and returns events and results."""

    def run(*batches, spoiled=None, error=None):
        comm, results, over = Communicator(), {}, threading.Semaphore(0)

        def stages(name, exchanges):
            for number in range(exchanges):
                if f"{name}{number}" == spoiled:
                    raise error
                assert (yield f"{name}{number}") == f"{name}{number}"
            return name

        def job(name, exchanges):
            def end(result):
                results[name] = result
                over.release()

            return ThreadJob(stages(name, exchanges), done=end, failed=end, context=contextlib.nullcontext)

        exchange_thread = ExchangeThread(comm)
        for number, batch in enumerate(batches, start=1):
            exchange_thread.put(
                [job(name, exchanges) for name, exchanges in batch], last=number == len(batches)
            )
        for batch in batches:
            for _ in batch:
                assert over.acquire(timeout=PATIENCE)
        return comm.events, results

    return run


def moves(text):
    """Return events from text like ``"a0 -b0"``: the start of a0, the wait for b0."""
    return [f"wait {word[1:]}" if word.startswith("-") else f"start {word}" for word in text.split()]


def test_a_whole_batch_is_started_before_anything_is_waited_for(carry):
    events, results = carry([("a", 1), ("b", 1), ("c", 1)], [("d", 1)])
    assert events == moves("a0 b0 c0 d0 -a0 -b0 -c0 -d0")
    assert results == {name: name for name in "abcd"}


def test_each_batch_advances_earlier_jobs_by_one_exchange(carry):
    events, _ = carry([("a", 2), ("b", 2)], [("c", 2)], [("d", 2)])
    assert events == moves("a0 b0 c0 -a0 a1 -b0 b1 d0 -a1 -b1 -c0 c1 -d0 d1 -c1 -d1")


def test_jobs_may_have_different_numbers_of_exchanges(carry):
    events, _ = carry([("a", 3), ("b", 1), ("c", 0)])
    assert events == moves("a0 b0 -a0 a1 -b0 -a1 a2 -a2")


def test_a_value_that_is_not_finite_fails_only_its_job(carry):
    error = NonFiniteError("a value")
    _, results = carry([("a", 2), ("b", 2)], [("c", 2)], spoiled="a1", error=error)
    assert results == {"a": error, "b": "b", "c": "c"}


def test_any_other_error_fails_all_later_jobs(carry):
    error = ValueError("of this rank alone")
    events, results = carry([("a", 2), ("b", 2)], [("c", 2)], spoiled="b0", error=error)
    assert results["b"] is error
    assert all(isinstance(results[name], CommunicatorError) for name in "ac")
    assert all(results[name].__cause__ is error for name in "ac")
    assert events == moves("a0")


class Alone:
    """A rank that receives what it sends, and notes how many bytes each exchange has."""

    def __init__(self):
        self.sizes = []

    def start(self, request):
        self.sizes.append(request.send.shape[0])
        return Arrived([request.send])


class Arrived:
    def __init__(self, messages):
        self.messages = messages

    def wait(self):
        return self.messages


@pytest.fixture
def join():
    """Return a function that runs jobs (name, bytes of each exchange), which join, and returns sizes and results."""

    def run(*jobs, spoiled=None, error=None):
        comm, results, over = Alone(), {}, threading.Semaphore(0)

        def stages(name, sizes):
            for number, size in enumerate(sizes):
                if f"{name}{number}" == spoiled:
                    raise error
                message = np.full(size, ord(name), np.uint8)
                (arrived,) = yield AllGather(message, (size,))
                assert arrived.tobytes() == message.tobytes()
            return name

        def job(name, sizes):
            def end(result):
                results[name] = result
                over.release()

            return ThreadJob(stages(name, sizes), end, end, contextlib.nullcontext, joins=True)

        exchange_thread = ExchangeThread(comm)
        for number, (name, sizes) in enumerate(jobs, start=1):
            exchange_thread.put([job(name, sizes)], last=number == len(jobs))
        for _ in jobs:
            assert over.acquire(timeout=PATIENCE)
        return comm.sizes, results

    return run


def test_short_messages_of_several_jobs_travel_together(join):
    sizes, results = join(("a", (8, 16)), ("b", (8,)), ("c", ()), ("d", (24, 8, 8)))
    assert len(sizes) == 3
    assert sizes[0] >= 8 + 8 + 24
    assert results == {name: name for name in "abcd"}


def test_jobs_wait_only_until_their_messages_are_long(join):
    half = 1 << 19
    sizes, results = join(("a", (half,)), ("b", (half, 8)), ("c", (8,)), ("d", (2 * half,)), ("e", (8, 8)))
    assert [size >= half for size in sizes] == [True, False, True, False, False]
    assert sizes[0] >= 2 * half
    assert results == {name: name for name in "abcde"}


def test_a_value_that_is_not_finite_fails_the_jobs_that_travel_together(join):
    error = NonFiniteError("a value")
    _, results = join(("a", (1 << 20, 8)), ("b", (8, 8)), ("c", (8, 8)), spoiled="b1", error=error)
    assert results == {"a": "a", "b": error, "c": error}


def test_any_other_error_fails_waiting_jobs_too(join):
    error = ValueError("of this rank alone")
    _, results = join(("a", (8,)), ("b", (8,)), ("c", (8,)), spoiled="b0", error=error)
    assert results["b"] is error
    assert all(isinstance(results[name], CommunicatorError) for name in "ac")


AT_EXIT = """
import threading, time
from types import SimpleNamespace
from contextlib import nullcontext
import torch
from qcomp.integrations.ddp.exchange_thread import ExchangeThread, ThreadJob

torch.set_num_threads(1)
arrived = threading.Event()

def stages():
    return 7
    yield

def done(result):
    arrived.set()
    until = time.monotonic() + 0.3
    while time.monotonic() < until:
        torch.futures.Future().set_result(torch.ones(9))

ExchangeThread(SimpleNamespace(start=None)).put([ThreadJob(stages(), done, print, nullcontext)], last=True)
assert arrived.wait(30)
"""


class TestOccupy:
    """One communicator serves several exchange threads, one after the other."""

    def test_another_thread_is_refused_until_release(self):
        comm = Communicator()
        first, second = ExchangeThread(comm), ExchangeThread(comm)
        for end in (first.release, first.close):
            first.occupy()
            first.occupy()
            for refused in (second.occupy, lambda: require_unoccupied(comm)):
                with pytest.raises(RuntimeError, match="the backward pass of another model still averages"):
                    refused()
            ExchangeThread(Communicator()).occupy()
            end()
            second.occupy()
            second.release()

    def test_a_new_thread_ends_an_interrupted_pass(self):
        comm = Communicator()
        interrupted, other = ExchangeThread(comm), ExchangeThread(Communicator())
        interrupted.occupy()
        other.occupy()
        new = ExchangeThread(comm)
        new.occupy()
        with pytest.raises(RuntimeError, match="leave out comm"):
            require_unoccupied(other.comm)
        with pytest.raises(RuntimeError, match="leave out comm"):
            interrupted.occupy()


@pytest.mark.slow
def test_the_process_ends_after_the_thread():
    """A thread that returns from torch's code while Python shuts down aborts the process."""
    done = subprocess.run(
        [sys.executable, "-c", AT_EXIT], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
