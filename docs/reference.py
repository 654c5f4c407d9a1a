"""The pages of the reference: one for each public module, and one for each name in its ``__all__``."""

import ast
import functools
import inspect
import shutil
import sys
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import qcomp

__all__ = ["FOLDER", "file_of", "public", "write"]

FOLDER = "api"
"""Where the pages are, under docs/."""

_MODULE = """\
{name}
{line}

.. automodule:: {name}
   :no-members:

.. list-table::
   :widths: auto

{rows}
{inner}
"""

_INNER = """
.. toctree::

{pages}
"""

_NAME = """\
:orphan:

{title}
{line}

In :doc:`{module}`.

.. currentmodule:: {module}

.. {directive}:: {name}
{rest}
"""

_INDEX = """\
Reference
=========

Every public name, by module. What is not here is not public, and may change in any release.

.. toctree::
   :maxdepth: 1

{pages}
"""


@functools.cache
def public() -> dict[str, list[str]]:
    """Return the names in ``__all__`` of each public module that are no modules themselves, by module.

    A module is public if it is `qcomp`, or in the ``__all__`` of one that is.
    """
    found: dict[str, list[str]] = {}
    _collect("qcomp", qcomp, found)
    return found


def _collect(name: str, module: ModuleType, found: dict[str, list[str]]) -> None:
    values = {key: getattr(module, key) for key in module.__all__}
    found[name] = sorted(
        (key for key, value in values.items() if not isinstance(value, ModuleType)),
        key=lambda key: key.strip("_").lower(),
    )
    for key, value in values.items():
        if isinstance(value, ModuleType):
            _collect(f"{name}.{key}", value, found)


def write(folder: Path) -> None:
    """Write the pages, in place of earlier ones."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    modules = public()
    documented: dict[int, str] = {}
    for module, names in modules.items():
        inner = [other for other in modules if other.rpartition(".")[0] == module != "qcomp"]
        rows = []
        for name in names:
            value = getattr(_module(module), name)
            twin = documented.setdefault(id(value), f"{module}.{name}")
            (folder / f"{file_of(module, name)}.rst").write_text(_page_of(module, name, value, twin))
            rows.append(f"   * - :py:obj:`{name} <{module}.{name}>`\n     - {_summary(name, value)}")
        page = _MODULE.format(
            name=module,
            line="=" * len(module),
            rows="\n".join(rows) or "   * - (only modules)",
            inner=_INNER.format(pages=_lines(inner)) if inner else "",
        )
        (folder / f"{module}.rst").write_text(page)
    tops = [module for module in modules if module.count(".") < 2]
    (folder / "index.rst").write_text(_INDEX.format(pages=_lines(tops)))


def file_of(module: str, name: str) -> str:
    """Return the file of a name, without its suffix; names may differ in case alone, which some file systems ignore."""
    twins = [other for other in public()[module] if other.lower() == name.lower()]
    return f"{module}.{name}" + ("-lower" if len(twins) > 1 and name.islower() else "")


def _page_of(module: str, name: str, value: object, twin: str) -> str:
    """Return the page of a name; ``twin`` is where the same object is documented, perhaps here."""
    if twin != f"{module}.{name}":
        directive, rest = "py:data", f"\n   The same as :py:obj:`{twin}`."
    elif inspect.isclass(value):
        foreign = [base.__name__ for base in value.__mro__ if not base.__module__.startswith("qcomp")]
        directive, rest = "autoclass", f"   :members:\n   :inherited-members: {', '.join(foreign)}"
    elif inspect.isroutine(value):
        directive, rest = "autofunction", ""
    else:
        directive, rest = "py:data", f"\n   {escaped(_text_of(name, value))}"
    title = name.replace("__", "\\_\\_")
    return _NAME.format(
        title=title, line="=" * len(title), module=module, directive=directive, name=name, rest=rest
    )


def _summary(name: str, value: object) -> str:
    """Return the first sentence of what is documented."""
    described = inspect.isclass(value) or inspect.isroutine(value)
    text = (inspect.getdoc(value) or "") if described else _text_of(name, value)
    return escaped(" ".join(text.partition("\n\n")[0].split()))


def _text_of(name: str, value: object) -> str:
    """Return the text below the assignment of a value, in the module of the package where that is."""
    for found, module in sorted(sys.modules.items()):
        if found.split(".")[0] != "qcomp" or getattr(module, name, None) is not value:
            continue
        body = ast.parse(inspect.getsource(module)).body
        for statement, below in pairwise(body):
            targets = (
                statement.targets
                if isinstance(statement, ast.Assign)
                else [getattr(statement, "target", None)]
            )
            if any(isinstance(target, ast.Name) and target.id == name for target in targets):
                text = below.value if isinstance(below, ast.Expr) else None
                return " ".join(text.value.split()) if isinstance(text, ast.Constant) else ""
    return ""


def escaped(text: str) -> str:
    """Return text in which norms, such as |x|, are not taken for substitutions."""
    parts = text.split("``")
    parts[::2] = [part.replace("|", "\\|") for part in parts[::2]]
    return "``".join(parts)


def _module(name: str) -> Any:
    found: Any = qcomp
    for part in name.split(".")[1:]:
        found = getattr(found, part)
    return found


def _lines(names: list[str]) -> str:
    return "\n".join(f"   {name}" for name in names)
