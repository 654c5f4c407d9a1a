"""Torch under torchrun, NumPy under mpirun and JAX on a mesh send the same bytes and end with the same parameters."""

import json
from pathlib import Path

import pytest

pytest.importorskip("jax", reason="jax is not installed")
pytest.importorskip("optax", reason="optax is not installed")

import faces

FOLDER = Path(__file__).parents[2] / "docs" / "benchmarks"


def assert_the_same(result):
    assert result["messages"] == result["ranks"] * faces.STEPS * (result["ranks"] + 1)
    core = result["faces"]["core"]
    for face, found in result["faces"].items():
        assert found["other_messages"] == 0
        assert found["same_parameters"]
        assert found["ranks_agree"]
        assert found["bytes"] == core["bytes"] > 0
        assert found["padding"] == 0 or face == "mesh"


@pytest.mark.exhaustive
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("ranks", [2, 4])
def test_all_faces(ranks):
    assert_the_same(faces.measure(ranks))


def test_the_page_shows_the_measured_results():
    results = json.loads((FOLDER / "faces.json").read_text())
    assert [result["ranks"] for result in results] == [2, 4]
    for result in results:
        assert set(result["faces"]) == set(faces.FACES)
        assert_the_same(result)
    assert faces.table(results) in (FOLDER / "README.md").read_text()
