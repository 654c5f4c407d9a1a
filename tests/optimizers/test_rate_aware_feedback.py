"""Feedback through changes of the learning rate: what is owed of a step is paid with the rate of that step."""

import numpy as np
import pytest

import qcomp
from qcomp.comm import LocalCommunicator, run_local

SHAPES = [(40,), (3, 11), ()]
RATES = [0.1, 0.1, 0.05, 0.2, 0.0, 0.0, 0.2, 0.02, 0.02, 0.03]


def schedule(step: int) -> float:
    return RATES[step]


def sgd(**changes) -> qcomp.CompressedSGD:
    settings = {"learning_rate": schedule, "momentum": 0.0, "exact": None, "compressor": qcomp.ScaledSign(8)}
    return qcomp.CompressedSGD(**{**settings, "rescale_feedback": True, **changes})


def follow(job, grads, opt, size: int) -> tuple[list, list]:
    """How far x_t - rate E_t is from x_0 - sum of rate * mean g after each step, and E before each.

    E = mean_i e_i + e_s, and the rate is the last one above 0.
    """
    run = job(opt, grads(SHAPES, 99, 0, np.float64), size)
    expected = [np.array(p) for p in run.params[0]]
    off, owed, last = [], [], 0.0
    for step, rate in enumerate(RATES):
        of_ranks = [grads(SHAPES, rank, step, np.float64) for rank in range(size)]
        owed.append(run.error())
        run.step(of_ranks)
        last = rate or last
        expected = [p - rate * sum(g[i] for g in of_ranks) / size for i, p in enumerate(expected)]
        virtual = [x - last * e.reshape(x.shape) for x, e in zip(run.params[0], run.error(), strict=True)]
        off.append([v - p for v, p in zip(virtual, expected, strict=True)])
    return off, owed


class TestIdentity:
    @pytest.mark.parametrize(
        "compressor", [qcomp.ScaledSign(8), qcomp.TopK(2, 8), qcomp.QSGD(7, 16)], ids=str
    )
    @pytest.mark.parametrize("topology", ["two_phase", "all_gather"])
    @pytest.mark.parametrize("size", [1, 2, 3])
    def test_holds_through_every_change(self, job, grads, size, topology, compressor):
        """x_t - rate (mean_i e_i + e_s) = x_0 - sum of rate * mean g, in float64."""
        off, owed = follow(job, grads, sgd(topology=topology, compressor=compressor), size)
        assert max(np.abs(d).max() for each in off for d in each) < 1e-12
        assert max(np.abs(e).max() for e in owed[-1]) > 0.01

    @pytest.mark.parametrize("topology", ["two_phase", "all_gather"])
    def test_without_it_is_broken_by_the_change_times_what_is_owed(self, job, grads, topology):
        """By the sum of (old rate - new rate) E over the changes."""
        moving = [rate for rate in RATES if rate]

        def opt(step: int) -> float:
            return moving[min(step, len(moving) - 1)]

        run = job(
            sgd(topology=topology, rescale_feedback=False, learning_rate=opt),
            grads(SHAPES, 99, 0, np.float64),
            2,
        )
        expected, broken = [np.array(p) for p in run.params[0]], 0.0
        for step, rate in enumerate(moving):
            of_ranks = [grads(SHAPES, rank, step, np.float64) for rank in range(2)]
            if step:
                broken = broken + (moving[step - 1] - rate) * run.error()[0]
            run.step(of_ranks)
            expected = [p - rate * sum(g[i] for g in of_ranks) / 2 for i, p in enumerate(expected)]
            np.testing.assert_allclose(
                run.params[0][0] - rate * run.error()[0] - expected[0], broken, atol=1e-13
            )
        assert np.abs(broken).max() > 0.01

    def test_a_step_of_rate_zero_leaves_what_is_owed(self, job, grads):
        run = job(sgd(), grads(SHAPES, 99, 0), 2)
        before = []
        for step in range(6):
            if step == 4:
                before = run.fingerprint(), run.state.numbers
            run.step([grads(SHAPES, rank, step) for rank in range(2)])
        after = run.fingerprint(), run.state.numbers
        assert before[0].replace(b"(4, ", b"(6, ") == after[0]
        assert before[1] == after[1] == {"feedback_rate": 0.2}

    def test_a_rate_that_stays_changes_nothing(self, job, grads):
        """Bit for bit, as without."""
        found = set()
        for rescale in (True, False):
            run = job(sgd(learning_rate=0.1, rescale_feedback=rescale), grads(SHAPES, 99, 0), 2)
            for step in range(3):
                run.step([grads(SHAPES, rank, step) for rank in range(2)])
            found.add(run.fingerprint())
        assert len(found) == 1

    def test_versions_that_are_wrong_are_found(self, job, grads, monkeypatch):
        """The inverse ratio, the worker alone, and a rate that is not remembered."""
        from qcomp.core.optimizers.compression import CompressingOptimizer

        right_owed, right_paid = CompressingOptimizer._owed, CompressingOptimizer._paid

        def inverse(self, state):
            new = right_owed(self, state)
            if new is state.exchange:
                return new
            factor = (state.numbers["feedback_rate"] / self.rate(state)) ** -2
            return new._replace(
                worker=tuple(factor * e for e in new.worker), server=tuple(factor * e for e in new.server)
            )

        def worker_alone(self, state):
            return right_owed(self, state)._replace(server=state.exchange.server)

        def forgetful(self, state, means):
            return right_paid(self, state, means)._replace(numbers={"feedback_rate": 0.1})

        for name, wrong in (("_owed", inverse), ("_owed", worker_alone), ("_paid", forgetful)):
            with monkeypatch.context() as patch:
                patch.setattr(CompressingOptimizer, name, wrong)
                off, _ = follow(job, grads, sgd(), 2)
            assert max(np.abs(d).max() for each in off for d in each) > 1e-3


