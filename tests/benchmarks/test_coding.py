"""The benchmark of the codes runs from start to end, and its table shows its numbers."""

import json
from pathlib import Path

import pytest

pytest.importorskip("numba")

import coding
import page

PAGE = Path(__file__).parents[2] / "docs" / "benchmarks"

pytestmark = pytest.mark.timeout(400)  # kernels may have to be compiled first


def test_coding(run_program, tmp_path):
    (tmp_path / page.PAGE).write_text("<!-- coding -->\n<!-- end of coding -->\n")
    folder = run_program(coding, "--rounds", "2", "--largest", "10")
    document = json.loads((folder / "coding.json").read_text())
    rows = {(r["subject"], r["code"], r["kernels"], r["what"]): r for r in document["results"]}
    assert len(rows) == len(document["results"]) == len(coding.VECTORS) * 2 * 2 * 2
    for row in rows.values():
        low, high = row["megabytes_per_second"]["quartiles"]
        assert 0 < low <= row["megabytes_per_second"]["median"] <= high
        assert row["bits"] > row["entropy"] > 0
    text = (folder / page.PAGE).read_text()
    assert coding.blocks(document)["coding"] in text
    assert run_program(coding, "--table")
    assert (folder / page.PAGE).read_text() == text


def test_a_rate_is_elements_of_four_bytes_over_seconds():
    row = {"elements": 10**6, "seconds": {"median": 0.1, "quartiles": [0.05, 0.2]}}
    assert coding.rate(row) == {"median": 40.0, "quartiles": [20.0, 80.0]}


def test_the_page_shows_the_committed_numbers():
    text, results = (PAGE / page.PAGE).read_text(), PAGE / "coding.json"
    if results.exists():
        assert page.replaced(text, coding.blocks(json.loads(results.read_text()))) == text
    else:
        assert "<!-- coding -->\nNot measured yet.\n" in text
