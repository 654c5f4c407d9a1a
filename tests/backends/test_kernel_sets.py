"""Kernel sets return the bytes of the pure version everywhere in the library."""

import pickle

import array_api_strict
import numpy as np
import pytest
import torch

import qcomp
from qcomp.core.compressors.qsgd import WideQSGD
from qcomp.core.kernels import Blend, StepNumbers, use_kernels
from qcomp.testing import check_compressor, check_kernels, read_only_numpy
from qcomp.testing.inputs import doubles, vector
from qcomp.testing.kernels import COMPRESSORS
from tests.contract.compressors import COMPRESSORS as EVERY_COMPRESSOR

pytest.importorskip("numba")

from qcomp.backends.numba_cpu import kernel_set
from qcomp.backends.numba_cpu.frames import kernels_of
from qcomp.backends.numba_cpu.kernel_set import KERNELS, NumbaKernels
from qcomp.core import primitives

FEEDBACK = [qcomp.ScaledSign(bucket_size=64), qcomp.QSGD(levels=7, bucket_size=128), qcomp.MinMaxUInt8(64)]
WIDE = WideQSGD(levels=1000, bucket_size=64)


def marks(compressor):
    """Return the marks of a case: each class of compressors has kernels that take long to compile."""
    if compressor == qcomp.ScaledSign(bucket_size=8):
        return []
    return [pytest.mark.slow if compressor == WideQSGD(128, 64) else pytest.mark.exhaustive]


@pytest.mark.parametrize(
    "compressor",
    [pytest.param(c, marks=marks(c)) for c in COMPRESSORS],
    ids=str,
)
def test_same_bytes(compressor):
    check_kernels(KERNELS, compressors=[compressor])


class InFloat64:
    """A library whose float32 is float64, so that a check for float32 becomes one for float64."""

    def __init__(self, xp):
        self._xp, self.__name__ = xp, f"{xp.__name__} in float64"
        self.float32 = self.float64 = xp.float64

    def asarray(self, values, dtype=None):
        """Return an array of the library, with random values in the bits that float32 lacks."""
        values = np.asarray(values)
        return self._xp.asarray(doubles(values, 0) if dtype is self.float64 else values, dtype=dtype)


@pytest.mark.parametrize(
    "compressor",
    [pytest.param(c, marks=marks(c) or pytest.mark.slow) for c in COMPRESSORS],
    ids=str,
)
def test_same_bytes_in_float64(compressor):
    check_kernels(KERNELS, InFloat64(np), compressors=[compressor], max_examples=10)


TINY = 2.0**-126
EDGES = (
    *(5e-324, -1e-310, 2.0**-1022, -(2.0**-1021), 1e-200, -0.0, 0.0, 2.0**-149, -TINY / 3, TINY, -TINY),
    *(TINY * (1 - 2.0**-40), 1e-9, 1 / 3, 1 - 2.0**-53, -1 - 2.0**-52, 1e16 + 2),
)


@pytest.mark.slow  # a worker of the quick run would compile these kernels beside all others, and grow
@pytest.mark.parametrize("as_array", [np.asarray, torch.asarray], ids=["numpy", "torch"])
@pytest.mark.parametrize("factor", [1.0, 2.0**60, 2.0**940, 2.0**943])
@pytest.mark.parametrize("compressor", [qcomp.Identity(), *FEEDBACK], ids=str)
def test_edge_values_of_float64(compressor, factor, as_array):
    """Values that float32 lacks: below 2^-126, from 2^100 on, and between its neighbours."""
    values, key = np.tile(np.asarray(EDGES) * factor, 13), qcomp.Key(seed=3)
    results = []
    for kernels in ("pure", "numba"):
        with qcomp.backends.use(kernels):
            x, residual = as_array(values.copy()), as_array(values[::-1].copy() / 3)
            try:
                payload = compressor.compress(x, key=key)
                encoded = primitives.encode(compressor, x, residual, key)
                primitives.require_accepted(compressor, encoded)
            except qcomp.NonFiniteError as error:
                results.append(str(error))
                continue
            mean = primitives.average(compressor, [payload, payload, payload], x)
            found = [payload.data, encoded.data, encoded.residual, mean, primitives.finish_mean(x, 3)]
            results.append([np.asarray(part).tobytes() for part in found])
    assert results[0] == results[1]
    assert isinstance(results[0], str) == (
        factor > 1e18 and not (compressor.traits.lossless and factor < 2**942)
    )


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "xp", [torch, pytest.param(read_only_numpy, marks=pytest.mark.exhaustive)], ids=lambda xp: xp.__name__
)
@pytest.mark.parametrize(
    "compressors",
    [FEEDBACK[:1], pytest.param(FEEDBACK[1:], marks=pytest.mark.exhaustive)],
    ids=["first", "others"],
)
def test_same_bytes_in_other_arrays(xp, compressors):
    """The same kernels on the same memory; only the conversion of inputs and results differs."""
    check_kernels(KERNELS, xp, compressors=compressors, max_examples=3)


