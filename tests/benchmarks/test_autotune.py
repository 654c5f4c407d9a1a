"""The page on Autotune is generated from the files of its runs."""

import json

import autotune_times
from network.autotune import METHODS, STOCK, TUNED


def test_the_program_writes_the_page(run_program, tmp_path):
    def took(median):
        return {"seconds": {"median": median, "quartiles": [median, median]}, "bytes": 1}

    steps = {name: took(1.0 + i) for i, name in enumerate(METHODS)} | {STOCK: took(9.0)}
    steps[TUNED] = took(2.2) | {"chosen": "min-max, 8 bits", "tried": {}, "iterations": 33}
    run = {"model": "mlp", "ranks": 2, "link": "1gbit", "steps": steps}
    (tmp_path / "mlp-2-1gbit.json").write_text(json.dumps(run))
    folder = run_program(autotune_times, "--page", "--models", "mlp", "--links", "1gbit")
    text = (folder / "README.md").read_text()
    expected = "| min-max, 8 bits | 2.2 (2.2 to 2.2) | min-max, 8 bits | 2 (2 to 2) | 1.10 | 0.24 | 33 |"
    assert f"| mlp, 2 ranks, 1gbit {expected}" in text
