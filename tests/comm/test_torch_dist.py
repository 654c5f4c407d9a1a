"""TorchCommunicator on real ranks over gloo: each test is a script that forked processes run."""

import os
import re
import signal
import subprocess
import sys

import pytest

import qcomp
from qcomp.core.errors import CommunicatorError

pytest.importorskip("torch")

HEAD = """
import os, signal, sys, threading, time
import numpy as np
import torch
import torch.distributed as dist
from qcomp.comm.torch_dist import TorchCommunicator
from qcomp.core.errors import CommunicatorError
from qcomp.core.mean.stages import AllGather, AllToAll

me, n = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
server = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), is_master=False)
store = dist.PrefixStore("job" + os.environ["TORCHELASTIC_RESTART_COUNT"], server)
dist.init_process_group("gloo", store=store, rank=me, world_size=n)

def zeros(size):
    return np.zeros(size, dtype=np.uint8)

def say(*words):
    print(*words, flush=True)

def wait_for(name):
    # Waits without the communicator until another rank has set this name.
    store.wait([name])
"""
CREATE = (
    "comm = TorchCommunicator(timeout=60)\ncomm.timeout = {timeout}\n"  # however long the ranks take to start
)


@pytest.fixture
def said(torch_ranks):
    """Run a script on ranks that have a communicator; return the lines of each."""

    def run(n, body, *, timeout=60, check=True):
        ranks = torch_ranks(n, HEAD + CREATE.format(timeout=timeout) + body, check=check)
        return [rank.out.splitlines() for rank in ranks]

    return run


@pytest.mark.slow
@pytest.mark.parametrize("n", [1, pytest.param(2, marks=pytest.mark.slow), 3])
def test_it_keeps_the_laws_of_communicators(said, n):
    body = """
from qcomp.testing import check_communicator

check_communicator(comm)
check_communicator(comm, torch, failures=n > 1)
say(comm.rank, comm.size)
"""
    assert said(n, body) == [[f"{rank} {n}"] for rank in range(n)]


def test_it_is_a_communicator(said):
    body = """
import platform
from qcomp.comm.base import Communicator
os.environ["QCOMP_HOST"] = "given"
say(isinstance(comm, Communicator), comm, comm.host == platform.node(), TorchCommunicator().host, comm.timeout)
"""
    assert said(1, body) == [["True TorchCommunicator(rank=0, size=1) True given 60"]]


@pytest.mark.slow
def test_each_rank_gets_arrays_of_its_own_library(said):
    pytest.importorskip("jax")
    body = """
if me == 0:
    mine = torch.arange(7, dtype=torch.uint8)[::2]  # not contiguous
elif me == 1:
    import jax.numpy
    mine = jax.numpy.arange(4, dtype="uint8") + 10
else:
    import array_api_strict
    mine = array_api_strict.asarray([20, 21, 22], dtype=array_api_strict.uint8)
received = comm.all_gather(mine, [4, 4, 3])
assert [type(x) for x in received] == [type(mine)] * 3
say(*[np.asarray(x).tolist() for x in received])
"""
    assert said(3, body) == [["[0, 2, 4, 6] [10, 11, 12, 13] [20, 21, 22]"]] * 3


def test_read_only_buffers_are_sent_without_a_warning(said):
    body = """
mine = np.arange(3, dtype=np.uint8) + me
mine.flags.writeable = False
received = comm.all_gather(mine, [3, 3])
received[me][0] = 99
say(*[x.tolist() for x in received], mine.tolist())
"""
    assert said(2, body) == [["[99, 1, 2] [1, 2, 3] [0, 1, 2]"], ["[0, 1, 2] [99, 2, 3] [1, 2, 3]"]]


def test_a_buffer_may_be_overwritten_once_the_exchange_is_over(said):
    body = """
size = 2_000_000
mine = zeros(size * me)
for i in range(10):
    mine[:] = i
    received = comm.all_to_all([mine, zeros(0)], [0, 0 if me else size])
    mine[:] = 255
    assert me or (received[1] == i).all()
say("ok")
"""
    assert said(2, body) == [["ok"]] * 2


@pytest.mark.parametrize("n", [*(pytest.param(n, marks=pytest.mark.slow) for n in (3, 4)), 5])
def test_long_payloads_are_sent_to_one_peer_at_a_time(said, n):
    body = """
peers = [(me + k) % n for k in range(1, n)]
sizes = [[65_536 + 1000 * s + r if (s, r) != (1, 0) else 0 for r in range(n)] for s in range(n)]
post, wait_for_these = comm.post_send, module.TorchExchange._wait_for
events = []

def post_send(tensor, peer, tag):
    if tag > 1:
        events.append(("to", peer))
    return post(tensor, peer, tag)

def waited(self, trouble, pending):
    works = list(pending)
    wait_for_these(self, trouble, works)
    if trouble.startswith("only a part"):
        events.extend(("from", peer) for peer, _ in works)

comm.post_send, module.TorchExchange._wait_for = post_send, waited
for start in (False, True):
    events.clear()
    send = [np.full(sizes[me][r], 10 * me + r, dtype=np.uint8) for r in range(n)]
    expected = [sizes[r][me] for r in range(n)]
    request = AllToAll(tuple(send), tuple(expected))
    received = comm.start(request).wait() if start else comm.all_to_all(send, expected)
    assert all(np.array_equal(received[r], np.full(expected[r], 10 * r + me)) for r in range(n))
    to, by = [("to", r) for r in peers], [("from", r) for r in reversed(peers)]
    in_turn = [event for pair in zip(to, by) for event in pair]
    there = {("to", r) for r in peers if sizes[me][r]} | {("from", r) for r in peers if sizes[r][me]}
    if start:
        sent = [event for event in to if event in there]
        assert events[: len(sent)] == sent, events
    else:
        assert events == [event for event in in_turn if event in there], events
say("ok")
"""
    assert said(n, "import qcomp.comm.torch_exchange as module\n" + body) == [["ok"]] * n


