"""What an outer loop refuses: on every rank, and without changing anything."""

import numpy as np
import pytest

import qcomp
from qcomp.comm import run_local
from qcomp.outer import Overlapped
from qcomp.testing import lockstep
from tests.outer.jobs import SIGN, Job, begun, loop_of, moves


@pytest.mark.parametrize("fragments", [1, 2])
@pytest.mark.parametrize("compressor", [SIGN, qcomp.Identity()], ids=["sign", "identity"])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_value_that_is_not_finite_is_named_on_every_rank(fragments, compressor, bad):
    job = Job(loop_of(fragments=fragments, every=4, compressor=compressor), 3).run(4 // fragments - 1)
    job.inner()
    tensor = job.loop.members(job.states[0], 0)[-1]
    clean = [p.copy() for p in job.params[1]]
    job.params[1][tensor] = job.params[1][tensor] + bad
    before = job.held()
    found = job.outer(catch=qcomp.NonFiniteError)
    for error in found:
        assert f"the outer gradient of '{tensor}' on rank 1 is not finite" in str(error)
        assert f"in step {4 // fragments}" in str(error)
    assert job.held() == before
    job.params[1] = clean
    job.run(0)
    job.outer()
    assert job.states[0].stage == "local"


def test_a_late_refusal_names_the_step_of_the_value():
    job = Job(loop_of(delay=2), 2).run(3)
    job.inner()
    job.params[0][0][0, 0] = np.nan
    job.outer()
    job.run(1)
    job.inner()
    before = job.held()
    for error in job.outer(catch=qcomp.NonFiniteError):
        assert "'0' on rank 0 is not finite, or too large to compress, in step 4" in str(error)
    assert job.held() == before


@pytest.mark.parametrize("delay", [0, 1])
def test_ranks_at_different_steps_are_an_error(delay):
    """Rank 1 is a whole outer round ahead: the messages have the same sizes."""
    job = Job(loop_of(delay=delay), 2).run(3)
    job.states[1] = job.states[1]._replace(step=7)
    for _ in range(delay):
        job.outer()
    for error in job.outer(catch=qcomp.MismatchError):
        assert (
            "the ranks exchange after different inner steps: rank 0 after step 4, rank 1 after step 8"
            in str(error)
        )


def test_ranks_with_different_fragments_are_an_error():
    job = Job(loop_of(fragments=2), 2).run(1)
    job.states[1] = job.states[1]._replace(step=3)
    for error in job.outer(catch=qcomp.MismatchError):
        assert "rank 0 after step 2, rank 1 after step 4" in str(error)


def test_unaveraged_gradients_are_found_at_the_end_of_the_warm_up():
    job = Job(loop_of(warmup=2), 2).run(1)
    job.inner()
    for error in job.outer(catch=qcomp.MismatchError):
        assert "the warm-up of 2 steps ends with different parameters on the ranks" in str(error)
        assert "the parameter '0' of shape" in str(error)


@pytest.mark.parametrize("overlapped", [False, True])
def test_a_rank_that_dies_ends_the_others_with_an_error(overlapped):
    loop = loop_of(delay=1)
    seen = {}

    def rank_main(comm):
        params = begun()
        state = loop.init(params, comm)
        running = Overlapped(loop, comm)
        for step in range(6):
            if comm.rank == 1 and step == 3:
                raise KeyError("gone")
            try:
                params, state = running.step(params, state) if overlapped else loop.step(params, state, comm)
            except qcomp.CommunicatorError as error:
                seen[comm.rank] = (step, str(error))
                raise

    with pytest.raises(KeyError):
        run_local(3, rank_main, timeout=20)
    assert set(seen) == {0, 2}
    assert all("rank 1 failed with KeyError" in text for _, text in seen.values())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"every": 0}, "every is 0; expected an integer >= 1"),
        ({"every": 2.0}, "every is 2.0"),
        ({"fragments": 5}, "fragments is 5; expected an integer from 1 to 4"),
        ({"delay": 4}, "delay is 4; expected less than every, which is 4"),
        ({"delay": -1}, "delay is -1"),
        ({"decay": 1.5}, "decay is 1.5"),
        ({"decay": 0.5, "averaging": qcomp.Averaging(feedback=False)}, "decay is 0.5 with feedback=False"),
        ({"mixing": 1.5}, "mixing is 1.5; expected a number from 0 to 1"),
        ({"turn": "sent"}, "turn is 'sent'; expected 'send' or 'apply'"),
        (
            {"turn": "apply", "fragments": 2, "delay": 2},
            "delay is 2 with turn='apply'; expected less than .* = 2",
        ),
        ({"scale": 0.0}, "scale is 0.0; expected a finite number above 0"),
        ({"scale": 0.5, "averaging": qcomp.Averaging(feedback=False)}, "scale is 0.5 with feedback=False"),
        ({"warmup": -1}, "warmup is -1"),
        ({"seed": -1}, "seed is -1"),
        ({"outer": qcomp.SGD(learning_rate=1.0, clip_norm=1.0)}, "outer has clip_norm=1.0; expected None"),
        ({"outer": qcomp.SGD(learning_rate=1.0, nonfinite="skip")}, "outer has nonfinite='skip'"),
        ({"compressor": qcomp.QSGD(1, 512)}, "feedback=True around qsgd"),
    ],
)
def test_incompatible_settings_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        loop_of(**changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"outer": qcomp.CompressedSGD(learning_rate=1.0)}, "expected an optimizer whose mean is exact"),
        ({"outer": qcomp.EF21SGD(learning_rate=1.0)}, "expected an optimizer whose mean is exact"),
        ({"outer": 0.7}, "outer is 0.7"),
        ({"compressor": "sign"}, "compressor is 'sign'"),
    ],
)
def test_settings_of_the_wrong_type_are_refused(changes, message):
    with pytest.raises(TypeError, match=message):
        loop_of(**changes)


