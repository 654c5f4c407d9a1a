"""Outer loops: ranks train alone for some steps, then average what these steps did.

`qcomp.OuterLoop` is the loop. This module has its published settings, the class that overlaps its exchanges with inner
steps, and the diagnostics.
"""

from qcomp.core.outer.diagnostics import OuterDiagnostics
from qcomp.core.outer.overlapped import Overlapped
from qcomp.core.outer.presets import diloco, local_sgd, muloco, sparse_loco, streaming_diloco

__all__ = [
    "OuterDiagnostics",
    "Overlapped",
    "diloco",
    "local_sgd",
    "muloco",
    "sparse_loco",
    "streaming_diloco",
]
