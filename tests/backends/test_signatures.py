"""The page on kernels lists every kernel, and the kernels of this package take the arguments of their primitives."""

import ast
import re
from pathlib import Path

import pytest

import qcomp

PACKAGE = Path(qcomp.__file__).parent
CORE = PACKAGE / "core"
PRIMITIVES = sorted((CORE / "primitives").glob("*.py"))
PAGE = (PACKAGE.parent / "docs" / "extend" / "kernels.md").read_text()
LISTED = dict(re.findall(r"^\| `(\w+)\((.*?)\)` \|", PAGE, re.MULTILINE))
SOURCES = [
    *sorted(path for path in (PACKAGE / "backends").rglob("*.py") if "def takes(self" in path.read_text()),
    PACKAGE / "jax" / "kernels.py",
    PACKAGE.parent / "tests" / "meta" / "test_broken_kernels.py",
]
NO_KERNELS = {"takes", "apart"}


def arguments(function):
    """Return the names of a function's arguments as the page lists them."""
    names = [a.arg for a in function.args.args if a.arg != "self"]
    keywords = [a.arg for a in function.args.kwonlyargs]
    return ", ".join([*names, "*", *keywords] if keywords else names)


def functions(tree):
    return {node.name: arguments(node) for node in tree.body if isinstance(node, ast.FunctionDef)}


def test_the_page_lists_every_kernel_that_the_core_calls():
    text = "".join(path.read_text() for path in (*PRIMITIVES, CORE / "mean" / "codec.py"))
    decorated = re.findall(r"^@primitive\(.*\)\ndef (\w+)", text, re.MULTILINE)
    by_hand = re.findall(r'(?:kernel_of\(|_each\(|self\._kernels, )"(\w+)"', text)
    assert set(LISTED) == {*decorated, *by_hand}


def test_kernels_take_the_arguments_of_their_primitives():
    defined = {}
    for path in (*PRIMITIVES, CORE / "numeric" / "low_rank.py"):
        defined |= functions(ast.parse(path.read_text()))
    defined["decode"] = defined["decode"].replace("payload", "data")
    defined["compensate"] = defined["compensate"].replace("what, ", "")
    different = {name for name in LISTED if defined.get(name) != LISTED[name]}
    assert different == {"encode_frames", "decode_frames", "average_frame", "compress_mean_frame"}


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_a_set_has_only_listed_kernels_with_the_listed_arguments(path):
    sets = [
        methods
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.ClassDef) and "takes" in (methods := functions(node))
    ]
    assert sets
    for methods in sets:
        kernels = {
            name: found for name, found in methods.items() if name[0] != "_" and name not in NO_KERNELS
        }
        assert kernels.items() <= LISTED.items()
