"""Ranks compare what they must share: when they resume, and when a warm-up ends."""

import numpy as np
import pytest

import qcomp
from qcomp import MismatchError
from tests.optimizers.every import EVERY, SHAPES, advance, growing

pytestmark = pytest.mark.filterwarnings("ignore:the variance of .* no longer fits")


def job(entry, shift, steps):
    """Return the parameters and the states of two ranks after some steps with gradients of their own."""

    def rank_main(comm):
        params = [np.zeros(shape, np.float32) for shape in SHAPES]
        state = entry.opt.init(params, comm)
        for step in range(steps):
            params, state = advance(
                entry.opt, params, state, comm, step, grads=lambda rank, step: growing(rank + shift, step)
            )
        return params, entry.opt.state_dict(state)

    return qcomp.comm.run_local(2, rank_main)


def errors(fn):
    """Return the error of each of two ranks, or None."""

    def rank_main(comm):
        try:
            fn(comm)
        except MismatchError as error:
            return str(error)
        return None

    return qcomp.comm.run_local(2, rank_main)


@pytest.mark.parametrize("steps", [3, 9])
@pytest.mark.parametrize("name", EVERY)
def test_a_state_of_another_job_on_one_rank_is_refused_on_all(name, steps):
    """Its step, shapes and settings are equal, and the parameters are the same; only moments differ."""
    entry = EVERY[name]
    mine, other = job(entry, 0, steps), job(entry, 10, steps)

    def resume(comm):
        params = [x.copy() for x in mine[0][0]]
        entry.opt.load_state_dict((other if comm.rank else mine)[comm.rank][1], params, comm)

    saved = mine[0][1], other[0][1]
    own = {"worker_residual", "server_residual", *entry.opt.own_kinds(saved[0]["stage"])}
    shared = [
        key
        for key in saved[0]
        if hasattr(saved[0][key], "shape")
        and key.partition(".")[0] not in own
        and key in saved[1]
        and not np.array_equal(saved[0][key], saved[1][key])
    ]
    found = errors(resume)
    if not shared:
        assert found == [None, None]
        return
    assert found[0] == found[1]
    if saved[0]["stage"] != saved[1]["stage"]:
        assert f"checkpoint is 'of step {steps}, {saved[0]['stage']}" in found[0]
        return
    assert f"'{min(shared)}'" in found[0]
    assert found[0].startswith("when they resume, the states of ranks 0 and 1 differ in [")


@pytest.mark.parametrize(
    "name", [name for name in EVERY if "warmup" in EVERY[name].stages and EVERY[name].compresses]
)
def test_a_moment_that_differs_is_noticed_when_the_warm_up_ends(name):
    """In a warm-up nothing of it is sent, so until then the ranks drift apart."""
    entry = EVERY[name]

    def train(comm):
        params = [np.zeros(shape, np.float32) for shape in SHAPES]
        state = entry.opt.init(params, comm)
        for step in range(9):
            if step == 1 and comm.rank:
                first, *others = state.variance
                state = state._replace(variance=(first + np.float32(1e-3), *others))
            params, state = advance(entry.opt, params, state, comm, step)

    found = errors(train)
    assert found[0] == found[1]
    assert "'variance.0'" in found[0]
    assert found[0].startswith("after step ")


def test_ranks_that_share_everything_train_on():
    for entry in EVERY.values():
        saved = job(entry, 0, 9)

        def resume(comm, entry=entry, saved=saved):
            entry.opt.load_state_dict(saved[comm.rank][1], [x.copy() for x in saved[comm.rank][0]], comm)

        assert errors(resume) == [None, None]
