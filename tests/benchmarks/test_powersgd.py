"""The page on PowerSGD is generated from the files of its runs."""

import json
from pathlib import Path

import powersgd_times
from network.powersgd import EXACT, VARIANTS

PAGE = Path(__file__).parents[2] / "docs" / "benchmarks" / "powersgd" / "README.md"
SPREAD = {"median": 0.5, "quartiles": [0.4, 0.6]}


def test_the_program_writes_the_page(run_program, tmp_path):
    run = {"machine": {"cores": 2}, "model": "mlp", "ranks": 2, "link": "1gbit", "rounds": 9}
    steps = {name: {"seconds": SPREAD, "bytes": 83_000} for name in VARIANTS}
    steps["qcomp, rank 2"] = {"seconds": SPREAD | {"median": 0.25}, "bytes": 140_000}
    (tmp_path / "mlp-1gbit.json").write_text(json.dumps(run | {"steps": steps}))
    curves = {name: [2.0] * 20 + [1.0] * 20 for name in VARIANTS}
    (tmp_path / "mlp-curves.json").write_text(json.dumps(run | {"curves": curves}))
    (tmp_path / PAGE.name).write_text(PAGE.read_text())
    folder = run_program(powersgd_times, "--page", "--models", "mlp", "--links", "1gbit")
    text = (folder / "README.md").read_text()
    assert "| qcomp, rank 2 | 0.25 (0.4 to 0.6) | 0.14 | 2.00 |" in text
    assert f"| {EXACT} | 1 |" in text
    run_program(powersgd_times, "--page", "--models", "mlp", "--links", "1gbit")
    assert (folder / "README.md").read_text() == text


def test_the_committed_page_shows_the_committed_files(run_program, tmp_path):
    for path in PAGE.parent.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    run_program(powersgd_times, "--page")
    assert (tmp_path / PAGE.name).read_text() == PAGE.read_text()
