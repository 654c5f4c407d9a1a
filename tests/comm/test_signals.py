"""A signal that one rank receives ends the loops of all ranks at the same step."""

import multiprocessing
import os
import signal
import subprocess
import sys
import threading

import numpy as np
import pytest

import qcomp
from qcomp.checkpoint import on_signal


def send(number=signal.SIGUSR1):
    os.kill(os.getpid(), number)


@pytest.fixture
def alone():
    before = signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    yield qcomp.comm.LocalCommunicator.alone()
    signal.signal(signal.SIGUSR1, before)


RANKS = """
import os, signal
import torch.distributed as dist
import qcomp

me = int(os.environ["RANK"])
dist.init_process_group("gloo")
with qcomp.checkpoint.on_signal(qcomp.comm.world(), [signal.SIGUSR1, signal.SIGTERM], every=EVERY) as ends:
    for step in range(1, 100):
        if (me, step) == (1, 5):
            os.kill(os.getpid(), signal.SIGTERM)
        if ends():
            break
assert step == AT, step
"""


@pytest.mark.parametrize(("every", "at"), [(1, 5), (4, 8)])
def test_all_ranks_end_at_the_same_step(torch_ranks, every, at):
    torch_ranks(2, RANKS.replace("EVERY", str(every)).replace("AT", str(at)))


def test_ranks_that_exchange_something_else_hear_of_it(torch_ranks):
    other = "qcomp.comm.broadcast(torch.ones(1), ends._comm)"
    code = "import torch\n" + RANKS.replace("EVERY", "1").replace(
        "if ends():", f"if ends() if me else {other}:"
    )
    ranks = torch_ranks(2, code, check=False)
    assert all("MismatchError" in rank.err and "call 1 of on_signal" in rank.err for rank in ranks)


def test_a_signal_within_an_exchange_counts_for_the_next(alone):
    class Struck:
        rank, size = 0, 1

        def all_gather(self, buffer, sizes, owner=None):
            found = alone.all_gather(buffer, sizes)
            send()
            return found

        def all_to_all(self, *given, owner=None):
            return alone.all_to_all(*given)

    with on_signal(alone, [signal.SIGUSR1]) as ends:
        ends._comm = Struck()
        assert [ends(), ends()] == [False, True]


@pytest.mark.parametrize("loop_goes_on", [True, False])
def test_a_signal_that_comes_again_counts_once_and_the_second_later_one_has_its_effect_from_before(
    alone, monkeypatch, loop_goes_on
):
    """Slurm may signal all processes of a step, and torchrun then passes the signal on to the same ranks.

    A signal that arrives within the 5 seconds is handled after them, if a call into C lasts longer.
    """
    heard, now = [], [100.0]
    monkeypatch.setattr("qcomp.checkpoint.signals.time.monotonic", lambda: now[0])
    signal.signal(signal.SIGUSR1, lambda *_: heard.append(1))
    with on_signal(alone, [signal.SIGUSR1]) as ends:
        send()
        now[0] += 5
        send()
        now[0] += 2  # a backward pass, in which signals arrived
        send()
        assert not heard
        if loop_goes_on:
            assert ends()
        send()
        assert heard == [1]
        assert ends()


def test_a_late_signal_of_another_kind_counts_for_itself(alone, monkeypatch):
    heard, now = [], [100.0]
    monkeypatch.setattr("qcomp.checkpoint.signals.time.monotonic", lambda: now[0])
    kinds = signal.SIGUSR1, signal.SIGUSR2
    before = [signal.signal(number, lambda *_: heard.append(1)) for number in kinds]
    with on_signal(alone, kinds):
        for number in kinds:
            send(number)
        now[0] += 7
        for number in kinds:
            send(number)
        assert not heard
    for number, handler in zip(kinds, before, strict=True):
        signal.signal(number, handler)


@pytest.mark.filterwarnings("ignore:os.fork:RuntimeWarning")  # of JAX, if an earlier test has imported it
def test_a_forked_child_ends_by_sigterm_and_leaves_other_signals_to_its_rank(alone):
    begun = multiprocessing.get_context("fork").Event()

    def child():
        os.kill(os.getpid(), signal.SIGUSR1)
        begun.set()
        threading.Event().wait(20)

    with on_signal(alone, [signal.SIGTERM, signal.SIGUSR1]) as ends:
        process = multiprocessing.get_context("fork").Process(target=child, daemon=True)
        process.start()
        assert begun.wait(10)
        process.terminate()
        process.join(10)
        assert process.exitcode == -signal.SIGTERM
        assert not ends()


@pytest.mark.parametrize("is_sent", [True, False])
def test_an_error_after_a_signal_names_the_likely_cause(alone, is_sent):
    def training():
        with on_signal(alone, [signal.SIGUSR1]):
            if is_sent:
                send()
            raise OSError("worker died")

    with pytest.raises(OSError, match="worker died") as error:
        training()
    assert is_sent == ("pass worker_init_fn" in "".join(getattr(error.value, "__notes__", ())))


WITH_WORKERS = """
import os, signal
import torch
import qcomp


def leave_group(worker):
    os.setpgid(0, 0)


with qcomp.checkpoint.on_signal(qcomp.comm.LocalCommunicator.alone()) as ends:
    loader = torch.utils.data.DataLoader(range(100), num_workers=2, worker_init_fn=leave_group)
    for step, _ in enumerate(loader):
        if step == 3:
            os.killpg(0, signal.SIGTERM)
        if step == 50:
            assert ends()
print("ended after", step)
"""


def test_workers_that_leave_the_group_of_their_rank_outlive_a_signal_to_it():
    """torchrun and mpirun signal the whole group. A worker in it would die, and its rank with it."""
    pytest.importorskip("torch")
    job = subprocess.run(
        [sys.executable, "-c", WITH_WORKERS],
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
        start_new_session=True,
    )
    assert job.stdout == "ended after 99\n", job.stderr


def test_afterwards_signals_have_their_effect_from_before(alone):
    with on_signal(alone, [signal.SIGUSR1]), on_signal(alone, [signal.SIGUSR1] * 2) as inner:
        send()
        assert inner()
    assert signal.getsignal(signal.SIGUSR1) == signal.SIG_IGN
    with pytest.raises(OSError, match="Invalid argument"):
        on_signal(alone, [signal.SIGUSR1, signal.SIGKILL])
    assert signal.getsignal(signal.SIGUSR1) == signal.SIG_IGN


def test_wrong_calls_are_refused(alone):
    with pytest.raises(ValueError, match="every is 0; expected an integer of at least 1"):
        on_signal(alone, every=0)
    for wrong in (signal.SIGUSR1, "SIGUSR1", ["SIGUSR1"]):
        with pytest.raises(TypeError, match=r"signals is .*SIGUSR1.*; expected several signals, such as"):
            on_signal(alone, wrong)
    told = []

    def elsewhere():
        with pytest.raises(RuntimeError, match="expected the main thread") as error:
            on_signal(alone)
        told.append(error)

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join(10)
    assert told


def test_it_stands_beside_a_training(alone):
    opt = qcomp.CompressedSGD(learning_rate=0.1, exact=None)
    params = np.ones(100, np.float32)
    state = opt.init(params, alone)
    with on_signal(alone, [signal.SIGUSR1]) as ends:
        for step in range(9):
            params, state = opt.step(params, params, state, alone)
            if step == 4:
                send()
            if ends():
                break
    assert state.step == 5
