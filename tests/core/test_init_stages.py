"""Means and optimizers can start without a communicator: `init` drives `init_stages`."""

import numpy as np
import pytest

import qcomp
from qcomp import CompressedMean
from qcomp.comm import run_local
from qcomp.extend import AllGather

SIGN = qcomp.ScaledSign(bucket_size=16)
X = [np.ones((3, 40), np.float32), np.ones(5, np.float32)]
OPT = qcomp.OneBitAdam(learning_rate=0.1, freeze=2, exact=None, compressor=SIGN)


@pytest.mark.parametrize("name", ["two_phase", "ring", "all_gather", "hierarchical", "auto"])
def test_a_mean_starts_as_over_a_communicator(lockstep, name):
    mean, hosts = CompressedMean(SIGN, name), ["a", "b", "a"]
    expected = run_local(3, lambda comm: mean.init(X, comm), hosts=hosts)
    found = lockstep([mean.init_stages(X, rank=r, size=3, host=hosts[r]) for r in range(3)])
    for one, other in zip(found, expected, strict=True):
        assert one._replace(worker=(), server=()) == other._replace(worker=(), server=())
        for kind in ("worker", "server"):
            shapes = [[r.shape for r in getattr(state, kind)] for state in (one, other)]
            assert shapes[0] == shapes[1]
    assert found[0].nodes == ((0, 1, 0) if name in ("hierarchical", "auto") else ())


@pytest.mark.parametrize("start", [CompressedMean(SIGN), OPT])
def test_ranks_that_differ_all_raise_in_the_same_stage(lockstep, start):
    params = [X, X, [X[0], np.ones(6, np.float32)]]
    stages = [start.init_stages(p, rank=r, size=3) for r, p in enumerate(params)]
    errors = lockstep(stages, catch=qcomp.MismatchError)
    assert len({str(error) for error in errors}) == 1
    assert "shapes[1][0] is 5 on ranks 0 and 1, but 6 on rank 2" in str(errors[0])


@pytest.mark.parametrize("start", [CompressedMean(SIGN), OPT])
@pytest.mark.parametrize("rank", [-1, 2])
def test_a_rank_outside_the_world_is_an_error(start, rank):
    with pytest.raises(ValueError, match=f"rank is {rank}, size is 2; expected a rank from 0"):
        next(start.init_stages(X, rank=rank, size=2))


@pytest.mark.parametrize("known", [None, "a"])
def test_a_hierarchy_needs_the_host_of_every_rank(lockstep, known):
    opt = qcomp.OneBitAdam(learning_rate=0.1, averaging=qcomp.Averaging(topology="hierarchical"), exact=None)
    for start in (opt, opt.mean):
        stages = [
            start.init_stages(X, rank=0, size=2, host="a"),
            start.init_stages(X, rank=1, size=2, host=known),
        ]
        results = lockstep(stages, catch=TypeError)
        if known:
            assert not any(isinstance(result, TypeError) for result in results)
        else:
            assert all("host is None on rank 1; expected the name of the machine" in str(e) for e in results)


def test_an_optimizer_saves_and_resumes_without_a_communicator(lockstep):
    """Start, steps, dicts and another start, all without a communicator."""
    states = lockstep([OPT.init_stages(X, rank=r, size=2, names=["w", "b"]) for r in range(2)])
    params = [X, X]
    for step in range(4):
        grads = [[np.full_like(x, r + step) for x in X] for r in range(2)]
        results = lockstep([OPT.stages(*each) for each in zip(params, grads, states, strict=True)])
        params, states = [list(part) for part in zip(*results, strict=True)]
    saved = [OPT.state_dict(state) for state in states]
    stages = [
        OPT.load_stages(saved[r], params[r], rank=r, size=2, names=["w", "b"], strict=True) for r in range(2)
    ]
    for before, state in zip(saved, lockstep(stages), strict=True):
        after = OPT.state_dict(state)
        assert before.keys() == after.keys()
        assert [np.asarray(before[k]).tobytes() for k in before] == [
            np.asarray(after[k]).tobytes() for k in before
        ]


def test_a_refused_dict_raises_its_own_error(lockstep):
    stages = [OPT.load_stages({}, X, rank=r, size=2) for r in range(2)]
    for error in lockstep(stages, catch=ValueError):
        assert isinstance(error, ValueError)
        assert not isinstance(error, qcomp.MismatchError)


def test_stages_can_be_closed_between_exchanges():
    """A framework that stops between two exchanges closes the generator."""
    stages = OPT.init_stages(X, rank=0, size=2)
    assert isinstance(next(stages), AllGather)
    stages.close()
