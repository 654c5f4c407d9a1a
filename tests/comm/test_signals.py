"""A signal that one rank receives ends the loops of all ranks at the same step."""

import os
import signal
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


def test_a_second_signal_has_its_effect_from_before(alone):
    heard = []
    signal.signal(signal.SIGUSR1, lambda *_: heard.append(1))
    with on_signal(alone, [signal.SIGUSR1]) as ends:
        send()
        assert not heard
        assert ends()
        send()
        assert heard == [1]
        assert ends()


def test_afterwards_signals_have_their_effect_from_before(alone):
    with on_signal(alone, [signal.SIGUSR1]), on_signal(alone, [signal.SIGUSR1]) as inner:
        send()
        assert inner()
    assert signal.getsignal(signal.SIGUSR1) == signal.SIG_IGN
    with pytest.raises(OSError, match="Invalid argument"):
        on_signal(alone, [signal.SIGUSR1, signal.SIGKILL])
    assert signal.getsignal(signal.SIGUSR1) == signal.SIG_IGN


def test_wrong_calls_are_refused(alone):
    with pytest.raises(ValueError, match="every is 0; expected an integer of at least 1"):
        on_signal(alone, every=0)
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
