"""Adam on the exact mean gradient, bit for bit; and clipping, schedules and arguments, as in all optimizers."""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

import qcomp
from qcomp.comm import LocalCommunicator, run_local
from qcomp.core.numeric.arrays import host_bytes
from qcomp.testing.libraries import to_numpy

SHAPES = [(3, 5), (), (17,)]


def reference_adam(opt: qcomp.Adam, params: list, steps: list[list], *, sqrt: Any = np.sqrt) -> list:
    """Plain Adam with decoupled weight decay and one gradient per step, as in the papers.

    Returns the parameters, the momenta and the variances.
    """
    b1, b2 = opt.betas
    m, v = ([p * 0 for p in params] for _ in range(2))
    for t, grads in enumerate(steps, 1):
        rate = opt.learning_rate(t - 1) if callable(opt.learning_rate) else opt.learning_rate
        for i, g in enumerate(grads):
            m[i] = b1 * m[i] + (1 - b1) * g
            v[i] = b2 * v[i] + (1 - b2) * (g * g)
            direction = (m[i] / (1 - b1**t)) / (sqrt(v[i] / (1 - b2**t)) + opt.eps)
            if opt.weight_decay:
                direction = direction + opt.weight_decay * params[i]
            params = [*params[:i], params[i] - rate * direction, *params[i + 1 :]]
    return [*params, *m, *v]


def rank_order_mean(values: list[list]) -> list:
    """Return the mean of each tensor over the ranks, added in rank order."""
    totals = values[0]
    for other in values[1:]:
        totals = [a + b for a, b in zip(totals, other, strict=True)]
    return [t / t.dtype.type(len(values)) for t in totals]


def start_params(grads, dtype: type = np.float32) -> list[np.ndarray]:
    return grads(SHAPES, 99, 0, dtype)


def same_bits(a: list, b: list) -> bool:
    return [host_bytes(x) for x in a] == [host_bytes(x) for x in b]


def everything(run) -> list:
    return [*run.params[0], *run.state.momentum, *run.state.variance]


OPTIMIZERS = [
    qcomp.Adam(learning_rate=0.01),
    qcomp.Adam(learning_rate=0.01, weight_decay=0.1, betas=(0.8, 0.95), eps=1e-3),
    qcomp.Adam(learning_rate=lambda step: 0.1 / (step + 1), betas=(0.0, 0.9)),
]


class TestReference:
    @pytest.mark.quick_cases(8)
    @pytest.mark.parametrize("opt", OPTIMIZERS)
    @pytest.mark.parametrize("size", [1, 2, 3])
    @pytest.mark.parametrize("dtype", [np.float32, np.float64])
    def test_bit_equal(self, job, grads, opt, size, dtype):
        params = start_params(grads, dtype)
        run = job(opt, params, size)
        history = []
        for step in range(12):
            of_ranks = [grads(SHAPES, rank, step, dtype) for rank in range(size)]
            history.append(rank_order_mean(of_ranks))
            run.step(of_ranks)
        assert same_bits(everything(run), reference_adam(opt, params, history))
        assert run.state.step == 12
        assert run.state.stage == "warmup"

    @pytest.mark.parametrize("opt", OPTIMIZERS)
    def test_bit_equal_in_torch(self, job, grads, opt):
        torch = pytest.importorskip("torch")
        params = [torch.from_numpy(np.asarray(p)) for p in start_params(grads)]
        history = [[torch.from_numpy(np.asarray(g)) for g in grads(SHAPES, 0, step)] for step in range(12)]
        run = job(opt, params, 1)
        for gradients in history:
            run.step([gradients])

        def rounded_correctly(x):  # torch's own float32 root on the CPU is sometimes off by an ulp
            return torch.sqrt(x.double()).to(x.dtype)

        assert same_bits(everything(run), reference_adam(opt, params, history, sqrt=rounded_correctly))

    @pytest.mark.parametrize("decay", [0.0, 0.1])
    def test_equals_adamw_of_torch(self, job, grads, decay):
        """An independent Adam, equal up to the order of operations in float64."""
        torch = pytest.importorskip("torch")
        leaves = [
            torch.from_numpy(np.asarray(p)).clone().requires_grad_() for p in start_params(grads, np.float64)
        ]
        theirs = torch.optim.AdamW(leaves, lr=0.01, betas=(0.9, 0.99), eps=1e-6, weight_decay=decay)
        ours = job(
            qcomp.Adam(learning_rate=0.01, betas=(0.9, 0.99), eps=1e-6, weight_decay=decay),
            start_params(grads, np.float64),
            1,
        )
        for step in range(20):
            gradients = grads(SHAPES, 0, step, np.float64)
            for leaf, g in zip(leaves, gradients, strict=True):
                leaf.grad = torch.from_numpy(np.asarray(g))
            theirs.step()
            ours.step([gradients])
        for leaf, p in zip(leaves, ours.params[0], strict=True):
            assert np.abs(leaf.detach().numpy() - p).max() < 1e-12

    def test_another_order_of_operations_is_caught(self, job, grads):
        """The same formula with one rounding in another place: m + (1 - b1) (g - m)."""
        run = job(OPTIMIZERS[0], start_params(grads), 1)
        other = [0 * p for p in run.params[0]]
        for step in range(12):
            gradients = grads(SHAPES, 0, step)
            run.step([gradients])
            other = [m + (1 - 0.9) * (g - m) for m, g in zip(other, gradients, strict=True)]
        assert np.abs(other[2] - run.state.momentum[2]).max() < 1e-6
        assert not same_bits(other, list(run.state.momentum))

    def test_constant_gradients_move_by_the_rate(self, job):
        """With bias correction, each step moves by the learning rate, from the first step on."""
        run = job(qcomp.Adam(learning_rate=0.25, eps=0.0), [np.zeros(3)], 1)
        for step in range(1, 5):
            run.step([[np.asarray([2.0, -3.0, 1e-3])]])
            assert run.params[0][0] == pytest.approx(np.asarray([-1, 1, -1]) * 0.25 * step, rel=1e-13)


