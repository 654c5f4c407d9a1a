"""If all ranks have the same gradients in the first step, they warn: they probably train on the same data."""

import warnings

import numpy as np
import pytest

from qcomp.comm import run_local
from tests.optimizers.every import EVERY, SHAPES, advance, growing

SAME = "have the same gradients in the first step"


def told(ranks, grads, opt=EVERY["Adam"].opt, steps=3):
    """Return how many warnings the ranks give."""

    def rank_main(comm):
        params = growing(99, 0)
        state = opt.init(params, comm)
        for step in range(steps):
            params, state = advance(opt, params, state, comm, step, grads=grads)

    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        run_local(ranks, rank_main)
    mine = [str(one.message) for one in found if SAME in str(one.message)]
    assert all(one.filename.endswith("every.py") for one in found if SAME in str(one.message))
    assert all(f"all {ranks} ranks {SAME}, so {type(opt).__name__} averages" in text for text in mine)
    return len(mine)


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize("name", [name for name in EVERY if name != "QSVRG"])
def test_every_optimizer_warns_once_on_every_rank(name):
    assert told(2, lambda _, step: growing(0, step), EVERY[name].opt) == 2
    assert told(2, growing, EVERY[name].opt) == 0


def test_no_rank_warns_if_one_rank_differs_in_one_element():
    def grads(rank, step):
        found = growing(0, step)
        found[-1][0] += rank == 2
        return found

    assert told(3, grads) == 0
    assert told(3, lambda _, step: grads(0, step)) == 3


def test_qsvrg_is_silent_though_all_ranks_have_the_same_first_vector():
    """At the snapshot itself the correction is zero, whatever the data."""

    def rank_main(comm):
        opt, params = EVERY["QSVRG"].opt, growing(99, 0)
        state = opt.begin_epoch(params, growing(comm.rank, 0), opt.init(params, comm), comm)
        same = growing(comm.rank, 1)
        opt.step(params, (same, same), state, comm)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run_local(2, rank_main)


def test_later_steps_are_not_compared():
    assert told(2, lambda rank, step: growing(0 if step else rank, step)) == 0


def test_zeros_and_a_lone_rank_cause_no_warning():
    zeros = [np.zeros(shape, np.float32) for shape in SHAPES]
    assert told(2, lambda *_: zeros) == 0
    assert told(1, growing) == 0


def test_layouts_do_not_matter():
    def grads(rank, _):
        found = growing(0, 0)
        return [np.asfortranarray(g) for g in found] if rank else found

    assert told(2, grads) == 2


def test_it_costs_four_bytes_for_each_peer():
    """Compared with the next step, for the same gradients."""

    def rank_main(comm):
        params, opt = growing(99, 0), EVERY["Adam"].opt
        state, sent = opt.init(params, comm), []
        for _ in range(2):
            before = comm.bytes_sent
            params, state = opt.step(params, growing(comm.rank, 0), state, comm)
            sent.append(comm.bytes_sent - before)
        return sent[0] - sent[1]

    assert run_local(3, rank_main) == [8] * 3