def test_more_fragments_than_tensors_are_refused_on_every_rank():
    def rank_main(comm):
        with pytest.raises(ValueError, match="fragments is 3; expected at most one for each of 2 tensors"):
            loop_of(fragments=3).init(begun()[:2], comm)

    run_local(2, rank_main, timeout=20)


@pytest.mark.parametrize(
    "changes",
    [
        {"every": 8},
        {"decay": 0.5},
        {"outer": qcomp.SGD(learning_rate=0.5)},
        {"delay": 1},
        {"warmup": 1},
        {"seed": 1},
    ],
    ids=lambda c: next(iter(c)),
)
def test_ranks_with_different_settings_are_an_error(changes):
    loops = [loop_of(), loop_of(**changes)]
    stages = [loop.init_stages(begun(), rank=rank, size=2) for rank, loop in enumerate(loops)]
    for error in lockstep(stages, catch=qcomp.MismatchError):
        assert f"{next(iter(changes))}" in str(error)
        assert isinstance(error, qcomp.MismatchError)


@pytest.mark.slow
def test_schedules_are_compared_by_their_values():
    def loop(rate):
        return loop_of(outer=qcomp.SGD(learning_rate=lambda step: rate / (step + 1)))

    lockstep([loop(1.0).init_stages(begun(), rank=rank, size=2) for rank in range(2)])
    stages = [loop(1.0 + rank).init_stages(begun(), rank=rank, size=2) for rank in range(2)]
    assert all("rates" in str(error) for error in lockstep(stages, catch=qcomp.MismatchError))


def test_parameters_of_other_shapes_are_refused():
    job = Job(loop_of(), 1)
    with pytest.raises(
        ValueError, match=r"params\[1\], the parameter '1', has shape \(5, 7\); expected \(7, 5\)"
    ):
        next(job.loop.stages([x.T if i == 1 else x for i, x in enumerate(begun())], job.states[0]))
    with pytest.raises(
        TypeError, match=r"params\[0\], the parameter '0', has dtype float64; expected one that is computed"
    ):
        next(job.loop.stages([x.astype(np.float64) for x in begun()], job.states[0]))
    with pytest.raises(ValueError, match="params has 3 arrays; state has 4"):
        next(job.loop.stages(begun()[:3], job.states[0]))
    with pytest.raises(ValueError, match="comm is rank 0 of 1; state belongs to rank 0 of 2"):
        Job(loop_of(), 2).loop.step(
            begun(), Job(loop_of(), 2).states[0], qcomp.comm.LocalCommunicator.alone()
        )


def test_overlapping_needs_a_delay_and_a_communicator_with_start():
    alone = qcomp.comm.LocalCommunicator.alone()
    with pytest.raises(ValueError, match="loop has delay=0"):
        Overlapped(loop_of(), alone)
    with pytest.raises(TypeError, match="expected a communicator with a method start"):
        Overlapped(loop_of(delay=1), object())


def test_non_finite_gradients_in_the_warm_up():
    job = Job(loop_of(warmup=2), 2)
    grads = [moves(rank, 0) for rank in range(2)]
    grads[1][2][0] = np.nan
    stages = [job.loop.average_stages(g, s) for g, s in zip(grads, job.states, strict=True)]
    for error in lockstep(stages, catch=qcomp.NonFiniteError):
        assert "the gradient of '2' on rank 1 is not finite, or too large to compress, in step 1" in str(
            error
        )


def test_every_tensor_may_be_empty_or_small():
    shapes = [(0, 3), (), (1,), (2, 3)]
    rng = np.random.default_rng(0)
    first = [np.asarray(rng.standard_normal(s), np.float32) for s in shapes]
    for topology in ("two_phase", "all_gather", "ring", "hierarchical"):
        loop = loop_of(fragments=4, exact=None, delay=1, averaging=qcomp.Averaging(topology=topology))
        for size in (1, 3):  # around a ring of one there is no exchange
            job = Job(loop, size, params=first).run(9)
            assert job.resumed(job.saved()).run(3).held() == Job(loop, size, params=first).run(12).held()
