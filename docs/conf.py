"""How Sphinx makes the documentation: `make docs`."""

import inspect
import sys
from pathlib import Path
from typing import Any

from sphinx.application import Sphinx

sys.path.insert(0, str(Path(__file__).parent))

import reference

from qcomp import __version__

project = "qcomp"
release = version = __version__
language = "en"

extensions = ["myst_parser", "numpydoc", "sphinx.ext.autodoc"]
exclude_patterns: list[str] = []
nitpicky = True
nitpick_ignore_regex = [
    ("py:.*", ".*")
]  # a name in backticks is a link where the reference has it, else only code

myst_heading_anchors = 4
numpydoc_show_class_members = False  # autodoc documents them
autosummary_generate = False  # numpydoc loads it
autodoc_member_order = "bysource"
autodoc_typehints = "none"  # the types are in the text, and shorter there
autodoc_preserve_defaults = True
default_role = "py:obj"
add_module_names = False
toc_object_entries_show_parents = "hide"

html_theme = "furo"
html_title = f"qcomp {__version__}"
html_static_path = ["static"]
html_css_files = ["wide.css"]
html_show_sphinx = False
html_show_copyright = False
pygments_style = "default"
pygments_dark_style = "monokai"

LONG = 20
"""Characters of a default from which on it is only in the text."""

DECISIONS = "\n```{toctree}\n:hidden:\n:glob:\n\n0*\n```\n"
"""What puts the decision records into the site's contents; in their list it would be in the way of other readers."""


def setup(app: Sphinx) -> None:
    """Write the pages of the reference before Sphinx looks for pages, and compare what it has made of them."""
    reference.write(Path(app.srcdir) / reference.FOLDER)
    app.connect("source-read", list_decisions)
    app.connect("autodoc-skip-member", skip_undocumented)
    app.connect("autodoc-process-signature", name_arguments)
    app.connect("autodoc-process-docstring", escape_norms, priority=900)  # after numpydoc
    app.connect("env-check-consistency", require_all_names)


def list_decisions(app: Sphinx, page: str, source: list[str]) -> None:  # noqa: ARG001
    """Add the table of contents to the list of decisions."""
    if page == "adr/README":
        source[0] += DECISIONS


def skip_undocumented(*arguments: object) -> bool | None:
    """Leave out a field of a named tuple of which Python says its number alone."""
    member = arguments[3]
    return True if str(getattr(member, "__doc__", "")).startswith("Alias for field number") else None


def name_arguments(*arguments: Any) -> tuple[str, str] | None:
    """Return the arguments of a class, with defaults if these are short; Sphinx would look at ``__new__`` first."""
    kind, value = arguments[1], arguments[3]
    if kind != "class" or issubclass(value, BaseException) or getattr(value, "_is_protocol", False):
        return None
    parameters = []
    for parameter in inspect.signature(value).parameters.values():
        long = parameter.default is not parameter.empty and len(repr(parameter.default)) >= LONG
        shown = Ellipsis if long else parameter.default
        parameters.append(parameter.replace(annotation=parameter.empty, default=shown))
    return str(inspect.Signature(parameters)).replace("Ellipsis", "..."), ""


def escape_norms(*arguments: Any) -> None:
    """Escape the bars of norms in a docstring."""
    lines: list[str] = arguments[5]
    lines[:] = [line if line.lstrip().startswith(">>>") else reference.escaped(line) for line in lines]


def require_all_names(app: Sphinx, environment: object) -> None:  # noqa: ARG001
    """Raise if the site lacks a public name.

    Raises
    ------
    ValueError
        Which names are missing.
    """
    domain = app.env.get_domain("py")
    found = {entry[0] for entry in domain.get_objects()}
    missing = [f"{module}.{name}" for module, names in reference.public().items() for name in names]
    missing = [name for name in missing if name not in found]
    if missing:
        raise ValueError(f"the reference lacks {', '.join(missing)}")
