"""Connections through which ranks learn that another rank has ended."""

import contextlib
import errno
import os
import re
import socket
import threading
import time
import warnings

import numpy as np
import pytest

from qcomp.comm import connecting, run_local
from qcomp.comm import lifelines as module
from qcomp.comm.lifelines import Lifelines, lifelines
from qcomp.core.errors import CommunicatorError

ENDED = "has finished, died or given up: its connection is closed"
LONG = 60.0


def share_of(comm):
    """Return a function that shares text over a communicator."""

    def share(text, check):
        own = np.frombuffer(text.encode(), np.uint8)
        lengths = comm.all_gather(np.array([own.size]).view(np.uint8), [8] * comm.size)
        texts = comm.all_gather(own, [int(x.view(np.int64)[0]) for x in lengths])
        check()
        return [(rank, x.tobytes().decode()) for rank, x in enumerate(texts)]

    return share


def connected(n, *, silence=LONG):
    """Return the lifelines of n ranks, all in this process."""
    return run_local(n, lambda comm: lifelines(comm.rank, n, share_of(comm), silence=silence))


@pytest.fixture
def three():
    """Return the lifelines of three ranks."""
    ranks = connected(3)
    yield ranks
    for each in ranks:
        each.finish()


def problem_of(rank, exchange):
    """Return the problem that a rank reports for an exchange, once it knows of one."""
    with rank.changed:
        assert rank.changed.wait_for(lambda: rank.problem(exchange, "all_gather") is not None, 30)
    return rank.problem(exchange, "all_gather")


def drop(rank):
    """Close the connections of a rank, as the end of its process would."""
    for connection in rank._sockets.values():
        connection.shutdown(socket.SHUT_RDWR)


@pytest.mark.parametrize("n", [1, 2, 5])
def test_living_ranks_report_no_problem(n):
    ranks = connected(n)
    assert [len(each._sockets) for each in ranks] == [n - 1] * n
    assert [each.problem(10**9, "all_gather") for each in ranks] == [None] * n
    for each in ranks:
        each.finish()


def test_a_dead_rank_is_a_problem_of_every_exchange(three):
    assert three[0].begin() == three[2].begin() == 0
    drop(three[1])
    for rank in (three[0], three[2]):
        assert problem_of(rank, 0) == f"all_gather: rank 1 {ENDED}"
        assert rank.is_dead(1)
        assert not rank.is_dead(2)


def test_a_finished_rank_is_no_problem_for_exchanges_that_it_completed(three):
    one = three[1]
    for _ in range(3):
        one.begin()
    one.complete(0)
    one.complete(2)
    one.complete(1)
    one.finish()
    for rank in (three[0], three[2]):
        assert problem_of(rank, 3) == f"all_gather: rank 1 {ENDED}"
        assert rank.problem(2, "all_gather") is None


def test_a_rank_that_gives_up_says_why_and_from_which_exchange_on(three):
    one = three[1]
    for _ in range(3):
        one.begin()
    one.complete(0)
    one.complete(2)  # exchanges may end in any order
    one.give_up("all_gather: no memory, ü" + "x" * 2000)
    for rank in (three[0], three[2]):
        assert problem_of(rank, 1).startswith("all_gather: rank 1 failed: all_gather: no memory, ü")
        assert rank.problem(0, "all_gather") is None
        assert not rank.is_dead(1)
        assert len(rank.problem(2, "all_gather")) < 1100
    drop(one)
    with three[0].changed:
        assert three[0].changed.wait_for(lambda: three[0].is_dead(1), 30)
    assert three[0].problem(1, "all_gather").startswith("all_gather: rank 1 failed")  # the first reason stays


def test_a_silent_rank_counts_as_lost_though_its_connection_is_open():
    here, there = socket.socketpair()
    with there:
        rank = Lifelines({1: here}, silence=0.2)
        assert (
            problem_of(rank, 0)
            == "all_gather: nothing was heard of rank 1 for 0.2 s: it was stopped or cut off"
        )
        assert rank.is_dead(1)
        rank.finish()


