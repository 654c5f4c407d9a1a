"""A report agrees with NumPy on the states and gradients of all ranks, and reporting does not change the step."""

import dataclasses
import math
import re
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

import qcomp
from qcomp.comm import LocalCommunicator, run_local
from qcomp.core.checkpoint.format import named_arrays

SHAPES = [(40,), (7, 9), (3,)]
NAMES = ("embedding", "layer/weight", "bias")


def sgd(**chosen: Any) -> qcomp.CompressedSGD:
    """With a rate of 1 and parameters of 0, the mean is exactly minus the new parameters."""
    settings: dict[str, Any] = {
        "learning_rate": 1.0,
        "momentum": 0.0,
        "exact": None,
        "compressor": qcomp.ScaledSign(8),
    }
    return qcomp.CompressedSGD(**settings | chosen)


def one_bit(**chosen: Any) -> qcomp.OneBitAdam:
    settings: dict[str, Any] = {
        "learning_rate": 0.1,
        "betas": (0.9, 0.9),
        "freeze": 2,
        "compressor": qcomp.ScaledSign(8),
    }
    return qcomp.OneBitAdam(exact=qcomp.ExactBelow(10), **settings | chosen)


def gradients(rank: int, step: int, shapes: Sequence[tuple] = SHAPES) -> list[np.ndarray]:
    rng = np.random.default_rng([5, rank, step])
    return [(rng.standard_normal(s) + 0.5).astype(np.float32) for s in shapes]


def run(
    opt: Any,
    size: int,
    *,
    steps: int = 4,
    array: Callable = np.array,
    shapes: Sequence[tuple] = SHAPES,
    **chosen: Any,
) -> list[list]:
    """Return for every rank: (parameters, state before, state after, report, bytes sent) of each step."""
    watched = qcomp.Diagnostics(opt, **{"replicas_every": None} | chosen)

    def rank_main(comm):
        params = [array(np.zeros(s, np.float32)) for s in shapes]
        state, done = opt.init(params, comm, NAMES[: len(shapes)]), []
        for step in range(steps):
            sent, before = comm.bytes_sent, state
            grads = [array(g) for g in gradients(comm.rank, step, shapes)]
            params, state, report = watched.step(params, grads, state, comm)
            done.append((params, before, state, report, comm.bytes_sent - sent))
            if isinstance(opt, qcomp.CompressedSGD):
                params = [p * 0 for p in params]
        return done

    return run_local(size, rank_main, timeout=20)


def flat(arrays: Any) -> np.ndarray:
    return np.concatenate([np.asarray(a, np.float64).reshape(-1) for a in arrays])


