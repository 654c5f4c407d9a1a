"""Runs torch's tests of optimizers or of schedulers on optimizers of qcomp, and prints each outcome as JSON.

    python -m tests.torch_face.torchs_own.program like_optim

In a process of its own: torch's helpers for tests change settings of torch for good. The wheel of torch has the
configurations of its optimizers and these helpers, but not the tests. The modules beside this one are like them. The
tests themselves run from a checkout of torch, if QCOMP_TORCH_TESTS names its folder ``test``:

    QCOMP_TORCH_TESTS=pytorch/test python -m tests.torch_face.torchs_own.program test_optim
"""

import importlib
import inspect
import json
import os
import sys
import types
import unittest
import warnings

import torch

import qcomp
import qcomp.torch
from tests.torch_face.every import FACES

# Tests that write their own expectations need it; none here does.
sys.modules.setdefault("expecttest", types.SimpleNamespace(TestCase=unittest.TestCase, ACCEPT=False))  # type: ignore[arg-type]  # wrong on purpose

from torch.testing._internal import common_optimizers  # noqa: E402

NEVER = 10**6
"""A step at which no test arrives."""


class SGD(qcomp.torch.CompressedSGD):
    """Has the arguments and defaults of ``torch.optim.SGD``, and nothing is compressed."""

    def __init__(self, params, lr=1e-3, momentum=0.0, **settings):
        super().__init__(params, lr, momentum, exact=True, **settings)


class Adam(qcomp.torch.OneBitAdam):
    """Has the defaults of ``torch.optim.Adam``, and its variance is never frozen."""

    def __init__(self, params, **settings):
        super().__init__(params, freeze=NEVER, decoupled_weight_decay=False, **settings)


def infos():
    """Return what torch's tests need to know of each optimizer."""
    torchs = {info.name: info for info in common_optimizers.optim_db}
    one_element = {"lr": torch.tensor(1e-3), "betas": (torch.tensor([[[0.9]]]), torch.tensor([[0.99]]))}
    compressed = {"exact": None}
    more = {
        "CompressedSGD": [compressed, {"momentum": torch.tensor(0.9), "exact": True}],
        "Muon": [{"momentum": torch.tensor([0.9])}],
    }
    return [
        _info(name, torchs["SGD" if "SGD" in name else "Adam"], more.get(name, [compressed, one_element]))
        for name in FACES
    ]


def _info(name, like, more):
    """Return what tests need to know of an optimizer, in the settings of the one of torch that it is like."""
    optimizer = getattr(qcomp.torch, name)
    if "freeze" in inspect.signature(optimizer).parameters:
        optimizer = _freezing(optimizer)
    of_groups = optimizer([torch.nn.Parameter(torch.ones(1))], lr=1e-3).defaults

    def inputs(device, dtype=None):
        every = [one.kwargs for one in like.optim_inputs_func(device, dtype)] + more
        kept = [{"lr": 1e-3, **kwargs} for kwargs in every if kwargs.keys() <= of_groups.keys()]
        return [common_optimizers.OptimizerInput(None, kwargs) for kwargs in kept]

    return common_optimizers.OptimizerInfo(
        optimizer,
        optim_inputs_func=inputs,
        scheduler_inputs=like.scheduler_inputs,
        supported_impls=(),
        not_og_supported_flags=(),
        optim_error_inputs_func=_errors,
    )


def _freezing(optimizer):
    """Return an optimizer whose variance is frozen so soon that most tests reach its compressed stage."""

    def init(self, params, *args, **settings):
        optimizer.__init__(self, params, *args, freeze=4, **settings)

    return type(optimizer.__name__, (optimizer,), {"__init__": init})


def _errors(device, dtype):
    """Return what is an error for all optimizers of torch; here it has other words in two cases."""
    found = common_optimizers.get_error_inputs_for_all_optims(device, dtype)
    for one in found:
        if "Tensor lr" in one.error_regex:
            one.error_regex = r"param_groups\[0\] has lr=.*; expected a finite number >= 0"
            one.optimizer_error_input.params = [torch.nn.Parameter(torch.ones(1))]
        elif one.error_type is UserWarning:
            one.error_type, one.error_regex = ValueError, "share memory"
    return found


class _Outcomes(unittest.TestResult):
    """Keeps the error of each test: None if it passed, and no entry if it was skipped."""

    def __init__(self):
        super().__init__()
        self.found = {}

    def addSuccess(self, test):  # noqa: N802
        self.found[test.id().rpartition(".")[2]] = None

    def addFailure(self, test, err):  # noqa: N802
        self.found[test.id().rpartition(".")[2]] = f"{err[0].__name__}: {err[1]}".strip().splitlines()[0]

    addError = addFailure  # noqa: N815


def main(name):
    """Print the outcomes of a module of tests."""
    common_optimizers.optim_db[:] = infos()
    if name.endswith("lrscheduler"):
        torch.optim.SGD, torch.optim.Adam = SGD, Adam
    originals = os.environ.get("QCOMP_TORCH_TESTS")
    if originals is not None:
        sys.path.insert(0, originals)
    module = importlib.import_module(f"{__package__}.{name}" if originals is None else name)
    warnings.filterwarnings("ignore", "the variance|.* compresses nothing|Muon orthogonalises")
    load, outcomes = unittest.defaultTestLoader.loadTestsFromTestCase, _Outcomes()
    for kind in list(vars(module).values()):
        if (
            isinstance(kind, type)
            and issubclass(kind, unittest.TestCase)
            and kind.__module__ == module.__name__
        ):
            load(kind).run(outcomes)
    print(json.dumps(outcomes.found))


if __name__ == "__main__":
    main(*sys.argv[1:])
