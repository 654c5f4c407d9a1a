"""Outer loops: ranks train alone for some steps, then average the changes that these steps made.

`qcomp.OuterLoop` is the loop itself. This module adds published settings for it, a class that overlaps its exchanges
with inner steps, a loop in which no rank waits for another, averages of the inner optimizers' states, and diagnostics.
"""

from qcomp.core.outer.asynchronous import Asynchronous
from qcomp.core.outer.asynchronous_state import AsynchronousState
from qcomp.core.outer.diagnostics import OuterDiagnostics
from qcomp.core.outer.inner_states import InnerStates
from qcomp.core.outer.overlapped import Overlapped
from qcomp.core.outer.presets import diloco, local_sgd, muloco, sparse_loco, streaming_diloco

__all__ = [
    "Asynchronous",
    "AsynchronousState",
    "InnerStates",
    "OuterDiagnostics",
    "Overlapped",
    "diloco",
    "local_sgd",
    "muloco",
    "sparse_loco",
    "streaming_diloco",
]
