"""Ranks that wait for each other in different communicators are told; ranks that still may go on are not."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from qcomp.comm import deadlocks as module
from qcomp.comm.deadlocks import Station
from qcomp.core.mean.stages import Owner


class Rank:
    """A rank with a station in each of two communicators, and threads by name."""

    def __init__(self, number):
        self.number = number
        self.refused = []
        self.threads = {}
        self.stations = {
            name: Station(
                name, number, lambda exchange, text, name=name: self.refused.append((name, exchange, text))
            )
            for name in "AB"
        }
        self.entered = []

    def on(self, thread, work):
        """Do some work on a thread of this rank."""
        if thread not in self.threads:
            self.threads[thread] = ThreadPoolExecutor(1)
        return self.threads[thread].submit(work).result()

    def exchange(self, name, thread="main"):
        """Begin and complete an exchange."""
        self.on(thread, self.stations[name].begin)

    def wait_in(self, name, thread="main"):
        """Begin an exchange and wait in it."""
        station = self.stations[name]
        number = self.on(thread, station.begin)
        waiting = station.waiting(number, Owner("SGD", 1, (f"of {name}",), 0, f"step {number}"))
        self.on(thread, waiting.__enter__)
        self.entered.append((thread, waiting))

    def go_on(self):
        """Complete the exchange in which a thread waits."""
        thread, waiting = self.entered.pop()
        self.on(thread, lambda: waiting.__exit__(None, None, None))

    def close(self):
        for thread in self.threads.values():
            thread.shutdown()
        for station in self.stations.values():
            station.close()


@pytest.fixture
def ranks(monkeypatch):
    monkeypatch.setattr(module, "_TELL_SECONDS", 0.0)
    both = Rank(0), Rank(1)
    for rank in both:
        rank.exchange("A")
        rank.exchange("B")
    yield both
    for rank in both:
        rank.close()


def talk(ranks):
    """Let each rank tell the other what it waits in, and judge; return what each refuses."""
    for rank, other in (ranks, ranks[::-1]):
        for name, station in rank.stations.items():
            for text in station.tell():
                other.stations[name].hear(rank.number, text)
    for rank in ranks:
        for station in rank.stations.values():
            station.judge()
    return [[(name, exchange) for name, exchange, _ in rank.refused] for rank in ranks]


def test_ranks_that_wait_for_each_other_are_both_told(ranks):
    ranks[0].wait_in("A")
    ranks[1].wait_in("B")
    assert talk(ranks) == [[("A", 1)], [("B", 1)]]
    for rank, (own, other) in zip(ranks, ("AB", "BA"), strict=True):
        ((_, _, text),) = rank.refused
        assert f"rank {rank.number}: step 1 of SGD number 1 with 'of {own}'" in text
        assert f"rank {1 - rank.number}: step 1 of SGD number 1 with 'of {other}'" in text


def test_it_does_not_matter_who_is_told_first(ranks):
    ranks[0].wait_in("A")
    assert talk(ranks) == [[], []]
    ranks[1].wait_in("B")
    assert talk(ranks) == [[("A", 1)], [("B", 1)]]


def test_ranks_that_wait_in_one_communicator_are_not_judged(ranks):
    ranks[0].wait_in("A")
    ranks[1].wait_in("A")
    assert talk(ranks) == [[], []]


def test_a_rank_that_has_begun_what_the_other_waits_for_is_not_judged(ranks):
    ranks[1].on("main", ranks[1].stations["A"].begin)  # started, and not waited for
    ranks[0].wait_in("A")
    ranks[1].wait_in("B")
    assert talk(ranks) == [[], []]


def test_an_exchange_that_another_thread_may_begin_is_not_judged(ranks):
    ranks[1].exchange("A", thread="of a hook")
    ranks[0].exchange("A")
    ranks[0].wait_in("A")
    ranks[1].wait_in("B")
    assert talk(ranks) == [[], []]


def test_if_threads_were_not_told_apart_a_rank_that_goes_on_would_be_refused(ranks, monkeypatch):
    monkeypatch.setattr(module, "_used_by", lambda _: list(module._stations))
    ranks[1].exchange("A", thread="of a hook")
    ranks[0].exchange("A")
    ranks[0].wait_in("A")
    ranks[1].wait_in("B")
    assert talk(ranks) != [[], []]


def test_each_thread_with_a_communicator_of_its_own_may_wait(ranks):
    for rank in ranks:
        for name in "AB":
            rank.stations[name] = Station(
                f"{name} of threads", rank.number, lambda *_: pytest.fail("refused")
            )
            rank.exchange(name, thread=name)
    ranks[0].wait_in("A", thread="A")
    ranks[1].wait_in("B", thread="B")
    assert talk(ranks) == [[], []]


def test_what_was_told_of_an_earlier_wait_is_not_taken_for_a_later_one(ranks):
    ranks[0].wait_in("A")
    assert talk(ranks) == [[], []]
    ranks[1].exchange("A")
    ranks[0].go_on()
    ranks[1].wait_in("B")
    assert talk(ranks) == [[], []]


def test_a_message_that_was_cut_off_is_dropped(ranks):
    ranks[0].wait_in("A")
    ranks[1].wait_in("B")
    (text,) = ranks[0].stations["A"].tell()
    ranks[1].stations["A"].hear(0, text[:-5])
    assert talk(ranks) == [[("A", 1)], []]  # rank 0 tells nothing twice


def test_a_short_wait_is_not_told(ranks, monkeypatch):
    monkeypatch.setattr(module, "_TELL_SECONDS", 60.0)
    ranks[0].wait_in("A")
    assert ranks[0].stations["A"].tell() == []


HEAD = """
import os, threading, time
import torch
import torch.distributed as dist
import qcomp, qcomp.torch
from qcomp.comm import deadlocks