def test_several_exchanges_are_under_way_at_once_and_waited_for_in_any_order(said):
    body = """
sizes = (5, 300_001, 0, 5)
pending = []
for i, size in enumerate(sizes):
    if i % 2:
        request = AllToAll(tuple(np.full(size + r, i + me, dtype=np.uint8) for r in range(n)), (size + me,) * n)
    else:
        request = AllGather(np.full(size, i + me, dtype=np.uint8), (size,) * n)
    pending.append(comm.start(request))
order = (2, 0, 3, 1) if me else (3, 2, 1, 0)
for i in order:
    received = pending[i].wait()
    assert [x.size for x in received] == [sizes[i] + me * (i % 2)] * n
    assert all((x == i + r).all() for r, x in enumerate(received))
    assert pending[i].wait() is received
say(comm.bytes_sent == sum(sizes) * (n - 1) + 2 * sum(r for r in range(n) if r != me))
"""
    assert said(3, body) == [["True"]] * 3


def test_a_dropped_exchange_takes_no_messages_of_a_later_one(said):
    """gloo cancels receives that nothing refers to, and their messages would reach the next exchange."""
    body = """
import gc
for size in (8, 100_000):
    pending = comm.start(AllGather(np.full(size, me, dtype=np.uint8), (size,) * n))
    del pending
    gc.collect()
    received = comm.all_gather(np.full(5, 10 + me, dtype=np.uint8), [5] * n)
    say([int(x[0]) for x in received])
"""
    assert said(2, body) == [["[10, 11]", "[10, 11]"]] * 2


def test_an_exchange_goes_on_while_its_ranks_do_not_wait(said):
    # If only wait moved the bytes, rank 0 would not have them before rank 1 waits.
    body = """
pending = comm.start(AllGather(np.full(500_000, me, dtype=np.uint8), (500_000,) * n))
if me == 0:
    assert pending.wait()[1].sum() == 500_000
    store.set("rank 0 has it", "")
else:
    wait_for("rank 0 has it")
    assert pending.wait()[0].sum() == 0
say("ok")
"""
    assert said(2, body) == [["ok"]] * 2


def test_interleaved_computations_in_stages_give_the_same_results(said):
    body = """
from collections import deque
import qcomp
from qcomp.core.mean.stages import drive
mean = qcomp.CompressedMean(qcomp.ScaledSign(bucket_size=64))
xs = [np.random.default_rng(10 * me + i).standard_normal(500 + i).astype(np.float32) for i in range(3)]
states = [mean.init(x, comm) for x in xs]
alone = [mean(x, state, comm)[0] for x, state in zip(xs, states)]

def advance(index, stages, arrived):
    try:
        request = stages.send(arrived)
    except StopIteration as stop:
        results[index] = stop.value[0]
    else:
        under_way.append((index, stages, comm.start(request)))

results, under_way = {}, deque()
for i, (x, state) in enumerate(zip(xs, states)):
    advance(i, mean.stages(x, state), None)
most = len(under_way)
while under_way:
    index, stages, pending = under_way.popleft()
    advance(index, stages, pending.wait())
say(most, all(np.array_equal(results[i], alone[i]) for i in range(3)))
"""
    assert said(2, body) == [["3 True"]] * 2


def test_messages_of_the_user_and_of_other_communicators_are_never_received(said):
    body = """
request = dist.isend(torch.full((40,), 9, dtype=torch.uint8), 1 - me, tag=0)
other = TorchCommunicator(timeout=60)
first = other.start(AllGather(np.array([me], dtype=np.uint8), (1, 1)))
assert comm.all_gather(zeros(4), [4, 4])[1 - me].tolist() == [0] * 4
assert [x.tolist() for x in first.wait()] == [[0], [1]]
mine = torch.zeros(40, dtype=torch.uint8)
dist.recv(mine, 1 - me, tag=0)
request.wait()
say(set(mine.tolist()))
"""
    assert said(2, body) == [["{9}"]] * 2


