"""Weighted means: each rank counts by a weight of its own in every step."""

import math

import numpy as np
import pytest

import qcomp
from qcomp.comm import run_local
from qcomp.core.mean import weights

SIZE = 3
WEIGHTS = [(300, 100, 7), (0, 2.5, 1), (5, 0, 0), (1e-300, 1e300, 1e-5), (1, 1, 1)]
"""The weights of the ranks in each step."""


def values(rank, step, size=1000):
    return np.random.default_rng((rank, step)).normal(size=size).astype(np.float32)


def exact(step, dtype=np.float64):
    """Return the weighted mean of the values of all ranks."""
    w = np.asarray(WEIGHTS[step], np.float64)
    return (
        sum(x * values(rank, step).astype(dtype) for rank, x in enumerate(w / w.max())) / (w / w.max()).sum()
    )


def means(mean, **how):
    """Return the weighted means of all steps, and the last states of all ranks."""

    def rank_main(comm):
        state, found = mean.init(values(0, 0), comm), []
        for step in range(len(WEIGHTS)):
            weight = how.get("weight", WEIGHTS[step][comm.rank])
            x, state = mean(values(comm.rank, step), state, comm, key=qcomp.Key(step=step), weight=weight)
            found.append(x)
        return found, state

    of_ranks = run_local(SIZE, rank_main)
    for found, _ in of_ranks:
        assert all(np.array_equal(x, y) for x, y in zip(found, of_ranks[0][0], strict=True))
    return of_ranks[0][0], [state for _, state in of_ranks]


def largest_error():
    """Return the largest error of exact weighted means in units of float32's rounding of the largest product."""
    found, _ = means(qcomp.CompressedMean(qcomp.Identity(), feedback=False))
    errors = [np.abs(x - exact(step)).max() for step, x in enumerate(found)]
    return max(errors) / (np.finfo(np.float32).eps * 4)  # |values| < 4, factors of at most 3


def test_a_mean_is_weighted():
    assert largest_error() <= SIZE + 1  # a rounding of each product, each sum and the quotient


@pytest.mark.parametrize(
    "broken",
    [
        lambda own, of_all: own / math.fsum(of_all),
        lambda own, of_all: len(of_all) * own / max(of_all),
        lambda own, of_all: float(own > 0),
    ],
    ids=["a sum, not a mean", "by the largest", "weights of 1"],
)
def test_a_broken_factor_is_noticed(monkeypatch, broken):
    monkeypatch.setattr(weights, "factor_of", broken)
    assert not largest_error() <= SIZE + 1


def test_equal_weights_change_no_bit():
    mean = qcomp.CompressedMean(qcomp.QSGD(levels=7, bucket_size=128))
    for weight in (1, 1 / 3, 1e-300):
        weighted, without = means(mean, weight=weight), means(mean, weight=None)
        assert all(np.array_equal(x, y) for x, y in zip(weighted[0], without[0], strict=True))


@pytest.mark.parametrize("topology", ["two_phase", "all_gather"])
def test_what_is_owed_completes_the_weighted_means(topology):
    """Sum identity, with other weights in every step: all means and what is owed are all exact weighted means."""
    mean = qcomp.CompressedMean(qcomp.ScaledSign(bucket_size=64), topology=topology)
    found, states = means(mean)
    owed = sum(np.concatenate([*map(np.ravel, state.worker)]).astype(np.float64) for state in states) / SIZE
    server = [x for state in states for x in state.server]
    if server:
        owed = owed + np.concatenate([*map(np.ravel, server)])[: owed.size]
    total = sum(x.astype(np.float64) for x in found) + owed
    expected = sum(map(exact, range(len(WEIGHTS))))
    assert np.abs(total - expected).max() < 1e-4
    assert np.abs(owed).max() > 0.1  # signs owe much


def test_a_rank_of_weight_0_may_have_no_finite_values():
    def rank_main(comm):
        mean = qcomp.CompressedMean(qcomp.Identity(), feedback=False)
        x = np.full(5, 3 if comm.rank else math.nan, np.float16)
        (found,), _ = mean([x], mean.init([x], comm), comm, weight=comm.rank)
        return found

    for found in run_local(2, rank_main):
        assert found.dtype == np.float16
        assert found.tolist() == [3] * 5


@pytest.mark.parametrize(
    ("of_ranks", "told"),
    [
        ((1, -1), "weight of rank 1 is not a finite number >= 0"),
        ((math.nan, math.inf), "weight of ranks 0 and 1 is not a finite number >= 0"),
        (("7", 1), "weight of rank 0 is not a finite number >= 0"),
        ((1, 10**400), "weight of rank 1 is not a finite number >= 0"),
        ((np.float32(math.inf), np.float16(math.inf)), "weight of ranks 0 and 1 is not a finite number >= 0"),
        (
            (1, np.ones(())),
            r"rank 1 is not a finite number >= 0(: here it is array\(1\.\), an array: .* float\(\))?$",
        ),
        ((0, 0.0), "weight is 0 on all ranks; expected a weight > 0 on at least one"),
    ],
)
def test_every_rank_hears_of_a_wrong_weight(of_ranks, told):
    def rank_main(comm):
        with pytest.raises(ValueError, match=told):
            qcomp.weighted(np.ones(3), of_ranks[comm.rank], comm)
        return qcomp.weighted(np.ones(3), 1, comm).tolist()  # the communicator goes on

    assert run_local(2, rank_main) == [[1, 1, 1]] * 2


