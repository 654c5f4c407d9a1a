"""The benchmark of compile times runs, and its page shows what was measured."""

import json
from pathlib import Path

import pytest

pytest.importorskip("jax", reason="jax is not installed")
pytest.importorskip("optax", reason="optax is not installed")

import compile_time
import page

FOLDER = Path(__file__).parents[2] / "docs" / "benchmarks" / "compiling"


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_small_case(run_program):
    options = ("--tensors", "1", "--devices", "2", "--methods", "pmean", "sign")
    folder = run_program(compile_time, *options)
    results = json.loads((folder / "after.json").read_text())["results"]
    assert [result["method"] for result in results] == ["pmean", "sign"]
    assert all(result["seconds"]["compile"] > 0 for result in results)


def test_the_page_shows_the_measured_results():
    text = (FOLDER / page.PAGE).read_text()
    assert page.replaced(text, compile_time.blocks(FOLDER)) == text


def test_what_the_page_says():
    """Nearly the same on four and eight devices, and a fraction of what it was."""
    after, before = (
        {(r["method"], r["tensors"], r["devices"]): compile_time.total(r) for r in results if "seconds" in r}
        for results in (
            json.loads((FOLDER / f"{name}.json").read_text())["results"] for name in ("after", "before")
        )
    )
    for method in compile_time.METHODS:
        for tensors in (1, 10, 100):
            assert after[method, tensors, 8] < 1.3 * after[method, tensors, 4]
        if method != "pmean":
            assert all(after[method, 10, devices] < 0.5 * before[method, 10, devices] for devices in (4, 8))
    assert after["sign", 100, 4] < 0.1 * before["sign", 100, 4]