class TestSilence:
    """By default a silent rank is reported: it may hold Python's lock, or be stopped for a while."""

    @pytest.fixture(autouse=True)
    def short(self, monkeypatch):
        monkeypatch.setattr(module, "SILENCE", 0.2)

    @pytest.fixture
    def alone(self):
        """Return the lifelines of rank 0 and the other end of its connection to rank 1, which says nothing."""
        here, there = socket.socketpair()
        with there:
            rank = Lifelines({1: here}, silence=None)
            yield rank, there
            rank.finish()

    @staticmethod
    def news(rank):
        """Return what there is to say, once there is something."""
        with rank.changed:
            assert rank.changed.wait_for(lambda: rank.has_news, 30)
        with pytest.warns(RuntimeWarning) as warned:
            rank.report()
        return [str(w.message) for w in warned]

    def test_is_reported_once_and_is_no_problem(self, alone):
        rank, _ = alone
        [text] = self.news(rank)
        assert re.match(
            r"nothing was heard of rank 1 for 0\.2 s, since \d\d:\d\d:\d\d: its process holds", text
        )
        for _ in range(4):  # several more of its turns
            with rank.changed:
                assert not rank.changed.wait_for(lambda: rank.has_news, rank._pause)
        assert rank.problem(0, "all_gather") is None
        assert not rank.is_dead(1)
        assert re.fullmatch(r"; nothing was heard of rank 1 for \d+ s", rank.silent())

    @staticmethod
    def answer(rank, there):
        """Give a sign of life; the next silence begins only when the test lets it."""
        rank._limit = LONG
        there.send(module._MESSAGE.pack(module._BEAT, 0, 0))
        while rank.silent():
            pass

    def test_its_end_is_reported_too(self, alone):
        rank, there = alone
        self.news(rank)
        self.answer(rank, there)
        [text] = self.news(rank)
        assert re.fullmatch(r"rank 1 is heard again, after \d+ s", text)
        rank._limit = 0.2
        there.send(module._MESSAGE.pack(module._BEAT, 0, 0))
        assert self.news(rank)[0].startswith("nothing was heard of rank 1")  # the next silence

    def test_ends_with_the_exchange_at_the_latest(self, alone):
        rank, _ = alone
        exchange = rank.begin()
        self.news(rank)
        rank._limit = LONG
        rank.complete(exchange)
        assert self.news(rank)[0].startswith("rank 1 is heard again")

    def test_that_nobody_waited_for_is_not_reported(self, alone):
        rank, there = alone
        with rank.changed:
            assert rank.changed.wait_for(lambda: rank.has_news, 30)
        self.answer(rank, there)
        rank.report()

    def test_that_ends_with_the_process_is_only_a_death(self, alone):
        rank, there = alone
        with rank.changed:
            assert rank.changed.wait_for(lambda: rank.has_news, 30)
        there.shutdown(socket.SHUT_RDWR)
        assert problem_of(rank, 0) == f"all_gather: rank 1 {ENDED}"
        assert not rank.has_news
        assert rank.silent() == ""

    def test_where_the_system_cannot_notice_a_cut_cable_a_silent_rank_is_lost(self, monkeypatch):
        monkeypatch.setattr(module, "_is_watched", lambda *_: False)
        here, there = socket.socketpair()
        with there:
            rank = Lifelines({1: here}, silence=None)
            assert "nothing was heard of rank 1 for 0.2 s: it was stopped or cut off" in problem_of(rank, 0)
            rank.finish()

    def test_signs_of_life_are_frequent_enough_for_the_most_impatient_rank(self):
        ranks = run_local(
            2, lambda comm: lifelines(comm.rank, 2, share_of(comm), silence=(0.2, LONG)[comm.rank])
        )
        with ranks[0].changed:
            assert not ranks[0].changed.wait_for(lambda: ranks[0].problem(0, "all_gather"), 0.6)
        for each in ranks:
            each.finish()


