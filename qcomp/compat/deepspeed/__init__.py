"""DeepSpeed's 1-bit Adam, 0/1 Adam and 1-bit LAMB, step by step as its release 0.19.6 made them, the last with them.

Same parameters, same gradients: the same trajectory up to rounding, with what was odd about it. What is different is
what surrounds it: any array library, any communicator, and a checkpoint that keeps the errors of compression, so
that a resumed run goes on as if it had never stopped. For new work there are `qcomp.OneBitAdam` and its
neighbours, without the oddities.
"""

from qcomp.compat.deepspeed.base import DeepSpeedOptimizer
from qcomp.compat.deepspeed.onebit_adam import OnebitAdam, onebit_adam
from qcomp.compat.deepspeed.onebit_lamb import OnebitLamb, onebit_lamb
from qcomp.compat.deepspeed.sign_mean import Errors, sign_mean
from qcomp.compat.deepspeed.zero_one_adam import ZeroOneAdam, zero_one_adam

__all__ = [
    "DeepSpeedOptimizer",
    "Errors",
    "OnebitAdam",
    "OnebitLamb",
    "ZeroOneAdam",
    "onebit_adam",
    "onebit_lamb",
    "sign_mean",
    "zero_one_adam",
]