def test_groups_of_some_ranks(said):
    body = """
pairs = [dist.new_group([0, 2]), dist.new_group([1, 2])]
for ranks, group in zip(([0, 2], [1, 2]), pairs):
    if me in ranks:
        part = TorchCommunicator(group, timeout=60)
        received = part.all_gather(np.array([me], dtype=np.uint8), [1, 1])
        say(part.rank, part.size, [int(x[0]) for x in received])
    else:
        try:
            TorchCommunicator(group)
        except TypeError as error:
            say("group must be a torch.distributed.ProcessGroup of this process, got" in str(error))
assert len(comm.all_gather(zeros(1), [1] * 3)) == 3
"""
    assert said(3, body) == [
        ["0 2 [0, 2]", "True"],
        ["True", "0 2 [1, 2]"],
        ["1 2 [0, 2]", "1 2 [1, 2]"],
    ]


def test_constructor_rejects_nonsense(torch_ranks):
    body = """
try:
    TorchCommunicator(timeout=0)
except ValueError as error:
    say(error)
dist.destroy_process_group()
try:
    TorchCommunicator()
except CommunicatorError as error:
    say(error)
dist.init_process_group("fake", rank=0, world_size=1)
try:
    TorchCommunicator()
except ValueError as error:
    say(error)
"""
    fake = "import torch.testing._internal.distributed.fake_pg\n"
    [rank] = torch_ranks(1, HEAD + fake + body)
    first, second, third = rank.out.splitlines()
    assert first == "timeout must be a positive number of seconds, got 0"
    assert second.startswith(
        "torch.distributed is not initialised: call torch.distributed.init_process_group"
    )
    assert third.startswith("group must have the backend gloo or nccl, got ")
    assert "fake" in third


def test_wrong_arguments_are_the_callers_error_and_close_nothing(said):
    body = """
for call in (lambda: comm.all_gather(zeros(3), [4, 4]), lambda: comm.all_gather(np.zeros(1), [1, 1])):
    try:
        call()
    except (ValueError, TypeError) as error:
        say(error)
assert len(comm.all_gather(zeros(1), [1, 1])) == 2
"""
    assert said(2, body) == [
        [
            f"receive[{rank}] is 4, but rank {rank} sends itself 3 bytes; expected equal numbers",
            "send must have dtype uint8, got float64",
        ]
        for rank in range(2)
    ]


# After an error the ranks stay until all have printed theirs, so that no rank sees the end of a process instead.
CATCH = """
try:
    work()
except CommunicatorError as error:
    say(error)
store.set(f"rank {me} is done", "")
for r in range(n):
    wait_for(f"rank {r} is done")
"""


@pytest.mark.parametrize(
    "scale", [pytest.param(1, id="small", marks=pytest.mark.slow), pytest.param(300_000, id="large")]
)
@pytest.mark.parametrize(
    ("sent", "announced"),
    [(4, 5), (5, 4), *(pytest.param(*sizes, marks=pytest.mark.slow) for sizes in ((0, 1), (1, 0)))],
)
def test_another_size_is_named_on_every_rank(said, sent, announced, scale):
    sent, announced = sent * scale, announced * scale
    body = f"""
def work():
    send, receive = [zeros(2)] * 3, [2] * 3
    if me == 1:
        send[2] = zeros({sent})
    if me == 2:
        receive[1] = {announced}
    comm.all_to_all(send, receive)
"""
    message = f"all_to_all: rank 1 sent {sent} bytes to rank 2, which expected {announced} bytes"
    assert said(3, body + CATCH) == [[message]] * 3


def test_if_the_tag_were_not_the_size_of_the_payload_gloo_would_abort(torch_ranks):
    # Rank 0 sends 5 bytes where 1 is expected: the mismatch that the test above finds named. Headers are not read
    # before the payload has arrived, or this rank might learn of it from them just in time.
    body = """
import qcomp.comm.torch_exchange as module
module._tag = lambda payload: 2
module.TorchExchange._read_headers = lambda self: self._wait_for("nothing came from", self._receiving.items())
comm.all_to_all([zeros(1), zeros(5 if me == 0 else 1)], [1, 1])
"""
    ranks = torch_ranks(2, HEAD + CREATE.format(timeout=5) + body, check=False)
    assert ranks[1].status == -signal.SIGABRT
    assert "EnforceNotMet" in ranks[1].err


def test_another_verb_is_named_on_every_rank(said):
    body = """
def work():
    if me == 1:
        comm.all_gather(zeros(1), [1] * 3)
    else:
        comm.all_to_all([zeros(1)] * 3, [1] * 3)
"""
    assert said(3, body + CATCH) == [["rank 0 called all_to_all where rank 1 called all_gather"]] * 3


def test_a_closed_communicator_stays_closed_also_for_exchanges_under_way(said):
    body = """
first = comm.start(AllGather(zeros(1), (1, 1)))
wrong = comm.start(AllGather(zeros(1 + me), (1 + me, 1 + me)))
third = comm.start(AllGather(zeros(1), (1, 1)))
say(len(first.wait()))
for call in (wrong.wait, wrong.wait, third.wait, lambda: comm.start(AllGather(zeros(1), (1, 1)))):
    try:
        call()
    except CommunicatorError as error:
        say(error)
say(len(first.wait()))
work = lambda: None
"""
    wrong = "all_gather: rank 0 sent 1 bytes to rank 1, which expected 2 bytes"
    closed = f"all_gather: this communicator is closed: {wrong}"
    assert said(2, body + CATCH) == [["2", wrong, closed, closed, closed, "2"]] * 2


