"""The first compressed step warns if elements move whose gradients are 0 on all ranks."""

import dataclasses
import warnings
from typing import Any

import numpy as np
import pytest

import qcomp

TEXT = "elements whose gradients are 0 on all ranks still move"
SIGN = qcomp.ScaledSign(64)
SHAPES = [(12, 16), (16, 12)]


def draws(rank, step):
    rng = np.random.default_rng([rank, step])
    return [rng.standard_normal(shape).astype(np.float32) for shape in SHAPES]


def padded(rank, step):
    """Return gradients with a slice of 0 along the first axis of one tensor, and along the last axis of the other."""
    found = draws(rank, step)
    found[0][3] = 0
    found[1][:, 7] = 0
    return found


def sgd(**settings):
    return qcomp.CompressedSGD(**{"learning_rate": 0.1, "exact": None, "compressor": SIGN} | settings)


@pytest.fixture
def told(lockstep):
    """Return the warnings of all ranks in the first step, in the later ones, and how far the slices of 0 moved."""

    def told(opt, grads=padded, *, ranks=2, steps=2):
        params = [[np.zeros(shape, np.float32) for shape in SHAPES]] * ranks
        found = []
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            states = lockstep(
                [opt.init_stages(p, rank=r, size=ranks, names=["a", "b"]) for r, p in enumerate(params)]
            )
            for step in range(steps):
                triples = [
                    (p, grads(r, step), s) for r, (p, s) in enumerate(zip(params, states, strict=True))
                ]
                with warnings.catch_warnings(record=True) as caught:
                    warnings.simplefilter("always")
                    results = lockstep([opt.stages(*each) for each in triples])
                params, states = [p for p, _ in results], [s for _, s in results]
                found.append([str(one.message) for one in caught if TEXT in str(one.message)])
        first, *later = found
        return (
            first,
            [text for of_step in later for text in of_step],
            max(abs(params[0][0][3]).max(), abs(params[0][1][:, 7]).max()),
        )

    return told


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(
    "opt",
    [
        sgd(),
        sgd(compressor=qcomp.LloydMax(2, 64), momentum=0.0, weight_decay=0.1),
        qcomp.EF21SGD(learning_rate=0.1, compressor=SIGN, exact=None),
        qcomp.Muon(learning_rate=0.1),
        qcomp.Muon(learning_rate=0.1, compressor=qcomp.QSGD(15, 64), output_axis=-1),
    ],
    ids=lambda opt: f"{type(opt).__name__}-{opt.compressor.spec}",
)
def test_slices_of_zeros_that_move_are_named_once_on_every_rank(told, opt, ranks):
    first, later, moved = told(opt, ranks=ranks)
    assert moved > 0
    assert not later
    assert len(set(first)) == 1
    assert len(first) == ranks
    assert "'a' (1 of 12 slices along the first axis" in first[0]
    assert "'b' (1 of 12 slices along the last axis" in first[0]
    spec = opt.update_compressor.spec if isinstance(opt, qcomp.Muon) else opt.compressor.spec
    assert spec in first[0]


@pytest.mark.parametrize(
    "opt", [sgd(compressor=c) for c in (qcomp.QSGD(15, 64), qcomp.TopK(4, 64), qcomp.MinMaxUInt8())]
)
def test_compressors_that_keep_zeros_cause_no_warning_and_no_exchange(told, opt):
    assert told(opt) == ([], [], 0)
    assert not opt.may_move_zeros(
        opt.init([np.ones((4, 4), np.float32)], qcomp.comm.LocalCommunicator.alone())
    )


def test_zeros_on_some_ranks_alone_cause_no_warning(told):
    def of_rank(zero):
        return lambda rank, step: (padded if rank in zero else draws)(rank, step)

    assert told(sgd(), of_rank({0, 1}), ranks=3)[0] == []
    assert len(told(sgd(), of_rank({0, 1, 2}), ranks=3)[0]) == 3


def test_zeros_that_stay_cause_no_warning(told):
    """A bucket of zeros stays 0: here each bucket of the first tensor is a slice, and the other tensor has no zeros."""

    def grads(rank, step):
        return [padded(rank, step)[0], draws(rank, step)[1]]

    first, _, _ = told(sgd(compressor=qcomp.ScaledSign(16)), grads)
    assert first == []
    assert len(told(sgd(compressor=qcomp.ScaledSign(32)), grads)[0]) == 2
    assert told(sgd(), lambda *_: [np.zeros(shape, np.float32) for shape in SHAPES]) == ([], [], 0)
    # No bucket is shared with a tensor that nobody used.
    assert told(sgd(compressor=qcomp.ScaledSign()), lambda *_: [0 * draws(0, 0)[0], draws(0, 0)[1]])[0] == []


@pytest.mark.parametrize(("share", "text"), [(0.5, "about 5.% of its elements"), (0.05, None)])
def test_many_scattered_zeros_are_pruned_weights(told, share, text):
    masks = [np.random.default_rng(5).random(shape) >= share for shape in SHAPES]

    def grads(rank, step):
        return [g * mask for g, mask in zip(draws(rank, step), masks, strict=True)]

    first, _, _ = told(sgd(), grads)
    assert len(first) == (2 if text else 0)
    assert all("slices" not in found and "of its elements" in found for found in first)
    # Elements of an orthogonalised update depend on the gradients of others.
    assert told(qcomp.Muon(learning_rate=0.1), grads)[0] == []


def test_the_share_is_that_of_a_sample(told):
    """Every stride is odd, so that it meets all columns, whose number is often a power of 2."""
    grads = [np.ones((256, 512), np.float32) for _ in range(2)]
    for g in grads:
        g[:, ::2] = 0
    opt = sgd(compressor=qcomp.ScaledSign())
    with pytest.warns(
        UserWarning, match=r"'0' \(256 of 512 slices along the last axis, about 50% of its elements\)"
    ):
        qcomp.comm.run_local(
            2,
            lambda comm: opt.step(
                [grads[0]], [grads[comm.rank] * (1 + comm.rank)], opt.init([grads[0]], comm), comm
            ),
        )


def test_a_warning_turned_into_an_error_changes_nothing():
    def rank_main(comm):
        params, opt = [np.ones(shape, np.float32) for shape in SHAPES], sgd()
        state = opt.init(params, comm)
        with pytest.raises(UserWarning, match=TEXT):
            opt.step(params, padded(comm.rank, 0), state, comm, donate=True)
        return all((p == 1).all() for p in params)

    assert qcomp.comm.run_local(2, rank_main) == [True, True]


FROZEN: dict[str, Any] = {"learning_rate": 0.01, "freeze": 3}


@pytest.mark.parametrize(
    "opt",
    [
        qcomp.OneBitAdam(**FROZEN, betas=(0.9, 0.9)),
        qcomp.OneBitAdam(**FROZEN, betas=(0.9, 0.9), watch=None, variance_steps=qcomp.DoublingIntervals(1)),
        qcomp.QAdam(**FROZEN, betas=(0.9, 0.9)),
        qcomp.OneBitLamb(**FROZEN, betas=(0.9, 0.9)),
        qcomp.ZeroOneAdam(
            learning_rate=0.01,
            betas=(0.9, 0.9),
            variance_steps=qcomp.DoublingIntervals(2),
            sync_steps=qcomp.LocalSteps(5, 3),
            freeze=8,
        ),
    ],
    ids=lambda opt: type(opt).__name__,
)
def test_a_frozen_variance_masks_them_in_every_stage(told, opt):
    opt = dataclasses.replace(opt, compressor=SIGN, exact=None)
    assert told(opt, steps=24) == ([], [], 0)
