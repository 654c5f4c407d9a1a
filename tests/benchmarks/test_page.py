"""The tables of the page, and that the committed page shows the committed numbers."""

import json
from pathlib import Path

import pytest

pytest.importorskip("numba")
pytest.importorskip("torch")

import gpu
import half_precision
import kernels
import muon
import muon_times
import overhead
import page

FOLDER = Path(__file__).parents[2] / "docs" / "benchmarks"
PROGRAMS = [kernels, overhead, gpu, muon, muon_times, half_precision]


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_the_page_shows_the_committed_numbers(program):
    results = FOLDER / f"{program.__name__}.json"
    text = (FOLDER / page.PAGE).read_text()
    if not results.exists():
        assert f"<!-- {program.__name__} -->\nNot measured yet.\n" in text
        return
    assert page.replaced(text, program.blocks(json.loads(results.read_text()))) == text


def test_a_block_is_replaced_and_the_rest_stays():
    text = "a\n<!-- x -->\nold\n<!-- end of x -->\nb <!-- y -->\n<!-- end of y -->\n"
    once = page.replaced(text, {"x": "new"})
    assert once == "a\n<!-- x -->\nnew\n<!-- end of x -->\nb <!-- y -->\n<!-- end of y -->\n"
    assert page.replaced(once, {"x": "new"}) == once


@pytest.mark.parametrize("text", ["", "<!-- x -->\n", "<!-- end of x -->\n<!-- x -->\n"])
def test_a_page_without_the_block_is_an_error(text):
    with pytest.raises(
        ValueError, match="the page has no block 'x'; expected <!-- x --> and <!-- end of x -->"
    ):
        page.replaced(text, {"x": "new"})


def test_tables_and_cells():
    assert page.table(["", "b"], [["1", "2"]]) == "|  | b |\n| --- | --- |\n| 1 | 2 |"
    assert page.cell({"median": 1.2345, "quartiles": [0.5, 1234.5]}) == "1.23 (0.5 to 1234)"
    assert page.cell(None) == ""


def test_a_page_says_if_its_numbers_are_of_a_trial():
    document = {"machine": {"cores": 2, "numpy": "2.0"}, "rounds": 7}
    assert page.made(document) == "Medians (quartiles) of 7 rounds; cores 2, numpy 2.0."
    assert page.made(document | {"rounds": 6}).startswith("**A trial: too few rounds to mean anything.** ")
