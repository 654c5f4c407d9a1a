"""Every optimizer keeps the laws of `qcomp.testing.check_optimizer` on NumPy and torch."""

import numpy as np
import pytest

import qcomp
from qcomp.testing import check_optimizer
from qcomp.testing.jobs import OptimizerCase
from tests.optimizers.every import EVERY

QUICK = ("1-bit, watched",)
ONE_GRADIENT = [name for name, entry in EVERY.items() if not entry.pairs]


def optimizer(name):
    """Return an optimizer that compresses the larger tensors of the laws."""
    return EVERY[name].make(exact=qcomp.ExactBelow(100))


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n in QUICK else [pytest.mark.exhaustive]) for n in ONE_GRADIENT]
)
def test_it_keeps_every_law(name):
    with qcomp.backends.use("numba"):  # its bytes are those of the pure version, in a third of the time
        check_optimizer(optimizer(name))


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["Adam", "1-bit"])
def test_it_keeps_every_law_in_torch(name):
    torch = pytest.importorskip("torch")
    check_optimizer(optimizer(name), torch)


@pytest.mark.quick_cases(1)
@pytest.mark.filterwarnings("ignore:the variance of OneBitAdam no longer fits")
@pytest.mark.parametrize("name", ONE_GRADIENT)
def test_the_laws_reach_its_stages(name):
    """The stages that its table lists within fourteen steps, except those that only growing gradients reach."""
    case = OptimizerCase(optimizer(name), np)
    job = case.start(2)
    seen = {job.states[0].stage}
    for step in range(12):
        job.step(step)
        seen.add(job.states[0].stage)
    assert seen == {*EVERY[name].stages}
