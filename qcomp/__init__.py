"""qcomp: compressed communication for data-parallel training, for any array library.

Ranks send gradients or momenta with 1 to 8 bits per element. Error feedback adds what compression loses to the next
step, and Adam still converges with a frozen variance. `import qcomp` loads no array library; the arrays that you pass
determine which one is imported.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from qcomp import backends, checkpoint, feedback, topologies
from qcomp.core import deprecations as _deprecations
from qcomp.core.compressor import Compressor
from qcomp.core.compressors import (
    QSGD,
    Cast,
    Identity,
    LloydMax,
    MinMaxUInt8,
    OneBitSGD,
    RandK,
    Scaled,
    ScaledSign,
    TopK,
    WholeFields,
)
from qcomp.core.errors import CommunicatorError, MismatchError, NonFiniteError, PayloadError
from qcomp.core.mean.averaging import Averaging, PowerSGD
from qcomp.core.mean.compressed_mean import CompressedMean, MeanState
from qcomp.core.mean.ef21 import EF21Mean
from qcomp.core.mean.powersgd import PowerSGDMean
from qcomp.core.numeric.random import Key
from qcomp.core.optimizers import (
    EF21SGD,
    QSVRG,
    SGD,
    Adam,
    CompressedSGD,
    DoublingIntervals,
    FreezeAt,
    Group,
    Lamb,
    Lion,
    LocalSteps,
    Muon,
    OneBitAdam,
    OneBitLamb,
    Optimizer,
    QAdam,
    VarianceStable,
    VarianceWatch,
    ZeroOneAdam,
)
from qcomp.core.payload import Payload, PayloadSpec
from qcomp.core.policies.by_name import ByName
from qcomp.core.policies.exact_below import ExactBelow, Tensor
from qcomp.core.registry import compressor, compressor_names, register
from qcomp.core.state import OptimizerState
from qcomp.core.traits import Traits
from qcomp.version import __version__

if TYPE_CHECKING:
    from qcomp import comm, elastic, extend, integrations, jax, outer, planning, testing, torch
    from qcomp.core.diagnostics import Diagnostics
    from qcomp.core.mean.weights import weighted
    from qcomp.core.outer.loop import OuterLoop

__all__ = [
    "EF21SGD",
    "QSGD",
    "QSVRG",
    "SGD",
    "Adam",
    "Averaging",
    "ByName",
    "Cast",
    "CommunicatorError",
    "CompressedMean",
    "CompressedSGD",
    "Compressor",
    "Diagnostics",
    "DoublingIntervals",
    "EF21Mean",
    "ExactBelow",
    "FreezeAt",
    "Group",
    "Identity",
    "Key",
    "Lamb",
    "Lion",
    "LloydMax",
    "LocalSteps",
    "MeanState",
    "MinMaxUInt8",
    "MismatchError",
    "Muon",
    "NonFiniteError",
    "OneBitAdam",
    "OneBitLamb",
    "OneBitSGD",
    "Optimizer",
    "OptimizerState",
    "OuterLoop",
    "Payload",
    "PayloadError",
    "PayloadSpec",
    "PowerSGD",
    "PowerSGDMean",
    "QAdam",
    "RandK",
    "Scaled",
    "ScaledSign",
    "Tensor",
    "TopK",
    "Traits",
    "VarianceStable",
    "VarianceWatch",
    "WholeFields",
    "ZeroOneAdam",
    "__version__",
    "backends",
    "checkpoint",
    "comm",
    "compressor",
    "compressor_names",
    "elastic",
    "extend",
    "feedback",
    "integrations",
    "jax",
    "outer",
    "planning",
    "register",
    "testing",
    "topologies",
    "torch",
    "weighted",
]

_SUBPACKAGES = (
    "comm",
    "elastic",
    "extend",
    "integrations",
    "jax",
    "outer",
    "planning",
    "testing",
    "torch",
)
_RARE = {"Diagnostics": "core.diagnostics", "OuterLoop": "core.outer.loop", "weighted": "core.mean.weights"}


def __getattr__(name: str) -> Any:
    """Import rarely used names and subpackages on first use, since some need an array library; serve old names."""
    if name in _RARE:
        return getattr(import_module(f"qcomp.{_RARE[name]}"), name)
    if name in _SUBPACKAGES:
        return import_module(f"qcomp.{name}")
    return _deprecations.former("qcomp", name)


def __dir__() -> list[str]:
    return __all__
