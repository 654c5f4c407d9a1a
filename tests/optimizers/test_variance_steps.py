"""Steps after the freeze that measure the variance again."""

import warnings

import numpy as np
import pytest

import qcomp
from qcomp.comm import LocalCommunicator, run_local
from qcomp.core.variance.arithmetic import kept_after, measured

FREEZE, BETAS = 4, (0.9, 0.8)
SHAPE = (6, 8)


def gradients(rank, step):
    """Return a rank's gradients of a step, half as large in each following step."""
    draws = np.random.default_rng((rank, step)).standard_normal(SHAPE)
    return (draws * 0.5**step).astype(np.float32)


def optimizer(kind="QAdam", **changes):
    settings = {"learning_rate": 0.01, "betas": BETAS, "freeze": FREEZE, "exact": None, "watch": None}
    settings["variance_steps"] = None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return getattr(qcomp, kind)(**settings | changes)


def states(opt, steps, ranks=2):
    """Return the parameters and the state of rank 0 after each step."""

    def rank_main(comm):
        params, found = np.ones(SHAPE, np.float32), []
        state = opt.init(params, comm)
        for step in range(steps):
            params, state = opt.step(params, gradients(comm.rank, step), state, comm)
            found.append((params.copy(), state))
        return found

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        results = run_local(ranks, rank_main)
    first, *others = results
    for (params, _), *rest in zip(first, *others, strict=True):
        assert all(params.tobytes() == found.tobytes() for found, _ in rest)
    return first


@pytest.mark.parametrize("kind", ["OneBitAdam", "QAdam"])
def test_measuring_in_every_step_gives_adam(kind):
    """The average of squares continues from the bias-corrected one; everything else is as in Adam."""
    opt = optimizer(kind, variance_steps=lambda _: True, variance_floor=0.0)
    beta1, beta2 = BETAS
    params, m, v = np.ones(SHAPE), np.zeros(SHAPE), np.zeros(SHAPE)
    for step, (found, state) in enumerate(states(opt, 9)):
        g = (gradients(0, step).astype(float) + gradients(1, step)) / 2
        m, v = beta1 * m + (1 - beta1) * g, beta2 * v + (1 - beta2) * g * g
        if step < FREEZE:
            corrected = v / (1 - beta2 ** (step + 1))
        if step == FREEZE - 1:
            v = corrected
        if step >= FREEZE:
            corrected = v
            assert state.stage == "compressed"
        params -= 0.01 * m / (1 - beta1 ** (step + 1)) / (np.sqrt(corrected) + 1e-8)
        np.testing.assert_allclose(found, params, rtol=1e-5)


@pytest.mark.parametrize(
    ("beta2", "steps", "kept"),
    [(0.95, (3, 5), (0.95**3, 0.95**2)), (0.95, (1, 12), (0.95, 0.75)), (0.5, (1, 4), (0.5, 0.5))],
)
def test_a_measurement_stands_for_the_steps_since_the_last(beta2, steps, kept):
    """After k steps the old variance has weight b2^k, but one measurement weighs at most a quarter, or 1 - b2."""
    opt = optimizer(variance_steps=lambda step: step in steps, variance_floor=0.0, betas=(0.9, beta2))
    found = [state.variance[0] for _, state in states(opt, FREEZE + steps[-1])]
    expected = found[FREEZE - 1].astype(float)
    for step in range(1, steps[-1] + 1):
        if step in steps:
            g = (gradients(0, FREEZE + step - 1).astype(float) + gradients(1, FREEZE + step - 1)) / 2
            weight = kept[steps.index(step)]
            expected = weight * expected + (1 - weight) * g * g
            np.testing.assert_allclose(found[FREEZE - 1 + step], expected, rtol=1e-5)
        else:
            assert found[FREEZE - 1 + step].tobytes() == found[FREEZE - 2 + step].tobytes()


def test_what_is_owed_stays_owed():
    """An exact step neither repays residuals nor makes new ones."""
    opt = optimizer("OneBitAdam", variance_steps=lambda step: step == 4)
    before, after = (state.exchange for _, state in states(opt, FREEZE + 4)[-2:])
    assert any(np.any(e) for e in before.worker)
    for old, new in zip((*before.worker, *before.server), (*after.worker, *after.server), strict=True):
        assert old.tobytes() == new.tobytes()


def test_steps_stay_as_long_as_those_of_adam_while_gradients_shrink():
    """A variance frozen at larger gradients makes steps too short: this is the reason to measure again."""

    def last_move(opt):
        (before, _), (after, _) = states(opt, 16)[-2:]
        return np.abs(after - before).mean()

    adam = last_move(qcomp.Adam(learning_rate=0.01, betas=BETAS))
    measured = last_move(optimizer(variance_steps=qcomp.DoublingIntervals(4)))
    frozen = last_move(optimizer())
    assert 0.5 < measured / adam < 2
    assert frozen < measured / 2


@pytest.mark.parametrize("rewarm_steps", [0, 3])
def test_measurements_beside_a_watch(rewarm_steps):
    """Its samples then come from the exact gradients; after a re-warm, steps are counted anew."""
    watch = qcomp.VarianceWatch(smallest=0.9, rewarm_steps=rewarm_steps, every=2)
    opt = optimizer("OneBitAdam", variance_steps=lambda step: step % 4 == 0, watch=watch)
    found = [state for _, state in states(opt, 30)]
    stages = [state.stage for state in found]
    assert ("rewarm" in stages) == bool(rewarm_steps)
    for before, after in zip(found[FREEZE:], found[FREEZE + 1 :], strict=False):
        if before.stage == "rewarm" and after.stage == "compressed":
            assert after.numbers["variance_steps_since"] == after.step
    assert found[-1].numbers["watch_measured"] if rewarm_steps == 0 else True


def test_a_state_without_a_measured_step_counts_from_its_own_step():
    comm, params = LocalCommunicator.alone(), np.ones(SHAPE, np.float32)
    plain, measuring = optimizer(), optimizer(variance_steps=qcomp.DoublingIntervals(4))
    (_, state) = states(plain, FREEZE + 3, ranks=1)[-1]
    loaded = measuring.load_state_dict(plain.state_dict(state), params, comm, strict=False)
    assert loaded.numbers["variance_steps_since"] == loaded.numbers["variance_measured"] == FREEZE + 3
    back = plain.load_state_dict(measuring.state_dict(loaded), params, comm, strict=False)
    assert dict(back.numbers) == dict(state.numbers)


def test_steps_stay_short_where_gradients_come_and_go():
    """From a single square, which is often near zero, steps would be many times as long as Adam's."""

    def longest_moves(kept):
        rng = np.random.default_rng(0)
        variance = (np.ones(10_000),)
        for _ in range(4):
            g = rng.standard_normal(10_000)
            variance = measured(variance, [g], [True], kept=[kept], floor=0.0)
        return np.sqrt(np.mean(1 / variance[0]))

    assert longest_moves(kept_after(0.999, 10**6)) < 1.5
    assert longest_moves(0.999**10**6) > 10


def test_one_bit_lamb_has_no_variance_steps():
    with pytest.raises(ValueError, match=r"variance_steps is .*; expected None: 1-bit LAMB measures"):
        qcomp.OneBitLamb(learning_rate=0.1, variance_steps=qcomp.DoublingIntervals(4))
