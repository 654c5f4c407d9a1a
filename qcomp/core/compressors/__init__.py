"""The compressors, one per file; their base is in `qcomp.core.compressor`."""

from qcomp.core.compressors.cast import Cast
from qcomp.core.compressors.identity import Identity
from qcomp.core.compressors.lloyd_max import LloydMax
from qcomp.core.compressors.minmax import MinMaxUInt8
from qcomp.core.compressors.onebit_sgd import OneBitSGD
from qcomp.core.compressors.qsgd import QSGD
from qcomp.core.compressors.randk import RandK
from qcomp.core.compressors.receptive_fields import WholeFields
from qcomp.core.compressors.scaled import Scaled
from qcomp.core.compressors.sign import ScaledSign
from qcomp.core.compressors.topk import TopK

__all__ = [
    "QSGD",
    "Cast",
    "Identity",
    "LloydMax",
    "MinMaxUInt8",
    "OneBitSGD",
    "RandK",
    "Scaled",
    "ScaledSign",
    "TopK",
    "WholeFields",
]
