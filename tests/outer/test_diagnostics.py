"""What diagnostics measure of an outer loop, compared with values computed from all ranks' arrays."""

import math

import numpy as np
import pytest

import qcomp
from qcomp.comm import run_local
from tests.outer.jobs import Job, begun, loop_of, moves


def measured(loop, size, steps, **options):
    watched = qcomp.outer.OuterDiagnostics(loop, **options)

    def rank_main(comm):
        params = begun()
        state = loop.init(params, comm)
        reports = []
        for step in range(steps):
            params = [np.asarray(p - m) for p, m in zip(params, moves(comm.rank, step), strict=True)]
            params, state, report = watched.step(params, state, comm)
            reports.append(report)
        return [p.tobytes() for p in params], reports

    return run_local(size, rank_main, timeout=30)


@pytest.mark.parametrize(
    "loop",
    [loop_of(), loop_of(fragments=2, delay=1), qcomp.OuterLoop(every=4)],
    ids=["sign", "delay", "exact"],
)
def test_steps_are_unchanged_and_all_ranks_report_the_same(loop):
    found = measured(loop, 3, 9)
    job = Job(loop, 3).run(9)
    for rank, (params, reports) in enumerate(found):
        assert params == [p.tobytes() for p in job.params[rank]]
        assert reports == found[0][1]
    for step, report in enumerate(found[0][1], 1):
        assert bool(report) == (step in (3, 5, 7, 9) if loop.delay else step % 4 == 0)


def test_drift_is_the_distance_of_outer_gradients_from_their_mean():
    loop = loop_of(exact=None, compressor=qcomp.ScaledSign(8))
    report = measured(loop, 2, 4)[0][1][-1]
    done = [
        np.concatenate([sum(moves(r, s)[i] for s in range(4)).ravel() for i in range(4)]) for r in range(2)
    ]
    mean = (done[0] + done[1]) / 2
    apart = [np.linalg.norm(d - mean) / np.linalg.norm(mean) for d in done]
    assert math.isclose(report["drift"], sum(apart) / 2, rel_tol=1e-6)
    assert math.isclose(report["drift_worst"], max(apart), rel_tol=1e-6)
    assert 0 < report["cosine"] < 1
    assert 0 < report["worker_residual"] <= report["worker_residual_worst"] < 1
    assert report["bytes_sent"] > 0


def test_ranks_with_the_same_steps_do_not_drift():
    report = measured(qcomp.OuterLoop(every=2), 1, 2)[0][1][-1]
    assert (report["drift"], report["cosine"]) == (0, 1)


def test_bad_arguments_are_refused():
    with pytest.raises(TypeError, match="loop is 3"):
        qcomp.outer.OuterDiagnostics(3)
    with pytest.raises(ValueError, match="sample is 0"):
        qcomp.outer.OuterDiagnostics(loop_of(), sample=0)
