"""SGD with momentum on a compressed mean: equal to torch's without loss, and the sum identity with loss."""

import numpy as np
import pytest

import qcomp
from qcomp.comm import run_local

SHAPES = [(40,), (3, 11), ()]


def sgd(**changes) -> qcomp.CompressedSGD:
    return qcomp.CompressedSGD(
        **{"learning_rate": 0.05, "exact": None, "compressor": qcomp.QSGD(7, 16), **changes}
    )


class TestReference:
    @pytest.mark.quick_cases(7)
    @pytest.mark.parametrize("size", [1, 3])
    @pytest.mark.parametrize(("momentum", "nesterov"), [(0.0, False), (0.9, False), (0.9, True), (0.5, True)])
    @pytest.mark.parametrize("decay", [0.0, 0.1])
    def test_equals_sgd_of_torch_without_compression(self, job, grads, size, *, momentum, nesterov, decay):
        torch = pytest.importorskip("torch")
        params = grads(SHAPES, 99, 0, np.float64)
        leaves = [torch.from_numpy(np.array(p)).requires_grad_() for p in params]
        theirs = torch.optim.SGD(leaves, lr=0.05, momentum=momentum, nesterov=nesterov, weight_decay=decay)
        opt = sgd(compressor=qcomp.Identity(), momentum=momentum, nesterov=nesterov, weight_decay=decay)
        ours = job(opt, params, size)
        for step in range(15):
            of_ranks = [grads(SHAPES, rank, step, np.float64) for rank in range(size)]
            for i, leaf in enumerate(leaves):
                leaf.grad = torch.from_numpy(np.asarray(sum(g[i] for g in of_ranks) / size))
            theirs.step()
            ours.step(of_ranks)
        for leaf, p in zip(leaves, ours.params[0], strict=True):
            assert np.abs(leaf.detach().numpy() - p).max() <= 1e-12 * max(1, np.abs(p).max())

    def test_plain_sgd_makes_the_same_steps(self, job, grads):
        """Bit for bit the steps of CompressedSGD with a lossless compressor."""
        settings = {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1, "clip_norm": 3.0}
        runs = [
            job(opt, grads(SHAPES, 99, 0), 3)
            for opt in (
                qcomp.SGD(learning_rate=0.05, **settings),
                sgd(compressor=qcomp.Identity(), **settings),
            )
        ]
        for step in range(5):
            for run in runs:
                run.step([grads(SHAPES, rank, step) for rank in range(3)])
        one, other = ([np.asarray(p).tobytes() for p in run.params[0]] for run in runs)
        assert one == other

    def test_variants_differ(self, job, grads):
        """The cases above are different optimizers."""
        finals = set()
        for changes in (
            {"momentum": 0.0},
            {},
            {"nesterov": True},
            {"weight_decay": 0.1},
            {"learning_rate": 0.04},
        ):
            run = job(sgd(compressor=qcomp.Identity(), **changes), grads(SHAPES, 99, 0), 1)
            for step in range(3):
                run.step([grads(SHAPES, 0, step)])
            finals.add(run.params[0][0].tobytes())
        assert len(finals) == 5


