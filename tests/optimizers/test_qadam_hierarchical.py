"""QAdam and other optimizers with the hierarchical mean: the state machine, checkpoints, convergence."""

import io
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import qcomp
from qcomp import MismatchError, NonFiniteError
from qcomp.comm import run_local
from qcomp.core.numeric.arrays import compute_dtype_name
from qcomp.core.optimizers.onebit_adam import OneBitAdam

SHAPES = [(40,), (3, 11), (7,)]
WORLDS = ["aab", "abab", "aaabb", "abbccc"]
FREEZE, BETAS, RATE = 4, (0.8, 0.9), 0.01
HIERARCHICAL = qcomp.Averaging(topology="hierarchical")
MINMAX = qcomp.MinMaxUInt8(bucket_size=16)


def qadam(**changes: Any) -> qcomp.QAdam:
    settings = {"learning_rate": RATE, "betas": BETAS, "freeze": FREEZE, "exact": None, "compressor": MINMAX}
    return qcomp.QAdam(**{**settings, "averaging": HIERARCHICAL, "variance_steps": None, **changes})


OTHERS = {
    "qadam": qadam(),
    "qadam without feedback": qadam(averaging=replace(HIERARCHICAL, feedback=False)),
    "qadam with exact tensors": qadam(exact=qcomp.ExactBelow(20), weight_decay=0.1, clip_norm=3.0),
    "1-bit": qcomp.OneBitAdam(
        learning_rate=RATE,
        betas=BETAS,
        freeze=FREEZE,
        exact=None,
        compressor=qcomp.ScaledSign(16),
        averaging=HIERARCHICAL,
    ),
    "sgd": qcomp.CompressedSGD(
        learning_rate=RATE,
        momentum=0.0,
        exact=None,
        compressor=qcomp.QSGD(7, 16),
        averaging=HIERARCHICAL,
    ),
}


def in_two_phases(opt: Any) -> Any:
    return replace(opt, averaging=replace(opt.averaging, topology="two_phase"))


def begin(job: Callable, opt: Any, params: Sequence[Any], hosts: str) -> Any:
    """Start a job whose ranks take their nodes from these hosts."""
    run = job(opt, params, len(hosts))
    run.states = run_local(len(hosts), lambda comm: opt.init(list(params), comm), hosts=hosts)
    return run


def of_ranks(grads: Callable, size: int, step: int, dtype: type = np.float32) -> list[list[np.ndarray]]:
    return [grads(SHAPES, rank, step, dtype) for rank in range(size)]


def bits(arrays: Sequence[Any]) -> list[bytes]:
    return [np.asarray(a).tobytes() for a in arrays]


def owed(run: Any) -> list[np.ndarray]:
    """Return mean_i e_i over nodes plus e_s of every tensor, flat; all tensors must be compressed."""
    whole = [np.zeros(p.size) for p in run.params[0]]
    for state in (s.exchange for s in run.states):
        where = {"rank": state.rank, "size": state.size, "nodes": state.nodes}
        worker, server = run.opt.mean.layout(state.shapes, **where).residuals
        for part, residual in zip(worker, state.worker, strict=True):
            whole[part.tensor][part.start : part.stop] += residual / len(set(state.nodes))
        for part, residual in zip(server, state.server, strict=True):
            whole[part.tensor][part.start : part.stop] += residual
    return whole


