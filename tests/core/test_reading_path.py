"""A step takes the way of a gradient that the tour describes, and no modules import each other in a circle."""

import ast
import re
import sys
from pathlib import Path

import numpy as np
import pytest

import qcomp
from qcomp.backends import choice
from tests.torch_face import every

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "qcomp"


TOUR = (ROOT / "docs" / "tour.md").read_text()
PURE = re.findall(r"^[0-9]+\. `([a-z_/0-9]+\.py)`: (.*)$", TOUR, flags=re.MULTILINE)
NUMBA = re.findall(r"^- `([a-z_/0-9]+\.py)`: (.*)$", TOUR, flags=re.MULTILINE)
"""The modules that the tour lists, with its sentences."""


def entered(call):
    """Return the modules of qcomp whose functions run in this thread during a call, in order of first use."""
    found = {}

    def note(frame, event, _):
        _, inside, module = frame.f_code.co_filename.partition(f"{PACKAGE}/")
        if event == "call" and inside:
            found.setdefault(module)

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return list(found)


@pytest.fixture
def compressed_step(monkeypatch, request):
    """Return the modules that a compressed step of one rank of two runs through."""
    monkeypatch.setattr(choice, "_default", None)
    monkeypatch.setenv("QCOMP_KERNELS", request.param)
    opt = qcomp.OneBitAdam(learning_rate=0.1, betas=(0.9, 0.9), freeze=2, exact=None)

    def rank_main(comm):
        params = np.arange(1, 5001, dtype=np.float32)
        state = opt.init(params, comm)
        for _ in range(4):
            params, state = opt.step(params, params * (comm.rank + 1), state, comm)
        assert state.stage == "compressed"
        return entered(lambda: opt.step(params, params * (comm.rank + 1), state, comm))

    return qcomp.comm.run_local(2, rank_main)[0]


@pytest.mark.parametrize("compressed_step", ["pure"], indirect=True)
def test_a_gradient_takes_the_way_that_the_tour_describes(compressed_step):
    assert compressed_step == [module for module, _ in PURE]


@pytest.mark.parametrize("compressed_step", ["numba"], indirect=True)
def test_with_kernels_it_takes_the_other_way_that_the_tour_describes(compressed_step):
    without = {module for module, _ in PURE}
    # Only compiled functions of drivers.py run, of which numba tells profilers before Python 3.12.
    kept_out = {*without, "backends/numba_cpu/drivers.py"}
    listed = [module for module, _ in NUMBA if module not in kept_out]
    assert [module for module in compressed_step if module not in kept_out] == listed
    left_out = re.compile("core/(compress|payload|primitives|numeric/(?!arrays|random))")
    assert without - {*compressed_step} == {module for module in without if left_out.match(module)}


@pytest.mark.parametrize(("module", "sentence"), PURE + NUMBA)
def test_the_tour_has_the_first_sentence_of_a_module(module, sentence):
    assert ast.get_docstring(ast.parse((PACKAGE / module).read_text())).splitlines()[0] == sentence


def imports_of(path: Path) -> set[str]:
    """Return the modules of the package that a module imports, including imports for types only."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("qcomp"):
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


FACES = {"Elastic", "Residuals", "OuterLoop", *every.FACES}
"""Public names that a face for a framework shares with the core."""


def classes_in(path: Path) -> set[str]:
    return {node.name for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ClassDef)}


def test_no_two_classes_have_one_name():
    names = [name for path in PACKAGE.rglob("*.py") for name in classes_in(path)]
    assert {name for name in names if names.count(name) > 1} == FACES
