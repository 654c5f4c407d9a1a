"""The checklist of a release finds what is not ready, and collects the changes."""

import datetime
import re
import subprocess

import pytest

import qcomp
from qcomp.cli.main import _COMMANDS as COMMANDS
from tests import release
from tests.release import Problem

TODAY = datetime.datetime.now(datetime.UTC).date()


def commit(root, *, tag=None):
    who = ("-c", "user.name=nobody", "-c", "user.email=nobody@localhost", "-c", "commit.gpgsign=false")
    subprocess.run(["git", "add", "."], cwd=root, check=True)
    subprocess.run(["git", *who, "commit", "-qm", "All"], cwd=root, check=True)
    if tag:
        subprocess.run(["git", "tag", tag], cwd=root, check=True)


@pytest.fixture
def project(tmp_path):
    """A repository that is ready, with one earlier release."""
    for folder in ("changes", "tests/golden/0.9", "tests/vectors", "docs/benchmarks"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "CHANGELOG.md").write_text(
        f"# Changelog\n\n## 2.0 ({TODAY})\n- new\n\n## 0.9 (2026-01-01)\n- old\n"
    )
    (tmp_path / "changes" / "README.md").write_text("# Changes\n")
    (tmp_path / "tests" / "golden" / "0.9" / "names.json").write_text("{}\n")
    (tmp_path / "tests" / "vectors" / "sign.json").write_text('{"decoded": [1]}\n')
    (tmp_path / "docs" / "benchmarks" / "steps.json").write_text("{}\n")
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    commit(tmp_path, tag="v0.9")
    return tmp_path


def found(root):
    """Return what each step that looks at files alone has found, or the problem."""
    steps = {
        "tree": release.clean_tree,
        "version": lambda root: release.version_everywhere(root, "2.0"),
        "changes": release.no_changes_left,
        "released files": release.released_files,
    }
    results = {}
    for name, step in steps.items():
        try:
            step(root)
        except (Problem, release.ReleasedError) as problem:
            results[name] = str(problem)
    return results


def test_a_project_that_is_ready_has_no_problem(project):
    assert found(project) == {}
    assert release.version_everywhere(project, "2.0") == "2.0"
    assert release.released_files(project) == "unchanged since v0.9"
    assert release.old_figures(project) == "older than 180 days: none"


@pytest.mark.parametrize(
    ("path", "text", "step", "problem"),
    [
        (
            "CHANGELOG.md",
            "# Changelog\n\n## 1.9 (2026-01-01)\n",
            "version",
            r"begins with '1.9 \(2026-01-01\)'",
        ),
        ("CHANGELOG.md", "# Changelog\n\n## 2.0\n", "version", r"begins with '2.0'; expected '2.0 \(YYYY"),
        ("CHANGELOG.md", "# Changelog\n", "version", "begins with None"),
        ("changes/ring.added.md", "- A ring.\n", "changes", "changes/ has ring.added.md; run"),
        ("changes/ring.md", "- A ring.\n", "changes", "ring.md is not named NAME.KIND.md"),
        ("changes/ring.new.md", "- A ring.\n", "changes", "ring.new.md is not named NAME.KIND.md"),
        ("changes/ring.added.md", "A ring.\n", "changes", "begins with neither"),
        ("changes/ring.added.md", "", "changes", "begins with neither"),
        ("changes/ring.added.md", "- A [ring](docs/ring.md).\n", "changes", "has a link"),
        ("tests/golden/0.9/names.json", "{ }\n", "released files", "changed since v0.9"),
        ("tests/golden/0.9/more.json", "{ }\n", "released files", "changed since v0.9"),
        (
            "tests/vectors/sign.json",
            '{"decoded": [2]}',
            "released files",
            "would change entries of the release 0.9",
        ),
    ],
)
def test_a_problem_is_found(project, path, text, step, problem):
    (project / path).write_text(text)
    commit(project)
    results = found(project)
    assert re.search(problem, results.pop(step))
    assert results == {}


def test_an_uncommitted_file_and_a_tag_are_found(project):
    (project / "new.py").write_text("")
    assert "new.py" in found(project)["tree"]
    commit(project, tag="v2.0")
    assert found(project)["version"].startswith("2.0 has a tag")


def test_old_figures_are_told(project, monkeypatch):
    monkeypatch.setattr(release, "OLD", -1)
    assert release.old_figures(project) == f"older than -1 days: docs/benchmarks/steps.json ({TODAY})"


def test_changes_are_collected(project):
    (project / "changes" / "b.fixed.md").write_text("- B is\n  right.\n")
    (project / "changes" / "a.added.md").write_text("- A.\n")
    (project / "changes" / "c.added.md").write_text("- C.\n")
    release.collect(project, "2.1")
    assert (project / "CHANGELOG.md").read_text() == (
        f"# Changelog\n\n## 2.1 ({TODAY})\n\n### Added\n- A.\n- C.\n\n### Fixed\n- B is\n  right.\n"
        f"\n## 2.0 ({TODAY})\n- new\n\n## 0.9 (2026-01-01)\n- old\n"
    )
    assert release.no_changes_left(project) == "none"


def test_later_changes_join_those_of_the_same_version(project):
    (project / "changes" / "a.added.md").write_text("- A.\n")
    release.collect(project, "2.1")
    path = project / "CHANGELOG.md"
    path.write_text(path.read_text().replace(f"2.1 ({TODAY})", "2.1 (2026-01-02)"))
    (project / "changes" / "b.fixed.md").write_text("- B.\n")
    release.collect(project, "2.1")
    assert path.read_text() == (
        f"# Changelog\n\n## 2.1 ({TODAY})\n\n### Added\n- A.\n\n### Fixed\n- B.\n"
        f"\n## 2.0 ({TODAY})\n- new\n\n## 0.9 (2026-01-01)\n- old\n"
    )


def test_all_steps_run_and_only_then_the_tag_is_printed(project, monkeypatch, capsys):
    def problem(root):
        raise Problem("it rains")

    monkeypatch.setattr(release, "STEPS", {"weather": problem, "tree": release.clean_tree})
    assert release.main(project) == 1
    printed = capsys.readouterr().out
    assert "FAILED  weather: it rains\nok      tree: " in printed
    assert "git tag" not in printed
    monkeypatch.setattr(release, "STEPS", {"tree": release.clean_tree})
    assert release.main(project) == 0
    assert f"git tag -a v{qcomp.__version__}" in capsys.readouterr().out
    assert release.tags(project) == ["v0.9"]


def test_the_page_has_every_step():
    page = (release.ROOT / "RELEASE.md").read_text()
    for step in release.STEPS:
        assert re.search(rf"^   \| .*\b{step}\b.* \|", page, re.MULTILINE | re.IGNORECASE), step


def test_the_commands_that_a_release_runs_are_all_but_the_plan():
    assert {command.split()[0] for command in release.README_COMMANDS} == set(COMMANDS) - {"plan"}


def test_the_files_in_changes_have_names_and_lines_that_can_be_collected():
    release.fragments(release.ROOT)