class TestCompressed:
    @pytest.mark.quick_cases(1)
    @pytest.mark.parametrize(
        "opt",
        [
            sgd(),
            sgd(compressor=qcomp.ScaledSign(16), momentum=0.0),
            sgd(compressor=qcomp.Scaled(qcomp.QSGD(3, 64)), momentum=0.0),
            sgd(averaging=qcomp.Averaging(topology="all_gather", feedback=False)),
            sgd(exact=qcomp.ExactBelow(20), weight_decay=0.1, clip_norm=2.0),
            sgd(exact=qcomp.ExactBelow(20), averaging=qcomp.Averaging(topology="all_gather")),
        ],
        ids=lambda o: f"{o.compressor}-{o.mean.topology}-{bool(o.exact)}",
    )
    @pytest.mark.parametrize("size", [pytest.param(1, marks=pytest.mark.slow), 3])
    def test_all_ranks_hold_the_same_and_converge(self, job, grads, opt, size):
        """Least squares towards the mean of the ranks' targets; Job.step compares the ranks."""
        targets = [grads(SHAPES, rank, 0) for rank in range(size)]
        run = job(opt, [np.zeros(s, dtype=np.float32) for s in SHAPES], size)
        for _ in range(30):
            run.step([[p - t for p, t in zip(run.params[0], ts, strict=True)] for ts in targets])
        assert run.state.stage == "compressed"
        assert run.state.step == 30
        for i, p in enumerate(run.params[0]):
            target = sum(t[i] for t in targets) / size
            assert np.linalg.norm(p - target) < 0.5 * np.linalg.norm(target)

    @pytest.mark.parametrize("compressor", [qcomp.QSGD(7, 16), qcomp.ScaledSign(16)], ids=str)
    def test_the_missing_part_is_in_the_residuals(self, job, grads, compressor):
        """Without momentum x_T = x_0 - rate (sum of exact means - E), E = mean_i e_i + e_s."""
        opt = sgd(momentum=0.0, compressor=compressor)
        run = job(opt, grads(SHAPES, 99, 0, np.float64), 3)
        expected = [np.array(p) for p in run.params[0]]
        for step in range(10):
            of_ranks = [grads(SHAPES, rank, step, np.float64) for rank in range(3)]
            run.step(of_ranks)
            expected = [p - 0.05 * sum(g[i] for g in of_ranks) / 3 for i, p in enumerate(expected)]
            for p, e, x in zip(expected, run.error(), run.params[0], strict=True):
                assert np.abs(x - (p + 0.05 * e.reshape(p.shape))).max() < 1e-12

    def test_no_momentum_is_kept_without_momentum(self):
        state = sgd(momentum=0.0).initial_state([np.zeros(4)], ("0",), rank=0, size=1)
        assert state.momentum == state.variance == ()

    def test_bytes_from_the_first_step_on(self):
        opt, x = sgd(compressor=qcomp.QSGD(7, 128)), np.ones(4096, dtype=np.float32)

        def rank_main(comm):
            state, params, sent = opt.init(x, comm), x, []
            for _ in range(2):
                before = comm.bytes_sent
                params, state = opt.step(params, x * (comm.rank + 1), state, comm)
                sent.append(comm.bytes_sent - before)
            return sent

        of_step = 4096 // 2 + 32 * 4 + 2 * 8
        assert run_local(2, rank_main) == [[of_step + 4, of_step]] * 2  # the first step compares gradients


class TestArguments:
    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ({"momentum": 1.0}, "momentum is 1.0; expected a number from 0 to below 1"),
            ({"momentum": -0.1}, "momentum is -0.1"),
            ({"momentum": 0.0, "nesterov": True}, "nesterov is True and momentum is 0"),
            ({"compressor": qcomp.QSGD(1, 128)}, r"feedback=True around qsgd.*qcomp\.Scaled"),
        ],
    )
    def test_out_of_range(self, arguments, message):
        with pytest.raises(ValueError, match=message):
            sgd(**arguments)

    @pytest.mark.parametrize(
        ("make", "error", "message"),
        [
            (lambda: qcomp.Averaging(topology="no_topology"), ValueError, "topology is 'no_topology'"),
            (lambda: sgd(averaging="ring"), TypeError, r"averaging is 'ring'; expected a qcomp.Averaging"),
            (lambda: qcomp.Adam(learning_rate=0.1, topology="ring"), TypeError, "unexpected keyword"),  # type: ignore[call-arg]  # wrong on purpose
            (lambda: qcomp.EF21SGD(learning_rate=0.1, feedback=False), TypeError, "unexpected keyword"),  # type: ignore[call-arg]  # wrong on purpose
        ],
    )
    def test_bad_averaging_settings(self, make, error, message):
        with pytest.raises(error, match=message):
            make()

    def test_the_default_is_a_contraction(self):
        opt = qcomp.CompressedSGD(learning_rate=0.1)
        assert opt.mean.feedback
        assert opt.compressor.traits.omega < 1