def reference(
    params: list, steps: list[list], *, decay: float = 0.0, lost: int = 0, stops: bool = False
) -> list:
    """Adam with a frozen variance, from mean gradients; optionally broken by a lost step, or a decay that stops."""
    frozen: list[Any] = []
    (b1, b2), m, v = BETAS, [p * 0 for p in params], [p * 0 for p in params]
    for t, means in enumerate(steps, 1):
        for i, g in enumerate(means):
            m[i] = b1 * m[i] + (0 if t == lost else 1 - b1) * g
            if t <= FREEZE:
                v[i] = b2 * v[i] + (0 if t == lost else 1 - b2) * g * g
            root = np.sqrt(v[i] / (1 - b2**t) if t <= FREEZE else frozen[i])
            shrunk = 0.0 if stops and t > FREEZE else decay
            change = (m[i] / (1 - b1**t)) / (root + 1e-8) + shrunk * params[i]
            params = [*params[:i], params[i] - RATE * change, *params[i + 1 :]]
        if t == FREEZE:
            frozen = [x / (1 - b2**t) for x in v]
    return params


class TestName:
    def test_ranks_with_different_topologies_are_an_error(self):
        def rank_main(comm):
            averaging = HIERARCHICAL if comm.rank else qcomp.Averaging()
            with pytest.raises(MismatchError, match=r"settings.topology is .*two_phase.* on rank 0, but"):
                qadam(averaging=averaging).init(np.ones(8), comm)
            return True

        assert run_local(2, rank_main, hosts="ab", timeout=20) == [True] * 2


