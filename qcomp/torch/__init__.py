"""qcomp's optimizers as optimizers of torch: with parameter groups, schedulers, closures and a GradScaler.

    optimizer = qcomp.torch.OneBitAdam(model.parameters(), lr=1e-3)

They themselves average over the ranks that torchrun or mpirun starts. Do not wrap the model in DistributedDataParallel,
which would average the gradients a second time. If the model is wrapped, pass it as ``model=``.
"""

import importlib
from typing import TYPE_CHECKING, Any

from qcomp.torch.algorithms import CompressedSGD, OneBitAdam, OneBitLamb, QAdam, ZeroOneAdam
from qcomp.torch.asynchronous import AsynchronousOuterLoop
from qcomp.torch.muon import Muon
from qcomp.torch.optimizer import AveragingOptimizer
from qcomp.torch.outer import OuterLoop

if TYPE_CHECKING:
    from qcomp.torch import fsdp, ft
    from qcomp.torch.planner import LoadPlanner

__all__ = [
    "AsynchronousOuterLoop",
    "AveragingOptimizer",
    "CompressedSGD",
    "LoadPlanner",
    "Muon",
    "OneBitAdam",
    "OneBitLamb",
    "OuterLoop",
    "QAdam",
    "ZeroOneAdam",
    "fsdp",
    "ft",
]


def __getattr__(name: str) -> Any:
    """Import on first use the modules that are slow to import, or need a newer torch, or torchft."""
    if name in ("fsdp", "ft"):
        return importlib.import_module(f"qcomp.torch.{name}")
    if name == "LoadPlanner":
        return importlib.import_module("qcomp.torch.planner").LoadPlanner
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
