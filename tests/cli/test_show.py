"""``qcomp show``: the files that it reads, the table, the picture, and its errors for files that are not logs."""

import json
import math
import sys
from pathlib import Path

import pytest

from qcomp.cli import main
from qcomp.cli.runs import read_runs

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture
def log(tmp_path):
    """Write JSON lines: ``log(name, [dict, ...])``."""

    def write(name, entries):
        (tmp_path / name).write_text("".join(json.dumps(entry) + "\n" for entry in entries))
        return str(tmp_path / name)

    return write


def shown(capsys, *arguments):
    assert main(["show", *map(str, arguments)]) == 0
    return capsys.readouterr().out


def refused(capsys, *arguments):
    with pytest.raises(SystemExit, match="2"):
        main(["show", *map(str, arguments)])
    return capsys.readouterr().err


def falling(count, scale=1.0):
    return [{"step": 10 * i, "loss": scale / (i + 1), "worker_residual": 0.5 * i} for i in range(count)]


def test_a_table_and_a_picture(capsys, log):
    out = shown(capsys, log("adam.jsonl", falling(5)), log("onebit.jsonl", falling(9, 2.0)))
    lines = out.splitlines()
    assert lines[0].split() == ["run", "steps", "sent", "loss:", "first", "least", "largest", "last"]
    assert lines[1].split() == ["a", "adam", "40", "-", "1", "0.2", "1", "0.2"]
    assert lines[2].split() == ["b", "onebit", "80", "-", "2", "0.2222", "2", "0.2222"]
    picture = lines[lines.index("loss") + 1 :]
    assert picture[0].startswith("  2 |b")
    assert picture[13].startswith("0.2 |")
    assert picture[13].rstrip().endswith("b")
    assert picture[13].count("a") == 2  # 0.25 and 0.2
    assert picture[-1].split() == ["0", "80", "steps"]
    assert "\x1b" not in out


def test_requested_metrics_are_drawn_in_their_order(capsys, log):
    out = shown(capsys, log("adam.jsonl", falling(5)), "--metric", "worker_residual", "--metric", "loss")
    assert out.index("\nworker_residual\n") < out.index("\nloss\n")


def test_json_has_the_points_without_nan(capsys, log):
    entries = [{"loss": 1.0, "nested": {"bits": 3}, "name": "text", "flag": True}, {"loss": math.nan}]
    (document,) = json.loads(shown(capsys, log("adam.jsonl", entries), "--json"))
    assert document == {
        "name": "adam",
        "figures": {},
        "metrics": ["loss", "nested.bits"],
        "series": {"loss": [[0.0, 1.0], [1.0, None]]},
    }
    picture = shown(capsys, log("adam.jsonl", entries))
    assert "nan" in picture.splitlines()[1]


def test_a_series_without_finite_values_says_so(capsys, log):
    assert "loss: no finite values" in shown(capsys, log("adam.jsonl", [{"loss": math.inf}]))


def test_a_single_point_and_a_constant(capsys, log):
    assert "7 |" in shown(capsys, log("one.jsonl", [{"step": 3, "loss": 7.0}]))
    assert "2 |" in shown(capsys, log("flat.jsonl", [{"loss": 2.0}] * 4))


def test_overlapping_points_are_marked(capsys, log):
    out = shown(capsys, log("a.jsonl", falling(3)), log("b.jsonl", falling(3)))
    assert "|*" in out
    assert "|a" not in out


def test_two_logs_with_the_same_name_get_different_labels(capsys, log, tmp_path):
    (tmp_path / "other").mkdir()
    out = shown(capsys, log("adam.jsonl", falling(2)), log("other/adam.jsonl", falling(2)))
    assert "adam (2)" in out


@pytest.mark.parametrize("path", ["docs/demo", "docs/demo/curves.json"])
def test_the_runs_of_the_example(capsys, path):
    runs = json.loads(shown(capsys, ROOT / path, "--json"))
    assert [run["name"] for run in runs] == ["adam", "onebit_adam", "qadam", "qsgd"]
    last = json.loads((ROOT / "docs/demo/summary.json").read_text())[0]
    assert runs[0]["series"]["validation_loss"][-1] == [
        last["steps"],
        pytest.approx(last["validation_loss"], 1e-6),
    ]
    assert bool(runs[0]["figures"]) == (path == "docs/demo")
    assert f"{last['bytes_sent_per_rank'] / 1e6:.1f} MB" in shown(capsys, ROOT / "docs/demo")


def test_the_runs_of_the_study(capsys):
    (path, *_) = sorted((ROOT / "docs/benchmarks/convergence/runs").glob("*adam-0.json"))
    (run,) = read_runs(path)
    assert run.series["validation_loss"]
    assert "validation_loss" in shown(capsys, path)


@pytest.mark.slow
def test_a_picture_in_a_file(capsys, log, tmp_path):
    pytest.importorskip("matplotlib")
    out = tmp_path / "runs.svg"
    text = shown(capsys, log("adam.jsonl", falling(5)), "--out", out, "--metric", "loss")
    assert f"written to {out}" in text
    assert "<svg" in out.read_text()
    odd = refused(capsys, log("adam.jsonl", falling(5)), "--out", tmp_path / "runs.odd")
    assert f"--out is {str(tmp_path / 'runs.odd')!r}: Format 'odd' is not supported" in odd


