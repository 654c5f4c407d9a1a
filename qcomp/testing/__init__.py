"""Checks of the contract: whether a compressor, kernel set, topology, communicator or optimizer keeps its promises.

Each check is a function that raises `ContractError`, an AssertionError that names the broken promises. `every_law`
makes a pytest test of each law, and ``qcomp check`` runs them from the shell. Needs the extra ``qcomp[testing]``
(hypothesis).
"""

from importlib.util import find_spec

if find_spec("hypothesis") is None:
    raise ImportError(
        "qcomp.testing draws vectors with hypothesis, which is not installed: pip install 'qcomp[testing]'"
    )

from qcomp.core.numeric.random import replace_draws
from qcomp.testing.communicators import check_communicator
from qcomp.testing.contract import check_compressor
from qcomp.testing.dispatch import contract_of, every_law
from qcomp.testing.faults import Death, until_death
from qcomp.testing.kernels import check_kernels
from qcomp.testing.law_groups import Contract, ContractError
from qcomp.testing.laws import LAWS
from qcomp.testing.libraries import read_only_numpy
from qcomp.testing.one_thread import lockstep
from qcomp.testing.optimizers import check_optimizer
from qcomp.testing.topologies import check_topology

__all__ = [
    "LAWS",
    "Contract",
    "ContractError",
    "Death",
    "check_communicator",
    "check_compressor",
    "check_kernels",
    "check_optimizer",
    "check_topology",
    "contract_of",
    "every_law",
    "lockstep",
    "read_only_numpy",
    "replace_draws",
    "until_death",
]