@pytest.mark.slow
@pytest.mark.parametrize(
    "size", [pytest.param(4, id="small"), pytest.param(2_000_000, id="large", marks=pytest.mark.slow)]
)
def test_an_absent_peer_is_named_after_the_timeout(said, size):
    body = f"""
comm.all_gather(zeros(1), [1] * n)  # all have started
def work():
    if me == 1:
        wait_for("rank 0 is done")
        wait_for("rank 2 is done")
        comm.all_gather(zeros({size}), [{size}] * n)  # arrives late, and learns of it
    else:
        comm.all_gather(zeros({size}), [{size}] * n)
"""
    lines = said(3, body + CATCH, timeout=3)  # ranks 0 and 2 meet within it
    late = "all_gather: waited 3 s: nothing came from rank 1"
    assert all(len(line) == 1 for line in lines)
    assert late in {lines[0][0], lines[2][0]}
    assert all(line[0].endswith(late) for line in lines)


def test_all_absent_peers_are_named(said):
    body = """
def work():
    if me == 0:
        comm.all_gather(zeros(1), [1] * n)
    else:
        wait_for("rank 0 is done")
"""
    lines = said(3, body + CATCH, timeout=0.5)
    assert lines == [["all_gather: waited 0.5 s: nothing came from ranks 1 and 2"], [], []]


def test_a_rank_that_does_not_take_part_in_the_creation_is_noticed(torch_ranks):
    body = """
if me == 1:
    wait_for("rank 0 is done")
else:
    try:
        TorchCommunicator(timeout=0.7)
    except CommunicatorError as error:
        say(error)
    store.set("rank 0 is done", "")
"""
    ranks = torch_ranks(2, HEAD + body, check=False)  # torch reports it too, on stderr
    assert ranks[0].out == "TorchCommunicator: waited 0.7 s for rank 1 to create one\n", ranks


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    ("end", "status"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL),
        pytest.param("raise ZeroDivisionError('boom')", 1, marks=pytest.mark.slow),
        pytest.param("sys.exit(3)", 3, marks=pytest.mark.slow),
        ("sys.exit(0)", 0),
    ],
)
def test_a_rank_that_ends_is_named_at_once_by_those_who_wait(torch_ranks, end, status):
    body = f"""
comm.all_gather(zeros(1), [1] * 3)
if me == 1:
    {end}
comm.all_gather(zeros(100_000), [100_000] * 3)
"""
    # The communicator's timeout is far longer than the job may take.
    code = HEAD + CREATE.format(timeout=1000) + body
    ranks = torch_ranks(3, code, check=False, whole_exit=True)
    assert [rank.status for rank in ranks] == [1, status, 1]
    gone = "has finished, died or given up: its connection is closed"
    for rank in (ranks[0], ranks[2]):
        assert "CommunicatorError: all_gather: rank" in rank.err
        assert gone in rank.err or "rank 1 failed" in rank.err or " failed: " in rank.err
    assert any(f"rank 1 {gone}" in rank.err for rank in ranks)


@pytest.mark.parametrize(
    "moment", [pytest.param(0.0, marks=pytest.mark.slow), 0.05, pytest.param(0.2, marks=pytest.mark.slow)]
)
def test_a_rank_that_is_killed_in_the_middle_of_a_message_is_noticed_at_once(torch_ranks, moment):
    # gloo does not report a message that has arrived only in part.
    body = f"""
size = 64 << 20
data = zeros(size)
comm.all_gather(zeros(1), [1] * 3)

def strike():
    time.sleep({moment})
    store.set("struck at", str(time.monotonic()))
    os.kill(os.getpid(), signal.SIGKILL)

if me == 1:
    threading.Thread(target=strike).start()
try:
    while True:
        comm.all_gather(data, [size] * 3)
except CommunicatorError as error:
    say("rank 1" in str(error), time.monotonic() - float(store.get("struck at")) < 10)
"""
    # The communicator's timeout is far longer than the job may take.
    code = HEAD + CREATE.format(timeout=1000) + body
    ranks = torch_ranks(3, code, check=False, whole_exit=True)
    assert [rank.status for rank in ranks] == [0, -signal.SIGKILL, 0]
    assert [ranks[0].out, ranks[2].out] == ["True True\n"] * 2


@pytest.mark.slow
@pytest.mark.parametrize("size", [4, pytest.param(30_000_000, marks=pytest.mark.slow)])
def test_a_stopped_rank_is_named_long_before_the_timeout(torch_ranks, size):
    body = f"""
comm = TorchCommunicator(timeout=1000, silence=1.0)
comm.all_gather(zeros(1), [1] * 3)
if me == 1:
    store.set("pid", str(os.getpid()))
    os.kill(os.getpid(), signal.SIGSTOP)
else:
    try:
        while True:
            comm.all_gather(zeros({size}), [{size}] * 3)
    except CommunicatorError as error:
        say(error)
    store.set(f"rank {{me}} is done", "")
    wait_for(f"rank {{2 - me}} is done")
    if me == 0:
        os.kill(int(store.get("pid")), signal.SIGKILL)
"""
    ranks = torch_ranks(3, HEAD + CREATE.format(timeout=1000) + body, check=False, whole_exit=True)
    silent = "all_gather: nothing was heard of rank 1 for 1 s: it was stopped or cut off"
    for rank in (ranks[0], ranks[2]):
        assert rank.status == 0
        assert rank.out.strip().endswith(silent)


