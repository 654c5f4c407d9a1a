"""The number of function calls in a step, which dominates the time for a small model."""

import sys
import warnings
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

import qcomp
from qcomp.comm import run_local

PACKAGE = str(Path(qcomp.__file__).parent)
WIRE = run_local.__code__.co_filename  # how many it calls depends on which rank comes first


def are_small(tensors):
    return [tensor.size < 100 for tensor in tensors]


def calls_of_a_step(kernels, tensors, exact=0):
    """Return how many functions of this package rank 0 of 2 calls in a compressed step."""
    opt = qcomp.OneBitAdam(learning_rate=0.01, freeze=2, exact=are_small, watch=None)
    counts = Counter()

    def note(frame, event, _):
        file = frame.f_code.co_filename
        if event == "call" and file.startswith(PACKAGE) and file != WIRE:
            counts[frame.f_code.co_qualname] += 1

    def rank_main(comm):
        params = [np.ones(n, dtype=np.float32) for n in [1000] * tensors + [10] * exact]
        state = opt.init(params, comm)
        for step in range(5):
            if step == 4 and comm.rank == 0:
                sys.setprofile(note)
            params, state = opt.step(params, params, state, comm)
            sys.setprofile(None)
        assert state.stage == "compressed"

    with qcomp.backends.use(kernels), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run_local(2, rank_main)
    return counts.total()


@pytest.mark.parametrize(("kernels", "most"), [("numba", 246), ("pure", 605)])
def test_a_step_of_one_tensor_makes_few_calls(kernels, most):
    assert most / 2 < calls_of_a_step(kernels, 1) <= most


def test_many_tensors_share_the_calls_of_kernels():
    one, many = calls_of_a_step("numba", 1), calls_of_a_step("numba", 40)
    assert (many - one) / 39 <= 11


def test_many_exact_tensors_share_their_calls():
    few, many = calls_of_a_step("numba", 1, exact=2), calls_of_a_step("numba", 1, exact=40)
    assert (many - few) / 38 <= 5
