"""A step takes the path of a gradient that CONTRIBUTING describes, and no modules import each other in a circle."""

import ast
import re
import sys
from pathlib import Path

import numpy as np
import pytest

import qcomp

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "qcomp"


def entered(call):
    """Return the modules of the core whose functions run during a call, in order of first use."""
    found = {}

    def note(frame, event, _):
        _, inside, module = frame.f_code.co_filename.partition("/qcomp/core/")
        if event == "call" and inside:
            found.setdefault(module)

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return list(found)


GUIDE = (ROOT / "CONTRIBUTING.md").read_text()
PATH = re.findall(r"^\d+\. `([a-z_/]+\.py)`:", GUIDE, flags=re.MULTILINE)
"""The modules that the guide lists by number."""


def compressed_step(kernels):
    """Return the modules of the core that a compressed step runs through."""
    opt = qcomp.OneBitAdam(learning_rate=0.1, freeze=2, exact=None)
    comm = qcomp.comm.LocalCommunicator.alone()
    gradient = np.ones(5000, dtype=np.float32)
    with qcomp.backends.use(kernels):
        params, state = gradient, opt.init(gradient, comm)
        for _ in range(3):
            params, state = opt.step(params, gradient, state, comm)
        assert state.stage == "compressed"
        return entered(lambda: opt.step(params, gradient, state, comm))


@pytest.mark.parametrize("kernels", ["numba", "pure"])
def test_a_gradient_takes_the_path_that_the_guide_describes(kernels):
    assert 1 < len(PATH) <= 7
    assert [module for module in compressed_step(kernels) if module in PATH] == PATH


def test_compressor_modules_run_only_without_kernels():
    compressors = re.findall(r"`(compressors/[a-z_]+\.py)`", GUIDE)
    passed = {kernels: compressed_step(kernels) for kernels in ("numba", "pure")}
    assert [module for module in passed["pure"] if module in compressors] == compressors
    assert not set(compressors) & set(passed["numba"])


def imports_of(path: Path) -> set[str]:
    """Return the modules of the package that a module imports, including imports for types only."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("qcomp"):
            found.add(node.module)
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names if alias.name.startswith("qcomp")}
    return found


def circles(arrows: dict[str, set[str]]) -> list[str]:
    """Return the modules that import themselves through others."""
    reached = {module: set(targets) for module, targets in arrows.items()}
    for middle in arrows:
        for targets in reached.values():
            if middle in targets:
                targets.update(reached[middle])
    return [module for module, targets in reached.items() if module in targets]


def test_there_are_no_import_circles():
    modules = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts): path
        for path in PACKAGE.rglob("*.py")
        if path.name != "__init__.py"  # the __init__ of a package only re-exports names
    }
    arrows = {module: imports_of(path) & modules.keys() for module, path in modules.items()}
    assert sum(map(len, arrows.values())) > 500
    assert circles(arrows) == []


def test_an_import_circle_is_found():
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}) == ["a", "b", "c"]


def test_the_root_of_the_core_stays_small():
    assert len([path for path in (PACKAGE / "core").glob("*.py") if path.name != "__init__.py"]) <= 16


FACES = {
    "Elastic",
    "Residuals",
    "OuterLoop",
    "CompressedSGD",
    "Muon",
    "OneBitAdam",
    "OneBitLamb",
    "QAdam",
    "ZeroOneAdam",
}
"""Public names that a face for a framework, or DeepSpeed's mode, shares with the core."""


def classes_in(path: Path) -> set[str]:
    return {node.name for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ClassDef)}


def test_no_two_classes_have_one_name():
    names = [name for path in PACKAGE.rglob("*.py") for name in classes_in(path)]
    assert {name for name in names if names.count(name) > 1} == FACES