@pytest.mark.slow
@pytest.mark.parametrize("size", [4, 30_000_000])
def test_a_rank_that_holds_pythons_lock_is_reported_and_waited_for(said, size):
    body = f"""
import ctypes, warnings
from qcomp.comm import lifelines
lifelines.SILENCE = 0.5
comm = TorchCommunicator(timeout=60)
comm.all_gather(zeros(1), [1, 1])
if me == 1:
    ctypes.PyDLL(None).usleep(1_500_000)  # without releasing the lock
with warnings.catch_warnings(record=True) as told:
    warnings.simplefilter("always")
    for _ in range(3):
        assert len(comm.all_gather(zeros({size}), [{size}] * 2)) == 2
say(*[str(w.message).partition(" for ")[0].partition(",")[0] for w in told])
"""
    assert said(2, body) == [["nothing was heard of rank 1 rank 1 is heard again"], [""]]


@pytest.mark.slow
def test_a_timeout_says_which_rank_was_silent(torch_ranks):
    body = """
from qcomp.comm import lifelines
lifelines.SILENCE = 0.5
import warnings
warnings.simplefilter("ignore")
comm = TorchCommunicator(timeout=60)
comm.all_gather(zeros(1), [1, 1])
comm.timeout = 2
if me == 1:
    store.set("pid", str(os.getpid()))
    os.kill(os.getpid(), signal.SIGSTOP)
try:
    while True:
        comm.all_gather(zeros(4), [4, 4])
except CommunicatorError as error:
    say(error)
os.kill(int(store.get("pid")), signal.SIGKILL)
"""
    ranks = torch_ranks(2, HEAD + body, check=False)
    silent = r"all_gather: waited 2 s: nothing came from rank 1; nothing was heard of rank 1 for \d s\n"
    assert re.fullmatch(silent, ranks[0].out), ranks


@pytest.mark.slow
def test_a_stopped_rank_is_noticed_in_the_middle_of_a_transfer_and_keeps_nobody_from_ending(torch_ranks):
    body = """
size = 30_000_000  # beyond what the system holds for a process that does not read
comm.all_gather(zeros(1), [1] * 2)
if me == 1:
    store.set("pid", str(os.getpid()))
    wait_for("end")
else:
    other = int(store.get("pid"))
    os.kill(other, signal.SIGSTOP)
    try:
        comm.all_gather(zeros(size), [size] * 2)
    except CommunicatorError as error:
        say(error)
    os.kill(other, signal.SIGCONT)
    store.set("end", "")
"""
    ranks = torch_ranks(2, HEAD + CREATE.format(timeout=0.7) + body, whole_exit=True)
    assert ranks[0].out == "all_gather: waited 0.7 s: nothing came from rank 1\n"


def test_an_interrupted_wait_closes_the_communicator_and_is_reported_to_the_others(said):
    body = """
class Enough(BaseException):
    pass

def interrupt(*_):
    raise Enough

def work():
    if me:
        comm.all_gather(zeros(1), [1] * 3)  # complete: rank 0 has sent its share
        comm.all_gather(zeros(1), [1] * 3)
        return
    pending = comm.start(AllGather(zeros(1), (1,) * 3))
    pending._complete = interrupt  # as Ctrl-C does between two waits for a peer
    try:
        pending.wait()
    except Enough:
        say("interrupted")
    comm.all_gather(zeros(1), [1] * 3)
"""
    reason = "all_gather was interrupted by Enough"
    lines = said(3, body + CATCH)
    assert lines[0] == ["interrupted", f"all_gather: this communicator is closed: {reason}"]
    for line in lines[1:]:
        assert line[0].startswith("all_gather: rank ")
        assert line[0].endswith(reason)


ON_DEVICE = """
# The code path for NCCL, but gloo carries what would travel from GPU to GPU.
comm._device = torch.device("cpu")
"""


def test_exchanges_on_a_device_deliver_every_message(said):
    body = """
for size in (0, 5, 100_001):
    send = [np.full(size * r, me, dtype=np.uint8) for r in range(n)]
    pending = [comm.start(AllToAll(tuple(send), (size * me,) * n)) for _ in range(2)]
    for exchange in reversed(pending):
        received = exchange.wait()
        assert [x.tolist() for x in received] == [[r] * size * me for r in range(n)]
    assert all(type(x) is torch.Tensor for x in comm.all_gather(torch.zeros(size, dtype=torch.uint8), [size] * n))
say("ok")
"""
    assert said(3, ON_DEVICE + body) == [["ok"]] * 3


