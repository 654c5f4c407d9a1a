"""The optimizers: explicit state, pure halves, one exchange between them."""

from qcomp.core.optimizers.adam import Adam
from qcomp.core.optimizers.base import Optimizer
from qcomp.core.optimizers.freeze import FreezeAt, VarianceStable
from qcomp.core.optimizers.onebit_adam import OneBitAdam
from qcomp.core.optimizers.qadam import QAdam
from qcomp.core.optimizers.sgd import CompressedSGD

__all__ = [
    "Adam",
    "CompressedSGD",
    "FreezeAt",
    "OneBitAdam",
    "Optimizer",
    "QAdam",
    "VarianceStable",
]
