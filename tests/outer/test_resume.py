"""Checkpoints of an outer loop: at any inner step, on the same ranks and on others."""

import numpy as np
import pytest

import qcomp
from qcomp.testing import lockstep
from qcomp.testing.means import owed
from tests.outer.jobs import Job, begun, loop_of

STREAMING = loop_of(every=6, fragments=3, delay=3, mixing=0.5, decay=0.5, outer=qcomp.Adam(learning_rate=0.1))
LOOPS = {
    "one": loop_of(outer=qcomp.SGD(learning_rate=0.5, momentum=0.5)),
    "streaming": STREAMING,
    "drawing": loop_of(compressor=qcomp.QSGD(7, 16), every=3, warmup=2, delay=1),
    "low rank": loop_of(averaging=qcomp.PowerSGD(rank=1), compressor=qcomp.Identity(), fragments=2, delay=1),
    "chosen": loop_of(averaging=qcomp.Averaging(topology="auto"), every=2, delay=1),
}


def averaged(job, steps):
    """Run a job, including its warm-up."""
    for _ in range(steps):
        before = list(job.params)
        job.inner()
        if job.states[0].stage == "warmup":
            grads = [[p - q for p, q in zip(*ps, strict=True)] for ps in zip(before, job.params, strict=True)]
            means = lockstep([job.loop.average_stages(g, s) for g, s in zip(grads, job.states, strict=True)])
            job.params = [[p - m for p, m in zip(*pm, strict=True)] for pm in zip(before, means, strict=True)]
        job.outer()
    return job


@pytest.mark.slow
@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("name", LOOPS)
def test_a_run_resumes_at_every_inner_step_bit_for_bit(name):
    whole = averaged(Job(LOOPS[name], 2), 14).held()
    stages = set()
    for stop in range(0, 14):
        first = averaged(Job(LOOPS[name], 2), stop)
        stages.add(first.states[0].stage.partition(" ")[0])
        second = first.resumed(first.saved())
        assert second.held() == first.held()
        assert averaged(second, 14 - stop).held() == whole, f"stopped after {stop} steps"
    assert stages >= ({"under", "local"} if LOOPS[name].delay else {"local"})


def test_a_saved_dict_outlives_inner_steps_in_place():
    job = Job(loop_of(), 1).run(2)
    (saved,) = job.saved()
    kept = saved["local.0"].copy()
    job.params[0][0] += 1
    assert np.array_equal(saved["local.0"], kept)


def test_a_state_passes_through_formats_that_hold_only_arrays():
    job = Job(STREAMING, 2).run(5)
    saved = [qcomp.checkpoint.to_arrays(d, like=np.zeros(1)) for d in job.saved()]
    assert job.resumed(saved).held() == job.held()


@pytest.mark.parametrize("new", [1, 3])
@pytest.mark.parametrize("stop", [4, 5, 7])
def test_other_ranks_resume_with_the_means(new, stop):
    """This keeps the means of d_i, now and under way, the mean of what is owed, and the shared parameters."""
    old = Job(STREAMING, 2).run(stop)
    with pytest.warns(UserWarning, match="a state of 2 ranks resumes with"):
        job = old.resumed(old.saved(), new)
    assert [x.tobytes() for x in job.anchor()] == [x.tobytes() for x in old.anchor()]
    for i in range(4):
        mean = sum(p[i] for p in old.params) / 2
        for of_rank in job.params:
            assert np.allclose(of_rank[i], mean, atol=1e-6)
    mean_of = old.loop.mean_of
    tensors = begun()[:2]
    debts = [owed(mean_of(j.states[0]), [s.exchange for s in j.states], tensors) for j in (old, job)]
    assert all(np.allclose(a, b, atol=1e-6) for a, b in zip(*debts, strict=True))
    if stop >= 5:
        assert job.states[0].stage == old.states[0].stage != "local"
        sent = [s.arrays["sent"] for s in old.states]
        for i, x in enumerate(job.states[-1].arrays["sent"]):
            assert x.shape == sent[0][i].shape
            assert np.allclose(x, (sent[0][i] + sent[1][i]) / 2, atol=1e-6)
    job.run(8)


def test_ranks_of_other_checkpoints_are_refused():
    one, other = Job(loop_of(), 2).run(2), Job(loop_of(), 2).run(3)
    with pytest.raises(qcomp.MismatchError, match="checkpoint is"):
        one.resumed([one.saved()[0], other.saved()[1]])


def test_a_state_of_another_loop_is_refused_or_warned_of():
    job = Job(loop_of(fragments=2), 1).run(2)
    (saved,) = job.saved()
    with pytest.warns(UserWarning, match=r"every=4 \(now 6\)"):
        Job(loop_of(fragments=2, every=6), 1).resumed([saved])
    with pytest.raises(ValueError, match="the state was saved with compressor="):
        Job(loop_of(fragments=2, compressor=qcomp.TopK(2, 16)), 1).resumed([saved])
    with pytest.raises(ValueError, match=r"it lacks 'number.rounds.2'"):
        Job(loop_of(fragments=3), 1).resumed([saved], strict=False)
    sgd, alone = qcomp.SGD(learning_rate=1.0), qcomp.comm.LocalCommunicator.alone()
    with pytest.raises(ValueError, match="the state was saved by OuterLoop; this is SGD"):
        sgd.load_state_dict(saved, begun(), alone)