class Found:
    """The values that NumPy computes for the last step of a run, on a sample of the compressed tensors."""

    def __init__(
        self, opt: Any, runs: list[list], stride: int, *, shapes: Sequence[tuple] = SHAPES, step: int = 3
    ) -> None:
        last = [done[step] for done in runs]
        kept = [i for i, exact in enumerate(last[0][1].exact) if not exact]
        grads = [flat([gradients(rank, step, shapes)[i] for i in kept]) for rank in range(len(runs))]
        if isinstance(opt, qcomp.CompressedSGD):
            self.signals = grads
            self.mean = -flat([last[0][0][i] for i in kept])
        else:
            momentum = flat([last[0][1].momentum[i] for i in kept])
            self.signals = [0.9 * momentum + 0.1 * g for g in grads]
            self.mean = flat([last[0][2].momentum[i] for i in kept])
        self.exact = np.mean(self.signals, axis=0)
        self.worker = [flat(after.exchange.worker) for _, _, after, *_ in last]
        self.server = []
        starts = np.cumsum([0, *(math.prod(shapes[i]) for i in kept)])
        chunks = opt.mean.layout([shapes[i] for i in kept], rank=0, size=len(runs)).chunks
        for (_, _, after, *_), chunk in zip(last, chunks * (len(last) // len(chunks)), strict=True):
            served = np.full_like(self.exact, np.nan)
            for segment, residual in zip(chunk, after.exchange.server, strict=False):
                start = starts[segment.tensor] + segment.start
                served[start : start + segment.size] = residual
            self.server.append(served)
        self.looked_at = np.arange(self.exact.size) % stride == 0

    def cosine(self, x: np.ndarray, y: np.ndarray) -> float:
        x, y = x[self.looked_at], y[self.looked_at]
        return float(x @ y / np.linalg.norm(x) / np.linalg.norm(y))

    def ratios(self, residuals: list, signals: list) -> list[float]:
        found = []
        for residual, signal in zip(residuals, signals, strict=True):
            here = self.looked_at & ~np.isnan(residual)
            if here.any():
                found.append(float(np.linalg.norm(residual[here]) / np.linalg.norm(signal[here])))
        return found

    def report(self) -> dict[str, float]:
        worker = self.ratios(self.worker, self.signals)
        server = self.ratios(self.server, [self.exact] * len(self.server))
        expected = {
            "cosine": self.cosine(self.mean, self.exact),
            "worker_residual": float(np.mean(worker)),
            "worker_residual_worst": max(worker),
        }
        if server:
            expected |= {"server_residual": float(np.mean(server)), "server_residual_worst": max(server)}
        return expected


def assert_reported(found: dict[str, float], expected: dict[str, float]) -> None:
    """Up to the rounding of float32 tree sums of at most 103 squares, and of a mean of 3: far below 1e-5."""
    measured = {k: v for k, v in found.items() if k not in ("bytes_sent", "bits_per_element")}
    assert measured.keys() == expected.keys()
    for key, value in expected.items():
        assert measured[key] == pytest.approx(value, rel=1e-5), key


@pytest.mark.quick_cases(6)
@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("topology", ["two_phase", "all_gather"])
@pytest.mark.parametrize("make", [sgd, one_bit])
@pytest.mark.parametrize(("sample", "stride"), [(1000, {103: 1, 63: 1}), (10, {103: 11, 63: 7})])
def test_agrees_with_numpy(size, topology, make, sample, stride):
    opt = make(averaging=qcomp.Averaging(topology))
    runs = run(opt, size, sample=sample)
    elements = 103 if make is sgd else 63  # the other elements stay exact
    expected = Found(opt, runs, stride[elements]).report()
    assert_reported(runs[0][3][3], expected)
    assert 0.1 < expected["cosine"] < 0.999
    assert expected["worker_residual"] > 0.1
    for done in runs[1:]:
        assert [repr(step[3]) for step in done] == [repr(step[3]) for step in runs[0]]


class TestDirection:
    """A single one-bit step may point anywhere; the sum of several points where the exact ones point."""

    @staticmethod
    def of(opt, steps, *, direction_steps=10, restart=None, size=2):
        """Return all reports, and NumPy's cosines for all sums of so many steps."""

        def rank_main(comm):
            watched = qcomp.Diagnostics(opt, replicas_every=None, direction_steps=direction_steps)
            params = [np.zeros(s, np.float32) for s in SHAPES]
            state, found, pairs = opt.init(params, comm, NAMES), [], []
            for step in range(steps):
                grads = gradients(comm.rank, step)
                if step == restart:
                    params, state = opt.step(params, grads, state, comm)
                    pairs, found = [], [*found, {}]
                    continue
                before, others = state, [gradients(rank, step) for rank in range(comm.size)]
                params, state, report = watched.step(params, grads, state, comm)
                mean = [sum(g[i] for g in others) / comm.size for i in range(len(SHAPES))]
                if state.stage == before.stage == "compressed":
                    chosen = [i for i, exact in enumerate(state.exact) if not exact]
                    b1 = opt.betas[0]
                    exact = [b1 * before.momentum[i] + (1 - b1) * mean[i] for i in chosen]
                    pairs.append([flat([state.momentum[i] for i in chosen]), flat(exact)])
                expected = None
                if len(pairs) >= direction_steps:
                    ours, theirs = (np.sum(x, axis=0) for x in zip(*pairs[-direction_steps:], strict=True))
                    expected = float(ours @ theirs / np.linalg.norm(ours) / np.linalg.norm(theirs))
                found.append(report | {"expected": expected})
            return found

        reports = run_local(size, rank_main, timeout=30)
        assert [repr(report) for report in reports[0]] == [repr(report) for report in reports[-1]]
        return reports[0]

    @pytest.mark.parametrize("direction_steps", [1, 4])
    def test_agrees_with_numpy(self, direction_steps):
        reports = self.of(one_bit(freeze=2, watch=None), 12, direction_steps=direction_steps)
        compared = [r for r in reports if r["expected"] is not None]
        assert len(compared) == 12 - 2 - direction_steps + 1
        for report in reports:
            assert ("direction" in report) == (report["expected"] is not None)
        for report in compared:
            assert report["direction"] == pytest.approx(report["expected"], rel=1e-4)
            if direction_steps == 1:
                assert report["direction"] == pytest.approx(report["cosine"], rel=1e-6)

    def test_only_of_steps_in_a_row(self):
        """A step without diagnostics restarts the sum."""
        reports = self.of(one_bit(freeze=2, watch=None), 16, direction_steps=4, restart=8)
        assert ["direction" in r for r in reports] == [*[False] * 5, *[True] * 3, *[False] * 4, *[True] * 4]

    def test_is_near_one_where_single_steps_are_not(self):
        """One bit for elements of very different sizes: single steps alternate in sign, but their sum does not."""
        scale = np.logspace(-3, 0, 512)
        opt = qcomp.OneBitAdam(learning_rate=0.0, betas=(0.9, 0.9), freeze=30, exact=None)
        watched, comm = qcomp.Diagnostics(opt, replicas_every=None), LocalCommunicator.alone()
        draws, params = np.random.default_rng(0), np.zeros(512)
        state, found = opt.init(params, comm), []
        for _ in range(130):
            grad = scale * (0.2 + draws.standard_normal(512))
            params, state, report = watched.step(params, grad, state, comm)
            found.append(report)
        last = found[60:]
        assert np.mean([r["cosine"] for r in last]) < 0.3
        assert np.mean([r["direction"] for r in last]) > 0.8


def test_broken_measures_would_differ():
    """The test above distinguishes them from the right ones."""
    opt = sgd()
    runs = run(opt, 3, sample=10)
    found = Found(opt, runs, 11)
    right, reported = found.report(), runs[0][3][3]
    before = [flat(done[3][1].exchange.worker) for done in runs]
    own = Found(opt, runs, 1)
    broken = [
        right | {"cosine": found.cosine(found.mean, found.signals[0])},  # one rank's gradient, not the mean
        right | {"cosine": found.cosine(found.mean, found.exact + found.worker[0])},  # after feedback
        right | {"worker_residual": np.mean(found.ratios(before, found.signals))},  # of the step before
        right | {"worker_residual_worst": min(found.ratios(found.worker, found.signals))},
        right | {"server_residual": np.mean(found.ratios(found.server, found.signals))},
        own.report(),  # over all elements instead of the sample
    ]
    assert_reported(reported, right)
    for each in broken:
        with pytest.raises(AssertionError):
            assert_reported(reported, each)


@pytest.mark.quick_cases(4)
@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize(
    "opt", [sgd(compressor=qcomp.QSGD(7, 16)), one_bit(clip_norm=1.0), qcomp.Adam(learning_rate=0.1)]
)
def test_the_step_is_the_same_without_diagnostics(size, opt):
    """The same parameters and states bit for bit; the reported bytes are those that communicators count for it."""
    runs = run(opt, size, replicas_every=1)

    def rank_main(comm):
        params = [np.zeros(s, np.float32) for s in SHAPES]
        state, done = opt.init(params, comm, NAMES), []
        for step in range(4):
            sent = comm.bytes_sent
            params, state = opt.step(params, gradients(comm.rank, step), state, comm)
            done.append((params, state, comm.bytes_sent - sent))
            if isinstance(opt, qcomp.CompressedSGD):
                params = [p * 0 for p in params]
        return done

    plain = run_local(size, rank_main, timeout=20)
    for rank in range(size):
        for (params, _, state, report, sent), (other, expected, _) in zip(
            runs[rank], plain[rank], strict=True
        ):
            assert [p.tobytes() for p in params] == [p.tobytes() for p in other]
            saved, saved_other = opt.state_dict(state), opt.state_dict(expected)
            assert {k: np.asarray(v).tobytes() for k, v in saved.items()} == {
                k: np.asarray(v).tobytes() for k, v in saved_other.items()
            }
            assert report["drifted_ranks"] == 0
            assert size == 1 or sent > report["bytes_sent"]
    for step in range(4):
        sent = [done[step][2] for done in plain]
        report = runs[0][step][3]
        assert report["bytes_sent"] == max(sent)
        assert report["bits_per_element"] == pytest.approx(8 * np.mean(sent) / 106)


def test_the_bytes_that_diagnostics_send():
    """2 (N - 1) / N * 4 bytes for each element of the sample, rounded up to messages, and 40 to each rank."""
    for size in (2, 3):
        for done in run(sgd(), size, sample=60):
            report, sent = done[3][3], done[3][4]
            exact = 2 * (size - 1) / size * 4 * 36  # every third of 106
            assert 0 <= sent - report["bytes_sent"] - exact - 32 * (size - 1) < 64 * size


def test_every_library(library):
    opt, shapes = one_bit(freeze=1), [(64,)]
    runs = run(opt, 2, steps=3, array=library.array, shapes=shapes, sample=10, replicas_every=2)
    done = [[_as_numpy(library, step) for step in of_rank] for of_rank in runs]
    expected = Found(opt, done, 7, shapes=shapes, step=2).report()
    reports = [step[3] for step in runs[0]]
    assert [report.pop("drifted_ranks", None) for report in reports] == [0, None, 0]
    assert_reported(reports[2], expected)
    assert all(type(value) is float for value in reports[2].values())


def _as_numpy(library: Any, step: tuple) -> tuple:
    params, before, after, *rest = step

    def of(state: Any) -> Any:
        kept = state.exchange
        return state._replace(
            momentum=[library.numpy(m) for m in state.momentum],
            exchange=kept._replace(
                worker=[library.numpy(r) for r in kept.worker], server=[library.numpy(r) for r in kept.server]
            ),
        )

    return [library.numpy(p) for p in params], of(before), of(after), *rest


class TestReplicas:
    """Flip one bit of one parameter on one rank."""

    @staticmethod
    def flipped(opt: Any, size: int, rank: int, tensor: int, **chosen: Any) -> tuple[list, list[str]]:
        watched = qcomp.Diagnostics(opt, **chosen)

        def rank_main(comm):
            params = [np.ones(s, np.float32) for s in SHAPES]
            state, reports = opt.init(params, comm, NAMES), []
            for step in range(4):
                if step == 2 and comm.rank == rank:
                    params = [p.copy() for p in params]
                    params[tensor].reshape(-1).view(np.uint32)[-1] ^= 1
                params, state, report = watched.step(params, gradients(comm.rank, step), state, comm)
                reports.append(report)
            return reports

        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            reports = run_local(size, rank_main, timeout=20)
        told = [w for w in caught if "drifted" in str(w.message)]
        assert {w.filename for w in told} <= {__file__}
        return reports, [str(w.message) for w in told]

    @pytest.mark.parametrize(("rank", "tensor"), [(0, 0), (2, 1), (1, 2)])
    def test_a_flipped_bit_is_found_and_named(self, rank, tensor):
        # A rate of 0 keeps the difference in place, so that only the comparison can find it.
        reports, told = self.flipped(sgd(learning_rate=0.0), 3, rank, tensor, replicas_every=1)
        for of_rank in reports:
            assert [report["drifted_ranks"] for report in of_rank] == [0, 0, 1, 1]
        others = " and ".join(str(r) for r in range(3) if r != rank)
        assert set(told) == {
            f"replicas have drifted apart: after step {step}, rank {rank} and ranks {others} have different values of "
            f"{NAMES[tensor]!r}"
            for step in (2, 3)
        }

    @pytest.mark.parametrize("kind", ["momentum.w", "variance.w"])
    def test_a_moment_of_another_job_is_found_and_named(self, kind):
        """In a warm-up no moment is sent, and parameters may stay alike for long."""
        opt = dataclasses.replace(one_bit(freeze=10, learning_rate=0.0), exact=None)
        watched = qcomp.Diagnostics(opt, replicas_every=1)

        def rank_main(comm):
            params = [np.ones(8, np.float32)]
            state, reports = opt.init(params, comm, ["w"]), []
            for step in range(2):
                if step == 1 and comm.rank == 0:
                    array = dict(named_arrays(state, opt.mean_of(state)))[kind]
                    array.view(np.uint32)[-1] ^= 1
                params, state, report = watched.step(
                    params, [np.full(8, comm.rank + 0.5, np.float32)], state, comm
                )
                reports.append(report["drifted_ranks"])
            return reports

        with pytest.warns(UserWarning, match="have different values of") as caught:
            reports = run_local(3, rank_main, timeout=20)
        assert reports == [[0, 1]] * 3
        assert kind in str(caught[0].message)

    def test_replicas_are_compared_at_the_given_interval(self):
        for every, expected in ((2, [0, None, 1, None]), (3, [0, None, None, 1]), (None, [None] * 4)):
            reports, told = self.flipped(sgd(learning_rate=0.0), 2, 1, 1, replicas_every=every)
            assert [report.get("drifted_ranks") for report in reports[0]] == expected
            assert bool(told) is (1 in expected)

    def test_ranks_that_are_apart_by_design_are_not_compared(self):
        opt = qcomp.ZeroOneAdam(
            learning_rate=0.1,
            betas=(0.9, 0.9),
            exact=None,
            compressor=qcomp.ScaledSign(8),
            variance_steps=qcomp.DoublingIntervals(1),
            sync_steps=qcomp.LocalSteps(1, 3),
            freeze=2,
        )
        watched = qcomp.Diagnostics(opt, replicas_every=1)

        def rank_main(comm):
            params = [np.ones(s, np.float32) for s in SHAPES]
            state, seen = opt.init(params, comm), []
            for step in range(10):
                apart = state.stage == "local"
                params, state, report = watched.step(params, gradients(comm.rank, step), state, comm)
                seen.append((apart, report.get("drifted_ranks"), report["bytes_sent"], "cosine" in report))
            return seen

        seen, _ = run_local(2, rank_main, timeout=20)
        assert {compared for apart, compared, *_ in seen if not apart} == {0.0}
        assert {compared for apart, compared, *_ in seen if apart} == {None}
        assert {(sent > 0, cosine) for _, _, sent, cosine in seen} == {
            (True, True),
            (True, False),
            (False, False),
        }


class TestWhatThereIs:
    """A report contains only what exists to be reported."""

    def test_exact_steps(self):
        runs = run(one_bit(), 2)
        assert set(runs[0][1][3]) == {"bytes_sent", "bits_per_element"}
        assert "cosine" in runs[0][2][3]

    def test_without_feedback_or_servers(self):
        (report, *_) = [
            done[3][3]
            for done in run(sgd(averaging=qcomp.Averaging(feedback=False), compressor=qcomp.QSGD(7, 16)), 2)
        ]
        assert set(report) == {"bytes_sent", "bits_per_element", "cosine"}
        (report, *_) = [done[3][3] for done in run(sgd(averaging=qcomp.Averaging(topology="all_gather")), 2)]
        assert not [key for key in report if "server" in key]

    def test_the_ratio_of_a_watch(self):
        opt = one_bit(betas=(0.9, 0.5), watch=qcomp.VarianceWatch(every=1))
        runs = run(opt, 2, steps=5)
        assert "variance_ratio" not in runs[0][2][3]
        for done in runs:
            assert done[4][3]["variance_ratio"] == done[4][2].numbers["variance_ratio"] > 0

    def test_zeros(self):
        """With zeros only: the residual ratio is zero, and the direction counts as right."""
        opt, comm = sgd(), qcomp.comm.LocalCommunicator.alone()
        params = [np.zeros(s, np.float32) for s in SHAPES]
        _, _, report = qcomp.Diagnostics(opt).step(params, params, opt.init(params, comm), comm)
        assert (report["worker_residual"], report["server_residual"], report["cosine"]) == (0, 0, 1)

    def test_a_skipped_step(self):
        opt = sgd(nonfinite="skip")
        watched = qcomp.Diagnostics(opt)

        def rank_main(comm):
            params = [np.zeros(s, np.float32) for s in SHAPES]
            grads = gradients(comm.rank, 0)
            grads[1][0, 0] = np.nan if comm.rank else 0
            _, state, report = watched.step(params, grads, opt.init(params, comm), comm)
            return state.skipped, sorted(report)

        assert (
            run_local(2, rank_main, timeout=20)
            == [(1, ["bits_per_element", "bytes_sent", "drifted_ranks"])] * 2
        )

    @pytest.mark.parametrize("hosts", ["aab", "abab", "aa"])
    def test_hierarchies(self, hosts):
        """With one rank per node it is two phases; else a rank's ratio refers to its part of its own signal."""
        opt = sgd(averaging=qcomp.Averaging(topology="hierarchical"))
        watched = qcomp.Diagnostics(opt, sample=1000)

        def rank_main(comm):
            params = [np.zeros(s, np.float32) for s in SHAPES]
            grads = gradients(comm.rank, 0)
            params, state, report = watched.step(params, grads, opt.init(params, comm, NAMES), comm)
            return params, grads, state, report

        results = run_local(len(hosts), rank_main, hosts=list(hosts), timeout=20)
        params, _, _, report = results[0]
        exact = np.mean([flat(grads) for _, grads, *_ in results], axis=0)
        mean = -flat(params)
        cosine = mean @ exact / np.linalg.norm(mean) / np.linalg.norm(exact)
        if hosts == "aa":  # then the mean is exact
            assert "worker_residual" not in report
            assert cosine == pytest.approx(1)
        ratios = []
        for _, grads, state, _ in results:
            kept = state.exchange
            parts, _ = (
                opt.mean.layout(kept.shapes, rank=kept.rank, size=kept.size, nodes=kept.nodes).residuals
                if kept.worker
                else ((), ())
            )
            pieces = [grads[p.tensor].reshape(-1)[p.start : p.stop] for p in parts]
            if pieces and flat(pieces).size:
                ratios.append(np.linalg.norm(flat(kept.worker)) / np.linalg.norm(flat(pieces)))
        if ratios:
            assert report["worker_residual"] == pytest.approx(np.mean(ratios), rel=1e-5)
        assert report["cosine"] == pytest.approx(cosine, rel=1e-5)


class TestErrors:
    def test_bad_settings(self):
        for chosen, message in (
            ({"sample": 0}, "sample is 0; expected an integer of at least 1"),
            ({"replicas_every": 0}, "replicas_every is 0; expected an integer of at least 1"),
            ({"replicas_every": 1.5}, "replicas_every is 1.5; expected an integer of at least 1"),
        ):
            with pytest.raises(ValueError, match=re.escape(message)):
                qcomp.Diagnostics(sgd(), **chosen)
        with pytest.raises(TypeError, match=r"optimizer is 'sgd'; expected a qcomp\.Optimizer"):
            qcomp.Diagnostics("sgd")

    def test_a_state_of_another_world_is_an_error(self):
        opt = sgd()
        params = [np.zeros(s, np.float32) for s in SHAPES]
        states = run_local(2, lambda comm: opt.init(params, comm))
        with pytest.raises(ValueError, match="comm is rank 0 of 1; state belongs to rank 0 of 2"):
            qcomp.Diagnostics(opt).step(params, params, states[0], qcomp.comm.LocalCommunicator.alone())

    def test_non_finite_raises_on_all_ranks(self):
        opt = sgd()

        def rank_main(comm):
            params = [np.zeros(s, np.float32) for s in SHAPES]
            grads = [np.full_like(p, np.inf if comm.rank else 1) for p in params]
            with pytest.raises(qcomp.NonFiniteError):
                qcomp.Diagnostics(opt).step(params, grads, opt.init(params, comm), comm)

        run_local(2, rank_main, timeout=20)
