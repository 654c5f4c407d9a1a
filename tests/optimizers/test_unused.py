"""Steps where some parameters have no gradient, in every array library; see also `tests/torch_face`."""

import numpy as np
import pytest

import qcomp
from qcomp.core.mean.stages import drive
from qcomp.core.numeric.arrays import host_bytes
from qcomp.core.optimizers.unused import stages_of_used

SHAPES = {"a": (150,), "b": (3,), "c": (40, 2)}
OPTIMIZERS = {
    "exact": qcomp.Adam(learning_rate=0.1, weight_decay=0.1),
    "compressed": qcomp.CompressedSGD(
        learning_rate=0.1, weight_decay=0.1, exact=None, compressor=qcomp.ScaledSign(bucket_size=16)
    ),
}


@pytest.mark.parametrize("opt", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_parameters_that_no_rank_uses_do_not_change(lockstep, library, opt):
    """Rank 1 lacks two gradients: one that rank 0 has, and one that no rank has."""
    names, shapes = tuple(SHAPES), tuple(SHAPES.values())
    params = [library.array(np.full(shape, 0.5, np.float32)) for shape in shapes]
    states = [opt.initial_state(params, names, rank, 2) for rank in range(2)]
    draws = [
        [
            np.random.default_rng([rank, i]).standard_normal(shape, np.float32)
            for i, shape in enumerate(shapes)
        ]
        for rank in range(2)
    ]
    missing = ({"b"}, {"a", "b"})

    def steps(grads):
        return lockstep([stages_of_used(opt, params, g, s) for g, s in zip(grads, states, strict=True)])

    given = [
        [None if name in absent else library.array(g) for name, g in zip(names, own, strict=True)]
        for own, absent in zip(draws, missing, strict=True)
    ]
    zeros = [
        [library.array(np.zeros_like(g) if name in absent else g) for name, g in zip(names, own, strict=True)]
        for own, absent in zip(draws, missing, strict=True)
    ]
    for (moved, state), (expected, filled), before in zip(steps(given), steps(zeros), states, strict=True):
        kept, used = host_bytes(moved[1]), [host_bytes(moved[i]) for i in (0, 2)]
        assert kept == host_bytes(params[1]) != host_bytes(expected[1])
        assert host_bytes(state.momentum[1]) == host_bytes(before.momentum[1])
        assert used == [host_bytes(expected[i]) for i in (0, 2)]
        assert state.step == filled.step == 1


@pytest.mark.filterwarnings("ignore:all . ranks have the same gradients")
def test_the_trust_ratio_of_an_unused_tensor_stays(lockstep):
    """It is not confused with a tensor whose name ends with its name."""
    opt = qcomp.OneBitLamb(learning_rate=0.1, weight_decay=0.1, exact=None)
    params = [np.full(5, 2, np.float32), np.full(5, 2, np.float32)]
    states = [opt.initial_state(params, ("weight", "0.weight"), rank, 2) for rank in range(2)]
    grads = [None, np.ones(5, np.float32)]
    for _, state in lockstep([stages_of_used(opt, params, grads, state) for state in states]):
        assert state.numbers["trust.weight"] == 1.0 != state.numbers["trust.0.weight"]


def test_settings_that_differ_are_an_error_on_every_rank(lockstep):
    opt = OPTIMIZERS["exact"]
    params = [np.ones(5, np.float32)]
    states = [opt.initial_state(params, ("a",), rank, 3) for rank in range(3)]
    computations = [
        stages_of_used(opt, params, params, state, settings=text)
        for state, text in zip(states, ("lr=1", "lr=2", "lr=1"), strict=True)
    ]
    errors = lockstep(computations, catch=qcomp.MismatchError)
    assert [str(error).partition("Code that changes")[0] for error in errors] == [
        f"the settings of step 1 differ between ranks 0 and 2, and rank 1: rank {rank} has lr={rate}. "
        for rank, rate in enumerate((1, 2, 1))
    ]


@pytest.mark.parametrize("opt", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_a_rank_alone_leaves_unused_parameters_as_they_are(opt):
    """An exact mean over one rank sends nothing, and parameters without gradients moved by momentum and decay."""
    comm = qcomp.comm.LocalCommunicator.alone()
    params = [np.full(shape, 0.5, np.float32) for shape in SHAPES.values()]
    grads = [np.ones_like(p) for p in params]
    params, state = opt.step(params, grads, opt.init(params, comm), comm)
    moved, after = drive(stages_of_used(opt, params, [grads[0], None, None], state), comm)
    assert (moved[0] != params[0]).all()
    assert [new.tolist() for new in moved[1:]] == [old.tolist() for old in params[1:]]
    assert [m.tolist() for m in after.momentum[1:]] == [m.tolist() for m in state.momentum[1:]]
    with pytest.warns(UserWarning, match="no parameter has a gradient on any rank"):
        nothing, same = drive(stages_of_used(opt, moved, [None] * 3, after), comm)
    assert same.step == after.step
    assert [new.tolist() for new in nothing] == [old.tolist() for old in moved]


def test_zeros_stand_for_missing_gradients_in_the_first_local_step(lockstep):
    """The ranks go apart in it, and it sends nothing, so no rank knows what the others use."""
    opt = qcomp.ZeroOneAdam(
        learning_rate=0.1, freeze=2, exact=None, sync_steps=qcomp.LocalSteps(double_every=2, longest=8)
    )
    names, params = ("a", "b"), [np.full(64, 0.5, np.float32), np.full(32, 0.5, np.float32)]
    draws = [np.random.default_rng(rank) for rank in range(2)]
    worlds = [(params, opt.initial_state(params, names, rank, 2)) for rank in range(2)]
    while worlds[0][1].stage != "local":
        before = worlds
        of_ranks = [[draw.standard_normal(p.shape, np.float32) for p in params] for draw in draws]
        worlds = lockstep(
            [stages_of_used(opt, p, grads, s) for (p, s), grads in zip(worlds, of_ranks, strict=True)]
        )
    grads = of_ranks[1]
    assert before[0][1].stage == "compressed"
    for missing in ([None, grads[1]], [None, None]):
        filled = [np.zeros_like(p) if g is None else g for g, p in zip(missing, params, strict=True)]
        (moved, state), (expected, wanted) = (
            drive(stages_of_used(opt, before[1][0], given, before[1][1]), None) for given in (missing, filled)
        )
        assert state.step == wanted.step
        assert [p.tolist() for p in moved] == [p.tolist() for p in expected]
        assert [m.tolist() for m in state.momentum] == [m.tolist() for m in wanted.momentum]