def test_exchanges_on_a_device_start_nothing_if_ranks_disagree(said):
    body = """
comm.post_on_device = lambda *_: say("started")
def work():
    send, receive = [zeros(2)] * 3, [2] * 3
    if me == 1:
        send[2] = zeros(4)
    comm.start(AllToAll(tuple(send), tuple(receive)))
"""
    message = "all_to_all: rank 1 sent 4 bytes to rank 2, which expected 2 bytes"
    assert said(3, ON_DEVICE + body + CATCH) == [[message]] * 3


def test_an_error_of_torch_is_a_communicator_error(said):
    body = """
def fail(*_):
    raise dist.DistBackendError("NCCL error")

comm.post_on_device = fail
def work():
    comm.all_gather(zeros(1), [1, 1])
"""
    message = "all_gather: torch.distributed failed: NCCL error"
    assert said(2, ON_DEVICE + body + CATCH) == [[message]] * 2


def test_no_thread_outlives_a_communicator(said):
    """A thread that still ran while Python shuts down could abort the process."""
    body = """
import threading
def running():
    return sorted(t.name for t in threading.enumerate() if t.name.startswith("qcomp"))
comm.all_gather(zeros(4), [4, 4])
assert running() == ["qcomp lifelines", "qcomp waits"], running()
comm.all_gather(zeros(1), [1, 1])
comm.close()
say(running())
"""
    assert said(2, body) == [["[]"]] * 2


@pytest.mark.slow
def test_an_ended_rank_is_no_problem_for_exchanges_that_it_completed(torch_ranks):
    body = """
pending = comm.start(AllGather(zeros(4), (4, 4)))
if me == 0:
    pending.wait()
else:
    lines = comm._lifelines
    with lines.changed:
        assert lines.changed.wait_for(lambda: lines.problem(10**9, "all_gather") is not None, 60)
    say(len(pending.wait()))
"""
    ranks = torch_ranks(2, HEAD + CREATE.format(timeout=60) + body, whole_exit=True)
    assert [rank.out for rank in ranks] == ["", "2\n"]