class TestLibraries:
    @pytest.mark.quick_cases(2)
    @pytest.mark.parametrize(
        "opt",
        [
            qcomp.Adam(learning_rate=0.01, weight_decay=0.1, clip_norm=2.0),
            qcomp.OneBitAdam(
                learning_rate=0.01, freeze=2, exact=qcomp.ExactBelow(10), compressor=qcomp.ScaledSign(16)
            ),
            qcomp.CompressedSGD(learning_rate=0.01, exact=None, compressor=qcomp.QSGD(7, 16), nesterov=True),
        ],
        ids=lambda opt: type(opt).__name__,
    )
    def test_every_library_gives_the_same_result(self, lockstep, grads, library, opt):
        """Identical on the ranks of one library; equal between libraries up to rounding. No input is written to."""
        shapes = [(16,), (2, 8)]

        def train(array, seal):
            params = [seal([array(p) for p in grads(shapes, 99, 0)]) for _ in range(2)]
            states = seal([opt.initial_state(params[0], ("a", "b"), rank, 2) for rank in range(2)])
            for step in range(4):
                gradients = [[array(g) for g in grads(shapes, rank, step)] for rank in range(2)]
                results = seal(
                    lockstep([opt.stages(p, g, s) for p, g, s in zip(params, gradients, states, strict=True)])
                )
                params, states = zip(*results, strict=True)
            assert same_bits(params[0], params[1])
            assert all(type(p) is type(array(np.zeros(1))) for p in params[0])
            return [to_numpy(p) for p in params[0]]

        got = train(library.array, library.seal)
        expected = train(np.asarray, lambda value: value)
        for one, other in zip(got, expected, strict=True):
            assert one.dtype == other.dtype
            # One bit rounded the other way would show as about a learning rate of 0.01.
            assert np.abs(one - other).max() < 1e-5

    @pytest.mark.parametrize("name", ["float16", "bfloat16"])
    @pytest.mark.filterwarnings("ignore:all . ranks have the same gradients")
    def test_half_precision_parameters_have_moments_in_float32(self, job, name):
        torch = pytest.importorskip("torch")
        dtype = getattr(torch, name)
        run = job(qcomp.Adam(learning_rate=0.1), [torch.ones(5, dtype=dtype)], 2)
        run.step([[torch.full((5,), 0.5, dtype=dtype)]] * 2)
        assert run.params[0][0].dtype == dtype
        assert run.state.momentum[0].dtype == run.state.variance[0].dtype == torch.float32
        assert run.params[0][0].tolist() == torch.full((5,), 0.9, dtype=dtype).tolist()

    def test_parameters_that_require_gradients(self, job):
        torch = pytest.importorskip("torch")
        leaf = torch.ones(4, requires_grad=True)
        (leaf**2).sum().backward()
        opt = qcomp.CompressedSGD(learning_rate=0.1, exact=None, compressor=qcomp.ScaledSign(8))
        comm = LocalCommunicator.alone()
        params, state = opt.step(leaf, leaf.grad, opt.init(leaf, comm), comm)
        assert not params.requires_grad
        assert not state.momentum[0].requires_grad
        assert leaf.tolist() == [1.0] * 4

    def test_an_array_and_a_list(self):
        opt, comm = qcomp.Adam(learning_rate=0.1), LocalCommunicator.alone()
        x = np.ones((2, 3))
        one, _ = opt.step(x, x, opt.init(x, comm), comm)
        several, _ = opt.step([x], (x,), opt.init([x], comm), comm)
        assert one.shape == (2, 3)
        assert isinstance(several, list)
        assert (one == several[0]).all()
        assert (x == 1).all()


