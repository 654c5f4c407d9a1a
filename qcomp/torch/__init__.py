"""qcomp's optimizers as optimizers of torch: with parameter groups, schedulers, closures and a GradScaler.

    optimizer = qcomp.torch.OneBitAdam(model.parameters(), lr=1e-3)

They average over the ranks themselves, started by torchrun or mpirun: wrap no model in DistributedDataParallel, which
would average the gradients too.
"""

from qcomp.torch.algorithms import CompressedSGD, OneBitAdam, OneBitLamb, QAdam, ZeroOneAdam
from qcomp.torch.optimizer import AveragingOptimizer

__all__ = ["AveragingOptimizer", "CompressedSGD", "OneBitAdam", "OneBitLamb", "QAdam", "ZeroOneAdam"]
