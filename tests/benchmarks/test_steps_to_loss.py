"""The table of steps to a loss agrees with the committed studies."""

import json
from pathlib import Path

import pytest
import steps_to_loss

from qcomp.planning import evidence

ROOT = Path(__file__).parents[2]


def test_the_table_agrees_with_the_studies():
    committed = json.loads(Path(evidence.__file__).with_name("steps_to_loss.json").read_text())
    found = steps_to_loss.records(ROOT / "docs" / "benchmarks")
    assert committed == found
    page = (ROOT / "docs" / "planning" / "README.md").read_text()
    assert f"<!-- steps to a loss -->\n{steps_to_loss.table(found)}\n<!-- end" in page


class TestRatio:
    FAST, SLOW = [(10, 4.0), (20, 2.0), (30, 1.0)], [(10, 5.0), (20, 3.0), (40, 1.0)]

    def test_compares_the_steps_to_the_same_loss(self):
        assert steps_to_loss.ratio(self.SLOW, self.FAST) == pytest.approx(40 / 30, abs=1e-3)
        assert steps_to_loss.ratio(self.FAST, self.SLOW) == pytest.approx(30 / 40, abs=1e-3)
        assert steps_to_loss.ratio(self.FAST, self.FAST) == 1.0

    def test_the_compared_loss_is_the_lowest_that_both_reach(self):
        worse = [(10, 5.0), (40, 3.0)]
        assert steps_to_loss.ratio(worse, self.FAST) == pytest.approx(40 / 15, abs=1e-3)  # 3.0 after 15 steps
        assert steps_to_loss.ratio(self.FAST, worse) == pytest.approx(15 / 40, abs=1e-3)

    def test_a_loss_at_the_start_of_a_curve_is_not_compared(self):
        assert steps_to_loss.ratio([(10, 9.0), (20, 8.0)], self.FAST) is None


def test_race_methods_are_compared_at_the_best_rate_of_exact_training(tmp_path):
    """A method that was not run at that rate is left out: a rate that suits no method says little."""
    (tmp_path / "loss").mkdir()

    def row(method, rate, *losses):
        points = [[0, 5.0], *([100 * (i + 1), loss] for i, loss in enumerate(losses))]
        return {
            "task": "demo",
            "ranks": 2,
            "method": method,
            "rate": rate,
            "seed": 0,
            "steps": 300,
            "losses": points,
        }

    def records(*rows):
        (tmp_path / "loss" / "curves.jsonl").write_text("".join(json.dumps(each) + "\n" for each in rows))
        return steps_to_loss._race(tmp_path)

    exact = [row("ddp_muon", 0.003, 4.0, 3.0, 2.0), row("ddp_muon", 0.001, 3.0, 2.0, 1.0)]
    wrong_rate = row("sparse_muon", 0.003, 3.0, 2.5, 2.0)
    assert records(*exact, wrong_rate) == []
    assert records(*exact, row("sparse_muon", 0.001, 4.0, 3.0, None)) == []  # it diverged
    (found,) = records(*exact, wrong_rate, row("sparse_muon", 0.001, 4.0, 3.0, 2.0))
    assert (found["method"], found["label"]) == (
        "SparseLoCo every 15 steps",
        "SparseLoCo every 15 steps, Muon",
    )
    assert (found["ratio"], found["gap"], found["reference"]) == (1.5, 1.0, "Muon")
