"""The optimizers: their state is explicit, and a step has two pure halves with an exchange between them."""

from qcomp.core.optimizers.adam import Adam
from qcomp.core.optimizers.base import Optimizer
from qcomp.core.optimizers.ef21_sgd import EF21SGD
from qcomp.core.optimizers.groups import Group
from qcomp.core.optimizers.lamb import Lamb
from qcomp.core.optimizers.lion import Lion
from qcomp.core.optimizers.muon import Muon
from qcomp.core.optimizers.onebit_adam import OneBitAdam
from qcomp.core.optimizers.onebit_lamb import OneBitLamb
from qcomp.core.optimizers.qadam import QAdam
from qcomp.core.optimizers.qsvrg import QSVRG
from qcomp.core.optimizers.sgd import SGD, CompressedSGD
from qcomp.core.optimizers.zero_one_adam import ZeroOneAdam
from qcomp.core.variance.rules import FreezeAt, VarianceStable
from qcomp.core.variance.schedules import DoublingIntervals, LocalSteps
from qcomp.core.variance.watch import VarianceWatch

__all__ = [
    "EF21SGD",
    "QSVRG",
    "SGD",
    "Adam",
    "CompressedSGD",
    "DoublingIntervals",
    "FreezeAt",
    "Group",
    "Lamb",
    "Lion",
    "LocalSteps",
    "Muon",
    "OneBitAdam",
    "OneBitLamb",
    "Optimizer",
    "QAdam",
    "VarianceStable",
    "VarianceWatch",
    "ZeroOneAdam",
]
