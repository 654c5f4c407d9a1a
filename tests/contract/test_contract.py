"""Every compressor keeps the whole contract on NumPy, and its bytes in every array library."""

import array_api_strict
import jax.numpy as jnp
import ml_dtypes  # noqa: F401 - gives NumPy a bfloat16, which is checked then
import numpy as np
import pytest
import torch

import qcomp
from qcomp.testing import check_compressor, read_only_numpy
from qcomp.testing.compressor_case import Case
from qcomp.testing.contract import compressor_contract
from tests.contract.compressors import COMPRESSORS, check_but_averages


def first_of_classes_without(listed):
    """Return the first compressor in the table of each class that has none in a list."""
    kinds = {type(c) for c in listed}
    return list({type(c): c for c in reversed(COMPRESSORS) if type(c) not in kinds}.values())


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
ONE_OF_EACH = QUICK | {
    qcomp.QSGD(levels=5, bucket_size=64, norm="l2"),
    qcomp.OneBitSGD(column_size=100),
    qcomp.RandK(k=8, bucket_size=64),
    qcomp.Scaled(qcomp.QSGD(levels=3, bucket_size=32)),
    qcomp.WholeFields(qcomp.QSGD(levels=3, bucket_size=64), field=25),
}
ONE_OF_EACH |= {*first_of_classes_without(ONE_OF_EACH)}
"""Besides these, the laws of values follow from those on NumPy, since the bytes are the same."""


def quick_or_slow(compressor):
    marks = [] if compressor in QUICK else [pytest.mark.exhaustive]
    return pytest.param(compressor, marks=marks, id=str(compressor))


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("compressor", [quick_or_slow(c) for c in COMPRESSORS])
def test_contract(compressor):
    check_compressor(compressor)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("compressor", "law"),
    [
        *(
            (qcomp.RandK(k=1, bucket_size=1024), law)
            for law in ("key_names_the_draws", "no_key_repeats", "draws_are_independent", "unbiased")
        ),
        (qcomp.RandK(k=2, bucket_size=512), "draws_are_independent"),
        (qcomp.Scaled(qcomp.RandK(k=1, bucket_size=512)), "contraction"),
    ],
    ids=str,
)
def test_elements_that_are_kept_rarely(compressor, law):
    """By chance, many draws keep none of an element's copies, and two keys keep the same elements."""
    assert list(compressor_contract(Case(compressor, np), 30).broken(only=law)) == []


@pytest.mark.exhaustive
@pytest.mark.timeout(400)
@pytest.mark.parametrize("compressor", [c for c in COMPRESSORS if c in ONE_OF_EACH], ids=str)
def test_contract_in_torch(compressor):
    check_but_averages(compressor, torch)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("compressor", COMPRESSORS, ids=str)
@pytest.mark.parametrize(
    ("law", "xp"),
    [
        *((law, torch) for law in ("same_bytes", "shapes_and_dtypes")),
        *(
            pytest.param(law, array_api_strict, marks=pytest.mark.exhaustive)
            for law in ("same_bytes", "shapes_and_dtypes", "pure", "nothing_is_shared")
        ),
        *(
            pytest.param(law, xp, marks=pytest.mark.exhaustive)
            for law in ("pure", "nothing_is_shared")
            for xp in (torch, read_only_numpy)
        ),
    ],
    ids=lambda part: getattr(part, "__name__", part),
)
def test_bytes_and_memory_in_other_libraries(compressor, xp, law):
    assert list(compressor_contract(Case(compressor, xp), 5).broken(only=law)) == []


@pytest.mark.exhaustive
@pytest.mark.timeout(900)
def test_contract_under_jit():
    """For one compressor: compiling for all the shapes of the laws takes a minute."""
    check_compressor(qcomp.ScaledSign(bucket_size=64, scale="rms"), jnp, jit=True)


UNDER_JIT = [
    qcomp.ScaledSign(),
    qcomp.QSGD(levels=5, bucket_size=64, norm="l2"),
    qcomp.OneBitSGD(column_size=100),
    qcomp.Scaled(qcomp.QSGD(levels=7, bucket_size=8)),
    qcomp.LloydMax(bits=4, bucket_size=64),
    qcomp.MinMaxUInt8(bucket_size=256),
    qcomp.TopK(k=5, bucket_size=64, value_bits=2, coding="fixed"),
    qcomp.Identity(),
    qcomp.Cast("float16"),
    qcomp.Cast("bfloat16"),
]
EXACT_PRODUCTS = {qcomp.RandK, qcomp.WholeFields}
"""Classes that only move elements, multiply them by powers of two, or call QSGD."""
UNDER_JIT += [
    c for c in first_of_classes_without(UNDER_JIT) if type(c) not in EXACT_PRODUCTS and not c.variable_length
]


@pytest.mark.exhaustive
@pytest.mark.parametrize("compressor", UNDER_JIT, ids=str)
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