def test_arrays_of_other_libraries_use_the_pure_version():
    x = array_api_strict.asarray(vector("gaussian", 1000, 0))
    assert not KERNELS.takes(x)
    with qcomp.backends.use("numba"):
        found = FEEDBACK[0].compress(x)
    with qcomp.backends.use("pure"):
        assert found.to_bytes() == FEEDBACK[0].compress(x).to_bytes()


@pytest.mark.slow
@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("offset", range(0, 9, 3))
@pytest.mark.parametrize(
    "compressor",
    [
        *FEEDBACK,
        WIDE,
        qcomp.Scaled(qcomp.QSGD(bucket_size=16)),
        qcomp.WholeFields(qcomp.QSGD(7, 64), field=9),
    ],
    ids=str,
)
def test_large_results_are_streamed_past_the_caches(monkeypatch, compressor, offset):
    """With the size limit lowered, so that small results count as large: at every alignment, with a tail."""
    monkeypatch.setattr(kernel_set, "pays", lambda size: True)
    x = vector("wide", 1001, 0)
    payload = compressor.compress(x, key=qcomp.Key())
    expected = compressor.decompress(payload, like=x)
    room = np.full(1001 + 32, np.float32(7.0))
    out = room[offset : offset + 1001]
    with qcomp.backends.use("numba"):
        assert compressor.decompress(payload, like=x, out=out) is out
    assert out.tobytes() == expected.tobytes()
    assert (room[:offset] == 7).all()
    assert (room[offset + 1001 :] == 7).all()


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("compressor", [*FEEDBACK, WIDE], ids=str)
def test_a_value_out_of_range_is_refused_even_if_it_is_overwritten(compressor):
    """x + residual is too large, x + 2 residual is not: a check after donated x is overwritten finds nothing."""
    x, residual = np.full(200, np.float32(1.0)), np.zeros(200, dtype=np.float32)
    x[70], residual[70] = 1.5 * 2.0**100, -0.4 * 2.0**100

    def compress(given):
        encoded = primitives.encode(compressor, given, residual, qcomp.Key(), out=given)
        primitives.require_accepted(compressor, encoded)

    for kernels in ("pure", "numba"):
        with qcomp.backends.use(kernels), pytest.raises(qcomp.NonFiniteError):
            compress(x.copy())


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "compressor",
    [
        FEEDBACK[1],
        *(pytest.param(c, marks=pytest.mark.exhaustive) for c in (FEEDBACK[0], FEEDBACK[2])),
        pytest.param(qcomp.Scaled(qcomp.QSGD(bucket_size=64)), marks=pytest.mark.exhaustive),
        pytest.param(qcomp.QSGD(1000, 64, coding="range"), marks=pytest.mark.exhaustive),
    ],
    ids=str,
)
def test_the_contract_holds_under_kernels(compressor):
    with qcomp.backends.use("numba"):
        check_compressor(compressor)


def test_compressors_of_other_packages_use_the_pure_version():
    class Louder(qcomp.ScaledSign):
        def decode_block(self, codes, scales):
            return 2 * super().decode_block(codes, scales)

    x = vector("gaussian", 100, 0)
    c = Louder(bucket_size=64)
    expected = c.decompress(c.compress(x), like=x)
    with qcomp.backends.use("numba"):
        assert np.array_equal(c.decompress(c.compress(x), like=x), expected)


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize("as_array", [np.asarray, torch.asarray], ids=["numpy", "torch"])
@pytest.mark.parametrize("compressor", FEEDBACK, ids=str)
def test_a_mean_and_its_residuals_are_the_same_with_kernels(compressor, as_array):
    allreduce = qcomp.CompressedMean(compressor)

    def rank_main(comm):
        state = allreduce.init(as_array(vector("gaussian", 1000, 0)), comm)
        means = []
        for step in range(3):
            x = as_array(vector("gaussian", 1000, 10 * step + comm.rank))
            mean, state = allreduce(x, state, comm, key=qcomp.Key(step=step))
            means.append(np.asarray(mean).tobytes())
        return means, [np.asarray(r).tobytes() for r in (*state.worker, *state.server)]

    expected = qcomp.comm.run_local(3, rank_main)
    with qcomp.backends.use("numba"):
        assert qcomp.comm.run_local(3, rank_main) == expected


