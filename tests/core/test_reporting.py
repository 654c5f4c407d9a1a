"""Warnings name the line of a script, behind the libraries that call qcomp for it."""

import warnings
from functools import partial

import pytest

from qcomp.core.reporting import warn_caller

CALL = "def call(function, *given):\n    return function(*given)\n"


def of_library(name):
    """Return a function of a library that calls another."""
    there = {"__name__": name}
    exec(compile(CALL, f"/lib/{name}.py", "exec"), there)
    return there["call"]


def where(call):
    """Return the file and the line that a warning names."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        call()
    (warning,) = found
    return warning.filename, warning.lineno


def line_of(function):
    return function.__code__.co_firstlineno


@pytest.mark.parametrize(
    "between",
    [(), ("torch.optim.optimizer",), ("torch.utils._contextlib", "contextlib", "lightning.pytorch")],
)
def test_the_line_of_the_script_is_named(between):
    call = partial(warn_caller, "now")
    for name in between:
        call = partial(of_library(name), call)

    def in_script():
        call()

    assert where(in_script)[0] == __file__


def test_the_innermost_line_of_the_script_is_named():
    def inner():
        of_library("torch.optim.optimizer")(warn_caller, "now")

    def outer():
        inner()

    assert where(outer) == (__file__, line_of(inner) + 1)


def test_other_libraries_are_named():
    assert where(lambda: of_library("timm.scheduler")(warn_caller, "now"))[0] == "/lib/timm.scheduler.py"
