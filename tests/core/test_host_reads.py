"""The number of times that a step reads values from a device: each read stalls the GPU's queue."""

import numpy as np
import pytest

import qcomp
from qcomp.core.mean.codec import Verdicts

torch = pytest.importorskip("torch")

from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

SHAPES = [(40, 50)] * 6 + [(50,)] * 6
"""Six matrices, which are compressed, and six vectors, which stay exact."""


class Reads(TorchDispatchMode):
    """Counts reads of tensor values: single numbers here, whole tensors in `Tensor.cpu`."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


def reads_of_steps(monkeypatch, lockstep, ranks, **options):
    """Return how many values rank 0 reads in each of 6 steps; the variance is frozen after 2 steps.

    Not counting two comparisons: of gradients in the first step, which reads a sample of them and the ranks' messages,
    and of what the ranks share, when the variance is frozen: each momentum and variance, and the messages. Nor the sums
    of the variance then, which are read at once.
    """
    opt = qcomp.OneBitAdam(learning_rate=0.1, freeze=2, exact=qcomp.ExactBelow(1000), **options)
    params = [torch.zeros(shape) for shape in SHAPES]
    states = [
        opt.initial_state(params, tuple(map(str, range(len(SHAPES)))), rank, ranks) for rank in range(ranks)
    ]
    cpu = torch.Tensor.cpu
    counts = []

    def counted(stages):
        """Run the steps of rank 0 and count its reads."""
        reads, arrived = Reads(), None
        with monkeypatch.context() as patch:

            def read(x, *args):
                reads.count += reading
                return cpu(x, *args)

            patch.setattr(torch.Tensor, "cpu", read)
            while True:
                reading = True
                try:
                    with reads:
                        request = stages.send(arrived)
                except StopIteration as stop:
                    counts.append(reads.count)
                    return stop.value
                reading = False
                arrived = yield request

    for step in range(6):
        computations = []
        for rank, state in enumerate(states):
            rng = np.random.default_rng([rank, step])
            grads = [torch.from_numpy(rng.standard_normal(s, dtype=np.float32)) for s in SHAPES]
            stages = opt.stages(params, grads, state)
            computations.append(stages if rank else counted(stages))
        results = lockstep(computations)
        params, states = results[0][0], [state for _, state in results]
    assert states[0].stage == "compressed"
    counts[0] -= (1 + ranks) * (ranks > 1)
    counts[1] -= 1 + (2 * len(SHAPES) + ranks) * (ranks > 1)
    return counts


@pytest.mark.parametrize("kernels", ["pure", "auto"])
@pytest.mark.parametrize("ranks", [1, 3, pytest.param(8, marks=pytest.mark.exhaustive)])
def test_a_step_reads_twice_at_any_number_of_ranks(monkeypatch, lockstep, ranks, kernels):
    if kernels == "auto":
        pytest.importorskip("numba")
    with qcomp.backends.use(kernels):
        counts = reads_of_steps(monkeypatch, lockstep, ranks, watch=None)
    # A lone rank sends no exact values, and a kernel has checked them when it returns.
    spared = int(ranks == 1 and kernels == "auto")
    assert counts == [count - spared for count in (1, 1, 2, 2, 2, 2)]


def test_a_watch_reads_a_few_times_more(monkeypatch, lockstep):
    """Its mean is accepted with one read; samples and momenta take one read each, and so do the levels at first."""
    counts = reads_of_steps(monkeypatch, lockstep, 3, watch=qcomp.VarianceWatch(every=1))
    assert counts[:2] == [1, 1 + len(SHAPES)]  # it has an array for each tensor, which the ranks compare too
    assert max(counts[2:]) <= 6


def test_reading_verdicts_as_they_arrive_is_noticed(monkeypatch, lockstep):
    init = Verdicts.__init__
    monkeypatch.setattr(Verdicts, "__init__", lambda self, *, at_once: init(self, at_once=True))
    assert reads_of_steps(monkeypatch, lockstep, 3, watch=None) == [2, 2, 4, 4, 4, 4]