def test_without_matplotlib_it_says_what_to_install(capsys, log, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    text = refused(capsys, log("adam.jsonl", falling(5)), "--out", tmp_path / "runs.png")
    assert "pip install 'qcomp[plot]'" in text


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "has no numbers by step"),
        ("3", "no log of a run"),
        ("[]", "no log of a run"),
        ("[1, 2]", "no log of a run"),
        ('{"loss": 1}\nhello', "line 2: Expecting value; expected a JSON dict for each step"),
        ('{"loss": 1}\n[3]', "line 2: expected a JSON dict"),
        ('{"step": "one", "loss": 1}\n{"loss": 1}', "line 1: step is 'one'; expected a number"),
        ('{"name": "x"}\n{"name": "y"}', "has no numbers by step"),
        ('[{"optimizer": "adam", "loss": 3}]', "has figures, but no series over steps to draw"),
        ('{"curve": 3}', "curve is 3; expected a list of [step, value]"),
        ('[{"optimizer": "adam", "validation": [{"step": 1}]}]', "expected points with a step and a loss"),
    ],
)
def test_a_file_that_is_not_a_log_is_an_error_with_the_reason(capsys, tmp_path, content, message):
    (tmp_path / "run.jsonl").write_text(content)
    assert message in refused(capsys, tmp_path / "run.jsonl")


def test_missing_files_are_an_error(capsys, tmp_path):
    assert "No such file" in refused(capsys, tmp_path / "none.jsonl")
    assert "has no summary.json" in refused(capsys, tmp_path)
    (tmp_path / "binary.json").write_bytes(b"\xff\xfe\x00")
    assert "is not a text file" in refused(capsys, tmp_path / "binary.json")


def test_a_missing_metric_is_an_error(capsys, log):
    text = refused(capsys, log("adam.jsonl", falling(2)), "--metric", "accuracy")
    assert "--metric is 'accuracy'; expected one of loss, worker_residual" in text
    close = refused(capsys, log("adam.jsonl", falling(2)), "--metric", "los")
    assert "--metric is 'los' (did you mean 'loss'?)" in close


@pytest.mark.parametrize("last", ['{"step": 3, "lo', "{", '{"loss": 1'])
def test_a_last_line_that_is_still_being_written_is_skipped(tmp_path, last):
    (tmp_path / "run.jsonl").write_text('{"step": 1, "loss": 2}\n{"step": 2, "loss": 1}\n' + last)
    assert read_runs(tmp_path / "run.jsonl")[0].series == {"loss": [(1.0, 2.0), (2.0, 1.0)]}


def test_a_broken_line_is_an_error_unless_it_may_still_be_written(capsys, tmp_path):
    (tmp_path / "run.jsonl").write_text('{"loss": 2}\n{"lo\n')
    assert "line 2: " in refused(capsys, tmp_path / "run.jsonl")
    (tmp_path / "run.jsonl").write_text('{"lo')
    assert "line 1: " in refused(capsys, tmp_path / "run.jsonl")
    (tmp_path / "run.jsonl").write_text("[" * 100_000)
    assert "no log of a run: maximum recursion depth" in refused(capsys, tmp_path / "run.jsonl")


def test_the_largest_numbers_are_drawn(capsys, tmp_path):
    path = tmp_path / "run.jsonl"
    path.write_text('{"step": -1e308, "loss": 1e308}\n{"step": 1e308, "loss": -1e308}\n')
    lines = shown(capsys, path).splitlines()
    assert lines[4] == " 1e+308 |a"
    assert lines[17] == "-1e+308 |" + " " * 63 + "a"
    path.write_text('\ufeff{"loss": 1}\n{"loss": 1' + "0" * 400 + "}\n", encoding="utf-8")
    assert read_runs(path)[0].series["loss"] == [(0.0, 1.0), (1.0, math.inf)]


def test_figures_may_be_text(capsys, tmp_path):
    path = tmp_path / "run.json"
    path.write_text('[{"optimizer": "adam", "x": [1, 2], "steps": "many", "bytes_sent": "9", "speed": NaN}]')
    assert shown(capsys, path).splitlines()[1].split()[:4] == ["a", "adam", "2", "-"]
    (document,) = json.loads(shown(capsys, path, "--json"), parse_constant=pytest.fail)
    assert document["figures"] == {"steps": "many", "bytes_sent": "9", "speed": None}


def test_a_folder_may_contain_an_empty_log_of_a_new_run(capsys, log, tmp_path):
    log("adam.jsonl", falling(5))
    log("onebit.jsonl", [])
    lines = shown(capsys, tmp_path).splitlines()
    assert lines[2].split() == ["b", "onebit", "0", "-", "-", "-", "-", "-"]
    assert "has no numbers by step, since it is empty" in refused(capsys, tmp_path / "onebit.jsonl")
