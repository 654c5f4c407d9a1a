"""The contract of a compressor, topology, optimizer, kernel set or communicator, and a test for each of its laws."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from qcomp.core.compressor import Compressor
from qcomp.core.mean.topologies.base import Topology
from qcomp.core.optimizers.base import Optimizer
from qcomp.testing.communicators import communicator_contract
from qcomp.testing.compressor_case import Case
from qcomp.testing.contract import compressor_contract
from qcomp.testing.kernels import kernel_contract
from qcomp.testing.law_groups import Contract
from qcomp.testing.libraries import Namespace, library_name
from qcomp.testing.optimizers import optimizer_contract
from qcomp.testing.topologies import topology_contract


def contract_of(thing: Any, xp: Namespace = np, *, thorough: bool = False) -> Contract:
    """Return the contract of a compressor, topology, optimizer, kernel set or communicator.

    Parameters
    ----------
    thing : Compressor, Topology, Optimizer, KernelSet or Communicator
    xp : namespace
        The array library to run on.
    thorough : bool
        Whether to try more vectors, more worlds, or failures that close a communicator.

    Raises
    ------
    TypeError
        If ``thing`` is none of these.

    Examples
    --------
    >>> import qcomp
    >>> contract = contract_of(qcomp.Identity())
    >>> contract.subject, contract.names[0], list(contract.broken(only="zero_gives_zero"))
    ('identity on numpy', 'sound_traits', [])
    """
    if isinstance(thing, Compressor):
        return compressor_contract(Case(thing, xp, thorough=thorough), 300 if thorough else 30)
    if isinstance(thing, Topology):
        return topology_contract(thing, xp, thorough=thorough)
    if isinstance(thing, Optimizer):
        return optimizer_contract(thing, xp)
    if not isinstance(thing, type) and hasattr(thing, "takes"):
        return kernel_contract(thing, xp, max_examples=300 if thorough else 30)
    if not isinstance(thing, type) and all(hasattr(thing, name) for name in ("all_to_all", "all_gather")):
        return communicator_contract(thing, xp, failures=thorough)
    raise TypeError(
        f"thing is {thing!r}; expected an instance of a compressor, a topology, an optimizer, a kernel set or a "
        "communicator"
    )


def every_law(
    thing: Any, *, xp: Namespace | Sequence[Namespace] = np, thorough: bool = False
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Run a pytest test once for each law of a contract. It decorates a test that has the argument ``law``.

    Parameters
    ----------
    thing : Compressor, Topology, Optimizer or KernelSet
        What to check. The laws of a communicator need several ranks, see `check_communicator`.
    xp : namespace or sequence of namespaces
        The array libraries to run on.
    thorough : bool
        As for `contract_of`.

    Returns
    -------
    callable
        A decorator, `pytest.mark.parametrize`. The test calls ``law()``, which raises `ContractError` if the law is
        broken.

    Raises
    ------
    TypeError
        As for `contract_of`.

    Examples
    --------
    >>> import qcomp
    >>> @every_law(qcomp.Identity())
    ... def test_keeps_its_promises(law):
    ...     law()
    >>> test_keeps_its_promises.pytestmark[0].args[1][0].id
    'sound_traits on numpy'
    """
    import pytest  # noqa: PLC0415 - the checks themselves do not need it

    libraries = xp if isinstance(xp, Sequence) else (xp,)
    contracts = {
        library_name(library): contract_of(thing, library, thorough=thorough) for library in libraries
    }
    cases = [
        pytest.param(partial(contract.require, only=name), id=f"{name} on {library}")
        for library, contract in contracts.items()
        for name in contract.names
    ]
    return pytest.mark.parametrize("law", cases)
