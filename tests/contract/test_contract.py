"""Every compressor keeps the whole contract in every array library."""

import array_api_strict
import jax.numpy as jnp
import ml_dtypes  # noqa: F401 - gives NumPy a bfloat16, which is checked then
import numpy as np
import pytest
import torch

import qcomp
from qcomp.testing import check_compressor, read_only_numpy
from qcomp.testing.case import Case
from qcomp.testing.contract import compressor_contract
from tests.contract.compressors import COMPRESSORS

LIBRARIES = [np, read_only_numpy, torch, array_api_strict]
QUICK_LAWS = [("same_bytes", torch), ("shapes_and_dtypes", torch)]
"""The golden payloads test the same for read-only arrays and the strict library."""


QUICK = {
    qcomp.ScaledSign(bucket_size=8, scale="rms"),
    qcomp.LloydMax(bits=3, bucket_size=8),
    qcomp.MinMaxUInt8(),
    qcomp.Identity(),
    qcomp.Cast("bfloat16"),
    qcomp.TopK(k=5, bucket_size=64),
    qcomp.TopK(k=8, bucket_size=512, value_bits=4, coding="fixed"),
}
"""One compressor of each kind, each checked in a second or two; tests/backends checks QSGD with kernels quickly."""


def quick_or_slow(compressor):
    marks = [] if compressor in QUICK else [pytest.mark.slow]
    return pytest.param(compressor, marks=marks, id=str(compressor))


@pytest.mark.parametrize("compressor", [quick_or_slow(c) for c in COMPRESSORS])
def test_contract(compressor):
    check_compressor(compressor)


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("xp", [read_only_numpy, torch], ids=lambda xp: xp.__name__)
@pytest.mark.parametrize("compressor", COMPRESSORS, ids=str)
def test_contract_in_other_libraries(compressor, xp):
    check_compressor(compressor, xp, max_examples=5)


@pytest.mark.parametrize("compressor", COMPRESSORS, ids=str)
@pytest.mark.parametrize(
    ("law", "xp"),
    [
        pytest.param(
            law, xp, marks=[] if (law, xp) in QUICK_LAWS else [pytest.mark.slow], id=f"{law}-{xp.__name__}"
        )
        for law in ("same_bytes", "shapes_and_dtypes", "pure", "nothing_is_shared")
        for xp in LIBRARIES[1:]
    ],
)
def test_bytes_and_memory_in_other_libraries(compressor, xp, law):
    assert list(compressor_contract(Case(compressor, xp), 5).broken(only=law)) == []


# One compressor of each kind: compiling takes most of the time, and other parameters compile the same code.
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "compressor",
    [
        qcomp.ScaledSign(),
        qcomp.ScaledSign(bucket_size=64, scale="rms"),
        qcomp.QSGD(levels=5, bucket_size=64, norm="l2"),
        qcomp.LloydMax(bits=4, bucket_size=64),
        qcomp.MinMaxUInt8(bucket_size=256),
        qcomp.Identity(),
        qcomp.Cast("bfloat16"),
        qcomp.Cast("float16"),
    ],
    ids=str,
)
def test_contract_under_jit(compressor):
    check_compressor(compressor, jnp, jit=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    "compressor",
    [
        qcomp.OneBitSGD(column_size=100),
        qcomp.Scaled(qcomp.QSGD(levels=7, bucket_size=8)),
        pytest.param(qcomp.TopK(k=5, bucket_size=64, value_bits=2, coding="fixed"), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_bytes_under_jit(compressor):
    """The bytes show whether the compiler fused what it must not; the other laws follow from those in NumPy."""
    assert list(compressor_contract(Case(compressor, jnp, jit=True), 10).broken(only="same_bytes")) == []


def test_every_compressor_is_in_the_table():
    assert {type(c) for c in COMPRESSORS} == {
        value
        for name in qcomp.__all__
        if isinstance(value := getattr(qcomp, name), type)
        and issubclass(value, qcomp.Compressor)
        and value is not qcomp.Compressor
    }
