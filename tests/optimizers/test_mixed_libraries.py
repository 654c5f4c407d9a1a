"""Ranks whose arrays are of different libraries hold the same parameters, bit for bit."""

from typing import Any

import numpy as np
import pytest

import qcomp
from qcomp.comm import run_local
from qcomp.core.numeric.arrays import host_bytes

SHAPES, NAMES = [(12, 5), (300,), (7,)], ("a", "b", "c")
EXACT = qcomp.ExactBelow(10)
SETTINGS: dict[str, Any] = {"learning_rate": 0.01, "exact": EXACT, "betas": (0.9, 0.97)}
OPTIMIZERS = {
    "adam": qcomp.Adam(learning_rate=0.01, weight_decay=0.1),
    "lamb": qcomp.Lamb(learning_rate=0.01, weight_decay=0.1),
    "lion": qcomp.Lion(learning_rate=0.01),
    "onebit_adam": qcomp.OneBitAdam(**SETTINGS, freeze=2),
    "onebit_lamb": qcomp.OneBitLamb(**SETTINGS, freeze=2),
    "qadam": qcomp.QAdam(**SETTINGS, freeze=2),
    "zero_one_adam": qcomp.ZeroOneAdam(**SETTINGS),
    "compressed_sgd": qcomp.CompressedSGD(
        learning_rate=0.01, compressor=qcomp.LloydMax(3), exact=EXACT, momentum=0.9
    ),
    "ef21": qcomp.EF21SGD(learning_rate=0.01, compressor=qcomp.TopK(4, 64), exact=EXACT, eta=0.3),
    "muon": qcomp.Muon(learning_rate=0.02),
}


@pytest.mark.quick_cases(11)
@pytest.mark.filterwarnings("ignore:the variance")
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_rank_of_numpy_and_one_of_another_library(grads, library, name):
    opt = OPTIMIZERS[name]

    def rank_main(comm):
        put = library.array if comm.rank else np.array
        params = [put(p) for p in grads(SHAPES, 99, 0)]
        state = opt.init(params, comm, NAMES)
        for step in range(4):
            given = [put(g) for g in grads(SHAPES, comm.rank, step)]
            params, state = opt.step(params, given, state, comm)
        return [host_bytes(x) for x in (*params, *state.arrays.get("fresh", ()))]

    own, other = run_local(2, rank_main, timeout=100)
    assert own == other
