"""Arguments of a wrong kind are errors that name them, before anything is computed."""

import numpy as np
import pytest

import qcomp
from qcomp import feedback

X = np.ones(3, dtype=np.float32)
DRAWS, SIGNS = qcomp.QSGD(7, 16), qcomp.ScaledSign(8)
KEY = qcomp.Key(seed=1)


@pytest.mark.parametrize("key", [3, (1, 2)])
@pytest.mark.parametrize("compress", [DRAWS.compress, lambda x, key: feedback.compress(DRAWS, x, X, key=key)])
def test_keys(compress, key):
    with pytest.raises(
        TypeError,
        match=r"^key is .*; qsgd:.* draws random numbers and needs a qcomp\.Key, such as .* for the nth call",
    ):
        compress(X, key=key)


@pytest.mark.parametrize("given", [[1.0, 2.0], 3.0, None])
def test_arrays(given):
    calls = {
        "x": [lambda: SIGNS.compress(given), lambda: feedback.compress(SIGNS, given, X)],
        "residual": [lambda: feedback.compress(SIGNS, X, given)],
        "like": [lambda: SIGNS.decompress(SIGNS.compress(X), like=given)],
        "total": [lambda: SIGNS.add(SIGNS.compress(X), given)],
    }
    for name, of_argument in calls.items():
        for call in of_argument:
            with pytest.raises(TypeError, match=rf"^{name} is a \w+; expected an array$"):
                call()


def test_arrays_that_are_computed_later():
    """A slice of dask's is no view, and what was in new memory differs each time that it is computed."""

    class Array(np.ndarray):
        def compute(self):
            return np.asarray(self)

    x, comm = X.view(Array), qcomp.comm.LocalCommunicator.alone()
    opt = qcomp.Adam(learning_rate=0.1)
    for call in (lambda: SIGNS.compress(x), lambda: opt.init(x, comm), lambda: qcomp.comm.broadcast(x, comm)):
        with pytest.raises(
            TypeError, match=r"^\w+ is a tests.Array, whose values are computed later; .*x\.compute\(\)$"
        ):
            call()


@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_shared_memory_that_may_be_written_to(library):
    """Written to as the first, it was read as the second."""
    x = np.ones(90, dtype=np.float32) if library == "numpy" else pytest.importorskip("torch").ones(90)
    comm = qcomp.comm.LocalCommunicator.alone()
    opt, mean = qcomp.Adam(learning_rate=0.1), qcomp.CompressedMean(SIGNS)
    for both in ([x, x], [x[:], x[:]], [x[:40], x[30:]], [x, x.reshape(-1, 10)], [x[::2], x[::2]]):
        state, started = opt.init(both, comm), mean.init(both, comm)
        with pytest.raises(
            ValueError, match=r"^params\[0\] and params\[1\] share memory that may be written to"
        ):
            opt.step(both, both, state, comm, donate=True)
        with pytest.raises(ValueError, match=r"^x\[0\] and x\[1\] share memory that may be written to"):
            mean(both, started, comm, donate=True)
        opt.step(both, both, state, comm)
    for apart in ([x[:30], x[30:]], [x[::2], x[1::2]], [x[:0], x[:0]]):
        mean(apart, mean.init(apart, comm), comm, donate=True)


def test_payloads():
    for call in (lambda: SIGNS.decompress(b"abc", like=X), lambda: SIGNS.add(b"abc", X.copy())):
        with pytest.raises(TypeError, match=r"^payload is b'abc'; expected a qcomp\.Payload"):
            call()


@pytest.mark.parametrize(
    ("x", "dtype"),
    [
        (np.ones(2, np.longdouble), r"float\d+"),
        (np.ones(2, [("a", "f4")]), r"void\d+"),
        (np.array(["a"]), r"str\d+"),
        (np.array([None]), "object"),
    ],
)
def test_dtypes_without_portable_bytes(x, dtype):
    def rank_main(comm):
        with pytest.raises(TypeError, match=rf"^an array has dtype {dtype}; expected one of bool, "):
            qcomp.comm.broadcast(x, comm)

    if x.dtype != np.float64:  # longdouble is float64 on some machines
        qcomp.comm.run_local(2, rank_main)


@pytest.mark.slow
def test_mpi_that_has_not_begun(mpirun):
    code = (
        "import mpi4py\nmpi4py.rc(initialize=False)\nfrom mpi4py import MPI\nimport qcomp\n"
        "for make in (qcomp.comm.world, lambda: qcomp.comm.MPICommunicator(MPI.COMM_WORLD)):\n"
        "    try:\n        make()\n"
        "    except qcomp.CommunicatorError as error:\n        assert 'MPI has not begun' in str(error), error\n"
        "    else:\n        raise AssertionError\n"
        "MPI.Init_thread()\nassert qcomp.comm.world().size == 2\nMPI.Finalize()\n"
    )
    mpirun(2, ["-c", code])