def test_a_mean_that_kernels_decline_is_made_by_the_pure_version():
    class Declining(NumbaKernels):
        def average_frame(self, *_):
            return False

    allreduce = qcomp.CompressedMean(qcomp.ScaledSign(), "all_gather", feedback=False)

    def rank_main(comm):
        x = vector("gaussian", 1000, comm.rank)
        return allreduce(x, allreduce.init(x, comm), comm)[0].tobytes()

    expected = qcomp.comm.run_local(2, rank_main)
    with use_kernels(Declining()):
        assert qcomp.comm.run_local(2, rank_main) == expected


def test_kernels_are_really_used():
    calls = []

    class Spy(NumbaKernels):
        def encode(self, *args, **options):
            calls.append("encode")
            return super().encode(*args, **options)

        def decode(self, *args, **options):
            calls.append("decode")
            return super().decode(*args, **options)

    x = vector("gaussian", 100, 0)
    c = qcomp.ScaledSign()
    with use_kernels(Spy()):
        payload = c.compress(x)
        c.decompress(payload, like=x)
    assert calls == ["encode", "decode"]


def test_arrays_that_were_unpickled_have_kernels():
    """Their dtype is not the object that other arrays share."""
    x = vector("gaussian", 100, 0)
    unpickled = pickle.loads(pickle.dumps(x))
    assert unpickled.dtype is not x.dtype
    for values, residual in ((x, unpickled), (unpickled, x)):
        assert KERNELS.encode(qcomp.ScaledSign(), values, residual, None, out=None, blend=None) is not None


@pytest.mark.parametrize("as_array", [np.asarray, torch.asarray], ids=["numpy", "torch"])
def test_arrays_of_different_dtypes_have_no_kernels(as_array):
    c, values = qcomp.ScaledSign(), vector("gaussian", 100, 0)
    arrays = as_array(values), as_array(values.astype(np.float64))
    for x, other in (arrays, arrays[::-1]):
        blend, numbers = Blend(other, 0.9, 1.0), StepNumbers(1, 1, 1, 0)
        assert KERNELS.encode(c, x, other, None, out=None, blend=None) is None
        assert KERNELS.encode(c, x, None, None, out=None, blend=blend) is None
        assert KERNELS.decode(c, c.compress(x).data, x, out=other, accumulate=False) is None
        assert KERNELS.momentum(x, other, 0.9, 1.0) is None
        assert KERNELS.descend(x, other, 0.1, 0.0, out=None) is None
        assert KERNELS.frozen_steps([x], [other], [x], [numbers], donate=False) is None
        assert KERNELS.frozen_steps([x, other], [x, other], [x, other], [numbers] * 2, donate=False) is None
        assert KERNELS.empty_likes([x, other]) is None


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize(
    ("compressor", "has_kernels"),
    [
        (WIDE, True),
        (qcomp.Scaled(WIDE), True),
        (qcomp.WholeFields(WIDE, field=9), True),
        (qcomp.WholeFields(qcomp.Scaled(qcomp.QSGD()), field=25), True),
        (qcomp.TopK(k=3, bucket_size=64), True),
        (qcomp.TopK(k=3, bucket_size=64, value_bits=2, coding="fixed"), True),
        (qcomp.WholeFields(qcomp.TopK(k=3, bucket_size=64), field=9), False),
        (qcomp.Scaled(qcomp.WholeFields(qcomp.QSGD(), field=25)), False),
    ],
    ids=str,
)
def test_which_compressors_have_kernels(compressor, has_kernels):
    x = vector("gaussian", 100, 0)
    how = {"out": None, "blend": None}
    data = compressor.compress(x, key=qcomp.Key()).data
    assert (KERNELS.encode(compressor, x, None, qcomp.Key(), **how) is not None) == has_kernels
    assert (KERNELS.decode(compressor, data, x, out=None, accumulate=False) is not None) == has_kernels


def test_compressors_that_check_kernels_tries_have_some():
    """Without kernels, it would compare the pure version with itself."""
    without = [c.spec for c in COMPRESSORS if kernels_of(c) is None]
    assert not without, f"numba_cpu/frames.py returns no kernels for {without}"


def test_compressors_that_check_kernels_does_not_try_have_none():
    """Nothing else would notice a wrong byte of such a kernel."""
    x, checked = vector("gaussian", 128, 0), {type(c) for c in COMPRESSORS}
    others = [c for c in EVERY_COMPRESSOR if type(c) not in checked]
    assert others
    for c in others:
        data = c.compress(x, key=qcomp.Key()).data
        assert KERNELS.encode(c, x, None, qcomp.Key(), out=None, blend=None) is None, c
        assert KERNELS.decode(c, data, x, out=None, accumulate=False) is None, c
