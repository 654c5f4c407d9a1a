"""A gradient that is not finite on one rank: one verdict for all ranks, and no change to any state."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import qcomp
from qcomp import NonFiniteError
from qcomp.comm import run_local
from tests.optimizers.every import EVERY, SHAPES

OPTIMIZERS: dict[str, Any] = {name: entry.make(freeze=2) for name, entry in EVERY.items() if entry.alike}
ALL_COMPRESSED = ("1-bit", "1-bit, clipped", "QAdam", "SGD")
OPTIMIZERS |= {f"{name}, nothing exact": replace(OPTIMIZERS[name], exact=None) for name in ALL_COMPRESSED}
WARMUP, COMPRESSED = 1, 3


def poisoned(
    grads, rank: int, step: int, *, bad: int | None, spot: tuple[int, float] = (1, np.nan)
) -> list[np.ndarray]:
    """Draw the gradients of a step; the bad rank has a value that is not finite in one tensor."""
    gradients = grads(SHAPES, rank, step)
    if rank == bad:
        tensor, value = spot
        gradients[tensor].reshape(-1)[2] = value
    return gradients


def trained(job, grads, opt, size: int, steps: int):
    run = job(opt, grads(SHAPES, 99, 0), size)
    for step in range(steps):
        run.step([grads(SHAPES, rank, step) for rank in range(size)])
    return run


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize(
    ("steps", "spot"),
    [
        (WARMUP, (1, np.inf)),
        (COMPRESSED, (0, np.nan)),
        (COMPRESSED, (2, -np.inf)),
        pytest.param(WARMUP, (0, np.nan), marks=pytest.mark.slow),
        pytest.param(WARMUP, (2, -np.inf), marks=pytest.mark.slow),
        pytest.param(COMPRESSED, (1, np.inf), marks=pytest.mark.slow),
    ],
)
class TestEveryStage:
    @pytest.mark.quick_cases(6)
    def test_raises_on_every_rank(self, job, grads, *, name, steps, spot):
        run = trained(job, grads, OPTIMIZERS[name], 3, steps)
        before = run.fingerprint()
        gradients = [poisoned(grads, rank, steps, bad=1, spot=spot) for rank in range(3)]
        stages = [run.opt.stages(p, g, s) for p, g, s in zip(run.params, gradients, run.states, strict=True)]
        errors = run.lockstep(stages, catch=NonFiniteError)
        assert [type(error) for error in errors] == [NonFiniteError] * 3
        assert all("rank 1 is not finite" in str(error) for error in errors)
        assert run.fingerprint() == before

    @pytest.mark.quick_cases(1)
    def test_skips_on_every_rank(self, job, grads, *, name, steps, spot):
        opt = replace(OPTIMIZERS[name], nonfinite="skip")
        run, other = (trained(job, grads, opt, 3, steps) for _ in range(2))
        before = run.fingerprint()
        for bad in (1, 2):
            run.step([poisoned(grads, rank, steps, bad=bad, spot=spot) for rank in range(3)])
            assert run.fingerprint() == before
            assert [s.skipped for s in run.states] == [bad] * 3
        # It continues as if the step had never happened.
        for step in range(steps, steps + 3):
            for each in (run, other):
                each.step([grads(SHAPES, rank, step) for rank in range(3)])
        assert run.fingerprint() == other.fingerprint()


class TestOverACommunicator:
    @pytest.mark.parametrize("size", [1, 2, 3])
    def test_no_rank_blocks(self, grads, size):
        opt = replace(OPTIMIZERS["1-bit"], nonfinite="skip")

        def rank_main(comm):
            params = grads(SHAPES, 99, 0)
            state = opt.init(params, comm)
            for step in range(8):
                gradients = poisoned(grads, comm.rank, step, bad=step % size if step in (1, 4, 5) else None)
                params, state = opt.step(params, gradients, state, comm)
            return state.skipped, state.step, b"".join(p.tobytes() for p in params)

        results = run_local(size, rank_main, timeout=20)
        assert len(set(results)) == 1
        assert results[0][:2] == (3, 5)

    def test_a_schedule_counts_completed_steps_only(self, grads):
        seen = []
        opt = qcomp.Adam(learning_rate=lambda step: seen.append(step) or 0.1, nonfinite="skip")
        comm = qcomp.comm.LocalCommunicator.alone()
        params = grads(SHAPES, 99, 0)
        state = opt.init(params, comm)
        seen.clear()  # from the comparison at init
        for step in range(4):
            params, state = opt.step(
                params, poisoned(grads, 0, step, bad=0 if step == 1 else None), state, comm
            )
        assert seen == [0, 1, 2]

    def test_a_skipped_step_returns_the_arrays_passed_in(self):
        """A skipped step returns the arrays passed in, also a single array outside a list."""
        opt = qcomp.Adam(learning_rate=0.1, nonfinite="skip")
        comm = qcomp.comm.LocalCommunicator.alone()
        x = np.ones(4)
        got, state = opt.step(x, np.full(4, np.nan), opt.init(x, comm), comm)
        assert (got == x).all()
        assert got.shape == (4,)
        assert state.skipped == 1
        got, _ = opt.step((x,), (np.full(4, np.nan),), opt.init([x], comm), comm)
        assert len(got) == 1


def test_a_check_of_the_own_gradient_alone_is_caught(job, grads, lockstep, monkeypatch):
    """A rank that checks only its own gradient leaves the others waiting: `lockstep` must detect this."""
    opt = OPTIMIZERS["1-bit"]
    run = trained(job, grads, opt, 2, COMPRESSED)

    def local_check(params, gradients, state):
        if not all(np.isfinite(g).all() for g in gradients):
            raise NonFiniteError("rank 1 is not finite")
        return (yield from opt.stages(params, gradients, state))

    gradients = [poisoned(grads, rank, COMPRESSED, bad=1) for rank in range(2)]
    with pytest.raises(AssertionError, match=r"ranks \[1\] have ended, but ranks \[0\] want an exchange"):
        lockstep(
            [local_check(p, g, s) for p, g, s in zip(run.params, gradients, run.states, strict=True)],
            catch=NonFiniteError,
        )


def test_large_values_that_are_sent_exactly_are_not_blamed():
    opt = qcomp.Adam(learning_rate=0.1)

    def rank_main(comm):
        params = [np.ones(3), np.ones(3)]
        state = opt.init(params, comm, ("a", "b"))
        grads = [np.full(3, 1e40), np.full(3, np.inf if comm.rank else 1e40)]
        with pytest.raises(NonFiniteError, match=r"^the gradient of 'b' on rank 1 is not finite"):
            opt.step(params, grads, state, comm)

    run_local(2, rank_main)
