"""The table of steps to a loss is what the committed studies say."""

import json
from pathlib import Path

import pytest
import steps_to_loss

from qcomp.planning import evidence

ROOT = Path(__file__).parents[2]


def test_the_table_is_what_the_studies_say():
    committed = json.loads(Path(evidence.__file__).with_name("steps_to_loss.json").read_text())
    found = steps_to_loss.records(ROOT / "docs" / "benchmarks")
    assert committed == found
    page = (ROOT / "docs" / "planning" / "README.md").read_text()
    assert f"<!-- steps to a loss -->\n{steps_to_loss.table(found)}\n<!-- end" in page


class TestRatio:
    FAST, SLOW = [(10, 4.0), (20, 2.0), (30, 1.0)], [(10, 5.0), (20, 3.0), (40, 1.0)]

    def test_is_that_of_the_steps_to_the_same_loss(self):
        assert steps_to_loss.ratio(self.SLOW, self.FAST) == pytest.approx(40 / 30, abs=1e-3)
        assert steps_to_loss.ratio(self.FAST, self.SLOW) == pytest.approx(30 / 40, abs=1e-3)
        assert steps_to_loss.ratio(self.FAST, self.FAST) == 1.0

    def test_the_loss_is_the_lower_one_that_both_reach(self):
        worse = [(10, 5.0), (40, 3.0)]
        assert steps_to_loss.ratio(worse, self.FAST) == pytest.approx(40 / 15, abs=1e-3)  # 3.0 after 15 steps
        assert steps_to_loss.ratio(self.FAST, worse) == pytest.approx(15 / 40, abs=1e-3)

    def test_a_loss_with_which_a_curve_begins_tells_nothing(self):
        assert steps_to_loss.ratio([(10, 9.0), (20, 8.0)], self.FAST) is None
