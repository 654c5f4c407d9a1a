"""``qcomp info`` says which kernels run for which arrays, and why."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

import qcomp
from qcomp.backends import choice, registry
from qcomp.cli import main

pytest.importorskip("numba")


@pytest.fixture(autouse=True)
def automatic(monkeypatch):
    monkeypatch.setattr(choice, "_default", ("auto", None))
    monkeypatch.setattr(choice, "_choices", {})
    registry.load.cache_clear()
    yield
    registry.load.cache_clear()


def lines(capsys):
    assert main(["info"]) == 0
    return {line.split("  ")[0].split(":")[0]: line for line in capsys.readouterr().out.splitlines()}


@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_names_the_kernels_for_each_dtype_and_the_reason(capsys, library):
    pytest.importorskip(library)
    found = lines(capsys)
    assert found[f"{library} on cpu"].split()[3:7] == ["numba"] * 4
    assert f"has kernels for {library} arrays of float32 on cpu" in found[f"{library} on cpu"]
    assert found["numba"].startswith("numba: available")


def test_says_what_is_missing_and_how_to_install_it(capsys, monkeypatch):
    missing = registry.BUILT_IN["numba"]._replace(module="qcomp_numba_is_missing")
    monkeypatch.setitem(registry.BUILT_IN, "numba", missing)
    found = lines(capsys)
    assert found["numpy on cpu"].split()[3:7] == ["pure"] * 4
    assert "pip install 'qcomp[numba]'" in found["numpy on cpu"]


def test_says_that_a_kernel_set_was_requested(capsys):
    qcomp.backends.set_default("pure")
    assert "was asked for; numba would take numpy arrays" in lines(capsys)["numpy on cpu"]


def test_a_kernel_set_without_its_array_library_is_not_available(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)  # as if it were not installed
    found = lines(capsys)
    assert found["cupy on cuda"].endswith("cupy is not installed")
    assert found["cupy"] == "cupy: not available; cupy is not installed"


def test_json_has_the_facts_of_the_text(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    text = lines(capsys)
    assert main(["info", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["qcomp"] == qcomp.__version__
    rows = {row["arrays"]: row for row in facts["arrays"]}
    assert rows["numpy on cpu"]["kernels"] == dict.fromkeys(
        ("float32", "float16", "bfloat16", "float64"), "numba"
    )
    assert rows["cupy on cuda"]["kernels"]["float32"] is None
    sets = {kernels["name"]: kernels for kernels in facts["kernels"]}
    assert sets["numba"]["available"]
    assert not sets["cupy"]["available"]
    for name, kernels in sets.items():
        assert text[name] == f"{name}: {kernels['reason']}"


@pytest.mark.slow
@pytest.mark.parametrize(
    "command",
    [
        [Path(sys.executable).parent / "qcomp"],
        [sys.executable, "-m", "qcomp"],
        [sys.executable, "-m", "qcomp.cli"],
    ],
)
def test_is_installed_as_a_command(command):
    done = subprocess.run([*command, "--version"], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == f"qcomp {qcomp.__version__}\n"


def test_no_subcommand_is_a_usage_error(capsys):
    with pytest.raises(SystemExit, match="2"):
        main([])
    assert "info" in capsys.readouterr().err