SCALES: list[tuple[int, float]] = []


@dataclass(frozen=True, kw_only=True)
class Recording(qcomp.Adam):
    """An Adam that records the factor by which each rank scales its gradients."""

    def prepare(self, grads: Any, state: Any, *, scale: float = 1.0) -> Any:
        SCALES.append((state.rank, scale))
        return super().prepare(grads, state, scale=scale)


class TestClipping:
    @pytest.mark.parametrize("size", [1, 2, 3])
    @pytest.mark.parametrize(("dtype", "rel"), [(np.float64, 1e-14), (np.float32, 1e-6)])
    def test_all_ranks_use_one_factor_which_brings_the_norm_down(self, job, grads, size, dtype, rel):
        clip = 1.5
        run = job(Recording(learning_rate=0.1, clip_norm=clip), start_params(grads, dtype), size)
        # The norms of the ranks differ by orders of magnitude.
        of_ranks = [[g * dtype(10.0**rank) for g in grads(SHAPES, rank, 0, dtype)] for rank in range(size)]
        SCALES.clear()
        run.step(of_ranks)
        squares = [math.fsum(float(x) ** 2 for g in gs for x in g.ravel()) for gs in of_ranks]
        norm = math.sqrt(sum(squares) / size)
        assert norm > clip
        assert [rank for rank, _ in SCALES] == list(range(size))
        assert len({scale for _, scale in SCALES}) == 1
        assert SCALES[0][1] == pytest.approx(clip / norm, rel=rel)
        expected = [0.1 * sum(gs[i] for gs in of_ranks) / size * clip / norm for i in range(len(SHAPES))]
        for got, want in zip(run.state.momentum, expected, strict=True):
            assert got == pytest.approx(want, rel=10 * rel, abs=rel)

    def test_a_smaller_norm_is_left_alone(self, job, grads):
        of_ranks = [grads(SHAPES, rank, 0) for rank in range(2)]
        runs = [
            job(qcomp.Adam(learning_rate=0.1, clip_norm=norm), start_params(grads), 2) for norm in (None, 1e3)
        ]
        for run in runs:
            run.step(of_ranks)
        assert same_bits(runs[0].params[0], runs[1].params[0])

    def test_zero_gradients(self, job):
        run = job(qcomp.Adam(learning_rate=0.1, clip_norm=1.0), [np.zeros(3)], 2)
        run.step([[np.zeros(3)]] * 2)
        assert run.params[0][0].tolist() == [0, 0, 0]

    def test_costs_eight_bytes_for_each_peer(self):
        def sent_by(opt):
            def rank_main(comm):
                x = np.ones(100, dtype=np.float32)
                state = opt.init(x, comm)
                before = comm.bytes_sent
                opt.step(x, x * (comm.rank + 1), state, comm)
                return comm.bytes_sent - before

            return run_local(3, rank_main)

        plain, clipped = (sent_by(qcomp.Adam(learning_rate=0.1, clip_norm=norm)) for norm in (None, 1.0))
        assert [b - a for a, b in zip(plain, clipped, strict=True)] == [16, 16, 16]

    def test_clipping_with_a_compressed_momentum(self, job, grads):
        """Clipping by 1.5 / norm gives the same as gradients that were that small from the start."""
        size, clip, dtype = 2, 1.5, np.float64
        opts = [
            qcomp.OneBitAdam(
                learning_rate=0.1, freeze=1, exact=None, clip_norm=norm, compressor=qcomp.ScaledSign(8)
            )
            for norm in (clip, None)
        ]
        runs = [job(opt, start_params(grads, dtype), size) for opt in opts]
        for step in range(3):
            of_ranks = [grads(SHAPES, rank, step, dtype) for rank in range(size)]
            norm = math.sqrt(sum(float((g**2).sum()) for gs in of_ranks for g in gs) / size)
            runs[0].step(of_ranks)
            runs[1].step([[g * (clip / norm) for g in gs] for gs in of_ranks])
        for one, other in zip(runs[0].params[0], runs[1].params[0], strict=True):
            assert one == pytest.approx(other, rel=1e-9)


