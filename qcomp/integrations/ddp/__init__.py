"""Compressed communication under torch's DistributedDataParallel, overlapped with the backward pass.

Either average the gradients with compression, for any optimizer::

    model = DistributedDataParallel(model, gradient_as_bucket_view=True)
    model.register_comm_hook(*hook(qcomp.ScaledSign(), model))

or let a qcomp optimizer, such as 1-bit Adam, average its momenta bucket by bucket::

    optimizer = OverlappedOptimizer(model, qcomp.OneBitAdam(learning_rate=1e-3, freeze=1000))
"""

from qcomp.integrations.ddp.autotune import TunedHookState, autotune, average_gradients
from qcomp.integrations.ddp.hook import HookState, compress_gradients, hook
from qcomp.integrations.ddp.optimizer import OverlappedOptimizer
from qcomp.integrations.ddp.parameters import inside

__all__ = [
    "HookState",
    "OverlappedOptimizer",
    "TunedHookState",
    "autotune",
    "average_gradients",
    "compress_gradients",
    "hook",
    "inside",
]