class TestOptimizers:
    @pytest.mark.parametrize("kind", [qcomp.OneBitAdam, qcomp.OneBitLamb, qcomp.QAdam])
    def test_frozen_adam_compresses_the_rescaled_residual(self, job, grads, kind):
        """The step after a change is that of a state whose residuals the caller has rescaled."""

        def halved(step: int) -> float:
            return 0.1 if step < 4 else 0.025

        settings = {"learning_rate": halved, "betas": (0.9, 0.9), "freeze": 2, "exact": None}
        settings["compressor"] = qcomp.ScaledSign(8)
        run = job(kind(**settings, rescale_feedback=True), grads(SHAPES, 99, 0), 2)
        plain = job(kind(**settings), grads(SHAPES, 99, 0), 2)
        for step in range(5):
            if step == 4:
                assert run.fingerprint() == plain.fingerprint()
                unscaled = plain.states
                plain.states = [
                    s._replace(
                        exchange=s.exchange._replace(
                            worker=tuple(4 * e for e in s.exchange.worker),
                            server=tuple(4 * e for e in s.exchange.server),
                        )
                    )
                    for s in unscaled
                ]
            of_ranks = [grads(SHAPES, rank, step) for rank in range(2)]
            run.step(of_ranks)
            plain.step(of_ranks)
        assert run.fingerprint() == plain.fingerprint()
        assert run.state.numbers["feedback_rate"] == 0.025

    def test_a_skipped_step_remembers_nothing(self, job, grads):
        run = job(sgd(nonfinite="skip"), grads(SHAPES, 99, 0), 2)
        for step in range(2):
            run.step([grads(SHAPES, rank, step) for rank in range(2)])
        before = run.fingerprint()
        bad = grads(SHAPES, 1, 2)
        bad[0][0] = np.inf
        run.step([grads(SHAPES, 0, 2), bad])
        assert run.fingerprint() == before
        assert run.state.numbers == {"feedback_rate": 0.1}

    def test_libraries(self, job, grads, library):
        opt, params = sgd(learning_rate=lambda step: 0.1 * 0.5**step), grads(SHAPES[:1], 99, 0)
        run, reference = job(opt, [library.array(p) for p in params], 2), job(opt, params, 2)
        for step in range(2):
            of_ranks = [grads(SHAPES[:1], rank, step) for rank in range(2)]
            reference.step(of_ranks)
            run.step([[library.array(g) for g in gs] for gs in of_ranks])
        assert run.fingerprint() == reference.fingerprint()

    def test_a_checkpoint_between_two_rates(self, grads):
        opt = sgd()

        def rank_main(comm, stop):
            params = grads(SHAPES, 99, 0)
            state = opt.init(params, comm)
            for step in range(4):
                if step == stop:
                    saved = opt.state_dict(state)
                    assert saved["number.feedback_rate"] == 0.1
                    state = opt.load_state_dict(saved, params, comm)
                params, state = opt.step(params, grads(SHAPES, comm.rank, step), state, comm)
            return [p.tobytes() for p in params]

        whole, stopped = (run_local(2, lambda comm, at=at: rank_main(comm, at)) for at in (None, 2))
        assert whole == stopped

    def test_nothing_is_kept_without_it(self):
        comm = LocalCommunicator.alone()
        assert "feedback_rate" not in sgd(rescale_feedback=False).init(np.ones(4), comm).numbers

    @pytest.mark.parametrize(
        ("make", "message"),
        [
            (lambda: sgd(feedback=False), "rescale_feedback is True and feedback is False"),
            (
                lambda: qcomp.ZeroOneAdam(learning_rate=0.1, rescale_feedback=True),
                "rescale_feedback is True; expected False: the exchanged sums contain the learning rates already",
            ),
        ],
    )
    def test_where_it_means_nothing(self, make, message):
        with pytest.raises(ValueError, match=message):
            make()
