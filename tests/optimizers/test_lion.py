"""Lion against its formula, and against optax."""

import numpy as np
import pytest

import qcomp

SHAPES = [(5, 3), (4,), ()]


def finals(opt, job, grads, size, dtype):
    made = job(opt, grads(SHAPES, 99, 0, dtype), size)
    for step in range(8):
        made.step([grads(SHAPES, rank, step, dtype) for rank in range(size)])
    return made.params[0]


@pytest.mark.parametrize("size", [1, 3])
def test_it_follows_its_formula(job, grads, size):
    rate, decay, b1, b2 = 0.05, 0.1, 0.8, 0.95
    found = finals(
        qcomp.Lion(learning_rate=rate, weight_decay=decay, betas=(b1, b2)), job, grads, size, np.float64
    )
    params = grads(SHAPES, 99, 0, np.float64)
    momenta = [np.zeros(s) for s in SHAPES]
    for step in range(8):
        of_ranks = [grads(SHAPES, rank, step, np.float64) for rank in range(size)]
        for i in range(len(SHAPES)):
            g = sum(of_rank[i] for of_rank in of_ranks) / size
            direction = np.sign(b1 * momenta[i] + (1 - b1) * g)
            params[i] = params[i] - rate * (direction + decay * params[i])
            momenta[i] = b2 * momenta[i] + (1 - b2) * g
    for p, q in zip(found, params, strict=True):
        assert np.abs(p - q).max() < 1e-12


@pytest.mark.slow
def test_it_equals_lion_of_optax(job, grads):
    optax = pytest.importorskip("optax", reason="optax is not installed")
    found = finals(qcomp.Lion(learning_rate=0.05, weight_decay=0.1), job, grads, 1, np.float32)
    theirs = optax.lion(0.05, b1=0.9, b2=0.99, weight_decay=0.1)
    params = [np.asarray(p) for p in grads(SHAPES, 99, 0)]
    state = theirs.init(params)
    for step in range(8):
        updates, state = theirs.update(grads(SHAPES, 0, step), state, params)
        params = optax.apply_updates(params, updates)
    for p, q in zip(found, params, strict=True):
        assert np.abs(np.asarray(p) - np.asarray(q)).max() < 1e-5


@pytest.mark.parametrize("betas", [(1.0, 0.9), (0.9, -0.1), (0.9,)])
def test_betas_out_of_range_are_refused(betas):
    with pytest.raises(ValueError, match="betas is"):
        qcomp.Lion(learning_rate=0.1, betas=betas)
