"""The Python code of a page of the documentation, joined into a module as a reader might paste it together."""

import importlib.util
import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(path for path in [ROOT / "README.md", *DOCS.rglob("*.md")] if DOCS / "api" not in path.parents)
FENCE = re.compile(r"^```(\S*)[^\n]*\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def blocks(page):
    """Return the language and the text of each fenced block of a page."""
    return FENCE.findall(page.read_text())


def code(page):
    """Return the Python of a page, with every line at its number in the page, so that tracebacks point there."""
    lines = [""] * (page.read_text().count("\n") + 1)
    for found in FENCE.finditer(page.read_text()):
        if found[1] == "python":
            start = page.read_text()[: found.start()].count("\n") + 1
            for offset, line in enumerate(found[2].splitlines()):
                lines[start + offset] = line
    return "\n".join(lines) + "\n"


def name_of(page):
    """Return the name of a page, such as "extend/topology"."""
    return str(page.relative_to(ROOT if page.parent == ROOT else DOCS).with_suffix(""))


def run(page, monkeypatch):
    """Run a page in this process as a module; return its globals."""
    name = "page_" + re.sub(r"\W", "_", name_of(page))
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader(name, loader=None))
    monkeypatch.setitem(sys.modules, name, module)  # pickle finds the page's classes by this name
    exec(compile(code(page), page, "exec"), vars(module))
    return vars(module)