torch.set_num_threads(1)
server = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), is_master=False)
store = dist.PrefixStore("job" + os.environ["TORCHELASTIC_RESTART_COUNT"], server)
me, n = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
dist.init_process_group("gloo", store=store, rank=me, world_size=n)

def made(name):
    p = torch.nn.Parameter(torch.zeros(8))
    optimizer = qcomp.torch.CompressedSGD([(name, p)], lr=1.0, compressor=qcomp.Identity(), exact=None)
    def step(value):
        p.grad = torch.full((8,), float(value + me))
        optimizer.step()
        return p[0].item()
    return step
enc, dec = made("enc"), made("dec")
"""


@pytest.mark.parametrize("n", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_optimizers_with_communicators_of_their_own_in_another_order_are_named(torch_ranks, n):
    body = """
start = time.monotonic()
try:
    for step in (enc, dec) if me == 0 else (dec, enc):
        step(1)
except qcomp.MismatchError as error:
    print(time.monotonic() - start < 10, error, flush=True)
dist.barrier()
"""
    for rank in torch_ranks(n, HEAD + body, timeout=50):
        assert rank.out.startswith("True "), rank
        for owner in ("'enc'", "'dec'"):
            assert f"step 1 (compressed) of CompressedSGD number 1 with {owner}" in rank.out, rank


def test_threads_that_wait_long_and_go_on_are_left_alone(torch_ranks):
    body = """
from concurrent.futures import ThreadPoolExecutor
deadlocks._TELL_SECONDS = 0.05
threads = {name: ThreadPoolExecutor(1) for name in ("enc", "dec")}
steps = {name: thread.submit(made, name).result() for name, thread in threads.items()}
may_go = threading.Event()
def run(name, value):
    if (name == "dec") == bool(me):
        may_go.wait()  # a thread of the other rank waits for this one meanwhile, and has told so
    return steps[name](value)
running = [threads[name].submit(run, name, value) for name, value in (("enc", 1), ("dec", 100))]
threading.Event().wait(0.5)
may_go.set()
print(*[one.result() for one in running], flush=True)
dist.barrier()
"""
    assert [rank.out for rank in torch_ranks(2, HEAD + body)] == ["-1.5 -100.5\n"] * 2


@pytest.mark.mpi
@pytest.mark.slow
def test_over_mpi_communicators_in_another_order_are_named(mpirun):
    body = """
import numpy as np
import qcomp
from mpi4py import MPI
from qcomp.comm import MPICommunicator

comms = MPICommunicator(MPI.COMM_WORLD), MPICommunicator(MPI.COMM_WORLD)
me, optimizer, params = comms[0].rank, qcomp.SGD(learning_rate=1.0), [np.zeros(8, np.float32)]
states = [optimizer.init(params, comm, [name]) for comm, name in zip(comms, ("enc", "dec"))]
try:
    for which in (0, 1) if me == 0 else (1, 0):
        optimizer.step(params, [np.full(8, me, np.float32)], states[which], comms[which])
except qcomp.MismatchError as error:
    print(error, flush=True)
MPI.COMM_WORLD.Barrier()
"""
    lines = [
        line for line in mpirun(2, ["-c", body], check=False).stdout.splitlines() if "each waits" in line
    ]
    assert len(lines) == 2
    for line in lines:
        for owner in ("'enc'", "'dec'"):
            assert f"step 1 (warmup) of SGD number 1 with {owner}" in line
