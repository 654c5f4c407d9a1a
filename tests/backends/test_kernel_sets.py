"""Kernel sets return the bytes of the pure version, everywhere in the library."""

import array_api_strict
import numpy as np
import pytest
import torch

import qcomp
from qcomp.core.kernels import chosen, use_kernels
from qcomp.testing import ContractError, check_compressor, check_kernels, read_only_numpy
from qcomp.testing.inputs import vector

pytest.importorskip("numba")

from qcomp.backends.numba_cpu.kernel_set import KERNELS, NumbaKernels

FEEDBACK = [qcomp.ScaledSign(bucket_size=64), qcomp.QSGD(levels=7, bucket_size=128), qcomp.MinMaxUInt8(64)]


@pytest.mark.parametrize("xp", [np, torch, read_only_numpy], ids=lambda xp: xp.__name__)
def test_same_bytes(xp):
    check_kernels(KERNELS, xp)


def test_arrays_of_other_libraries_are_left_to_the_pure_version():
    check_kernels(KERNELS, array_api_strict, compressors=FEEDBACK[:1], max_examples=5)


@pytest.mark.parametrize("compressor", [*FEEDBACK, qcomp.Scaled(qcomp.QSGD(bucket_size=64))], ids=str)
def test_the_contract_holds_under_kernels(compressor):
    with qcomp.backends.use("numba"):
        check_compressor(compressor)


def test_compressors_of_others_are_left_to_the_pure_version():
    class Louder(qcomp.ScaledSign):
        def decode_block(self, codes, scales):
            return 2 * super().decode_block(codes, scales)

    x = vector("gaussian", 100, 0)
    c = Louder(bucket_size=64)
    expected = c.decompress(c.compress(x), like=x)
    with qcomp.backends.use("numba"):
        assert np.array_equal(c.decompress(c.compress(x), like=x), expected)


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


def test_the_choice_ends_with_the_context_and_pure_is_a_choice():
    assert chosen() is None
    with qcomp.backends.use("numba"):
        assert chosen() is KERNELS
        with qcomp.backends.use("pure"):
            assert chosen() is None
        assert chosen() is KERNELS
    assert chosen() is None


def test_an_unknown_set_is_an_error():
    with pytest.raises(ValueError, match="name is 'numbers'; expected one of pure, numba"):
        qcomp.backends.use("numbers")


def test_a_set_that_is_not_installed_is_an_error_with_a_hint(monkeypatch):
    monkeypatch.setitem(qcomp.backends._SETS, "numba", ("qcomp_numba_is_missing", "numba"))
    with pytest.raises(ImportError, match=r"pip install 'qcomp\[numba\]'"):
        qcomp.backends.use("numba")


class Broken(NumbaKernels):
    """Kernels with one thing wrong."""

    def __init__(self, fault):
        self.fault = fault

    def encode(self, compressor, x, residual, key, *, donate):
        if (
            self.fault == "skips the range check"
            and residual is not None
            and not np.all(np.abs(x) < 2.0**100)
        ):
            residual[...] = x
            return np.zeros(compressor.payload_spec(x.size).nbytes, dtype=np.uint8), residual
        found = super().encode(compressor, x, residual, key, donate=donate)
        if found is None or x.size < 8:
            return found
        data, new = found
        if self.fault == "flips a bit of the last byte":
            data[-1] ^= 1
        if self.fault == "forgets the old residual" and residual is not None:
            return super().encode(compressor, x, np.zeros_like(residual), key, donate=False)
        if self.fault == "rounds the residual" and new is not None:
            new = new.astype(np.float16).astype(np.float32)
        return data, new

    def decode(self, compressor, data, out, *, accumulate):
        if self.fault == "adds where it should write":
            out[...] = 1
            return super().decode(compressor, data, out, accumulate=True)
        if self.fault == "writes where it should add":
            return super().decode(compressor, data, out, accumulate=False)
        return super().decode(compressor, data, out, accumulate=accumulate)


@pytest.mark.parametrize(
    "fault",
    [
        "skips the range check",
        "flips a bit of the last byte",
        "forgets the old residual",
        "rounds the residual",
        "adds where it should write",
        "writes where it should add",
    ],
)
def test_broken_kernels_are_caught(fault):
    with pytest.raises(ContractError, match="differ from the pure version"):
        check_kernels(Broken(fault), compressors=[qcomp.ScaledSign(bucket_size=64)], max_examples=10)
    check_kernels(Broken(None), compressors=[qcomp.ScaledSign(bucket_size=64)], max_examples=10)
