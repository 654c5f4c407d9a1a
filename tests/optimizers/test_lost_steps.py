"""Parameters in half precision that are too coarse for their steps are named in step 100."""

import warnings

import numpy as np
import pytest

import qcomp

ALONE = qcomp.comm.LocalCommunicator.alone()


def told(params, grads, rate, steps=101, opt=None):
    """Return the texts of the warnings that parameters did not move, with the step before each."""
    opt = opt or qcomp.SGD(learning_rate=rate)
    state, found = opt.init(params, ALONE, names=[f"p{i}" for i in range(len(params))]), []
    for step in range(1, steps + 1):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            params, state = opt.step(params, grads, state, ALONE)
        found += [(step, str(w.message)) for w in caught if "did not move" in str(w.message)]
    return found


def halves(*values):
    return [np.full((20, 30), value, np.float16) for value in values]


def test_steps_that_are_lost_are_told_once():
    params, grads = halves(1.0, 1e-3, 1.0), halves(1.0, 1.0, 0.0)
    ((step, text),) = told(params, grads, 1e-4)
    assert step == 100
    assert text.startswith(
        "most elements of 'p0' did not move in step 100, although"
    )  # p1 is small, p2 at rest
    assert "float16 rounds away steps below 1/4096 of a value" in text


@pytest.mark.parametrize(
    ("params", "rate"),
    [(halves(1.0), 1e-3), (halves(1.0), 0.0), ([np.ones((20, 30), np.float32)], 1e-6)],
    ids=["it moves", "a rate of 0", "float32"],
)
def test_others_are_not(params, rate):
    assert told(params, [np.ones((20, 30), params[0].dtype)], rate) == []


@pytest.mark.parametrize(("moving", "is_told"), [(299, True), (301, False)])
def test_half_of_the_elements_is_the_limit(moving, is_told):
    values = np.where(np.arange(600) < moving, 1e-3, 1.0).astype(np.float16)
    assert bool(told([values], [np.ones(600, np.float16)], 1e-4)) == is_told


def test_momenta_count_in_the_compressed_stage():
    opt = qcomp.OneBitAdam(learning_rate=1e-6, betas=(0.9, 0.9), freeze=20, exact=None, watch=None)
    draws = np.random.default_rng(0).normal(size=(20, 30)).astype(np.float16)
    assert [step for step, _ in told(halves(1.0), [draws], 1e-4, opt=opt)] == [100]
