"""The benchmark of keyed checksums runs from start to end, and the page on security has its figures."""

import json
from pathlib import Path

import authentication

DOCS = Path(__file__).parents[2] / "docs"


def test_authentication(run_program):
    document = json.loads(
        (
            run_program(authentication, "--rounds", "2", "--largest", "10000") / "authentication.json"
        ).read_text()
    )
    assert set(document) == {"machine", "rounds", "results"}
    assert [row["bytes"] for row in document["results"]] == [1000, 10_000]
    for row in document["results"]:
        assert row["seconds_per_megabyte"] > 0
        for name in ("seconds", "over_copy", "over_plain"):
            low, high = row[name]["quartiles"]
            assert 0 < low <= row[name]["median"] <= high


def test_the_page_has_the_committed_figures():
    results = json.loads((DOCS / "benchmarks" / "authentication.json").read_text())["results"]
    (row,) = [row for row in results if row["bytes"] == 1_000_000]
    milliseconds = row["seconds_per_megabyte"] * 1000
    assert f"{milliseconds:.1f} ms for each MB" in (DOCS / "security.md").read_text()
