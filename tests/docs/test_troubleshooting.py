"""The index of messages stays current: each entry is in the sources, and no warning or error of ranks is missing."""

import ast
import functools
import re
from pathlib import Path

import pytest

import qcomp
from tests.docs.pages import DOCS

PACKAGE = Path(qcomp.__file__).parent
GAP = "…"
LISTED = re.findall(r"^- `(.+)`$", (DOCS / "troubleshooting.md").read_text(), re.MULTILINE)
WARNS = {"warn", "warn_caller", "warning"}
RAISES = {
    "CommunicatorError",
    "ImportError",
    "MismatchError",
    "NonFiniteError",
    "RuntimeError",
    "UnavailableError",
}
"""Errors whose message names no argument, so that a reader needs further explanation."""


def text_of(node):
    """Return the text of an expression with a gap for every run-time part; None if it has no text."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value.replace("%s", GAP)
    if isinstance(node, ast.JoinedStr):
        return "".join(text_of(part) or GAP for part in node.values)
    if isinstance(node, ast.BinOp):
        return f"{text_of(node.left) or GAP}{text_of(node.right) or GAP}"
    return None


def normal(text):
    return re.sub(rf"(\s*{GAP}+\s*)+", f" {GAP} ", text).strip()


@functools.cache
def sources():
    return [(path, ast.parse(path.read_text())) for path in sorted(PACKAGE.rglob("*.py"))]


@functools.cache
def texts():
    """Return every text in the sources."""
    found = {text_of(node) for _, tree in sources() for node in ast.walk(tree) if isinstance(node, ast.expr)}
    return {normal(text) for text in found if text}


def messages():
    """Yield all warnings, and errors that name no argument, with their files; without what `qcomp` prints."""
    for path, tree in sources():
        for node in ast.walk(tree):
            if not isinstance(node, ast.Call) or not node.args or "cli" in path.parts:
                continue
            name = getattr(node.func, "id", getattr(node.func, "attr", ""))
            text = text_of(node.args[0])
            if name in WARNS | RAISES and text and text.strip(f"{GAP} ,in"):
                yield normal(text), path


@pytest.mark.quick_cases(5)
@pytest.mark.parametrize("entry", LISTED)
def test_every_entry_is_a_message(entry):
    assert any(text.startswith(normal(entry)) for text in texts())


def test_every_message_has_an_entry():
    entries = tuple(map(normal, LISTED))
    missing = [
        f"{message} ({path.relative_to(PACKAGE)})"
        for message, path in sorted(set(messages()))
        if not message.startswith(entries)
    ]
    assert not missing, "add to docs/troubleshooting.md: " + "; ".join(missing)


def test_an_entry_without_a_message_would_be_found():
    assert not any(text.startswith(normal("the gradient of … is not quite finite")) for text in texts())


def test_entries_are_distinct():
    assert len(set(map(normal, LISTED))) == len(LISTED)
