"""Fixtures that select the loops of the coders."""

import pytest

import qcomp


@pytest.fixture
def numba_coders():
    """Use the compiled loops, without which long vectors would take too long."""
    pytest.importorskip("numba")
    with qcomp.backends.use("numba"):
        yield


@pytest.fixture(params=["pure", "numba"])
def coders(request):
    """Use the pure loops, then the compiled ones."""
    if request.param == "numba":
        pytest.importorskip("numba")
    with qcomp.backends.use(request.param):
        yield request.param
