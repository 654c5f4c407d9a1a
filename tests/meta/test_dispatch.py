"""Checks work as functions, as one pytest test per law, and without pytest."""

import subprocess
import sys

import numpy as np
import pytest
import torch

import qcomp
from qcomp.testing import ContractError, contract_of, every_law
from tests.meta.test_broken_compressors import AddsEpsilon

LAWS_OF_IDENTITY = contract_of(qcomp.Identity()).names


@every_law(qcomp.Identity())
def test_every_law_is_a_test(law):
    law()


def test_each_law_has_a_test():
    (mark,) = test_every_law_is_a_test.pytestmark
    assert [case.id for case in mark.args[1]] == [f"{law} on numpy" for law in LAWS_OF_IDENTITY]
    assert len(LAWS_OF_IDENTITY) > 25


def test_each_law_is_checked_alone():
    cases = marked(every_law(AddsEpsilon()))
    laws = dict(zip(LAWS_OF_IDENTITY, [case.values[0] for case in cases], strict=True))
    laws["no_key_repeats"]()
    with pytest.raises(ContractError, match=r"breaks 1 promise\(s\):\n- zero_gives_zero: "):
        laws["zero_gives_zero"]()


def marked(decorator):
    """Return the cases that a decorator passes to a test."""

    def check(law):
        law()

    (mark,) = decorator(check).pytestmark
    return mark.args[1]


def test_several_libraries_are_several_tests():
    names = [case.id for case in marked(every_law(qcomp.Identity(), xp=[np, torch]))]
    assert names == [f"{law} on {library}" for library in ("numpy", "torch") for law in LAWS_OF_IDENTITY]


@pytest.mark.parametrize(
    ("thing", "subject"),
    [
        (qcomp.Identity(), "identity on numpy"),
        (qcomp.topologies.topology("ring"), "the topology 'ring' on numpy"),
        (qcomp.Adam(learning_rate=0.1), "Adam on numpy"),
        (qcomp.comm.LocalCommunicator.alone(), "rank 0 of LocalCommunicator on numpy"),
    ],
    ids=["compressor", "topology", "optimizer", "communicator"],
)
def test_everything_that_has_a_contract_is_recognised(thing, subject):
    contract = contract_of(thing)
    assert contract.subject == subject
    assert len(contract.names) == len(set(contract.names)) > 5


@pytest.mark.parametrize("thing", [3, None, qcomp.Identity, "sign", qcomp.comm.LocalCommunicator])
def test_objects_without_a_contract_are_refused(thing):
    with pytest.raises(TypeError, match="expected an instance of a compressor, a topology"):
        contract_of(thing)


@pytest.mark.slow
def test_pytest_is_not_needed():
    code = """
import sys
sys.modules["pytest"] = None
import qcomp
qcomp.testing.check_compressor(qcomp.Identity(), max_examples=2)
qcomp.comm.run_local(2, qcomp.testing.check_communicator)
print("pytest" in sys.modules and sys.modules["pytest"] is None)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.stdout, done.stderr) == ("True\n", "")