@pytest.mark.slow
def test_an_ended_child_of_multiprocessing_is_no_problem_either(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(
        """
import sys
import numpy as np
import torch
import torch.distributed as dist
from qcomp.comm.torch_dist import TorchCommunicator
from qcomp.core.mean.stages import AllGather

kept = []  # so that nothing is freed before the end

def main(rank, store):
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    comm = TorchCommunicator(timeout=60)
    kept.append(comm)
    pending = comm.start(AllGather(np.zeros(4, dtype=np.uint8), (4, 4)))
    if rank == 0:
        pending.wait()
        return
    lines = comm._lifelines
    with lines.changed:
        assert lines.changed.wait_for(lambda: lines.problem(10**9, "all_gather") is not None, 60)
    print(len(pending.wait()), flush=True)

if __name__ == "__main__":
    torch.multiprocessing.start_processes(main, (sys.argv[1],), nprocs=2, start_method="fork")
"""
    )
    done = subprocess.run(
        [sys.executable, str(program), str(tmp_path / "store")],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "2\n"), done.stderr


def test_a_rank_may_end_while_the_others_complete_the_last_exchange(said):
    body = """
size = 3_000_000
for _ in range(3):
    received = comm.all_gather(np.full(size, me, dtype=np.uint8), [size] * 2) if me == 0 else None
    if me == 1:
        pending = comm.start(AllGather(np.full(size, me, dtype=np.uint8), (size,) * 2))
        received = pending.wait()
    assert [int(x[0]) + int(x[-1]) for x in received] == [0, 2]
say("ok")
"""
    assert said(2, body) == [["ok"]] * 2


# A mean and an optimizer, whose bytes must not depend on the communicator.
TRAINING = """
import hashlib
import warnings
import numpy as np
import qcomp

warnings.filterwarnings("ignore", "the variance is frozen after")

def train(comm):
    digest = hashlib.sha256()
    mean = qcomp.CompressedMean(qcomp.QSGD(levels=7, bucket_size=64), feedback=False)
    x = np.random.default_rng(comm.rank).standard_normal(1001).astype(np.float32)
    state = mean.init(x, comm)
    for step in range(3):
        found, state = mean(x, state, comm, key=qcomp.Key(seed=1, step=step))
        digest.update(found.tobytes())
    opt = qcomp.OneBitAdam(learning_rate=1e-2, freeze=2, exact=None)
    params = [np.ones((7, 31), dtype=np.float32), np.ones(13, dtype=np.float32)]
    state = opt.init(params, comm)
    for step in range(6):
        rng = np.random.default_rng((comm.rank, step))
        grads = [rng.standard_normal(p.shape).astype(np.float32) for p in params]
        params, state = opt.step(params, grads, state, comm)
        digest.update(b"".join(p.tobytes() for p in params))
    return f"{comm.rank} {comm.bytes_sent} {digest.hexdigest()}"
"""


@pytest.mark.slow
def test_training_gives_the_same_bytes_as_over_threads_and_over_mpi(said, mpirun):
    scope = {}
    exec(TRAINING, scope)
    local = qcomp.comm.run_local(2, scope["train"])
    assert local[0].split()[2] == local[1].split()[2]
    assert said(2, TRAINING + "say(train(comm))\n") == [[line] for line in local]
    over_mpi = mpirun(2, ["-c", TRAINING + "print(train(qcomp.comm.world(timeout=60)), flush=True)\n"])
    assert sorted(over_mpi.stdout.splitlines()) == local


def test_a_mismatched_handshake_ends_on_every_rank_with_the_message(said):
    body = """
from qcomp.core.handshake import handshake
def work():
    handshake(comm, {"compressor": "sign" if me != 1 else "qsgd", "seed": 0}, like=np.zeros(0))
"""
    message = "the ranks were not started alike: compressor is 'sign' on ranks 0 and 2, but 'qsgd' on rank 1"
    assert said(3, body + CATCH) == [[message]] * 3


@pytest.mark.slow
def test_ranks_can_meet_in_a_store(said):
    body = """
from qcomp.testing import check_communicator
mine = TorchCommunicator.from_store(dist.PrefixStore("mine", store), rank=me, size=n, timeout=60)
check_communicator(mine)
for wrong, word in (({"rank": n}, "rank must be from 0 to size - 1 = 1, got 2"), ({"timeout": 0}, "timeout must be")):
    try:
        TorchCommunicator.from_store(store, **{"rank": me, "size": n, **wrong})
    except ValueError as error:
        assert word in str(error), error
    else:
        raise AssertionError(wrong)
say(mine.rank, mine.size)
"""
    assert said(2, body) == [["0 2"], ["1 2"]]


@pytest.mark.slow
def test_close_frees_the_memory_of_a_failed_exchange(said):
    body = """
import gc
import qcomp.comm.torch_dist as module

def kept():
    gc.collect()
    own = [thread for thread in threading.enumerate() if thread.name.startswith("qcomp")]
    return len(os.listdir("/proc/self/fd")), len(own), len(module._unfinished)

counts = []
for attempt in range(6):
    mine = TorchCommunicator.from_store(dist.PrefixStore(f"try{attempt}", store), rank=me, size=n, timeout=60)
    if me == 0:
        mine.close()
    try:
        mine.all_gather(zeros(1 << 20), [1 << 20] * n)
    except CommunicatorError as error:
        assert me or "close was called" in str(error), error
        mine.close()
        mine.close()
    else:
        raise AssertionError("the exchange ended well")
    del mine
    comm.all_gather(zeros(1), [1] * n)
    counts.append(kept())
assert counts[-1][0] <= counts[1][0], counts
assert counts[-1][1:] == counts[1][1:] and not counts[-1][2], counts
say("ok")
"""
    assert said(3, body) == [["ok"]] * 3


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_forked_child_does_nothing_for_its_rank(torch_ranks):
    """It may drop all that it inherited while its parent waits in an exchange, as a data loader's worker does.

    The child leaves by `os._exit`, as children of multiprocessing do: a thread of gloo may hold the lock of exit()
    during the fork, and then exit() in the child waits for ever.
    """
    body = """
import gc

def child():
    \"""Fork, and return what the child says and its status.\"""
    read, write = os.pipe()
    pid = os.fork()
    if pid:
        os.close(write)
        with os.fdopen(read) as said:
            text = said.read()
        return text, os.waitpid(pid, 0)[1]
    for call in (lambda: comm.all_gather(zeros(1), [1, 1]), lambda: comm.start(AllGather(zeros(1), (1, 1))),
                 TorchCommunicator):
        try:
            call()
        except CommunicatorError as error:
            os.write(write, f"{error}\\n".replace(str(os.getpid()), "CHILD").encode())
    os.close(write)
    global pending
    del globals()["comm"], pending
    gc.collect()
    os._exit(0)

if me == 0:
    pending = comm.start(AllGather(zeros(4), (4, 4)))
    waiting = threading.Thread(target=pending.wait)
    waiting.start()
    text, status = child()
    print(status, text.replace(str(os.getpid()), "RANK"), end="")
    assert comm._closed is None
    store.set("the child has ended", "")
    waiting.join()
    say(len(pending.wait()))
else:
    wait_for("the child has ended")
    comm.all_gather(zeros(4), [4, 4])
comm.all_gather(zeros(4), [4, 4])
"""
    ranks = torch_ranks(2, HEAD + CREATE.format(timeout=50) + body, check=False, whole_exit=True)
    assert [rank.status for rank in ranks] == [0, 0], ranks
    of_child = (
        "process CHILD is a forked child of rank 0 (process RANK), whose connections it must not use: let children, "
        "such as a data loader's workers, only compute, and call exchanges in the rank"
    )
    assert ranks[0].out.splitlines() == [
        f"0 all_gather: {of_child}",
        f"start: {of_child}",
        "TorchCommunicator: torch.distributed was initialised in the parent of this forked process, and a child must "
        "not use its parent's connections: make communicators in the parent",
        "2",
    ]


@pytest.mark.parametrize("moment", ["before", pytest.param("meanwhile", marks=pytest.mark.slow)])
def test_a_rank_that_dies_before_the_creation_is_complete_is_noticed_at_once(torch_ranks, moment):
    body = f"""
from qcomp.comm import connecting
from qcomp.comm.torch_meeting import StoreMeeting

share = StoreMeeting.share
rounds = []

def die_in_the_second(self, text, check):
    told = share(self, text, check)
    rounds.append(next(told))
    if len(rounds) == 2:  # the others know whom it has reached, but rank 2 has not reached it
        os.kill(os.getpid(), signal.SIGKILL)
    yield rounds[-1]
    yield from told

store.set(f"connected {{me}}", b"")
if me == 1:
    store.wait(["connected 0", "connected 2"])  # else init_process_group would fail there
    if "{moment}" == "before":
        os.kill(os.getpid(), signal.SIGKILL)
    StoreMeeting.share = die_in_the_second
    connecting._Door._welcome = lambda *_: threading.Event().wait()
try:
    TorchCommunicator(timeout=1000)
except CommunicatorError as error:
    say(error)
"""
    ranks = torch_ranks(3, HEAD + body, check=False)
    assert [rank.status for rank in ranks] == [0, -signal.SIGKILL, 0], ranks
    # A rank may also hear from another one that has heard of it before.
    ended = r"rank \d (ended before it created its own|ended while the ranks made their|has finished, died or given up)"
    assert all(re.search(ended, ranks[survivor].out) for survivor in (0, 2)), ranks


@pytest.mark.slow
def test_an_interrupted_creation_is_reported_to_the_others_however_late_they_come(torch_ranks):
    body = """
def interrupt(*_):
    raise KeyboardInterrupt

if me == 0:
    signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.3)
    try:
        TorchCommunicator(timeout=1000)
    except KeyboardInterrupt:
        store.set("interrupted", "")
else:
    wait_for("interrupted")
    try:
        TorchCommunicator(timeout=1000)
    except CommunicatorError as error:
        say(error)
comm = TorchCommunicator(timeout=60)  # the next one works
say(len(comm.all_gather(zeros(1), [1, 1])))
"""
    ranks = torch_ranks(2, HEAD + body)
    failed = "TorchCommunicator: rank 0 failed: KeyboardInterrupt"
    assert [rank.out.splitlines() for rank in ranks] == [["2"], [failed, "2"]]


def test_only_errors_of_the_transport_are_the_communicators(said):
    """A data loader's worker that dies raises RuntimeError from a handler of signals, in the middle of anything."""
    body = """
def report(*_):
    raise RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed.")

comm.all_gather(zeros(1), [1, 1])
if me == 0:
    signal.signal(signal.SIGALRM, report)
    signal.setitimer(signal.ITIMER_REAL, 0.2)
try:
    if me == 1:
        wait_for("rank 0 has failed")
        comm.all_gather(zeros(1), [1, 1])  # may complete: rank 0 has sent its share
    comm.all_gather(zeros(1), [1, 1])
except RuntimeError as error:
    say(type(error).__name__, error)
    store.set("rank 0 has failed", "")
"""
    died = "DataLoader worker (pid 7) is killed by signal: Killed."
    assert said(2, body) == [
        [f"RuntimeError {died}"],
        [f"CommunicatorError all_gather: rank 0 failed: all_gather was interrupted by RuntimeError: {died}"],
    ]


def test_a_handler_of_signals_may_interrupt_any_call_of_torch():
    """Its error has the class of torch's own, but another place."""
    import torch.distributed as dist

    from qcomp.comm.torch_library import transport_errors

    with pytest.raises(RuntimeError, match=r"^a worker is dead$") as caught, transport_errors("gloo failed"):
        raise RuntimeError("a worker is dead")
    assert type(caught.value) is RuntimeError
    with pytest.raises(CommunicatorError, match=r"^gloo failed: broken$"), transport_errors("gloo failed"):
        raise dist.DistBackendError("broken")


@pytest.mark.slow
def test_a_worker_of_a_data_loader_that_dies_is_no_dead_rank(torch_ranks):
    body = """
from torch.utils.data import DataLoader

class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 8
    def __getitem__(self, index):
        if index == 4 and me == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return index

loader = DataLoader(Data(), num_workers=1, prefetch_factor=1, multiprocessing_context="fork")
try:
    for index in loader:
        if me == 1 and index == 4:
            time.sleep(2)
        comm.all_gather(zeros(1), [1, 1])
        if me == 0:
            time.sleep(0.1)
except RuntimeError as error:
    say(type(error).__name__, str(error).partition("(")[0])
"""
    ranks = torch_ranks(2, HEAD + CREATE.format(timeout=50) + body, check=False)
    assert [rank.out.partition(" ")[0] for rank in ranks] == ["RuntimeError", "CommunicatorError"], ranks
    assert "DataLoader worker" in ranks[0].out


@pytest.mark.slow
def test_communicators_made_in_threads_and_beside_each_other_work(said):
    body = """
made = []
thread = threading.Thread(target=lambda: made.append(TorchCommunicator(timeout=60)))
thread.start()
thread.join()
[other] = made
pending = comm.start(AllGather(zeros(3), (3, 3)))
assert [len(x) for x in other.all_gather(zeros(5), [5, 5])] == [5, 5]
del other, made[:]
say([len(x) for x in pending.wait()])
"""
    assert said(2, body) == [["[3, 3]"]] * 2
