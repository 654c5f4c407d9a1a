"""Outer loops: ranks train alone for some steps, then average what these steps did.

`qcomp.OuterLoop` is the loop. Here are its published settings, what overlaps its exchanges with inner steps, and what
measures them.
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