def test_weights_in_half_precision_count_as_numbers():
    """Also where a comparison with the largest float64 would overflow."""
    weights = np.float16(1), np.float32(3)
    found = run_local(2, lambda comm: qcomp.weighted(np.ones(1), weights[comm.rank], comm).item())
    assert found == [0.5, 1.5]


def test_a_weight_on_some_ranks_alone_is_refused():
    opt = qcomp.SGD(learning_rate=0.1)

    def rank_main(comm):
        params = np.ones(3, np.float32)
        state = opt.init(params, comm)
        with pytest.raises(qcomp.MismatchError, match="the exchange of weights"):
            opt.step(params, params * comm.rank, state, comm, weight=2 if comm.rank else None)

    run_local(2, rank_main)


@pytest.mark.parametrize(
    ("grads", "error"),
    [([None], r"grads\[0\] is None"), ([np.ones(4, np.int64)], r"grads\[0\].* has dtype int64")],
)
def test_a_weighted_step_reads_gradients_as_a_step_does(grads, error):
    opt = qcomp.SGD(learning_rate=1.0)

    def rank_main(comm):
        params = [np.ones(4, np.float32)]
        state = opt.init(params, comm)
        with pytest.raises((TypeError, ValueError), match=error):
            opt.step(params, grads, state, comm, weight=1)
        given = (iter([np.full(4, x, np.float32)]) for x in (1, comm.rank))
        (moved,), _ = opt.step(*given, state, comm, weight=1)
        return moved.tolist()

    assert run_local(2, rank_main) == [[0.5] * 4] * 2


def steps_of(opt, how):
    """Return the parameters of rank 0 after 8 steps."""

    def rank_main(comm):
        params = np.zeros(1000, np.float32)
        state = opt.init(params, comm)
        for step in range(8):
            grads, weight = values(comm.rank, step), WEIGHTS[step % 3][comm.rank]
            if how == "weight":
                params, state = opt.step(params, grads, state, comm, weight=weight)
            else:
                params, state = opt.step(params, qcomp.weighted(grads, weight, comm), state, comm)
        return params

    return run_local(SIZE, rank_main)[0]


@pytest.mark.parametrize(
    "opt",
    [
        qcomp.OneBitAdam(learning_rate=0.01, freeze=3, exact=None, clip_norm=10.0, watch=None),
        qcomp.CompressedSGD(learning_rate=0.01, exact=None),
    ],
    ids=lambda opt: type(opt).__name__,
)
def test_a_step_takes_a_weight(opt):
    assert np.array_equal(steps_of(opt, "weight"), steps_of(opt, "by hand"))


def test_the_norm_that_is_clipped_is_weighted():
    opt = qcomp.SGD(learning_rate=1.0, clip_norm=1.0)

    def rank_main(comm):
        params = np.zeros(4, np.float32)
        grads = np.full(4, 10.0 if comm.rank else 3.0, np.float32)
        moved, _ = opt.step(params, grads, opt.init(params, comm), comm, weight=1 - comm.rank)
        return moved

    # The factors are 2 and 0, so the norm is sqrt((2 * 6)^2 / 2), and the mean 3.
    assert run_local(2, rank_main)[0] == pytest.approx(np.full(4, -3 / math.sqrt(72)), rel=1e-6)


@pytest.mark.parametrize("delay", [0, 1])
def test_outer_gradients_are_weighted(delay):
    loop = qcomp.OuterLoop(every=2, delay=delay)

    def rank_main(comm):
        params = np.zeros(4, np.float32)
        state = loop.init(params, comm)
        for _ in range(2 + delay):
            params, state = loop.step(params - (1 + comm.rank), state, comm, weight=(3, 1)[comm.rank])
        return loop.shared(params, state)

    assert run_local(2, rank_main)[0] == pytest.approx(np.full(4, -2 * (3 * 1 + 1 * 2) / 4))


@pytest.mark.parametrize("delay", [0, 1])
def test_outer_gradients_of_weight_0_may_be_not_finite(delay):
    loop = qcomp.OuterLoop(every=2, delay=delay)

    def rank_main(comm):
        params = np.zeros(4, np.float32)
        state = loop.init(params, comm)
        for _ in range(2 + delay):
            params = np.full_like(params, math.nan) if comm.rank else params - 1
            params, state = loop.step(params, state, comm, weight=1 - comm.rank)
        return loop.shared(params, state).tolist()

    assert run_local(2, rank_main) == [[-2] * 4] * 2


def test_a_result_is_outside_of_automatic_differentiation():
    """On every rank: those of weight 0 could not lead a loss back to the model."""
    torch = pytest.importorskip("torch")
    loss = torch.ones(3, requires_grad=True).sum()
    assert [x.requires_grad for x in run_local(2, lambda comm: qcomp.weighted(loss, comm.rank, comm))] == [
        False,
        False,
    ]


UNDER_DDP = """
import os
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
import qcomp
from qcomp.integrations import ddp

me = int(os.environ["RANK"])
dist.init_process_group("gloo")
comm = qcomp.comm.world()
for hooked in (False, True):
    model = DistributedDataParallel(torch.nn.Linear(3, 1, bias=False))
    if hooked:
        model.register_comm_hook(*ddp.hook(qcomp.Identity(), model, exact=None))
    tokens, x = (300, 100)[me], torch.full((1, 3), (1.0, 5.0)[me])
    (model(x).sum() * qcomp.weighted(torch.ones(()), tokens, comm)).backward()
    assert torch.equal(model.module.weight.grad, torch.full((1, 3), 2.0)), model.module.weight.grad
"""


def test_a_factor_of_the_loss_weighs_what_others_average(torch_ranks):
    torch_ranks(2, UNDER_DDP)
