"""Connections through which ranks learn that another rank has ended."""

import os
import socket
import time
import warnings

import numpy as np
import pytest

from qcomp.comm import lifelines as module
from qcomp.comm import run_local
from qcomp.comm.lifelines import Lifelines, lifelines

ENDED = "has finished, died or given up: its connection is closed"
LONG = 60.0


def share_of(comm):
    """Return a function that shares text over a communicator."""

    def share(text):
        own = np.frombuffer(text, np.uint8)
        lengths = comm.all_gather(np.array([len(text)]).view(np.uint8), [8] * comm.size)
        return [x.tobytes() for x in comm.all_gather(own, [int(x.view(np.int64)[0]) for x in lengths])]

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

        def intrude(text):
            texts = share(text)
            if comm.rank == 1 and len(texts[0].split()) > 1 and not strangers:
                _, port, *_ = texts[0].decode().split()
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
    monkeypatch.setattr(module, "_addresses", lambda: [])

    told = []

    def rank_main(comm):
        return lifelines(comm.rank, 2, share_of(comm), silence=LONG)

    # Not pytest.warns, whose record belongs to one thread.
    monkeypatch.setattr(module.warnings, "warn", lambda text, kind, **_: told.append((text, kind)))
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
