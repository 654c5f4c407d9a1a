"""The compressors, one a file."""

from qcomp.core.compressors.cast import Cast
from qcomp.core.compressors.identity import Identity
from qcomp.core.compressors.minmax import MinMaxUInt8
from qcomp.core.compressors.qsgd import QSGD
from qcomp.core.compressors.scaled import Scaled
from qcomp.core.compressors.sign import ScaledSign

__all__ = ["QSGD", "Cast", "Identity", "MinMaxUInt8", "Scaled", "ScaledSign"]