class Distant:
    """A connection to another machine, which only notes its options."""

    def __init__(self):
        self.options = {}

    def getsockname(self):
        return ("10.0.0.1", 1)

    def getpeername(self):
        return ("10.0.0.2", 1)

    def setsockopt(self, level, name, value):
        self.options[level, name] = value


class TestSystem:
    """The system ends connections to machines that do not answer, which needs no interpreter."""

    @pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="this system is not Linux")
    def test_is_asked_to_notice_a_machine_that_does_not_answer(self):
        distant = Distant()
        assert module._is_watched(distant, 20.0)
        tcp = socket.IPPROTO_TCP
        assert distant.options[socket.SOL_SOCKET, socket.SO_KEEPALIVE] == 1
        idle, pause, probes = (
            distant.options[tcp, getattr(socket, f"TCP_KEEP{name}")] for name in ("IDLE", "INTVL", "CNT")
        )
        assert 10 <= idle + pause * probes <= 20
        # A sign of life is due every 5 s. If the next one is not answered, the wait ends within the limit.
        assert 10_000 <= distant.options[tcp, socket.TCP_USER_TIMEOUT] + 5_000 <= 20_000

    @pytest.mark.parametrize("limit", [0.01, 1e9])
    def test_accepts_all_limits(self, limit):
        with socket.create_server(("127.0.0.1", 0)) as server:
            distant = Distant()
            distant.setsockopt = server.setsockopt
            assert module._is_watched(distant, limit)

    def test_may_be_unable_to(self, monkeypatch):
        monkeypatch.delattr(socket, "TCP_USER_TIMEOUT", raising=False)
        assert not module._is_watched(Distant(), 20.0)

    def test_need_not_notice_the_own_machine(self, monkeypatch):
        monkeypatch.delattr(socket, "TCP_USER_TIMEOUT", raising=False)
        with (
            socket.create_server(("127.0.0.1", 0)) as server,
            socket.create_connection(server.getsockname()) as connection,
        ):
            assert module._is_watched(connection, 20.0)

    def test_names_a_machine_that_does_not_answer(self):
        here, there = socket.socketpair()
        with there:
            rank = Lifelines({1: here}, silence=LONG)
            rank._errors[1] = TimeoutError(errno.ETIMEDOUT, "Connection timed out")  # as `send` raises it
            there.shutdown(socket.SHUT_RDWR)
            assert problem_of(rank, 0) == (
                "all_gather: rank 1 cannot be reached: its machine is down or cut off (Connection timed out)"
            )
            assert rank.is_dead(1)
            rank.finish()


def test_heartbeats_keep_idle_ranks_from_counting_as_lost():
    ranks = connected(2, silence=0.2)
    beats = []
    with ranks[0].changed:  # waits for a condition that must not occur
        ranks[0].changed.wait_for(
            lambda: beats.append(1) or ranks[0].problem(0, "all_gather") is not None, 1.0
        )
    assert ranks[0].problem(0, "all_gather") is None
    for each in ranks:
        each.finish()


def test_a_rank_that_was_itself_stopped_blames_no_other(monkeypatch):
    here, there = socket.socketpair()
    with there:
        monkeypatch.setattr(Lifelines, "_watch", lambda _: None)
        rank = Lifelines({1: here}, silence=1.0)
        rank._heard[1] = rank._turned = rank._spoke = time.monotonic() - 30
        assert rank._turn()
        assert rank.problem(0, "all_gather") is None
        rank._heard[1] -= 30
        assert rank._turn()  # its own thread ran just now, so this silence counts
        assert "nothing was heard of rank 1" in rank.problem(0, "all_gather")
        rank.finish()
        rank._selector.close()
        rank._woken.close()


