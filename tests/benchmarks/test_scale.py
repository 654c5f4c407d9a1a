"""Many ranks: the computed page, and the page of those run on one machine."""

import json
from pathlib import Path

import planning_rig
import planning_scale
import pytest
from network.scale import METHODS

PAGE = Path(__file__).parents[2] / "docs" / "planning" / "README.md"


def test_without_variation_the_slowest_rank_takes_the_mean_time(monkeypatch):
    monkeypatch.setattr(planning_scale, "OWN", 0.0)
    monkeypatch.setattr(planning_scale, "EACH", 0.0)
    assert planning_scale.slowest.__wrapped__(4, 3) == pytest.approx(1.0)


def test_many_ranks_wait_longer_and_long_rounds_less():
    found = {(n, every): planning_scale.slowest(n, every) for n in (16, 64) for every in (1, 25)}
    assert 1 < found[16, 25] < found[16, 1] < found[64, 1]
    assert found[64, 25] < found[64, 1]


@pytest.mark.exhaustive  # draws 40 million numbers
def test_the_page_shows_the_computed_figures():
    assert f"<!-- scale -->\n{planning_scale.table()}\n<!-- end of scale -->" in PAGE.read_text()


def test_the_rig_writes_its_page(run_program, tmp_path):
    steps = {n: {"seconds": {"median": 0.2, "quartiles": [0.2, 0.2]}, "predicted": 0.25} for n in METHODS}
    run = {"ranks": 8, "link": "100mbit", "steps": steps}
    (tmp_path / "8-100mbit.json").write_text(json.dumps(run))
    folder = run_program(planning_rig, "--page", "--ranks", "8")
    assert "| 8 ranks, 100mbit | sign, 1 bit | 200 | 250 | +25% |" in (folder / "README.md").read_text()