class TestStages:
    @pytest.mark.quick_cases(2)
    @pytest.mark.parametrize(
        "hosts", [pytest.param(w, marks=[] if w == "abab" else [pytest.mark.slow]) for w in WORLDS]
    )
    @pytest.mark.parametrize("name", OTHERS)
    def test_all_ranks_hold_the_same(self, job, grads, name, hosts):
        """Job.step compares the ranks; and the nodes are still known after the freeze."""
        run = begin(job, OTHERS[name], grads(SHAPES, 99, 0), hosts)
        for step in range(FREEZE + 4):
            run.step(of_ranks(grads, len(hosts), step))
        assert run.state.stage == "compressed"
        assert {s.exchange.nodes for s in run.states} == {tuple(sorted(set(hosts)).index(h) for h in hosts)}

    @pytest.mark.parametrize("hosts", ["aab", "abab"])
    def test_warm_up_is_adam_bit_for_bit(self, job, grads, hosts):
        """In all of its steps, including the one that freezes; the next step is compressed."""
        adam = qcomp.Adam(learning_rate=RATE, betas=BETAS)
        frozen, plain = (begin(job, opt, grads(SHAPES, 99, 0), hosts) for opt in (qadam(), adam))
        for step in range(FREEZE + 1):
            assert frozen.state.stage == ("warmup" if step < FREEZE else "compressed")
            for run in (frozen, plain):
                run.step(of_ranks(grads, len(hosts), step))
            assert (bits(frozen.params[0]) == bits(plain.params[0])) == (step < FREEZE)

    @pytest.mark.parametrize("hosts", ["aaa", "ab", "aaabb"])
    @pytest.mark.parametrize("decay", [0.0, 0.3])
    def test_no_step_is_lost_and_weight_decay_continues(self, job, grads, hosts, decay):
        """Without loss it is Adam with a frozen variance. A lost gradient or a missing decay leads far away from it."""
        params = grads(SHAPES, 99, 0, np.float64)
        run = begin(job, qadam(compressor=qcomp.Identity(), weight_decay=decay), params, hosts)
        steps = []
        for step in range(FREEZE + 4):
            gradients = of_ranks(grads, len(hosts), step, np.float64)
            run.step(gradients)
            steps.append([sum(g) / len(hosts) for g in zip(*gradients, strict=True)])

        def distance(**broken):
            expected = reference(params, steps, decay=decay, **broken)
            return max(np.abs(a - b).max() for a, b in zip(run.params[0], expected, strict=True))

        assert distance() < 1e-12
        assert min(distance(lost=step) for step in range(1, FREEZE + 4)) > 1e-4
        assert (distance(stops=True) > 1e-3) == (decay > 0)

    @pytest.mark.quick_cases(2)
    @pytest.mark.parametrize("hosts", WORLDS)
    @pytest.mark.parametrize("name", ["qadam", "1-bit"])
    def test_identity_of_every_step(self, job, grads, name, hosts):
        """m' + E' = b1 m + (1 - b1) mean_i g_i + E over all ranks, with E = mean_i e_i over nodes + e_s."""
        self.check_identity(job, grads, OTHERS[name], hosts)

    def test_nodes_with_momenta_of_their_own_are_caught(self, job, grads, monkeypatch):
        """If the ranks of a node continued from a momentum of their own, the nodes would drift apart."""
        apply = OneBitAdam.apply

        def selfish(self, params, means, state):
            new_params, new = apply(self, params, means, state)
            own = tuple(m + state.exchange.nodes[state.rank] * 1e-7 for m in new.momentum)
            return new_params, new._replace(momentum=own)

        monkeypatch.setattr(OneBitAdam, "apply", selfish)
        with pytest.raises(AssertionError):
            self.check_identity(job, grads, qadam(), "aab")

    @staticmethod
    def check_identity(job, grads, opt, hosts):
        dtype, size, beta1 = np.float64, len(hosts), BETAS[0]
        run = begin(job, opt, grads(SHAPES, 99, 0, dtype), hosts)
        for step in range(FREEZE):
            run.step(of_ranks(grads, size, step, dtype))
        for step in range(FREEZE, FREEZE + 6):
            before = [m + e.reshape(m.shape) for m, e in zip(run.state.momentum, owed(run), strict=True)]
            momenta, errors = run.state.momentum, owed(run)
            gradients = of_ranks(grads, size, step, dtype)
            run.step(gradients)
            after = [m + e.reshape(m.shape) for m, e in zip(run.state.momentum, owed(run), strict=True)]
            for i, total in enumerate(after):
                mean = sum(g[i] for g in gradients) / size
                expected = beta1 * momenta[i] + (1 - beta1) * mean + errors[i].reshape(mean.shape)
                scale = max(np.abs(before[i]).max(), np.abs(expected).max(), 1.0)
                assert np.abs(total - expected).max() <= 1e-12 * scale
        assert max(np.abs(e).max() for e in owed(run)) > 1e-4

    def test_on_one_node_nothing_is_compressed(self, job, grads):
        same = [
            qadam(),
            qadam(compressor=qcomp.Identity()),
            qadam(compressor=qcomp.QSGD(1, 16), averaging=replace(HIERARCHICAL, feedback=False)),
        ]
        runs = [begin(job, opt, grads(SHAPES, 99, 0), "aaa") for opt in same]
        for step in range(FREEZE + 4):
            for run in runs:
                run.step(of_ranks(grads, 3, step))
        assert len({b"".join(bits(run.params[0])) for run in runs}) == 1
        assert runs[0].state.exchange.worker == ()

    @pytest.mark.quick_cases(2)
    @pytest.mark.parametrize("hosts", ["ab", "abc"])
    @pytest.mark.parametrize("name", OTHERS)
    def test_on_nodes_of_one_rank_it_is_two_phases(self, job, grads, name, hosts):
        runs = [
            begin(job, opt, grads(SHAPES, 99, 0), hosts)
            for opt in (OTHERS[name], in_two_phases(OTHERS[name]))
        ]
        for step in range(FREEZE + 3):
            for run in runs:
                run.step(of_ranks(grads, len(hosts), step))
        assert runs[0].fingerprint() == runs[1].fingerprint()

    @pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
    def test_gradients_of_half_precision(self, job, dtype):
        torch = pytest.importorskip("torch")
        half = getattr(torch, dtype)
        x = torch.ones(40, dtype=half)
        run = begin(job, qadam(freeze=1), [x], "aab")
        for step in range(3):
            run.step([[torch.linspace(rank + 1, step + 3, 40).to(half)] for rank in range(3)])
        assert run.params[0][0].dtype == half
        assert str(run.state.momentum[0].dtype).endswith(compute_dtype_name(dtype))

    @pytest.mark.parametrize("bad", [0, 2, 4])
    def test_a_skipped_step_changes_nothing(self, job, grads, bad):
        """For a bad value on a leader, on a rank beyond the lanes, and on a rank of the other node."""
        run = begin(job, qadam(nonfinite="skip"), grads(SHAPES, 99, 0), "aaabb")
        for step in range(FREEZE + 2):
            run.step(of_ranks(grads, 5, step))
        before = run.fingerprint()
        gradients = of_ranks(grads, 5, FREEZE + 2)
        gradients[bad][1][2, 3] = np.nan
        run.step(gradients)
        assert run.fingerprint() == before
        assert [s.skipped for s in run.states] == [1] * 5
        raising = replace(run.opt, nonfinite="raise")
        errors = run.lockstep(
            [raising.stages(p, g, s) for p, g, s in zip(run.params, gradients, run.states, strict=True)],
            catch=NonFiniteError,
        )
        blamed = (
            f"the gradient of '1' on rank {bad} is not finite, or too large to compress, in step {FREEZE + 3}"
        )
        assert {str(e) for e in errors} == {blamed}


