"""An array library whose arrays NumPy can read through DLPack alone computes what NumPy computes."""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import array_api_strict
import numpy as np
import pytest

import qcomp
from qcomp.comm import broadcast, run_local
from qcomp.core.numeric.arrays import host_bytes

COMPRESSORS = (
    "sign:bucket_size=64",
    "qsgd:levels=7,bucket_size=64",
    "topk:k=8,bucket_size=64",
    "cast",
    "identity",
)


@contextmanager
def dlpack_alone() -> Iterator[None]:
    """Take from array_api_strict the protocols that the standard lacks."""
    kind = type(array_api_strict.zeros(1))
    with pytest.MonkeyPatch.context() as patch:
        for protocol in ("__array__", "__buffer__"):
            patch.delattr(kind, protocol, raising=False)
        assert np.asarray(array_api_strict.zeros(3)).dtype == object
        yield


def work(comm, xp):
    """Return a digest of all that a rank computes with arrays of a library."""
    held = []

    def drawn(step, dtype=np.float32):
        return xp.asarray(np.random.default_rng([comm.rank, step]).standard_normal((30, 11)).astype(dtype))

    for spec in COMPRESSORS:
        compressor = qcomp.compressor(spec)
        for dtype in (np.float32, np.float64):
            x = drawn(0, dtype)
            payload = compressor.compress(x, key=qcomp.Key(seed=1))
            held += [payload.data, compressor.decompress(payload, like=x)]
            held.append(qcomp.Payload.from_bytes(payload.to_bytes(), like=x).data)
    held += broadcast([drawn(1), drawn(2) > 0, drawn(3, np.float64)], comm)
    opt = qcomp.OneBitAdam(learning_rate=0.01, freeze=2, exact=None)
    params = broadcast(drawn(4), comm)
    state = opt.init(params, comm)
    for step in range(6):
        if step == 4:
            state = opt.load_state_dict(opt.state_dict(state), params, comm)
        params, state = opt.step(params, drawn(5 + step), state, comm)
    assert state.stage == "compressed"
    held += [params, *state.exchange.worker]
    held += qcomp.checkpoint.to_arrays(opt.state_dict(state), like=params).values()
    assert {type(x) for x in held} == {type(params)}
    return hashlib.sha256(b"".join(map(host_bytes, held))).hexdigest()


@pytest.mark.filterwarnings("ignore:the variance")
def test_ranks_in_threads():
    expected = run_local(2, lambda comm: work(comm, np), timeout=60)
    with dlpack_alone():
        assert run_local(2, lambda comm: work(comm, array_api_strict), timeout=60) == expected


@pytest.mark.mpi
def test_ranks_of_mpi(mpirun):
    program = """
import warnings
warnings.filterwarnings("ignore", "the variance")
import array_api_strict, numpy, qcomp
from tests.core.test_dlpack import dlpack_alone, work
comm = qcomp.comm.world()
expected = work(comm, numpy)
with dlpack_alone():
    assert work(comm, array_api_strict) == expected
"""
    mpirun(2, ["-c", program])
