"""DeepSpeed's 1-bit Adam, 0/1 Adam and 1-bit LAMB, step by step as in 0.19.6, the last release that has them.

With the same parameters and gradients they follow the same trajectory up to rounding, including DeepSpeed's quirks.
Unlike DeepSpeed, they work with any array library and communicator, and their checkpoints keep the compression errors,
so that a resumed run continues as if it had never stopped. For new work use `qcomp.OneBitAdam`, `qcomp.ZeroOneAdam` and
`qcomp.OneBitLamb`, which lack the quirks.
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
