"""`qcomp.extend` is all that authors of extensions need: the examples and their tests import nothing below it."""

import ast
import importlib
import sys
from pathlib import Path

import pytest

import qcomp
from qcomp import extend

ROOT = Path(__file__).parent.parent.parent
EXAMPLES = sorted((ROOT / "examples").rglob("*.py"))
STRANGERS = [
    ROOT / "tests" / "core" / "tree.py",
    ROOT / "tests" / "meta" / "strangers.py",
    ROOT / "examples" / "custom_compressor.py",
    ROOT / "examples" / "custom_transport.py",
]
FOR_AUTHORS = {"qcomp", "qcomp.extend", "qcomp.testing"}
SUBPACKAGES = FOR_AUTHORS | {f"qcomp.{name}" for name in ("comm", "torch", "planning", "checkpoint", "outer")}
PUBLIC = SUBPACKAGES | {
    "qcomp.integrations",
    "qcomp.integrations.ddp",
    "qcomp.elastic",
    "qcomp.jax",
    "qcomp.jax.optax",
    "qcomp.torch.fsdp",
    "qcomp.torch.ft",
}


def modules_used(path: Path) -> set[str]:
    """Return the modules of the package that a file imports or reaches through attributes."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.partition(".")[0] == "qcomp":
            found.add(node.module)
            found |= {f"{node.module}.{a.name}" for a in node.names if is_module(f"{node.module}.{a.name}")}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names if alias.name.partition(".")[0] == "qcomp"}
        elif isinstance(node, ast.Attribute):
            name = ast.unparse(node)
            if name.startswith("qcomp.") and is_module(name):
                found.add(name)
    return found


def is_module(name: str) -> bool:
    """Return whether there is a module of exactly this name, not an alias for something else."""
    try:
        return importlib.import_module(name).__name__ == name
    except ImportError:
        return False


def below(names: set[str], allowed: set[str]) -> set[str]:
    return {name for name in names if name not in allowed}


@pytest.mark.parametrize("path", STRANGERS, ids=lambda p: p.name)
def test_third_party_code_uses_only_the_modules_for_authors(path):
    used = modules_used(path)
    assert used
    assert below(used, FOR_AUTHORS | {"qcomp.comm"}) == set()


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda p: str(p.relative_to(ROOT / "examples")))
def test_examples_use_only_public_modules(path):
    assert (
        below(modules_used(path), PUBLIC | {"qcomp.backends", "qcomp.cli.corpus"}) == set()
    )  # the demo's text


@pytest.mark.parametrize(
    "line",
    [
        "from qcomp.core.numeric.arrays import divide",
        "import qcomp.core.registry",
        "from qcomp.core import primitives",
        "import qcomp; qcomp.core.registry.compressor('sign')",
    ],
)
def test_uses_of_internal_modules_are_found(tmp_path, line):
    (tmp_path / "stranger.py").write_text(line + "\n")
    assert below(modules_used(tmp_path / "stranger.py"), PUBLIC) != set()


def test_every_listed_name_exists_and_is_listed_once():
    assert len(set(extend.__all__)) == len(extend.__all__)
    for name in extend.__all__:
        assert getattr(extend, name) is not None


def test_shared_names_mean_the_same_in_qcomp_and_extend():
    for name in set(extend.__all__) & set(qcomp.__all__):
        assert getattr(extend, name) is getattr(qcomp, name)


def test_it_is_imported_on_first_use():
    assert "extend" in dir(qcomp)
    assert sys.modules["qcomp.extend"] is qcomp.extend