class TestSchedule:
    def test_gets_the_number_of_completed_steps(self, job):
        seen = []

        def rate(step):
            seen.append(step)
            return 0.5**step

        run = job(qcomp.Adam(learning_rate=rate, eps=0.0), [np.zeros(1)], 1)
        for _ in range(4):
            run.step([[np.ones(1)]])
        assert seen == [0, 1, 2, 3]
        assert run.params[0][0].tolist() == pytest.approx([-1.875])


class TestArguments:
    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ({"learning_rate": -1.0}, "learning_rate is -1.0; expected a finite number >= 0 or a schedule"),
            ({"learning_rate": math.inf}, "learning_rate is inf"),
            ({"learning_rate": "1e-3"}, "learning_rate is '1e-3'"),
            ({"seed": 1.5}, r"seed is 1\.5"),
            ({"learning_rate": math.nan}, "learning_rate is nan"),
            ({"weight_decay": -0.1}, "weight_decay is -0.1; expected a finite number >= 0"),
            ({"clip_norm": 0.0}, "clip_norm is 0.0; expected a number > 0"),
            ({"seed": -1}, "seed is -1; expected an integer from 0 to 2"),
            ({"seed": 2**64}, "seed is 18446744073709551616"),
            ({"nonfinite": "ignore"}, "nonfinite is 'ignore'; expected 'raise' or 'skip'"),
            ({"betas": (0.9, 1.0)}, r"betas is \(0.9, 1.0\); expected two numbers from 0 to below 1"),
            ({"betas": (0.9,)}, "betas is"),
            ({"eps": -1e-8}, "eps is -1e-08; expected a number >= 0"),
        ],
    )
    def test_out_of_range(self, arguments, message):
        with pytest.raises(ValueError, match=message):
            qcomp.Adam(**{"learning_rate": 0.1, **arguments})

    @pytest.mark.parametrize("rate", [math.nan, math.inf, -0.1, None, "0.1 s"])
    def test_a_schedule_must_return_a_rate(self, rate):
        opt, comm = (
            qcomp.Adam(learning_rate=lambda step: rate if step == 1 else 0.1),
            LocalCommunicator.alone(),
        )
        x = np.ones(3)
        params, state = opt.step(x, x, opt.init(x, comm), comm)
        with pytest.raises(
            ValueError, match=rf"learning_rate\(1\) is {rate!r}; expected a finite number >= 0"
        ):
            opt.step(params, x, state, comm)

    @pytest.mark.parametrize("policy", ["exact", "compressors"])
    def test_a_policy_must_be_callable(self, policy):
        with pytest.raises(TypeError, match=rf"{policy} is \[1\]; expected a policy"):
            qcomp.CompressedSGD(learning_rate=0.1, **{policy: [1]})

    def test_gradients_of_other_shapes(self):
        opt, comm = qcomp.Adam(learning_rate=0.1), LocalCommunicator.alone()
        x = np.ones((2, 3))
        state = opt.init(x, comm)
        with pytest.raises(
            ValueError, match=r"grads\[0\], the gradient of '0', has shape \(3, 2\); expected \(2, 3\)"
        ):
            opt.step(x, np.ones((3, 2)), state, comm)
        with pytest.raises(ValueError, match="grads has 2 arrays; params has 1"):
            opt.step(x, [x, x], state, comm)
        with pytest.raises(ValueError, match="params is empty"):
            opt.init([], comm)
        with pytest.raises(
            TypeError, match="params has dtype int64; expected float64, float32, float16 or bfloat16"
        ):
            opt.init(np.ones(3, dtype=np.int64), comm)
        with pytest.raises(TypeError, match="params mixes float64 with other dtypes"):
            opt.init([np.ones(3), np.ones(3, dtype=np.float32)], comm)

    def test_names(self):
        opt, comm = qcomp.Adam(learning_rate=0.1), LocalCommunicator.alone()
        assert opt.init([np.ones(2)] * 2, comm).names == ("0", "1")
        assert opt.init([np.ones(2)] * 2, comm, names=["w", "b"]).names == ("w", "b")
        for bad in (["w"], ["w", "w"], ["w", "b", "c"]):
            with pytest.raises(ValueError, match=r"names has . different names; params has 2 tensors"):
                opt.init([np.ones(2)] * 2, comm, names=bad)

    def test_a_state_of_another_rank(self):
        opt = qcomp.Adam(learning_rate=0.1)
        state = opt.initial_state([np.ones(2)], ("0",), rank=1, size=2)
        with pytest.raises(ValueError, match="comm is rank 0 of 1; state belongs to rank 1 of 2"):
            opt.step(np.ones(2), np.ones(2), state, LocalCommunicator.alone())
