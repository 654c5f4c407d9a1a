"""Run all laws on a compressor and say which it breaks."""

from collections.abc import Iterator
from typing import Any

import numpy as np
from hypothesis import HealthCheck, given, settings

from qcomp.core.compressor import Compressor
from qcomp.core.errors import NonFiniteError
from qcomp.testing.case import Case
from qcomp.testing.inputs import FAMILIES, sizes, vector, vectors
from qcomp.testing.laws import LAWS, VECTOR_LAWS
from qcomp.testing.libraries import Namespace
from qcomp.testing.vector_laws import VectorLaw

__all__ = ["ContractError", "broken_laws", "check_compressor"]


class ContractError(AssertionError):
    """A compressor breaks promises; the message names each, with the first case that shows it."""


def check_compressor(
    compressor: Compressor, xp: Namespace = np, *, jit: bool = False, max_examples: int = 30
) -> None:
    """Check that a compressor keeps every promise of the contract and of its traits.

    Parameters
    ----------
    compressor : Compressor
        Registered (`qcomp.register`), so that its payloads can be read.
    xp : namespace
        The array library to run on: numpy, torch, jax.numpy, array_api_strict, cupy, or
        `qcomp.testing.read_only_numpy`.
    jit : bool
        Whether to run under `jax.jit`.
    max_examples : int
        How many vectors Hypothesis draws for each law.

    Raises
    ------
    ContractError
        Naming every law that is broken.

    Notes
    -----
    Unbiasedness and variance are exact, by enumeration of all 65536 draws of an element: the compressor
    must take its randomness from `qcomp.core.random.draws16`. The same call finds the same cases each time.

    Examples
    --------
    >>> import qcomp, numpy
    >>> qcomp.testing.check_compressor(qcomp.QSGD(levels=3, bucket_size=16), xp=numpy, max_examples=5)
    """
    case = Case(compressor, xp, jit=jit)
    broken = [f"- {name}: {message}" for name, message in broken_laws(case, max_examples)]
    if broken:
        raise ContractError(f"{case!r} breaks {len(broken)} promise(s):\n" + "\n".join(broken))


def broken_laws(case: Case, max_examples: int, *, only: str | None = None) -> Iterator[tuple[str, str]]:
    """Yield the name of each broken law, or of the only one to try, and what showed it."""
    for law in LAWS:
        try:
            if only in (None, law.__name__):
                law(case)
        except Exception as error:
            yield law.__name__, _describe(error)
    for vector_law in VECTOR_LAWS:
        try:
            if only in (None, vector_law.__name__):
                _search(case, vector_law, max_examples)
        except Exception as error:
            yield vector_law.__name__, _describe(error)


def _search(case: Case, law: VectorLaw, max_examples: int) -> None:
    """Run a law on one vector of every family, then on what Hypothesis draws."""
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

    @settings(
        max_examples=max_examples,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(vectors(of_sizes))
    def run(x: np.ndarray[Any, Any]) -> None:
        check(x)

    run()


def _is_beyond_range(case: Case, x: np.ndarray[Any, Any]) -> bool:
    """Return whether the documented answer to a vector, which NumPy gives, is that the format cannot hold it."""
    try:
        case.on_numpy.compress(x)
    except NonFiniteError:
        return True
    return False


def _describe(error: Exception) -> str:
    text = str(error) or type(error).__name__
    return text if isinstance(error, AssertionError) else f"{type(error).__name__}: {text}"
