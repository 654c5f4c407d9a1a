"""The version that ranks compare: the release, and the state of its sources."""

import compileall
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import qcomp
from qcomp.version import digest_of, version_and_sources

PACKAGE = Path(qcomp.__file__).parent
SAY = "from qcomp.version import version_and_sources; import qcomp; print(version_and_sources(), qcomp.__file__)"


@pytest.fixture
def folder(tmp_path):
    """A small package."""
    (tmp_path / "part").mkdir()
    (tmp_path / "__init__.py").write_bytes(b"x = 1\ny = 2\n")
    (tmp_path / "part" / "a.py").write_bytes(b"z = 3\n")
    return tmp_path


def said_by_a_copy(path):
    """Return what a fresh interpreter that finds the package there calls its version."""
    done = subprocess.run(
        [sys.executable, "-B", "-c", SAY],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        env={"PYTHONPATH": str(path)},
        cwd="/",
    )
    said, _, file = done.stdout.strip().rpartition(" ")
    assert file.startswith(str(path))
    return said


def test_every_change_of_a_source_changes_the_digest(folder):
    before = digest_of(folder)
    changes = {
        "an edit": lambda: (folder / "part" / "a.py").write_bytes(b"z = 4\n"),
        "a new file": lambda: (folder / "part" / "b.py").write_bytes(b""),
        "another name": lambda: (folder / "part" / "b.py").rename(folder / "b.py"),
        "a line that has moved to another file": lambda: (
            (folder / "__init__.py").write_bytes(b"x = 1\n"),
            (folder / "b.py").write_bytes(b"y = 2\n"),
        ),
    }
    seen = {before}
    for change in changes.values():
        change()
        assert digest_of(folder) not in seen
        seen.add(digest_of(folder))


def test_nothing_else_changes_it(folder):
    before = digest_of(folder)
    (folder / "__init__.py").write_bytes(b"x = 1\r\ny = 2\r\n")
    (folder / "__pycache__").mkdir()
    (folder / "__pycache__" / "a.py").write_bytes(b"w = 5\n")
    (folder / "a.pyc").write_bytes(b"compiled")
    assert digest_of(folder) == before


def test_a_zip_has_the_same_version_and_compiled_files_alone_have_none(tmp_path):
    ignored = shutil.ignore_patterns("__pycache__")
    whole, compiled = tmp_path / "whole", tmp_path / "compiled"
    for name in ("backends", "checkpoint", "comm", "core", "planning"):  # what `import qcomp` needs
        shutil.copytree(PACKAGE / name, whole / "qcomp" / name, ignore=ignored)
    for file in PACKAGE.glob("*.py"):
        shutil.copy(file, whole / "qcomp")
    archive = tmp_path / "archive.zip"
    with zipfile.ZipFile(archive, "w") as zipped:
        for file in whole.rglob("*.py"):
            zipped.write(file, file.relative_to(whole))
    shutil.copytree(whole, compiled)
    assert compileall.compile_dir(compiled, quiet=1, legacy=True)
    for file in compiled.rglob("*.py"):
        file.unlink()

    assert said_by_a_copy(archive) == version_and_sources()
    assert said_by_a_copy(compiled) == f"{qcomp.__version__} without sources"
