"""Fixtures that select the loops of the coders."""

import pytest

import qcomp


@pytest.fixture
def numba_coders():
    """Use the compiled loops, without which long vectors would take too long."""
    pytest.importorskip("numba")
    with qcomp.backends.use("numba"):
        yield


@pytest.fixture
def coders_for_size(size):
    """Use the pure loops, or for a size with which they would take seconds the compiled ones."""
    if size > 1 << 15:
        pytest.importorskip("numba")
    with qcomp.backends.use("numba" if size > 1 << 15 else "pure"):
        yield


@pytest.fixture(params=["pure", pytest.param("numba", marks=pytest.mark.slow)])
def coders(request):
    """Use the pure loops, then the compiled ones."""
    if request.param == "numba":
        pytest.importorskip("numba")
    with qcomp.backends.use(request.param):
        yield request.param
