"""The contract accepts correct designs that are unlike qcomp's own, and catches them with one fault each."""

import numpy as np
import pytest

from qcomp.testing import check_compressor
from qcomp.testing.compressor_case import Case
from qcomp.testing.contract import compressor_contract

from . import forgeries, papers

ONCE_ACCUSED = [
    (papers.Pairs(), "padding_never_leaks"),
    (papers.Coin(), "key_names_the_draws"),
    (papers.OneOfEight(), "no_key_repeats"),
    (papers.Coin(), "draws_are_independent"),
    (papers.TwoDraws(), "unbiased_to_the_last_draw"),
    (papers.WideDraws(), "unbiased_at_every_size"),
]
"""An odd element shares a code with padding; few draws are alike by chance; two draws of an element are independent."""


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize(("compressor", "law"), ONCE_ACCUSED, ids=str)
def test_what_is_unusual_is_not_accused(compressor, law):
    assert list(compressor_contract(Case(compressor, np), 5).broken(only=law)) == []


@pytest.mark.quick_cases(4)
@pytest.mark.parametrize(
    ("compressor", "law"),
    [pytest.param(c, law, id=f"{kind}-{c.name}") for c, kind, law in forgeries.FORGERIES],
)
def test_a_design_with_one_fault_breaks_a_law(compressor, law):
    assert [name for name, _ in compressor_contract(Case(compressor, np), 20).broken(only=law)] == [law]


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "compressor",
    [
        pytest.param(c, marks=pytest.mark.exhaustive if number % 6 else pytest.mark.slow)
        for number, c in enumerate(papers.PAPERS)
    ],
    ids=str,
)
def test_correct_compressors_after_published_designs_pass(compressor):
    check_compressor(compressor, max_examples=5)