class TestCheckpoint:
    @pytest.mark.quick_cases(2)
    @pytest.mark.parametrize("hosts", ["aab", "abab", "aaa"])
    @pytest.mark.parametrize("name", OTHERS)
    @pytest.mark.parametrize("stop", [2, FREEZE, FREEZE + 2])
    def test_goes_on_bit_for_bit(self, grads, name, hosts, stop):
        opt = OTHERS[name]

        def held(params, state):
            kept = (*params, *state.momentum, *state.variance, *state.exchange.worker, *state.exchange.server)
            return bits(kept), state.step, state.stage, state.exchange.nodes

        def rank_main(comm):
            def train(params, state):
                for step in range(state.step, state.step + 3):
                    params, state = opt.step(params, grads(SHAPES, comm.rank, step), state, comm)
                return params, state

            params = grads(SHAPES, 99, 0)
            state = opt.init(params, comm)
            while state.step < stop:
                params, state = opt.step(params, grads(SHAPES, comm.rank, state.step), state, comm)
            file = io.BytesIO()
            np.savez(file, **opt.state_dict(state))
            file.seek(0)
            loaded = opt.load_state_dict(np.load(file, allow_pickle=False), params, comm)
            assert held(params, loaded) == held(params, state)
            assert held(*train(params, loaded)) == held(*train(params, state))
            return True

        assert run_local(len(hosts), rank_main, hosts=hosts, timeout=20) == [True] * len(hosts)

    def test_residuals_are_named_by_their_position(self):
        """Rank 1 holds the second half of its node's buckets, and serves the first half of these."""
        opt, x = qadam(freeze=1), [np.ones(64), np.ones(5)]

        def rank_main(comm):
            grads = [g * (comm.rank + 1) for g in x]
            params, state = opt.step(x, grads, opt.init(x, comm, ["w", "b"]), comm)
            saved = opt.state_dict(opt.step(params, grads, state, comm)[1])
            return {key: value.shape for key, value in saved.items() if "residual" in key}

        names = run_local(5, rank_main, hosts="aaabb")
        # Five buckets in lanes of three and two, in chunks of two or one.
        assert names[0] == {
            "worker_residual.w": (48,),
            "worker_residual.b": (0,),
            "server_residual.w@0": (32,),
        }
        assert names[4] == {
            "worker_residual.w@48": (16,),
            "worker_residual.b": (5,),
            "server_residual.b@0": (5,),
        }
        assert names[2] == {"worker_residual.w": (0,), "worker_residual.b": (0,)}

    def test_other_nodes_are_refused(self, grads):
        """If a rank has other lanes now, its state is refused instead of being used in the wrong place."""
        opt = qadam(freeze=1)

        def save(comm):
            params = grads(SHAPES, 99, 0)
            own = grads(SHAPES, 99, comm.rank)
            return opt.state_dict(opt.step(params, own, opt.init(params, comm), comm)[1])

        saved = run_local(4, save, hosts="aabb")

        def load(comm):
            params = grads(SHAPES, 99, 0)
            with pytest.raises((ValueError, MismatchError)) as caught:
                opt.load_state_dict(saved[comm.rank], params, comm)
            return type(caught.value) is ValueError and "which this optimizer does not keep" in str(
                caught.value
            )

        assert any(run_local(4, load, hosts="abab", timeout=20))

    @pytest.mark.parametrize("hosts", ["abb", "ab", "aabbcc"])
    def test_with_other_nodes_the_owed_amount_is_kept(self, grads, hosts):
        """All dicts of two nodes of two ranks resume elsewhere: mean_i e_i + e_s is unchanged."""
        opt = qadam()
        params = grads(SHAPES, 99, 0, np.float64)

        class Ranks:
            def __init__(self, states):
                self.opt, self.states, self.params = opt, states, [params]

        def save(comm):
            new, state = params, opt.init(params, comm)
            for step in range(FREEZE + 3):
                new, state = opt.step(new, grads(SHAPES, comm.rank, step, np.float64), state, comm)
            return state

        old = run_local(4, save, hosts="aabb")
        saved = [opt.state_dict(state) for state in old]

        def load(comm):
            return opt.load_state_dict(saved, params, comm)

        with pytest.warns(UserWarning, match="resumes with"):
            new = run_local(len(hosts), load, hosts=hosts, timeout=20)
        before, after = owed(Ranks(old)), owed(Ranks(new))
        assert max(np.abs(e).max() for e in before) > 1e-4
        for a, b in zip(before, after, strict=True):
            assert np.abs(a - b).max() <= 1e-14 * max(1.0, np.abs(a).max())


