"""Checks of the contract: whether a compressor or a kernel set keeps its promises, and which ones it breaks.

Needs the extra ``qcomp[testing]`` (hypothesis).
"""

from importlib.util import find_spec

if find_spec("hypothesis") is None:
    raise ImportError(
        "qcomp.testing draws vectors with hypothesis, which is not installed: pip install 'qcomp[testing]'"
    )

from qcomp.core.numeric.random import replace_draws
from qcomp.testing.contract import ContractError, check_compressor
from qcomp.testing.kernels import check_kernels
from qcomp.testing.laws import LAWS
from qcomp.testing.libraries import read_only_numpy

__all__ = ["LAWS", "ContractError", "check_compressor", "check_kernels", "read_only_numpy", "replace_draws"]
