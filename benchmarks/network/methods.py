"""The compared methods of averaging: stock DistributedDataParallel, its hooks, and those of qcomp."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

import qcomp
from network.models import Model, loss
from qcomp.integrations import ddp

__all__ = ["COMPUTE", "METHODS", "Method", "Trainee"]

COMPUTE = "compute"
"""The method that averages nothing."""
BUCKET_MB, ONE_BUCKET_MB = 25, 1000
FREEZE = 2
"""The exact steps of 1-bit Adam; the stage after them is timed."""
SLOW = 1e-7
"""A rate at which nothing diverges, although the variance is frozen far too early; only the time matters."""
SMALLEST_GAIN = 2
"""PowerSGD's default: a matrix whose factors have more than half of its elements is sent uncompressed."""


@dataclass(frozen=True)
class Method:
    """A method of averaging."""

    label: str
    colour: str
    register: Callable[[DistributedDataParallel, Any], None] | None = None
    """Registers the hook of a model on a process group; None for no hook."""
    compressor: str | None = None
    """The spec of qcomp's compressor, in the automatically selected topology."""
    rank: int | None = None
    """The rank of PowerSGD's approximation."""
    adam: qcomp.Optimizer | None = None
    """The optimizer that averages and updates the parameters, instead of stock SGD with momentum."""

    @property
    def ours(self) -> bool:
        """Whether this is a method of qcomp."""
        return self.compressor is not None


def _fp16(model: DistributedDataParallel, group: Any) -> None:
    model.register_comm_hook(group, default_hooks.fp16_compress_hook)


def _power_sgd(rank: int) -> Callable[[DistributedDataParallel, Any], None]:
    def register(model: DistributedDataParallel, group: Any) -> None:
        state = powerSGD_hook.PowerSGDState(
            group,
            matrix_approximation_rank=rank,
            start_powerSGD_iter=2,
            min_compression_rate=SMALLEST_GAIN,
        )
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)

    return register


def _qcomp(spec: str) -> Callable[[DistributedDataParallel, Any], None]:
    def register(model: DistributedDataParallel, _group: Any) -> None:
        model.register_comm_hook(*ddp.hook(qcomp.compressor(spec), model))

    return register


SIGN = "sign:bucket_size=4096,scale=l1"
QSGD4 = "qsgd:levels=7,bucket_size=512,norm=max,coding=fixed"
MINMAX = "minmax:bucket_size=2048"

METHODS = {
    COMPUTE: Method("compute alone", "#4d4d4d"),
    "none": Method("DDP, no hook", "#8c8c8c"),
    "fp16": Method("DDP, fp16 hook", "#b5b5b5", _fp16),
    "powersgd1": Method("DDP, PowerSGD rank 1", "#e0962b", _power_sgd(1), rank=1),
    "powersgd2": Method("DDP, PowerSGD rank 2", "#edbe7a", _power_sgd(2), rank=2),
    "sign": Method("qcomp hook, sign, 1 bit", "#d1495b", _qcomp(SIGN), SIGN),
    "qsgd4": Method("qcomp hook, QSGD, 4 bits", "#2e86ab", _qcomp(QSGD4), QSGD4),
    "minmax8": Method("qcomp hook, min-max, 8 bits", "#3d9970", _qcomp(MINMAX), MINMAX),
    "onebit_adam": Method(
        "qcomp 1-bit Adam, after the freeze",
        "#7a4fa3",
        compressor=SIGN,
        adam=qcomp.OneBitAdam(learning_rate=SLOW, freeze=FREEZE, averaging=qcomp.Averaging(topology="auto")),
    ),
}


class Trainee:
    """A model, its optimizer and its method of averaging, with its own process group.

    With a group of its own, a method that fails does not break others.
    """

    def __init__(self, method: str, model: Model, group: Any) -> None:
        chosen = METHODS[method]
        torch.manual_seed(0)
        # PowerSGD starts its second all-reduce from a callback. Over gloo the callbacks of two buckets run in an
        # order that differs between ranks, which aborts the job. So it has one bucket.
        self.model = DistributedDataParallel(
            model.make(),
            process_group=group,
            bucket_cap_mb=BUCKET_MB if chosen.rank is None else ONE_BUCKET_MB,
            gradient_as_bucket_view=True,
        )
        self.optimizer: Any
        if chosen.adam is not None:
            self.optimizer = ddp.OverlappedOptimizer(self.model, chosen.adam)
        else:
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=0.9)
        if chosen.register is not None:
            chosen.register(self.model, group)
        torch.manual_seed(1 + dist.get_rank(group))
        self._batch = model.batch()
        self._alone = method == COMPUTE

    def step(self) -> None:
        """Do one step of training."""
        self.optimizer.zero_grad()
        with self.model.no_sync() if self._alone else nullcontext():
            torch.autograd.backward(loss(self.model, self._batch))
        self.optimizer.step()


def parameter_shapes(model: nn.Module) -> list[tuple[int, ...]]:
    """Return the shapes of the averaged tensors."""
    return [tuple(p.shape) for p in model.parameters()]
