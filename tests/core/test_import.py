"""What importing the package loads, which names are public, and what the core may import."""

import ast
import importlib
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import qcomp
from qcomp.core.mean.topologies.registry import topology

PACKAGE = Path(qcomp.__file__).parent
CORE = sorted((PACKAGE / "core").rglob("*.py"))
KINDS = [value for value in vars(qcomp).values() if isinstance(value, type)]
PARTS = {kind.__module__ for kind in KINDS if issubclass(kind, qcomp.Compressor | qcomp.Optimizer)}
PARTS |= {type(topology(name)).__module__ for name in qcomp.topologies.names()}
"""The modules of compressors, optimizers and topologies."""
LIBRARIES = ("numpy", "torch", "jax", "jaxlib", "cupy", "mpi4py", "array_api_strict")


def modules_after(code: str) -> set[str]:
    """Return the modules that a fresh interpreter has loaded after some code."""
    done = subprocess.run(
        [sys.executable, "-c", f"{code}\nimport json, sys; print(json.dumps(sorted(sys.modules)))"],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return set(json.loads(done.stdout.splitlines()[-1]))


def loaded_by(code: str) -> list[str]:
    """Return the array libraries and transports that a fresh interpreter has loaded after some code."""
    loaded = modules_after(code)
    return [name for name in LIBRARIES if name in loaded]


class TestLoads:
    def test_import_loads_no_array_library(self):
        assert loaded_by("import qcomp") == []

    def test_import_loads_little(self):
        """So that it takes about a tenth of a second: modules that load slowly or are rarely used load on first use."""
        loaded = modules_after("import qcomp") - modules_after("")
        slow = {
            "asyncio",
            "email",
            "importlib.metadata",
            "logging",
            "pathlib",
            "socket",
            "subprocess",
            "urllib.parse",
        }
        assert not loaded & slow
        own = {name for name in loaded if name.startswith("qcomp")}
        assert 50 < len(own - PARTS) <= 96, "modules besides those of compressors, optimizers and topologies"

    def test_making_an_optimizer_loads_no_array_library(self):
        code = (
            "import qcomp; opt = qcomp.OneBitAdam(learning_rate=1e-3, compressor=qcomp.compressor('sign'))\n"
            "qcomp.compressor('scaled(qsgd)').payload_spec(100); qcomp.comm; dir(qcomp)"
        )
        assert loaded_by(code) == []

    @pytest.mark.exhaustive
    def test_only_the_library_of_the_arrays_is_loaded(self):
        assert "torch" not in loaded_by("import numpy, qcomp; qcomp.ScaledSign().compress(numpy.ones(9))")
        assert "jax" not in loaded_by("import torch, qcomp; qcomp.ScaledSign().compress(torch.ones(9))")

    def test_the_detector_detects(self):
        assert loaded_by("import numpy") == ["numpy"]


class TestPublic:
    @pytest.mark.parametrize("name", qcomp.__all__)
    def test_every_listed_name_can_be_imported(self, name):
        assert getattr(qcomp, name) is not None
        namespace = {}
        exec(f"from qcomp import {name}", namespace)
        assert namespace[name] is getattr(qcomp, name)

    @pytest.mark.parametrize(
        "name", [name for name in qcomp.__all__ if isinstance(getattr(qcomp, name), ModuleType)]
    )
    def test_every_listed_module_can_be_imported_from(self, name):
        module = importlib.import_module(f"qcomp.{name}")
        assert module is getattr(qcomp, name)
        for public in module.__all__:
            assert hasattr(module, public)

    def test_every_public_name_is_listed(self):
        """Names that the package's own modules declare public for users."""
        modules = ("compressors", "optimizers", "errors", "registry")
        for module in modules:
            listed = importlib.import_module(f"qcomp.core.{module}").__all__
            assert set(listed) <= set(qcomp.__all__), module
        own = {
            name
            for name, value in vars(qcomp).items()
            if not name.startswith("_") and str(getattr(value, "__module__", "")).startswith("qcomp")
        }
        assert own <= set(qcomp.__all__)

    def test_listed_names_are_sorted_without_duplicates(self):
        assert len(set(qcomp.__all__)) == len(qcomp.__all__)
        assert dir(qcomp) == sorted(qcomp.__all__)

    def test_unknown_names_are_attribute_errors(self):
        with pytest.raises(AttributeError, match="module 'qcomp' has no attribute 'nothing'"):
            qcomp.nothing  # noqa: B018

    @pytest.mark.parametrize("path", CORE, ids=lambda p: str(p.relative_to(PACKAGE)))
    def test_names_listed_by_modules_of_the_core_exist(self, path):
        name = ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__")
        module = importlib.import_module(name)
        for public in getattr(module, "__all__", []):
            assert hasattr(module, public)

    def test_type_information_is_shipped(self):
        assert (PACKAGE / "py.typed").exists()


ALLOWED = {"array_api_compat", *sys.stdlib_module_names}
NO_IO = {"asyncio", "http", "multiprocessing", "os", "random", "socket", "subprocess", "threading", "time"}
"""Modules of the standard library that a pure core does not need."""


def forbidden_imports(source: str, *, package: tuple[str, ...]) -> list[str]:
    """Return the modules imported anywhere in a module of the core that the core may not import."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: len(package) + 1 - node.level]) if node.level else ""
            names = [".".join(filter(None, (base, node.module)))]
            if names == ["qcomp"]:
                names = [f"qcomp.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            top = name.partition(".")[0]
            own = name in ("qcomp.core", "qcomp.version") or name.startswith("qcomp.core.")
            if not own and (top not in ALLOWED or top in NO_IO):
                found.append(name)
    return found


@pytest.mark.parametrize("path", CORE, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_the_core_imports_only_what_it_may(path):
    package = path.relative_to(PACKAGE.parent).parent.parts
    assert forbidden_imports(path.read_text(), package=package) == []


@pytest.mark.parametrize(
    "source",
    [
        "import numpy as np",
        "from torch import nn",
        "def f():\n    import jax.numpy",
        "import qcomp.comm.local",
        "from qcomp import comm",
        "from qcomp.comm.base import Communicator",
        "from ..comm import base",
        "import time",
        "if TYPE_CHECKING:\n    from mpi4py import MPI",
    ],
)
def test_forbidden_imports_are_caught(source):
    assert forbidden_imports(source, package=("qcomp", "core"))


def test_the_core_has_no_clock_no_files_and_no_global_random_numbers():
    for path in CORE:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                assert node.func.id not in ("open", "print", "input", "exec", "eval"), path


def test_no_module_calls_the_array_protocol_directly():
    """From Python 3.12 on, array-api-strict supports only the buffer protocol; NumPy uses whichever protocol exists."""
    for path in sorted(PACKAGE.rglob("*.py")):
        names = {
            node.attr for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Attribute)
        }
        assert "__array__" not in names, path


@pytest.mark.exhaustive
def test_a_view_of_a_file_in_memory_ends_before_the_file():
    """Python 3.13 reports an ignored exception when it frees a BytesIO and a view of it in one cycle."""
    for path in sorted(PACKAGE.rglob("*.py")):
        nodes = list(ast.walk(ast.parse(path.read_text())))
        views = [n for n in nodes if isinstance(n, ast.Attribute) and n.attr == "getbuffer"]
        managed = [item.context_expr for n in nodes if isinstance(n, ast.With) for item in n.items]
        assert all(any(view in ast.walk(each) for each in managed) for view in views), path