def test_a_foreign_connection_is_closed():
    def rank_main(comm):
        share = share_of(comm)
        strangers = []

        def intrude(text, check):
            texts = share(text, check)
            if comm.rank == 1 and len(texts[0][1].split()) > 1 and not strangers:
                _, _, port, *_ = texts[0][1].split()
                stranger = socket.create_connection(("127.0.0.1", int(port)), timeout=10)
                stranger.sendall(bytes(16) + (1).to_bytes(4, "little"))
                strangers.append(stranger)
                assert stranger.recv(1) == b""
                stranger.close()
            return texts

        return lifelines(comm.rank, 2, intrude, silence=LONG)

    ranks = run_local(2, rank_main)
    ranks[1].give_up("I am the one")
    assert problem_of(ranks[0], 0) == "all_gather: rank 1 failed: I am the one"
    for each in ranks:
        each.finish()


def test_ranks_that_cannot_reach_each_other_are_named(monkeypatch):
    monkeypatch.setattr(connecting, "_addresses", lambda: [])

    told = []

    def rank_main(comm):
        return lifelines(comm.rank, 2, share_of(comm), silence=LONG)

    # Not pytest.warns, whose record belongs to one thread.
    monkeypatch.setattr(module, "warn_caller", lambda text, kind: told.append((text, kind)))
    for each in run_local(2, rank_main):
        assert each._sockets == {}
        assert each.problem(0, "all_gather") is None
        each.finish()
    assert sorted(text.partition(" beside")[0] for text, _ in told) == [
        "rank 0 has no connection to rank 1",
        "rank 1 has no connection to rank 0",
    ]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_forked_child_does_not_keep_the_connections_of_a_dead_parent_open(three):
    read, write = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python, and JAX if loaded, warn of a fork in a process with threads
        child = os.fork()
    if child == 0:
        os.close(write)
        os.read(read, 1)  # the child lives until the end of the test
        os._exit(0)
    os.close(read)
    for connection in three[1]._sockets.values():
        connection.close()
    assert problem_of(three[0], 0) == f"all_gather: rank 1 {ENDED}"
    os.close(write)
    os.waitpid(child, 0)


class TestHello:
    """A connection counts once the whole hello has come, within one deadline."""

    @pytest.fixture(autouse=True)
    def short(self, monkeypatch):
        monkeypatch.setattr(connecting, "_HELLO_SECONDS", 0.3)

    @staticmethod
    @contextlib.contextmanager
    def dripping(connection):
        """Send a byte every now and then, until the peer has closed the connection."""
        done = threading.Event()

        def drip():
            with contextlib.suppress(OSError):
                while not done.wait(0.1):
                    connection.send(b"\0")

        thread = threading.Thread(target=drip)
        thread.start()
        yield
        done.set()
        thread.join()

    def test_has_one_deadline_however_often_a_byte_arrives(self):
        here, there = socket.socketpair()
        with here, there, self.dripping(there), pytest.raises(TimeoutError):
            connecting._exactly(here, 20)

    def test_a_stranger_that_drips_delays_no_rank(self):
        closed = []

        def rank_main(comm):
            share = share_of(comm)
            with contextlib.ExitStack() as stack:

                def intrude(text, check):
                    told = share(text, check)
                    if comm.rank == 1 and len(told[0][1].split()) > 1:
                        port = int(told[0][1].split()[2])
                        stranger = stack.enter_context(
                            socket.create_connection(("127.0.0.1", port), timeout=30)
                        )
                        stack.callback(lambda: closed.append(stranger.recv(1)))
                        stack.enter_context(self.dripping(stranger))
                    return told

                return lifelines(comm.rank, 2, intrude, silence=LONG)

        ranks = run_local(2, rank_main)
        assert [sorted(each._sockets) for each in ranks] == [[1], [0]]
        assert closed == [b""]
        for each in ranks:
            each.finish()

    def test_a_rank_that_ends_meanwhile_is_noticed(self, monkeypatch):
        def rank_main(comm):
            share = share_of(comm)

            def end(text, check):
                told = share(text, lambda: None)
                if comm.rank == 1:
                    yield from told
                    raise ZeroDivisionError
                yield from told
                while True:
                    check()

            with pytest.raises((CommunicatorError, ZeroDivisionError)) as caught:
                lifelines(comm.rank, 2, end, silence=LONG)
            return str(caught.value)

        assert run_local(2, rank_main)[0] == "rank 1 ended while the ranks made their communicators"
