"""torch's schedulers make of an exact optimizer what they make of torch's own: in rates, momenta and parameters."""

import copy
import gc
import warnings
import weakref

import pytest
import torch
from torch.optim import lr_scheduler
from torch.optim.swa_utils import SWALR

import qcomp
import qcomp.torch
from qcomp.comm import LocalCommunicator

SCHEDULERS = {
    "LambdaLR": lambda opt: lr_scheduler.LambdaLR(opt, lambda step: 0.9**step),
    "MultiplicativeLR": lambda opt: lr_scheduler.MultiplicativeLR(opt, lambda step: 0.8),
    "StepLR": lambda opt: lr_scheduler.StepLR(opt, 2),
    "MultiStepLR": lambda opt: lr_scheduler.MultiStepLR(opt, [2, 4]),
    "ConstantLR": lambda opt: lr_scheduler.ConstantLR(opt, total_iters=3),
    "LinearLR": lr_scheduler.LinearLR,
    "ExponentialLR": lambda opt: lr_scheduler.ExponentialLR(opt, 0.9),
    "CosineAnnealingLR": lambda opt: lr_scheduler.CosineAnnealingLR(opt, 4),
    "CosineAnnealingWarmRestarts": lambda opt: lr_scheduler.CosineAnnealingWarmRestarts(opt, 3),
    "PolynomialLR": lr_scheduler.PolynomialLR,
    "CyclicLR": lambda opt: lr_scheduler.CyclicLR(opt, 0.001, 0.01, step_size_up=3),
    "CyclicLR of a fixed momentum": lambda opt: lr_scheduler.CyclicLR(
        opt, 0.001, 0.01, step_size_up=3, mode="exp_range", gamma=0.9, cycle_momentum=False
    ),
    "OneCycleLR": lambda opt: lr_scheduler.OneCycleLR(opt, 0.02, total_steps=12),
    "OneCycleLR in three phases": lambda opt: lr_scheduler.OneCycleLR(
        opt, 0.02, total_steps=12, three_phase=True, anneal_strategy="linear"
    ),
    "SequentialLR": lambda opt: lr_scheduler.SequentialLR(
        opt, [lr_scheduler.LinearLR(opt), lr_scheduler.ExponentialLR(opt, 0.9)], [3]
    ),
    "ChainedScheduler": lambda opt: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(opt, total_iters=3), lr_scheduler.ExponentialLR(opt, 0.9)]
    ),
    "ReduceLROnPlateau": lambda opt: lr_scheduler.ReduceLROnPlateau(opt, patience=0),
    "SWALR": lambda opt: SWALR(opt, 0.05, anneal_epochs=4),
}
STOCK = {
    "OneBitAdam": (torch.optim.AdamW, {"betas": (0.9, 0.99), "weight_decay": 0.1}, {"freeze": 10**6}),
    "CompressedSGD": (
        torch.optim.SGD,
        {"momentum": 0.9, "weight_decay": 0.1},
        {"compressor": qcomp.Identity()},
    ),
}
"""An optimizer of torch, settings of both, and what makes ours exact."""

every_scheduler = pytest.mark.parametrize("scheduler", SCHEDULERS)
every_face = pytest.mark.parametrize("name", STOCK)


class Run:
    """Two groups of a parameter each, an optimizer, and a scheduler of it."""

    def __init__(self, make, scheduler, **settings):
        params = [torch.nn.Parameter(torch.linspace(-1, 1, n, dtype=torch.float64)) for n in (40, 9)]
        groups = [{"params": params[:1]}, {"params": params[1:], "weight_decay": 0.3}]
        self.params, self.optimizer = params, make(groups, **settings)
        self.scheduler = SCHEDULERS[scheduler](self.optimizer)

    def steps(self, numbers):
        for number in numbers:
            for p in self.params:
                p.grad = torch.sin(torch.arange(p.numel(), dtype=torch.float64) + number) + p.detach()
            self.optimizer.step()
            is_plateau = isinstance(self.scheduler, lr_scheduler.ReduceLROnPlateau)
            self.scheduler.step(*([1.0] if is_plateau else []))

    def written(self):
        """Return what a scheduler may have written into the groups."""
        return [
            {
                key: numbers_in(value)
                for key, value in group.items()
                if key.endswith(("lr", "betas", "momentum"))
            }
            for group in self.optimizer.param_groups
        ]


def numbers_in(value):
    return [float(x) for x in value] if isinstance(value, tuple | list) else float(value)


def ours(name, scheduler, **settings):
    _, own, exact = STOCK[name]
    make = getattr(qcomp.torch, name)
    return Run(
        make,
        scheduler,
        **{"lr": 0.01, **own, **exact, **copy.deepcopy(settings)},
        exact=None,
        comm=LocalCommunicator.alone(),
    )


