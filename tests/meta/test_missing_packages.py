"""Tests that need a package that is not installed are skipped; code that should do without it fails."""

import pytest

ROOT = "conftest.py"


@pytest.fixture
def root_conftest(request):
    (found,) = (
        plugin
        for plugin in request.config.pluginmanager.get_plugins()
        if getattr(plugin, "__file__", None) == str(request.config.rootpath / ROOT)
    )
    return found


def error_in(path, code):
    """Return the error of code that stands in a file of the project."""
    try:
        exec(compile(code, str(path), "exec"), {})
    except ImportError as error:
        return error
    raise AssertionError("the code imports everything")


@pytest.mark.parametrize(
    ("place", "expected"),
    [
        ("tests/core/test_any.py", "nothere"),
        ("examples/any.py", "nothere"),
        ("qcomp/face/module.py", "nothere"),
        ("qcomp/face.py", "nothere"),
        ("qcomp/old/module.py", "another>=9"),
        ("qcomp/core/any.py", None),
        ("qcomp/faces/any.py", None),
    ],
)
@pytest.mark.parametrize(
    "code",
    [
        "import nothere",
        "import nothere.inside",
        "try: import nothere\nexcept ImportError as e: raise ImportError('install it') from e",
    ],
)
def test_a_missing_package_is_needed_where_it_may_be(
    root_conftest, monkeypatch, request, place, expected, code
):
    needs = {"nothere": ["qcomp/face", "qcomp/face.py"], "another>=9": ["qcomp/old"]}
    monkeypatch.setattr(root_conftest, "MISSING", list(needs))
    monkeypatch.setattr(root_conftest, "NEEDS", needs)
    assert root_conftest.needs_missing(error_in(request.config.rootpath / place, code)) == expected


def test_other_errors_are_not_skipped(root_conftest, monkeypatch, request):
    monkeypatch.setattr(root_conftest, "MISSING", ["nothere"])
    monkeypatch.setattr(root_conftest, "NEEDS", {"nothere": []})
    path = request.config.rootpath / "tests" / "any.py"
    for code in ("import another_that_is_not_there", "from os import nothere"):
        assert root_conftest.needs_missing(error_in(path, code)) is None


def test_a_version_that_is_too_old_counts_as_missing(root_conftest):
    assert root_conftest.is_installed("pytest")
    assert not root_conftest.is_installed("pytest>=1000")
    assert not root_conftest.is_installed("nothere")
