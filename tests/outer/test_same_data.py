"""Ranks that all send the same in the first outer round warn: they probably train on the same data."""

import warnings

import numpy as np
import pytest

import qcomp
from qcomp.comm import run_local

PLAIN = qcomp.OuterLoop(every=2)
STREAMING = qcomp.OuterLoop(every=4, fragments=2, delay=1)
WARMED = qcomp.OuterLoop(every=2, warmup=2)


def train(comm, loop, gradient, steps=8, *, hides=False):
    """Return what this rank sends in each step, with inner steps of a rate of 1."""
    params = [np.zeros(4, np.float32), np.zeros((2, 3), np.float32)]
    state = loop.init(params, comm)
    running = qcomp.outer.Overlapped(loop, comm) if hides else None
    sent = []
    for step in range(steps):
        before = comm.bytes_sent
        grads = loop.average([np.full_like(p, gradient(comm.rank, step)) for p in params], state, comm)
        params = [p - g for p, g in zip(params, grads, strict=True)]
        params, state = running.step(params, state) if running else loop.step(params, state, comm)
        sent.append(comm.bytes_sent - before)
    return sent


def told(ranks, loop, gradient, **options):
    """Return the warnings of all ranks."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        run_local(ranks, lambda comm: train(comm, loop, gradient, **options), timeout=20)
    assert all(one.filename == __file__ for one in found)
    return [str(one.message).partition(",")[0] for one in found]


@pytest.mark.parametrize(
    ("loop", "hides", "what"),
    [
        (PLAIN, False, "outer gradients in the first round"),
        (STREAMING, False, "outer gradients in the first round"),
        (STREAMING, True, "outer gradients in the first round"),
        (WARMED, False, "gradients in the first step"),
    ],
)
def test_every_rank_warns_once(loop, hides, what):
    text = f"all 3 ranks have the same {what}"
    assert told(3, loop, lambda _, step: 1 + step, hides=hides) == [text] * 3
    assert told(3, loop, lambda rank, step: 1 + step + (rank == 2), hides=hides) == []


@pytest.mark.parametrize("loop", [PLAIN, STREAMING, WARMED])
def test_later_rounds_are_not_compared(loop):
    assert told(2, loop, lambda rank, step: 1 + rank * (step < 4)) == []


def test_ranks_that_have_not_moved_and_a_lone_rank_do_not_warn():
    assert told(2, PLAIN, lambda *_: 0) == []
    assert told(1, PLAIN, lambda *_: 1) == []


def test_steps_within_a_round_send_nothing():
    """The comparison takes 4 bytes to each peer at the end of the first round."""
    first, second, third, fourth = run_local(3, lambda comm: train(comm, PLAIN, lambda rank, _: rank))[0][:4]
    assert (first, third, second - fourth) == (0, 0, 8)


def test_driving_the_stages_directly_causes_no_warning():
    """A rank that joins starts with the parameters of another."""
    from qcomp.core.mean.stages import drive

    def rank_main(comm):
        params = np.zeros(4, np.float32)
        state = PLAIN.init(params, comm)
        for _ in range(2):
            params, state = drive(PLAIN.stages(params - 1, state), comm)

    run_local(2, rank_main)