def theirs(name, scheduler, **settings):
    stock, own, _ = STOCK[name]
    return Run(stock, scheduler, **{"lr": 0.01, **own, **copy.deepcopy(settings)})


def assert_alike(one, other):
    assert one.written() == other.written()
    for p, q in zip(one.params, other.params, strict=True):
        torch.testing.assert_close(p.detach(), q.detach(), rtol=1e-11, atol=1e-13)


@pytest.mark.quick_cases(6)
@every_scheduler
@every_face
@pytest.mark.parametrize("in_tensors", [False, True])
def test_a_scheduler_makes_the_steps_that_it_makes_with_torchs_optimizer(name, scheduler, in_tensors):
    """Also if rate, momentum and decay are tensors; schedulers fill a rate in place."""
    one, other = ours(name, scheduler), theirs(name, scheduler)
    if in_tensors:
        rate = {"lr": tensor_of(0.01)}
        rest = {
            key: tuple(map(tensor_of, value)) if key == "betas" else tensor_of(value)
            for key, value in STOCK[name][1].items()
        }
        one, other = ours(name, scheduler, **rate, **rest), theirs(name, scheduler, **rate)
    rates = [group["lr"] for group in one.optimizer.param_groups]
    for step in range(10):
        one.steps([step])
        other.steps([step])
        assert_alike(one, other)
    if in_tensors:
        assert all(map(torch.is_tensor, rates))
        assert all(a is group["lr"] for a, group in zip(rates, one.optimizer.param_groups, strict=True))


def tensor_of(number):
    return torch.tensor(number, dtype=torch.float64)


@pytest.mark.quick_cases(3)
@every_scheduler
@every_face
def test_a_run_resumes_with_its_scheduler(name, scheduler):
    one, other = ours(name, scheduler), ours(name, scheduler, lr=0.3)
    one.steps(range(4))
    saved = copy.deepcopy((one.optimizer.state_dict(), one.scheduler.state_dict()))
    with torch.no_grad():
        for p, q in zip(one.params, other.params, strict=True):
            q.copy_(p)
    other.optimizer.load_state_dict(saved[0])
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", "Detected call of `lr_scheduler.step"
        )  # torch has seen no step since
        other.scheduler.load_state_dict(saved[1])
        for step in range(4, 8):
            one.steps([step])
            other.steps([step])
            assert_alike(one, other)


def test_a_step_of_the_scheduler_before_that_of_the_optimizer_is_warned_of():
    run = ours("OneBitAdam", "StepLR")
    with pytest.warns(
        UserWarning, match=r"Detected call of `lr_scheduler.step\(\)` before `optimizer.step\(\)`"
    ):
        run.scheduler.step()
    run.steps(range(3))  # warnings are errors here


def test_a_step_that_was_replaced_is_warned_of():
    run = ours("OneBitAdam", "StepLR")
    step = run.optimizer.step

    def replaced(*args):
        return step(*args)

    run.optimizer.step = replaced
    with pytest.warns(UserWarning, match=r"`optimizer.step\(\)` has been overridden"):
        run.steps(range(2))


@every_face
def test_optimizer_and_scheduler_are_freed_without_the_collector(name):
    def made():
        run = ours(name, "LambdaLR")
        run.steps(range(2))
        return weakref.ref(run.scheduler), weakref.ref(run.optimizer)

    gc.collect()
    gc.disable()
    try:
        assert [found() for found in made()] == [None, None]
    finally:
        gc.enable()


CHANGES = {
    "lr": lambda group: group.update(lr=0.3),
    "a rate in its tensor": lambda group: group["lr"].fill_(0.3),
    "weight_decay": lambda group: group.update(weight_decay=0.7),
    "betas": lambda group: group.update(betas=(0.5, 0.6)),
    "eps": lambda group: group.update(eps=0.5),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("rate", [0.01, tensor_of(0.01)], ids=["number", "tensor"])
def test_a_setting_that_changes_alone_between_steps_is_read(rate, change):
    if change == "a rate in its tensor" and not torch.is_tensor(rate):
        rate = tensor_of(rate)
    found = []
    for make, own in (
        (torch.optim.AdamW, {}),
        (qcomp.torch.OneBitAdam, {"freeze": 10**6, "exact": None, "comm": LocalCommunicator.alone()}),
    ):
        p = torch.nn.Parameter(torch.linspace(-1, 1, 40, dtype=torch.float64))
        optimizer = make([p], lr=copy.deepcopy(rate), betas=[0.9, 0.99], weight_decay=0.1, **own)
        for step in range(6):
            if step == 3:
                CHANGES[change](optimizer.param_groups[0])
            p.grad = torch.sin(torch.arange(40.0, dtype=torch.float64) + step) + p.detach()
            optimizer.step()
        found.append(p.detach())
    torch.testing.assert_close(*found, rtol=1e-11, atol=1e-13)