class TestConvergence:
    """Ill-conditioned least squares, with a quarter of the data and a noisy gradient on each of four ranks."""

    @staticmethod
    def final(job, **changes: Any) -> float:
        rng = np.random.default_rng(3)
        a = rng.standard_normal((4, 64, 24)) * np.geomspace(1, 0.1, 24)
        target = rng.standard_normal(24)
        settings = {"learning_rate": lambda step: 0.05 / (1 + step / 50), "betas": (0.9, 0.99), "freeze": 40}
        opt = qadam(**{**settings, "compressor": qcomp.MinMaxUInt8(8), **changes})
        run = begin(job, opt, [np.zeros(24)], "aabb")
        for step in range(100):
            rows = np.random.default_rng(step).integers(64, size=(4, 16))
            picked = [(a[r][rows[r]], run.params[0][0]) for r in range(4)]
            run.step([[2 * m.T @ (m @ (x - target)) / 16] for m, x in picked])
        return sum(float(np.mean((a[r] @ (run.params[0][0] - target)) ** 2)) for r in range(4)) / 4

    @pytest.mark.slow
    def test_ends_like_two_phases_and_no_compression(self, job):
        exact = self.final(job, compressor=qcomp.Identity())
        assert exact == pytest.approx(0.116, rel=0.05)
        assert self.final(job) == pytest.approx(exact, rel=1e-3)
        assert self.final(job, averaging=qcomp.Averaging()) == pytest.approx(exact, rel=1e-3)

    @pytest.mark.slow
    def test_feedback_is_what_makes_one_bit_converge(self, job):
        """So the residuals between nodes matter: 0.24 with them, 0.25 in two phases, 0.44 without."""
        sign = qcomp.ScaledSign(8)
        with_feedback = self.final(job, compressor=sign)
        assert with_feedback == pytest.approx(0.244, rel=0.1)
        assert with_feedback < 0.7 * self.final(
            job, compressor=sign, averaging=replace(HIERARCHICAL, feedback=False)
        )
