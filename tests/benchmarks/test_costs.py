"""The table of costs agrees with what is counted now."""

from pathlib import Path

import costs
import pytest

PAGE = Path(__file__).parents[2] / "docs" / "costs" / "README.md"


@pytest.fixture(scope="module")
def table():
    return costs.table()


def test_the_page_shows_the_counted_costs(table):
    assert f"<!-- costs -->\n{table}\n<!-- end of costs -->" in PAGE.read_text()


def row(table, label):
    (line,) = (line for line in table.splitlines() if line.startswith(f"| {label} |"))
    return [float(cell) for cell in line.split("|")[2:-1]]


def test_known_costs(table):
    # N = 4: 4 bytes for each moment and the worker's residual, 4 / N for the server's; and the watch's samples.
    assert row(table, "1-bit Adam")[0] == pytest.approx(4 + 4 + 4 + 1, abs=0.02)
    assert row(table, "Adam")[0] == 8
    # Signs, and 32 bits for each 4096 of them; verdicts and padding add a few bytes.
    assert row(table, "1-bit Adam")[1] == pytest.approx(1 + 32 / 4096, abs=0.006)
    assert row(table, "QAdam")[1] == pytest.approx(8 + 64 / 2048, abs=0.006)
    assert row(table, "SGD, 1-bit SGD")[1] == pytest.approx(1 + 64 / 256, abs=0.006)
    assert row(table, "0/1 Adam, a step in between")[1:] == [0, 0]
