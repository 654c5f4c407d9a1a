"""`check_compressor`: runs all laws about a compressor, and reports the broken laws."""

from functools import partial
from typing import Any

import numpy as np

from qcomp.core.compressor import Compressor
from qcomp.core.errors import NonFiniteError
from qcomp.testing.compressor_case import Case
from qcomp.testing.inputs import FAMILIES, drawn, sizes, vector
from qcomp.testing.law_groups import Contract
from qcomp.testing.laws import FORM_LAWS, MEAN_LAWS, STATE_LAWS, VALUE_LAWS, VECTOR_LAWS
from qcomp.testing.libraries import Namespace
from qcomp.testing.state_laws import first_calls, independent_of_calls
from qcomp.testing.vector_laws import VectorLaw, applies


def check_compressor(
    compressor: Compressor,
    xp: Namespace = np,
    *,
    jit: bool = False,
    max_examples: int = 30,
    thorough: bool = False,
) -> None:
    """Check that a compressor keeps every promise of the contract and of its traits.

    Parameters
    ----------
    compressor : Compressor
        The compressor to check. Register it (`qcomp.register`), so that its payloads can be read.
    xp : namespace
        The array library to run on: numpy, torch, jax.numpy, array_api_strict, cupy, or
        `qcomp.testing.read_only_numpy`.
    jit : bool
        Whether to run under `jax.jit`.
    max_examples : int
        Number of vectors drawn for each law.
    thorough : bool
        Whether to draw ten times as many vectors, and to search longer for the worst vectors.

    Raises
    ------
    ContractError
        If laws are broken. The error names the broken laws of the first group that has any. The groups are the laws
        about announcements, about dependencies of results, about values, and about averages. Each group relies on the
        earlier ones.
    TypeError
        If ``compressor`` is not an instance of a compressor.

    Notes
    -----
    Every call with the same arguments checks the same cases. Averages are tested by means over many keys, with a
    false-alarm probability below 1e-6. If each draw of `qcomp.core.numeric.random.draws16` affects only its own
    element, unbiasedness is also checked exactly, by enumerating all 65536 draws. On libraries other than NumPy, the
    laws of averages run on NumPy, and the library must give the same bytes.

    Examples
    --------
    >>> import qcomp, numpy
    >>> qcomp.testing.check_compressor(qcomp.ScaledSign(bucket_size=16), xp=numpy, max_examples=5)
    """
    if isinstance(compressor, type):
        name = compressor.__name__
        raise TypeError(f"compressor is the class {name}; expected an instance of it, such as {name}()")
    if not isinstance(compressor, Compressor):
        raise TypeError(
            f"compressor is a {type(compressor).__name__}; expected an instance of a subclass of qcomp.Compressor"
        )
    case = Case(compressor, xp, jit=jit, thorough=thorough)
    compressor_contract(case, max_examples * (10 if thorough else 1)).require()


def compressor_contract(case: Case, max_examples: int = 30) -> Contract:
    """Return the laws about a compressor."""

    def call_first() -> None:
        case.first_calls = first_calls(case)

    of_vectors = [(law.__name__, partial(_search, case, law, max_examples)) for law in VECTOR_LAWS]
    groups = [
        *([(law.__name__, partial(law, case)) for law in laws] for laws in (FORM_LAWS, STATE_LAWS)),
        [*((law.__name__, partial(law, case)) for law in VALUE_LAWS), *of_vectors],
        [(law.__name__, partial(law, case.on_numpy)) for law in MEAN_LAWS],
    ]
    return Contract(repr(case), groups, {independent_of_calls.__name__: call_first})


def _search(case: Case, law: VectorLaw, max_examples: int) -> None:
    """Run a law on one vector of every family, then on drawn vectors."""
    if not applies(case, law):
        return
    of_sizes = sizes(case.compressor.traits.bucket_size)

    def check(x: np.ndarray[Any, Any]) -> None:
        try:
            law(case, x)
        except Exception:
            if not _is_beyond_range(case, x):
                raise

    for family in FAMILIES:
        for size in (7, of_sizes[-1]):
            check(vector(family, size, 0))
    for x in drawn(of_sizes, max_examples):
        check(x)


def _is_beyond_range(case: Case, x: np.ndarray[Any, Any]) -> bool:
    """Return whether NumPy refuses a vector with the documented error, because the format cannot represent it."""
    try:
        case.on_numpy.compress(x)
    except NonFiniteError:
        return True
    return False
