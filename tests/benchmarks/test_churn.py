"""Replicas are killed, stopped and started at random: the program runs and its figures are right."""

import json
from pathlib import Path

import pytest

pytest.importorskip("torchft", reason="it is for Linux only")

import churn

PAGE = Path(__file__).parents[2] / "docs" / "reliability" / "README.md"


def line(event, time, step, digest="a", quorum=1):
    return {"event": event, "time": time, "step": step, "digest": digest, "quorum": quorum}


def test_figures():
    diaries = {
        "0": [line("ready", 0.0, 0), *(line("committed", 10.0 + t, t) for t in (0, 1, 2, 5, 6))],
        "1": [
            line("ready", 12.0, 0),
            line("failed", 12.5, 1, "b"),
            line("committed", 14.0, 2),
            line("committed", 15.0, 5, "b"),
            line("committed", 15.5, 5, "c", quorum=2),
        ],
    }
    faults = [{"kind": kind, "time": 13.0, "diary": "1"} for kind in ("kill", "continue")]
    faults.insert(1, {"kind": "stop", "time": 12.2, "diary": "1"})
    run = {"begin": 10.0, "end": 18.0, "diaries": diaries, "faults": faults}
    calm = {**run, "end": 16.0}
    found = churn.figures(calm, run)
    assert (found["kill"], found["stop"], found["join"], found["ended"]) == (1, 1, 0, 0)
    assert found["committed"] == 8
    assert found["mismatches"] == 1  # step 5 of the first quorum
    assert (found["longest_pause_seconds"], found["longest_pause_without_faults_seconds"]) == (2.0, 2.0)
    assert found["longest_wait_seconds"] == 3.0  # the first replica, between its steps 2 and 5
    assert (found["steps_per_second"], found["steps_per_second_without_faults"]) == (0.75, 1.0)
    assert found["goodput"] == 0.75
    assert (found["recoveries"], found["longest_recovery_seconds"]) == (1, 2.0)
    assert found["longest_after_a_stop_seconds"] == 1.0
    assert found["longest_after_a_cut_seconds"] is None


def test_a_replica_that_was_cut_off_does_not_count_as_waiting():
    times = (10.0, 11.0, 16.5, 17.0)
    diaries = {"0": [line("ready", 0.0, 0), *(line("committed", t, i) for i, t in enumerate(times))]}
    faults = [{"kind": "cut", "time": 11.5, "diary": "0"}, {"kind": "mend", "time": 16.0, "diary": "0"}]
    run = {"begin": 10.0, "end": 17.5, "diaries": diaries, "faults": faults}
    found = churn.figures(run, run)
    assert (found["cut"], found["longest_after_a_cut_seconds"], found["longest_wait_seconds"]) == (
        1,
        0.5,
        1.0,
    )


def test_a_fault_may_hit_a_replica_before_it_writes_anything():
    line = {"event": "committed", "quorum": 1, "digest": "a"}
    diary = [{**line, "step": step, "time": float(step)} for step in range(5)]
    faults = [{"kind": kind, "time": 1.0, "diary": "new"} for kind in ("stop", "continue")]
    found = churn.figures(*2 * [{"begin": 0.0, "end": 4.0, "diaries": {"0": diary}, "faults": faults}])
    assert (found["stop"], found["longest_after_a_stop_seconds"]) == (1, None)


@pytest.mark.exhaustive
@pytest.mark.timeout(280)
@pytest.mark.filterwarnings("ignore")
def test_replicas_come_and_go_for_a_minute(run_program, tmp_path):
    (tmp_path / "README.md").write_text(PAGE.read_text())
    folder = run_program(
        churn, "--peers", "4", "--seconds", "60", "--calm", "3", "--every", "3", "--faces", "qcomp"
    )
    found = json.loads((folder / "churn.json").read_text())["results"]["qcomp"]
    assert (found["mismatches"], found["ended"]) == (0, 0)
    assert found["kill"] + found["stop"] + found["join"] > 15
    assert found["committed"] > 150


@pytest.mark.exhaustive
@pytest.mark.timeout(280)
@pytest.mark.filterwarnings("ignore")
def test_cables_are_cut_and_both_libraries_measured(run_program, tmp_path, allowed):
    (tmp_path / "README.md").write_text(PAGE.read_text())
    options = ["--peers", "3", "--seconds", "15", "--calm", "3", "--every", "3", "--cut"]
    folder = run_program(churn, *options, "--faces", "qcomp", "torchft")
    document = json.loads((folder / "churn.json").read_text())
    assert set(document["results"]) == {"qcomp", "torchft"}
    found = document["results"]["qcomp"]
    assert (found["mismatches"], found["ended"]) == (0, 0)
    assert found["kill"] + found["stop"] + found["cut"] + found["join"] == 4
    assert found["committed"] > 20
    assert churn.summary(document) in (folder / "README.md").read_text()
